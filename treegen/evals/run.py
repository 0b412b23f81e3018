"""Run one evaluation: sample what a run directory lacks, then score what it holds.

Nothing here prints: `sample` is an iterator of progress, which its caller shows. Nothing here
imports torch, for scoring a stored run needs no model.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from treegen.errors import RunError, TaskError
from treegen.evals.account import Account, add_up, stored_parts
from treegen.evals.calls import asked, verdicts_of
from treegen.evals.choices import likeliest_by_length
from treegen.evals.execution import Judging, executing
from treegen.evals.job import AnyJob, Job, fit_job
from treegen.evals.metrics import Report, ReportOptions
from treegen.evals.progress import AccuracySoFar, Glance, Progress
from treegen.evals.settings import stored_choices
from treegen.evals.thinking import Tokens, answer_of, stored, thinking_of
from treegen.evals.timeline import Timeline
from treegen.evals.verdict import SampleScore, Verdict
from treegen.outputs import Completion
from treegen.runs import RunDir

if TYPE_CHECKING:
    from treegen.engine.stream import Stream
    from treegen.llm import LLM


def sample(
    job: Job,
    run: RunDir,
    llm: "LLM",
    *,
    stop: Callable[[], object] = lambda: None,
    judging: Judging | None = None,
) -> Iterator[Progress]:
    """Draw the samples that a run lacks and store each once it has ended; yields after every step.

    stop: polled before every step; once it returns something true, the iteration ends. Samples that
    had finished by then, or before an error, are in the run.
    judging: judges programs meanwhile.
    """
    if run.missing <= 0:
        return
    job = fit_job(job, llm.tokenizer, llm.spec)
    if job.choices:
        # Imported here because only runs by likelihood need it.
        from treegen.evals.likelihood import sample_choices

        yield from sample_choices(job, run, llm, stop=stop)
        return
    account = Account(run)
    tally = _tally(job, judging)
    if tally:
        for record in run.records():
            tally.add(record)
    with (
        closing(Timeline(run.path, len(account.parts))) as timeline,
        llm.stream(job.tree, job.settings.sampling, skip=set(run.done)) as stream,
    ):
        prompts = _Prompts(stream)
        account.begin(stream.usage, stream.plan, stream.workers)
        watch = _Watch(run, stream, tally)

        def keep(completions: Sequence[Completion]) -> None:
            for completion in completions:
                record = prompts.record(completion, tokens=job.settings.log_tokens)
                job.mark(record)
                run.append(record)
                account.count()
                if tally:
                    tally.add(record)

        try:
            stopped = False
            while stream.has_work and not stopped:
                stopped = bool(stop())
                keep(stream.ended() if stopped else stream.step())
                if judging:
                    judging.poll()
                account.save()
                last, computed = stopped or not stream.has_work, stream.usage.prompt_tokens_computed
                now = watch.look(last=last)
                timeline.note(now, last=last, prompt_tokens=computed)
                yield now
        except BaseException:
            # The user must see the first error, such as a full disk, not one that follows from it.
            with suppress(Exception):
                keep(stream.ended())
            with suppress(RunError):
                account.save(now=True)
            raise
        run.sync()
        account.save(now=True)


def judged(
    job: Job, run: RunDir, judging: Judging | None = None
) -> Iterator[tuple[dict[str, Any], Mapping[str, Verdict] | None]]:
    """Yield every stored sample with its verdicts by filter; None for a program without any."""
    problems = {problem.id: problem for problem in job.data.problems}
    for record in run.records():
        if judging:
            yield record, judging.verdicts(record)
        else:
            problem = problems[record["problem_id"]]
            yield record, verdicts_of(job.task, problem, answer_of(record))


def score(job: Job, run: RunDir, judging: Judging | None = None) -> Report:
    """Judge every stored sample of a run; programs have the verdicts that are stored."""
    return aggregate(job, sample_scores(job, judged(job, run, judging)))


def sample_scores(
    job: Job, found: Iterable[tuple[dict[str, Any], Mapping[str, Verdict] | None]]
) -> list[SampleScore]:
    """Return the scores of stored samples, leaving out those that have no verdicts."""
    problems = {problem.id: problem for problem in job.data.problems}
    scores = []
    for record, verdicts in found:
        if verdicts is None:
            continue
        thinking = thinking_of(record)
        by_length: Mapping[str, Verdict] = {}
        if "choice_logprobs" in record:
            problem = problems[record["problem_id"]]
            choice = likeliest_by_length(problem.choices, record["choice_logprobs"])
            by_length = job.task.score(problem, choice)
        scores.append(
            SampleScore(
                problem_id=record["problem_id"],
                sample_index=record["sample_index"],
                finish_reason=record["finish_reason"],
                verdicts=verdicts,
                by_length=by_length,
                closed=None if thinking is None else thinking.is_closed,
            )
        )
    return scores


def aggregate(job: Job, scores: Sequence[SampleScore]) -> Report:
    """Return the metrics over scored samples of a job."""
    settings = job.settings
    options = ReportOptions(
        problem_ids=[problem.id for problem in job.data.problems],
        num_samples=settings.num_samples,
        num_fewshot=job.data.num_fewshot,
        pass_ks=settings.pass_ks,
        maj_ks=settings.maj_ks,
        problems=job.data.problems,
    )
    report = asked(job.task.aggregate, job.task.name)(scores, options)
    if not isinstance(report, Report):
        name = type(report).__name__
        raise TaskError(f"aggregate of task {job.task.name!r} gives a {name}; it must be a Report")
    return replace(report, label=job.data.label)


def write_results(
    job: Job, run: RunDir, judging: Judging | None = None
) -> tuple[dict[str, Any], Report | None]:
    """Write results.json from the samples of a run; returns its content, and the report.

    The report is None if samples are not scored, or are programs that are not judged.
    """
    unjudged = executing(job.task) is not None and judging is None
    report = score(job, run, judging) if job.settings.score and not unjudged else None
    unshared = kept = shortened = 0
    tokens = Tokens()
    for record in run.records():
        tokens.add(record)
        shortened += "dropped" in record
        unshared += record["prompt_tokens"] + record.get("choice_tokens", 0)
        kept += record["num_tokens"]
    parts = stored_parts(run)
    told = {"label": job.data.label, "notes": list(job.data.notes)}
    results = {
        **results_head(job, run, stored_choices(run.info), **told),
        "shortened": shortened,
        "usage": add_up(parts, num_samples=len(run.done), unshared=unshared, kept=kept),
        "report": report.to_json() if report else None,
        "parts": parts,
    }
    if thinking := tokens.summary():
        results["thinking"] = thinking
    if judging:
        results["judging"] = judging.summary()
    run.write_results(results)
    return results, report


def results_head(
    job: AnyJob, run: RunDir, choices: Mapping[str, Any], **of_task: Any
) -> dict[str, Any]:
    """Return the first fields of results.json, for a run of any kind. of_task: more on the task."""
    info, source = run.info, job.data.source
    return {
        "complete": run.missing == 0,
        "planned": info.planned,
        "done": len(run.done),
        "task": {"name": job.task.name, "version": job.task.version, "source": source, **of_task},
        "model": dict(info.identity["model"]),
        "settings": dict(choices),
        "fingerprint": info.fingerprint,
        "versions": dict(info.versions),
        "skipped": [
            {"source": row.source, "line": row.line, "reason": row.reason}
            for row in job.data.skipped
        ],
    }


class _Watch:
    """Tells how far a stream is."""

    def __init__(
        self, run: RunDir, stream: "Stream", tally: "AccuracySoFar | Judging | None"
    ) -> None:
        """The part begins now."""
        self._run, self._stream, self._tally = run, stream, tally
        self._started, self._start = len(run.done), time.monotonic()
        self._glance = Glance()
        self._seen: dict[str, Any] = {}

    def look(self, *, last: bool) -> Progress:
        """Return how far the run is. last: nothing comes after this."""
        if self._glance(now=last or not self._seen.get("levels")):
            self._seen = {
                "levels": self._stream.levels(),
                "estimate": self._tally.estimate() if self._tally else None,
            }
        status = self._stream.status()
        return Progress(
            done=len(self._run.done),
            planned=self._run.info.planned,
            rows=status.rows,
            pages=status.pages,
            num_pages=status.num_pages,
            tokens=self._stream.usage.decoded_tokens,
            seconds=time.monotonic() - self._start,
            accuracy=self._tally.accuracy if self._tally else None,
            started=self._started,
            workers=self._stream.workers(),
            **self._seen,
        )


class _Prompts:
    """What records say of the prompts: the hash of their token ids, and their lengths."""

    def __init__(self, stream: "Stream") -> None:
        self._request = {request.id: request for request in stream.plan.requests}
        self._hash: dict[str, str] = {}

    def record(self, completion: Completion, *, tokens: bool) -> dict[str, Any]:
        """Return the line of samples.jsonl for one finished sample."""
        prompt = self._request[completion.prompt_id].tokens
        known = self._hash.get(completion.prompt_id)
        if known is None:
            known = hashlib.blake2b(prompt.astype("<i4").tobytes(), digest_size=16).hexdigest()
            self._hash[completion.prompt_id] = known
        record: dict[str, Any] = {
            "problem_id": completion.prompt_id,
            "sample_index": completion.sample_index,
            "seed": completion.seed,
            "text": completion.text,
            "num_tokens": completion.num_tokens,
            "logprob": completion.logprob,
            "finish_reason": completion.finish_reason,
            "stop": completion.stop,
            "prompt_hash": known,
            "prompt_tokens": len(prompt),
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        }
        if completion.thinking is not None:
            record["thinking"] = stored(completion.thinking)
        if tokens:
            record["tokens"] = list(completion.tokens)
        return record


def _tally(job: Job, judging: Judging | None) -> "AccuracySoFar | Judging | None":
    """Return what counts right samples; None where they are not scored now."""
    if judging or not job.settings.score:
        return judging
    return None if executing(job.task) else AccuracySoFar(job)
