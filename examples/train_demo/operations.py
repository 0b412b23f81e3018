"""The steps of programming problems, on lists of numbers and on words.

A step comes with several wordings and several ways to program it, and with a function that does it
here, from which examples and tests come.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Operation:
    """One step. {k} in texts and programs is a constant from `constants`, if there are any.

    texts: as the end of "Then ..." or "Print ...". programs: Python statements that change the
    variable {v}, or for a last step an expression to print. run: what it does.
    """

    name: str
    texts: tuple[str, ...]
    programs: tuple[str, ...]
    run: Callable[[Any, int], Any]
    constants: tuple[int, int] | None = None


def _keep(
    name: str, what: str, test: str, run: Callable[[int, int], bool], *constants: int
) -> Operation:
    """A filter, in the ways that all filters can be written."""
    return Operation(
        name,
        (f"keep only the {what}", f"remove all but the {what}", f"take the {what} only"),
        (
            f"{{v}} = [x for x in {{v}} if {test}]",
            f"kept = []\nfor x in {{v}}:\n    if {test}:\n        kept.append(x)\n{{v}} = kept",
            f"{{v}} = list(filter(lambda x: {test}, {{v}}))",
        ),
        lambda values, k: [x for x in values if run(x, k)],
        (constants[0], constants[1]) if constants else None,
    )


def _elementwise(
    name: str, text: str, value: str, run: Callable[[int, int], int], *constants: int
) -> Operation:
    """A change of every number, in the ways that all such can be written."""
    return Operation(
        name,
        (text, text.replace("every number", "each number")),
        (
            f"{{v}} = [{value} for x in {{v}}]",
            f"changed = []\nfor x in {{v}}:\n    changed.append({value})\n{{v}} = changed",
            f"for i, x in enumerate({{v}}):\n    {{v}}[i] = {value}",
        ),
        lambda values, k: [run(x, k) for x in values],
        (constants[0], constants[1]) if constants else None,
    )


def _running_sums(values: list[int], k: int) -> list[int]:
    return [sum(values[: i + 1]) for i in range(len(values))]


NUMBER_STEPS: Final = (
    _keep("even", "even numbers", "x % 2 == 0", lambda x, k: x % 2 == 0),
    _keep("odd", "odd numbers", "x % 2 == 1", lambda x, k: x % 2 == 1),
    _keep("positive", "numbers above zero", "x > 0", lambda x, k: x > 0),
    _keep("negative", "numbers below zero", "x < 0", lambda x, k: x < 0),
    _keep("multiples", "multiples of {k}", "x % {k} == 0", lambda x, k: x % k == 0, 3, 9),
    _keep(
        "no multiples",
        "numbers that {k} does not divide",
        "x % {k} != 0",
        lambda x, k: x % k != 0,
        2,
        9,
    ),
    _keep("above", "numbers greater than {k}", "x > {k}", lambda x, k: x > k, 2, 40),
    _keep("below", "numbers less than {k}", "x < {k}", lambda x, k: x < k, 2, 40),
    _keep(
        "ends",
        "numbers whose last digit is {k}",
        "abs(x) % 10 == {k}",
        lambda x, k: abs(x) % 10 == k,
        0,
        9,
    ),
    _elementwise("square", "square every number", "x * x", lambda x, k: x * x),
    _elementwise("add", "add {k} to every number", "x + {k}", lambda x, k: x + k, 1, 50),
    _elementwise(
        "subtract", "subtract {k} from every number", "x - {k}", lambda x, k: x - k, 1, 50
    ),
    _elementwise("times", "multiply every number by {k}", "x * {k}", lambda x, k: x * k, 2, 20),
    _elementwise("negate", "change the sign of every number", "-x", lambda x, k: -x),
    _elementwise(
        "size", "replace every number by its absolute value", "abs(x)", lambda x, k: abs(x)
    ),
    _elementwise(
        "remainder",
        "replace every number by its remainder when divided by {k}",
        "x % {k}",
        lambda x, k: x % k,
        2,
        20,
    ),
    _elementwise(
        "halve", "divide every number by {k}, rounding down", "x // {k}", lambda x, k: x // k, 2, 9
    ),
    _elementwise(
        "cap", "lower every number that is greater than {k} to {k}", "min(x, {k})", min, 5, 40
    ),
    _elementwise(
        "raise", "raise every number that is less than {k} to {k}", "max(x, {k})", max, 1, 40
    ),
    Operation(
        "reverse",
        ("put the list in the opposite order", "reverse the list"),
        ("{v} = {v}[::-1]", "{v}.reverse()", "{v} = list(reversed({v}))"),
        lambda values, k: values[::-1],
    ),
    Operation(
        "ascending",
        ("sort the list from small to large", "put the numbers in ascending order"),
        ("{v}.sort()", "{v} = sorted({v})"),
        lambda values, k: sorted(values),
    ),
    Operation(
        "descending",
        ("sort the list from large to small", "put the numbers in descending order"),
        ("{v}.sort(reverse=True)", "{v} = sorted({v}, reverse=True)"),
        lambda values, k: sorted(values, reverse=True),
    ),
    Operation(
        "distinct",
        ("remove every number that came before", "keep each number only once"),
        (
            "{v} = list(dict.fromkeys({v}))",
            "seen = []\nfor x in {v}:\n    if x not in seen:\n        seen.append(x)\n{v} = seen",
        ),
        lambda values, k: list(dict.fromkeys(values)),
    ),
    Operation(
        "first",
        ("keep the first {k} numbers", "cut the list after {k} numbers"),
        ("{v} = {v}[:{k}]", "del {v}[{k}:]"),
        lambda values, k: values[:k],
        (2, 6),
    ),
    Operation(
        "drop",
        ("remove the first {k} numbers", "leave out the first {k} numbers"),
        ("{v} = {v}[{k}:]", "del {v}[:{k}]"),
        lambda values, k: values[k:],
        (1, 4),
    ),
    Operation(
        "every other",
        ("keep the first number, the third, the fifth and so on",),
        ("{v} = {v}[::2]",),
        lambda values, k: values[::2],
    ),
    Operation(
        "running sums",
        ("replace every number by the sum of all numbers up to it",),
        (
            "{v} = [sum({v}[: i + 1]) for i in range(len({v}))]",
            "total = 0\nsums = []\nfor x in {v}:\n    total += x\n"
            "    sums.append(total)\n{v} = sums",
        ),
        _running_sums,
    ),
    Operation(
        "differences",
        ("replace the list by the differences of neighbours, the next less the one",),
        ("{v} = [b - a for a, b in zip({v}, {v}[1:])]",),
        lambda values, k: [b - a for a, b in pairwise(values)],
    ),
    Operation(
        "append sum",
        ("put the sum of the list at its end", "append the sum of all numbers"),
        ("{v}.append(sum({v}))", "{v} = {v} + [sum({v})]"),
        lambda values, k: [*values, sum(values)],
    ),
)

NUMBER_ENDS: Final = (
    Operation("sum", ("the sum", "the sum of the numbers"), ("sum({v})",), lambda v, k: sum(v)),
    Operation(
        "largest",
        ("the largest number, or {k} if there is none",),
        ("max({v}, default={k})", "max({v}) if {v} else {k}"),
        lambda v, k: max(v, default=k),
        (0, 0),
    ),
    Operation(
        "smallest",
        ("the smallest number, or {k} if there is none",),
        ("min({v}, default={k})", "min({v}) if {v} else {k}"),
        lambda v, k: min(v, default=k),
        (0, 0),
    ),
    Operation(
        "count",
        ("how many numbers are left", "the length of the list"),
        ("len({v})",),
        lambda v, k: len(v),
    ),
    Operation(
        "kinds",
        ("how many different numbers there are",),
        ("len(set({v}))",),
        lambda v, k: len(set(v)),
    ),
    Operation(
        "range",
        ("the largest number less the smallest, or {k} if there is none",),
        ("max({v}) - min({v}) if {v} else {k}", "max({v}, default={k}) - min({v}, default={k})"),
        lambda v, k: max(v) - min(v) if v else k,
        (0, 0),
    ),
    Operation(
        "how often",
        ("how often {k} is in the list",),
        ("{v}.count({k})",),
        lambda v, k: v.count(k),
        (0, 30),
    ),
    Operation(
        "contains",
        ("YES if {k} is in the list and NO if it is not",),
        ("'YES' if {k} in {v} else 'NO'",),
        lambda v, k: "YES" if k in v else "NO",
        (0, 30),
    ),
    Operation(
        "rising",
        ("YES if no number is less than the one before it and NO otherwise",),
        (
            "'YES' if {v} == sorted({v}) else 'NO'",
            "'YES' if all(a <= b for a, b in zip({v}, {v}[1:])) else 'NO'",
        ),
        lambda v, k: "YES" if v == sorted(v) else "NO",
    ),
    Operation(
        "list",
        ("the list in one line", "all numbers in one line"),
        ("*{v}",),
        lambda v, k: " ".join(map(str, v)),
    ),
    Operation(
        "lines",
        ("the numbers, one per line",),
        ("*{v}, sep='\\n'", "'\\n'.join(map(str, {v}))"),
        lambda v, k: "\n".join(map(str, v)),
    ),
)

VOWELS: Final = "aeiou"
WORD_STEPS: Final = (
    Operation(
        "reverse",
        ("turn the word round", "reverse the word"),
        ("{v} = {v}[::-1]", "{v} = ''.join(reversed({v}))"),
        lambda w, k: w[::-1],
    ),
    Operation(
        "no vowels",
        ("remove all vowels (a, e, i, o, u)",),
        (
            "{v} = ''.join(c for c in {v} if c not in 'aeiou')",
            "kept = ''\nfor c in {v}:\n    if c not in 'aeiou':\n        kept += c\n{v} = kept",
        ),
        lambda w, k: "".join(c for c in w if c not in VOWELS),
    ),
    Operation(
        "only vowels",
        ("keep only the vowels (a, e, i, o, u)",),
        (
            "{v} = ''.join(c for c in {v} if c in 'aeiou')",
            "kept = ''\nfor c in {v}:\n    if c in 'aeiou':\n        kept += c\n{v} = kept",
        ),
        lambda w, k: "".join(c for c in w if c in VOWELS),
    ),
    Operation(
        "capitals", ("write it in capital letters",), ("{v} = {v}.upper()",), lambda w, k: w.upper()
    ),
    Operation(
        "sort",
        ("put its letters in alphabetical order",),
        ("{v} = ''.join(sorted({v}))",),
        lambda w, k: "".join(sorted(w)),
    ),
    Operation(
        "double",
        ("write every letter twice", "double each letter"),
        ("{v} = ''.join(c * 2 for c in {v})", "{v} = ''.join(c + c for c in {v})"),
        lambda w, k: "".join(c * 2 for c in w),
    ),
    Operation(
        "repeat",
        ("write the word {k} times in a row",),
        ("{v} = {v} * {k}", "{v} *= {k}"),
        lambda w, k: w * k,
        (2, 4),
    ),
    Operation(
        "first",
        ("keep the first {k} letters", "cut it after {k} letters"),
        ("{v} = {v}[:{k}]",),
        lambda w, k: w[:k],
        (2, 7),
    ),
    Operation(
        "drop", ("remove the first {k} letters",), ("{v} = {v}[{k}:]",), lambda w, k: w[k:], (1, 4)
    ),
    Operation(
        "last", ("keep the last {k} letters",), ("{v} = {v}[-{k}:]",), lambda w, k: w[-k:], (2, 6)
    ),
    Operation(
        "every other",
        ("keep the first letter, the third, the fifth and so on",),
        ("{v} = {v}[::2]",),
        lambda w, k: w[::2],
    ),
    Operation(
        "once",
        ("remove every letter that came before", "keep each letter only once"),
        (
            "{v} = ''.join(dict.fromkeys({v}))",
            "seen = ''\nfor c in {v}:\n    if c not in seen:\n        seen += c\n{v} = seen",
        ),
        lambda w, k: "".join(dict.fromkeys(w)),
    ),
    Operation(
        "mirror",
        ("append the word turned round", "put its mirror image at its end"),
        ("{v} = {v} + {v}[::-1]", "{v} += {v}[::-1]"),
        lambda w, k: w + w[::-1],
    ),
)
WORD_ENDS: Final = (
    Operation("word", ("the word", "what is left"), ("{v}",), lambda w, k: w),
    Operation(
        "length", ("its length", "how many letters it has"), ("len({v})",), lambda w, k: len(w)
    ),
    Operation(
        "kinds",
        ("how many different letters it has",),
        ("len(set({v}))",),
        lambda w, k: len(set(w)),
    ),
    Operation(
        "palindrome",
        ("YES if it reads the same from both ends and NO if it does not",),
        ("'YES' if {v} == {v}[::-1] else 'NO'",),
        lambda w, k: "YES" if w == w[::-1] else "NO",
    ),
    Operation(
        "spelled",
        ("its letters, one per line",),
        ("*{v}, sep='\\n'", "'\\n'.join({v})"),
        lambda w, k: "\n".join(w),
    ),
    Operation(
        "dashes",
        ("its letters with dashes between",),
        ("'-'.join({v})", "*{v}, sep='-'"),
        lambda w, k: "-".join(w),
    ),
    Operation(
        "vowels",
        ("how many vowels (a, e, i, o, u) it has",),
        ("sum(c in 'aeiou' for c in {v})", "sum(1 for c in {v} if c in 'aeiou')"),
        lambda w, k: sum(c in VOWELS for c in w),
    ),
)
