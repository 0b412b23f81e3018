"""What a search may spend, and what it has spent."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, fields

from treegen.errors import InputError, TreegenError
from treegen.params import check_int, check_number


class BudgetReached(TreegenError):
    """A search asked for more after its budget was used up, or after it was stopped."""


class StillAsking(asyncio.CancelledError):
    """A search asked for more in spite of BudgetReached, so often that it would never end.

    It ends the search as BudgetReached would, but `except Exception` does not catch it.
    """


@dataclass(slots=True)
class SearchUsage:
    """What one search has cost.

    tokens_decoded: generated tokens, those of cancelled samples included.
    tokens_prefilled: given or recomputed tokens that went through the model, each counted once.
    tokens_reprompted: what prefilling the whole context anew for every call would have computed.
    calls: sample and score calls.
    nodes: children made; the root does not count.
    started: when the search began, on the clock of `time.monotonic`.
    seconds: wall time, once the search has ended.
    """

    tokens_decoded: int = 0
    tokens_prefilled: int = 0
    tokens_reprompted: int = 0
    calls: int = 0
    nodes: int = 0
    started: float = field(default_factory=time.monotonic, repr=False, compare=False)
    seconds: float = 0.0

    def elapsed(self) -> float:
        """Seconds since the search began, or that it took if it has ended."""
        return self.seconds or time.monotonic() - self.started


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one search; None is no limit.

    tokens: decoded tokens, those of prompts that ask for values included.
    calls: sample and score calls.
    seconds: wall time.
    nodes: children, those of given text included.

    calls and nodes are never exceeded: if a call asks for more children than are left, only those
    are drawn. tokens is checked after each pass of the model, so it is exceeded by less than one
    token for each sample under way. With `AskTell` samples come whole, so it may be exceeded by
    those that were asked for. seconds ends samples after the pass under way. It ends at once
    whatever else a search awaits, such as a tool. It cannot end code that does not await, such as
    a loop or `time.sleep`.
    """

    tokens: int | None = None
    calls: int | None = None
    seconds: float | None = None
    nodes: int | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            limit = getattr(self, item.name)
            if limit is None:
                continue
            (check_number if item.name == "seconds" else check_int)(f"budget {item.name}", limit)
            if not limit > 0:
                raise InputError(f"budget {item.name} must be more than 0, got {limit!r}")

    def exceeded(
        self, usage: SearchUsage, *, drawing: bool = False, live_tokens: int = 0
    ) -> str | None:
        """A sentence on the limit that is reached; None if none is.

        drawing: whether samples are being drawn; then only tokens and seconds count.
        live_tokens: decoded tokens of samples that have not ended.
        """
        for name, spent in (
            ("tokens", usage.tokens_decoded + live_tokens), ("calls", usage.calls),
            ("seconds", usage.elapsed()), ("nodes", usage.nodes),
        ):  # fmt: skip
            limit = getattr(self, name)
            if drawing and name in ("calls", "nodes"):
                continue
            if limit is not None and spent >= limit:
                return self.reached(name)
        return None

    def reached(self, name: str) -> str:
        """The sentence that the limit of that name is reached."""
        return f"budget of {getattr(self, name):,} {name} reached"


def check_budget(budget: object) -> None:
    """Raise InputError unless this is a Budget or None."""
    if budget is not None and not isinstance(budget, Budget):
        raise InputError(f"budget is {budget!r}; give a Budget, such as Budget(tokens=1000)")
