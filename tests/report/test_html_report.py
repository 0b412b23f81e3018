"""Reports as files: what a page holds, what is left out, and what is refused."""

import base64
import errno
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Command, results_of, write_jsonl
from report_cases import HOSTILE, make_run, make_search_run, make_timeline, make_trees

from treegen.common.formatting import safe_text
from treegen.errors import InputError
from treegen.evals.problem import Problem
from treegen.evals.progress.usage import load_attempts, read_timeline
from treegen.evals.scoring.results import write_results
from treegen.evals.statistics.estimators import pass_at_k
from treegen.evals.statistics.metrics import ReportOptions
from treegen.evals.statistics.tables import Grid, Table, table_by
from treegen.evals.verdict import SampleScore
from treegen.report.curves import choose_ks, finish_counts, k_curves, vote_shares
from treegen.report.html_page import write_page
from treegen.report.load import load_run
from treegen.report.plots.figures import Plot
from treegen.report.plots.progress import sharing_plot
from treegen.report.plots.runs import curves_plot, run_plots
from treegen.report.view import RunView
from treegen.runs.record_format import encode_record
from treegen.tasks.gsm8k import GSM8K


class Reader(HTMLParser):
    """Counts the elements of a page and keeps what its scripts and headings hold."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.scripts: dict[str, str] = {}
        self.attributes: list[tuple[str, str | None]] = []
        self._script: str | None = None
        self.style = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] += 1
        self.attributes += attrs
        if tag in ("script", "style"):
            self._script = dict(attrs).get("id") or tag

    def handle_endtag(self, tag: str) -> None:
        self._script = None

    def handle_data(self, data: str) -> None:
        if self._script:
            self.scripts[self._script] = self.scripts.get(self._script, "") + data

    def blob(self, name: str) -> Any:
        """What one embedded part says."""
        return json.loads(gzip.decompress(base64.b64decode(self.scripts[name])))


def report(treegen: Command, path: Path, *more: object) -> Reader:
    """Write the page of a run and read it."""
    done = treegen("report", path, "--no-plots", *more)
    assert done.code == 0, done.err
    return Reader(Path(done.document["page"]))


# The page


@pytest.mark.usefixtures("undrawn")
def test_a_page_needs_nothing_but_itself(treegen: Command, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    page = report(treegen, run)
    links = [value or "" for name, value in page.attributes if name in ("src", "href", "srcset")]
    assert links and all(re.match("data:|#", link) for link in links)
    assert not page.counts["link"] and not page.counts["iframe"]
    policy = next(v for _, v in page.attributes if v and v.startswith("default-src 'none'"))
    for name in ("script", "style"):
        digest = hashlib.sha256(page.scripts[name].encode()).digest()
        assert f"{name}-src 'sha256-{base64.b64encode(digest).decode()}'" in policy
    assert "unsafe" not in policy


@pytest.mark.usefixtures("undrawn")
def test_every_sample_is_in_the_page_as_it_is_safe_to_look_at(
    treegen: Command, tmp_path: Path
) -> None:
    run = make_run(
        tmp_path / "run",
        num_problems=len(HOSTILE),
        num_samples=2,
        draw=lambda rng, number, index: HOSTILE[number] * (index + 1),
        questions=HOSTILE[:6],
    )
    make_trees(run, text=HOSTILE[1])
    page = report(treegen, run)
    index = page.blob("run-1-index")
    parts = [n for n in page.scripts if n.startswith("run-1-texts-")]
    texts = [text for name in parts for text in page.blob(name)]
    assert len(parts) == len(index["text_starts"]) > 1
    samples = list(load_run(run).samples)
    assert texts == [safe_text(sample.text) for sample in samples]
    assert index["samples"]["tokens"] == [sample.num_tokens for sample in samples]
    # None of the texts is anywhere as markup, and every element is one of the template's.
    whole = (run / "report.html").read_text(encoding="utf-8")
    for text in (*HOSTILE[:3], "\x1b", "\u202e", "\x9b"):
        assert text not in whole
    assert page.counts["script"] == 1 + len(page.scripts) - 2


@pytest.mark.usefixtures("undrawn")
def test_a_page_has_the_numbers_of_results_json(
    treegen: Command, finished: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    report(treegen, run)
    page = (run / "report.html").read_text(encoding="utf-8")
    results = results_of(run)
    for row in results["report"]["metrics"]:
        assert row["metric"] in page and f"{row['value']:.3f}" in page
    usage = results["usage"]
    assert f"{usage['prompt_tokens_computed']:,} instead of" in page
    read, apart = usage["key_tokens_read"], usage["key_tokens_unshared"]
    assert f"Keys read in decode steps: {read:,} tokens" in page and f"{apart:,}" in page
    levels = usage["plan"]["levels"]
    assert (levels[0]["rows"], levels[0]["segments"]) == (20, 1)
    assert sum(level["tokens"] for level in levels) == usage["prompt_tokens_computed"]
    assert all(reason in page for level in levels for reason in level["reasons"])
    assert "What sharing did" in page
    # A run of a moment has no course to plot.
    assert ("Tokens per second" in page) == (len(read_timeline(run)) > 2)


def test_scoring_again_keeps_the_usage(treegen: Command, finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    before = results_of(run)
    assert treegen("score", run, "-q").code == 0
    assert results_of(run)["usage"] == before["usage"]
    moments = read_timeline(run)
    assert moments[-1]["tokens"] == before["usage"]["decoded_tokens"]
    assert moments[-1]["done"] == 20 and {m["part"] for m in moments} == {0}
    assert all(sum(m["level_rows"][:1]) <= 20 for m in moments)


@pytest.mark.usefixtures("undrawn")
def test_scratch_files_of_a_killed_report_are_removed(treegen: Command, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for name in ("report.html.123.tmp", "other.html.123.tmp"):
        (run / name).write_text("<html>")
    (run / "report_plots").mkdir()
    for name in ("votes.png.123.tmp", "votes.png"):
        (run / "report_plots" / name).write_text("half a picture")
    treegen("report", run, "-o", run / "report.html")
    assert [file.name for file in run.rglob("*.tmp")] == ["other.html.123.tmp"]
    assert (run / "report_plots" / "votes.png").read_bytes()[:4] == b"\x89PNG"


def test_a_picture_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "votes.png").write_text("before")
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(InputError, match="No space left"):
        Plot("votes", "Votes", "nothing", lambda figure: None).render().save(tmp_path)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [
        ("votes.png", "before")
    ]


def test_a_torn_timeline_is_read_to_its_end(tmp_path: Path) -> None:
    make_timeline(tmp_path)
    whole = read_timeline(tmp_path)
    file = tmp_path / "progress.jsonl"
    file.write_bytes(file.read_bytes()[:-20] + b'\n[1]\n\xff\n{"part": 1}')
    assert read_timeline(tmp_path) == whole[:-1]
    assert read_timeline(tmp_path / "nowhere") == []


def test_corrupt_lines_of_a_timeline_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "progress.jsonl"
    good = {"part": 0, "seconds": 1.5, "done": 1, "tokens": 9, "rows": 3, "level_rows": [1, 2]}
    odd: list[Any] = [None, "1", [[]], {}, -1]
    wrong: list[Any] = [{**good, name: bad} for name in good for bad in odd]
    wrong += [{**good, "level_rows": [[1]]}, {**good, "seconds": 10**30}, 5, [good], {"part": 0}]
    write_jsonl(file, [good, *wrong, good])
    assert read_timeline(tmp_path) == [good, good]
    file.write_bytes(b'\xff\n{"part": 0, "seconds": NaN, "tokens": 1}\n' + b"[" * 100_000)
    assert read_timeline(tmp_path) == []


def test_plots_are_written_beside_the_page(treegen: Command, tmp_path: Path) -> None:
    done = treegen("report", make_run(tmp_path / "run", num_problems=6, num_samples=4))
    names = {Path(path).name for path in done.document["plots"]}
    assert {"metrics_over_k.svg", "metrics_over_k.png", "votes.png", "lengths.svg"} <= names
    for path in map(Path, done.document["plots"]):
        start = path.read_bytes()[:8]
        assert start == (b"\x89PNG\r\n\x1a\n" if path.suffix == ".png" else b"<svg xml")
    # With one sample of each problem there is little to draw.
    runs = [
        make_run(tmp_path / f"run-{seed}", seed=seed, num_problems=3, num_samples=1)
        for seed in range(2)
    ]
    both = treegen("report", *runs, "-o", tmp_path / "all" / "both.html")
    folders = {Path(path).parent.relative_to(tmp_path) for path in both.document["plots"]}
    top = Path("all/both_plots")
    assert folders == {top, top / "run-0", top / "run-1"}
    assert "--html FILE.html" in (tmp_path / "all" / "both.html").read_text("utf-8")
    equal = [make_run(tmp_path / name / "a", num_problems=3, num_samples=1) for name in "xy"]
    named = treegen("report", *equal, "-o", tmp_path / "equal.html")
    names = {Path(path).parent.name for path in named.document["plots"]}
    assert names == {"equal_plots", "x_a", "y_a"}
    none = treegen("report", runs[1], "--no-plots")
    assert none.document["plots"] == [] and not (runs[1] / "report_plots").exists()


def test_the_same_run_gives_the_same_page(treegen: Command, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_problems=2, num_samples=2)
    report(treegen, run)
    first = (run / "report.html").read_bytes()
    report(treegen, run)
    assert (run / "report.html").read_bytes() == first


@pytest.mark.usefixtures("undrawn")
def test_several_runs_stand_on_one_page(treegen: Command, tmp_path: Path) -> None:
    for seed in range(3):
        make_run(tmp_path / "runs" / f"run-{seed}", seed=seed, num_samples=1 + 2 * seed)
    page = report(treegen, tmp_path / "runs", "-o", tmp_path / "page.html")
    assert page.counts["article"] == 3
    assert {"run-1-index", "run-2-index", "run-3-index"} <= page.scripts.keys()


def test_grids_and_tables_of_a_task_are_drawn(tmp_path: Path) -> None:
    view = load_run(make_run(tmp_path / "run"))
    assert view.report is not None
    values = {f"p{i}": i / 11 for i in range(12)}
    tables = (
        table_by("by depth", "Depth", [("near", ["p0", "p9"]), ("far", [])], values),
        Table("of its own", ("What", "Number"), (("x", 3), ("y", None))),
    )
    grid = Grid("map $x$", "depth", ("0%", "50%"), "length", ("1", "2"), ((0.5, None), (1.0, 0.0)))
    view = replace(view, report=replace(view.report, tables=tables, grids=(grid,)))
    plots = {plot.name: plot for plot in run_plots(view)}
    assert "near (2): 0.409" in plots["table_1"].description and "table_2" not in plots
    assert plots["heat_map_1"].description == "3 cells from 0.00 to 1.00"
    assert all(plot.png()[:4] == b"\x89PNG" for plot in plots.values() if "_1" in plot.name)
    write_page([view], tmp_path / "page.html", plots=False)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count(">Of its own</h2>") == 1 and "<td>near</td>" in page


def test_accuracy_by_steps_needs_problems_that_differ_in_steps() -> None:
    task = GSM8K()
    problems = [
        Problem(f"p{i}", "?", "1", {"solution": "so it is\n" * (1 + i % 3) + "#### 1"})
        for i in range(6)
    ]
    scores = [
        SampleScore(p.id, 0, "stop", task.score(p, f"The answer is {1 + (i > 3)}."))
        for i, p in enumerate(problems)
    ]

    def tables(problems: list[Problem]) -> tuple[Table, ...]:
        ids = [problem.id for problem in problems]
        options = ReportOptions(problem_ids=ids, num_samples=1, problems=problems)
        return task.aggregate([s for s in scores if s.problem_id in ids], options).tables

    (table,) = tables(problems)
    assert [row[:3] for row in table.rows] == [("1", 2, 1.0), ("2", 2, 0.5), ("3", 2, 0.5)]
    assert tables(problems[::3]) == tables([]) == ()


@pytest.mark.usefixtures("undrawn")
def test_searches_are_shown_and_compared(treegen: Command, tmp_path: Path) -> None:
    run = make_search_run(tmp_path / "a")
    other = make_search_run(tmp_path / "b", seed=1)
    page = report(treegen, run)
    index = page.blob("run-1-index")
    assert len(index["trees"]) == 12 and index["filters"][0]["name"] == "solved"
    first = page.blob("run-1-trees-0")[0]
    view = load_run(run)
    assert [node["text"] for node in first["nodes"]] == [n["text"] for n in view.trees[0].nodes]
    assert first["best"] == sorted(node["id"] for node in view.trees[0].path)
    solved = [bool(tree.solved) for tree in view.trees]
    assert view.report is not None
    assert view.report.value("solved", "solved") == pytest.approx(sum(solved) / 12)
    shown = treegen("show", run)
    assert "|Search|Solved|" in shown.out and "|Right|" not in shown.out
    assert "prompt tokens computed: 1,080 instead of 10,800" in shown.out
    # Five examples come with the puzzles.
    assert "|     5|solved|" in shown.out and "12 of 12 searches" in shown.out
    tables = shown.out.rpartition("\n{")[0]
    assert "prefill" not in tables and "samples" not in tables
    one = treegen("show", run, "-p", view.problems[0].id).out
    assert f"--- search: {'solved' if solved[0] else 'unsolved'}, " in one
    assert (index["unit"], index["statuses"]) == ("searches", ["unsolved", "solved"])
    assert set(index["filters"][0]["status"]) == {"0", "1"}
    text = (run / "report.html").read_text(encoding="utf-8")
    assert "Why searches ended" in text and "12 searches of 12 problems" in text
    assert ">Searches</h2>" in text and ">Samples</h2>" not in text
    (counts,) = finish_counts(view).values()
    assert counts["invalid"] == counts["wrong"] == 0 and counts["solved"] == sum(solved)
    found = treegen("compare", run, other).document["differences"]
    assert [row["filter"] for row in found] == ["solved"] and "p-value" in found[0]["method"]
    both = report(treegen, tmp_path, "-o", tmp_path / "both.html")
    assert both.counts["article"] == 2


@pytest.mark.usefixtures("undrawn")
def test_an_invalid_search_tree_is_an_error(treegen: Command, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_problems=2)
    tree = "the tree of problem 'p0' cannot be read"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"parent_id": None}, tree),
        ({"parent_id": 20}, tree),
        ({"id": 2}, tree),
        ({"parent_id": "0"}, "corrupt line (parent_id"),
    ]
    for change, message in cases:
        (record,) = make_trees(run, num_trees=1)
        record["nodes"][3].update(change)
        (run / "trees.jsonl").write_bytes(encode_record(record))
        error = treegen("report", run).error
        assert message in error, change


@pytest.mark.usefixtures("undrawn")
def test_the_run_among_the_examples_is_shown_as_it_was(
    treegen: Command, repository: Path, tmp_path: Path
) -> None:
    run = repository / "examples" / "run"
    view = load_run(run)
    assert view.notices == () and view.num_done == view.info.planned
    assert (
        json.loads(json.dumps(view.report and view.report.to_json())) == results_of(run)["report"]
    )
    page = report(treegen, run, "-o", tmp_path / "page.html")
    assert page.counts["img"] >= 8
    # Larger files would be a burden on everyone who gets the sources.
    assert sum(file.stat().st_size for file in run.iterdir()) < 600_000


# What is missing


def test_a_run_without_samples_has_a_page(treegen: Command, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_problems=3, done=[0, 0, 0])
    done = treegen("report", run)
    assert done.code == 0 and "24 of 24 samples are not drawn yet\n" in done.err
    page = Reader(run / "report.html")
    assert page.counts["img"] == 0 and page.counts["article"] == 1


def test_sharing_is_drawn_once_a_sample_has_ended() -> None:
    usage = {"prompt_tokens_computed": 700, "prompt_tokens_unshared": 0}
    assert sharing_plot(usage) is None
    assert sharing_plot({**usage, "prompt_tokens_unshared": 1400}) is not None


@pytest.mark.parametrize(("problems", "samples"), [(1, 1), (1, 5), (5, 1), (3, 2)])
def test_small_runs_have_a_page(
    treegen: Command, tmp_path: Path, problems: int, samples: int
) -> None:
    run = make_run(tmp_path / "run", num_problems=problems, num_samples=samples)
    assert report(treegen, run).counts["img"] >= 1


@pytest.mark.usefixtures("undrawn")
def test_a_run_under_way_has_a_page(treegen: Command, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_problems=4, num_samples=6, done=[6, 3, 1, 0])
    with (run / "samples.jsonl").open("ab") as file:
        file.write(b'{"problem_id":"p3","sam')
    done = treegen("report", run)
    assert done.code == 0 and "14 of 24 samples are not drawn yet" in done.err
    assert "unfinished" in done.err


@pytest.mark.usefixtures("undrawn")
def test_a_run_without_its_data_file_is_shown_without_scores(
    treegen: Command, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run")
    data = tmp_path / "run-data.jsonl"
    moved = shutil.move(data, tmp_path / "moved.jsonl")
    done = treegen("report", run)
    assert done.code == 1 and "Error: " in done.err
    assert "the samples are not scored" in done.err
    assert done.err.endswith("; if the file has moved, pass its new path with --data\n")
    similar = tmp_path / "run-dat.jsonl"
    shutil.copy(moved, similar)
    assert "did you mean 'run-dat.jsonl'? If the file has moved, " in treegen("score", run).error
    similar.unlink()
    exported = treegen("export", run, "--to", "lm-eval", "-q")
    assert exported.code == 1 and "pass its new path with --data" in exported.err
    compared = treegen("compare", run, run)
    assert compared.code == 2 and "cannot be compared: the problems cannot be read" in compared.err
    assert "pass its new path with --data" in compared.err
    for words in (("certify",), ("score",), ("eval", "--resume")):
        done = treegen(*words, run)
        assert done.code == 2 and done.error.endswith("pass its new path with --data")
        named = treegen(*words, run, "--data", tmp_path / "nowhere.jsonl")
        assert named.code == 2 and "pass its new path" not in named.err
    index = Reader(run / "report.html").blob("run-1-index")
    assert index["filters"] == [] and len(index["samples"]["tokens"]) == 96
    assert len(index["prompts"]) == 13
    assert treegen("report", run, "--data", moved, "-q").err == ""
    shutil.copy(moved, run / data.name)
    assert load_run(run).filters and load_run(run).notices == ()
    assert Reader(run / "report.html").blob("run-1-index")["filters"]
    lines = Path(moved).read_text().replace("What is 3", "What was 3")
    Path(moved).write_text(lines)
    assert "are not the problems of" in treegen("report", run, "--data", moved).error


def test_stored_metrics_are_shown_without_the_data_file(treegen: Command, tmp_path: Path) -> None:
    from treegen.evals.config.eval_settings import resolve_eval_settings, stored_choices
    from treegen.evals.job import load_job
    from treegen.runs import RunDir

    run = make_run(tmp_path / "run")
    with RunDir.open(run) as opened:
        job = load_job(resolve_eval_settings({}, stored_choices(opened.info)))
        write_results(job, opened)
        assert load_attempts(opened) == []
    report_before = load_run(run).report
    (tmp_path / "run-data.jsonl").unlink()
    assert load_run(run).report == report_before


@pytest.mark.parametrize("name", ["report", "show", "compare"])
def test_reports_of_paths_without_a_run_are_errors(
    treegen: Command, tmp_path: Path, name: str
) -> None:
    args = [tmp_path / "gone"] * (2 if name == "compare" else 1)
    assert "there is no run directory" in treegen(name, *args).error
    (tmp_path / "empty").mkdir()
    args = [tmp_path / "empty"] * len(args)
    assert "has no run.json" in treegen(name, *args).error


@pytest.mark.usefixtures("undrawn")
def test_a_page_path_that_cannot_be_written_is_an_error(treegen: Command, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_problems=2)
    assert "ends in .html" in treegen("report", run, "-o", tmp_path / "page.pdf").error
    assert "cannot write" in treegen("report", run, "-o", run / "run.json" / "page.html").error


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_a_missing_library_is_named(
    treegen: Command, tmp_path: Path, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", num_problems=2)
    for name in [n for n in sys.modules if n.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    error = treegen("report", run).error
    assert missing in error and "pip install '.[report]'" in error


def test_reports_do_not_import_torch(tmp_path: Path) -> None:
    runs = [str(make_run(tmp_path / f"run-{seed}", num_problems=3, seed=seed)) for seed in range(2)]
    commands = [["show", runs[0]], ["report", runs[0], "--no-plots"]]
    commands.append(["compare", *runs, "--no-plots"])
    code = (
        "import sys\nfrom treegen.cli.main import cli\n"
        f"for args in {commands!r}:\n"
        "    try:\n        cli.main(args)\n"
        "    except SystemExit as done:\n        assert not done.code\n"
        "    assert not {'torch', 'transformers', 'datasets'} & set(sys.modules), args\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# Numbers behind the plots


def test_a_legend_of_many_runs_stands_above_the_axes(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path / "run", num_problems=3, num_samples=4))
    curves = k_curves(run.verdicts("numeric"))
    names = [f"gsm8k-demo-20261130-1344{number}-16197" for number in range(10, 22)]
    one, many = (
        curves_plot(dict.fromkeys(names[:num], curves)).render() for num in (1, len(names))
    )
    assert one.width == many.width and many.height > 2 * one.height


def test_curves_of_many_runs_look_different(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    curves = k_curves(load_run(make_run(tmp_path / "run")).verdicts("numeric"))
    figure = Figure()
    curves_plot({f"run {number}": curves for number in range(20)}).draw(figure)
    looks = {
        (line.get_color(), line.get_marker(), line.get_linestyle())
        for line in figure.axes[0].get_lines()
        if not str(line.get_label()).startswith("_")  # an error bar
    }
    assert len(looks) == 20 * len(curves)


def test_long_names_of_runs_differ_in_the_legend(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    curves = k_curves(load_run(make_run(tmp_path / "run")).verdicts("numeric"))
    names = [f"gsm8k-Llama-3.1-8B-Instruct-20261130-1344{number}-16197" for number in (10, 11)]
    figure = Figure()
    curves_plot(dict.fromkeys(names, curves)).draw(figure)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(set(labels)) == len(labels) == 4 and max(map(len, labels)) == 48


def test_curves_are_the_estimates_of_the_report(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path / "run", num_problems=9, num_samples=7))
    verdicts = run.verdicts("numeric")
    (alone,) = k_curves(verdicts, votes=False)
    assert curves_plot({"programs": [alone]}).title == "pass@k, with 95% intervals"
    assert curves_plot({"a": k_curves(verdicts)}).title == "pass@k and maj@k, with 95% intervals"
    passed, voted = k_curves(verdicts)
    assert passed.ks == voted.ks == tuple(range(1, 8))
    assert run.report is not None
    assert passed.values[-1].value == run.report.value("pass@7", "numeric")
    accuracy = run.report.value("exact_match", "numeric")
    assert passed.values[0].value == pytest.approx(accuracy, abs=1e-12)
    for row in run.report.majority:
        if row.filter == "numeric":
            found = voted.values[voted.ks.index(row.k)]
            assert (found.value, found.low, found.high) == (row.value, row.low, row.high)
    middle = [pass_at_k(7, sum(v.correct for v in group), 3) for group in verdicts.values()]
    assert passed.values[2].value == pytest.approx(sum(middle) / 9)


@pytest.mark.parametrize("num", [1, 2, 12, 13, 40, 100, 1000])
def test_at_most_12_ks_are_plotted(num: int) -> None:
    ks = choose_ks(num)
    assert ks[0] == 1 and ks[-1] == num and len(ks) <= 12
    assert list(ks) == sorted(set(ks))


def test_shares_of_votes_add_up(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path / "run", num_problems=20, num_samples=6))
    for filter in run.filters:
        shares = vote_shares(run.verdicts(filter))
        assert [s.right for s in shares] == sorted((s.right for s in shares), reverse=True)
        for s in shares:
            assert s.right + s.top_wrong + s.other_wrong + s.invalid == pytest.approx(1)
            assert s.won or s.top_wrong >= s.right or s.right == 0


def test_labels_do_not_steer_a_plot(tmp_path: Path) -> None:
    def draw(rng: Any, number: int, index: int) -> str:
        return f"$\\frac{{{number}$ \u4e2d\u0645 {HOSTILE[index % 7]}"

    view: RunView = load_run(make_run(tmp_path / "run", num_samples=7, draw=draw))
    for plot in run_plots(view):
        assert plot.render().svg.startswith(b"<svg") and b"<script" not in plot.render().svg
