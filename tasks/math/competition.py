"""Base class of the tasks of competition mathematics: the boxed prompt, the reading of answers."""

from typing import Final

from treegen.evals.answer_types import AnswerType
from treegen.evals.problem import Problem
from treegen.evals.verdict import Verdict
from treegen.tasks.answers.maths import MathAnswer
from treegen.tasks.common.text_task import TextTask
from treegen.tasks.math.boxed import hendrycks_verdict

_BOXED: Final = "Please reason step by step, and put your final answer within \\boxed{}."


class Competition(TextTask):
    """Asks for a boxed answer; reads it with math-verify and by the rule of MATH's authors."""

    filters: tuple[str, ...] = ("math-verify", "hendrycks")

    def __init__(self) -> None:
        """Create the answer type."""
        self._math = MathAnswer()

    @property
    def answer_types(self) -> dict[str, AnswerType]:
        """Answer types by filter: math-verify groups equal answers, the other compares texts."""
        return {"math-verify": self._math}

    def ask(self, problem: Problem) -> str:
        """Return the prompt that asks for a boxed answer."""
        return f"{problem.question}\n{_BOXED}"

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return a verdict for each filter."""
        references = [problem.answer]
        return {
            "math-verify": self._math.verdict(text, references),
            "hendrycks": hendrycks_verdict(text, references),
        }
