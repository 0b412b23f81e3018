"""What implementations of attention are given and must do.

Legend: T query rows, H query heads, D key dimension, V value dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from treegen.attention.level import HostLevel

KVPair = tuple[Tensor, Tensor]
NEEDS_AMPERE = "needs compute capability 8.0 (Ampere) or newer"


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """What one layer adds to the levels."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None


class Implementation(Protocol):
    """One way to compute attention over levels.

    To add one: write a class with this interface and name it in `treegen.attention.api.LOADERS`
    (or call `register`). It either computes what `reference` computes, up to rounding, or raises
    InputError saying what it does not take; it never falls back to another one.
    """

    name: str

    def refusal(self, device: torch.device) -> str | None:
        """Why it cannot run on this device at all, None if it can."""
        ...

    def prepare(
        self, levels: Sequence[HostLevel], positions_T: Tensor | None, device: torch.device
    ) -> Any:
        """Compute once per pass what every layer reuses; kept in Prepared.state."""
        ...

    def attend(
        self, q_THD: Tensor, pairs: Sequence[KVPair], prepared: Prepared, options: Options
    ) -> tuple[Tensor, Tensor]:
        """Out [T, H, V] in the type of q, and LSE [T, H] in float32 (float64 for float64)."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Levels made ready for the layers of one forward pass; impl names what will compute.

    checked: whether tensors of layers are checked against the levels.
    """

    levels: tuple[HostLevel, ...]
    positions_T: Tensor | None
    device: torch.device
    impl: str
    implementation: Implementation
    state: Any
    checked: bool
    # Tensor shapes, types and devices that have been checked against the levels.
    seen: set[Any] = field(default_factory=set)

    @property
    def kernels(self) -> tuple[str, ...]:
        """What computes each level, once a layer has run."""
        return getattr(self.state, "kernels", ()) or (self.impl,) * len(self.levels)


@dataclass(slots=True)
class Missing:
    """Stands for an implementation whose library is not installed; refuses every device."""

    name: str
    reason: str

    def refusal(self, device: torch.device) -> str | None:
        """Why it cannot run."""
        return self.reason

    def prepare(
        self, levels: Sequence[HostLevel], positions_T: Tensor | None, device: torch.device
    ) -> Any:
        """Never called, for the device is refused."""
        raise AssertionError(self.reason)

    def attend(
        self, q_THD: Tensor, pairs: Sequence[KVPair], prepared: Prepared, options: Options
    ) -> tuple[Tensor, Tensor]:
        """Never called, for the device is refused."""
        raise AssertionError(self.reason)
