"""Likelihood runs: the sample of a problem is the likeliest of its choices after its prompt.

Nothing is drawn, so a problem has one sample. Records, resuming, scoring and reports work as with
sampling.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from treegen.common.outputs import Score
from treegen.errors import NumericsError, RunError
from treegen.evals.job import PreparedJob
from treegen.evals.multiple_choice import ChoicePrompt
from treegen.evals.progress.run_progress import RunProgress, UpdateTimer
from treegen.evals.progress.timeline import Timeline
from treegen.evals.sample_recorder import SampleRecorder

if TYPE_CHECKING:
    from treegen.llm.base import BaseLLM


def sample_choices(
    prepared: PreparedJob,
    recorder: SampleRecorder,
    llm: "BaseLLM",
    *,
    stop: Callable[[], object] = lambda: None,
) -> Iterator[RunProgress]:
    """Score the choices of a run's missing problems and store the likeliest of each problem.

    Args:
        prepared: The job of the run, with the tokens and the plan of its prompts.
        recorder: Stores the records in the run.
        llm: The model that scores the choices.
        stop: Called after every step; see `treegen.evals.sampling.sample`.

    Yields:
        The progress of the run after every step.
    """
    job, run, account = prepared.job, recorder.run, recorder.account
    problems, tally = job.choices, recorder.tally
    done = {problem_id for problem_id, _ in run.done}
    prompts = [prompt for prompt in prepared.choice_prompts if prompt.id not in done]
    started, start, glance, interval = len(run.done), time.monotonic(), UpdateTimer(), None
    stopped = False
    with (
        closing(recorder),
        closing(Timeline(run.path, len(account.parts))) as timeline,
        llm.score_plan(prepared.plan_for(llm, prompts)) as stream,
    ):
        account.begin(stream.usage, workers=stream.workers)
        waiting = _Waiting(prompts)
        try:
            while stream.has_work and not stopped:
                stopped = bool(stop())
                for prompt, scores in waiting.add(stream.step()):
                    record = _record(
                        prompt, problems[prompt.id].candidates, scores, job.settings.log_tokens
                    )
                    if job.task_requests is not None:
                        record["choice_greedy"] = [score.is_greedy for score in scores]
                    recorder.add(record)
                account.save()
                last = stopped or not stream.has_work
                if glance(now=last):
                    interval = tally.estimate() if tally else None
                status = stream.status()
                now = RunProgress(
                    done=len(run.done),
                    planned=run.info.planned,
                    rows=0,
                    pages=status.pages,
                    num_pages=status.num_pages,
                    tokens=stream.usage.prompt_tokens_computed,
                    seconds=time.monotonic() - start,
                    accuracy=tally.accuracy if tally else None,
                    started=started,
                    estimate=interval,
                    workers=stream.workers(),
                )
                timeline.note(now, last=last)
                yield now
        except BaseException:
            # The user must see the first error, such as a full disk, not its consequences.
            with suppress(RunError):
                account.save(now=True)
            raise
    run.sync()
    account.save(now=True)


class _Waiting:
    """Prompts whose choices have not all been scored."""

    def __init__(self, prompts: Sequence[ChoicePrompt]) -> None:
        self._of_pair = [prompt for prompt in prompts for _ in prompt.whole]
        self._first = dict[str, int]()
        for index, prompt in enumerate(self._of_pair):
            self._first.setdefault(prompt.id, index)
        self._scores: dict[str, dict[int, Score]] = {prompt.id: {} for prompt in prompts}

    def add(self, pairs: Sequence[tuple[int, Score]]) -> Iterator[tuple[ChoicePrompt, list[Score]]]:
        """Add the scores of pairs and yield the prompts whose choices are now all scored."""
        for index, score in pairs:
            prompt = self._of_pair[index]
            scores = self._scores[prompt.id]
            scores[index - self._first[prompt.id]] = score
            if len(scores) == len(prompt.whole):
                yield prompt, [scores[choice] for choice in range(len(scores))]


def _record(
    prompt: ChoicePrompt, candidates: Sequence[str], scores: Sequence[Score], log_tokens: bool
) -> dict[str, Any]:
    """Return the line of samples.jsonl for one problem; of equally likely choices, the first."""
    logprobs = [score.logprob for score in scores]
    if not all(map(math.isfinite, logprobs)):
        raise NumericsError(
            f"the model gives the choices of problem {prompt.id!r} the log-probabilities "
            f"{logprobs}; check the weights or use dtype float32"
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
