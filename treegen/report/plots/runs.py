"""The plots of one run, and those that show several runs together or compare two."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from treegen.common.lifetimes import pause_gc
from treegen.errors import InputError
from treegen.evals.statistics.tables import GROUP_COLUMNS, Grid, Table
from treegen.report.compare import Comparison
from treegen.report.curves import Curve, VoteShares, k_curves, vote_shares
from treegen.report.plots.calibration import calibration_plots
from treegen.report.plots.figures import (
    BLUE,
    GREEN,
    GREY,
    MANY,
    ORANGE,
    YELLOW,
    Plot,
    PlotLink,
    choose_style,
    draw_band,
    draw_legend,
    make_link,
    plain_label,
)
from treegen.report.plots.heat_map import draw_grid, grid_size
from treegen.report.plots.progress import finish_plot, lengths_plot, sharing_plot, timeline_plot
from treegen.report.plots.searches import solved_plot
from treegen.report.stopping_savings import Savings, get_replay_problems, savings
from treegen.report.view import RunView

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# With fewer samples, early stopping saves little.
_MIN_VOTERS: Final = 16
# Up to this many problems, each has a bar with its name.
_NAMED: Final = 40

_Bar = tuple[str, float, float | None, float | None]
"""A label, its value, and the bounds of the value's interval."""


@pause_gc()
def run_plots(view: RunView) -> list[Plot]:
    """Return every plot for which a run has data."""
    plots: list[Plot] = []
    if view.filters and view.report is not None:
        headline = view.filters[0]
        verdicts = view.verdicts(headline)
        votes = bool(view.report.majority)
        fixed = view.verdicts(headline, fixed=True)
        if curves := k_curves(fixed, votes=votes, problems=view.problems):
            plots.append(curves_plot({plain_label(headline): curves}))
        max_k = max(map(len, verdicts.values()), default=0)
        if votes and max_k == view.num_samples >= _MIN_VOTERS:
            with suppress(InputError):  # the run stopped early, or lacks numbers of tokens
                replay_problems = get_replay_problems(view, headline)
                plots.append(_savings_plot(savings(replay_problems, problems=view.problems)))
        plots += [
            _table_plot(i, table) for i, table in enumerate(view.report.tables) if _has_bars(table)
        ]
        plots += [_grid_plot(i, grid) for i, grid in enumerate(view.report.grids)]
        shares = vote_shares(verdicts)
        if view.num_samples > 1:
            index_of = {problem.id: number for number, problem in enumerate(view.problems)}
            plots.append(_votes_plot(shares, index_of, votes=votes))
            plots.append(_solved_plot([share.right for share in shares]))
        if not view.searched:
            plots += calibration_plots(view)
    if view.searched and (solved := solved_plot(view)) is not None:
        plots.append(solved)
    if view.num_done:
        plots.append(finish_plot(view))
    if len({sample.num_tokens for sample in view.samples}) > 1:
        plots.append(lengths_plot(view))
    if len(view.timeline) > 2:
        plots.append(timeline_plot(view.timeline))
    if view.usage.get("plan") and (sharing := sharing_plot(view.usage)) is not None:
        plots.append(sharing)
    return plots


def curves_plot(curves_of: Mapping[str, Sequence[Curve]]) -> Plot:
    """Return the plot of pass@k and maj@k against k, for one run or several.

    Args:
        curves_of: The curves by the name of the run; without maj@k if answers do not vote.
    """
    description = "; ".join(
        f"{name}: {c.metric} from {c.values[0].value:.3f} at k={c.ks[0]} to "
        f"{c.values[-1].value:.3f} at k={c.ks[-1]}"
        for name, curves in curves_of.items()
        for c in curves
    )

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for number, (name, curves) in enumerate(curves_of.items()):
            for curve in curves:
                passed = curve.metric == "pass@k"
                style = choose_style(number if len(curves_of) > 1 else int(passed))
                style["linestyle"] = "--" if passed else "-"
                label = curve.metric
                if len(curves_of) > 1:
                    label += f", {plain_label(name)}"
                draw_band(axes, curve.ks, curve.values, label=label, markersize=3.5, **style)
        max_k = max(curve.ks[-1] for curves in curves_of.values() for curve in curves)
        if max_k > 12:
            axes.set_xscale("log")
        ticks = [k for k in (1, 2, 3, 4, 5, 8, 10, 20, 40, 100, 200, 400, 1000) if k <= max_k]
        axes.set_xticks(sorted({*(t for t in ticks if max_k <= 12 or t not in (3, 4, 8)), max_k}))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.set(xlabel="k, samples per problem", ylabel="share of problems", ylim=(-0.02, 1.02))
        if len(curves_of) > 1:
            draw_legend(figure, 2)
        else:
            axes.legend()

    metrics = dict.fromkeys(curve.metric for curves in curves_of.values() for curve in curves)
    return Plot("metrics_over_k", f"{' and '.join(metrics)}, with 95% intervals", description, draw)


def _savings_plot(groups: Sequence[Savings]) -> Plot:
    """Return the plot of votes against tokens: majority of all samples, and stopping early."""
    all_problems = groups[0]
    best = all_problems.rules[-1]
    description = (
        f"{best.name}: {best.vote.value:.3f} with {best.saved:.0%} fewer tokens than "
        f"{all_problems.majority[-1].name}, which has {all_problems.majority[-1].vote.value:.3f}"
    )

    def draw(figure: "Figure") -> None:
        panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
        for axes, group in zip(panels, groups, strict=True):
            lines = (("maj@k", group.majority, BLUE), ("stop when decided", group.rules, ORANGE))
            for label, points, colour in lines:
                tokens = [point.tokens for point in points]
                votes = [point.vote for point in points]
                draw_band(axes, tokens, votes, colour, label, alpha=0.12, markersize=3)
            axes.set_xscale("log")
            axes.set_title(f"{group.label} ({group.num_problems:,})", fontsize=10)
            axes.set_ylim(-0.02, 1.02)
            axes.tick_params(axis="x", labelsize=10)
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.xaxis.set_minor_formatter("")
        panels[len(panels) // 2].set_xlabel("tokens per problem")
        panels[0].set_ylabel("vote")
        panels[0].legend(fontsize=10)

    size = max(6.4, 2.6 * len(groups)), 3.4
    title = "Votes against tokens, with 95% intervals"
    return Plot("votes_over_tokens", title, description, draw, size)


def metric_plot(name: str, rows: Sequence[_Bar]) -> Plot:
    """Return the plot of one metric of several runs.

    Args:
        name: The name of the metric.
        rows: For each run its label, its value, and the bounds of its interval.
    """
    description = "; ".join(f"{label}: {value:.3f}" for label, value, _, _ in rows)
    return _bar_plot("runs", f"{name}, with 95% intervals", description, rows)


def _has_bars(table: Table) -> bool:
    return table.columns[1:] == GROUP_COLUMNS and any(row[2] is not None for row in table.rows)


def _table_plot(index: int, table: Table) -> Plot:
    rows: list[_Bar] = []
    for label, num, value, _, low, high in table.rows:
        if isinstance(value, float):
            bounds = [bound if isinstance(bound, float) else None for bound in (low, high)]
            rows.append((f"{plain_label(str(label))} ({num:,})", value, bounds[0], bounds[1]))
    description = "; ".join(f"{label}: {value:.3f}" for label, value, _, _ in rows[:_NAMED])
    description = f"by {plain_label(table.columns[0])}, problems in brackets; {description}"
    return _bar_plot(f"table_{index + 1}", plain_label(table.title, 80), description, rows)


def _bar_plot(name: str, title: str, description: str, rows: Sequence[_Bar]) -> Plot:
    def draw(figure: "Figure") -> None:
        _draw_bars(figure.subplots(), rows)

    return Plot(name, title, description, draw, (6.4, 1.2 + 0.28 * len(rows)))


def _draw_bars(axes: "Axes", rows: Sequence[_Bar]) -> None:
    positions = range(len(rows))
    axes.barh(positions, [row[1] for row in rows], color=BLUE, alpha=0.85, height=0.7)
    for position, (_, value, low, high) in zip(positions, rows, strict=True):
        if low is not None and high is not None:
            axes.errorbar(
                [value],
                [position],
                xerr=[[value - low], [high - value]],
                fmt="o",
                markersize=4,
                color=ORANGE,
                capsize=3,
            )
    axes.set_yticks(positions, [plain_label(row[0]) for row in rows])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1)


def _grid_plot(index: int, grid: Grid) -> Plot:
    values = [v for row in grid.values for v in row if v is not None]
    description = (
        f"{len(values):,} cells from {min(values, default=0):.2f} to {max(values, default=0):.2f}"
    )
    return Plot(
        f"heat_map_{index + 1}",
        plain_label(grid.title, 80),
        description,
        lambda figure: draw_grid(figure, grid),
        grid_size(grid),
    )


def _votes_plot(shares: Sequence[VoteShares], index_of: Mapping[str, int], *, votes: bool) -> Plot:
    won = sum(s.won and not s.tied for s in shares)
    tied = sum(s.won and s.tied for s in shares)
    parts = [
        ("right", [s.right for s in shares], GREEN),
        ("most frequent wrong answer", [s.top_wrong for s in shares], ORANGE),
        ("other wrong answers", [s.other_wrong for s in shares], YELLOW),
        ("no answer", [s.invalid for s in shares], GREY),
    ]
    if not votes:  # no two programs are the same, so no wrong one is most frequent
        wrong = [s.top_wrong + s.other_wrong for s in shares]
        parts[1:3] = [("wrong", wrong, ORANGE)]

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        bottom = [0.0] * len(shares)
        positions = range(len(shares))
        for label, values, colour in parts:
            top = [b + v for b, v in zip(bottom, values, strict=True)]
            if len(shares) <= _NAMED:
                axes.bar(positions, values, bottom=bottom, color=colour, label=label, width=0.85)
            else:
                axes.fill_between(
                    positions,
                    bottom,
                    top,
                    color=colour,
                    label=label,
                    step="mid",
                    linewidth=0,
                    rasterized=len(shares) > MANY,
                )
            bottom = top
        if len(shares) <= _NAMED:
            names = [plain_label(share.problem_id, 14) for share in shares]
            axes.set_xticks(positions, names, rotation=60, ha="right", rotation_mode="anchor")
            axes.tick_params(axis="x", labelsize=10)
        else:
            axes.set_xlabel("problems, best solved first")
        axes.grid(axis="x", visible=False)
        axes.set(ylabel="share of samples", ylim=(0, 1))
        axes.margins(x=0.01)
        draw_legend(figure, 2)

    description = f"{len(shares):,} problems"
    if votes:
        description += f"; a right answer has the most votes in {won:,} and ties in {tied:,}"

    def find_links(figure: "Figure") -> list[PlotLink]:
        return [
            make_link(figure, (at - 0.5, 0), (at + 0.5, 1), index_of[share.problem_id])
            for at, share in enumerate(shares)
        ]

    return Plot("votes", "Answers per problem", description, draw, (6.4, 4.4), find_links)


def _solved_plot(right: Sequence[float]) -> Plot:
    never, always = sum(r == 0 for r in right), sum(r == 1 for r in right)

    def draw(figure: "Figure") -> None:
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots()
        axes.hist(right, bins=[i / 10 for i in range(11)], color=BLUE, rwidth=0.92)
        axes.set(xlabel="share of right samples", ylabel="problems")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="x", visible=False)

    description = f"{never:,} of {len(right):,} problems are never solved, {always:,} always"

    def find_links(figure: "Figure") -> list[PlotLink]:
        top = figure.axes[0].get_ylim()[1]
        names = [
            f"accuracy>={i / 10:g}" + (f" accuracy<{(i + 1) / 10:g}" if i < 9 else "")
            for i in range(10)
        ]
        return [
            make_link(figure, (i / 10, 0), ((i + 1) / 10, top), name)
            for i, name in enumerate(names)
        ]

    return Plot(
        "difficulty", "How hard the problems are", description, draw, (6.4, 3.0), find_links
    )


def comparison_plots(comparison: Comparison) -> list[Plot]:
    """Return the differences by metric, and by problem for the headline metric."""
    rows = [row for row in comparison.differences if row.low is not None and row.high is not None]
    first = comparison.differences[0]
    order = sorted(range(len(first.by_problem)), key=lambda i: -first.by_problem[i])
    ranked = [first.by_problem[i] for i in order]
    names = f"{plain_label(comparison.b)} minus {plain_label(comparison.a)}"

    def by_metric(figure: "Figure") -> None:
        axes = figure.subplots()
        for index, row in enumerate(rows):
            assert row.low is not None and row.high is not None
            spread = [[row.value - row.low], [row.high - row.value]]
            clear = row.low > 0 or row.high < 0
            colour = GREY if not clear else GREEN if row.value > 0 else ORANGE
            axes.errorbar([row.value], [index], xerr=spread, fmt="o", color=colour, capsize=4)
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

    def find_links(figure: "Figure") -> list[PlotLink]:
        return [
            make_link(figure, (at - 0.5, -1), (at + 0.5, 1), comparison.problem_indices[i])
            for at, i in enumerate(order)
        ]

    description = f"{first.better:,} problems better, {first.worse:,} worse"
    plots = [
        Plot("by_problem", f"{names}, by problem", description, by_problem, find_links=find_links)
    ]
    if rows:
        description = "; ".join(f"{row.metric} ({row.filter}): {row.value:+.3f}" for row in rows)
        size = (6.4, 1.2 + 0.35 * len(rows))
        title = f"{names}, with 95% intervals"
        plots.insert(0, Plot("by_metric", title, description, by_metric, size))
    return plots
