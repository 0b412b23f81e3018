"""Reads the answers of a run by public rules, beside the run's own verdicts."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from treegen.errors import TreegenError
from treegen.evals.registry import get_task
from treegen.evals.statistics.estimators import difference_interval, estimate, pass_at_k
from treegen.evals.statistics.metrics import clusters_of
from treegen.evals.statistics.votes import tally_of
from treegen.evals.verdict import Verdict
from treegen.report.audit.equivalence import MATH_RULES, compare, expression_of
from treegen.report.audit.findings import Finding, RuleEffect, find
from treegen.report.audit.readers import (
    CHOICE_RULES,
    NUMBER_RULES,
    TEXT_RULES,
    Rule,
    choices_of,
    is_bare,
    is_in_words,
    kind_of,
    value_of,
    visible,
)
from treegen.report.view import ProblemView, RunView, Sample

# Tasks whose answers are not one number, letter or text that is compared with the reference.
_OTHER: Final = (
    "needle",
    "ruler-",
    "countdown",
    "game24",
    "ifeval",
    "simpleqa",
    "chartqa",
    "docvqa",
)
_RULES: Final[Mapping[str, tuple[Rule, ...]]] = {
    "number": NUMBER_RULES,
    "choice": CHOICE_RULES,
    "text": TEXT_RULES,
    "mathematics": MATH_RULES,
}
_MOST_ANSWERS: Final = 8  # of a problem, whose classes are compared

Counts = dict[tuple[str | None, bool], int]


def references_of(answer: str) -> tuple[str, ...]:
    """Return the right answers of a problem: tasks store several as a JSON list of texts.

    Of a solution that ends in "#### N", as in logs on GSM8K, the answer is N.
    """
    if answer.startswith("["):
        with suppress(ValueError):
            answers = json.loads(answer)
            if answers and all(isinstance(each, str) for each in answers):
                return tuple(answers)
    answer = answer.rpartition("#### ")[2]
    return (answer,) if answer else ()


def answer_kind(view: RunView) -> str:
    """Return how the answers of a run can be read again; "none" if no public rule applies."""
    if view.job is not None and view.job.task.executes_code:
        return "code"
    if not view.filters or view.searched or view.task.startswith(_OTHER):
        return "none"
    if view.job is not None and view.job.choices:
        return "none"
    kind = kind_of([gold for p in view.problems if p.samples for gold in references_of(p.answer)])
    headline = view.job.task.answer_types.get(view.filters[0]) if view.job is not None else None
    return "mathematics" if type(headline).__name__ == "MathAnswer" else kind


@dataclass(frozen=True, slots=True)
class _Case:
    """A sample that a finding is about, with the answers that were read."""

    sample: Sample
    gold: str
    run: str | None
    """The answer that the run has read."""
    others: str | None
    """The answer that the other rules have read."""

    @property
    def text(self) -> str:
        return (
            f"the run reads {self.run!r}, other rules read {self.others!r}, the reference is "
            f"{self.gold!r}: {self.sample.text[-600:]}"
        )


@dataclass(slots=True)
class _Opinions:
    """What the rules say about a run."""

    rules: Sequence[Rule]
    counts: dict[str, dict[str, Counts]] = field(default_factory=lambda: defaultdict(dict))
    """By rule and problem, how many samples gave each answer; rule "" is the run itself."""
    differing: Counter[str] = field(default_factory=Counter)
    rejected: list[_Case] = field(default_factory=list)
    accepted: list[_Case] = field(default_factory=list)
    fallback: list[_Case] = field(default_factory=list)
    in_words: list[_Case] = field(default_factory=list)
    merged: list[tuple[str, str]] = field(default_factory=list)
    split: list[tuple[str, str]] = field(default_factory=list)
    unread: list[Sample] = field(default_factory=list)
    total: int = 0


def audit_answers(view: RunView, kind: str) -> tuple[list[Finding], list[RuleEffect]]:
    """Return the findings on the answers of a run, and its metrics under each rule.

    Args:
        view: The run.
        kind: The kind of its answers, from `answer_kind`.
    """
    if kind not in _RULES:
        return [], []
    rules = [*_RULES[kind], *([] if kind != "mathematics" else _math_verify(view))]
    opinions = _Opinions(rules)
    for problem in view.problems:
        golds = references_of(problem.answer)
        if golds and problem.samples:
            _read_problem(view, problem, golds, kind, opinions)
    if not opinions.total:
        return [], []
    names = [(rule.name, rule.source) for rule in rules]
    names += [(name, "filter of this run") for name in map(_key, view.filters[1:])]
    effects = [_effect(view, opinions, *name) for name in names if name[0] in opinions.counts]
    return list(_findings(opinions)), [effect for effect in effects if effect is not None]


def _key(filter: str) -> str:
    """Return the name of a filter among the rules, some of which have the same name."""
    return f"{filter}, here"


def _math_verify(view: RunView) -> list[Rule]:
    """Return math-verify as a rule, unless the run is scored by it or it is not installed."""
    if view.filters[0] == "math-verify":
        return []
    try:
        task = get_task("math500")
        task.answer_types["math-verify"].verdict("$1$", ["1"])
    except TreegenError:
        return []
    kind: Any = task.answer_types["math-verify"]

    def is_right(answer: str, gold: str) -> bool:
        return bool(kind.verdict(f"$\\boxed{{{answer}}}$", [gold]).correct)

    return [Rule("math-verify", "Hugging Face", expression_of, is_right, True)]


def _read_problem(
    view: RunView, problem: ProblemView, golds: tuple[str, ...], kind: str, opinions: _Opinions
) -> None:
    """Add the samples of a problem to the opinions. Equal texts are read once."""
    headline, most = view.filters[0], view.fixed
    read: dict[str, list[tuple[str | None, bool]]] = {}
    verified: dict[tuple[int, str], bool] = {}
    texts: dict[str, set[str]] = defaultdict(set)  # by the run's answer, the independent ones
    for sample in problem.samples:
        if sample.verdicts is None or headline not in sample.verdicts:
            continue
        if most is not None and sample.index >= most:
            continue
        verdict, text = sample.verdicts[headline], visible(sample.parts[1])
        if (answers := read.get(text)) is None:
            answers = []
            for place, rule in enumerate(opinions.rules):
                answer = rule.read(text)
                if answer is not None and (place, answer) not in verified:
                    right = any(rule.is_right(answer, gold) for gold in golds)
                    verified[place, answer] = right
                answers.append((answer, answer is not None and verified[place, answer]))
            read[text] = answers
        named = [("", (verdict.answer, verdict.correct))]
        named += [(rule.name, a) for rule, a in zip(opinions.rules, answers, strict=True)]
        for name in view.filters[1:]:
            if (other := sample.verdicts.get(name)) is not None:
                named.append((_key(name), (other.answer, other.correct)))
        for name, pair in named:
            counts = opinions.counts[name].setdefault(problem.id, {})
            counts[pair] = counts.get(pair, 0) + 1
            opinions.differing[name] += pair[1] != verdict.correct
        _judge(sample, text, verdict, answers, golds, problem.question, kind, opinions)
        own = expression_of(text) if kind == "mathematics" else None
        if verdict.answer is not None and own is not None:
            texts[verdict.answer].add(own)
    _compare_classes(problem.id, opinions, kind, texts)


def _judge(
    sample: Sample,
    text: str,
    verdict: Verdict,
    answers: Sequence[tuple[str | None, bool]],
    golds: tuple[str, ...],
    question: str,
    kind: str,
    opinions: _Opinions,
) -> None:
    """Compare the verdict on a sample with what the other rules agree on."""
    opinions.total += 1
    if verdict.answer is None:
        opinions.unread.append(sample)
    rules = zip(opinions.rules, answers, strict=True)
    others = next((a for rule, (a, _) in rules if rule.marks and a is not None), None)
    if others is None:
        others = next((a for a, _ in answers if a is not None), None)
    case = _Case(sample, golds[0], verdict.answer, others)
    if kind == "text":  # the whole text or its first line, without case and punctuation
        if not verdict.correct and any(right for _, right in answers):
            opinions.rejected.append(case)
        return
    is_equal = [_is_same_value(answer, golds, kind) for answer, _ in answers]
    pairs = zip(opinions.rules, answers, is_equal, strict=True)
    marked = [(a, same) for rule, (a, _), same in pairs if rule.marks and same is not None]
    # The run may use one of the rules; the others have a second opinion.
    apart = [s for answer, s in marked if s or not _is_same_answer(answer, verdict.answer)]
    known = [same for same in is_equal if same is not None]
    if not verdict.correct and known.count(True) >= 2 and all(apart) and (apart or not marked):
        opinions.rejected.append(case)
    if verdict.correct and marked and known.count(False) >= 2 and not any(known):
        opinions.accepted.append(case)
    if verdict.answer is not None and kind in ("number", "choice"):
        if not marked and not (kind == "number" and is_bare(text)):
            opinions.fallback.append(case)
        if kind == "choice" and is_in_words(text, verdict.answer):
            choice = choices_of(question).get(verdict.answer)
            if not choice or choice.casefold() not in text.casefold():
                opinions.in_words.append(case)


def _is_same_answer(first: str | None, second: str | None) -> bool:
    if first is None or second is None:
        return False
    return first == second or (value_of(first) or first) == (value_of(second) or second)


def _is_same_value(answer: str | None, golds: tuple[str, ...], kind: str) -> bool | None:
    """Return whether an answer has the value of a reference; None if it has no value."""
    if answer is None:
        return None
    if kind == "choice":
        return any(answer == gold.strip("() .").upper() for gold in golds)
    if kind == "number":
        value = value_of(answer.rstrip(".,"))
        return None if value is None else any(value == value_of(gold) for gold in golds)
    results = [compare(answer, gold)[0] for gold in golds]
    return True if True in results else None if None in results else False


def _compare_classes(
    problem_id: str, opinions: _Opinions, kind: str, texts: Mapping[str, set[str]]
) -> None:
    """Add pairs of answers that the run's votes count as one or as two, unlike their values."""
    counts = Counter[str]()
    for (answer, _), times in opinions.counts[""].get(problem_id, {}).items():
        if answer is not None:
            counts[answer] += times
    answers = [answer for answer, _ in counts.most_common(_MOST_ANSWERS)]
    for place, first in enumerate(answers):
        for second in answers[:place]:
            if kind == "number":
                value = value_of(first)
                same: bool | None = value is not None and value == value_of(second)
            else:
                same = kind == "mathematics" and compare(first, second)[0]
            if same:
                opinions.split.append((problem_id, f"{second} and {first}"))
    for answer in answers if kind == "mathematics" else ():
        mine = sorted(texts[answer])[:_MOST_ANSWERS]
        different = [other for other in mine[1:] if False in compare(mine[0], other)]
        if different:
            opinions.merged.append((problem_id, f"{mine[0]} and {different[0]}"))


def _findings(opinions: _Opinions) -> Iterator[Finding]:
    for name, cases in (
        ("right-answer-rejected", opinions.rejected),
        ("wrong-answer-accepted", opinions.accepted),
        ("letter-is-a-word", opinions.in_words),
        ("decided-by-fallback", opinions.fallback),
    ):
        example = cases[0].text if cases else None
        yield from find(name, [case.sample for case in cases], opinions.total, example=example)
    num_problems = len(opinions.counts[""])
    for name, pairs in (("votes-split", opinions.split), ("votes-merged", opinions.merged)):
        yield from find(name, [*dict(pairs[::-1]).items()], num_problems, unit="problems")
    yield from find("no-answer-read", opinions.unread, opinions.total)


def _effect(view: RunView, opinions: _Opinions, name: str, source: str) -> RuleEffect | None:
    """Return the metrics of the run under one rule; None if the rule never finds an answer."""
    by_problem = opinions.counts[name]
    if all(answer is None for counts in by_problem.values() for answer, _ in counts):
        return None
    ids = list(by_problem)
    clusters = clusters_of(view.problems, ids)
    values, differences = {}, {}
    least = min(sum(counts.values()) for counts in by_problem.values())
    for metric, k in [("accuracy", 1), *((f"{m}@{least}", least) for m in ("maj", "pass"))]:
        if metric != "accuracy" and least < 2:
            continue
        mine = [_value(by_problem[i], metric, k) for i in ids]
        base = [_value(opinions.counts[""][i], metric, k) for i in ids]
        mean = estimate(mine, clusters)
        moved = [a - b for a, b in zip(mine, base, strict=True)]
        low, high = difference_interval(moved, clusters) if any(moved) else (0.0, 0.0)
        values[metric] = mean.value, mean.low, mean.high
        differences[metric] = sum(moved) / len(moved), low, high
    return RuleEffect(
        rule=name,
        source=source,
        values=values,
        differences=differences,
        differing=opinions.differing[name],
    )


def _value(counts: Counts, metric: str, k: int) -> float:
    """Return the value of a metric for one problem."""
    total = sum(counts.values())
    right = sum(times for (_, is_right), times in counts.items() if is_right)
    if metric == "accuracy":
        return right / total
    if metric.startswith("pass"):
        return pass_at_k(total, right, k)
    tally = tally_of((Verdict(answer, is_right), n) for (answer, is_right), n in counts.items())
    return tally.maj_at_k(k)
