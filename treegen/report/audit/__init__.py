"""A second opinion on the score of a finished run: other readers, prompts, samples and data."""

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Final, Literal

Severity = Literal["high", "medium", "low"]
SEVERITIES: Final[tuple[Severity, ...]] = ("high", "medium", "low")
"""High: read the example before you report the number. Medium: the number may mislead. Low: a
reader should know."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of finding, as a line of kinds.jsonl."""

    name: str
    area: str
    message: str
    """What is wrong; it may have fields in braces."""
    advice: str
    high: float = 2.0
    """The share of samples or problems from which it is high: 0 for a single case, 2 for none."""
    medium: float = 2.0


def _read() -> dict[str, Kind]:
    text = files("treegen.report.audit").joinpath("kinds.jsonl").read_text(encoding="utf-8")
    kinds = [Kind(**json.loads(line)) for line in text.splitlines()]
    return {kind.name: kind for kind in kinds}


KINDS: Final = _read()
"""All kinds by name."""
