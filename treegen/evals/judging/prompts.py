"""The prompts of a judging: for each answer, or pair of answers, each wording and each criterion.

They are flat. What they share is found in their tokens: the rubric by all prompts of a wording, the
question by those of a problem, the answer by its criteria, the whole prompt by its repeats.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from treegen.errors import InputError
from treegen.evals.job import Job
from treegen.evals.judging.answer_quoting import quote_answer
from treegen.evals.judging.judgement_files import Slot
from treegen.evals.judging.settings import JudgeRun
from treegen.evals.thinking import get_answer_text
from treegen.runs import RunDir


@dataclass(frozen=True, slots=True)
class JudgedCase:
    """What one prompt is about.

    shown: the (run, sample) of each answer, in the order in which they are shown.
    """

    problem_id: str
    shown: tuple[tuple[int, int], ...]
    wording: int
    criterion: int

    @property
    def id(self) -> str:
        """The name of its prompt, by which it draws."""
        about = "-".join(f"{run}:{index}" for run, index in self.shown)
        return f"{self.problem_id}/{about}/{self.wording}/{self.criterion}"

    def slot(self, repeat: int) -> Slot:
        """Return what names one judgement."""
        return self.shown, self.wording, self.criterion, repeat


class AnswerSet:
    """The answers of runs of the same problems, and what was asked.

    questions, references: by problem. names: of the runs. texts: by problem, of each (run, sample).
    """

    def __init__(self, jobs: Sequence[Job], runs: Sequence[RunDir]) -> None:
        """Read the samples of runs; what a sample thinks is no part of its answer.

        Raises:
            InputError: there is no sample, or the runs are of other problems.
        """
        problems = jobs[0].data.problems
        self.questions = {problem.id: problem.question for problem in problems}
        self.references = {problem.id: problem.answer for problem in problems}
        self.groups = {problem.id: problem.group for problem in problems}
        self.names = [run.path.name for run in runs]
        self.texts: dict[str, dict[tuple[int, int], str]] = {p.id: {} for p in problems}
        for number, (job, run) in enumerate(zip(jobs, runs, strict=True)):
            if {p.id: p.question for p in job.data.problems} != self.questions:
                raise InputError(
                    f"{run.path} is of other problems than {runs[0].path}; compare runs of the same"
                )
            for record in run.records():
                key = number, int(record["sample_index"])
                self.texts[record["problem_id"]][key] = get_answer_text(record)
        if not any(self.texts.values()):
            raise InputError(f"{runs[0].path} has no sample to judge; finish the run first")

    def all(self) -> Iterator[tuple[str, int, str]]:
        """Yield problem, sample and text of each answer; the problem names runs but the first."""
        for problem_id, texts in self.texts.items():
            for (run, index), text in sorted(texts.items()):
                yield f"{problem_id} in {self.names[run]}" if run else problem_id, index, text

    def iterate_shown(self, *, pairs: bool) -> Iterator[tuple[str, tuple[tuple[int, int], ...]]]:
        """Yield each problem with what is judged at once, an answer or a pair in either order.

        Samples of one index make a pair, so that each is in as many pairs as any other.
        """
        for problem_id, texts in self.texts.items():
            if not pairs:
                for key in sorted(texts):
                    yield problem_id, (key,)
                continue
            runs = sorted({run for run, _ in texts})
            for first, second in combinations(runs, 2):
                for index in sorted(i for run, i in texts if run == first):
                    if (second, index) in texts:
                        yield problem_id, ((first, index), (second, index))
                        yield problem_id, ((second, index), (first, index))


def cases_of(answers: AnswerSet, judging: JudgeRun) -> list[JudgedCase]:
    """Return all that a judging asks, prompts that share most beside each other."""
    asked = judging.asked
    criteria = range(max(1, len(asked.rubric.criteria)))
    return [
        JudgedCase(problem_id, shown, wording, criterion)
        for wording in range(asked.wordings)
        for problem_id, shown in answers.iterate_shown(pairs=asked.rubric.pairs)
        for criterion in criteria
    ]


def prompt_of(
    case: JudgedCase, answers: AnswerSet, judging: JudgeRun, special: Sequence[str]
) -> tuple[str, str]:
    """Return the system turn and the user turn of a case.

    Args:
        special: The special tokens of the judge's tokenizer, which no answer may forge.
    """
    rubric = judging.asked.rubric
    texts = [
        quote_answer(answers.texts[case.problem_id][key], judging.mark, special)
        for key in case.shown
    ]
    values: dict[str, str] = {
        "question": answers.questions[case.problem_id],
        "reference": answers.references[case.problem_id],
        "criterion": rubric.criteria[case.criterion][0] if rubric.criteria else "",
        "answer": texts[0],
        "answer_a": texts[0],
        "answer_b": texts[-1],
    }
    body = rubric.templates[case.wording].render(values)
    return rubric.system, body + rubric.ending(reasons=judging.asked.verdicts == "samples")


def build_content(
    turns: tuple[str, str], *, chat: bool, lead: str
) -> str | list[Mapping[str, Any]]:
    """Return a prompt as a node takes it. lead: what the reply begins with, without chat."""
    system, user = turns
    if not chat:
        return f"{system}\n\n{user}{lead}" if system else f"{user}{lead}"
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": user}]
