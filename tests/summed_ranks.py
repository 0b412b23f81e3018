"""Sums over ranks in shared memory beside those by NCCL; ranks import this module by its name."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from treegen.model.parallel.ranks import Ranks, linear_over_ranks, sum_over_ranks

SHAPES = [(1, 8), (3, 1000), (64, 4096), (17, 3, 72), (1024, 4096), (1, 1), (0, 64), (4097, 4096)]
DTYPES = [torch.bfloat16, torch.float32, torch.float16]
REPLAYS = 200


def compare_sums(*, device: torch.device, ranks: Ranks) -> dict[str, Any]:
    """Return what differs between sums in shared memory and by NCCL. A collective."""
    unequal: list[str] = []
    generator = torch.Generator(device).manual_seed(ranks.rank)
    with torch.inference_mode():
        for shape in SHAPES:
            for dtype in DTYPES:
                numbers = torch.randn(shape, device=device, generator=generator).to(dtype)
                want = numbers.clone()
                dist.all_reduce(want)
                residual = want.flip(0).contiguous()
                for addend in (None, residual):
                    total = want if addend is None else want + addend
                    if not torch.equal(sum_over_ranks(numbers, addend), total):
                        unequal.append(f"sum {shape} {dtype} {addend is not None}")
                weight = torch.randn(48, shape[-1], device=device, generator=generator).to(dtype)
                product = linear(numbers, weight)
                dist.all_reduce(product)
                if not torch.equal(linear_over_ranks(numbers, weight), product):
                    unequal.append(f"linear {shape} {dtype}")
        unequal += replay(device, generator)
    return {"shared": ranks.shared is not None, "unequal": unequal}


def replay(device: torch.device, generator: torch.Generator) -> list[str]:
    """Return which replays gave other sums. Each sum of a graph directly follows another one."""
    inputs = [torch.empty(rows, 512, device=device).bfloat16() for rows in (1, 64, 700)]
    outputs: list[Tensor] = []

    def add_up() -> None:
        outputs[:] = [sum_over_ranks(given.clone()) for given in inputs for _ in range(3)]

    add_up()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_up()
    wrong: list[str] = []
    for number in range(REPLAYS):
        for given in inputs:
            given.normal_(generator=generator)
        graph.replay()
        for index, output in enumerate(outputs):
            want = inputs[index // 3].clone()
            dist.all_reduce(want)
            if not torch.equal(output, want):
                wrong.append(f"replay {number} of {tuple(want.shape)}")
    return wrong
