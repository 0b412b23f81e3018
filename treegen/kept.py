"""Prefixes whose keys and values stay in memory between calls.

Each is one page table from position 0, named, and holds a reference on its pages. They are
bounded by pages and leave least recently used first; pages that running work shares with a
dropped prefix stay until that work ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from treegen.cache import PagedCache, Pages
from treegen.radix import Tokens


@dataclass(slots=True)
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

    def __iter__(self):  # type: ignore[no-untyped-def]
        """Least recently used first."""
        return iter(sorted(self._prefixes, key=lambda prefix: prefix.last_used))

    def add(self, name: str, tokens: Tokens, pages: Pages) -> KeptPrefix:
        """Keep a prefix; takes over the caller's references on `pages`."""
        prefix = KeptPrefix(name, tokens, pages)
        self._prefixes.append(prefix)
        self.touch(prefix)
        while self.num_pages > self.max_pages and len(self._prefixes) > 1:
            self.evict_one()
        return prefix

    def touch(self, prefix: KeptPrefix) -> None:
        """Note that a prefix was used now."""
        self._clock += 1
        prefix.last_used = self._clock

    def drop(self, name: str) -> int:
        """Forget all prefixes of a name; returns how many there were."""
        chosen = [prefix for prefix in self._prefixes if prefix.name == name]
        for prefix in chosen:
            self._remove(prefix)
        return len(chosen)

    def evict_one(self) -> bool:
        """Forget the least recently used prefix; False if there is none."""
        if not self._prefixes:
            return False
        self._remove(min(self._prefixes, key=lambda prefix: prefix.last_used))
        return True

    def _remove(self, prefix: KeptPrefix) -> None:
        assert prefix.pages is not None
        self._prefixes.remove(prefix)
        self._cache.pool.free(prefix.pages)
        prefix.pages = None

    @property
    def num_pages(self) -> int:
        """Pages that kept prefixes refer to, shared ones counted each time."""
        return sum(len(prefix.pages) for prefix in self._prefixes if prefix.pages is not None)
