"""Places in JSON documents, and the documents with something else there."""

import copy
from collections.abc import Iterator
from typing import Any


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to everything in a document."""
    if path:
        yield path
    if isinstance(document, dict | list):
        items = document.items() if isinstance(document, dict) else enumerate(document)
        for key, value in items:
            yield from places(value, (*path, key))


def find_holder(document: Any, path: tuple[Any, ...]) -> Any:
    """What holds the last step of a path."""
    for step in path[:-1]:
        document = document[step]
    return document


def edits_of(document: Any, path: tuple[Any, ...], values: list[Any]) -> Iterator[tuple[str, Any]]:
    """The document with each value at a place, and without the place; in words what is there."""
    for value in values:
        edited = copy.deepcopy(document)
        find_holder(edited, path)[path[-1]] = value
        yield f"{path} = {value!r}", edited
    edited = copy.deepcopy(document)
    del find_holder(edited, path)[path[-1]]
    yield f"no {path}", edited
