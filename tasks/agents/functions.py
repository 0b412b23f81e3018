"""Small functions with possible bugs, from which the puzzles of `repair` are made."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Function:
    """A correct function, bugs that it may get, and a way to draw its arguments."""

    name: str
    source: str
    bugs: tuple[tuple[str, str], ...]
    """Texts of the source, each with what replaces it."""
    draw: Callable[[random.Random], Arguments]

    def load(self, source: str | None = None) -> Callable[..., Any]:
        """Return the function of a source, by default of the correct one."""
        names: dict[str, Any] = {}
        exec(compile(source or self.source, f"{self.name}.py", "exec"), names)
        function: Callable[..., Any] = names[self.name]
        return function


def _integers(draw: random.Random, low: int = -9, high: int = 9, max_length: int = 7) -> list[int]:
    return [draw.randint(low, high) for _ in range(draw.randint(0, max_length))]


def _draw_clamp(draw: random.Random) -> Arguments:
    low = draw.randint(-5, 3)
    return _integers(draw), low, low + draw.randint(0, 5)


def _draw_intervals(draw: random.Random) -> Arguments:
    starts = [draw.randint(0, 20) for _ in range(draw.randint(0, 5))]
    return ([[start, start + draw.randint(0, 6)] for start in starts],)


def _draw_table(draw: random.Random) -> Arguments:
    width = draw.randint(1, 4)
    return ([[draw.randint(0, 9) for _ in range(width)] for _ in range(draw.randint(1, 4))],)


def _draw_word(letters: str, max_length: int) -> Callable[[random.Random], Arguments]:
    return lambda draw: ("".join(draw.choice(letters) for _ in range(draw.randint(0, max_length))),)


def _draw_brackets(draw: random.Random) -> Arguments:
    text = ""
    for _ in range(draw.randint(0, 4)):
        pair = draw.choice(("()", "[]"))
        text = draw.choice((pair[0] + text + pair[1], text + pair))
    if text and draw.random() < 0.5:
        at = draw.randrange(len(text))
        text = text[:at] + draw.choice("()[]") + text[at + draw.randint(0, 1) :]
    return (text,)


FUNCTIONS: Final = (
    Function(
        "clamp",
        '''def clamp(values, low, high):
    """Return the values, each raised to low or lowered to high where it is outside of them."""
    return [min(max(value, low), high) for value in values]
''',
        (
            ("min(max(value, low), high)", "max(value, low)"),
            ("min(max(value, low), high)", "min(max(value, high), low)"),
            ("for value in values]", "for value in values[1:]]"),
        ),
        _draw_clamp,
    ),
    Function(
        "runs",
        '''def runs(text):
    """Return the runs of equal letters as [letter, length]: "aab" gives [["a", 2], ["b", 1]]."""
    result = []
    for letter in text:
        if result and result[-1][0] == letter:
            result[-1][1] += 1
        else:
            result.append([letter, 1])
    return result
''',
        (
            ("result.append([letter, 1])", "result.append([letter, 0])"),
            ("result[-1][0] == letter", "result[0][0] == letter"),
            ("result[-1][1] += 1", "result[-1][1] = 2"),
        ),
        _draw_word("ab", 8),
    ),
    Function(
        "merge_intervals",
        '''def merge_intervals(intervals):
    """Return the intervals [start, end] in order, with those merged that overlap or touch."""
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged
''',
        (
            ("start <= merged[-1][1]", "start < merged[-1][1]"),
            ("max(merged[-1][1], end)", "end"),
            ("sorted(intervals)", "intervals"),
        ),
        _draw_intervals,
    ),
    Function(
        "rotate",
        '''def rotate(items, steps):
    """Rotate a list to the right by a number of steps."""
    if not items:
        return []
    steps %= len(items)
    return items[len(items) - steps :] + items[: len(items) - steps]
''',
        (
            ("    steps %= len(items)\n", ""),
            (
                "items[len(items) - steps :] + items[: len(items) - steps]",
                "items[steps:] + items[:steps]",
            ),
        ),
        lambda draw: (_integers(draw), draw.randint(0, 12)),
    ),
    Function(
        "is_leap",
        '''def is_leap(year):
    """Return whether a year is a leap year: every fourth, but of the centuries every fourth."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
''',
        (
            (" and (year % 100 != 0 or year % 400 == 0)", ""),
            ("(year % 100 != 0 or year % 400 == 0)", "year % 100 != 0"),
        ),
        lambda draw: (draw.choice((draw.randint(1900, 2100), 100 * draw.randint(15, 28))),),
    ),
    Function(
        "window_sums",
        '''def window_sums(values, size):
    """Return the sum of each window of neighbours; none if the window is longer than the list."""
    return [sum(values[i : i + size]) for i in range(len(values) - size + 1)]
''',
        (
            ("len(values) - size + 1", "len(values) - size"),
            ("len(values) - size + 1", "len(values)"),
            ("values[i : i + size]", "values[i : size]"),
        ),
        lambda draw: (_integers(draw), draw.randint(1, 4)),
    ),
    Function(
        "to_roman",
        '''def to_roman(number):
    """Return a number from 1 on as Roman numerals."""
    parts = ((1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"))
    parts += ((50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"))
    text = ""
    for value, letters in parts:
        text += letters * (number // value)
        number %= value
    return text
''',
        (
            ('(9, "IX"), ', ""),
            ('(40, "XL"), ', ""),
            ('(400, "CD"), ', ""),
        ),
        lambda draw: (draw.choice((draw.randint(1, 60), draw.randint(1, 3000))),),
    ),
    Function(
        "second_largest",
        '''def second_largest(values):
    """Return the second largest of the different values; None if there is only one or none."""
    ordered = sorted(set(values))
    return ordered[-2] if len(ordered) > 1 else None
''',
        (
            ("sorted(set(values))", "sorted(values)"),
            ("ordered[-2]", "ordered[1]"),
        ),
        lambda draw: (_integers(draw, 0, 5),),
    ),
    Function(
        "shift_letters",
        '''def shift_letters(text, steps):
    """Return the text with each letter a to z moved on by some steps; after z comes a."""
    moved = ""
    for letter in text:
        if "a" <= letter <= "z":
            letter = chr((ord(letter) - ord("a") + steps) % 26 + ord("a"))
        moved += letter
    return moved
''',
        (
            (" % 26", ""),
            ('"a" <= letter <= "z"', '"a" < letter < "z"'),
            (" + steps) % 26", " - steps) % 26"),
        ),
        lambda draw: (_draw_word("abxyz -", 8)(draw)[0], draw.randint(1, 25)),
    ),
    Function(
        "transpose",
        '''def transpose(rows):
    """Return the columns of a table, given as a list of rows of equal length."""
    return [[row[i] for row in rows] for i in range(len(rows[0]))]
''',
        (
            ("range(len(rows[0]))", "range(len(rows))"),
            ("for row in rows]", "for row in reversed(rows)]"),
        ),
        _draw_table,
    ),
    Function(
        "is_balanced",
        '''def is_balanced(text):
    """Return whether each bracket of a text of ( ) [ ] is closed by its own kind, in order."""
    waiting = []
    for bracket in text:
        if bracket in "([":
            waiting.append(bracket)
        elif not waiting or waiting.pop() + bracket not in ("()", "[]"):
            return False
    return not waiting
''',
        (
            ("return not waiting", "return True"),
            ('not in ("()", "[]")', 'not in ("()", "[]", "(]", "[)")'),
        ),
        _draw_brackets,
    ),
    Function(
        "most_common",
        '''def most_common(text):
    """Return the letter that is most frequent, the first in the alphabet of several; "" if none."""
    return min(sorted(set(text)), key=lambda letter: -text.count(letter), default="")
''',
        (
            ("-text.count(letter)", "text.count(letter)"),
            ("sorted(set(text))", "sorted(set(text), reverse=True)"),
        ),
        _draw_word("abc", 7),
    ),
)
