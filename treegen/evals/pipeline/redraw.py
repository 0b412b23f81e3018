"""Draws random samples of a run again, and compares them with the stored ones.

The chosen samples are left out of a copy of the run, which is then resumed. So they are drawn as
the run drew them: by the same prompts, seeds, budgets and stops.

A sample uses one random number for each token, which picks a token in the cumulative distribution
of the model. If the random number is so close to the boundary between two tokens that rounding may
move the boundary past it, the two tokens are nearly tied. From there on, an honest sample may part
from its redraw.
"""

import math
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from treegen.common.params import SamplingParams
from treegen.errors import InputError, ModelError, arg
from treegen.evals.identity import computed_on
from treegen.evals.job import Job, PreparedJob
from treegen.evals.model import load_llm, weights_fingerprint
from treegen.evals.pipeline.listener import Listener
from treegen.evals.sampling import sample
from treegen.model.options import EngineOptions
from treegen.prompts.plan.plan import Request
from treegen.prompts.token_text import PARTIAL, Detokenizer
from treegen.runs import Key, RunDir, RunSettings, versions

if TYPE_CHECKING:
    from treegen.llm.base import BaseLLM

_TOLERANCES: Final = {"float32": 1e-3}
_TOLERANCE: Final = 0.1  # of number formats with 16 bits or fewer
_MOST_PARTED: Final = 0.5
_BACK: Final = 4  # tokens before the first one that disagrees with a text whose tokens are unknown
_EXACT: Final = (
    "seed",
    "text",
    "num_tokens",
    "finish_reason",
    "stop",
    "prompt_hash",
    "prompt_tokens",
    "thinking",
    "dropped",
    "images",
    "choice_tokens",
    "choice_greedy",
)


# Numbers of a record that rounding changes, and the field with the number of tokens that they are a
# sum over; None for means.
_NUMBERS: Final = {
    "logprob": "num_tokens",
    "choice_logprobs": "choice_tokens",
    "confidence": None,
    "self_certainty": None,
}


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
    parted: tuple[Key, ...]
    """The samples that part from the stored ones at a near-tie."""
    differing: tuple[tuple[Key, str], ...]
    """The other samples, and what differs."""
    largest: float
    """The largest difference of a sample's log-probability over the square root of its tokens,
    among the same samples."""

    @property
    def holds(self) -> bool:
        """Whether no sample differs, and at most half of the samples part at near-ties."""
        most = math.ceil(_MOST_PARTED * (len(self.same) + len(self.parted)))
        return not self.differing and len(self.parted) <= most

    def __str__(self) -> str:
        num = len(self.same) + len(self.parted) + len(self.differing)
        how = "are equal to the bit"
        if self.tolerance is not None:
            how = (
                f"have the same tokens, and log-probabilities within {self.tolerance:g} times the "
                f"square root of the number of tokens (largest difference {self.largest:.2g})"
            )
        text = (
            f"{len(self.same):,} of {num:,} {how}; {len(self.parted):,} diverge at a near-tie; "
            f"chosen by seed {self.seed}"
        )
        if self.differing:
            (name, index), why = self.differing[0]
            text += (
                f"; {len(self.differing):,} differ, such as problem {name!r:.80}, sample {index}: "
                f"{why}"
            )
        elif not self.holds:
            text += "; in honest runs, fewer than half of the samples diverge"
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
    default = _TOLERANCES.get(prepared.facts.dtype, _TOLERANCE)
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
        drawn = _draw(run, _record_tokens(prepared), llm, chosen, listener)
        comparison = _Comparison(prepared, llm, 0.0 if tolerance is None else tolerance)
        same, parted, differing, largest = [], [], list[tuple[Key, str]](), 0.0
        for key in sorted(chosen):
            if key not in drawn:
                differing.append((key, "it was not drawn again"))
                continue
            why, distance = comparison.compare(stored[key], drawn[key])
            if not why:
                same.append(key)
                largest = max(largest, distance)
            elif not is_exact and comparison.parts_at_near_tie(stored[key], drawn[key]):
                parted.append(key)
            else:
                differing.append((key, why))
    finally:
        llm.close()
    return Redraw(
        seed=seed,
        tolerance=None if is_exact else tolerance,
        default_tolerance=default,
        same=tuple(same),
        parted=tuple(parted),
        differing=tuple(differing),
        largest=largest,
    )


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
            f"differ; name the right one with {arg('model=')}"
        )


def pair_requests(prepared: PreparedJob) -> dict[str, tuple[Request, SamplingParams]]:
    """Return the request and the parameters of each problem, by id; empty if choices are scored."""
    drawing, requests = prepared.job.drawing, prepared.plan.requests
    if prepared.job.choices:
        return {}
    params = drawing if isinstance(drawing, list) else [drawing] * len(requests)
    return {request.id: (request, one) for request, one in zip(requests, params, strict=True)}


def _key(record: Mapping[str, Any]) -> Key:
    return record["problem_id"], record["sample_index"]


def _is_exact(run: RunDir, job: Job, prepared: PreparedJob) -> bool:
    """Return whether this machine draws the samples of a run to the bit."""
    from treegen.evals.identity import run_settings

    if not job.settings.engine.reproducible or prepared.facts.device_type == "cpu":
        return False
    now = run_settings(
        job,
        dtype=prepared.facts.dtype,
        fingerprint="",
        device_type=prepared.facts.device_type,
        quantization=prepared.facts.quantization,
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
        with listener.poll_interrupts() as stop:
            listener.track(sample(prepared, copy, llm, stop=stop), "redraw")
        return {_key(record): record for record in copy.records() if _key(record) in chosen}


class _Comparison:
    """Compares stored samples with redrawn ones."""

    def __init__(self, prepared: PreparedJob, llm: "BaseLLM", tolerance: float) -> None:
        self._job, self._llm, self._tolerance = prepared.job, llm, tolerance
        self._decode = Detokenizer(llm.tokenizer).text
        self._ends = {*llm.spec.eos_token_ids}
        self._requests = pair_requests(prepared)

    def compare(self, stored: Mapping[str, Any], drawn: Mapping[str, Any]) -> tuple[str, float]:
        """Return what differs, or an empty text and the distance of the log-probabilities."""
        for name in _EXACT:
            if stored.get(name) != drawn.get(name):
                return f"{name} {stored.get(name)!r:.80} / {drawn.get(name)!r:.80}", 0.0
        if "tokens" in stored and stored["tokens"] != drawn["tokens"]:
            return "its tokens", 0.0
        distance = 0.0
        for name in _NUMBERS:
            old, new = (list(_numbers(record.get(name))) for record in (stored, drawn))
            if len(old) != len(new) or [a is None for a in old] != [b is None for b in new]:
                return f"{name} is missing, or has other parts", 0.0
            count = _NUMBERS[name]
            scale = math.sqrt(max(1, drawn.get(count, 1))) if count else 1.0
            for a, b in zip(old, new, strict=True):
                gap = 0.0 if a is None or b is None else abs(a - b) / scale
                if not gap <= self._tolerance:
                    return f"{name} {a} / {b}", 0.0
                distance = max(distance, gap)
        return "", distance

    def parts_at_near_tie(self, stored: Mapping[str, Any], drawn: Mapping[str, Any]) -> bool:
        """Return whether a redrawn sample parts from the stored one where two tokens nearly tie.

        Only the token at which they part is compared. What follows cannot be.
        """
        if any(stored.get(name) != drawn.get(name) for name in ("seed", "prompt_hash")):
            return False
        if not isinstance(stored.get("text"), str):  # edited by hand
            return False
        if self._job.choices:
            return self._is_tie_of_choices(stored, drawn)
        request, params = self._requests[drawn["problem_id"]]
        tokens, kept = drawn["tokens"], stored.get("tokens")
        stop: str | int | None = stored["stop"]
        text: str = stored["text"].lstrip()
        if stop is not None and stop not in {*self._ends, *params.stop_token_ids, *params.stops}:
            return False
        whole = f"{text}{stop}" if isinstance(stop, str) else text

        def read(some: Sequence[int]) -> str:
            return self._decode(request.tokens, some).rstrip(PARTIAL).lstrip()

        def agrees(some: Sequence[int]) -> bool:
            """Return whether the stored sample may begin with these tokens."""
            added = read(some)
            return whole.startswith(added) or (isinstance(stop, str) and added.startswith(whole))

        if kept is not None:
            size = self._llm.spec.vocab_size
            are_tokens = all(type(token) is int and 0 <= token < size for token in kept)
            if not (are_tokens and len(kept) == stored["num_tokens"] and agrees(kept)):
                return False
            pairs = enumerate(zip(tokens, kept, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), None)
            is_whole = read(kept).startswith(text.rstrip(PARTIAL))
            return at is not None and is_whole and kept[at] in self._near(drawn, at)

        def may_follow(other: int, at: int) -> bool:
            if other in self._ends or stop == other:  # it adds no text
                return stop == other and read(tokens[:at]) == text
            return agrees([*tokens[:at], other])

        last = next((i for i in range(len(tokens)) if not agrees(tokens[: i + 1])), len(tokens) - 1)
        return any(
            may_follow(other, at)
            for at in range(last, max(-1, last - _BACK), -1)
            for other in self._near(drawn, at)
        )

    def _is_tie_of_choices(self, stored: Mapping[str, Any], drawn: Mapping[str, Any]) -> bool:
        """Return whether two choices are about equally likely, and everything else is the same."""
        old, new = stored["choice_logprobs"], drawn["choice_logprobs"]
        most = self._tolerance * math.sqrt(max(1, drawn["choice_tokens"]))
        if len(old) != len(new) or any(abs(a - b) > most for a, b in zip(old, new, strict=True)):
            return False
        candidates = self._job.choices[stored["problem_id"]].candidates
        if stored["text"] not in candidates or drawn["text"] not in candidates:
            return False
        a, b = (float(new[candidates.index(record["text"])]) for record in (stored, drawn))
        return bool(stored["text"] != drawn["text"]) and abs(a - b) <= 2 * most

    def _near(self, drawn: Mapping[str, Any], at: int) -> Iterator[int]:
        """Yield the tokens other than the drawn one that rounding could have drawn at a place."""
        request, params = self._requests[drawn["problem_id"]]
        if params.penalties or params.structure or params.max_thinking_tokens is not None:
            return  # then a draw depends on more than the text before it
        one = replace(
            params,
            max_tokens=1,
            min_tokens=int(at < params.min_tokens),
            stop=(),
            reasoning_tags=None,
            confidence=0,
            self_certainty=False,
            logprobs=self._llm.spec.vocab_size,
            logprobs_mode="processed_logprobs" if params.temperature else "raw_logprobs",
        )
        ids = [*request.tokens.tolist(), *drawn["tokens"][:at]]
        ((completion,),) = self._llm.generate([ids], one, progress=False)
        logprobs = dict(completion.top_logprobs[0])
        mine = drawn["tokens"][at]
        if params.temperature == 0:
            near = (t for t, p in logprobs.items() if p >= logprobs[mine] - 2 * self._tolerance)
            yield from (token for token in near if token != mine)
            return
        weights = {token: math.exp(logprobs[token]) for token in sorted(logprobs)}
        point = random_number(drawn["seed"], at) * math.fsum(weights.values())
        # Scaled logits that move by up to x move a share of the distribution by up to tanh(x / 2).
        margin = math.tanh(self._tolerance / params.temperature / 2)
        if params.top_p < 1 or params.top_k or params.min_p:  # the last token that is kept may go
            margin += min(weight for weight in weights.values() if weight > 0)
        start = 0.0
        for token, weight in weights.items():
            if token != mine and weight > 0 and start - margin <= point <= start + weight + margin:
                yield token
            start += weight


def _numbers(value: Any) -> Iterator[float | None]:
    """Yield a number, or the numbers in a list or a mapping."""
    if isinstance(value, Mapping):
        yield from (value[name] for name in sorted(value))
    elif isinstance(value, list):
        yield from value
    else:
        yield value


def random_number(seed: int, step: int) -> float:
    """Return the random number with which a sample draws a token, as `uniforms` of `treegen.ops`.

    Args:
        seed: The seed of the sample.
        step: The number of tokens that it has drawn before.
    """
    number = (seed + (step + 1) * 0x9E3779B97F4A7C15) % 2**64
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB % 2**64
    return ((number ^ (number >> 31)) >> 11) * 2.0**-53
