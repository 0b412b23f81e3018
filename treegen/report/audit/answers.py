"""Reads the answers of a run by public rules, and compares the results with the run's verdicts."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from treegen.errors import TreegenError
from treegen.evals.problem import list_references
from treegen.evals.registry import get_task
from treegen.evals.statistics.estimators import difference_interval, estimate, pass_at_k
from treegen.evals.statistics.metrics import clusters_of
from treegen.evals.statistics.votes import tally_of
from treegen.evals.verdict import Verdict
from treegen.report.audit.equivalence import (
    MATH_RULES,
    compare,
    expression_of,
    run_limited,
)
from treegen.report.audit.findings import Finding, RuleEffect, find
from treegen.report.audit.readers import (
    CHOICE_RULES,
    NUMBER_RULES,
    TEXT_RULES,
    ScoringRule,
    choices_of,
    is_bare,
    is_in_words,
    is_same_number,
    is_unclear,
    kind_of,
    marks_answer,
    may_state,
    squad_form,
    value_of,
    visible,
    with_plain_minus,
)
from treegen.report.view import ProblemView, RunView, Sample

# Tasks whose answers are not one number, letter or text that is compared with the reference.
_OTHER_TASKS: Final = (
    "needle",
    "ruler-",
    "countdown",
    "game24",
    "ifeval",
    "simpleqa",
    "chartqa",
    "docvqa",
)
_RULES: Final[Mapping[str, tuple[ScoringRule, ...]]] = {
    "number": NUMBER_RULES,
    "choice": CHOICE_RULES,
    "text": TEXT_RULES,
    "mathematics": MATH_RULES,
}
_MAX_ANSWERS: Final = 8  # of a problem, whose classes are compared

Counts = dict[tuple[str | None, bool], int]


def references_of(answer: str) -> tuple[str, ...]:
    """Return the right answers of a problem: tasks store several as a JSON list of texts.

    Of a solution that ends in "#### N", as in logs on GSM8K, the answer is N.
    """
    if (references := list_references(answer)) != [answer]:
        return tuple(references)
    answer = answer.rpartition("#### ")[2]
    return (answer,) if answer else ()


def answer_kind(view: RunView) -> str:
    """Return how the answers of a run can be read again; "none" if no public rule applies."""
    if view.job is not None and view.job.task.executes_code:
        return "code"
    if not view.filters or view.searched or view.task.startswith(_OTHER_TASKS):
        return "none"
    if view.job is not None and view.job.choices:
        return "none"
    kind = kind_of([gold for p in view.problems if p.samples for gold in references_of(p.answer)])
    is_math = view.job is not None and view.job.task.compares_formulas
    return "mathematics" if is_math else kind


@dataclass(frozen=True, slots=True)
class _Case:
    """A sample with a finding, and the answers that the run and the rules read."""

    sample: Sample
    gold: str
    """The reference."""
    run: str | None
    """The answer that the run read."""
    others: str | None
    """The answer that the other rules read."""

    @property
    def text(self) -> str:
        return (
            f"the run reads {self.run!r}, other rules read {self.others!r}, the reference is "
            f"{self.gold!r}: {self.sample.text[-600:]}"
        )


@dataclass(frozen=True, slots=True)
class _Reading:
    """A sample with its verdict in the run, and with what each rule reads."""

    sample: Sample
    text: str
    """The part of the sample that rules read."""
    verdict: Verdict
    answers: Sequence[tuple[str | None, bool]]
    """By rule, the answer and whether it is right."""


@dataclass(slots=True)
class _AnswerStatistics:
    """Samples, answers and counts that the findings on answers need."""

    kind: str
    """The kind of the answers, from `answer_kind`."""
    rules: Sequence[ScoringRule]
    counts: dict[str, dict[str, Counts]] = field(default_factory=lambda: defaultdict(dict))
    """By rule and problem, how many samples gave each answer; rule "" is the run itself."""
    differing: Counter[str] = field(default_factory=Counter)
    """By rule, how many samples have another verdict than in the run."""
    rejected: list[_Case] = field(default_factory=list)
    """Wrong samples that several rules read as right."""
    accepted: list[_Case] = field(default_factory=list)
    """Right samples that the rules read as wrong."""
    fallback: list[_Case] = field(default_factory=list)
    """Samples whose text marks no answer."""
    in_words: list[_Case] = field(default_factory=list)
    """Samples whose letter was read from a word."""
    merged: list[tuple[str, str]] = field(default_factory=list)
    """Problem ids, and different answers that votes count as one."""
    split: list[tuple[str, str]] = field(default_factory=list)
    """Problem ids, and equal answers that votes count separately."""
    unread: list[Sample] = field(default_factory=list)
    """Samples in which the run found no answer."""
    total: int = 0
    """The number of scored samples."""


def audit_answers(view: RunView, kind: str) -> tuple[list[Finding], list[RuleEffect]]:
    """Return the findings on the answers of a run, and its metrics under each rule.

    Args:
        view: The run.
        kind: The kind of its answers, from `answer_kind`.
    """
    if kind not in _RULES:
        return [], []
    rules = [*_RULES[kind], *([] if kind != "mathematics" else _math_verify(view))]
    statistics = _AnswerStatistics(kind, rules)
    for problem in view.problems:
        golds = references_of(problem.answer)
        if golds and problem.samples:
            _read_problem(view, problem, golds, statistics)
    if not statistics.total:
        return [], []
    names = [(rule.name, rule.source) for rule in rules]
    names += [(name, "") for name in map(_filter_key, view.filters[1:])]
    effects = [
        _compute_effect(view, statistics, *name) for name in names if name[0] in statistics.counts
    ]
    return list(_list_findings(statistics)), [effect for effect in effects if effect is not None]


def _filter_key(filter: str) -> str:
    """Return the key of a filter of the run; a rule may have the same name as a filter."""
    return f"the run's filter {filter}"


def _math_verify(view: RunView) -> list[ScoringRule]:
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
        verdict = run_limited(lambda: kind.verdict(f"$\\boxed{{{answer}}}$", [gold]))
        return bool(verdict and verdict.correct)

    return [ScoringRule("math-verify", "Hugging Face", expression_of, is_right, True)]


def _read_problem(
    view: RunView, problem: ProblemView, golds: tuple[str, ...], statistics: _AnswerStatistics
) -> None:
    """Add the samples of a problem to the statistics.

    Args:
        view: The run.
        problem: The problem.
        golds: Its references.
        statistics: The statistics to update.
    """
    headline, max_samples = view.filters[0], view.fixed
    expressions_of: dict[str, set[str]] = defaultdict(set)  # by the run's answer
    choices = choices_of(problem.question) if statistics.kind == "choice" else {}
    is_value = statistics.kind in ("number", "mathematics")
    plain_golds = tuple(map(with_plain_minus, golds)) if is_value else golds
    read, read_plain = (_make_reader(statistics.rules, answers) for answers in (golds, plain_golds))
    for sample in problem.samples:
        if sample.verdicts is None or headline not in sample.verdicts:
            continue
        if max_samples is not None and sample.index >= max_samples:
            continue
        verdict, text = sample.verdicts[headline], visible(sample.parts[1])
        # Rules "like" those of other tools read the text as these tools do.
        _count_verdicts(view, problem.id, _Reading(sample, text, verdict, read(text)), statistics)
        if is_value:
            text = with_plain_minus(text)
        reading = _Reading(sample, text, verdict, read_plain(text))
        _compare_with_rules(reading, plain_golds, choices, statistics)
        expression = expression_of(text) if statistics.kind == "mathematics" else None
        if verdict.answer is not None and expression is not None:
            expressions_of[verdict.answer].add(expression)
    _compare_classes(problem.id, statistics, expressions_of)


def _make_reader(
    rules: Sequence[ScoringRule], golds: tuple[str, ...]
) -> Callable[[str], Sequence[tuple[str | None, bool]]]:
    """Return a function that reads a text by all rules; equal texts and answers only once."""
    is_right = cache(
        lambda index, answer: any(rules[index].is_right(answer, gold) for gold in golds)
    )

    @cache
    def read(text: str) -> Sequence[tuple[str | None, bool]]:
        answers = [rule.read(text) for rule in rules]
        return [
            (answer, answer is not None and is_right(index, answer))
            for index, answer in enumerate(answers)
        ]

    return read


def _count_verdicts(
    view: RunView, problem_id: str, reading: _Reading, statistics: _AnswerStatistics
) -> None:
    """Add the verdicts of the run, of each rule, and of the run's other filters."""
    verdict = reading.verdict
    named = [("", (verdict.answer, verdict.correct))]
    named += [
        (rule.name, pair) for rule, pair in zip(statistics.rules, reading.answers, strict=True)
    ]
    for name in view.filters[1:]:
        if (other := reading.sample.verdict(name)) is not None:
            named.append((_filter_key(name), (other.answer, other.correct)))
    for name, pair in named:
        counts = statistics.counts[name].setdefault(problem_id, {})
        counts[pair] = counts.get(pair, 0) + 1
        statistics.differing[name] += pair[1] != verdict.correct


def _compare_with_rules(
    reading: _Reading,
    golds: tuple[str, ...],
    choices: Mapping[str, str],
    statistics: _AnswerStatistics,
) -> None:
    """Compare the verdict on a sample with the answers that rules read.

    Args:
        reading: The sample, its verdict and the answers.
        golds: The references.
        choices: The text of each choice by letter; empty for other kinds of answers.
        statistics: The statistics to update.
    """
    statistics.total += 1
    kind, verdict, text = statistics.kind, reading.verdict, reading.text
    if verdict.answer is None:
        statistics.unread.append(reading.sample)
    pairs = [*zip(statistics.rules, reading.answers, strict=True)]
    other = next((a for rule, (a, _) in pairs if rule.marks and a is not None), None)
    if other is None:
        other = next((a for a, _ in reading.answers if a is not None), None)
    case = _Case(reading.sample, golds[0], verdict.answer, other)
    if kind == "text":
        if not verdict.correct and sum(right for _, right in reading.answers) >= 2:
            statistics.rejected.append(case)
        return
    if kind == "mathematics" or not is_unclear(text):
        _compare_marked(case, reading, golds, statistics)
    if verdict.answer is None or kind == "mathematics":
        return
    if kind == "choice" and _may_name_choice(text, choices, verdict.answer):
        return
    is_marked = any(rule.marks and answer is not None for rule, (answer, _) in pairs)
    if not is_marked and not marks_answer(text, verdict.answer):
        statistics.fallback.append(case)
    if kind == "choice" and is_in_words(text, verdict.answer):
        statistics.in_words.append(case)


def _may_name_choice(text: str, choices: Mapping[str, str], letter: str) -> bool:
    """Return whether the text may state a choice by its words instead of its letter."""
    if letter not in choices:
        return not (choices and letter in tuple("ABCDEFGHIJ"))  # a tool may read other signs
    words, form = squad_form(choices[letter]).split(), squad_form(text)
    return any(word in form for word in words if not word.isascii() or len(word) > 3) or (
        len(words) == 1 and words[0] in form.split()
    )


def _compare_marked(
    case: _Case, reading: _Reading, golds: tuple[str, ...], statistics: _AnswerStatistics
) -> None:
    """Add a case whose verdict contradicts the marked answers of its text."""
    kind, verdict = statistics.kind, reading.verdict
    pairs = [*zip(statistics.rules, reading.answers, strict=True)]
    decided = [_is_same_value(answer, golds, kind) for answer, _ in reading.answers]
    marked = [
        (answer, same)
        for (rule, (answer, _)), same in zip(pairs, decided, strict=True)
        if rule.marks and answer is not None
    ]
    if not verdict.correct and decided.count(True) >= 2:
        # The run may use one of the rules, so only the other rules confirm that it is wrong.
        confirmations = [
            same
            for answer, same in marked
            if same is not None and (same or not _is_same_answer(answer, verdict.answer))
        ]
        # Without a mark, rules that read the last number agree by construction.
        is_stated = bool(_is_same_value(verdict.answer, golds, kind)) or is_bare(reading.text)
        if all(confirmations) and (confirmations or (not marked and is_stated)):
            statistics.rejected.append(case)
    if verdict.correct and marked and decided.count(False) >= 2 and True not in decided:
        # A value that is unclear, or a reference that follows the mark, leaves a doubt.
        is_clear = all(same is False for _, same in marked)
        is_letter = kind == "choice"
        if is_clear and (
            kind == "mathematics"
            or not any(may_state(reading.text, gold, is_letter=is_letter) for gold in golds)
        ):
            statistics.accepted.append(case)


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
        results = [is_same_number(answer.rstrip(".,"), gold) for gold in golds]
    else:
        results = [compare(answer, gold)[0] for gold in golds]
    return True if True in results else None if None in results else False


def _compare_classes(
    problem_id: str, statistics: _AnswerStatistics, expressions_of: Mapping[str, set[str]]
) -> None:
    """Add equal answers that the run's votes count separately, and different ones counted as one.

    Args:
        problem_id: The problem.
        statistics: The statistics to update.
        expressions_of: By answer of the run, the expressions that its samples have.
    """
    kind, counts = statistics.kind, Counter[str]()
    for (answer, _), times in statistics.counts[""].get(problem_id, {}).items():
        if answer is not None:
            counts[answer] += times
    answers = [answer for answer, _ in counts.most_common(_MAX_ANSWERS)]
    for index, first in enumerate(answers):
        for second in answers[:index]:
            if kind == "number":
                value = value_of(first)
                same: bool | None = value is not None and value == value_of(second)
            else:
                same = kind == "mathematics" and compare(first, second)[0]
            if same:
                statistics.split.append((problem_id, f"{second} and {first}"))
    for answer in answers if kind == "mathematics" else ():
        members = sorted(expressions_of[answer])[:_MAX_ANSWERS]
        different = [other for other in members[1:] if False in compare(members[0], other)]
        if different:
            statistics.merged.append((problem_id, f"{members[0]} and {different[0]}"))


def _list_findings(statistics: _AnswerStatistics) -> Iterator[Finding]:
    for name, cases in (
        ("right-answer-rejected", statistics.rejected),
        ("wrong-answer-accepted", statistics.accepted),
        ("letter-is-a-word", statistics.in_words),
        ("decided-by-fallback", statistics.fallback),
    ):
        example = cases[0].text if cases else None
        yield from find(name, [case.sample for case in cases], statistics.total, example=example)
    num_problems = len(statistics.counts[""])
    for name, pairs in (("votes-split", statistics.split), ("votes-merged", statistics.merged)):
        yield from find(name, [*dict(pairs[::-1]).items()], num_problems, unit="problems")
    yield from find("no-answer-read", statistics.unread, statistics.total)


def _compute_effect(
    view: RunView, statistics: _AnswerStatistics, name: str, source: str
) -> RuleEffect | None:
    """Return the metrics of the run under one rule; None if the rule never finds an answer."""
    by_problem = statistics.counts[name]
    if all(answer is None for counts in by_problem.values() for answer, _ in counts):
        return None
    ids = list(by_problem)
    clusters = clusters_of(view.problems, ids)
    values, differences = {}, {}
    min_samples = min(sum(counts.values()) for counts in by_problem.values())
    for metric, k in [
        ("accuracy", 1),
        *((f"{m}@{min_samples}", min_samples) for m in ("maj", "pass")),
    ]:
        if metric != "accuracy" and min_samples < 2:
            continue
        metric_values = [_compute_metric(by_problem[i], metric, k) for i in ids]
        base = [_compute_metric(statistics.counts[""][i], metric, k) for i in ids]
        mean = estimate(metric_values, clusters)
        moved = [a - b for a, b in zip(metric_values, base, strict=True)]
        low, high = difference_interval(moved, clusters) if any(moved) else (0.0, 0.0)
        values[metric] = mean.value, mean.low, mean.high
        differences[metric] = sum(moved) / len(moved), low, high
    return RuleEffect(
        rule=name,
        source=source,
        values=values,
        differences=differences,
        differing=statistics.differing[name],
    )


def _compute_metric(counts: Counts, metric: str, k: int) -> float:
    """Return the value of a metric for one problem."""
    total = sum(counts.values())
    right = sum(times for (_, is_right), times in counts.items() if is_right)
    if metric == "accuracy":
        return right / total
    if metric.startswith("pass"):
        return pass_at_k(total, right, k)
    tally = tally_of((Verdict(answer, is_right), n) for (answer, is_right), n in counts.items())
    return tally.maj_at_k(k)
