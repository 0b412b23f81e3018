"""The plots that compare two runs of the same problems."""

from typing import TYPE_CHECKING

from treegen.report.compare import Comparison
from treegen.report.plots.figures import (
    BLUE,
    GREEN,
    GREY,
    MANY,
    ORANGE,
    Plot,
    PlotLink,
    plain_label,
    spot,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def comparison_plots(comparison: Comparison) -> list[Plot]:
    """Return the differences by metric, and by problem for the headline metric."""
    rows = [row for row in comparison.differences if row.low is not None and row.high is not None]
    first = comparison.differences[0]
    order = sorted(range(len(first.by_problem)), key=lambda i: -first.by_problem[i])
    ranked = [first.by_problem[i] for i in order]
    names = f"{plain_label(comparison.b)} minus {plain_label(comparison.a)}"

    def by_metric(figure: "Figure") -> None:
        axes = figure.subplots()
        for place, row in enumerate(rows):
            assert row.low is not None and row.high is not None
            spread = [[row.value - row.low], [row.high - row.value]]
            clear = row.low > 0 or row.high < 0
            colour = GREY if not clear else GREEN if row.value > 0 else ORANGE
            axes.errorbar([row.value], [place], xerr=spread, fmt="o", color=colour, capsize=4)
        axes.axvline(0, color=GREY, linewidth=1)
        axes.set_yticks(
            range(len(rows)), [f"{row.metric}, {plain_label(row.filter)}" for row in rows]
        )
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel(names)

    def by_problem(figure: "Figure") -> None:
        axes = figure.subplots()
        colours = [GREEN if value > 0 else ORANGE for value in ranked]
        if len(ranked) <= MANY:
            axes.bar(range(len(ranked)), ranked, color=colours, width=1.0)
        else:
            axes.fill_between(
                range(len(ranked)), ranked, step="mid", color=BLUE, linewidth=0, rasterized=True
            )
        axes.axhline(first.value, color=BLUE, linestyle="--", label=f"mean {first.value:+.3f}")
        axes.set_xlabel("problems, best for the second run first")
        axes.set(ylabel=f"{first.metric}: difference", ylim=(-1.02, 1.02))
        axes.legend()

    def spots(figure: "Figure") -> list[PlotLink]:
        return [
            spot(figure, (at - 0.5, -1), (at + 0.5, 1), comparison.places[i])
            for at, i in enumerate(order)
        ]

    description = f"{first.better:,} problems better, {first.worse:,} worse"
    plots = [Plot("by_problem", f"{names}, by problem", description, by_problem, spots=spots)]
    if rows:
        description = "; ".join(f"{row.metric} ({row.filter}): {row.value:+.3f}" for row in rows)
        size = (6.4, 1.2 + 0.35 * len(rows))
        title = f"{names}, with 95% intervals"
        plots.insert(0, Plot("by_metric", title, description, by_metric, size))
    return plots
