"""What a run has computed, added up over the parts in which it was sampled.

A part begins each time a run is begun or resumed. The parts are stored in results.json every few
seconds. So a process that is killed loses at most the account of its last seconds, never a sample.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from treegen.common.formatting import format_bytes
from treegen.common.outputs import Usage, WorkerStatus, in_order
from treegen.errors import RunError
from treegen.runs import RunDir

if TYPE_CHECKING:
    from treegen.prompts.plan.plan import Plan

Workers = Callable[[], Sequence[WorkerStatus]]
_SAVE_SECONDS: Final = 10.0
_LARGEST: Final = ("peak_rows", "peak_pages", "num_pages", "page_size")
_OF_LEVELS: Final = ("depth", "segments", "tokens", "rows", "kept")
# It counts all planned samples of a part, finished or not; `add_up` counts those that finished.
_REPLACED: Final = "prompt_tokens_unshared"


class AttemptLog:
    """The parts of one run, each with its seconds; the last part is under way."""

    def __init__(self, run: RunDir, workers: Workers = lambda: ()) -> None:
        """Take over the parts in the run's results.json; a new part begins now.

        Args:
            workers: Says what each worker of a cluster has done.
        """
        self._run, self._before, self._workers = run, load_attempts(run), workers
        self._start, self._save_due = time.monotonic(), 0.0

    @property
    def parts(self) -> list[dict[str, Any]]:
        """Every part, as JSON holds it."""
        return [*self._before, self._with_workers({"seconds": time.monotonic() - self._start})]

    def _with_workers(self, part: dict[str, Any]) -> dict[str, Any]:
        if workers := self._workers():
            part["workers"] = workers_to_json(workers)
        return part

    def save(self, *, now: bool = False) -> None:
        """Write the parts to results.json if that is due. now: write them in any case."""
        if now or time.monotonic() >= self._save_due:
            done, planned = len(self._run.done), self._run.info.planned
            self._run.write_results(
                {"complete": False, "planned": planned, "done": done, "parts": self.parts}
            )
            self._save_due = time.monotonic() + _SAVE_SECONDS


class UsageLog(AttemptLog):
    """The parts of one run, each with the usage and plan that a scheduler tells of."""

    def __init__(self, run: RunDir) -> None:
        """Take over the parts in the run's results.json."""
        super().__init__(run)
        self._usage: Usage | None = None
        self._plan: dict[str, Any] | None = None
        self._num_samples = 0

    def begin(
        self, usage: Usage, plan: "Plan | None" = None, workers: Workers = lambda: ()
    ) -> None:
        """Start a part.

        Args:
            usage: The scheduler keeps it up.
            plan: What the part follows, if known.
            workers: Says what each worker of a cluster has done.
        """
        self._usage, self._workers = usage, workers
        self._plan = plan_to_json(plan) if plan else None
        self._save_due = time.monotonic() + _SAVE_SECONDS

    def count(self) -> None:
        """Note a finished sample."""
        self._num_samples += 1

    @property
    def parts(self) -> list[dict[str, Any]]:
        """Every part, as JSON holds it."""
        if self._usage is None:
            return self._before
        now = asdict(self._usage)
        del now[_REPLACED]
        if self._plan is not None:
            now["plan"] = self._plan
        return [*self._before, self._with_workers({"samples": self._num_samples, **now})]


def workers_to_json(workers: Sequence[WorkerStatus]) -> list[dict[str, Any]]:
    """Return what each worker has done, as JSON holds it."""
    return [
        {"name": w.name, "where": w.where, "tokens": w.tokens, "deaths": w.deaths} for w in workers
    ]


def plan_to_json(plan: "Plan") -> dict[str, Any]:
    """Return what a plan shares, stores and reads, as JSON holds it; in tokens and token_bytes."""
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
    """Return a plan's levels, as JSON holds them."""
    return [{**asdict(level), "reasons": dict(level.reasons)} for level in plan.levels()]


def load_attempts(run: RunDir) -> list[dict[str, Any]]:
    """Return the parts in a run's results.json; a part that cannot be read is left out."""
    try:
        results = run.results()
    except RunError:
        return []
    parts = results.get("parts") if isinstance(results, dict) else None
    return [part for part in parts if _is_part(part)] if isinstance(parts, list) else []


def _is_part(part: object) -> bool:
    """Whether a JSON value is a part as `AttemptLog` or `UsageLog` writes it."""
    if not isinstance(part, dict) or not _is_number(part.get("seconds")):
        return False
    kinds = {**asdict(Usage()), "samples": 0}
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
    """Whether a JSON value is what `describe` returns."""
    if not isinstance(plan, dict) or not isinstance(plan.get("levels"), list):
        return False
    counts = [v for k, v in plan.items() if k not in ("sharing", "levels")]
    for level in plan["levels"]:
        if not isinstance(level, dict) or not isinstance(reasons := level.get("reasons"), dict):
            return False
        counts += [level.get(name) for name in _OF_LEVELS] + [*reasons.values()]
    return "token_bytes" in plan and all(map(_is_number, counts))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def sum_usage(
    parts: list[dict[str, Any]], *, num_samples: int, unshared: int, kept: int
) -> dict[str, Any]:
    """Return the account of a whole run.

    Args:
        num_samples: Finished samples.
        unshared: Prompt tokens of these samples, each prompt counted as often as it has samples.
        kept: Tokens that these samples generated.
    """
    total: dict[str, Any] = {
        "prompt_tokens_computed": 0,
        "prompt_tokens_unshared": unshared,
        "sample_tokens": kept,
        "decoded_tokens": 0,
        "seconds": 0.0,
    }
    for part in parts:
        for name, value in part.items():
            if name == "workers":  # of this part alone
                continue
            if name == "kernels":
                total[name] = _sum_level_steps(total.get(name, {}), value)
            elif isinstance(value, bool) or not isinstance(value, int | float):
                total[name] = value
            elif name in _LARGEST:
                total[name] = max(total.get(name, 0), value)
            else:
                total[name] = total.get(name, 0) + value
    # After a kill these are fewer than num_samples: the last seconds are not in the account.
    total["samples_accounted"] = min(int(total.pop("samples", 0)), num_samples)
    total["samples"] = num_samples
    seconds = total["seconds"]
    total["tokens_per_second"] = total["decoded_tokens"] / seconds if seconds > 0 else 0.0
    return total


def format_sharing(usage: Mapping[str, Any]) -> str:
    """Return in one sentence what sharing did."""
    computed, unshared = usage["prompt_tokens_computed"], usage["prompt_tokens_unshared"]
    if usage["samples_accounted"] < usage["samples"]:
        return (
            f"prompt tokens: the account covers {usage['samples_accounted']:,} of "
            f"{usage['samples']:,} samples, since a part of the run was killed"
        )
    if not computed:
        return "prompt tokens: none computed"
    if not usage["samples"]:
        return f"prompt tokens computed: {computed:,}; no sample has ended yet"
    return (
        f"prompt tokens computed: {computed:,} instead of {unshared:,} "
        f"({_times(unshared / computed)})"
    )


def _times(fewer: float) -> str:
    if fewer >= 1.05:
        return f"{fewer:,.1f} times fewer"
    return "nothing saved" if fewer > 0.95 else f"{1 / fewer:,.1f} times more"


def workers_line(parts: Sequence[Mapping[str, Any]]) -> str:
    """Return in one line what each worker of the last part did; "" if there were none."""
    workers = parts[-1].get("workers") if parts else None
    told = []
    for worker in workers if isinstance(workers, list) else ():
        if isinstance(worker, Mapping) and _is_number(worker.get("tokens")):
            lost = f", {worker['deaths']} times lost" if worker.get("deaths") else ""
            told.append(f"{worker.get('name')} ({worker.get('where')}) {worker['tokens']:,} tokens")
            told[-1] += lost
    return ", ".join(told)


def speculation_line(usage: Mapping[str, Any]) -> str:
    """Return in one line how guessed tokens fared; "" if none were guessed."""
    drafted, accepted = usage.get("drafted_tokens", 0), usage.get("accepted_tokens", 0)
    if not drafted:
        return ""
    passes = usage["decoded_tokens"] - accepted
    each = f"; {usage['decoded_tokens'] / passes:.2f} tokens a pass" if passes > 0 else ""
    return (
        f"guessed tokens: {accepted:,} of {drafted:,} were drawn ({accepted / drafted:.0%}){each}"
    )


def attention_line(usage: Mapping[str, Any]) -> str:
    """Return in one line which kernels read the levels in decode steps, and what sharing saved.

    Return "" if there were no decode steps. The bytes are those of keys and values.
    """
    read, apart = usage.get("key_tokens_read", 0), usage.get("key_tokens_unshared", 0)
    if not apart:
        return ""
    told = f"attention: {format_kernels(usage) or usage.get('impl', '')}"
    if "plan" not in usage:
        return told
    size = usage["plan"]["token_bytes"]
    return (
        f"{told}; key reads saved {1 - read / apart:.1%} "
        f"({format_bytes((apart - read) * size)} of {format_bytes(apart * size)})"
    )


def format_kernels(usage: Mapping[str, Any]) -> str:
    """Return which kernel read each level; if several did in turn, with their numbers of steps."""
    kernels: Mapping[str, Mapping[str, int]] = usage.get("kernels", {})
    return ", ".join(f"{level} {_in_turn(kernels[level])}" for level in in_order(kernels))


def _in_turn(steps: Mapping[str, int]) -> str:
    if len(steps) == 1:
        return next(iter(steps))
    most_first = sorted(steps.items(), key=lambda item: -item[1])
    return " and ".join(f"{name} ({num:,} steps)" for name, num in most_first)


def _sum_level_steps(
    first: Mapping[str, Mapping[str, int]], second: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, int]]:
    """Return steps by level and kernel, added up."""
    return {
        level: dict(Counter(first.get(level, {})) + Counter(second.get(level, {})))
        for level in {**first, **second}
    }
