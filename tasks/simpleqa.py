r"""SimpleQA: short factual questions with one answer each (Wei et al., 2024).

Data: simple_qa_test_set.csv of https://github.com/openai/simple-evals (MIT), 4,326 questions. `hf`
is basicv8vc/SimpleQA, the same table. One row:

    {"problem": "Who ...?", "answer": "Ada Lovelace",
     "metadata": "{'topic': 'History', 'answer_type': 'Person', 'urls': [...]}"}

The prompt is the question alone, as published. The published scores come from a judge, a model that
grades each answer as correct, incorrect or not attempted: `--judge`, whose default rubric for this
task is simpleqa. Samples are drawn as in its script for chat models: temperature 0.5 and at most
1,024 tokens.
"""

import ast
import json
from collections.abc import Mapping
from typing import Any, Final

from treegen.common.params import SamplingParams
from treegen.evals.problem import Problem
from treegen.evals.task import TaskDefaults
from treegen.evals.verdict import Verdict
from treegen.tasks.answers.canonical import ContainedAnswer
from treegen.tasks.common.files import column, optional
from treegen.tasks.common.sources import HubTable, Source
from treegen.tasks.common.text_task import TextTask


class SimpleQA(TextTask):
    """SimpleQA. Without a judge a sample counts as right if it contains the known answer."""

    name = "simpleqa"
    source = Source(
        task="simpleqa",
        bundled="simpleqa_sample.jsonl",
        hub=HubTable("basicv8vc/SimpleQA"),
        files={"test": ("simple_qa_test_set.csv",)},
    )
    version = "2"
    filters = ("contains",)
    groups = ("topic", "answer_type")
    rubric: Final = "simpleqa"
    """The default rubric of judges."""
    defaults: Final = TaskDefaults(
        sampling=SamplingParams(temperature=0.5, max_tokens=1024), num_samples=1, num_fewshot=0
    )

    _answer: Final = ContainedAnswer(ignore_case=True)

    def make_problem(self, row: dict[str, Any], line: int) -> Problem:
        """Return the question of a row."""
        about = _metadata(row.get("metadata"))
        return Problem(
            id=optional(row, ("id",)) or f"simpleqa-{line - 1}",
            question=column(row, ("problem", "question")),
            answer=column(row, ("answer",)),
            metadata={"line": line, **{key: about[key] for key in self.groups if about.get(key)}},
        )

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return whether a text contains the known answer, ignoring case."""
        return {"contains": self._answer.verdict(text, [problem.answer])}


def _metadata(value: Any) -> Mapping[str, Any]:
    """Return the metadata of a row, which may be a mapping, JSON, or a Python literal."""
    for read in (json.loads, ast.literal_eval):
        if isinstance(value, str):
            try:
                value = read(value)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                continue
    if not isinstance(value, Mapping):
        return {}
    return {str(key): item for key, item in value.items() if isinstance(item, str)}
