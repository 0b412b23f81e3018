"""Renders matplotlib figures as SVG, for light and dark pages, and as PNG."""

import base64
import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from treegen.common.files import write_output
from treegen.common.formatting import safe_text
from treegen.errors import require_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from treegen.evals.statistics.estimators import Estimate

# Okabe and Ito's colours, which people with any colour vision can distinguish.
GREEN, ORANGE, YELLOW, BLUE, SKY, GREY, PINK = (
    "#009e73",
    "#d55e00",
    "#e69f00",
    "#1b87cf",
    "#56b4e9",
    "#8c8c8c",
    "#cc79a7",
)
# Maps of numbers to colours: cividis looks the same to people with any colour vision, and in grey.
COLOUR_MAP: Final = "cividis"
# Plots with more points draw them as pixels, because a browser is slow with so many SVG shapes.
MANY: Final = 200
_LEGEND_INCHES: Final = 0.6
"""Height of a legend of two lines, for which the size of a figure has room."""
_MIN_LINK_INCHES: Final = 0.12  # smallest width and height of a link's area
_CYCLE: Final = (BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, GREY)
_MARKERS: Final = "osD^vPX*"
_DPI: Final = 96  # a browser's pixels per inch
# The colour of text and lines. Nothing else in a picture has exactly this colour.
_INK: Final = "#1f2328"
_ADAPTING: Final = f"svg{{color:{_INK}}}@media (prefers-color-scheme:dark){{svg{{color:#e6e8eb}}}}"


@dataclass(frozen=True, slots=True)
class PlotLink:
    """A part of a picture that links to one problem or to several."""

    box: tuple[float, float, float, float]
    """Left, top, right and bottom, as shares of the picture's width and height."""
    target: int | str
    """The index of the problem in the run, or a filter of the table of problems."""

    def to_json(self) -> list[float | int | str]:
        """Return the box and the target as one list."""
        return [*(round(side, 5) for side in self.box), self.target]


def make_link(
    figure: "Figure", low: tuple[float, float], high: tuple[float, float], target: int | str
) -> PlotLink:
    """Return a link whose area lies between two points of a drawn figure's first axes.

    The area is at least as large as a drawn point.

    Args:
        figure: The drawn figure.
        low: One corner (x, y), in the axes' data coordinates.
        high: The opposite corner.
        target: The target of the link; see `PlotLink`.
    """
    axes = figure.axes[0]
    corners = axes.transData.transform([low, high])
    (x0, y0), (x1, y1) = figure.transFigure.inverted().transform(corners)
    width, height = figure.get_size_inches()
    x, y = _MIN_LINK_INCHES / width, _MIN_LINK_INCHES / height
    left, right = sorted((float(x0), float(x1)))
    bottom, top = sorted((float(y0), float(y1)))
    if right - left < x:
        left, right = (left + right - x) / 2, (left + right + x) / 2
    if top - bottom < y:
        bottom, top = (bottom + top - y) / 2, (bottom + top + y) / 2
    return PlotLink((left, 1 - top, right, 1 - bottom), target)


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot that can be drawn."""

    name: str
    """The name of its files."""
    title: str
    """The heading above it."""
    description: str
    """A sentence that describes it, for people who cannot see it."""
    draw: "Callable[[Figure], None]"
    """Draws it on a figure."""
    size: tuple[float, float] = (6.4, 3.6)
    """Width and height in inches; a high legend adds to the height."""
    find_links: "Callable[[Figure], list[PlotLink]] | None" = None
    """Returns the bars and points of the drawn figure that link to problems; see `make_link`."""

    def render(self) -> "Picture":
        """Draw the plot as SVG: transparent, with text and lines in the page's colour.

        Raises:
            InputError: matplotlib is not installed.
        """
        svg, figure = self._draw_file("svg")
        links = self.find_links(figure) if self.find_links else []
        width, height = (round(inches * _DPI) for inches in figure.get_size_inches())
        return Picture(self, _light_or_dark(svg), links, width, height)

    def png(self) -> bytes:
        """Return the picture as PNG, on white.

        Raises:
            InputError: matplotlib is not installed.
        """
        return self._draw_file("png")[0]

    def _draw_file(self, kind: str) -> "tuple[bytes, Figure]":
        with _style():
            # pyplot would choose a display and keep figures that must be closed.
            from matplotlib.figure import Figure

            figure = Figure(figsize=self.size, layout="constrained")
            self.draw(figure)
            out = io.BytesIO()
            # Without a date, the same run produces the same file.
            metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
            figure.savefig(out, format=kind, dpi=144, transparent=kind == "svg", metadata=metadata)
        return out.getvalue(), figure


@dataclass(frozen=True, slots=True)
class Picture:
    """A plot that was drawn as SVG."""

    plot: Plot
    svg: bytes
    links: list[PlotLink]
    """The areas that link to problems."""
    width: int
    """Width in CSS pixels."""
    height: int
    """Height in CSS pixels."""

    @property
    def url(self) -> str:
        """The SVG as the URL of an image."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.svg).decode('ascii')}"

    def save(self, folder: Path) -> list[Path]:
        """Write NAME.svg and NAME.png, and return their paths.

        Args:
            folder: The folder of the files; it is created if necessary.

        Raises:
            InputError: a file cannot be written.
        """
        contents = {"svg": self.svg, "png": self.plot.png()}
        paths = [folder / f"{self.plot.name}.{kind}" for kind in contents]
        for path, content in zip(paths, contents.values(), strict=True):
            write_output(path, [content])
        return paths


def choose_style(index: int) -> dict[str, Any]:
    """Return the colour and the marker of a curve among several; the first 56 all differ."""
    return {"colour": _CYCLE[index % len(_CYCLE)], "marker": _MARKERS[index % len(_MARKERS)]}


def draw_band(
    axes: "Axes",
    x: Sequence[float],
    estimates: "Sequence[Estimate]",
    colour: str,
    label: str,
    *,
    alpha: float = 0.15,
    marker: str = "o",
    **style: Any,
) -> None:
    """Draw a curve of estimates, with their intervals as a band, or as a bar for a single one.

    Args:
        axes: The axes to draw on.
        x: The position of each estimate.
        estimates: The values and their intervals.
        colour: The colour of curve and band.
        label: The name of the curve in the legend.
        alpha: The opacity of the band.
        marker: The shape of the points.
        style: Further arguments of `Axes.plot`, such as the size of the points.
    """
    values = [estimate.value for estimate in estimates]
    axes.plot(x, values, color=colour, label=label, marker=marker, **style)
    if len(estimates) == 1:
        bars = error_bars(estimates)
        axes.errorbar(x, values, yerr=bars, color=colour, capsize=3)
        return
    low, high = ([getattr(e, end) for e in estimates] for end in ("low", "high"))
    axes.fill_between(x, low, high, color=colour, alpha=alpha, linewidth=0)


def error_bars(estimates: "Sequence[Estimate]") -> list[list[float]]:
    """Return the distances from values to the lower and to the upper ends of their intervals."""
    return [[e.value - e.low for e in estimates], [e.high - e.value for e in estimates]]


def draw_legend(figure: "Figure", max_columns: int) -> None:
    """Draw the legend of a figure above its axes, and make the figure higher for a high legend."""
    for ncols in range(max_columns, 0, -1):
        legend = figure.legend(loc="outside upper center", ncols=ncols, fontsize=10)
        box = legend.get_window_extent()
        if box.width <= figure.bbox.width or ncols == 1:
            break
        legend.remove()
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + max(0.0, box.height / figure.dpi - _LEGEND_INCHES))


def plain_label(text: str, limit: int = 40) -> str:
    """Return a text as a label: one line without control characters, of at most `limit` characters.

    The middle of a longer text is left out, because names of runs may differ only at the end.
    """
    line = " ".join(safe_text(text).split())
    head, tail = (limit - 3) // 2, (limit - 2) // 2
    return line if len(line) <= limit else f"{line[:head]}...{line[-tail:]}"


@contextmanager
def _style() -> Iterator[None]:
    with require_extra("plots need matplotlib", "report"):
        import matplotlib
        from matplotlib.rcsetup import cycler
    settings: dict[Any, Any] = {
        **dict.fromkeys(("text.color", "xtick.color", "ytick.color", "grid.color"), _INK),
        **{f"axes.{part}color": _INK for part in ("label", "edge", "title")},
        "legend.labelcolor": _INK,
        "legend.framealpha": 0.0,
        "figure.facecolor": "white",
        "axes.facecolor": "white",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "axes.axisbelow": True,
        "axes.titlesize": 11,
        "axes.prop_cycle": cycler(color=_CYCLE),
        "font.size": 10,
        # A dollar sign in a label starts no formula. The salt keeps ids the same in every file.
        "text.parse_math": False,
        "svg.hashsalt": "treegen",
    }
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # Labels may be in any script. A missing glyph is drawn as a box and needs no warning.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


def _light_or_dark(svg: bytes) -> bytes:
    """Return an SVG with text and lines in the page's colour, without metadata and comments."""
    text = svg.decode("utf-8")
    unread = r"<metadata>.*?</metadata>|<!--.*?-->"  # comments repeat the labels
    text = re.sub(unread, "", text[text.index("<svg") :], flags=re.DOTALL)
    text = text.replace(_INK, "currentColor").replace("</svg>", f"<style>{_ADAPTING}</style></svg>")
    return re.sub(r"\n\s*", "\n", text).encode()
