"""The make-the-target puzzles: their base class, prompts that judge states, and Countdown."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from treegen.common.params import SamplingParams
from treegen.errors import InputError, arg
from treegen.evals.arguments import check_arguments
from treegen.evals.chat import Turn
from treegen.evals.problem import Problem
from treegen.evals.search.task import SearchDefaults, SearchTask
from treegen.evals.selection import select
from treegen.evals.task import TaskData, TaskDefaults, TaskOptions
from treegen.evals.verdict import Verdict
from treegen.tasks.common.fewshot import pick_examples
from treegen.tasks.common.files import text_field
from treegen.tasks.common.sources import Source, row_id
from treegen.tasks.common.text_task import TextTask
from treegen.tasks.puzzles import puzzle as texts
from treegen.tasks.puzzles.puzzle import (
    Number,
    PuzzleState,
    PuzzleStep,
    is_legal,
    moves,
    state_of,
)

# Score of each judgement, as in the tree-of-thoughts paper.
WORTH: Final = {"sure": 20.0, "likely": 1.0, "impossible": 0.001}

_PROPOSE_HEADER: Final = "List steps that may help to reach the target, one a line."
_NUM_PROPOSED: Final = 6
_PROPOSED: Final[tuple[tuple[PuzzleState, int], ...]] = (((2, 6, 7, 13), 24), ((3, 5, 8), 16))
_JUDGED: Final[tuple[tuple[PuzzleState, int], ...]] = (
    ((10, 14), 24),
    ((11, 12), 24),
    ((4, 4, 10), 24),
    ((5, 9), 45),
    ((3, 7, 12), 50),
    ((2, 5, 8), 20),
    ((7, 13), 6),
    ((10, 10, 11), 24),
    ((4, 6), 30),
    ((17,), 17),
)


def puzzle_value_prompt(state: PuzzleState, target: Number, *, whole: bool) -> str:
    """Return the prompt for a judgement of a state, which ends where the judgement begins.

    Args:
        state: The numbers that are left.
        target: The number to reach.
        whole: Whether every result must be a non-negative integer.
    """
    blocks = [
        texts.value_block(numbers, goal, texts.value_label(numbers, goal, whole=whole))
        for numbers, goal in _JUDGED
    ]
    return texts.prompt(texts.VALUE_HEADER, blocks, texts.value_head(state, target))


def read_judgement(text: str) -> float:
    """Return the score of a judgement; 0 for a text that is not a judgement."""
    words = text.split(None, 1)
    return WORTH.get(words[0].rstrip(".").lower(), 0.0) if words else 0.0


def propose_prompt(state: PuzzleState, target: Number, *, whole: bool) -> str:
    """Return the prompt for a list of possible next steps, which ends where the list begins.

    Args:
        state: The numbers that are left.
        target: The number to reach.
        whole: Whether every result must be a non-negative integer.
    """
    blocks = []
    for numbers, goal in _PROPOSED:
        steps = moves(numbers, whole=whole)
        # Show steps from the whole list, because the first ones all combine the same two numbers.
        proposed = steps[:: max(1, len(steps) // _NUM_PROPOSED)][:_NUM_PROPOSED]
        blocks.append(_propose_head(numbers, goal) + "\n".join(map(texts.step_line, proposed)))
    return texts.prompt(_PROPOSE_HEADER, blocks, _propose_head(state, target))


def read_proposals(text: str, state: PuzzleState, *, whole: bool) -> list[str]:
    """Return the legal steps of an answer as lines with their newlines, without repeats.

    Args:
        text: The model's answer.
        state: The numbers that are left before the step.
        whole: Whether every result must be a non-negative integer.
    """
    proposals: dict[str, None] = {}
    for line in text.split("\n"):
        step = texts.read_step(line.strip())
        if step is not None and is_legal(state, step, whole=whole):
            proposals[f"{texts.step_line(step)}\n"] = None
    return list(proposals)


def _propose_head(numbers: Sequence[Number], target: Number) -> str:
    return f"Numbers: {texts.numbers_text(numbers)}\nTarget: {target}\nPossible next steps:\n"


if TYPE_CHECKING:
    from treegen.search.evaluate import Evaluate
    from treegen.search.propose import Propose
    from treegen.search.tree.node import SearchNode

# Deciding longer puzzles takes minutes, and their lines exceed the length of a step.
MAX_NUMBERS: Final = 6
_MAX_NUMBER: Final = 10**6
_LIST_TOKENS: Final = 320


@dataclass(frozen=True, slots=True)
class Puzzle:
    """A puzzle."""

    numbers: PuzzleState
    """The numbers to combine."""
    target: int
    """The number to reach."""
    steps: tuple[PuzzleStep, ...] = ()
    """A solution, if the data have one."""


class PuzzleTask(TextTask, SearchTask):
    """Combine numbers step by step until the target alone is left.

    A sample's answer is the number that is left after its steps. A sample has no answer if a step
    is illegal or more than one number is left.
    """

    filters = ("solved",)
    # Whether every result must be a non-negative integer.
    whole: ClassVar[bool]
    # The file of solved puzzles in treegen.tasks.data.
    examples: ClassVar[str]
    checkable: Final = True
    defaults: TaskDefaults = TaskDefaults(
        sampling=SamplingParams(temperature=0.7, max_tokens=128, stop=("\n\n",)),
        num_samples=40,
        num_fewshot=5,
    )
    search_defaults: SearchDefaults = SearchDefaults(
        method="tot-bfs",
        tokens=2000,
        depth=MAX_NUMBERS - 1,
        width=3,
        expand=4,
        step=SamplingParams(temperature=0.7, max_tokens=48, stop=("\n",), include_stop=True),
        solution=SamplingParams(temperature=0.7, max_tokens=128, stop=("\n\n",)),
        evaluator="judge",
        max_value=WORTH["sure"],
        propose=("list",),
        evaluate=("judge", "judge-sampled"),
        # A state that is "likely" to reach the target has three times this score.
        prune_below=WORTH["likely"] / 3,
    )

    def load(self, options: TaskOptions) -> TaskData:
        """Read puzzles and examples. A puzzle is never one of its own examples.

        Raises:
            InputError: An option is invalid, or there are too few examples.
            DataError: Puzzles or examples cannot be read, or an example is a problem.
        """
        check_arguments(self.name, options.extra, self.arguments)
        self.configure(options.extra)
        loaded, skipped, source = self.read(options)
        problems = select(loaded, options)
        examples = self._examples(options, problems)
        return TaskData(
            problems=problems,
            source=source,
            fewshot=texts.prompt(texts.SOLVE_HEADER, map(self.example, examples)),
            num_fewshot=len(examples),
            skipped=skipped,
            turns=self._turns(examples),
        )

    def head(self, puzzle: Puzzle) -> str:
        """Return the prompt's text of a puzzle, up to where its solution begins."""
        return texts.solve_head(puzzle.numbers, puzzle.target)

    def example(self, puzzle: Puzzle) -> str:
        """Return a puzzle with its solution."""
        return texts.solve_block(puzzle.numbers, puzzle.target, puzzle.steps)

    def ask(self, problem: Problem) -> str:
        """Return the text of a problem, up to where its solution begins."""
        return self.head(puzzle_of(problem))

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return the number left after the steps of a text, and whether it is the target."""
        answer = self.answer(problem, text)
        return {"solved": Verdict(answer, answer == problem.answer)}

    # Search

    def root(self, data: TaskData, problem: Problem) -> str:
        """Return the prompt up to where the steps begin."""
        puzzle = puzzle_of(problem)
        return data.fewshot + texts.solve_head(puzzle.numbers, puzzle.target)

    def state(self, problem: Problem, text: str) -> str | None:
        """Return the numbers that are left; None after an illegal or unfinished step."""
        numbers = self._remaining_numbers(problem, text)
        # A step without its newline is unfinished, unless one number is left.
        if numbers is None or (len(numbers) > 1 and text and not _ends_a_step(text)):
            return None
        return texts.numbers_text(numbers)

    def done(self, problem: Problem, text: str) -> bool:
        """Return whether one number is left."""
        numbers = self._remaining_numbers(problem, text)
        return numbers is not None and len(numbers) == 1

    def answer(self, problem: Problem, text: str) -> str | None:
        """Return the number that is left if there is only one; otherwise None."""
        numbers = self._remaining_numbers(problem, text)
        return str(numbers[0]) if numbers is not None and len(numbers) == 1 else None

    def is_solved(self, problem: Problem, text: str) -> bool:
        """Return whether the target alone is left after legal steps."""
        return self.answer(problem, text) == problem.answer

    def propose(self, problem: Problem, how: str) -> "Propose":
        """Return the proposer that asks the model for a list of steps.

        Args:
            problem: The puzzle.
            how: Name of the proposer: "list".
        """
        from treegen.search.propose import propose_lines

        async def propose(node: "SearchNode") -> Sequence["SearchNode"]:
            numbers = self._remaining_numbers(problem, node.path_text)
            if numbers is None:
                return []
            question = propose_prompt(numbers, int(problem.answer), whole=self.whole)
            ask = propose_lines(
                lambda _: question,
                lambda answer, _: read_proposals(answer, numbers, whole=self.whole),
                stop="\n\n",
                max_tokens=_LIST_TOKENS,
            )
            return await ask(node)

        return propose

    def evaluate(self, problem: Problem, how: str) -> "Evaluate":
        """Return the evaluator that asks the model whether the numbers can reach the target.

        Args:
            problem: The puzzle.
            how: Name of the evaluator. "judge" weighs the three judgements by the model's
                probabilities. "judge-sampled" draws three judgements, as the tree-of-thoughts paper
                does.
        """
        from treegen.search import evaluate

        def prompt_of(node: "SearchNode") -> str:
            numbers = self._remaining_numbers(problem, node.path_text)
            assert numbers is not None, "a judged node must be a puzzle state"
            return puzzle_value_prompt(numbers, int(problem.answer), whole=self.whole)

        if how == "judge":
            return evaluate.choice_scores(
                prompt_of, {f" {word}": worth for word, worth in WORTH.items()}
            )
        return evaluate.value_prompt(prompt_of, read_judgement, n=3)

    def _turns(self, examples: Sequence[Puzzle]) -> tuple[Turn, ...]:
        turns = []
        for number, puzzle in enumerate(examples):
            head = self.head(puzzle)
            question = head if number else texts.prompt(texts.SOLVE_HEADER, (), head)
            turns.append((question, self.example(puzzle).removeprefix(head).lstrip(" ")))
        return tuple(turns)

    def _remaining_numbers(self, problem: Problem, text: str) -> PuzzleState | None:
        return texts.apply_steps(puzzle_of(problem).numbers, text, whole=self.whole)

    def _examples(self, options: TaskOptions, problems: Sequence[Problem]) -> list[Puzzle]:
        if options.fewshot_data is not None:
            raise InputError(
                f"{self.name} does not draw examples at random; pass solved puzzles with "
                f"{arg('fewshot_file')}"
            )
        return pick_examples(
            options,
            {(problem.question, problem.answer): problem.id for problem in problems},
            self.defaults.num_fewshot,
            self._read_solved,
            key=lambda puzzle: (texts.numbers_text(puzzle.numbers), str(puzzle.target)),
            bundled=self.examples,
        )

    def _read_solved(self, row: dict[str, Any]) -> Puzzle:
        numbers, target = read_puzzle(row)
        lines = text_field(row, "solution").strip().split("\n")
        if texts.apply_steps(numbers, "\n".join(lines), whole=self.whole) != (target,):
            raise ValueError("the solution does not reach the target; fix the steps")
        steps = tuple(step for step in map(texts.read_step, lines) if step is not None)
        return Puzzle(numbers, target, steps)


def read_puzzle(row: dict[str, Any]) -> tuple[PuzzleState, int]:
    """Return a row's numbers and target.

    Raises:
        ValueError: The row is not a usable puzzle.
    """
    numbers, target = row.get("numbers"), row.get("target")
    if not isinstance(numbers, list) or not all(map(_is_integer, numbers)):
        raise ValueError(f"numbers is not a list of integers from 0 to {_MAX_NUMBER:,}")
    if not 2 <= len(numbers) <= MAX_NUMBERS:
        raise ValueError(f"numbers must have 2 to {MAX_NUMBERS} entries, not {len(numbers)}")
    if target is None or not _is_integer(target):
        raise ValueError(f"target is not an integer from 0 to {_MAX_NUMBER:,}")
    return state_of(numbers), target


def as_problem(problem_id: str, numbers: PuzzleState, target: int, **metadata: Any) -> Problem:
    """Return a puzzle as a problem.

    Args:
        problem_id: Id of the problem.
        numbers: The numbers to combine.
        target: The number to reach.
        metadata: Metadata of the problem.
    """
    return Problem(problem_id, texts.numbers_text(numbers), str(target), metadata)


def puzzle_of(problem: Problem) -> Puzzle:
    """Return the puzzle of a problem."""
    return Puzzle(tuple(map(int, problem.question.split(" "))), int(problem.answer))


def _is_integer(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_NUMBER


def _ends_a_step(text: str) -> bool:
    # A blank line is not a step. It means that the model has given up.
    return text.endswith("\n") and not text.endswith("\n\n") and text != "\n"


class Countdown(PuzzleTask):
    """Puzzles with their own targets; results are non-negative integers.

    Data: JSON Lines, such as the puzzles that come with treegen:

        {"id": "countdown-0", "numbers": [4, 6, 6], "target": 18}
    """

    name = "countdown"
    source = Source(task="countdown", bundled="countdown_sample.jsonl")
    noun = "puzzle"
    whole = True
    examples = "countdown_fewshot.jsonl"

    def make_problem(self, row: dict[str, Any], line: int) -> Problem:
        """Return the puzzle of a row."""
        return as_problem(row_id(row, line, "countdown"), *read_puzzle(row), line=line)
