"""The shape of a model: what a plan and a cache need to know of it. No torch here."""

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from treegen.errors import ModelWarning


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Keys and values of which a token keeps a latent (multi-head latent attention, DeepSeek-V2).

    Each head makes its key and its value of the latent by a product. The last numbers of a key are
    rotated, and the same for all heads.

    heads: query heads, and as many heads of keys and values.
    rank: numbers of a latent.
    rope: rotated numbers, which are kept behind it.
    nope: numbers of a head's key that are made of the latent; v_dim: those of its value.
    """

    heads: int
    rank: int
    rope: int
    nope: int
    v_dim: int

    @property
    def kept(self) -> int:
        """Numbers that are kept of a token."""
        return self.rank + self.rope

    @property
    def k_dim(self) -> int:
        """Numbers in one head's key."""
        return self.nope + self.rope

    @property
    def expanded(self) -> int:
        """Numbers in the keys and values of all heads, which are made of one token's latent."""
        return self.heads * (self.k_dim + self.v_dim)

    def copy_pages(self, kept_size: int, size: int) -> int:
        """Pages that the keys and values of all heads take, for each page of tokens.

        Args:
            kept_size: Bytes of a number in a page.
            size: Bytes of a number of these keys and values.
        """
        pages = -(-self.expanded * size // (self.kept * kept_size))
        while pages * self.kept * kept_size % size:
            pages += 1
        return pages


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The keys and values of one attention layer.

    kv_heads: key heads, and as many value heads.
    k_dim, v_dim: numbers in one head's key and value.
    shared_with: an earlier layer whose keys and values this one uses as they are. Such a layer
    needs no memory of its own.
    latent: how they are made of latents. Then one head is kept, and its value is the first v_dim
    numbers of its key: the latent. None if keys and values are kept as they are.
    """

    kv_heads: int
    k_dim: int
    v_dim: int
    shared_with: int | None = None
    latent: LatentSpec | None = None

    @property
    def numbers(self) -> int:
        """Numbers that are kept of a token, if the layer needs memory of its own."""
        return self.kv_heads * (self.k_dim + (0 if self.latent is not None else self.v_dim))

    @property
    def expanded(self) -> int:
        """Numbers in the keys and values of all heads."""
        return self.numbers if self.latent is None else self.latent.expanded


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
class DeltaSpec:
    """What a recurrent layer takes to list updates of a state without making them.

    Rows that start from one state need no state of their own for a while: each keeps a list of its
    updates, a key and a value of each token. Lists lie in pages. A slot for states can be cut into
    `pages` of them, each with room for `page_tokens` updates.

    k_heads: heads of keys and queries; each serves v_heads / k_heads heads of values.
    k_dim, v_dim: numbers in a key and in a value.
    itemsize: bytes of one number of a list.
    corrects: whether a value is corrected by what the state holds under its key. The gated delta
    rule does so, Mamba2 does not.
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    itemsize: int
    corrects: bool = True

    @property
    def token_bytes(self) -> int:
        """Bytes of one update in one layer: key, value and gate of all heads."""
        return self.k_heads * self._head_token_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of a state of float32 in one layer."""
        return 4 * self.v_heads * self.k_dim * self.v_dim

    @property
    def _head_token_bytes(self) -> int:
        values = self.v_heads // self.k_heads
        return 4 * values + (self.k_dim + values * self.v_dim) * self.itemsize

    @property
    def pages(self) -> int:
        """Pages that a slot can be cut into."""
        for pages in (16, 8, 4, 2):
            if self._tokens_of(pages) >= _FEWEST_UPDATES:
                return pages
        return 1

    @property
    def page_tokens(self) -> int:
        """Updates that a page has room for; 0 where a list does not pay."""
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
        """Updates that a row with a state of its own lists before it makes them, by cost.

        To make n updates takes to read the state and to write it. Meanwhile n / 2 of them are read
        in each step. The sum of both is least at the square root of four states' worth of updates.
        """
        return max(math.isqrt(4 * self.state_bytes // self.token_bytes), 1)

    @property
    def own_pages(self) -> int:
        """Pages for these."""
        return max(round(self.own_tokens / self.page_tokens), 1)

    def shared_tokens(self, siblings: int) -> int:
        """Updates that a row lists before it gets a state of its own, by cost.

        With a state of its own a row reads that state, and own_tokens / 2 updates.

        Args:
            siblings: Rows that start from the same state, and read it once for all of them.
        """
        spared = self.state_bytes * (siblings - 1) // max(siblings, 1) // self.token_bytes
        return min(spared + self.own_tokens, (self.pages + self.own_pages) * self.page_tokens)

    def row_slots(self, max_tokens: int, siblings: int) -> float:
        """Slots that a row takes, which has so many tokens at most; pages are parts of one."""
        to_come = max_tokens - 1  # the last token is never an input
        if to_come > self.shared_tokens(siblings):
            return 1 + self.own_pages / self.pages
        return max(-(-to_come // self.page_tokens), 1) / self.pages


_FEWEST_UPDATES = 8  # in a page


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
    delta: how rows list updates of these states; None where all of them have their own states.
    recommended: how the checkpoint recommends to sample, as pairs of names and values of
    SamplingParams; empty if it does not.
    recommended_note: one line on how samples by them differ from those of transformers' `generate`;
    empty if they do not.
    copy_pages: of a model with latents, pages that the keys and values of all heads take for each
    page of tokens, in the type that it computes in.
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
    delta: DeltaSpec | None = None
    recommended: tuple[tuple[str, Any], ...] = ()
    recommended_note: str = ""
    copy_pages: int = 0

    def take_recommended(self) -> dict[str, Any]:
        """Return the recommended sampling, for use; warn of what is not taken.

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
        """Bytes of keys and values that one token takes over all layers."""
        own = (layer for layer in self.layers if layer.shared_with is None)
        return sum(layer.numbers for layer in own) * self.itemsize

    @property
    def expanded_bytes_per_token(self) -> int:
        """The same if keys and values of all heads were kept, as most models keep theirs."""
        own = (layer for layer in self.layers if layer.shared_with is None)
        return sum(layer.expanded for layer in own) * self.itemsize

    @property
    def latent(self) -> LatentSpec | None:
        """How keys and values are made of latents, if it is the same in all layers; else None."""
        found = {layer.latent for layer in self.layers}
        return found.pop() if len(found) == 1 else None


def sum_bytes(states: Iterable[StateSpec]) -> int:
    """Bytes of the state of one sequence in one layer."""
    return sum(state.num_bytes for state in states)
