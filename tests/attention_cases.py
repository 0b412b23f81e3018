"""Ragged trees of keys for the attention tests, and attention row by row without levels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from devices import DEVICE
from torch import Tensor

from treegen.ops.attention import Level, attend


@dataclass
class Group:
    """Rows start to stop and keys at positions kv_start onwards."""

    start: int
    stop: int
    kv_len: int
    kv_start: int = 0


RAGGED = [
    [Group(0, 9, 21)],
    [Group(0, 1, 3, 21), Group(2, 9, 18, 21)],
    [Group(i, i + 1, 1 + i, 39) for i in range(9)],
]
"""For nine rows after 60 keys."""
MIXED = (
    [[Group(0, 20, 33)], [Group(0, 12, 20, 33), Group(12, 19, 7, 33), Group(19, 20, 5, 33)]],
    [*range(33 + 8, 33 + 20), *range(33, 40), 37],
)
"""A chunk that continues an earlier one, a fresh span and a decoding row under one prefix."""


@dataclass
class Case:
    """Query rows, levels of groups, and each group's keys and values in float64."""

    q: Tensor
    groups: list[list[Group]]
    causal: list[bool]
    positions: Tensor
    keys: list[list[Tensor]] = field(default_factory=list)
    values: list[list[Tensor]] = field(default_factory=list)


def make_case(
    groups: list[list[Group]],
    positions: Sequence[int] | Tensor,
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16),
    causal: Sequence[bool] | None = None,
    seed: int = 0,
    round_to: torch.dtype = torch.float64,
) -> Case:
    """Fill a case with random numbers that the given type holds exactly."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(round_to).double()

    case = Case(
        q=draw(len(positions), heads[0], dims[0]) * 2,
        groups=groups,
        causal=list(causal) if causal is not None else [False] * len(groups),
        positions=torch.as_tensor(positions, dtype=torch.int64),
    )
    for level in groups:
        case.keys.append([draw(g.kv_len, heads[1], dims[0]) for g in level])
        case.values.append([draw(g.kv_len, heads[1], dims[1]) for g in level])
    return case


def oracle(
    case: Case,
    *,
    scale: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gather the whole key set of each row by hand and take one softmax, in float64."""
    num_rows, q_heads, k_dim = case.q.shape
    v_dim = next((v.shape[-1] for level in case.values for v in level), k_dim)
    scale = 1 / math.sqrt(k_dim) if scale is None else scale
    out = torch.zeros(num_rows, q_heads, v_dim, dtype=torch.float64)
    lse = torch.full((num_rows, q_heads), -torch.inf, dtype=torch.float64)
    for row in range(num_rows):
        position = int(case.positions[row])
        keys, values = [], []
        for i, level in enumerate(case.groups):
            for j, group in enumerate(level):
                if group.start <= row < group.stop:
                    at = torch.arange(group.kv_len) + group.kv_start
                    seen = torch.ones(group.kv_len, dtype=torch.bool)
                    if case.causal[i]:
                        seen &= at <= position
                    if window is not None:
                        seen &= position - at < window
                    if chunk is not None:
                        seen &= at >= position // chunk * chunk
                    keys.append(case.keys[i][j][seen])
                    values.append(case.values[i][j][seen])
        k = torch.cat(keys) if keys else case.q.new_zeros(0, 1, k_dim)
        v = torch.cat(values) if values else case.q.new_zeros(0, 1, v_dim)
        for head in range(q_heads):
            kv_head = head // (q_heads // k.shape[1])
            logits = k[:, kv_head] @ case.q[row, head] * scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            if sinks is not None:
                logits = torch.cat([logits, sinks[head, None].double()])
            if logits.numel():
                weights = logits.softmax(0)
                lse[row, head] = logits.logsumexp(0)
                out[row, head] = weights[: len(k)] @ v[:, kv_head]
    return out, lse


def column(values: Sequence[int]) -> Tensor:
    """An int32 tensor."""
    return torch.tensor(list(values), dtype=torch.int32)


def paged(
    case: Case,
    dtype: torch.dtype,
    page_size: int = 4,
    *,
    shuffle: bool = True,
    poison: float = math.nan,
    seed: int = 0,
) -> tuple[Tensor, Tensor, list[Level]]:
    """Lay all levels out in one pool, every slot that holds no key poisoned, page 0 first."""
    counts = [[-(-g.kv_len // page_size) for g in level] for level in case.groups]
    total = sum(map(sum, counts))
    order = np.arange(1, total + 1)
    if shuffle:
        np.random.default_rng(seed).shuffle(order)
    heads, k_dim = next((k.shape[1:] for level in case.keys for k in level), (1, case.q.shape[2]))
    v_dim = next((v.shape[2] for level in case.values for v in level), k_dim)
    keys = torch.full((total + 1, page_size, heads, k_dim), poison, dtype=dtype)
    values = torch.full((total + 1, page_size, heads, v_dim), poison, dtype=dtype)
    levels = []
    used = 0
    for i, level in enumerate(case.groups):
        table = torch.zeros(len(level), max(counts[i], default=0) + 1, dtype=torch.int32)
        for j, count in enumerate(counts[i]):
            pages = torch.as_tensor(order[used : used + count])
            used += count
            table[j, :count] = pages
            slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()
            slots = slots[: level[j].kv_len]
            keys.view(-1, heads, k_dim)[slots] = case.keys[i][j].to(dtype)
            values.view(-1, heads, v_dim)[slots] = case.values[i][j].to(dtype)
        levels.append(
            Level(
                column([g.start for g in level]),
                column([g.stop for g in level]),
                table,
                column([g.kv_len for g in level]),
                column([g.kv_start for g in level]),
                case.causal[i],
            )
        )
    return keys, values, levels


def to_device(level: Level, device: str) -> Level:
    """Return a level whose tensors are on a device."""
    names = ("q_start_G", "q_stop_G", "pages_GP", "kv_len_G", "kv_start_G")
    return replace(level, **{name: getattr(level, name).to(device) for name in names})


def check_attention(
    case: Case,
    dtype: torch.dtype,
    impl: str,
    bounds: tuple[float, float],
    *,
    device: str = DEVICE,
    stored: torch.dtype | None = None,
    page_size: int = 4,
    poison: float = math.nan,
    **options: Any,
) -> None:
    """Compare out and LSE with the oracle by their worst element; unused slots are poisoned.

    bounds: how far elements of out, and LSEs, may be from the oracle.
    stored: dtype of keys and values, if it is not that of queries.
    """
    want_out, want_lse = oracle(case, **options)
    keys, values, levels = paged(case, stored or dtype, page_size, poison=poison)
    moved: dict[str, Any] = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in options.items()
    }
    out, lse = attend(
        case.q.to(device, dtype),
        keys.to(device),
        values.to(device),
        [to_device(level, device) for level in levels],
        case.positions.to(device),
        impl=impl,
        return_lse=True,
        **moved,
    )
    assert out.dtype == dtype and lse.dtype == torch.float32
    of_out, of_lse = bounds
    torch.testing.assert_close(out.cpu().double(), want_out, rtol=of_out, atol=of_out)
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=of_lse, atol=of_lse)


def dense(
    case: Case, dtype: torch.dtype, *, spare: int = 1
) -> tuple[list[Tensor], list[Tensor], list[Level]]:
    """Lay each level out as dense tensors [G, L, kv_heads, dim] of its own, padding poisoned."""

    def pad(parts: list[Tensor]) -> Tensor:
        longest = max(len(part) for part in parts) + spare
        padded = torch.full((len(parts), longest, *parts[0].shape[1:]), math.nan, dtype=dtype)
        for i, part in enumerate(parts):
            padded[i, : len(part)] = part.to(dtype)
        return padded

    levels = [
        Level.dense(
            [g.start for g in level],
            [g.stop for g in level],
            [g.kv_len for g in level],
            [g.kv_start for g in level],
            causal=causal,
        )
        for level, causal in zip(case.groups, case.causal, strict=True)
    ]
    return [pad(k) for k in case.keys], [pad(v) for v in case.values], levels


def random_tree(seed: int, *, max_rows: int = 24, max_depth: int = 12) -> dict[str, Any]:
    """Groups and positions of a random ragged tree: arguments of make_case."""
    rng = np.random.default_rng(seed)
    num_rows = int(rng.integers(1, max_rows + 1))
    spans = [(0, num_rows, 0)]
    levels: list[list[Group]] = []
    end = np.zeros(num_rows, dtype=np.int64)
    for _ in range(int(rng.integers(1, max_depth + 1))):
        level, below = [], []
        for start, stop, begin in spans:
            kv_len = int(rng.choice([0, 1, 2, 3, 5, 8, 13, 40], p=[0.1, *[0.9 / 7] * 7]))
            if rng.random() < 0.85:
                level.append(Group(start, stop, kv_len, begin))
            else:
                kv_len = 0
            end[start:stop] = begin + kv_len
            cuts = rng.integers(start, stop + 1, size=int(rng.integers(0, 4)))
            edges = [start, *sorted(cuts), stop]
            for low, high in itertools.pairwise(edges):
                if high > low and rng.random() < 0.95:
                    below.append((int(low), int(high), begin + kv_len))
        levels.append(level)
        spans = below
    return {"groups": levels, "positions": end}
