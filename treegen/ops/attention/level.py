"""Levels: groups of consecutive query rows, each group with its own keys.

Legend: G groups, P page table entries per group, L slots of a page of dense keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from treegen.common.checks import device_name
from treegen.errors import InputError

IntArray = npt.NDArray[np.int64]
_T = TypeVar("_T")


def memoize(memo: dict[Any, Any], key: Any, make: Callable[[], _T]) -> _T:
    """Return the value of a key in a memo, which `make` computes the first time.

    Args:
        memo: The values that were computed before.
        key: The key.
        make: Returns the value.
    """
    if key not in memo:
        memo[key] = make()
    value: _T = memo[key]
    return value


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """G groups of consecutive query rows, each with its own keys.

    Groups are disjoint and in ascending order. A row outside all groups gets nothing from the
    level. All tensors are int32 on one device.
    """

    q_start_G: Tensor
    """The first row of each group."""
    q_stop_G: Tensor
    """The row after the last row of each group."""
    pages_GP: Tensor
    """The group's pages in the order of its keys; entries past the last used page are ignored."""
    kv_len_G: Tensor
    """The group's number of keys."""
    kv_start_G: Tensor
    """The position of the group's first key."""
    causal: bool = False
    """Whether keys may lie after a row. If so, positions are compared: a row sees key j of its
    group if kv_start + j is not greater than its own position."""

    @classmethod
    def dense(
        cls,
        q_start: Tensor | Sequence[int],
        q_stop: Tensor | Sequence[int],
        kv_len: Tensor | Sequence[int] | int,
        kv_start: Tensor | Sequence[int] | int = 0,
        *,
        causal: bool = False,
        device: torch.device | str | None = None,
    ) -> Level:
        """Return a level over dense keys [G, L, kv_heads, k_dim]; group g has page g of size L.

        Args:
            q_start: First query row of each group [G].
            q_stop: End of each group's query rows [G], exclusive.
            kv_len: Number of real keys among the L, per group [G] or for all groups.
            kv_start: Position of the first key, per group [G] or for all groups. Default: 0.
            causal: As in `Level`.
            device: Where the level's tensors go. Default: the device of `q_start`, or the CPU if
                that is a sequence.
        """
        if device is None:
            device = q_start.device if isinstance(q_start, Tensor) else "cpu"
        device = device_name(device)

        def column(value: Tensor | Sequence[int] | int) -> Tensor:
            return torch.as_tensor(value, dtype=torch.int32, device=device)

        start_G = column(q_start)
        num_groups = start_G.shape[0]
        return cls(
            q_start_G=start_G,
            q_stop_G=column(q_stop),
            pages_GP=torch.arange(num_groups, dtype=torch.int32, device=device)[:, None],
            kv_len_G=column(kv_len).expand(num_groups),
            kv_start_G=column(kv_start).expand(num_groups),
            causal=causal,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """Items to which query rows belong; the number of rows per item differs between passes."""

    offsets: IntArray
    """Item i has the rows offsets[i] to offsets[i + 1]."""
    start_G: IntArray
    """The first item of each group of a level."""
    stop_G: IntArray
    """The item after the last item of each group of a level."""
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)
    """Values that implementations cache about the level, whatever the rows of its items."""

    @property
    def num(self) -> int:
        """The number of items."""
        return len(self.offsets) - 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without `memo`, because every process has its own."""
        return Items, (self.offsets, self.start_G, self.stop_G)


@dataclass(frozen=True, slots=True, eq=False)
class HostLevel:
    """A level as arrays on the host, from which work is planned.

    The other fields are those of `Level`.
    """

    start_G: IntArray
    stop_G: IntArray
    pages_GP: IntArray
    kv_len_G: IntArray
    kv_start_G: IntArray
    causal: bool
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)
    """Values that implementations cache about the level, which may serve many steps."""
    items: Items | None = None
    """The items to which the groups' rows belong; None if unknown."""
    copied: bool = False
    """Whether `pages_GP` lists expanded keys and values of all heads, in a pool of latents; see
    `treegen.ops.attention.latent`."""
    stored_GP: IntArray | None = None
    """The pages of these latents."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without `memo`, because every process has its own."""
        arrays = (self.start_G, self.stop_G, self.pages_GP, self.kv_len_G, self.kv_start_G)
        copied = self.copied, self.stored_GP
        return HostLevel, (*arrays, self.causal, {}, self.items, *copied)

    def check_pool(self, index: int, num_pages: int, page_size: int) -> None:
        """Check that all keys of the level lie in a pool.

        Args:
            index: Number of the level, for messages.
            num_pages: Pages of the pool.
            page_size: Cache slots per page.

        Raises:
            InputError: a group has too few pages, or a page that the pool does not have.
        """
        used_G = -(-self.kv_len_G // page_size)
        capacity = self.pages_GP.shape[1]
        if used_G.size and used_G.max() > capacity:
            g = int(used_G.argmax())
            raise InputError(
                f"level {index} group {g} has {self.kv_len_G[g]} keys, but {capacity} pages of "
                f"{page_size} keys have room for only {capacity * page_size}; pass {used_G[g]} "
                "pages for this group"
            )
        used_GP = np.arange(capacity) < used_G[:, None]
        bad = np.argwhere(used_GP & ((self.pages_GP < 0) | (self.pages_GP >= num_pages)))
        if bad.size:
            g, p = bad[0]
            raise InputError(
                f"level {index} group {g} uses page {self.pages_GP[g, p]}, but the pool has "
                f"only pages 0 to {num_pages - 1}"
            )


def to_host(level: Level) -> HostLevel:
    """Copy a level to the host, waiting for the device. The caller may then reuse its tensors."""

    def array(tensor: Tensor) -> IntArray:
        return tensor.detach().cpu().numpy().astype(np.int64)  # astype always copies

    return HostLevel(
        start_G=array(level.q_start_G),
        stop_G=array(level.q_stop_G),
        pages_GP=array(level.pages_GP),
        kv_len_G=array(level.kv_len_G),
        kv_start_G=array(level.kv_start_G),
        causal=level.causal,
    )


def check_layout(level: Any, index: int, device: torch.device) -> None:
    """Check the types, shapes and device of a level's tensors.

    Args:
        level: The object that should be a `Level`.
        index: Number of the level, for messages.
        device: Where all tensors must be.

    Raises:
        InputError: the object is no `Level`, or its tensors violate the rules of `Level`.
    """
    if not isinstance(level, Level):
        raise InputError(f"levels[{index}] must be a Level, got {type(level).__name__}")
    columns = {
        "q_start_G": level.q_start_G,
        "q_stop_G": level.q_stop_G,
        "kv_len_G": level.kv_len_G,
        "kv_start_G": level.kv_start_G,
        "pages_GP": level.pages_GP,
    }
    num_groups = level.q_start_G.shape[0] if level.q_start_G.dim() else -1
    for name, tensor in columns.items():
        if tensor.dtype != torch.int32:
            raise InputError(f"level {index} {name} must be int32, got {tensor.dtype}")
        if tensor.device != device:
            raise InputError(f"level {index} {name} must be on {device}, got {tensor.device}")
        expected = 2 if name == "pages_GP" else 1
        if tensor.dim() != expected or tensor.shape[0] != num_groups:
            raise InputError(
                f"level {index} {name} must have {expected} dimensions, and the first must have "
                f"size {num_groups} (the number of groups), got shape {tuple(tensor.shape)}"
            )


def check_values(level: HostLevel, index: int) -> None:
    """Check the row ranges and lengths of a level.

    Args:
        level: The level, on the host.
        index: Number of the level, for messages.

    Raises:
        InputError: groups overlap or are out of order, or a length is negative.
    """
    start_G, stop_G = level.start_G, level.stop_G
    if start_G.size == 0:
        return
    if start_G[0] < 0:
        raise InputError(
            f"level {index} group 0 must start at row 0 or later, got row {start_G[0]}"
        )
    if (stop_G < start_G).any():
        g = int((stop_G < start_G).argmax())
        raise InputError(
            f"level {index} group {g} has rows {start_G[g]} to {stop_G[g]}; stop must be >= start"
        )
    overlap = start_G[1:] < stop_G[:-1]
    if overlap.any():
        g = int(overlap.argmax())
        raise InputError(
            f"level {index} groups {g} and {g + 1} must be ascending and disjoint, got rows "
            f"{start_G[g]} to {stop_G[g]} and {start_G[g + 1]} to {stop_G[g + 1]}"
        )
    if level.kv_len_G.min() < 0:
        g = int(level.kv_len_G.argmin())
        raise InputError(f"level {index} group {g} has kv_len {level.kv_len_G[g]}; it must be >= 0")
