"""The shape of a model: what a plan and a cache need to know of it. No torch here."""

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The keys and values of one attention layer.

    kv_heads: key heads, and as many value heads.
    k_dim, v_dim: numbers in one head's key and value.
    shared_with: an earlier layer whose keys and values this one uses as they are. Such a layer
    needs no memory of its own.
    """

    kv_heads: int
    k_dim: int
    v_dim: int
    shared_with: int | None = None


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One tensor of the state that a recurrent layer keeps of a sequence.

    kind: what it is to the layer: "conv", "recurrent" or "linear".
    index: which of that kind.
    shape: its shape for one sequence.
    dtype: its type by torch's name.
    itemsize: bytes of one number.
    is_stepwise: whether the layer goes on from it by one token at a time only.
    """

    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    is_stepwise: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes for one sequence."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model: its layers, its vocabulary, its context.

    name: what messages call it: its directory or its hub name.
    model_type: what transformers calls its family.
    layers: its layers that attend.
    vocab_size: logits of a token.
    context_length: tokens of a text at most.
    eos_token_ids: the ids that end a text.
    itemsize: bytes of one number in the cache.
    windows: the sliding window of each layer that attends; None for a layer that sees all keys.
    unreached: parts of the model that a text never reaches (image and sound towers).
    states: what each recurrent layer keeps of a sequence; empty for a model without any.
    num_weights: numbers in all weights that a text reaches.
    num_in_linears: those of them in linear layers that may run in FP8.
    """

    name: str
    model_type: str
    layers: tuple[LayerSpec, ...]
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    itemsize: int
    windows: tuple[int | None, ...] = ()
    unreached: tuple[str, ...] = ()
    states: tuple[tuple[StateSpec, ...], ...] = ()
    num_weights: int = 0
    num_in_linears: int = 0

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one sequence over all recurrent layers."""
        return sum(map(sum_bytes, self.states))

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token takes over all layers."""
        numbers = sum(
            layer.kv_heads * (layer.k_dim + layer.v_dim)
            for layer in self.layers
            if layer.shared_with is None
        )
        return numbers * self.itemsize


def sum_bytes(states: Iterable[StateSpec]) -> int:
    """Bytes of the state of one sequence in one layer."""
    return sum(state.num_bytes for state in states)
