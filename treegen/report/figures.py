"""From a drawing function to bytes: matplotlib pictures as SVG, for light and dark, and as PNG."""

import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from treegen.errors import InputError
from treegen.formats import safe_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any colour vision can tell apart.
GREEN, ORANGE, YELLOW, BLUE, SKY, GREY, PINK = (
    "#009e73", "#d55e00", "#e69f00", "#1b87cf", "#56b4e9", "#8c8c8c", "#cc79a7",
)  # fmt: skip
CYCLE: Final = (BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, GREY)
# The colour of text and lines. Nothing else in a picture has just this colour.
_INK: Final = "#1f2328"
_ADAPTING: Final = f"svg{{color:{_INK}}}@media (prefers-color-scheme:dark){{svg{{color:#e6e8eb}}}}"


@dataclass(frozen=True, slots=True)
class Plot:
    """One picture that can be drawn.

    name: the name of its files.
    title: the heading above it.
    told: what it shows, in a sentence, for those who cannot see it.
    draw: draws it on a figure.
    size: width and height in inches.
    """

    name: str
    title: str
    told: str
    draw: "Callable[[Figure], None]"
    size: tuple[float, float] = (6.4, 3.6)

    def svg(self) -> bytes:
        """Return the picture as SVG: transparent, with text and lines in the page's colour.

        Raises:
            InputError: matplotlib is not installed.
        """
        return _light_or_dark(self._render("svg"))

    def png(self) -> bytes:
        """Return the picture as PNG, on white.

        Raises:
            InputError: matplotlib is not installed.
        """
        return self._render("png")

    def save(self, folder: Path, svg: bytes | None = None) -> list[Path]:
        """Write NAME.svg and NAME.png, and return their paths.

        svg: what `svg` returned, so that it is not drawn again.

        Raises:
            InputError: the folder cannot be written, or matplotlib is not installed.
        """
        paths = [folder / f"{self.name}.svg", folder / f"{self.name}.png"]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path, content in zip(paths, (svg or self.svg(), self.png()), strict=True):
                path.write_bytes(content)
        except OSError as error:
            raise InputError(f"cannot write in {folder}: {error.strerror or error}") from None
        return paths

    def _render(self, kind: str) -> bytes:
        with _style():
            # pyplot would choose a display and keep figures that must be closed.
            from matplotlib.figure import Figure

            figure = Figure(figsize=self.size, layout="constrained")
            self.draw(figure)
            out = io.BytesIO()
            # Without a date the same run gives the same file.
            metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
            figure.savefig(out, format=kind, dpi=144, transparent=kind == "svg", metadata=metadata)
        return out.getvalue()


def plain_label(text: str, limit: int = 40) -> str:
    """Return a text as a label: one line, nothing that steers, not too long."""
    line = " ".join(safe_text(text).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


@contextmanager
def _style() -> Iterator[None]:
    try:
        import matplotlib
        from matplotlib.rcsetup import cycler
    except ImportError:
        raise InputError(
            "plots need matplotlib; install it with: pip install 'treegen[report]'"
        ) from None
    settings: dict[Any, Any] = {
        "text.color": _INK, "axes.labelcolor": _INK, "axes.edgecolor": _INK,
        "axes.titlecolor": _INK, "xtick.color": _INK, "ytick.color": _INK,
        "legend.labelcolor": _INK, "legend.framealpha": 0.0,
        "figure.facecolor": "white", "axes.facecolor": "white",
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
        "grid.alpha": 0.25, "grid.color": _INK, "axes.axisbelow": True, "axes.titlesize": 11,
        "axes.prop_cycle": cycler(color=CYCLE), "font.size": 10,
        # A dollar sign in a label begins no formula. The salt keeps ids the same in every file.
        "text.parse_math": False, "svg.hashsalt": "treegen",
    }  # fmt: skip
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # Labels may be in any script. A box in place of a letter needs no warning.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


def _light_or_dark(svg: bytes) -> bytes:
    """Return an SVG whose text and lines have the page's colour, without metadata and comments."""
    text = svg.decode("utf-8")
    unread = r"<metadata>.*?</metadata>|<!--.*?-->"  # comments repeat the labels
    text = re.sub(unread, "", text[text.index("<svg") :], flags=re.DOTALL)
    text = text.replace(_INK, "currentColor").replace("</svg>", f"<style>{_ADAPTING}</style></svg>")
    return re.sub(r"\n\s*", "\n", text).encode()
