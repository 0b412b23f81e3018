"""Draw docs/speed.svg and docs/tree.svg: `python docs/charts.py`. Speeds come from figures.json."""

import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

_HERE = Path(__file__).parent
_COLOURS = {
    "treegen": "#00796b",
    "vLLM 0.26.0": "#8d9aa5",
    "SGLang 0.5.17": "#c3a26b",
}
# A white sheet, so that the pictures read alike on light and on dark pages.
_SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
    'height="{height}" font-family="system-ui, sans-serif" font-size="13" fill="#202428">\n'
    '<rect width="100%" height="100%" rx="8" fill="#ffffff"/>\n{body}\n</svg>\n'
)


def text(x: float, y: float, words: str, more: str = "") -> str:
    """Return one line of text, its baseline at y."""
    return f'<text x="{x:g}" y="{y:g}"{" " + more if more else ""}>{escape(words)}</text>'


def speed(figures: dict[str, Any]) -> str:
    """Return bars of the median tokens per second with their ranges; each job has its own scale."""
    width, bar, left = 760, 22, 130
    parts, y = (
        [
            text(
                20,
                28,
                "Decoded tokens per second: median (range) of 3 runs",
                'font-size="16" font-weight="600"',
            )
        ],
        60,
    )
    for job in figures["jobs"]:
        parts += [
            text(20, y, job["title"], 'font-weight="600"'),
            text(
                width - 20, y, job["work"], 'text-anchor="end" fill="#5c666f"'
            ),
        ]
        scale = (width - left - 210) / max(each["high"] for each in job["bars"])
        for each in job["bars"]:
            y += bar + 6
            engine, value = each["engine"], each["tokens_per_second"]
            low, high = each["low"], each["high"]
            runs = "1 run" if low == high else f"{low:,}-{high:,}"
            parts += [
                text(left - 10, y, engine, 'text-anchor="end"'),
                f'<rect x="{left}" y="{y - 16}" width="{scale * value:.1f}" height="{bar}" rx="3" '
                f'fill="{_COLOURS[engine]}"/>',
                f'<path d="M{left + scale * low:.1f} {y - 5} H{left + scale * high:.1f}" '
                'stroke="#202428" stroke-width="2"/>',
                text(left + scale * high + 8, y, f"{value:,} ({runs})"),
            ]
        y += 40
    parts.append(
        text(
            20,
            y - 6,
            f"{figures['device']}; each job has its own scale",
            'fill="#5c666f"',
        )
    )
    return _SVG.format(width=width, height=y + 10, body="\n".join(parts))


def tree() -> str:
    """Return the tree of an eval: examples above problems above samples, and who reads what."""
    boxes: list[tuple[float, float, float, str, str]] = [
        (250, 20, 260, "#00796b", "8 few-shot examples, 900 tokens"),
        (40, 100, 190, "#26a69a", "problem 1, 100 tokens"),
        (285, 100, 190, "#26a69a", "problem 2, 100 tokens"),
        (530, 100, 190, "#26a69a", "problem 50, 100 tokens"),
    ]
    lines = [
        f'<path d="M380 56 L{x} 100" stroke="#8d9aa5"/>'
        for x in (135, 380, 625)
    ]
    parts = []
    for x, y, wide, colour, words in boxes:
        parts += [
            f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="36" rx="6" fill="{colour}"/>',
            text(
                x + wide / 2,
                y + 23,
                words,
                'text-anchor="middle" fill="#ffffff"',
            ),
        ]
        if y == 20:
            continue
        for i in range(4):
            at = x + 4 + i * 49
            lines.append(
                f'<path d="M{x + wide / 2:g} 136 L{at + 17:g} 176" stroke="#8d9aa5"/>'
            )
            parts += [
                f'<rect x="{at:g}" y="176" width="34" height="24" rx="4" fill="#dfe6e8"/>',
                text(
                    at + 17,
                    192,
                    ["1", "2", "3", "40"][i],
                    'text-anchor="middle"',
                ),
            ]
    parts += [
        text(502, 122, "..."),
        text(380, 232, "An ordinary engine reads 1,000 prompt tokens for each of 2,000 samples "
             "in every step: 2,000,000.", 'text-anchor="middle" fill="#5c666f"'),
        text(380, 254, "treegen reads each shared prompt once: 900 + 50 x 100 = 5,900.",
             'text-anchor="middle" font-weight="600"'),
    ]  # fmt: skip
    return _SVG.format(width=760, height=272, body="\n".join(lines + parts))


def draw() -> dict[str, str]:
    """Return each picture by its file name."""
    figures = json.loads((_HERE / "figures.json").read_text(encoding="utf-8"))
    return {"speed.svg": speed(figures), "tree.svg": tree()}


if __name__ == "__main__":
    for name, picture in draw().items():
        (_HERE / name).write_text(picture, encoding="utf-8")
