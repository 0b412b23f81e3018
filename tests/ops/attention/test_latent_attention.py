"""Attention over latents, absorbed, from copies and in pieces, against all heads' own keys."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from devices import CUDA, needs_triton
from torch import Tensor

from treegen.common.spec import LatentSpec
from treegen.ops.attention import HostLevel, attend, merge, prepare_host
from treegen.ops.attention import latent as latents
from treegen.ops.attention.latent import attend_latents, view_expanded, write_expanded
from treegen.ops.attention.types import FP8

CPU = torch.device("cpu")
FORM = LatentSpec(heads=3, rank=12, rope=4, nope=6, v_dim=5)
PAGE = 4


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


class Tree:
    """A random tree of latents in a pool: a trunk, wide nodes below it, and keys of each row."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64, form: LatentSpec = FORM):
        random = np.random.default_rng(seed)
        torch.manual_seed(seed)
        self.form, self.num_pages, self.block = form, 700, 1
        self.pool = torch.randn(self.num_pages, PAGE, 1, form.cached_dim, dtype=dtype)
        self.up = torch.randn(form.heads, form.nope + form.v_dim, form.rank, dtype=dtype) / 3
        self.free = random.permutation(np.arange(400, self.num_pages)).tolist()
        nodes = [int(random.integers(1, 30)) for _ in range(int(random.integers(1, 4)))]
        self.rows = sum(nodes)
        self.q = torch.randn(self.rows, form.heads, form.k_dim, dtype=dtype)
        stops = np.cumsum(nodes)
        trunk = int(random.integers(1, 60))
        lengths = random.integers(0, 25, len(nodes))
        own = random.integers(1, 12, self.rows)
        first = np.repeat(trunk + lengths, nodes)
        self.positions = torch.from_numpy(first + own - 1)
        self.levels = [
            self.level([0], [self.rows], [trunk], [0]),
            self.level(stops - nodes, stops, lengths, [trunk] * len(nodes)),
            self.level(range(self.rows), range(1, self.rows + 1), own, first),
        ]

    def level(self, starts, stops, lengths, origins) -> HostLevel:  # type: ignore[no-untyped-def]
        width = max(-(-int(n) // PAGE) for n in lengths) + 1
        pages = np.zeros((len(lengths), width), dtype=np.int64)
        for row, length in enumerate(lengths):
            for at in range(-(-int(length) // PAGE)):
                pages[row, at] = self.free.pop()
        start_G, stop_G = (np.array([*map(int, each)]) for each in (starts, stops))
        return HostLevel(start_G, stop_G, pages, ints(*lengths), ints(*origins), causal=False)

    def expanded(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all heads of the whole pool, as stock layers make them."""
        form = self.form
        latent, rotated = self.pool.split([form.rank, form.rope], -1)
        made = torch.einsum("psgr,hxr->pshx", latent, self.up)
        keys = torch.cat([made[..., : form.nope], rotated.expand(-1, -1, form.heads, -1)], -1)
        return keys, made[..., form.nope :]

    def want(self, levels: list[HostLevel], **options) -> Tensor:  # type: ignore[no-untyped-def]
        prepared = prepare_host(levels, self.positions, CPU, "reference")
        out: Tensor = attend(self.q, *self.expanded(), prepared, **options)
        return out

    def copied(self, index: int, groups: list[int]) -> list[HostLevel]:
        """The levels with copies of some groups of one of them, which are written."""
        level, form = self.levels[index], self.form
        per = form.copy_pages(self.pool.itemsize, self.q.itemsize)
        selected = np.isin(np.arange(level.start_G.size), groups)
        pages = np.zeros_like(level.pages_GP)
        for group in groups:
            num = int(level.kv_len_G[group])
            count = -(-num // PAGE)
            pages[group, :count] = np.arange(self.block, self.block + count)
            self.block += count
            at = np.arange(num)
            slots, targets = (
                torch.from_numpy(table[group, at // PAGE] * PAGE + at % PAGE)
                for table in (level.pages_GP, pages)
            )
            write_expanded(self.pool, slots, targets, self.up, form, self.q.dtype)
        assert self.block * per < 400
        both = [
            replace(level, kv_len_G=np.where(selected, 0, level.kv_len_G), memo={}),
            replace(
                level,
                pages_GP=pages,
                kv_len_G=np.where(selected, level.kv_len_G, 0),
                copied=True,
                memo={},
            ),
        ]
        return [*self.levels[:index], *both, *self.levels[index + 1 :]]

    def got(self, levels, impl="reference", *, expands=False, **options) -> Tensor:  # type: ignore[no-untyped-def]
        prepared = prepare_host(levels, self.positions, CPU, impl, expands=expands)
        options.setdefault("scale", self.form.k_dim**-0.5)
        return attend_latents(self.q, self.pool, self.up, self.form, prepared, **options)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("seed", range(6))
def test_all_forms_give_what_all_heads_keys_give(
    seed: int, impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latents, "_PIECE", FORM.expanded * PAGE * 2)  # of two pages each
    tree = Tree(seed)
    options: list[dict[str, Any]] = [
        {},
        {"window": 9},
        {"softcap": 2.0, "sinks": torch.randn(3, dtype=torch.float64)},
    ]
    for option in options:
        want = tree.want(tree.levels, **option)
        for levels in (
            tree.levels,
            tree.copied(0, [0]),
            tree.copied(1, [*range(0, tree.levels[1].start_G.size, 2)]),
        ):
            for expands in (False, True):
                got = tree.got(levels, impl, expands=expands, **option)
                torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_a_pass_of_many_rows_makes_keys_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt: the tokens of a pass see all earlier ones, and those before themselves."""
    monkeypatch.setattr(latents, "_PIECE", FORM.expanded * PAGE * 3)
    tree = Tree(0)
    rows, before = 40, 50
    tree.rows, tree.q = rows, torch.randn(rows, 3, FORM.k_dim, dtype=torch.float64)
    tree.positions = torch.arange(before, before + rows)
    tree.free = list(range(200, 400))
    earlier = tree.level([0], [rows], [before], [0])
    own = replace(tree.level([0], [rows], [rows], [before]), causal=True)
    made: list[int] = []
    expand = latents._expand_latents

    def noted(*given: Any) -> Any:
        made.append(len(given[1]))
        return expand(*given)

    monkeypatch.setattr(latents, "_expand_latents", noted)
    for impl in ("reference", "cpu"):
        got = tree.got([earlier, own], impl, expands=True)
        torch.testing.assert_close(got, tree.want([earlier, own]), rtol=1e-11, atol=1e-11)
    assert set(made) == {12, 4} and sum(made) == 2 * (52 + 40)
    made.clear()
    assert latents.rows_to_expand(FORM) > 4
    few = replace(own, stop_G=ints(4))
    tree.got([earlier, few], expands=True)
    assert sum(made) == 52  # few rows see latents as they are


def test_copies_of_latents_in_8_bits_are_in_the_type_of_the_queries() -> None:
    form = LatentSpec(heads=3, rank=13, rope=4, nope=6, v_dim=5)
    tree = Tree(3, torch.float32, form)
    tree.pool = tree.pool.clamp(-8, 8).to(FP8)
    assert form.copy_pages(1, 4) * form.cached_dim % 4 == 0
    keys, values = view_expanded(tree.pool, form, torch.float32)
    assert keys.dtype == values.dtype == torch.float32
    assert (keys.shape[1:], values.shape[1:]) == ((PAGE, 3, 10), (PAGE, 3, 5))
    levels = tree.copied(0, [0])
    stored = tree.pool.float()
    for each in (levels, tree.levels):
        got = tree.got(each)
        tree.pool, previous = stored, tree.pool
        torch.testing.assert_close(got, tree.want(tree.levels), rtol=1e-5, atol=1e-5)
        tree.pool = previous


def test_a_copy_takes_whole_pages() -> None:
    """With the sizes of DeepSeek-V3, V2-Lite and GLM-4.7-Flash."""
    for sizes, cached_dim, expanded, pages in (
        ((128, 512, 64, 128, 128), 576, 40_960, 72),
        ((16, 512, 64, 128, 128), 576, 5_120, 9),
        ((20, 512, 64, 192, 256), 576, 10_240, 18),
    ):
        form = LatentSpec(*sizes)
        assert (form.cached_dim, form.expanded) == (cached_dim, expanded)
        assert form.copy_pages(2, 2) == pages
        assert form.copy_pages(1, 2) == 2 * expanded // cached_dim + 1


DEVICE = torch.device("cuda" if CUDA else "cpu")
# The interpreter computes products in bf16 wrongly, so float16 stands in.
HALF = torch.bfloat16 if CUDA else torch.float16


def by_triton(tree: Tree, levels: list[HostLevel], dtype: torch.dtype, **options) -> Tensor:  # type: ignore[no-untyped-def]
    """What Triton's kernels make of a tree in float64 whose numbers are rounded to a type."""
    positions = tree.positions.to(DEVICE)
    expands = options.pop("expands", False)
    prepared = prepare_host(levels, positions, DEVICE, "triton", expands=expands)
    q, pool, up = (each.to(DEVICE, dtype) for each in (tree.q, tree.pool, tree.up))
    options.setdefault("scale", tree.form.k_dim**-0.5)
    if "sinks" in options:
        options["sinks"] = options["sinks"].to(DEVICE)
    out = attend_latents(q, pool, up, tree.form, prepared, **options)
    assert out.dtype == dtype
    return out.double().cpu()


def rounded(tree: Tree, dtype: torch.dtype) -> Tree:
    for name in ("q", "pool", "up"):
        setattr(tree, name, getattr(tree, name).to(dtype).double())
    return tree


FORMS = [FORM, LatentSpec(20, 32, 16, 24, 16), LatentSpec(80, 16, 8, 8, 8)]


@needs_triton
@pytest.mark.parametrize(
    ("seed", "form"),
    # The interpreter takes seconds for many heads, whose blocks are the same in every tree.
    [(seed, form) for form in FORMS for seed in range(1 if form.heads > 64 else 2)],
    ids=str,
)
def test_kernels_read_a_latent_once_for_all_heads(seed: int, form: LatentSpec) -> None:
    tree = rounded(Tree(seed + 10, form=form), torch.float32)
    for option in ({}, {"window": 9}, {"softcap": 2.0, "sinks": torch.randn(form.heads)}):
        want = tree.want(tree.levels, **option)
        got = by_triton(tree, tree.levels, torch.float32, **option)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_kernels_merge_copies_and_pieces(dtype: torch.dtype) -> None:
    bound = 1e-4 if dtype == torch.float32 else 2e-2
    tree = rounded(Tree(4), dtype)
    copied, piecewise = tree.copied(0, [0]), tree.copied(1, [0])
    tree.pool = tree.pool.to(dtype).double()
    want = tree.want(tree.levels)
    # A copy is laid out for the type of the pool, so it is written anew.
    for levels in (copied, piecewise):
        typed = replace_pool(tree, levels, dtype)
        for expands in (False, True):
            prepared = prepare_host(
                levels, tree.positions.to(DEVICE), DEVICE, "triton", expands=expands
            )
            q, up = tree.q.to(DEVICE, dtype), tree.up.to(DEVICE, dtype)
            scale = tree.form.k_dim**-0.5
            got = attend_latents(q, typed, up, tree.form, prepared, scale=scale)
            torch.testing.assert_close(got.double().cpu(), want, rtol=bound, atol=bound)


def replace_pool(tree: Tree, levels: list[HostLevel], dtype: torch.dtype) -> Tensor:
    """The pool in a type on the device, with the copies that levels read."""
    pool = tree.pool.to(DEVICE, dtype)
    pairs = [(stored, copy) for stored, copy in itertools.pairwise(levels) if copy.copied]
    for stored, copy in pairs:
        for group in np.flatnonzero(copy.kv_len_G):
            at = np.arange(int(copy.kv_len_G[group]))
            slots, targets = (
                torch.from_numpy(table[group, at // PAGE] * PAGE + at % PAGE).to(DEVICE)
                for table in (stored.pages_GP, copy.pages_GP)
            )
            up = tree.up.to(DEVICE, dtype)
            write_expanded(pool, slots, targets, up, tree.form, dtype)
    return pool


@needs_triton
def test_two_results_are_merged_in_one_launch() -> None:
    from treegen.ops.attention.gpu.latent_kernels import merge_pair

    torch.manual_seed(0)
    a = torch.randn(3, 9, 20).transpose(0, 1).to(DEVICE)
    b = torch.randn(9, 3, 20).to(DEVICE)
    lses = torch.randn(2, 9, 3).to(DEVICE) * 9
    lses[0, :4], lses[1, 2:6] = -torch.inf, -torch.inf
    a[:3] = torch.nan
    want, _ = merge([a, b], lses)
    torch.testing.assert_close(merge_pair(a, lses[0], b, lses[1]), want, rtol=1e-6, atol=1e-6)
