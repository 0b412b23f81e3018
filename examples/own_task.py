"""A task of your own in one file: two-digit sums.

    treegen eval examples/own_task.py:Sums --model DIR --n-samples 8
    treegen eval examples/own_task.py:Sums --model DIR --task-arg digits=3

A task inherits from Task and defines these members: it reads its problems, makes their prompt tree,
scores any text and aggregates the scores. It neither samples nor prints.
"""

import random
from collections.abc import Sequence
from typing import Final

from treegen import Node, SamplingParams
from treegen.evals.arguments import check_arguments, whole_number
from treegen.tasks import (
    Problem,
    Report,
    ReportOptions,
    SampleScore,
    Task,
    TaskData,
    TaskDefaults,
    TaskOptions,
    Verdict,
    select,
    summarize,
)
from treegen.tasks.common.answers import numeric_answer


class Sums(Task):
    """Sums of two numbers, with solved ones before them."""

    name: Final = "sums"
    version: Final = "1"
    filters: Final = ("numeric",)
    # Only needed by a task that takes --task-arg.
    arguments: Final = {"digits": "digits of each number; default: 2"}
    defaults: Final = TaskDefaults(
        sampling=SamplingParams(temperature=0.7, max_tokens=8, stop=("\n",)),
        num_samples=4,
        num_fewshot=4,
    )

    def load(self, options: TaskOptions) -> TaskData:
        """Make the problems; the seed of a run draws other ones."""
        check_arguments(self.name, options.extra, self.arguments)
        limit = 10 ** (whole_number(options.extra, "digits") or 2)
        draw = random.Random(options.seed)
        num_shots = (
            self.defaults.num_fewshot if options.num_fewshot is None else options.num_fewshot
        )
        sums = [(draw.randrange(limit), draw.randrange(limit)) for _ in range(100 + num_shots)]
        problems = [
            Problem(f"sum-{number}", f"{a} + {b}", str(a + b))
            for number, (a, b) in enumerate(sums[num_shots:])
        ]
        return TaskData(
            problems=select(problems, options),
            source=f"sums drawn with seed {options.seed}",
            fewshot="".join(f"{a} + {b} = {a + b}\n" for a, b in sums[:num_shots]),
            num_fewshot=num_shots,
        )

    def tree(self, data: TaskData, num_samples: int) -> Node:
        """Return examples -> sums -> samples; the examples are computed once."""
        sums = [Node(f"{p.question} =", samples=num_samples, id=p.id) for p in data.problems]
        return Node(data.fewshot, children=sums)

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return whether a text gives the right number."""
        number = numeric_answer(text)
        return {"numeric": Verdict(number, number == problem.answer)}

    def aggregate(self, scores: Sequence[SampleScore], options: ReportOptions) -> Report:
        """Return accuracy, pass@k and maj@k."""
        return summarize(
            scores, options, task=self.name, version=self.version, filters=self.filters
        )
