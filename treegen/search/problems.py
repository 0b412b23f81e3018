"""Names of the problems that are searched; what a search draws belongs to its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from treegen.errors import InputError
from treegen.prompts.tree import as_list


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt to search from, as text or token ids.

    is_named: whether the name was given. If not, what the search draws belongs to its prompt.
    origin: what it belongs to then, where that is known already.
    """

    name: str
    content: str | Sequence[int]
    is_named: bool
    origin: str | None = None


def named(problems: Iterable[Any], flat: Callable[[Any], str | Sequence[int]]) -> list[Problem]:
    """Problems with names: pairs as they are, others by their number.

    flat: text or token ids of a problem's content.
    """
    found = []
    for index, problem in enumerate(as_list("problems", problems)):
        if isinstance(problem, Problem):
            found.append(problem)
            continue
        is_pair = isinstance(problem, tuple) and len(problem) == 2 and isinstance(problem[0], str)
        name, content = problem if is_pair else (str(index), problem)
        found.append(Problem(name, flat(content), is_pair))
    for name, times in Counter(problem.name for problem in found).items():
        if times > 1:
            raise InputError(f"two problems are named {name!r}; names must be unique")
    return found
