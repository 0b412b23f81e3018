"""Finds samples that ended too early, too late or without content, and equal samples."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

from treegen.report.audit.findings import Finding, find
from treegen.report.audit.readers import next_problem
from treegen.report.view import RunView, Sample

_TAIL: Final = 600  # characters at the end of a text in which a repetition is looked for
_LEAST_REPEATED: Final = 200
_MARKUP: Final = re.compile(
    r"<\|(?:im_end|im_start|eot_id|end|endoftext|eom_id|start_header_id|end_of_text)\|>"
    r"|<end_of_turn>|<start_of_turn>|</s>|\[/?INST\]"
)
_LANGUAGE_LETTERS: Final = 40  # letters of a text from which its script is known
_LONG: Final = 20  # tokens from which equal samples are surprising


def audit_samples(view: RunView) -> Iterator[Finding]:
    """Yield the findings on the samples of a run, whose answers are not read here."""
    if view.job is not None and view.job.choices:
        return  # nothing was drawn
    samples = list(view.samples)
    num = len(samples)
    cut = [s for s in samples if s.finish_reason == "length" or _is_open(s)]
    yield from _cut(view, samples, cut)
    yield from find("empty-sample", [s for s in samples if not s.text.strip()], num)
    yield from find(
        "repeats-to-the-end",
        [s for s in samples if s.num_tokens != 1 and is_repetition(s.text)],
        num,
    )
    yield from find("end-token-in-text", [s for s in samples if _MARKUP.search(s.text)], num)
    unread = [s for s in samples if s.thinking is None and "</think>" in s.text]
    yield from find("reasoning-read-as-answer", unread, num)
    yield from find(
        "runs-into-next-problem", [s for s in samples if next_problem(s.parts[1]) is not None], num
    )
    yield from _equal(view)
    yield from _language(view, samples)


def _is_open(sample: Sample) -> bool:
    if sample.thinking is not None:
        return not sample.thinking.is_closed
    return sample.text.count("<think>") > sample.text.count("</think>")


def _cut(view: RunView, samples: Sequence[Sample], cut: Sequence[Sample]) -> Iterator[Finding]:
    headline, num = view.filters[0] if view.filters else "", len(samples)
    thinking = [s for s in cut if _is_open(s)]
    yield from find("thinking-cut-off", thinking, num)

    def is_unanswered(sample: Sample) -> bool:
        verdict = (sample.verdicts or {}).get(headline)
        # The text of a sample with choices or a program is its own answer.
        return verdict is None or not verdict.correct

    open_ones = {id(sample) for sample in thinking}
    unanswered = [s for s in cut if id(s) not in open_ones and is_unanswered(s)]
    yield from find("cut-off", unanswered, num)
    drawn = [s for s in samples if s.num_tokens != 1]
    if len(drawn) >= 5 and len(cut) >= 0.95 * len(drawn) and len(unanswered) >= len(drawn) / 2:
        yield from find("end-never-reached", cut, num)


def is_repetition(text: str) -> bool:
    """Return whether the end of a text consists of copies of one piece."""
    tail = text[-_TAIL:].strip()
    if len(tail) < _LEAST_REPEATED or len(set(tail)) == 1:
        return len(tail) >= _LEAST_REPEATED
    if tail.count(tail[-20:]) < 3:  # a quick check that most texts fail
        return False
    # The smallest period of the reversed end, by the failure function of Knuth, Morris and Pratt.
    end = tail[::-1]
    border = [0] * len(end)
    for place in range(1, len(end)):
        size = border[place - 1]
        while size and end[place] != end[size]:
            size = border[size - 1]
        border[place] = size + (end[place] == end[size])
        period = place + 1 - border[place]
        if place + 1 >= _LEAST_REPEATED and period * 3 <= place + 1:
            return True
    return False


def _equal(view: RunView) -> Iterator[Finding]:
    sampling: Any = view.info.identity.get("sampling") or {}
    temperature = sampling.get("temperature") or 0
    groups = [p.samples for p in view.problems if len(p.samples) > 1]
    if not temperature or not groups or view.searched:
        return
    # A text of probability 1e-6 is not drawn twice by chance.
    equal = [
        group
        for group in groups
        if len({s.text for s in group}) == 1
        and group[0].num_tokens >= _LONG
        and (len(group) > 2 if (logprob := group[0].logprob) is None else logprob < -14)
    ]
    first = [group[0] for group in equal]
    yield from find("equal-samples", first, len(groups), unit="problems", temperature=temperature)


def _language(view: RunView, samples: Sequence[Sample]) -> Iterator[Finding]:
    num = len(samples)
    script_of_problem = {p.id: main_script(p.question) for p in view.problems}
    strange = []
    for sample in samples:
        asked = script_of_problem.get(sample.problem_id)
        if asked is not None and not (sample.text.isascii() and asked == "LATIN"):
            mine = main_script(sample.parts[1])
            if mine is not None and mine != asked:
                strange.append(sample)
    yield from find("other-language", strange, num)


@lru_cache(maxsize=1 << 13)
def _script(letter: str) -> str:
    name = unicodedata.name(letter, "").partition(" ")[0]
    return "CJK" if name in ("HIRAGANA", "KATAKANA", "HANGUL") else name


def main_script(text: str) -> str | None:
    """Return the script of most letters at the start of a text; None if it has few letters."""
    text = text[:4000]
    if text.isascii():
        return "LATIN" if sum(map(str.isalpha, text)) >= _LANGUAGE_LETTERS else None
    counts = Counter(_script(letter) for letter in text if letter.isalpha())
    total = sum(counts.values())
    # A character of Chinese says as much as several letters.
    if total + 3 * counts["CJK"] < _LANGUAGE_LETTERS:
        return None
    name, most = counts.most_common(1)[0]
    return name if most >= 0.6 * total else None
