"""Plots of a run's progress: why and when samples ended, speed, and what sharing saved."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from treegen.report.curves import (
    INVALID,
    OUTCOMES,
    RIGHT,
    SOLVED,
    UNSCORED,
    UNSOLVED,
    WRONG,
    finish_counts,
    lengths,
)
from treegen.report.plots.figures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    SKY,
    Plot,
    draw_legend,
    plain_label,
)
from treegen.report.view import RunView

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS: Final = {
    RIGHT: GREEN,
    WRONG: ORANGE,
    INVALID: GREY,
    UNSCORED: SKY,
    SOLVED: GREEN,
    UNSOLVED: ORANGE,
}


def finish_plot(view: RunView) -> Plot:
    """Return the plot of finish reasons by outcome."""
    counts = finish_counts(view)
    description = "; ".join(f"{reason}: {sum(by.values()):,}" for reason, by in counts.items())

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        reasons = list(counts)
        starts = [0] * len(reasons)
        for name in OUTCOMES:
            values = [counts[reason][name] for reason in reasons]
            if any(values):
                axes.barh(
                    range(len(reasons)), values, left=starts, color=_COLOURS[name], label=name
                )
                starts = [a + b for a, b in zip(starts, values, strict=True)]
        axes.set_yticks(range(len(reasons)), [plain_label(reason) for reason in reasons])
        axes.invert_yaxis()
        axes.set_xlabel(view.unit)
        axes.grid(axis="y", visible=False)
        draw_legend(figure, 4)

    return Plot(
        "finish_reasons",
        f"Why {view.unit} ended",
        description,
        draw,
        (6.4, 1.4 + 0.45 * len(counts)),
    )


def lengths_plot(view: RunView) -> Plot:
    """Return the histogram of lengths by outcome."""
    by_outcome = lengths(view)
    everything = sorted(length for values in by_outcome.values() for length in values)
    middle = everything[len(everything) // 2]

    def draw(figure: "Figure") -> None:
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots()
        names = list(by_outcome)
        # The width of bins is an integer of tokens.
        width = 1 + (everything[-1] - everything[0]) // 30
        bins = range(everything[0], everything[-1] + width + 1, width)
        axes.hist(
            [np.array(by_outcome[name]) for name in names],
            bins=[edge - 0.5 for edge in bins],
            stacked=True,
            color=[_COLOURS[name] for name in names],
            label=names,
        )
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="generated tokens", ylabel=view.unit)
        axes.grid(axis="x", visible=False)
        draw_legend(figure, 4)

    description = f"{everything[0]:,} to {everything[-1]:,} tokens, half of them up to {middle:,}"
    return Plot("lengths", f"How long {view.unit} are", description, draw, (6.4, 3.2))


def timeline_plot(moments: Sequence[Mapping[str, Any]]) -> Plot:
    """Return the plot of tokens per second and rows over time, from a run's timeline."""
    parts = _parts(moments)

    def draw(figure: "Figure") -> None:
        upper, lower = figure.subplots(2, sharex=True)
        begin = 0.0
        for number, part in enumerate(parts, start=1):
            pairs = list(pairwise(part))
            at = [begin + after["seconds"] for _, after in pairs]
            upper.plot(at, [_rate(before, after) for before, after in pairs], color=BLUE)
            times = [begin + moment["seconds"] for moment in part]
            lower.plot(times, [m.get("rows", 0) for m in part], color="C1", label="all")
            begin += part[-1]["seconds"]
            if number < len(parts):
                for axes in (upper, lower):
                    axes.axvline(begin, color=GREY, linestyle=":")
        upper.set_ylabel("tokens/s")
        lower.set_ylabel("rows at once")
        lower.set_xlabel("seconds" + (", dotted where the run was resumed" * (len(parts) > 1)))
        for axes in (upper, lower):
            axes.set_ylim(bottom=0)
        upper.yaxis.set_major_formatter("{x:,.0f}")

    last = [part[-1] for part in parts]
    tokens, seconds = sum(m["tokens"] for m in last), sum(m["seconds"] for m in last)
    description = f"{tokens:,} tokens in {seconds:,.1f} s"
    return Plot("speed", "Tokens per second and rows over time", description, draw, (6.4, 4.0))


def _parts(moments: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return the moments of each part of a run. Each part has its own clock."""
    parts: list[list[Mapping[str, Any]]] = []
    for moment in moments:
        before = parts[-1][-1] if parts else moment
        # If a part was killed before its usage was written, the next part has the same number.
        starts_attempt = moment["part"] != before["part"] or moment["seconds"] < before["seconds"]
        if starts_attempt or not parts:
            parts.append([])
        parts[-1].append(moment)
    return parts


def _rate(before: Mapping[str, Any], after: Mapping[str, Any]) -> float:
    seconds = after["seconds"] - before["seconds"]
    return (after["tokens"] - before["tokens"]) / seconds if seconds > 0 else 0.0


def sharing_plot(usage: Mapping[str, Any]) -> Plot | None:
    """Return the plot of tokens with and without sharing; None before the first sample ended."""
    pairs = [
        (
            "prompt tokens computed",
            usage["prompt_tokens_computed"],
            usage["prompt_tokens_unshared"],
        ),
        (
            "keys read in decode steps",
            usage.get("key_tokens_read", 0),
            usage.get("key_tokens_unshared", 0),
        ),
    ]
    pairs = [(name, shared, unshared) for name, shared, unshared in pairs if shared and unshared]
    if not pairs:
        return None
    description = "; ".join(f"{name}: {a:,} instead of {b:,}" for name, a, b in pairs)

    def draw(figure: "Figure") -> None:
        from matplotlib.ticker import EngFormatter

        axes = figure.subplots()
        for index, (_, shared, unshared) in enumerate(pairs):
            for offset, value, colour, label in (
                (-0.2, shared, GREEN, "with sharing"),
                (0.2, unshared, GREY, "without sharing"),
            ):
                bar = axes.barh(
                    index + offset,
                    value,
                    height=0.36,
                    color=colour,
                    label=label if index == 0 else None,
                )
                axes.bar_label(bar, labels=[f" {value:,}"], fontsize=10)
        axes.set_yticks(range(len(pairs)), [name for name, _, _ in pairs])
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.minorticks_off()
        axes.margins(x=0.2)
        axes.set_xlabel("tokens, logarithmic")
        axes.grid(axis="y", visible=False)
        draw_legend(figure, 2)

    return Plot("sharing", "What sharing saved", description, draw, (6.4, 2.6))
