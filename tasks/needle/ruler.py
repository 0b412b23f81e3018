"""RULER's needle tests: magic numbers for made-up keys, hidden in essays, noise or other needles.

The tests are those of https://github.com/NVIDIA/RULER, with treegen's own words and filler. One
prompt, of niah_single_2:

    A special magic number is hidden within the following text. Make sure to memorize it. I will
    quiz you about the number afterwards.
    {text that says: One of the special magic numbers for brisk-lantern is: 5817204.}
    What is the special magic number for brisk-lantern mentioned in the provided text? The special
    magic number for brisk-lantern mentioned in the provided text is

The last sentence begins the answer. With a chat template it is part of the assistant's turn. The
length includes the prompt and the 128 generated tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Final

from treegen.errors import InputError
from treegen.evals.problem import Problem
from treegen.evals.selection import select
from treegen.evals.statistics.metrics import Report, ReportOptions, mean_row
from treegen.evals.statistics.tables import Table, by_decile, problem_values, table_by
from treegen.evals.task import TaskData, TaskOptions
from treegen.evals.verdict import SampleScore, Verdict
from treegen.prompts.tree import Node
from treegen.tasks.common.text_task import TextTask, greedy
from treegen.tasks.needle.options import (
    ARGUMENT,
    SHORTER,
    Measure,
    NeedleOptions,
    fit_length,
    measure_of,
)
from treegen.tasks.needle.ruler_items import RulerItem, Variant, find_values
from treegen.tasks.needle.text import Haystack, check_absent, load_haystack

_LENGTHS: Final = (16_000,)


class Ruler(TextTask):
    """One of RULER's needle tests; the subclasses define which.

    An answer is right if it contains every requested value, at any place. RULER's own metric,
    string_match_all, is the share of the values that it contains.
    """

    variant: Variant

    filters = ("contains-all",)
    defaults: Final = greedy(max_tokens=128)
    shorter: Final = SHORTER
    arguments: ClassVar = {
        "lengths": "lengths of prompt and answer: 16000,32000 or 8000-64000/8 (default: "
        + f"{','.join(map(str, _LENGTHS))}, about 4,000 tokens)",
        "questions": "problems of each length (default: 100; RULER has 500)",
        "tokenizer": ARGUMENT,
    }

    @property
    def name(self) -> str:
        """The name of the test."""
        return f"ruler-niah-{self.variant.name}"

    def load(self, options: TaskOptions) -> TaskData:
        """Return the problems of each length. Each has keys, values and places of its own.

        Raises:
            InputError: An option is invalid.
            DataError: The haystack cannot be read.
        """
        unused = () if self.variant.haystack == "essay" else ("data",)
        arguments = NeedleOptions(options, self.name, self.arguments, unused)
        self.check_no_examples(options)
        lengths = arguments.wholes("lengths", _LENGTHS, 1, 10**9)
        num = arguments.whole("questions", 100, 1, 100_000)
        haystack = load_haystack(options.data)
        check_absent(haystack, "special magic")
        measure = measure_of(arguments)
        problems = [
            problem
            for length in lengths
            for problem in self._problems(length, num, haystack, measure, options.seed)
        ]
        text_name = haystack.source if self.variant.haystack == "essay" else self.variant.haystack
        return TaskData(
            problems=select(problems, options),
            source=f"{num:,} prompts of each of {len(lengths)} lengths in {text_name}",
        )

    def _problems(
        self, length: int, num: int, haystack: Haystack, measure: Measure, seed: int
    ) -> Iterator[Problem]:
        answer_room = self.defaults.sampling.max_tokens * measure.per_token
        if length <= answer_room:
            raise InputError(
                f"length {length:,} leaves nothing for a prompt: the answer alone may take "
                f"{answer_room:,} {measure.unit}; ask for a longer text"
            )
        size = 0
        for number in range(num):
            item = RulerItem(self.variant, haystack, f"{self.name} {seed} {number}")
            # Prompts of one length need nearly the same filler.
            what = f"a prompt of {self.name}"
            size = fit_length(item.prompt, measure, length - answer_room, what=what, start=size)
            yield Problem(
                id=f"{self.name}-{length}-{number}",
                question=item.question(size),
                answer=" ".join(item.values),
                metadata={
                    "length": length,
                    "unit": measure.unit,
                    "depth": item.depth(size),
                    "reply": item.reply,
                },
            )

    def tree(self, data: TaskData, num_samples: int) -> Node:
        """Return all prompts as siblings, each with the beginning of its answer as a child."""
        return Node(
            children=[
                Node(
                    problem.question,
                    children=[
                        Node(
                            problem.metadata["reply"],
                            samples=num_samples,
                            id=problem.id,
                            metadata={"role": "assistant"},
                        )
                    ],
                )
                for problem in data.problems
            ]
        )

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return whether the text contains all values. The credit is the share that it contains."""
        wanted = problem.answer.split(" ")
        read = text.casefold()
        recalled = [value for value in wanted if value.casefold() in read]
        answer = " ".join(find_values(text, self.variant.values)) or " ".join(recalled)
        credit = len(recalled) / len(wanted)
        return {"contains-all": Verdict(answer or None, bool(answer) and credit == 1, credit)}

    def aggregate(self, scores: Sequence[SampleScore], options: ReportOptions) -> Report:
        """Return accuracy and string_match_all, also by length and, for one needle, by depth."""
        report = self.overall(scores, options)
        values = problem_values(scores, self.filters[0])
        mean = mean_row(list(values.values()))
        match = self.metric_row("string_match_all", self.filters[0], options, **mean)
        tables = _tables(options.problems, values) if options.problems else ()
        return replace(report, metrics=(match, *report.metrics), tables=tables)


def _tables(problems: Sequence[Problem], values: Mapping[str, float]) -> tuple[Table, ...]:
    lengths: dict[int, list[str]] = {}
    for problem in problems:
        lengths.setdefault(problem.metadata["length"], []).append(problem.id)
    unit = problems[0].metadata["unit"]
    groups = [(f"{length:,}", ids) for length, ids in sorted(lengths.items())]
    by_length = table_by("string_match_all by length", f"Length ({unit})", groups, values)
    depths = {problem.id: problem.metadata["depth"] for problem in problems}
    if None in depths.values():
        return (by_length,)
    return by_length, table_by("string_match_all by depth", "Depth", by_decile(depths), values)


class Single1(Ruler):
    """One number in noise: passkey retrieval."""

    variant = Variant("single-1", haystack="noise")


class Single2(Ruler):
    """One number in an essay: the plain needle test."""

    variant = Variant("single-2")


class Single3(Ruler):
    """One UUID in an essay."""

    variant = Variant("single-3", values="uuids")


class MultiKey1(Ruler):
    """Four needles in an essay, one of which is requested."""

    variant = Variant("multikey-1", num_keys=4)


class MultiKey2(Ruler):
    """A needle among needles: numbers for words."""

    variant = Variant("multikey-2", haystack="needles")


class MultiKey3(Ruler):
    """A needle among needles: UUIDs for UUIDs."""

    variant = Variant("multikey-3", haystack="needles", keys="uuids", values="uuids")


class MultiValue(Ruler):
    """Four numbers for one key, all of which are requested."""

    variant = Variant("multivalue", num_values=4)


class MultiQuery(Ruler):
    """Four keys, all of which are requested."""

    variant = Variant("multiquery", num_keys=4, num_queries=4)
