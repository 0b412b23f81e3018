"""Estimates the costs of parts of a search, so that concurrent parts end within the budget."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Awaitable
from typing import Final, TypeVar

from treegen.search.budgeted_search import BudgetedSearch

_LIMITS: Final = {"tokens": "tokens_decoded", "calls": "calls", "nodes": "nodes"}

T = TypeVar("T")


class Costs:
    """Tokens, calls and nodes that each kind of work has taken from a search's budget so far."""

    def __init__(self, search: BudgetedSearch) -> None:
        """Start without any measured costs."""
        self._usage = search.usage
        self._limits = {
            name: limit for name in _LIMITS if (limit := getattr(search.budget, name)) is not None
        }
        self._num: Counter[str] = Counter()
        self._taken: defaultdict[str, Counter[str]] = defaultdict(Counter)

    async def of(self, kind: str, num: int, call: Awaitable[T]) -> T:
        """Await a call and record what it used as the cost of `num` items of a kind.

        Args:
            kind: Name of the kind of work.
            num: Items that the call computes.
            call: The call to await.

        Returns:
            What the call returns.
        """
        before = self._read_usage()
        returned = await call
        self._num[kind] += num
        self._taken[kind].update(self._read_usage() - before)
        return returned

    def fits_budget(self, **nums: int) -> bool:
        """Return whether the budget has room for `nums` items of each kind, at their mean costs.

        A kind without measured costs counts as free.
        """
        spent = self._read_usage()
        return all(
            spent[name] + sum(self._mean(kind, name) * num for kind, num in nums.items()) <= limit
            for name, limit in self._limits.items()
        )

    def most(self, num: int, *kinds: str) -> int:
        """Return how many of `num` items fit the budget, each with one of all kinds; at least 1."""
        sizes = range(num, 1, -1)
        return next((size for size in sizes if self.fits_budget(**dict.fromkeys(kinds, size))), 1)

    def _mean(self, kind: str, name: str) -> float:
        return self._taken[kind][name] / max(1, self._num[kind])

    def _read_usage(self) -> Counter[str]:
        return Counter({name: getattr(self._usage, _LIMITS[name]) for name in self._limits})
