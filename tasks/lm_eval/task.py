"""A task, group or tag of lm-evaluation-harness as a task of treegen.

lm-eval's objects provide documents, prompts, requests, filters, metrics and aggregation.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from treegen.common.params import SamplingParams
from treegen.errors import InputError, arg
from treegen.evals.arguments import whole_number
from treegen.evals.problem import Problem
from treegen.evals.registry import LM_EVAL
from treegen.evals.selection import select
from treegen.evals.statistics.metrics import Report, ReportOptions
from treegen.evals.task import Task, TaskData, TaskDefaults, TaskOptions
from treegen.evals.thinking import get_answer_text
from treegen.evals.verdict import SampleScore, Verdict
from treegen.prompts.tree import Node
from treegen.tasks.lm_eval.load import LoadedTasks, lm_eval_version, load_tasks
from treegen.tasks.lm_eval.parts import FEWSHOT_SEED, TaskPart, is_scored, part_of

if TYPE_CHECKING:
    from treegen.common.spec import ModelSpec
    from treegen.evals.config.eval_settings import EvalSettings
    from treegen.evals.multiple_choice import OwnRequests
    from treegen.prompts.images.table import ImageTable


class LmEvalTask(Task):
    """The task for `lm-eval:TASK`, `lm-eval:TASK@DIR` or `path/to/task.yaml`."""

    arguments: Final = {
        "fewshot_seed": f"seed with which lm-eval draws few-shot examples; default: {FEWSHOT_SEED}",
    }
    limits_parts: Final = True
    shorter: Final = "lm-eval leaves out the first tokens of a prompt that is too long"

    def __init__(self, task_name: str) -> None:
        """Find the task and load its data.

        Args:
            task_name: Name of the task, in one of the three forms.

        Raises:
            InputError: lm-eval is not installed, has no such task, or the task cannot be run here.
            DataError: The data of the task cannot be loaded.
        """
        self._place = task_name
        self._loaded: LoadedTasks = load_tasks(task_name)
        self._parts: dict[str, TaskPart] = {}
        kinds = {is_scored(task) for task in self._tasks}
        if not kinds:
            raise InputError(
                f"{task_name} has no tasks; use a task, or a group that contains tasks"
            )
        if len(kinds) > 1:
            names = ",".join(self._loaded.leaves)
            raise InputError(
                f"{task_name} contains tasks that generate answers and tasks that score given "
                f"answers, which cannot share a run; pass the tasks instead: {LM_EVAL}{names}"
            )
        self._is_scored = kinds.pop()

    @property
    def _tasks(self) -> list[Any]:
        return list(self._loaded.leaves.values())

    @property
    def name(self) -> str:
        """The stored name of the task, without its folder, which may differ between machines."""
        return f"{LM_EVAL}{self._loaded.name}"

    @property
    def place(self) -> str:
        """The name by which the task was requested, in one of the three forms."""
        return self._place

    @cached_property
    def version(self) -> str:
        """The version of the task, or of the group."""
        if self._loaded.groups and self._loaded.groups[0].name == self._loaded.name:
            return str(self._loaded.groups[0].version)
        return str(self._tasks[0].VERSION)

    @cached_property
    def filters(self) -> tuple[str, ...]:
        """The filters that all tasks share; without any, "first", each task's first filter."""
        named = [[ensemble.name for ensemble in task._filters] for task in self._tasks]
        shared = [name for name in named[0] if all(name in names for names in named)]
        return tuple(dict.fromkeys(shared)) or ("first",)

    @cached_property
    def defaults(self) -> TaskDefaults:
        """How the first task is sampled; each prompt keeps its own task's settings."""
        first = self._tasks[0]
        sampling, repeats = SamplingParams(temperature=0.0), 1
        if not self._is_scored:
            # Import this only if needed: it takes seconds, and tasks without sampling do not use
            # it.
            from treegen.tasks.lm_eval.requests import default_params

            sampling = default_params(first.get_config("generation_kwargs") or {})
            repeats = max(int(task.get_config("repeats") or 1) for task in self._tasks)
        return TaskDefaults(sampling, repeats, first.get_config("num_fewshot") or 0)

    def load(self, options: TaskOptions) -> TaskData:
        """Return the documents of all tasks as problems.

        A limit applies to each task, as in lm-eval.

        Raises:
            InputError: An option does not apply to tasks of lm-eval, or no document is left.
        """
        for name in ("data", "split", "fewshot_file", "fewshot_data"):
            if getattr(options, name) is not None:
                raise InputError(
                    f"{arg(name + '=')} is not supported with lm-eval tasks, because their YAML "
                    "files set the data; write a YAML file that includes the file of the task, "
                    "and pass this file"
                )
        seed = whole_number(options.extra, "fewshot_seed") or FEWSHOT_SEED
        parts = [part_of(name, task, options, seed) for name, task in self._loaded.leaves.items()]
        self._parts = {part.name: part for part in parts}
        problems = tuple(problem for part in parts for problem in part.problems())
        if options.ids is not None:
            problems = select(problems, options)
        if not problems:
            raise InputError(f"{self._place} has no documents; check the data set in its YAML file")
        shots = {part.num_fewshot for part in parts}
        return TaskData(
            problems=problems,
            source=f"lm-eval {lm_eval_version()}, {self._loaded.name}",
            num_fewshot=max(shots),
            form=_form(parts),
            scored=self._is_scored,
        )

    def tree(self, data: TaskData, num_samples: int) -> Node:
        """Return a tree of the questions; prompts need a tokenizer, see `requests`."""
        return Node(
            "",
            children=[
                Node(problem.question, id=problem.id, samples=num_samples)
                for problem in data.problems
            ],
            samples=0,
        )

    def requests(
        self,
        data: TaskData,
        settings: "EvalSettings",
        tokenizer: Any,
        spec: "ModelSpec",
        images: "ImageTable | None",
    ) -> "OwnRequests":
        """Return lm-eval's requests as token ids.

        Args:
            data: The loaded problems.
            settings: Settings of the run.
            tokenizer: Tokenizer of the model.
            spec: Description of the model, which has the context length.
            images: The model's images; None if it takes none.

        Raises:
            InputError: As for `build_requests`.
            CapacityError: As for `build_requests`.
        """
        from treegen.tasks.lm_eval.requests import build_requests

        ids = [problem.id for problem in data.problems]
        chosen = {_leaf(name) for name in ids}
        parts = [part for part in self._parts.values() if part.name in chosen]
        return build_requests(parts, ids, settings, tokenizer, spec, images)

    def verdicts(self, problem: Problem, record: Mapping[str, Any]) -> dict[str, Verdict]:
        """Return lm-eval's verdicts on a stored sample, by filter."""
        return self._score(problem, record, get_answer_text(record))

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return lm-eval's verdicts on a text, by filter.

        Raises:
            InputError: The task scores given texts.
        """
        if self._is_scored:
            raise InputError(
                f"{self._place} scores given texts, not texts from a model; use evaluate"
            )
        return self._score(problem, {}, text)

    def get_documents(self) -> dict[str, Any]:
        """Return the document of each problem, by its id, for `treegen compare`."""
        return {name: doc for part in self._parts.values() for name, doc in part.docs.items()}

    def log_documents(self, settings: "EvalSettings") -> dict[str, dict[str, Any]]:
        """Return what lm-eval logs of each problem, by its id, for `treegen export`."""
        from treegen.tasks.lm_eval.requests import log_documents

        return log_documents(list(self._parts.values()), settings)

    def log_groups(self) -> dict[str, list[str]]:
        """Return the names of the members of each group, for `treegen export`."""
        return {
            group.name: [task.task_name for task in group.get_all_tasks()]
            for group in self._loaded.groups
        }

    def _score(self, problem: Problem, record: Mapping[str, Any], text: str) -> dict[str, Verdict]:
        from treegen.tasks.lm_eval.report import responses_of, score_responses

        part = self._parts[_leaf(problem.id)]
        verdicts = score_responses(
            part, part.docs[problem.id], responses_of(part, record, text), text
        )
        first = next(iter(verdicts.values()))
        return {**{name: verdicts.get(name, first) for name in self.filters}, **verdicts}

    def aggregate(self, scores: Sequence[SampleScore], options: ReportOptions) -> Report:
        """Return lm-eval's metrics of groups and tasks, and pass@k and maj@k."""
        from treegen.tasks.lm_eval.report import build_report

        parts, groups = list(self._parts.values()), self._loaded.groups
        # Filters that score all samples together give no verdict on one sample.
        filters = self.filters[:1] if any(part.repeats > 1 for part in parts) else self.filters
        return build_report(self.name, self.version, filters, parts, groups, scores, options)


def _leaf(problem_id: str) -> str:
    return problem_id.rpartition("/")[0]


def _form(parts: Sequence[TaskPart]) -> str:
    """Return a hash of the tasks' definitions and of the way examples are drawn."""
    definitions = []
    for part in parts:
        config = dict(part.task.dump_config())
        for name in ("metadata", "dataset_kwargs", "num_fewshot"):
            config.pop(name, None)
        definitions.append([part.name, part.num_fewshot, part.seed, config])
    text = json.dumps(definitions, sort_keys=True, default=_plain)
    return f"lm-eval:{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def _plain(value: object) -> str:
    """Return a part of a definition as text that is the same in every process."""
    return getattr(value, "__qualname__", type(value).__qualname__)
