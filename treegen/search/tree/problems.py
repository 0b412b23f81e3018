"""Names of the problems that are searched; the seeds of a search follow from its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from treegen.errors import InputError
from treegen.prompts.tree import as_list


@dataclass(frozen=True, slots=True)
class SearchProblem:
    """A prompt to search from, as text or token ids."""

    name: str
    """Unique in a run."""
    content: str | Sequence[int]
    """The prompt."""
    is_named: bool
    """Whether the user gave the name. If not, the seeds of the search follow from its prompt."""
    origin: str | None = None
    """For an unnamed problem, the text that its seeds follow from; None if not known yet."""


def name_problems(
    problems: Iterable[Any], flat: Callable[[Any], str | Sequence[int]]
) -> list[SearchProblem]:
    """Return problems with their given names; a problem without a name gets its number.

    Args:
        problems: Prompts, (name, prompt) pairs, or SearchProblems, which are kept unchanged.
        flat: Returns the text or token ids of a prompt.

    Raises:
        InputError: Two problems have the same name.
    """
    named = []
    for index, problem in enumerate(as_list("problems", problems)):
        if isinstance(problem, SearchProblem):
            named.append(problem)
            continue
        is_pair = isinstance(problem, tuple) and len(problem) == 2 and isinstance(problem[0], str)
        name, content = problem if is_pair else (str(index), problem)
        named.append(SearchProblem(name, flat(content), is_pair))
    for name, times in Counter(problem.name for problem in named).items():
        if times > 1:
            raise InputError(f"two problems are named {name!r}; names must be unique")
    return named
