r"""ChartQA and DocVQA: questions with short answers on charts and on scanned pages.

Data of ChartQA: https://github.com/vis-nlp/ChartQA (Masry et al., 2022), or HuggingFaceM4/ChartQA
on the Hugging Face hub. Data of DocVQA: https://www.docvqa.org (Mathew et al., 2021), or
lmms-lab/DocVQA. A row of each; images may be paths, data URLs, or Parquet's records:

    {"imgname": "41699051005347.png", "query": "How many are there?", "label": "14"}
    {"questionId": "337", "question": "What is the date?", "answers": ["1/8/93"], "image": "1.png"}

Prompts are those of lmms-eval.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from treegen.evals.problem import Problem
from treegen.evals.statistics.metrics import Report, ReportOptions, mean_row
from treegen.evals.statistics.tables import problem_values
from treegen.evals.verdict import SampleScore, Verdict
from treegen.tasks.common.files import column, optional
from treegen.tasks.common.images import Images, VisionTask
from treegen.tasks.common.sources import HubTable
from treegen.tasks.common.text_task import greedy

_TOLERANCE: Final = 0.05
_WORST: Final = 0.5


def is_relaxed_match(text: str, answer: str) -> bool:
    """Return whether a number is within 5% of the right one; any other text must be equal.

    Case is ignored. This is relaxed_correctness of https://github.com/google-research/pix2struct
    (metrics.py), from section 5.1 of https://arxiv.org/abs/2203.10244.
    """
    number, right = number_of(text), number_of(answer)
    if number is not None and right:
        return abs(number - right) / abs(right) <= _TOLERANCE
    return text.lower() == answer.lower()


def number_of(text: str) -> float | None:
    """Return a text as a number, a percentage as hundredths; None if it is not a number."""
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def anls(text: str, answers: Sequence[str]) -> float:
    """Return the normalized similarity of a text and the closest of some answers.

    The similarity is 1 minus the edits per character, and 0 if that is below 0.5. Case and spacing
    are ignored. This is anls of lmms-eval (api/metrics.py), from https://arxiv.org/abs/1907.00490.
    """
    best = 0.0
    answer_text = " ".join(text.lower().split())
    for answer in answers:
        right = " ".join(answer.lower().split())
        length = max(len(answer.upper()), len(text.upper()))
        # The difference of the lengths bounds the edits, so distant texts need no count.
        if length and 1 - abs(len(right) - len(answer_text)) / length < _WORST:
            continue
        best = max(best, 1 - _edits(right, answer_text) / length if length else 1.0)
    return best if best >= _WORST else 0.0


def _edits(a: str, b: str) -> int:
    """Return the Levenshtein distance of two texts."""
    if len(a) > len(b):
        a, b = b, a
    row = list(range(len(a) + 1))
    for i, letter in enumerate(b, start=1):
        before, row[0] = row[0], i
        for j, other in enumerate(a, start=1):
            same = before
            before = row[j]
            row[j] = same if letter == other else 1 + min(same, before, row[j - 1])
    return row[-1]


_FINAL: Final = re.compile(r"answer\W*?:[\s*]*([^\n]*)", re.IGNORECASE)


class ChartQA(VisionTask):
    """ChartQA by relaxed accuracy: a number may be off by 5%.

    The filter `relaxed` uses the whole text, as published. `final` uses the text after the last
    "answer:", for models that explain; without one it uses the whole text.
    """

    name = "chartqa"
    filters = ("relaxed", "final")
    bundled = "chartqa_sample.jsonl"
    table = HubTable("HuggingFaceM4/ChartQA", ("test", "val", "train"))
    groups = ("type",)
    defaults = greedy(max_tokens=64)

    def problem(self, row: dict[str, Any], line: int, images: Images) -> Problem:
        """Return the problem of a row, with the columns of its authors or of the hub.

        Args:
            row: The row.
            line: Line number of the row, from 1.
            images: Reads images of the row, given the problem's id and their values.
        """
        name = _name(row, line, self.name)
        image = row.get("image")
        if image is None and isinstance(row.get("imgname"), str):
            image = f"png/{row['imgname']}"
        question = f"{column(row, ('question', 'query'))}\nAnswer the question with a single word."
        kind = row.get("type", row.get("human_or_machine"))
        if not isinstance(kind, str | int | float | None):
            raise ValueError(f"type is {kind!r:.40}, neither text nor number")
        kind_of = {0: "human", 1: "augmented", "human_test": "human", "augmented_test": "augmented"}
        return Problem(
            name,
            question,
            json.dumps(_texts(row, ("answer", "label"))),
            {"line": line, "type": kind_of.get(kind, "")},
            images=images(name, [image]),
        )

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return whether the text is close to a right answer, and whether its last answer is."""
        answers = json.loads(problem.answer)
        finals = _FINAL.findall(text)
        # Keep a full stop at the start, because it may begin a number such as .5.
        last = finals[-1].strip(" *_").rstrip(".* _") if finals else text.strip()
        return {
            "relaxed": _relaxed_verdict(text.strip(), answers),
            "final": _relaxed_verdict(last, answers),
        }


class DocVQA(VisionTask):
    """DocVQA by ANLS, which tolerates some wrong letters; accuracy counts only exact answers."""

    name = "docvqa"
    filters = ("anls",)
    bundled = "docvqa_sample.jsonl"
    table = HubTable("lmms-lab/DocVQA", ("validation", "test"), ("DocVQA",))
    defaults = greedy(max_tokens=64)

    def problem(self, row: dict[str, Any], line: int, images: Images) -> Problem:
        """Return the problem of a row.

        Args:
            row: The row.
            line: Line number of the row, from 1.
            images: Reads images of the row, given the problem's id and their values.
        """
        name = _name(row, line, self.name)
        question = (
            f"{column(row, ('question',))}\nAnswer the question using a single word or phrase."
        )
        answers = json.dumps(_texts(row, ("answers", "answer")))
        return Problem(
            name, question, answers, {"line": line}, images=images(name, [row.get("image")])
        )

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return the similarity of a text and the closest right answer."""
        near = anls(text, json.loads(problem.answer))
        answer = " ".join(text.lower().split())
        return {"anls": Verdict(answer or None, bool(answer) and near == 1, near)}

    def aggregate(self, scores: Sequence[SampleScore], options: ReportOptions) -> Report:
        """Return the mean ANLS above accuracy, pass@k and maj@k."""
        report = super().aggregate(scores, options)
        mean = mean_row(list(problem_values(scores, "anls").values()))
        row = self.metric_row("anls", "anls", options, **mean)
        return replace(report, metrics=(row, *report.metrics))


def _relaxed_verdict(text: str, answers: Sequence[str]) -> Verdict:
    number = number_of(text)
    reading = text.lower()
    # If 0 is right, answers are compared as texts: 0.0 is wrong, so it must not vote with 0.
    if number is not None and all(number_of(answer) != 0 for answer in answers):
        reading = f"{number:.12g}"
    return Verdict(
        reading or None, bool(reading) and any(is_relaxed_match(text, answer) for answer in answers)
    )


def _name(row: Mapping[str, Any], line: int, task: str) -> str:
    return optional(row, ("id", "questionId", "question_id")) or f"{task}-{line - 1}"


def _texts(row: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    for name in names:
        if (value := row.get(name)) is not None:
            values = value if isinstance(value, list) else [value]
            texts = [str(item).strip() for item in values if isinstance(item, str | int | float)]
            if texts and all(texts):
                return texts
            raise ValueError(f"{name} has no text; the test split has no answers")
    raise ValueError(f"no {' or '.join(names)}")
