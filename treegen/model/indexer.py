"""Change layers with sparse attention so that treegen can share their keys.

In layers with sparse attention, an indexer selects the keys that a token attends to. Up to a number
of keys it selects all of them (`families.dense_length`). If treegen's context ends there, the
indexer is skipped, and passes an empty tensor as the selection, which stands for all keys.

Beyond that number (`families.selects_keys`), the indexer makes its queries, keys and weights for
the tokens of a pass. treegen stores the index keys in the page pool, and selects keys of all levels
by their scores. Indexers of single keys run their own code up to the scores. Those that select
blocks of keys are written anew from their own parts, because their code also pools and selects; the
load check compares both.

A block has an index key that is pooled from those of its tokens. The last token of a block stores
this key in place of its own, which no other block needs. So a block that spans a node and its
children has a key in each of them, and a block inside a node has one for all rows below.

With any other attention function the layers work as before.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from treegen.common.version import tested_versions
from treegen.errors import ModelError
from treegen.model.batch import current_batch
from treegen.model.checkpoint.families import recurrent_types, selects_keys
from treegen.model.chunked import ScaledLayer, is_scaling_layer
from treegen.model.latent import TREEGEN_ATTENTION, LatentLayer, latent_of, make_subclass
from treegen.ops.attention.key_selection import (
    IndexForm,
    completes_block,
    read_blocks,
    read_slots,
    select_keys,
)
from treegen.ops.cache.pool import write_slots

# H heads of an indexer, T tokens, D numbers of an index key, X numbers that a token stores, B
# tokens of a block, S selected keys, C selections of a token, P rotated numbers

INDEX_KEYS: Final = "treegen_index_keys"
"""The name of the buffer that represents the page pool in a compiled indexer."""


class _DenseIndexer(nn.Module):
    """An indexer that selects all keys, without computing scores."""

    treegen_config: Any
    """The configuration of the attention layer."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return an empty selection if treegen computes attention."""
        if self.treegen_config._attn_implementation in TREEGEN_ATTENTION:
            return _make_empty(hidden_states)
        selected: Tensor = super().forward(hidden_states, *args, **kwargs)
        return selected


class _SelectingIndexer(_DenseIndexer):
    """An indexer that selects keys of treegen's levels, and runs its own code up to the scores."""

    head_dim: int
    index_topk: int
    treegen_pool: int
    """The index of the layer among those with pages."""

    def get_form(self) -> IndexForm:
        """Return which keys the indexer selects."""
        return IndexForm(self.index_topk)

    def get_dim(self) -> int:
        """Return how many numbers a token stores for the indexer."""
        return self.head_dim

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the positions of the selected keys [1, T, S] if treegen computes attention."""
        if self.treegen_config._attn_implementation != TREEGEN_ATTENTION[0]:
            return super().forward(hidden_states, *args, **kwargs)
        return self.select(hidden_states, *args, **kwargs)[None]

    def select(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the positions of the selected keys [T, S]; the arguments are the indexer's."""
        products = _IndexProducts(type(self).__name__)
        indexer: Any = super(_DenseIndexer, self)
        full_mask = hidden_states.new_ones((1, 1, 1), dtype=torch.bool)
        args = tuple(full_mask if _is_empty_tensor(value) else value for value in args)
        with products:
            indexer.forward(hidden_states, *args, **kwargs)
        return self._write_and_select(*products.read())

    def get_pool(self) -> Tensor:
        """Return the layer's pool of index keys."""
        index = current_batch().layers[self.treegen_pool].index
        assert index is not None, f"layer {self.treegen_pool} has no index keys"
        return index

    def _write_and_select(self, q_THD: Tensor, k_TD: Tensor, weights_TH: Tensor | None) -> Tensor:
        """Store new index keys and select, as `write_and_select` does, also in compiled layers."""
        form, keys = self.get_form(), getattr(self, INDEX_KEYS, None)
        if keys is None:
            return write_and_select(q_THD, k_TD, weights_TH, self.get_pool(), form)
        selected: Tensor = torch.ops.treegen.write_and_select(q_THD, k_TD, weights_TH, keys, *form)
        return selected


class _PooledIndexer(_SelectingIndexer):
    """An indexer that selects complete blocks of keys; every block has one pooled key."""

    index_kpool: int
    n_heads: int

    def get_form(self) -> IndexForm:
        """Return which keys the indexer selects."""
        return IndexForm(self.index_topk // self.index_kpool, self.index_kpool, is_pooled=True)

    def get_dim(self) -> int:
        """Return the numbers of an index key and of its gate."""
        return 2 * self.head_dim

    def select(self, hidden_states: Tensor, q_resid: Tensor, **kwargs: Any) -> Tensor:
        """Return the positions of the selected keys [T, S]."""
        part: Any = self
        q_THD = part.wq_b(q_resid)[0].unflatten(-1, (-1, self.head_dim))
        k_TD = part.k_norm(part.wk(hidden_states))[0]
        gate_TD = linear(hidden_states, part.index_kpool_compress_gate)[0]
        form, pool = self.get_form(), self.get_pool()
        blocks_TBX, _ = write_and_read(torch.cat([k_TD, gate_TD], -1), pool, form.size)
        k_TBD, gate_TBD = blocks_TBX.chunk(2, -1)
        logits_TBD = gate_TBD.float() + part.index_kpool_compress_ape.float()
        pooled_TD = (logits_TBD.softmax(1).to(k_TBD.dtype) * k_TBD).sum(1)
        weights_TH = part.weights_proj(hidden_states.to(part.weights_proj.weight.dtype))[0].float()
        scale = self.n_heads**-0.5 * part.softmax_scale
        return write_and_select(q_THD.float(), pooled_TD, weights_TH * scale, pool, form)


class _AveragedIndexer(_SelectingIndexer):
    """An indexer that selects among complete blocks by the average of their tokens' keys."""

    treegen_rotary: tuple[nn.Module]
    """The rotary embedding of the model, in a tuple so that it is not a part of the indexer."""

    def get_form(self) -> IndexForm:
        """Return which keys the indexer selects."""
        part: Any = self
        return IndexForm(part.block_topk, part.compress_ratio, is_pooled=True)

    def get_dim(self) -> int:
        """Return how many numbers a token stores for the indexer."""
        part: Any = self
        return int(part.index_head_dim)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return an empty selection if treegen computes attention: the layer calls `select`."""
        return _DenseIndexer.forward(self, hidden_states, *args, **kwargs)

    def select(self, hidden_states: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Return the positions of the selected keys [T, S].

        Args:
            hidden_states: The input of the layer.
            rotary: The cosines and sines of the tokens' positions.
        """
        part: Any = self
        heads_1TXD = part.index_qk_proj(hidden_states).unflatten(-1, (-1, part.index_head_dim))
        q_1THD, k_1T1D = heads_1TXD.split([part.index_n_heads, 1], 2)
        q_THD = _rotate(part.q_layernorm(q_1THD), *rotary)[0].float()
        form, pool = self.get_form(), self.get_pool()
        k_TBD, starts_T = write_and_read(k_1T1D[0, :, 0], pool, form.size)
        pooled_TD = part.k_layernorm(k_TBD.float().mean(1).to(k_TBD.dtype))
        rotary = self.treegen_rotary[0](hidden_states, starts_T[None])
        pooled_TD = _rotate(pooled_TD[None, :, None], *rotary)[0, :, 0]
        return write_and_select(q_THD, pooled_TD, q_THD.new_ones(q_THD.shape[:2]), pool, form)


class _LargestIndexer(_SelectingIndexer):
    """An indexer whose heads each select blocks by the highest product of their keys."""

    def get_form(self) -> IndexForm:
        """Return which keys the indexer selects."""
        part: Any = self
        blocks = part.topk_blocks, part.block_size
        return IndexForm(*blocks, local=part.local_blocks, selections=part.num_heads)

    def select(self, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], *args: Any) -> Tensor:
        """Return the positions of the keys that each head selects [T, C, S].

        The arguments are those of `_AveragedIndexer.select`.
        """
        part: Any = self
        cos_1TP, sin_1TP = (table[..., : self.head_dim] for table in rotary)
        q_1THD = part.q_norm(part.q_proj(hidden_states).unflatten(-1, (-1, self.head_dim)))
        k_1T1D = part.k_norm(part.k_proj(hidden_states)[:, :, None])
        q_THD = _rotate(q_1THD, cos_1TP, sin_1TP)[0].float()
        k_TD = _rotate(k_1T1D, cos_1TP, sin_1TP)[0, :, 0]
        return self._write_and_select(q_THD, k_TD, None)


def _rotate(x_1THD: Tensor, cos_1TP: Tensor, sin_1TP: Tensor) -> Tensor:
    """Return queries or keys whose first P numbers are rotated."""
    rotated, unrotated = x_1THD.tensor_split([cos_1TP.shape[-1]], -1)
    first, second = rotated.chunk(2, -1)
    half = torch.cat([-second, first], -1)
    rotated = rotated * cos_1TP[:, :, None] + half * sin_1TP[:, :, None]
    return torch.cat([rotated, unrotated], -1)


class _IndexProducts(TorchFunctionMode):
    """Takes the queries, keys and weights of an indexer from the factors of its matrix products.

    The first product is that of queries [1, T, H, D] and keys [1, 1, D, T]. It is not computed:
    treegen scores the keys of all levels itself. Ones [1, T, H, 1] are returned in its place, as if
    each head had a product of 1 with a single key. The indexer multiplies them by its scale, if it
    scales products, so they reach the second product as the scale of each head. That is the
    product of weights [1, T, 1, H] and scores [1, T, H, 1], and is computed as usual.

    Products of other shapes, and more or fewer of them, are an error. What the indexer computes
    between and after the products is left to the load check.
    """

    def __init__(self, name: str) -> None:
        """Set up the mode.

        Args:
            name: The name of the indexer's class, for messages.
        """
        super().__init__()
        self._name = name
        self._products: list[tuple[Tensor, ...]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.matmul or args[0].dim() != 4:
            return func(*args, **(kwargs or {}))
        left, right = args
        self._products.append((left, right))
        _, num_tokens, num_heads, dim = self._products[0][0].shape
        if len(self._products) == 1:
            self._check(left.shape[0] == 1 and right.shape == (1, 1, dim, num_tokens))
            return left.new_ones((1, num_tokens, num_heads, 1))
        shapes = (1, num_tokens, 1, num_heads), (1, num_tokens, num_heads, 1)
        self._check((left.shape, right.shape) == shapes and len(self._products) == 2)
        return func(left, right)

    def read(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries [T, H, D], the keys [T, D] and the weight of each head [T, H].

        Raises:
            ModelError: the indexer has not made both products.
        """
        self._check(len(self._products) == 2)
        (q_1THD, k_11DT), (weights_1T1H, scales_1TH1) = self._products
        return q_1THD[0], k_11DT[0, 0].T, weights_1T1H[0, :, 0] * scales_1TH1[0, ..., 0]

    def _check(self, is_known: bool) -> None:
        if not is_known:
            raise ModelError(
                f"the code of {self._name} in transformers {transformers.__version__} differs "
                "from the code that treegen supports, so treegen might select different keys; "
                f"install '{tested_versions('transformers')}'"
            )


def write_and_read(new_TX: Tensor, pool: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Store what tokens add to blocks, then read the block that each token completes.

    Args:
        new_TX: What the tokens add [T, X].
        pool: The layer's pool of index keys [pages, page_size, X].
        size: B, the number of tokens of a block.

    Returns:
        What the tokens of the block added [T, B, X], as in `read_blocks`, and the position of the
            first of them [T].
    """
    batch = current_batch()
    write_slots(pool, batch.slots_T, new_TX)
    blocks_TBX = read_blocks(
        pool, batch.levels, batch.positions_T, batch.slots_T, size, new_TX.dtype
    )
    return blocks_TBX, (batch.positions_T + 1 - size).clamp(min=0)


def write_and_select(
    q_THD: Tensor, k_TD: Tensor, weights_TH: Tensor | None, pool: Tensor, form: IndexForm
) -> Tensor:
    """Store new index keys in a layer's page pool, then select keys of all levels of the batch.

    Args:
        q_THD: Index queries [T, H, D].
        k_TD: New index keys [T, D]. Keys of blocks replace what the last tokens of blocks added.
        weights_TH: Weight of each head [T, H]; None if each head selects keys of its own.
        pool: The layer's pool of index keys [pages, page_size, X]; X is D or more.
        form: Which keys are selected.

    Returns:
        The positions of the selected keys [T, S] or [T, H, S], as in `select_keys`.
    """
    batch, pool = current_batch(), pool[..., : k_TD.shape[-1]]
    if form.is_pooled:
        is_last_T1 = completes_block(batch.positions_T, form.size)[:, None]
        k_TD = torch.where(is_last_T1, k_TD, read_slots(pool, batch.slots_T, k_TD.dtype))
    write_slots(pool, batch.slots_T, k_TD)
    return select_keys(q_THD, weights_TH, pool, batch.levels, batch.positions_T, form)


class _DenseLayer(nn.Module):
    """An attention layer that needs no mask."""

    config: Any

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, with an empty mask if treegen computes attention."""
        if self.config._attn_implementation in TREEGEN_ATTENTION:
            kwargs["attention_mask"] = _make_empty(hidden_states)
        return super().forward(hidden_states, *args, **kwargs)

    def build_attention_mask_from_topk(self, **kwargs: Any) -> Tensor | None:
        """Return no mask if treegen computes attention. Only some families call this method."""
        if self.config._attn_implementation in TREEGEN_ATTENTION:
            return None
        mask: Tensor = super().build_attention_mask_from_topk(**kwargs)  # type: ignore[misc]
        return mask


class _SelectingLayer(_DenseLayer):
    """An attention layer that attends to keys that its indexer or an earlier layer's selects."""


class _PooledLayer(_SelectingLayer):
    """A layer that hands a mask of the selected keys to attention."""

    def build_attention_mask_from_topk(self, **kwargs: Any) -> Tensor | None:
        """Return the positions of the selected keys in place of a mask."""
        mask = super().build_attention_mask_from_topk(**kwargs)
        return kwargs["topk_indices"] if mask is None else mask


class _AveragedLayer(_SelectingLayer):
    """A layer that combines the masks of its indexer and of causality."""

    indexer: _AveragedIndexer

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
    ) -> Any:
        """Run the layer, and pass the positions of the selected keys to treegen's attention."""
        if self.config._attn_implementation == TREEGEN_ATTENTION[0]:
            kwargs["indices"] = self.indexer.select(hidden_states, position_embeddings)[None]
        return super().forward(hidden_states, position_embeddings, **kwargs)


def _make_empty(hidden_states: Tensor) -> Tensor:
    """Return the empty tensor that replaces a mask or a selection of keys, [1, 1, 0, 0]."""
    return hidden_states.new_empty((1, 1, 0, 0), dtype=torch.bool)


def is_empty(value: Any) -> bool:
    """Return whether an argument of attention is None or the empty tensor of a dense layer."""
    return value is None or _is_empty_tensor(value)


def _is_empty_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.numel()


_KINDS: Final[dict[str, tuple[type[_SelectingLayer], type[_SelectingIndexer]]]] = {
    "glm5_next_text": (_PooledLayer, _PooledIndexer),
    "minimax_m3_vl_text": (_SelectingLayer, _LargestIndexer),
    "qwen4_exp_text": (_AveragedLayer, _AveragedIndexer),
}
"""The layers and indexers of families that select blocks of keys."""


def adapt_attention(module: PreTrainedModel) -> None:
    """Make the layers of a model pass their latents to treegen, and sparse layers their keys."""
    text = module.config.get_text_config(decoder=True)
    kinds: tuple[Any, Any] = _DenseLayer, _DenseIndexer
    if selects_keys(text):
        kinds = _KINDS.get(text.model_type, (_SelectingLayer, _SelectingIndexer))
    parts: list[Any] = list(module.modules())
    names = {"rotary_emb", "embed_tokens"}
    rotary = [
        part.rotary_emb for part in parts if names <= {name for name, _ in part.named_children()}
    ]
    pools = 0
    for part in parts:
        stock: Any = type(part)
        if is_scaling_layer(part):
            part.__class__ = stock = make_subclass(ScaledLayer, stock)
        if latent_of(part) is not None and not isinstance(part, LatentLayer):
            part.__class__ = stock = make_subclass(LatentLayer, stock)
        if not hasattr(part, "indexer") or isinstance(part, _DenseLayer):
            continue
        part.__class__ = make_subclass(kinds[0], stock)
        if part.indexer is not None:  # otherwise the layer uses the selection of an earlier one
            indexer, stock = part.indexer, type(part.indexer)
            indexer.__class__ = make_subclass(kinds[1], stock)
            indexer.treegen_config = part.config
            # In hybrid models only layers that attend have pages, and all of those are sparse.
            indexer.treegen_pool = pools if recurrent_types(text) else part.layer_idx
            indexer.treegen_rotary = tuple(rotary[:1])
        pools += 1


def restore_attention(module: nn.Module) -> None:
    """Undo `adapt_attention`."""
    for part in module.modules():
        for changed in (_DenseLayer, _DenseIndexer, LatentLayer, ScaledLayer):
            if isinstance(part, changed):
                part.__class__ = type(part).__bases__[1]


def is_selecting_layer(part: nn.Module) -> bool:
    """Return whether a layer attends to selected keys of treegen's levels."""
    return isinstance(part, _SelectingLayer)


def index_dim_of(part: Any) -> int:
    """Return the number of elements of a layer's index keys; 0 if it selects no keys itself."""
    return part.indexer.get_dim() if _has_selecting_indexer(part) else 0


def index_form_of(part: Any) -> IndexForm | None:
    """Return which keys a layer's indexer selects; None if it selects all keys."""
    return part.indexer.get_form() if _has_selecting_indexer(part) else None


def _has_selecting_indexer(part: Any) -> bool:
    return isinstance(getattr(part, "indexer", None), _SelectingIndexer)
