"""The kernels against transformers' rule: on a GPU, or in Triton's interpreter on a CPU.

Without a GPU run it as `TRITON_INTERPRET=1 pytest tests/ops/recurrence/test_kernels.py`.
"""

from __future__ import annotations

import pytest
import torch
from delta_cases import Case, own_slots
from devices import CUDA, DEVICE, needs_triton
from torch import Tensor

from treegen.ops.recurrence import Convolution, reference

pytestmark = [needs_triton, *([pytest.mark.gpu] if CUDA else [])]
Heads = tuple[int, int, int, int]
# Key heads, value heads, and dims that are powers of two or not, small or not.
HEADS = [(2, 6, 8, 12), (1, 1, 16, 16), (2, 4, 32, 96)]
if CUDA:
    HEADS += [(16, 32, 128, 128), (16, 48, 128, 128)]
RULES = [(heads, True) for heads in HEADS]
RULES += [((2, 6, 8, 12), False)]  # Mamba2
if CUDA:
    RULES += [((8, 128, 128, 64), False), ((1, 48, 128, 64), False), ((1, 8, 256, 64), False)]


def on_kernels(
    seed: int, num_rows: int, heads: Heads, num_tokens: int = 16, corrects: bool = True
) -> Case:
    from treegen.ops.recurrence import gpu

    return Case(seed, num_rows, num_tokens, heads=heads, device=DEVICE, by=gpu, corrects=corrects)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5 * float(want.abs().max()))


@pytest.mark.parametrize(("heads", "corrects"), RULES)
def test_states_of_rows(heads: Heads, corrects: bool) -> None:
    case = on_kernels(0, 5, heads, corrects=corrects)
    reads, writes = case.own.to(DEVICE), case.own.to(DEVICE) + 5
    from treegen.ops.recurrence import gpu

    for t in range(6):
        got = gpu.step(case.inputs(t), case.states, own_slots(reads, writes))
        close(got.cpu(), case.want[t])
        reads, writes = writes, reads  # as in a search
    torch.testing.assert_close(case.states.windows[reads].cpu(), case.windows[6])


@pytest.mark.parametrize(("heads", "corrects"), RULES)
def test_lists_of_rows(heads: Heads, corrects: bool) -> None:
    num_rows, num_tokens = (37, 100) if CUDA else (5, 10)
    case = on_kernels(1, num_rows, heads, num_tokens, corrects)
    for t in range(num_tokens):
        due = (case.listed >= case.most.clamp(max=num_tokens // 2)).nonzero()[:, 0]
        if len(due):
            case.fold(due)
        close(case.list_step(t), case.want[t])
    assert case.folds
    case.fold(torch.arange(num_rows))
    close(case.states.states[case.own.to(DEVICE)].cpu(), case.last)


@pytest.mark.parametrize(
    ("dtype", "corrects"), [(torch.bfloat16, True), (torch.float32, True), (torch.bfloat16, False)]
)
def test_kernels_and_reference_agree_in_16_bits(dtype: torch.dtype, corrects: bool) -> None:
    """Inputs and lists are rounded in both; kernels also round what the convolution gives."""
    from treegen.ops.recurrence import gpu

    cases = [
        Case(2, 3, 12, dtype, (2, 4, 16, 32), 2, device, by, corrects)
        for device, by in ((DEVICE, gpu), ("cpu", reference))
    ]
    for t in range(8):
        got, want = (case.list_step(t).float() for case in cases)
        assert float((got - want).norm() / want.norm()) < 2e-2
    actual, expected = (case.states.windows[case.window.to(case.device)].cpu() for case in cases)
    assert torch.equal(actual, expected) and torch.equal(expected, cases[1].windows[8])


def test_rows_that_fill_up_a_graph_have_no_state() -> None:
    """They read slot 0, which may hold anything, and write to it; other rows do not notice."""
    case = on_kernels(3, 4, HEADS[0])
    case.states.states[0] = float("nan")
    given, slots = case.inputs(0), case.slots(0)
    slots.inputs_RT[:, 2:] = 0
    from treegen.ops.recurrence import gpu

    got = gpu.step(given, case.states, slots).cpu()
    close(got[:2], case.want[0][:2])
    assert got.isfinite().all()


@pytest.mark.parametrize(("width", "has_bias"), [(3, False), (7, True), (4, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows_move_on_from_slot_to_slot(width: int, has_bias: bool, dtype: torch.dtype) -> None:
    """Short convolutions: windows as wide as the convolution, and nothing else."""
    from treegen.ops.recurrence import gpu

    generator = torch.Generator().manual_seed(width)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    windows, weights, x = normal(9, 40, width), normal(40, width), normal(4, 50)[:, 5:45]
    bias = normal(40) if has_bias else None
    reads, writes = torch.tensor([1, 1, 2, 8]), torch.tensor([3, 4, 2, 0])
    want_windows = windows.clone()
    conv = Convolution(weights, bias, want_windows)
    want = reference.convolve(x, conv, reads, writes).to(dtype)
    on = windows.to(DEVICE)
    conv = Convolution(weights.to(DEVICE), None if bias is None else bias.to(DEVICE), on)
    got = gpu.convolve(x.to(DEVICE), conv, reads.to(DEVICE), writes.to(DEVICE))
    torch.testing.assert_close(got.cpu(), want)
    assert torch.equal(on.cpu(), want_windows)
