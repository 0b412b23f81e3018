"""The properties of a model that plans depend on, whether it is loaded or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from treegen.common.spec import ModelSpec
from treegen.model.options import EngineOptions
from treegen.prompts.images.table import ImageTable
from treegen.prompts.plan.plan import Plan, Request
from treegen.prompts.plan.requests import plan_requests


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model's shape, tokenizer and cache size."""

    engine: EngineOptions
    """The options from which the other values follow."""
    spec: ModelSpec
    """The model's shape."""
    tokenizer: Any
    """Its tokenizer."""
    images: ImageTable | None
    """The images of prompts; None if the model takes none."""
    dtype: str
    """The name of the type to compute in, such as "bfloat16"."""
    device_type: str
    """"cpu" or "cuda"."""
    max_rows: int
    """Maximum rows decoded at once."""
    page_size: int
    """Tokens per cache page."""
    memory: int | None
    """Bytes of the cache; None if they are known only once the model is loaded, as with the free
    memory of a GPU."""
    num_pages: int | None
    """Pages of the cache; None if not known, as for `memory`."""
    num_states: int | None
    """Slots for recurrent states; None if not known, or without recurrent layers."""
    align: int = 1
    """Attention parts begin at multiples of this many positions."""
    quantization: str | None = None
    """Type in which matrices are multiplied, such as "fp8"; None for `dtype`."""

    def plan(self, requests: Sequence[Request]) -> Plan:
        """Return the plan of requests; raise CacheFullError if one of them can never fit."""
        plan = self.plan_unchecked(requests)
        if self.num_pages is not None:
            plan.check_fits(self.num_pages, self.page_size, self.num_states)
        return plan

    def plans_like(self, other: ModelInfo) -> bool:
        """Return whether both models give equal plans of the same requests."""
        first, second = (
            (
                replace(info.spec, eos_token_ids=()),
                info.device_type,
                info.engine.sharing,
                info.max_rows,
                info.align,
            )
            for info in (self, other)
        )
        return first == second

    def plan_unchecked(self, requests: Sequence[Request]) -> Plan:
        """Return the plan of requests without checking that it fits."""
        return plan_requests(
            requests,
            self.spec,
            device_type=self.device_type,
            sharing=self.engine.sharing,
            max_rows=self.max_rows,
            align=self.align,
        )
