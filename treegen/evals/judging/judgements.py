"""Reading of stored judgements: verdicts, their values under the rubric, and results of pairs."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from treegen.common.files import describe_read_error
from treegen.errors import InputError, RunError, arg
from treegen.evals.judging.judgement_files import (
    TOO_LONG,
    get_slot,
    read_judgings,
    read_records,
    read_verdict,
)
from treegen.evals.judging.preference import (
    PositionBias,
    Strength,
    bradley_terry,
    estimate_position_bias,
)
from treegen.evals.judging.repeats import majority
from treegen.evals.judging.settings import JudgeRun
from treegen.evals.statistics.tables import Cell, Table
from treegen.evals.thinking import get_answer_text

Key = tuple[int, int]
"""The number of the run and of the sample of an answer."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """One verdict of a judge on an answer or a pair of answers."""

    problem_id: str
    shown: tuple[Key, ...]
    """The (run, sample) of the answer, or of both answers in the order of the prompt."""
    wording: int
    criterion: int
    repeat: int
    verdict: str | None
    """A choice of the rubric; with likelihoods, the most likely. None if the text has no readable
    verdict."""
    value: float | None
    """The value of the verdict, between the rubric's least and most; with likelihoods, the expected
    value. None if the verdict is unreadable."""
    chances: tuple[float, ...] = ()
    """The probabilities of the choices, normalized to 1; empty without likelihoods."""
    mass: float | None = None
    """The total probability of all choices before normalizing; None without likelihoods."""
    text: str = ""
    """The reply of the judge after its reasoning; empty with likelihoods."""
    too_long: bool = False
    """Whether the prompt was too long for the judge, so that the judge did not run."""
    truncated: bool = False
    """Whether the text reached the maximum number of tokens."""


@dataclass(frozen=True)
class JudgementSet:
    """A judge run with its judgements."""

    judging: JudgeRun
    judgements: tuple[Judgement, ...]

    @cached_property
    def values(self) -> Mapping[tuple[str, Key, int], float]:
        """The value of each answer under each wording, from 0 (lowest) to 1 (highest).

        Keys are (problem, answer, wording). Criteria are averaged by their weights. Answers without
        a readable judgement are left out.
        """
        return get_cells(self)

    @property
    def unreadable(self) -> int:
        """The number of judgements without a readable verdict."""
        return sum(judgement.verdict is None for judgement in self.judgements)

    def counts(self) -> dict[str, int]:
        """Return how often each verdict was given; the key `unreadable` counts the others."""
        counts = dict.fromkeys((*self.judging.settings.rubric.choices, "unreadable"), 0)
        for judgement in self.judgements:
            counts["unreadable" if judgement.verdict is None else judgement.verdict] += 1
        return counts


def read_judged(path: Path) -> list[JudgementSet]:
    """Return the judge runs of the run in a directory; this loads no model.

    Raises:
        RunError: a file is corrupt.
    """
    return [
        JudgementSet(judging, tuple(_judgements(path, judging))) for judging in read_judgings(path)
    ]


def _judgements(path: Path, judging: JudgeRun) -> Iterator[Judgement]:
    rubric = judging.settings.rubric
    choices, values = list(rubric.choices), list(rubric.choices.values())
    for record in read_records(path, judging.name):
        answer_keys, wording, criterion, repeat = get_slot(record)
        fields: dict[str, Any] = {}
        if "choice_logprobs" in record:
            logprobs = record["choice_logprobs"]
            if len(logprobs) != len(choices):
                raise RunError(
                    f"{judging.name}: a line must have log-probabilities of {len(choices)} "
                    f"choices, got {len(logprobs)}; remove the line"
                )
            chances = [math.exp(logprob - max(logprobs)) for logprob in logprobs]
            total = math.fsum(chances)
            chances = [chance / total for chance in chances]
            best = max(range(len(choices)), key=chances.__getitem__)
            fields = {
                "verdict": choices[best],
                "value": math.fsum(c * v for c, v in zip(chances, values, strict=True)),
                "chances": tuple(chances),
                "mass": min(1.0, math.fsum(map(math.exp, logprobs))),
            }
        else:
            verdict = read_verdict(record, rubric)
            value = None if verdict is None else rubric.choices[verdict]
            fields = {"verdict": verdict, "value": value, "text": get_answer_text(record)}
            fields["too_long"] = bool(record.get(TOO_LONG))
            fields["truncated"] = record.get("finish_reason") == "length"
        yield Judgement(record["problem_id"], answer_keys, wording, criterion, repeat, **fields)


def get_cells(
    judged: JudgementSet, criterion: int | None = None
) -> dict[tuple[str, Key, int], float]:
    """Return the value of each answer under each wording; see `JudgementSet.values`.

    The value of a pair is that of the answer of the run with the lower number: in either order, 1
    means that this answer is better. A pair of samples of the runs A and B has the key (1000 A + B,
    sample of A) in place of an answer's. Repeats count as in `_iterate_cases`.

    Args:
        judged: The judge run.
        criterion: The number of the only criterion to use; None for all.
    """
    weighted_values: dict[tuple[str, Key, int], list[tuple[float, float]]] = defaultdict(list)
    for problem_id, answer_keys, wording, value, weight in _iterate_cases(judged, criterion):
        if len(answer_keys) == 2 and answer_keys[0] > answer_keys[1]:
            value, answer_keys = 1 - value, answer_keys[::-1]
        key = (
            answer_keys[0]
            if len(answer_keys) == 1
            else (answer_keys[0][0] * 1000 + answer_keys[1][0], answer_keys[0][1])
        )
        weighted_values[problem_id, key, wording].append((value, weight))
    return {key: _weighted_mean(pairs) for key, pairs in weighted_values.items()}


def _iterate_cases(
    judged: JudgementSet, criterion: int | None = None
) -> Iterator[tuple[str, tuple[Key, ...], int, float, float]]:
    """Yield the value of each prompt with a readable verdict.

    Repeats count by their mean, or by their majority if they were drawn until the majority was
    settled.

    Args:
        judged: The judge run.
        criterion: The number of the only criterion to use; None for all.

    Yields:
        The problem, the shown answers, the wording, the value from 0 to 1, and the weight of the
        criterion.
    """
    settings = judged.judging.settings
    rubric, span = settings.rubric, settings.rubric.max_value - settings.rubric.min_value
    judgements: dict[tuple[str, tuple[Key, ...], int, int], list[Judgement]] = defaultdict(list)
    for judgement in sorted(judged.judgements, key=lambda judgement: judgement.repeat):
        slot = judgement.problem_id, judgement.shown, judgement.wording, judgement.criterion
        judgements[slot].append(judgement)
    for (problem_id, answer_keys, wording, of_slot), repeats in judgements.items():
        if criterion not in (None, of_slot):
            continue
        value = _value(repeats, decided=settings.decided, choices=rubric.choices)
        if value is None:
            continue
        weight = rubric.criteria[of_slot][1] if rubric.criteria else 1.0
        yield problem_id, answer_keys, wording, (value - rubric.min_value) / span, weight


def _weighted_mean(values: Sequence[tuple[float, float]]) -> float:
    """Return the weighted mean of (value, weight) pairs."""
    return math.fsum(v * w for v, w in values) / math.fsum(w for _, w in values)


def _value(
    repeats: Sequence[Judgement], *, decided: bool, choices: Mapping[str, float]
) -> float | None:
    if decided:
        verdict = majority(judgement.verdict for judgement in repeats)
        return None if verdict is None else choices[verdict]
    values = [judgement.value for judgement in repeats if judgement.value is not None]
    return math.fsum(values) / len(values) if values else None


def group_juries(judged: Sequence[JudgementSet]) -> list[list[JudgementSet]]:
    """Return judge runs grouped into juries: judge runs that differ only in their judge."""
    juries: dict[str, list[JudgementSet]] = {}
    for judgement_set in judged:
        key = repr((judgement_set.judging.settings.identity(), judgement_set.judging.runs))
        juries.setdefault(key, []).append(judgement_set)
    return list(juries.values())


def labels_of(
    path: Path, rubric_choices: Mapping[str, float], rubric: str
) -> dict[tuple[str, int], float]:
    """Read labels by people from a JSONL file.

    Each line has problem_id, sample_index, and label: a choice of the rubric, or a number between
    its least and most.

    Args:
        path: The file.
        rubric_choices: The choices of the rubric and their values.
        rubric: The name of the rubric.

    Returns:
        Labels by (problem, sample), scaled to values from 0 to 1.

    Raises:
        InputError: a line cannot be used.
    """
    from treegen.runs.files import parse_sample_line, read_sample_lines

    least, most = min(rubric_choices.values()), max(rubric_choices.values())
    labels: dict[tuple[str, int], float] = {}
    try:
        lines = read_sample_lines(path)
    except OSError as error:
        why = describe_read_error(path, error)
        raise InputError(f"the labels file cannot be read: {why}") from None
    except ValueError as error:
        raise InputError(
            f"the labels file {path} cannot be read: {error}; use a JSON Lines file in UTF-8"
        ) from None
    for number, line in lines:
        try:
            key, row = parse_sample_line(line)
            label = row["label"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path}, line {number}: expected a JSON object with problem_id, sample_index "
                f"and label ({error})"
            ) from None
        value = rubric_choices.get(str(label), label)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(
                f"{path}, line {number}: the label must be one of "
                f"{', '.join(map(str, rubric_choices))}, the choices of the rubric {rubric}, got "
                f"{label!r:.40}; correct the label, or pass the {arg('rubric=')} that has it"
            )
        if not least <= value <= most:
            raise InputError(
                f"{path}, line {number}: the label must be from {least:g} to {most:g}, the values "
                f"of the rubric {rubric}, got {label!r:.40}; correct the label, or pass the "
                f"{arg('rubric=')} that has it"
            )
        if key in labels:
            raise InputError(
                f"{path}, line {number}: this sample already has a label; remove one of the two "
                "lines"
            )
        labels[key] = (value - least) / (most - least)
    if not labels:
        raise InputError(f"{path} has no labels; write one label in each line")
    return labels


@dataclass(frozen=True)
class Pairs:
    """Results of runs in pairwise comparison."""

    runs: tuple[str, ...]
    """The paths of the runs."""
    strengths: tuple[Strength, ...]
    """The strength of each run, in the order of `runs`."""
    position: PositionBias
    """The effect of the order of the answers."""

    @property
    def table(self) -> Table:
        """The strengths as a table, strongest run first."""
        rows = sorted(zip(self.runs, self.strengths, strict=True), key=lambda row: -row[1].value)
        return Table(
            "Bradley-Terry strength (natural logarithm of odds)",
            ("Run", "Strength", "Low", "High", "Pairs won"),
            tuple((Path(name).name or name, s.value, *_ends(s), s.wins) for name, s in rows),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the results as plain dicts and lists."""
        return {
            "strengths": [
                {"run": run, **asdict(s)} for run, s in zip(self.runs, self.strengths, strict=True)
            ],
            "position": asdict(self.position),
        }


def pairs_of(
    judged: Sequence[JudgementSet],
    weights: Sequence[float] | None = None,
    groups: Mapping[str, str] | None = None,
) -> Pairs:
    """Return the results of runs in pairwise comparison by a jury.

    The result of a pair is the mean of both orders, each averaged over wordings, criteria and
    judges, with the weights of criteria and judges. Repeats count as in `get_cells`. A pair that
    was judged in only one order is left out.

    Args:
        judged: Judge runs that differ only in their judge.
        weights: The weight of each judge; None for equal weights.
        groups: The cluster of each problem, by id; empty for a problem without a cluster. None
            treats problems as independent.

    Raises:
        InputError: no pair has readable verdicts in both orders.
    """
    wins: dict[tuple[str, tuple[Any, ...]], dict[bool, list[tuple[float, float]]]]
    wins = defaultdict(dict)
    runs = tuple(str(judge_run["path"]) for judge_run in judged[0].judging.runs)
    for judge_run, judge_weight in zip(judged, weights or [1.0] * len(judged), strict=True):
        for problem, shown, _, value, weight in _iterate_cases(judge_run):
            swapped = shown[0] > shown[1]
            pair = shown[::-1] if swapped else shown
            weighted = 1 - value if swapped else value, weight * judge_weight
            wins[problem, pair].setdefault(swapped, []).append(weighted)
    orders: dict[str, list[tuple[float, float]]] = defaultdict(list)
    clusters: dict[str, tuple[str, ...]] = {}
    pairs = []
    for (problem, pair), values in wins.items():
        if len(values) < 2:
            continue
        first, second = (_weighted_mean(values[swapped]) for swapped in (False, True))
        orders[problem].append((first, second))
        group = (groups or {}).get(problem)
        clusters[problem] = (group,) if group else ("", problem)
        pairs.append((problem, pair[0][0], pair[1][0], (first + second) / 2))
    if not pairs:
        raise InputError(
            "no pair has readable verdicts in both orders; judge more samples, or pass another "
            f"{arg('judge=')}"
        )
    strengths = bradley_terry(pairs, len(runs), clusters)
    return Pairs(runs, tuple(strengths), estimate_position_bias(orders, clusters))


def _ends(strength: Strength) -> tuple[Cell, Cell]:
    """Return the ends of an interval; "unbounded" for an end at infinity."""
    return (
        "unbounded" if strength.low is None else strength.low,
        "unbounded" if strength.high is None else strength.high,
    )


def order_table(position: PositionBias, *, by_chance: bool) -> Table:
    """Return the effect of the order of the answers as a table.

    Args:
        position: The effect.
        by_chance: Whether verdicts are probabilities.
    """
    first = "the answer shown first wins"
    if by_chance:
        first = "mean probability that the answer shown first wins"
    return Table(
        f"Order of the answers, in {position.pairs:,} pairs",
        ("", "Share", "Low", "High"),
        (
            (first, position.first, position.low, position.high),
            ("the winner changes with the order", position.flipped, None, None),
        ),
    )
