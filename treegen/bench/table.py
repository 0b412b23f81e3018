"""Measurements as rows of text. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from treegen.common.formatting import format_bytes
from treegen.common.outputs import in_order
from treegen.report.tables import PrintableTable

if TYPE_CHECKING:
    from treegen.bench.attention import AttentionResult
    from treegen.bench.cascade import CascadeResult
    from treegen.bench.decoding.decode import Ratio
    from treegen.bench.decoding.result import WorkloadResult
    from treegen.bench.latent import LatentResult
    from treegen.bench.timing import Spread


_WORDS: Final = ("Job", "Mode", "read once", "kernels")


def result_line(result: WorkloadResult) -> str:
    """Return one result as one line, to print when it arrives."""
    told = result.skipped and f"not run: {result.skipped}"
    if not told and result.tokens_per_second is not None:
        told = f"{result.tokens_per_second.median:,.0f} tokens/s"
        if result.share is not None:
            told += f", {result.share:.0%} of the roofline"
    elif not told and result.job is not None:
        told = f"{result.job.median:,.0f} tokens/s with prefill"
    return f"{_where(result)}, {result.mode}: {told}"


def results_table(results: Sequence[WorkloadResult]) -> PrintableTable:
    """Return a table of the workloads' results in each mode, by workload."""
    order = list(dict.fromkeys(result.workload for result in results))
    several = len({workload.name for workload in order}) > 1
    head = (
        "Job",
        "Prefix",
        "Problems",
        "Rows",
        "Mode",
        "tokens/s",
        "low-high",
        "step ms",
        "roofline ms",
        "share",
        "GPU busy",
        "with prefill",
        "run s",
        "start-up s",
        "encode ms",
        "prefill ms",
        "KV",
        "GPU",
        "keys read",
        "saved",
        "read once",
        "kernels",
    )
    rows, remarks = [], []
    for result in sorted(results, key=lambda result: order.index(result.workload)):
        if result.skipped:
            remarks.append(f"{_where(result)}, {result.mode}: {result.skipped}")
        elif any(result.notes):
            remarks.append(f"{_where(result)}, {result.mode}: {'; '.join(result.notes)}")
        workload = result.workload
        rows.append(
            (
                workload.name,
                f"{workload.prefixes:,} x {workload.prefix:,}"
                if workload.prefixes > 1
                else f"{workload.prefix:,}",
                f"{workload.problems:,} x {workload.problem_tokens:,}"
                if workload.problem_tokens
                else "",
                f"{result.rows:,}",
                result.mode,
                *_speeds(result),
                *_of_image(result),
                *_memory(result),
                ", ".join(f"{count:,} x {keys // count:,}" for _, count, keys in result.levels),
                _kernels(result),
            )
        )
    kept = [i for i in range(len(head)) if (several or i) and any(row[i] for row in rows)]
    return PrintableTable(
        tuple(head[i] for i in kept),
        tuple(tuple(row[i] for i in kept) for row in rows),
        tuple(place for place, i in enumerate(kept) if head[i] not in _WORDS),
        lines=tuple(dict.fromkeys(remarks)),
    )


def _where(result: WorkloadResult) -> str:
    workload = result.workload
    problems = f", {workload.problems:,} problems" if workload.problem_tokens else ""
    return f"{workload.name}, prefix {workload.prefix:,}{problems}, {result.rows:,} rows"


def _speeds(result: WorkloadResult) -> tuple[str, ...]:
    speed, step = result.tokens_per_second, result.step_ms
    return (
        f"{speed.median:,.0f}" if speed else ("not run" if result.skipped else ""),
        f"{speed.low:,.0f}-{speed.high:,.0f}" if speed else "",
        f"{step.median:,.2f}" if step else "",
        f"{result.floor_ms:,.3g}" if result.floor_ms is not None else "",
        f"{result.share:.1%}" if result.share is not None else "",
        f"{result.busy.median:.1%}" if result.busy else "",
        f"{result.job.median:,.0f}" if result.job else "",
        f"{result.seconds.median:,.2f}" if result.seconds else "",
        f"{result.startup_seconds:,.2f}" if result.startup_seconds is not None else "",
    )


def _of_image(result: WorkloadResult) -> tuple[str, str]:
    """Return the columns for a prefix that begins with an image."""
    encode, prefill = result.encode_seconds, result.prefill_seconds
    if encode is None or prefill is None:
        return ("", "")
    return f"{encode.median * 1e3:,.1f}", f"{prefill.median * 1e3:,.1f}"


def _memory(result: WorkloadResult) -> tuple[str, ...]:
    if not result.read_bytes and not result.kv_bytes:
        return ("", "", "", "")
    return (
        format_bytes(result.kv_bytes),
        format_bytes(result.device_bytes) if result.device_bytes else "",
        format_bytes(result.read_bytes),
        format_bytes(result.saved_bytes),
    )


def _kernels(result: WorkloadResult) -> str:
    """Return the kernels that read the levels, from the root to the rows' own keys."""
    names = ["/".join(result.kernels[level]) for level in in_order(result.kernels)]
    return " + ".join(names) if len(set(names)) > 1 else next(iter(names), result.impl)


def ratio_table(ratios: Sequence[Ratio]) -> PrintableTable:
    """Return a table of speed with sharing over speed without, prefixes down and rows across."""
    columns = sorted({each.rows for each in ratios})
    cells = {(each.prefix, each.rows): each for each in ratios}

    def text(prefix: int, rows: int) -> str:
        each = cells.get((prefix, rows))
        if each is None or each.ratio is None:
            return ""
        return f"{each.ratio:.2f}{'' if each.shared else ' (off)'}{' !' if each.is_slower else ''}"

    return PrintableTable(
        ("Prefix \\ rows", *(f"{rows:,}" for rows in columns)),
        tuple(
            (f"{prefix:,}", *(text(prefix, rows) for rows in columns))
            for prefix in sorted({each.prefix for each in ratios})
        ),
        tuple(range(len(columns) + 1)),
        lines=(
            "(off): the engine chose not to share, both are the same work; !: slower by more than "
            "noise",
        ),
    )


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
    head = (
        "Rows",
        "Prefix",
        "Suffix",
        *(f"{name} us" for name in shared),
        "low-high",
        "roofline",
        "share",
        "prefix TFLOP/s",
        "of ceiling",
        *(f"{name} us" for name in unshared),
        "over copies",
        "over reread",
    )
    rows = [
        (
            f"{r.rows:,}",
            f"{r.prefix:,}",
            f"{r.suffix:,}",
            *(_us(r.shared.get(name)) for name in shared),
            f"{r.shared[r.fastest].low:,.0f}-{r.shared[r.fastest].high:,.0f}",
            f"{r.floor_us:,.1f}",
            f"{r.share:.1%}",
            f"{r.prefix_flops / 1e12:,.3g}",
            f"{r.prefix_share:.1%}",
            *(_us(r.unshared.get(name)) for name in unshared),
            *("" if x is None else f"{x:,.2f}x" for x in (r.over_copies, r.over_reread)),
        )
        for r in results
    ]
    reasons = _reasons(
        (f"{r.rows:,} rows, prefix {r.prefix:,}, suffix {r.suffix:,}", r.skipped) for r in results
    )
    return PrintableTable(head, tuple(rows), tuple(range(len(head))), lines=reasons)


def _reasons(cases: Iterable[tuple[str, Mapping[str, str]]]) -> tuple[str, ...]:
    """Return why implementations were skipped, case by case, without repeated lines."""
    return tuple(
        dict.fromkeys(
            f"{case}, {name}: {reason}"
            for case, skipped in cases
            for name, reason in skipped.items()
        )
    )


def _us(spread: Spread | None) -> str:
    return f"{spread.median:,.1f}" if spread else ""


def latent_line(result: LatentResult) -> str:
    """Return one result as one line, to print when it arrives."""
    told = ", ".join(f"{name} {spread.median:,.1f} us" for name, spread in result.times.items())
    return f"{result.rows:,} rows, prefix {result.prefix:,}, suffix {result.suffix:,}: {told}"


def latent_table(results: Sequence[LatentResult]) -> PrintableTable:
    """Return a table of attention to latents in each form, with the least time of each."""
    names = list(dict.fromkeys(name for r in results for name in r.times))
    columns = [title for name in names for title in (f"{name} us", "its roofline")]
    head = ("Rows", "Prefix", "Suffix", "cheapest forms us", *columns)
    rows = [
        (
            f"{r.rows:,}",
            f"{r.prefix:,}",
            f"{r.suffix:,}",
            f"{r.floor_us:,.1f}",
            *(
                cell
                for name in names
                for cell in (_us(r.times.get(name)), f"{r.floors_us.get(name, 0):,.1f}")
            ),
        )
        for r in results
    ]
    reasons = _reasons((f"{r.rows:,} rows, suffix {r.suffix:,}", r.skipped) for r in results)
    return PrintableTable(head, tuple(rows), tuple(range(len(head))), lines=reasons)


def cascade_line(result: CascadeResult) -> str:
    """Return one result as one line, to print when it arrives."""
    told = ", ".join(
        f"{name} {spread.median:,.1f} us, {result.ratios[name]:.2f} times the floor"
        for name, spread in result.times.items()
    )
    return f"{result.rows:,} rows, {_levels(result)}: {told}"


def cascade_table(results: Sequence[CascadeResult]) -> PrintableTable:
    """Return a table of cascades with each implementation, with the least time of the levels."""
    names = list(dict.fromkeys(name for r in results for name in r.times))
    columns = [title for name in names for title in (f"{name} us", "low-high", "times the floor")]
    head = ("Rows", "Levels, keys x groups", "floor us", *columns)
    rows = [
        (
            f"{r.rows:,}",
            _levels(r),
            f"{r.floor_us:,.1f}",
            *(cell for name in names for cell in _beside_floor(r, name)),
        )
        for r in results
    ]
    reasons = _reasons((f"{r.rows:,} rows, {_levels(r)}", r.skipped) for r in results)
    return PrintableTable(head, tuple(rows), (0, *range(2, len(head))), lines=reasons)


def _beside_floor(result: CascadeResult, name: str) -> tuple[str, str, str]:
    if name not in result.times:
        return ("", "", "")
    spread = result.times[name]
    return _us(spread), f"{spread.low:,.1f}-{spread.high:,.1f}", f"{result.ratios[name]:.2f}"


def _levels(result: CascadeResult) -> str:
    return " + ".join(f"{part.keys:,} x {part.groups:,}" for part in result.parts)
