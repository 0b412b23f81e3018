"""Draws a grid of values: as text for a terminal, and as a PNG picture."""

import os
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from treegen.common.files import replace_file
from treegen.errors import InputError, require_extra
from treegen.evals.statistics.tables import Grid
from treegen.report.plots.figures import COLOUR_MAP, Plot

# From empty to full, for values from 0 to 1.
_BLOCKS: Final = " \u2591\u2592\u2593\u2588"
_ASCII: Final = " .:*#"
_MISSING: Final = "--"


def draw_text(grid: Grid, *, ascii: bool = False) -> str:
    """Return the grid as lines of shaded cells, each with its value in percent.

    Args:
        grid: The grid.
        ascii: Shade with punctuation, for streams that cannot encode block characters.
    """
    shades = _ASCII if ascii else _BLOCKS
    cells = [[_cell(value, shades) for value in row] for row in grid.values]
    label_width = max(len(text) for text in (grid.row_name, *grid.row_labels))
    widths = [max(6, len(label)) for label in grid.column_labels]

    def line(label: str, texts: list[str]) -> str:
        padded = (text.rjust(width) for text, width in zip(texts, widths, strict=True))
        return "  ".join([label.rjust(label_width), *padded])

    return "\n".join(
        [
            grid.title,
            f"{'':>{label_width}}  {grid.column_name}",
            line(grid.row_name, list(grid.column_labels)),
            *(line(label, row) for label, row in zip(grid.row_labels, cells, strict=True)),
        ]
    )


def save_png(grid: Grid, path: str | os.PathLike[str]) -> None:
    """Write the grid as a PNG picture.

    Raises:
        InputError: matplotlib is not installed, or the file cannot be written.
    """
    with require_extra("a PNG heat map needs matplotlib", "plots"):
        import_module("matplotlib.figure")

    def draw(figure: Any) -> None:
        draw_grid(figure, grid)
        figure.axes[0].set_title(grid.title)

    content = Plot("heat_map", grid.title, "", draw, grid_size(grid)).png()
    try:
        with replace_file(Path(path)) as file:  # a link in the run may lead to another file
            file.write(content)
    except OSError as error:
        raise InputError(
            f"cannot write {os.fspath(path)}: {error.strerror or error}; choose another path"
        ) from None


def _cell(value: float | None, shades: str) -> str:
    if value is None:
        return _MISSING
    # Only a full cell is solid and only an empty one is blank.
    step = 0 if value <= 0 else 4 if value >= 1 else 1 + min(2, int(value * 3))
    return f"{shades[step] * 2}{100 * value:4.0f}"


def grid_size(grid: Grid) -> tuple[float, float]:
    """Return the width and height of the picture of a grid in inches."""
    return 2.5 + 0.7 * len(grid.column_labels), 1.8 + 0.4 * len(grid.row_labels)


def draw_grid(figure: Any, grid: Grid) -> None:
    """Draw the grid on a matplotlib figure."""
    axes = figure.subplots()
    numbers = [[float("nan") if v is None else v for v in row] for row in grid.values]
    image = axes.imshow(numbers, vmin=0, vmax=1, cmap=COLOUR_MAP, aspect="auto")
    figure.colorbar(image, ax=axes, label="accuracy")
    rows, columns = len(grid.row_labels), len(grid.column_labels)
    axes.set_xticks(range(columns), grid.column_labels, rotation=45)
    axes.set_yticks(range(rows), grid.row_labels)
    axes.set(xlabel=grid.column_name, ylabel=grid.row_name)
    axes.grid(visible=False)
    for i, row in enumerate(grid.values):
        for j, value in enumerate(row):
            if value is None:
                axes.text(j, i, _MISSING, ha="center", va="center", fontsize=10)
            else:  # low values have a dark background
                ink = "white" if value < 0.55 else "black"
                percent = f"{100 * value:.0f}"
                axes.text(j, i, percent, ha="center", va="center", fontsize=10, color=ink)
