"""Read a model's shape and configuration without loading its weights.

The sizes in a configuration are compared with the headers of the weights before memory of these
sizes is allocated.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, PretrainedConfig, __version__
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from treegen.common.checks import device_name
from treegen.common.formatting import summarize_error
from treegen.common.spec import LayerSpec, ModelSpec
from treegen.errors import InputError, ModelError, ModelWarning, arg
from treegen.model.checkpoint.families import dense_length, has_loops, refuse_family, selects_keys
from treegen.model.checkpoint.files import (
    FLOATS,
    check_trust,
    locate,
    read_headers,
    read_raw_config,
    weight_files,
)
from treegen.model.checkpoint.fp4 import read_quant_config
from treegen.model.checkpoint.generation_config import (
    difference_from_generate,
    read_settings,
    recommended_sampling,
)
from treegen.model.checkpoint.gguf_file import Stored, check_sizes, gguf_arguments, is_gguf
from treegen.model.checkpoint.quantization import quantization_settings
from treegen.model.checkpoint.text_part import generates_text

_ALIASES: Final = {"half": "float16", "float": "float32"}  # as in vLLM and torch
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(device: str | torch.device) -> torch.device:
    """Return the named device; "auto" is CUDA if available, else the CPU.

    Raises:
        InputError: there is no such device, or it is not given as text or as a `torch.device`.
    """
    name = device_name(device)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    resolved = None
    with contextlib.suppress(RuntimeError, ValueError, OverflowError):
        resolved = torch.device(name)
    is_indexed_cpu = resolved is not None and resolved.type == "cpu" and resolved.index
    if resolved is None or resolved.type not in ("cpu", "cuda") or is_indexed_cpu:
        raise InputError(f"{arg('device')} must be auto, cpu, cuda or cuda:N, got {name!r}")
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"device {device} needs CUDA, but torch finds no GPU; use {arg('device', 'cpu')}"
        )
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        available = ", ".join(f"cuda:{index}" for index in range(torch.cuda.device_count()))
        raise InputError(f"device {device} does not exist; choose one of {available}")
    return resolved


def resolve_dtype(
    dtype: str | torch.dtype, config: PretrainedConfig, device: torch.device
) -> torch.dtype:
    """Return the dtype to compute in; "auto" is the checkpoint's own on a GPU, float32 on a CPU.

    On a CPU float32 holds every number of a 16-bit checkpoint exactly, is as fast or faster on most
    machines, and makes a sample independent of the composition of its batch.

    Args:
        dtype: "auto", the name of a dtype, or a dtype. "half" is float16, and "float" is float32.
        config: The model's configuration, which names the checkpoint's own dtype.
        device: The device to compute on.

    Raises:
        InputError: treegen does not compute in this dtype.
    """
    if isinstance(dtype, str) and (name := _ALIASES.get(dtype, dtype)) in DTYPES:
        return DTYPES[name]
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    if dtype != "auto":
        raise InputError(
            f"{arg('dtype')} must be auto or one of {', '.join(DTYPES)}, got {dtype!r:.60}"
        )
    if device.type == "cpu":
        return torch.float32
    return declared_dtype(config) or torch.bfloat16


def declared_dtype(config: PretrainedConfig) -> torch.dtype | None:
    """Return the dtype that a checkpoint's configuration names, if treegen can compute in it."""
    for source in (config, config.get_text_config(decoder=True)):
        declared = getattr(source, "dtype", None)
        declared = DTYPES.get(declared) if isinstance(declared, str) else declared
        if isinstance(declared, torch.dtype) and declared in DTYPES.values():
            return declared
    return None


def read_config(
    path: str | os.PathLike[str],
    directory: Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PretrainedConfig:
    """Return the configuration of a checkpoint.

    Args:
        path: The directory or hub name as the user gave it; a directory needs no pinned revision.
        directory: The checkpoint's directory or GGUF file.
        revision: The branch, tag or commit of a model on the hub.
        trust_remote_code: Whether code of the checkpoint itself may run.

    Raises:
        ModelError: the configuration cannot be read, or describes a model that cannot be used.
        InputError: `trust_remote_code` is set for a hub name without a pinned commit.
    """
    if is_gguf(directory):
        return _gguf_config(directory)
    raw = read_raw_config(directory)
    check_trust(
        raw,
        "config.json",
        revision,
        local=Path(path).expanduser().is_dir(),
        trust=trust_remote_code,
    )
    if not isinstance(text := raw.get("text_config", {}), Mapping | None):
        raise ModelError(
            f"text_config in {directory / 'config.json'} must be an object, got {text!r:.60}; "
            "download the file again"
        )
    model_type = raw.get("model_type")
    is_in_transformers = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    if not is_in_transformers and not raw.get("auto_map"):
        raise ModelError(
            f"model_type {model_type!r} in {directory / 'config.json'} is not known to "
            f"transformers {__version__}; upgrade transformers or check the file"
        )
    settings = read_quant_config(directory) if not raw.get("quantization_config") else None
    check_headers(directory, raw if settings is None else raw | {"quantization_config": settings})
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            directory, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:
        raise ModelError(
            f"{directory / 'config.json'} is not valid: {summarize_error(error)}; "
            "download it again, or update transformers"
        ) from None
    if settings is not None and not quantization_settings(config):
        config.quantization_config = settings
    refuse_family(config)
    if not raw.get("auto_map"):
        _refuse_silent(config)
    return config


def _gguf_config(file: Path) -> PretrainedConfig:
    """Return the configuration of a model in a GGUF file."""
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(file.parent, **gguf_arguments(file))
    except Exception as error:
        raise ModelError(
            f"{file} cannot be used: {summarize_error(error)}; use the original safetensors "
            "checkpoint"
        ) from None
    refuse_family(config)
    _refuse_silent(config)
    return config


def _refuse_silent(config: PretrainedConfig) -> None:
    if not generates_text(config):
        raise ModelError(
            f"{config.model_type} is not a causal language model: transformers has no class "
            "that generates text with this model; use another model"
        )


def load_spec(
    path: str | os.PathLike[str],
    dtype: str | torch.dtype = "auto",
    *,
    device: str | torch.device = "auto",
    kv_cache_dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    ranks: int = 1,
) -> ModelSpec:
    """Return a model's shape from its configuration alone, without reading weights.

    Args:
        path: A directory, a GGUF file or a hub name.
        dtype: As in `treegen.model.load.load_model`.
        device: As in `treegen.model.load.load_model`; it decides what dtype "auto" means.
        kv_cache_dtype: As in `treegen.model.load.load_model`.
        revision: The branch, tag or commit of a model on the hub.
        trust_remote_code: Whether code of the checkpoint itself may run.
        ranks: Processes that compute the model together. The heads in the result are those of one
            rank.

    Raises:
        InputError: the dtype or the device cannot be used.
        ModelError: the configuration cannot be read, or describes a model that cannot be used.
    """
    directory = locate(path, revision, weights=False)
    config = read_config(path, directory, revision=revision, trust_remote_code=trust_remote_code)
    return spec_of(
        os.fspath(path),
        directory,
        config,
        resolve_dtype(dtype, config, resolve_device(device)),
        kv_cache_dtype=kv_cache_dtype,
        trust_remote_code=trust_remote_code,
        ranks=ranks,
    )


def spec_of(
    name: str,
    directory: Path | None,
    config: PretrainedConfig,
    dtype: torch.dtype,
    *,
    kv_cache_dtype: str = "auto",
    trust_remote_code: bool = False,
    ranks: int = 1,
) -> ModelSpec:
    """Return the shape of the model that a configuration describes.

    Args:
        name: The model's name in messages and in the result.
        directory: The checkpoint's directory; None for a model that was built in memory.
        config: The model's configuration.
        dtype: The type to compute in.
        kv_cache_dtype: As in `load_spec`.
        trust_remote_code: As in `load_spec`.
        ranks: As in `load_spec`.

    Raises:
        ModelError: the layers call attention in a way that is not supported, or the configuration
            declares no context length.
    """
    from treegen.model.probe import probe_layers  # slow to import, and only needed here

    probed = probe_layers(config, dtype, trust_remote_code, ranks)
    layers: list[LayerSpec] = []
    for at, (call, source) in enumerate(zip(probed.calls, probed.sources, strict=True)):
        _, kv_heads, k_dim = call.k_TGK.shape
        v_dim, latent = call.v_TGV.shape[-1], call.latent
        if latent is not None:
            k_dim, v_dim = latent.cached_dim, latent.rank
        shared_with = None if source == at else source
        layers.append(LayerSpec(kv_heads, k_dim, v_dim, shared_with, latent, call.index_dim))
    text = config.get_text_config(decoder=True)
    forms = [call.index_form for call in probed.calls if call.index_form is not None]
    declared = _declared_length(text)
    length, reason = min([(declared, ""), *_limits(text)], key=lambda limit: limit[0])
    if reason:
        warn_context(name, declared, length, reason)
    itemsize = 1 if kv_cache_dtype == "fp8" else dtype.itemsize
    spec = ModelSpec(
        name=name,
        model_type=config.model_type,
        layers=tuple(layers),
        vocab_size=probed.vocab_size,
        context_length=length,
        eos_token_ids=_eos_token_ids(directory, config),
        itemsize=itemsize,
        windows=tuple(call.window for call in probed.calls),
        chunk=next((call.chunk for call in probed.calls if call.chunk), None),
        unreached=probed.unreached,
        states=probed.states,
        num_weights=probed.num_weights,
        num_in_linears=probed.num_in_linears,
        delta=probed.delta,
        index_topk=max((form.num * form.size for form in forms), default=0),
        index_pool=max((form.size for form in forms if form.is_pooled), default=1),
        index_selections=max((form.selections for form in forms), default=1),
        num_heads=max(call.q_THK.shape[1] for call in probed.calls),
        recommended=recommended_sampling(directory),
        recommended_note=difference_from_generate(directory),
    )
    if spec.index_topk and has_loops(text):
        raise ModelError(
            f"{config.model_type} combines sparse attention with looped layers, which is not "
            "supported; use another model"
        )
    if spec.latent is None:
        return spec
    return replace(spec, copy_pages=spec.latent.copy_pages(itemsize, dtype.itemsize))


def _declared_length(text: PretrainedConfig) -> int:
    """Return the context length that the configuration declares, in tokens."""
    length = getattr(text, "max_position_embeddings", None)
    length = length or getattr(text, "max_sequence_length", None) or getattr(text, "n_ctx", None)
    if not isinstance(length, int) or length < 1:
        raise ModelError(
            f"the {text.model_type} configuration has no max_position_embeddings; add this "
            "field to config.json"
        )
    return length


def _limits(text: PretrainedConfig) -> Iterator[tuple[int, str]]:
    """Yield lengths at which the context must end, and why."""
    for rope in _iter_rope_settings(text):
        # Once one row is longer than the original length, longrope rotates every position of the
        # batch by different factors. ("dynamic" does so beyond max_position_embeddings.)
        if "longrope" in (rope.get("rope_type"), rope.get("type")):
            original = rope.get("original_max_position_embeddings")
            original = original or getattr(text, "original_max_position_embeddings", None)
            if original:
                yield (
                    original,
                    "the model's longrope changes its rotation factors, but cached keys were "
                    "rotated with the factors for shorter texts",
                )
    if (length := dense_length(text)) and not selects_keys(text):
        yield length, "the model uses sparse attention, which is not supported"


def warn_context(name: str, declared: int, length: int, reason: str) -> None:
    """Warn that the context of a model is shorter than its configuration declares.

    Args:
        name: The model's name.
        declared: The declared length.
        length: The supported length.
        reason: What happens beyond that length.
    """
    warnings.warn(
        f"{name}: the context is limited to {length:,} tokens instead of {declared:,}; beyond "
        f"this length, {reason}",
        ModelWarning,
        stacklevel=1,  # the same line for a plan and for a load, so Python shows it once
    )


def _iter_rope_settings(text: PretrainedConfig) -> Iterator[dict[str, Any]]:
    """Yield the RoPE settings: one for the model, or one for each type of layer."""
    settings = getattr(text, "rope_parameters", None) or {}
    if settings and all(isinstance(value, dict) for value in settings.values()):
        yield from settings.values()
    else:
        yield settings


def _eos_token_ids(directory: Path | None, config: PretrainedConfig) -> tuple[int, ...]:
    """Return every id that ends a text, from generation_config.json and from the configuration."""
    settings = [read_settings(directory).get("eos_token_id")]
    sources = (config, config.get_text_config(decoder=True))
    settings += [getattr(source, "eos_token_id", None) for source in sources]
    eos_ids: list[Any] = []
    for ids in settings:
        eos_ids += ids if isinstance(ids, list | tuple) else [ids]
    return tuple(dict.fromkeys(i for i in eos_ids if isinstance(i, int) and i >= 0))


_QUANTIZED: Final = ("quantization_config", "compression_config")
_WIDTHS: Final = ("vocab_size", "hidden_size", "n_embd")
_DEPTHS: Final = ("num_hidden_layers", "n_layer", "num_layers")
_DEPTHS_OF_PARTS: Final = (*_DEPTHS, "depth")
_MAX_PART_LAYERS: Final = 1_000
"""Layers that a tower or another part may declare without weights numbered that high."""
_MAX_PACKED: Final = 64
"""Maximum numbers that quantized weights pack into one stored value, such as 1 bit of 64."""


def check_headers(directory: Path, raw: Mapping[str, Any]) -> None:
    """Raise ModelError for a configuration with sizes that no stored weight has.

    Smaller differences are reported by name and shape once the model is built. Quantized weights
    are packed into other types and smaller shapes.

    Args:
        directory: The checkpoint's directory.
        raw: The content of config.json. Some configurations build a list as long as the layers.
    """
    text = raw.get("text_config")
    # text_config overrides a number of the wrapper, which may only be a default.
    texts = [settings for settings in (raw, text) if isinstance(settings, Mapping)]
    is_packed = any(settings.get(key) for settings in texts for key in _QUANTIZED)
    stored = Stored()
    for name, kind, shape in _headers(directory):
        if len(shape) > 1 and name.endswith("weight") and kind not in FLOATS and not is_packed:
            if kind.startswith("F8"):
                continue  # reported elsewhere with advice
            raise ModelError(
                f"{name} in {directory} must be stored as floating-point numbers, got {kind}, "
                "and config.json has no quantization_config; save the weights again"
            )
        stored.add(name, shape)
    if not stored.max_dimension:
        return
    file, weights_name = directory / "config.json", "the weights in the same directory"
    towers = {  # the checkpoint may lack their weights
        f"{part}.{name}": size
        for part, settings in raw.items()
        for name in (_DEPTHS_OF_PARTS if isinstance(settings, Mapping) else ())
        if isinstance(size := settings.get(name), int) and size > _MAX_PART_LAYERS
    }
    check_sizes(file, weights_name, stored, {}, towers)
    widths, depths = (
        {name: settings[name] for settings in texts for name in names if name in settings}
        for names in (_WIDTHS, _DEPTHS)
    )
    check_sizes(file, weights_name, stored, widths, depths, _MAX_PACKED if is_packed else 1)


def _headers(directory: Path) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield the name, type and shape of each stored tensor, as far as the files can be read."""
    try:
        files = weight_files(directory)
    except (ModelError, KeyError, TypeError, AttributeError):  # loading reports the error
        return
    for file in files:
        try:
            yield from read_headers(file)
        except (OSError, SafetensorError):  # loading reports the error
            continue
