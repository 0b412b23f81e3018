r"""MATH and its subset MATH-500: competition problems whose answers are expressions.

Data: https://github.com/hendrycks/math (Hendrycks et al., 2021; MIT), on the hub
EleutherAI/hendrycks_math; and HuggingFaceH4/MATH-500, the 500 problems of Lightman et al. (2023).
One row of each:

    {"problem": "What is $1+1$?", "level": "Level 1", "type": "Prealgebra",
     "solution": "It is $\\boxed{2}$."}
    {"problem": "What is $1+1$?", "solution": "It is $\\boxed{2}$.", "answer": "2",
     "subject": "Prealgebra", "level": 1, "unique_id": "test/prealgebra/1.json"}

`math` has the prompt of Minerva (Lewkowycz et al., 2022) and lm-eval's minerva_math, four solved
examples and one solution:

    Problem:\n{problem}\n\nSolution: {solution}\n\n  ...  Problem:\n{problem}\n\nSolution:

`math500` has no examples and asks for a boxed answer, as in the evaluations of DeepSeek-R1 and
Qwen.
"""

from typing import Any, Final

from treegen.evals.answer_types import AnswerType
from treegen.evals.chat import Turn
from treegen.evals.problem import Problem
from treegen.evals.task import TaskDefaults
from treegen.evals.verdict import Verdict
from treegen.tasks.answers.maths import MathAnswer
from treegen.tasks.common.text_task import REASONING, TextTask, greedy
from treegen.tasks.math.boxed import hendrycks_verdict
from treegen.tasks.math.data import MATH, MATH_500, read_problem
from treegen.tasks.math.minerva import MinervaAnswer, read_example

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

    def make_problem(self, row: dict[str, Any], line: int) -> Problem:
        """Return the problem of a row."""
        return read_problem(row, line)

    def ask_question(self, question: str) -> str:
        """Return the prompt that asks for a boxed answer."""
        return f"{question}\n{_BOXED}"

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return a verdict for each filter."""
        references = [problem.answer]
        return {
            "math-verify": self._math.verdict(text, references),
            "hendrycks": hendrycks_verdict(text, references),
        }


class Math(Competition):
    """MATH with Minerva's prompt: 4 examples, 1 sample, temperature 0.

    Three filters read the same texts: `math-verify`; `minerva`, the answer in Minerva's sentence;
    and `hendrycks`, the rule of MATH's authors.
    """

    name = "math"
    source = MATH
    own_examples = "math_fewshot.jsonl"
    filters = ("math-verify", "minerva", "hendrycks")
    groups = ("subject", "level")
    defaults: Final = greedy(max_tokens=1024, stop=("Problem:",), num_fewshot=4)

    def __init__(self) -> None:
        """Create the answer types."""
        super().__init__()
        self._minerva = MinervaAnswer()

    @property
    def answer_types(self) -> dict[str, AnswerType]:
        """Answer types by filter: both filters that compare mathematics group equal answers."""
        return {**super().answer_types, "minerva": self._minerva}

    def make_example(self, row: dict[str, Any], *, is_drawn: bool) -> Turn:
        """Return a problem and its solution."""
        return read_example(row)

    def ask_question(self, question: str) -> str:
        """Return the problem, up to where its solution begins."""
        return f"Problem:\n{question}\n\nSolution:"

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return a verdict for each filter."""
        return {
            **super().score(problem, text),
            "minerva": self._minerva.verdict(text, [problem.answer]),
        }


class Math500(Competition):
    """MATH-500 in the form used for reasoning models: no examples, a boxed answer."""

    name = "math500"
    source = MATH_500
    groups = ("subject", "level")
    defaults: Final = TaskDefaults(sampling=REASONING, num_samples=4, num_fewshot=0)
