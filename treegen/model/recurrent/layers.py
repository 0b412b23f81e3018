"""Run stock recurrent layers of transformers on states in state slots.

A layer with a recurrent state or a convolution reads its state from the cache that the model was
called with, and stores the state after its tokens there. treegen calls the model without a cache.
Instead, it wraps each such layer and calls it once per run of a pass, with a batch of N sequences
of equal length and an object in place of the cache; the N states are gathered from slots before the
call and scattered into slots after it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from treegen.common.lifetimes import use_context_value
from treegen.common.spec import StateSpec
from treegen.errors import ModelError
from treegen.model.recurrent.layer_states import (
    CACHE_ARGUMENTS,
    LayerStates,
    StateKey,
    cache_argument,
)
from treegen.model.recurrent.operators import forward
from treegen.model.recurrent.state_batch import StateBatch, StateRun

# T tokens of a pass, N sequences that run together, L tokens of each

_UPDATES: Final = frozenset({"update_conv_state", "update_recurrent_state", "set_linear_cache"})
_WRAPPED: Final = "treegen_recurrent"


class _Pass(Protocol):
    """The states of one pass, on which recurrent layers run."""

    def run(self, layer: RecurrentLayer, arguments: dict[str, Any]) -> Any:
        """Return the output of a layer."""


_pass: ContextVar[_Pass | None] = ContextVar("treegen_recurrent_pass", default=None)


class RecurrentLayer:
    """A transformers module that keeps a state; an instance replaces its `forward`.

    Attributes:
        module: The module.
        index: Its index among the recurrent layers of the model.
        name: The name of its class.
    """

    def __init__(self, module: nn.Module, index: int, cache_name: str) -> None:
        """Record the module's forward; `wrap_recurrent` then replaces it.

        Args:
            module: The module.
            index: Its index among the recurrent layers of the model.
            cache_name: The name under which it takes a cache.
        """
        self.module, self.index, self.name = module, index, type(module).__name__
        self._forward: Callable[..., Any] = module.forward
        self._signature = inspect.signature(self._forward)
        self._cache_name = cache_name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output, computed on the states of the current pass, if any."""
        current = _pass.get()
        if current is None:
            return self._forward(*args, **kwargs)
        # The pass has the states, so drop any cache argument, whatever its name.
        without_cache = {
            name: value for name, value in kwargs.items() if name not in CACHE_ARGUMENTS
        }
        arguments = dict(self._signature.bind_partial(*args, **without_cache).arguments)
        # Other keywords are for attention.
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                arguments.pop(name, None)
        return current.run(self, arguments)

    def forward(self, arguments: dict[str, Any], states: LayerStates) -> Any:
        """Run the module itself on some sequences and their states."""
        return self._forward(**{**arguments, self._cache_name: states})


def wrap_recurrent(module: nn.Module) -> list[RecurrentLayer]:
    """Wrap the recurrent layers of a model, unless already wrapped, and return them in order.

    Raises:
        ModelError: a layer that keeps a state has no cache argument.
    """
    layers: list[RecurrentLayer] = []
    kinds = {kind for kind in {type(part) for part in module.modules()} if _keeps_state(kind)}
    for part in module.modules():
        if type(part) not in kinds:
            continue
        layer = getattr(part, _WRAPPED, None)
        if layer is None:
            cache_name = cache_argument(part.forward)
            if cache_name is None:
                raise ModelError(f"{type(part).__name__} keeps a state outside its arguments")
            layer = RecurrentLayer(part, len(layers), cache_name)
            setattr(part, _WRAPPED, layer)
            part.forward = layer
        layers.append(layer)
    return layers


def _keeps_state(kind: type[nn.Module]) -> bool:
    """Return whether some method of a class stores a new state in a cache."""
    for base in kind.__mro__:
        if base is nn.Module:
            return False
        for method in vars(base).values():
            code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
            if code is not None and _UPDATES & set(code.co_names):
                return True
    return False


def use_states(current: _Pass | None) -> AbstractContextManager[None]:
    """While open, recurrent layers run on the states of this pass; None runs them unchanged."""
    return use_context_value(_pass, current)


class StateProbe:
    """A pass that records which states the layers keep.

    Attributes:
        states: The states of each layer, by its index.
    """

    def __init__(self) -> None:
        """Start without any states."""
        self.states: dict[int, tuple[StateSpec, ...]] = {}

    def run(self, layer: RecurrentLayer, arguments: dict[str, Any]) -> Any:
        """Run a layer on the whole pass as one sequence."""
        if layer.index in self.states:
            raise ModelError(f"{layer.name} runs twice in one pass, so it would need two states")
        states = LayerStates({})
        out = layer.forward(arguments, states)
        first = dict(states.values)
        with _UseRecorder(list(first.values())) as recorder:
            layer.forward(arguments, states)
        self.states[layer.index] = tuple(
            StateSpec(
                kind,
                index,
                tuple(value.shape[1:]),
                str(value.dtype).removeprefix("torch."),
                value.dtype.itemsize,
                is_stepwise=id(value) not in recorder.used,
            )
            for (kind, index), value in sorted(first.items())
        )
        return out


class _UseRecorder(TorchFunctionMode):
    """Records which of some tensors are used in computations while it is active.

    Some layers continue from a state by one token only, and treat several tokens as the start of a
    text.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._watched = {id(tensor) for tensor in tensors}
        self.used: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        if getattr(func, "__name__", "") != "__get__":  # reading a shape or type does not count
            self.used |= {id(leaf) for leaf in leaves} & self._watched
        return func(*args, **(kwargs or {}))


class SlotPass:
    """A pass over states in slots that uses treegen's own operators."""

    def __init__(self, batch: StateBatch) -> None:
        self._batch = batch

    def run(self, layer: RecurrentLayer, arguments: dict[str, Any]) -> Any:
        """Run a layer on the whole pass."""
        tensors = self._batch.layers[layer.index]
        return forward(layer.module, arguments["hidden_states"], tensors)


class StatePass:
    """A pass over states in slots that runs transformers' own layers."""

    def __init__(self, batch: StateBatch, specs: tuple[tuple[StateSpec, ...], ...]) -> None:
        """Prepare the pass.

        Args:
            batch: The runs of the pass and the states.
            specs: The states of each layer.
        """
        self._batch = batch
        self._keys = [[(spec.kind, spec.index) for spec in layer_specs] for layer_specs in specs]
        self._stepwise = [any(spec.is_stepwise for spec in layer_specs) for layer_specs in specs]

    def run(self, layer: RecurrentLayer, arguments: dict[str, Any]) -> Any:
        """Run a layer on each run of the pass; return its outputs for the whole pass."""
        keys, tensors = self._keys[layer.index], self._batch.layers[layer.index]
        widths = {key: t.shape[-1] for key, t in zip(keys, tensors, strict=True)}
        parts: list[tuple[StateRun, Any]] = []
        num_tokens = next(v.shape[1] for v in arguments.values() if isinstance(v, Tensor))
        for run in self._batch.runs:
            values: dict[StateKey, Tensor] = {}
            if run.read_slots_N is not None:
                values = {
                    key: tensor.index_select(0, run.read_slots_N)
                    for key, tensor in zip(keys, tensors, strict=True)
                }
            states = LayerStates(values, widths)
            run_arguments = {name: _gather_run(v, run, num_tokens) for name, v in arguments.items()}
            if self._stepwise[layer.index] and values and run.length > 1:
                parts.append((run, _forward_stepwise(layer, run_arguments, states, run)))
            else:
                parts.append((run, layer.forward(run_arguments, states)))
            for key, tensor in zip(keys, tensors, strict=True):
                tensor.index_copy_(0, run.write_slots_N, states.values[key].to(tensor.dtype))
        return _scatter_outputs(parts, num_tokens)


def _forward_stepwise(
    layer: RecurrentLayer, arguments: dict[str, Any], states: LayerStates, run: StateRun
) -> Any:
    """Return the output of a layer that computes the tokens of a run one after another."""
    outs = [
        layer.forward({n: _token(v, run, at) for n, v in arguments.items()}, states)
        for at in range(run.length)
    ]
    return _stack_tokens(outs, run.num)


def _token(value: Any, run: StateRun, at: int) -> Any:
    """Return one token per sequence from an argument [N, L, ...]."""
    if isinstance(value, tuple | list):
        return type(value)(_token(item, run, at) for item in value)
    if not isinstance(value, Tensor) or value.shape[:2] != (run.num, run.length):
        return value
    return value[:, at : at + 1]


def _stack_tokens(outs: list[Any], num: int) -> Any:
    """Return outputs [N, 1, ...] of single tokens as one [N, L, ...]."""
    if isinstance(outs[0], tuple):
        return tuple(_stack_tokens([out[at] for out in outs], num) for at in range(len(outs[0])))
    if not isinstance(outs[0], Tensor) or outs[0].shape[:2] != (num, 1):
        return None
    return torch.cat(outs, dim=1)


def _gather_run(value: Any, run: StateRun, num_tokens: int) -> Any:
    """Return a run's part of an argument: [1, T, ...] becomes [N, L, ...]."""
    if isinstance(value, tuple | list):
        return type(value)(_gather_run(item, run, num_tokens) for item in value)
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[:2] != (1, num_tokens):
        return value
    return value[0][run.rows].view(run.num, run.length, *value.shape[2:])


def _scatter_outputs(parts: list[tuple[StateRun, Any]], num_tokens: int) -> Any:
    """Return outputs [N, L, ...] of all runs as one [1, T, ...]; other outputs become None."""
    run, first = parts[0]
    if isinstance(first, tuple):
        columns = [[(run, out[at]) for run, out in parts] for at in range(len(first))]
        return tuple(_scatter_outputs(column, num_tokens) for column in columns)
    # A state next to the output may by chance be as wide as one of the runs is long.
    if not all(isinstance(out, Tensor) and out.shape[:2] == (r.num, r.length) for r, out in parts):
        return None
    if len(parts) == 1 and isinstance(run.rows, slice):
        return first.reshape(1, num_tokens, *first.shape[2:])
    outputs = first.new_empty(num_tokens, *first.shape[2:])
    for run, out in parts:
        outputs[run.rows] = out.reshape(run.num * run.length, *out.shape[2:])
    return outputs[None]
