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

import random
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Final, Literal

from treegen.errors import InputError
from treegen.evals.problem import Problem
from treegen.evals.selection import select
from treegen.evals.statistics.metrics import Report, ReportOptions, mean_row
from treegen.evals.statistics.tables import Table, by_decile, problem_values, table_by
from treegen.evals.task import TaskData, TaskOptions
from treegen.evals.verdict import SampleScore, Verdict
from treegen.prompts.tree import Node
from treegen.tasks.common.text_task import TextTask, greedy
from treegen.tasks.needle.task import (
    SHORTEN_HINT,
    TOKENIZER_HELP,
    Measure,
    fit_length,
    measure_of,
    read_arguments,
    read_int,
    read_ints,
)
from treegen.tasks.needle.text import (
    WORDS,
    Document,
    Haystack,
    check_absent,
    insert,
    join_pieces,
    load_haystack,
)

ADJECTIVES: Final = WORDS["adjectives"]
NOUNS: Final = WORDS["nouns"]

Values = Literal["numbers", "uuids"]

_NEEDLE: Final = "One of the special magic {kind} for {key} is: {value}."
_NOISE: Final = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)
_SEVERAL_VALUES: Final = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What are all the special magic {kind} for {query} mentioned in the provided text?"
)
_SEVERAL_VALUES_REPLY: Final = (
    " The special magic {kind} for {query} mentioned in the provided text are"
)
# Templates for a single requested value.
_SINGLE_VALUE: Final = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {query} mentioned in the provided text?"
)
_SINGLE_VALUE_REPLY: Final = (
    " The special magic {kind} for {query} mentioned in the provided text is"
)

# Needles are at some of 40 depths, the first at the start and the last at the end.
_NUM_DEPTHS: Final = 40

_VALUE_PATTERNS: Final[Mapping[Values, re.Pattern[str]]] = {
    "numbers": re.compile(r"(?<![0-9])[0-9]{7}(?![0-9])"),
    "uuids": re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the tests: the kind of text, the number of needles, and how many are requested."""

    name: str
    """The end of the task's name."""
    haystack: Literal["essay", "noise", "needles"] = "essay"
    """The kind of text."""
    keys: Literal["words", "uuids"] = "words"
    """The kind of the keys."""
    values: Values = "numbers"
    """The kind of the values."""
    num_keys: int = 1
    """Number of keys; each has a needle for each of its values."""
    num_values: int = 1
    """Values per key."""
    num_queries: int = 1
    """Number of requested keys."""


def find_values(text: str, values: Values) -> list[str]:
    """Return every different value in a text, in ascending order."""
    return sorted(set(_VALUE_PATTERNS[values].findall(text.casefold())))


class RulerItem:
    """One problem, without the size of its filler.

    Attributes:
        values: The requested values.
        reply: The beginning of the answer.
    """

    def __init__(self, variant: Variant, haystack: Haystack, seed: str) -> None:
        self._variant = variant
        self._haystack = haystack
        self._seed = seed
        draw = random.Random(seed)
        keys = _draw_keys(draw, variant)
        self._needle_keys = [next(keys) for _ in range(variant.num_keys)]
        num_needles = variant.num_keys * variant.num_values
        values = iter(_draw_values(draw, variant.values, num_needles))
        needles: list[tuple[str, str]] = [
            (key, next(values)) for key in self._needle_keys for _ in range(variant.num_values)
        ]
        queries = draw.sample(self._needle_keys, variant.num_queries)
        self.values = [value for query in queries for key, value in needles if key == query]
        draw.shuffle(needles)
        self._needles = [self._format_needle(key, value) for key, value in needles]
        places = sorted(draw.sample(range(_NUM_DEPTHS), len(needles)))
        self._depths = [place / (_NUM_DEPTHS - 1) for place in places]
        *first, last = queries
        self._query = f"{', '.join(first)}, and {last}" if first else last
        self.reply = self._fill_template(
            _SINGLE_VALUE_REPLY if self._is_single else _SEVERAL_VALUES_REPLY
        )

    def question(self, size: int) -> str:
        """Return the prompt up to where the answer begins, with `size` characters of filler."""
        context = self._document(size).text
        return self._fill_template(_SINGLE_VALUE if self._is_single else _SEVERAL_VALUES, context)

    def prompt(self, size: int) -> str:
        """Return the whole prompt."""
        return self.question(size) + self.reply

    def depth(self, size: int) -> float | None:
        """Return the depth of the needle, from 0 to 1; None if there are several."""
        return self._document(size).depth(0) if len(self._needles) == 1 else None

    @property
    def _is_single(self) -> bool:
        return len(self.values) == 1

    def _format_needle(self, key: str, value: str) -> str:
        return _NEEDLE.format(kind=self._variant.values, key=key, value=value)

    def _fill_template(self, template: str, context: str = "") -> str:
        kind = self._variant.values.removesuffix("s") if self._is_single else self._variant.values
        return template.format(kind=kind, query=self._query, context=context)

    def _document(self, size: int) -> Document:
        needles = list(zip(self._depths, self._needles, strict=True))
        if self._variant.haystack == "essay":
            return insert(self._haystack.take(size), needles)
        if self._variant.haystack == "noise":
            lines = [_NOISE] * (size // (len(_NOISE) + 1))
        else:
            lines = self._distractors(size)
        return _insert_lines(lines, needles)

    def _distractors(self, size: int) -> list[str]:
        """Return up to `size` characters of needles for other keys; a larger size adds needles."""
        draw = random.Random(f"{self._seed} distractors")
        keys = _draw_keys(draw, self._variant)
        lines: list[str] = []
        while True:
            key = next(keys)
            (value,) = _draw_values(draw, self._variant.values, 1)
            if key in self._needle_keys or value in self.values:
                continue
            line = self._format_needle(key, value)
            size -= len(line) + 1
            if size < 0:
                return lines
            lines.append(line)


def _insert_lines(lines: list[str], needles: list[tuple[float, str]]) -> Document:
    pieces: list[tuple[str, bool]] = []
    done = 0
    for depth, needle in needles:
        upto = round(depth * len(lines))
        pieces += [*((line, False) for line in lines[done:upto]), (needle, True)]
        done = upto
    return join_pieces([*pieces, *((line, False) for line in lines[done:])], "\n")


@lru_cache(maxsize=1)
def _word_keys() -> tuple[str, ...]:
    return tuple(f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS)


def _draw_keys(draw: random.Random, variant: Variant) -> Iterator[str]:
    """Yield different keys.

    Raises:
        InputError: All keys that the words can make are used up.
    """
    if variant.keys == "uuids":
        while True:
            yield _draw_uuid(draw)
    words = _word_keys()
    used: set[str] = set()
    while len(used) < len(words):
        key = draw.choice(words)
        if key not in used:
            used.add(key)
            yield key
    raise InputError(f"a text can contain at most {len(words):,} keys; use a shorter text")


def _draw_values(draw: random.Random, values: Values, num: int) -> list[str]:
    if values == "uuids":
        return [_draw_uuid(draw) for _ in range(num)]
    return [str(number) for number in draw.sample(range(10**6, 10**7), num)]


def _draw_uuid(draw: random.Random) -> str:
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


_LENGTHS: Final = (16_000,)


class Ruler(TextTask):
    """One of RULER's needle tests; the subclasses define which.

    An answer is right if it contains every requested value, at any place. RULER's own metric,
    string_match_all, is the share of the values that it contains.
    """

    variant: Variant

    filters = ("contains-all",)
    defaults: Final = greedy(max_tokens=128)
    shorter: Final = SHORTEN_HINT
    arguments: ClassVar = {
        "lengths": "lengths of prompt and answer: 16000,32000, or 8000-64000/8 for 8 even steps "
        + f"(default: {','.join(map(str, _LENGTHS))}, about 4,000 tokens)",
        "questions": "problems of each length (default: 100; RULER has 500)",
        "tokenizer": TOKENIZER_HELP,
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
        arguments = read_arguments(options, self, unused)
        self.check_no_examples(options)
        lengths = read_ints(arguments, "lengths", _LENGTHS, 1, 10**9)
        num = read_int(arguments, "questions", 100, 100_000)
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
                f"length {length:,} must be more than {answer_room:,} {measure.unit}, because the "
                "answer may be that long; raise lengths"
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
        expected_values = problem.answer.split(" ")
        read = text.casefold()
        recalled = [value for value in expected_values if value.casefold() in read]
        answer = " ".join(find_values(text, self.variant.values)) or " ".join(recalled)
        credit = len(recalled) / len(expected_values)
        return {"contains-all": Verdict(answer or None, bool(answer) and credit == 1, credit)}

    def aggregate(self, scores: Sequence[SampleScore], options: ReportOptions) -> Report:
        """Return accuracy and string_match_all, also by length and, for one needle, by depth."""
        report = self.overall(scores, options)
        values = problem_values(scores, self.filters[0])
        mean = mean_row(list(values.values()))
        match = self.metric_row("string_match_all", self.filters[0], options, **mean)
        tables = _make_tables(options.problems, values) if options.problems else ()
        return replace(report, metrics=(match, *report.metrics), tables=tables)


def _make_tables(problems: Sequence[Problem], values: Mapping[str, float]) -> tuple[Table, ...]:
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
