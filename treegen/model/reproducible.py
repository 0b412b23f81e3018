"""Passes whose bits for a row do not depend on the rows beside it: all of a model but attention.

Attention is `impl="invariant"`. The rest of a layer is computed for each row apart, but by kernels
that may sum in another order where rows are few, or many. So products do not split their sums, no
pass has few rows, and layers are compiled for one number of rows whatever the first pass is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch
import torch._inductor.config
from torch import Tensor, nn

from treegen.common.spec import ModelSpec
from treegen.errors import InputError
from treegen.model.batch import Batch
from treegen.model.linear.experts import GroupedExperts
from treegen.ops.attention import HostLevel, prepare_host
from treegen.ops.cache.pool import LayerKV

IMPL: Final = "invariant"
ALIGN: Final = 16
"""Attention parts begin at multiples of so many positions: what one matrix product sums at once."""
_LEAST_ROWS: Final = 64  # products of fewer rows are no faster, and some are much slower
_COMPILED_ROWS: Final = 1024


def check_reproducible(device: torch.device, impl: str, page_size: int) -> None:
    """Check how attention is computed.

    Raises:
        InputError: bits of a row would depend on other rows.
    """
    if device.type != "cuda":
        return
    if impl not in ("auto", IMPL):
        raise InputError(
            f"reproducible computes attention with impl {IMPL!r}, but impl is {impl!r}; leave one "
            "of them out"
        )
    if page_size % ALIGN:
        raise InputError(
            f"reproducible needs a page_size that is a multiple of {ALIGN}, got {page_size}"
        )


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Check the type of the weights.

    Raises:
        InputError: bits of a row would depend on other rows.
    """
    # Weights of a softmax that are small have fewer digits in float16. On a CPU, so far only sums
    # in float32 were shown to give the same samples.
    allowed = (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,)
    if dtype not in allowed:
        names = " or ".join(str(each).removeprefix("torch.") for each in allowed)
        raise InputError(
            f"reproducible on {device.type} takes {names}, and the model's dtype is "
            f"{str(dtype).removeprefix('torch.')}; give dtype= (--dtype)"
        )


def reproducible_spec(spec: ModelSpec, device: torch.device) -> ModelSpec:
    """How a model keeps what it computes if a row's bits do not depend on others.

    Rows have recurrent states of their own: what they read from a shared one and a list is summed
    up in another order.

    Raises:
        InputError: bits of a row would depend on other rows.
    """
    if device.type == "cuda" and any(layer.latent is not None for layer in spec.layers):
        raise InputError(
            f"reproducible does not take {spec.name} ({spec.model_type}) on a GPU: how queries are "
            "multiplied to meet latents depends on the other rows; leave it out"
        )
    return replace(spec, delta=None) if device.type == "cuda" else spec


def check_recurrence(module: nn.Module, spec: ModelSpec, by_operators: bool) -> None:
    """Check that recurrent layers compute every token by itself, by treegen's own operators.

    Raises:
        InputError: they do not.
    """
    about = f"reproducible does not take {spec.name} ({spec.model_type}) on a GPU: "
    if spec.states and not by_operators:
        raise InputError(f"{about}its recurrent layers are transformers' own; leave it out")
    for part in module.modules():
        least, most = getattr(part, "time_step_limit", (0.0, float("inf")))
        if spec.states and (least > 0 or most < float("inf")):
            raise InputError(
                f"{about}its time steps have limits, which a single token does not heed; leave it "
                "out"
            )


def check_experts(module: nn.Module, spec: ModelSpec) -> None:
    """Check that experts are computed by treegen's own kernels, whose sums have one order.

    Raises:
        InputError: a layer has experts that are computed in another way.
    """
    for name, part in module.named_modules():
        if name.rpartition(".")[2] == "experts" and not isinstance(part, GroupedExperts):
            raise InputError(
                f"reproducible does not take {spec.name} ({spec.model_type}) on a GPU: what its "
                f"experts ({name}) compute for a row depends on the other rows; leave it out"
            )


def disable_split_k() -> None:
    """Let matrix products of this process not split the sums of a row, whatever the rows.

    cuBLASLt can be told so.
    """
    torch.backends.cuda.preferred_blas_library("cublaslt")
    # Of each pair, the second is whether sums may be split.
    for name in (
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_reduced_precision_reduction",
    ):
        setattr(torch.backends.cuda.matmul, name, (False, False))


def compiler_options() -> dict[str, bool]:
    """Options of `torch.compile` with which kernels are not chosen by timing them.

    Kernels that sum may do so in other orders, and even of those that do not, one may round a
    product and a sum once and another twice. The options go with each compiled layer, as what is
    set for the process does not last: whenever dynamo traces a frame, it restores
    `torch.use_deterministic_algorithms`, which sets Inductor's `deterministic` too. Layers compiled
    without the options are not taken for these either.
    """
    known = torch._inductor.config.get_config_copy()
    wanted = {"deterministic": True, "triton.autotune_pointwise": False}
    return {name: value for name, value in wanted.items() if name in known}


def pad_batch(batch: Batch) -> Batch:
    """The same batch with rows to spare, which write to the padding page, if it has few.

    Its recurrent layers compute a token at a time.
    """
    missing = max(_LEAST_ROWS - len(batch.tokens_T), 0)
    if batch.states is not None:
        batch = replace(batch, states=batch.states.with_rows(missing))
    if not missing:
        return batch

    def longer(tensor_T: Tensor) -> Tensor:
        return torch.nn.functional.pad(tensor_T, (0, missing))

    positions_T = longer(batch.positions_T)
    levels = batch.levels
    if levels.positions_T is not None:
        levels = replace(levels, positions_T=positions_T)
    rotary_AT = batch.rotary_AT
    return replace(
        batch,
        tokens_T=longer(batch.tokens_T),
        positions_T=positions_T,
        slots_T=longer(batch.slots_T),
        levels=levels,
        rotary_AT=None if rotary_AT is None else longer(rotary_AT),
    )


def build_warmup_batch(layers: Sequence[LayerKV], device: torch.device, impl: str = IMPL) -> Batch:
    """A pass over nothing but the padding page, for the compiler to see a usual number of rows."""
    zeros_T = torch.zeros(_COMPILED_ROWS, dtype=torch.int64, device=device)
    one, none = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    level = HostLevel(none, one * _COMPILED_ROWS, none[:, None], one, none, causal=False)
    return Batch(
        zeros_T,
        zeros_T,
        zeros_T,
        zeros_T[:_LEAST_ROWS],
        prepare_host([level], zeros_T, device, impl),
        layers,
    )
