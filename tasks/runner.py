"""Run one evaluation: sample what a run directory lacks, then score what it holds.

Nothing here prints; `sample` is an iterator of progress that its caller draws. No torch either:
scoring a stored run needs no model.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from treegen.errors import RunError
from treegen.results import Completion
from treegen.runs import RunDir
from treegen.tasks.account import Account, add_up, stored_parts
from treegen.tasks.execution import Judging, executing
from treegen.tasks.job import Job, fit_job
from treegen.tasks.report import Report, ReportOptions
from treegen.tasks.settings import stored_choices
from treegen.tasks.verdict import SampleScore, Verdict

if TYPE_CHECKING:
    from treegen.engine import LLM, Stream


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is.

    done, planned: samples. rows: decoded at once now. tokens: decoded since this part began,
    `seconds` ago; where nothing is decoded, prompt tokens computed. accuracy: share of right
    samples so far, None where none is judged.
    """

    done: int
    planned: int
    rows: int
    pages: int
    num_pages: int
    tokens: int
    seconds: float
    accuracy: float | None

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens over the time of this part."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def sample(
    job: Job,
    run: RunDir,
    llm: "LLM",
    *,
    stop: Callable[[], object] = lambda: None,
    judging: Judging | None = None,
) -> Iterator[Progress]:
    """Draw the samples that a run lacks and store each as it ends; yields after every step.

    stop: polled after every step; once it returns something true, the iteration ends. What had
    finished by then, or before an error, is in the run. judging: judges programs meanwhile.
    """
    if run.missing <= 0:
        return
    job = fit_job(job, llm.tokenizer, llm.spec)
    if job.choices:
        # It uses this module's names.
        from treegen.tasks.likelihood import sample_choices

        yield from sample_choices(job, run, llm, stop=stop)
        return
    account = Account(run)
    tally = _tally(job, judging)
    if tally:
        for record in run.records():
            tally.add(record)
    with llm.stream(job.tree, job.settings.sampling, skip=set(run.done)) as stream:
        prompts = _Prompts(stream)
        account.begin(stream.usage)
        start = time.monotonic()
        try:
            while stream.has_work and not stop():
                for completion in stream.step():
                    record = prompts.record(completion, tokens=job.settings.log_tokens)
                    job.mark(record)
                    run.append(record)
                    account.count()
                    if tally:
                        tally.add(record)
                if judging:
                    judging.poll()
                account.save()
                yield Progress(
                    done=len(run.done),
                    planned=run.info.planned,
                    rows=stream.scheduler.live.num_active,
                    pages=llm.cache.pool.num_used,
                    num_pages=llm.cache.pool.num_pages,
                    tokens=stream.usage.decoded_tokens,
                    seconds=time.monotonic() - start,
                    accuracy=tally.accuracy if tally else None,
                )
        except BaseException:
            # What went wrong first is what the user must hear of, as on a full disk.
            with suppress(RunError):
                account.save(now=True)
            raise
        run.sync()
        account.save(now=True)


def score(job: Job, run: RunDir, judging: Judging | None = None) -> Report:
    """Judge every stored sample of a run; of programs, take the verdicts that there are."""
    problems = {problem.id: problem for problem in job.data.problems}
    scores = []
    for record in run.records():
        verdicts: Mapping[str, Verdict] | None
        if judging:
            verdicts = judging.verdicts(record)
        else:
            verdicts = job.task.score(problems[record["problem_id"]], record["text"])
        if verdicts is not None:
            scores.append(
                SampleScore(
                    problem_id=record["problem_id"],
                    sample_index=record["sample_index"],
                    finish_reason=record["finish_reason"],
                    verdicts=verdicts,
                )
            )
    settings = job.settings
    options = ReportOptions(
        problem_ids=list(problems),
        num_samples=settings.num_samples,
        num_fewshot=job.data.num_fewshot,
        pass_ks=settings.pass_ks,
        maj_ks=settings.maj_ks,
        problems=job.data.problems,
    )
    return job.task.aggregate(scores, options)


def write_results(
    job: Job, run: RunDir, judging: Judging | None = None
) -> tuple[dict[str, Any], Report | None]:
    """Write results.json from the samples of a run; returns its content, and the report.

    There is no report on programs that are not judged.
    """
    unjudged = executing(job.task) is not None and judging is None
    report = score(job, run, judging) if job.settings.score and not unjudged else None
    unshared = kept = shortened = 0
    for record in run.records():
        shortened += "dropped" in record
        unshared += record["prompt_tokens"]
        kept += record["num_tokens"]
    info, parts = run.info, stored_parts(run)
    results = {
        "complete": run.missing == 0,
        "planned": info.planned,
        "done": len(run.done),
        "task": {"name": job.task.name, "version": job.task.version, "source": job.data.source},
        "model": dict(info.identity["model"]),
        "settings": stored_choices(info),
        "fingerprint": info.fingerprint,
        "versions": dict(info.versions),
        "skipped": [
            {"source": row.source, "line": row.line, "reason": row.reason}
            for row in job.data.skipped
        ],
        "shortened": shortened,
        "usage": add_up(parts, num_samples=len(run.done), unshared=unshared, kept=kept),
        "report": report.to_json() if report else None,
        "parts": parts,
    }
    if judging:
        results["judging"] = judging.summary()
    run.write_results(results)
    return results, report


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
        if tokens:
            record["tokens"] = list(completion.tokens)
        return record


def _tally(job: Job, judging: Judging | None) -> "Tally | Judging | None":
    """Return what counts right samples; None where they are not scored now."""
    if judging or not job.settings.score:
        return judging
    return None if executing(job.task) else Tally(job)


class Tally:
    """How many samples are right, by the task's first filter."""

    def __init__(self, job: Job) -> None:
        """Nothing is judged yet."""
        self._job = job
        self._problems = {problem.id: problem for problem in job.data.problems}
        self._judged = self._right = 0

    def add(self, record: dict[str, Any]) -> None:
        """Judge a stored sample."""
        verdicts = self._job.task.score(self._problems[record["problem_id"]], record["text"])
        self._judged += 1
        self._right += verdicts[self._job.task.filters[0]].correct

    @property
    def accuracy(self) -> float | None:
        """Share of right samples; None before the first."""
        return self._right / self._judged if self._judged else None
