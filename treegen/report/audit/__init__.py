"""Audits of finished runs: checks of the answers, the prompts, the samples and the data."""

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final, Literal

Severity = Literal["high", "medium", "low"]
SEVERITIES: Final[tuple[Severity, ...]] = ("high", "medium", "low")
"""High: read the example before you report the score. Medium: the score may be misleading. Low:
state it next to the score."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of finding, as a line of kinds.jsonl."""

    name: str
    """The name, such as "cut-off"."""
    area: str
    """The part of a run: "answers", "prompts", "samples" or "data"."""
    message: str
    """What is wrong, with fields in braces for values of the run."""
    advice: str
    """What to do."""
    high: float = 2.0
    """The smallest share of affected samples or problems at which the severity is high: 0 if one
    case suffices, 2 for never."""
    medium: float = 2.0
    """The smallest share at which the severity is medium."""


def read_rows(name: str) -> list[dict[str, Any]]:
    """Return the JSON lines of a file in this package."""
    text = files("treegen.report.audit").joinpath(name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


KINDS: Final = {row["name"]: Kind(**row) for row in read_rows("kinds.jsonl")}
"""All kinds by name."""
