"""Answer types: how an answer is extracted from a text, compared, and counted in votes.

A task names the answer type of each filter, as in `answer_types = {"answer": MathAnswer()}`. Its
`score` can return the result of the type's `verdict(text, [problem.answer])`.
"""

from treegen.evals.verdict import AnswerType
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
