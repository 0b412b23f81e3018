"""How long a text is, and how much filler makes one as long as was asked for.

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
# What an answer takes where lengths are characters; English has a little over four.
_CHARS_PER_TOKEN: Final = 4
_MAX_TRIES: Final = 40


@dataclass(frozen=True, slots=True)
class Measure:
    """A unit of length; per_token: how many of it a token takes."""

    unit: str
    count: Callable[[str], int]
    per_token: int


def measure_of(options: NeedleOptions) -> Measure:
    """Return the unit of a task's lengths: tokens if its option `tokenizer` is given."""
    if "tokenizer" not in options:
        return Measure("characters", len, _CHARS_PER_TOKEN)
    name = options.text("tokenizer").strip()
    # Brings torch and transformers, which no other way of making the problems needs.
    from treegen.model.files import load_tokenizer

    tokenizer = load_tokenizer(name)

    def count(text: str) -> int:
        return len(tokenizer(text, verbose=False)["input_ids"])

    return Measure("tokens", count, 1)


def fit_length(
    build: Callable[[int], str], measure: Measure, length: int, *, what: str, start: int = 0
) -> int:
    """Return a filler size, in characters, with which a text is close to `length` but not above.

    build: makes the text for a filler size. what: the text's name, for the error when it is too
    long even without filler. start: a size to try first, such as that of a similar text.

    Raises:
        InputError: the text is longer than `length` without any filler.
    """
    empty = measure.count(build(0))
    if empty > length:
        raise InputError(
            f"{what} takes {empty:,} {measure.unit} without any filler, but the length is "
            f"{length:,}; ask for a longer text or less in it"
        )
    # Texts grow nearly in proportion to their filler, so each try is a straight line from the
    # empty text through the last one, kept inside of what is known to fit and not to fit.
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
