"""Confidence of samples, and ending unconfident samples early (DeepConf).

The method is Fu et al. 2025, "Deep Think with Confidence". The confidence of a token is minus the
mean log-probability of the most likely tokens at its position. Low confidence over a group of
consecutive tokens marks samples that are often wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from treegen.common.checks import check_argument_types, check_int, checked_class
from treegen.errors import InputError, arg

STOPPED: Final = "confidence"
"""The finish reason of a sample that ended because its confidence fell below the floor."""
CONFIDENCES: Final = frozenset(("confidence", "lowest", "bottom", "tail"))
"""The names of the numbers of `summary` in votes; "confidence" is `mean` in `summary`."""
_SLACK: Final = 1e-4  # share by which the floor is lowered
_BOTTOM_SHARE: Final = 0.1  # share of the groups, the least confident, that `bottom` averages


@checked_class
@dataclass(frozen=True, slots=True, kw_only=True)
class Confidence:
    """Settings of the confidence of samples: how it is measured, and which samples it ends.

    Without `keep`, all samples are drawn, and votes may choose and weight them by confidence. With
    `keep`, the first samples of a problem are drawn to their end and set a floor. A later sample
    whose group confidence falls below the floor ends at once and has no vote.
    """

    top: int = 20
    """Number of most likely tokens whose log-probabilities give the confidence of a token."""
    window: int = 2048
    """Tokens of a group, and of the tail."""
    keep: float | None = None
    """Share of the samples to keep. A sample ends once the confidence of a group of its tokens is
    below the floor, which the least confident groups of this share of the warm-up samples reach. So
    0.1 keeps the most confident tenth, and 0.9 ends about a tenth. None ends none."""
    warmup: int = 16
    """Samples of each problem that are drawn first, to their end."""

    def __post_init__(self) -> None:
        for name in ("top", "window", "warmup"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InputError(f"{arg('confidence=')} {name} must be at least 1, got {value!r}")
        if self.keep is not None and not 0 < self.keep <= 1:
            raise InputError(
                f"{arg('confidence=')} keep must be a share above 0 and up to 1, got {self.keep!r}"
            )

    def floor(self, lowest: Sequence[float]) -> float:
        """Return the floor of a problem from its warm-up samples.

        Samples often begin alike, so later samples may have the very group that sets the floor,
        with other rounding errors from another batch. The floor is therefore a little lower than
        the quantile, so that these samples continue.

        Args:
            lowest: Confidence of the least confident group of each warm-up sample, as in `summary`.
        """
        assert self.keep is not None
        quantile = float(np.quantile(np.asarray(lowest, dtype=np.float64), 1 - self.keep))
        return quantile * (1 - _SLACK)


@check_argument_types
def group_confidences(confidences: Sequence[float], window: int) -> npt.NDArray[np.float64]:
    """Return the mean confidence of every group of consecutive tokens, ordered by its last token.

    A sample with fewer than `window` tokens is one group.
    """
    check_int("window", window, minimum=1)
    values = np.asarray(confidences, dtype=np.float64)
    if not len(values):
        return values
    window = min(window, len(values))
    sums = np.concatenate([[0.0], values.cumsum()])
    means: npt.NDArray[np.float64] = (sums[window:] - sums[:-window]) / window
    return means


@check_argument_types
def summary(confidences: Sequence[float], window: int) -> dict[str, float]:
    """Return the confidence numbers for the record of a sample.

    Returns:
        The confidences by name; empty if the sample has no token. `mean` is over all tokens,
        `lowest` of the least confident group, `bottom` the mean over the least confident tenth of
        the groups, and `tail` the mean over the last `window` tokens.
    """
    groups = group_confidences(confidences, window)
    if not len(groups):
        return {}
    num = max(1, int(len(groups) * _BOTTOM_SHARE))
    return {
        "mean": float(np.mean(np.asarray(confidences, dtype=np.float64))),
        "lowest": float(groups.min()),
        "bottom": float(np.sort(groups)[:num].mean()),
        "tail": float(groups[-1]),
    }


@check_argument_types
def stops_at(confidences: Sequence[float], window: int, floor: float) -> int | None:
    """Return after how many tokens a finished sample would end for a lack of confidence.

    Args:
        confidences: Confidence of each token of the sample.
        window: Tokens of a group.
        floor: The sample ends after the first group whose mean confidence is below this.

    Returns:
        The number of tokens; None if no group is below the floor, or if the first such group ends
        with the last token of the sample.
    """
    if len(confidences) < window:
        return None
    below = np.flatnonzero(group_confidences(confidences, window) < floor)
    if not len(below):
        return None
    at = int(below[0]) + window
    return at if at < len(confidences) else None
