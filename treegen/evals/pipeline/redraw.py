"""Draws random samples of a run again, and compares them with the stored ones.

The chosen samples are left out of a copy of the run, which is then resumed. So they are drawn as
the run drew them: by the same prompts, seeds, budgets and stops.

Where a redraw diverges from its sample at a near-tie, `near_ties` follows the sample further.
"""

import math
import random
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from treegen.errors import InputError, ModelError, arg
from treegen.evals.identity import computed_on
from treegen.evals.job import Job, PreparedJob
from treegen.evals.model import load_llm, weights_fingerprint
from treegen.evals.pipeline.listener import Listener
from treegen.evals.pipeline.near_ties import (
    MAX_TIE_SHARE,
    NearTieResult,
    NearTies,
    Record,
    compare_records,
    max_ties,
)
from treegen.evals.sampling import sample
from treegen.model.options import EngineOptions
from treegen.runs import Key, RunDir, RunSettings, versions

if TYPE_CHECKING:
    from treegen.evals.progress.run_progress import RunProgress
    from treegen.llm.base import BaseLLM

_TOLERANCES: Final = {"float32": 1e-3}
_TOLERANCE: Final = 0.1  # of number formats with 16 bits or fewer


@dataclass(frozen=True, slots=True)
class Redraw:
    """The result of drawing samples again."""

    seed: int
    """The seed that chose the samples."""
    tolerance: float | None
    """As for `redraw_samples`; None if samples must be the same to the bit."""
    default_tolerance: float
    """The tolerance unless another is given; 0 if samples must be the same to the bit."""
    same: tuple[Key, ...]
    """The samples with the same tokens, and log-probabilities within the tolerance."""
    diverged: tuple[Key, ...]
    """The samples that diverge from the stored ones at near-ties, and are the same otherwise."""
    num_ties: int
    """The near-ties at which these samples diverge."""
    num_tokens: int
    """The tokens of the same samples and of these ones."""
    differing: tuple[tuple[Key, str], ...]
    """The other samples, and what differs."""
    largest: float
    """The largest difference of a sample's log-probability over the square root of its tokens,
    among the samples that do not differ."""

    @property
    def holds(self) -> bool:
        """Whether no sample differs, and few tokens are near-ties at which samples diverge."""
        return not self.differing and self.num_ties <= max_ties(self.num_tokens)

    def __str__(self) -> str:
        num = len(self.same) + len(self.diverged) + len(self.differing)
        how = "are equal to the bit"
        if self.tolerance is not None:
            how = (
                f"have the same tokens, and log-probabilities within {self.tolerance:g} times the "
                f"square root of the number of tokens (largest difference {self.largest:.2g})"
            )
        text = f"{len(self.same):,} of {num:,} {how}"
        if self.diverged:
            text += (
                f"; {len(self.diverged):,} more differ only at {self.num_ties:,} near-ties among "
                f"{self.num_tokens:,} tokens"
            )
        text += f"; chosen by seed {self.seed}"
        if self.differing:
            (name, index), why = self.differing[0]
            text += (
                f"; {len(self.differing):,} differ, such as problem {name!r:.80}, sample {index}: "
                f"{why}"
            )
        elif not self.holds:
            text += f"; in honest runs, at most {MAX_TIE_SHARE:.0%} of the tokens are near-ties"
        return text


def check_tolerance(tolerance: float | None) -> None:
    """Raise InputError for a tolerance that `redraw_samples` does not take."""
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise InputError(f"{arg('tolerance')} must be at least 0 and finite, got {tolerance}")


def redraw_samples(
    run: RunDir,
    prepared: PreparedJob,
    listener: Listener,
    *,
    num: int,
    seed: int,
    tolerance: float | None = None,
) -> Redraw:
    """Draw some samples of a run again and compare them with the stored ones.

    Args:
        run: The run, open for reading.
        prepared: The job of the run with its prompts.
        listener: Receives messages and progress.
        num: How many samples to draw; all if the run has fewer.
        seed: Chooses the samples.
        tolerance: By how much the log-probability of a token may differ; that of a sample may
            differ by this times the square root of its tokens. None takes 0.001 for float32 and 0.1
            for other number formats, and requires equal bits of a run with `reproducible` on a GPU,
            if this is the same kind of GPU with the same versions.

    Raises:
        InputError: the tolerance is negative or not finite, or the run has no sample.
        TreegenError: the model cannot be loaded, or a sample cannot be drawn.
    """
    check_tolerance(tolerance)
    if not run.done:
        raise InputError(f"{run.path} has no sample to draw again")
    keys = sorted(run.done)
    chosen = frozenset(random.Random(seed).sample(keys, min(num, len(keys))))
    job, engine = prepared.job, prepared.job.settings.engine
    default = _TOLERANCES.get(prepared.model_info.dtype, _TOLERANCE)
    if _is_exact(run, job, prepared):
        default = 0.0
    is_exact = tolerance is None and default == 0
    if tolerance is None and not is_exact:
        tolerance = default
    listener.loading(engine.model)
    check_model(run, engine)
    llm = load_llm(engine, run.info.identity["model"]["fingerprint"])
    try:
        stored = {_key(record): record for record in run.records() if _key(record) in chosen}
        prepared = _record_tokens(prepared)
        redrawn = _draw(run, prepared, llm, chosen, listener)
        results = _compare(stored, redrawn, tolerance or 0.0)
        unequal = {
            key: stored[key] for key, result in results.items() if result.why and key in redrawn
        }
        if unequal and not is_exact:
            results |= NearTies(prepared, llm, tolerance or 0.0).follow(unequal, redrawn)
    finally:
        llm.close()
    right = {key: result for key, result in results.items() if not result.why}
    return Redraw(
        seed=seed,
        tolerance=None if is_exact else tolerance,
        default_tolerance=default,
        same=tuple(key for key, result in right.items() if not result.num_ties),
        diverged=tuple(key for key, result in right.items() if result.num_ties),
        num_ties=sum(result.num_ties for result in right.values()),
        num_tokens=sum(stored[key]["num_tokens"] for key in right),
        differing=tuple((key, result.why) for key, result in results.items() if result.why),
        largest=max([0.0, *(result.distance for result in right.values())]),
    )


def _compare(
    stored: Mapping[Key, Record], redrawn: Mapping[Key, Record], tolerance: float
) -> dict[Key, NearTieResult]:
    """Return for each stored sample what differs from its redraw."""
    results = {key: NearTieResult(0, "it was not drawn again") for key in sorted(stored)}
    for key in sorted(redrawn):
        why, distance = compare_records(stored[key], redrawn[key], tolerance)
        results[key] = NearTieResult(0, why, distance)
    return results


def check_model(run: RunDir, engine: EngineOptions) -> None:
    """Raise an error unless a model has the weights that a run was drawn from.

    Args:
        run: The run.
        engine: The options that name the model.

    Raises:
        ModelError: the model cannot be read, or is another one.
    """
    stored = run.info.identity.get("model")
    now = weights_fingerprint(engine)
    if not isinstance(stored, Mapping) or stored.get("fingerprint") != now:
        raise ModelError(
            f"{engine.model} is not the model of {run.path}: its weights, tokenizer or settings "
            f"differ; pass the model of the run with {arg('model=')}"
        )


def _key(record: Mapping[str, Any]) -> Key:
    return record["problem_id"], record["sample_index"]


def _is_exact(run: RunDir, job: Job, prepared: PreparedJob) -> bool:
    """Return whether this machine draws the samples of a run to the bit."""
    from treegen.evals.identity import run_settings

    if not job.settings.engine.reproducible or prepared.model_info.device_type == "cpu":
        return False
    now = run_settings(
        job,
        dtype=prepared.model_info.dtype,
        fingerprint="",
        device_type=prepared.model_info.device_type,
        quantization=prepared.model_info.quantization,
    )
    last = run.info.resumes[-1]["versions"] if run.info.resumes else run.info.versions
    of_run = {**computed_on(run.info), "torch": last.get("torch"), "treegen": last.get("treegen")}
    of_now = {**now.computing, **{name: versions().get(name) for name in ("torch", "treegen")}}
    return of_run == of_now


def _record_tokens(prepared: PreparedJob) -> PreparedJob:
    """Return a job that stores tokens and scores no samples."""
    settings = replace(prepared.job.settings, log_tokens=True, score=False)
    return replace(prepared, job=replace(prepared.job, settings=settings))


def _draw(
    run: RunDir, prepared: PreparedJob, llm: "BaseLLM", chosen: frozenset[Key], listener: Listener
) -> dict[Key, dict[str, Any]]:
    """Draw the chosen samples in a copy of the run without them, and return their records."""
    info = run.info
    settings = RunSettings(
        identity=info.identity,
        problem_ids=info.problem_ids,
        planned=info.planned,
        free=info.free,
    )
    with (
        tempfile.TemporaryDirectory(prefix="treegen-redraw-") as folder,
        RunDir.create(Path(folder, "run"), settings) as copy,
    ):
        for record in run.records():
            if _key(record) not in chosen:
                copy.append(record)
        num_copied = len(copy.done)
        with listener.poll_interrupts() as stop:
            steps = sample(prepared, copy, llm, stop=stop)
            listener.track((_leave_out(now, num_copied) for now in steps), "redraw")
        return {_key(record): record for record in copy.records() if _key(record) in chosen}


def _leave_out(now: "RunProgress", num: int) -> "RunProgress":
    """Return the progress of a run without a number of samples that were there at its start."""
    started, done, planned = (value - num for value in (now.started, now.done, now.planned))
    return replace(now, started=started, done=done, planned=planned)
