"""A job on several workers, simulated: treegen's own dispatcher with the times of one GPU.

The simulation shows what a job loses because workers end at different times and because a worker
with few rows is slow. It has no costs of the driver's process and of the network but `--latency`,
no work that workers return, and no full caches. The default step times at 1, 64 and 1,024 rows were
measured on an H200; the other ones and the prefill rate are estimates. The figures of
docs/benchmarks/features.md come from commands such as

    python examples/benchmarks/simulate_workers.py --problems 512 --samples 40
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final

import click
import numpy as np

from treegen.bench.cluster import ClusterJob
from treegen.cli.bench.options import bounded_option, int_list_option, int_option
from treegen.cli.main import script
from treegen.cli.options.options import JSON
from treegen.cli.terminal.render import json_line, print_table
from treegen.errors import InputError
from treegen.llm.cluster.cluster_run import NUM_QUEUED_TURNS, TURN_SECONDS
from treegen.llm.cluster.dispatcher import Dispatcher, WorkItem, num_rows_to_hold
from treegen.report.tables import PrintableTable

_LLAMA3_8B: Final = "1:4.6,64:5.84,256:10.1,1024:29.4,2048:59,4096:118"

Part = tuple[int, int]
"""A problem and the index of a sample."""


@dataclass(frozen=True, slots=True)
class WorkerSpeed:
    """How fast one worker is.

    max_rows: samples that it decodes at once.
    rows, step_ms: times of decode steps at some numbers of rows; linear in between.
    prefill_rate: prompt tokens per second.
    latency: seconds that a message between the driver and the worker takes.
    """

    max_rows: int
    rows: Sequence[float]
    step_ms: Sequence[float]
    prefill_rate: float
    latency: float

    def step_seconds(self, rows: int) -> float:
        """Return the time of a decode step."""
        return float(np.interp(rows, self.rows, self.step_ms)) / 1e3


@dataclass(frozen=True, slots=True)
class SimulatedTime:
    """The simulated time of a job.

    workers: number of workers.
    seconds: time until the last sample ends.
    first_end: time at which the first worker has nothing left to do.
    tokens: tokens of all samples.
    """

    workers: int
    seconds: float
    first_end: float
    tokens: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens of samples over the whole time."""
        return self.tokens / self.seconds


@dataclass(slots=True)
class _Worker:
    number: int
    inbox: deque[list[WorkItem]] = field(default_factory=deque)
    """Turns that wait behind the current one."""
    waiting: deque[Part] = field(default_factory=deque)
    parts: list[Part] = field(default_factory=list)
    """The samples that it decodes."""
    left: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=int))
    """Tokens that each of them still needs."""
    problems: set[int] = field(default_factory=set)
    """Problems whose prompts it has computed."""
    num_queued: int = 0
    """Turns that it was sent and whose results have not arrived."""
    num_finished: int = 0
    """Samples that ended in its last turn with any, as the driver knows."""
    is_busy: bool = False
    end: float = 0.0


class Simulation:
    """Runs one job on some workers, as `ClusterRun` assigns it."""

    def __init__(self, job: ClusterJob, workers: int, speed: WorkerSpeed) -> None:
        """Draw the lengths of samples, which do not depend on the number of workers.

        Args:
            job: The job.
            workers: Number of workers.
            speed: How fast each worker is.
        """
        limit = job.max_tokens or 4 * job.mean_tokens
        drawn = np.random.default_rng(0).geometric(1 / job.mean_tokens, (job.problems, job.samples))
        self._job, self._speed = job, speed
        self._lengths = np.minimum(drawn, limit)
        weight = limit + job.problem_tokens / job.samples
        samples = tuple(range(job.samples))
        items = [WorkItem(problem, samples, weight) for problem in range(job.problems)]
        self._dispatcher = Dispatcher(items, range(workers))
        self._workers = [_Worker(number) for number in range(workers)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now = 0.0

    def run(self) -> SimulatedTime:
        """Run the job to its end."""
        self._assign_turns()
        while self._events:
            self._now, _, handle = heapq.heappop(self._events)
            handle()
        assert not self._dispatcher.has_work
        ends = [worker.end for worker in self._workers]
        return SimulatedTime(len(ends), max(ends), min(ends), int(self._lengths.sum()))

    def _call(self, time: float, handle: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), handle))

    # The driver

    def _assign_turns(self) -> None:
        for worker in self._workers:
            while worker.num_queued < NUM_QUEUED_TURNS:
                num_decoded = self._speed.max_rows
                num_rows = num_rows_to_hold(num_decoded, worker.num_finished)
                items = self._dispatcher.assign(
                    worker.number, num_decoded=num_decoded, num_rows=num_rows
                )
                if not items and not self._dispatcher.num_open(worker.number):
                    break
                worker.num_queued += 1
                self._call(self._now + self._speed.latency, partial(self._receive, worker, items))

    def _collect(self, worker: _Worker, finished: list[Part]) -> None:
        worker.num_queued -= 1
        worker.num_finished = len(finished) or worker.num_finished
        for part in finished:
            assert self._dispatcher.done(worker.number, *part)
        self._assign_turns()

    # A worker

    def _receive(self, worker: _Worker, items: list[WorkItem]) -> None:
        worker.inbox.append(items)
        self._start_turn(worker)

    def _start_turn(self, worker: _Worker) -> None:
        if worker.is_busy or not worker.inbox:
            return
        worker.is_busy = True
        for item in worker.inbox.popleft():
            worker.waiting.extend((item.key, index) for index in item.indices)
        time, finished = self._now, list[Part]()
        while (worker.waiting or worker.parts) and time < self._now + TURN_SECONDS:
            time += self._step(worker, finished)
            worker.end = time
        self._call(time, partial(self._end_turn, worker, finished))

    def _end_turn(self, worker: _Worker, finished: list[Part]) -> None:
        worker.is_busy = False
        self._call(self._now + self._speed.latency, partial(self._collect, worker, finished))
        self._start_turn(worker)

    def _step(self, worker: _Worker, finished: list[Part]) -> float:
        """Start waiting samples, and decode one token of each; return the seconds."""
        num_started = min(self._speed.max_rows - len(worker.parts), len(worker.waiting))
        started = [worker.waiting.popleft() for _ in range(num_started)]
        lengths = [int(self._lengths[part]) for part in started]
        new = {problem for problem, _ in started} - worker.problems
        prompt_tokens = len(new) * self._job.problem_tokens
        if new and not worker.problems:
            prompt_tokens += self._job.prefix
        worker.problems |= new
        worker.parts += started
        worker.left = np.concatenate([worker.left, np.array(lengths, dtype=int)]) - 1
        seconds = self._speed.step_seconds(len(worker.parts))
        if not worker.left.all():
            finished += [
                part for part, left in zip(worker.parts, worker.left, strict=True) if not left
            ]
            worker.parts = [
                part for part, left in zip(worker.parts, worker.left, strict=True) if left
            ]
            worker.left = worker.left[worker.left > 0]
        return seconds + prompt_tokens / self._speed.prefill_rate


def _read_steps(_: click.Context, __: click.Parameter, text: str) -> list[tuple[float, float]]:
    """Read pairs of rows and milliseconds."""
    try:
        pairs = [(float(rows), float(ms)) for rows, ms in (p.split(":") for p in text.split(","))]
    except ValueError:
        pairs = []
    if not pairs or any(not (1 <= rows < 1e9 and 0 < ms < 1e6) for rows, ms in pairs):
        raise InputError(f"--step-ms must be pairs such as 1:4.6,1024:29.4, got {text!r}")
    return sorted(pairs)


@script
@int_list_option("--workers", "Numbers of workers.", default="1,2,4,8")
@int_option("--problems", 512, "Problems below one prefix.")
@int_option("--samples", 40, "Samples per problem.")
@int_option("--prefix", 900, "Prompt tokens that all problems share.")
@int_option("--problem-tokens", 100, "Tokens of each problem.")
@int_option("--mean-tokens", 100, "Mean tokens per sample.")
@int_option("--max-tokens", 256, "Maximum tokens per sample.")
@int_option("--max-rows", 4096, "Samples that a worker decodes at once.")
@click.option(
    "--step-ms",
    "steps",
    default=_LLAMA3_8B,
    callback=_read_steps,
    metavar="ROWS:MS,...",
    help="Times of decode steps. Default: the llama3-8b shape on an H200.",
)
@int_option("--prefill-rate", 28_000, "Prompt tokens per second.")
@bounded_option(
    "--latency",
    lambda seconds: 0 <= seconds < 60,
    "at least 0 and below 60",
    type=float,
    default=0.005,
    show_default=True,
    help="Seconds that each message takes.",
)
@JSON
def main(
    workers: list[int],
    max_rows: int,
    steps: list[tuple[float, float]],
    prefill_rate: int,
    latency: float,
    **params: Any,
) -> None:
    """Simulate a job on several workers."""
    job = ClusterJob(**params)
    rows, step_ms = zip(*steps, strict=True)
    speed = WorkerSpeed(max_rows, rows, step_ms, prefill_rate, latency)
    times = [Simulation(job, number, speed).run() for number in workers]
    alone = Simulation(job, 1, speed).run().seconds
    columns: dict[str, str | Callable[[SimulatedTime], str]] = {
        "Workers": "{0.workers}",
        "tokens/s": "{0.tokens_per_second:,.0f}",
        "times one": lambda time: f"{alone / time.seconds:.2f}",
        "seconds": "{0.seconds:.2f}",
        "first worker ends": "{0.first_end:.2f}",
    }
    print_table(PrintableTable.of(times, columns))
    results = [asdict(time) | {"tokens_per_second": time.tokens_per_second} for time in times]
    json_line({"bench": "simulated cluster", "job": job, "speed": speed, "results": results})


if __name__ == "__main__":
    main()
