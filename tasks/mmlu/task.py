r"""MMLU: multiple-choice questions with four choices on 57 subjects, in two published forms.

Data: https://github.com/hendrycks/test, or cais/mmlu on the Hugging Face hub. One row of
test/anatomy_test.csv, and a prompt of the original form, few-shot examples left out (the two spaces
are the original's):

    A lesion causing compression of the facial nerve causes,paralysis.,loss of taste.,...,A

    The following are multiple choice questions (with answers) about  anatomy.

    A lesion causing compression of the facial nerve causes
    A. paralysis.
    B. loss of taste.
    C. ...
    D. ...
    Answer:

lm-eval's form has one space there, and no space around a question.

The examples of a subject are nodes above all its questions, so they are computed only once.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Final

from treegen.errors import DataError, InputError, arg
from treegen.evals.arguments import check_arguments, one_of, whole_number, words
from treegen.evals.chat import with_role, with_turns
from treegen.evals.problem import Problem, Skipped
from treegen.evals.selection import select
from treegen.evals.statistics.estimators import mean_of_means
from treegen.evals.statistics.metrics import MetricRow, Report, ReportOptions
from treegen.evals.statistics.tables import problem_values, table_by
from treegen.evals.task import TaskData, TaskOptions
from treegen.evals.truncation import mark_droppable
from treegen.evals.verdict import SampleScore, Verdict
from treegen.prompts.tree import Node
from treegen.tasks.common.letters import first_capital, letter_answer
from treegen.tasks.common.sources import TASK_PAGE, bundled_rows
from treegen.tasks.common.text_task import TextTask, greedy
from treegen.tasks.mmlu.data import LETTERS, Question, load_questions

CATEGORY_OF: Final = {
    subject: row["category"]
    for _, row in bundled_rows("mmlu_categories.jsonl")
    for subject in row["subjects"]
}


def subject_of(problem_id: str) -> str:
    """Return the subject in an id such as "anatomy-17"."""
    return problem_id.rpartition("-")[0]


def by_subject(overall: Report, scores: Sequence[SampleScore], options: ReportOptions) -> Report:
    """Return the report with means over subjects, and tables by category and subject.

    The mean over subjects follows each mean over questions. The tables have the mean of each
    category and of each subject, for the first filter.

    Args:
        overall: The report to extend.
        scores: Scores of the samples.
        options: Options of the report.
    """
    rows: list[MetricRow] = []
    for row in overall.metrics:
        rows.append(row)
        if row.metric in ("exact_match", "acc") and row.value is not None:
            rows.append(_macro(row, problem_values(scores, row.filter)))
    values = problem_values(scores, overall.metrics[0].filter)
    subjects = _groups(options.problem_ids, subject_of)
    categories = _groups(options.problem_ids, lambda name: CATEGORY_OF.get(subject_of(name), ""))
    categories.pop("", None)
    tables = [table_by("accuracy by subject", "Subject", list(subjects.items()), values)]
    if categories:
        table = table_by("accuracy by category", "Category", list(categories.items()), values)
        tables.insert(0, table)
    return replace(overall, metrics=tuple(rows), tables=tuple(tables))


def _groups(problem_ids: Iterable[str], group_of: Callable[[str], str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for problem_id in problem_ids:
        groups.setdefault(group_of(problem_id), []).append(problem_id)
    return dict(sorted(groups.items()))


def _macro(row: MetricRow, values: Mapping[str, float]) -> MetricRow:
    """Return the mean over subjects; its error bars are for other questions on these subjects."""
    groups = _groups(values, subject_of).values()
    mean = mean_of_means([[values[problem_id] for problem_id in ids] for ids in groups])
    fields = {name: getattr(mean, name) for name in ("value", "stderr", "low", "high")}
    return replace(row, metric=f"{row.metric}_macro", **fields)


_FORMS: Final = ("hendrycks", "lm-eval")
_ARGUMENTS: Final = {
    "subjects": "subjects, separated by commas; default: all",
    "per_subject": "number of questions from each subject, from the first; default: all",
}
_SHOTS: Final = 5


class SubjectTask(TextTask):
    """Questions on subjects, below the examples of each subject from the dev split.

    If a prompt does not fit the model's context, its last examples are left out.
    """

    choices: ClassVar[tuple[str, ...]] = ()
    """The texts to score; empty if answers are sampled."""
    needs_data = "a folder with dev/ and test/, or with hf for the hub"
    gap: ClassVar[str]
    """The text between a prompt and the letter of its answer."""

    def load(self, options: TaskOptions) -> TaskData:
        """Read the questions, and each subject's examples from the dev split in their order.

        Raises:
            InputError: An option is invalid, or there are too few examples.
            DataError: The data cannot be read, or have no usable question.
        """
        check_arguments(self.name, options.extra, self.arguments)
        if options.fewshot_file is not None or options.fewshot_data is not None:
            raise InputError(
                f"{self.name} uses the examples from the dev split; set only {arg('num_fewshot=')}"
            )
        num_shots = _SHOTS if options.num_fewshot is None else options.num_fewshot
        loaded = load_questions(
            options.data, options.split, words(options.extra, "subjects"), with_dev=num_shots > 0
        )
        skipped = list(loaded.skipped)
        problems: list[Problem] = []
        shots: dict[str, list[str]] = {}
        for subject, questions in loaded.test.items():
            dev = loaded.dev.get(subject, [])[:num_shots]
            if len(dev) < num_shots:
                raise InputError(
                    f"{arg('num_fewshot')} is {num_shots}, but the dev split of {subject} has "
                    f"{len(dev)} examples; lower the number"
                )
            shots[subject] = [
                f"{self.prompt(subject, self.block(question))}{self.gap}{question.answer}\n\n"
                for question in dev
            ]
            dev_keys = {question.key for question in dev}
            for question in questions[: whole_number(options.extra, "per_subject")]:
                if question.key in dev_keys:
                    reason = f"it is one of the examples of {subject}"
                    skipped.append(Skipped(loaded.source, question.line, reason))
                    continue
                name = f"{subject}-{question.index}"
                metadata = {"subject": subject, "line": question.line}
                text = self.block(question)
                problems.append(Problem(name, text, question.answer, metadata, self.choices))
        if not problems:
            reason = f"; {skipped[0]}" if skipped else ""
            raise DataError(f"{loaded.source} has no usable question{reason}{TASK_PAGE}")
        chosen = select(problems, options)
        used = {subject_of(problem.id) for problem in chosen}
        return TaskData(
            problems=chosen,
            source=loaded.source,
            num_fewshot=num_shots,
            fewshot_of={subject: shots[subject] for subject in shots if subject in used},
            skipped=tuple(skipped),
        )

    def block(self, question: Question) -> str:
        """Return a question with its choices."""
        return question.block

    @abstractmethod
    def prompt(self, subject: str, block: str) -> str:
        """Return the prompt of a question with its choices, up to the gap before its answer."""

    def header(self, data: TaskData, subject: str) -> Node:
        """Return the node above the examples of a subject, without children."""
        return Node("")

    def ask(self, problem: Problem) -> str:
        """Return the prompt of a problem, to be placed below the examples."""
        return self.prompt(subject_of(problem.id), problem.question)

    def tree(self, data: TaskData, num_samples: int) -> Node:
        """Return the tree subject -> examples -> questions."""
        questions_of: dict[str, list[Node]] = {}
        for problem in data.problems:
            leaf = Node(self.ask(problem), samples=num_samples, id=problem.id)
            questions_of.setdefault(subject_of(problem.id), []).append(leaf)
        subjects = []
        for subject, leaves in questions_of.items():
            children = leaves
            for shot in reversed(data.fewshot_of[subject]):
                # An example ends with the gap, and its letter.
                example = shot.rstrip()
                turn = (example[:-2], example[-1])
                children = [with_turns(mark_droppable(Node(shot, children=children)), [turn])]
            subjects.append(replace(self.header(data, subject), children=children))
        return Node("", children=subjects)


class MMLU(SubjectTask):
    """MMLU by likelihood: the answer is the most likely of " A" to " D" after the prompt."""

    name = "mmlu"
    filters = ("none",)
    arguments: ClassVar = {
        "form": "prompt format: hendrycks (the original, the default) or lm-eval",
        **_ARGUMENTS,
    }
    # Nothing is sampled. The only sample of a problem is its most likely choice.
    defaults: Final = greedy(max_tokens=1, num_fewshot=_SHOTS)
    choices = tuple(f" {letter}" for letter in LETTERS)
    gap = " "
    _form = _FORMS[0]  # until `load` sets another

    def load(self, options: TaskOptions) -> TaskData:
        """Read questions and examples, as `SubjectTask.load` does, for prompts of a form."""
        self._form = one_of(options.extra, "form", _FORMS, _FORMS[0])
        # The default form is stored as empty, as in runs from versions with only one form.
        stored = self._form if self._form != _FORMS[0] else ""
        return replace(super().load(options), form=stored, label=f"{self._form} form")

    def block(self, question: Question) -> str:
        """Return a question with its choices, in lm-eval's form without space around it."""
        is_stripped = self._form == "lm-eval"
        return (
            replace(question, text=question.text.strip()).block if is_stripped else question.block
        )

    def prompt(self, subject: str, block: str) -> str:
        """Return the prompt of a question with its choices."""
        return f"{block}\nAnswer:"

    def header(self, data: TaskData, subject: str) -> Node:
        """Return the description of a subject, which lm-eval puts in the system turn of a chat."""
        # The original writes a space before each word of the subject, so there are two before the
        # first.
        name = f"{'' if data.form else ' '}{subject.replace('_', ' ')}"
        header = Node(
            f"The following are multiple choice questions (with answers) about {name}.\n\n"
        )
        return with_role(header, "system") if data.form else header

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return whether the chosen text is the right letter."""
        return {"none": _verdict(text.strip(), problem)}

    def aggregate(self, scores: Sequence[SampleScore], options: ReportOptions) -> Report:
        """Return accuracy over all questions, over subjects, by category and by subject."""
        overall = self.overall(scores, options)
        # Only accuracy is meaningful: the most likely choice is always readable and complete, and
        # one sample has no vote. Normalizing by length would change nothing, because all choices
        # are one letter.
        accuracy = tuple(row for row in overall.metrics if row.metric in ("exact_match", "acc"))
        report = by_subject(replace(overall, metrics=accuracy, majority=()), scores, options)
        named = (replace(r, metric=r.metric.replace("exact_match", "acc")) for r in report.metrics)
        return replace(report, metrics=tuple(named))


class MMLUGenerate(SubjectTask):
    """MMLU by generating a letter, in the form of RelayAttention's benchmark.

    Two filters read the same texts. `letter`, the headline, finds the letter that a text gives as
    its answer; `first-capital` is the original's rule, which finds T in "The answer is B".
    """

    name = "mmlu-generate"
    version = "2"
    filters = ("letter", "first-capital")
    arguments = _ARGUMENTS
    # The original has no stop string. This one begins a question that the model makes up.
    defaults: Final = greedy(
        max_tokens=32, stop=("There is a single choice question",), num_fewshot=_SHOTS
    )
    gap = "\n"

    def prompt(self, subject: str, block: str) -> str:
        """Return the prompt of a question with its choices."""
        return (
            f"There is a single choice question about {subject.replace('_', ' ')}. "
            f"Answer the question by replying A, B, C or D.\nQuestion: {block}\nAnswer: "
        )

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return a verdict for each filter. The text ends where a stop string began."""
        return {
            "letter": _verdict(letter_answer(text), problem),
            "first-capital": _verdict(first_capital(text), problem),
        }

    def aggregate(self, scores: Sequence[SampleScore], options: ReportOptions) -> Report:
        """Return accuracy over all questions, over subjects, by category and by subject."""
        return by_subject(self.overall(scores, options), scores, options)


def _verdict(letter: str | None, problem: Problem) -> Verdict:
    if letter is None or letter not in tuple(LETTERS):
        return Verdict(None, False)
    return Verdict(letter, letter == problem.answer)
