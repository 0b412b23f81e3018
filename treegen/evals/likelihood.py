"""Runs by likelihood: the sample of a problem is the likeliest of its choices after its prompt.

Nothing is drawn, so a problem has one sample. Records, resuming, scoring and reports are as with
sampling.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from treegen.errors import CapacityError, NumericsError, RunError
from treegen.evals.account import Account
from treegen.evals.choices import ChoicePrompt, choice_prompts, common_length, num_distinct
from treegen.evals.job import Job
from treegen.evals.progress import AccuracySoFar, Glance, Progress
from treegen.evals.timeline import Timeline
from treegen.outputs import Score, Usage
from treegen.prompts.tree import Node
from treegen.runs import RunDir

if TYPE_CHECKING:
    from treegen.llm import LLM
    from treegen.prompts.radix import Tokens

# A prefix that one call shares with the next is worth keeping if it has this many tokens.
_MIN_KEPT: Final = 64
# New tokens per call, in prefill chunks: enough to fill the GPU, few enough to stop soon.
_CHUNKS: Final = 2
_NONE: Final = np.zeros(0, dtype=np.int32)


def sample_choices(
    job: Job, run: RunDir, llm: "LLM", *, stop: Callable[[], object] = lambda: None
) -> Iterator[Progress]:
    """Score the choices of the problems that a run lacks; store the likeliest of each problem.

    stop: polled after every call of a few thousand tokens; see `treegen.evals.run.sample`.
    """
    choices, score = job.choices, job.settings.score
    done = {problem_id for problem_id, _ in run.done}
    prompts = [p for p in choice_prompts(job.tree, choices, llm.tokenizer) if p.id not in done]
    tally = AccuracySoFar(job)
    if score:
        for record in run.records():
            tally.add(record)
    usage = Usage(page_size=llm.cache.page_size, num_pages=llm.cache.pool.num_pages)
    account = Account(run)
    account.begin(usage)
    timeline = Timeline(run.path, len(account.parts) - 1)
    started, glance, interval = len(run.done), Glance(), None
    try:
        for chunk, scores in _scored(prompts, llm, usage):
            for prompt, its_scores in zip(chunk, scores, strict=True):
                record = _record(prompt, choices[prompt.id], its_scores, job.settings.log_tokens)
                job.mark(record)
                run.append(record)
                account.count()
                if score:
                    tally.add(record)
            account.save()
            if glance(now=len(run.done) == run.info.planned):
                interval = tally.estimate()
            now = Progress(
                done=len(run.done),
                planned=run.info.planned,
                rows=0,
                pages=llm.cache.pool.num_used,
                num_pages=llm.cache.pool.num_pages,
                tokens=usage.prompt_tokens_computed,
                seconds=usage.seconds,
                accuracy=tally.accuracy,
                started=started,
                estimate=interval,
            )
            timeline.note(now, last=now.done == now.planned)
            yield now
            if stop():
                break
    except BaseException:
        # The user must see the first error, such as a full disk, and not one that follows from it.
        with suppress(RunError):
            account.save(now=True)
        raise
    finally:
        timeline.close()
    run.sync()
    account.save(now=True)


def _scored(
    prompts: Sequence[ChoicePrompt], llm: "LLM", usage: Usage
) -> Iterator[tuple[list[ChoicePrompt], list[list[Score]]]]:
    """Yield chunks of prompts with the scores of their choices; add to `usage` what they cost.

    A prefix that a chunk shares with the next, such as a subject's examples, is kept for both.
    """
    chunks = _chunks(prompts, _CHUNKS * llm.prefill_chunk)
    held = _NONE
    with ExitStack() as shelf:
        for chunk, following in pairwise([*chunks, []]):
            start = time.monotonic()
            wanted = _shared(chunk[-1], following[0]) if following else _NONE
            if len(wanted) and not _covers(held, wanted):
                shelf.close()
                held = _NONE
                # A prefix that is too long to be kept is computed for each chunk.
                with suppress(CapacityError):
                    kept = shelf.enter_context(llm.keep(Node(wanted.tolist())))
                    usage.prompt_tokens_computed += kept.usage.prompt_tokens_computed
                    held = wanted
            scores = iter(llm.score([pair for prompt in chunk for pair in prompt.pairs()]))
            all_tokens = [whole for prompt in chunk for whole in prompt.whole]
            usage.prompt_tokens_computed += num_distinct([*all_tokens, held]) - len(held)
            usage.prompt_tokens_reused += len(held)
            usage.prefill_steps += 1
            if not len(wanted):
                shelf.close()
                held = _NONE
            usage.seconds += time.monotonic() - start
            usage.prefill_seconds = usage.seconds
            yield chunk, [[next(scores) for _ in prompt.whole] for prompt in chunk]


def _chunks(prompts: Sequence[ChoicePrompt], budget: int) -> list[list[ChoicePrompt]]:
    """Cut prompts into chunks: after `budget` new tokens, and where prompts share much less."""
    chunks: list[list[ChoicePrompt]] = []
    size, shared = budget, 0
    for before, prompt in zip([None, *prompts], prompts, strict=False):
        common = common_length(before.context, prompt.context) if before else 0
        if size >= budget or (shared >= _MIN_KEPT and common < shared // 2):
            chunks.append([])
            size, shared = 0, 0
        if before and chunks[-1]:
            shared = min(shared, common) if shared else common
        chunks[-1].append(prompt)
        size += num_distinct(prompt.whole) - common
    return chunks


def _shared(last: ChoicePrompt, first: ChoicePrompt) -> "Tokens":
    """Return the prefix of two prompts that is worth keeping from one to the next; may be empty."""
    # It is less than a whole prompt, because the last token of a prompt must give logits.
    limit = min(len(last.context), len(first.context)) - 1
    length = min(limit, common_length(last.context, first.context))
    return first.context[:length] if length >= _MIN_KEPT else _NONE


def _covers(held: "Tokens", wanted: "Tokens") -> bool:
    common = common_length(held, wanted)
    return common == len(held) > 0 and len(wanted) - common < _MIN_KEPT


def _record(
    prompt: ChoicePrompt, choices: Sequence[str], scores: Sequence[Score], log_tokens: bool
) -> dict[str, Any]:
    """Return the line of samples.jsonl for one problem; of equally likely choices, the first."""
    logprobs = [score.logprob for score in scores]
    if not all(map(math.isfinite, logprobs)):
        raise NumericsError(
            f"the model gives the choices of problem {prompt.id!r} the log-probabilities "
            f"{logprobs}; check the weights or use dtype float32"
        )
    best = max(range(len(choices)), key=logprobs.__getitem__)
    tokens = prompt.context.astype("<i4").tobytes()
    record: dict[str, Any] = {
        "problem_id": prompt.id,
        "sample_index": 0,
        "text": choices[best],
        "num_tokens": len(scores[best].tokens),
        "logprob": logprobs[best],
        "choice_logprobs": logprobs,
        "finish_reason": "stop",
        "prompt_hash": hashlib.blake2b(tokens, digest_size=16).hexdigest(),
        "prompt_tokens": len(prompt.context),
        "choice_tokens": prompt.num_tokens - len(prompt.context),
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }
    if log_tokens:
        record["tokens"] = list(scores[best].tokens)
    return record
