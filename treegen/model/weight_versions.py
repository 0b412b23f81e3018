"""Detect whether weights were written into, by an optimizer's step or `load_state_dict`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


def get_versions(weights: Iterable[Tensor]) -> tuple[int, ...]:
    """Return each weight's version counter. In-place writes change it, except through `.data`."""
    return tuple(0 if weight.is_inference() else weight._version for weight in weights)


def _bump_versions(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Count a fused optimizer step as torch counts all others, because fused kernels do not."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            for weight in group["params"]:
                if not weight.is_inference():
                    increment_version(weight)


register_optimizer_step_post_hook(_bump_versions)
