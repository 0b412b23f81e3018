"""The options of the needle tasks: whole numbers within bounds, lists of them, and lengths.

Lengths are characters, which need no model, or tokens of a tokenizer that the user names.
`fit_length` finds how much filler makes a text of a given length.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


ARGUMENT: Final = (
    "checkpoint or hub name; lengths are then tokens of its tokenizer (default: characters)"
)
SHORTER: Final = "shorten them with -T lengths=N,... (characters, or tokens of -T tokenizer=DIR)"
# Characters per token, to convert lengths. English has a little over four.
_CHARS_PER_TOKEN: Final = 4
_MAX_TRIES: Final = 40


@dataclass(frozen=True, slots=True)
class Measure:
    """A unit of length."""

    unit: str
    """Its name, in the plural."""
    count: Callable[[str], int]
    """Returns the length of a text."""
    per_token: int
    """Approximate number of units per token."""


def measure_of(options: NeedleOptions) -> Measure:
    """Return the unit of a task's lengths: tokens if its option `tokenizer` is set.

    Raises:
        ModelError: The tokenizer cannot be loaded.
    """
    if "tokenizer" not in options:
        return Measure("characters", len, _CHARS_PER_TOKEN)
    name = options.text("tokenizer").strip()
    # This imports torch and transformers, which are not needed to make problems of characters.
    from treegen.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(name)

    def count(text: str) -> int:
        return len(tokenizer(text, verbose=False)["input_ids"])

    return Measure("tokens", count, 1)


def fit_length(
    build: Callable[[int], str], measure: Measure, length: int, *, what: str, start: int = 0
) -> int:
    """Return a filler size, in characters, that makes a text close to `length` but not longer.

    Args:
        build: Makes the text for a filler size.
        measure: The unit of `length`.
        length: Maximum length of the text.
        what: The name of the text, for the error.
        start: A size to try first, such as that of a similar text.

    Raises:
        InputError: The text is longer than `length` without any filler.
    """
    empty = measure.count(build(0))
    if empty > length:
        raise InputError(
            f"{what} takes {empty:,} {measure.unit} without any filler, but the length is "
            f"{length:,}; ask for a longer text or less in it"
        )
    # Texts grow nearly in proportion to their filler. So each guess lies on the straight line from
    # the text without filler through the last try. It stays between the largest size that is known
    # to fit and the smallest size that is known to be too long.
    close = max(16, length // 1000)
    fits, used = 0, empty
    too_long: int | None = None
    rate = _CHARS_PER_TOKEN / measure.per_token
    guess = start or int((length - empty) * rate)
    for _ in range(_MAX_TRIES):
        if too_long is not None:
            guess = min(guess, too_long - 1)
        if guess <= fits or length - used <= close:
            break
        size = measure.count(build(guess))
        if size > length:
            too_long = guess
        else:
            fits, used = guess, size
        if size > empty:
            rate = guess / (size - empty)
        guess = int((length - empty) * rate) - (size > length)
        if too_long is not None and not fits < guess < too_long:
            guess = (fits + too_long) // 2
    return fits
