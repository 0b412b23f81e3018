"""Reads the letter of a choice from model text; total, and linear in the text."""

import re
import unicodedata
from dataclasses import dataclass
from typing import Final

# Hedges are looked for in so many characters before a statement.
_HEDGE_WINDOW: Final = 64
_HEDGE: Final = re.compile(
    r"(?:\b(?:if|whether|unless|suppose|supposing|assume|assuming|doubt)"
    r"|(?:\b(?:not|never|cannot)|n['\u2019]t)"
    r"(?:[ ]+(?:think|believe|say|mean|true|sure|certain|possible|likely|clear|the[ ]case|be))?)"
    r"(?:[ ]+that)?(?:[ ]+(?:the|my|our|an?|its))?"
    r"(?:[ ]+(?:final|correct|right|best|only|option|choice|answer|statement)){0,3}"
    r"[ ]*[(*\"']{0,3}\Z",
    re.IGNORECASE,
)


def is_hedged(text: str, at: int) -> bool:
    """Return whether the words before `at` deny or only suppose the text that begins there.

    An example is "if the answer is 5".
    """
    return bool(_HEDGE.search(text[max(at - _HEDGE_WINDOW, 0) : at]))


LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

# Number of characters that are read before and after a letter.
_WINDOW: Final = 80
# A text with more letters is hardly an answer; only its first letter and this many last are read.
_MAX_LATER_MATCHES: Final = 500
# Before these words "A" and "I" are letters. Before other lower-case words they are words.
_VERBS: Final = (
    r"(?:is|was|because|since|as|and|or|but|nor|for|given|due|would|will|must|should|seems|in|with"
    r"|on|at|from|to|which|when|where|if|then|here|has|does|cannot|isn|doesn|can|could)(?![\w-])"
)
# A letter that is not part of a word or of a formula.
_LETTER: Final = re.compile(
    r"(?<![A-Za-z0-9])(?<![A-Za-z0-9][_^'\u2019\\-])[A-Z]"
    r"(?![A-Za-z0-9+#])(?![_'\u2019^-][A-Za-z0-9])(?![ ]?=)"
    rf"(?!(?<=A)[ \t]{{1,8}}(?!{_VERBS})[a-z])(?!(?<=I)[ \t]{{1,8}}(?!is|because|since)[a-z])"
)
_OPENING: Final = re.compile(
    r"(?:[(\[{\"'`*_$\u2018\u201c \t]|\\(?:text(?:bf|rm|it|sf)?|math(?:bf|rm)|mbox|[,(\[])){1,16}$"
)
_CLOSING: Final = re.compile(r"[)\]}\"'`*_$\u2019\u201d]{0,12}")
_JOINED: Final = re.compile(
    r"[)\]}\"'`*_$]{0,8}[ \t]{0,4}(?:,?[ ]?\b(?:and|or|nor|and/or)\b|[,/&])[ \t]{0,4}"
    r"(?:(?:option|choice|answer|statement)s?[ ])?[(\[{\"'`*_$]{0,8}",
    re.IGNORECASE,
)
_SINGULAR: Final = re.compile(
    r"[)\]}\"'`*_$]{0,8}[ ](?:is|isn|was|has|does|doesn|can|cannot|would)\b"
)

_NOUN: Final = r"(?:option|choice|answer|letter|statement|one)"
_IS: Final = r"(?:is|would\s+be|will\s+be|must\s+be|should\s+be)"
_SURELY: Final = (
    r"(?:\s+(?:therefore|thus|clearly|indeed|definitely|likely|probably|most\s+likely))?"
)
# Words that state the letter after them: "the answer is", "Answer:", "the best option would be".
_STATES: Final = re.compile(
    rf"(?<![A-Za-z])(?:answer|(?:correct|right|best|final)\s+{_NOUN})(?:\s+choice)?[*_)\"']{{0,4}}"
    rf"(?:\s+{_IS}{_SURELY}|\s*[:=]|[*_#:]{{0,4}}[ \t]*\n)[\s:*_]*(?:{_NOUN}[\s:*_]*)?$",
    re.IGNORECASE,
)
_ENDS: Final = re.compile(r"(?<![A-Za-z])answer(?:[ ]choice)?$", re.IGNORECASE)
# Words that state the letter before them: "is the correct answer".
_IS_STATED: Final = re.compile(
    rf"\s+{_IS}{_SURELY}\s+(?:the|my|our)\s+(?:(?:most|only)\s+\w+\s+|correct\s+|right\s+|best\s+"
    rf"|final\s+){{0,2}}{_NOUN}\b",
    re.IGNORECASE,
)
# Weaker statements, used if no letter is stated more clearly: "is correct", "I choose".
_IS_RIGHT: Final = re.compile(
    rf"(?:\s*\([^()\n]{{0,200}}\))?(?:\s+(?:is|are|must\s+be|seems)(?:\s+both)?{_SURELY}\s+"
    r"(?:the\s+)?(?:correct|right|best)\b"
    r"|[ \t]*[.:)-][ \t]*(?:correct|right)(?=[ \t]*(?:[.,;!\n]|\Z)))",
    re.IGNORECASE,
)
_CHOOSES: Final = re.compile(
    rf"\b(?:choos(?:e|ing)|chose|pick(?:ed)?|select(?:ed)?|(?:go|going|went)\s+with|opt\s+for)\s*"
    rf"(?:{_NOUN}\s*)?$",
    re.IGNORECASE,
)
_DENIES: Final = re.compile(
    r"(?:\b(?:not|nor|neither|never|cannot|except|eliminat\w{1,5}|rul\w{1,4}\s+out|exclud\w{1,3}"
    r"|discard\w{0,3}|reject\w{0,3}|instead\s+of|rather\s+than|unlike|than|over)|n['\u2019]t)"
    rf"(?:\s+(?:both|either|be|choose|pick|select|the|just|only|{_NOUN}s?)){{0,3}}\s*$",
    re.IGNORECASE,
)
_IS_DENIED: Final = re.compile(
    r"(?:\s*\([^()\n]{0,200}\))?(?:[ \t]+(?:is|are|was|were|can|could|would|does|do|seems?|be)"
    r"(?:\s+(?:both|all|clearly|also|definitely|therefore|simply)){0,2}\s*(?:not\b|n['\u2019]t\b|"
    r"incorrect|wrong|false|out\b|eliminated|excluded|ruled|impossible|invalid)"
    r"|[ \t]+(?:isn|aren|can|couldn|doesn|don|wouldn|wasn)['\u2019]t\b|[ \t]+cannot\b"
    r"|[ \t]*[.:)-]?[ \t]*[-\u2013]?[ \t]*\(?(?:[\u2717\u2718\u274c]"
    r"|(?:incorrect|wrong)(?=[ \t]*(?:[.,;:!)\n]|because|since|as\b|\Z)))"
    r"|[ \t]*[:\u2013-][ \t]*(?:no(?=[ \t]*(?:[.,;!\n]|\Z))|not[ ](?:correct|right|true)\b))",
    re.IGNORECASE,
)
_OR_ANOTHER: Final = re.compile(
    r"(?:(?!\bnot\b|\bthan\b)[^.;\n]){0,40}?\bor[ }]{1,3}(?:option[ ])?"
    r"[(*\"]{0,3}[A-Z](?![A-Za-z0-9])"
)
_UNCLOSED: Final = re.compile(r"\([^()]*\Z")
# Text before the letter of a listed choice ("B.", "(B)", "B:") at the start of a line or sentence.
_HEAD: Final = re.compile(
    r"(?:\A|\n|[.;!?][ \t])[ \t>#-]{0,8}(?:(?:option|choice)[ ])?$", re.IGNORECASE
)
_LEADS: Final = re.compile(r"\s*(?:(?:option|choice)\s+)?", re.IGNORECASE)
_LED: Final = re.compile(r"[.,:;\n]|\s*\Z")


@dataclass(frozen=True, slots=True)
class _Mention:
    """Letters mentioned together, as "B" or "A, B or C", and what the text says about them."""

    letters: frozenset[str]
    start: int
    end: int
    is_stated: bool
    is_chosen: bool
    is_denied: bool
    is_head: bool

    @property
    def letter(self) -> str | None:
        """The letter if there is only one; otherwise None."""
        return next(iter(self.letters)) if len(self.letters) == 1 else None


def first_capital(text: str) -> str | None:
    """Return the first upper-case letter of a text; for "The answer is B" this is T.

    RelayAttention's script reads answers this way.
    """
    return next((character for character in text if character.isupper()), None)


def letter_answer(text: str, num: int = 4) -> str | None:
    r"""Return the letter, among the first `num`, that a text gives as its answer.

    Uses the first of these rules that applies:

    - the letter that is stated last, as in "the answer is B", "Answer: B", "B is the best answer"
      and "\boxed{B}";
    - the last letter that is called correct or chosen, as in "B is correct" and "I choose B";
    - the letter at the start of the text, as in "B. Paris", unless other choices are listed too;
    - the only letter in the text that is not part of a word and not denied, as in "not A".

    Several letters, as in "the answer is A or B", and letters beyond the choices give None.
    """
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    mentions = _find_mentions(text)
    for among in ("is_stated", "is_chosen"):
        if last := next(
            (mention for mention in reversed(mentions) if getattr(mention, among)), None
        ):
            return _one_of(last.letter, num)
    if mentions and (first := mentions[0]).letter and _is_leading(text, mentions):
        return _one_of(first.letter, num)
    denied = {letter for mention in mentions if mention.is_denied for letter in mention.letters}
    named = {letter for mention in mentions if not mention.is_denied for letter in mention.letters}
    alone = (named - denied) & {*LETTERS[:num]}
    return alone.pop() if len(alone) == 1 else None


def _one_of(letter: str | None, num: int) -> str | None:
    return letter if letter is not None and letter in LETTERS[:num] else None


def _is_leading(text: str, mentions: list[_Mention]) -> bool:
    first, *later = mentions
    begins = _OPENING.sub("", text[: first.start]) if first.start < _WINDOW else "?"
    if first.is_denied or not _LEADS.fullmatch(begins):
        return False
    marks = _CLOSING.match(text, first.end)
    end = marks.end() if marks else first.end
    if end == first.end and not _LED.match(text, end):
        return False
    form = _form(text, first.end)
    alike = [other for other in later if _form(text, other.end) == form and not other.is_denied]
    if [other.letter for other in (first, *alike)] == [*LETTERS[: len(alike) + 1]]:
        return not alike  # the text lists all choices in order
    return not any(other.is_head for other in alike)


def _form(text: str, end: int) -> str:
    """Return the character after a letter, such as the bracket of "(B)": it shows its format."""
    return (text[end : end + 2].strip(" \t") or "\n")[:1] if text[end : end + 1] != " " else " "


def _find_mentions(text: str) -> list[_Mention]:
    matches = list(_LETTER.finditer(text))
    matches = [*matches[:1], *matches[1:][-_MAX_LATER_MATCHES:]]
    groups: list[list[re.Match[str]]] = []
    for match in matches:
        if groups and _are_listed_together(text, groups[-1][-1], match):
            groups[-1].append(match)
        else:
            groups.append([match])
    return [_make_mention(text, group) for group in groups]


def _are_listed_together(text: str, before: re.Match[str], match: re.Match[str]) -> bool:
    """Return whether two letters belong to one list. In "A, B is wrong" they do not."""
    if match.start() - before.end() > _WINDOW:
        return False
    joined = _JOINED.fullmatch(text, before.end(), match.start())
    if joined is None:
        return False
    is_or = re.search(r"\b(?:n?or)\b", joined[0], re.IGNORECASE)
    return bool(is_or) or not _SINGULAR.match(text, match.end())


def _make_mention(text: str, group: list[re.Match[str]]) -> _Mention:
    start, end = group[0].start(), group[-1].end()
    before = text[max(start - _WINDOW, 0) : start]
    bare = _OPENING.sub("", before)
    marks = _CLOSING.match(text, end)
    after_at = marks.end() if marks else end
    after = text[after_at : after_at + 3 * _WINDOW]
    if ")" in text[end:after_at] and "(" not in before[len(bare) :] and _UNCLOSED.search(bare):
        after = ""  # in "C (at most R) is right" the words refer to C
    states = _STATES.search(bare)
    at = start - len(before) + states.start() if states else start
    ends = _ENDS.search(bare) is not None and re.match(r"[.\s]*(?:\n|\Z)", after) is not None
    announced = states or ends or bare.endswith("\\boxed")
    stated = announced or _IS_STATED.match(after)
    chosen = _IS_RIGHT.match(after) or _CHOOSES.search(bare)
    is_denied = bool(
        _DENIES.search(bare)
        or (not announced and _IS_DENIED.match(after))
        or ((stated or chosen) and is_hedged(text, at))
    )
    letters = {match[0] for match in group}
    if stated and (other := _OR_ANOTHER.match(after)):
        letters.add(other[0][-1])
    return _Mention(
        letters=frozenset(letters),
        start=start,
        end=end,
        is_stated=bool(stated) and not is_denied,
        is_chosen=bool(chosen) and not is_denied,
        is_denied=is_denied,
        is_head=bool(_HEAD.search(bare)),
    )
