"""Answers as judges are shown them: between marks that they cannot forge, and what they try."""

import re
import unicodedata
from collections.abc import Sequence
from typing import Final

# What speaks to a judge and not to whoever asked the question. It flags, it changes nothing.
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
# Letters of other scripts that look like Latin ones, in the order of the latter.
_ALIKE: Final = str.maketrans(
    "\u0430\u0441\u0435\u0456\u0458\u043a\u043e\u0440\u0455\u0443\u0445"
    "\u0410\u0412\u0421\u0415\u041d\u0406\u0408\u041a\u041c\u041e\u0420\u0405\u0422\u0423\u0425"
    "\u03b1\u03b5\u03b9\u03ba\u03bd\u03bf\u03c1\u03c5\u03c7"
    "\u0391\u0392\u0395\u0396\u0397\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a5\u03a7",
    "aceijkopsyxABCEHIJKMOPSTYXaeikvopuxABEZHIKMNOPTYX",
)
# What chat templates write around turns: <|im_start|>, <start_of_turn>, <think>, [INST].
_IN_TEMPLATE: Final = re.compile(r"<[^<>\s{}%'\"]{1,40}>|\[/?[A-Z_]{2,20}\]")


def addresses_judge(text: str) -> list[str]:
    """Return by which means an answer speaks to its judge; empty if it does not seem to.

    Regular expressions find it, so an honest answer about grading may be flagged, and a veiled
    request missed. Letters that only look like others are read as those, and invisible ones not.
    """
    plain = _plain(text)
    return [what for what, pattern in _TRIES.items() if pattern.search(plain)]


def special_in_template(template: str) -> set[str]:
    """Return the texts by which a chat template tells turns, and who speaks, apart."""
    return set(_IN_TEMPLATE.findall(template))


def quote_answer(text: str, mark: str, special: Sequence[str] = ()) -> str:
    """Return an answer between two marks, neither of which is in it.

    Args:
        mark: Letters and digits that are the same for all answers, so that prompts share the tokens
            before an answer. An answer that has them, or special tokens of the judge's tokenizer,
            gets a space put into these. An answer that has them only in letters that tokenizers may
            take for plain ones is written in plain letters first.
    """
    forged = [each for each in sorted({mark, *special}, key=len, reverse=True) if len(each) > 1]
    folded = text if text.isascii() else unicodedata.normalize("NFKC", text)
    if any(each in folded and each not in text for each in forged):
        text = folded
    for each in forged:
        text = text.replace(each, f"{each[0]} {each[1:]}")
    return f"<<<{mark}\n{text}\n{mark}>>>"


def _plain(text: str) -> str:
    if text.isascii():
        return text
    folded = unicodedata.normalize("NFKC", text).translate(_ALIKE)
    return "".join(each for each in folded if unicodedata.category(each) != "Cf")
