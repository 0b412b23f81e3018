"""Quoting of answers for judges: marks that an answer cannot forge, and detection of attempts."""

import re
import unicodedata
from collections.abc import Sequence
from typing import Final

# Texts that address the judge instead of the asker of the question. They only flag an answer.
_TRIES: Final = {
    "asks to ignore the instructions": re.compile(
        r"\b(ignore|disregard|forget|override|bypass)\b[^.\n]{0,40}\b(rubric|instruction|prompt|rule"
        r"|criteri\w+|guideline|above|previous)s?\b",
        re.IGNORECASE,
    ),
    "asks for a verdict": re.compile(
        r"\b(say|assign|award|output|return|reply|respond|rate|grade|score|choose|pick|select|mark"
        r"|give (it|this|me|the|my|full))\b[^.\n]{0,30}\b((10|ten)(?=\s*(/|out of|[.!,\"']|$))"
        r"|(full|max\w*|perfect|highest|top) (mark|score|rating|grade|point)s?|marks"
        r"|as correct|correct\"?$|answer [ab])\b",
        re.IGNORECASE | re.MULTILINE,
    ),
    "addresses the judge": re.compile(
        r"\b(dear|hey|hello|attention|note to( the)?|to( the)?|you are (the|a|an)|as (the|a|an))\s+"
        r"(\w+\s+)?(judge|grader|evaluator|rater|assessor|reviewer|examiner)\b",
        re.IGNORECASE,
    ),
    "writes a verdict": re.compile(
        r"\bverdict[*_`\"']*\s*[:=]|^[*_`\s]*final (score|rating|grade)[*_`\s]*:"
        r"|\[\[\s*(\d+(\.\d+)?|[ABC])\s*\]\]",
        re.IGNORECASE | re.MULTILINE,
    ),
    "writes the marks or special tokens of a prompt": re.compile(
        r"\bANSWER_[0-9a-f]{8}|<\|[^|<>\n]{1,40}\|>|</?s>|\[/?INST\]|<</?SYS>>"
        r"|<(start|end)_of_turn>|<(bos|eos)>"
    ),
}
# Cyrillic and Greek letters that look like Latin letters, in the order of the Latin letters.
_ALIKE: Final = str.maketrans(
    "\u0430\u0441\u0435\u0456\u0458\u043a\u043e\u0440\u0455\u0443\u0445"
    "\u0410\u0412\u0421\u0415\u041d\u0406\u0408\u041a\u041c\u041e\u0420\u0405\u0422\u0423\u0425"
    "\u03b1\u03b5\u03b9\u03ba\u03bd\u03bf\u03c1\u03c5\u03c7"
    "\u0391\u0392\u0395\u0396\u0397\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a5\u03a7",
    "aceijkopsyxABCEHIJKMOPSTYXaeikvopuxABEZHIKMNOPTYX",
)
# Markers that chat templates write around turns: <|im_start|>, <start_of_turn>, <think>, [INST].
_IN_TEMPLATE: Final = re.compile(r"<[^<>\s{}%'\"]{1,40}>|\[/?[A-Z_]{2,20}\]")


def addresses_judge(text: str) -> list[str]:
    """Return the ways in which an answer seems to address its judge; empty if there are none.

    Detection uses regular expressions, so it may flag an honest answer about grading and miss a
    veiled request. Letters that look like Latin letters are read as these, and invisible characters
    are ignored.
    """
    plain = _plain(text)
    return [what for what, pattern in _TRIES.items() if pattern.search(plain)]


def special_in_template(template: str) -> set[str]:
    """Return the texts with which a chat template marks turns and speakers."""
    return set(_IN_TEMPLATE.findall(template))


def quote_answer(text: str, mark: str, special: Sequence[str] = ()) -> str:
    """Return an answer between two marks, with the marks and special tokens inside it broken up.

    If the answer contains the mark or a special token, a space is inserted after its first
    character. If it contains them only in letters that tokenizers may normalize to plain letters,
    the answer is first normalized to plain letters (NFKC).

    Args:
        text: The answer.
        mark: Letters and digits of the mark. It is the same for all answers, so that prompts share
            the tokens before an answer.
        special: Special tokens of the judge's tokenizer, as texts.
    """
    forged = [token for token in sorted({mark, *special}, key=len, reverse=True) if len(token) > 1]
    folded = text if text.isascii() else unicodedata.normalize("NFKC", text)
    if any(token in folded and token not in text for token in forged):
        text = folded
    for token in forged:
        text = text.replace(token, f"{token[0]} {token[1:]}")
    return f"<<<{mark}\n{text}\n{mark}>>>"


def _plain(text: str) -> str:
    if text.isascii():
        return text
    folded = unicodedata.normalize("NFKC", text).translate(_ALIKE)
    return "".join(char for char in folded if unicodedata.category(char) != "Cf")
