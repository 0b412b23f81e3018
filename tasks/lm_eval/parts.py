"""One task of lm-eval in a run of one or several tasks: its documents, as problems."""

import json
from dataclasses import dataclass, field
from typing import Any

from treegen.errors import DataError, InputError
from treegen.evals.problem import Problem
from treegen.evals.selection import parse_limit
from treegen.evals.task import TaskOptions
from treegen.prompts.images.loading import ImageFile, as_file
from treegen.tasks.lm_eval.load import KINDS, quiet, use_default_seeds

FEWSHOT_SEED = 1234


@dataclass(frozen=True, slots=True, eq=False)
class TaskPart:
    """One task of lm-eval with its settings and documents."""

    name: str
    task: Any
    num_fewshot: int
    """Number of few-shot examples."""
    seed: int
    """The seed by which examples are drawn."""
    docs: dict[str, Any] = field(default_factory=dict)
    """The selected documents by problem id, in the order of the data."""
    indices: tuple[int, ...] = ()
    """Their indices in the data."""
    is_whole: bool = True
    """Whether all documents are selected."""

    @property
    def ids(self) -> list[str]:
        """The ids of the problems, in the order of the data."""
        return list(self.docs)

    @property
    def scored(self) -> bool:
        """Whether the task scores given texts, so nothing is sampled."""
        return is_scored(self.task)

    @property
    def version(self) -> str:
        """The version of the task."""
        return str(self.task.VERSION)

    @property
    def repeats(self) -> int:
        """Number of samples of each document that the task requests and scores together."""
        return int(self.task.get_config("repeats") or 1)

    @property
    def filters(self) -> list[str]:
        """The names of the task's filters."""
        return [ensemble.name for ensemble in self.task._filters]

    def ready(self) -> Any:
        """Return the task with this run's examples set, because several runs may share a task."""
        self.task.set_config(key="num_fewshot", value=self.num_fewshot)
        self.task.set_fewshot_seed(seed=self.seed)
        return self.task

    def problems(self) -> list[Problem]:
        """Return the selected documents as problems."""
        return [_problem(self.task, name, doc) for name, doc in self.docs.items()]


def is_scored(task: Any) -> bool:
    """Return whether a task scores given texts. Raise InputError if its type is unknown."""
    kind = task.OUTPUT_TYPE
    if kind not in KINDS:
        raise InputError(f"the lm-eval output type {kind!r} is not supported; use another task")
    return bool(kind != "generate_until")


def part_of(name: str, task: Any, options: TaskOptions, seed: int) -> TaskPart:
    """Return a task with the documents that the options select.

    Args:
        name: Name of the task.
        task: lm-eval's task.
        options: Options of the run.
        seed: The seed by which examples are drawn.

    Raises:
        InputError: The limit or the ids are invalid.
    """
    num_fewshot = task.get_config("num_fewshot") if task.get_config("num_fewshot") else 0
    # As in lm-eval, 0 in a task's file means that it never has examples.
    if options.num_fewshot is not None and task.get_config("num_fewshot") != 0:
        num_fewshot = options.num_fewshot
    with quiet(), use_default_seeds():
        docs = list(task.eval_docs)
    if options.ids is not None:
        ids = set(options.ids)
        chosen = [at for at in range(len(docs)) if f"{name}/{at}" in ids]
    else:
        start, stop = parse_limit(options.limit, len(docs))
        chosen = list(range(start, stop))
    documents = {f"{name}/{at}": docs[at] for at in chosen}
    return TaskPart(
        name, task, num_fewshot, seed, documents, tuple(chosen), len(chosen) == len(docs)
    )


def _problem(task: Any, name: str, doc: Any) -> Problem:
    target: Any = task.doc_to_target(doc)
    choices: tuple[str, ...] = ()
    if task.OUTPUT_TYPE == "multiple_choice" and hasattr(task, "doc_to_choice"):
        choices = tuple(map(_text, task.doc_to_choice(doc)))
    question: Any = task.doc_to_text(doc)
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        question, target = target, ""
    right = question if isinstance(question, int) and choices else target
    if isinstance(right, int) and not isinstance(right, bool) and 0 <= right < len(choices):
        target = choices[right]
    if isinstance(question, int):  # each choice has its own context
        question = " / ".join(choices)
    if task.OUTPUT_TYPE == "loglikelihood":
        choices = (_text(target),)
    images = images_of_doc(task, name, doc)
    # A scored problem must have choices. One empty text represents a whole text, or unknown
    # choices.
    empty_choice = ("",) if is_scored(task) else ()
    return Problem(
        name, _text(question), _text(target), choices=choices or empty_choice, images=images
    )


def images_of_doc(task: Any, name: str, doc: Any) -> tuple[ImageFile, ...]:
    """Return the images of a document.

    Args:
        task: lm-eval's task.
        name: The id of the problem.
        doc: The document.

    Raises:
        DataError: An image cannot be used.
    """
    if not task.get_config("doc_to_image"):
        return ()
    from treegen.integrations.lm_eval.conversion import as_image_list

    try:
        return tuple(
            ImageFile.within(as_file(image), f"{name}-{number}")
            for number, image in enumerate(as_image_list(task.doc_to_image(doc)), start=1)
        )
    except InputError as error:
        raise DataError(f"{name}: {error}") from None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
