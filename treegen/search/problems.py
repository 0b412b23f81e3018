"""Names of the problems that are searched; what a search draws belongs to its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from treegen.errors import InputError


def named(
    problems: Sequence[Any], flat: Callable[[Any], str | Sequence[int]]
) -> list[tuple[str, str | Sequence[int]]]:
    """Problems with names: pairs as they are, others by their number.

    flat: text or token ids of a problem's content.
    """
    pairs = []
    for index, problem in enumerate(problems):
        is_pair = isinstance(problem, tuple) and len(problem) == 2 and isinstance(problem[0], str)
        name, content = problem if is_pair else (str(index), problem)
        pairs.append((name, flat(content)))
    for name, times in Counter(name for name, _ in pairs).items():
        if times > 1:
            raise InputError(f"two problems are named {name!r}; names must be unique")
    return pairs
