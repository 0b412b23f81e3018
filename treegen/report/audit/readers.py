r"""Public rules that read an answer from a text, independent of treegen's tasks.

Each rule is as its authors publish it, up to the length of the text that it reads. All take time
linear in the text:

- lm-eval: `strict-match` and `flexible-extract` of its GSM8K tasks, compared as its `exact_match`
  does.
- Inspect: `match(numeric=True)`, and the last "ANSWER: X" of its choice and answer scorers.
- simple-evals: "Answer: X" of its MMLU, GPQA and MGSM scripts.
- MMLU-Pro: "answer is (X)", else "Answer: X". Artificial Analysis (also NeMo-Skills): the last
  "**Answer:** X". lighteval: the last "answer is X" or "answer: X".
- verl: the last "#### N".
- SQuAD: texts without case, punctuation and articles.

A rule that "marks" reads only a place that a text marks as its answer; the others fall back to the
last number or to the whole text.
"""

import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Final

MAX_TEXT: Final = 100_000
"""Number of last characters of a text that rules read."""
_MAX_DIGITS: Final = 60
_BARE: Final = 60  # characters

_STRICT: Final = (re.compile(r"#### (-?[0-9.,]+)"), re.compile(r"The answer is (-?[0-9.,]+)."))
_FLEXIBLE: Final = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_NUMBER: Final = re.compile(r"-?(?:\d+(?:\.\d*)?|\.\d+)(?:/\d+)?", re.ASCII)
_THOUSANDS: Final = re.compile(r"(?<=\d),(?=\d{3}(?!\d))", re.ASCII)
_MGSM: Final = re.compile(r"-?\d[\d,]*\.?\d*", re.ASCII)
_STATED_NUMBER: Final = re.compile(
    r"answer[*_]{0,2}(?:\s{1,4}is|\s?:)[\s:*_$\\(]{0,8}(-?[$\u20ac\u00a3]?\d[\d,]*(?:\.\d+)?)",
    re.IGNORECASE,
)
_BOXED: Final = "\\boxed{"
_MMLU: Final = re.compile(r"(?i)Answer[ \t]*:[ \t]*\$?([A-J])\$?")
_INSPECT: Final = re.compile(r"(?i)^[ \t]*ANSWER\s*:\s*\(?([A-Za-z])\)?(?=[^\w]|$)", re.MULTILINE)
_AAI: Final = re.compile(
    r"(?i)[*_]{0,2}Answer[*_]{0,2}\s*:[\s*_]{0,2}\s*(?:\\boxed\{)?\(?([A-Z])(?![a-zA-Z0-9])"
)
_MMLU_PRO: Final = (
    re.compile(r"answer is \(?([A-J])\)?(?![a-zA-Z'])"),
    re.compile(r"[aA]nswer:\s*([A-J])(?![a-zA-Z'])"),
)
_STATED_LETTER: Final = re.compile(
    r"(?i:answer)[*_]{0,2}(?:\s{1,4}is|\s?:)[\s:*_$\\({]{0,8}([A-J])(?![a-zA-Z0-9'\u2019])"
)
_LETTER_BOX: Final = re.compile(r"(?:\\text\w*\{)?\s*\(?([A-Z])\)?\s*\}?(?:[:).-].*)?", re.DOTALL)
_LEADING: Final = re.compile(r"\s*[*_(\[]{0,3}([A-Z])(?:[)\].:*_]|\s*\Z)")
_CHOICE: Final = re.compile(r"^[ \t(]{0,4}([A-J])[).:](.*)$", re.MULTILINE)
_ALONE: Final = re.compile(r"(?<![A-Za-z0-9'])I(?![A-Za-z0-9])")
_WORD_AFTER: Final = re.compile(r"['\u2019][a-z]|[ \t]+(?!(?:is|because|since|as|and|or)\b)[a-z]")
# Another problem begins: the model went on in the form of its examples.
_NEXT: Final = re.compile(r"\n\s{0,4}(?:Q|Question|Problem|Instruction|Passage)\s?\d{0,3}:")
_MARKS: Final = re.compile(r"####|\\boxed|answer\s{0,4}(?:is|:)", re.IGNORECASE)
_ARTICLES: Final = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True)
class Rule:
    """A public rule: how it reads an answer, and how it compares the answer with the reference."""

    name: str
    source: str
    read: Callable[[str], str | None]
    """Returns the answer in a text; None if it finds none."""
    is_right: Callable[[str, str], bool]
    """Whether an answer equals a reference."""
    marks: bool = False
    """Whether it reads only places that are marked as the answer."""


def visible(text: str) -> str:
    """Return the part of a text that rules read: after the reasoning, before a further problem."""
    text = text[-MAX_TEXT:]
    if "</think>" in text:
        text = text.rpartition("</think>")[2] or text
    if (at := next_problem(text)) is not None:
        return text[:at]
    return text


def next_problem(text: str) -> int | None:
    """Return where a text that has stated its answer begins another problem; None if nowhere."""
    mark = _MARKS.search(text)
    for match in _NEXT.finditer(text):
        start = match.start()
        if mark is not None and mark.end() <= start:
            return start
        if start < _BARE and text[:start].strip() and is_bare(text[:start]):
            return start
    return None


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} whose braces close; None if there is none."""
    at = text.rfind(_BOXED)
    if at < 0:
        return None
    depth, start = 1, at + len(_BOXED)
    for place in range(start, min(len(text), start + 2000)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[start:place].strip()
    return None


@lru_cache(maxsize=1 << 14)
def value_of(answer: str) -> Fraction | None:
    r"""Return the number that an answer is: 1,000, $18.00, -3/4, \frac{1}{2}; None for another."""
    if len(answer) > _MAX_DIGITS:
        return None
    plain = answer.replace("\u2212", "-").replace("{,}", ",")
    plain = _THOUSANDS.sub("", plain)
    plain = re.sub(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}", r"\1/\2", plain)
    plain = re.sub(r"[\s$\u20ac\u00a3*_`\\]", "", plain).strip("()[]{}%:;!?.,")
    plain = plain.removeprefix("+")
    if not _NUMBER.fullmatch(plain):
        return None
    top, _, bottom = plain.partition("/")
    if bottom and not int(bottom):
        return None
    return Fraction(top.rstrip(".") or "0") / int(bottom or "1")


def choices_of(question: str) -> dict[str, str]:
    """Return the choices that a question lists, by letter; empty if it lists none in order."""
    choices = {letter: text.strip() for letter, text in _CHOICE.findall(question)}
    return choices if [*choices] == [*"ABCDEFGHIJ"[: len(choices)]] else {}


def is_in_words(text: str, letter: str) -> bool:
    """Return whether a letter stands in a text only within words, or as the word "I"."""
    if letter == "I":
        places = list(_ALONE.finditer(text))
        return bool(places) and all(_WORD_AFTER.match(text, match.end()) for match in places)
    if len(letter) != 1 or letter.upper() not in text.upper():
        return False
    return not re.search(rf"(?<![A-Za-z]){letter}(?![A-Za-z'\u2019])", text, re.IGNORECASE)


def is_bare(text: str) -> bool:
    """Return whether a text is only its answer, with at most three words around."""
    return len(text) < _BARE and len(text.split()) <= 4


def _flexible(text: str) -> str | None:
    # A match has no spaces, so words are read from the end.
    for word in reversed(text[-2000:].split()):
        if found := [match[0] for match in _FLEXIBLE.finditer(word)]:
            return found[-1]
    return None


def _inspect_number(text: str) -> str | None:
    for word in reversed(text[-2000:].split()):
        if "%" not in word and (value := value_of(word)) is not None:
            return str(value)
    return None


def _after_answer(text: str) -> str | None:
    at = text.lower().rfind("answer:")
    if at < 0:
        return None
    numbers = _MGSM.findall(text[at : at + 2000].replace("$", ""))
    return numbers[-1].rstrip(".,") if numbers else None


def _boxed_number(text: str) -> str | None:
    box = last_boxed(text)
    return box if box is not None and value_of(box) is not None else None


def _exact_form(answer: str) -> str:
    plain = answer.replace(",", "").replace("$", "")
    return plain.rpartition("#### ")[2].removesuffix(".").lower()


def _equals_exactly(answer: str, gold: str) -> bool:
    return _exact_form(answer) == _exact_form(gold)


def _equals_as_number(answer: str, gold: str) -> bool:
    value = value_of(answer)
    return value is not None and value == value_of(gold)


def _first(*patterns: re.Pattern[str]) -> Callable[[str], str | None]:
    """Return a reader of the first match of the first pattern that matches."""

    def read(text: str) -> str | None:
        matches = (pattern.search(text) for pattern in patterns)
        return next((match[1].upper() for match in matches if match), None)

    return read


def _last(pattern: re.Pattern[str]) -> Callable[[str], str | None]:
    """Return a reader of the last match of a pattern."""

    def read(text: str) -> str | None:
        found: list[str] = pattern.findall(text)
        return found[-1].upper() if found else None

    return read


def _boxed_letter(text: str) -> str | None:
    box = last_boxed(text)
    match = _LETTER_BOX.fullmatch(box) if box is not None else None
    return match[1] if match else None


def _leading_letter(text: str) -> str | None:
    match = _LEADING.match(text)
    return match[1] if match else None


def _same_letter(answer: str, gold: str) -> bool:
    return answer == gold.strip("() .").upper()


def squad_form(text: str) -> str:
    """Return a text without case, punctuation, articles and needless spaces."""
    plain = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def _first_line(text: str) -> str | None:
    return next((line.strip() for line in text.splitlines() if line.strip()), None)


NUMBER_RULES: Final = (
    Rule("strict-match", "lm-eval", _first(*_STRICT), _equals_exactly, True),
    Rule("last ####", "verl", _last(_STRICT[0]), _equals_exactly, True),
    Rule("flexible-extract", "lm-eval", _flexible, _equals_exactly),
    Rule("match(numeric)", "Inspect", _inspect_number, _equals_as_number),
    Rule("Answer: N", "simple-evals", _after_answer, _equals_as_number, True),
    Rule("boxed number", "MATH", _boxed_number, _equals_as_number, True),
    Rule("answer is N", "lighteval", _last(_STATED_NUMBER), _equals_as_number, True),
)
CHOICE_RULES: Final = (
    Rule("Answer: X, first", "simple-evals", _first(_MMLU), _same_letter, True),
    Rule("ANSWER: X, last line", "Inspect", _last(_INSPECT), _same_letter, True),
    Rule("**Answer:** X, last", "NeMo-Skills", _last(_AAI), _same_letter, True),
    Rule("answer is (X)", "MMLU-Pro", _first(*_MMLU_PRO), _same_letter, True),
    Rule("answer is X, last", "lighteval", _last(_STATED_LETTER), _same_letter, True),
    Rule("boxed letter", "NeMo-Gym", _boxed_letter, _same_letter, True),
    Rule("leading letter", "lm-eval", _leading_letter, _same_letter, True),
)
TEXT_RULES: Final = (
    Rule("whole text", "Inspect", lambda text: text.strip() or None, lambda a, b: a == b.strip()),
    Rule("exact match", "SQuAD", squad_form, lambda a, b: a == squad_form(b)),
    Rule("first line", "oe-eval", _first_line, lambda a, b: squad_form(a) == squad_form(b), True),
)


def kind_of(golds: Sequence[str]) -> str:
    """Return the kind of answer that references are: choice, number, mathematics or text."""
    if not golds:
        return "none"
    if all(re.fullmatch(r"\s*\(?[A-J]\)?\s*", gold) for gold in golds):
        return "choice"
    if sum(value_of(gold) is not None for gold in golds) >= 0.95 * len(golds):
        return "number"
    if any("\\" in gold or "$" in gold for gold in golds):
        return "mathematics"
    return "text"
