"""Read the weights of a checkpoint into a module of transformers, ready for inference.

Weights are converted on the way: adapters are merged, quantized weights are expanded or kept, and a
tensor-parallel model is divided. `LoadPlan` has the decisions, which need no weights.
"""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import GgufConfig, PretrainedConfig, PreTrainedModel

from treegen.common.formatting import format_bytes
from treegen.common.spec import ModelSpec
from treegen.errors import ModelError, ModelWarning
from treegen.model.attention_hook import ATTENTION
from treegen.model.checkpoint.adapter import Adapter, merge
from treegen.model.checkpoint.dequantization import dequantize_packed_on_load
from treegen.model.checkpoint.files import fingerprint, weight_files
from treegen.model.checkpoint.gguf_file import gguf_arguments, is_gguf, read_header
from treegen.model.checkpoint.load_report import (
    check_complete,
    loading_error,
    quiet_loading,
    warn_unused,
)
from treegen.model.checkpoint.quantization import (
    QuantizationInfo,
    check_fp4,
    configure_dequantization,
    unused_names,
)
from treegen.model.checkpoint.text_part import attention_of_text, auto_class, drop_parts
from treegen.model.indexer import adapt_attention
from treegen.model.linear.fp4_checkpoint import (
    KeptMatrices,
    keep_on_load,
    kept_in_4_bits,
    num_in_experts,
)
from treegen.model.linear.fp8 import can_multiply
from treegen.model.linear.fp8_checkpoint import RestoreReport, fp8_tensors, restore_fp8
from treegen.model.linear.fp8_experts import quantize_matrices
from treegen.model.memory import empty_device_cache
from treegen.model.parallel.ranks import Ranks
from treegen.model.parallel.shards import shard, tie_head

_kept_bases: list[dict[Hashable, PreTrainedModel]] = []
"""For each open `share_base_weights`, the last base model, by what identifies its weights."""


@contextmanager
def share_base_weights() -> Iterator[None]:
    """While open, read the base weights of models with adapters only once.

    The host keeps one copy of the weights in 16 or 32 bits. Each model gets tensors of its own.
    """
    _kept_bases.append({})
    try:
        yield
    finally:
        _kept_bases.pop()


def _load_base(key: Hashable, read: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Return a separate copy of the module that `read` loads.

    Args:
        key: Identifies the weights. Other weights replace the ones that are kept; None keeps
            nothing.
        read: Loads the module from its checkpoint.
    """
    if not _kept_bases or key is None:
        return read()
    kept = _kept_bases[-1]
    if key not in kept:
        kept.clear()  # free the memory of another base before this one is read
        kept[key] = read()
    return copy.deepcopy(kept[key])


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """All that decides how weights are loaded."""

    directory: Path
    """The directory or GGUF file of the checkpoint."""
    config: PretrainedConfig
    """Its configuration."""
    spec: ModelSpec
    """The shape of the model, with the parts that text never reaches."""
    dtype: torch.dtype
    """The type to compute in."""
    device: torch.device
    """The device of the weights."""
    stored: QuantizationInfo | None
    """How the weights are quantized; None if they are not."""
    quantization: str | None
    """As in `load_model`."""
    adapter: Adapter | None
    """The adapter to merge; None for none."""
    images: bool
    """Whether the model takes images too."""
    ranks: Ranks | None
    """As in `load_model`."""
    trust_remote_code: bool
    """As in `load_model`."""

    @property
    def is_first_rank(self) -> bool:
        """Whether this process has rank 0, or computes the model alone."""
        return self.ranks is None or self.ranks.rank == 0

    @property
    def dropped(self) -> tuple[str, ...]:
        """Names of the parts that are removed. Rank 0 reads images, if any rank does."""
        return () if self.images and self.is_first_rank else self.spec.unreached

    @property
    def towers(self) -> tuple[str, ...]:
        """Names of the parts that read images; rank 0 keeps them whole."""
        return self.spec.unreached if self.images else ()

    @property
    def keeps_fp8(self) -> bool:
        """Whether matrices stay in FP8. An adapter and other ranks need expanded ones."""
        stays = stays_fp8(self.stored, self.quantization, self.device)
        return stays and self.ranks is None and self.adapter is None

    @property
    def four_bits(self) -> str:
        """The format in 4 bits in which weights stay, "mxfp4" or "nvfp4"; empty if in none.

        An adapter and other ranks need expanded weights.
        """
        form = kept_in_4_bits(
            self.config,
            self.spec.num_in_linears,
            self.stored,
            self.quantization,
            self.device,
            self.dtype,
        )
        return form if self.ranks is None and self.adapter is None else ""


def load_weights(plan: LoadPlan) -> PreTrainedModel:
    """Return the module of transformers with every weight read from the checkpoint.

    Args:
        plan: The decisions.

    Raises:
        InputError: quantization is a format in 4 bits that the checkpoint does not store.
        ModelError: the weights do not fit the configuration or the device, or cannot be read.
    """
    directory, stored = plan.directory, plan.stored
    keeps_fp8, four_bits = plan.keeps_fp8, plan.four_bits
    from_gguf = is_gguf(directory)
    if stored is None and not from_gguf:
        _check_scales_described(directory)
    key = None
    if plan.adapter is not None:
        key = (directory, fingerprint(directory), plan.dtype, plan.images)
    matrices = check_fp4(directory, plan.config) if stored is not None and stored.is_fp4 else None
    kept_matrices = KeptMatrices() if four_bits == "nvfp4" else None
    module = _load_base(key, lambda: _read_checkpoint(plan, four_bits == "mxfp4", kept_matrices))
    prepare(module)
    if plan.dtype == torch.float32 or stored is not None or from_gguf:
        _cast(module, plan.dtype)
    if plan.adapter is not None:
        merge(module, plan.adapter, plan.dropped)
    expanded_bytes = _sum_bytes(module)
    if plan.ranks is not None:
        shard(module, plan.ranks.rank, plan.ranks.size, plan.towers)
    if plan.device.type == "cuda":
        empty_device_cache(plan.device)
    restored = _move_to_device(module, plan, keeps_fp8, kept_matrices)
    if from_gguf and not (header := read_header(directory)).is_plain:
        stored = QuantizationInfo("gguf", f"{header.stores} (GGUF)")
    if four_bits:
        numbers = num_in_experts(plan.config) if kept_matrices is None else kept_matrices.numbers
        line = "" if plan.quantization else _describe_kept(plan, four_bits, numbers, module)
        if kept_matrices is not None:
            expanded = kept_matrices.describe_expanded(matrices, restored.count if restored else 0)
            line = "; ".join(filter(None, (line, expanded)))
        if line:
            warnings.warn(f"{plan.spec.name}: {line}", ModelWarning, stacklevel=1)
    elif stored is not None and plan.is_first_rank:
        if restored is not None:
            expanded_bytes = _sum_bytes(module)
        file_bytes = sum(file.stat().st_size for file in weight_files(directory))
        _warn_converted(plan, stored, restored, (file_bytes, expanded_bytes))
    return module


def _read_checkpoint(
    plan: LoadPlan, keeps_mxfp4: bool, kept_matrices: KeptMatrices | None
) -> PreTrainedModel:
    """Return the module as transformers loads it, without the parts that are dropped.

    Args:
        plan: How the weights are loaded.
        keeps_mxfp4: Whether experts stay in MXFP4.
        kept_matrices: Takes the matrices that stay in NVFP4; None if all are expanded.
    """
    directory, stored = plan.directory, plan.stored
    config = copy.deepcopy(plan.config)  # loading writes into it
    gguf = gguf_arguments(directory)
    if gguf:
        gguf["quantization_config"] = GgufConfig(dequantize=True)
    key_mapping = {}
    if keeps_mxfp4:
        keep_on_load(config)
    elif stored is not None and stored.packing is not None:
        dequantize_packed_on_load(config, stored.packing, kept_matrices)
    elif stored is not None:
        key_mapping = configure_dequantization(config, stored)
    # transformers does not control GGUF's progress bars.
    bars = contextlib.redirect_stderr(io.StringIO()) if gguf else contextlib.nullcontext()
    with quiet_loading() as report_lines, bars:
        try:
            loaded, info = auto_class(config, images=plan.images).from_pretrained(
                directory.parent if gguf else directory,
                config=config,
                dtype=plan.dtype,
                attn_implementation=attention_of_text(config, ATTENTION),
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=plan.trust_remote_code,
                key_mapping=key_mapping or None,
                # check_complete refuses them below, with names and shapes.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **gguf,
            )
        except Exception as error:
            raise loading_error(directory, error, report_lines) from None
    check_complete(directory, info)
    warn_unused(directory, unused_names(info["unexpected_keys"], stored))
    module: PreTrainedModel = loaded
    drop_parts(module, plan.dropped)
    return module


def _move_to_device(
    module: PreTrainedModel, plan: LoadPlan, keeps_fp8: bool, kept_matrices: KeptMatrices | None
) -> RestoreReport | None:
    """Move weights to the device of the plan, and quantize them there.

    Args:
        module: The module, which is changed.
        plan: How the weights are loaded.
        keeps_fp8: Whether FP8 matrices are put back.
        kept_matrices: The matrices that stay in NVFP4; None if all were expanded.

    Returns:
        The FP8 matrices that were put back; None if all weights were expanded.

    Raises:
        ModelError: the weights take more memory than is free.
    """
    device = plan.device
    try:
        # Quantize matrix by matrix, so that the weights need not fit before they are quantized.
        if kept_matrices is not None:
            kept_matrices.install(module, device)
        restored = restore_fp8(module, plan.directory, device) if keeps_fp8 else None
        if plan.quantization == "fp8":
            quantize_matrices(module, device)
        module.to(device)
        if plan.ranks is not None:
            tie_head(module, plan.ranks.rank, plan.ranks.size)
        return restored
    except torch.cuda.OutOfMemoryError:
        size = _sum_bytes(module)
    raise ModelError(
        f"the weights require {size / 2**30:.1f} GiB, which exceeds the free memory of "
        f"{device}; use another device or a smaller dtype"
    )


def _sum_bytes(module: PreTrainedModel) -> int:
    """Return the bytes of a module's weights."""
    return sum(weight.nbytes for weight in module.parameters())


def _cast(module: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast weights to the type to compute in, except those that the family keeps in float32.

    Next to quantized weights, transformers leaves other weights in the type of the file.
    """
    float32_names = {*(module._keep_in_fp32_modules_strict or ())}
    if dtype == torch.float16:
        float32_names |= {*(module._keep_in_fp32_modules or ())}
    for name, weight in module.named_parameters():
        if weight.is_floating_point() and not any(part in name for part in float32_names):
            weight.data = weight.data.to(dtype)


def _describe_kept(plan: LoadPlan, form: str, numbers: int, module: PreTrainedModel) -> str:
    """Return a line about weights that stay in 4 bits because expanded ones take much memory.

    Args:
        plan: How the weights were loaded.
        form: Their format.
        numbers: How many numbers are in 4 bits.
        module: The loaded module.
    """
    size = _sum_bytes(module)
    four_bits = sum(weight.numel() for weight in module.parameters() if weight.dtype == torch.uint8)
    wide = size - four_bits + numbers * plan.dtype.itemsize
    return (
        f"weights stay in {form.upper()} ({format_bytes(size)} instead of "
        f"{format_bytes(wide)}), because dequantized weights would use more than half of "
        f"{plan.device}; set quantization to none to dequantize the weights"
    )


def _warn_converted(
    plan: LoadPlan, stored: QuantizationInfo, restored: RestoreReport | None, sizes: tuple[int, int]
) -> None:
    """Warn, in one line, about weights that are not computed as they are stored.

    Args:
        plan: How the weights were loaded.
        stored: How the weights are stored.
        restored: The FP8 matrices that were put back; None if all weights were expanded.
        sizes: Bytes of the files, and of the weights if all are expanded.
    """
    kind = str(plan.dtype).removeprefix("torch.")
    if restored is None:
        why = ""
        if stored.is_fp8 and not can_multiply(plan.device):
            why = f", because {plan.device} does not support FP8"
        before, after = map(format_bytes, sizes)
        message = (
            f"weights in {stored.stores} were dequantized to {kind}{why}: {before} in files, "
            f"{after} dequantized{_advise_quantization(plan, stored)}"
        )
    else:
        message = f"{restored.count:,} matrices stay in {'FP8' if stored.is_fp4 else stored.stores}"
        if restored.rounded:
            message += (
                f", of which {restored.rounded:,} were rounded from block scales to one scale "
                f"for each output (rounding error: {restored.error:.1%})"
            )
        if restored.expanded:
            message += f"; {restored.expanded:,} others were dequantized to {kind}"
        if stored.is_fp4:
            before, after = map(format_bytes, sizes)
            message += (
                f"; matrices in NVFP4 were dequantized to {kind}: {before} in files, {after} "
                f"dequantized{_advise_quantization(plan, stored)}"
            )
        elif not restored.rounded and not restored.expanded:
            return
    warnings.warn(f"{plan.spec.name}: {message}", ModelWarning, stacklevel=1)


def _advise_quantization(plan: LoadPlan, stored: QuantizationInfo) -> str:
    """Return how to keep weights in 4 bits that were expanded; empty if they cannot be kept."""
    form = "nvfp4" if stored.is_fp4 else "mxfp4" if stored.method == "mxfp4" else ""
    if not form or plan.quantization is not None or not replace(plan, quantization=form).four_bits:
        return ""
    return f"; set quantization to {form} to keep 4-bit weights"


def stays_fp8(
    stored: QuantizationInfo | None, quantization: str | None, device: torch.device
) -> bool:
    """Return whether matrices that a checkpoint stores in FP8 stay in FP8 on a device.

    Args:
        stored: How the weights are quantized; None if they are not.
        quantization: As in `load_model`.
        device: The device.
    """
    if stored is None:
        return False
    if stored.is_fp4:
        return "FP8" in stored.stores and quantization in (None, "nvfp4") and can_multiply(device)
    return stored.is_fp8 and (
        quantization == "fp8" or (quantization is None and can_multiply(device))
    )


def _check_scales_described(directory: Path) -> None:
    """Raise ModelError for FP8 weights whose scales config.json does not describe.

    Files that cannot be read are left to transformers, whose errors are reported.
    """
    try:
        matrices = fp8_tensors(directory)
    except Exception:
        return
    if matrices:
        raise ModelError(
            f"{directory} has weights in FP8 ({next(iter(matrices))}), but config.json has no "
            "quantization_config that defines their scales; use another copy of the model"
        )


def prepare(module: PreTrainedModel) -> None:
    """Make a transformers module ready for inference."""
    module.eval().requires_grad_(False)
    adapt_attention(module)
    for part in module.modules():
        # treegen never pads. Some families check for padding in each pass, which would wait for
        # the device, so the check is disabled.
        if isinstance(part, PreTrainedModel):
            part.warn_if_padding_and_no_attention_mask = lambda *_arguments: None
