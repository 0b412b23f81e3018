"""Printed results of a run: lines, and tables that can be pasted elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from treegen.common.formatting import format_table, safe_line, safe_text
from treegen.evals.progress.usage import (
    attention_line,
    format_decoding,
    format_sharing,
    speculation_line,
    workers_line,
)
from treegen.evals.statistics.metrics import Report
from treegen.evals.statistics.tables import Table
from treegen.evals.thinking import thinking_line
from treegen.report.plots.heat_map import draw_text
from treegen.report.run_settings import KeySettings
from treegen.report.tables import (
    format_interval,
    headline_filters,
    interval,
    number,
    table_listing,
    task_label,
)

UP, DOWN = "\u2191", "\u2193"
_MAX_PROBLEMS: Final = 5
_COSTS: Final = {
    "Decoded": "tokens_decoded",
    "Prefilled": "tokens_prefilled",
    "Without sharing": "tokens_reprompted",
    "Calls": "calls",
    "Nodes": "nodes",
    "Actions": "actions",
}


def run_text(
    results: Mapping[str, Any],
    report: Report | None,
    *,
    unit: str = "samples",
    ascii: bool = False,
    all_filters: bool = False,
    more: str = "",
) -> str:
    """Return the metrics of a run with their intervals, the votes, and what sharing saved.

    Args:
        results: The content of results.json.
        report: The metrics; None if nothing is scored.
        unit: The unit of results["done"].
        ascii: Draw grids without block characters.
        all_filters: Show every filter; otherwise the headline filters of each task.
        more: How the user sees the other filters.
    """
    lines: list[str] = []
    if report is not None:
        headline = None if all_filters else headline_filters(report)
        lines.append(_format_metrics(report, headline))
        vote_filters = None if headline is None else next(iter(headline.values()), ())
        if votes := _format_votes(report, vote_filters):
            lines.append("\n" + votes)
        lines += [f"\n{table_listing(_select_filters(table, headline))}" for table in report.tables]
        lines += [f"\n{safe_text(draw_text(grid, ascii=ascii))}" for grid in report.grids]
        if hidden := _list_hidden_filters(report, headline):
            how = f"; {more}" if more else ""
            lines.append(f"\nother filters: {safe_text(', '.join(hidden))}{how}")
        notes = results.get("task", {}).get("notes", ())
        if remarks := [*_list_remarks(report), *notes]:
            lines += ["", *map(safe_line, remarks)]
        lines.append("")
    usage = results["usage"]
    if thinking := results.get("thinking"):
        lines.append(thinking_line(thinking))
    lines.append(format_sharing(usage, unit=unit))
    if line := attention_line(usage):
        lines.append(safe_text(line))
    if line := speculation_line(usage):
        lines.append(line)
    threads = results.get("versions", {}).get("threads")
    if usage["seconds"] or threads:  # an imported run has neither
        lines.append(_format_time(usage) + (f"; CPU threads: {threads}" if threads else ""))
    if usage.get("eager_because"):
        lines.append(safe_text(f"decode steps ran without CUDA graphs: {usage['eager_because']}"))
    if usage.get("uncompiled_because"):
        lines.append(safe_text(f"layers ran uncompiled: {usage['uncompiled_because']}"))
    done = f"{results['done']:,} of {results['planned']:,} {unit}"
    lines.append(f"{format_decoding(usage)}; {done}")
    if line := workers_line(results.get("parts", ())):
        lines.append(safe_text(f"workers: {line}"))
    return "\n".join(lines)


def cost_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with one line for each run.

    Costs are means over problems. They are in tokens, except for calls, nodes and actions.
    "Without sharing" is what Prefilled would be if each call computed its whole context again.
    Seconds are those of the whole run.

    Args:
        results: The content of each results.json.
    """
    costs = {title: name for title, name in _COSTS.items() if name in results[0]["cost"]}
    head = ["Method", "Solved", "Share", "95% interval", *costs, "Failed", "Seconds"]
    rows = [
        [
            result["method"],
            f"{result['num_solved']}/{result['done']}",
            *_format_share(result["solved"]),
            *(_format_mean(result["cost"][name]["mean"]) for name in costs.values()),
            str(result.get("num_failed", 0)),
            f"{result['seconds']:,.1f}",
        ]
        for result in results
    ]
    task, budget = results[0]["task"], results[0]["settings"]["budget"]
    model = KeySettings.of_results(results[0]).model
    limits = ", ".join(f"{value:,} {name}" for name, value in budget.items() if value is not None)
    done = results[0]["done"]
    several = any(result.get("pass@k") for result in results)
    what, unit = ("searches of problems", "search") if several else ("problems", "problem")
    text = (
        f"{task['name']} with {model}: {done:,} {what} ({task['source']}); "
        f"at most {limits} per {unit}"
        f"\n\n{format_table(head, rows, right=range(1, len(head)))}\n\n"
        f"Costs are means per {unit}; Decoded, Prefilled and Without sharing count tokens. Seconds "
        "is the time of the whole run.\nWithout sharing is what Prefilled would be with one prompt "
        "per call."
    )
    return f"{text}\n\n{_pass_table(results)}" if several else text


def _pass_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of pass@k over the searches of each problem, a line for each method."""
    ks = sorted({int(k) for result in results for k in result.get("pass@k", {})})
    rows = [
        [result["method"], *(_format_pass(result.get("pass@k", {}).get(str(k))) for k in ks)]
        for result in results
    ]
    head = ["Method", *(f"pass@{k}" for k in ks)]
    return format_table(head, rows, right=range(1, len(head)))


def _format_share(solved: Mapping[str, float] | None) -> tuple[str, str]:
    """Return a share and its interval."""
    if solved is None:
        return "n/a", ""
    return number(solved["value"]), interval(solved["low"], solved["high"])


def _format_pass(solved: Mapping[str, float] | None) -> str:
    value, bounds = _format_share(solved)
    return f"{value} ({bounds})" if bounds else value


def _format_mean(value: float | None) -> str:
    return "n/a" if value is None else f"{value:,.1f}"


def _format_time(usage: Mapping[str, Any]) -> str:
    if "prefill_seconds" not in usage:  # searches record only the total time
        return f"time: {usage['seconds']:,.2f} s"
    prefill, decode = usage["prefill_seconds"], usage["decode_seconds"]
    return f"time: prefill {prefill:,.2f} s, decode {decode:,.2f} s of {usage['seconds']:,.2f} s"


def _format_metrics(report: Report, headline: Mapping[str, Sequence[str]] | None) -> str:
    """Return the table of metrics.

    Args:
        report: The report.
        headline: The filters to show, by task; None for all.
    """
    rows = [
        [
            task_label(row.task, report),
            row.version,
            row.filter,
            "n/a" if row.num_fewshot is None else str(row.num_fewshot),
            row.metric,
            UP if row.higher_is_better else DOWN,
            number(row.value),
            format_interval(row),
        ]
        for row in report.metrics
        if headline is None or row.filter in headline[row.task]
    ]
    head = ["Task", "Version", "Filter", "n-shot", "Metric", "", "Value", "95% interval"]
    return format_table(head, rows, right=(1, 3, 6, 7))


def _list_hidden_filters(report: Report, headline: Mapping[str, Sequence[str]] | None) -> list[str]:
    if headline is None:
        return []
    return [*dict.fromkeys(r.filter for r in report.metrics if r.filter not in headline[r.task])]


def _select_filters(table: Table, headline: Mapping[str, Sequence[str]] | None) -> Table:
    """Return a table without the rows of hidden filters.

    Args:
        table: The table.
        headline: The filters to show, by task; None for all.
    """
    if headline is None or "Filter" not in table.columns:
        return table
    index = table.columns.index("Filter")
    names = {name for filters in headline.values() for name in filters}
    return replace(table, rows=tuple(row for row in table.rows if row[index] in names))


def _format_votes(report: Report, headline: Sequence[str] | None) -> str:
    """Return the table of maj@k; "" without votes.

    Args:
        report: The report.
        headline: The filters to show; None for all.
    """
    rows = [
        [row.filter, str(row.k), number(row.value), format_interval(row), number(row.tie_rate)]
        for row in report.majority
        if headline is None or row.filter in headline
    ]
    head = ["Filter", "k", "maj@k", "95% interval", "Tie rate"]
    return format_table(head, rows, right=(1, 2, 3, 4)) if rows else ""


def _list_remarks(report: Report) -> list[str]:
    """Return why values are missing, and which problems have too few samples."""
    metrics_of: dict[str, dict[str, None]] = {}
    reasons = [(row.metric, row.reason) for row in report.metrics]
    for metric, reason in [*reasons, *((f"maj@{row.k}", row.reason) for row in report.majority)]:
        if reason:
            metrics_of.setdefault(reason, {})[metric] = None
    remarks = [f"n/a: {', '.join(metrics)}: {reason}" for reason, metrics in metrics_of.items()]
    if report.incomplete:
        some = ", ".join(
            f"{p.problem_id} ({p.num_samples} of {p.planned})"
            for p in report.incomplete[:_MAX_PROBLEMS]
        )
        more = ", ..." if len(report.incomplete) > _MAX_PROBLEMS else ""
        remarks.append(
            f"incomplete: {len(report.incomplete):,} problems have fewer samples than planned: "
            f"{some}{more}"
        )
    return remarks
