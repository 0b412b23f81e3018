"""Follows a stored sample past the tokens at which its redraw diverges from it at a near-tie.

A sample uses one random number for each token, which picks a token in the cumulative distribution
of the model. If the random number is so close to the boundary between two tokens that rounding may
move the boundary past it, the two tokens are nearly tied, and an honest sample may diverge from its
redraw. The sample is then drawn once more, with its tokens up to the near-tie given and all others
drawn, so that what follows is compared too.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from treegen.common.params import SamplingParams
from treegen.evals.job import PreparedJob
from treegen.evals.sampling import RecordMaker
from treegen.prompts.token_text import PARTIAL, Detokenizer
from treegen.runs import Key

if TYPE_CHECKING:
    from treegen.llm.base import BaseLLM

Record = Mapping[str, Any]
Branch = tuple[int, ...]
"""The first tokens of a sample. The last token nearly ties with another one."""

MAX_TIE_SHARE: Final = 0.02
"""The largest share of an honest sample's tokens at which it diverges from its redraws. 120 samples
drawn in float32 and redrawn in bfloat16 diverged at 0.25% of their tokens."""
_ALWAYS_ALLOWED_TIES: Final = 2  # of a sample of any length
_MAX_TIES: Final = 64  # of one sample, because each near-tie takes another redraw
_MAX_BRANCHES: Final = 8  # continuations of a sample whose tokens are not stored
_MAX_TOKENS_BACK: Final = 4  # before the first token that disagrees with a stored text
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


def max_ties(num_tokens: int) -> int:
    """Return at how many near-ties an honest sample of this length may diverge from its redraw."""
    return _ALWAYS_ALLOWED_TIES + math.ceil(MAX_TIE_SHARE * num_tokens)


def compare_records(stored: Record, redrawn: Record, tolerance: float) -> tuple[str, float]:
    """Return what differs, or an empty text and the distance of the log-probabilities.

    Args:
        stored: The record of a sample.
        redrawn: The record of its redraw.
        tolerance: By how much log-probabilities may differ; see `redraw_samples`.
    """
    for name in _EXACT:
        if stored.get(name) != redrawn.get(name):
            return f"{name} {stored.get(name)!r:.80} / {redrawn.get(name)!r:.80}", 0.0
    if "tokens" in stored and stored["tokens"] != redrawn["tokens"]:
        return "other tokens", 0.0
    distance = 0.0
    for name, count in _NUMBERS.items():
        old, new = (list(_numbers(record.get(name))) for record in (stored, redrawn))
        if [*map(_is_number, old)] != [*map(_is_number, new)]:
            return f"{name} is missing, or has other parts", 0.0
        scale = math.sqrt(max(1, redrawn.get(count, 1))) if count else 1.0
        for a, b in zip(old, new, strict=True):
            gap = abs(a - b) / scale if _is_number(a) else 0.0
            if not gap <= tolerance:
                return f"{name} {a} / {b}", 0.0
            distance = max(distance, gap)
    return "", distance


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(value: Any) -> Iterator[Any]:
    """Yield a number, or the numbers in a list or a mapping."""
    if isinstance(value, Mapping):
        yield from (value[name] for name in sorted(value))
    elif isinstance(value, list):
        yield from value
    else:
        yield value


@dataclass(frozen=True, slots=True)
class NearTieResult:
    """What following a sample past its near-ties has shown."""

    num_ties: int
    """The near-ties at which it diverges from its redraws."""
    why: str
    """What differs apart from them; empty if nothing does."""
    distance: float = 0.0
    """As from `compare_records`."""


class NearTies:
    """Follows stored samples past near-ties."""

    def __init__(self, prepared: PreparedJob, llm: "BaseLLM", tolerance: float) -> None:
        """Take a job that stores tokens, its model, and the tolerance of log-probabilities."""
        self._prepared, self._llm, self._tolerance = prepared, llm, tolerance
        self._decode = Detokenizer(llm.tokenizer).text
        self._ends = {*llm.spec.eos_token_ids}
        self._requests = prepared.pair_requests()
        self._records = RecordMaker(prepared.plan, prepared.job)

    def follow(
        self, stored: Mapping[Key, Record], redraws: Mapping[Key, Record]
    ) -> dict[Key, NearTieResult]:
        """Return for each sample whether it differs from its redraws only at near-ties.

        Args:
            stored: The stored records that differ from their redraws.
            redraws: Their redraws.
        """
        if self._prepared.job.choices:
            return {key: self._follow_choice(stored[key], redraws[key]) for key in stored}
        done = {
            key: NearTieResult(0, self._compare(stored[key], redraws[key])[0]) for key in stored
        }
        open_branches = [
            (key, branch)
            for key in stored
            for branch in self._find_branches(stored[key], redraws[key], 0)[:_MAX_BRANCHES]
        ]
        for num_ties in range(1, _MAX_TIES + 1):
            if not open_branches:
                break
            redrawn = self._draw(open_branches)
            holding: dict[Key, NearTieResult] = {}
            for (key, _), record in zip(open_branches, redrawn, strict=True):
                why, distance = self._compare(stored[key], record)
                if not why:
                    holding[key] = NearTieResult(num_ties, "", distance)
                elif done[key].num_ties < num_ties:  # the branch that agrees most
                    done[key] = NearTieResult(num_ties, f"after near-ties, {why}")
            done |= holding
            following = defaultdict[Key, list[Branch]](list)
            for (key, branch), record in zip(open_branches, redrawn, strict=True):
                if key not in holding and num_ties < max_ties(record["num_tokens"]):
                    following[key] += self._find_branches(stored[key], record, len(branch))
            open_branches = [
                (key, branch)
                for key, branches in following.items()
                for branch in branches[:_MAX_BRANCHES]
            ]
        return done

    def _compare(self, stored: Record, redrawn: Record) -> tuple[str, float]:
        return compare_records(stored, redrawn, self._tolerance)

    def _draw(self, branches: Sequence[tuple[Key, Branch]]) -> list[dict[str, Any]]:
        """Return the records of samples with given first tokens and all others drawn."""
        requests, all_params = [], []
        for number, ((problem, index), branch) in enumerate(branches):
            request, params = self._requests[problem]
            requests.append(
                replace(
                    request,
                    id=str(number),
                    samples=1,
                    rows=1,
                    origin=request.origin or request.id,
                    first=request.first + index,
                    forced=branch,
                )
            )
            all_params.append(params)
        model_info, llm = self._prepared.model_info, self._llm
        plan = llm.adopt_plan(model_info.plan(requests), model_info)
        with llm.start_plan(plan, all_params) as stream:
            completions = {int(completion.prompt_id): completion for completion in stream}
            stream.check_complete()
        named = (
            replace(completions[number], prompt_id=problem, sample_index=index)
            for number, ((problem, index), _) in enumerate(branches)
        )
        return [self._records.record(completion) for completion in named]

    def _find_branches(self, stored: Record, redrawn: Record, start: int) -> list[Branch]:
        """Return the ways in which a stored sample may diverge from a redraw at a near-tie.

        Args:
            stored: The record of the sample.
            redrawn: The record of the redraw.
            start: The first position at which they may diverge.
        """
        if any(stored.get(name) != redrawn.get(name) for name in ("seed", "prompt_hash")):
            return []
        tokens, stored_tokens = redrawn["tokens"], stored.get("tokens")
        if not isinstance(stored_tokens, list):
            branches = sorted(
                self._find_branches_by_text(stored, redrawn, start), key=lambda pair: -pair[0]
            )
            return [branch for _, branch in branches]
        pairs = enumerate(zip(tokens, stored_tokens, strict=False))
        at = next((position for position, (a, b) in pairs if a != b), None)
        if (
            at is None
            or at < start
            or stored_tokens[at] not in self._list_near_tokens(redrawn, [at])[0]
        ):
            return []
        return [(*tokens[:at], int(stored_tokens[at]))]

    def _find_branches_by_text(
        self, stored: Record, redrawn: Record, start: int
    ) -> Iterator[tuple[int, Branch]]:
        """Yield what `_find_branches` returns for a sample whose text alone is known.

        Yields:
            The length of the text that the tokens of a branch have in common with the sample, and
            the branch.
        """
        request, _ = self._requests[redrawn["problem_id"]]
        tokens, text, stop = redrawn["tokens"], stored.get("text"), stored.get("stop")
        if not isinstance(text, str) or not isinstance(stop, str | int | None):
            return  # it was edited by hand
        text = text.lstrip()
        full_text = f"{text}{stop}" if isinstance(stop, str) else text

        def read(some: Sequence[int]) -> str:
            return self._decode(request.tokens, some).rstrip(PARTIAL).lstrip()

        def agrees(added: str) -> bool:
            """Return whether the stored sample may begin with a text."""
            return full_text.startswith(added) or (
                isinstance(stop, str) and added.startswith(full_text)
            )

        def may_follow(before: str, added: str, other: int) -> bool:
            """Return whether a near token may continue a text in the stored sample.

            Args:
                before: The text before the token.
                added: The text with the token.
                other: The token.
            """
            if other in self._ends or stop == other:  # it adds no text
                return stop == other and before == text
            following = full_text[len(before) : len(before) + 1]
            if added == before and before and following.isascii():
                return False  # it begins a character of several bytes, which does not follow
            return agrees(added)

        positions = range(len(tokens))
        first = bisect_left(positions, True, key=lambda at: not agrees(read(tokens[: at + 1])))
        last = min(first, len(tokens) - 1)
        last_positions = range(last, max(start - 1, last - _MAX_TOKENS_BACK), -1)
        for at, near in zip(
            last_positions, self._list_near_tokens(redrawn, last_positions), strict=True
        ):
            before = read(tokens[:at])
            for other in near:
                added = read([*tokens[:at], other])
                if may_follow(before, added, other):
                    yield len(added), (*tokens[:at], other)

    def _follow_choice(self, stored: Record, redrawn: Record) -> NearTieResult:
        """Return whether two choices are about equally likely, and everything else is the same."""
        why = self._compare(stored, redrawn)[0]
        candidates = self._prepared.job.choices[redrawn["problem_id"]].candidates
        if stored["text"] not in candidates or stored["text"] == redrawn["text"]:
            return NearTieResult(0, why)
        new = redrawn["choice_logprobs"]
        new_logprob, old_logprob = (
            float(new[candidates.index(one["text"])]) for one in (redrawn, stored)
        )
        of_text = {name: stored.get(name) for name in ("text", "num_tokens", "tokens")}
        reason, distance = self._compare(stored, {**redrawn, **of_text, "logprob": old_logprob})
        max_distance = self._tolerance * math.sqrt(max(1, redrawn["choice_tokens"]))
        if reason or abs(new_logprob - old_logprob) > 2 * max_distance:
            return NearTieResult(0, why)
        return NearTieResult(1, "", distance)

    def _list_near_tokens(self, redrawn: Record, positions: Sequence[int]) -> list[list[int]]:
        """Return for each position the tokens other than the drawn one that rounding could draw."""
        request, params = self._requests[redrawn["problem_id"]]
        if params.penalties or params.structure or params.max_thinking_tokens is not None:
            return [[] for _ in positions]  # then a draw depends on more than the text before it
        one = replace(
            params,
            max_tokens=1,
            min_tokens=0,
            stop=(),
            reasoning_tags=None,
            confidence=0,
            self_certainty=False,
            logprobs=self._llm.spec.vocab_size,
            logprobs_mode="processed_logprobs" if params.temperature else "raw_logprobs",
        )
        all_params = [replace(one, min_tokens=int(at < params.min_tokens)) for at in positions]
        prompt = request.tokens.tolist()
        prompts = [[*prompt, *redrawn["tokens"][:at]] for at in positions]
        found = self._llm.generate(prompts, all_params, progress=False)
        return [
            self._select_near_tokens(redrawn, at, params, dict(completion.top_logprobs[0]))
            for at, (completion,) in zip(positions, found, strict=True)
        ]

    def _select_near_tokens(
        self, redrawn: Record, at: int, params: SamplingParams, logprobs: Mapping[int, float]
    ) -> list[int]:
        """Return the near tokens at a position, given the log-probabilities of all tokens there."""
        redrawn_token = redrawn["tokens"][at]
        if params.temperature == 0:
            near = (
                t for t, p in logprobs.items() if p >= logprobs[redrawn_token] - 2 * self._tolerance
            )
            return [token for token in near if token != redrawn_token]
        weights = {token: math.exp(logprobs[token]) for token in sorted(logprobs)}
        point = random_number(redrawn["seed"], at) * math.fsum(weights.values())
        # Scaled logits that move by up to x move a share of the distribution by up to tanh(x / 2).
        margin = math.tanh(self._tolerance / params.temperature / 2)
        if params.top_p < 1 or params.top_k or params.min_p:  # the last token that is kept may go
            margin += min(weight for weight in weights.values() if weight > 0)
        near_tokens, begin = [], 0.0
        for token, weight in weights.items():
            if (
                token != redrawn_token
                and weight > 0
                and begin - margin <= point <= begin + weight + margin
            ):
                near_tokens.append(token)
            begin += weight
        return near_tokens


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
