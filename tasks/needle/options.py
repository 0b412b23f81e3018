"""The options of the needle tasks: whole numbers within bounds, and lists of them."""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from treegen.errors import InputError
from treegen.evals.arguments import check_arguments
from treegen.evals.task import TaskOptions

_WHOLE: Final = re.compile(r"[0-9]{1,12}")
_STEPS: Final = re.compile(r"([0-9]{1,12})-([0-9]{1,12})/([0-9]{1,4})")
# General options that no needle task uses, because it makes its own problems.
_OTHERS: Final = ("split", "fewshot_file", "fewshot_data")


class NeedleOptions:
    """A needle task's own options. Names are checked at once, a value when it is read.

    known: the task's `arguments`.

    Args:
        unused: Further general options that the task does not use.

    Raises:
        InputError: There is no such option, or the task does not use it.
    """

    def __init__(
        self,
        options: TaskOptions,
        task: str,
        arguments: Mapping[str, str],
        unused: Sequence[str] = (),
    ) -> None:
        check_arguments(task, options.extra, arguments)
        for name in (*_OTHERS, *unused):
            if getattr(options, name) is not None:
                raise InputError(
                    f"task {task!r} makes its own problems and has no use for {name}; leave it out"
                )
        self._extra = options.extra
        self._task = task

    def __contains__(self, name: str) -> bool:
        """Return whether the option was set."""
        return name in self._extra

    def text(self, name: str, default: str = "") -> str:
        """Return a text that is not blank.

        Raises:
            InputError: The argument is blank.
        """
        value = self._extra.get(name, default)
        if not value.strip():
            raise InputError(f"task argument {name} is empty; give a text, or leave it out")
        return value

    def whole(self, name: str, default: int, low: int, high: int) -> int:
        """Return a whole number.

        Args:
            name: Name of the argument.
            default: The number if the argument is not set.
            low: The lowest allowed number.
            high: The highest allowed number.

        Raises:
            InputError: The argument is not such a number.
        """
        (number,) = _numbers(name, [self._extra.get(name, str(default))], low, high)
        return number

    def wholes(self, name: str, default: Sequence[int], low: int, high: int) -> tuple[int, ...]:
        """Return ascending whole numbers from "1000,2000", or "1000-16000/16" for 16 even steps.

        Args:
            name: Name of the argument.
            default: The numbers if the argument is not set.
            low: The lowest allowed number.
            high: The highest allowed number.

        Raises:
            InputError: The argument is not such a list.
        """
        if name not in self._extra:
            return tuple(default)
        text = self._extra[name].strip()
        steps = _STEPS.fullmatch(text)
        words = text.split(",")
        if steps:
            first, last, num = (int(part) for part in steps.groups())
            if first >= last or num < 2:
                raise InputError(
                    f"task argument {name} must count up in 2 steps or more, as in 1000-16000/16, "
                    f"got {text!r}"
                )
            words = [str(round(first + (last - first) * i / (num - 1))) for i in range(num)]
        numbers = _numbers(name, words, low, high)
        if len(set(numbers)) < len(numbers):
            raise InputError(f"task argument {name} has a number twice: {text!r}; give each once")
        return tuple(sorted(numbers))


def _numbers(name: str, words: Sequence[str], low: int, high: int) -> list[int]:
    # Only plain ASCII digits are valid. int() would also accept 1_000 and digits of other scripts.
    if not all(_WHOLE.fullmatch(word.strip()) for word in words):
        kind = "a whole number" if len(words) == 1 else "whole numbers with commas between"
        raise InputError(f"task argument {name} must be {kind}, got {','.join(words)!r}")
    numbers = [int(word) for word in words]
    for number in numbers:
        if not low <= number <= high:
            raise InputError(
                f"task argument {name} must be from {low:,} to {high:,}, got {number:,}"
            )
    return numbers
