"""Run a model without data, to see how its layers call attention before weights are read.

The probe also finds which states recurrent layers keep.
"""

import copy
import functools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations import hub_kernels

from treegen.common.formatting import summarize_error
from treegen.common.spec import DeltaSpec, StateSpec
from treegen.errors import ModelError, arg
from treegen.model.attention_hook import NO_NUMBER, PROBE, AttentionCall, Probe
from treegen.model.checkpoint.families import (
    NO_ATTENTION,
    OTHERS,
    OWN_ATTENTION,
    has_loops,
    recurrent_types,
)
from treegen.model.checkpoint.text_part import (
    attention_of_text,
    auto_class,
    drop_parts,
    find_unused_parts,
)
from treegen.model.indexer import adapt_attention
from treegen.model.linear.fp8 import iter_fp8_linears
from treegen.model.linear.fp8_experts import rounding_experts
from treegen.model.parallel.shards import shard
from treegen.model.recurrent.layer_states import forward_options
from treegen.model.recurrent.layers import StateProbe, use_states, wrap_recurrent
from treegen.model.recurrent.operators import make_delta_spec

_NUM_TOKENS: Final = 3


class _EmptyExpertMode(TorchDispatchMode):
    """Lets loops over the chosen experts run on meta tensors, as if no expert were chosen."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.nonzero.default:
            return torch.empty((0, args[0].dim()), dtype=torch.int64, device="meta")
        return func(*args, **(kwargs or {}))


class _MetaValueMode(TorchFunctionMode):
    """Answers queries for values of meta tensors with False or zero.

    Some models read how many rows each expert has and split the rows by these numbers. All rows
    then go to the first expert.
    """

    _ANSWERS: Final = {
        torch.Tensor.__bool__: False,
        torch.Tensor.__contains__: False,
        torch.Tensor.__int__: 0,
        torch.Tensor.item: 0,
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._ANSWERS and args[0].is_meta:
            return self._ANSWERS[func]
        if func is torch.Tensor.tolist and args[0].is_meta and args[0].dim() == 1:
            return [0] * len(args[0])
        if func is torch.Tensor.split and args[0].is_meta and isinstance(args[1], list):
            first, *later_sizes = args[1]
            if not sum(args[1]):
                args = (
                    args[0],
                    [args[0].shape[(kwargs or {}).get("dim", 0)] + first, *later_sizes],
                )
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The results of a pass without data."""

    calls: tuple[AttentionCall, ...]
    """The attention calls."""
    sources: tuple[int, ...]
    """For each call the index of the call that first passed these very keys and values."""
    vocab_size: int
    """The number of logits of a row."""
    unreached: tuple[str, ...]
    """Names of the parts that a pass over text never calls, which need no memory."""
    states: tuple[tuple[StateSpec, ...], ...]
    """The states that each recurrent layer keeps per sequence."""
    num_weights: int
    """Numbers in all weights, without parts that text never reaches."""
    num_in_linears: int
    """Numbers in layers that may run in FP8."""
    delta: DeltaSpec | None = None
    """The layout of the rows' update lists; None if rows cannot keep such lists."""


class _StockConfig:
    """A configuration of transformers' own, equal to others of the same class and content.

    The folder that a configuration was read from is no part of its content. The tensor-parallel
    plan is, although transformers omits it from the JSON.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = copy.deepcopy(config)
        self.config.name_or_path = ""
        plans = [(type(part), repr(part.base_model_tp_plan)) for part in _iter_parts(self.config)]
        self._content = (self.config.to_json_string(use_diff=False), *plans)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _StockConfig) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)


def _iter_parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Yield a configuration and the configurations in it."""
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PretrainedConfig):
            yield from _iter_parts(part)


def probe_layers(
    config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool, ranks: int = 1
) -> ProbeResult:
    """Run the model on three tokens without data and return how its layers call attention.

    The results of the last configurations are kept. A job is planned and then loaded, and a load
    with a check loads small copies of the model.

    Args:
        config: The model's configuration.
        dtype: The type to compute in.
        trust_remote_code: Whether code of the checkpoint itself may run.
        ranks: Processes that compute the model together; the recorded calls are those of one rank.

    Raises:
        ModelError: the layers call attention in a way that is not supported.
    """
    if trust_remote_code or not type(config).__module__.startswith("transformers."):
        return _probe(config, dtype, trust_remote_code, ranks)
    try:
        stock = _StockConfig(config)
    except (TypeError, ValueError):  # it has values that JSON cannot hold
        return _probe(config, dtype, trust_remote_code, ranks)
    return _probe_stock(stock, dtype, ranks)


@functools.lru_cache(maxsize=64)
def _probe_stock(stock: _StockConfig, dtype: torch.dtype, ranks: int) -> ProbeResult:
    return _probe(stock.config, dtype, False, ranks)


def _probe(
    config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool, ranks: int
) -> ProbeResult:
    """Probe a configuration; see `probe_layers`."""
    try:
        model = _build_meta_model(config, dtype, trust_remote_code)
        states = StateProbe()
        adapt_attention(model)
        recurrent = wrap_recurrent(model)
        if not recurrent and (types := recurrent_types(config)):
            raise ModelError(f"no layer of type {', '.join(types)} keeps its state in a cache")
        with _calls() as called, use_states(states if recurrent else None):
            probe, vocab_size = _pass(model)
        unreached = find_unused_parts(model, probe.modules, called)
        if unreached and not _works_without(model, unreached):
            unreached = ()
        num_weights = sum(weight.numel() for weight in model.parameters())
        num_in_linears = sum(part.weight.numel() for _, part in iter_fp8_linears(model))
        for _, (part, *names) in rounding_experts(model):
            num_in_linears += sum(getattr(part, name).numel() for name in names)
    except ModelError as error:
        raise ModelError(f"{config.model_type} models cannot be used: {error}; {OTHERS}") from None
    except Exception as error:
        raise ModelError(
            f"{config.model_type} models cannot be used: {_explain_failure(error)}; {OTHERS}"
        ) from None
    if recurrent:
        _check_hybrid(config, probe, states, len(recurrent))
    else:
        _check_layers(config, probe)
    for call in probe.calls:
        dtypes = {call.q_THK.dtype, call.k_TGK.dtype, call.v_TGV.dtype}
        if call.q_THK.shape[0] != _NUM_TOKENS or dtypes != {dtype}:
            raise ModelError(
                f"{config.model_type} models cannot be used: layer {call.layer} must call "
                f"attention with {_NUM_TOKENS} rows in {dtype}, got {call.q_THK.shape[0]} rows "
                f"in {dtypes}"
            )
    if ranks > 1:
        if recurrent:
            raise ModelError(
                f"{config.model_type} models cannot be divided among GPUs: they have recurrent "
                f"layers; use one GPU ({arg('tensor_parallel_size', 1)})"
            )
        probe = _probe_shard(model, config, ranks)
    layer_states = tuple(states.states[index] for index in range(len(recurrent)))
    delta: DeltaSpec | None = None
    if recurrent:
        delta = make_delta_spec([layer.module for layer in recurrent], layer_states, dtype)
    return ProbeResult(
        tuple(probe.calls),
        tuple(probe.sources),
        vocab_size,
        unreached,
        layer_states,
        num_weights,
        num_in_linears,
        delta,
    )


def _build_meta_model(
    config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    """Return the model without data, on the meta device."""
    with torch.device("meta"):
        model: PreTrainedModel = auto_class(config).from_config(
            # Building a model writes into its configuration.
            copy.deepcopy(config),
            dtype=dtype,
            attn_implementation=attention_of_text(config, PROBE),
            # "eager" loops over experts. Grouped matmuls do not accept meta tensors.
            experts_implementation="eager",
            trust_remote_code=trust_remote_code,
        )
        return model.eval()


def _probe_shard(model: PreTrainedModel, config: PretrainedConfig, ranks: int) -> Probe:
    """Cut a model to the shard of rank 0, and return its attention calls."""
    shard(model, 0, ranks)
    try:
        return _pass(model)[0]
    except RuntimeError as error:
        raise ModelError(
            f"{config.model_type} models cannot be divided among {ranks} GPUs: the forward pass "
            f"of a shard failed with {summarize_error(error)}; use one GPU "
            f"({arg('tensor_parallel_size', 1)})"
        ) from None


def _works_without(model: nn.Module, parts: Sequence[str]) -> bool:
    """Return whether a pass over text still works without these parts.

    Some models read the device of such a part, although they do not call it.
    """
    dropped = {name: model.get_submodule(name) for name in parts}
    drop_parts(model, parts)
    try:
        _pass(model)
    except Exception:
        for name, part in dropped.items():
            above, _, child = name.rpartition(".")
            setattr(model.get_submodule(above), child, part)
        return False
    return True


def _pass(model: nn.Module) -> tuple[Probe, int]:
    """Run the model without data; return its attention calls and the number of logits of a row."""
    probe = Probe()
    ids_1T = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device="meta")
    # torch's modes have no annotations.
    chosen = _EmptyExpertMode()  # type: ignore[no-untyped-call]
    with chosen, _MetaValueMode(), _disable_kernels(), torch.inference_mode():
        logits: Tensor = model(
            input_ids=ids_1T, position_ids=ids_1T, treegen=probe, **forward_options(model)
        ).logits
    return probe, logits.shape[-1]


@contextmanager
def _disable_kernels() -> Iterator[None]:
    """Disable kernels of other packages in recurrent layers, because they need data.

    transformers skips them while a model is exported. This also silences the warnings that they are
    not installed.
    """
    name, logger = "is_torchdynamo_exporting", logging.getLogger(hub_kernels.__name__)
    before, level = getattr(hub_kernels, name), logger.level
    setattr(hub_kernels, name, lambda: True)
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        setattr(hub_kernels, name, before)
        logger.setLevel(level)


@contextmanager
def _calls() -> Iterator[set[nn.Module]]:
    """Yield a set that collects every module called while the context is open."""
    called: set[nn.Module] = set()

    def note(module: nn.Module, _inputs: object) -> None:
        called.add(module)

    with register_module_forward_pre_hook(note):
        yield called


def _explain_failure(error: Exception) -> str:
    """Return why a pass without data failed, as far as the error shows."""
    if isinstance(error, KeyError) and error.args == (PROBE,):
        return OWN_ATTENTION
    if isinstance(error, NotImplementedError) and "meta tensor" in str(error):
        return "its layers depend on values that only a forward pass with data has"
    if isinstance(error, ImportError):
        return f"a package is missing: {summarize_error(error)}"
    return (
        "a forward pass on text with treegen's attention function failed with "
        f"{type(error).__name__}: {summarize_error(error)}"
    )


def _check_hybrid(
    config: PretrainedConfig, probe: Probe, states: StateProbe, num_recurrent: int
) -> None:
    """Raise ModelError unless attention calls are in order and all recurrent layers have a state.

    Layers that do neither may have only an MLP; the load check covers them.
    """
    layers = [call.layer for call in probe.calls]
    silent = sorted({*range(num_recurrent)} - states.states.keys())
    if not layers:
        reason = NO_ATTENTION
    elif layers != sorted(layers):
        reason = "its layers do not call attention in order"
    elif silent or not all(states.states.values()):
        reason = f"{len(silent) or 1} of its {num_recurrent} recurrent layers have no known state"
    else:
        return
    raise ModelError(f"{config.model_type} models cannot be used: {reason}; {OTHERS}")


def _check_layers(config: PretrainedConfig, probe: Probe) -> None:
    """Raise ModelError unless each layer called the attention function once, in order."""
    num_layers = config.get_text_config(decoder=True).num_hidden_layers
    layers = [call.layer for call in probe.calls]
    if layers and layers == list(range(num_layers)):
        return
    if has_loops(config.get_text_config(decoder=True)) and {*layers} == {*range(num_layers)}:
        return
    (layer, times), *_ = Counter(layers).most_common(1) or [(0, 0)]
    silent = sorted({*range(num_layers)} - {*layers})
    if num_layers < 1:
        reason = f"the number of layers in config.json must be at least 1, got {num_layers}"
    elif not layers:
        reason = OWN_ATTENTION
    elif NO_NUMBER in layers:
        reason = f"{type(probe.modules[0]).__name__} has no layer index (layer_idx)"
    elif times > 1:
        reason = (
            f"each layer must call attention once in a forward pass, but layer {layer} calls "
            f"attention {times} times"
        )
    elif silent:
        reason = (
            f"{len(silent)} of its {num_layers} layers do not call attention, such as layer "
            f"{silent[0]}"
        )
    else:
        reason = (
            f"its {num_layers} layers must call attention once each and in order, got "
            f"{len(layers)} calls"
        )
    raise ModelError(f"{config.model_type} models cannot be used: {reason}; {OTHERS}")
