"""Change attention layers so that treegen can share their keys: latent and sparse attention.

transformers' layers with multi-head latent attention expand a token's latent into keys and values
of all heads, by a method `expand_kv`, right before attention. Here that method returns its inputs
unchanged, so the attention function receives latents as keys and rotated parts as values, and
expands them with the layer's own weights where needed.

In layers with sparse attention, an indexer selects the keys that a token attends to. Up to a number
of keys it selects all of them (`families.dense_length`), and treegen's context ends there. Here the
indexer is skipped, and passes an empty tensor as the selection, which stands for all keys.

With any other attention function the layers work as before.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from treegen.common.spec import LatentSpec

# H heads, X numbers of a head's key and value that are made from a latent, R rank

OURS: Final = ("treegen", "treegen_probe")
"""Names of the attention functions that take latents."""
_TUNED: Final = "attn_temperature_tuning"
"""Llama 4 scales queries by their place in a pass; not within the context of treegen, where the
factor is 1."""


class _LatentLayer(nn.Module):
    """An attention layer that passes its latents on. All layers of a class share this method."""

    config: Any

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latents and rotated parts unchanged if treegen computes attention."""
        if self.config._attn_implementation in OURS:
            return kv_nope, k_rot
        expanded: tuple[Tensor, Tensor] = super().expand_kv(kv_nope, k_rot)  # type: ignore[misc]
        return expanded


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


class _DenseLayer(nn.Module):
    """An attention layer that needs no mask and no selection of keys."""

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


def _make_empty(hidden_states: Tensor) -> Tensor:
    """Return the empty tensor that replaces a mask or a selection of keys, [1, 1, 0, 0]."""
    return hidden_states.new_empty((1, 1, 0, 0), dtype=torch.bool)


def is_empty(value: Any) -> bool:
    """Return whether an argument of attention is None or the empty tensor of a dense layer."""
    return value is None or (isinstance(value, Tensor) and not value.numel())


@cache
def _kind(changed: type[nn.Module], stock: type[nn.Module]) -> Any:
    """Return the subclass of a layer class with one change; always the same one."""
    return type(stock.__name__, (changed, stock), {"__module__": __name__})


def adapt_attention(module: nn.Module) -> None:
    """Make the layers of a model pass their latents to treegen, and sparse layers all keys."""
    parts: list[Any] = list(module.modules())
    for part in parts:
        stock: Any = type(part)
        if getattr(part, _TUNED, False):
            setattr(part, _TUNED, False)
            part.treegen_is_tuned = True
        if latent_of(part) is not None and not isinstance(part, _LatentLayer):
            part.__class__ = stock = _kind(_LatentLayer, stock)
        if not hasattr(part, "indexer") or isinstance(part, _DenseLayer):
            continue
        part.__class__ = _kind(_DenseLayer, stock)
        if part.indexer is not None:  # otherwise the layer uses the selection of an earlier one
            indexer: Any = type(part.indexer)
            part.indexer.__class__ = _kind(_DenseIndexer, indexer)
            part.indexer.treegen_config = part.config


def restore_attention(module: nn.Module) -> None:
    """Undo `adapt_attention`."""
    for part in module.modules():
        if hasattr(part, "treegen_is_tuned"):
            setattr(part, _TUNED, True)
            del part.treegen_is_tuned
        for changed in (_DenseLayer, _DenseIndexer, _LatentLayer):
            if isinstance(part, changed):
                part.__class__ = type(part).__bases__[1]


def is_latent_layer(part: nn.Module) -> bool:
    """Return whether a layer passes its latents to the attention function."""
    return isinstance(part, _LatentLayer)


def latent_of(part: nn.Module) -> LatentSpec | None:
    """Return how a layer makes keys and values from latents; None if it does not in a known way.

    The heads are those of one rank. Whether the numbers are right is left to the load check.
    """
    up: Any = getattr(part, "kv_b_proj", None)
    names = "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"
    rank, rope, nope, v_dim = (getattr(part, name, None) for name in names)
    if not callable(getattr(part, "expand_kv", None)) or getattr(part, "config", None) is None:
        return None
    if not isinstance(up, nn.Module) or getattr(up, "bias", None) is not None:
        return None
    if not (rank and rope and nope and v_dim) or getattr(up, "in_features", None) != rank:
        return None
    heads, rest = divmod(up.out_features, nope + v_dim)
    return None if rest else LatentSpec(heads, rank, rope, nope, v_dim)


def get_up_projection(part: Any) -> Tensor:
    """Return the weights with which a layer makes keys and values from latents, [H, X, R]."""
    up = part.kv_b_proj
    if type(up) is nn.Linear:
        weights = up.weight
    else:  # several matrices, such as with an adapter: multiply an identity matrix by them
        units = torch.eye(up.in_features, dtype=part.o_proj.weight.dtype, device=up.weight.device)
        weights = up(units).t()
    return weights.reshape(-1, part.qk_nope_head_dim + part.v_head_dim, up.in_features)
