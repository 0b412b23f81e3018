r"""Rules that read an answer from a text as other tools do, independent of treegen's tasks.

A rule is named after the tool whose rule it follows. It may differ from that tool in rare forms,
and it reads only the end of a long text. All take time linear in the text:

- like lm-eval: `strict-match` of its tasks gsm8k and gsm8k_cot, and `flexible-extract`, compared as
  its `exact_match` does.
- like Inspect: `match(numeric=True)`, and the last "ANSWER: X" of its choice and answer scorers.
- like simple-evals: "Answer: X" of its MMLU, GPQA and MGSM scripts, in many languages.
- like MMLU-Pro: "answer is (X)", else "Answer: X". Like NeMo-Skills: the last "**Answer:** X". Like
  lighteval: the last "answer is X" or "answer: X", here in many languages and in JSON.
- like verl: the last "#### N". Like DeepSeek-R1: the last <answer>X</answer>.
- like SQuAD: texts without case, punctuation and articles.

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
_POWERS: Final = frozenset(10**power for power in range(13))

_STRICT: Final = (re.compile(r"#### (-?[0-9.,]+)"), re.compile(r"The answer is (-?[0-9.,]+)."))
_FLEXIBLE: Final = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_NUMBER: Final = re.compile(r"-?(?:\d+(?:\.\d*)?|\.\d+)(?:/\d+)?", re.ASCII)
_GROUPED: Final = re.compile(r"[^\d.,]*[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?[^\d,]*", re.ASCII)
_SPACED: Final = re.compile(r"\d\s+\.?\d|\d\s*\\[dt]?frac", re.ASCII)
_MGSM: Final = re.compile(r"-?\d[\d,]*\.?\d*", re.ASCII)
# "Answer" in the languages of simple-evals and some more.
_WORD: Final = (
    r"(?i:answer|antwort|respuesta|r\u00e9ponse|resposta|risposta|jawaban|jibu|cevap|"
    r"odpowied\u017a|\u043e\u0442\u0432\u0435\u0442|\u0432\u0456\u0434\u043f\u043e\u0432\u0456\u0434\u044c|"
    r"\u7b54\u6848|\u7b54\u3048|\u56de\u7b54|\u89e3\u7b54|\u7b54|\uc815\ub2f5|\ub2f5\ubcc0|\ub2f5|"
    r"\u0627\u0644\u0625\u062c\u0627\u0628\u0629|\u0627\u0644\u062c\u0648\u0627\u0628|"
    r"\u0989\u09a4\u09cd\u09a4\u09b0|\u0909\u0924\u094d\u0924\u0930|"
    r"\u0e04\u0e33\u0e15\u0e2d\u0e1a|\u0c38\u0c2e\u0c3e\u0c27\u0c3e\u0c28\u0c02)"
)
_STATED: Final = (
    rf"{_WORD}(?:\s[^\W\d]{{1,12}})?[*_\"']{{0,3}}"
    r"(?:\s{1,4}(?i:is|ist|lautet|es|est|\u00e8|\u00e9|adalah)(?=[\s:*_$\\(])|\s?[:\uff1a]|\s?[\u662f\u4e3a\u306f\uc740])"
    r"[\s:\uff1a*_$\\(\"'{]{0,8}"
)
_NUMERAL: Final = r"(-?[$\u20ac\u00a3]?(?:\d[\d,]*(?:\.\d+)?|\.\d+))"
_STATED_NUMBER: Final = re.compile(_STATED + _NUMERAL)
_BOXED: Final = "\\boxed{"
_MMLU: Final = re.compile(r"(?i)Answer[ \t]*:[ \t]*\$?([A-J])\$?")
_MULTILINGUAL: Final = re.compile(
    _WORD + r"[*_]{0,2}\s?[:\uff1a][\s*_(]{0,4}([A-J])(?![a-zA-Z0-9'\u2019])"
)
_INSPECT: Final = re.compile(r"(?i)^[ \t]*ANSWER\s*:\s*\(?([A-Za-z])\)?(?=[^\w]|$)", re.MULTILINE)
_AAI: Final = re.compile(
    r"(?i)[*_]{0,2}Answer[*_]{0,2}\s*:[\s*_]{0,2}\s*(?:\\boxed\{)?\(?([A-Z])(?![a-zA-Z0-9])"
)
_MMLU_PRO: Final = (
    re.compile(r"answer is \(?([A-J])\)?(?![a-zA-Z'])"),
    re.compile(r"[aA]nswer:\s*([A-J])(?![a-zA-Z'])"),
)
_STATED_LETTER: Final = re.compile(_STATED + r"([A-J])(?![a-zA-Z0-9'\u2019])")
_TAG: Final = re.compile(r"<answer>\s{0,9}([^<>]{1,100}?)\s{0,9}</answer>", re.IGNORECASE)
_LETTER_BOX: Final = re.compile(r"(?:\\text\w*\{)?\s*\(?([A-Z])\)?\s*\}?(?:[:).-].*)?", re.DOTALL)
_LEADING: Final = re.compile(r"\s*[*_(\[]{0,3}([A-Z])(?:[)\].:*_]|\s*\Z)")
# A stated answer that does not end where a rule stops to read: 18 or 20, 2 million, 9 + 9 = 18.
_AND: Final = r"(?:or|and|to|oder|und|bis|ou|et|o|y|\u6216|\u548c)\b"
_UNCLEAR: Final = re.compile(
    _STATED + r"(?:(?>" + _NUMERAL + r")[)*_$\\]{0,3}[ \t\u00a0\u202f]{0,2}"
    r"(?:[+*/=^\u00d7\u00b7\u00f7~\u2013-]|\\(?:times|cdot|pm|le|ge)|\d|[.,]\d|[\u5341\u767e\u5343\u4e07\u4ebf]|"
    rf"(?i:{_AND}|(?:hundred|thousand|million|billion|dozen|mio|mrd|tausend|million\w{{1,3}}|k)\b))"
    rf"|[A-J][)*_]{{0,3}}[ \t]{{0,2}}(?:[,/&+]\s?|(?i:{_AND})\s{{1,2}})[(*_]{{0,3}}[A-J](?![a-z]))"
)
_CHOICE: Final = re.compile(r"^[ \t(]{0,4}([A-J])[).:]", re.MULTILINE)
_END_OF_CHOICES: Final = re.compile(r"\n[ \t]*\n|\n[^\n:]{0,40}:[ \t]*\Z")
_PRONOUN: Final = re.compile(r"(?<![A-Za-z0-9'])I(?![A-Za-z0-9])")
_WORD_AFTER: Final = re.compile(r"['\u2019][a-z]|[ \t]+(?!(?:is|because|since|as|and|or)\b)[a-z]")
# Another problem begins: the model went on in the form of its examples.
_NEXT: Final = re.compile(r"\n\s{0,4}(?:Q|Question|Problem|Instruction|Passage)\s?\d{0,3}:")
_REPLY: Final = re.compile(r"\n\s{0,4}(?:A|Answer|Solution|Response)\s?\d{0,3}:")
ANSWER_MARK: Final = re.compile(r"####|\\boxed|answer\s{0,4}(?:is|:)", re.IGNORECASE)
_ANY_MARK: Final = re.compile(
    rf"####|\\boxed|</?\w{{0,20}}answer>|{_WORD}|\*\*[^*\n]{{1,80}}\*\*|__[^_\n]{{1,80}}__|"
    r"(?i:\b(?:option|choice|choose|pick|select|result|solution|total|final|therefore|hence|thus|so)\b)|[=\u2248\u2234\u21d2]"
)
_MARKED_LETTER: Final = r"[(\[*_\"'{{<:\uff1a\n]\s?{0}(?![A-Za-z])|(?<![A-Za-z]){0}\s?[)\]:\uff09]"
_ARTICLES: Final = re.compile(r"\b(?:a|an|the)\b")
_MINUS: Final = dict.fromkeys((0x2212, 0xFE63, 0xFF0D), "-")
# Not in "3\u20135" and "3 \u20135", which may be ranges or differences.
_DASH: Final = re.compile(
    r"(?<![\w.,)\]}%])(?<![\d)\]}]\s)[\u2010-\u2013](?=[$\u20ac\u00a3]?\.?\d)"
)
_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True)
class ScoringRule:
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


def with_plain_minus(text: str) -> str:
    """Return a text in which a minus sign of Unicode, or a dash before a number, is "-"."""
    return _DASH.sub("-", text.translate(_MINUS))


def next_problem(text: str) -> int | None:
    """Return where a text that has stated its answer begins another problem; None if nowhere."""
    mark = ANSWER_MARK.search(text)
    for match in _NEXT.finditer(text):
        start = match.start()
        is_stated = mark is not None and mark.end() <= start
        if is_stated and _REPLY.search(text, match.end()):
            return start
        if start >= _BARE:
            if mark is None or is_stated:  # no later place has a reply either
                return None
        elif text[:start].strip() and is_bare(text[:start]):
            return start
    return None


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...}; None if there is none or it does not close."""
    at = text.rfind(_BOXED)
    if at < 0:
        return None
    depth, start = 1, at + len(_BOXED)
    for index in range(start, min(len(text), start + 2000)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if not depth:
            return text[start:index].strip()
    return None


@lru_cache(maxsize=1 << 14)
def value_of(answer: str) -> Fraction | None:
    r"""Return the number that an answer is: 1,000, $18.00, -3/4, \frac{1}{2}; None for another."""
    if len(answer) > _MAX_DIGITS or _SPACED.search(answer):  # 1 2, or 1 1/2
        return None
    plain = with_plain_minus(answer).replace("{,}", ",")
    plain = re.sub(r"\\[!,;]", "", plain)
    if "," in plain.rstrip(".,; \n"):
        if not _GROUPED.fullmatch(plain) or re.search(r"[()\[\]]", plain):  # (1,000) is a pair
            return None
        plain = plain.replace(",", "")
    plain = re.sub(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}", r"\1/\2", plain)
    plain = re.sub(r"[\s$\u20ac\u00a3*_`\\]", "", plain).lstrip("()[]{}:;").rstrip("()[]{}%:;!?.,")
    plain = plain.removeprefix("+")
    if not _NUMBER.fullmatch(plain):
        return None
    top, _, bottom = plain.partition("/")
    if bottom and not int(bottom):
        return None
    return Fraction(top.rstrip(".") or "0") / int(bottom or "1")


def is_same_number(answer: str, gold: str) -> bool | None:
    """Return whether two texts are the same number; None if one is none, or if it is unclear.

    It is unclear for numbers that differ by a sign, by rounding, or by a power of ten: 50% and 0.5,
    $2 million and 2, and 1.234 in languages with a decimal comma.
    """
    value, gold_value = value_of(answer), value_of(gold)
    if value is None or gold_value is None:
        return None
    if value == gold_value:
        return True
    if not value or not gold_value:
        return False
    ratio = abs(value / gold_value)
    near = (
        abs(ratio - 1) < Fraction(1, 100) and not value.denominator == gold_value.denominator == 1
    )
    is_power = {ratio.numerator, ratio.denominator} <= _POWERS
    return None if near or is_power else False


def choices_of(question: str) -> dict[str, str]:
    """Return the choices that a question lists, by letter; empty if it lists none in order.

    A choice ends at the next letter; the last one at an empty line, or at a last line that ends
    with a colon.
    """
    matches = list(_CHOICE.finditer(question))
    letters = [match[1] for match in matches]
    if len(matches) < 2 or letters != [*"ABCDEFGHIJ"[: len(letters)]]:
        return {}
    ends = [match.start() for match in matches[1:]]
    end = _END_OF_CHOICES.search(question, matches[-1].end())
    ends.append(end.start() if end else len(question))
    return {
        match[1]: question[match.end() : end].strip()
        for match, end in zip(matches, ends, strict=True)
    }


def is_in_words(text: str, letter: str) -> bool:
    """Return whether a letter was read from a word: the word "I", or one after "answer:"."""
    if not re.fullmatch("[A-J]", letter):
        return False
    if letter == "I":
        matches = list(_PRONOUN.finditer(text))
        return bool(matches) and all(_WORD_AFTER.match(text, match.end()) for match in matches)
    if re.search(rf"(?<![A-Za-z]){letter}(?![A-Za-z'\u2019])", text, re.IGNORECASE):
        return False
    return re.search(rf"{_STATED}(?i:{letter})[a-z'\u2019]", text) is not None


def marks_answer(text: str, answer: str) -> bool:
    """Return whether a text may mark its answer: by a word, a tag, bold type, or a last line."""
    if is_bare(text) or _ANY_MARK.search(text):
        return True
    answer = with_plain_minus(answer)
    last = text.rstrip().rpartition("\n")[2]
    if is_bare(last):
        return True
    return bool(re.search(_MARKED_LETTER.format(re.escape(answer)), text))


def is_unclear(text: str) -> bool:
    """Return whether a text goes on after its stated answer, as in "18 or 20" and "2 million"."""
    return _UNCLEAR.search(text) is not None


def may_state(text: str, gold: str, *, is_letter: bool) -> bool:
    """Return whether a reference stands anywhere after the first mark of a text.

    Args:
        text: The text.
        gold: The reference.
        is_letter: Whether the reference is a letter; otherwise it is a number.
    """
    mark = re.search(rf"####|\\boxed|<answer>|{_WORD}", text, re.IGNORECASE)
    text = text[mark.start() if mark else 0 :]
    if is_letter:
        letter = re.escape(gold.strip("() ."))
        return re.search(rf"(?<![A-Za-z]){letter}(?![A-Za-z])", text) is not None
    numbers = re.findall(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)", text)
    return any(is_same_number(number.rstrip(","), gold) for number in numbers)


def is_bare(text: str) -> bool:
    """Return whether a text is only its answer, with at most three words around."""
    return len(text) < _BARE and len(text.split()) <= 4


def _flexible(text: str) -> str | None:
    # A match has no spaces, so words are read from the end.
    for word in reversed(text[-2000:].split()):
        if numbers := [match[0] for match in _FLEXIBLE.finditer(word)]:
            return numbers[-1]
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
    return box if box is not None and len(box) <= _BARE else None


def _exact_form(answer: str) -> str:
    plain = answer.replace(",", "").replace("$", "")
    return plain.rpartition("#### ")[2].removesuffix(".").lower()


def _equals_exactly(answer: str, gold: str) -> bool:
    return _exact_form(answer) == _exact_form(gold)


def _equals_as_number(answer: str, gold: str) -> bool:
    return is_same_number(answer, gold) is True


def _first(*patterns: re.Pattern[str]) -> Callable[[str], str | None]:
    """Return a reader of the first match of the first pattern that matches."""

    def read(text: str) -> str | None:
        matches = (pattern.search(text) for pattern in patterns)
        return next((match[1].upper() for match in matches if match), None)

    return read


def _last(pattern: re.Pattern[str]) -> Callable[[str], str | None]:
    """Return a reader of the last match of a pattern."""

    def read(text: str) -> str | None:
        matches = list(pattern.finditer(text))
        if not matches:
            return None
        answer: str = matches[-1][1]
        return answer.upper() if len(answer) == 1 else answer

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


def _same_text(answer: str, gold: str) -> bool:
    return answer == gold.strip()


def _tagged_letter(text: str) -> str | None:
    tags = _TAG.findall(text)
    match = _LETTER_BOX.fullmatch(tags[-1]) if tags else None
    return match[1] if match else None


NUMBER_RULES: Final = (
    ScoringRule("strict-match", "like lm-eval", _first(*_STRICT), _equals_exactly, True),
    ScoringRule("last ####", "like verl", _last(_STRICT[0]), _equals_exactly, True),
    ScoringRule("flexible-extract", "like lm-eval", _flexible, _equals_exactly),
    ScoringRule("match(numeric)", "like Inspect", _inspect_number, _equals_as_number),
    ScoringRule("Answer: N", "like simple-evals", _after_answer, _equals_as_number, True),
    ScoringRule("boxed number", "like MATH", _boxed_number, _equals_as_number, True),
    ScoringRule("answer is N", "like lighteval", _last(_STATED_NUMBER), _equals_as_number, True),
    ScoringRule("<answer>N</answer>", "like DeepSeek-R1", _last(_TAG), _equals_as_number, True),
)
CHOICE_RULES: Final = (
    ScoringRule("Answer: X, first", "like simple-evals", _first(_MMLU), _same_letter, True),
    ScoringRule("Antwort: X, last", "like simple-evals", _last(_MULTILINGUAL), _same_letter, True),
    ScoringRule("ANSWER: X, last line", "like Inspect", _last(_INSPECT), _same_letter, True),
    ScoringRule("**Answer:** X, last", "like NeMo-Skills", _last(_AAI), _same_letter, True),
    ScoringRule("answer is (X)", "like MMLU-Pro", _first(*_MMLU_PRO), _same_letter, True),
    ScoringRule("answer is X, last", "like lighteval", _last(_STATED_LETTER), _same_letter, True),
    ScoringRule("boxed letter", "like NeMo-Gym", _boxed_letter, _same_letter, True),
    ScoringRule("<answer>X</answer>", "like DeepSeek-R1", _tagged_letter, _same_letter, True),
    ScoringRule("leading letter", "treegen", _leading_letter, _same_letter, True),
)
TEXT_RULES: Final = (
    ScoringRule("whole text", "like Inspect", lambda text: text.strip() or None, _same_text),
    ScoringRule("exact match", "like SQuAD", squad_form, lambda a, b: a == squad_form(b)),
    ScoringRule("first line", "like oe-eval", _first_line, _same_text, True),
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
