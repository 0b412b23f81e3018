"""A language model over a few letters, and searches over it.

The model is a function from a text to the probabilities of the next letter, so what a search
should find can be worked out by listing every continuation. The backend decodes as an engine does:
token by token, all that is asked for side by side, budgets checked at each step.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from treegen.common.outputs import Completion, FinishReason, Score
from treegen.common.params import SamplingParams
from treegen.prompts.plan.draws import row_seed
from treegen.prompts.tree import Parts
from treegen.search.backend import BackendSample, Context
from treegen.search.budget import Budget, SearchUsage
from treegen.search.budgeted_search import BudgetedSearch
from treegen.search.evaluate import Evaluate, by_function
from treegen.search.propose import Propose
from treegen.search.tree.node import Search, SearchNode
from treegen.search.tree.result import SearchOutcome, SearchResult

EOS = 0

Weights = Callable[[str], Sequence[float]]


@dataclass(frozen=True)
class ToyModel:
    """Token t > 0 is letters[t - 1]; token 0 ends a text.

    weights: of the tokens after a text, [1 + len(letters)], in any scale.
    """

    letters: str
    weights: Weights

    def probabilities(self, text: str, temperature: float = 1.0) -> list[float]:
        weights = self.weights(text)
        assert len(weights) == len(self.letters) + 1
        return list(_normalize(tuple(weights), temperature))

    def text(self, tokens: Sequence[int]) -> str:
        return "".join(self.letters[token - 1] for token in tokens if token != EOS)

    def tokens(self, text: str) -> list[int]:
        return [self.letters.index(letter) + 1 for letter in text]

    def continuations(self, text: str, max_tokens: int) -> Iterator[tuple[str, float]]:
        """Every way on to the end of the text or to max_tokens, with its probability."""
        todo: list[tuple[str, float, int]] = [("", 1.0, 0)]
        while todo:
            so_far, chance, length = todo.pop()
            if length == max_tokens:
                yield so_far, chance
                continue
            for token, each in enumerate(self.probabilities(text + so_far)):
                if each and token == EOS:
                    yield so_far, chance * each
                elif each:
                    letter = self.letters[token - 1]
                    todo.append((so_far + letter, chance * each, length + 1))


@lru_cache(maxsize=1 << 14)
def _normalize(weights: tuple[float, ...], temperature: float) -> tuple[float, ...]:
    """Probabilities in proportion to weights at a temperature."""
    if temperature == 0:
        best = max(range(len(weights)), key=lambda token: weights[token])
        return tuple(float(token == best) for token in range(len(weights)))
    scaled = [weight ** (1 / temperature) for weight in weights]
    total = sum(scaled)
    return tuple(weight / total for weight in scaled)


def hashed(letters: str, *, salt: object = 0, eos: float = 0.0) -> ToyModel:
    """A model without any pattern; eos: probability that a text ends."""

    def weights(text: str) -> list[float]:
        digest = hashlib.blake2b(f"{salt}\0{text}".encode(), digest_size=len(letters)).digest()
        drawn = [1 + byte for byte in digest]
        return [eos, *(weight * (1 - eos) / sum(drawn) for weight in drawn)]

    return ToyModel(letters, weights)


@dataclass(eq=False)
class ToyContext:
    text: str
    num_tokens: int
    to_compute: int


@dataclass
class ToyBackend:
    """drawn: (key, index) of every finished sample. calls: texts that samples were asked after."""

    model: ToyModel
    drawn: list[tuple[str, int]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    live: set[Context] = field(default_factory=set)
    cancelled: set[BudgetedSearch] = field(default_factory=set)

    def _context(self, text: str, num_tokens: int, to_compute: int) -> ToyContext:
        context = ToyContext(text, num_tokens, to_compute)
        self.live.add(context)
        return context

    def prompt(self, content: str | Sequence[int], usage: SearchUsage) -> Context:
        text = content if isinstance(content, str) else self.model.text(content)
        usage.tokens_prefilled += len(text)
        return self._context(text, len(text), 0)

    def extend(self, context: Context, content: str | Parts) -> Context:
        assert isinstance(context, ToyContext) and isinstance(content, str)
        num = len(content)
        return self._context(
            context.text + content, context.num_tokens + num, context.to_compute + num
        )

    async def sample(
        self,
        context: Context,
        key: str,
        indices: range,
        params: SamplingParams,
        search: BudgetedSearch,
        *,
        continues: bool = False,
    ) -> Sequence[BackendSample | None]:
        assert isinstance(context, ToyContext) and context in self.live
        self._compute(context, search)
        self.calls.append(context.text)
        seeds = {index: row_seed(params.seed, key, index) for index in indices}
        tokens: dict[int, list[int]] = {index: [] for index in indices}
        logprobs: dict[int, list[float]] = {index: [] for index in indices}
        written = dict.fromkeys(indices, "")
        finished: dict[int, BackendSample] = {}
        while len(finished) < len(indices):
            await asyncio.sleep(0)
            for index in indices:
                if search in self.cancelled or index in finished:
                    continue
                text = context.text + written[index]
                number = _number(seeds[index], len(tokens[index]))
                plain = drawn = self.model.probabilities(text)
                if params.temperature != 1:
                    drawn = self.model.probabilities(text, params.temperature)
                token = _draw(drawn, number)
                tokens[index].append(token)
                written[index] += self.model.text([token])
                logprobs[index].append(math.log(plain[token]))
                search.usage.tokens_decoded += 1
                end = _ending(written[index], tokens[index], params)
                if end is not None:
                    reason, stop, own = end
                    done = Completion(
                        key,
                        index,
                        seeds[index],
                        own,
                        tuple(tokens[index]),
                        tuple(logprobs[index]),
                        reason,
                        stop,
                    )
                    length = context.num_tokens + len(tokens[index])
                    finished[index] = BackendSample(
                        done, self._context(context.text + own, length, 0)
                    )
                    self.drawn.append((key, index))
                limit = search.budget.tokens
                if limit is not None and search.usage.tokens_decoded >= limit:
                    search.stop(search.budget.describe_limit("tokens"))
            if search in self.cancelled:
                break
        return [finished.get(index) for index in indices]

    async def score(
        self, context: Context, texts: Sequence[str], search: BudgetedSearch
    ) -> list[Score]:
        assert isinstance(context, ToyContext) and context in self.live
        self._compute(context, search)
        await asyncio.sleep(0)
        scores = []
        for text in texts:
            tokens = self.model.tokens(text)
            rows = [
                self.model.probabilities(context.text + text[:place]) for place in range(len(text))
            ]
            logprobs = [math.log(row[token]) for row, token in zip(rows, tokens, strict=True)]
            greedy = all(row[token] == max(row) for row, token in zip(rows, tokens, strict=True))
            scores.append(Score(tuple(tokens), tuple(logprobs), greedy))
            search.usage.tokens_prefilled += len(tokens)
        return scores

    def release(self, context: Context) -> None:
        self.live.remove(context)

    def cancel(self, search: BudgetedSearch) -> None:
        self.cancelled.add(search)

    def _compute(self, context: ToyContext, search: BudgetedSearch) -> None:
        search.usage.tokens_prefilled += context.to_compute
        context.to_compute = 0


@lru_cache(maxsize=1 << 14)
def _number(seed: int, place: int) -> float:
    """The random number that draws one token."""
    return random.Random(f"{seed}/{place}").random()


def _draw(probabilities: Sequence[float], number: float) -> int:
    for token, probability in enumerate(probabilities):
        number -= probability
        if number < 0 and probability > 0:
            return token
    return max(token for token, probability in enumerate(probabilities) if probability > 0)


def _ending(
    text: str, tokens: Sequence[int], params: SamplingParams
) -> tuple[FinishReason, str | int | None, str] | None:
    if tokens[-1] == EOS:
        return "stop", EOS, text
    if tokens[-1] in params.stop_token_ids:
        return "stop", tokens[-1], text[:-1]
    for stop in params.stops:
        if text.endswith(stop):
            return "stop", stop, text if params.include_stop else text[: -len(stop)]
    if len(tokens) == params.max_tokens:
        return "length", None, text
    return None


def start(
    model: ToyModel,
    prompt: str = "",
    *,
    name: str = "toy",
    params: SamplingParams | None = None,
    budget: Budget | None = None,
) -> tuple[Search, ToyBackend]:
    """A search that has not begun, and its backend."""
    backend = ToyBackend(model)
    return Search(backend, prompt, name=name, params=params, budget=budget), backend


def run(search: Search, fn: Callable[[SearchNode], Awaitable[object]]) -> SearchResult:
    """Run one search to its end; a failure is raised."""

    async def whole() -> object:
        return await fn(search.root)

    return SearchResult.of(search, asyncio.run(whole()), None)


def run_all(
    searches: Sequence[Search], fn: Callable[[SearchNode], Awaitable[object]]
) -> list[SearchResult]:
    """Run searches side by side; a failure is kept in the result of its search."""

    async def one(search: Search) -> SearchResult:
        try:
            return SearchResult.of(search, await fn(search.root), None)
        except Exception as error:
            return SearchResult.of(search, None, error)

    async def whole() -> list[SearchResult]:
        return await asyncio.gather(*map(one, searches))

    return asyncio.run(whole())


# Trees whose right answers can be listed

T = TypeVar("T")
MODEL = hashed("abc")
Strategy = Callable[[SearchNode], Awaitable[SearchOutcome]]


def moves(letters: str, visited: list[str] | None = None) -> Propose:
    """Every letter as a next step; `visited` takes up where it was asked."""

    async def propose(node: SearchNode) -> list[SearchNode]:
        if visited is not None:
            visited.append(node.path_text)
        return [node.extend(letter) for letter in letters]

    return propose


def table(values: dict[str, float], default: float = 0.0) -> Evaluate:
    return by_function(lambda node: values.get(node.path_text, default))


def at_length(length: int) -> Callable[[SearchNode], bool]:
    return lambda node: len(node.path_text) == length


def find(fn: Callable[[SearchNode], Awaitable[T]], model: ToyModel = MODEL, **options: Any) -> T:
    """What a function, such as a strategy, returns at a fresh root."""
    found: list[T] = []

    async def keep(root: SearchNode) -> None:
        found.append(await fn(root))

    run(start(model, **options)[0], keep)
    return found[0]


def texts(nodes: Sequence[SearchNode]) -> list[str]:
    return [node.path_text for node in nodes]
