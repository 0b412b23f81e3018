"""The shape of a model: what plans and caches need to know about it. No torch here."""

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from treegen.errors import ModelWarning


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Shape of keys and values in multi-head latent attention (MLA, DeepSeek-V2).

    The cache keeps one latent per token, from which each head derives its key and its value by a
    product. The last numbers of a key are rotated, and the same for all heads.
    """

    heads: int
    """Number of query heads, which is also the number of key and value heads."""
    rank: int
    """Numbers per latent."""
    rope: int
    """Rotated numbers per token, which are stored after the latent."""
    nope: int
    """Numbers of a head's key that are derived from the latent."""
    v_dim: int
    """Numbers of a head's value."""

    @property
    def cached_dim(self) -> int:
        """Numbers stored per token."""
        return self.rank + self.rope

    @property
    def k_dim(self) -> int:
        """Numbers in one head's key."""
        return self.nope + self.rope

    @property
    def expanded(self) -> int:
        """Numbers in the keys and values of all heads, derived from one token's latent."""
        return self.heads * (self.k_dim + self.v_dim)

    def copy_pages(self, cached_itemsize: int, size: int) -> int:
        """Return the number of pages for expanded keys and values per page of tokens.

        Args:
            cached_itemsize: Bytes of a number in a page.
            size: Bytes of a number of the expanded keys and values.
        """
        pages = -(-self.expanded * size // (self.cached_dim * cached_itemsize))
        while pages * self.cached_dim * cached_itemsize % size:
            pages += 1
        return pages


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Shape of the keys and values of one attention layer."""

    kv_heads: int
    """Number of key heads, which is also the number of value heads."""
    k_dim: int
    """Number of elements of one head's key."""
    v_dim: int
    """Number of elements of one head's value."""
    shared_with: int | None = None
    """Index of an earlier layer whose keys and values this layer reuses. Such a layer needs no
    memory of its own."""
    latent: LatentSpec | None = None
    """How keys and values are derived from latents; None if they are stored themselves. With
    latents, one head is stored, and its value is the first v_dim numbers of its key, the latent."""
    index_dim: int = 0
    """Number of elements of the index key by which later tokens select a token; 0 for a layer
    without an indexer. A layer that reuses keys and values may have index keys of its own."""

    @property
    def numbers(self) -> int:
        """Numbers stored per token, if the layer needs memory of its own."""
        return self.kv_heads * (self.k_dim + (0 if self.latent is not None else self.v_dim))

    @property
    def expanded(self) -> int:
        """Numbers in the keys and values of all heads."""
        return self.numbers if self.latent is None else self.latent.expanded


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One tensor of the state that a recurrent layer keeps per sequence."""

    kind: str
    """Its kind in the layer: "conv", "recurrent" or "linear"."""
    index: int
    """Its index among the tensors of that kind."""
    shape: tuple[int, ...]
    """Its shape for one sequence."""
    dtype: str
    """Name of its torch type."""
    itemsize: int
    """Bytes per number."""
    is_stepwise: bool = False
    """Whether the layer can continue from it only one token at a time."""

    @property
    def num_bytes(self) -> int:
        """Bytes for one sequence."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Sizes of update lists, which keep updates of a recurrent layer's state to apply later.

    Rows that start from one shared state need no state of their own for a while: each keeps a list
    of its updates, with a key and a value per token. Lists are stored in pages. A state slot can be
    cut into `pages` pages, each with room for `page_tokens` updates.
    """

    k_heads: int
    """Heads of keys and queries; each serves v_heads / k_heads heads of values."""
    v_heads: int
    """Heads of values."""
    k_dim: int
    """Number of elements of a key."""
    v_dim: int
    """Number of elements of a value."""
    itemsize: int
    """Bytes per number of a list."""
    corrects: bool = True
    """Whether a value is corrected by what the state holds under its key, as in the gated delta
    rule, but not in Mamba2."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one update in one layer: key, value and gate of all heads."""
        return self.k_heads * self._head_token_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of a float32 state in one layer."""
        return 4 * self.v_heads * self.k_dim * self.v_dim

    @property
    def _head_token_bytes(self) -> int:
        values = self.v_heads // self.k_heads
        return 4 * values + (self.k_dim + values * self.v_dim) * self.itemsize

    @property
    def pages(self) -> int:
        """Number of pages that a state slot can be cut into."""
        for pages in (16, 8, 4, 2):
            if self._tokens_of(pages) >= _MIN_UPDATES:
                return pages
        return 1

    @property
    def page_tokens(self) -> int:
        """Number of updates that a page has room for; 0 if a state slot has no room for one."""
        return self._tokens_of(self.pages)

    def _tokens_of(self, pages: int) -> int:
        block = self.state_bytes // (pages * self.k_heads)
        gates = 4 * (self.v_heads // self.k_heads)
        tokens = block // self._head_token_bytes
        # Keys start at a multiple of 16 bytes.
        while (
            tokens
            and -(-tokens * gates // 16) * 16 + tokens * (self._head_token_bytes - gates) > block
        ):
            tokens -= 1
        return tokens

    @property
    def own_tokens(self) -> int:
        """Number of updates that a row with its own state lists before it applies them, by cost.

        Applying n updates costs one read and one write of the state. Until then, each step reads n
        / 2 updates on average. The total cost is lowest at the square root of four states' worth of
        updates.
        """
        return max(math.isqrt(4 * self.state_bytes // self.token_bytes), 1)

    @property
    def own_pages(self) -> int:
        """Number of pages for these updates."""
        return max(round(self.own_tokens / self.page_tokens), 1)

    def shared_tokens(self, siblings: int) -> int:
        """Return the number of updates that a row lists before it gets its own state, by cost.

        With its own state a row reads that state and own_tokens / 2 updates.

        Args:
            siblings: Number of rows that start from the same state, and read it once for all of
                them.
        """
        saved_updates = self.state_bytes * (siblings - 1) // max(siblings, 1) // self.token_bytes
        return min(
            saved_updates + self.own_tokens, (self.pages + self.own_pages) * self.page_tokens
        )

    def row_slots(self, max_tokens: int, siblings: int) -> float:
        """Return the state slots that a row takes; pages are fractions of a slot.

        Args:
            max_tokens: Maximum number of tokens of the row.
            siblings: Number of rows that start from the same state.
        """
        to_come = max_tokens - 1  # the last token is never an input
        if to_come > self.shared_tokens(siblings):
            return 1 + self.own_pages / self.pages
        return max(-(-to_come // self.page_tokens), 1) / self.pages


_MIN_UPDATES = 8  # minimum number of updates per page


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model: its layers, its vocabulary, its context."""

    name: str
    """Its name in messages: its directory or its hub name."""
    model_type: str
    """The name of its family in transformers."""
    layers: tuple[LayerSpec, ...]
    """Its attention layers."""
    vocab_size: int
    """Logits per token."""
    context_length: int
    """Maximum number of tokens of a text."""
    eos_token_ids: tuple[int, ...]
    """The ids that end a text."""
    itemsize: int
    """Bytes per number in the cache."""
    windows: tuple[int | None, ...] = ()
    """The sliding window of each attention layer; None for a layer that sees all keys."""
    chunk: int | None = None
    """Number of positions of a chunk, if some layers attend within chunks; else None."""
    unreached: tuple[str, ...] = ()
    """Parts of the model that a text never reaches (image and sound towers)."""
    states: tuple[tuple[StateSpec, ...], ...] = ()
    """The state tensors of each recurrent layer; empty for a model without recurrent layers."""
    num_weights: int = 0
    """Numbers in all weights that a text reaches."""
    num_in_linears: int = 0
    """Number of these in linear layers that may run in FP8."""
    delta: DeltaSpec | None = None
    """Sizes of update lists of these states; None if every row has its own states."""
    recommended: tuple[tuple[str, Any], ...] = ()
    """Sampling parameters that the checkpoint recommends, as pairs of names and values of
    SamplingParams; empty if it recommends none."""
    recommended_note: str = ""
    """One line on how samples with these parameters differ from those of transformers' `generate`;
    empty if they do not."""
    index_topk: int = 0
    """Number of keys that a token selects, in layers with an indexer; 0 if no layer selects keys,
    or the context has no more of them."""
    index_pool: int = 1
    """Number of tokens whose index keys are pooled into one key; 1 if none are pooled."""
    index_selections: int = 1
    """Number of times that a token selects keys in a layer, each time for some heads."""
    num_heads: int = 0
    """Query heads of the layer that has most of them."""
    copy_pages: int = 0
    """For a model with latents, the number of pages for expanded keys and values per page of
    tokens, in the type of the computation."""

    def take_recommended(self) -> dict[str, Any]:
        """Return the recommended sampling parameters, and warn about those that are not supported.

        Returns:
            Arguments of SamplingParams by name; empty if nothing is recommended.
        """
        if self.recommended_note:
            warnings.warn(self.recommended_note, ModelWarning, stacklevel=3)
        return dict(self.recommended)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one sequence over all recurrent layers."""
        return sum(map(sum_bytes, self.states))

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys, values and index keys per token over all layers."""
        layers = (layer for layer in self.layers if layer.shared_with is None)
        return sum(layer.numbers for layer in layers) * self.itemsize + self.index_bytes_per_token

    @property
    def index_bytes_per_token(self) -> int:
        """Bytes of index keys per token over all layers; 0 for a model that selects no keys."""
        return sum(layer.index_dim for layer in self.layers) * self.itemsize

    @property
    def expanded_bytes_per_token(self) -> int:
        """Bytes per token if keys and values of all heads were stored, as in most models."""
        layers = (layer for layer in self.layers if layer.shared_with is None)
        return sum(layer.expanded for layer in layers) * self.itemsize + self.index_bytes_per_token

    @property
    def latent(self) -> LatentSpec | None:
        """How keys and values are derived from latents.

        None unless it is the same in all layers, and each layer keeps its own latents: expanded
        copies are stored with the latents, and each layer expands them by its own weights.
        """
        latents = {layer.latent for layer in self.layers}
        is_shared = any(layer.shared_with is not None for layer in self.layers)
        return latents.pop() if len(latents) == 1 and not is_shared else None


def sum_bytes(states: Iterable[StateSpec]) -> int:
    """Return the bytes of the state of one sequence in one layer."""
    return sum(state.num_bytes for state in states)
