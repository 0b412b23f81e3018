"""The model of a run: its properties, from its files and without its weights, and its loading."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treegen.common.cores import set_threads
from treegen.errors import ModelError
from treegen.model.options import EngineOptions

# Importing torch takes seconds. Reading and checking the data does not need it.
if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from treegen.llm.base import BaseLLM
    from treegen.llm.cluster.placement import Placement
    from treegen.model.model_info import ModelInfo


@dataclass(frozen=True, slots=True)
class ModelPrecision:
    """The number formats of a model, from its configuration alone; fields as in `ModelInfo`."""

    directory: Path
    config: "PretrainedConfig"
    device: "torch.device"
    torch_dtype: "torch.dtype"
    quantization: str | None

    @property
    def dtype(self) -> str:
        """The name of the dtype."""
        return str(self.torch_dtype).removeprefix("torch.")

    @property
    def device_type(self) -> str:
        """The kind of the device."""
        return self.device.type


def resolve_precision(
    engine: EngineOptions, placement: "Placement | None" = None
) -> ModelPrecision:
    """Return the number formats of a model: all that resuming a finished run needs of it.

    Args:
        engine: The engine options, which name the model.
        placement: As for `load_model_info`.
    """
    from treegen.model.checkpoint.files import locate

    directory = locate(engine.model, engine.revision, weights=False)  # a wrong path fails at once

    import torch

    from treegen.model.checkpoint.adapter import find_adapter
    from treegen.model.checkpoint.quantization import quantization_of
    from treegen.model.config import read_config, resolve_device, resolve_dtype

    device = torch.device(placement.device) if placement else resolve_device(engine.device)
    config = read_config(engine.model, directory, **_source(engine))
    dtype = resolve_dtype(engine.dtype, config, device)
    requested = engine.loading()["quantization"]
    if engine.adapter is not None:
        find_adapter(engine.adapter, weights=False)  # an unusable adapter fails at once
    stored = quantization_of(config)
    keeps_fp8 = False
    # The code that loads and runs models takes seconds to import. A finished run does not need it.
    if stored is not None and engine.adapter is None:
        from treegen.model.weights import stays_fp8

        keeps_fp8 = stays_fp8(stored, requested, device)
    quantization = "fp8" if requested == "fp8" or keeps_fp8 else None
    return ModelPrecision(directory, config, device, dtype, quantization)


def _source(engine: EngineOptions) -> dict[str, Any]:
    return {"revision": engine.revision, "trust_remote_code": engine.trust_remote_code}


def load_model_info(engine: EngineOptions, placement: "Placement | None" = None) -> "ModelInfo":
    """Return the properties of a model that its configuration and tokenizer contain.

    Args:
        engine: The engine options, which name the model.
        placement: The placement of the workers that compute, on devices that this machine need not
            have; None if this machine computes.
    """
    precision = resolve_precision(engine, placement)
    device, dtype = precision.device, precision.torch_dtype

    from treegen.model import memory
    from treegen.model.config import load_spec
    from treegen.model.model_info import ModelInfo
    from treegen.model.reproducible import ALIGN, check_dtype, reproducible_spec
    from treegen.model.tokenizer import load_tokenizer
    from treegen.model.vision import load_processor

    source = _source(engine)
    ranks = engine.tensor_parallel_size
    spec = load_spec(
        engine.model,
        dtype,
        device="cpu",  # the dtype is already resolved
        kv_cache_dtype=engine.kv_cache_dtype,
        ranks=ranks,
        **source,
    )
    if engine.speculates:
        from treegen.engine.speculative.speculation import check_speculation

        check_speculation(engine, spec)
    if engine.reproducible:
        check_dtype(dtype, device)
        spec = reproducible_spec(spec, device)
    page_size, max_rows, _ = engine.sizes(device.type)
    tokenizer = load_tokenizer(engine.model, **source, chat_template=engine.chat_template)
    images = None
    if engine.images:
        processor = load_processor(precision.directory, precision.config, tokenizer)
        images = processor.enable_images(
            tokenizer, spec.vocab_size, keep_template=engine.chat_template is not None
        )
    draft_token_bytes = _draft_token_bytes(engine, tokenizer, dtype)
    size, capacity = engine.cache_bytes, None
    if size is None and device.type == "cpu":
        size = memory.default_bytes(device)
    if size is not None:
        capacity = memory.cache_size(size, spec, page_size, max_rows, draft_token_bytes)
        size = memory.subtract_draft_cache(size, spec, draft_token_bytes)
    return ModelInfo(
        engine=engine,
        spec=spec,
        tokenizer=tokenizer,
        images=images,
        dtype=precision.dtype,
        device_type=precision.device_type,
        max_rows=max_rows,
        page_size=page_size,
        memory=size,
        num_pages=None if capacity is None else capacity.pages,
        num_states=None if capacity is None else capacity.states,
        align=ALIGN if engine.reproducible and device.type == "cuda" else 1,
        quantization=precision.quantization,
    )


def _draft_token_bytes(engine: EngineOptions, tokenizer: Any, dtype: "torch.dtype") -> int:
    """Return the bytes of a token's keys and values in the draft model; 0 without a draft model.

    Args:
        engine: The engine options.
        tokenizer: The model's tokenizer.
        dtype: The type that the model computes in.

    Raises:
        InputError: the draft model has another tokenizer, or recurrent layers.
        ModelError: the draft model cannot be used.
    """
    if engine.draft_model is None:
        return 0
    from treegen.engine.speculative.draft_model import inspect_draft_model

    return inspect_draft_model(engine, tokenizer, dtype).kv_bytes_per_token


def check_machine(engine: EngineOptions, placement: "Placement | None" = None) -> None:
    """Raise InputError or CapacityError for options that this machine cannot support at all.

    Workers check their own machines.
    """
    from treegen.model import rank_processes
    from treegen.model.config import resolve_device

    if placement is None:
        rank_processes.check_machine(engine, resolve_device(engine.device))


def weights_fingerprint(engine: EngineOptions) -> str:
    """Return a hash that identifies a model's weights; raise ModelError if there are none."""
    from treegen.model.checkpoint.files import check_weights, fingerprint, locate

    directory: Path = locate(engine.model, engine.revision, weights=True)
    check_weights(directory)
    if engine.adapter is None:
        return fingerprint(directory)
    from treegen.model.checkpoint.adapter import find_adapter

    return fingerprint(directory, find_adapter(engine.adapter).directory)


def load_llm(
    engine: EngineOptions,
    fingerprint: str,
    placement: "Placement | None" = None,
    before: Sequence[Callable[[], object]] = (),
) -> "BaseLLM":
    """Load a model.

    Args:
        engine: The engine options, which name the model.
        fingerprint: The hash that `weights_fingerprint` returned for the model.
        placement: The placement of workers. With it the function returns a Cluster, which the
            caller must close.
        before: Functions that each worker calls before it loads the model.

    Raises:
        ModelError: its files changed since `weights_fingerprint`, or it cannot be used.
    """
    from treegen.llm import LLM

    llm: BaseLLM
    if placement is None:
        from treegen.model.config import resolve_device

        if resolve_device(engine.device).type == "cpu":
            set_threads()
        llm = LLM(**asdict(engine))
    else:
        from treegen.llm.cluster.cluster import Cluster

        llm = Cluster.at(placement, engine, before)
    if llm.fingerprint != fingerprint:
        llm.close()
        raise ModelError(
            f"the files of {engine.model} changed while treegen read the files; start the "
            "command again"
        )
    return llm
