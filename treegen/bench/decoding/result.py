"""The result of a workload, and the settings of its measurement. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treegen.bench.decoding.workloads import Workload
    from treegen.bench.timing import Spread


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure.

    repeats: timed runs of each mode.
    time_limit: seconds. A run whose least time is longer is skipped.
    memory: memory of the key-value cache, as for `LLM`.
    eager: whether to run without compiling and without CUDA graphs.
    """

    repeats: int = 3
    time_limit: float = 120.0
    memory: str | None = None
    eager: bool = False
    reproducible: bool = False


@dataclass(frozen=True, slots=True)
class WorkloadResult:
    """The result of one workload in one mode; spreads are over repeats.

    rows: rows decoded at once.
    skipped: why the workload was not run; other fields are then unset.
    tokens_per_second: tokens of decode steps over their time, if the engine reports it separately.
    job: the samples' tokens over the whole time, including prefill.
    seconds: the whole time.
    startup_seconds: the time to make the engine, if it was made for this workload, plus that of the
    untimed run, in which layers are compiled and steps captured.
    step_ms: the median decode step of each repeat with all rows live.
    busy: the share of the time in which the GPU was in a pass; see
    `treegen.bench.decoding.gpu_busy`.
    prefill_seconds: the time of prefill passes, whose images were encoded in the untimed run.
    encode_seconds: the time to encode the image at the start of a prefix, if there is one.
    floor_ms, floor_parts_ms: the least time of the mean decode step, in total and by part.
    share: the floor as a share of the measured step.
    impl, kernels: the attention implementation, and its kernels as in `Usage`.
    levels: (name, segments, keys) of the levels that are read once for all rows below.
    read_bytes: bytes of keys and values that decode steps read.
    saved_bytes: bytes that they would have read in addition if each row read its own prompt.
    prompt_tokens, unshared_prompt_tokens: prompt tokens computed, and computed without sharing.
    kv_bytes, device_bytes: peak bytes in use, of the cache and of the device.
    notes: why graphs, compiled layers or the roofline are missing.
    """

    workload: Workload
    mode: str
    rows: int
    skipped: str = ""
    tokens_per_second: Spread | None = None
    job: Spread | None = None
    seconds: Spread | None = None
    startup_seconds: float | None = None
    step_ms: Spread | None = None
    busy: Spread | None = None
    prefill_seconds: Spread | None = None
    encode_seconds: Spread | None = None
    floor_ms: float | None = None
    floor_parts_ms: dict[str, float] | None = None
    share: float | None = None
    impl: str = ""
    kernels: dict[str, dict[str, int]] = field(default_factory=dict)
    levels: tuple[tuple[str, int, int], ...] = ()
    read_bytes: int = 0
    saved_bytes: int = 0
    prompt_tokens: int = 0
    unshared_prompt_tokens: int = 0
    kv_bytes: int = 0
    device_bytes: int | None = None
    notes: tuple[str, ...] = ()
