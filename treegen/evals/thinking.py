"""The thinking in stored samples: only what follows it is scored, and its tokens count apart.

The line of a sample that thinks has `thinking`: {"tokens": ..., "end": ..., "closed": ..., and
"forced": true where its budget closed it}. `end` counts characters of `text`.
"""

from collections.abc import Mapping
from typing import Any, Final

from treegen.common.outputs import Thinking, answer_after


def thinking_to_json(thinking: Thinking) -> dict[str, Any]:
    """Return where a thinking ends as JSON holds it."""
    found: dict[str, Any] = {
        "tokens": thinking.num_tokens,
        "end": thinking.end,
        "closed": thinking.is_closed,
    }
    return found | ({"forced": True} if thinking.is_forced else {})


def load_thinking(record: Mapping[str, Any]) -> Thinking | None:
    """Return where the thinking of a stored sample ends; None if it has none."""
    found = record.get("thinking")
    if found is None or not isinstance(found, Mapping):
        return None
    return Thinking(
        int(found["tokens"]), int(found["end"]), bool(found["closed"]), bool(found.get("forced"))
    )


def get_answer_text(record: Mapping[str, Any]) -> str:
    """Return the text of a stored sample that is scored."""
    text = str(record["text"])
    return text if record.get("thinking") is None else answer_after(text, load_thinking(record))


_COUNTS: Final = ("samples", "thinking", "closed", "forced", "thinking_tokens", "answer_tokens")


class ThinkingTokens:
    """Counts the tokens of thinkings and of answers, over samples."""

    def __init__(self) -> None:
        """No samples yet."""
        self._counts = dict.fromkeys(_COUNTS, 0)

    def add(self, record: Mapping[str, Any]) -> None:
        """Count a stored sample."""
        found = load_thinking(record)
        mine = (
            (0, 0, 0, 0)
            if found is None
            else (1, found.is_closed, found.is_forced, found.num_tokens)
        )
        each = (1, *mine, int(record["num_tokens"]) - mine[-1])
        for name, count in zip(_COUNTS, each, strict=True):
            self._counts[name] += count

    def summary(self) -> dict[str, int] | None:
        """Return the counts as JSON holds them; None if no sample thinks.

        samples, thinking: all samples, and those that think. closed, forced: of these, those whose
        thinking came to its end, and those whose budget closed it.
        """
        return dict(self._counts) if self._counts["thinking"] else None


def thinking_line(summary: Mapping[str, int]) -> str:
    """Return in one line how much samples thought."""
    thinking, cut = summary["thinking"], summary["thinking"] - summary["closed"]
    line = (
        f"thinking: {summary['thinking_tokens']:,} tokens in {thinking:,} of "
        f"{summary['samples']:,} samples, {summary['thinking_tokens'] / thinking:,.1f} each; "
        f"answers: {summary['answer_tokens']:,} tokens"
    )
    forced = f"; {summary['forced']:,} were closed by their budget" if summary["forced"] else ""
    return f"{line}{forced}{f'; {cut:,} never ended' if cut else ''}"
