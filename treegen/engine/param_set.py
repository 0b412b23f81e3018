"""Sampling parameters, with the biases and stop conditions that follow from them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from treegen.common.params import SamplingParams
from treegen.ops.sampling.batch import NO_END, Bias
from treegen.prompts.stops import StopConditions


@dataclass(frozen=True)
class ParamSet:
    """Sampling parameters that several requests share, and their stop conditions."""

    params: SamplingParams
    stopping: StopConditions

    @property
    def is_greedy(self) -> bool:
        """Whether all samples of a request are the same."""
        return self.params.temperature == 0

    @functools.cached_property
    def bias(self) -> Bias:
        """Biases and bans: from min_tokens, logit_bias, bad_words and allowed_token_ids."""
        least = self.params.min_tokens
        stops = [(token, -math.inf, least) for token in sorted(self.stopping.ids) if least]
        own = [(token, value, NO_END) for token, value in self.params.biases]
        token, value, until = zip(*stops, *own, strict=True) if stops or own else ((), (), ())
        allowed = self.params.allowed_token_ids
        return Bias(
            np.array(token, np.int64),
            np.array(value, np.float32),
            np.array(until, np.int64),
            self.stopping.bad_words,
            None if allowed is None else np.array(allowed, np.int64),
        )


def param_sets(
    params: Sequence[SamplingParams], stopping_of: Callable[[SamplingParams], StopConditions]
) -> tuple[list[ParamSet], list[int]]:
    """Return the distinct parameter sets of requests, and the index of each request's set.

    Args:
        params: Sampling parameters of each request. Without requests, one default set is returned.
        stopping_of: Returns the stop conditions of sampling parameters.
    """
    # Rows with equal parameters are drawn and ended together.
    sets = {each.drawing: each for each in params or [SamplingParams()]}
    place = {drawing: index for index, drawing in enumerate(sets)}
    found = [ParamSet(each, stopping_of(each)) for each in sets.values()]
    return found, [place[each.drawing] for each in params]
