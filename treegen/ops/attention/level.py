"""A level: groups of consecutive query rows, each group with keys of its own.

Legend: G groups, P page table entries per group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from treegen.common.checks import device_name
from treegen.errors import InputError

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """G groups of consecutive query rows, each with keys of its own.

    Groups are disjoint and in ascending order. A row of no group gets nothing from the level. All
    tensors are int32 on one device.

    q_start_G, q_stop_G: group g has the rows q_start <= row < q_stop.
    pages_GP: the pages in which its keys lie in order; entries past the last used page are ignored.
    kv_len_G: how many keys it has.
    kv_start_G: the position of its first key.
    causal: whether keys may lie after a row. If so, positions are compared: a row sees key j of its
    group if kv_start + j is not greater than its own position.
    """

    q_start_G: Tensor
    q_stop_G: Tensor
    pages_GP: Tensor
    kv_len_G: Tensor
    kv_start_G: Tensor
    causal: bool = False

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
        """Level over dense keys [G, L, kv_heads, k_dim], in which group g has page g of size L.

        Args:
            kv_len: For each group, or for all, how many of the L keys are real.
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
    """Items that each have some of the query rows, another number of them in each pass.

    offsets: item i has the rows offsets[i] to offsets[i + 1].
    start_G, stop_G: the items of each group of a level.
    memo: what implementations remember about the level, whatever rows its items have.
    """

    offsets: IntArray
    start_G: IntArray
    stop_G: IntArray
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def num(self) -> int:
        """How many items there are."""
        return len(self.offsets) - 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Other processes remember for themselves."""
        return Items, (self.offsets, self.start_G, self.stop_G)


@dataclass(frozen=True, slots=True, eq=False)
class HostLevel:
    """A level as arrays on the host, from which work is planned.

    The fields are those of `Level`.

    memo: what implementations remember about the level, which may serve many steps.
    items: whose rows the groups have; None if nobody has told.
    copied: whether its pages are those of copies, which have the keys and values of all heads where
    the pool has latents; see `treegen.ops.attention.latent`. stored_GP: the pages of these latents.
    """

    start_G: IntArray
    stop_G: IntArray
    pages_GP: IntArray
    kv_len_G: IntArray
    kv_start_G: IntArray
    causal: bool
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)
    items: Items | None = None
    copied: bool = False
    stored_GP: IntArray | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Other processes remember for themselves."""
        given = (self.start_G, self.stop_G, self.pages_GP, self.kv_len_G, self.kv_start_G)
        copied = self.copied, self.stored_GP
        return HostLevel, (*given, self.causal, {}, self.items, *copied)

    def check_pool(self, index: int, num_pages: int, page_size: int) -> None:
        """Check that all keys of the level lie in a pool.

        Args:
            index: The number of the level, for messages.

        Raises:
            InputError: a group has too few pages, or a page that the pool does not have.
        """
        used_G = -(-self.kv_len_G // page_size)
        capacity = self.pages_GP.shape[1]
        if used_G.size and used_G.max() > capacity:
            g = int(used_G.argmax())
            raise InputError(
                f"level {index} group {g} has {self.kv_len_G[g]} keys but its {capacity} pages of "
                f"{page_size} hold {capacity * page_size}; give it {used_G[g]} pages"
            )
        used_GP = np.arange(capacity) < used_G[:, None]
        bad = np.argwhere(used_GP & ((self.pages_GP < 0) | (self.pages_GP >= num_pages)))
        if bad.size:
            g, p = bad[0]
            raise InputError(
                f"level {index} group {g} uses page {self.pages_GP[g, p]}; "
                f"the pool has pages 0 to {num_pages - 1}"
            )


def to_host(level: Level) -> HostLevel:
    """Copy a level to the host; waits for the device. The caller may then reuse its tensors."""

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

    Raises:
        InputError: they are not as `Level` says.
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
        want = 2 if name == "pages_GP" else 1
        if tensor.dim() != want or tensor.shape[0] != num_groups:
            raise InputError(
                f"level {index} {name} must have {want} dimensions, the first {num_groups} (groups "
                f"of q_start_G), got shape {tuple(tensor.shape)}"
            )


def check_values(level: HostLevel, index: int) -> None:
    """Check the numbers in a level.

    Raises:
        InputError: groups overlap or are out of order, or a length is negative.
    """
    start_G, stop_G = level.start_G, level.stop_G
    if start_G.size == 0:
        return
    if start_G[0] < 0:
        raise InputError(f"level {index} group 0 starts at row {start_G[0]}; rows start at 0")
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
