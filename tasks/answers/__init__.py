"""Answer types: how an answer is read from a text, compared, and counted in votes.

A task has a member such as `answer_types = {"answer": MathAnswer()}`, by filter. Its `score` may
return what the type's `verdict(text, [problem.answer])` returns.
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
