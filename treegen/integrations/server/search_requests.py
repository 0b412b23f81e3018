"""Requests for searches: the body of a chat, a budget, and the settings of a method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import Field

from treegen.common.structured_outputs import STRUCTURES
from treegen.integrations.nodes.params import NodeModel
from treegen.integrations.server.limits import SearchLimits
from treegen.integrations.server.requests import (
    CompletionRequest,
    RequestError,
    parse_model,
    parse_request,
)
from treegen.prompts.grammars import REQUESTED
from treegen.search.budget import Budget

_MAX_ANSWERS: Final = 128
# Fields of a chat that a search cannot honour, and why.
_NOT_SEARCHED: Final = {
    "prompt_logprobs": "a search does not score its prompt",
    "first": "a search numbers its samples itself",
    "return_token_ids": "the tree has the text of each node",
    "separate_reasoning": "a search answers with the whole text",
    **dict.fromkeys(
        ("tools", "tool_choice", "parallel_tool_calls", *STRUCTURES, *REQUESTED),
        "a search answers with text",
    ),
    **dict.fromkeys(("logprobs", "top_logprobs"), "the tree has the log-probability of each node"),
    **dict.fromkeys(
        ("include_stop", "include_stop_str_in_output"),
        "a search decides which steps have their stop strings",
    ),
}


class _Budget(NodeModel):
    tokens: Annotated[int, Field(ge=1)] | None = None
    seconds: Annotated[float, Field(gt=0)] | None = None
    calls: Annotated[int, Field(ge=1)] | None = None
    nodes: Annotated[int, Field(ge=1)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """A parsed request for a search of a chat."""

    method: str
    chat: CompletionRequest
    messages: Sequence[Any]
    """The messages as the body has them."""
    budget: Budget
    options: Mapping[str, Any]
    """The settings of the method."""
    num_answers: int
    shows_tree: bool

    @property
    def question(self) -> str:
        """The text of the last message of the user, which a verifier reads as the question."""
        for message in reversed(self.messages):
            if message.get("role") == "user":
                content = message.get("content")
                if isinstance(content, str):
                    return content
                parts = content or ()
                return "\n".join(p["text"] for p in parts if p.get("type") != "image_url")
        return ""


def parse_search(method: str, body: Mapping[str, Any], limits: SearchLimits) -> SearchRequest:
    """Parse the body of a request for a search.

    Args:
        method: The method, from the path.
        body: The JSON object.
        limits: Limits of the budget.

    Raises:
        RequestError: a field is unknown, malformed or not supported.
    """
    chat_fields = {name: value for name, value in body.items() if name not in ("budget", "search")}
    for name, reason in _NOT_SEARCHED.items():
        if name in chat_fields and chat_fields[name] not in (False, [], {}):
            raise RequestError(f"{name} is not supported: {reason}; remove it", name)
    chat = parse_request(chat_fields, is_chat=True)
    chat.prompts()  # checks the messages
    options = body.get("search", {})
    if not isinstance(options, dict):
        raise RequestError(f"search must be an object, got {options!r:.60}", "search")
    shows_tree = options.get("tree", True)
    if not isinstance(shows_tree, bool):
        raise RequestError(f"search.tree must be true or false, got {shows_tree!r:.60}", "search")
    num = chat.sampling.get("n", 1)
    if type(num) is not int or not 1 <= num <= _MAX_ANSWERS:
        raise RequestError(f"n must be from 1 to {_MAX_ANSWERS}, got {num!r:.60}", "n")
    return SearchRequest(
        method=method,
        chat=chat,
        messages=chat.messages or (),
        budget=_parse_budget(body.get("budget", {}), limits),
        options={name: value for name, value in options.items() if name != "tree"},
        num_answers=num,
        shows_tree=shows_tree,
    )


def _parse_budget(fields: Any, limits: SearchLimits) -> Budget:
    budget = parse_model(_Budget, fields, "budget")
    for name in ("tokens", "seconds"):
        limit, value = getattr(limits, f"max_search_{name}"), getattr(budget, name)
        if value is not None and value > limit:
            raise RequestError(
                f"budget.{name} must be at most {limit:,}, the limit of this server, got {value:,}",
                f"budget.{name}",
            )
    return Budget(
        tokens=budget.tokens or limits.max_search_tokens,
        seconds=budget.seconds or limits.max_search_seconds,
        calls=budget.calls,
        nodes=budget.nodes,
    )
