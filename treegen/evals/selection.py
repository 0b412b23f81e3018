"""Select some of a task's problems: by a limit, a range, or ids."""

import math
import re
import sys
from collections.abc import Sequence

from treegen.common.checks import check_argument_types
from treegen.common.spelling import did_you_mean
from treegen.errors import InputError, arg
from treegen.evals.problem import Problem
from treegen.evals.task import TaskOptions


@check_argument_types
def select(problems: Sequence[Problem], options: TaskOptions) -> tuple[Problem, ...]:
    """Return the problems that `options.limit` or `options.ids` select; all without either.

    The `load` methods of tasks call it.

    Raises:
        InputError: the limit is invalid or starts after the last problem; the list of ids is empty,
            contains an id twice, or contains an id that no problem has.
    """
    if options.ids is not None:
        return _select_by_id(problems, options.ids)
    start, stop = parse_limit(options.limit, len(problems))
    return tuple(problems[start:stop])


def select_if_needed(problems: Sequence[Problem], options: TaskOptions) -> Sequence[Problem]:
    """Select problems only if they differ from the selection, as for a task that does not select.

    A fraction, or a range wider than the data, does not show whether the task has applied it: then
    all problems stay.

    Raises:
        InputError: as for `select`.
    """
    if options.ids is not None:
        return (
            problems if [p.id for p in problems] == list(options.ids) else select(problems, options)
        )
    start, stop = parse_limit(options.limit, sys.maxsize)
    return problems if len(problems) <= stop - start else select(problems, options)


def parse_limit(limit: int | float | str | None, num_problems: int) -> tuple[int, int]:
    """Return the half-open range of problems that a limit selects.

    An integer takes that many from the first on, a number below 1 that fraction of all (rounded
    up), and "10-20" the tenth to the twentieth.

    Raises:
        InputError: the limit is none of these, or the range starts after the last problem.
    """
    if limit is None:
        return 0, num_problems
    text = str(limit).strip()
    span = re.fullmatch(r"([0-9]{1,12})-([0-9]{1,12})", text)
    if span:
        first, last = int(span[1]), int(span[2])
        if not 1 <= first <= last:
            raise InputError(
                f"the range {text!r} of {arg('limit')} must start at 1 or later "
                "and must not end before its start; use a range such as 10-20"
            )
        if first > num_problems:
            raise InputError(
                f"the range {text!r} of {arg('limit')} starts after the last of "
                f"{num_problems} problems; use a lower start"
            )
        return first - 1, min(last, num_problems)
    # Only plain ASCII numbers: float() would also take 1_000, digits of other scripts and "nan".
    is_plain = re.fullmatch(r"[0-9]{1,12}(\.[0-9]{0,20})?|\.[0-9]{1,20}", text)
    number = float(text) if is_plain else 0.0
    if 0 < number < 1:
        return 0, math.ceil(number * num_problems)  # in floats, as lm-eval computes it
    if number >= 1 and number == math.floor(number):
        return 0, int(min(number, num_problems))
    raise InputError(f"{arg('limit')} must be a count, a fraction below 1 or a range, got {text!r}")


def _select_by_id(problems: Sequence[Problem], ids: Sequence[str]) -> tuple[Problem, ...]:
    by_id = {problem.id: problem for problem in problems}
    if not ids:
        raise InputError("the list of problem ids is empty; add a problem id, or remove the list")
    selected: dict[str, Problem] = {}
    for problem_id in ids:
        if problem_id not in by_id:
            hint = (
                did_you_mean(problem_id, by_id)
                or f"; the id of the first problem is {next(iter(by_id), None)!r}"
            )
            raise InputError(f"there is no problem {problem_id!r}{hint}")
        if problem_id in selected:
            raise InputError(f"problem {problem_id!r} is named twice; name each problem once")
        selected[problem_id] = by_id[problem_id]
    return tuple(selected.values())
