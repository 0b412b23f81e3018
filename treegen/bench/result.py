"""What a workload took, and how it was measured. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treegen.bench.timing import Spread
    from treegen.bench.workloads import Workload


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure. time_limit: seconds that one run may take at least, or it is left out.

    eager: without compiling, and without CUDA graphs.
    reproducible: so that each row has the bits that it has alone.
    """

    repeats: int = 3
    time_limit: float = 120.0
    memory: str | None = None
    eager: bool = False
    reproducible: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """What one workload took in one mode; spreads are over repeats.

    tokens_per_second: of decode steps alone, where the engine tells them apart. job: samples'
    tokens over the whole time, prefill included. seconds: that time. startup_seconds: making the
    engine, if it was made for this, and the run that is not timed, in which layers are compiled and
    steps captured. step_ms: median decode step of each repeat with all rows live. busy: share of
    the time in which the GPU was in a pass, see `treegen.bench.busy`.
    floor_ms, floor_parts_ms: least time of the mean decode step; share: of it in the step that was
    measured. levels: (name, segments, keys) read once for all rows below. kernels: see `Usage`.
    read_bytes, saved_bytes: of keys and values in decode steps, and how many more each row's
    reading its own prompt would have read. kv_bytes, device_bytes: most that was in use.
    skipped: why there is nothing else.
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
