"""Load a model from a checkpoint, or wrap a transformers module that is already in memory.

Both return a `Model` that uses treegen's attention. By default it is checked against transformers'
own attention.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import GgufConfig, PretrainedConfig, PreTrainedModel

from treegen.common.formatting import format_bytes
from treegen.common.params import check_bool
from treegen.common.spec import ModelSpec
from treegen.common.tested_versions import warn_untested
from treegen.errors import InputError, ModelError, ModelWarning, arg
from treegen.model.base_weights import load_base
from treegen.model.checkpoint.adapter import Adapter, find_adapter, merge
from treegen.model.checkpoint.families import refuse_family, refuse_images
from treegen.model.checkpoint.files import check_weights, fingerprint, locate, weight_files
from treegen.model.checkpoint.gguf_file import gguf_arguments, is_gguf, read_header
from treegen.model.checkpoint.load_report import (
    check_complete,
    loading_error,
    quiet_loading,
    warn_unused,
)
from treegen.model.checkpoint.packed_weights import dequantize_packed_on_load
from treegen.model.checkpoint.quantized import (
    QuantizationInfo,
    configure_dequantization,
    quantisation_of,
    unused_names,
)
from treegen.model.checkpoint.text_part import attention_of_text, auto_class, drop_parts
from treegen.model.config import (
    DTYPES,
    read_config,
    resolve_device,
    resolve_dtype,
    spec_of,
)
from treegen.model.hook import ATTENTION
from treegen.model.latent import enable_latents
from treegen.model.linear.fp8 import can_multiply
from treegen.model.linear.fp8_checkpoint import RestoreReport, fp8_tensors, restore_fp8
from treegen.model.linear.fp8_experts import quantize_matrices
from treegen.model.linear.mxfp4 import can_keep, fits_expanded, keep_on_load
from treegen.model.load_check import check_model
from treegen.model.memory import empty_device_cache
from treegen.model.model import Model
from treegen.model.options import check_stored
from treegen.model.parallel.ranks import Ranks, check_ranks
from treegen.model.parallel.shards import shard, tie_head
from treegen.model.vision.processor import placeholder_of
from treegen.model.vision.tower import VisionTower
from treegen.ops.attention.registry import choose


def load_model(
    path: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    check: bool = True,
    revision: str | None = None,
    trust_remote_code: bool = False,
    impl: str = "auto",
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    ranks: Ranks | None = None,
    adapter: str | os.PathLike[str] | None = None,
    images: bool = False,
) -> Model:
    """Load the model in a directory or with a hub name, ready to use and checked.

    Args:
        path: A directory, a GGUF file, a hub name, or "demo" for the bundled model.
        dtype: The type to compute in. "auto" is the checkpoint's own type on a GPU and float32 on a
            CPU.
        device: The device. "auto" is CUDA if available, else the CPU.
        check: Whether to compare a small tree with transformers' own attention on the loaded
            weights, which takes about a second. Without it, an untested family may be silently
            wrong.
        revision: The branch, tag or commit of a model on the hub.
        trust_remote_code: Whether code of the checkpoint itself may run. From the hub it runs only
            if `revision` is a commit.
        impl: The attention implementation, as in `treegen.ops.attention.attend`.
        quantization: "fp8" turns linear layers into `Fp8Linear`; "mxfp4" keeps experts in 4 bits;
            "none" expands all weights. None keeps matrices that are stored in FP8 where the device
            multiplies FP8, and keeps MXFP4 experts if expanded ones would not fit.
        kv_cache_dtype: "fp8" keeps keys and values in 8 bits, "auto" in `dtype`.
        ranks: The processes of a tensor-parallel model; this process loads its own shard. Default:
            one process.
        adapter: A directory or hub name of an adapter to merge into the weights; see
            `treegen.model.checkpoint.adapter`. FP8 weights are then expanded.
        images: Whether to load the vision tower, so that the model takes images.

    Returns:
        The model, with weights on the device.

    Raises:
        InputError: the dtype, the device or another argument cannot be used.
        ModelError: the checkpoint cannot be loaded, or would give wrong numbers.
    """
    check_bool("check", check)
    check_bool("trust_remote_code", trust_remote_code)
    check_bool("images", images)
    check_stored(quantization, kv_cache_dtype)
    check_ranks(ranks)
    _warn_untested(ranks)
    directory = locate(path, revision, weights=True)
    config = read_config(path, directory, revision=revision, trust_remote_code=trust_remote_code)
    if images:
        refuse_images(config)
    target = resolve_device(device)
    kind = resolve_dtype(dtype, config, target)
    choose(impl, target)
    check_weights(directory)
    added = None if adapter is None else find_adapter(adapter)
    spec = spec_of(
        os.fspath(path),
        directory,
        config,
        kind,
        kv_cache_dtype=kv_cache_dtype,
        trust_remote_code=trust_remote_code,
        ranks=ranks.size if ranks else 1,
    )
    towers = spec.unreached if images else ()
    if images and (ranks is None or not ranks.rank):
        spec = replace(spec, unreached=())
    stored = quantisation_of(config)
    stays_8 = stays_fp8(stored, quantization, target) and ranks is None and added is None
    stays_4 = stays_mxfp4(config, stored, quantization, target, kind)
    stays = stays_8 or (stays_4 and ranks is None and added is None)
    if stored is None and not is_gguf(directory):
        _refuse_bare_fp8(directory)
    module = _load_weights(
        directory,
        config,
        spec,
        kind,
        target,
        trust_remote_code,
        ranks,
        stored,
        stays,
        quantization,
        added,
        images,
        towers,
    )
    model = Model(
        module,
        spec,
        kind,
        impl=impl,
        ranks=ranks,
        fingerprint=fingerprint(directory, added.directory if added else None),
        quantization="fp8" if stays_8 or quantization == "fp8" else None,
    )
    if check:
        check_model(model)
    if images:
        model.tower = VisionTower(module, placeholder_of(config))
    return model


def from_module(
    module: PreTrainedModel,
    *,
    name: str = "",
    check: bool = True,
    impl: str = "auto",
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    ranks: Ranks | None = None,
) -> Model:
    """Wrap a transformers module that is in memory, on one device and in one dtype.

    The module is changed: it uses treegen's attention from now on.
    `treegen.model.module_patch.patch_module` restores it afterwards.

    Args:
        module: A causal language model of transformers.
        name: The name for messages. Default: the model type.
        check: Whether to compare with transformers' own attention, as in `load_model`.
        impl: The attention implementation, as in `treegen.ops.attention.attend`.
        quantization: As in `load_model`. "fp8" rounds the module's own weights.
        kv_cache_dtype: As in `load_model`.
        ranks: The processes of a tensor-parallel model; the module is the shard of this process.

    Returns:
        The model. It shares the module's weights.

    Raises:
        InputError: the module is no language model of transformers, or its dtype or another
            argument cannot be used.
        ModelError: the model cannot be used, or would give wrong numbers.
    """
    kind = module.__name__ if isinstance(module, type) else type(module).__name__
    if isinstance(module, type) or not callable(getattr(module, "set_attn_implementation", None)):
        raise InputError(
            f"from_module takes a model of transformers, got {kind}; for a checkpoint give its "
            "directory or name to LLM or load_model"
        )
    if module.get_output_embeddings() is None:
        raise InputError(
            f"from_module takes a language model, and {kind} has no head that predicts tokens; "
            "load it by AutoModelForCausalLM"
        )
    check_bool("check", check)
    check_stored(quantization, kv_cache_dtype)
    check_ranks(ranks)
    _warn_untested(ranks)
    choose(impl, module.device)
    config = module.config
    refuse_family(config)
    if module.dtype not in DTYPES.values():
        raise InputError(f"a module must be in one of {', '.join(DTYPES)}, got {module.dtype}")
    spec = spec_of(
        name or config.model_type,
        None,
        config,
        module.dtype,
        kv_cache_dtype=kv_cache_dtype,
        ranks=ranks.size if ranks else 1,
    )
    prepare(module)
    if quantization == "fp8":
        quantize_matrices(module, module.device)
    module.set_attn_implementation(attention_of_text(config, ATTENTION))
    model = Model(
        module,
        spec,
        module.dtype,
        fingerprint="",
        impl=impl,
        ranks=ranks,
        quantization="fp8" if quantization == "fp8" else None,
    )
    if check:
        check_model(model)
    return model


def _warn_untested(ranks: Ranks | None) -> None:
    if ranks is None or not ranks.rank:
        warn_untested()


def _load_weights(
    directory: Path,
    config: PretrainedConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool,
    ranks: Ranks | None,
    stored: QuantizationInfo | None,
    stays: bool,
    quantization: str | None,
    adapter: Adapter | None,
    images: bool,
    towers: Sequence[str],
) -> PreTrainedModel:
    """Return the transformers model with every weight read from the checkpoint.

    Args:
        directory: The directory or GGUF file of the checkpoint.
        config: Its configuration.
        spec: The shape of the model.
        dtype: The type to compute in.
        device: The device of the weights.
        trust_remote_code: As in `load_model`.
        ranks: As in `load_model`.
        stored: How the weights are quantised; None if they are not.
        stays: Whether FP8 or MXFP4 weights stay quantised.
        quantization: As in `load_model`.
        adapter: The adapter to merge; None for none.
        images: Whether the model takes images too.
        towers: Names of the parts that read images; rank 0 keeps them whole.
    """
    config = copy.deepcopy(config)  # loading writes into it
    in_one = gguf_arguments(directory)
    if in_one:
        in_one["quantization_config"] = GgufConfig(dequantize=True)
    names = {}
    in_4_bits = stays and stored is not None and not stored.is_fp8
    if in_4_bits:
        keep_on_load(config)
    elif stored is not None and stored.packing is not None:
        dequantize_packed_on_load(config, stored.packing)
    elif stored is not None:
        names = configure_dequantization(config, stored)
    bars = contextlib.redirect_stderr(io.StringIO()) if in_one else contextlib.nullcontext()

    def read_weights() -> PreTrainedModel:
        with quiet_loading() as report_lines, bars:  # transformers does not control GGUF's bars
            try:
                loaded, info = auto_class(config, images=images).from_pretrained(
                    directory.parent if in_one else directory,
                    config=config,
                    dtype=dtype,
                    attn_implementation=attention_of_text(config, ATTENTION),
                    use_safetensors=True,
                    local_files_only=True,
                    trust_remote_code=trust_remote_code,
                    key_mapping=names or None,
                    # check_complete refuses them below, with names and shapes.
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                    **in_one,
                )
            except Exception as error:
                raise loading_error(directory, error, report_lines) from None
        check_complete(directory, info)
        warn_unused(directory, unused_names(info["unexpected_keys"], stored))
        read: PreTrainedModel = loaded
        drop_parts(read, spec.unreached)
        return read

    below = None if adapter is None else (directory, fingerprint(directory), dtype, images)
    module = load_base(below, read_weights)
    prepare(module)
    if dtype == torch.float32 or stored is not None or in_one:
        _cast(module, dtype)
    if adapter is not None:
        merge(module, adapter, spec.unreached)
    expanded = sum(p.numel() * p.element_size() for p in module.parameters())
    if ranks is not None:
        shard(module, ranks.rank, ranks.size, towers)
    if device.type == "cuda":
        empty_device_cache(device)
    try:
        # Quantise matrix by matrix, so that the weights need not fit before they are quantised.
        restored = restore_fp8(module, directory, device) if stays and not in_4_bits else None
        if quantization == "fp8":
            quantize_matrices(module, device)
        module = module.to(device)
        if ranks is not None:
            tie_head(module, ranks.rank, ranks.size)
        if in_one and not (header := read_header(directory)).is_plain:
            stored = QuantizationInfo("gguf", f"{header.stores} (GGUF)")
        if stored is not None and not in_4_bits and (ranks is None or ranks.rank == 0):
            files = [directory] if in_one else weight_files(directory)
            sizes = sum(file.stat().st_size for file in files), expanded
            _tell(spec.name, stored, restored, dtype, device, sizes)
        return module
    except torch.cuda.OutOfMemoryError:
        size = sum(p.numel() * p.element_size() for p in module.parameters())
    raise ModelError(
        f"the weights take {size / 2**30:.1f} GiB, more than is free on {device}; use another "
        "device or a smaller dtype"
    )


def _cast(module: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast weights to the type to compute in, except those that the family keeps in float32.

    Next to quantised weights, transformers leaves other weights in the type of the file.
    """
    kept = {*(module._keep_in_fp32_modules_strict or ())}
    if dtype == torch.float16:
        kept |= {*(module._keep_in_fp32_modules or ())}
    for name, weight in module.named_parameters():
        if weight.is_floating_point() and not any(part in name for part in kept):
            weight.data = weight.data.to(dtype)


def stays_fp8(
    stored: QuantizationInfo | None, quantization: str | None, device: torch.device
) -> bool:
    """Return whether matrices that a checkpoint stores in FP8 stay in FP8 on a device.

    Args:
        stored: How the weights are quantised; None if they are not.
        quantization: As in `load_model`.
        device: The device.
    """
    if stored is None or not stored.is_fp8:
        return False
    return quantization == "fp8" or (quantization is None and can_multiply(device))


def stays_mxfp4(
    config: PretrainedConfig,
    stored: QuantizationInfo | None,
    quantization: str | None,
    device: torch.device,
    dtype: torch.dtype,
) -> bool:
    """Return whether experts that a checkpoint stores in MXFP4 stay in 4 bits on a device.

    Args:
        config: The model's configuration.
        stored: How the weights are quantised; None if they are not.
        quantization: As in `load_model`.
        device: The device.
        dtype: The type to compute in.

    Raises:
        InputError: quantization is "mxfp4", but the checkpoint does not store MXFP4.
    """
    is_stored = stored is not None and stored.method == "mxfp4"
    if quantization == "mxfp4":
        if not is_stored:
            raise InputError(
                f"{arg('quantization', 'mxfp4')} is for checkpoints that store MXFP4, and this one "
                "does not; leave it out"
            )
        return can_keep(config, device, dtype)
    return (
        is_stored
        and quantization is None
        and can_keep(config, device, dtype)
        and not fits_expanded(config, device)
    )


def _refuse_bare_fp8(directory: Path) -> None:
    """Raise ModelError for FP8 weights whose scales config.json does not describe.

    Files that cannot be read are left to transformers, whose errors are reported.
    """
    try:
        matrices = fp8_tensors(directory)
    except Exception:
        return
    if matrices:
        raise ModelError(
            f"{directory} has weights in FP8 ({next(iter(matrices))}), and config.json has no "
            "quantization_config that tells how they are scaled; use another copy of the model"
        )


def _tell(
    name: str,
    stored: QuantizationInfo,
    restored: RestoreReport | None,
    dtype: torch.dtype,
    device: torch.device,
    sizes: tuple[int, int],
) -> None:
    """Warn, in one line, about weights that are not computed as they are stored.

    Args:
        name: The model's name.
        stored: How the weights are stored.
        restored: The FP8 matrices that were put back; None if all weights were expanded.
        dtype: The type to compute in.
        device: The device.
        sizes: Bytes of the files, and of the weights if all are expanded.
    """
    kind = str(dtype).removeprefix("torch.")
    if restored is None:
        why = ""
        if stored.is_fp8 and not can_multiply(device):
            why = f", for {device} does not multiply FP8"
        before, after = map(format_bytes, sizes)
        message = (
            f"weights in {stored.stores} were expanded to {kind}{why}: {before} of files became "
            f"{after}"
        )
    else:
        message = f"{restored.count:,} matrices stay in {stored.stores}"
        if restored.rounded:
            message += (
                f", {restored.rounded:,} of them rounded from scales of blocks to one scale for "
                f"each output, which moved them by {restored.error:.1%}"
            )
        if restored.expanded:
            message += f"; {restored.expanded:,} others were expanded to {kind}"
        if not restored.rounded and not restored.expanded:
            return
    warnings.warn(f"{name}: {message}", ModelWarning, stacklevel=1)


def prepare(module: PreTrainedModel) -> None:
    """Make a transformers module ready for inference."""
    module.eval().requires_grad_(False)
    enable_latents(module)
    for part in module.modules():
        # treegen never pads. Some families check for padding in each pass, which would wait for
        # the device, so the check is disabled.
        if isinstance(part, PreTrainedModel):
            part.warn_if_padding_and_no_attention_mask = lambda *_given: None
