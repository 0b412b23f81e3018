"""A plan packed for workers, with the tokens of each segment only once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from treegen.common.params import SamplingParams
from treegen.prompts.plan.plan import Plan

_NONE = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """A plan without prompts, which its segments contain, and sampling parameters.

    plan: the plan, with requests without tokens.
    params: the distinct sampling parameters.
    params_of: index into `params` for each request.
    """

    plan: Plan
    params: tuple[SamplingParams, ...]
    params_of: tuple[int, ...]

    @staticmethod
    def of(plan: Plan, params: Sequence[SamplingParams]) -> PackedPlan:
        """Pack a plan and the sampling parameters of each of its requests."""
        sets = {each.drawing: each for each in params}
        places = {drawing: index for index, drawing in enumerate(sets)}
        requests = tuple(replace(request, tokens=_NONE) for request in plan.requests)
        # Copies, because pickling a view would include the whole prompt.
        segments = tuple(replace(s, tokens=s.tokens.copy()) for s in plan.segments)
        packed = replace(plan, requests=requests, segments=segments)
        return PackedPlan(
            packed, tuple(sets.values()), tuple(places[each.drawing] for each in params)
        )

    def unpack(self) -> tuple[Plan, list[SamplingParams]]:
        """Return the original plan, and the sampling parameters of each request."""
        plan = self.plan
        requests = []
        for place, request in enumerate(plan.requests):
            parts = [segment.tokens for segment in plan.path(place)]
            requests.append(replace(request, tokens=np.concatenate(parts[::-1])))
        return replace(plan, requests=tuple(requests)), [self.params[i] for i in self.params_of]
