"""Numbers of problems, answers, judges, wordings and repeats that reach an interval width."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from treegen.errors import InputError, arg
from treegen.evals.judging.statistics.components import REST, Design, predicted_variance

_MOST: Final = 10**7
_NORMAL: Final = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Need:
    """The required value of one number of a design, if the other numbers stay the same.

    what: "problems", "answers" (of a problem), "judges", "wordings" or "repeats".
    now: the present number.
    needed: the required number; None if no number is enough, or if it is undetermined.
    """

    what: str
    now: float
    needed: int | None


def check_half_width(half_width: float) -> None:
    """Raise InputError unless the half width is a finite number above 0."""
    is_number = isinstance(half_width, int | float) and not isinstance(half_width, bool)
    if not is_number or not 0 < half_width < math.inf:
        raise InputError(f"{arg('half_width')} must be above 0, got {half_width!r:.80}")


def required_numbers(
    variances: Mapping[str, float | None],
    design: Design,
    half_width: float,
    *,
    repeats: int = 1,
    repeat_variance: float = 0.0,
) -> list[Need]:
    """Return the number of problems, answers and so on for a half width of the 95% interval.

    The half width is 1.96 times the root of the predicted variance of the mean; with few levels the
    reported interval is wider. An undetermined variance counts as 0, so a single judge does not
    determine how many judges are needed.

    Args:
        variances: The variance of each factor; None if undetermined.
        design: The present numbers.
        half_width: Half width of the interval to reach, above 0.
        repeats: Present number of verdicts in each cell.
        repeat_variance: Variance of a verdict around the mean of its cell. It is part of the rest
            in `variances`, where it is divided by `repeats`.

    Returns:
        The required value of each number, if the other numbers stay the same.

    Raises:
        InputError: the half width is not above 0.
    """
    check_half_width(half_width)
    rest = variances[REST] or 0.0
    repeat_variance = min(repeat_variance, rest * repeats)

    def half(design: Design, num_repeats: int) -> float:
        more = rest - repeat_variance / repeats + repeat_variance / num_repeats
        return _NORMAL * math.sqrt(predicted_variance({**variances, REST: more}, design))

    needs = []
    for what in ("problems", "answers", "judges", "wordings", "repeats"):
        now = repeats if what == "repeats" else getattr(design, what)
        if what == "judges" and variances["judge"] is None and design.judges == 1:
            needs.append(Need(what, now, None))
            continue
        if what == "wordings" and variances["wording"] is None and design.wordings == 1:
            needs.append(Need(what, now, None))
            continue

        def with_number(number: int, what: str = what) -> float:
            if what == "repeats":
                return half(design, number)
            return half(replace(design, **{what: number}), repeats)

        needs.append(Need(what, now, _least(with_number, half_width)))
    return needs


def _least(half, half_width: float) -> int | None:  # type: ignore[no-untyped-def]
    """Return the smallest sufficient number; None if 10^7 is not enough."""
    if half(_MOST) > half_width:
        return None
    low, high = 0, _MOST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if half(middle) <= half_width else (middle, high)
    return high
