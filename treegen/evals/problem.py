"""What a task asks: its problems, and the lines of its data that could not be used."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from treegen.common.checks import checked_class
from treegen.prompts.images.loading import ImageFile


@checked_class
@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to solve.

    id: its name, unique among a task's problems.
    question: the text that was asked, as the data has it.
    answer: the reference, in whatever form the task's `score` compares with.
    metadata: JSON values that a report may show; scoring does not need them.
    group: problems with one group, such as questions on one passage, are no independent draws, so
        error bars are clustered by it. Empty for a problem on its own.
    choices: texts that may follow the prompt. If there are any, nothing is drawn: the likeliest
        of them is the sample. All problems of a task have choices, or none has.
    openings: for each choice, a text that stands between the prompt and the choice. It is read and
        not scored. So texts that differ only there are told apart by what follows, which may be
        the same for all. Empty if the choices follow the prompt itself.
    images: what is asked about. In the question, "<image 1>" stands for the first, and so on; those
        that it does not name stand before it.
    messages: the chat that is asked, if it is not the question alone; the question is what people
        read of it. A part {"type": "image", "image": 0} stands for the first image, and so on.
    """

    id: str
    question: str
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    choices: tuple[str, ...] = ()
    group: str = ""
    openings: tuple[str, ...] = ()
    images: tuple[ImageFile, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()

    @property
    def content(self) -> list[str]:
        """The fields that samples and their scores depend on."""
        files = (image.sha256 for image in self.images)
        chat = [json.dumps(self.messages, sort_keys=True)] if self.messages else []
        return [self.id, self.question, self.answer, *self.choices, *self.openings, *files, *chat]

    @property
    def candidates(self) -> tuple[str, ...]:
        """Each choice after its opening: the texts that a sample can be."""
        if not self.openings:
            return self.choices
        pairs = zip(self.openings, self.choices, strict=True)
        return tuple(f"{opening}{choice}" for opening, choice in pairs)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A line of the data that cannot be run, and why."""

    source: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.source}, line {self.line}: {self.reason}"
