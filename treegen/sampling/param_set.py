"""Sampling parameters, and where samples that are drawn with them end."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Tokens = Sequence[int] | NDArray[np.int32] | NDArray[np.int64]
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from treegen.params import SamplingParams
from treegen.sampling.draw import NEVER, Bias

if TYPE_CHECKING:
    pass
from treegen.prompts.stops import Stopping


@dataclass(frozen=True)
class ParamSet:
    """Sampling parameters that requests may have, and when they end a sample."""

    params: SamplingParams
    stopping: Stopping

    @property
    def is_greedy(self) -> bool:
        """Whether all samples of a request are the same."""
        return self.params.temperature == 0

    @functools.cached_property
    def bias(self) -> Bias:
        """What is added to logits before a draw."""
        least = self.params.min_tokens
        stops = [(token, -math.inf, least) for token in sorted(self.stopping.ids) if least]
        own = [(token, value, NEVER) for token, value in self.params.biases]
        token, value, until = zip(*stops, *own, strict=True) if stops or own else ((), (), ())
        return Bias(
            np.array(token, np.int64), np.array(value, np.float32), np.array(until, np.int64)
        )
