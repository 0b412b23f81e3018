"""Draw the samples that a run directory still needs, and store each when it has ended.

In a likelihood run nothing is drawn: the one sample of a problem is the most likely of its choices.
Nothing here prints: `sample` is an iterator of progress, which its caller shows.
"""

import hashlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from treegen.common.outputs import Completion, LevelRows, Score
from treegen.errors import NumericsError, RunError
from treegen.evals.early_stopping import Rounds
from treegen.evals.job import Job, PreparedJob
from treegen.evals.multiple_choice import ChoicePrompt
from treegen.evals.progress.run_progress import (
    AccuracyCounter,
    RunProgress,
    TimeForecast,
    UpdateTimer,
)
from treegen.evals.progress.usage import Timeline
from treegen.evals.sample_recorder import SampleRecorder, keep_job_images
from treegen.evals.scoring.code_execution import ProgramScoring
from treegen.evals.scoring.run_verdicts import RunVerdicts
from treegen.evals.statistics.confidence import summary
from treegen.evals.statistics.estimators import Estimate
from treegen.evals.thinking import thinking_to_json
from treegen.prompts.plan.plan import Plan
from treegen.runs import RunDir

if TYPE_CHECKING:
    from treegen.engine.stream import Stream
    from treegen.llm.base import BaseLLM


def sample(
    prepared: PreparedJob,
    run: RunDir,
    llm: "BaseLLM",
    *,
    stop: Callable[[], object] = lambda: None,
    program_scoring: ProgramScoring | None = None,
    verdicts: RunVerdicts | None = None,
) -> Iterator[RunProgress]:
    """Draw a run's missing samples and store each when it has ended.

    Args:
        prepared: The job of the run, with the tokens and the plan of its prompts.
        run: The run directory that samples are appended to.
        llm: The model that draws them.
        stop: Called before every step; if it returns a true value, the iteration ends. Samples
            that had finished by then, or before an error, are in the run.
        program_scoring: Runs and scores the programs of code tasks during sampling.
        verdicts: The verdicts on the run's samples; receives those on new ones. Default: none are
            known.

    Yields:
        The progress of the run after every step.
    """
    if run.missing <= 0:
        return
    job = prepared.job
    recorder = SampleRecorder(job, run, program_scoring, verdicts)
    keep_job_images(job, run, prepared.model_info.images)
    if job.choices:
        yield from sample_choices(prepared, recorder, llm, stop=stop)
        return
    forecast = _start_forecast(job, run, llm)
    selection: dict[str, Any] = {"on_demand": True} if recorder.rounds else {"skip": set(run.done)}
    with (
        closing(recorder),
        closing(Timeline(run.path, len(recorder.usage_log.parts))) as timeline,
        llm.start_plan(prepared.plan_for(llm), job.sampling_params, **selection) as stream,
    ):
        records = RecordMaker(stream.plan, job)
        feeder = _RoundFeeder(run, stream, recorder.rounds) if recorder.rounds else None
        recorder.usage_log.begin(stream.usage, stream.plan, stream.workers)
        tracker = _ProgressTracker(run, stream, recorder.tally, forecast)

        def store(completions: Sequence[Completion]) -> None:
            for completion in completions:
                recorder.add(records.record(completion))
                forecast.finish(completion.num_tokens)

        try:
            stopped = False
            while stream.has_work and not stopped:
                stopped = bool(stop())
                store(stream.take_finished() if stopped else stream.step())
                if feeder:
                    feeder.add_due()
                if program_scoring:
                    program_scoring.poll()
                recorder.usage_log.save()
                last, computed = stopped or not stream.has_work, stream.usage.prompt_tokens_computed
                now = tracker.report(last=last)
                timeline.note(now, last=last, prompt_tokens=computed)
                yield now
        except BaseException:
            # The user must see the first error, such as a full disk, not its consequences.
            with suppress(Exception):
                store(stream.take_finished())
            with suppress(RunError):
                recorder.usage_log.save(now=True)
            raise
        run.sync()
        recorder.usage_log.save(now=True)


def _start_forecast(job: Job, run: RunDir, llm: "BaseLLM") -> TimeForecast:
    """Return a forecast that has seen the lengths of the stored samples."""
    forecast = TimeForecast(
        job.settings.sampling.max_tokens, shares_speed=llm.model_info.device_type == "cpu"
    )
    for record in run.records():
        forecast.finish(record["num_tokens"], before=True)
    return forecast


class _ProgressTracker:
    """Reports the progress of a stream."""

    def __init__(
        self,
        run: RunDir,
        stream: Any,
        tally: "AccuracyCounter | ProgramScoring | None",
        forecast: TimeForecast | None = None,
    ) -> None:
        """Start the clock of this part of the run.

        Args:
            run: The run.
            stream: A `Stream` of samples, or a `ScoreStream` of scores of choices.
            tally: The accuracy so far; None if samples are not scored.
            forecast: Forecasts the remaining time of samples; None for scores.
        """
        self._run, self._stream, self._tally, self._forecast = run, stream, tally, forecast
        self._started, self._start = len(run.done), time.monotonic()
        self._update_timer = UpdateTimer()
        self._interval: Estimate | None = None
        self._levels: tuple[LevelRows, ...] = ()

    def report(self, *, last: bool) -> RunProgress:
        """Return the progress of the run.

        Args:
            last: Whether this is the last report.
        """
        draws = self._forecast is not None
        if self._update_timer(now=last or (draws and not self._levels)):
            self._interval = self._tally.estimate() if self._tally else None
            self._levels = self._stream.levels() if draws else ()
        status, usage = self._stream.status(), self._stream.usage
        done, planned = len(self._run.done), self._run.info.planned - self._run.num_not_drawn
        rows = status.rows if draws else 0
        tokens = usage.decoded_tokens if draws else usage.prompt_tokens_computed
        seconds, forecast = time.monotonic() - self._start, None
        if self._forecast is not None:
            waiting = max(0, planned - done - rows)
            forecast = self._forecast.estimate(
                seconds=seconds, spent=tokens, running=rows, waiting=waiting
            )
        return RunProgress(
            done=done,
            planned=planned,
            rows=rows,
            pages=status.pages,
            num_pages=status.num_pages,
            tokens=tokens,
            seconds=seconds,
            forecast=forecast,
            accuracy=self._tally.accuracy if self._tally else None,
            started=self._started,
            estimate=self._interval,
            scored=self._tally.num_judged if self._tally else None,
            compute_estimate=self._tally.estimate if self._tally else None,
            levels=self._levels,
            workers=self._stream.workers(),
        )


class RecordMaker:
    """Makes the records of samples."""

    def __init__(self, plan: Plan, job: Job) -> None:
        """Take the plan and the job of the samples."""
        self._settings, self._task_requests = job.settings, job.task_requests
        self._request = {request.id: request for request in plan.requests}
        self._hash: dict[str, str] = {}

    def _text(self, completion: Completion) -> str:
        # The end of the reasoning is counted in characters of the text as it was drawn.
        if self._task_requests is None or completion.thinking is not None:
            return completion.text
        return self._task_requests.text(completion)

    def record(self, completion: Completion) -> dict[str, Any]:
        """Return the line of samples.jsonl for one finished sample."""
        prompt = self._request[completion.prompt_id].tokens
        prompt_hash = self._hash.get(completion.prompt_id)
        if prompt_hash is None:
            prompt_hash = hashlib.blake2b(
                prompt.astype("<i4").tobytes(), digest_size=16
            ).hexdigest()
            self._hash[completion.prompt_id] = prompt_hash
        record: dict[str, Any] = {
            "problem_id": completion.prompt_id,
            "sample_index": completion.sample_index,
            "seed": completion.seed,
            "text": self._text(completion),
            "num_tokens": completion.num_tokens,
            "logprob": completion.logprob,
            "finish_reason": completion.finish_reason,
            "stop": completion.stop,
            "prompt_hash": prompt_hash,
            "prompt_tokens": len(prompt),
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        }
        if completion.thinking is not None:
            record["thinking"] = thinking_to_json(completion.thinking)
        settings = self._settings
        if settings.confidence is not None:
            record["confidence"] = summary(completion.confidences, settings.confidence.window)
        certainties = completion.certainties
        if settings.self_certainty and certainties:  # a sample without tokens has none
            record["self_certainty"] = math.fsum(certainties) / len(certainties)
        if settings.log_tokens:
            record["tokens"] = list(completion.tokens)
            if settings.confidence is not None:
                record["confidences"] = list(completion.confidences)
        return record


class _RoundFeeder:
    """Adds samples to a stream when their round is due."""

    def __init__(self, run: RunDir, stream: "Stream", rounds: Rounds) -> None:
        """Add the samples that are due now."""
        self._run, self._stream, self._rounds = run, stream, rounds
        self._index_of = {request.id: i for i, request in enumerate(stream.plan.requests)}
        rounds.begin()
        self.add_due()

    def add_due(self) -> None:
        """Add the samples that have become due."""
        due = self._rounds.take_due()
        pairs = ((self._index_of[name], self._rounds.floor(name)) for name, _ in due)
        floors = {index: floor for index, floor in pairs if floor is not None}
        if due:
            self._stream.add_work(
                [(self._index_of[name], indices) for name, indices in due], floors
            )
        self._run.num_not_drawn = self._rounds.num_not_drawn


def sample_choices(
    prepared: PreparedJob,
    recorder: SampleRecorder,
    llm: "BaseLLM",
    *,
    stop: Callable[[], object] = lambda: None,
) -> Iterator[RunProgress]:
    """Score the choices of a run's missing problems and store the most likely of each problem.

    Args:
        prepared: The job of the run, with the tokens and the plan of its prompts.
        recorder: Stores the records in the run.
        llm: The model that scores the choices.
        stop: Called before every step; if it returns a true value, the iteration ends after this
            step.

    Yields:
        The progress of the run after every step.
    """
    job, run, usage_log = prepared.job, recorder.run, recorder.usage_log
    problems = job.choices
    done = {problem_id for problem_id, _ in run.done}
    prompts = [prompt for prompt in prepared.choice_prompts if prompt.id not in done]
    prompt_of_pair = [prompt for prompt in prompts for _ in prompt.sequences]
    scores_of = defaultdict[str, dict[int, Score]](dict)
    stopped = False
    with (
        closing(recorder),
        closing(Timeline(run.path, len(usage_log.parts))) as timeline,
        llm.score_plan(prepared.plan_for(llm, prompts)) as stream,
    ):
        usage_log.begin(stream.usage, workers=stream.workers)
        tracker = _ProgressTracker(run, stream, recorder.tally)
        try:
            while stream.has_work and not stopped:
                stopped = bool(stop())
                for index, score in stream.step():
                    prompt = prompt_of_pair[index]
                    by_pair = scores_of[prompt.id]
                    by_pair[index] = score
                    if len(by_pair) < len(prompt.sequences):
                        continue
                    scores = [by_pair[pair] for pair in sorted(by_pair)]
                    record = _make_choice_record(
                        prompt, problems[prompt.id].candidates, scores, job.settings.log_tokens
                    )
                    if job.task_requests is not None:
                        record["choice_greedy"] = [score.is_greedy for score in scores]
                    recorder.add(record)
                usage_log.save()
                last = stopped or not stream.has_work
                now = tracker.report(last=last)
                timeline.note(now, last=last)
                yield now
        except BaseException:
            # The user must see the first error, such as a full disk, not its consequences.
            with suppress(RunError):
                usage_log.save(now=True)
            raise
    run.sync()
    usage_log.save(now=True)


def _make_choice_record(
    prompt: ChoicePrompt, candidates: Sequence[str], scores: Sequence[Score], log_tokens: bool
) -> dict[str, Any]:
    """Return the line of samples.jsonl for one problem; of equally likely choices, the first."""
    logprobs = [score.logprob for score in scores]
    if not all(map(math.isfinite, logprobs)):
        raise NumericsError(
            f"the log-probabilities of the choices of problem {prompt.id!r} are not finite: "
            f"{logprobs}; check the weights, or use dtype float32"
        )
    best = max(range(len(candidates)), key=logprobs.__getitem__)
    parts = scores if len(candidates) == 1 else [scores[best]]  # a text may be scored in windows
    tokens = prompt.context.astype("<i4").tobytes()
    record: dict[str, Any] = {
        "problem_id": prompt.id,
        "sample_index": 0,
        "text": candidates[best],
        "num_tokens": sum(len(part.tokens) for part in parts),
        "logprob": math.fsum(part.logprob for part in parts),
        "choice_logprobs": logprobs,
        "finish_reason": "stop",
        "prompt_hash": hashlib.blake2b(tokens, digest_size=16).hexdigest(),
        "prompt_tokens": len(prompt.context),
        "choice_tokens": prompt.num_tokens - len(prompt.context),
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }
    if log_tokens:
        record["tokens"] = [token for part in parts for token in part.tokens]
    return record
