"""What the tasks of competition mathematics share: the boxed prompt, the reading of answers."""

from collections.abc import Sequence
from typing import Final

from treegen.evals.answers import AnswerType
from treegen.evals.problem import Problem
from treegen.evals.statistics.metrics import Report, ReportOptions, summarise
from treegen.evals.task import TaskData
from treegen.evals.verdict import SampleScore, Verdict
from treegen.prompts.tree import Node
from treegen.tasks.answers.maths import MathAnswer
from treegen.tasks.common.reasoning import by_metadata
from treegen.tasks.common.tree import examples_above_problems
from treegen.tasks.math.boxed import hendrycks_verdict

_BOXED: Final = "Please reason step by step, and put your final answer within \\boxed{}."


class Competition:
    """Reads answers by math-verify and by the rule of MATH's authors.

    Subclasses have a `name`, a `version`, and `groups`: fields of the metadata that have tables.
    """

    name: str
    version: str
    filters: tuple[str, ...] = ("math-verify", "hendrycks")
    groups: tuple[str, ...] = ()

    def __init__(self) -> None:
        """Ask nothing yet."""
        self._math = MathAnswer()

    @property
    def answer_types(self) -> dict[str, AnswerType]:
        """Answers by math-verify are classes; those of the other filter are texts."""
        return {"math-verify": self._math}

    def tree(self, data: TaskData, num_samples: int) -> Node:
        """Return problems -> samples; the prompts ask for a boxed answer."""
        return examples_above_problems(data, num_samples, boxed_prompt)

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return a verdict per filter."""
        references = [problem.answer]
        return {
            "math-verify": self._math.verdict(text, references),
            "hendrycks": hendrycks_verdict(text, references),
        }

    def aggregate(self, scores: Sequence[SampleScore], options: ReportOptions) -> Report:
        """Return accuracy, pass@k, maj@k, and accuracy by group."""
        report = summarise(
            scores, options, task=self.name, version=self.version, filters=self.filters
        )
        return by_metadata(report, scores, options, *self.groups)


def boxed_prompt(problem: Problem) -> str:
    """Return the prompt that asks for a boxed answer."""
    return f"{problem.question}\n{_BOXED}"
