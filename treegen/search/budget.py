"""The budget of a search, its usage, and the reasons for stopping it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Final

from treegen.common.checks import check_int, check_number, checked_class
from treegen.errors import InputError, TreegenError


class StopReason(Enum):
    """The reason why a search ended early, for programs. A sentence for people is stored too."""

    BUDGET = "budget"
    STOPPED = "stopped"
    """The search, or the code that runs it, called `stop`."""
    SOLVED = "solved"
    CLOSED = "closed"
    INTERRUPTED = "interrupted"
    """The whole run was interrupted, so the search has to be repeated."""
    LEFT_OUT = "left out"
    """The search was skipped; see `Cluster`."""
    FAILED = "failed"
    """The search function raised an error, or returned something that is not its own node."""


@checked_class
class BudgetReached(TreegenError):
    """A search made a call after its budget was used up, or after it was stopped.

    Attributes:
        by: What ended it.
    """

    def __init__(self, message: str = "", by: StopReason = StopReason.BUDGET) -> None:
        """Create the error.

        Args:
            message: A sentence for people.
            by: What ended the search.
        """
        super().__init__(message)
        self.by = by


class BudgetIgnored(asyncio.CancelledError):
    """A search kept making calls despite BudgetReached, so often that it would never end.

    It ends the search as BudgetReached would, but `except Exception` does not catch it.
    """


@dataclass(slots=True)
class SearchUsage:
    """The cost of one search."""

    tokens_decoded: int = 0
    """Generated tokens, including those of cancelled samples. Under a budget of tokens a cancelled
    sample counts at most as many as the longest sample that arrived while it was being drawn."""
    tokens_prefilled: int = 0
    """Given, scored or recomputed tokens that went through the model, each counted once."""
    tokens_reprompted: int = 0
    """Tokens that would be prefilled if every call computed its whole context again; a call to
    `score` also computes its texts. So this is the whole cost without a cache: it includes what
    `tokens_prefilled` counts."""
    calls: int = 0
    """Calls of `sample`, `stream` and `score`."""
    nodes: int = 0
    """Children made; the root does not count."""
    started: float = field(default_factory=time.monotonic, repr=False, compare=False)
    """When the search began, on the clock of `time.monotonic`."""
    seconds: float = 0.0
    """Wall time, once the search has ended."""
    actions: int = 0
    """Actions that environments have run for agents; actions that forks repeat do not count."""

    def elapsed_seconds(self) -> float:
        """Return the seconds since the search began, or that it took if it has ended."""
        return self.seconds or time.monotonic() - self.started


_MAX_LIMIT: Final = 2**63  # files of runs hold integers of 64 bits


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one search; None is no limit.

    tokens, calls and nodes are never exceeded. If a call asks for more children than the limits
    allow, only those that are allowed are drawn. Samples count towards the tokens in the order of
    the calls: the sample that does not end within the remaining tokens is cut, and so are all
    samples requested after it. So what a budget cuts follows from the search alone. Samples start
    concurrently while all of them are sure to end within the budget. With `AskTell` samples arrive
    whole, so the samples of one call may exceed the tokens.

    seconds ends samples after the current pass. It immediately ends anything else that a search
    awaits, such as a tool. It cannot end code that does not await, such as a loop or `time.sleep`.
    """

    tokens: int | None = None
    """Decoded tokens, including those of prompts that ask for values."""
    calls: int | None = None
    """Calls of `sample`, `stream` and `score`, each for any number of children or texts."""
    seconds: float | None = None
    """Wall time."""
    nodes: int | None = None
    """Children, including those of given text."""
    actions: int | None = None
    """Actions that environments run for agents. A reply whose calls do not all fit runs none."""

    def __post_init__(self) -> None:
        for item in fields(self):
            limit = getattr(self, item.name)
            if limit is None:
                continue
            (check_number if item.name == "seconds" else check_int)(f"budget {item.name}", limit)
            if not limit > 0:
                raise InputError(f"budget {item.name} must be more than 0, got {limit!r}")
            if item.name != "seconds" and limit > _MAX_LIMIT:
                raise InputError(f"budget {item.name} must be at most 2^63, got {limit!r:.40}")

    def describe_exceeded(self, usage: SearchUsage) -> str | None:
        """Return a sentence on the limit that is reached; None if none is."""
        for name, spent in (
            ("tokens", usage.tokens_decoded),
            ("calls", usage.calls),
            ("nodes", usage.nodes),
            ("actions", usage.actions),
        ):
            limit = getattr(self, name)
            if limit is not None and spent >= limit:
                return self.describe_limit(name)
        return self.describe_limit("seconds") if self.is_over(usage) else None

    def is_over(self, usage: SearchUsage) -> bool:
        """Return whether the time is used up."""
        return self.seconds is not None and usage.elapsed_seconds() >= self.seconds

    def describe_limit(self, name: str) -> str:
        """Return the sentence that the limit of that name is reached."""
        return f"budget of {getattr(self, name):,} {name} reached"


def check_budget(budget: object) -> None:
    """Raise InputError unless the value is a Budget or None."""
    if budget is not None and not isinstance(budget, Budget):
        raise InputError(f"budget must be a Budget, such as Budget(tokens=1000), got {budget!r}")
