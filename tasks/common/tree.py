"""The prompt tree of most tasks."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from treegen.evals.chat import with_turns
from treegen.evals.problem import Problem
from treegen.evals.task import TaskData
from treegen.prompts.images.loading import ImageFile, is_image
from treegen.prompts.tree import Message, Node

_PLACE: Final = re.compile(r"<image (\d{1,3})>")


def examples_above_problems(
    data: TaskData, num_samples: int, ask: Callable[[Problem], str]
) -> Node:
    """Return the tree examples -> problems -> samples, with two levels that samples share.

    Problems with images become chat messages.

    Args:
        data: Problems and solved examples.
        num_samples: Samples per problem.
        ask: Returns the prompt of a problem, to be placed below the examples.
    """
    children = [
        Node(build_content(problem, ask(problem)), samples=num_samples, id=problem.id)
        for problem in data.problems
    ]
    return with_turns(Node(data.fewshot, children=children), data.turns)


def build_content(problem: Problem, text: str) -> str | list[Message]:
    """Return the content of a problem's node: a text, or messages with images."""
    if problem.messages:
        return [_with_images(message, problem.images) for message in problem.messages]
    if not problem.images:
        return text
    return [{"role": "user", "content": interleave_images(text, problem.images)}]


def interleave_images(text: str, images: Sequence[ImageFile]) -> list[dict[str, Any]]:
    """Return a text with images as the parts of a message.

    Each "<image N>" is replaced by the N-th image, from 1. Images that the text does not name are
    put before the text.
    """
    pieces = _PLACE.split(text)  # alternating texts and numbers
    named = {int(number) for number in pieces[1::2]}
    before = [image.part for number, image in enumerate(images, 1) if number not in named]
    parts: list[dict[str, Any]] = []
    said = pieces[0]
    for number, after in zip(pieces[1::2], pieces[2::2], strict=True):
        if not 0 < int(number) <= len(images):
            said += f"<image {number}>{after}"
            continue
        parts += [{"type": "text", "text": said}, images[int(number) - 1].part]
        said = after
    parts.append({"type": "text", "text": said})
    return [*before, *(part for part in parts if part.get("text") != "")]


def _with_images(message: Message, images: Sequence[ImageFile]) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [images[part["image"]].part if is_image(part) else part for part in content]
    return {**message, "content": parts}
