"""Needle in a haystack, in Hydragen's form: many dogs in one long text, and their colours.

The text is any file, or the bundled filler. Sentences such as

    The dog named Biscuit has fur that is brown.

are inserted at even distances, from its first sentence to its last. The prompt:

    Start of document:
    {text}
    End of document

    Question: What color is the fur of the dog named Pippin?
    Answer: ###White###

      ... five solved questions in all, whose dogs are in the text as well ...

    Question: What color is the fur of the dog named Biscuit?
    Answer:

The text and the solved questions are one node above all questions, so a document of any length is
computed and stored once. Differences from the original: no name is a prefix of another, no dog is
asked about twice, all colours are equally frequent, and the length is that of the whole text.

The other needle tasks share the options and the lengths of this module. Lengths are characters,
which need no tokenizer, or tokens of a tokenizer that the user names. `fit_length` finds the amount
of filler for a text of a certain length.
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from treegen.errors import InputError
from treegen.evals.arguments import check_arguments
from treegen.evals.chat import Turn
from treegen.evals.problem import Problem
from treegen.evals.selection import select
from treegen.evals.statistics.metrics import Report, ReportOptions
from treegen.evals.statistics.tables import by_decile, problem_values, table_by
from treegen.evals.task import TaskData, TaskOptions
from treegen.evals.verdict import SampleScore, Verdict
from treegen.tasks.common.text_task import TextTask, greedy
from treegen.tasks.needle.text import (
    COLOURS,
    Document,
    check_absent,
    draw_colours,
    draw_names,
    insert,
    load_haystack,
)

_INTEGER: Final = re.compile(r"[0-9]{1,12}")
_STEPS: Final = re.compile(r"([0-9]{1,12})-([0-9]{1,12})/([0-9]{1,4})")
# General options that no needle task uses, because needle tasks generate their problems.
_UNUSED_OPTIONS: Final = ("split", "fewshot_file", "fewshot_data")


def read_arguments(
    options: TaskOptions, task: TextTask, unused: Sequence[str] = ()
) -> Mapping[str, str]:
    """Return a needle task's own arguments, by name. Their values are checked when they are read.

    Args:
        options: Options of the run.
        task: The task.
        unused: General options that this task does not use, besides those of all needle tasks.

    Raises:
        InputError: An argument is unknown, or a general option is set that the task does not use.
    """
    check_arguments(task.name, options.extra, task.arguments)
    for name in (*_UNUSED_OPTIONS, *unused):
        if getattr(options, name) is not None:
            raise InputError(
                f"{name} is not supported with the task {task.name!r}, which generates its "
                f"problems; remove {name}"
            )
    return options.extra


def read_text(arguments: Mapping[str, str], name: str, default: str = "") -> str:
    """Return a text that is not blank.

    Args:
        arguments: The arguments, by name.
        name: Name of the argument.
        default: The text if the argument is not set.

    Raises:
        InputError: The argument is blank.
    """
    value = arguments.get(name, default)
    if not value.strip():
        raise InputError(f"task argument {name} must not be empty; pass a text, or remove {name}")
    return value


def read_int(arguments: Mapping[str, str], name: str, default: int, high: int) -> int:
    """Return a positive integer.

    Args:
        arguments: The arguments, by name.
        name: Name of the argument.
        default: The number if the argument is not set.
        high: The highest allowed number.

    Raises:
        InputError: The argument is not such a number.
    """
    (number,) = _numbers(name, [arguments.get(name, str(default))], 1, high)
    return number


def read_ints(
    arguments: Mapping[str, str], name: str, default: Sequence[int], low: int, high: int
) -> tuple[int, ...]:
    """Return ascending integers from "1000,2000", or 16 of them from "1000-16000/16".

    Args:
        arguments: The arguments, by name.
        name: Name of the argument.
        default: The numbers if the argument is not set.
        low: The lowest allowed number.
        high: The highest allowed number.

    Raises:
        InputError: The argument is not such a list.
    """
    if name not in arguments:
        return tuple(default)
    text = arguments[name].strip()
    words = text.split(",")
    if steps := _STEPS.fullmatch(text):
        first, last, num = (int(part) for part in steps.groups())
        if first >= last or num < 2:
            raise InputError(
                f"task argument {name} must count up in 2 steps or more, as in 1000-16000/16, "
                f"got {text!r}"
            )
        words = [str(round(first + (last - first) * i / (num - 1))) for i in range(num)]
    numbers = _numbers(name, words, low, high)
    if len(set(numbers)) < len(numbers):
        raise InputError(f"task argument {name} must not repeat a number, got {text!r}")
    return tuple(sorted(numbers))


def _numbers(name: str, words: Sequence[str], low: int, high: int) -> list[int]:
    # Only plain ASCII digits are valid. int() would also accept 1_000 and digits of other scripts.
    if not all(_INTEGER.fullmatch(word.strip()) for word in words):
        kind = "an integer" if len(words) == 1 else "comma-separated integers"
        raise InputError(f"task argument {name} must be {kind}, got {','.join(words)!r}")
    numbers = [int(word) for word in words]
    for number in numbers:
        if not low <= number <= high:
            raise InputError(
                f"task argument {name} must be from {low:,} to {high:,}, got {number:,}"
            )
    return numbers


TOKENIZER_HELP: Final = (
    "checkpoint or hub name; lengths are then tokens of its tokenizer (default: characters)"
)
SHORTEN_HINT: Final = (
    "shorten them with -T lengths=N,... (characters, or tokens of -T tokenizer=DIR)"
)
# Characters per token, to convert lengths. English has a little over four.
_CHARS_PER_TOKEN: Final = 4
_MAX_TRIES: Final = 40


@dataclass(frozen=True, slots=True)
class Measure:
    """A unit of length."""

    unit: str
    """Its name, in the plural."""
    count: Callable[[str], int]
    """Returns the length of a text."""
    per_token: int
    """Approximate number of units per token."""


def measure_of(arguments: Mapping[str, str]) -> Measure:
    """Return the unit of a task's lengths: tokens if `tokenizer` is set, otherwise characters.

    Raises:
        ModelError: The tokenizer cannot be loaded.
    """
    if "tokenizer" not in arguments:
        return Measure("characters", len, _CHARS_PER_TOKEN)
    name = read_text(arguments, "tokenizer").strip()
    # The import is slow, because of torch and transformers, and only lengths in tokens need it.
    from treegen.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(name)

    def count(text: str) -> int:
        return len(tokenizer(text, verbose=False)["input_ids"])

    return Measure("tokens", count, 1)


def fit_length(
    build: Callable[[int], str], measure: Measure, length: int, *, what: str, start: int = 0
) -> int:
    """Return a filler size, in characters, that makes a text close to `length` but not longer.

    Args:
        build: Makes the text for a filler size.
        measure: The unit of `length`.
        length: Maximum length of the text.
        what: The name of the text, for the error.
        start: Filler size to try first, such as that of a similar text. Default: an estimate.

    Raises:
        InputError: The text is longer than `length` without any filler.
    """
    empty = measure.count(build(0))
    if empty > length:
        raise InputError(
            f"{what} needs {empty:,} {measure.unit} without any filler, but the length is "
            f"{length:,}; raise the length, or hide fewer needles"
        )
    # Texts grow nearly in proportion to their filler. So each guess lies on the straight line from
    # the text without filler through the last try. It stays between the largest size that is known
    # to fit and the smallest size that is known to be too long.
    close = max(16, length // 1000)
    fits, used = 0, empty
    too_long: int | None = None
    rate = _CHARS_PER_TOKEN / measure.per_token
    guess = start or int((length - empty) * rate)
    for _ in range(_MAX_TRIES):
        if too_long is not None:
            guess = min(guess, too_long - 1)
        if guess <= fits or length - used <= close:
            break
        size = measure.count(build(guess))
        if size > length:
            too_long = guess
        else:
            fits, used = guess, size
        if size > empty:
            rate = guess / (size - empty)
        guess = int((length - empty) * rate) - (size > length)
        if too_long is not None and not fits < guess < too_long:
            guess = (fits + too_long) // 2
    return fits


_MARKED: Final = re.compile(r"###(.*?)###")
_COLOUR: Final = re.compile(rf"\b(?:{'|'.join(COLOURS)})\b")


@dataclass(frozen=True, slots=True)
class _Dogs:
    """The dogs, with indices in the order of the text."""

    names: tuple[str, ...]
    colours: Mapping[int, str]  # the colour of each index
    shots: tuple[int, ...]  # the indices of dogs in solved questions
    targets: tuple[int, ...]  # the indices of dogs in the questions of the run

    def needles(self) -> list[tuple[float, str]]:
        """Return (depth, sentence) of each dog."""
        last = max(1, len(self.names) - 1)
        return [
            (index / last, f"The dog named {name} has fur that is {self.colours[index]}.")
            for index, name in enumerate(self.names)
        ]

    def question(self, index: int) -> str:
        """Return the question about a dog."""
        return f"What color is the fur of the dog named {self.names[index]}?"

    def answer(self, index: int) -> str:
        """Return the right answer."""
        return self.colours[index].title()

    def build_example(self, index: int) -> Turn:
        """Return question and answer as a few-shot example."""
        return _format_question(self.question(index)), f"###{self.answer(index)}###"


class Needle(TextTask):
    """Dogs and the colours of their fur, all in one document.

    The filter `strict-match`, the headline, is Hydragen's: it uses the exact text between the first
    two ###. `flexible-extract` uses the first colour in the answer.
    """

    name = "needle"
    filters = ("strict-match", "flexible-extract")
    # Greedy and ten tokens, as published: enough for a colour, but not for a chain of thought. A
    # stop string begins a question that the model makes up, which no filter reads.
    defaults: Final = greedy(max_tokens=10, stop=("\n\n", "Question:"), num_fewshot=5)
    shorter: Final = "shorten the text with -T length=N (characters, or tokens of -T tokenizer=DIR)"
    arguments: ClassVar = {
        "questions": "number of dogs to ask about (default: 256)",
        "length": "length of the text with its needles (default: 80000, about 20,000 tokens)",
        "tokenizer": TOKENIZER_HELP,
    }

    def load(self, options: TaskOptions) -> TaskData:
        """Hide the needles in the text. The seed decides the dogs, their colours and their order.

        Raises:
            InputError: An option is invalid.
            DataError: The haystack cannot be read, or mentions named dogs itself.
        """
        arguments = read_arguments(options, self)
        num = read_int(arguments, "questions", 256, 10_000)
        length = read_int(arguments, "length", 80_000, 10**9)
        num_shots = options.num_fewshot
        if num_shots is None:
            num_shots = self.defaults.num_fewshot
        haystack = load_haystack(options.data)
        check_absent(haystack, "the dog named")
        dogs = _draw_dogs(random.Random(f"{self.name} {options.seed}"), num, num_shots)
        needles = dogs.needles()

        def hide(size: int) -> Document:
            return insert(haystack.take(size), needles)

        measure = measure_of(arguments)
        what = f"a text with {len(needles):,} needles"
        size = fit_length(lambda size: hide(size).text, measure, length, what=what)
        document = hide(size)
        text = f"Start of document:\n{document.text}\nEnd of document\n\n"
        solved = [dogs.build_example(index) for index in dogs.shots]
        examples = "".join(f"{question} {answered}\n\n" for question, answered in solved)
        problems = [
            Problem(
                id=f"needle-{number}",
                question=dogs.question(index),
                answer=dogs.answer(index),
                metadata={"depth": document.depth(index)},
            )
            for number, index in enumerate(dogs.targets)
        ]
        length_text = (
            "" if measure.unit == "characters" else f", {measure.count(document.text):,} tokens"
        )
        return TaskData(
            problems=select(problems, options),
            source=f"{len(needles):,} needles in {haystack.describe(size)}{length_text}",
            fewshot=f"{text}{examples}",
            num_fewshot=num_shots,
            turns=tuple(
                (f"{text}{question}" if number == 0 else question, answered)
                for number, (question, answered) in enumerate(solved)
            ),
        )

    def ask(self, problem: Problem) -> str:
        """Return the question, up to where its answer begins."""
        return _format_question(problem.question)

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return a verdict for each filter."""
        marked = _MARKED.search(text)
        strict = marked[1].strip().replace(",", "") if marked else ""
        # A question that a base model adds after the answer is not part of the answer.
        named = _COLOUR.search(text.partition("Question:")[0].casefold())
        flexible = named[0].title() if named else ""
        return {
            "strict-match": Verdict(strict or None, strict == problem.answer),
            "flexible-extract": Verdict(flexible or None, flexible == problem.answer),
        }

    def aggregate(self, scores: Sequence[SampleScore], options: ReportOptions) -> Report:
        """Return accuracy, also by depth, and the score of always giving the most frequent answer.

        The error bars are for other questions on this one document.
        """
        report = self.overall(scores, options)
        if not options.problems:
            return report
        share = max(Counter(p.answer for p in options.problems).values()) / len(options.problems)
        constant = self.metric_row("constant_answer", "none", options, value=share)
        groups = by_decile({problem.id: problem.metadata["depth"] for problem in options.problems})
        values = problem_values(scores, self.filters[0])
        table = table_by(f"Accuracy by depth ({self.filters[0]})", "Depth", groups, values)
        return replace(report, metrics=(*report.metrics, constant), tables=(table,))


def _format_question(question: str) -> str:
    return f"Question: {question}\nAnswer:"


def _draw_dogs(draw: random.Random, num: int, num_shots: int) -> _Dogs:
    names = draw_names(draw, num + num_shots)
    order = draw.sample(range(len(names)), len(names))
    shots, targets = order[:num_shots], order[num_shots:]
    # Balance the colours of solved and unsolved questions separately, so that answers do not follow
    # from the colours in the solved questions.
    colours = dict(zip(shots, draw_colours(draw, num_shots), strict=True))
    colours |= zip(targets, draw_colours(draw, num), strict=True)
    return _Dogs(tuple(names), colours, tuple(shots), tuple(targets))
