"""The shape of a model: what a plan and a cache need to know of it. No torch here."""

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
class ModelSpec:
    """One model: its layers, its vocabulary, its context.

    name: what messages call it: its directory or its hub name.
    model_type: what transformers calls its family.
    layers: its attention layers.
    vocab_size: logits of a token.
    context_length: tokens of a text at most.
    eos_token_ids: the ids that end a text.
    itemsize: bytes of one number in the cache.
    windows: the sliding window of each layer; None for a layer that sees all keys.
    unreached: parts of the model that a text never reaches (image and sound towers).
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

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token takes over all layers."""
        numbers = sum(
            layer.kv_heads * (layer.k_dim + layer.v_dim)
            for layer in self.layers
            if layer.shared_with is None
        )
        return numbers * self.itemsize
