"""How confident the model was in a sample, and which samples are worth their tokens (DeepConf).

Of Fu et al. 2025, "Deep Think with Confidence". The confidence of a token is minus the mean
log-probability of the likeliest tokens there. Low confidence over a group of consecutive tokens
marks samples that are often wrong.

Offline, all samples are drawn, the most confident ones vote, and they vote by their confidence.
Online, the first samples of a problem are whole and set a floor. A later sample whose group
confidence falls below the floor ends at once, and has no vote.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from treegen.common.checks import check_argument_types, check_int, checked_class
from treegen.errors import InputError

STOPPED: Final = "confidence"
"""The finish reason of a sample that ended for a lack of confidence."""
CONFIDENCES: Final = frozenset(("confidence", "lowest", "bottom", "tail"))
"""What votes call the numbers of `summary`; the first is `mean` there."""
_SLACK: Final = 1e-4
_LEAST_SHARE: Final = 0.1  # of the groups, the least confident ones that `bottom` is the mean of


@checked_class
@dataclass(frozen=True, slots=True, kw_only=True)
class Confidence:
    """What is told of the confidence of samples, and what is done about it.

    top: the likeliest tokens that the confidence of a token is of.
    window: tokens of a group, and of the tail.
    keep: end a sample once a group of its tokens is less confident than the least confident group
        of most warm-up samples: all but a share of `keep` of them. So 0.1 keeps the tenth that is
        most confident, and 0.9 ends about a tenth. None ends none.
    warmup: samples of each problem that are drawn first, whole.
    """

    top: int = 20
    window: int = 2048
    keep: float | None = None
    warmup: int = 16

    def __post_init__(self) -> None:
        for name in ("top", "window", "warmup"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InputError(f"confidence= {name} must be at least 1, got {value!r}")
        if self.keep is not None and not 0 < self.keep <= 1:
            raise InputError(
                f"confidence= keep must be a share above 0 and up to 1, got {self.keep!r}"
            )

    def floor(self, lowest: Sequence[float]) -> float:
        """Return the floor of a problem. lowest: of its warm-up samples, as in `summary`.

        Samples often begin alike. So the group that sets the floor may be one that later samples
        have too, rounded otherwise in another batch. The floor is a little lower, and they go on.
        """
        assert self.keep is not None
        quantile = float(np.quantile(np.asarray(lowest, dtype=np.float64), 1 - self.keep))
        return quantile * (1 - _SLACK)


@check_argument_types
def group_confidences(confidences: Sequence[float], window: int) -> npt.NDArray[np.float64]:
    """Return the mean of every group of consecutive tokens, by the place where it ends.

    A sample that is shorter than a group is one group.
    """
    check_int("window", window, least=1)
    values = np.asarray(confidences, dtype=np.float64)
    if not len(values):
        return values
    window = min(window, len(values))
    sums = np.concatenate([[0.0], values.cumsum()])
    means: npt.NDArray[np.float64] = (sums[window:] - sums[:-window]) / window
    return means


@check_argument_types
def summary(confidences: Sequence[float], window: int) -> dict[str, float]:
    """Return what a sample's record says of its confidence; empty if it has no token.

    mean: over all its tokens.
    lowest: of its least confident group.
    bottom: over the tenth of its groups that are least confident.
    tail: over its last `window` tokens.
    """
    groups = group_confidences(confidences, window)
    if not len(groups):
        return {}
    num = max(1, int(len(groups) * _LEAST_SHARE))
    return {
        "mean": float(np.mean(np.asarray(confidences, dtype=np.float64))),
        "lowest": float(groups.min()),
        "bottom": float(np.sort(groups)[:num].mean()),
        "tail": float(groups[-1]),
    }


@check_argument_types
def stops_at(confidences: Sequence[float], window: int, floor: float) -> int | None:
    """Return after how many tokens a whole sample ends for a lack of confidence; None if never.

    It does not end there if it is over at that token anyway.
    """
    if len(confidences) < window:
        return None
    below = np.flatnonzero(group_confidences(confidences, window) < floor)
    if not len(below):
        return None
    at = int(below[0]) + window
    return at if at < len(confidences) else None
