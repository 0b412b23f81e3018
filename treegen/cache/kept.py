"""Prefixes whose keys and values stay in memory between calls.

Each is one page table from position 0, named, and holds a reference on its pages. They are
bounded by pages and leave least recently used first; pages that running work shares with a
dropped prefix stay until that work ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from treegen.cache.pool import PagedCache, Pages
from treegen.prompts.radix import Tokens


@dataclass(slots=True, eq=False)
class KeptPrefix:
    """One kept prefix; `pages` is None once it has been dropped."""

    name: str
    tokens: Tokens
    pages: Pages | None
    last_used: int = 0


class KeptPrefixes:
    """All kept prefixes of one cache, at most `max_pages` pages together."""

    def __init__(self, cache: PagedCache, max_pages: int) -> None:
        """Nothing is kept yet."""
        self._cache = cache
        self.max_pages = max_pages
        self._prefixes: list[KeptPrefix] = []
        self._clock = 0

    def __iter__(self) -> Iterator[KeptPrefix]:
        """Least recently used first."""
        return iter(sorted(self._prefixes, key=lambda prefix: prefix.last_used))

    def add(self, name: str, tokens: Tokens, pages: Pages) -> KeptPrefix:
        """Keep a prefix; takes over the caller's references on `pages`."""
        prefix = KeptPrefix(name, tokens, pages)
        self._prefixes.append(prefix)
        self.touch(prefix)
        for other in self:
            if self.num_pages > self.max_pages and other.name != name:
                self.remove(other)
        return prefix

    def touch(self, prefix: KeptPrefix) -> None:
        """Note that a prefix was used now."""
        self._clock += 1
        prefix.last_used = self._clock

    def drop(self, name: str) -> int:
        """Forget all prefixes of a name; returns how many there were."""
        chosen = [prefix for prefix in self._prefixes if prefix.name == name]
        for prefix in chosen:
            self.remove(prefix)
        return len(chosen)

    def evict_one(self) -> bool:
        """Forget the least recently used prefix that running work does not use as a whole.

        False if there is none. Its pages are free once no other kept prefix shares them.
        """
        tables = list(self.tables())
        if not tables:
            return False
        pages, count = np.unique(np.concatenate(tables), return_counts=True)
        only_kept = pages[self._cache.pool.num_references(pages) == count]
        for prefix in self:
            if prefix.pages is not None and np.isin(prefix.pages, only_kept).any():
                self.remove(prefix)
                return True
        return False

    def remove(self, prefix: KeptPrefix) -> None:
        """Forget one prefix, if it is still kept."""
        if prefix.pages is not None:
            self._prefixes.remove(prefix)
            self._cache.pool.free(prefix.pages)
            prefix.pages = None

    def tables(self) -> Iterator[Pages]:
        """Page tables of all prefixes."""
        return (prefix.pages for prefix in self._prefixes if prefix.pages is not None)

    @property
    def num_pages(self) -> int:
        """Different pages that kept prefixes refer to."""
        tables = list(self.tables())
        return len(np.unique(np.concatenate(tables))) if tables else 0
