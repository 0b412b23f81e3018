"""Objects that live in a model's memory, and so are not copied."""

from __future__ import annotations

from typing import Any, Self

from treegen.errors import InputError


class NonCopyable:
    """Copying gives the same object; pickling raises an error that says what to do instead.

    Libraries that copy their states, such as controllers of searches, may have nodes in them. A
    real copy of a node would copy its session, its cache and its model. A node, unlike the others,
    is pickled by its key.
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
