"""What an implementation of attention is given, and what it must do.

Legend: T query rows, H query heads, D key dimension, V value dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from treegen.ops.attention.level import HostLevel

KVPair = tuple[Tensor, Tensor]
FP8: Final = torch.float8_e4m3fn
"""A type in which keys and values may be stored."""
NEEDS_AMPERE = "needs compute capability 8.0 (Ampere) or newer"


@dataclass(frozen=True, slots=True, eq=False)
class AttentionOptions:
    """The kind of softmax of one layer; `attend` says what the fields mean."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None


class Implementation(Protocol):
    """One way to compute attention over levels.

    To add one, write a class with this interface and name it in `LOADERS` of
    `treegen.ops.attention.registry`, or call `register`. It computes what `reference` computes,
    up to rounding. Where it does not take an argument, it raises InputError and says so; it never
    falls back to another one.

    name: what `impl=` calls it.

    An implementation whose `in_graphs` is True prepares a `TritonState`, whose work lists can stay
    where they are: the passes of such attention may become CUDA graphs.
    """

    name: str

    def refusal(self, device: torch.device) -> str | None:
        """Why it cannot run on a device; None if it can."""
        ...

    def prepare(
        self, levels: Sequence[HostLevel], positions_T: Tensor | None, device: torch.device
    ) -> Any:
        """Return what all layers of a pass share; `attend` finds it in `PreparedLevels.state`."""
        ...

    def attend(
        self,
        q_THD: Tensor,
        pairs: Sequence[KVPair],
        prepared: PreparedLevels,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor]:
        """Attend in one layer.

        Returns out [T, H, V] in the type of q, and LSE [T, H] in float32 (float64 for float64).

        Args:
            pairs: The keys and values of each level.
        """
        ...


def can_capture(implementation: Implementation) -> bool:
    """Whether passes with this attention may become CUDA graphs."""
    return getattr(implementation, "in_graphs", False)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedLevels:
    """Levels made ready for the layers of one pass.

    levels: the levels, on the host.
    positions_T: the position of each query row; None where nothing needs it.
    device: where the tensors are.
    impl: the name of the implementation.
    implementation: what computes.
    state: what the implementation has prepared.
    checked: whether the tensors of each layer are checked against the levels.
    copies: levels that are read from copies of keys and values, where the pool has latents.
    expands: whether rows may attend to latents by keys and values that are made meanwhile.
    """

    levels: tuple[HostLevel, ...]
    positions_T: Tensor | None
    device: torch.device
    impl: str
    implementation: Implementation
    state: Any
    checked: bool
    copies: PreparedLevels | None = None
    expands: bool = False
    memo: dict[Any, Any] = field(default_factory=dict)  # of attention to latents
    # The shapes, types and devices of tensors that were checked already.
    seen: set[Any] = field(default_factory=set)

    def with_positions(self, positions_T: Tensor | None) -> PreparedLevels:
        """The same with other positions of the rows."""
        copies = None if self.copies is None else self.copies.with_positions(positions_T)
        return replace(self, positions_T=positions_T, copies=copies)

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernel that computes each level, known once a layer has run."""
        mine = getattr(self.state, "kernels", ()) or (self.impl,) * len(self.levels)
        return mine if self.copies is None else (*self.copies.kernels, *mine)
