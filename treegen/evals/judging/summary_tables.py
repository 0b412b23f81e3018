"""Tables of judgements, with sentences below them on what limits their numbers."""

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from treegen.evals.judging.components import Cells
from treegen.evals.judging.interval import MIN_LABELLED_PROBLEMS, CorrectedMean, Mean
from treegen.evals.judging.judgement_files import FILE, FOLDER
from treegen.evals.judging.judgements import JudgementSet
from treegen.evals.judging.rubric import BUILT_IN, VERDICT_PREFIX, Rubric, load_rubric
from treegen.evals.judging.settings import JudgeRun, JudgeSettings
from treegen.evals.statistics.estimators import Estimate
from treegen.evals.statistics.tables import AnnotatedTable, Table

AgreementRow = tuple[str, float | None, float | None, int]
"""Raters, Cohen's kappa, Krippendorff's alpha, and number of answers."""

# The columns of means, and the field of each.
_MEAN_COLUMNS: Final = {
    "Mean": "value",
    "Low": "low",
    "High": "high",
    "Stderr": "stderr",
    "Stderr over problems alone": "naive",
    "Low, these judges": "low_fixed",
    "High, these judges": "high_fixed",
}
_MIN_MASS: Final = 0.5  # smallest total probability of the choices of a reliable judge
_MIN_SHOWN_DEVIATION: Final = 0.0005  # smaller standard deviations are shown as 0.000
_MAX_EXCERPT_CHARS: Final = 60  # characters of a text that a notice shows


def make_mean_table(
    judged: Sequence[JudgementSet],
    means: Sequence[tuple[str, Mean | None]],
    notices: Sequence[str],
) -> AnnotatedTable:
    """Return the table of means.

    Args:
        judged: Judge runs that differ only in their judge.
        means: The name and the mean of each row; the mean is None without readable verdicts.
        notices: Sentences below the table.
    """
    rubric = judged[0].judging.settings.rubric
    values = f"{rubric.min_value:g} to {rubric.max_value:g}"
    if rubric.pairs:
        about = "1 if the first run's answer wins, 0 if it loses"
    else:
        about = values if values == "0 to 1" else f"{values}, scaled to 0 to 1"
    rows = tuple(
        (name, *(getattr(mean, field, None) for field in _MEAN_COLUMNS.values()))
        for name, mean in means
    )
    title = f"Judged by {rubric.name} ({about})"
    return AnnotatedTable(title, ("Judge", *_MEAN_COLUMNS), rows, _to_sentences(notices))


def make_verdict_table(
    judged: Sequence[JudgementSet], notices: Sequence[str] = ()
) -> AnnotatedTable:
    """Return the table of how often each judge gave each verdict.

    Args:
        judged: Judge runs that differ only in their judge.
        notices: Sentences below the table.
    """
    counts = [judge_run.counts() for judge_run in judged]
    by_chance = judged[0].judging.settings.verdicts == "likelihood"
    lines = list(_to_sentences(notices))
    if len(criteria := judged[0].judging.settings.rubric.criteria) > 1:
        lines.append(f"Each answer has a verdict for each of the {len(criteria)} criteria.")
    return AnnotatedTable(
        f"Verdicts: {judged[0].judging.settings.rubric.name}",
        ("Judge", *counts[0], *(["chance of all choices"] if by_chance else [])),
        tuple(
            (
                judge_run.judging.judge,
                *count.values(),
                *([_mean_mass(judge_run)] if by_chance else []),
            )
            for judge_run, count in zip(judged, counts, strict=True)
        ),
        tuple(lines),
    )


def make_criterion_table(rubric: Rubric, means: Sequence[Mean | None]) -> Table:
    """Return the table of the mean of each criterion over all judges.

    Args:
        rubric: The rubric.
        means: The mean of each criterion; None without readable verdicts.
    """
    rows = tuple(
        (text, f"{weight:g}", *((mean.value, mean.low, mean.high) if mean else (None,) * 3))
        for (text, weight), mean in zip(rubric.criteria, means, strict=True)
    )
    head = ("Criterion", "Weight", "Mean", "Low", "High")
    return Table(f"Means by criterion: {rubric.name}", head, rows)


def make_variance_table(
    variances: Mapping[str, float | None], values: Cells, rubric: str
) -> AnnotatedTable:
    """Return the table of the sources of variance.

    Args:
        variances: The variance of each factor; None if the design does not determine it.
        values: The values, with problem, answer, judge and wording.
        rubric: The name of the rubric.
    """
    total = math.fsum(value or 0.0 for value in variances.values())
    names = ("problem", "answer", "judge", "wording")
    rows = tuple(
        (
            name,
            values.num(name) if name in names else None if name != "rest" else len(values.y),
            None if value is None else math.sqrt(value),
            None if value is None or not total else value / total,
        )
        for name, value in variances.items()
    )
    lines = []
    if 0 < total < _MIN_SHOWN_DEVIATION**2:
        lines.append(
            f"All values are almost equal (standard deviation {math.sqrt(total):.1g}), so the "
            "shares of the variance and Krippendorff's alpha mean little."
        )
    head = ("Source", "Levels", "Standard deviation", "Share of the variance")
    return AnnotatedTable(f"Sources of variance: {rubric}", head, rows, tuple(lines))


def make_agreement_table(
    rubric: str, agreement: Sequence[tuple[AgreementRow, int]]
) -> AnnotatedTable:
    """Return the table of agreement, with the reasons for undefined values.

    Args:
        rubric: The name of the rubric.
        agreement: The rows, and the number of raters of each.
    """
    lines = []
    without_kappa = [num_raters for (_, kappa, _, _), num_raters in agreement if kappa is None]
    if any(num_raters > 2 for num_raters in without_kappa):
        lines.append("Cohen's kappa is n/a for more than two raters, because it compares two.")
    if 2 in without_kappa:
        lines.append("Cohen's kappa is n/a if both raters give all answers the same value.")
    if any(alpha is None for (_, _, alpha, _), _ in agreement):
        lines.append("Krippendorff's alpha is n/a if all values are equal.")
    head = ("Of", "Cohen's kappa", "Krippendorff's alpha", "Answers")
    rows = tuple(row for row, _ in agreement)
    return AnnotatedTable(f"Agreement: {rubric}", head, rows, tuple(lines))


def make_corrected_table(corrected: CorrectedMean, num_unjudged: int) -> AnnotatedTable:
    """Return the table of the mean corrected by labels.

    Args:
        corrected: The corrected mean.
        num_unjudged: The number of labels of answers without a judgement.
    """
    lines = []
    if corrected.weight == 0:
        if corrected.labelled < MIN_LABELLED_PROBLEMS:
            reason = f"With fewer than {MIN_LABELLED_PROBLEMS} labelled problems"
        elif corrected.labelled == corrected.problems:
            reason = "Because all problems have labels"
        else:
            reason = "Because the judges' values do not increase with the labels"
        lines.append(f"{reason}, treegen uses the labels alone (weight 0).")
    if num_unjudged:
        lines.append(
            f"Labels that treegen ignores, because nobody judged the answer: {num_unjudged:,}."
        )
    return AnnotatedTable(
        f"Corrected by the labels of {corrected.labelled:,} of {corrected.problems:,} problems",
        ("Estimate", "Mean", "Low", "High"),
        (
            ("judges, corrected", corrected.value, corrected.low, corrected.high),
            ("labels alone", corrected.labels, corrected.labels_low, corrected.labels_high),
            ("judges, uncorrected", corrected.judge, None, None),
            ("judges are higher by", corrected.bias, None, None),
            ("weight of the judges", corrected.weight, None, None),
        ),
        tuple(lines),
    )


def make_votes_table(votes: Estimate, num_judges: int) -> Table:
    """Return the table of effective votes.

    Args:
        votes: The effective votes of the jury.
        num_judges: The number of its judges.
    """
    return Table(
        f"Independent judges that err as little as the mean of these {num_judges}",
        ("Effective votes", "Low", "High", "Problems"),
        ((votes.value, votes.low, votes.high, votes.num_problems),),
    )


def list_notices(judged: Sequence[JudgementSet], mean: Mean | None) -> list[str]:
    """Return sentences about verdicts that need attention, the gravest first.

    Args:
        judged: Judge runs that differ only in their judge.
        mean: The mean; None without readable verdicts.
    """
    unreliable, left_out = [], []
    for run in judged:
        judge = run.judging.judge
        if (mass := _mean_mass(run)) is not None and mass < _MIN_MASS:
            unreliable.append(
                f"the judge {judge} assigns the choices a total probability of {mass:.3f} on "
                "average, so its verdicts are not reliable; use an instruction-tuned model, or "
                "let the judge write its verdicts (--verdicts samples)"
            )
        if run.unreadable:
            share = run.unreadable / len(run.judgements)
            left_out.append(
                f"{run.unreadable:,} of {len(run.judgements):,} verdicts of {judge} are unreadable "
                f"({share:.1%}) and are left out of all means{_describe_texts(run)}"
            )
        if too_long := len({(j.problem_id, j.shown) for j in run.judgements if j.too_long}):
            left_out.append(
                f"{too_long:,} answers are too long for the context of {judge}; treegen did not "
                "judge them and counts them as unreadable"
            )
    notices = [*unreliable, *left_out]
    if mean is not None and mean.fixed_factors:
        notices.append(
            f"there is only one {' and one '.join(mean.fixed_factors)}, so the interval does not "
            "apply to others"
        )
    return notices


def _to_sentences(notices: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{notice[0].upper()}{notice[1:]}." for notice in notices)


def _describe_texts(run: JudgementSet) -> str:
    """Return how an unreadable text ends, and where all texts are; "" without such a text."""
    texts = [j.text for j in run.judgements if j.verdict is None and not j.too_long]
    if not texts:
        return ""
    settings, expected, cut = run.judging.settings, "", ""
    if not settings.rubric.defines_verdict_format:
        choices = ", ".join(settings.rubric.choices)
        expected = (
            f"; treegen expects the last line '{VERDICT_PREFIX} X', where X is one of {choices}"
        )
    num_cut = sum(j.truncated for j in run.judgements if j.verdict is None)
    if num_cut:
        cut = f"; {num_cut:,} of these texts are cut off after --max-tokens {settings.max_tokens}"
    end = " ".join(texts[0].split())
    end = f"...{end[-_MAX_EXCERPT_CHARS:]}" if len(end) > _MAX_EXCERPT_CHARS else end
    shown = f"ends with {end!r}" if end else "is empty"
    return (
        f"{expected}{cut}; the first of these texts {shown}; all texts are in "
        f"{FOLDER}/{run.judging.name}/{FILE} in the run directory"
    )


def _mean_mass(judged: JudgementSet) -> float | None:
    """Return the mean total probability of the choices; None without likelihoods."""
    masses = [one.mass for one in judged.judgements if one.mass is not None]
    return float(np.mean(masses)) if masses else None


def continue_commands(path: Path, judgings: Iterable[JudgeRun]) -> list[str]:
    """Return the commands that add the missing judgements, one for each jury.

    Args:
        path: Directory of the run.
        judgings: The judge runs with missing judgements.
    """
    judges: dict[str, list[str]] = {}
    for judging in judgings:
        judges.setdefault(shlex.join(_list_flags(judging.settings)), []).append(judging.judge)
    return [
        f"treegen judge {shlex.quote(str(path))} "
        + " ".join(f"--judge {shlex.quote(name)}" for name in names)
        + f" {flags}"
        for flags, names in judges.items()
    ]


def _list_flags(settings: JudgeSettings) -> list[str]:
    """Return the flags of `treegen judge` that give these settings."""
    rubric = settings.rubric
    is_built_in = rubric.name in BUILT_IN and rubric == load_rubric(rubric.name)
    flags = ["--rubric", rubric.name if is_built_in else f"FILE_OF_{rubric.name}"]
    if settings.wordings < len(rubric.wordings):
        flags += ["--wordings", str(settings.wordings)]
    if settings.chat is not None:
        flags.append("--apply-chat-template" if settings.chat else "--no-chat-template")
    if settings.verdicts == "likelihood":
        return flags
    flags += ["--verdicts", settings.verdicts]
    if settings.repeats > 1:
        flags += ["--repeats", str(settings.repeats)]
    if settings.decided:
        flags += ["--stop-when", "decided"]
    fields = JudgeSettings.__dataclass_fields__
    for name in ("temperature", "max_tokens", "seed"):
        if (value := getattr(settings, name)) != fields[name].default:
            flags += [f"--{name.replace('_', '-')}", str(value)]
    return flags
