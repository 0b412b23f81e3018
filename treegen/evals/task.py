"""The base class of tasks: a task provides problems, a prompt tree and scores.

A task is data, a tree, a score and a way to aggregate. It neither samples nor prints. Scoring needs
only a problem and a text, so any stored text can be scored again without a model.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treegen.common.checks import checked_class
from treegen.common.params import SamplingParams
from treegen.errors import InputError, arg
from treegen.evals.chat import Turn
from treegen.evals.problem import Problem, Skipped
from treegen.evals.statistics.metrics import Report, ReportOptions
from treegen.evals.verdict import AnswerType, SampleScore, Verdict
from treegen.prompts.tree import Node

if TYPE_CHECKING:
    from treegen.common.spec import ModelSpec
    from treegen.prompts.images.table import ImageTable


@checked_class
@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """The user's choices about a task's data; every task takes the same ones."""

    data: str | None = None
    """A file, a directory with one file per split, or a name that the task knows. None is the small
    data set that comes with treegen."""
    split: str | None = None
    """Which split of a directory or a named data set; None is the task's own default."""
    num_fewshot: int | None = None
    """Few-shot examples before each problem; None is the task's own default."""
    fewshot_file: str | None = None
    """A JSONL file of examples, taken from its start."""
    fewshot_data: str | None = None
    """Draw the examples by `seed` from this file; "train" is the data's train split."""
    limit: int | float | str | None = None
    """The number of problems to run, from the first; a fraction below 1; or "10-20", the tenth to
    the twentieth."""
    ids: Sequence[str] | None = None
    """Run these problems only, in this order."""
    seed: int = 0
    """Decides which examples are drawn from `fewshot_data`."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Arguments that only this task knows, by name; see its `arguments`."""
    run_dir: Path | None = None
    """The directory of a run that is resumed or read. Its stored images replace images that can no
    longer be read. None for a new run; users do not set it."""

    def __post_init__(self) -> None:
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise InputError(f"{arg('num_fewshot')} must be at least 0, got {self.num_fewshot}")
        if self.fewshot_file is not None and self.fewshot_data is not None:
            raise InputError(
                f"{arg('fewshot_file')} and {arg('fewshot_data')} cannot be used together; "
                "remove one of the two arguments"
            )
        if self.limit is not None and self.ids is not None:
            raise InputError(
                f"{arg('limit=')} and {arg('ids=')} cannot be used together; remove one of the two "
                "arguments"
            )


@checked_class
@dataclass(frozen=True, slots=True)
class TaskDefaults:
    """How a task is sampled if the user does not choose."""

    sampling: SamplingParams
    num_samples: int
    num_fewshot: int


@checked_class
@dataclass(frozen=True, slots=True)
class TaskData:
    """What `Task.load` returns: the problems to run and the text that all of them share."""

    problems: tuple[Problem, ...]
    """In the order in which they run."""
    source: str
    """Where they come from, for people."""
    fewshot: str = ""
    """The few-shot examples, formatted as the text before every problem; may be empty."""
    num_fewshot: int = 0
    """How many examples each problem has."""
    skipped: tuple[Skipped, ...] = ()
    """Unusable lines of the data; everything else runs."""
    fewshot_of: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Examples by group of problems; empty if all problems share theirs."""
    turns: tuple[Turn, ...] = ()
    """The examples of `fewshot` as questions and answers, for chat."""
    form: str = ""
    """The name of the prompt form, if problems and examples do not imply it."""
    label: str = ""
    """Distinguishes these problems or prompts from others of the task, for tables."""
    notes: tuple[str, ...] = ()
    """Lines that a reader of the scores must know."""
    scored: bool = False
    """Whether the model scores fixed texts of each problem instead of drawing samples."""

    @property
    def examples(self) -> Any:
        """Everything that prompts consist of besides their problems, as JSON values."""
        if self.form:
            return [self.fewshot, dict(self.fewshot_of), self.form]
        return [self.fewshot, dict(self.fewshot_of)] if self.fewshot_of else self.fewshot

    @property
    def fingerprint(self) -> str:
        """A hash of everything here that prompts and scores depend on."""
        content = [self.examples, [problem.content for problem in self.problems]]
        return hashlib.sha256(json.dumps(content).encode("ascii")).hexdigest()


class Task(ABC):
    """Problems with a prompt tree, a score and a way to aggregate.

    A task inherits from this class and defines the abstract members: `name`, `version`, `filters`,
    `defaults`, `load`, `tree`, `score` and `aggregate`. The class is called without arguments. A
    member that is no method may be a class attribute or a property.

    The other members have defaults: `arguments`, `answer_types`, `shorter`, `needs_data`,
    `limits_parts`, `executes_code`, `open_scoring`, `compares_formulas`, `rubric`, `place`,
    `configure`, `requests` and `verdicts`.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name by which users select the task."""

    @property
    @abstractmethod
    def version(self) -> str:
        """The version; it changes when samples or scores change.

        A run of another version cannot be resumed.
        """

    @property
    @abstractmethod
    def filters(self) -> tuple[str, ...]:
        """Names of the ways to read an answer from a text; the first is used for headlines."""

    @property
    @abstractmethod
    def defaults(self) -> TaskDefaults:
        """How the task is sampled if the user does not choose."""

    @abstractmethod
    def load(self, options: TaskOptions) -> TaskData:
        """Read the problems that `options` select; `treegen.tasks.select` chooses them.

        Raises:
            DataError: the data cannot be used.
        """

    @abstractmethod
    def tree(self, data: TaskData, num_samples: int) -> Node:
        """Return the prompt tree: one sampled node per problem, with the problem's id."""

    @abstractmethod
    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return one verdict for each filter, for any text."""

    @abstractmethod
    def aggregate(self, scores: Sequence[SampleScore], options: ReportOptions) -> Report:
        """Return the metrics over all scored samples; their order must not matter."""

    @property
    def arguments(self) -> Mapping[str, str]:
        """The arguments that the task reads from `TaskOptions.extra`, with a line of help each."""
        return {}

    @property
    def answer_types(self) -> Mapping[str, AnswerType]:
        """By filter, the type that decides which answers are equal without being equal strings.

        Votes and reports then count equal answers as one.
        """
        return {}

    @property
    def shorter(self) -> str | None:
        """How the user can shorten prompts, for the error about prompts that do not fit."""
        return None

    @property
    def needs_data(self) -> str:
        """What the user must pass as data, if the task has no data of its own; otherwise empty."""
        return ""

    @property
    def limits_parts(self) -> bool:
        """Whether `load` applies the limit itself, to each part of the task."""
        return False

    @property
    def executes_code(self) -> bool:
        """Whether scoring runs programs that a model has written, which the user must allow.

        Such a task also defines `open_scoring`.
        """
        return False

    @property
    def compares_formulas(self) -> bool:
        """Whether the first filter compares answers as mathematics."""
        kind = self.answer_types.get(self.filters[0]) if self.filters else None
        return bool(getattr(kind, "compares_formulas", False))

    @property
    def rubric(self) -> str:
        """The name of the rubric by which a judge grades answers if the user names none."""
        return "correctness"

    @property
    def place(self) -> str | None:
        """The name by which another process finds the task, if it is an lm-eval task."""
        return None

    def configure(self, arguments: Mapping[str, str]) -> None:
        """Receive the arguments before `defaults` is read; for defaults that depend on them."""
        return

    def requests(
        self,
        data: TaskData,
        settings: Any,
        tokenizer: Any,
        spec: "ModelSpec",
        images: "ImageTable | None",
    ) -> Any:
        """Return the requests of a task that tokenizes its prompts itself.

        Args:
            data: The loaded problems.
            settings: The run's `EvalSettings`.
            tokenizer: The model's tokenizer.
            spec: The model's specification, which has the context length.
            images: The model's images; None if it takes none.

        Returns:
            A `treegen.evals.multiple_choice.OwnRequests`; None if treegen tokenizes the prompts
            of `tree`.
        """
        return None

    def verdicts(self, problem: Problem, record: Mapping[str, Any]) -> Mapping[str, Verdict] | None:
        """Return the verdicts on a stored sample that need more than its text.

        Args:
            problem: The problem that the sample answers.
            record: The sample's line of samples.jsonl.

        Returns:
            What `score` returns; None if the text is enough, so that `score` is called.
        """
        return None

    def open_scoring(self, run: Any, execution: Any) -> Any:
        """Return the scoring of a run's samples, which are programs; see `executes_code`.

        Args:
            run: The `RunDir` of the run.
            execution: The `ExecutionOptions`; None to read stored verdicts only.

        Returns:
            A `treegen.evals.scoring.code_execution.ProgramScoring`.
        """
        raise NotImplementedError
