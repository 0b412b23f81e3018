"""The object that a recurrent layer of transformers gets in place of a cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from treegen.errors import ModelError

StateKey = tuple[str, int]
"""Kind and index of a layer's state, as in StateSpec."""

# transformers takes `cache` from 5.24 on; models of other authors keep the older names.
CACHE_ARGUMENTS: Final = ("cache", "cache_params", "past_key_values", "past_key_value")
"""The argument names under which modules of transformers take a cache."""


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """Return the argument name under which a module takes its cache; outputs return it likewise.

    Args:
        forward: The method of the module. It may be decorated, such as to map older names.

    Returns:
        The name of the argument, or None if the method takes no cache.
    """
    names = inspect.signature(forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in names), None)


class LayerStates:
    """The states of N sequences in one recurrent layer, in the form of a transformers cache.

    It has the methods that layers call in transformers 5.17 to 5.24.

    Attributes:
        values: The states, [N, ...] each; empty at the start of texts. The layer may change them in
            place.
    """

    record_past = False

    def __init__(
        self, values: dict[StateKey, Tensor], widths: Mapping[StateKey, int] | None = None
    ) -> None:
        """Wrap the states of a layer.

        Args:
            values: The states.
            widths: Widths of convolution windows, if known.
        """
        self.values, self._widths = values, widths or {}

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Return whether the sequences have tokens before these."""
        return bool(self.values)

    def is_recording_past(self, layer_idx: int | None = None) -> bool:
        """Return whether to keep more than the last window: always False."""
        return False

    def get_conv_state(self, layer_idx: int | None = None, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs of a convolution [N, channels, width]; None if there are none."""
        return self.values.get(("conv", state_idx))

    def get_recurrent_state(
        self, layer_idx: int | None = None, state_idx: int = 0
    ) -> Tensor | None:
        """Return the recurrent state [N, ...]; None at the start of texts."""
        return self.values.get(("recurrent", state_idx))

    def get_linear_cache(self, layer_idx: int | None = None) -> Tensor | None:
        """Return the state of linear attention [N, ...]; None at the start of texts."""
        return self.values.get(("linear", 0))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_kwargs: Any,
    ) -> Tensor:
        """Append inputs of a convolution to its window.

        Args:
            conv_states: New inputs [N, channels, tokens].
            layer_idx: Ignored.
            state_idx: The index of the convolution in the layer.
            conv_kernel_size: The width of the window. Default: that of the stored window, if known,
                else the number of new inputs.
            **_kwargs: Ignored.

        Returns:
            The inputs after those of the previous window.
        """
        key = "conv", state_idx
        width = conv_kernel_size or self._widths.get(key) or conv_states.shape[-1]
        before = self.values.get(key)
        if before is not None:
            inputs = torch.cat([before, conv_states], dim=-1)
        else:
            num_missing = max(width - conv_states.shape[-1], 0)
            inputs = (
                nn.functional.pad(conv_states, (num_missing, 0)) if num_missing else conv_states
            )
        self.values[key] = inputs[..., -width:]
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int | None = None, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Store a recurrent state and return it.

        Args:
            recurrent_states: The state [N, ...].
            layer_idx: Ignored.
            state_idx: The index of the state in the layer.
            **_: Ignored.
        """
        self.values["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Store a state of linear attention."""
        self.values["linear", 0] = linear_cache

    # transformers 5.17 reads a layer of the cache where later releases call a method.

    @property
    def layers(self) -> _SameLayerList:
        """This object as the cache of any layer."""
        return _SameLayerList(self)

    @property
    def conv_states(self) -> dict[int, Tensor]:
        """Convolution windows by index."""
        return {index: value for (kind, index), value in self.values.items() if kind == "conv"}

    @property
    def recurrent_states(self) -> dict[int, Tensor]:
        """Recurrent states by index."""
        return {index: v for (kind, index), v in self.values.items() if kind == "recurrent"}


class _SameLayerList:
    def __init__(self, states: LayerStates) -> None:
        self._states = states

    def __getitem__(self, _layer: int) -> LayerStates:
        return self._states


def forward_options(module: nn.Module) -> dict[str, bool]:
    """Return the keywords of `forward` with which a model computes logits and nothing else."""
    names = inspect.signature(module.forward).parameters
    # The loss that balances experts costs time, and torch 2.11 fails on it without data.
    routed = {"output_router_logits": False} if "output_router_logits" in names else {}
    return {"use_cache": False, **routed}


def forward_in_two_steps(module: nn.Module, ids_1N: Tensor) -> Tensor:
    """Return the logits [N, V] of a text: those of its last token from the state before it."""
    positions_1N = torch.arange(ids_1N.shape[1], device=ids_1N.device)[None]
    name = cache_argument(module.forward)
    if name is None:
        raise ModelError(f"{type(module).__name__} keeps a state but accepts no cache")
    cache: dict[str, Any] = {}
    logits = []
    for part in (slice(None, -1), slice(-1, None)):
        out = module(
            input_ids=ids_1N[:, part],
            position_ids=positions_1N[:, part],
            **(forward_options(module) | {"use_cache": True}),
            **cache,
        )
        cache = {name: getattr(out, name)}
        logits.append(out.logits[0])
    return torch.cat(logits)
