"""Sequences that are computed a token at a time: their numbers, and the same bits in any parts.

On a GPU, or in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/ops/recurrence/test_scan.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from delta_cases import Case
from devices import CUDA, DEVICE, needs_triton
from torch import Tensor

from treegen.ops import recurrence
from treegen.ops.recurrence import Convolution, DeltaInputs, reference

pytestmark = [pytest.mark.gpu] if CUDA else []
BY = ["reference", pytest.param("gpu", marks=needs_triton)]
Heads = tuple[int, int, int, int]
RULES: list[tuple[Heads, bool]] = [((2, 6, 8, 12), True), ((2, 6, 8, 12), False)]
RULES += [((2, 4, 32, 96), True)]
if CUDA:
    RULES += [((16, 32, 128, 128), True), ((8, 128, 128, 64), False), ((1, 48, 128, 64), False)]


def module_of(by: str) -> Any:
    if by == "reference":
        return reference
    from treegen.ops.recurrence import gpu

    return gpu


def case_of(by: str, rows: int, heads: Heads, corrects: bool, dtype: torch.dtype) -> Case:
    device = DEVICE if by == "gpu" else "cpu"
    return Case(4, rows, 12, dtype, heads, device=device, by=module_of(by), corrects=corrects)


def tokens(case: Case, first: int, last: int, rows: slice = slice(None)) -> DeltaInputs:
    """Some tokens of some rows, those of the first row first."""
    steps = [case.inputs(t) for t in range(first, last)]

    def together(name: str) -> Tensor:
        return torch.stack([getattr(each, name)[rows] for each in steps], 1).flatten(0, 1)

    one = steps[0]
    return DeltaInputs(
        together("mixed_TC"),
        together("a_TH"),
        together("b_TH"),
        one.conv_CW,
        one.a_log_H,
        one.dt_bias_H,
        one.strength,
        one.conv_bias_C,
        one.skip_H,
    )


def pieces(
    by: str, case: Case, parts: list[int], rows: slice = slice(None), *, fresh: bool = False
) -> Tensor:
    """What rows read at all tokens, computed in parts of so many; [rows, tokens, H, V]."""
    writes = case.own[rows].to(case.device)
    reads = torch.full_like(writes, -1) if fresh else case.base[rows].to(case.device)
    outs, at = [], 0
    for num in parts:
        given = tokens(case, at, at + num, rows)
        out = module_of(by).scan(given, case.states, reads, writes, num)
        outs.append(out.unflatten(0, (-1, num)))
        reads, at = writes, at + num
    return torch.cat(outs, 1)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize(("heads", "corrects"), RULES)
def test_sequences_are_those_of_the_rule(heads: Heads, corrects: bool, by: str) -> None:
    case = case_of(by, 3, heads, corrects, torch.float32)
    got = pieces(by, case, [5, 1, 6]).cpu()
    want = case.want.transpose(0, 1)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5 * float(want.abs().max()))
    own = case.own.to(case.device)
    scale = float(case.last.abs().max())
    torch.testing.assert_close(
        case.states.states[own].cpu(), case.last, rtol=1e-4, atol=2e-5 * scale
    )
    assert torch.equal(case.states.windows[own].cpu(), case.windows[12])


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "corrects"), RULES)
def test_bits_are_the_same_in_any_parts(
    heads: Heads, corrects: bool, dtype: torch.dtype, by: str
) -> None:
    num_rows = 40 if CUDA else 3
    found = []
    for parts in ([12], [1] * 12, [3, 7, 2], [11, 1]):
        case = case_of(by, num_rows, heads, corrects, dtype)
        out = pieces(by, case, parts)
        own = case.own.to(case.device)
        found.append((out, case.states.states[own], case.states.windows[own]))
    alone = case_of(by, num_rows, heads, corrects, dtype)
    row = pieces(by, alone, [4, 8], slice(1, 2))
    if by == "reference":
        torch.testing.assert_close(row[0], found[0][0][1])
    else:
        assert torch.equal(row[0], found[0][0][1])
    for each in found[1:]:
        for one, other in zip(each, found[0], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("by", BY)
def test_a_text_begins_with_nothing(by: str) -> None:
    case = case_of(by, 3, (2, 6, 8, 12), True, torch.float32)
    zeros = case_of(by, 3, (2, 6, 8, 12), True, torch.float32)
    zeros.states.states[1:3], zeros.states.windows[1:3] = 0.0, 0.0
    case.states.states[case.own.to(case.device)] = torch.nan
    got, want = pieces(by, case, [2, 10], fresh=True), pieces(by, zeros, [12])
    assert torch.equal(got, want)


@needs_triton
@pytest.mark.parametrize(("width", "seen", "has_bias"), [(3, 3, False), (4, 4, True), (5, 4, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolutions_of_runs(width: int, seen: int, has_bias: bool, dtype: torch.dtype) -> None:
    """Runs are shorter or longer than a window, or begin; some go on in the slot they read."""
    generator = torch.Generator().manual_seed(width)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    windows, weights = normal(9, 40, width), normal(40, seen)
    bias = normal(40) if has_bias else None
    for num_tokens in (1, 2, 3, 7):
        x = normal(3 * num_tokens, 50)[:, 5:45]
        reads, writes = torch.tensor([1, -1, 2]), torch.tensor([3, 4, 2])
        want_windows, on = windows.clone(), windows.to(DEVICE).clone()
        conv = Convolution(weights, bias, want_windows)
        want = reference.convolve_runs(x, conv, reads, writes, num_tokens)
        from treegen.ops.recurrence import gpu

        conv = Convolution(weights.to(DEVICE), None if bias is None else bias.to(DEVICE), on)
        slots = reads.to(DEVICE), writes.to(DEVICE)
        got = gpu.convolve_runs(x.to(DEVICE), conv, *slots, num_tokens)
        torch.testing.assert_close(got.cpu(), want)
        assert torch.equal(on.cpu(), want_windows)


def test_the_api_takes_what_the_device_has() -> None:
    case = case_of("reference", 3, (2, 6, 8, 12), True, torch.float32)
    other = case_of("reference", 3, (2, 6, 8, 12), True, torch.float32)
    given = (tokens(case, 0, 12), case.states, case.base, case.own, 12)
    want = pieces("reference", other, [12]).flatten(0, 1)
    assert torch.equal(recurrence.scan(*given), want)
