"""Objects that live in a model's memory, and therefore are not copied."""

from __future__ import annotations

from typing import Any, Self

from treegen.errors import InputError


class NonCopyable:
    """An object whose copy is the object itself, and whose pickling raises an error with advice.

    Libraries that copy their states, such as controllers of searches, may store nodes in them. A
    real copy of a node would copy its session, its cache and its model. Nodes are the exception:
    they are pickled by their keys.
    """

    __slots__ = ()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce_ex__(self, protocol: object) -> Any:
        raise InputError(
            f"a {type(self).__name__} cannot be pickled: it lives in the memory of a model. Keep "
            "its key, path_text or data, or the records of its tree (SearchTree, SearchResult)"
        )
