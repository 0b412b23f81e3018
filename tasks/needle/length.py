"""Measures the length of a text, and finds how much filler makes a text of a given length.

Lengths are characters, which need no model, or tokens of a tokenizer that the user names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from treegen.errors import InputError
from treegen.tasks.needle.options import NeedleOptions

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
