"""Change layers with latent attention so that treegen can share their keys.

transformers' layers with multi-head latent attention expand a token's latent into keys and values
of all heads, by a method `expand_kv`, right before attention. Here that method returns its inputs
unchanged, so the attention function receives latents as keys and rotated parts as values, and
expands them with the layer's own weights where needed. With any other attention function the layers
work as before.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from treegen.common.spec import LatentSpec

# H heads, X numbers of a head's key and value that are made from a latent, R rank

TREEGEN_ATTENTION: Final = ("treegen", "treegen_probe")
"""Names of the attention functions that take latents."""


class LatentLayer(nn.Module):
    """An attention layer that passes its latents on. All layers of a class share this method."""

    config: Any

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latents and rotated parts unchanged if treegen computes attention."""
        if self.config._attn_implementation in TREEGEN_ATTENTION:
            return kv_nope, k_rot
        expanded: tuple[Tensor, Tensor] = super().expand_kv(kv_nope, k_rot)  # type: ignore[misc]
        return expanded


@cache
def make_subclass(changed: type[nn.Module], stock: type[nn.Module]) -> Any:
    """Return the subclass of a layer class with one change; always the same one."""
    return type(stock.__name__, (changed, stock), {"__module__": __name__})


def is_latent_layer(part: nn.Module) -> bool:
    """Return whether a layer passes its latents to the attention function."""
    return isinstance(part, LatentLayer)


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
    heads, remainder = divmod(up.out_features, nope + v_dim)
    return None if remainder else LatentSpec(heads, rank, rope, nope, v_dim)


def get_up_projection(part: Any) -> Tensor:
    """Return the weights with which a layer makes keys and values from latents, [H, X, R]."""
    up = part.kv_b_proj
    if type(up) is nn.Linear:
        weights = up.weight
    else:  # several matrices, such as with an adapter: multiply an identity matrix by them
        units = torch.eye(up.in_features, dtype=part.o_proj.weight.dtype, device=up.weight.device)
        weights = up(units).t()
    return weights.reshape(-1, part.qk_nope_head_dim + part.v_head_dim, up.in_features)
