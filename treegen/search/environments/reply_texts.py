"""Replies of a model as tool calls, and the results of the calls as text of the chat."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from treegen.common.formatting import replace_surrogates
from treegen.prompts.replies.types import Reply
from treegen.prompts.tool_turns import ToolTurns
from treegen.prompts.tree import Parts
from treegen.search.environments.protocol import call_key
from treegen.search.environments.states import Outcome
from treegen.search.tree.node import SearchNode


def find_last_tokens(node: SearchNode) -> Sequence[int]:
    """Return the last token ids before a sample; none if they are not known."""
    tail = getattr(node._context, "tail", None)
    return () if tail is None else [int(token) for token in tail()]


def call_keys(reply: Reply) -> tuple[str, ...]:
    """Return the keys of a reply's calls."""
    return tuple(map(call_key, reply.calls))


def read_reply(turns: ToolTurns, sample: SearchNode, before: Sequence[int]) -> Reply:
    """Return a sample as a reply; one that was cut off has no calls.

    Args:
        turns: Reads calls.
        sample: The sample.
        before: The last token ids before it; none if they are not known.
    """
    completion = sample.completion
    assert completion is not None
    if completion.finish_reason != "stop":  # a call at the end may be cut off
        return Reply(completion.text, [])
    return turns.read(completion, before)


def render_outcome(
    turns: ToolTurns, reply: Reply, outcome: Outcome, sample: SearchNode
) -> str | Parts:
    """Return the results of a reply's calls, as text or parts to append to the sample.

    Args:
        turns: Renders the results.
        reply: The sample as a reply.
        outcome: What its calls have done.
        sample: The sample.
    """
    results = outcome.observations
    # Texts next to images are marked, because a text may be empty or stand elsewhere, too.
    marks = {i: secrets.token_hex(16) for i, result in enumerate(results) if result.images}
    texts = [marks.get(i, result.text) for i, result in enumerate(results)]
    text = replace_surrogates(turns.render_results(reply.calls, texts, sample.stop))
    if not marks:
        return text
    parts: list[Mapping[str, Any]] = []
    for place, mark in marks.items():
        before, _, text = text.partition(mark)
        parts.append({"type": "text", "text": before + replace_surrogates(results[place].text)})
        parts += [{"type": "image", "image": image} for image in results[place].images]
    return [*parts, {"type": "text", "text": text}]
