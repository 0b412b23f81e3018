"""A language model, letter by letter, that plays make-the-target puzzles and judges states.

It has no idea which step is good: legal steps are equally likely, wrong ones now and then. Its
judgements are mostly right. So sampling whole solutions rarely works, and searching does.
"""

from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache

from toy_search import ToyBackend, ToyModel, run_all

from treegen.common.outputs import Status, WorkerStatus
from treegen.common.params import SamplingParams
from treegen.evals.search.searcher import TaskSearch
from treegen.search.budget import Budget
from treegen.search.tree.node import Search
from treegen.search.tree.result import SearchResult
from treegen.tasks.puzzles.base import WORTH
from treegen.tasks.puzzles.puzzle import (
    Number,
    PuzzleState,
    PuzzleStep,
    apply_steps,
    moves,
    reachable,
    state_of,
    step_line,
    value_label,
)

LETTERS = "0123456789 +-*/=():\n" + "".join(sorted(set("left" + "".join(WORTH))))


def solutions(
    state: PuzzleState, target: Number, *, whole: bool
) -> Iterator[tuple[PuzzleStep, ...]]:
    """Yield every way to the target, as steps."""
    if len(state) == 1:
        if state[0] == target:
            yield ()
        return
    for step in moves(state, whole=whole):
        if reachable(step.left, target, whole):
            for rest in solutions(step.left, target, whole=whole):
                yield (step, *rest)


@cache
def puzzle_model(*, mistakes: float = 0.1, right: float = 0.95, whole: bool = True) -> ToyModel:
    """mistakes: weight of a wrong line beside one of a legal step. right: share of judgements."""

    def weights(text: str) -> list[float]:
        block = text[text.rindex("\n\n", 0, _head(text)) + 2 :]
        head, *lines = block.split("\n")
        numbers = state_of([int(word) for word in head.split(":")[1].split()])
        target = int(lines[0].split(":")[1])
        rest = "\n".join(lines[1:])
        if rest.startswith("Judge:"):
            verdict = value_label(numbers, target, whole=whole)
            answers = {f" {word}\0": (1 - right) / 2 for word in WORTH}
            answers[f" {verdict}\0"] = right
            return _next(answers, rest.removeprefix("Judge:"))
        typed = rest.partition(":\n")[2]
        before, _, line = typed.rpartition("\n")
        if rest.startswith("Possible"):
            written = before.split("\n") if before else []
            options = {
                each: weight
                for each, weight in _lines(numbers, mistakes, whole).items()
                if each[:-1] not in written
            }
            return _next(options if len(written) < 6 and options else {"\n": 1.0}, line)
        state = apply_steps(numbers, before, whole=whole) if before else numbers
        if state is None or len(state) == 1:
            return _next({"\0": 1.0}, "")
        return _next(_lines(state, mistakes, whole), line)

    return ToyModel(LETTERS, lru_cache(maxsize=1 << 15)(weights))


def _head(text: str) -> int:
    return max(text.rfind("\nInput:"), text.rfind("\nNumbers:")) + 1


@cache
def _lines_of(state: PuzzleState, mistakes: float, whole: bool) -> tuple[tuple[str, float], ...]:
    legal = moves(state, whole=whole)
    wrong = [replace(step, c=step.c + 1) for step in legal[:3]]
    return tuple(
        [(step_line(step) + "\n", 1.0) for step in legal]
        + [(step_line(step) + "\n", mistakes) for step in wrong]
    )


def _lines(state: PuzzleState, mistakes: float, whole: bool) -> dict[str, float]:
    return dict(_lines_of(state, mistakes, whole))


def _next(texts: dict[str, float], typed: str) -> list[float]:
    """Weights of the next letter of one of these texts; a \\0 ends it."""
    found: defaultdict[str, float] = defaultdict(float)
    for text, weight in texts.items():
        if text.startswith(typed) and len(text) > len(typed):
            found[text[len(typed)]] += weight
    if not found:
        found["\0"] = 1.0
    return [found["\0"], *(found[letter] for letter in LETTERS)]


class Results:
    """What a stream of searches is to the runner."""

    def __init__(self, results: Generator[SearchResult, None, None], num_begun: int) -> None:
        self._results, self.num_unknown = results, num_begun
        self._found: list[SearchResult] = []
        self.has_work = True

    def workers(self) -> tuple[WorkerStatus, ...]:
        return ()

    def status(self) -> Status:
        return Status(rows=0, pages=0, num_pages=1)

    def __iter__(self) -> Iterator[SearchResult]:
        while self.has_work:
            self.step()
            yield from self.take_results()

    def step(self) -> None:
        try:
            self._found.append(next(self._results))
            self.num_unknown -= 1
        except StopIteration:
            self.has_work = False

    def take_results(self) -> list[SearchResult]:
        found, self._found = self._found, []
        return found

    def close(self) -> None:
        self._results.close()


@dataclass
class ToyLLM:
    """What the runner needs of an LLM; begun: the searches that were started."""

    model: ToyModel
    begun: list[str] = field(default_factory=list)

    def search_stream(
        self,
        fn: TaskSearch,
        problems: Sequence[tuple[str, str]],
        params: SamplingParams,
        *,
        concurrency: int,
        budget: Budget,
    ) -> Results:
        return Results(self._results(fn, problems, params, budget), len(problems))

    def _results(
        self,
        fn: TaskSearch,
        problems: Sequence[tuple[str, str]],
        params: SamplingParams,
        budget: Budget,
    ) -> Generator[SearchResult, None, None]:
        for name, prompt in problems:
            self.begun.append(name)
            search = Search(ToyBackend(self.model), prompt, name=name, params=params, budget=budget)
            yield from run_all([search], fn)
