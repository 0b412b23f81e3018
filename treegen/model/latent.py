"""Layers of multi-head latent attention hand their latents to treegen, which keeps these.

transformers' layers make the keys and values of all heads of a token's latent, by a method called
`expand_kv`, right before they attend. Here that method gives back what it is given. So the
attention function gets latents for keys and what is rotated for values, and makes what it needs of
them by the layer's own weights. Under any other attention function the layers do as ever.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from treegen.common.spec import LatentSpec

# H heads, X numbers of a head's key and value that are made of a latent, R rank

OURS: Final = ("treegen", "treegen_probe")
"""Names of the attention functions that take latents."""


class _LatentLayer(nn.Module):
    """A layer that attends, with its latents. All layers of a class share this method."""

    config: Any

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """The latents and the rotated part as they are, for an attention function of ours."""
        if self.config._attn_implementation in OURS:
            return kv_nope, k_rot
        expanded: tuple[Tensor, Tensor] = super().expand_kv(kv_nope, k_rot)  # type: ignore[misc]
        return expanded


@cache
def _kind(stock: type[nn.Module]) -> Any:
    """The class of a layer that hands its latents on; always the same one."""
    return type(stock.__name__, (_LatentLayer, stock), {"__module__": __name__})


def enable_latents(module: nn.Module) -> None:
    """From now on, the layers of a model that can hand latents to treegen do so."""
    for part in module.modules():
        if latent_of(part) is not None and not isinstance(part, _LatentLayer):
            stock: Any = type(part)
            part.__class__ = _kind(stock)


def disable_latents(module: nn.Module) -> None:
    """Let all layers of a model make keys and values of their latents again."""
    for part in module.modules():
        if isinstance(part, _LatentLayer):
            part.__class__ = type(part).__mro__[2]


def is_latent_layer(part: nn.Module) -> bool:
    """Whether a layer hands latents to the attention function."""
    return isinstance(part, _LatentLayer)


def latent_of(part: nn.Module) -> LatentSpec | None:
    """How a layer makes keys and values of latents; None if it does not, or not as others do.

    Its heads are those of one rank. Whether the numbers are right is left to the load check.
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
    """The weights by which a layer makes keys and values of latents, [H, X, R]."""
    up = part.kv_b_proj
    if type(up) is nn.Linear:
        whole = up.weight
    else:  # more than one matrix, such as one with an adapter: what it makes of units
        units = torch.eye(up.in_features, dtype=part.o_proj.weight.dtype, device=up.weight.device)
        whole = up(units).t()
    return whole.reshape(-1, part.qk_nope_head_dim + part.v_head_dim, up.in_features)
