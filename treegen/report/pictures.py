"""The rendered pictures of a page: those of each run, and those of several runs together."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from treegen.report.compare import Comparison
from treegen.report.curves import k_curves
from treegen.report.plots.comparison import comparison_plots
from treegen.report.plots.figures import Plot, PlotLink
from treegen.report.plots.runs import curves_plot, metric_plot, run_plots
from treegen.report.plots.searches import methods_plot
from treegen.report.tables import headline_of
from treegen.report.view import RunView

_DPI: Final = 96  # a browser's pixels per inch


@dataclass(frozen=True, slots=True)
class Picture:
    """A rendered plot, as the template takes it.

    drawn: its SVG.
    spots: its parts that link to problems.
    width, height: in a browser's pixels.
    """

    plot: Plot
    drawn: bytes
    spots: Sequence[PlotLink]
    width: int
    height: int

    @classmethod
    def of(cls, plot: Plot) -> "Picture":
        """Render a plot."""
        width, height = (round(inches * _DPI) for inches in plot.size)
        return cls(plot, *plot.svg_and_spots(), width, height)

    @property
    def svg(self) -> str:
        """The SVG in base64."""
        return base64.b64encode(self.drawn).decode("ascii")

    def save(self, folder: Path) -> list[Path]:
        """Write the plot's files to a folder and return their paths."""
        return self.plot.save(folder, self.drawn)


def draw_all(
    views: Sequence[RunView], comparison: Comparison | None
) -> tuple[dict[str, list[Picture]], list[Picture]]:
    """Return the pictures of each run by its key on the page, and those of all runs together."""
    drawn = {
        _key(number): [Picture.of(plot) for plot in run_plots(view)]
        for number, view in enumerate(views)
    }
    plots = _across(views) if comparison is None else comparison_plots(comparison)
    return drawn, [Picture.of(plot) for plot in plots]


def _key(number: int) -> str:
    return f"run-{number + 1}"


def _across(views: Sequence[RunView]) -> list[Plot]:
    """Return the pictures that show several runs together."""
    if len(views) < 2:
        return []
    plots = []
    rows = [(view.name, row) for view in views if (row := headline_of(view)) is not None]
    known = [(n, r.value, r.low, r.high) for n, r in rows if r.value is not None]
    if known:
        names = {row.metric for _, row in rows}
        plots.append(metric_plot(names.pop() if len(names) == 1 else "headline metric", known))
    curves = {
        view.name: k_curves(
            view.verdicts(view.filters[0], fixed=True),
            votes=bool(view.report.majority),
            problems=view.problems,
        )
        for view in views
        if view.filters and view.report is not None
    }
    if curves := {name: of_run for name, of_run in curves.items() if of_run}:
        plots.append(curves_plot(curves))
    if (methods := methods_plot(views)) is not None:
        plots.append(methods)
    return plots
