"""Run one evaluation: sample what a run directory lacks, then score what it holds.

Nothing here prints: `sample` is an iterator of progress, which its caller shows. Nothing here
imports torch, for scoring a stored run needs no model.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from treegen.errors import RunError, TaskError
from treegen.evals.account import Account, add_up, stored_parts
from treegen.evals.answers import answer_types, unified
from treegen.evals.calls import asked, verdicts_on
from treegen.evals.choices import likeliest_by_length
from treegen.evals.confidence import summary
from treegen.evals.execution import Judging, executing
from treegen.evals.job import AnyJob, Job, fit_job
from treegen.evals.metrics import Report, ReportOptions
from treegen.evals.progress import AccuracySoFar, Glance, Progress
from treegen.evals.settings import stored_choices
from treegen.evals.stopping import NEVER, Rounds
from treegen.evals.thinking import Tokens, stored, thinking_of
from treegen.evals.timeline import Timeline
from treegen.evals.verdict import SampleScore, Verdict
from treegen.evals.vote_tables import NO_VOTES, Votes, stop_tables, vote_table
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
    rounds = look_back(job, run)
    if tally:
        for record in run.records():
            tally.add(record)
    with (
        closing(Timeline(run.path, len(account.parts))) as timeline,
        _begun(job, run, llm, rounds) as stream,
    ):
        prompts = _Prompts(stream, job)
        dealing = _Dealing(run, stream, rounds) if rounds else None
        account.begin(stream.usage, stream.plan, stream.workers)
        watch = _Watch(run, stream, tally)

        def keep(completions: Sequence[Completion]) -> None:
            for completion in completions:
                record = prompts.record(completion)
                job.mark(record)
                run.append(record)
                account.count()
                answer = tally.add(record) if tally else None
                if rounds:
                    rounds.add(record, answer)

        try:
            stopped = False
            while stream.has_work and not stopped:
                stopped = bool(stop())
                keep(stream.ended() if stopped else stream.step())
                if dealing:
                    dealing.go_on()
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
    """Yield every stored sample with its verdicts by filter; None for a program without any.

    If the task declares answer types, equal answers of a problem are equal strings here.
    """
    problems = {problem.id: problem for problem in job.data.problems}
    if not judging and (types := answer_types(job.task)):
        found = [
            (key, verdicts_on(job.task, problems[key], record))
            for record in run.records()
            for key in (record["problem_id"],)
        ]
        # Another process may have appended records in between.
        yield from zip(run.records(), asked(unified, job.task.name)(found, types), strict=False)
        return
    for record in run.records():
        if judging:
            yield record, judging.verdicts(record)
        else:
            yield record, verdicts_on(job.task, problems[record["problem_id"]], record)


def score(job: Job, run: RunDir, judging: Judging | None = None) -> Report:
    """Judge every stored sample of a run; programs have the verdicts that are stored."""
    scores = sample_scores(job, judged(job, run, judging))
    return aggregate(job, scores, look_back(job, run), Votes.of(run.path))


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
            choice = likeliest_by_length(problem, record["choice_logprobs"])
            by_length = job.task.score(problem, choice)
        scores.append(
            SampleScore(
                problem_id=record["problem_id"],
                sample_index=record["sample_index"],
                finish_reason=record["finish_reason"],
                verdicts=verdicts,
                by_length=by_length,
                numbers=_numbers(record),
                num_tokens=record["num_tokens"],
                closed=None if thinking is None else thinking.is_closed,
            )
        )
    return scores


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return what votes may weigh a stored sample by."""
    found = {}
    if record["num_tokens"] and "logprob" in record:
        found["logprob"] = record["logprob"] / record["num_tokens"]
    if (certainty := record.get("self_certainty")) is not None:
        found["certainty"] = certainty
    for name, value in record.get("confidence", {}).items():
        found["confidence" if name == "mean" else name] = value
    return found


def aggregate(
    job: Job, scores: Sequence[SampleScore], rounds: Rounds | None = None, votes: Votes = NO_VOTES
) -> Report:
    """Return the metrics over scored samples of a job.

    rounds: of a run that stops problems, by whose rule samples are chosen for what is told.
    votes: what samples vote by that their records do not have.
    """
    settings = job.settings
    fixed, num = list(scores), settings.num_samples
    if settings.stop_when != NEVER:
        # Those that were drawn whatever came; see `treegen.evals.stopping`.
        num = settings.first_round
        fixed = [sample for sample in scores if sample.sample_index < num]
    options = ReportOptions(
        problem_ids=[problem.id for problem in job.data.problems],
        num_samples=num,
        num_fewshot=job.data.num_fewshot,
        pass_ks=_up_to(num, settings.pass_ks),
        maj_ks=_up_to(num, settings.maj_ks),
        problems=job.data.problems,
    )
    report = asked(job.task.aggregate, job.task.name)(fixed, options)
    if not isinstance(report, Report):
        name = type(report).__name__
        raise TaskError(f"aggregate of task {job.task.name!r} gives a {name}; it must be a Report")
    tables = list(report.tables)
    if rounds is not None:
        tables += stop_tables(job, scores, rounds)
    if settings.votes:
        ks = options.maj_ks or (num,)
        tables.append(
            vote_table(fixed, job.task.filters, settings.votes, ks, votes, job.data.problems)
        )
    return replace(report, label=job.data.label, tables=tuple(tables))


def _up_to(num: int, ks: Sequence[int] | None) -> Sequence[int] | None:
    return None if ks is None else [k for k in ks if k <= num]


def look_back(job: Job, run: RunDir) -> Rounds | None:
    """Return how far the rounds of a run are by what it has stored; None if it has no rounds.

    It also tells the run which samples need not be drawn.
    """
    settings = job.settings
    if not settings.in_rounds:
        return None
    problems = {problem.id: problem for problem in job.data.problems}
    kind = answer_types(job.task).get(job.task.filters[0])
    rounds = Rounds(settings.stop_rule, list(problems), kind.representatives if kind else None)
    for record in run.records():
        verdicts: Mapping[str, Verdict] = {}
        if rounds.reads_answers:
            verdicts = verdicts_on(job.task, problems[record["problem_id"]], record)
        first = verdicts.get(job.task.filters[0])
        rounds.add(record, first.answer if first else None)
    rounds.due()
    run.spared = rounds.spared
    return rounds


def write_results(
    job: Job, run: RunDir, judging: Judging | None = None
) -> tuple[dict[str, Any], Report | None]:
    """Write results.json from the samples of a run; returns its content, and the report.

    The report is None if samples are not scored, or are programs that are not judged.
    """
    unjudged = executing(job.task) is not None and judging is None
    rounds = look_back(job, run)
    report = None
    if job.settings.score and not unjudged:
        scores = sample_scores(job, judged(job, run, judging))
        report = aggregate(job, scores, rounds, Votes.of(run.path))
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
    if rounds:
        results["stopping"] = rounds.told()
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
            planned=self._run.info.planned - self._run.spared,
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

    def __init__(self, stream: "Stream", job: Job) -> None:
        self._settings = job.settings
        self._request = {request.id: request for request in stream.plan.requests}
        self._hash: dict[str, str] = {}

    def record(self, completion: Completion) -> dict[str, Any]:
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
        settings = self._settings
        if settings.confidence is not None:
            record["confidence"] = summary(completion.confidences, settings.confidence.window)
        if settings.self_certainty:
            certainties = completion.certainties
            record["self_certainty"] = math.fsum(certainties) / len(certainties)
        if settings.log_tokens:
            record["tokens"] = list(completion.tokens)
            if settings.confidence is not None:
                record["confidences"] = list(completion.confidences)
        return record


def _begun(job: Job, run: RunDir, llm: "LLM", rounds: Rounds | None) -> "Stream":
    """Begin to draw what a run lacks."""
    if rounds is not None:
        return llm.dealt(job.tree, job.settings.drawing)
    return llm.stream(job.tree, job.settings.drawing, skip=set(run.done))


class _Dealing:
    """Deals samples whose round has come to a stream."""

    def __init__(self, run: RunDir, stream: "Stream", rounds: Rounds) -> None:
        """Deal what is due now."""
        self._run, self._stream, self._rounds = run, stream, rounds
        self._place = {request.id: i for i, request in enumerate(stream.plan.requests)}
        rounds.begin()
        self.go_on()

    def go_on(self) -> None:
        """Deal what has become due."""
        due = self._rounds.due()
        found = ((self._place[name], self._rounds.floor(name)) for name, _ in due)
        floors = {place: floor for place, floor in found if floor is not None}
        if due:
            self._stream.deal([(self._place[name], indices) for name, indices in due], floors)
        self._run.spared = self._rounds.spared


def _tally(job: Job, judging: Judging | None) -> "AccuracySoFar | Judging | None":
    """Return what counts right samples; None where they are not scored now."""
    if judging or not job.settings.score:
        return judging
    return None if executing(job.task) else AccuracySoFar(job)
