"""Runs workloads through the engine in several modes, and compares each with its roofline."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor

from treegen.bench.ceilings import Ceilings
from treegen.bench.roofline import ModelSize, StepFloor, levels_of, size_of, state_bytes, step_floor
from treegen.bench.timing import Spread, graph_bytes, time_passes
from treegen.bench.workloads import NO_ATTENTION, SHARING_MODES, TIME_LIMIT, Case, Workload
from treegen.common.outputs import Usage
from treegen.common.params import SamplingParams
from treegen.errors import CapacityError
from treegen.llm import LLM
from treegen.model.memory import empty_device_cache
from treegen.ops.attention.level import HostLevel
from treegen.ops.attention.registry import LOADERS, choose, register
from treegen.ops.attention.types import AttentionOptions, KVPairs, PreparedLevels
from treegen.prompts.plan.cost_model import Sharing
from treegen.prompts.plan.plan import Plan

if TYPE_CHECKING:
    from treegen.model.model import Model

MAX_ROWS: Final = 8192
"""Maximum rows decoded at once, even if memory admits more, because logits need memory too."""
_WARM_TOKENS: Final = 8


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the measurement."""

    repeats: int = 3
    """Timed runs of each mode."""
    time_limit: float = TIME_LIMIT
    """Seconds; a run whose roofline is longer is skipped."""
    memory: str | None = None
    """Memory of the key-value cache, as for `LLM`."""
    eager: bool = False
    """Whether to run without compiling and without CUDA graphs."""
    reproducible: bool = False
    """Whether rows are computed as if each were alone, as for `LLM`."""


@dataclass(frozen=True, slots=True)
class WorkloadResult:
    """The result of one workload in one mode; spreads are over repeats."""

    workload: Workload
    mode: str
    rows: int
    """Rows decoded at once."""
    skipped: str = ""
    """Why the workload was not run; other fields are then unset."""
    tokens_per_second: Spread | None = None
    """Tokens of decode steps over their time, if the engine reports it separately."""
    job: Spread | None = None
    """The samples' tokens over the whole time, including prefill."""
    seconds: Spread | None = None
    """The whole time."""
    startup_seconds: float | None = None
    """The time to make the engine, if it was made for this workload, plus that of the untimed run,
    in which layers are compiled and steps captured."""
    step_ms: Spread | None = None
    """The median decode step of each repeat with all rows live."""
    busy: Spread | None = None
    """The share of the time in which the GPU was in a pass; see `PassTimer.share`."""
    prefill_seconds: Spread | None = None
    """The time of prefill passes."""
    floor_ms: float | None = None
    """The minimum time of the mean decode step, in milliseconds."""
    floor_parts_ms: dict[str, float] | None = None
    """The parts of `floor_ms`."""
    share: float | None = None
    """The floor as a share of the measured step."""
    impl: str = ""
    """The attention implementation."""
    kernels: dict[str, dict[str, int]] = field(default_factory=dict)
    """The kernels of the implementation, as in `Usage`."""
    levels: tuple[tuple[str, int, int], ...] = ()
    """(name, segments, keys) of the levels that are read once for all rows below."""
    read_bytes: int = 0
    """Bytes of keys and values that decode steps read."""
    saved_bytes: int = 0
    """Bytes that they would have read in addition if each row read its own prompt."""
    prompt_tokens: int = 0
    """Number of prompt tokens computed."""
    unshared_prompt_tokens: int = 0
    """Number of prompt tokens computed if no prompt were shared."""
    kv_bytes: int = 0
    """Peak number of bytes in use in the cache."""
    device_bytes: int | None = None
    """Peak number of bytes in use on the device."""
    notes: tuple[str, ...] = ()
    """Why graphs, compiled layers or the roofline are missing."""


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of the engine."""

    usage: Usage
    plan: Plan
    steps: tuple[float, ...]
    """Seconds of each decode step with all rows live."""
    busy: float | None
    """The share of the time in which the GPU was in a pass."""


class Bench:
    """One model on one device, its ceilings, and its runs.

    A subclass may add modes: to `turn_modes`, or as further calls of `measure_modes`.
    """

    turn_modes: tuple[str, ...] = SHARING_MODES
    """The modes that run in turn on one engine."""

    def __init__(
        self, model: Model, tokenizer: Any, ceilings: Ceilings, settings: Settings
    ) -> None:
        """Create a bench.

        Args:
            model: The model; nothing else may use it until `close`.
            tokenizer: Its tokenizer.
            ceilings: The device's sustained rates.
            settings: Settings of the measurement.
        """
        self.model, self.tokenizer = model, tokenizer
        self.ceilings, self.settings = ceilings, settings
        self.size: ModelSize | None
        size = size_of(model)
        self.size, self.no_roofline = (None, size) if isinstance(size, str) else (size, "")
        self.llm: LLM | None = None  # the engine in use
        self._impl = ""
        self._max_rows = 0

    def measure(self, cases: Sequence[Case]) -> Iterator[WorkloadResult]:
        """Yield results as they arrive: first the modes that take turns, then no attention."""
        self._max_rows = max((case.workload.max_rows or 0 for case in cases), default=0)
        for case in cases:
            modes = [mode for mode in case.modes if mode in self.turn_modes]
            yield from self.measure_modes(case.workload, modes)
        with no_attention() as impl:
            for case in cases:
                if NO_ATTENTION in case.modes:
                    yield from self.measure_modes(case.workload, [NO_ATTENTION], impl)
        self.close()

    def close(self) -> None:
        """Free the cache."""
        self.llm = None
        self.model.reset()
        empty_device_cache(self.model.device)

    def params(self, workload: Workload, mode: str) -> SamplingParams:
        """Return the sampling parameters of a workload in a mode."""
        return workload.params(self.model.spec.vocab_size)

    def rows(self, llm: LLM, workload: Workload, mode: str) -> int:
        """Return how many rows of a workload to decode at once.

        Args:
            llm: The engine.
            workload: The workload.
            mode: The mode to run it in.
        """
        if workload.max_rows is not None:
            return min(workload.max_rows, workload.rows)
        pool = llm.cache.pool.num_pages
        max_rows = workload.rows_stored(_sharing(mode), pool, llm.cache.page_size)
        return max(min(max_rows, workload.rows, MAX_ROWS), 1)

    def plan(self, llm: LLM, workload: Workload, mode: str, rows: int) -> Plan:
        """Return the plan of a workload.

        Args:
            llm: The engine.
            workload: The workload.
            mode: The mode to run it in.
            rows: Rows that the engine may decode at once.
        """
        llm.engine.sharing, llm.engine.max_rows = _sharing(mode), rows
        size = llm.spec.vocab_size
        return llm.plan(workload.tree(self.tokenizer, size), workload.params(size))

    def measure_modes(
        self, workload: Workload, modes: Sequence[str], impl: str = "auto"
    ) -> Iterator[WorkloadResult]:
        """Run the modes in turn in each repeat, so that drift of the device affects all alike.

        Args:
            workload: The workload.
            modes: The modes to run it in.
            impl: The implementation of attention. Default: "auto".
        """
        if not modes:
            return
        start = time.perf_counter()
        llm = self._engine(impl)
        engine_seconds = time.perf_counter() - start
        runs: dict[str, list[_Run]] = {}
        startup: dict[str, float] = {}
        skipped: dict[str, str] = {}
        rows = {mode: self.rows(llm, workload, mode) for mode in modes}
        if workload.equal:
            rows = dict.fromkeys(rows, min(rows.values()))
        peaks: dict[str, int] = {}
        # If rows come and go, some batch sizes are captured only when they occur again.
        warm_ups = 2 if workload.random_ends else 1
        for turn in range(warm_ups + self.settings.repeats):
            repeat = turn - warm_ups
            # Every other turn runs the modes backwards, so that no mode is always first.
            for mode in reversed(modes) if turn % 2 else modes:
                if mode in skipped:
                    continue
                try:
                    if repeat < 0:
                        self._check(llm, workload, mode, rows[mode])
                    run = self._run(llm, workload, mode, rows[mode], warm_up=repeat < 0)
                except CapacityError as error:
                    skipped[mode] = str(error)
                except torch.cuda.OutOfMemoryError:
                    skipped[mode] = "the GPU ran out of memory"
                if mode in skipped:  # outside the except block, which keeps tensors alive
                    empty_device_cache(self.model.device)
                    continue
                if repeat < 0:
                    startup.setdefault(mode, engine_seconds + run.usage.seconds)
                    engine_seconds = 0.0
                else:
                    runs.setdefault(mode, []).append(run)
                    peaks[mode] = self._device_peak(llm, run.usage)
        for mode in modes:
            if mode in skipped:
                yield WorkloadResult(workload, mode, rows[mode], skipped=skipped[mode])
            else:
                result = self._result(workload, mode, rows[mode], runs[mode])
                device_bytes = peaks[mode] or None
                yield replace(result, startup_seconds=startup[mode], device_bytes=device_bytes)

    def _engine(self, impl: str) -> LLM:
        if self.llm is None or self._impl != impl:
            self.close()
            self._impl = impl
            self.llm = LLM(
                self.model,
                tokenizer=self.tokenizer,
                memory=self.settings.memory,
                max_rows=self._max_rows or None,
                impl=impl,
                eager=self.settings.eager,
                reproducible=self.settings.reproducible,
            )
        return self.llm

    def _run(self, llm: LLM, workload: Workload, mode: str, rows: int, *, warm_up: bool) -> _Run:
        """Run a workload; in a warm-up, only its first batch with few tokens if it has several.

        A workload in which rows come and go is always run in full.
        """
        if warm_up and workload.rows > rows and not workload.random_ends:
            workload = workload.first(rows, _WARM_TOKENS)
        llm.engine.sharing, llm.engine.max_rows = _sharing(mode), rows
        if self.model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.model.device)
        tree = workload.tree(self.tokenizer, self.model.spec.vocab_size)
        steps = []
        params = self.params(workload, mode)
        with time_passes(self.model) as clock, llm.stream(tree, params) as stream:
            usage = stream.usage
            while stream.has_work:
                before, tokens = usage.decode_steps, usage.decoded_tokens
                prefill, start = usage.prefill_seconds, time.perf_counter()
                stream.step()
                seconds = time.perf_counter() - start
                # When passes are launched ahead, a step waits for the pass before it. If that was a
                # prefill pass, the time is not that of a decode step.
                is_decode = usage.decode_steps > before and usage.prefill_seconds == prefill
                if is_decode and usage.decoded_tokens - tokens == rows:
                    steps.append(seconds)
            return _Run(usage, stream.plan, tuple(steps), clock.share())

    def _check(self, llm: LLM, workload: Workload, mode: str, rows: int) -> None:
        """Raise CapacityError if a workload does not fit context or memory, or takes too long."""
        length = workload.prompt_tokens + workload.max_tokens
        if length > llm.spec.context_length:
            raise CapacityError(
                f"the workload has {length:,} tokens, more than the context length of the model "
                f"({llm.spec.context_length:,}); request fewer tokens"
            )
        plan = self.plan(llm, workload, mode, rows)
        fit = rows_that_fit(llm, plan)
        if fit < rows and workload.max_rows is not None:
            raise CapacityError(
                f"only {fit:,} of {rows:,} rows fit in memory; use fewer rows or a larger --memory"
            )
        floor = self._floor(plan, rows, workload.mean_generated, mode)
        if floor is not None:
            min_seconds = floor.seconds * (workload.new_tokens - 1) * workload.rows / rows
            if min_seconds > self.settings.time_limit:
                raise CapacityError(
                    f"a run takes at least {min_seconds:,.0f} s, more than --time-limit"
                )

    def _floor(self, plan: Plan, rows: int, generated: float, mode: str) -> StepFloor | None:
        if self.size is None:
            return None
        levels = [] if mode == NO_ATTENTION else levels_of(plan, rows, generated)
        states = state_bytes(self.model.spec, plan, rows, generated)
        return step_floor(self.size, self.ceilings, rows, levels, states)

    def _device_peak(self, llm: LLM, usage: Usage) -> int:
        """Return the peak bytes of GPU memory in use; 0 on a CPU.

        Only pages of the cache that were in use count. The run must have captured no graph. The
        private memory of CUDA graphs counts in full, because they keep it.
        """
        device = self.model.device
        if device.type != "cuda":
            return 0
        unused = usage.num_pages + 1 - usage.peak_pages
        page_bytes = usage.page_size * llm.spec.kv_bytes_per_token
        return torch.cuda.max_memory_allocated(device) + graph_bytes() - unused * page_bytes

    def _result(
        self, workload: Workload, mode: str, rows: int, runs: Sequence[_Run]
    ) -> WorkloadResult:
        usage, plan = runs[-1].usage, runs[-1].plan
        spec = self.model.spec
        token_bytes = spec.kv_bytes_per_token
        decoded = usage.decoded_tokens - workload.rows  # first tokens are drawn in prefill
        speed = floor = share = None
        if decoded:
            speed = Spread.of([decoded / run.usage.decode_seconds for run in runs])
            floor = self._floor(
                plan, round(decoded / usage.decode_steps), workload.mean_generated, mode
            )
        if floor is not None and speed is not None:
            share = floor.seconds * usage.decode_steps * speed.median / decoded
        steps = [Spread.of(run.steps).median * 1e3 for run in runs if run.steps]
        busy = [run.busy for run in runs if run.busy is not None]
        no_roofline = self.no_roofline and f"no roofline: {self.no_roofline}"
        notes = (usage.eager_because, usage.uncompiled_because, no_roofline)
        lengths: dict[int, list[int]] = {}
        for segment in plan.segments:
            if segment.is_cascaded:
                lengths.setdefault(segment.depth, []).append(segment.stop - segment.base)
        return WorkloadResult(
            workload,
            mode,
            rows,
            tokens_per_second=speed,
            job=Spread.of([run.usage.decoded_tokens / run.usage.seconds for run in runs]),
            seconds=Spread.of([run.usage.seconds for run in runs]),
            step_ms=Spread.of(steps) if steps else None,
            busy=Spread.of(busy) if busy else None,
            prefill_seconds=Spread.of([run.usage.prefill_seconds for run in runs]),
            floor_ms=None if floor is None else floor.seconds * 1e3,
            floor_parts_ms=None if floor is None else floor.parts_ms,
            share=share,
            impl=usage.impl,
            kernels=usage.kernels,
            levels=tuple(
                (f"level {d}", len(keys), sum(keys)) for d, keys in sorted(lengths.items())
            ),
            read_bytes=usage.key_tokens_read * token_bytes,
            saved_bytes=(usage.key_tokens_unshared - usage.key_tokens_read) * token_bytes,
            prompt_tokens=usage.prompt_tokens_computed,
            unshared_prompt_tokens=usage.prompt_tokens_unshared,
            kv_bytes=usage.peak_pages * usage.page_size * token_bytes,
            notes=tuple(filter(None, notes)),
        )


def _sharing(mode: str) -> Sharing:
    return cast(Sharing, mode) if mode in SHARING_MODES else "all"


def rows_that_fit(llm: LLM, plan: Plan) -> int:
    """Return how many rows of a plan fit in the memory of an engine at once."""
    cache = llm.cache
    return plan.rows_that_fit(cache.pool.num_pages, cache.page_size, llm.engine.num_states)


class _NoAttention:
    """Attention replaced by zeros: a decode step without it, which no attention can beat.

    Keys and values are still written, and levels are still prepared. It is chosen only by name.
    """

    name = NO_ATTENTION
    in_graphs = True

    def refusal(self, device: torch.device) -> str | None:
        """Return None: it runs on every device."""
        return None

    def prepare(
        self, levels: Sequence[HostLevel], positions_T: Tensor | None, device: torch.device
    ) -> Any:
        """Prepare levels as the default implementation does, so that graphs can be used.

        Args:
            levels: The levels of the pass.
            positions_T: Position of each query row, `[T]`; needed if a level is causal.
            device: The device of the pass.
        """
        return choose("auto", device).prepare(levels, positions_T, device)

    def attend(
        self, q_THD: Tensor, pairs: KVPairs, prepared: PreparedLevels, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """Return outputs and log-sum-exps of zeros.

        Args:
            q_THD: Queries, `[T, H, D]`.
            pairs: Keys and values of the cache; the width of a value is that of the output.
            prepared: Ignored.
            options: Ignored.
        """
        shape = q_THD.shape[:2]
        v_dim = pairs[0][1].shape[-1]
        return q_THD.new_zeros(*shape, v_dim), q_THD.new_zeros(shape, dtype=torch.float32)


@contextmanager
def no_attention() -> Iterator[str]:
    """Register the implementation while the context is open, and yield its name."""
    register(NO_ATTENTION, _NoAttention, auto=False)
    try:
        yield NO_ATTENTION
    finally:
        del LOADERS[NO_ATTENTION]
