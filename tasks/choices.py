"""ARC, HellaSwag, PIQA and WinoGrande, and their base class.

Prompts and scores are those of lm-eval's tasks of the same names. The text that is scored follows
one space; `acc` uses its log-likelihood, and `acc_norm` its log-likelihood per character.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Final

from treegen.errors import DataError
from treegen.evals.arguments import check_arguments
from treegen.evals.chat import Turn
from treegen.evals.problem import Problem
from treegen.evals.statistics.metrics import Report, ReportOptions
from treegen.evals.task import TaskData, TaskOptions
from treegen.evals.verdict import SampleScore, Verdict
from treegen.tasks.common.fewshot import pick_examples
from treegen.tasks.common.files import Rows, read_text, text_field
from treegen.tasks.common.sources import HubTable, Source, problems_of
from treegen.tasks.common.text_task import TextTask, greedy, select_task_data, with_examples


@dataclass(frozen=True, slots=True)
class ChoiceItem:
    """A question, the texts to choose from, and the index of the right one.

    Raises:
        ValueError: The right choice is not among the choices, or two choices are equal.
    """

    id: str
    """Its id in the data; empty if it has none."""
    prompt: str
    """The text before the choices; empty if each choice has its own."""
    choices: tuple[str, ...]
    """The texts to choose from, as in the data."""
    gold: int
    """The index of the right choice, from 0."""
    rest: str | None = None
    """A text that follows every choice and is scored in place of the choices; None if there is
    none."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Fields that reports may show."""

    def __post_init__(self) -> None:
        if len(self.choices) < 2:
            raise ValueError("a question needs two or more choices")
        if len(set(self.choices)) < len(self.choices):
            raise ValueError("two choices are equal; change or remove one")
        if not 0 <= self.gold < len(self.choices):
            raise ValueError("the right choice is not among the choices")

    def problem(self, id: str) -> Problem:
        """Return the item as a problem, with one space before each scored text, as in lm-eval."""
        metadata = dict(self.metadata)
        if self.rest is None:
            scored = tuple(f" {choice}" for choice in self.choices)
            return Problem(id, self.prompt, scored[self.gold], metadata, scored)
        scored = (f" {self.rest}",) * len(self.choices)
        right = f"{self.choices[self.gold]}{scored[0]}"
        return Problem(id, self.prompt, right, metadata, scored, openings=self.choices)

    @property
    def turn(self) -> Turn:
        """The item as a few-shot example: the prompt, and the answer after it."""
        right = self.choices[self.gold]
        if self.rest is None:
            return self.prompt, right
        return f"{self.prompt}{right}", self.rest


def read_id(row: Mapping[str, Any], field: str) -> str:
    """Return the id in a field of a row as text, such as "0" for 0; empty if there is none."""
    value = row.get(field)
    return "" if value is None else str(value)


def read_texts(values: Any, name: str) -> tuple[str, ...]:
    """Return the texts of a list; raise ValueError if it is not a list or a text is invalid."""
    if not isinstance(values, list):
        raise ValueError(f"{name} is not a list")
    return tuple(text_field({name: value}, name) for value in values)


def read_index(value: Any, name: str) -> int:
    """Return an integer that may be written as text; raise ValueError for anything else."""
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError(f"{name} is {value!r:.40}, not an integer: the split may have no answers")


class ChoiceTask(TextTask):
    """A question whose answer is the choice that is scored as most likely.

    Subclasses define a name, a source, their published metrics, and `item`.
    """

    source: ClassVar[Source]
    metrics: ClassVar[tuple[str, ...]] = ("acc", "acc_norm")
    filters = ("none",)
    # No tokens are sampled: the only sample of a problem is its most likely choice.
    defaults: Final = greedy(max_tokens=1)

    def item(self, row: dict[str, Any]) -> ChoiceItem:
        """Return the item of a row; raise ValueError with the reason if it has none."""
        raise NotImplementedError

    def add_answers(self, rows: Rows, source: str) -> Rows:
        """Return rows with their answers, for data whose answers are in another file.

        Args:
            rows: The rows.
            source: Name of their source; for a file, its path.
        """
        return rows

    def load(self, options: TaskOptions) -> TaskData:
        """Read problems and examples. No example is a problem of the run.

        Raises:
            InputError: An option is invalid, or there are too few examples.
            DataError: The data cannot be read, or an example of a file is a problem.
        """
        check_arguments(self.name, options.extra, ())
        rows, source = self.source.read(options.data, options.split)
        problems = problems_of(
            self.add_answers(rows, source), source, self._problem, noun="question"
        )
        data = select_task_data(*problems, source, options)
        return with_examples(data, self._examples(options, data.problems))

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return whether the chosen text is the right one."""
        return {"none": Verdict(text, text == problem.answer)}

    def aggregate(self, scores: Sequence[SampleScore], options: ReportOptions) -> Report:
        """Return the published metrics of the task: `acc`, and for most tasks `acc_norm`."""
        report = self.overall(scores, options)
        rows = [
            replace(row, metric="acc") if row.metric == "exact_match" else row
            for row in report.metrics
        ]
        published = tuple(row for row in rows if row.metric in self.metrics)
        return replace(report, metrics=published, majority=())

    def _problem(self, row: dict[str, Any], line: int) -> Problem:
        item = self.item(row)
        return item.problem(item.id or f"{self.name}-{line - 1}")

    def _examples(self, options: TaskOptions, problems: Sequence[Problem]) -> list[Turn]:
        """Return the few-shot examples: the first of a file, or examples drawn by seed."""
        if options.num_fewshot is None and not (options.fewshot_file or options.fewshot_data):
            return []

        def read(rows: Rows, source: str) -> Rows:
            # Only the first rows of a file are read, because later rows may be unusable.
            first = options.num_fewshot if options.fewshot_file is not None else None
            return islice(self.add_answers(rows, source), first)

        items = pick_examples(
            options,
            {_make_key(problem): problem.id for problem in problems},
            None,
            self.item,
            self.source.train,
            key=lambda item: _make_key(item.problem("")),
            text=lambda item: f"{item.prompt}\n{item.choices}",
            read=read,
        )
        return [item.turn for item in items]


def _make_key(problem: Problem) -> tuple[str, tuple[str, ...]]:
    return problem.question, problem.candidates


def _make_arc_source(task: str, part: str, bundled: str) -> Source:
    return Source(
        task=task,
        bundled=bundled,
        hub=HubTable("allenai/ai2_arc", ("test", "validation", "train"), (part,)),
        files={
            "test": (f"{part}-Test.jsonl",),
            "validation": (f"{part}-Dev.jsonl",),
            "train": (f"{part}-Train.jsonl",),
        },
    )


class ARCEasy(ChoiceTask):
    r"""ARC: science questions for schools with three to five choices, in an easy and a hard set.

    Data: https://allenai.org/data/arc, or allenai/ai2_arc on the Hugging Face hub. A row of each:

        {"id": "A1", "question": {"stem": "What melts?", "choices": [{"text": "ice", "label": "A"},
         {"text": "sand", "label": "B"}]}, "answerKey": "A"}
        {"id": "A1", "question": "What melts?", "choices": {"text": ["ice", "sand"],
         "label": ["A", "B"]}, "answerKey": "A"}

    Prompt and score are those of lm-eval's `arc_easy` and `arc_challenge`: `Question:
    {question}\nAnswer:` and the text of each choice after a space; `acc` and `acc_norm`.
    """

    name = "arc-easy"
    source = _make_arc_source("arc-easy", "ARC-Easy", "arc_easy_sample.jsonl")

    def item(self, row: dict[str, Any]) -> ChoiceItem:
        """Return the item of a row in either form; a label names the right choice."""
        question, choices = row.get("question"), row.get("choices")
        if isinstance(question, dict):
            choices = question.get("choices")
            question = question.get("stem")
        if isinstance(choices, list) and all(isinstance(choice, dict) for choice in choices):
            choices = {name: [choice.get(name) for choice in choices] for name in ("text", "label")}
        if not isinstance(choices, dict):
            raise ValueError("choices must be a list, or an object of lists")
        labels = read_texts(choices.get("label"), "label")
        key = text_field({"answerKey": row.get("answerKey")}, "answerKey")
        if key not in labels:
            raise ValueError(f"answerKey {key!r:.40} is not one of the labels of the choices")
        texts = read_texts(choices.get("text"), "text")
        if len(texts) != len(labels):
            raise ValueError(f"there are {len(labels)} labels for {len(texts)} choices")
        question_text = text_field({"question": question}, "question")
        prompt = f"Question: {question_text}\nAnswer:"
        return ChoiceItem(read_id(row, "id"), prompt, texts, labels.index(key))


class ARCChallenge(ARCEasy):
    """The questions of ARC that simple methods get wrong."""

    name = "arc-challenge"
    source = _make_arc_source("arc-challenge", "ARC-Challenge", "arc_challenge_sample.jsonl")


_BRACKETS: Final = re.compile(r"\[[^\]\n]*\]")


class HellaSwag(ChoiceTask):
    r"""HellaSwag: which of four endings follows a short text.

    Data: https://github.com/rowanz/hellaswag (hellaswag_val.jsonl), or Rowan/hellaswag on the
    Hugging Face hub. The answers of the test split are not published. One row:

        {"ind": 1, "activity_label": "Baking", "ctx_a": "A man opens an oven.", "ctx_b": "he",
         "endings": ["takes a cake out.", "swims.", "sings to it.", "paints."], "label": 0}

    Prompt and score are those of lm-eval's `hellaswag`: `{activity_label}: {ctx_a} {ctx_b}`, the
    first letter of ctx_b in upper case and the rest of it in lower case, without the text in
    brackets from WikiHow's pages; the endings, cleaned in the same way, after a space; `acc` and
    `acc_norm`.
    """

    name = "hellaswag"
    source = Source(
        task="hellaswag",
        bundled="hellaswag_sample.jsonl",
        hub=HubTable("Rowan/hellaswag", ("validation", "train")),
        files={"validation": ("hellaswag_val.jsonl",), "train": ("hellaswag_train.jsonl",)},
    )

    def item(self, row: dict[str, Any]) -> ChoiceItem:
        """Return the item of a row."""
        label, first = text_field(row, "activity_label"), text_field(row, "ctx_a")
        second = row.get("ctx_b")
        if not isinstance(second, str):
            raise ValueError("ctx_b must be text")
        endings = read_texts(row.get("endings"), "endings")
        return ChoiceItem(
            id="",
            prompt=_clean_text(f"{label}: {first} {second.capitalize()}"),
            choices=tuple(map(_clean_text, endings)),
            gold=read_index(row.get("label"), "label"),
            metadata={"activity": label},
        )


def _clean_text(text: str) -> str:
    """Return a text without the marks of WikiHow's pages, by the same steps as lm-eval."""
    text = text.strip().replace(" [title]", ". ")
    return _BRACKETS.sub("", text).replace("  ", " ")


class PIQA(ChoiceTask):
    r"""PIQA: which of two ways reaches an everyday goal.

    Data: https://yonatanbisk.com/piqa (valid.jsonl, with valid-labels.lst in the same folder), or
    baber/piqa on the Hugging Face hub. The answers of the test split are not published. One row;
    its label may be in the other file, one label per line:

        {"goal": "Dry wet shoes.", "sol1": "Fill them with paper.", "sol2": "Fill them with water.",
         "label": 0}

    Prompt and score are those of lm-eval's `piqa`: `Question: {goal}\nAnswer:` and each solution
    after a space; `acc` and `acc_norm`.
    """

    name = "piqa"
    source = Source(
        task="piqa",
        bundled="piqa_sample.jsonl",
        hub=HubTable("baber/piqa", ("validation", "train")),
        files={"validation": ("valid.jsonl",)},
    )

    def item(self, row: dict[str, Any]) -> ChoiceItem:
        """Return the item of a row."""
        goal = text_field(row, "goal")
        solutions = text_field(row, "sol1"), text_field(row, "sol2")
        gold = read_index(row.get("label"), "label")
        return ChoiceItem(read_id(row, "id"), f"Question: {goal}\nAnswer:", solutions, gold)

    def add_answers(self, rows: Rows, source: str) -> Rows:
        """Return rows with the labels of the label file in the same folder, if there is one."""
        path = Path(source)
        labels = path.with_name(f"{path.stem}-labels.lst")
        if not path.is_file() or not labels.is_file():
            return rows
        return _add_labels(rows, labels)


def _add_labels(rows: Rows, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    labels = read_text(path).split()
    numbered = list(rows)
    if len(labels) != len(numbered):
        raise DataError(
            f"{path} has {len(labels)} labels for {len(numbered)} rows; use the labels and the "
            "rows of the same split"
        )
    for (line, row), label in zip(numbered, labels, strict=True):
        yield line, {**row, "label": label}


_BLANK: Final = "_"


class WinoGrande(ChoiceTask):
    r"""WinoGrande: which of two words fills a blank.

    Data: https://winogrande.allenai.org (dev.jsonl, train_xl.jsonl), or allenai/winogrande on the
    Hugging Face hub. The answers of the test split are not published. One row:

        {"qID": "1", "sentence": "The cup did not fit on the shelf as the _ was too big.",
         "option1": "cup", "option2": "shelf", "answer": "1"}

    The score is that of lm-eval's `winogrande`, and of Trinh and Le
    (https://arxiv.org/abs/1806.02847), who call it partial scoring. The prompt is the sentence up
    to the blank, filled with each option. The rest of the sentence, the same for both, is scored,
    and the option with the likelier rest is the answer. So a long or rare option has no
    disadvantage. The metric is `acc`.
    """

    name = "winogrande"
    metrics = ("acc",)
    source = Source(
        task="winogrande",
        bundled="winogrande_sample.jsonl",
        hub=HubTable("allenai/winogrande", ("validation", "train"), ("winogrande_xl",)),
        files={"validation": ("dev.jsonl",), "train": ("train_xl.jsonl",)},
    )

    def item(self, row: dict[str, Any]) -> ChoiceItem:
        """Return the item of a row; its options fill the blank in the sentence."""
        before, blank, after = text_field(row, "sentence").partition(_BLANK)
        if not blank:
            raise ValueError("sentence must have a blank (_)")
        if not after.strip():
            raise ValueError("the sentence ends with the blank, so there is no text to score")
        options = text_field(row, "option1"), text_field(row, "option2")
        return ChoiceItem(
            id=read_id(row, "qID"),
            prompt=before,
            choices=options,
            gold=read_index(row.get("answer"), "answer") - 1,
            rest=after.strip(),
        )
