"""Change layers with sparse attention so that treegen can share their keys.

In layers with sparse attention, an indexer selects the keys that a token attends to. Up to a number
of keys it selects all of them (`families.dense_length`). If treegen's context ends there, the
indexer is skipped, and passes an empty tensor as the selection, which stands for all keys.

Beyond that number (`families.selects_keys`), the indexer's own code makes its queries, keys and
weights for the tokens of a pass. treegen stores the index keys in the page pool, and selects keys
of all levels by their scores.

With any other attention function the layers work as before.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from treegen.common.version import tested_versions
from treegen.errors import ModelError
from treegen.model.batch import current_batch
from treegen.model.checkpoint.families import selects_keys
from treegen.model.chunked import ScaledLayer, is_scaling_layer
from treegen.model.latent import OURS, LatentLayer, latent_of, make_subclass
from treegen.ops.attention.selection import select_keys
from treegen.ops.cache.pool import write_slots

# H heads of an indexer, T tokens, D numbers of an index key, S selected keys

INDEX_KEYS: Final = "treegen_index_keys"
"""The name of the buffer that represents the page pool in a compiled indexer."""


class _DenseIndexer(nn.Module):
    """An indexer that selects all keys, without computing scores."""

    treegen_config: Any
    """The configuration of the attention layer."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return an empty selection if treegen computes attention."""
        if self.treegen_config._attn_implementation in OURS:
            return _make_empty(hidden_states)
        selected: Tensor = super().forward(hidden_states, *args, **kwargs)
        return selected


class _SelectingIndexer(_DenseIndexer):
    """An indexer that selects keys of treegen's levels."""

    layer_idx: int
    index_topk: int

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the positions of the selected keys [1, T, S] if treegen computes attention."""
        if self.treegen_config._attn_implementation != OURS[0]:
            return super().forward(hidden_states, *args, **kwargs)
        products = _IndexProducts(type(self).__name__)
        indexer: Any = super(_DenseIndexer, self)
        everything = hidden_states.new_ones((1, 1, 1), dtype=torch.bool)
        args = tuple(everything if _is_empty_tensor(value) else value for value in args)
        with products:
            indexer.forward(hidden_states, *args, **kwargs)
        q_THD, k_TD, weights_TH = products.read()
        keys = getattr(self, INDEX_KEYS, None)
        if keys is not None:
            operator = torch.ops.treegen.write_and_select
            selected: Tensor = operator(q_THD, k_TD, weights_TH, keys, self.index_topk)
        else:
            pool = current_batch().index_keys_of(self.layer_idx)
            selected = write_and_select(q_THD, k_TD, weights_TH, pool, self.index_topk)
        return selected[None]


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
                f"the code of {self._name} in transformers {transformers.__version__} is not the "
                "one that treegen knows, so it would select other keys; install "
                f"'{tested_versions('transformers')}'"
            )


def write_and_select(
    q_THD: Tensor, k_TD: Tensor, weights_TH: Tensor, pool: Tensor, num: int
) -> Tensor:
    """Store new index keys in a layer's page pool, then select keys of all levels of the batch.

    Args:
        q_THD: Index queries [T, H, D].
        k_TD: New index keys [T, D].
        weights_TH: Weight of each head [T, H].
        pool: The layer's pool of index keys [pages, page_size, D].
        num: S, the number of keys to select.

    Returns:
        The positions of the selected keys [T, S], as in `select_keys`.
    """
    batch = current_batch()
    write_slots(pool, batch.slots_T, k_TD)
    return select_keys(q_THD, weights_TH, pool, batch.levels, batch.positions_T, num)


class _DenseLayer(nn.Module):
    """An attention layer that needs no mask."""

    config: Any

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, with an empty mask if treegen computes attention."""
        if self.config._attn_implementation in OURS:
            kwargs["attention_mask"] = _make_empty(hidden_states)
        return super().forward(hidden_states, *args, **kwargs)

    def build_attention_mask_from_topk(self, **kwargs: Any) -> Tensor | None:
        """Return no mask if treegen computes attention. Only some families call this method."""
        if self.config._attn_implementation in OURS:
            return None
        mask: Tensor = super().build_attention_mask_from_topk(**kwargs)  # type: ignore[misc]
        return mask


class _SelectingLayer(_DenseLayer):
    """An attention layer that attends to keys that its indexer or an earlier layer's selects."""


def _make_empty(hidden_states: Tensor) -> Tensor:
    """Return the empty tensor that replaces a mask or a selection of keys, [1, 1, 0, 0]."""
    return hidden_states.new_empty((1, 1, 0, 0), dtype=torch.bool)


def is_empty(value: Any) -> bool:
    """Return whether an argument of attention is None or the empty tensor of a dense layer."""
    return value is None or _is_empty_tensor(value)


def _is_empty_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.numel()


def adapt_attention(module: PreTrainedModel) -> None:
    """Make the layers of a model pass their latents to treegen, and sparse layers their keys."""
    selects = selects_keys(module.config.get_text_config(decoder=True))
    parts: list[Any] = list(module.modules())
    for part in parts:
        stock: Any = type(part)
        if is_scaling_layer(part):
            part.__class__ = stock = make_subclass(ScaledLayer, stock)
        if latent_of(part) is not None and not isinstance(part, LatentLayer):
            part.__class__ = stock = make_subclass(LatentLayer, stock)
        if not hasattr(part, "indexer") or isinstance(part, _DenseLayer):
            continue
        part.__class__ = make_subclass(_SelectingLayer if selects else _DenseLayer, stock)
        if part.indexer is not None:  # otherwise the layer uses the selection of an earlier one
            indexer: Any = type(part.indexer)
            kind = _SelectingIndexer if selects else _DenseIndexer
            part.indexer.__class__ = make_subclass(kind, indexer)
            part.indexer.treegen_config = part.config


def restore_attention(module: nn.Module) -> None:
    """Undo `adapt_attention`."""
    for part in module.modules():
        for changed in (_DenseLayer, _DenseIndexer, LatentLayer, ScaledLayer):
            if isinstance(part, changed):
                part.__class__ = type(part).__bases__[1]


def is_selecting_layer(part: nn.Module) -> bool:
    """Return whether a layer attends to selected keys of treegen's levels."""
    return isinstance(part, _SelectingLayer)


def indexer_sizes(part: Any) -> tuple[int, int]:
    """Return the width of a layer's index keys, and how many keys it selects; 0 without indexer."""
    indexer: Any = getattr(part, "indexer", None)
    selects = isinstance(indexer, _SelectingIndexer)
    return (int(indexer.head_dim), int(indexer.index_topk)) if selects else (0, 0)
