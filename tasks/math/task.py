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

from typing import Final

from treegen.common.params import SamplingParams
from treegen.evals.answer_types import AnswerType
from treegen.evals.arguments import check_arguments
from treegen.evals.problem import Problem
from treegen.evals.task import TaskData, TaskDefaults, TaskOptions
from treegen.evals.verdict import Verdict
from treegen.tasks.answers.maths import MathAnswer
from treegen.tasks.common.fewshot import pick_turns
from treegen.tasks.common.problems import problems_of
from treegen.tasks.common.text_task import (
    REASONING,
    Loaded,
    TextTask,
    select_task_data,
    with_own_examples,
)
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


class Math(Competition):
    """MATH with Minerva's prompt: 4 examples, 1 sample, temperature 0.

    Three filters read the same texts: `math-verify`; `minerva`, the answer in Minerva's sentence;
    and `hendrycks`, the rule of MATH's authors.
    """

    name = "math"
    filters = ("math-verify", "minerva", "hendrycks")
    groups = ("subject", "level")
    defaults: Final = TaskDefaults(
        sampling=SamplingParams(temperature=0.0, max_tokens=1024, stop=("Problem:",)),
        num_samples=1,
        num_fewshot=4,
    )

    def __init__(self) -> None:
        """Create the answer types."""
        super().__init__()
        self._minerva = MinervaAnswer()

    @property
    def answer_types(self) -> dict[str, AnswerType]:
        """Answer types by filter: both filters that compare mathematics group equal answers."""
        return {**super().answer_types, "minerva": self._minerva}

    def load(self, options: TaskOptions) -> TaskData:
        """Read problems and examples. A problem is never one of its own examples.

        Raises:
            InputError: An option is invalid, or there are too few examples.
            DataError: Problems or examples cannot be read, or an example is a problem.
        """
        check_arguments(self.name, options.extra, ())
        rows, source = MATH.read(options.data, options.split)
        data = select_task_data(*problems_of(rows, source, read_problem), source, options)
        shown = pick_turns(
            options,
            data.problems,
            self.defaults.num_fewshot,
            read_example,
            MATH.train,
            bundled="math_fewshot.jsonl",
        )
        turns = [(_ask(problem), solution) for problem, solution in shown]
        return with_own_examples(data, turns, options)

    def ask(self, problem: Problem) -> str:
        """Return the problem, up to where its solution begins."""
        return _ask(problem.question)

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return a verdict for each filter."""
        return {
            **super().score(problem, text),
            "minerva": self._minerva.verdict(text, [problem.answer]),
        }


class Math500(Competition):
    """MATH-500 in the form used for reasoning models: no examples, a boxed answer."""

    name = "math500"
    groups = ("subject", "level")
    defaults: Final = TaskDefaults(sampling=REASONING, num_samples=4, num_fewshot=0)

    def read(self, options: TaskOptions) -> Loaded:
        """Return all problems of the data."""
        rows, source = MATH_500.read(options.data, options.split)
        return *problems_of(rows, source, read_problem), source


def _ask(problem: str) -> str:
    return f"Problem:\n{problem}\n\nSolution:"
