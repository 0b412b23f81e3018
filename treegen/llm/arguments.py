"""Unknown arguments of calls: they raise InputError with a hint, instead of a TypeError."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final, TypeVar, cast

from treegen.common.params import SamplingParams
from treegen.common.spelling import FOREIGN, hint_at
from treegen.errors import InputError

_OURS: Final = {
    "sampling_params": "params",
    "generation_config": "params",
    "inputs": "prompts",
    "prompt_token_ids": "prompts",
    "use_tqdm": "progress",
}
"""Arguments of vLLM's and transformers' `generate` that have another name here."""
_ELSEWHERE: Final = {
    "lora_request": "load the adapter with LLM(model, adapter=DIR)",
    "attention_mask": "leave it out: prompts need no padding",
    "pad_token_id": "leave it out: prompts need no padding",
}
_SAMPLING: Final = frozenset(field.name for field in fields(SamplingParams))

_Call = TypeVar("_Call", bound=Callable[..., Any])


def reject_unknown_arguments(call: _Call) -> _Call:
    """Make a method raise InputError with a hint for an argument that it does not have."""
    _, *known = inspect.signature(call).parameters

    @functools.wraps(call)
    def call_checked(self: object, *args: Any, **given: Any) -> Any:
        for name in given:
            if name not in known:
                raise InputError(
                    f"{call.__name__} has no {name!r}{_hint(name, given[name], known)}"
                )
        return call(self, *args, **given)

    return cast(_Call, call_checked)


def _hint(name: str, value: Any, known: list[str]) -> str:
    if name in _ELSEWHERE:
        return f"; {_ELSEWHERE[name]}"
    if _OURS.get(name) in known:
        return f"; did you mean {_OURS[name]}=?"
    ours = FOREIGN.get(name, name)
    if ours in _SAMPLING and "params" in known:
        return f"; give params=SamplingParams({ours}={value!r:.40})"
    return hint_at(name, known) or f"; it has {', '.join(known)}"
