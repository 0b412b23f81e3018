"""The findings of an audit, as values, as text and as tables of a report."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from shlex import quote
from typing import Any, Final

from treegen.common.formatting import safe_line, safe_text
from treegen.errors import InputError
from treegen.evals.statistics.tables import Cell, Table
from treegen.report.audit import KINDS, SEVERITIES, Severity
from treegen.report.tables import PrintableTable, table_listing
from treegen.report.view import Sample

_MAX_SHORT_CHARS: Final = 240
_MAX_EXAMPLE_CHARS: Final = 4000  # last characters of an example


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One kind of defect, with an example and what to do."""

    kind: str
    """The name of the kind, such as "right-answer-rejected"."""
    area: str
    """"answers", "prompts", "samples" or "data"."""
    severity: Severity
    count: int
    """The number of samples or problems with the defect."""
    total: int
    """The number of samples or problems that were checked."""
    unit: str
    """The unit of `count` and `total`: "samples", "searches", "problems" or "runs"."""
    message: str
    """What is wrong, as a sentence without a period."""
    advice: str
    """What to do, as a sentence without a period."""
    example: str = ""
    """The text of one case."""
    problem_id: str = ""
    """The problem of the example."""
    sample_index: int | None = None
    """The sample of the example."""

    @property
    def location(self) -> str:
        """Where the example is, such as "problem q7, sample 2"; empty without an example."""
        if not self.problem_id:
            return ""
        drawn = "search" if self.unit == "searches" else "sample"
        sample = "" if self.sample_index is None else f", {drawn} {self.sample_index}"
        return f"problem {self.problem_id}{sample}"

    @property
    def share(self) -> str:
        """The affected samples or problems, such as "3 of 120 samples"."""
        return f"{self.count:,} of {self.total:,} {self.unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleEffect:
    """The metrics of a run if another rule read and compared its answers."""

    rule: str
    """The name of the rule."""
    source: str
    """The tool that has the rule; empty for a filter of the run."""
    values: dict[str, tuple[float, float, float]]
    """By metric ("accuracy", "maj@8", "pass@8"), the value and its 95% interval."""
    differences: dict[str, tuple[float, float, float]]
    """The value minus this run's value, and its 95% interval over problems."""
    differing: int
    """The number of samples with another verdict than in the run."""

    @property
    def label(self) -> str:
        """The name of the rule and its source."""
        return f"{self.rule} ({self.source})" if self.source else self.rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """All findings on a run, the severest first."""

    run: str
    """The directory of the run."""
    task: str
    is_scored: bool
    """Whether the run has scores."""
    answers: str
    """How answers were read again: number, choice, mathematics, text, code, or none."""
    num_samples: int
    findings: tuple[Finding, ...]
    rules: tuple[RuleEffect, ...] = ()
    notices: tuple[str, ...] = ()
    """What was not checked and why."""
    failure: str | None = None
    """Why the run could not be audited; None if it was."""
    unit: str = "samples"
    """The unit of `num_samples`: "samples" or "searches"."""

    def count(self, severity: Severity) -> int:
        """Return the number of findings of a severity."""
        return sum(finding.severity == severity for finding in self.findings)

    def has(self, severity: str) -> bool:
        """Return whether some finding has this severity or a higher one.

        Raises:
            InputError: there is no such severity.
        """
        if severity not in SEVERITIES:
            raise InputError(f"severity must be one of {', '.join(SEVERITIES)}, got {severity!r}")
        bad = SEVERITIES[: SEVERITIES.index(severity) + 1]
        return any(finding.severity in bad for finding in self.findings)

    @property
    def summary(self) -> str:
        """The numbers of findings, such as "1 high, 0 medium, 2 low"."""
        return ", ".join(f"{self.count(severity)} {severity}" for severity in SEVERITIES)

    @property
    def warning(self) -> str | None:
        """One line about a failure or the findings of high severity on a score; None without."""
        if self.failure is not None:
            return f"the run is complete, but {self.failure}"
        high = [finding for finding in self.findings if finding.severity == "high"]
        if not high or not self.is_scored:
            return None
        kinds = ", ".join(f"{finding.kind} ({finding.share})" for finding in high)
        return f"the score may be misleading: {kinds}; treegen audit {quote(self.run)} shows why"

    def to_json(self) -> dict[str, Any]:
        """Return the audit as plain dicts and lists."""
        return {**asdict(self), "counts": {name: self.count(name) for name in SEVERITIES}}

    def tables(self) -> list[PrintableTable]:
        """Return the findings, and the metrics under each rule, as tables."""
        head = ["Severity", "Finding", "Affected", "What", "Example", "What to do"]
        rows = [
            [f.severity, f.kind, f.share, f.message, excerpt(f.example), f.advice]
            for f in self.findings
        ]
        title = f"Audit: {self.summary}" if self.failure is None else "Audit: failed"
        lines = [*([] if self.failure is None else [self.failure]), *self.agreement, *self.notices]
        tables = [PrintableTable(head, rows, title=title, lines=lines)]
        moved = [rule for rule in self.rules if rule.differing]
        for metric in dict.fromkeys(name for rule in moved for name in rule.values):
            tables.append(table_listing(self._effects(metric, moved)))
        return tables

    @property
    def agreement(self) -> list[str]:
        """A sentence that names the rules with the same verdicts as the run, if there are any."""
        same = [rule.label for rule in self.rules if not rule.differing]
        return (
            [f"These scoring rules give the run's verdict on every sample: {', '.join(same)}."]
            if same
            else []
        )

    def _effects(self, metric: str, rules: Sequence[RuleEffect]) -> Table:
        name = metric[:1].upper() + metric[1:]
        rows: list[tuple[Cell, ...]] = [
            (r.label, *r.values[metric], *r.differences[metric], r.differing)
            for r in rules
            if metric in r.values
        ]
        head = (
            "Rule",
            name,
            "Low",
            "High",
            "Minus this run",
            "Low ",
            "High ",
            "Differing verdicts",
        )
        return Table(f"{name} if another rule read the answers", head, tuple(rows))

    def lines(self) -> Iterator[str]:
        """Yield the audit as lines for a terminal, each safe to display."""
        for line in self._finding_lines():
            yield safe_line(line)
        for table in self.tables()[1:]:
            yield ""
            yield from safe_text(str(table)).split("\n")
        if notes := [*self.agreement, *self.notices]:
            yield ""
            yield from map(safe_line, notes)

    def _finding_lines(self) -> Iterator[str]:
        yield f"{self.task}: {self.num_samples:,} {self.unit}; findings: {self.summary}"
        for finding in self.findings:
            yield ""
            yield f"{finding.severity.upper()} {finding.kind}: {finding.share}"
            yield f"  {finding.message}"
            if finding.example:
                location = f"{finding.location}: " if finding.location else ""
                yield f"  example: {location}{excerpt(finding.example)}"
            yield f"  what to do: {finding.advice}"

    def __str__(self) -> str:
        return "\n".join(self.lines())


def excerpt(text: str) -> str:
    """Return the start and the end of a text, in one line and safe to display."""
    if len(text) > _MAX_SHORT_CHARS:
        text = f"{text[: _MAX_SHORT_CHARS // 3]} [...] {text[-2 * _MAX_SHORT_CHARS // 3 :]}"
    return " ".join(safe_text(text).split())


Case = Sample | tuple[str, str]
"""A sample, or the id of a problem and a text."""


def find(
    name: str,
    cases: Sequence[Case],
    total: int,
    *,
    unit: str = "samples",
    example: str | None = None,
    severity: Severity | None = None,
    **values: object,
) -> Iterator[Finding]:
    """Yield a finding if there are cases.

    Args:
        name: A name of `KINDS`.
        cases: The samples or problems with the defect; the first is the example.
        total: The number of samples or problems that were checked.
        unit: "samples", "searches", "problems" or "runs".
        example: The text to show, if it is not that of the first case.
        severity: The severity; by default it follows from the share of cases.
        values: The values of the fields in the message, by name.
    """
    if not cases:
        return
    kind, first, share = KINDS[name], cases[0], len(cases) / max(1, total)
    index = None
    if isinstance(first, Sample):
        problem_id, index, text = first.problem_id, first.index, first.text
    else:
        problem_id, text = first
    yield Finding(
        kind=name,
        area=kind.area,
        severity=severity
        or ("high" if share >= kind.high else "medium" if share >= kind.medium else "low"),
        count=len(cases),
        total=total,
        unit=unit,
        message=kind.message.format(**values) if values else kind.message,
        advice=kind.advice,
        example=(text if example is None else example)[-_MAX_EXAMPLE_CHARS:],
        problem_id=problem_id,
        sample_index=index,
    )


def sort_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings, the severest first; among equal ones, in their order."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))
