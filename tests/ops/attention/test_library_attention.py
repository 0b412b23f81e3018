"""Attention by library kernels against the oracle: the real ones on a GPU, a slow one anywhere."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import (
    MIXED,
    RAGGED,
    Case,
    Group,
    check_attention,
    make_case,
    paged,
    random_tree,
)
from torch import Tensor

from treegen.errors import InputError
from treegen.ops.attention import Level, attend, prepare
from treegen.ops.attention.library_attention import QKV, KernelCall, Library
from treegen.ops.attention.registry import LOADERS
from treegen.ops.attention.types import AttentionOptions

GPU = [pytest.param(name, marks=pytest.mark.gpu) for name in ("flash", "flash4", "xformers")]
KERNELS = ["slow", "slow without windows", *GPU]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2**-8, torch.bfloat16: 2**-6}


class Slow(Library):
    """What a library's kernel has to do, one sequence at a time."""

    dtypes = (torch.float32,)
    softcaps = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.windows = name == "slow"
        self.calls: list[KernelCall] = []

    def refusal(self, device: torch.device) -> str | None:
        return None

    def run(self, qkv: QKV, call: KernelCall, options: AttentionOptions) -> tuple[Tensor, Tensor]:
        self.calls.append(call)
        q_NHD, k_SKD, v_SKD = qkv
        out, lse = torch.empty_like(q_NHD), q_NHD.new_empty(q_NHD.shape[:2])
        ends, slots, lengths = call.ends_3U.tolist()
        assert ends[-1] == len(q_NHD) and len(call.units_U5) == len(ends) - 1
        for start, stop, slot, length in zip(ends, ends[1:], slots, lengths, strict=False):
            assert 0 < stop - start <= call.max_q and 0 < length <= call.max_k
            k, v = (
                x[slot : slot + length].repeat_interleave(q_NHD.shape[1] // x.shape[1], 1)
                for x in (k_SKD, v_SKD)
            )
            logits = torch.einsum("nhd,lhd->nhl", q_NHD[start:stop], k) * options.scale
            if options.softcap is not None:
                logits = options.softcap * (logits / options.softcap).tanh()
            if call.causal:
                ahead = torch.arange(length) - torch.arange(length - stop + start, length)[:, None]
                hidden = ahead > 0
                if call.window is not None:
                    hidden |= ahead <= -call.window
                logits.masked_fill_(hidden[:, None], -torch.inf)
            out[start:stop] = torch.einsum("nhl,lhd->nhd", logits.softmax(-1), v)
            lse[start:stop] = logits.logsumexp(-1)
        return out, lse.T


@pytest.fixture
def impl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an implementation, registered for the test if it is slow."""
    name: str = request.param
    if name.startswith("slow"):
        library = Slow(name)
        monkeypatch.setitem(LOADERS, name, lambda: library)
    elif LOADERS[name]().refusal(torch.device("cuda")) is not None:
        pytest.skip(f"{name} is not installed")
    return name


def check(case: Case, impl: str, **options: Any) -> None:
    is_slow = impl.startswith("slow")
    options["poison"] = 6e4 if impl == "flash4" else math.nan  # flash4 wants finite values
    for dtype in [torch.float32] if is_slow else [torch.float16, torch.bfloat16]:
        # Inputs are exact in 16 bits, so that only the products' rounding is left.
        bounds = TOLERANCE[dtype], 2e-4
        check_attention(case, dtype, impl, bounds, device="cpu" if is_slow else "cuda", **options)


def case_of(*args: Any, **kwargs: Any) -> Case:
    """A case that bfloat16 holds exactly, and float16 nearly always."""
    return make_case(*args, **{"dims": (64, 64), **kwargs}, round_to=torch.bfloat16)


@pytest.mark.parametrize("impl", KERNELS, indirect=True)
@pytest.mark.parametrize("seed", range(8))
def test_random_ragged_trees(impl: str, seed: int) -> None:
    tree = random_tree(seed, max_depth=[3, 12][seed % 2])
    check(case_of(**tree, heads=[(4, 2), (8, 1), (3, 3)][seed % 3], seed=seed), impl)


@pytest.mark.parametrize("impl", KERNELS, indirect=True)
@pytest.mark.parametrize("kind", ["window", "chunk"])
@pytest.mark.parametrize("seed", range(6))
def test_windows_and_sinks(impl: str, seed: int, kind: str) -> None:
    case = case_of(**random_tree(seed + 50, max_depth=4), seed=seed)
    options: dict[str, Any] = {kind: [2, 7, 30][seed % 3]}
    check(case, impl, scale=0.1, sinks=torch.randn(4), **options)


@pytest.mark.parametrize("impl", KERNELS, indirect=True)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_head_dimensions(impl: str, dim: int) -> None:
    check(case_of(RAGGED, [60] * 9, heads=(6, 2), dims=(dim, dim)), impl, page_size=16)


@pytest.mark.parametrize("impl", KERNELS, indirect=True)
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 1}, {"window": 5}, {"window": 9}, {"window": 40}, {"chunk": 6}, {"chunk": 36}],
    ids=str,
)
@pytest.mark.parametrize("page_size", [4, 64])
def test_prefill_of_chunks_beside_decoding(
    impl: str, options: dict[str, int], page_size: int
) -> None:
    """A chunk that continues an earlier one, a fresh span and a decoding row under one prefix."""
    case = case_of(*MIXED, causal=[False, True])
    check(case, impl, page_size=page_size, **options)


@pytest.mark.parametrize("impl", KERNELS, indirect=True)
@pytest.mark.parametrize("seed", range(8))
def test_any_positions_on_causal_levels(impl: str, seed: int) -> None:
    """Rows out of order, before and after the keys, with gaps and repeats."""
    random = torch.Generator().manual_seed(seed)
    steps = torch.randint(-1, 3, (40,), generator=random).clamp(min=0 if seed % 2 else -1)
    groups = [[Group(0, 25, 30), Group(25, 40, 17, 3)]]
    case = case_of(groups, steps.cumsum(0) - 3, causal=[True], seed=seed)
    options: list[dict[str, int]] = [{}, {"window": 4}, {"window": 11}, {"chunk": 7}]
    check(case, impl, **options[seed % 4])


@pytest.mark.parametrize("impl", KERNELS, indirect=True)
def test_few_rows_on_many_keys_are_split(impl: str) -> None:
    case = case_of([[Group(0, 3, 1500)], [Group(1, 2, 3, 1500)]], [1600] * 3)
    check(case, impl, page_size=16)
    check(case, impl, page_size=16, window=700)


@pytest.mark.parametrize("impl", KERNELS, indirect=True)
def test_nothing_to_attend_to(impl: str) -> None:
    check(case_of([[Group(0, 2, 0)], [Group(1, 2, 3)]], [5, 5, 5]), impl)
    check(case_of([[Group(0, 2, 0)], []], [5, 5]), impl)


@pytest.mark.parametrize("impl", KERNELS, indirect=True)
def test_more_units_than_a_grid_has_room_for(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row reads the same key, so each gets its value."""
    rows, slow = 70_000, impl.startswith("slow")
    if slow:
        rows = 70
        monkeypatch.setattr("treegen.ops.attention.library_attention.MAX_UNITS", 32)
    device, dtype = ("cpu", torch.float32) if slow else ("cuda", torch.float16)
    level = Level.dense(range(rows), range(1, rows + 1), 1, device=device)
    level = replace(level, pages_GP=torch.zeros_like(level.pages_GP))
    q, keys, values = (
        torch.randn(shape, dtype=dtype, device=device)
        for shape in ((rows, 2, 64), (1, 1, 1, 64), (1, 1, 1, 64))
    )
    assert attend(q, keys, values, [level], impl=impl).equal(values[0, 0].expand(rows, 2, -1))


@pytest.mark.parametrize(
    "impl", ["slow", pytest.param("flash4", marks=pytest.mark.gpu)], indirect=True
)
def test_softcap_where_the_kernel_takes_it(impl: str) -> None:
    check(case_of([[Group(0, 5, 9)]], [20] * 5), impl, softcap=3.0)


@pytest.mark.parametrize("impl", ["slow"], indirect=True)
def test_consecutive_pages_are_one_unit_and_calls_are_made_once(impl: str) -> None:
    case = case_of([[Group(0, 6, 40)], [Group(0, 3, 9, 40), Group(3, 6, 9, 40)]], [60] * 6)
    keys, values, levels = paged(case, torch.float32, shuffle=False)
    prepared = prepare(levels, impl=impl)
    first, again = (attend(case.q.float(), keys, values, prepared) for _ in range(2))
    assert first.equal(again)
    library = LOADERS[impl]()
    assert isinstance(library, Slow)
    assert [len(call.units_U5) for call in library.calls] == [1, 2] * 2
    assert library.calls[:2] == library.calls[2:]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"dtype": torch.float64}, "supports only torch.float32, got torch.float64; use 'triton'"),
        ({"dims": (20, 20)}, "a multiple of 8 up to 256, got 20 and 20"),
        ({"dims": (264, 264)}, "up to 256, got 264"),
        (
            {"dims": (64, 32)},
            "the same width, which must be a multiple of 8 up to 256, got 64 and 32",
        ),
        ({"softcap": 3.0}, "does not support softcap with the installed kernels, got 3.0"),
    ],
)
@pytest.mark.parametrize("impl", ["slow"], indirect=True)
def test_what_it_does_not_take_is_refused(
    impl: str, change: dict[str, Any], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slow, "softcaps", False)
    dtype = change.get("dtype", torch.float32)
    case = case_of([[Group(0, 2, 3)]], [5, 5], dims=change.get("dims", (64, 64)))
    keys, values, levels = paged(case, dtype)
    with pytest.raises(InputError, match=complaint):
        attend(case.q.to(dtype), keys, values, levels, impl=impl, softcap=change.get("softcap"))


def test_an_lse_of_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Padded(Slow):
        def run(self, *args: Any) -> tuple[Tensor, Tensor]:
            out, lse = super().run(*args)
            return out, lse[None]

    monkeypatch.setitem(LOADERS, "padded", lambda: Padded("padded"))
    case = case_of([[Group(0, 2, 3)]], [5, 5])
    keys, values, levels = paged(case, torch.float32)
    with pytest.raises(
        InputError, match=r"LSE of shape \(1, 2, 4\), expected \[heads, rows\] \(2, 4\)"
    ):
        attend(case.q.float(), keys, values, levels, impl="padded")


def test_a_library_is_only_taken_by_name() -> None:
    _, _, levels = paged(case_of([[Group(0, 2, 3)]], [5, 5]), torch.float32)
    assert prepare(levels).impl == "cpu"
    with pytest.raises(InputError, match="flash: requires tensors on an NVIDIA GPU, got cpu"):
        prepare(levels, impl="flash")
    with pytest.raises(InputError, match=r"xformers: (xformers (cannot|was)|requires tensors)"):
        prepare(levels, impl="xformers")
