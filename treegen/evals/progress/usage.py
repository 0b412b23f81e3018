"""Usage of a run: the tokens and time that it took, summed over its attempts.

An attempt begins whenever a run is started or resumed. The attempts are stored as `parts` in
results.json every 10 seconds, so a killed process loses at most the usage of its last seconds, and
never a sample.

The timeline of a run is `progress.jsonl` in its directory, for a plot. The file has one line of
JSON for each moment. The distance between moments grows with the time: an hour has about 600 lines,
a month 1,300. Nothing depends on the file, so a run continues if it cannot be written.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from treegen.common.files import open_regular, read_lines
from treegen.common.formatting import format_bytes
from treegen.common.outputs import Usage, WorkerStatus, in_order
from treegen.evals.progress.run_progress import RunProgress
from treegen.runs import RunDir
from treegen.runs.files import parse_json

if TYPE_CHECKING:
    from treegen.prompts.plan.plan import Plan

Workers = Callable[[], Sequence[WorkerStatus]]
_SAVE_SECONDS: Final = 10.0
_MAXIMA: Final = ("peak_rows", "peak_pages", "num_pages", "page_size")
_LEVEL_FIELDS: Final = ("depth", "segments", "tokens", "rows", "kept")
# It counts all planned samples of an attempt, finished or not; `sum_usage` counts finished ones.
_REPLACED: Final = "prompt_tokens_unshared"


class AttemptLog:
    """The attempts of one run, each with its seconds; the last attempt is running."""

    def __init__(self, run: RunDir, workers: Workers = lambda: ()) -> None:
        """Read the attempts in the run's results.json, and begin a new attempt.

        Args:
            run: The run.
            workers: Returns the status of each worker of a cluster.
        """
        self._run, self._before, self._workers = run, load_attempts(run), workers
        self._start, self._save_due = time.monotonic(), 0.0

    @property
    def parts(self) -> list[dict[str, Any]]:
        """Every attempt, as an object for JSON."""
        return [*self._before, self._with_workers({"seconds": time.monotonic() - self._start})]

    def _with_workers(self, part: dict[str, Any]) -> dict[str, Any]:
        if workers := self._workers():
            names = ("name", "where", "tokens", "deaths")
            part["workers"] = [{name: getattr(w, name) for name in names} for w in workers]
        return part

    def save(self, *, now: bool = False) -> None:
        """Write the attempts to results.json if that is due.

        Args:
            now: Whether to write them in any case.
        """
        if now or time.monotonic() >= self._save_due:
            done, planned = len(self._run.done), self._run.info.planned
            self._run.write_results(
                {"complete": False, "planned": planned, "done": done, "parts": self.parts}
            )
            self._save_due = time.monotonic() + _SAVE_SECONDS


class UsageLog(AttemptLog):
    """The attempts of one run, each with the usage and plan of its scheduler."""

    def __init__(self, run: RunDir) -> None:
        """Read the attempts in the run's results.json."""
        super().__init__(run)
        self._usage: Usage | None = None
        self._plan: dict[str, Any] | None = None
        self._num_samples = 0

    def begin(
        self, usage: Usage, plan: "Plan | None" = None, workers: Workers = lambda: ()
    ) -> None:
        """Begin a new attempt.

        Args:
            usage: The usage of the scheduler, which keeps it up to date.
            plan: The plan of the attempt; None if unknown.
            workers: Returns the status of each worker of a cluster.
        """
        self._usage, self._workers = usage, workers
        self._plan = plan_to_json(plan) if plan else None
        self._save_due = time.monotonic() + _SAVE_SECONDS

    def count(self) -> None:
        """Count a finished sample."""
        self._num_samples += 1

    @property
    def parts(self) -> list[dict[str, Any]]:
        """Every attempt, as an object for JSON; the last one only after `begin`."""
        if self._usage is None:
            return self._before
        now = asdict(self._usage)
        del now[_REPLACED]
        if self._plan is not None:
            now["plan"] = self._plan
        return [*self._before, self._with_workers({"samples": self._num_samples, **now})]


def plan_to_json(plan: "Plan") -> dict[str, Any]:
    """Return the tokens that a plan shares, stores and reads, as an object for JSON.

    `token_bytes` is the size of one token in the cache.
    """
    return {
        "sharing": plan.sharing,
        "token_bytes": plan.token_bytes,
        "stored_tokens": plan.stored_tokens,
        "unshared_tokens": plan.unshared_tokens,
        "read_tokens": plan.read_tokens,
        "unshared_read_tokens": plan.unshared_read_tokens,
        "levels": describe_levels(plan),
    }


def describe_levels(plan: "Plan") -> list[dict[str, Any]]:
    """Return the levels of a plan as objects for JSON."""
    return [{**asdict(level), "reasons": dict(level.reasons)} for level in plan.levels()]


def load_attempts(run: RunDir) -> list[dict[str, Any]]:
    """Return the attempts in a run's results.json; corrupt ones are left out."""
    parts = run.stored_results().get("parts")
    return [part for part in parts if _is_part(part)] if isinstance(parts, list) else []


def _is_part(part: object) -> bool:
    """Return whether a JSON value is an attempt as `AttemptLog` or `UsageLog` writes it."""
    if not isinstance(part, dict) or not _is_number(part.get("seconds")):
        return False
    kinds = {**asdict(Usage()), "samples": 0, "sample_tokens": 0}
    for name, value in part.items():
        like = kinds.get(name)
        if name == "kernels":
            steps = value.values() if isinstance(value, dict) else [None]
            right = all(isinstance(s, dict) and all(map(_is_number, s.values())) for s in steps)
        elif name == "plan":
            right = _is_plan(value)
        elif isinstance(like, int | float):
            right = _is_number(value)
        else:
            right = like is None or isinstance(value, type(like))
        if not right:
            return False
    return True


def _is_plan(plan: object) -> bool:
    """Return whether a JSON value is a plan as `plan_to_json` returns it."""
    if not isinstance(plan, dict) or not isinstance(plan.get("levels"), list):
        return False
    counts = [v for k, v in plan.items() if k not in ("sharing", "levels")]
    for level in plan["levels"]:
        if not isinstance(level, dict) or not isinstance(reasons := level.get("reasons"), dict):
            return False
        counts += [level.get(name) for name in _LEVEL_FIELDS] + [*reasons.values()]
    return "token_bytes" in plan and all(map(_is_number, counts))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def sum_usage(
    parts: list[dict[str, Any]], *, num_samples: int, unshared: int, sample_tokens: int
) -> dict[str, Any]:
    """Return the usage of a run, summed over its attempts.

    Args:
        parts: The attempts, as in results.json.
        num_samples: Number of finished samples.
        unshared: Prompt tokens of these samples, with a prompt counted once for each sample.
        sample_tokens: Generated tokens of these samples.
    """
    total: dict[str, Any] = {
        "prompt_tokens_computed": 0,
        "prompt_tokens_unshared": unshared,
        "sample_tokens": sample_tokens,
        "decoded_tokens": 0,
        "seconds": 0.0,
    }
    for part in parts:
        for name, value in part.items():
            if name == "workers":  # describes a single attempt
                continue
            if name == "kernels":
                total[name] = _sum_level_steps(total.get(name, {}), value)
            elif not (_is_number(value) and _is_number(earlier := total.get(name, 0))):
                total[name] = value
            else:
                total[name] = max(earlier, value) if name in _MAXIMA else earlier + value
    # After a kill these are fewer than num_samples, because the usage of the last seconds is lost.
    total["samples_accounted"] = min(int(total.pop("samples", 0)), num_samples)
    total["samples"] = num_samples
    seconds = total["seconds"]
    total["tokens_per_second"] = total["decoded_tokens"] / seconds if seconds > 0 else 0.0
    return total


def count_unfinished_tokens(usage: Mapping[str, Any]) -> int:
    """Return how many generated tokens belong to no finished sample.

    These are the tokens of samples that are being decoded, or that were when the run stopped. After
    a kill, the number is a lower bound, because the usage of the last seconds is lost.

    Args:
        usage: The usage of a run, as from `sum_usage`.
    """
    return max(0, int(usage.get("decoded_tokens", 0)) - int(usage.get("sample_tokens", 0)))


def format_decoding(usage: Mapping[str, Any]) -> str:
    """Return one sentence on the generated tokens: their number, their speed, what they include.

    Args:
        usage: The usage of a run, as from `sum_usage`.
    """
    samples, accounted = usage.get("samples", 0), usage.get("samples_accounted", 0)
    decoded, sample_tokens = usage["decoded_tokens"], usage.get("sample_tokens", 0)
    if samples and not (decoded or accounted):
        have = f"; the finished samples have {sample_tokens:,} tokens" if sample_tokens else ""
        return f"decoded tokens: not recorded{have}"
    line = f"decoded tokens: {decoded:,} at {usage['tokens_per_second']:,.0f} per second"
    is_partial = accounted < samples and (accounted or decoded)  # imported runs have neither
    if unfinished := count_unfinished_tokens(usage):
        bound = "at least " if is_partial else ""
        line += f", including {bound}{unfinished:,} of unfinished samples"
    return f"{line}; not counted: the last seconds before a kill" if is_partial else line


def format_sharing(usage: Mapping[str, Any], *, unit: str = "samples") -> str:
    """Return one sentence on the prompt tokens that sharing saved.

    Args:
        usage: The usage of a run, as from `sum_usage`.
        unit: The unit of what is drawn for a problem. For "searches" the sentence names what is
            compared: one prompt for each call, whatever its number of samples.
    """
    computed, unshared = usage["prompt_tokens_computed"], usage["prompt_tokens_unshared"]
    if usage["samples_accounted"] < usage["samples"]:
        if not (usage["samples_accounted"] or computed):  # such as an imported run
            return "prompt tokens: not recorded"
        return (
            f"prompt tokens: known for {usage['samples_accounted']:,} of {usage['samples']:,} "
            "samples, because a part of the run was killed"
        )
    if not computed:
        return "prompt tokens: none computed"
    if not usage["samples"]:
        return f"prompt tokens computed: {computed:,}; no sample has ended yet"
    is_search = unit == "searches"
    times = _times(unshared / computed, " than one prompt per call" * is_search)
    return (
        f"prompt tokens computed: {computed:,} instead of {unshared:,}"
        f"{' without sharing' * is_search} ({times})"
    )


def _times(fewer: float, baseline: str) -> str:
    if fewer >= 1.05:
        return f"{fewer:,.1f} times fewer{baseline}"
    return "nothing saved" if fewer > 0.95 else f"{1 / fewer:,.1f} times more{baseline}"


def workers_line(parts: Sequence[Mapping[str, Any]]) -> str:
    """Return one line on the work of each worker in the last attempt; "" without workers."""
    workers = parts[-1].get("workers") if parts else None
    lines = []
    for worker in workers if isinstance(workers, list) else ():
        if isinstance(worker, Mapping) and _is_number(worker.get("tokens")):
            lost = f", lost {worker['deaths']} times" if worker.get("deaths") else ""
            lines.append(
                f"{worker.get('name')} ({worker.get('where')}) {worker['tokens']:,} tokens"
            )
            lines[-1] += lost
    return ", ".join(lines)


def speculation_line(usage: Mapping[str, Any]) -> str:
    """Return one line on how many draft tokens were accepted; "" without draft tokens."""
    drafted, accepted = usage.get("drafted_tokens", 0), usage.get("accepted_tokens", 0)
    if not drafted:
        return ""
    passes = usage["decoded_tokens"] - accepted
    rate = f"; {usage['decoded_tokens'] / passes:.2f} tokens per pass" if passes > 0 else ""
    share = f"{accepted / drafted:.0%}"
    return f"draft tokens: {drafted:,}, of which {accepted:,} ({share}) were accepted{rate}"


def attention_line(usage: Mapping[str, Any]) -> str:
    """Return one line on the attention kernels of decode steps, and the key reads that were saved.

    It is "" without decode steps. The bytes are those of keys and values.
    """
    read, unshared = usage.get("key_tokens_read", 0), usage.get("key_tokens_unshared", 0)
    if not unshared:
        return ""
    line = f"attention: {format_kernels(usage) or usage.get('impl', '')}"
    if "plan" not in usage:
        return line
    size = usage["plan"]["token_bytes"]
    why = "" if read < unshared else ", because shared prompts are short or absent"
    return (
        f"{line}; key reads saved {1 - read / unshared:.1%} "
        f"({format_bytes((unshared - read) * size)} of {format_bytes(unshared * size)}){why}"
    )


def format_kernels(usage: Mapping[str, Any]) -> str:
    """Return the kernels that read each level, with their numbers of steps if there were several.

    Args:
        usage: The usage of a run, as from `sum_usage`.
    """
    kernels: Mapping[str, Mapping[str, int]] = usage.get("kernels", {})
    return ", ".join(f"{level} {_join_kernels(kernels[level])}" for level in in_order(kernels))


def _join_kernels(steps: Mapping[str, int]) -> str:
    if len(steps) == 1:
        return next(iter(steps))
    sorted_steps = sorted(steps.items(), key=lambda item: -item[1])
    return " and ".join(f"{name} ({num:,} steps)" for name, num in sorted_steps)


def _sum_level_steps(
    first: Mapping[str, Mapping[str, int]], second: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, int]]:
    """Return the sums of steps by level and kernel."""
    return {
        level: dict(Counter(first.get(level, {})) + Counter(second.get(level, {})))
        for level in {**first, **second}
    }


NAME: Final = "progress.jsonl"
# The first moments are this many seconds apart, later moments a hundredth of the time so far.
_FIRST: Final = 0.25
_GROWTH: Final = 0.01
_MAX_COUNT: Final = 1e18  # of seconds, tokens, ...; a larger number means that the file is damaged


class Timeline:
    """Appends the moments of one attempt of a run to its file."""

    def __init__(self, folder: Path, part: int) -> None:
        """Open the file for appending.

        Args:
            folder: Directory of the run.
            part: Number of the attempt, from 0.
        """
        self._part = part
        self._due = 0.0
        self._file: IO[str] | None = None
        with suppress(OSError):
            fd = open_regular(folder / NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            self._file = os.fdopen(fd, "a", encoding="ascii")

    def note(self, progress: RunProgress, *, last: bool = False, **more: int) -> None:
        """Write a moment if one is due.

        Args:
            progress: The progress of the run.
            last: Whether this is the last moment, which is always written.
            **more: Further numbers of the moment, by name.
        """
        if self._file is None or (progress.seconds < self._due and not last):
            return
        self._due = progress.seconds + max(_FIRST, _GROWTH * progress.seconds)
        moment = {
            "part": self._part,
            "seconds": round(progress.seconds, 3),
            "done": progress.done,
            "tokens": progress.tokens,
            "rows": progress.rows,
            "pages": progress.pages,
            **more,
            "level_rows": [level.rows for level in progress.levels],
        }
        with suppress(OSError):
            # Each moment is one write, so a kill can damage only the last line.
            self._file.write(json.dumps(moment, separators=(",", ":")) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None


def read_timeline(folder: Path) -> list[Mapping[str, Any]]:
    """Return the moments of a run in order; empty if there is no file.

    Corrupt lines are left out.
    """
    moments: list[Mapping[str, Any]] = []
    with suppress(OSError):
        for line in read_lines(folder / NAME):
            with suppress(ValueError):
                moment = parse_json(line.decode().strip())
                if _is_moment(moment):
                    moments.append(moment)
    return moments


def _is_moment(value: object) -> bool:
    if not isinstance(value, dict) or not {"part", "seconds", "tokens"} <= value.keys():
        return False
    numbers = [value[name] for name in value if name != "level_rows"]
    if "level_rows" in value:
        if not isinstance(value["level_rows"], list):
            return False
        numbers += value["level_rows"]
    return all(type(number) in (int, float) and 0 <= number < _MAX_COUNT for number in numbers)
