"""Tables and numbers of a report: headlines, metrics, sharing, settings."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final, TypeVar

from treegen.common.formatting import flatten, format_bytes, format_table, safe_line, safe_text
from treegen.evals.progress.usage import (
    count_unfinished_tokens,
    format_kernels,
    format_sharing,
)
from treegen.evals.statistics.metrics import MajorityRow, MetricRow, Report
from treegen.evals.statistics.tables import AnnotatedTable, Cell, Table
from treegen.report.run_settings import describe_view
from treegen.report.view import RunView

_Item = TypeVar("_Item")
# Titles of columns in results.json, and the titles that reports show.
_TITLES: Final = {"Less maj@k": "Minus maj@k"}
_MEANINGS: Final = {
    "pass@": "the probability that at least one of k samples is correct",
    "pass^": "the probability that all k samples are correct",
    "G-Pass@": "the probability that at least this share of k samples is correct",
    "mG-Pass@": "2 / k times the sum of G-Pass@k over the shares above one half",
    "maj@": "the probability that a majority vote over k samples is correct (ties: that several "
    "answers have the most votes)",
}
_INTERVAL: Final = (
    "95% interval: where the value for all problems of this kind probably is, with the problem as "
    "the unit"
)


@dataclass(frozen=True, slots=True)
class Card:
    """A headline number."""

    label: str
    value: str
    more: str = ""
    """The interval of the value, or a note, such as the total."""


@dataclass(frozen=True, slots=True)
class PrintableTable:
    """A table ready to print."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[int] = ()
    """The columns that are aligned to the right."""
    title: str = ""
    """The heading above it."""
    lines: Sequence[str] = ()
    """Sentences below it."""

    @staticmethod
    def of(
        items: Iterable[_Item],
        columns: Mapping[str, str | Callable[[_Item], str]],
        *,
        words: Sequence[str] = (),
        lines: Iterable[str] = (),
    ) -> "PrintableTable":
        """Return a table with a row for each item.

        Args:
            items: The items.
            columns: How an item is shown, by title of the column, such as "{0.rows:,}" or a
                function.
            words: The columns that are not numbers.
            lines: Sentences below the table; equal ones are shown once.
        """
        formats = [
            column.format if isinstance(column, str) else column for column in columns.values()
        ]
        rows = [[show(item) for show in formats] for item in items]
        numbers = [column for column, title in enumerate(columns) if title not in words]
        return PrintableTable(tuple(columns), rows, numbers, lines=tuple(dict.fromkeys(lines)))

    def __str__(self) -> str:
        """Return the title, the table in Markdown, and the lines."""
        table = format_table(self.head, self.rows, self.numbers) if self.rows else ""
        lines = "\n".join(map(safe_line, self.lines))
        return "\n\n".join(filter(None, (safe_text(self.title), table, lines)))

    def _repr_html_(self) -> str:
        def row(cells: Sequence[str], tag: str) -> str:
            sides = ("right" if i in self.numbers else "left" for i in range(len(cells)))
            tags = (
                f'<{tag} style="text-align: {side}">{escape(cell)}</{tag}>'
                for cell, side in zip(cells, sides, strict=True)
            )
            return f"<tr>{''.join(tags)}</tr>"

        body = "".join(row(cells, "td") for cells in self.rows)
        table = f"<table><thead>{row(self.head, 'th')}</thead><tbody>{body}</tbody></table>"
        title = f"<p><b>{'<br>'.join(map(escape, self.title.splitlines()))}</b></p>"
        lines = "".join(f"<p>{escape(line)}</p>" for line in self.lines)
        return f"{title if self.title else ''}{table if self.rows else ''}{lines}"


def headline_of(view: RunView) -> MetricRow | None:
    """Return the first metric of a run."""
    return view.report.metrics[0] if view.report and view.report.metrics else None


def headline_cards_of(report: Report) -> list[Card]:
    """Return the first metric of a report, and maj@k and pass@k of most samples."""
    if not report.metrics:
        return []
    first = report.metrics[0]
    votes = [row for row in report.majority if row.filter == first.filter and row.k > 1]
    cards = [
        _make_card(metric_label(first.metric), first),
        *(Card(f"maj@{v.k}", number(v.value), interval(v.low, v.high)) for v in votes[-1:]),
    ]
    passes = [
        row
        for row in report.metrics
        if (row.task, row.filter) == (first.task, first.filter) and row.metric.startswith("pass@")
    ]
    return [*cards, *(_make_card(row.metric, row) for row in passes[-1:])]


def headline_text(report: Report | None) -> str:
    """Return the headline numbers with their intervals in a line.

    Such as "accuracy 0.688 (0.470 to 0.852), maj@8 0.875 (0.615 to 0.991)"; "nothing scored"
    without a report.
    """
    cards = [] if report is None else headline_cards_of(report)
    if not cards:
        return "nothing scored"
    return ", ".join(
        f"{card.label} {card.value}{f' ({card.more})' if card.more else ''}" for card in cards
    )


def cards(view: RunView) -> list[Card]:
    """Return the headline numbers of a run."""
    headline_cards: list[Card] = []
    report, first = view.report, headline_of(view)
    if report is not None and first is not None:
        headline_cards += headline_cards_of(report)
        rates = [row for row in report.metrics if row.metric in ("invalid", "truncated")]
        row_of = {row.metric: row for row in reversed(rates)}
        headline_cards += [
            _make_card(name, row_of[name]) for name in ("invalid", "truncated") if name in row_of
        ]
    usage = view.usage
    if thoughts := [s for s in view.samples if s.thinking is not None]:
        tokens = sum(s.thinking.num_tokens for s in thoughts if s.thinking is not None)
        answers = sum(s.num_tokens for s in thoughts) - tokens
        note = f"tokens each; answers {answers / len(thoughts):,.0f}"
        headline_cards.append(Card("thinking", f"{tokens / len(thoughts):,.0f}", note))
    if usage.get("decoded_tokens"):
        speed = f"{usage['tokens_per_second']:,.0f}"
        note = f"{usage['decoded_tokens']:,} tokens"
        if unfinished := count_unfinished_tokens(usage):
            note += f", {unfinished:,} of them in unfinished samples"
        headline_cards.append(Card("tokens/s", speed, note))
    if usage.get("accepted_tokens"):
        share = usage["accepted_tokens"] / usage["decoded_tokens"]
        headline_cards.append(
            Card("draft tokens", f"{share:.0%}", f"of {usage['decoded_tokens']:,} tokens")
        )
    if usage.get("prompt_tokens_computed") and usage["samples_accounted"] < usage["samples"]:
        headline_cards.append(
            Card("prompt sharing", "n/a", "not known, because a part of the run was killed")
        )
    elif usage.get("prompt_tokens_computed") and usage["samples"]:
        computed, unshared = usage["prompt_tokens_computed"], usage["prompt_tokens_unshared"]
        headline_cards.append(
            Card("prompt sharing", f"{unshared / computed:,.1f}\u00d7", f"{computed:,} computed")
        )
    return headline_cards


def metrics(view: RunView, *, first: bool) -> PrintableTable:
    """Return a table of metrics; its title says what the run is.

    Args:
        view: The run.
        first: Whether to take the metrics of headline filters and metrics without a filter; False
            takes the other metrics.
    """
    report = view.report
    headline = headline_filters(report)
    vote_filters = next(iter(headline.values()), ())
    rows: list[list[str]] = []
    for row in report.metrics if report else ():
        if (row.filter in headline.get(row.task, ())) == first:
            better = "" if row.higher_is_better else " (lower is better)"
            rows.append([row.task, row.filter, f"{row.metric}{better}"])
            rows[-1] += _format_metric(row)
    for vote in report.majority if report else ():
        if (vote.filter in vote_filters) == first:
            ties = "" if vote.tie_rate is None else f" (ties {vote.tie_rate:.3f})"
            rows.append([view.task, vote.filter, f"maj@{vote.k}{ties}"])
            rows[-1] += _format_metric(vote)
    head = ["Task", "Filter", "Metric", "Value", "95% interval"]
    if not first:
        return PrintableTable(head, rows, (3, 4))
    lines = _define_metrics(str(row[2]) for row in rows)
    return PrintableTable(head, rows, (3, 4), title=describe_view(view), lines=lines)


def _define_metrics(metrics: Iterable[str]) -> list[str]:
    """Return a sentence that defines the interval, and the metrics that have a definition."""
    names = list(metrics)
    meanings = [
        f"{start}k: {meaning}"
        for start, meaning in _MEANINGS.items()
        if any(name.startswith(start) for name in names)
    ]
    return ["; ".join(("Values are means over problems", *meanings, _INTERVAL)) + "."]


def headline_filters(report: Report | None) -> dict[str, tuple[str, ...]]:
    """Return the filters that a short table shows, by task: the task's first filter, and "none"."""
    filters: dict[str, tuple[str, ...]] = {}
    for row in report.metrics if report else ():
        if row.task not in filters or filters[row.task] == ("none",):
            filters[row.task] = tuple(dict.fromkeys(("none", row.filter)))
    return filters


def task_label(task: str, report: Report | None) -> str:
    """Return the name of a task with the label of its data, such as "gsm8k (bundled problems)"."""
    return f"{task} ({report.label})" if report is not None and report.label else task


def _format_metric(row: MetricRow | MajorityRow) -> list[str]:
    value = number(row.value) if row.reason is None else f"n/a: {row.reason}"
    return [value, format_interval(row)]


def other_tables(view: RunView) -> list[PrintableTable]:
    """Return the tables that only this task has, and those of judgements."""
    tables = view.report.tables if view.report else ()
    return [table_listing(table) for table in (*tables, *view.judged)]


def table_listing(table: Table) -> PrintableTable:
    """Return a table of values, ready to print; bounds become intervals, and replace errors."""
    lows = [
        index
        for index, (a, b) in enumerate(zip(table.columns, table.columns[1:], strict=False))
        if a.startswith("Low") and b == f"High{a[3:]}"
    ]
    dropped = {low + 1 for low in lows}
    if lows and "Stderr" in table.columns:
        dropped.add(table.columns.index("Stderr"))
    columns = [index for index in range(len(table.columns)) if index not in dropped]

    # Differences, and the intervals that follow them
    signed = {
        column + i
        for column, name in enumerate(table.columns)
        if name.startswith(("Less ", "Minus "))
        for i in (0, 1)
    }

    def cell(row: Sequence[Cell], index: int) -> str:
        value = row[index]
        if index in lows:
            return interval(value, row[index + 1], signed=index in signed)  # type: ignore[arg-type]
        return f"{value:+.3f}" if index in signed and value is not None else _format_cell(value)

    def title(index: int) -> str:
        name = table.columns[index]
        return f"95% interval{name[3:].rstrip()}" if index in lows else _TITLES.get(name, name)

    return PrintableTable(
        [title(index) for index in columns],
        [[cell(row, index) for index in columns] for row in table.rows],
        numbers=range(1, len(columns)),
        title=table.title,
        lines=table.lines if isinstance(table, AnnotatedTable) else (),
    )


def sharing(view: RunView) -> PrintableTable | None:
    """Return what sharing saved: sentences, and a table of the tree's levels.

    Returns None if the run did not record it.
    """
    usage, plan = view.usage, view.usage.get("plan")
    if not usage.get("prompt_tokens_computed"):
        return None
    sentence = format_sharing(usage, unit=view.unit)
    lines = [f"{sentence[0].upper()}{sentence[1:]}."]
    read, unshared = usage.get("key_tokens_read", 0), usage.get("key_tokens_unshared", 0)
    if read and plan:
        size = plan["token_bytes"]
        lines.append(
            f"Keys read in decode steps: {read:,} tokens instead of {unshared:,} "
            f"({unshared / read:,.1f} times fewer); {format_bytes((unshared - read) * size)} of "
            f"{format_bytes(unshared * size)} of keys and values not read."
        )
    if kernels := format_kernels(usage):
        lines.append(f"Kernels that read keys: {kernels}.")
    prefill, decode = usage.get("prefill_seconds", 0.0), usage.get("decode_seconds", 0.0)
    if usage.get("num_pages") and usage.get("page_size"):
        lines.append(
            f"Time: {usage['seconds']:,.1f} s, of which prefill {prefill:,.1f} s and decode "
            f"{decode:,.1f} s; at most {usage.get('peak_rows', 0):,} rows at once in "
            f"{usage.get('peak_pages', 0):,} of {usage['num_pages']:,} pages of "
            f"{usage['page_size']:,} tokens."
        )
    if usage.get("eager_because"):
        lines.append(f"Decode steps ran without CUDA graphs: {usage['eager_because']}.")
    if usage.get("uncompiled_because"):
        lines.append(f"Layers ran uncompiled: {usage['uncompiled_because']}.")
    kernel = f"in the {usage.get('impl', '')} kernel"
    columns: dict[str, str | Callable[[Mapping[str, Any]], str]] = {
        "Level": "{0[depth]}",
        "Segments": "{0[segments]:,}",
        "Stored tokens": "{0[tokens]:,}",
        "Rows below": "{0[rows]:,}",
        "Read once by": lambda level: f"{level['kept']:,} {kernel}" if level["kept"] else "none",
        "Read per row by": _describe_folded,
        "Why": list_reasons,
    }
    words = [*columns][4:]
    return PrintableTable.of(plan["levels"] if plan else (), columns, words=words, lines=lines)


def list_reasons(level: Mapping[str, Any]) -> str:
    """Return why segments of a level are read once or by each row, with their numbers."""
    return ", ".join(f"{reason} ({num:,})" for reason, num in level["reasons"].items())


def _describe_folded(level: Mapping[str, Any]) -> str:
    folded = level["segments"] - level["kept"]
    return f"{folded:,} with the rows' own" if folded else "none"


def settings(view: RunView) -> list[tuple[str, str]]:
    """Return the dotted name and value of each setting of a run, and of each version it records."""
    info = view.info
    flat = (*flatten(info.identity), *flatten(info.free), *flatten({"version": info.versions}))
    pairs = [(name, str(value)) for name, value in flat if value not in (None, [], (), {})]
    return [("directory", str(view.path)), ("fingerprint", info.fingerprint), *pairs]


def interval(low: float | None, high: float | None, *, signed: bool = False) -> str:
    """Return an interval as "0.123 to 0.456"; empty if there is none.

    Args:
        low: The lower end; None if there is no interval.
        high: The upper end; None if there is no interval.
        signed: Write + and - before the numbers.
    """
    if low is None or high is None:
        return ""
    return f"{low:+.3f} to {high:+.3f}" if signed else f"{low:.3f} to {high:.3f}"


def format_interval(row: MetricRow | MajorityRow) -> str:
    """Return the interval of a value; for a metric that has none, its standard error."""
    if row.low is None and row.stderr is not None:
        return f"stderr {row.stderr:.3f}"
    return interval(row.low, row.high)


def number(value: float | None) -> str:
    """Return a value with three decimal places."""
    return "n/a" if value is None else f"{value:.3f}"


def p_text(p_value: float | None) -> str:
    """Return a p-value with four decimal places."""
    if p_value is None:
        return "n/a"
    return f"{p_value:.4f}" if p_value >= 0.00005 else "<0.0001"


def metric_label(metric: str) -> str:
    """Return the name of a metric for people, such as "accuracy" for "exact_match"."""
    return "accuracy" if metric in ("exact_match", "acc") else metric.replace("_", " ")


def _make_card(label: str, row: MetricRow) -> Card:
    return Card(label, number(row.value), interval(row.low, row.high))


def _format_cell(cell: Any) -> str:
    if cell is None or isinstance(cell, float):
        return number(cell)
    return f"{cell:,}" if isinstance(cell, int) else str(cell)
