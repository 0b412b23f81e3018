"""How two runs differ, as a table: for a terminal and for a page."""

from treegen.report.compare import Comparison, Tokens
from treegen.report.tables import Listing, interval

_HEAD = ["Filter", "Metric", "A", "B", "B - A", "95% interval", "p", "Better", "Worse"]


def comparison_listing(found: Comparison) -> Listing:
    """Return one line for each metric that both runs have, and how it was tested."""
    rows = [
        [
            row.filter,
            row.metric,
            f"{row.a:.3f}",
            f"{row.b:.3f}",
            f"{row.value:+.3f}",
            interval(row.low, row.high, signed=True),
            _p_value(row.p_value),
            f"{row.better:,}",
            f"{row.worse:,}",
        ]
        for row in found.differences
    ]
    left_out = f"; {len(found.left_out):,} unfinished ones left out" if found.left_out else ""
    title = f"A: {found.a}\nB: {found.b}\n{len(found.problem_ids):,} problems, paired{left_out}"
    lines = []
    for method in dict.fromkeys(row.method for row in found.differences):
        names = dict.fromkeys(row.metric for row in found.differences if row.method == method)
        lines.append(f"{', '.join(names)}: {method}")
    if found.tokens is not None:
        lines.append(_tokens(found.tokens))
    return Listing(_HEAD, rows, range(2, len(_HEAD)), title, lines)


def _tokens(found: Tokens) -> str:
    told = f"tokens: A {found.a:,}, B {found.b:,}"
    if found.a != found.b:
        told += f" ({abs(found.saved):.1%} {'fewer' if found.saved > 0 else 'more'})"
    if found.low is None or found.high is None:
        return told
    bounds = f"{found.low:+,.0f} to {found.high:+,.0f}"
    p_value = _p_value(found.p_value)
    return f"{told}; B - A {found.value:+,.0f} for a problem ({bounds}), t-test p {p_value}"


def _p_value(value: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value:.4f}" if value >= 0.00005 else "<0.0001"
