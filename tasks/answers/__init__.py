"""Answer types: how an answer is read from a text, compared, and counted in votes.

class MyTask:
    filters = ("answer",)
    answer_types = {"answer": MathAnswer()}

    def score(self, problem, text):
        return {"answer": self.answer_types["answer"].verdict(text, [problem.answer])}
"""

from treegen.evals.answers import AnswerType
from treegen.tasks.answers.maths import MathAnswer
from treegen.tasks.answers.plain import (
    ChoiceAnswer,
    ContainedAnswer,
    NumberAnswer,
    PatternAnswer,
    PlainAnswer,
    TextAnswer,
)

__all__ = [
    "AnswerType",
    "ChoiceAnswer",
    "ContainedAnswer",
    "MathAnswer",
    "NumberAnswer",
    "PatternAnswer",
    "PlainAnswer",
    "TextAnswer",
]
