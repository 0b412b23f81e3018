r"""GPQA: graduate-level questions in biology, chemistry and physics, with four choices.

Data: https://github.com/idavidrein/gpqa (Rein et al., 2023; CC BY 4.0). Its authors ask that no
question is put online in plain text, so none comes with treegen. `hf` is Idavidrein/gpqa, whose
terms you must accept. One row, which has many more columns:

    {"Question": "Which ...?", "Correct Answer": "this", "Incorrect Answer 1": "that", ...}

The prompt and the filter `simple-evals` are those of https://github.com/openai/simple-evals
(gpqa_eval.py, MIT), which reports on reasoning models use. Samples are drawn as for DeepSeek-R1
(2025).
"""

import random
import re
from pathlib import Path
from typing import Any, ClassVar, Final

from treegen.errors import InputError
from treegen.evals.arguments import one_of
from treegen.evals.problem import Problem
from treegen.evals.task import TaskDefaults, TaskOptions
from treegen.evals.verdict import Verdict
from treegen.tasks.answers.canonical import ChoiceAnswer
from treegen.tasks.common.fewshot import rank
from treegen.tasks.common.files import Rows, column, optional
from treegen.tasks.common.sources import HubTable, bundled_rows, file_rows, problems_of
from treegen.tasks.common.text_task import REASONING, Loaded, TextTask

SUBSETS: Final = ("diamond", "main", "extended")
SHUFFLES: Final = ("hash", "simple-evals")
BUNDLED: Final = "gpqa_sample.jsonl"
_HUB: Final = "Idavidrein/gpqa"
_CHOICES: Final = ("Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3)))
_LETTERS: Final = "ABCD"
_PROMPT: Final = """\
Answer the following multiple choice question. The last line of your response should be of the \
following format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by \
step before answering.

{question}

A) {A}
B) {B}
C) {C}
D) {D}"""


def _rows(data: str | None, split: str | None, subset: str | None) -> tuple[Rows, str]:
    if data is None:
        _check_no_subset(subset, "the bundled problems have")
        return bundled_rows(BUNDLED, split), f"bundled {BUNDLED}"
    name = f"gpqa_{subset or SUBSETS[0]}"
    if data in ("hf", _HUB):
        instead = "a file; the hub asks to accept its terms first"
        return HubTable(_HUB, ("train",), (name,), instead).rows(split), f"{_HUB} {name}"
    path = Path(data)
    if path.is_dir() and split is None and (path / f"{name}.csv").exists():
        return file_rows(str(path / f"{name}.csv"), None)
    _check_no_subset(subset, f"{data} has")
    return file_rows(data, split)


def _check_no_subset(subset: str | None, what: str) -> None:
    if subset is not None:
        raise InputError(
            f"{what} no subsets; remove the subset, or use hf or a folder with gpqa_*.csv"
        )


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
        "subset": "diamond, main or extended, for --data hf or a folder; default: diamond",
        "shuffle": "order of the choices: hash (of the seed and the texts, the default) or "
        "simple-evals (as its script draws it)",
    }
    defaults: Final = TaskDefaults(sampling=REASONING, num_samples=4, num_fewshot=0)
    _letter: Final = ChoiceAnswer()

    def read(self, options: TaskOptions) -> Loaded:
        """Return the questions, with their choices in order.

        The order "hash" is by hashes of the seed, the question and the choice. The order
        "simple-evals" is that of OpenAI's script, which depends on the row's index.
        """
        subset = one_of(options.extra, "subset", SUBSETS, SUBSETS[0])
        shuffle = one_of(options.extra, "shuffle", SHUFFLES, SHUFFLES[0])
        is_chosen = "subset" in options.extra
        rows, source = _rows(options.data, options.split, subset if is_chosen else None)
        rng = random.Random(0)

        def make(row: dict[str, Any], line: int) -> Problem:
            # Draw before anything can fail, so that a bad row does not change the order of others.
            order = rng.sample(range(4), 4)
            question = column(row, ("Question",))
            choices = [column(row, (name,)) for name in _CHOICES]
            if shuffle == "hash":
                order.sort(key=lambda index: rank(options.seed, f"{question}\n{choices[index]}"))
            shuffled = [choices[index] for index in order]
            letters = dict(zip(_LETTERS, shuffled, strict=True))
            return Problem(
                id=optional(row, ("Record ID", "id")) or f"gpqa-{line - 1}",
                question=_PROMPT.format(question=question, **letters),
                answer=_LETTERS[shuffled.index(choices[0])],
                metadata={
                    "line": line,
                    "domain": optional(row, ("High-level domain", "domain")) or "",
                    "subdomain": optional(row, ("Subdomain",)) or "",
                },
            )

        return *problems_of(rows, source, make), source

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return a verdict for each filter."""
        match = _ANSWER.search(text)
        letter = match[1] if match else None
        return {
            "simple-evals": Verdict(letter, letter == problem.answer),
            "letter": self._letter.verdict(text, [problem.answer]),
        }
