"""Prefixes whose keys, values and recurrent states stay in memory between calls.

A cached prefix has a name and a page table from position 0, and holds a reference to its pages. All
cached prefixes together have a limit of pages, and one of half of the slots of recurrent states.
Beyond it the least recently used prefixes of other names than the new one are dropped. Pages of a
dropped prefix that running work uses stay until that work ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from treegen.common.outputs import Usage
from treegen.ops.cache.pool import PagedCache, Pages
from treegen.ops.cache.state_cache import NO_STATE, Slots, StateCache
from treegen.prompts.radix import Tokens


@dataclass(slots=True, eq=False)
class CachedPrefix:
    """One cached prefix."""

    name: str
    """The caller's name for it; several prefixes may have one name."""
    tokens: Tokens
    """Its token ids."""
    pages: Pages | None
    """Its page table; None once it has been dropped."""
    last_used: int = 0
    """When it was last used, by the clock of `PrefixCache`."""
    end_state: int = NO_STATE
    """Slot of its recurrent state after its last token, which it owns; NO_STATE for none."""
    penultimate_state: int = NO_STATE
    """Slot of its recurrent state before its last token, which it owns; NO_STATE for none."""


class PrefixCache:
    """All cached prefixes of one cache, at most `max_pages` pages together."""

    def __init__(self, cache: PagedCache, max_pages: int) -> None:
        """Set up an empty prefix cache."""
        self._cache = cache
        # Without recurrent layers there is no slot.
        self._states = cache.states or StateCache((), 0)
        self.max_pages = max_pages
        self._prefixes: list[CachedPrefix] = []
        self._clock = 0

    def __iter__(self) -> Iterator[CachedPrefix]:
        """Return an iterator over the prefixes, least recently used first."""
        return iter(sorted(self._prefixes, key=lambda prefix: prefix.last_used))

    def add(self, prefix: CachedPrefix) -> None:
        """Keep a prefix, and drop prefixes of other names while there are too many pages or states.

        The prefix takes over the caller's references to its pages and states.
        """
        self._prefixes.append(prefix)
        self.touch(prefix)
        for other in self:
            if self._exceeds_limits and other.name != prefix.name:
                self.remove(other)

    @property
    def _exceeds_limits(self) -> bool:
        return self.num_pages > self.max_pages or len(self.states()) > self._states.num_slots // 2

    def touch(self, prefix: CachedPrefix) -> None:
        """Record that a prefix was used now."""
        self._clock += 1
        prefix.last_used = self._clock

    def drop(self, name: str) -> int:
        """Drop all prefixes of a name; return how many there were."""
        chosen = [prefix for prefix in self._prefixes if prefix.name == name]
        for prefix in chosen:
            self.remove(prefix)
        return len(chosen)

    def evict_one(self) -> bool:
        """Drop the least recently used prefix that has a page used only by cached prefixes.

        Such a page is freed once no cached prefix has it any more. If there is no such prefix, drop
        the least recently used one with recurrent states, which frees their slots. Return False if
        there is none of either.
        """
        tables = list(self.tables())
        if not tables:
            return False
        pages, count = np.unique(np.concatenate(tables), return_counts=True)
        exclusive = pages[self._cache.pool.num_references(pages) == count]
        for prefix in self:
            if prefix.pages is not None and np.isin(prefix.pages, exclusive).any():
                self.remove(prefix)
                return True
        if self._states.num_slots:
            for prefix in self:
                self.remove(prefix)
                return True
        return False

    def remove(self, prefix: CachedPrefix) -> None:
        """Drop one prefix, if it is still kept."""
        if prefix.pages is not None:
            self._prefixes.remove(prefix)
            self._cache.pool.free(prefix.pages)
            prefix.pages = None
            self._states.free([prefix.end_state, prefix.penultimate_state])

    def clear(self) -> None:
        """Drop all prefixes."""
        for prefix in list(self._prefixes):
            self.remove(prefix)

    def tables(self) -> Iterator[Pages]:
        """Return the page tables of all prefixes."""
        return (prefix.pages for prefix in self._prefixes if prefix.pages is not None)

    def states(self) -> Slots:
        """Return the slots of the recurrent states of all prefixes."""
        owned = [slot for p in self._prefixes for slot in (p.end_state, p.penultimate_state)]
        return np.array([slot for slot in owned if slot != NO_STATE], dtype=np.int64)

    @property
    def num_pages(self) -> int:
        """Number of distinct pages of all cached prefixes."""
        tables = list(self.tables())
        return len(np.unique(np.concatenate(tables))) if tables else 0


class Kept:
    """The prefixes that `LLM.keep` has kept under one name. Leaving the `with` block drops them.

    Attributes:
        name: Their name, for `LLM.drop`.
        usage: Usage of computing them.
    """

    def __init__(self, store: PrefixCache, prefixes: list[CachedPrefix], usage: Usage) -> None:
        """Set up the result of `LLM.keep`.

        Args:
            store: The prefix cache.
            prefixes: The prefixes kept under one name.
            usage: Usage of computing them.
        """
        self._store, self._prefixes, self.usage = store, prefixes, usage
        self.name = prefixes[0].name

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *error: object) -> None:
        for prefix in self._prefixes:
            self._store.remove(prefix)
