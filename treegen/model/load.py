"""Load a model from a checkpoint, or wrap a transformers module that is already in memory.

Both return a `Model` that uses treegen's attention. By default it is checked against transformers'
own attention.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel

from treegen.common.checks import check_bool
from treegen.common.version import warn_untested
from treegen.errors import InputError
from treegen.model.attention_hook import ATTENTION
from treegen.model.checkpoint.adapter import find_adapter
from treegen.model.checkpoint.families import refuse_family, refuse_images
from treegen.model.checkpoint.files import check_weights, fingerprint, locate
from treegen.model.checkpoint.quantization import quantization_of
from treegen.model.checkpoint.text_part import attention_of_text
from treegen.model.config import DTYPES, read_config, resolve_device, resolve_dtype, spec_of
from treegen.model.indexer import restore_attention
from treegen.model.linear.fp8_experts import quantize_matrices
from treegen.model.load_check import check_boundaries, check_model
from treegen.model.model import Model
from treegen.model.options import check_stored
from treegen.model.parallel.ranks import Ranks, check_ranks
from treegen.model.vision import VisionTower, placeholder_of
from treegen.model.weights import LoadPlan, load_weights, prepare
from treegen.ops.attention.registry import choose

_PADDING_CHECK: Final = "warn_if_padding_and_no_attention_mask"
_ABSENT: Final = object()


def load_model(  # noqa: PLR0913 -- users name these arguments
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
            weights, which takes about a second, and small random copies of a model of an untested
            family beyond its windows and the like. Without it, an untested family may be silently
            wrong.
        revision: The branch, tag or commit of a model on the hub.
        trust_remote_code: Whether code of the checkpoint itself may run. From the hub it runs only
            if `revision` is a commit.
        impl: The attention implementation, as in `treegen.ops.attention.attend`.
        quantization: "fp8" turns linear layers into `Fp8Linear`; "mxfp4" and "nvfp4" keep weights
            that are stored so in 4 bits; "none" expands all weights. None keeps matrices that are
            stored in FP8 where the device multiplies FP8, and keeps weights in 4 bits if the
            expanded ones would take more than half of a GPU.
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
    check_bool("trust_remote_code", trust_remote_code)
    check_bool("images", images)
    _check_arguments(check, quantization, kv_cache_dtype, ranks)
    directory = locate(path, revision, weights=True)
    config = read_config(path, directory, revision=revision, trust_remote_code=trust_remote_code)
    if images:
        refuse_images(config)
    target = resolve_device(device)
    kind = resolve_dtype(dtype, config, target)
    choose(impl, target)
    check_weights(directory)
    adapter_to_merge = None if adapter is None else find_adapter(adapter)
    spec = spec_of(
        os.fspath(path),
        directory,
        config,
        kind,
        kv_cache_dtype=kv_cache_dtype,
        trust_remote_code=trust_remote_code,
        ranks=ranks.size if ranks else 1,
    )
    plan = LoadPlan(
        directory=directory,
        config=config,
        spec=spec,
        dtype=kind,
        device=target,
        stored=quantization_of(config),
        quantization=quantization,
        adapter=adapter_to_merge,
        images=images,
        ranks=ranks,
        trust_remote_code=trust_remote_code,
    )
    model = _load_planned(plan, impl)
    if check:
        _compare_with_stock(model)
    if images:
        model.tower = VisionTower(model.module, placeholder_of(config))
    return model


def _load_planned(plan: LoadPlan, impl: str) -> Model:
    adapter = plan.adapter
    is_fp8 = plan.keeps_fp8 or plan.quantization == "fp8"
    return Model(
        load_weights(plan),
        replace(plan.spec, unreached=plan.dropped),
        plan.dtype,
        impl=impl,
        ranks=plan.ranks,
        fingerprint=fingerprint(plan.directory, adapter.directory if adapter else None),
        quantization="fp8" if is_fp8 else None,
    )


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

    The module is changed: it uses treegen's attention, and its weights need no gradients from now
    on. `patch_module` restores both afterwards.

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
            f"from_module requires a transformers model, got {kind}; pass the directory or name "
            "of a checkpoint to LLM or load_model"
        )
    if module.get_output_embeddings() is None:
        raise InputError(
            f"from_module requires a language model, but {kind} has no head that predicts "
            "tokens; load the model with AutoModelForCausalLM"
        )
    _check_arguments(check, quantization, kv_cache_dtype, ranks)
    choose(impl, module.device)
    config = module.config
    refuse_family(config)
    if module.dtype not in DTYPES.values():
        raise InputError(
            f"the dtype of the module must be one of {', '.join(DTYPES)}, got {module.dtype}"
        )
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
        _compare_with_stock(model)
    return model


def _check_arguments(
    check: bool, quantization: str | None, kv_cache_dtype: str, ranks: Ranks | None
) -> None:
    """Check arguments that `load_model` and `from_module` share; warn of untested libraries."""
    check_bool("check", check)
    check_stored(quantization, kv_cache_dtype)
    check_ranks(ranks)
    if ranks is None or not ranks.rank:
        warn_untested()


def _compare_with_stock(model: Model) -> None:
    check_model(model)
    check_boundaries(model, partial(from_module, check=False))


@contextmanager
def patch_module(module: PreTrainedModel) -> Iterator[None]:
    """While open, make a module ready for treegen: no gradients, no dropout, treegen's attention.

    Afterwards requires_grad, train and eval mode of each part, the attention functions, classes and
    attributes are restored. Wrappers of the module's own forward, such as accelerate's autocast,
    are removed while it is open.
    """
    before: list[tuple[Any, str, Any]] = []
    for part in module.modules():
        # vars() of a TorchScript module lacks `training`.
        before.append((part, "training", part.training))
        before.append((part, _PADDING_CHECK, vars(part).get(_PADDING_CHECK, _ABSENT)))
    before += [(weight, "requires_grad", weight.requires_grad) for weight in module.parameters()]
    before.append((module, "forward", vars(module).pop("forward", _ABSENT)))
    try:
        with restoring_attention_names(configs_of(module)):
            prepare(module)
            module.set_attn_implementation(attention_of_text(module.config, ATTENTION))
            yield
    finally:
        restore_attention(module)
        for holder, name, value in before:
            if value is not _ABSENT:
                setattr(holder, name, value)
            elif name in vars(holder):
                delattr(holder, name)


def configs_of(module: nn.Module) -> list[Any]:
    """Return the configurations of a model's parts and their sub-configurations, each once."""
    configs: dict[int, Any] = {}
    stack = [part.config for part in module.modules() if isinstance(part, PreTrainedModel)]
    while stack:
        config = stack.pop()
        if config is not None and id(config) not in configs:
            configs[id(config)] = config
            stack += [getattr(config, name, None) for name in config.sub_configs]
    return list(configs.values())


@contextmanager
def restoring_attention_names(configs: Sequence[Any]) -> Iterator[None]:
    """Restore the names of attention functions in configurations at the end."""
    before = [(config, config._attn_implementation_internal) for config in configs]
    try:
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name
