"""Answer types: how an answer is read from a text, compared, and counted in votes.

A task has a member such as `answer_types = {"answer": MathAnswer()}`, by filter. Its `score` may
return what the type's `verdict(text, [problem.answer])` returns.
"""

from treegen.evals.answer_types import AnswerType
from treegen.tasks.answers.canonical import (
    CanonicalAnswer,
    ChoiceAnswer,
    ContainedAnswer,
    NumberAnswer,
    PatternAnswer,
    TextAnswer,
)
from treegen.tasks.answers.maths import MathAnswer

__all__ = [
    "AnswerType",
    "CanonicalAnswer",
    "ChoiceAnswer",
    "ContainedAnswer",
    "MathAnswer",
    "NumberAnswer",
    "PatternAnswer",
    "TextAnswer",
]
