"""Finds nodes again by their keys: in a session, and when a controller's state is unpickled."""

from __future__ import annotations

import uuid
from typing import Protocol
from weakref import WeakValueDictionary

from treegen.errors import InputError


class Findable(Protocol):
    """A search."""

    def find(self, key: str) -> object:
        """The node of a key."""
        ...


_searches: WeakValueDictionary[str, Findable] = WeakValueDictionary()


def register(search: Findable) -> str:
    """A token by which `node_of` finds a search, as long as something in this process holds it."""
    token = uuid.uuid4().hex
    _searches[token] = search
    return token


def node_of(token: str, key: str) -> object:
    """The node that a pickle stands for.

    Raises:
        InputError: its search is not in this process any more, or never was.
    """
    search = _searches.get(token)
    if search is None:
        raise InputError(
            f"node {key!r} was pickled by its key, and its search is not in this process; make the "
            "nodes again, or keep path_text, data or records (SearchTree) instead of nodes"
        )
    return search.find(key)
