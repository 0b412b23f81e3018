"""What is known of a model that samples, loaded or not: what work with it is planned by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treegen.common.spec import ModelSpec
from treegen.model.options import EngineOptions
from treegen.prompts.plan.plan import Plan, Request
from treegen.prompts.plan.requests import plan_requests


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model's shape, tokenizer and cache size.

    engine: the options that the rest follows from.
    spec: the model's shape.
    tokenizer: its tokenizer.
    dtype: the name of the type to compute in, such as "bfloat16".
    device_type: "cpu" or "cuda".
    max_rows: most rows to decode at once.
    page_size: tokens of a cache page.
    memory: bytes of the cache. num_pages: its pages. Both are None if only the loaded model can
    tell, as with a GPU's free memory.
    num_states: its slots for recurrent states; None likewise, and for a model without any.
    align: attention parts begin at multiples of so many positions.
    quantization: how its matrices are computed, such as "fp8"; None for as dtype says.
    """

    engine: EngineOptions
    spec: ModelSpec
    tokenizer: Any
    dtype: str
    device_type: str
    max_rows: int
    page_size: int
    memory: int | None
    num_pages: int | None
    num_states: int | None
    align: int = 1
    quantization: str | None = None

    def plan(self, requests: Sequence[Request]) -> Plan:
        """Return the plan of requests; raise CacheFullError for one that can never fit."""
        plan = self.plan_unchecked(requests)
        if self.num_pages is not None:
            plan.check_fits(self.num_pages, self.page_size, self.num_states)
        return plan

    def plan_unchecked(self, requests: Sequence[Request]) -> Plan:
        """Return the plan of requests, whether it fits or not."""
        return plan_requests(
            requests,
            self.spec,
            device_type=self.device_type,
            sharing=self.engine.sharing,
            max_rows=self.max_rows,
            align=self.align,
        )
