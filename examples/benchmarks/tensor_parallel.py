"""What sums over GPUs cost, and what tensor parallelism gains.

The first table has the microseconds of a sum of bfloat16 numbers over the GPUs, in CUDA graphs: by
NCCL, by treegen (which has its own kernels for two GPUs), and by torch's kernels over symmetric
memory (without multicast; their numbers are in this memory already). The second table has tokens/s
of `treegen bench decode`. On two GPUs or more:

    python examples/benchmarks/tensor_parallel.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Final

import click
import torch
import torch.distributed as dist

from treegen.cli.bench.options import int_list_option, int_option
from treegen.cli.main import script
from treegen.cli.options.options import JSON
from treegen.cli.terminal.render import echo, json_line, notice, print_table
from treegen.errors import InputError
from treegen.model.parallel.ranks import Ranks, sum_over_ranks
from treegen.model.rank_processes import RankGroup
from treegen.report.tables import PrintableTable

SIZES: Final = [1 << power for power in range(13, 26)]  # bytes: one row of 4,096 numbers and more
WAYS: Final = ("NCCL", "treegen", "one shot", "two shots")
_CALLS: Final = 20  # of a graph
_REPEATS: Final = 10


def time_sums(*, device: torch.device, ranks: Ranks) -> dict[str, list[float]]:
    """Return microseconds of sums of `SIZES` by way. A collective."""
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # a rendezvous would set it up
    symmetric = import_module("torch.distributed._symmetric_memory")
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    shared = symmetric.empty(SIZES[-1] // 2, dtype=torch.bfloat16, device=device).normal_()
    symmetric.rendezvous(shared, group)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for size in SIZES:
        numbers = torch.randn(size // 2, device=device).bfloat16()
        there, out = shared[: size // 2], torch.empty_like(numbers)
        calls = (
            partial(dist.all_reduce, numbers),
            partial(sum_over_ranks, numbers),
            partial(torch.ops.symm_mem.one_shot_all_reduce_out, there, "sum", group, out),
            partial(torch.ops.symm_mem.two_shot_all_reduce_, there, "sum", group),
        )
        for way, call in zip(WAYS, calls, strict=True):
            times[way].append(graph_microseconds(call))
    return times


def graph_microseconds(call: Callable[[], object]) -> float:
    """Return the median microseconds of a call in a CUDA graph of several."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            call()
    graph.replay()
    torch.cuda.synchronize()
    times: list[float] = []
    for _ in range(_REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / _CALLS)
    return sorted(times)[_REPEATS // 2]


def tokens_per_second(arguments: list[str]) -> dict[int, float]:
    """Return the median tokens/s of `treegen bench decode` with further arguments, by rows."""
    command = [sys.executable, "-m", "treegen", "bench", "decode", "--modes", "all", "--json"]
    done = subprocess.run([*command, *arguments], stdout=subprocess.PIPE, check=True, text=True)
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    return {result["rows"]: result["tokens_per_second"]["median"] for result in results}


@script
@click.option("--shape", metavar="NAME", default="llama3-8b", help="The shape of the model.")
@int_list_option("--tp", "Numbers of GPUs that compute together.", default="1,2,4")
@int_list_option("--rows", "Samples decoded at once.", default="64,1024")
@int_option("--prefix", 2048, "Prompt tokens that all share.", minimum=1)
@int_option("--repeats", 3, "Runs that are timed.")
@JSON
def main(shape: str, tp: list[int], rows: list[int], prefix: int, repeats: int) -> None:
    """Sums over GPUs, and decode steps of models on several GPUs."""
    gpus = torch.cuda.device_count()
    sizes = [size for size in tp if size <= gpus]
    if gpus < 2:
        raise InputError("tensor parallelism needs two GPUs")
    # The ranks import the function by the name of its module.
    function = import_module("tensor_parallel").time_sums
    sums: dict[int, dict[str, list[float]]] = {}
    for size in sizes:
        if size > 1:
            with RankGroup(size) as group:
                times: Any = group.load(function)
            sums[size] = times
            echo(f"Microseconds of a sum over {size} GPUs")
            cells = [
                [f"{nbytes:,}", *(f"{microseconds:.1f}" for microseconds in row)]
                for nbytes, row in zip(SIZES, zip(*times.values(), strict=True), strict=True)
            ]
            print_table(PrintableTable(["bytes", *WAYS], cells, range(1 + len(WAYS))))
    fixed = ["--shape", shape, "--rows", ",".join(map(str, rows)), "--prefix", str(prefix)]
    fixed += ["--repeats", str(repeats), "--ceiling-seconds", "0.1"]
    speeds: dict[int, dict[int, float]] = {}
    for size in sizes:
        speeds[size] = tokens_per_second([*fixed, "--tp", str(size)])
        notice(f"{shape} on {size} GPUs: {speeds[size]}")
    cells = [
        [str(size), *(f"{speed[number]:,.0f}" for number in rows)] for size, speed in speeds.items()
    ]
    head = ["GPUs", *(f"{number:,} rows" for number in rows)]
    print_table(PrintableTable(head, cells, range(len(head))))
    json_line({"bench": "tensor_parallel", "microseconds": sums, "tokens_per_second": speeds})


if __name__ == "__main__":
    main()
