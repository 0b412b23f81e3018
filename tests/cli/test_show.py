"""`treegen show`, trees in the terminal, and the live view."""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Command
from report_cases import HOSTILE, make_run, make_trees
from rich.console import Console

from treegen.cli.terminal import progress
from treegen.common.formatting import safe_text
from treegen.common.outputs import LevelRows
from treegen.evals.progress import run_progress
from treegen.evals.progress.run_progress import AccuracyCounter, RunProgress
from treegen.evals.progress.usage import read_timeline
from treegen.evals.statistics.estimators import estimate
from treegen.report import run_document
from treegen.report.view import StoredTree, read_trees
from treegen.runs.record_format import encode_record
from treegen.search.tree.records import best_path, draw_tree


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with searches."""
    path = make_run(tmp_path_factory.mktemp("show") / "run", num_problems=25, num_samples=5)
    make_trees(path)
    return path


def printed(tree: Any, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(tree)
    return out.getvalue()


# treegen show


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("terminal", [False, True])
def test_json_is_printed_alone_and_only_if_asked_for(
    treegen: Command, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    commands = (
        ("show", run),
        ("show", run, "--problem", "p0"),
        ("show", run, "--tree", "p0"),
        ("score", run),
        ("tasks",),
        ("models",),
        ("power",),
        ("plan", "gsm8k", "--limit", "2", "--write-out"),
        ("replay", run),
        ("compare", run, run, "--no-plots"),
        ("report", run, "--no-plots", "-o", tmp_path / "page.html"),
    )
    for command in commands:
        with monkeypatch.context() as patch:
            patch.setattr(sys.stdout, "isatty", lambda: terminal)
            plain, as_json = treegen(*command), treegen(*command, "--json")
        assert plain.code == as_json.code == 0, (command, plain.err, as_json.err)
        assert plain.out.strip() and not any(s.startswith("{") for s in plain.out.splitlines())
        document = json.loads(as_json.out)
        assert as_json.out.count("\n") == 1 and document == as_json.document
        if command[0] != "score":  # seconds differ
            assert document == plain.document
        if command[0] != "score" and not terminal:
            assert treegen(*command, "-q").out == ""
    assert json.loads(treegen("tasks", "-q", "--json").out)["tasks"]
    assert (
        "remove one of the two options"
        in treegen("show", run, "--tree", "p0", "--as", "dot", "--json").error
    )


def test_a_terminal_is_one_without_being_told() -> None:
    reader, terminal = os.openpty()
    with os.fdopen(reader, "rb", buffering=0) as screen, os.fdopen(terminal, "wb") as stdout:
        command = [sys.executable, "-m", "treegen", "tasks"]
        started = subprocess.Popen(command, stdout=stdout)
        stdout.close()
        shown = b""
        while True:
            try:
                shown += screen.read(4096)
            except OSError:  # EIO: the program has closed its end
                break
        assert started.wait() == 0
    assert b"gsm8k" in shown and b'{"tasks"' not in shown


def test_a_run_is_shown_as_tables(treegen: Command, run: Path) -> None:
    done = treegen("show", run)
    assert done.code == 0, done.err
    title = "gsm8k with made-up: n 5, temperature 0.7, max_tokens 256, 8-shot"
    assert done.out.startswith(f"{title}\n") and "125 of 125 samples" in done.out
    last = done.out.rstrip().splitlines()[-1]
    assert last.startswith("gsm8k with made-up: accuracy 0.") and last.endswith(f"; run: {run}")
    assert "maj@5 0." in last and "pass@5 0." in last
    assert "|Task " in done.out and "maj@k" in done.out
    assert "... and 5 harder problems" in done.out and "|Problem|Search|" in done.out
    assert len(done.document["problems"]) == 25 and len(done.document["trees"]) == 3
    assert "... and" not in treegen("show", run, "--full").out


def test_a_problem_is_shown_with_samples_and_votes(treegen: Command, run: Path) -> None:
    done = treegen("show", run, "--problem", "p7")
    assert done.code == 0 and "question: What is 7 + 0?" in done.out
    found = done.document
    assert [sample["index"] for sample in found["samples"]] == list(range(5))
    assert found["answer"] == "7" and found["vote"]["answer"] in found["vote"]["tied"]
    for sample in found["samples"]:
        assert f"--- sample {sample['index']}: {sample['outcome']}" in done.out
        assert sample["text"].strip() in done.out
    strict = treegen("show", run, "-p", "p7", "--filter", "strict-match")
    assert "Answer (strict-match)" in strict.out
    assert treegen("show", run, "-p", "p7", "--json").out.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-p", "p99"], "the run has no problem 'p99'"),
        (["-p", "p1", "-t", "p1"], "--problem and --tree cannot be used together"),
        (["--filter", "numerc"], "no verdicts of the filter 'numerc'; its filters: numeric"),
    ],
)
def test_what_is_not_there_is_refused(
    treegen: Command, run: Path, args: list[str], message: str
) -> None:
    assert message in treegen("show", run, *args).error


def test_a_search_is_drawn_with_its_best_path(treegen: Command, run: Path) -> None:
    (record,) = [tree for tree in read_trees(run) if tree.problem_id == "p1"]
    done = treegen("show", run, "--tree", "p1")
    assert done.document["method"] == "beam" and len(done.document["nodes"]) == 21
    *lines, legend = [line for line in done.out.splitlines()[1:] if line.strip()]
    assert len(lines) == 21 and legend.startswith("(* on the best path; score: the value")
    starred = [line for line in lines if "* " in line]
    assert len(starred) == len(best_path(record.nodes, record.best)) == len(record.path)
    for line, node in zip(starred, record.path, strict=True):
        assert node["text"].strip() in line
        assert not node["n_tokens"] or f"{node['n_tokens']:,} tokens" in line


@pytest.mark.parametrize(
    ("found", "title", "legend"),
    [
        (
            {"solved": False, "answer": None, "candidates": []},
            "not solved (no finished solution)",
            "(score: the value",
        ),
        (
            {"solved": False, "answer": "5", "candidates": [20]},
            "not solved (the best path is wrong), answer 5",
            "(* on the best path; score: the value",
        ),
        (
            {"solved": True, "answer": "5", "candidates": [20]},
            "solved, answer 5",
            "(* on the best path; score: the value",
        ),
    ],
)
def test_only_the_path_of_a_finished_solution_is_marked(
    found: dict[str, Any], title: str, legend: str, treegen: Command, tmp_path: Path
) -> None:
    path = make_run(tmp_path / "run", num_problems=1, num_samples=1)
    (record,) = make_trees(path, num_trees=1)
    (path / "trees.jsonl").write_bytes(encode_record(record | found))
    done = treegen("show", path, "--tree", "p0")
    first, *lines, last = [line for line in done.out.splitlines() if line.strip()]
    assert first == f"p0, beam: 21 nodes, {title}" and last.startswith(legend)
    assert any("* " in line for line in lines) == bool(found["candidates"])
    marked = treegen("show", path, "--tree", "p0", "--as", "dot").out.count("penwidth=3")
    assert bool(marked) == bool(found["candidates"])


def test_a_problem_without_a_search_is_drawn_with_its_prompt(treegen: Command, run: Path) -> None:
    done = treegen("show", run, "--tree", "p9")
    nodes = done.document["nodes"]
    assert [node["depth"] for node in nodes] == [0, 1, 2, 2, 2, 2, 2]
    assert "Q: What is 9 + 0?" in nodes[1]["text"]
    answer = next(n for n in nodes if n["id"] == done.document["best"])
    assert done.document["solved"] == (answer["score"] == 1)
    assert done.out.count("\u251c\u2500\u2500 ") >= 4


def test_hostile_text_does_not_reach_the_terminal(treegen: Command, tmp_path: Path) -> None:
    path = make_run(
        tmp_path / "run",
        num_problems=2,
        num_samples=len(HOSTILE),
        draw=lambda rng, number, index: HOSTILE[index],
        questions=[HOSTILE[3], HOSTILE[4]],
    )
    make_trees(path, num_trees=2, text="".join(HOSTILE[:7]))
    for args in ([], ["-p", "p0"], ["-t", "p0"], ["-t", "p1", "--full"], ["-p", "p1", "--full"]):
        done = treegen("show", path, *args)
        assert done.code == 0, done.err
        assert safe_text(done.out) == done.out
        assert not {"\x1b", "\x9b", "\u202e", "\u2028"} & set(done.out)
    assert len(treegen("show", path, "-t", "p0").out.splitlines()[1]) <= 200


# draw_tree


def node(id: int, parent: int | None, text: str = "x", **more: Any) -> dict[str, Any]:
    return {
        "id": id,
        "parent_id": parent,
        "depth": 0,
        "text": text,
        "score": None,
        "logprob": None,
        "n_tokens": 1,
        "leaf": False,
        "pruned": False,
        "finish_reason": None,
        **more,
    }


def test_a_tree_says_what_is_known_of_each_node() -> None:
    drawn = printed(
        draw_tree(
            [
                node(0, None, "start [bold]here[/bold]"),
                node(1, 0, "  two\n lines ", score=0.5, logprob=-1.25, n_tokens=1234),
                node(2, 0, "", pruned=True, leaf=True, finish_reason="length"),
            ],
            best=1,
        )
    )
    assert drawn.splitlines()[0] == "* [1 tokens] start [bold]here[/bold]"
    assert drawn.splitlines()[1].endswith("* [score 0.500, logprob -1.25, 1,234 tokens] two lines")
    assert drawn.splitlines()[2].endswith("[1 tokens, cut off, pruned] (empty)")


def test_a_tree_shows_visits_and_the_first_nodes_of_restarts() -> None:
    nodes = [
        node(0, None, visits=9),
        node(1, 0, score=0.5, visits=6),
        node(2, 1),
        node(3, 0, restart=2),
        node(4, 3, restart=2),
        node(5, 1, restart=3),
    ]
    lines = printed(draw_tree(nodes)).splitlines()
    shown = [re.sub(r"^.*?\[(.*)\].*", r"\1", line) for line in lines]
    assert shown == [
        "visits 9, 1 tokens",
        "score 0.500, visits 6, 1 tokens",
        "1 tokens",
        "1 tokens, restart 3",
        "1 tokens, restart 2",
        "1 tokens",
    ]
    stored = StoredTree("p", "mcts", None, None, None, tuple(nodes))
    assert run_document.tree_legend(stored) == (
        "score: the value of a node, higher is better; visits: how many values count for a node; "
        "restart: the search began again at the root"
    )


def test_a_line_is_cut_at_the_width_unless_all_is_asked_for() -> None:
    nodes = [node(0, None), node(1, 0, "word " * 100)]
    assert len(printed(draw_tree(nodes), width=60).splitlines()) == 2
    assert printed(draw_tree(nodes, full=True), width=60).count("word") == 100


def test_of_a_long_prompt_the_end_is_shown() -> None:
    nodes = [node(0, None, f"{'an example ' * 50}What is asked?")]
    (line,) = printed(draw_tree(nodes)).splitlines()
    assert "] ..." in line and line.endswith(" What is asked?")
    assert printed(draw_tree(nodes, full=True)).count("example") == 50


def test_the_last_lines_of_a_prompt_are_told_apart() -> None:
    prompt = "Input: 1 2\nSteps: 3\n\nInput:  4 7 9 11\nTarget: 6\nSteps:\n"
    (line,) = printed(draw_tree([node(0, None, prompt, n_tokens=0)])).splitlines()
    assert line == "... Input: 4 7 9 11 \u21b5 Target: 6 \u21b5 Steps:"
    (line,) = printed(draw_tree([node(0, None, "Two\nlines\n", n_tokens=0)])).splitlines()
    assert line == "Two \u21b5 lines"


@pytest.mark.parametrize("depth", [1, 3000])
def test_a_tree_may_be_deep(depth: int) -> None:
    nodes = [node(i, i - 1 if i else None) for i in range(depth)]
    tree = draw_tree(nodes, best=depth - 1)
    deepest = 1
    while tree.children:
        tree, deepest = tree.children[0], deepest + 1
    assert deepest == depth


def test_no_nodes_and_a_best_that_is_not_there_are_drawn() -> None:
    assert printed(draw_tree([])).strip() == ""
    assert "*" not in printed(draw_tree([node(0, None)], best=7))


# The live view


def moment(done: int, **more: Any) -> RunProgress:
    fields: dict[str, Any] = {
        "done": done,
        "planned": 40,
        "rows": 8,
        "pages": 3,
        "num_pages": 10,
        "tokens": done * 7,
        "seconds": done / 2,
        "accuracy": 0.5,
        "estimate": estimate([0.5, 1.0, 0.0]),
        "levels": (LevelRows(0, 1, 8, 8), LevelRows(1, 4, 7, 0)),
    }
    return RunProgress(**fields | more)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_levels_time_left_and_the_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setattr(progress, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    progress.show_progress(iter([moment(10), moment(20)]), "gsm8k", quiet=False)
    shown = screen.getvalue()
    assert "20/40" in shown and "0:10 left" in shown and "3/10 pages" in shown
    assert "accuracy 0.500 (0.000 to 1.000)" in shown and "14 tokens/s" in shown
    for word in ("level", "segments", "rows", "read once for", "8 rows", "none"):
        assert word in shown


def test_lines_of_a_log_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    steps: Iterator[RunProgress] = iter([moment(0, estimate=None), moment(20), moment(40)])
    progress.show_progress(steps, "gsm8k", quiet=False)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("gsm8k: 20/40 samples (50%), 14 tokens/s, 8 rows, 3/10 pages, accur")
    assert lines[0].endswith(", 0:10 left") and "left" not in lines[1]


def test_a_line_of_a_log_has_the_accuracy_of_all_its_samples(
    treegen: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import treegen as library

    monkeypatch.setattr(
        run_progress, "UPDATE_SECONDS", 1e9
    )  # no update between the first and the last
    run = tmp_path / "run"
    done = treegen("eval", "gsm8k", "--limit", "6", "-n", "8", "--max-tokens", "96", "-o", run)
    lines = re.findall(r"(\d+)/48 samples .* accuracy (\S+ \(\S+ to \S+\))", done.err)
    assert len(lines) > 5
    records = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    samples = library.open_run(run).samples()
    right = {(row.problem_id, row.sample_index): row.correct for row in samples.itertuples()}
    for number, accuracy in lines:
        so_far = AccuracyCounter()
        for record in records[: int(number)]:
            key = record["problem_id"], record["sample_index"]
            so_far.count(record["problem_id"], right[key])
        assert (found := so_far.estimate()) is not None
        assert accuracy == f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})"


def test_a_line_says_how_many_samples_are_scored_unless_all_are() -> None:
    assert "scored" not in moment(10, scored=10).accuracy_text
    shown = moment(10, scored=4).accuracy_text
    assert shown == "accuracy 0.500 (0.000 to 1.000) of 4 scored samples"
    assert moment(10, scored=4, estimate=None).details.endswith("0.500 of 4 scored samples")


def test_time_left_is_that_of_this_part() -> None:
    assert moment(10, started=5).time_left == "0:30 left"
    assert moment(10, started=10).time_left == ""
    assert moment(1, started=0, planned=7400, seconds=1.0).time_left == "2:03:19 left"


def test_accuracy_so_far_is_a_mean_over_problems() -> None:
    so_far = AccuracyCounter()
    assert so_far.accuracy is None and so_far.estimate() is None
    for problem, right in [("a", True), ("a", True), ("a", True), ("b", False)]:
        so_far.count(problem, right)
    found = so_far.estimate()
    assert so_far.accuracy == 0.75
    assert found is not None and found == estimate([1.0, 0.0])


def test_what_is_under_way_may_turn_out_either_way() -> None:
    so_far = AccuracyCounter()
    assert so_far.estimate(3) is None
    for problem in "abcd":  # the easy ones, which end first
        so_far.count(problem, True)
    found = so_far.estimate(8)
    assert found is not None and found.value == 4 / 12 and found.num_problems == 12
    assert found.low == estimate([1.0] * 4 + [0.0] * 8).low and found.high == 1
    shown = moment(4, estimate=found, unknown=8, unit="searches").accuracy_text
    assert shown == f"solved so far 0.333 ({found.low:.3f} to 1.000), 8 running"
    assert so_far.estimate() == so_far.estimate(0) == estimate([1.0] * 4)


def test_a_real_run_knows_its_rows_by_level(treegen: Command, tiny: Path, tmp_path: Path) -> None:
    from treegen.evals.config.eval_settings import resolve_eval_settings
    from treegen.evals.identity import run_settings
    from treegen.evals.job import load_job, prepare_job
    from treegen.evals.model import load_llm, weights_fingerprint
    from treegen.evals.sampling import sample
    from treegen.runs import RunDir

    settings = {
        "task": "gsm8k",
        "model": str(tiny),
        "limit": 3,
        "num_samples": 4,
        "max_tokens": 40,
        "memory": "4MiB",
    }
    job = load_job(resolve_eval_settings(settings))
    weights = weights_fingerprint(job.settings.engine)
    wanted = run_settings(job, dtype="float32", fingerprint=weights)
    with RunDir.create(tmp_path / "run", wanted) as opened:
        llm = load_llm(job.settings.engine, weights)
        seen = list(sample(prepare_job(job, llm.model_info), opened, llm))
    assert seen[-1].done == 12 and seen[-1].seconds_left == 0
    assert seen[-1].estimate is not None and seen[-1].estimate.num_problems == 3
    levels = next(now.levels for now in seen if now.levels)
    assert levels[0].segments == 1 and levels[0].rows <= 12
    # Below the examples, each row belongs to one problem at most.
    assert all(level.rows <= levels[0].rows for level in levels)
    assert read_timeline(tmp_path / "run")[-1]["done"] == 12
