"""Timing of calls: by events on a GPU, by the clock on a CPU; medians and spreads."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor

from treegen.common.device import use_device

if TYPE_CHECKING:
    from treegen.model.model import Model

_FLUSH_BYTES = 2**29  # written between timed calls; larger than any L2 cache
_BATCH_SECONDS = 0.05  # seconds of work queued on a GPU between reads of the clock


@dataclass(frozen=True, slots=True)
class Spread:
    """A number that was measured several times: its median, minimum and maximum."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Return the median, minimum and maximum of at least one value."""
        return Spread(statistics.median(values), min(values), max(values))


def free_bytes(device: torch.device) -> int:
    """Return the bytes of memory that are available now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Memory that torch keeps for later use counts as free.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def graph_bytes() -> int:
    """Return the bytes of CUDA graphs' private memory, which torch does not count as allocated."""
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["segment_pool_id"] != (0, 0)
    )


def describe_machine(device: torch.device) -> dict[str, str | int]:
    """Return a description of the hardware and software, for the record."""
    import transformers

    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else "CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def headline(machine: Mapping[str, str | int]) -> str:
    """Return one line about the machine that is measured."""
    return f"torch {machine['torch']}, {machine['threads']} threads, {machine['device']}"


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_sustained(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the seconds per call while the call is repeated for `seconds` seconds.

    The first third is not timed. A GPU at its power limit slows down within a tenth of a second, so
    short bursts would overestimate its speed.

    Args:
        call: The call to time.
        device: The device that it runs on.
        seconds: Duration of the repetition, including the untimed third.
    """
    call()
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    batch = max(int(_BATCH_SECONDS / max(time.perf_counter() - start, 1e-6)), 1)
    if device.type == "cpu":
        batch = 1

    def repeat(until: float) -> float:
        begin, calls = time.perf_counter(), 0
        while not calls or time.perf_counter() - begin < until:
            for _ in range(batch):
                call()
            calls += batch
            synchronize(device)
        return (time.perf_counter() - begin) / calls

    repeat(seconds / 3)
    return repeat(seconds * 2 / 3)


class Stopwatch:
    """Times single calls with cold caches: on a GPU the L2 is overwritten before each call.

    On a GPU a call is captured as a CUDA graph. So the time does not include the host's launch
    time, which a decode step does not pay either.
    """

    def __init__(self, device: torch.device) -> None:
        """Create a stopwatch for one device."""
        self._device = device
        self._flush: Tensor | None = None
        if device.type == "cuda":
            self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)

    def microseconds(self, call: Callable[[], object], repeats: int) -> Spread:
        """Return the spread of the microseconds of `repeats` calls, after two untimed calls."""
        with use_device(self._device):
            return Spread.of([seconds * 1e6 for seconds in self._seconds(call, repeats)])

    def _seconds(self, call: Callable[[], object], repeats: int) -> list[float]:
        for _ in range(2):
            call()
        if self._flush is None:
            times = [time.perf_counter()]
            for _ in range(repeats):
                call()
                times.append(time.perf_counter())
            return [after - before for before, after in pairwise(times)]
        synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(self._device)):
            result = call()  # kept, because its memory belongs to the graph
        graph.replay()
        pairs = []
        for _ in range(repeats):
            self._flush.zero_()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            pairs.append((start, stop))
        synchronize(self._device)
        del result
        return [start.elapsed_time(stop) / 1e3 for start, stop in pairs]


class PassTimer:
    """Times the passes of a run by events. A replay of a CUDA graph is one pass."""

    def __init__(self) -> None:
        self._passes: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def wrap_timed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same function, recording each call as one more pass."""

        def call(*args: Any, **options: Any) -> Any:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            result = run(*args, **options)
            end.record()
            self._passes.append((begin, end))
            return result

        return call

    def share(self) -> float | None:
        """Return the time within passes over the time from first to last; None without passes.

        Copies between passes, and steps while they are captured, count as idle time.
        """
        if not self._passes:
            return None
        first, last = self._passes[0][0], self._passes[-1][1]
        last.synchronize()
        inside: float = sum(begin.elapsed_time(end) for begin, end in self._passes)
        total: float = first.elapsed_time(last)
        return inside / total


@contextmanager
def time_passes(model: Model) -> Iterator[PassTimer]:
    """Record the passes of a model on a GPU while the context is open, replayed or not."""
    clock = PassTimer()
    if model.device.type != "cuda":
        yield clock
        return
    replay = torch.cuda.CUDAGraph.replay
    with (
        patch.object(torch.cuda.CUDAGraph, "replay", clock.wrap_timed(replay)),
        patch.object(model, "forward", clock.wrap_timed(model.forward)),
    ):
        yield clock
