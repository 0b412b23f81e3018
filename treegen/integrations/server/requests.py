"""Parses request bodies. Unknown fields that would change the answer are errors."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, NoReturn, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from treegen.common.foreign_names import (
    NEUTRAL_REQUEST,
    advise_foreign,
    drop_neutral,
)
from treegen.common.lifetimes import pause_gc
from treegen.common.params import REQUEST_FIELDS, SamplingParams
from treegen.common.spelling import did_you_mean, suggest_arguments
from treegen.common.structured_outputs import STRUCTURES
from treegen.errors import InputError, TreegenError
from treegen.integrations.nodes.params import Sampling, Variables, read_structure
from treegen.integrations.nodes.protocol import Operation
from treegen.integrations.server.field_errors import describe_field_error, hint_field
from treegen.prompts.grammars import REQUESTED
from treegen.prompts.images.table import ImageTable
from treegen.prompts.tree import Message

# Fields of SamplingParams that requests may have under the same names, as in vLLM's server.
_SAMPLING: Final = {
    *REQUEST_FIELDS,
    "n",
    "allowed_token_ids",
    "include_stop",
    "include_stop_str_in_output",
    "max_thinking_tokens",
} - {"logit_bias"}
# Fields that change no answer, and are ignored.
_IGNORED: Final = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "priority",
)
_ONLY_COMPLETIONS: Final = ("prompt", "echo", "best_of", "suffix")
_ONLY_CHATS: Final = (
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "separate_reasoning",
)
_RENAMED: Final = ("best_of", "max_completion_tokens", "top_logprobs")
"""Fields of one kind of request that the other kind has under another name."""
_DEFAULT_MAX_TOKENS: Final = 16  # default of /v1/completions, as in OpenAI's API

_MAX_NAMED_FIELDS: Final = 8  # maximum unknown fields that an error names
_MAX_ECHOED_CHARS: Final = 2**20  # maximum characters of prompts that are echoed n times
_MAX_VALUES: Final = 2**20  # values of a JSON text: a million takes about 0.2 s to read
_MAX_BAD_WORDS: Final = 1_000  # as in the requests for nodes
# Maximum prompt log-probabilities of one response, alternatives included.
_MAX_PROMPT_LOGPROBS: Final = 2**21

_Length = Annotated[int, Field(ge=0)]
_Top = Annotated[int, Field(ge=0, le=20)]
_Stop = Annotated[str, Field(max_length=1_000)]
_Token = Annotated[int, Field(strict=False)]  # not strict, because keys of JSON objects are text


class RequestError(InputError):
    """A request that cannot be served.

    Attributes:
        field: The request's field at fault; None if it is not one field.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _StreamOptions(_Strict):
    include_usage: bool | None = False
    include_obfuscation: bool | None = False


class _Function(_Strict):
    name: str


class _NamedTool(_Strict):
    type: Literal["function"]
    function: _Function


class CompletionRequest(BaseModel):
    """The body of a request, which is a chat if it has messages; made by `parse_request`."""

    model_config = ConfigDict(strict=True)
    sampling: dict[str, Any]
    """The fields that SamplingParams checks. The other fields have the names of the protocol."""
    model: str = ""
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    max_tokens: _Length | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=64)] = []
    logit_bias: dict[_Token, Any] = {}
    logprobs: bool | _Top | None = None  # a bool in a chat, otherwise a number
    prompt_logprobs: _Top | None = None

    prompt: Any = None
    echo: bool = False
    best_of: int | None = None
    suffix: Literal[""] = ""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    max_completion_tokens: _Length | None = None
    top_logprobs: _Top = 0
    tools: list[Any] | None = None
    tool_choice: Literal["auto", "none", "required"] | _NamedTool = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: Variables = {}
    separate_reasoning: bool = False
    return_token_ids: bool = False
    request_id: Annotated[str, Field(max_length=256)] = ""  # part of the id of the response
    first: _Length = 0  # with a seed, index of the first sample of each prompt

    @property
    def is_chat(self) -> bool:
        """Whether the request is a chat."""
        return self.messages is not None

    @property
    def num_top(self) -> int | None:
        """Number of alternatives to report per token; None reports no log-probabilities."""
        if self.is_chat:
            return self.top_logprobs if self.logprobs else None
        return self.logprobs

    @property
    def num_prompt_top(self) -> int | None:
        """Number of alternatives needed per prompt token; None if the prompt is not scored."""
        counts = [self.prompt_logprobs, self.num_top if self.echo else None]
        return max((num for num in counts if num is not None), default=None)

    def check_prompt_logprobs(self, num_tokens: int) -> None:
        """Raise RequestError if the prompts have too many log-probabilities for one answer.

        Args:
            num_tokens: Number of tokens of all prompts.
        """
        if self.num_prompt_top is None:
            return
        total = num_tokens * (self.num_prompt_top + 1) * self.sampling.get("n", 1)
        if total > _MAX_PROMPT_LOGPROBS:
            raise RequestError(
                f"{total:,} prompt log-probabilities exceed the limit per response, which is "
                f"{_MAX_PROMPT_LOGPROBS:,}; request fewer alternatives or send shorter prompts",
                "prompt_logprobs" if self.prompt_logprobs is not None else "logprobs",
            )

    @property
    def shown_tools(self) -> list[Any] | None:
        """The tools that the model may call."""
        return self.tools if self.tools and self.tool_choice != "none" else None

    @property
    def must_call(self) -> bool:
        """Whether the model must call a tool."""
        return self.tool_choice not in ("auto", "none")

    @property
    def forced_tool(self) -> str | None:
        """Name of the tool that the model must call; None if the request names none."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, _NamedTool) else None

    @property
    def parses_reply(self) -> bool:
        """Whether reasoning and tool calls are separated from the text."""
        apart = self.separate_reasoning or self.shown_tools is not None or self.is_structured
        return self.is_chat and apart

    @property
    def is_structured(self) -> bool:
        """Whether the answer, apart from its reasoning, must have a structure such as JSON."""
        return not self.sampling.keys().isdisjoint(STRUCTURES)

    @property
    def includes_stop(self) -> bool:
        """Whether the text has the stop string that ended it."""
        names = ("include_stop", "include_stop_str_in_output")
        return any(self.sampling.get(name) for name in names)

    @property
    def is_sampled(self) -> bool:
        """Whether anything is sampled; otherwise prompts are only echoed."""
        return self.max_tokens != 0

    def prompts(self) -> list[str | list[int] | list[Message]]:
        """Return the prompts to sample from; a chat has one.

        Raises:
            RequestError: The prompt is malformed.
        """
        if self.messages is not None:
            return [[read_message(message) for message in self.messages]]
        prompt = self.prompt
        if isinstance(prompt, str) or _is_tokens(prompt):
            return [prompt]
        texts = prompt if isinstance(prompt, list) else []
        if texts and (all(map(_is_tokens, texts)) or all(isinstance(text, str) for text in texts)):
            return texts
        raise RequestError(
            "prompt must be a string, token ids, or a list of strings or of token ids", "prompt"
        )

    def params(
        self,
        chat_max_tokens: int,
        defaults: Mapping[str, Any] = MappingProxyType({}),
        grammar: str | None = None,
    ) -> SamplingParams:
        """Return the sampling parameters.

        Args:
            chat_max_tokens: Maximum number of tokens of a chat's answer, if the request gives none.
            defaults: Sampling parameters that apply if the request does not give them.
            grammar: Grammar of the tool call, if the model has to call a tool.

        Raises:
            InputError: A sampling parameter cannot be used.
        """
        default_max_tokens = chat_max_tokens if self.is_chat else _DEFAULT_MAX_TOKENS
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        limits = [self.max_completion_tokens, self.max_tokens, default_max_tokens]
        limit = next(limit for limit in limits if limit is not None)
        params = SamplingParams(
            **{**defaults, **self.sampling, **({"grammar": grammar} if grammar else {})},
            reasoning_tags="auto" if self.separate_reasoning else None,
            max_tokens=limit if self.is_sampled else 1,
            stop=[text for text in stops if text],
            logprobs=self.num_top or 0,
            prompt_logprobs=self.num_prompt_top,
            logit_bias=self.logit_bias or None,
        )
        if self.echo and params.n > 1 and params.n * len(str(self.prompt)) > _MAX_ECHOED_CHARS:
            raise RequestError(
                f"echo would return the prompt n={params.n} times, which is too long for a "
                "response; leave out echo",
                "echo",
            )
        return params


def field_of(error: TreegenError) -> str | None:
    """Return the request's field that an error is about; None if it is about no single one."""
    if isinstance(error, RequestError):
        return error.field
    name = error.parameter
    return name if name in CompletionRequest.model_fields or name in _SAMPLING else None


def check_chat_template(tokenizer: Any) -> None:
    """Raise RequestError if a tokenizer cannot render chat messages."""
    if not getattr(tokenizer, "chat_template", None):
        template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        raise RequestError(
            "the served model has no chat template and cannot read messages; start treegen serve "
            f"with a template, such as --chat-template '{template}', or send text to "
            "/v1/completions or /v1/nodes",
            "messages",
        )


def read_json(text: bytes) -> dict[str, Any]:
    """Return the JSON object in a body, without fields that are null.

    Raises:
        RequestError: The body is not a JSON object, or has too many values.
    """
    return {name: value for name, value in _read_object(text).items() if value is not None}


@pause_gc()
def _read_object(text: bytes, name: str = "the body") -> dict[str, Any]:
    # Nothing else is served while JSON is read.
    if max(text.count(b","), text.count(b"[") + text.count(b"{")) > _MAX_VALUES:
        raise RequestError(f"{name} has more than {_MAX_VALUES:,} values; send several requests")
    try:
        parsed = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name} is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise RequestError(f"{name} is not a JSON object")
    return parsed


@pause_gc()
def parse_request(body: Mapping[str, Any], *, is_chat: bool) -> CompletionRequest:
    """Parse the body of a request.

    Args:
        body: The JSON object.
        is_chat: Whether it was sent to the chat endpoint.

    Raises:
        RequestError: A field is unknown, malformed or not supported.
    """
    supported = {*CompletionRequest.model_fields, *_SAMPLING, *_IGNORED, *REQUESTED} - {"sampling"}
    supported -= set(_ONLY_COMPLETIONS if is_chat else _ONLY_CHATS)
    if body.get("suffix"):
        supported.discard("suffix")
    body = drop_neutral(body, supported, NEUTRAL_REQUEST)
    if unknown := [name[:80] for name in body if name not in supported]:
        verb = "is" if len(unknown) == 1 else "are"
        hints = suggest_arguments(
            unknown[:_MAX_NAMED_FIELDS], lambda name: _hint_request(name, supported, is_chat)
        )
        listed = ", ".join(unknown[:_MAX_NAMED_FIELDS])
        raise RequestError(f"{listed} {verb} not supported{hints}", unknown[0])
    if "logprobs" in body and type(body["logprobs"]) is not (bool if is_chat else int):
        raise RequestError(
            "logprobs must be true or false in a chat, and a number in a completion; change or "
            "remove logprobs",
            "logprobs",
        )
    structure = read_structure(body)
    sampling = {name: body[name] for name in _SAMPLING if name in body} | structure
    needed: dict[str, Any] = {"messages": []} if is_chat else {}
    try:
        request = CompletionRequest.model_validate({**needed, **body, "sampling": sampling})
    except ValidationError as error:
        message, field, _ = describe_field_error(error)
        field = (field or "").partition(".")[0]
        if field == "tool_choice":
            message = (
                f"tool_choice {body['tool_choice']!r:.80} is not supported; use auto, none, "
                'required, or {"type": "function", "function": {"name": NAME}}'
            )
        raise RequestError(message, field) from None
    _check_combinations(request, body, sampling, has_structure=bool(structure))
    return request


def _check_combinations(
    request: CompletionRequest,
    body: Mapping[str, Any],
    sampling: Mapping[str, Any],
    *,
    has_structure: bool,
) -> None:
    """Check that the fields of a request can be used together.

    Args:
        request: The request.
        body: Its JSON object.
        sampling: Its sampling parameters.
        has_structure: Whether its samples must match a structure.

    Raises:
        RequestError: Two fields exclude each other, or there are too many bad words.
    """
    words = sampling.get("bad_words")
    problems = (
        ("top_logprobs needs logprobs=true", request.top_logprobs and not request.logprobs),
        (
            "logprobs with echo cannot be streamed",
            request.echo and request.stream and request.num_top is not None,
        ),
        (
            "prompt_logprobs cannot be streamed",
            request.prompt_logprobs is not None and request.stream,
        ),
        (
            "max_tokens must be at least 1, except with echo=true and stream=false",
            not request.is_sampled and (request.stream or not request.echo),
        ),
        (
            "tool_choice forces a call, but tools is empty",
            request.must_call and not request.tools,
        ),
        (
            "tool_choice and structured output cannot be used together",
            request.must_call and has_structure,
        ),
        (
            f"bad_words can contain at most {_MAX_BAD_WORDS:,} words",
            isinstance(words, list) and len(words) > _MAX_BAD_WORDS,
        ),
        ("first needs a seed", request.first and "seed" not in sampling),
        (
            "stream_options needs stream=true",
            request.stream_options.include_usage and not request.stream,
        ),
        ("best_of must equal n", request.best_of not in (None, body.get("n", 1))),
        (
            "chat_template_kwargs must not contain chat_template",
            "chat_template" in request.chat_template_kwargs,  # a template could run forever
        ),
        ("return_token_ids cannot be streamed", request.return_token_ids and request.stream),
        (
            "include_stop cannot be used in a chat with tools, separate_reasoning or structured "
            "output, which are read from the text without its stop",
            request.parses_reply and request.includes_stop,
        ),
    )
    for problem, applies in problems:
        if applies:
            field = problem.split()[0]
            raise RequestError(f"{problem}; change or remove {field}", field)


def _hint_request(name: str, supported: Collection[str], is_chat: bool) -> str:
    """Return "; " and what to do about a field that a completion or a chat cannot have.

    Args:
        name: The field.
        supported: The fields that it can have.
        is_chat: Whether it is a chat.
    """
    others = _ONLY_COMPLETIONS if is_chat else _ONLY_CHATS
    if name in others and name not in _RENAMED:
        kind, path = ("texts", "completions") if is_chat else ("chats", "chat/completions")
        return f"; POST {kind} to /v1/{path}, or remove it"
    return hint_field(name, supported)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def check_no_images(prompt: Any, images: ImageTable | None) -> None:
    """Raise RequestError if a prompt contains the internal token ids of an image of any client.

    Args:
        prompt: A prompt; text and messages have no token ids.
        images: The images of all clients; None if the model takes none.
    """
    if images is not None and _is_tokens(prompt) and max(prompt) >= images.vocab_size:
        raise RequestError(
            f"prompt has the token id {max(prompt)}, but the token ids of the model are 0 to "
            f"{images.vocab_size - 1}; send images as data URLs in messages",
            "prompt",
        )


def read_part(part: Any, field: str = "messages") -> dict[str, Any]:
    """Convert a part of a message: text, or an image that the request contains as a data URL.

    Args:
        part: The part.
        field: The request's field that has it. Default: messages.

    Raises:
        RequestError: The part cannot be read.
    """
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "image_url":
        if isinstance(part, dict) and isinstance(text := part.get("text"), str):
            return {"type": "text", "text": text}
        raise RequestError(f"only parts of type text and image_url are supported in {field}", field)
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    # Clients must not make the server read local files or addresses in its network.
    if not isinstance(url, str) or not url.startswith("data:"):
        raise RequestError("image_url must be a data URL (data:image/png;base64,...)", field)
    return {"type": "image", "image": url}


def read_message(message: dict[str, Any]) -> Message:
    """Convert a message for chat templates: text in one piece, tool arguments as objects."""
    converted = {name: value for name, value in message.items() if value is not None}
    if isinstance(content := converted.get("content"), list):
        parts = list(map(read_part, content))
        is_text = all(part["type"] == "text" for part in parts)
        converted["content"] = "\n".join(part["text"] for part in parts) if is_text else parts
    if not isinstance(calls := converted.get("tool_calls", []), list):
        raise RequestError(f"tool_calls must be a list, got {calls!r:.80}", "messages")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise RequestError("each item of tool_calls must have a function", "messages")
        if isinstance(arguments := function.get("arguments"), str):
            # Some clients send an empty string for no arguments.
            text = arguments.encode("utf-8", "replace") or b"{}"
            function["arguments"] = _read_object(text, "a tool call's arguments")
    return converted


_Model = TypeVar("_Model", bound=BaseModel)
_OPERATIONS: Final[dict[str, type[BaseModel]]] = {
    get_args(model.model_fields["op"].annotation)[0]: model
    for model in get_args(get_args(Operation)[0])
}


@pause_gc()
def parse_model(kind: type[_Model], fields: Any, name: str = "") -> _Model:
    """Return a JSON object as its model.

    Args:
        kind: The model.
        fields: The JSON object.
        name: Name of the object in the request. Default: it is the body.

    Raises:
        RequestError: A field is unknown or malformed.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        message, param, first = describe_field_error(error, name, _OPERATIONS)
        if first["type"] == "extra_forbidden":
            message = f"{param or 'the body'} is not supported{_hint(kind, first['loc'])}"
        elif first["type"] in ("union_tag_invalid", "union_tag_not_found"):
            tag = first["ctx"].get("tag", "")[:80]
            names = did_you_mean(tag, _OPERATIONS) or f"; use one of {', '.join(_OPERATIONS)}"
            message = f"{param}: the op {tag!r} is not supported{names}"
        raise RequestError(message, param) from None


def _hint(kind: type[BaseModel], loc: Sequence[Any]) -> str:
    """Return what to do about an unknown field.

    Args:
        kind: The model of the body.
        loc: The names and indices that lead to the field, as pydantic reports them.
    """
    *above, name = map(str, loc)
    outer = _OPERATIONS[above[2]] if above[:1] == ["operations"] and above[2:] else kind
    known = outer.model_fields.keys()
    if above[-1:] == ["params"]:
        if name in known:
            return "; pass it outside params"
        known = Sampling.model_fields.keys()
    elif "params" in known:
        if name in Sampling.model_fields:
            return "; pass it in params"
        own_name, _ = advise_foreign(name, Sampling.model_fields)
        if own_name is not None:
            return f"; did you mean {f'params.{own_name}'!r}?"
    return hint_field(name, known)
