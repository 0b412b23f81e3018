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
"""

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from treegen.evals.chat import Turn
from treegen.evals.problem import Problem
from treegen.evals.selection import select
from treegen.evals.statistics.metrics import Report, ReportOptions
from treegen.evals.statistics.tables import by_decile, problem_values, table_by
from treegen.evals.task import TaskData, TaskOptions
from treegen.evals.verdict import SampleScore, Verdict
from treegen.tasks.common.text_task import TextTask, greedy
from treegen.tasks.needle.options import ARGUMENT, NeedleOptions, fit_length, measure_of
from treegen.tasks.needle.text import (
    COLOURS,
    Document,
    check_absent,
    draw_colours,
    draw_names,
    insert,
    load_haystack,
)

_MARKED: Final = re.compile(r"###(.*?)###")
_COLOUR: Final = re.compile(rf"\b(?:{'|'.join(COLOURS)})\b")


@dataclass(frozen=True, slots=True)
class _Dogs:
    """The dogs, numbered in their order in the text."""

    names: tuple[str, ...]  # their names
    colours: Mapping[int, str]  # the colour of each number
    shots: tuple[int, ...]  # the numbers of dogs in solved questions
    targets: tuple[int, ...]  # the numbers of dogs in the questions of the run

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
        """Return question and answer as a solved example."""
        return _ask(self.question(index)), f"###{self.answer(index)}###"


class Needle(TextTask):
    """Dogs and the colours of their fur, all in one document.

    Two filters read the same texts. `strict-match`, the headline, is Hydragen's: it uses the exact
    text between the first two ###. `flexible-extract` uses the first colour in the answer.
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
        "tokenizer": ARGUMENT,
    }

    def load(self, options: TaskOptions) -> TaskData:
        """Hide the needles in the text. The seed decides the dogs, colours and places.

        Raises:
            InputError: An option is invalid.
            DataError: The haystack cannot be read, or mentions named dogs itself.
        """
        arguments = NeedleOptions(options, self.name, self.arguments)
        num = arguments.whole("questions", 256, 1, 10_000)
        length = arguments.whole("length", 80_000, 1, 10**9)
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
        shown = "".join(f"{question} {answered}\n\n" for question, answered in solved)
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
            fewshot=f"{text}{shown}",
            num_fewshot=num_shots,
            turns=tuple(
                (f"{text}{question}" if number == 0 else question, answered)
                for number, (question, answered) in enumerate(solved)
            ),
        )

    def ask(self, problem: Problem) -> str:
        """Return the question, up to where its answer begins."""
        return _ask(problem.question)

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
        (_, most), *_ = Counter(problem.answer for problem in options.problems).most_common(1)
        share = most / len(options.problems)
        constant = self.metric_row("constant_answer", "none", options, value=share)
        groups = by_decile({problem.id: problem.metadata["depth"] for problem in options.problems})
        values = problem_values(scores, self.filters[0])
        table = table_by(f"Accuracy by depth ({self.filters[0]})", "Depth", groups, values)
        return replace(report, metrics=(*report.metrics, constant), tables=(table,))


def _ask(question: str) -> str:
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
