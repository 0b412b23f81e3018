"""Base class of the tasks with code: options, prompts, scoring and the report.

Sampling needs no permission; scoring runs the programs, which the user must allow.
"""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

from treegen.common.params import SamplingParams
from treegen.evals.arguments import check_arguments, one_of
from treegen.evals.chat import Turn
from treegen.evals.problem import Problem
from treegen.evals.scoring.code_execution import ExecutionOptions
from treegen.evals.task import TaskData, TaskDefaults, TaskOptions
from treegen.runs import RunDir
from treegen.tasks.common.files import Rows
from treegen.tasks.common.sources import Source, describe_problems, make_data_label, problems_of
from treegen.tasks.common.text_task import select_task_data, with_examples
from treegen.tasks.programs.report import ProgramVerdict
from treegen.tasks.programs.scoring import SandboxScoring
from treegen.tasks.programs.task import ProgramCases, ProgramOutcome, ProgramTask, judge_limits
from treegen.tasks.sandbox import Limits, SandboxPool

FORMS: Final = ("completion", "chat")
FORM_HELP: Final = (
    "completion (default): the model continues the prompt, as published; or chat: the model "
    "answers with a code block"
)
TIMEOUT_HELP: Final = (
    "seconds of CPU time per {}; default {}; the wall-time limit is three times as long"
)
MEMORY_HELP: Final = "memory limit of a program, such as 512MiB; default 1GiB"


def code_arguments(seconds: int, of: str = "test", **more: str) -> dict[str, str]:
    """Return the arguments of a task in two forms, with a line of help each.

    Args:
        seconds: The default time limit, in seconds of CPU time.
        of: What has this limit, for the help text.
        more: The task's further arguments.
    """
    timeout = TIMEOUT_HELP.format(of, seconds)
    return {"form": FORM_HELP, **more, "timeout": timeout, "memory": MEMORY_HELP}


class CodeTask(ProgramTask):
    """Programs by pass@k. Subclasses define how rows become prompts and tests.

    `record` makes the record of a problem from its row.
    """

    source: ClassVar[Source]
    default_limits: ClassVar[Limits]
    """Limits of each test, unless the user sets others."""
    sampling: ClassVar[SamplingParams]
    """Sampling of the form "completion"; chats are longer, and have no stop strings."""
    num_samples: ClassVar[int] = 20
    """Default samples per problem."""
    num_shots: ClassVar[int] = 0
    """Default few-shot examples of the form "completion"."""
    extract = FORMS[0]

    def __init__(self) -> None:
        """Use the default options until `load` sets others."""
        super().__init__()
        self.limits = self.default_limits
        self.records: dict[str, Any] = {}

    @property
    def defaults(self) -> TaskDefaults:
        """The sampling, sample count and few-shot examples of the form."""
        if self.extract != FORMS[1]:
            return TaskDefaults(self.sampling, self.num_samples, self.num_shots)
        return TaskDefaults(
            replace(self.sampling, max_tokens=2048, stop=()), self.num_samples, num_fewshot=0
        )

    def configure(self, arguments: Mapping[str, str]) -> None:
        """Set the form from the task's arguments."""
        if "form" in self.arguments:
            self.extract = one_of(arguments, "form", FORMS, FORMS[0])

    @abstractmethod
    def record(self, row: dict[str, Any]) -> tuple[str, str, Any]:
        """Return the id, the prompt and the record of a row.

        Raises:
            ValueError: The row is unusable; the message has the reason.
        """

    @abstractmethod
    def make_cases(self, record: Any, judge: SandboxPool) -> ProgramCases:
        """Return the tests of a record."""

    def rows(self, options: TaskOptions) -> tuple[Rows, str]:
        """Return the rows that the options select, and the name of their source."""
        return self.source.read(options.data, options.split)

    def metadata(self, record: Any) -> dict[str, Any]:
        """Return the fields of a record that reports may show."""
        return {}

    def examples(self, options: TaskOptions, problems: Sequence[Problem]) -> tuple[Turn, ...]:
        """Return the few-shot examples, each as a prompt and the text that follows it."""
        self.check_no_examples(options)
        return ()

    def load(self, options: TaskOptions) -> TaskData:
        """Read problems and examples.

        Raises:
            InputError: An option is invalid, or there are too few examples.
            DataError: Problems or examples cannot be read.
        """
        check_arguments(self.name, options.extra, self.arguments)
        self.configure(options.extra)
        self.limits = judge_limits(options.extra, self.default_limits)
        self.forget_cases()
        rows, source = self.rows(options)
        records: dict[str, Any] = {}

        def make_problem(row: dict[str, Any], line: int) -> Problem:
            id, prompt, record = self.record(row)
            records[id] = record
            metadata = {**self.metadata(record), "line": line}
            # The tests themselves may take megabytes. Their digest is enough to detect a change.
            return Problem(id, prompt, f"tests {_digest(row)}", metadata)

        data = select_task_data(*problems_of(rows, source, make_problem), source, options)
        self.records = {problem.id: records[problem.id] for problem in data.problems}
        chat = "chat form" if self.extract == FORMS[1] else ""
        return replace(
            with_examples(data, self.examples(options, data.problems), gap=""),
            label=", ".join(filter(None, [self.label(options), chat])),
            notes=(self.describe_source(options, source, len(data.problems)),),
        )

    def label(self, options: TaskOptions) -> str:
        """Return a label that distinguishes these problems from others of the task, for tables."""
        return make_data_label(options.data)

    def describe_source(self, options: TaskOptions, source: str, num: int) -> str:
        """Return one line that names the source of the problems.

        Args:
            options: Options of the run.
            source: Name of the source.
            num: Number of problems.
        """
        return describe_problems(options.data, source, num)

    def score_outcome(self, problem_id: str, outcome: ProgramOutcome) -> dict[str, ProgramVerdict]:
        """Return the verdict on a program by filter."""
        return {self.filters[0]: without_credit(outcome)}

    def open_scoring(self, run: RunDir, execution: ExecutionOptions | None) -> SandboxScoring:
        """Return the verdicts on a run of the loaded task.

        Args:
            run: The run directory.
            execution: How programs may run; if None, only the stored verdicts are read.
        """
        return SandboxScoring(self, run, execution)

    def sample_of(self, prompt: str, solution: str) -> str:
        """Return a sample with a solution, in the form of the run.

        Args:
            prompt: The code that a completion continues.
            solution: The solution after it.
        """
        return solution if self.extract == FORMS[0] else f"```python\n{prompt}{solution}\n```"

    def read_cases(self, problem_id: str, judge: SandboxPool) -> ProgramCases:
        """Return the tests of a loaded problem."""
        return self.make_cases(self.records[problem_id], judge)


def check_name(value: object, field: str) -> None:
    """Raise ValueError if a field is not a Python name."""
    if not isinstance(value, str) or not value.isidentifier():
        raise ValueError(f"{field} {str(value)[:40]!r} is not a Python name")


def without_credit(outcome: ProgramOutcome) -> ProgramVerdict:
    """Return the verdict by all tests, without credit, because tests after a failure do not run."""
    return replace(outcome.verdicts, credit=None)


def _digest(row: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest()
