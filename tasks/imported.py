"""The problems of an imported log, whose samples keep the verdicts of the log."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

from treegen.common.params import SamplingParams
from treegen.errors import DataError, InputError, RunError
from treegen.evals.arguments import check_arguments
from treegen.evals.problem import Problem
from treegen.evals.selection import select
from treegen.evals.statistics.metrics import Report, ReportOptions, clusters_of, mean_row
from treegen.evals.statistics.tables import problem_values
from treegen.evals.task import TaskData, TaskDefaults, TaskOptions
from treegen.evals.verdict import SampleScore, Verdict
from treegen.runs.files import parse_json
from treegen.tasks.common.files import read_rows
from treegen.tasks.common.sources import problems_of
from treegen.tasks.common.text_task import TextTask


class Imported(TextTask):
    """The task of a run from `treegen import`; name, version and filters come from the log."""

    name = "imported"
    version = "0"
    filters: tuple[str, ...] = ("score",)
    arguments: ClassVar = {
        "name": "the task's name in the log; default: imported",
        "version": "the task's version in the log; default: 0",
        "filters": "the names of the log's scores, as a JSON list; default: one, score",
        "recorded": "the names of the settings that the log contains, as a JSON list; no default",
        "fewshot": "few-shot examples before each problem, as the log says; default: 0",
    }
    defaults: Final = TaskDefaults(sampling=SamplingParams(), num_samples=1, num_fewshot=0)

    _num_fewshot = 0  # until `configure` sets that of the log

    def configure(self, arguments: Mapping[str, str]) -> None:
        """Set the name, version and filters of the log's task.

        Raises:
            InputError: An argument is unknown, or `filters` is not a list of names.
        """
        check_arguments("imported", arguments, self.arguments)
        self.name = arguments.get("name") or self.name
        self.version = arguments.get("version") or self.version
        try:
            filters = parse_json(arguments.get("filters", '["score"]'))
            self._num_fewshot = int(arguments.get("fewshot", "0"))
        except ValueError as error:
            raise InputError(
                f"the arguments of an imported task are invalid: {error}; import the log again"
            ) from None
        is_list = isinstance(filters, list) and len(filters) > 0
        if not is_list or not all(isinstance(name, str) and name for name in filters):
            raise InputError(f"filters must be a JSON list of names, got {filters!r:.60}")
        self.filters = tuple(dict.fromkeys(filters))

    def load(self, options: TaskOptions) -> TaskData:
        """Read the problems that `treegen import` wrote.

        Raises:
            InputError: There is no file.
            DataError: The file cannot be read.
        """
        if options.data is None:
            raise InputError(
                "the task imported needs an imported log; create a run with `treegen import LOG`"
            )
        path = Path(options.data)
        problems, skipped = problems_of(read_rows(path), str(path), _problem)
        if skipped:
            raise DataError(f"{skipped[0]}; import the log again")
        return TaskData(
            problems=select(problems, options), source=str(path), num_fewshot=self._num_fewshot
        )

    def verdicts(self, problem: Problem, record: Mapping[str, Any]) -> dict[str, Verdict]:
        """Return the verdicts of the log, which are stored with the sample.

        A filter that did not score the sample is left out.

        Args:
            problem: The problem of the sample.
            record: The stored sample.

        Raises:
            RunError: The record has no verdicts, or an invalid one.
        """
        stored = record["verdicts"]
        try:
            return {
                name: Verdict(row["answer"], row["correct"], row.get("credit"))
                for name in self.filters
                if (row := stored.get(name)) is not None
            }
        except (KeyError, ValueError) as error:
            raise RunError(
                f"the verdicts of problem {problem.id!r:.60}, sample {record['sample_index']}, "
                f"are corrupt ({error}); import the log again"
            ) from None

    def aggregate(self, scores: Sequence[SampleScore], options: ReportOptions) -> Report:
        """Return the usual report, and the mean score of filters with partial credit.

        The mean is over problems, of the mean over their samples, as in the tools that write logs.

        Args:
            scores: The samples with their verdicts.
            options: Options of the report.
        """
        report = self.overall(scores, options)
        means = []
        for name in self.filters:
            verdicts = (sample.verdicts.get(name) for sample in scores)
            if not any(verdict is not None and verdict.credit is not None for verdict in verdicts):
                continue
            values = problem_values(scores, name)
            ids = [problem_id for problem_id in options.problem_ids if problem_id in values]
            clusters = clusters_of(options.problems, ids)
            row = mean_row([values[problem_id] for problem_id in ids], None, clusters)
            means.append(self.metric_row("mean_score", name, options, **row))
        return replace(report, metrics=(*report.metrics, *means))

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Raise InputError, because only the tool that wrote the log can score a new text.

        Raises:
            InputError: Always.
        """
        raise InputError(
            "new samples of an imported run cannot be scored, because the run has only the "
            "verdicts from the log"
        )


def _problem(row: dict[str, Any], line: int) -> Problem:
    fields = {name: row.get(name, "") for name in ("id", "question", "answer", "group")}
    if not all(isinstance(value, str) for value in fields.values()):
        raise ValueError("id, question, answer and group must be texts")
    prompt = row.get("prompt")
    return Problem(**fields, metadata={"prompt": prompt} if isinstance(prompt, str) else {})
