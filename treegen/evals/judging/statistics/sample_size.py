"""How many more problems, answers, judges or wordings make an interval as narrow as wanted."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from treegen.errors import InputError
from treegen.evals.judging.statistics.components import REST, Design, predicted_variance

_MOST: Final = 10**7
_NORMAL: Final = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Need:
    """What one number of a design has to be, if the others stay.

    what: "problems", "answers" (of a problem), "judges", "wordings" or "repeats".
    now: what it is. needed: what it has to be; None if no number is enough.
    """

    what: str
    now: float
    needed: int | None


def check_half_width(half_width: float) -> None:
    """Raise InputError unless an interval can be so wide."""
    is_number = isinstance(half_width, int | float) and not isinstance(half_width, bool)
    if not is_number or not 0 < half_width < math.inf:
        raise InputError(f"half_width must be above 0, got {half_width!r:.80}")


def required_numbers(
    variances: Mapping[str, float | None],
    design: Design,
    half_width: float,
    *,
    repeats: int = 1,
    repeat_variance: float = 0.0,
) -> list[Need]:
    """Return what each number would have to be for a half width of the 95% interval.

    The half width is 1.96 times the root of the predicted variance of the mean; with few levels the
    interval that is reported is wider. What a design cannot tell counts as no variance, so one
    judge alone says nothing of how many judges it takes.

    Args:
        repeats: Verdicts of each cell.
        repeat_variance: Of one verdict about the mean of its cell; it is a part of the rest of
            `variances`, divided by repeats there.

    Raises:
        InputError: the half width is not above 0.
    """
    check_half_width(half_width)
    rest = variances[REST] or 0.0
    repeat_variance = min(repeat_variance, rest * repeats)

    def half(design: Design, num_repeats: int) -> float:
        more = rest - repeat_variance / repeats + repeat_variance / num_repeats
        return _NORMAL * math.sqrt(predicted_variance({**variances, REST: more}, design))

    found = []
    for what in ("problems", "answers", "judges", "wordings", "repeats"):
        now = repeats if what == "repeats" else getattr(design, what)
        if what == "judges" and variances["judge"] is None and design.judges == 1:
            found.append(Need(what, now, None))
            continue
        if what == "wordings" and variances["wording"] is None and design.wordings == 1:
            found.append(Need(what, now, None))
            continue

        def with_number(number: int, what: str = what) -> float:
            if what == "repeats":
                return half(design, number)
            return half(replace(design, **{what: number}), repeats)

        found.append(Need(what, now, _least(with_number, half_width)))
    return found


def _least(half, half_width: float) -> int | None:  # type: ignore[no-untyped-def]
    """Return the least number that is enough; None if none up to the most is."""
    if half(_MOST) > half_width:
        return None
    low, high = 0, _MOST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if half(middle) <= half_width else (middle, high)
    return high
