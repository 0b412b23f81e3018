"""Measurements as rows of text. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from treegen.common.formatting import format_bytes
from treegen.common.outputs import in_order
from treegen.report.tables import PrintableTable

if TYPE_CHECKING:
    from treegen.bench.attention import AttentionResult
    from treegen.bench.decode import WorkloadResult
    from treegen.bench.timing import Spread


_Columns = Mapping[str, Callable[["WorkloadResult"], str]]
_WORDS: Final = ("Job", "Mode", "read once", "kernels")


def result_line(result: WorkloadResult) -> str:
    """Return one result as one line, to print when it arrives."""
    text = result.skipped and f"not run: {result.skipped}"
    if not text and result.tokens_per_second is not None:
        text = f"{result.tokens_per_second.median:,.0f} tokens/s"
        if result.share is not None:
            text += f", {result.share:.0%} of the roofline"
    elif not text and result.job is not None:
        text = f"{result.job.median:,.0f} tokens/s with prefill"
    return f"{_describe_workload(result)}, {result.mode}: {text}"


def results_table(results: Sequence[WorkloadResult]) -> PrintableTable:
    """Return a table of the workloads' results in each mode, by workload; no column is empty."""
    order = list(dict.fromkeys(result.workload for result in results))
    ordered = sorted(results, key=lambda result: order.index(result.workload))
    remarks = [
        f"{_describe_workload(result)}, {result.mode}: {result.skipped or '; '.join(result.notes)}"
        for result in ordered
        if result.skipped or any(result.notes)
    ]
    columns = dict(_COLUMNS)
    if len({workload.name for workload in order}) == 1:
        del columns["Job"]
    filled = {title: text for title, text in columns.items() if any(map(text, ordered))}
    return PrintableTable.of(ordered, filled, words=_WORDS, lines=remarks)


def _describe_workload(result: WorkloadResult) -> str:
    workload = result.workload
    problems = f", {workload.problems:,} problems" if workload.problem_tokens else ""
    return f"{workload.name}, prefix {workload.prefix:,}{problems}, {result.rows:,} rows"


def _prefix(result: WorkloadResult) -> str:
    workload = result.workload
    several = f"{workload.prefixes:,} x " if workload.prefixes > 1 else ""
    return f"{several}{workload.prefix:,}"


def _problems(result: WorkloadResult) -> str:
    workload = result.workload
    if not workload.problem_tokens:
        return ""
    return f"{workload.problems:,} x {workload.problem_tokens:,}"


def _speed(result: WorkloadResult) -> str:
    not_run = "not run" if result.skipped else ""
    return _median(result.tokens_per_second, ",.0f") or not_run


def _range(spread: Spread | None) -> str:
    return f"{spread.low:,.0f}-{spread.high:,.0f}" if spread else ""


def _median(spread: Spread | None, spec: str) -> str:
    return format(spread.median, spec) if spread else ""


def format_number(value: float | None, spec: str) -> str:
    """Return a number as text, or nothing if it was not measured."""
    return "" if value is None else format(value, spec)


def _bytes_read(result: WorkloadResult, count: int) -> str:
    return format_bytes(count) if result.read_bytes or result.kv_bytes else ""


def _levels_read_once(result: WorkloadResult) -> str:
    return ", ".join(f"{count:,} x {keys // count:,}" for _, count, keys in result.levels)


def _kernels(result: WorkloadResult) -> str:
    """Return the kernels that read the levels, from the root to the rows' own keys."""
    names = ["/".join(result.kernels[level]) for level in in_order(result.kernels)]
    return " + ".join(names) if len(set(names)) > 1 else next(iter(names), result.impl)


_COLUMNS: Final[_Columns] = {
    "Job": lambda r: r.workload.name,
    "Prefix": _prefix,
    "Problems": _problems,
    "Rows": lambda r: f"{r.rows:,}",
    "Mode": lambda r: r.mode,
    "tokens/s": _speed,
    "low-high": lambda r: _range(r.tokens_per_second),
    "step ms": lambda r: _median(r.step_ms, ",.2f"),
    "roofline ms": lambda r: format_number(r.floor_ms, ",.3g"),
    "share": lambda r: format_number(r.share, ".1%"),
    "GPU busy": lambda r: _median(r.busy, ".1%"),
    "with prefill": lambda r: _median(r.job, ",.0f"),
    "run s": lambda r: _median(r.seconds, ",.2f"),
    "start-up s": lambda r: format_number(r.startup_seconds, ",.2f"),
    "KV": lambda r: _bytes_read(r, r.kv_bytes),
    "GPU": lambda r: format_bytes(r.device_bytes) if r.device_bytes else "",
    "keys read": lambda r: _bytes_read(r, r.read_bytes),
    "saved": lambda r: _bytes_read(r, r.saved_bytes),
    "read once": _levels_read_once,
    "kernels": _kernels,
}


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}x"


def attention_case_line(result: AttentionResult) -> str:
    """Return one result as one line, to print when it arrives."""
    speedup = f", {result.over_copies:.1f}x" if result.over_copies is not None else ""
    return (
        f"{result.rows:,} rows, prefix {result.prefix:,}, suffix {result.suffix:,}: "
        f"{result.shared[result.fastest].median:,.0f} us{speedup}"
    )


def attention_table(results: Sequence[AttentionResult]) -> PrintableTable:
    """Return a table of the operator and attention without sharing; one column for each kernel."""
    shared = list(dict.fromkeys(name for r in results for name in r.shared))
    unshared = list(dict.fromkeys(name for r in results for name in r.unshared))
    times = {f"{n} us": lambda r, n=n: format_us(r.shared.get(n)) for n in shared}
    more_columns = {
        f"{name} us": lambda r, name=name: format_us(r.unshared.get(name)) for name in unshared
    }
    columns: dict[str, str | Callable[[AttentionResult], str]] = {
        "Rows": "{0.rows:,}",
        "Prefix": "{0.prefix:,}",
        "Suffix": "{0.suffix:,}",
        **times,
        "low-high": lambda r: _range(r.shared[r.fastest]),
        "roofline": "{0.floor_us:,.1f}",
        "share": "{0.share:.1%}",
        "prefix TFLOP/s": lambda r: f"{r.prefix_flops / 1e12:,.3g}",
        "of ceiling": "{0.prefix_share:.1%}",
        **more_columns,
        "over copies": lambda r: _ratio(r.over_copies),
        "over reread": lambda r: _ratio(r.over_reread),
    }
    lines = skip_reasons(
        (f"{r.rows:,} rows, prefix {r.prefix:,}, suffix {r.suffix:,}", r.skipped) for r in results
    )
    return PrintableTable.of(results, columns, lines=lines)


def skip_reasons(cases: Iterable[tuple[str, Mapping[str, str]]]) -> list[str]:
    """Return why implementations were skipped, case by case."""
    return [f"{case}, {name}: {why}" for case, skipped in cases for name, why in skipped.items()]


def format_us(spread: Spread | None) -> str:
    """Return a median of microseconds, or nothing if none was measured."""
    return f"{spread.median:,.1f}" if spread else ""
