"""Audits of finished runs: checks of the answers, the prompts, the samples and the data."""

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Final, Literal

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


def _read_kinds() -> dict[str, Kind]:
    text = files("treegen.report.audit").joinpath("kinds.jsonl").read_text(encoding="utf-8")
    kinds = [Kind(**json.loads(line)) for line in text.splitlines()]
    return {kind.name: kind for kind in kinds}


KINDS: Final = _read_kinds()
"""All kinds by name."""
