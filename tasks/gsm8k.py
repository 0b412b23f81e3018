r"""GSM8K: grade-school word problems whose answer is one number.

Data: https://github.com/openai/grade-school-math, or openai/gsm8k on the Hugging Face hub. One row:

    {"question": "Ann has 3 boxes of 4 pens and loses 2 pens. How many pens are left?",
     "answer": "She has 3*4=<<3*4=12>>12 pens.\n12-2=<<12-2=10>>10 are left.\n#### 10"}

The prompt has the form of lm-eval's gsm8k_cot, few-shot examples before the problem:

    Q: {question}\nA: {reasoning} The answer is {number}.\n\n  ...  Q: {question}\nA:

All examples are one node above all problems, so they are computed once for the whole run. A sample
ends at the stop strings of gsm8k_cot; `form=self-consistency` also ends it at a blank line, as
gsm8k_cot_self_consistency does.

In a search, a step is a sentence or a line of the reasoning, up to a period or a newline.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar, Final

from treegen.common.params import SamplingParams
from treegen.evals.arguments import one_of
from treegen.evals.chat import Turn
from treegen.evals.problem import Problem
from treegen.evals.search.task import SearchDefaults, SearchTask
from treegen.evals.statistics.metrics import Report, ReportOptions
from treegen.evals.task import TaskData, TaskDefaults
from treegen.evals.verdict import SampleScore, Verdict
from treegen.tasks.common.answers import (
    exact_match_form,
    numeric_and_flexible,
    numeric_answer,
    strict_match,
)
from treegen.tasks.common.arithmetic import canonical_number
from treegen.tasks.common.files import text_field
from treegen.tasks.common.sources import HubTable, Source, row_id
from treegen.tasks.common.text_task import TextTask, with_table

# Notes for a calculator, such as "<<48/2=24>>", which the data's authors advise to remove.
_ANNOTATION: Final = re.compile(r"<<[^>]*>>")


def reasoning_and_number(answer: str) -> tuple[str, str]:
    """Split a reference answer at its last "####", and remove its calculator notes.

    An answer without "####" is a number as a whole.
    """
    reasoning, _, number = _ANNOTATION.sub("", answer).rpartition("####")
    return reasoning.rstrip(), number.strip()


def num_steps(problem: Problem) -> int:
    """Return the number of steps of the reference solution: its lines before the answer."""
    reasoning, _ = reasoning_and_number(problem.metadata.get("solution", ""))
    return sum(bool(line.strip()) for line in reasoning.splitlines())


_STATED: Final = re.compile(r"\banswer is\b", re.IGNORECASE)
_DIGIT: Final = re.compile("[0-9]")
_STOPS: Final = {"cot": ("Q:", "</s>", "<|im_end|>"), "self-consistency": ("Q:", "\n\n")}
_SEARCH_STOPS: Final = _STOPS["self-consistency"]
# The temperature of the self-consistency paper, and lm-eval's length.
_SAMPLING: Final = SamplingParams(temperature=0.7, max_tokens=256)


class GSM8K(TextTask, SearchTask):
    """Grade-school math with chain-of-thought examples and majority voting.

    Three filters read the same texts. `numeric`, the headline, compares numbers. `strict-match`
    and `flexible-extract` are lm-eval's, string for string, for comparing with published results.
    """

    name = "gsm8k"
    source = Source(
        task="gsm8k",
        bundled="gsm8k_sample.jsonl",
        hub=HubTable("openai/gsm8k", ("test", "train"), ("main",)),
    )
    # These examples were written for treegen, in the style of the eight examples of
    # chain-of-thought papers. Scores to be compared with published ones need the published
    # examples: a few-shot file with one {"question": ..., "target": "... The answer is N."} per
    # line.
    own_examples = "gsm8k_fewshot.jsonl"
    version = "2"
    filters = ("numeric", "strict-match", "flexible-extract")
    arguments: ClassVar = {
        "form": "stop strings: cot (as in lm-eval's gsm8k_cot; default) or self-consistency, which "
        "also stops at a blank line"
    }
    # Whether an answer is right cannot be checked without the reference.
    checkable: Final = False
    search_defaults: Final = SearchDefaults(
        method="beam",
        tokens=4000,
        depth=24,
        width=4,
        expand=4,
        step=SamplingParams(temperature=0.7, max_tokens=96, stop=(".", "\n"), include_stop=True),
        solution=replace(_SAMPLING, stop=_SEARCH_STOPS),
        evaluator="logprob",
        arguments={"form": "self-consistency"},  # whose stops are those of searches
    )
    _form = "cot"

    @property
    def defaults(self) -> TaskDefaults:
        """40 paths as in the self-consistency paper, with the stops of the form."""
        sampling = replace(_SAMPLING, stop=_STOPS[self._form])
        return TaskDefaults(sampling=sampling, num_samples=40, num_fewshot=8)

    def configure(self, arguments: Mapping[str, str]) -> None:
        """Set the form from the task's arguments."""
        self._form = one_of(arguments, "form", tuple(_STOPS), "cot")

    def make_problem(self, row: dict[str, Any], line: int) -> Problem:
        """Return the problem of a row."""
        question, answer = text_field(row, "question"), text_field(row, "answer")
        _, number = reasoning_and_number(answer)
        if canonical_number(number) is None:
            raise ValueError("answer must end in '#### NUMBER'")
        id = row_id(row, line, "gsm8k")
        return Problem(id, question, number, {"line": line, "solution": answer})

    def make_example(self, row: dict[str, Any], *, is_drawn: bool) -> Turn:
        """Return the question and the answer of a few-shot example."""
        question = text_field(row, "question")
        if "target" in row:
            answer = text_field(row, "target")
        else:
            answer = text_field(row, "answer")
            reasoning, number = reasoning_and_number(answer)
            # strict-match searches for this sentence, so the model must learn to copy it.
            sentence = f"{reasoning}\nThe answer is {number}.".lstrip("\n")
            answer = sentence if "####" in answer else number
        if is_drawn and "\n\n" in answer:
            raise ValueError("an example must not contain a blank line, which may be a stop string")
        return question, answer

    def ask_question(self, question: str) -> str:
        """Return the question, up to where its answer begins."""
        return f"Q: {question}\nA:"

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return a verdict for each filter. The text ends where a stop string began."""
        (numeric, flexible), strict = numeric_and_flexible(text), strict_match(text)
        is_short = (
            len(strict or "") <= _MAX_CACHED_CHARS and len(flexible or "") <= _MAX_CACHED_CHARS
        )
        judge = _cached_verdicts if is_short else _build_verdicts
        return judge(problem.answer, numeric, strict, flexible).copy()

    def aggregate(self, scores: Sequence[SampleScore], options: ReportOptions) -> Report:
        """Return accuracy, also by steps of the reference solution, pass@k and maj@k."""
        title = "accuracy by steps of the reference solution"
        report = self.overall(scores, options)
        group_of = {problem.id: num_steps(problem) for problem in options.problems}
        return with_table(report, scores, title, "Steps", group_of)

    # Search

    def root(self, data: TaskData, problem: Problem) -> str:
        """Return the prompt up to where the reasoning begins."""
        return f"{data.fewshot}{self.ask(problem)}"

    def state(self, problem: Problem, text: str) -> str | None:
        """Return the reasoning so far; None if the model has written nothing but spaces."""
        return text if text.strip() or not text else None

    def done(self, problem: Problem, text: str) -> bool:
        """Return whether the answer is stated and its line has ended, or a stop string has come.

        A period does not end the line with the answer, because it may belong to 3.50.
        """
        return _before_stop(text) != text or (text.endswith("\n") and bool(_STATED.search(text)))

    def answer(self, problem: Problem, text: str) -> str | None:
        """Return the number that the reasoning gives as its answer."""
        return numeric_answer(_before_stop(text))

    def is_solved(self, problem: Problem, text: str) -> bool:
        """Return whether the answer equals the reference."""
        return self.score(problem, _before_stop(text))["numeric"].correct


def _before_stop(text: str) -> str:
    """Return a text up to the first stop string, after which the model makes up a new problem."""
    ends = [at for stop in _SEARCH_STOPS if (at := text.find(stop)) >= 0]
    return text[: min(ends, default=len(text))]


# A problem has many samples with few different answers, which are short unless they are runs of
# digits. So verdicts on short answers are cached.
_CACHE_SIZE: Final = 1 << 14
_MAX_CACHED_CHARS: Final = 64
_gold: Final = lru_cache(maxsize=1024)(canonical_number)
_exact_gold: Final = lru_cache(maxsize=1024)(exact_match_form)


def _build_verdicts(
    gold: str, numeric: str | None, strict: str | None, flexible: str | None
) -> dict[str, Verdict]:
    """Return the verdict of each filter on the answer that it has read."""
    verdicts = (
        _verdict(numeric, numeric is not None and numeric == _gold(gold)),
        _exact_match(gold, strict),
        _exact_match(gold, flexible),
    )
    return dict(zip(GSM8K.filters, verdicts, strict=True))


_cached_verdicts: Final = lru_cache(maxsize=_CACHE_SIZE)(_build_verdicts)


def _verdict(answer: str | None, right: bool) -> Verdict:
    # All samples with the same answer share one verdict object.
    return (_cached_verdict if len(answer or "") <= _MAX_CACHED_CHARS else Verdict)(answer, right)


_cached_verdict: Final = lru_cache(maxsize=_CACHE_SIZE)(Verdict)


def _exact_match(gold: str, answer: str | None) -> Verdict:
    form = None if answer is None else exact_match_form(answer)
    # lm-eval counts ".." as a wrong answer. Here it counts as no answer, so that it cannot win a
    # vote. The score is the same.
    if form is None or not _DIGIT.search(form):
        return _verdict(None, False)
    return _verdict(form, form == _exact_gold(gold))
