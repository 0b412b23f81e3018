"""Plots of accuracy against probability, vote share and length."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from treegen.report.calibration import (
    Bin,
    ProblemPoint,
    bin_by_probability,
    bin_by_tokens,
    bin_by_vote_share,
    compute_problem_points,
    compute_within_problem_auc,
    expected_calibration_error,
    split_lengths,
)
from treegen.report.plots.figures import (
    BLUE,
    GREEN,
    GREY,
    MANY,
    ORANGE,
    PINK,
    Plot,
    PlotLink,
    draw_legend,
    error_bars,
    make_link,
)
from treegen.report.view import RunView

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Fewer samples would show no pattern.
_MIN_SAMPLES: Final = 20
_INTERVALS: Final = "with 95% intervals"


def calibration_plots(view: RunView) -> list[Plot]:
    """Return the plots for which a scored run has enough data."""
    filter = view.filters[0]
    correctness = [v.correct for verdicts in view.verdicts(filter).values() for v in verdicts]
    if len(correctness) < _MIN_SAMPLES or len(set(correctness)) < 2:
        return []
    plots: list[Plot] = []
    if len(bins := bin_by_probability(view, filter)) > 1:
        plots.append(_probability_plot(bins, view, filter))
    points = compute_problem_points(view, filter)
    if view.votes:
        bins = bin_by_vote_share(view, points)
        plots += [_vote_share_plot(bins, points), _difficulty_plot(points)]
    if len({sample.num_tokens for sample in view.samples}) > 1:
        plots.append(_tokens_plot(bin_by_tokens(view, filter), points))
        plots.append(_lengths_plot(view, filter))
    return plots


def _draw_bins(axes: "Axes", bins: Sequence[Bin], label: str) -> None:
    shares = [b.accuracy for b in bins]
    x, y, bars = [b.mean for b in bins], [share.value for share in shares], error_bars(shares)
    axes.errorbar(x, y, bars, fmt="o-", markersize=4, capsize=3, color=BLUE, label=label, zorder=3)


def _probability_plot(bins: Sequence[Bin], view: RunView, filter: str) -> Plot:
    description = (
        f"from {bins[0].accuracy.value:.3f} right of the least likely samples to "
        f"{bins[-1].accuracy.value:.3f} of the most likely"
    )
    if auc := compute_within_problem_auc(view, filter):
        description += (
            f"; of a right and a wrong sample of a problem, the right one is likelier in "
            f"{auc.value:.0%} of cases ({auc.low:.0%} to {auc.high:.0%})"
        )

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        _draw_bins(axes, bins, "samples, in bins of equal size")
        axes.set(xlabel="mean probability of a sample's tokens (geometric)", ylabel="share right")
        axes.set_ylim(-0.02, 1.02)

    title = f"Log-probability against accuracy, {_INTERVALS}"
    return Plot("probability_accuracy", title, description, draw)


def _draw_points(
    axes: "Axes", x: Sequence[float], y: Sequence[float], colour: str, label: str
) -> None:
    axes.scatter(
        x, y, s=16, color=colour, alpha=0.6, linewidths=0, label=label, rasterized=len(x) > MANY
    )


def _point_plot(
    name: str,
    title: str,
    description: str,
    draw: "Callable[[Figure], None]",
    points: Mapping[int, tuple[float, float]],
) -> Plot:
    """Return a plot with a point for each problem, which links to the problem.

    Args:
        name: As in `Plot`.
        title: As in `Plot`.
        description: As in `Plot`.
        draw: As in `Plot`.
        points: The coordinates of each problem's point, by the problem's index in the run.
    """

    def find_links(figure: "Figure") -> list[PlotLink]:
        return [make_link(figure, point, point, index) for index, point in points.items()]

    return Plot(name, title, description, draw, (6.4, 4.0), find_links)


def _vote_share_plot(bins: Sequence[Bin], points: Sequence[ProblemPoint]) -> Plot:
    error = expected_calibration_error(bins)
    description = (
        f"expected calibration error {error:.3f}: how far the share of the top answer is, in the "
        "mean, from the share of right votes; a point is a problem"
    )
    coordinates = {p.index: (p.top_share, 1.06 if p.vote >= 0.5 else -0.06) for p in points}

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], linestyle=":", color=GREY, label="as sure as right")
        _draw_bins(axes, bins, "votes")
        for is_right, colour, label in ((True, GREEN, "right vote"), (False, ORANGE, "wrong vote")):
            kind = [coordinates[p.index] for p in points if (p.vote >= 0.5) == is_right]
            _draw_points(axes, [x for x, _ in kind], [y for _, y in kind], colour, label)
        axes.set(xlabel="share of the answer with most votes", ylabel="share of right votes")
        axes.set(ylim=(-0.12, 1.12), xlim=(-0.02, 1.02))
        draw_legend(figure, 2)

    title = f"Vote share against accuracy, {_INTERVALS}"
    return _point_plot("share_accuracy", title, description, draw, coordinates)


def _difficulty_plot(points: Sequence[ProblemPoint]) -> Plot:
    kinds = (
        ("right vote", GREEN, [p for p in points if p.vote == 1]),
        ("tied", PINK, [p for p in points if 0 < p.vote < 1]),
        ("wrong vote", ORANGE, [p for p in points if p.vote == 0]),
    )
    sure = sum(p.vote == 0 and p.top_share > 0.5 for p in points)
    description = (
        f"{len(kinds[2][2]):,} of {len(points):,} votes are wrong, {sure:,} of them with more than "
        "half of the samples; on the line, the top answer is right"
    )
    coordinates = {p.index: (p.accuracy, p.top_share) for p in points}

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], linestyle=":", color=GREY)
        for label, colour, kind in kinds:
            if kind:
                _draw_points(
                    axes, [p.accuracy for p in kind], [p.top_share for p in kind], colour, label
                )
        axes.set_xlabel("share of right samples (easier to the right)")
        axes.set(ylabel="share of the top answer", xlim=(-0.02, 1.02), ylim=(-0.02, 1.04))
        draw_legend(figure, 3)

    title = "Difficulty against votes"
    return _point_plot("difficulty_votes", title, description, draw, coordinates)


def _tokens_plot(bins: Sequence[Bin], points: Sequence[ProblemPoint]) -> Plot:
    first, last = bins[0], bins[-1]
    description = (
        f"{first.accuracy.value:.3f} right of the shortest samples ({first.mean:,.0f} tokens in "
        f"the mean), {last.accuracy.value:.3f} of the longest ({last.mean:,.0f}); a point is a "
        "problem, at the mean of its samples"
    )
    coordinates = {p.index: (p.mean_tokens, p.accuracy) for p in points}

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        _draw_points(
            axes, [p.mean_tokens for p in points], [p.accuracy for p in points], ORANGE, "problems"
        )
        _draw_bins(axes, bins, "samples, in bins of equal size")
        axes.set(xlabel="generated tokens", ylabel="share right", ylim=(-0.05, 1.05))
        draw_legend(figure, 2)

    title = f"Tokens against accuracy, {_INTERVALS}"
    return _point_plot("tokens_accuracy", title, description, draw, coordinates)


def _lengths_plot(view: RunView, filter: str) -> Plot:
    right, wrong = (np.array(lengths) for lengths in split_lengths(view, filter))
    medians = float(np.median(right)), float(np.median(wrong))
    description = (
        f"half of the right samples have up to {medians[0]:,.0f} tokens, of the wrong "
        f"{medians[1]:,.0f}"
    )

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        low, high = (int(extreme([extreme(right), extreme(wrong)])) for extreme in (np.min, np.max))
        width = 1 + (high - low) // 30
        bins = [edge - 0.5 for edge in range(low, high + width + 1, width)]
        for values, label, colour, line, median in (
            (right, "right", GREEN, "-", medians[0]),
            (wrong, "wrong", ORANGE, "--", medians[1]),
        ):
            weights = np.full(len(values), 1 / len(values))
            axes.hist(
                values,
                bins=bins,
                weights=weights,
                histtype="step",
                color=colour,
                linestyle=line,
                linewidth=1.8,
                label=f"{label} ({len(values):,})",
            )
            axes.axvline(median, color=colour, linestyle=":", linewidth=1)
        axes.set(
            xlabel="generated tokens, dotted at the medians",
            ylabel="share of right, of wrong samples",
        )
        axes.grid(axis="x", visible=False)
        draw_legend(figure, 2)

    return Plot(
        "lengths_by_verdict", "Lengths of right and wrong samples", description, draw, (6.4, 3.2)
    )
