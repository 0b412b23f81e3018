"""Finds nodes by their keys: in a session, and when a controller's state is unpickled."""

from __future__ import annotations

import uuid
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Protocol
from weakref import WeakValueDictionary

from treegen.common.lifetimes import use_context_value
from treegen.errors import InputError


class Findable(Protocol):
    """A search whose nodes can be found by their keys."""

    def find(self, key: str) -> object:
        """Return the node with a key."""
        ...


_is_for_other_process: ContextVar[bool] = ContextVar("_is_for_other_process", default=False)
_searches: WeakValueDictionary[str, Findable] = WeakValueDictionary()


def register(search: Findable) -> str:
    """Return a token by which `resolve_node` finds a search.

    The token is valid as long as something in this process holds the search.
    """
    token = uuid.uuid4().hex
    _searches[token] = search
    return token


def pickling_for_other_process() -> AbstractContextManager[None]:
    """Make pickling a node raise InputError inside, because another process could not find it."""
    return use_context_value(_is_for_other_process, True)


def check_same_process(key: str) -> None:
    """Raise InputError for a node that is pickled for another process."""
    if _is_for_other_process.get():
        raise InputError(
            f"node {key!r} cannot be sent to another process, because the node belongs to a model "
            "in memory; send the path_text or data of the node"
        )


def resolve_node(token: str, key: str) -> object:
    """Return the node of a pickle.

    Raises:
        InputError: Its search is not in this process, or no longer.
    """
    search = _searches.get(token)
    if search is None:
        raise InputError(
            f"node {key!r} was pickled by its key, but its search is not in this process; create "
            "the nodes again, or pickle path_text, data or records (SearchTree) instead of nodes"
        )
    return search.find(key)
