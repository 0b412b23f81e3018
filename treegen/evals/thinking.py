"""Reasoning in stored samples: only the text after it is scored; its tokens are counted separately.

The record of a sample with reasoning has `thinking`: {"tokens": ..., "end": ..., "closed": ..., and
"forced": true if its budget closed it}. `end` counts characters of `text`.
"""

from collections.abc import Mapping
from typing import Any, Final

from treegen.common.outputs import Thinking, answer_after


def thinking_to_json(thinking: Thinking) -> dict[str, Any]:
    """Return the end of a sample's reasoning as JSON values."""
    document: dict[str, Any] = {
        "tokens": thinking.num_tokens,
        "end": thinking.end,
        "closed": thinking.is_closed,
    }
    return document | ({"forced": True} if thinking.is_forced else {})


def load_thinking(record: Mapping[str, Any]) -> Thinking | None:
    """Return the end of the reasoning in a stored sample; None if it has none."""
    stored = record.get("thinking")
    if stored is None or not isinstance(stored, Mapping):
        return None
    return Thinking(
        int(stored["tokens"]),
        int(stored["end"]),
        bool(stored["closed"]),
        bool(stored.get("forced")),
    )


def get_answer_text(record: Mapping[str, Any]) -> str:
    """Return the part of a stored sample's text that is scored."""
    text = str(record["text"])
    return text if record.get("thinking") is None else answer_after(text, load_thinking(record))


_COUNTS: Final = ("samples", "thinking", "closed", "forced", "thinking_tokens", "answer_tokens")


class ThinkingTokens:
    """Counts reasoning tokens and answer tokens over samples."""

    def __init__(self) -> None:
        """Start without samples."""
        self._counts = dict.fromkeys(_COUNTS, 0)

    def add(self, record: Mapping[str, Any]) -> None:
        """Count a stored sample."""
        thinking = load_thinking(record)
        counts = (
            (0, 0, 0, 0)
            if thinking is None
            else (1, thinking.is_closed, thinking.is_forced, thinking.num_tokens)
        )
        row = (1, *counts, int(record["num_tokens"]) - counts[-1])
        for name, count in zip(_COUNTS, row, strict=True):
            self._counts[name] += count

    def summary(self) -> dict[str, int] | None:
        """Return the counts as JSON values; None if no sample has reasoning.

        samples, thinking: all samples, and those with reasoning. closed, forced: samples whose
        reasoning ended, and those whose budget closed it.
        """
        return dict(self._counts) if self._counts["thinking"] else None


def thinking_line(summary: Mapping[str, int]) -> str:
    """Return one line about the amount of reasoning in samples."""
    thinking, cut = summary["thinking"], summary["thinking"] - summary["closed"]
    line = (
        f"reasoning: {summary['thinking_tokens']:,} tokens in {thinking:,} of "
        f"{summary['samples']:,} samples, {summary['thinking_tokens'] / thinking:,.1f} each; "
        f"answers: {summary['answer_tokens']:,} tokens"
    )
    forced = f"; {summary['forced']:,} ended at the budget" if summary["forced"] else ""
    return f"{line}{forced}{f'; {cut:,} never ended' if cut else ''}"
