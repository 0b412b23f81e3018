"""Passes in which a row's bits do not depend on the other rows, for all of a model but attention.

Attention uses `impl="invariant"`. All other operations treat rows separately, but their kernels may
sum in another order when there are few or many rows. Therefore matrix products do not split their
sums, no pass has few rows, and layers are compiled for one fixed number of rows.
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
from treegen.errors import InputError, arg
from treegen.model.batch import Batch
from treegen.model.linear.blas import require_cublaslt
from treegen.model.linear.experts import GroupedExperts
from treegen.ops.attention import HostLevel, prepare_host
from treegen.ops.cache.pool import LayerKV

IMPL: Final = "invariant"
ALIGN: Final = 16
"""Attention parts begin at multiples of this many positions, which one matrix product sums."""
_MIN_ROWS: Final = 64  # products of fewer rows are no faster, and some are much slower
_COMPILED_ROWS: Final = 1024


RECURRENT_IN_TRANSFORMERS: Final = "its recurrent layers run on transformers' code"
"""The reason why a model with recurrent layers is not compiled and not reproducible."""


def check_reproducible(device: torch.device, impl: str, page_size: int) -> None:
    """Check that attention can be computed reproducibly.

    Args:
        device: The device of the model.
        impl: The attention implementation; on a GPU "auto" or "invariant".
        page_size: Tokens per page; on a GPU a multiple of `ALIGN`.

    Raises:
        InputError: the bits of a row would depend on other rows.
    """
    if device.type != "cuda":
        return
    if impl not in ("auto", IMPL):
        raise InputError(
            f"reproducible requires impl {IMPL!r}, got {impl!r}; remove one of the two arguments"
        )
    if page_size % ALIGN:
        raise InputError(
            f"reproducible requires {arg('page_size')} to be a multiple of {ALIGN}, got {page_size}"
        )


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Check that the type of the weights allows reproducible passes.

    Raises:
        InputError: the bits of a row would depend on other rows.
    """
    # Small softmax weights have fewer digits in float16. On a CPU, only float32 sums have been
    # shown to give the same samples.
    allowed = (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,)
    if dtype not in allowed:
        names = " or ".join(str(allowed_dtype).removeprefix("torch.") for allowed_dtype in allowed)
        raise InputError(
            f"reproducible on {device.type} requires the dtype {names}, got "
            f"{str(dtype).removeprefix('torch.')}; set {arg('dtype=')}"
        )


def reproducible_spec(spec: ModelSpec, device: torch.device) -> ModelSpec:
    """Return the model's shape with states that allow reproducible passes.

    On a GPU each row gets a recurrent state of its own, because reading a shared state and an
    update list sums in another order.

    Raises:
        InputError: the bits of a row would depend on other rows.
    """
    if device.type == "cuda" and any(layer.latent is not None for layer in spec.layers):
        raise InputError(
            f"reproducible does not support {spec.name} ({spec.model_type}) on a GPU, because "
            "the products of queries and latents depend on other rows; remove reproducible"
        )
    return replace(spec, delta=None) if device.type == "cuda" else spec


def check_recurrence(module: nn.Module, spec: ModelSpec, by_operators: bool) -> None:
    """Check that recurrent layers compute every token by itself, with treegen's own operators.

    Args:
        module: The transformers model.
        spec: Its shape.
        by_operators: Whether its recurrent layers run on treegen's operators.

    Raises:
        InputError: they do not, or their time steps have limits.
    """
    about = f"reproducible does not support {spec.name} ({spec.model_type}) on a GPU: "
    if spec.states and not by_operators:
        raise InputError(f"{about}{RECURRENT_IN_TRANSFORMERS}; remove reproducible")
    for part in module.modules():
        dt_min, dt_max = getattr(part, "time_step_limit", (0.0, float("inf")))
        if spec.states and (dt_min > 0 or dt_max < float("inf")):
            raise InputError(
                f"{about}its time steps have limits that do not apply to single tokens; remove "
                "reproducible"
            )


def check_experts(module: nn.Module, spec: ModelSpec) -> None:
    """Check that experts are computed by treegen's own kernels, whose sums have a fixed order.

    Raises:
        InputError: a layer has experts that are computed in another way.
    """
    for name, part in module.named_modules():
        if name.rpartition(".")[2] == "experts" and not isinstance(part, GroupedExperts):
            raise InputError(
                f"reproducible does not support {spec.name} ({spec.model_type}) on a GPU, "
                f"because its experts ({name}) are not batch-invariant; remove reproducible"
            )


def disable_split_k() -> None:
    """Prevent matrix products of this process from splitting the sums of a row.

    Only cuBLASLt has a setting for this.
    """
    require_cublaslt()
    # The second value of each pair decides whether sums may be split.
    for name in (
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_reduced_precision_reduction",
    ):
        setattr(torch.backends.cuda.matmul, name, (False, False))


def compiler_options() -> dict[str, bool]:
    """Return options of `torch.compile` that prevent choosing kernels by timing them.

    Reduction kernels may sum in other orders, and even among other kernels one may round a product
    and a sum once and another twice. The options are passed with each compiled layer, because
    process-wide settings do not last: whenever dynamo traces a frame, it restores
    `torch.use_deterministic_algorithms`, which also sets Inductor's `deterministic`. Layers
    compiled without the options are cached separately.
    """
    settings = torch._inductor.config.get_config_copy()
    options = {"deterministic": True, "triton.autotune_pointwise": False}
    return {name: value for name, value in options.items() if name in settings}


def pad_batch(batch: Batch) -> Batch:
    """Pad a batch that has few rows with spare rows, which write to the padding page.

    Recurrent layers of the batch compute one token at a time.
    """
    padding = max(_MIN_ROWS - len(batch.tokens_T), 0)
    if batch.states is not None:
        batch = replace(batch, states=batch.states.with_rows(padding))
    if not padding:
        return batch

    def pad_rows(tensor_T: Tensor) -> Tensor:
        return torch.nn.functional.pad(tensor_T, (0, padding))

    positions_T = pad_rows(batch.positions_T)
    levels = batch.levels
    if levels.positions_T is not None:
        levels = replace(levels, positions_T=positions_T)
    rotary_AT = batch.rotary_AT
    return replace(
        batch,
        tokens_T=pad_rows(batch.tokens_T),
        positions_T=positions_T,
        slots_T=pad_rows(batch.slots_T),
        levels=levels,
        rotary_AT=None if rotary_AT is None else pad_rows(rotary_AT),
    )


def build_warmup_batch(layers: Sequence[LayerKV], device: torch.device, impl: str = IMPL) -> Batch:
    """Build a pass over the padding page only, so that the compiler sees a typical number of rows.

    Args:
        layers: The page pool of each attention layer.
        device: The device of the pools.
        impl: The attention implementation.
    """
    zeros_T = torch.zeros(_COMPILED_ROWS, dtype=torch.int64, device=device)
    one, none = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    level = HostLevel(none, one * _COMPILED_ROWS, none[:, None], one, none, causal=False)
    return Batch(
        zeros_T,
        zeros_T,
        zeros_T,
        zeros_T[:_MIN_ROWS],
        prepare_host([level], zeros_T, device, impl),
        layers,
    )
