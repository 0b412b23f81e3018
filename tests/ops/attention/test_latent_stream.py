"""The kernel that streams latents, against the reference in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from treegen.ops.attention import HostLevel, attend, prepare_host

D, V, PAGE = 576, 512, 64
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


class Pages:
    """Random latents in scattered pages, with NaN wherever no key is."""

    def __init__(self, num_pages: int, dtype: torch.dtype):
        generator = np.random.default_rng(0)
        self.free = generator.permutation(np.arange(1, num_pages)).tolist()
        self.pool = torch.full((num_pages, PAGE, 1, D), torch.nan, dtype=dtype, device="cuda")

    def level(self, starts: list[int], stops: list[int], lengths: list[int]) -> HostLevel:
        width = max(-(-n // PAGE) for n in lengths) + 1
        pages = np.zeros((len(lengths), width), dtype=np.int64)
        for group, length in enumerate(lengths):
            for at in range(-(-length // PAGE)):
                page = pages[group, at] = self.free.pop()
                keys = min(PAGE, length - at * PAGE)
                self.pool[page, :keys] = torch.randn(keys, 1, D, device="cuda")
        start, stop, keys_G = (np.array(each, dtype=np.int64) for each in (starts, stops, lengths))
        return HostLevel(start, stop, pages, keys_G, np.zeros_like(keys_G), causal=False)


def both(
    pages: Pages, levels: list[HostLevel], rows: int, heads: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Results and LSE by kernels, and by the reference in float64."""
    torch.manual_seed(1)
    dtype, device = pages.pool.dtype, pages.pool.device
    q = torch.randn(rows, heads, D, device=device).to(dtype)
    made = []
    for impl, kind in (("gluon", dtype), ("reference", torch.float64)):
        prepared = prepare_host(levels, None, device, impl)
        pool = pages.pool.to(kind)
        made.append(
            attend(q.to(kind), pool, pool[..., :V], prepared, scale=D**-0.5, return_lse=True)
        )
    return made[0], made[1]


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [20, 16, 8, 40, 64, 128, 3])
def test_streamed_latents_give_what_the_reference_gives(heads: int, dtype: torch.dtype) -> None:
    pages = Pages(4000, dtype)
    own = [1000, 64, 65, 1, 63, 128, 0, 500, 127, 129]
    rows = len(own)
    single = pages.level([*range(rows)], [*range(1, rows + 1)], own)
    trunk = pages.level([0], [rows], [700])
    nodes = pages.level([0, 4, 5], [4, 5, rows], [300, 0, 77])
    long = pages.level([0], [rows], [5000])
    for levels in ([single], [trunk, single], [trunk, nodes, single], [long], [nodes]):
        got, want = both(pages, levels, rows, heads)
        bound = {torch.bfloat16: 6e-3, torch.float16: 1e-3}[dtype]
        assert (got[0].double() - want[0]).norm() <= bound * want[0].norm()
        torch.testing.assert_close(got[1].double(), want[1], rtol=0, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_many_streams_take_turns() -> None:
    pages = Pages(9000, torch.bfloat16)
    random = np.random.default_rng(2)
    own = random.integers(1, 700, 900)
    single = pages.level([*range(900)], [*range(1, 901)], own.tolist())
    trunk = pages.level([0], [900], [2000])
    for levels in ([single], [trunk, single]):
        got, want = both(pages, levels, 900, 20)
        assert (got[0].double() - want[0]).norm() <= 6e-3 * want[0].norm()
        torch.testing.assert_close(got[1].double(), want[1], rtol=0, atol=2e-3)
