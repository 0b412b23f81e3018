r"""GPQA: graduate-level questions in biology, chemistry and physics, with four choices.

Data: https://github.com/idavidrein/gpqa (Rein et al., 2023; CC BY 4.0). Its authors ask that no
question is put online in plain text, so none comes with treegen. `hf` is Idavidrein/gpqa, whose
terms you must accept. One row, which has many more columns:

    {"Question": "Which ...?", "Correct Answer": "this", "Incorrect Answer 1": "that", ...}

The prompt and the filter `simple-evals` are those of https://github.com/openai/simple-evals
(gpqa_eval.py, MIT), which reports on reasoning models use. Samples are drawn as for DeepSeek-R1
(2025).
"""

import re
from typing import ClassVar, Final

from treegen.evals.arguments import one_of
from treegen.evals.problem import Problem
from treegen.evals.task import TaskDefaults, TaskOptions
from treegen.evals.verdict import Verdict
from treegen.tasks.answers.canonical import ChoiceAnswer
from treegen.tasks.common.text_task import REASONING, Loaded, TextTask
from treegen.tasks.gpqa.data import SHUFFLES, SUBSETS, load_problems

_ANSWER: Final = re.compile(r"(?i)Answer[ \t]*:[ \t]*\$?([A-D])\$?")


class GPQA(TextTask):
    """GPQA by generated letters.

    The filter `simple-evals` reads the first "Answer: X"; a lower-case letter is wrong, as
    published. `letter` reads the letter that the text gives as its answer.
    """

    name = "gpqa"
    version = "2"
    filters = ("simple-evals", "letter")
    groups = ("domain",)
    arguments: ClassVar = {
        "subset": "diamond, main or extended, of hf or a folder of files; default: diamond",
        "shuffle": "order of the choices: hash (of the seed and the texts, the default) or "
        "simple-evals (as its script draws it)",
    }
    defaults: Final = TaskDefaults(sampling=REASONING, num_samples=4, num_fewshot=0)
    _letter: Final = ChoiceAnswer()

    def read(self, options: TaskOptions) -> Loaded:
        """Return the questions, with their choices in order."""
        subset = one_of(options.extra, "subset", SUBSETS, SUBSETS[0])
        shuffle = one_of(options.extra, "shuffle", SHUFFLES, SHUFFLES[0])
        return load_problems(
            options.data,
            options.split,
            subset if "subset" in options.extra else None,
            shuffle,
            options.seed,
        )

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return a verdict for each filter."""
        found = _ANSWER.search(text)
        return {
            "simple-evals": Verdict(found[1], found[1] == problem.answer)
            if found
            else Verdict(None, False),
            "letter": self._letter.verdict(text, [problem.answer]),
        }
