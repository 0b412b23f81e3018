"""Needle in a haystack as a grid: one fact, hidden in texts of several lengths, at several depths.

The test was made popular by https://github.com/gkamradt/LLMTest_NeedleInAHaystack. One prompt:

    Start of document:
    {text that says: The best thing to do in San Francisco is ...}
    End of document

    Question: What is the best thing to do in San Francisco?
    Answer:

An answer is right if it contains the key facts, whatever else it says. Prompts of all lengths begin
with the same text, up to the needle. The engine finds these shared prefixes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar, Final

from treegen.errors import InputError
from treegen.evals.problem import Problem
from treegen.evals.selection import select
from treegen.evals.statistics.metrics import Report, ReportOptions
from treegen.evals.statistics.tables import Grid, problem_values, table_by
from treegen.evals.task import TaskData, TaskOptions
from treegen.evals.verdict import SampleScore, Verdict
from treegen.tasks.common.text_task import TextTask, greedy
from treegen.tasks.needle.task import (
    SHORTEN_HINT,
    TOKENIZER_HELP,
    Measure,
    fit_length,
    measure_of,
    read_arguments,
    read_ints,
    read_text,
)
from treegen.tasks.needle.text import Document, Haystack, check_absent, insert, load_haystack

_NEEDLE: Final = (
    "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny "
    "day."
)
_QUESTION: Final = "What is the best thing to do in San Francisco?"
_FACTS: Final = "sandwich|Dolores Park"
_LENGTHS: Final = (4_000, 8_000, 16_000, 32_000, 64_000)
_DEPTHS: Final = tuple(range(0, 101, 10))
_MAX_ANSWER_CHARS: Final = 80


class NeedleGrid(TextTask):
    """One fact at every depth of texts of every length."""

    name = "needle-grid"
    filters = ("contains",)
    defaults: Final = greedy(max_tokens=64, stop=("\nQuestion:",))
    shorter: Final = SHORTEN_HINT
    arguments: ClassVar = {
        "lengths": "lengths of the text: 4000,8000, or 1000-16000/16 for 16 even steps (default: "
        + f"{','.join(map(str, _LENGTHS))})",
        "depths": "depths of the needle in percent, in the same form (default: 0-100/11)",
        "needle": "sentence to hide (default: the best thing to do in San Francisco)",
        "question": "question about the needle; required with `needle`",
        "facts": "facts that an answer must contain, separated by |; required with `needle`",
        "tokenizer": TOKENIZER_HELP,
    }

    def load(self, options: TaskOptions) -> TaskData:
        """Return a problem for each length and depth; its question is the whole prompt.

        Raises:
            InputError: An option is invalid.
            DataError: The haystack cannot be read.
        """
        arguments = read_arguments(options, self)
        self.check_no_examples(options)
        lengths = read_ints(arguments, "lengths", _LENGTHS, 1, 10**9)
        depths = read_ints(arguments, "depths", _DEPTHS, 0, 100)
        needle, question, facts = _read_needle(arguments)
        haystack = load_haystack(options.data)
        check_absent(haystack, needle)
        measure = measure_of(arguments)
        problems = [
            Problem(
                id=f"{self.name}-{length}-{depth}",
                question=(
                    f"Start of document:\n{document.text}\nEnd of document\n\n"
                    f"Question: {question}\nAnswer:"
                ),
                answer="|".join(facts),
                metadata={
                    "length": length,
                    "unit": measure.unit,
                    "depth": depth,
                    "measured_depth": document.depth(0),
                },
            )
            for length in lengths
            for depth, document in _make_documents(haystack, needle, depths, measure, length)
        ]
        return TaskData(
            problems=select(problems, options),
            source=f"{len(lengths)} lengths x {len(depths)} depths in {haystack.source}",
        )

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return whether the text contains every key fact. The answer is the facts in it."""
        read = _normalize(text)
        facts = problem.answer.split("|")
        recalled = [fact for fact in facts if _contains(read, _normalize(fact))]
        answer = ", ".join(recalled) or read[:_MAX_ANSWER_CHARS]
        return {"contains": Verdict(answer or None, len(recalled) == len(facts))}

    def aggregate(self, scores: Sequence[SampleScore], options: ReportOptions) -> Report:
        """Return accuracy over all problems, by length, by depth, and as a grid of both."""
        report = self.overall(scores, options)
        if not options.problems:
            return report
        values = problem_values(scores, self.filters[0])
        cells = {(p.metadata["depth"], p.metadata["length"]): p.id for p in options.problems}
        depths = sorted({depth for depth, _ in cells})
        lengths = sorted({length for _, length in cells})
        unit = options.problems[0].metadata["unit"]
        by_length = [
            (f"{length:,}", [cells[d, length] for d in depths if (d, length) in cells])
            for length in lengths
        ]
        by_depth = [
            (f"{depth}%", [cells[depth, n] for n in lengths if (depth, n) in cells])
            for depth in depths
        ]
        grid = Grid(
            title=f"{self.name}: accuracy in percent",
            row_name="depth",
            row_labels=tuple(label for label, _ in by_depth),
            column_name=f"length in {unit}",
            column_labels=tuple(label for label, _ in by_length),
            values=tuple(
                tuple(values.get(cells.get((depth, length), "")) for length in lengths)
                for depth in depths
            ),
        )
        tables = (
            table_by("Accuracy by length", f"Length ({unit})", by_length, values),
            table_by("Accuracy by depth", "Depth", by_depth, values),
        )
        return replace(report, tables=tables, grids=(grid,))


def _read_needle(arguments: Mapping[str, str]) -> tuple[str, str, list[str]]:
    """Return the sentence to hide, the question, and the facts that an answer must contain."""
    present = [name for name in ("needle", "question", "facts") if name in arguments]
    if present and len(present) < 3:
        raise InputError(
            f"needle, question and facts must be set together, got only {' and '.join(present)}"
        )
    needle = " ".join(read_text(arguments, "needle", _NEEDLE).split())
    question = " ".join(read_text(arguments, "question", _QUESTION).split())
    facts = [fact.strip() for fact in read_text(arguments, "facts", _FACTS).split("|")]
    for fact in facts:
        if not _normalize(fact):
            raise InputError(f"facts has an empty part: {'|'.join(facts)!r}; remove one bar (|)")
        if not _contains(_normalize(needle), _normalize(fact)):
            raise InputError(
                f"the needle {needle!r} does not contain the fact {fact!r}; add the fact to "
                "the needle"
            )
        if _contains(_normalize(question), _normalize(fact)):
            raise InputError(
                f"the question {question!r} contains the fact {fact!r}; write another question"
            )
    return needle, question, facts


def _make_documents(
    haystack: Haystack, needle: str, depths: Sequence[int], measure: Measure, length: int
) -> list[tuple[int, Document]]:
    """Return a text of one length for each depth.

    Args:
        haystack: The filler text.
        needle: The sentence to hide.
        depths: Depths of the needle, in percent.
        measure: The unit of `length`.
        length: Length of the text with the needle.

    Raises:
        InputError: The text is too short, so that two depths fall on the same place.
    """

    def hide(size: int, depth: float) -> Document:
        # A needle moves up to the end of a sentence, by at most half the step between two depths.
        step = min((b - a for a, b in pairwise(depths)), default=100)
        reach = min(500, step * size // 200)
        return insert(haystack.take(size), [(depth / 100, needle)], reach=reach)

    what = f"a text with the needle of {len(needle):,} characters"
    size = fit_length(lambda size: hide(size, 50).text, measure, length, what=what)
    documents = [(depth, hide(size, depth)) for depth in depths]
    for (upper, first), (lower, second) in pairwise(documents):
        if first.starts == second.starts:
            raise InputError(
                f"length {length:,} is too short for these depths: {upper}% and {lower}% are "
                "the same position; use fewer depths or longer texts"
            )
    return documents


def _normalize(text: str) -> str:
    """Return a text in lower case, without punctuation, with one space between words."""
    return re.sub(r"[\W_]+", " ", text.casefold()).strip()


def _contains(text: str, fact: str) -> bool:
    # A number must not be part of a longer one: 42 is not in 1425. A word may: "sandwich" is in
    # "sandwiches".
    return re.search(rf"(?<!\d){re.escape(fact)}(?!\d)", text) is not None
