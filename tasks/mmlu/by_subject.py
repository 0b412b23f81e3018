"""MMLU's averages: over questions, over subjects, by category and by subject."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from treegen.evals.statistics.estimators import mean_of_means
from treegen.evals.statistics.metrics import MetricRow, Report, ReportOptions
from treegen.evals.statistics.tables import problem_values, table_by
from treegen.evals.verdict import SampleScore

CATEGORIES: Final = {
    "STEM": (
        "abstract_algebra",
        "astronomy",
        "college_biology",
        "college_chemistry",
        "college_computer_science",
        "college_mathematics",
        "college_physics",
        "computer_security",
        "conceptual_physics",
        "electrical_engineering",
        "elementary_mathematics",
        "high_school_biology",
        "high_school_chemistry",
        "high_school_computer_science",
        "high_school_mathematics",
        "high_school_physics",
        "high_school_statistics",
        "machine_learning",
    ),
    "humanities": (
        "formal_logic",
        "high_school_european_history",
        "high_school_us_history",
        "high_school_world_history",
        "international_law",
        "jurisprudence",
        "logical_fallacies",
        "moral_disputes",
        "moral_scenarios",
        "philosophy",
        "prehistory",
        "professional_law",
        "world_religions",
    ),
    "social_sciences": (
        "econometrics",
        "high_school_geography",
        "high_school_government_and_politics",
        "high_school_macroeconomics",
        "high_school_microeconomics",
        "high_school_psychology",
        "human_sexuality",
        "professional_psychology",
        "public_relations",
        "security_studies",
        "sociology",
        "us_foreign_policy",
    ),
    "other": (
        "anatomy",
        "business_ethics",
        "clinical_knowledge",
        "college_medicine",
        "global_facts",
        "human_aging",
        "management",
        "marketing",
        "medical_genetics",
        "miscellaneous",
        "nutrition",
        "professional_accounting",
        "professional_medicine",
        "virology",
    ),
}

CATEGORY_OF: Final = {
    subject: category for category, subjects in CATEGORIES.items() for subject in subjects
}


def subject_of(problem_id: str) -> str:
    """Return the subject in an id such as "anatomy-17"."""
    return problem_id.rpartition("-")[0]


def by_subject(overall: Report, scores: Sequence[SampleScore], options: ReportOptions) -> Report:
    """Return the report with means over subjects, and tables by category and subject.

    The mean over subjects follows each mean over questions. The tables have the mean of each
    category and of each subject, for the first filter.

    Args:
        overall: The report to extend.
        scores: Scores of the samples.
        options: Options of the report.
    """
    rows: list[MetricRow] = []
    for row in overall.metrics:
        rows.append(row)
        if row.metric in ("exact_match", "acc") and row.value is not None:
            rows.append(_macro(row, problem_values(scores, row.filter)))
    values = problem_values(scores, overall.metrics[0].filter)
    subjects = _groups(options.problem_ids, subject_of)
    categories = _groups(options.problem_ids, lambda name: CATEGORY_OF.get(subject_of(name), ""))
    categories.pop("", None)
    tables = [table_by("accuracy by subject", "Subject", list(subjects.items()), values)]
    if categories:
        table = table_by("accuracy by category", "Category", list(categories.items()), values)
        tables.insert(0, table)
    return replace(overall, metrics=tuple(rows), tables=tuple(tables))


def _groups(problem_ids: Iterable[str], group_of: Callable[[str], str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for problem_id in problem_ids:
        groups.setdefault(group_of(problem_id), []).append(problem_id)
    return dict(sorted(groups.items()))


def _macro(row: MetricRow, values: Mapping[str, float]) -> MetricRow:
    """Return the mean over subjects; its error bars are for other questions on these subjects."""
    groups = _groups(values, subject_of).values()
    mean = mean_of_means([[values[problem_id] for problem_id in ids] for ids in groups])
    return replace(
        row,
        metric=f"{row.metric}_macro",
        value=mean.value,
        stderr=mean.stderr,
        low=mean.low,
        high=mean.high,
    )
