"""The interface of attention implementations, and their inputs.

Legend: T query rows, H query heads, D key dimension, V value dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, TypeVar

import torch
from torch import Tensor

from treegen.ops.attention.level import HostLevel, IntArray

KVPair = tuple[Tensor, Tensor]
KVPairs = Sequence[KVPair]
FP8: Final = torch.float8_e4m3fn
"""The 8-bit type in which keys and values may be stored."""
E4M3_MAX: Final = 448.0
"""The largest number in `FP8`."""
NEEDS_AMPERE = "needs compute capability 8.0 (Ampere) or newer"


Positions = TypeVar("Positions", int, IntArray, Tensor)


@dataclass(frozen=True, slots=True)
class Window:
    """The positions that a row sees, up to its own: the last ones, or those of its chunk."""

    size: int
    """Number of positions of the window or chunk."""
    is_chunk: bool = False
    """Whether windows are chunks, which start at multiples of `size`."""

    def start(self, position: Positions) -> Positions:
        """Return the first position that rows at these positions see; it may be negative."""
        if self.is_chunk:
            return position - position % self.size
        return position - self.size + 1


@dataclass(frozen=True, slots=True, eq=False)
class AttentionOptions:
    """Softmax options of one layer; `treegen.ops.attention.attend` explains them."""

    scale: float
    window: Window | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None


class Implementation(Protocol):
    """One way to compute attention over levels.

    To add an implementation, write a class with this interface and call `register` of
    `treegen.ops.attention.registry`. It computes what `reference` computes,
    up to rounding. For an argument that it does not support, it raises InputError; it never falls
    back to another implementation.

    An implementation whose `in_graphs` is True prepares a `TritonState`, whose work lists can keep
    their addresses. Passes with such attention may therefore become CUDA graphs.
    """

    name: str
    """Its name in `impl=`."""

    def refusal(self, device: torch.device) -> str | None:
        """Return why the implementation cannot run on a device, or None if it can."""

    def prepare(
        self, levels: Sequence[HostLevel], positions_T: Tensor | None, device: torch.device
    ) -> Any:
        """Return the state that all layers of a pass share, stored in `PreparedLevels.state`.

        Args:
            levels: The levels, on the host.
            positions_T: Position of each query row [T]; None if nothing needs positions.
            device: Where the tensors of the layers are.
        """

    def attend(
        self, q_THD: Tensor, pairs: KVPairs, prepared: PreparedLevels, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """Compute the attention of one layer.

        Args:
            q_THD: Queries [T, H, D].
            pairs: Keys and values of each level, both [pages, page_size, kv_heads, dim].
            prepared: The levels, with this implementation's `state`.
            options: Softmax options of the layer.

        Returns:
            Results [T, H, V] in the type of q, and LSE [T, H] in float32 (float64 for float64).
        """


def can_capture(implementation: Implementation) -> bool:
    """Return whether passes with this attention may become CUDA graphs."""
    return getattr(implementation, "in_graphs", False)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedLevels:
    """Levels prepared for the layers of one pass."""

    levels: tuple[HostLevel, ...]
    """The levels, on the host."""
    positions_T: Tensor | None
    """The position of each query row; None if nothing needs positions."""
    device: torch.device
    """The device of the tensors."""
    impl: str
    """The name of the implementation."""
    implementation: Implementation
    """The implementation that computes the attention."""
    state: Any
    """The state that the implementation's `prepare` returned."""
    checked: bool
    """Whether the tensors of each layer are checked against the levels."""
    copies: PreparedLevels | None = None
    """Levels that are read from expanded keys and values, in a pool of latents."""
    expands: bool = False
    """Whether rows may attend to latents through keys and values that are expanded during the
    pass."""
    memo: dict[Any, Any] = field(default_factory=dict)
    """Values that all layers of the pass use, such as the keys of each row."""
    seen: set[Any] = field(default_factory=set)
    """The shapes, types and devices of tensors that were checked before."""

    def with_positions(self, positions_T: Tensor | None) -> PreparedLevels:
        """Return a copy with other positions of the rows."""
        copies = None if self.copies is None else self.copies.with_positions(positions_T)
        return replace(self, positions_T=positions_T, copies=copies)

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernel that computes each level, known once a layer has run."""
        names = getattr(self.state, "kernels", ()) or (self.impl,) * len(self.levels)
        return names if self.copies is None else (*self.copies.kernels, *names)
