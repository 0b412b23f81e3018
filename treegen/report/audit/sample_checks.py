"""Finds samples that ended too early, too late or without content, and equal samples."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, Final

from treegen.report.audit import Severity
from treegen.report.audit.findings import Finding, find
from treegen.report.audit.readers import ANSWER_MARK, is_bare, next_problem
from treegen.report.view import RunView, Sample, StoredTree, settings_group
from treegen.search.tree.records import TreeNode

_TAIL_CHARS: Final = 600  # characters at the end of a text in which a repetition is looked for
_MIN_REPEATED_CHARS: Final = 200
_MARKUP: Final = re.compile(
    r"<\|(?:im_end|im_start|eot_id|end|endoftext|eom_id|start_header_id|end_of_text)\|>"
    r"|<end_of_turn>|<start_of_turn>|</s>|\[/?INST\]"
)
_MIN_LETTERS: Final = 40  # letters of a text from which its script is known
_MIN_SURPRISING_TOKENS: Final = 20  # tokens from which equal samples are surprising
_SHORT_ANSWERS: Final = ("number", "choice", "mathematics")
_MIN_TOKENS: Final = 32  # tokens in which a sample could have ended
_ANSWER_LINE: Final = re.compile(r"\n\s{0,4}(?:A|Answer|Solution|Response)\s?:")


def audit_samples(view: RunView, kind: str, *, is_scored: bool) -> Iterator[Finding]:
    """Yield the findings on the texts and ends of samples.

    Args:
        view: The run.
        kind: The kind of its answers.
        is_scored: Whether the run has scores, so that a cut answer counts as wrong.
    """
    if view.job is not None and view.job.choices:
        return  # nothing was drawn
    drawn = list(_read_model_texts(view))
    num, unit = len(drawn), view.unit
    if is_scored:
        samples = [d.sample for d in drawn]
        yield from _find_cut_off(view, samples, [d.sample for d in drawn if d.is_cut], kind)
        yield from _find_read_reasoning(view, samples, kind)
    yield from find("empty-sample", [d.sample for d in drawn if d.is_empty], num, unit=unit)
    repeated = [d.sample for d in drawn if not d.is_stopped and any(map(is_repetition, d.texts))]
    yield from find("repeats-to-the-end", repeated, num, unit=unit)
    ended = [d.sample for d in drawn if any(map(_MARKUP.search, d.texts))]
    yield from find("end-token-in-text", ended, num, unit=unit)
    ran = [d.sample for d in drawn if any(map(_states_next_problem, d.answers))]
    # A text without a short answer may have been asked to write problems.
    severity: Severity | None = "low" if kind in ("text", "none") else None
    yield from find("runs-into-next-problem", ran, num, unit=unit, severity=severity)
    yield from _find_equal_samples(view)
    yield from _find_other_language(view, drawn)


@dataclass(frozen=True, slots=True)
class _ModelTexts:
    """The texts that the model wrote in a sample, or on the best path of a search."""

    sample: Sample
    texts: tuple[str, ...]
    """The model's texts. The best path of an agent has one for each turn, without the results of
    tools between turns."""
    answers: tuple[str, ...]
    """The texts without their reasoning."""
    is_cut: bool
    """Whether the last text ended at max_tokens or during its reasoning."""
    is_stopped: bool
    """Whether the model or a stop string ended the last text."""
    is_empty: bool
    """Whether the model wrote nothing but empty texts."""


def _read_model_texts(view: RunView) -> Iterator[_ModelTexts]:
    if view.searched:
        tree_of = {(tree.problem_id, tree.repeat): tree for tree in view.trees}
        for sample in view.samples:
            yield _read_search_texts(sample, tree_of[sample.problem_id, sample.index])
        return
    for sample in view.samples:
        yield _ModelTexts(
            sample,
            texts=(sample.text,),
            answers=(sample.parts[1],),
            is_cut=sample.finish_reason == "length" or _is_open(sample),
            is_stopped=sample.finish_reason == "stop",
            is_empty=not sample.text.strip(),
        )


def _read_search_texts(sample: Sample, tree: StoredTree) -> _ModelTexts:
    """Return the texts that the model wrote on the best path of a search.

    A search without a best path found no solution, but its model may have written text. An
    unfinished path is not cut: a budget, a depth or pruning ended its search.
    """
    path = tree.path[1:]
    runs = [(is_own, list(nodes)) for is_own, nodes in groupby(path, _is_generated)]
    texts = tuple("".join(node["text"] for node in nodes) for is_own, nodes in runs if is_own)
    end = path[-1].get("finish_reason") if path else None
    generated = [node for node in tree.nodes if _is_generated(node)]
    return _ModelTexts(
        sample,
        texts=texts,
        answers=texts,
        is_cut=tree.is_finished and end == "length",
        is_stopped=end != "length",
        is_empty=bool(generated) and not any(node["text"].strip() for node in generated),
    )


def _is_generated(node: TreeNode) -> bool:
    """Return whether the model wrote a node; the root is the prompt."""
    return node["parent_id"] is not None and node.get("finish_reason") != "given"


def _is_open(sample: Sample) -> bool:
    if sample.thinking is not None:
        return not sample.thinking.is_closed
    return sample.text.lstrip().startswith("<think>") and "</think>" not in sample.text


def _states_next_problem(text: str) -> bool:
    """Return whether a text states its answer, and then another problem with an answer."""
    at = next_problem(text)
    return at is not None and _ANSWER_LINE.search(text, at) is not None


def _find_read_reasoning(view: RunView, samples: Sequence[Sample], kind: str) -> Iterator[Finding]:
    """Yield a finding on samples whose reasoning the scorer read.

    An answer that stands after the reasoning was probably read there. Other kinds of answers than
    numbers and letters change their form when they are read.
    """

    def is_read_after(sample: Sample) -> bool:
        verdict = sample.verdict(view.headline)
        if verdict is None or verdict.answer is None:
            return False
        after = sample.text.rpartition("</think>")[2]
        return _normalize(verdict.answer) in _normalize(after)

    unread = [s for s in samples if s.thinking is None and "</think>" in s.text]
    unread = [s for s in unread if not is_read_after(s)]
    severity: Severity | None = None if kind in ("number", "choice") else "low"
    yield from find(
        "reasoning-read-as-answer", unread, len(samples), unit=view.unit, severity=severity
    )


def _normalize(text: str) -> str:
    return re.sub(r"[\s,$]", "", text).casefold()


def _find_cut_off(
    view: RunView, samples: Sequence[Sample], cut: Sequence[Sample], kind: str
) -> Iterator[Finding]:
    """Yield findings on samples that ended before their answer.

    Args:
        view: The run.
        samples: All samples.
        cut: Those that ended at max_tokens or during their reasoning.
        kind: The kind of the answers.
    """
    num = len(samples)
    thinking = [s for s in cut if _is_open(s)]
    yield from find("thinking-cut-off", thinking, num, unit=view.unit)

    def is_unanswered(sample: Sample) -> bool:
        verdict = sample.verdict(view.headline)
        if verdict is None:
            return True
        if verdict.answer is None:
            return not verdict.correct
        # A short or marked answer came before the end; other kinds may have begun with it.
        is_stated = is_bare(sample.text) or ANSWER_MARK.search(sample.text) is not None
        return not verdict.correct and not is_stated and kind in _SHORT_ANSWERS

    open_ones = {id(sample) for sample in thinking}
    unanswered = [s for s in cut if id(s) not in open_ones and is_unanswered(s)]
    is_searched = view.searched  # the finish reason of a search is not that of its text
    at_limit = len(cut) if is_searched else sum(s.finish_reason == "length" for s in samples)
    yield from find("cut-off", unanswered, num, unit=view.unit, cut=at_limit)
    long_samples = [s for s in samples if s.num_tokens >= _MIN_TOKENS]
    if len(long_samples) >= 5 and len(cut) >= 0.95 * num and len(unanswered) >= num / 2:
        yield from find("end-never-reached", cut, num, unit=view.unit)


def is_repetition(text: str) -> bool:
    """Return whether the end of a text consists of copies of one piece."""
    tail = text[-_TAIL_CHARS:].strip()
    if len(tail) < _MIN_REPEATED_CHARS or tail.startswith("|") or tail.endswith("|"):
        return False  # short, or a table
    if len(set(tail)) == 1:
        return True
    if tail.count(tail[-20:]) < 3:  # a quick check that most texts fail
        return False
    # The smallest period of the reversed end, by the failure function of Knuth, Morris and Pratt.
    end = tail[::-1]
    border = [0] * len(end)
    for index in range(1, len(end)):
        size = border[index - 1]
        while size and end[index] != end[size]:
            size = border[size - 1]
        border[index] = size + (end[index] == end[size])
        period = index + 1 - border[index]
        if index + 1 >= _MIN_REPEATED_CHARS and period * 3 <= index + 1:
            return True
    return False


def _find_equal_samples(view: RunView) -> Iterator[Finding]:
    sampling = settings_group(view.info, "sampling")
    temperature = _get_number(sampling, "temperature", 0)
    groups = [p.samples for p in view.problems if len(p.samples) > 2]
    if not groups or view.searched or not _is_random(sampling):
        return
    long = [group for group in groups if group[0].num_tokens >= _MIN_SURPRISING_TOKENS]
    equal = [group for group in long if len({s.text for s in group}) == 1]
    severity: Severity | None = None
    if any(group[0].logprob is None for group in equal):
        # A confident model may repeat a text, but not for all problems.
        severity = "medium" if len(equal) == len(long) > 2 else "low"
    elif temperature < 1:
        # Stored log-probabilities are those at temperature 1; lower temperatures repeat more.
        equal = [group for group in equal if (group[0].logprob or 0) < -40]
    else:  # a text of probability 1e-6 is not drawn three times by chance
        equal = [group for group in equal if (group[0].logprob or 0) < -14]
    yield from find(
        "equal-samples",
        [group[0] for group in equal],
        len(groups),
        unit="problems",
        severity=severity,
        temperature=temperature,
    )


def _is_random(sampling: Mapping[str, Any]) -> bool:
    """Return whether the sampling parameters are far enough from greedy sampling.

    Then equal samples of a long text are surprising.
    """
    top_p, top_k = _get_number(sampling, "top_p", 1), _get_number(sampling, "top_k", 0)
    is_wide = top_p >= 0.7 and not 0 < top_k < 5 and _get_number(sampling, "min_p", 0) <= 0.2
    return is_wide and _get_number(sampling, "temperature", 0) >= 0.5


def _get_number(sampling: Mapping[str, Any], name: str, default: float) -> float:
    """Return a setting; the default if it is 0, missing or not a number."""
    value = sampling.get(name)
    return value if isinstance(value, int | float) and value else default


def _find_other_language(view: RunView, drawn: Sequence[_ModelTexts]) -> Iterator[Finding]:
    script_of_problem = {p.id: main_script(p.question) for p in view.problems}
    other_script = []
    for drawn_sample in drawn:
        sample = drawn_sample.sample
        expected = script_of_problem.get(sample.problem_id)
        if expected is not None and not (sample.text.isascii() and expected == "LATIN"):
            script = main_script("\n".join(drawn_sample.answers))
            if script is not None and script != expected:
                other_script.append(sample)
    yield from find("other-language", other_script, len(drawn), unit=view.unit)


@lru_cache(maxsize=1 << 13)
def _script_of(letter: str) -> str:
    name = unicodedata.name(letter, "").partition(" ")[0]
    return "CJK" if name in ("HIRAGANA", "KATAKANA", "HANGUL") else name


def main_script(text: str) -> str | None:
    """Return the script of most letters at the start of a text; None if it has few letters."""
    text = text[:4000]
    if text.isascii():
        return "LATIN" if sum(map(str.isalpha, text)) >= _MIN_LETTERS else None
    counts = Counter(_script_of(letter) for letter in text if letter.isalpha())
    total = sum(counts.values())
    # A character of Chinese says as much as several letters.
    if total + 3 * counts["CJK"] < _MIN_LETTERS:
        return None
    name, count = counts.most_common(1)[0]
    return name if count >= 0.6 * total else None
