"""Position-dependent parts of Llama 4's layers: attention within chunks, and scaled queries.

Some layers attend only to the keys of a token's own chunk. The layers without rotary positions
scale queries by their position. They count positions from the start of a pass, so treegen's
attention scales them in their place, with the positions of the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from treegen.model.checkpoint.families import CHUNKED
from treegen.model.latent import TREEGEN_ATTENTION


class ScaledLayer(nn.Module):
    """An attention layer that leaves the scaling of its queries to treegen's attention."""

    config: Any

    @property
    def attn_temperature_tuning(self) -> bool:
        """Whether the layer scales its queries itself."""
        return self.config._attn_implementation not in TREEGEN_ATTENTION


def chunk_of(layer: nn.Module) -> int | None:
    """Return the number of positions of a chunk; None if a layer does not attend within chunks."""
    config: Any = getattr(layer, "config", None)
    types, at = getattr(config, "layer_types", None), getattr(layer, "layer_idx", None)
    if not types or not isinstance(at, int) or types[at] != CHUNKED:
        return None
    size: int | None = config.attention_chunk_size
    return size


def is_scaling_layer(layer: Any) -> bool:
    """Return whether a layer of transformers scales its queries by their positions in a pass."""
    is_scaling = vars(layer).get("attn_temperature_tuning") and not layer.use_rope
    return bool(is_scaling and not isinstance(layer, ScaledLayer))


def scaling_of(layer: Any) -> tuple[float, float] | None:
    """Return the settings with which `scale_queries` scales a layer's queries, or None."""
    is_scaled = isinstance(layer, ScaledLayer)
    return (float(layer.floor_scale), float(layer.attn_scale)) if is_scaled else None


def scale_queries(q_THK: Tensor, positions_T: Tensor, floor_scale: float, scale: float) -> Tensor:
    """Return queries scaled by their positions, as `Llama4TextAttention` of transformers does.

    Args:
        q_THK: Queries [T, H, K].
        positions_T: Their positions.
        floor_scale: Number of positions after which the factor grows.
        scale: Growth of the factor.
    """
    steps_T = torch.floor((positions_T.float() + 1.0) / floor_scale)
    factor_T = torch.log1p(steps_T) * scale + 1.0
    return (q_THK * factor_T[:, None, None]).to(q_THK.dtype)
