"""`treegen search` on a tiny checkpoint: what it writes, prints, continues and refuses."""

import io
import json
import os
import re
import shlex
import shutil
from contextlib import redirect_stderr, redirect_stdout
from itertools import product
from pathlib import Path

import pytest
from cli_cases import Command, edit_config, run_command, trees_of, write_jsonl

from treegen.cli.search import _pair_runs
from treegen.evals.search.methods import METHODS
from treegen.search.tree.records import SearchTree

pytestmark = pytest.mark.usefixtures("elsewhere")

FEW = ["-L", "3", "--budget", "tokens=150", "-f", "1", "--memory", "4MiB"]


def assert_same_trees(found: Path, expected: Path) -> None:
    """Compare two runs: texts exactly, numbers of the model as closely as they are rounded."""
    # Which of two searches computes what they share is a matter of who comes first.
    want = trees_of(expected, "tokens_prefilled")
    for record in want:
        for node, name in product(record["nodes"], ("logprob", "score")):
            node[name] = pytest.approx(node[name], abs=1.1e-3)
    assert trees_of(found, "tokens_prefilled") == want


@pytest.fixture(scope="module")
def compared(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run_command(
            "search", "countdown", "--compare", "sample,tot-bfs", "-M", tiny, *FEW, "-o", path
        )
    assert code == 0, err.getvalue()
    (path / "out.txt").write_text(out.getvalue())
    with redirect_stdout(document := io.StringIO()), redirect_stderr(io.StringIO()):
        code = run_command("search", "--resume", path, "--json")
    assert code == 0
    (path / "document.json").write_text(document.getvalue())
    (path / "err.txt").write_text(err.getvalue())
    return path


def test_what_a_comparison_prints_and_stores(compared: Path) -> None:
    out, err = ((compared / name).read_text() for name in ("out.txt", "err.txt"))
    assert "at most 150 tokens per problem" in out
    rows = [line.strip("|").split("|") for line in out.splitlines() if line.startswith("|")]
    head, _, *cells = [[cell.strip() for cell in row] for row in rows]
    assert head[:5] == ["Method", "Solved", "Share", "95% interval", "Decoded"]
    assert [row[0] for row in cells] == ["sample", "tot-bfs"]
    assert [row[1] for row in cells] == ["0/3", "0/3"]
    assert [row[2] for row in cells] == ["0.000", "0.000"]
    assert cells[0][3] == "0.000 to 0.755"
    assert f"paired test: treegen compare {compared / 'sample'} {compared / 'tot-bfs'}" in out
    assert "adjust the p-values" not in out
    assert "Seconds is the time of the whole run." in out
    assert f"preparing {compared / 'sample'}, {compared / 'tot-bfs'}: reading" in err
    assert err.index("preparing") < err.index("run directory")
    document = json.loads((compared / "document.json").read_text())
    assert [run["method"] for run in document["runs"]] == ["sample", "tot-bfs"]
    assert "countdown tot-bfs: 3/3 searches (100%)" in err
    for method, run in zip(("sample", "tot-bfs"), document["runs"], strict=True):
        records = trees_of(compared / method)
        assert run["run"] == str(compared / method) and len(records) == 3
        stored = json.loads((compared / method / "results.json").read_text())
        assert {k: v for k, v in stored.items() if k != "parts"} | {"run": run["run"]} == run
        for record in records:
            tree = SearchTree.from_json(record["nodes"])
            assert len(tree.nodes) == record["usage"]["nodes"] + 1
            assert tree.nodes[0].text.endswith("Steps:\n")
            # A step of decoding is finished for all samples that are under way.
            assert 0 < record["usage"]["tokens_decoded"] <= 150 + 40
            assert record["stopped"] == "budget of 150 tokens reached"


def test_a_run_that_was_cut_ends_with_the_same_trees(
    treegen: Command, compared: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(compared, tmp_path / "cut"))
    for method, lines in (("sample", 1), ("tot-bfs", 3)):
        file = path / method / "trees.jsonl"
        kept = file.read_bytes().splitlines(keepends=True)[:lines]
        file.write_bytes(b"".join(kept) + (b'{"problem' if lines < 3 else b""))
        (path / method / "results.json").unlink()
    done = treegen("search", "--resume", path)
    assert done.code == 0, done.err
    assert "1 of 3 searches done" in done.err and "3 of 3 searches done" in done.err
    assert "was unfinished" in done.err
    for method in ("sample", "tot-bfs"):
        assert_same_trees(path / method, compared / method)
    assert treegen("search", "--resume", path / "sample").code == 0  # one of them alone


def test_a_method_is_added_to_a_comparison(
    treegen: Command, tiny: Path, compared: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(compared, tmp_path / "more"))
    args = ["--compare", "tot-bfs,majority", "-M", tiny, *FEW, "-o", path, "--resume"]
    done = treegen("search", "countdown", *args, "-q")
    assert done.code == 0 and done.err == ""
    assert [run["method"] for run in done.document["runs"]] == ["tot-bfs", "majority"]
    resumed = treegen("search", "--resume", path)
    methods = [run["method"] for run in resumed.document["runs"]]
    assert methods == ["sample", "tot-bfs", "majority"]  # as they were started
    assert len(trees_of(path / "majority")) == 3
    assert done.out == ""
    add = ["countdown", "--compare", "tot-bfs,mcts", "-M", tiny, "--resume", path]
    assert "have different budgets" in treegen("search", *add).error
    assert "have different problems" in treegen("search", *add, *FEW[2:], "-f", 2).error


def test_runs_are_resumed_in_the_order_in_which_they_were_started(
    treegen: Command, compared: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(compared, tmp_path / "copy"))
    for second, method in enumerate(("tot-bfs", "sample")):
        file = path / method / "run.json"
        document = json.loads(file.read_text())
        document["created"] = f"2026-01-01T00:00:0{second}+00:00"
        file.write_text(json.dumps(document))
        os.utime(file, (9 - second, 9 - second))  # copies may have other times
    done = treegen("search", "--resume", path)
    assert done.code == 0, done.err
    assert [run["method"] for run in done.document["runs"]] == ["tot-bfs", "sample"]


def test_a_word_problem(treegen: Command, tiny: Path, tmp_path: Path) -> None:
    args = shlex.split(f"-M {tiny} -L 2 -f 1 --budget tokens=200,calls=30 -o {tmp_path}/r")
    done = treegen("search", "gsm8k", "--width", 2, "--expand", 2, *args, "--max-tokens", 40)
    assert done.code == 0, done.err
    assert done.document["runs"][0]["method"] == "beam"
    assert "at most 200 tokens, 30 calls per problem" in done.out


def test_a_run_with_an_invalid_argument_is_resumed_with_another(
    treegen: Command, tiny: Path, tmp_path: Path
) -> None:
    args = ["-M", tiny, "-L", "2", "-f", "1", "--budget", "tokens=60", "-o", tmp_path / "r"]
    assert treegen("search", "gsm8k", *args).code == 0
    file = tmp_path / "r" / "run.json"
    record = json.loads(file.read_text())
    record["settings"]["free"]["extra"] = {"form": "prose"}  # which searches ignored before
    file.write_text(json.dumps(record))
    trees = tmp_path / "r" / "trees.jsonl"
    trees.write_bytes(trees.read_bytes().splitlines(keepends=True)[0])
    (tmp_path / "r" / "results.json").unlink()
    done = treegen("search", "--resume", tmp_path / "r")
    assert done.code == 2 and done.err.count("\n") == 1
    assert done.error.endswith("resume the run with --task-arg form=self-consistency")
    done = treegen("search", "--resume", tmp_path / "r", "--task-arg", "form=self-consistency")
    assert done.code == 0 and len(trees_of(tmp_path / "r")) == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no task is given"),
        (["mmlu"], "task 'mmlu' cannot be searched"),
        (["cuontdown"], "there is no task 'cuontdown'; did you mean 'countdown'"),
        (["countdown", "-m", "tot"], "there is no method 'tot'"),
        (["countdown", "--compare", "beam,beam"], "--compare lists 'beam' twice"),
        (["countdown", "--compare", ","], "--compare is empty"),
        (
            ["countdown", "--compare", "beam", "-m", "beam"],
            "--method and --compare cannot be used together",
        ),
        (["countdown", "--budget", "tokens=many"], "--budget: tokens must be an integer"),
        (["countdown", "--budget", "token=5"], "--budget has no 'token'; known: tokens, calls"),
        (["countdown", "--budget", "tokens=0"], "budget tokens must be"),
        (["countdown", "--budget", ""], "--budget is empty"),
        (["countdown", "--width", "0"], "width must be at least 1"),
        (["countdown", "--temperature", "0"], "use a temperature above 0"),
        (["countdown", "--evaluate", "vote"], "there is no way to evaluate 'vote'"),
        (["countdown", "--evaluate", "reward:./none"], "'./none' does not exist"),
        (["countdown", "--data", "none.jsonl"], "none.jsonl does not exist"),
        (["countdown", "--max-tokens", "5000"], "lower --num-fewshot or --max-tokens"),
        (["countdown", "-T", "form=steps"], "task 'countdown' has no argument 'form'"),
        (["game24"], "set --data to the 24.csv from the paper"),
        (["countdown", "--resume"], "--resume requires a run directory"),
        (["countdown", "--resume", "none"], "there is no run directory none"),
        (["countdown", "--resume", "a", "-o", "b"], "name different directories"),
    ],
)
def test_what_is_refused_before_weights_are_loaded(
    treegen: Command, tiny: Path, no_weights: None, args: list[str], message: str
) -> None:
    assert message in treegen("search", *args, "-M", tiny).error
    assert not list(Path().rglob("run.json"))


def test_refusals_of_a_run_that_is_there(
    treegen: Command, tiny: Path, compared: Path, no_weights: None, tmp_path: Path, model: Path
) -> None:
    run = compared / "sample"
    for args, message in (
        (
            ["countdown", "-M", tiny, "-o", run],
            f"already contains a run; continue the run with --resume {run}",
        ),
        (["countdown", "-M", tiny, "-o", run, "--compare", "beam,mcts"], "already contains a run"),
        (["--resume", run, "--width", "9"], "search.width: 3 -> 9 (--width)"),
        (["--resume", run, "-m", "beam"], 'search.method: "sample" -> "beam" (--method)'),
        (["--resume", run, "--budget", "tokens=9"], "budget.tokens: 150 -> 9 (--budget tokens)"),
        (["--resume", run, "--limit", "2"], "(--data, --split, --limit or --sample-id)"),
        (["--resume", run, "--compare", "beam"], "is the run of a single method"),
        (
            ["gsm8k", "--resume", run],
            f"{run} is a run of the task countdown, not of the task gsm8k",
        ),
    ):
        assert message in treegen("search", *args).error
    edit_config(model, rms_norm_eps=0.01)
    assert "model.fingerprint: " in treegen("search", "--resume", run, "-M", model).error
    error = treegen("eval", "--resume", run).error
    assert "was created with `treegen search`, not with `treegen eval`" in error
    assert (
        "use a run of `treegen eval`, or continue this run with `treegen search --resume`" in error
    )
    for command in ("score", "eval"):
        assert treegen(command, *(["--resume"] if command == "eval" else []), run).code == 2


def test_no_model(treegen: Command, no_weights: None) -> None:
    error = treegen("search", "game24").error
    assert "no model is given" in error
    assert error.endswith("game24 also needs --data with the 24.csv from the paper")
    assert "harbor also needs --data with a task folder" in treegen("search", "harbor").error
    assert "also needs" not in treegen("search", "game24", "--data", "24.csv").error


def test_puzzles_are_an_ordinary_task_too(treegen: Command, tiny: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "d.jsonl", [{"numbers": [1, 2], "target": 3}])
    args = ["-M", tiny, "-n", "3", "--max-tokens", "8", "-f", "2", "--data", data]
    done = treegen("eval", "countdown", *args, "-o", tmp_path / "run")
    assert done.code == 0, done.err
    metrics = done.document["runs"][0]["report"]["metrics"]
    assert {row["metric"] for row in metrics} >= {"exact_match", "pass@3", "invalid"}


def test_help_names_every_method(treegen: Command) -> None:
    text = re.sub(r"-\n\s+", "-", treegen("search", "--help").out)
    assert all(name in text for name in METHODS)


def test_the_tests_of_a_few_runs_are_of_all_pairs() -> None:
    assert _pair_runs(["a", "b"]) == [("a", "b")]
    assert _pair_runs(["a", "b", "c"]) == [("a", "b"), ("a", "c"), ("b", "c")]
    assert len(_pair_runs(list("abcd"))) == 6
    assert _pair_runs(list("abcde")) == [("a", "b"), ("a", "c"), ("a", "d"), ("a", "e")]
