"""Results of searches against their cost: a table of runs, and curves over tokens."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from treegen.evals.statistics.estimators import Estimate, estimate
from treegen.evals.statistics.metrics import HasGroup, clusters_of
from treegen.report.plots.figures import (
    BLUE,
    Plot,
    choose_style,
    draw_band,
    draw_legend,
    plain_label,
)
from treegen.report.tables import PrintableTable, interval, number
from treegen.report.view import RunView, StoredTree, settings_group

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Names of costs in records, with their column heads.
_COSTS = {
    "tokens_prefilled": "Prefilled",
    "tokens_reprompted": "Without sharing",
    "calls": "Calls",
    "nodes": "Nodes",
    "seconds": "Seconds",
}


def methods_of(views: Sequence[RunView]) -> list[str]:
    """Return the search method of each run, with the settings in which its runs differ."""
    runs = [(_method(view), _settings(view)) for view in views]
    labels = []
    for method, chosen in runs:
        same_method = [settings for other, settings in runs if other == method]
        differ = (
            key for key in chosen if any(other.get(key) != chosen[key] for other in same_method)
        )
        labels.append(" ".join([method, *(f"{key}={chosen[key]}" for key in differ)]))
    return labels


def _method(view: RunView) -> str:
    tree_method = view.trees[0].method if view.trees else "?"
    return str(settings_group(view.info, "search").get("method") or tree_method)


def _settings(view: RunView) -> dict[str, Any]:
    """Return the settings of a run that shape its searches, except their budget."""
    search = dict(settings_group(view.info, "search"))
    arguments = search.pop("arguments", None)
    more = dict(arguments) if isinstance(arguments, Mapping) else {}
    model = {"model": view.info.free.get("model")}
    return {**search, **more, **settings_group(view.info, "draw"), **model}


def budget_of(view: RunView) -> str:
    """Return the limits on the cost of each search of a run."""
    limits = settings_group(view.info, "budget").items()
    texts = (f"{value:,}\N{NO-BREAK SPACE}{name}" for name, value in limits if value is not None)
    return ", ".join(texts) or "none"


def solved_share(
    trees: Sequence[StoredTree],
    max_tokens: float = math.inf,
    *,
    problems: Iterable[HasGroup] = (),
) -> Estimate | None:
    """Return the share of searches solved within a number of tokens, as a mean over problems.

    Several searches of a problem count by their mean. None if nothing is scored.

    Args:
        trees: The searches.
        max_tokens: The largest number of decoded tokens of a search that counts as solved.
        problems: The problems, for intervals clustered by their groups; empty for no clusters.
    """
    solved_of: dict[str, list[bool]] = {}
    for tree in trees:
        if tree.solved is not None:
            solved = tree.solved and tree.num_tokens <= max_tokens
            solved_of.setdefault(tree.problem_id, []).append(solved)
    if not solved_of:
        return None
    return estimate(list(map(fmean, solved_of.values())), clusters_of(problems, list(solved_of)))


def cost_listing(views: Sequence[RunView]) -> PrintableTable | None:
    """Return one line for each search run: its budget, its solutions and its cost."""
    searched = [view for view in views if view.searched and view.trees]
    if not searched:
        return None
    rows = []
    for view, method in zip(searched, methods_of(searched), strict=True):
        solved = solved_share(view.trees, problems=view.problems)
        tokens = [tree.num_tokens for tree in view.trees]
        num_solved = sum(bool(tree.solved) for tree in view.trees)
        rows.append(
            [
                view.name,
                method,
                budget_of(view),
                f"{num_solved:,}/{len(view.trees):,}",
                number(solved.value if solved else None),
                interval(solved.low, solved.high) if solved else "",
                f"{fmean(tokens):,.0f}",
                f"{max(tokens):,}",
                f"{sum(tokens) / num_solved:,.0f}" if num_solved else "n/a",
                *(_cost(view.trees, name) for name in _COSTS),
            ]
        )
    head = [
        "Run",
        "Method",
        "Budget",
        "Solved",
        "Share",
        "95% interval",
        "Tokens",
        "Max",
        "Tokens per solution",
        *_COSTS.values(),
    ]
    return PrintableTable(head, rows, range(3, len(head)), "Budgets and costs", _COSTS_NOTE)


_COSTS_NOTE = (
    "Costs are means per search. Tokens counts decoded tokens, and Max those of the largest "
    "search; Tokens per solution divides the tokens of all searches by the number of solved "
    "searches. Prefilled counts prompt tokens that were computed; Without sharing is what "
    "Prefilled would be if each call computed its whole context: one prompt per call, whatever "
    "its samples.",
)


def _cost(trees: Sequence[StoredTree], name: str) -> str:
    costs = [float(tree.usage[name]) for tree in trees if tree.usage.get(name) is not None]
    if len(costs) < len(trees):
        return ""
    mean = fmean(costs)
    return f"{mean:,.2f}" if name == "seconds" else f"{mean:,.1f}"


def solved_plot(view: RunView) -> Plot | None:
    """Return the plot of searches solved within a number of tokens; None if none is solved."""
    costs = sorted({tree.num_tokens for tree in view.trees if tree.solved})
    solved = solved_share(view.trees, problems=view.problems)
    if not costs or solved is None:
        return None
    # Limit the number of steps in the picture.
    steps = costs if len(costs) <= 200 else [costs[i * len(costs) // 200] for i in range(200)]
    largest = max(tree.num_tokens for tree in view.trees)
    at = sorted({0, *steps, costs[-1], largest})
    shares = [
        share
        for max_tokens in at
        if (share := solved_share(view.trees, max_tokens, problems=view.problems)) is not None
    ]

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        axes.step(at, [s.value for s in shares], where="post", color=BLUE)
        axes.fill_between(
            at,
            [s.low for s in shares],
            [s.high for s in shares],
            step="post",
            color=BLUE,
            alpha=0.15,
            linewidth=0,
        )
        axes.set(xlabel="decoded tokens of a search", ylabel="share of searches")
        axes.set_ylim(-0.02, 1.02)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter("{x:,.0f}")

    half = costs[(len(costs) - 1) // 2]
    description = (
        f"{solved.value:.3f} solved; half of the costs of solutions are up to {half:,} tokens"
    )
    return Plot("solved", "Solved within so many tokens, with 95% intervals", description, draw)


def methods_plot(views: Sequence[RunView]) -> Plot | None:
    """Return solved against tokens: a curve for each method, over the budgets of its runs.

    Runs of a method that differ in other settings have separate curves.
    """
    curves: dict[str, list[tuple[float, Estimate]]] = {}
    searched = [view for view in views if view.searched and view.trees]
    for view, method in zip(searched, methods_of(searched), strict=True):
        if (solved := solved_share(view.trees, problems=view.problems)) is not None:
            tokens = fmean([float(tree.num_tokens) for tree in view.trees])
            curves.setdefault(method, []).append((tokens, solved))
    if sum(map(len, curves.values())) < 2:
        return None
    for points in curves.values():
        points.sort(key=lambda point: point[0])
    description = "; ".join(
        f"{name}: {', '.join(f'{s.value:.3f} with {tokens:,.0f}' for tokens, s in points)} tokens"
        for name, points in curves.items()
    )

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for index, (name, points) in enumerate(curves.items()):
            x = [tokens for tokens, _ in points]
            shares = [share for _, share in points]
            style = choose_style(index)
            draw_band(axes, x, shares, label=plain_label(name), alpha=0.12, markersize=5, **style)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.set_minor_formatter("{x:,.0f}")
        axes.tick_params(axis="x", which="both", labelsize=10, rotation=30)
        axes.set(xlabel="decoded tokens per search, in the mean", ylabel="share of problems solved")
        axes.set_ylim(-0.02, 1.02)
        draw_legend(figure, 4)

    title = "Solved against tokens by method, with 95% intervals"
    return Plot("methods_over_tokens", title, description, draw, (6.4, 4.2))
