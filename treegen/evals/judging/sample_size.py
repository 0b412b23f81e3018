"""Numbers of problems, answers, judges and wordings that an interval of some width needs."""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from treegen.errors import InputError, arg
from treegen.evals.judging.components import REST, Design
from treegen.evals.judging.interval import CONFIDENCE, FEW_LEVELS_CONFIDENCE, Mean, quantile

_MAX_NUMBER: Final = 10**7


@dataclass(frozen=True, slots=True)
class RequiredNumber:
    """The required value of one number of a design, if the other numbers stay the same."""

    name: str
    """"problems", "answers" (of a problem), "judges", "wordings" or "repeats"."""
    present: float
    """The present number."""
    required: int | None
    """The required number; None if no number is enough, or if it is unknown."""
    reason: str = ""
    """Why `required` is None."""


def check_half_width(half_width: float) -> None:
    """Raise InputError unless the half width is a finite number above 0."""
    is_number = isinstance(half_width, int | float) and not isinstance(half_width, bool)
    if not is_number or not 0 < half_width < math.inf:
        raise InputError(f"{arg('half_width')} must be above 0, got {half_width!r:.80}")


def half_width_of(interval: Mean) -> float:
    """Return the distance from a mean to the farther end of its interval."""
    return max(interval.value - interval.low, interval.high - interval.value)


def predict_half_width(variances: Mapping[str, float | None], design: Design, mean: float) -> float:
    """Return the distance from a mean to the farther end of its interval in a balanced design.

    The interval is that of `interval.mean_of`, with its imaginary problems and quantiles.

    Args:
        variances: The variance of each factor; None, for undetermined, counts as 0.
        design: Numbers of problems, answers, judges and wordings.
        mean: The mean, from 0 to 1.
    """
    n, k, j, w = design.problems, design.answers, design.judges, design.wordings
    of = {name: value or 0.0 for name, value in variances.items()}
    of_problem = of["problem"] + of["answer"] / k + of["problem x judge"] / j
    of_problem += of["problem x wording"] / w + of[REST] / (k * j * w)
    center = (n * mean + 1) / (n + 2)
    squares = (n - 1) * of_problem + n * (mean - center) ** 2 + center**2 + (1 - center) ** 2
    error = math.sqrt(squares / ((n + 1) * (n + 2)))
    halves = [quantile(0.5 + CONFIDENCE / 2, n + 1) * error]
    for name, number, other in (("judge", j, w), ("wording", w, j)):
        if number > 1:
            of_level = of[name] + of[f"problem x {name}"] / n + of[REST] / (n * k * other)
            halves.append(
                quantile(0.5 + FEW_LEVELS_CONFIDENCE / 2, number - 1) * math.sqrt(of_level / number)
            )
    half = math.hypot(*halves)
    return max(mean - max(0.0, center - half), min(1.0, center + half) - mean, 0.0)


def required_numbers(
    variances: Mapping[str, float | None],
    design: Design,
    half_width: float,
    interval: Mean,
    *,
    repeats: int = 1,
    repeat_variance: float = 0.0,
) -> list[RequiredNumber]:
    """Return the number of problems, answers and so on for a half width of the 95% interval.

    The prediction is scaled, so that it equals the present interval for the present numbers. It
    differs without the scale if the design is not balanced or if problems have clusters. An
    undetermined variance counts as 0, so a single judge does not determine how many judges are
    needed.

    Args:
        variances: The variance of each factor; None if undetermined.
        design: The present numbers.
        half_width: Required distance from the mean to the farther end of the interval, above 0.
        interval: The present mean with its interval.
        repeats: Present number of verdicts in each cell.
        repeat_variance: Variance of a verdict around the mean of its cell. It is part of the rest
            in `variances`, where it is divided by `repeats`.

    Returns:
        The required value of each number, if the other numbers stay the same.

    Raises:
        InputError: the half width is not above 0.
    """
    check_half_width(half_width)
    residual = variances[REST] or 0.0
    repeat_variance = min(repeat_variance, residual * repeats)
    scale = half_width_of(interval) / predict_half_width(variances, design, interval.value)

    def predict(design: Design, num_repeats: int) -> float:
        more = residual - repeat_variance / repeats + repeat_variance / num_repeats
        return scale * predict_half_width({**variances, REST: more}, design, interval.value)

    numbers = []
    for name in ("problems", "answers", "judges", "wordings", "repeats"):
        present = repeats if name == "repeats" else getattr(design, name)
        factor = {"judges": "judge", "wordings": "wording"}.get(name)
        if factor is not None and present == 1:
            reason = f"unknown: there is only one {factor}"
            numbers.append(RequiredNumber(name, present, None, reason))
            continue

        def with_number(number: int, name: str = name) -> float:
            if name == "repeats":
                return predict(design, number)
            return predict(replace(design, **{name: number}), repeats)

        # A single judge or wording would be treated as fixed.
        required = _find_min_number(with_number, half_width, minimum=1 if factor is None else 2)
        reason = ""
        if required is None:
            best = with_number(_MAX_NUMBER)
            reason = f"not reachable: the other numbers keep the half width above about {best:.2g}"
        numbers.append(RequiredNumber(name, present, required, reason))
    return numbers


def _find_min_number(
    half_width_at: Callable[[int], float], half_width: float, minimum: int
) -> int | None:
    """Return the smallest sufficient number; None if 10^7 is not enough.

    Args:
        half_width_at: Returns the half width of the interval with a number.
        half_width: The required half width.
        minimum: The smallest possible number.
    """
    numbers = range(minimum, _MAX_NUMBER + 1)
    index = bisect_left(numbers, True, key=lambda number: half_width_at(number) <= half_width)
    return numbers[index] if index < len(numbers) else None
