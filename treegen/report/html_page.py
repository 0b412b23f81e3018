"""One HTML page for one or more runs. It is self-contained, and fast with 50,000 samples."""

import base64
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from treegen.common.files import file_name, write_output
from treegen.common.formatting import safe_text
from treegen.common.lifetimes import freeze_gc
from treegen.common.version import VERSION
from treegen.errors import InputError, require_extra
from treegen.report.audit.findings import Audit
from treegen.report.compare import Comparison
from treegen.report.curves import k_curves
from treegen.report.html_page_data import build_page_data
from treegen.report.plots.figures import Picture, Plot
from treegen.report.plots.runs import comparison_plots, curves_plot, metric_plot, run_plots
from treegen.report.plots.searches import cost_listing, methods_plot
from treegen.report.run_settings import KeySettings, describe_view, differing_columns
from treegen.report.tables import cards, headline_of, metrics, other_tables, settings, sharing
from treegen.report.view import RunView
from treegen.runs.files import check_no_link

_SCRIPTS: Final = (
    "data.js",
    "elements.js",
    "export.js",
    "address.js",
    "plot_links.js",
    "table.js",
    "tree.js",
    "picture.js",
    "sample_view.js",
    "samples.js",
    "problems.js",
    "searches.js",
    "prompts.js",
    "comparison.js",
    "live.js",
    "main.js",
)


def render_plots(
    views: Sequence[RunView], comparison: Comparison | None
) -> tuple[dict[str, list[Picture]], list[Picture]]:
    """Return the pictures of each run by its key on the page, and those of several runs.

    Args:
        views: The runs.
        comparison: The comparison of the two runs; None draws each run's headline metric.
    """
    pictures = {
        f"run-{number}": [plot.render() for plot in run_plots(view)]
        for number, view in enumerate(views, start=1)
    }
    plots = _plot_runs_together(views) if comparison is None else comparison_plots(comparison)
    return pictures, [plot.render() for plot in plots]


def _plot_runs_together(views: Sequence[RunView]) -> list[Plot]:
    """Return the plots that show several runs together; none for a single run."""
    if len(views) < 2:
        return []
    plots = []
    rows = [(view.name, row) for view in views if (row := headline_of(view)) is not None]
    points = [(n, r.value, r.low, r.high) for n, r in rows if r.value is not None]
    if points:
        names = {row.metric for _, row in rows}
        plots.append(metric_plot(names.pop() if len(names) == 1 else "headline metric", points))
    curves = {
        view.name: k_curves(
            view.verdicts(view.filters[0], fixed=True),
            votes=bool(view.report.majority),
            problems=view.problems,
        )
        for view in views
        if view.filters and view.report is not None
    }
    if curves := {name: run_curves for name, run_curves in curves.items() if run_curves}:
        plots.append(curves_plot(curves))
    if (methods := methods_plot(views)) is not None:
        plots.append(methods)
    return plots


@dataclass(frozen=True, slots=True)
class LivePage:
    """How a page follows runs in progress."""

    version: str
    """The version of the page; the page reloads when the server has another version."""
    every: float
    """Seconds between the page's requests for the version."""


def check_name(path: Path, option: str) -> None:
    """Raise InputError unless the path ends in .html or .htm."""
    if path.suffix not in (".html", ".htm"):
        raise InputError(f"{option} must be a file name that ends in .html, got {path}")


@freeze_gc()
def write_page(
    views: Sequence[RunView],
    path: Path,
    *,
    plots: bool = True,
    comparison: Comparison | None = None,
    audits: Sequence[Audit] = (),
) -> list[Path]:
    """Write the page of some runs, and next to it a folder with its plots.

    Args:
        views: The runs.
        path: The file of the page.
        plots: Whether to write the folder of plots; it is named after the page.
        comparison: The comparison of the two runs, if there are two to compare.
        audits: The audit of each run, if the page shows audits.

    Returns:
        The files.

    Raises:
        InputError: jinja2 or matplotlib is missing, or the files cannot be written.
        RunError: the page is in its run, and a link leads out of the run.
    """
    views = _make_names_unique(views)
    pictures, joint_pictures = render_plots(views, comparison)
    page = _render(views, pictures, joint_pictures, comparison=comparison, audits=audits)
    write_output(path, (piece.encode() for piece in page))
    written = [path]
    folder = path.with_name(f"{path.stem}_plots")
    if path.parent == views[0].path:
        check_no_link(path.parent, folder)
    subfolders = _name_subfolders(views, pictures)
    for key, run_pictures in pictures.items() if plots else ():
        for picture in run_pictures:
            written += picture.save(folder if len(views) == 1 else folder / subfolders[key])
    for picture in joint_pictures if plots else ():
        written += picture.save(folder)
    return written


def _name_subfolders(views: Sequence[RunView], keys: Iterable[str]) -> dict[str, str]:
    """Return the folder of each run's plots: the name of the run, or its key if names are equal.

    Args:
        views: The runs.
        keys: The key of each run on the page.
    """
    # Some file systems do not distinguish upper case from lower case.
    names = [file_name(view.name) for view in views]
    counts = Counter(name.casefold() for name in names)
    return {
        key: name if counts[name.casefold()] == 1 else f"{name}-{key}"
        for key, name in zip(keys, names, strict=True)
    }


@freeze_gc()
def render_page(views: Sequence[RunView], *, live: LivePage | None = None) -> str:
    """Return the page of some runs; with `live`, a page that a server updates.

    Raises:
        InputError: jinja2 or matplotlib is missing.
    """
    views = _make_names_unique(views)
    return "".join(_render(views, *render_plots(views, None), live=live))


def _make_names_unique(views: Sequence[RunView]) -> list[RunView]:
    """Return the runs with unique names.

    Equal names are prefixed by the parent folder. Names that are still equal get a number.
    """
    counts = Counter(view.name for view in views)
    seen: Counter[str] = Counter()
    renamed = []
    for view in views:
        above = view.path.resolve().parent.name
        name = view.name if counts[view.name] == 1 else f"{above}/{view.name}"
        seen[name] += 1
        if seen[name] > 1:
            name = f"{name} ({seen[name]})"
        renamed.append(view if name == view.name else replace(view, name=name))
    return renamed


def _render(
    views: Sequence[RunView],
    pictures: dict[str, list[Picture]],
    joint_pictures: Sequence[Picture],
    *,
    comparison: Comparison | None = None,
    live: LivePage | None = None,
    audits: Sequence[Audit] = (),
) -> Iterable[str]:
    """Return the pieces of the page. A piece contains at most one part of the data."""
    with require_extra("reports need jinja2", "report"):
        import jinja2
        from markupsafe import Markup

    def finalize(value: Any) -> Any:
        # Write out control characters in all values that the template prints; jinja escapes HTML.
        return value if isinstance(value, Markup) else safe_text(str(value))

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_read_page_file),
        autoescape=True,
        finalize=finalize,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    style = _read_page_file("style.css")
    script = "".join(_read_page_file(name) for name in _SCRIPTS)
    names = [view.name for view in views]
    return environment.get_template("page.html.jinja").generate(
        title=_title(names, views[0].task, comparison),
        live=live,
        version=VERSION,
        style=Markup(style),
        style_hash=_hash_for_csp(style),
        script=Markup(script),
        script_hash=_hash_for_csp(script),
        runs=[
            _describe_run(view, key, pictures[key], audit)
            for key, view, audit in zip_longest(pictures, views, audits)
        ],
        overview=_describe_overview(views, joint_pictures),
        comparison=None if comparison is None else comparison.listing(all_filters=True),
        blobs=(
            blob
            for key, view in zip(pictures, views, strict=True)
            for blob in build_page_data(
                view, key, {p.plot.name: p.links for p in pictures[key] if p.links}
            )
        ),
    )


def _title(names: Sequence[str], task: str, comparison: Comparison | None) -> str:
    if comparison is not None:
        return f"{task}: {comparison.b} compared with {comparison.a}"
    return f"{task}: {names[0]}" if len(names) == 1 else f"{len(names)} runs"


def _read_page_file(name: str) -> str:
    return files("treegen.report").joinpath("page", name).read_text(encoding="utf-8")


def _hash_for_csp(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _describe_run(
    view: RunView, key: str, plots: Sequence[Picture], audit: Audit | None
) -> dict[str, Any]:
    """Return the template's data of one run.

    Args:
        view: The run.
        key: Its key on the page.
        plots: Its pictures.
        audit: Its audit, if the page shows it.
    """
    done = f"{view.num_done:,} {view.unit} of {len(view.problems):,} problems"
    source = f" ({view.source})" if view.source else ""
    section = {
        "key": key,
        "name": view.name,
        "address": urlencode({"run": safe_text(view.name)}),
        "what": describe_view(view),
        "subtitle": f"{done}{source}; begun {view.info.created}",
        "notices": view.notices,
        "cards": cards(view),
        "plots": plots,
        "metrics": metrics(view, first=True),
        "more_metrics": metrics(view, first=False),
        "tables": [*other_tables(view), *(audit.tables() if audit is not None else ())],
        "sharing": sharing(view),
        "costs": cost_listing([view]),
        "has_samples": view.num_done > 0,
        # Searches have their own table, with the same content if each problem has one search.
        "has_problems": view.num_done > 0 and (not view.searched or view.num_samples > 1),
        "unit": view.unit,
        "has_prompts": view.num_done > 0 and not view.searched,
        "has_votes": view.votes,
        "has_trees": bool(view.trees),
        "settings": settings(view),
    }
    return {**section, "contents": list(_contents(section))}


def _contents(section: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the id and the title of each part of a run's section, in the order of the template."""
    if section["metrics"].rows:
        yield "metrics", "Metrics"
    for number, table in enumerate(section["tables"], 1):
        yield f"table-{number}", table.title[:1].upper() + table.title[1:]
    for field, id, title in (
        ("has_problems", "problems", "Problems"),
        ("has_trees", "trees", "Search trees"),
        ("has_samples", "drawn", section["unit"].capitalize()),
        ("plots", "plots", "Plots"),
        ("costs", "costs", section["costs"].title if section["costs"] else ""),
        ("sharing", "sharing", "What sharing did"),
        ("has_prompts", "prompts", "Prompt tree"),
    ):
        if section[field]:
            yield id, title
    yield "settings", "Settings"


def _describe_overview(
    views: Sequence[RunView], joint_pictures: Sequence[Picture]
) -> dict[str, Any]:
    labels = list(dict.fromkeys(card.label for view in views for card in cards(view)))
    key_settings = [KeySettings.of(view) for view in views]
    differing = differing_columns(key_settings)
    differing.pop("model", None)  # it has a column of its own
    rows = []
    for number, (view, own_settings) in enumerate(zip(views, key_settings, strict=True)):
        values = {card.label: card.value for card in cards(view)}
        rows.append(
            [
                view.name,
                view.task,
                own_settings.model,
                *(column[number] for column in differing.values()),
                *(values.get(label, "") for label in labels),
            ]
        )
    head = ["Run", "Task", "Model", *differing]
    return {
        "head": [*head, *labels],
        "rows": rows,
        "numbers": range(len(head), len(head) + len(labels)),
        "plots": joint_pictures,
        "costs": cost_listing(views),
        # Only pictures of two runs have links, by the index of the problem in the first run.
        "links": {
            p.plot.name: [link.to_json() for link in p.links] for p in joint_pictures if p.links
        },
    }
