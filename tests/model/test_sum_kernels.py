"""The kernels that add up the tensors of two ranks, in two processes that share memory.

Without a GPU run it as `TRITON_INTERPRET=1 pytest tests/model/test_sum_kernels.py`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from devices import INTERPRETED
from torch import Tensor

triton = pytest.importorskip("triton")
sum_kernels: Any = pytest.importorskip("treegen.model.parallel.sum_kernels")
interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="needs TRITON_INTERPRET=1; two GPUs run tests/summed_ranks.py"
)

PROGRAMS = 3
LINES, STAGED, PIECES = 1024, 2048, 4  # of a rank's memory
BLOCK = 128
NUMBERS = [2, 254, 256, 258, 1000, 2048, 2, 6, 5000, 1536]  # that are added up, one after another
SEED = 3


def numbers_of(rank: int, count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return the numbers of a rank; some of their sums overflow or are not numbers."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    numbers = torch.randn(count, generator=generator)
    numbers[:: 1 + seed % 7] *= 1e4
    if count > 100:
        numbers[3], numbers[5] = torch.inf if rank else -torch.inf, -0.0
    return numbers.to(dtype)


class Rank:
    """One of two ranks, with its own memory and that of the other rank."""

    def __init__(self, rank: int, memories: list[list[Tensor]], launch: int = 0) -> None:
        own, peer = memories[rank], memories[1 - rank]
        stop = torch.zeros(1, dtype=torch.int32)
        launches = torch.full((2, PROGRAMS), launch, dtype=torch.int32)
        self.tagged = partial(self._sum, "sum_tagged", own[0], peer[0], launches[0], stop)
        areas = own[1], peer[1], own[2], peer[2], launches[1]
        self.staged = partial(self._sum, "sum_staged", *areas, stop)
        self.stop = stop

    def _sum(self, name: str, *areas: Any) -> Tensor:
        *memory, numbers, residual, in_place = areas
        out = numbers if in_place else torch.full_like(numbers, torch.nan)
        getattr(sum_kernels, name)(numbers, residual, out, *memory)
        return out


def compare(
    rank: int, memories: list[list[Tensor]], dtype: torch.dtype, launch: int, wrong: Any
) -> None:
    """Add up numbers in one of two processes, and report which sums differ from torch's."""
    sum_kernels._TAGGED_BLOCK, sum_kernels._STAGED_BLOCKS = BLOCK, (BLOCK, 2 * BLOCK)
    this, random = Rank(rank, memories, launch), Random(SEED)
    for seed in range(3 * len(NUMBERS)):
        count = NUMBERS[seed % len(NUMBERS)]
        numbers, others = (numbers_of(each, count, dtype, seed) for each in (rank, 1 - rank))
        residual = numbers_of(2, count, dtype, seed) if random.random() < 0.5 else None
        want = (numbers.double() + others.double()).to(dtype)
        if residual is not None:
            want = (want.double() + residual.double()).to(dtype)
        is_tagged, in_place = random.random() < 0.5, random.random() < 0.5
        if count * dtype.itemsize > 4 * LINES:
            is_tagged = False
        actual = (this.tagged if is_tagged else this.staged)(numbers, residual, in_place)
        if not torch.equal(actual.nan_to_num(7), want.nan_to_num(7)):
            wrong.put(f"rank {rank}: {count} numbers, tagged {is_tagged}, in place {in_place}")
    wrong.put("")


def wait_alone(rank: int, memories: list[list[Tensor]], done: Any) -> None:
    """Add up numbers without the other rank, which never comes."""
    sum_kernels._POLLS = 8
    this = Rank(rank, memories)
    this.stop.fill_(1)
    for add in (this.tagged, this.staged):
        add(torch.ones(1000), None, False)
    done.put("")


def run_ranks(function: Any, ranks: int, *arguments: Any) -> list[str]:
    """Return what processes report that run as ranks."""
    memories = [
        [
            torch.zeros(size, dtype=dtype).share_memory_()
            for size, dtype in (
                (2 * LINES, torch.int64),
                (2 * STAGED, torch.int32),
                (PROGRAMS * PIECES, torch.int32),
            )
        ]
        for _ in range(2)
    ]
    context = multiprocessing.get_context("fork")
    reports = context.SimpleQueue()
    processes = [
        context.Process(target=function, args=(rank, memories, *arguments, reports))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    random, end = Random(SEED), time.monotonic() + 60
    while all(process.is_alive() for process in processes) and time.monotonic() < end:
        # Each rank is suspended again and again, at any moment.
        pid = random.choice(processes).pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        time.sleep(random.uniform(0, 0.03))
        os.kill(pid, signal.SIGCONT)
        time.sleep(random.uniform(0, 0.01))
    for process in processes:
        process.join(10)
        process.kill()
        process.join()
        assert process.exitcode == 0
    found: list[str] = []
    while not reports.empty():
        found.append(reports.get())
    assert found.count("") == ranks
    return [report for report in found if report]


@interpreted
# The interpreter truncates bfloat16; two GPUs add it up in tests/summed_ranks.py.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("launch", [0, (1 << 31) - 9, -(1 << 31) + 9], ids=str)
def test_two_ranks_have_the_rounded_sum_of_both(dtype: torch.dtype, launch: int) -> None:
    assert run_ranks(compare, 2, dtype, launch) == []


@interpreted
def test_a_rank_without_the_other_one_stops() -> None:
    assert run_ranks(wait_alone, 1) == []


@pytest.mark.skipif(INTERPRETED, reason="needs Triton's compiler")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_programs_can_be_compiled_and_copy_16_bytes_at_once(dtype: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for kernel, block, warps in (
        (sum_kernels._sum_tagged, 256, 4),
        (sum_kernels._sum_staged, 8192, 16),
    ):
        constants = {"HALF": 1 << 17, "BLOCK": block, "HAS_RESIDUAL": True}
        constants |= {"MAX_PIECES": 16, "POLLS": 1024, "DTYPE": getattr(triton.language, dtype)}
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
        types = {
            name: "constexpr"
            if name in constants
            else {"num_words": "i32"}.get(name, "*i64" if "lines" in name else "*i32")
            for name in kernel.arg_names
        }
        aligned = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(kernel.arg_names)
            if types[name] != "constexpr"
        }
        source = ASTSource(kernel, types, constants, aligned)
        done = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": warps})
        assert ("st.global.v2.b64" if block == 256 else "st.global.v4.b32") in done.asm["ptx"]
