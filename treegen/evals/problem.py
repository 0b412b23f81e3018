"""The problems of a task, and the lines of its data that could not be used."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from treegen.prompts.images.loading import ImageFile


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem to solve."""

    id: str
    """Its name, unique among a task's problems."""
    question: str
    """The text of the question, as the data has it."""
    answer: str
    """The reference, in whatever form the task's `score` compares with."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """JSON values that a report may show; scoring does not need them."""
    choices: tuple[str, ...] = ()
    """Texts that may follow the prompt. If there are any, nothing is drawn: the most likely of them
    is the sample. Either all problems of a task have choices, or none has."""
    group: str = ""
    """Problems of one group, such as questions on one passage, are not independent draws, so error
    bars are clustered by it. Empty for an independent problem."""
    openings: tuple[str, ...] = ()
    """For each choice, a text between the prompt and the choice. The model reads it, and it is not
    scored. So openings can differ while the scored text, the choice, is the same for all. Empty if
    the choices follow the prompt itself."""
    images: tuple[ImageFile, ...] = ()
    """The images of the question. In the question, "<image 1>" marks the first, and so on; images
    that the question does not mention are placed before it."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The chat that the model gets, if it is not the question alone; the question is its readable
    form. A part {"type": "image", "image": 0} marks the first image, and so on."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The problem's line in the data file, for exports; no sample or score depends on it."""

    @property
    def content(self) -> list[str]:
        """The fields that samples and their scores depend on."""
        files = (image.sha256 for image in self.images)
        chat = [json.dumps(self.messages, sort_keys=True)] if self.messages else []
        return [self.id, self.question, self.answer, *self.choices, *self.openings, *files, *chat]

    @property
    def candidates(self) -> tuple[str, ...]:
        """Each choice after its opening: the possible texts of a sample."""
        if not self.openings:
            return self.choices
        pairs = zip(self.openings, self.choices, strict=True)
        return tuple(f"{opening}{choice}" for opening, choice in pairs)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A line of the data that cannot be run, and the reason."""

    source: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.source}, line {self.line}: {self.reason}"


def list_references(answer: str) -> list[str]:
    """Return the right answers of a reference: tasks store several as a JSON list of texts.

    Args:
        answer: The reference as `Problem.answer` has it.
    """
    if answer.startswith("["):
        with suppress(ValueError, RecursionError):
            answers = json.loads(answer)
            if answers and all(isinstance(accepted, str) for accepted in answers):
                return list(answers)
    return [answer]


def readable_reference(answer: str) -> str:
    """Return a reference for people.

    Args:
        answer: The reference as `Problem.answer` has it.
    """
    return " or ".join(list_references(answer))
