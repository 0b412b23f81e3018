"""`treegen search -m file.py:function` and its arguments, on a tiny checkpoint."""

import json
import shutil
from pathlib import Path

import pytest
from cli_cases import EXAMPLES, Command

from treegen.runs import SearchRunDir

pytestmark = pytest.mark.usefixtures("elsewhere")

FEW = ["-L", "2", "--budget", "tokens=120", "-f", "1", "--memory", "4MiB"]


def test_a_file_is_searched_compared_shown_and_resumed(
    treegen: Command, tiny: Path, tmp_path: Path
) -> None:
    own = shutil.copy(EXAMPLES / "search_own.py", tmp_path / "mine.py")
    args = ["countdown", "-M", tiny, *FEW, "--compare", f"sample,{own}:narrowing"]
    done = treegen("search", *args, "-a", "widths=3,2", "-o", tmp_path / "run", "-q")
    assert done.code == 0, done.err
    first, second = done.document["runs"]
    assert (first["method"], second["method"]) == ("sample", "mine.py:narrowing")
    assert second["run"] == str(tmp_path / "run" / "mine-narrowing")
    assert second["settings"]["arguments"] == {"widths": [3, 2], "keep": "best"}
    assert not first["settings"]["arguments"] and second["errors"] == {}
    assert "mine.py:narrowing" in treegen("show", second["run"]).out
    report = treegen("report", tmp_path / "run", "--no-plots")
    assert report.code == 0, report.err
    trees = Path(second["run"]) / "trees.jsonl"
    kept = trees.read_bytes().splitlines(keepends=True)[:1]
    trees.write_bytes(b"".join(kept))
    again = treegen("search", "--resume", tmp_path / "run", "-q", "--allow-task-code")
    assert again.code == 0, again.err
    with SearchRunDir.open(Path(second["run"])) as run:
        assert len(list(run.records())) == 2
    with Path(own).open("a") as file:
        file.write("# changed\n")
    error = treegen("search", "--resume", second["run"], "-m", f"{own}:narrowing").error
    assert "search.source" in error and "the file of the method has changed" in error


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-m", "{own}:narrow"], "has no function 'narrow'; did you mean 'narrowing'"),
        (["-m", "{own}:narrowing", "-a", "width=2"], "no argument 'width'; did you mean 'widths'"),
        (["-m", "{own}:narrowing", "-a", "keep=all"], "keep must be one of best, first"),
        (["-m", "{own}:narrowing", "-a", "keep"], "a method argument must be name=value"),
        (
            ["-m", "{own}:narrowing", "-a", "dtype=float32"],
            "use --dtype to set this option of the model",
        ),
        (["-m", "mcts", "-a", "batch=0"], "batch must be an integer >= 1, got '0'"),
        (
            ["-m", "beam", "-a", "keep=first"],
            "method beam has no argument 'keep'; the method has no arguments",
        ),
        (["{own}:narrowing"], "but an async function, such as a search method; did you mean -"),
        (["--compare", "beam,{own}:narrowing", "-a", "x=1"], "none of the methods has an argument"),
    ],
)
def test_what_is_refused_before_weights_are_loaded(
    treegen: Command, tiny: Path, no_weights: None, args: list[str], message: str
) -> None:
    given = [each.format(own=EXAMPLES / "search_own.py") for each in args]
    task = [] if args[0].startswith("{own}") else ["countdown"]
    assert message in treegen("search", *task, *given, "-M", tiny).error
    assert not list(Path().rglob("run.json"))


@pytest.mark.soak
def test_workers_search_by_a_file(treegen: Command, tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    own = shutil.copy(EXAMPLES / "search_own.py", tmp_path / "mine.py")
    args = ["countdown", "-M", tiny, *FEW, "-m", f"{own}:narrowing", "-q"]
    alone = treegen("search", *args, "-o", tmp_path / "alone")
    spread = treegen("search", *args, "-o", tmp_path / "spread", "--workers", 1)
    assert alone.code == spread.code == 0, spread.err

    def texts(path: Path) -> list[list[str]]:
        rows = (path / "trees.jsonl").read_text().splitlines()
        records = sorted(map(json.loads, rows), key=lambda record: str(record["problem_id"]))
        return [[node["text"] for node in record["nodes"]] for record in records]

    assert texts(tmp_path / "alone") == texts(tmp_path / "spread")


def test_the_message_names_the_line_of_the_users_file(
    treegen: Command, tiny: Path, tmp_path: Path
) -> None:
    own = tmp_path / "mine.py"
    own.write_text(
        "async def first(root, tools):\n"
        "    return parse(root.text)\n"
        "def parse(text):\n"
        "    return [][0]\n"
        "async def second(root, tools):\n"
        "    return await tools.steps(root, 2)\n"
        "async def third(root, tools):\n"
        "    return await root.sample(2, max_tokens='a')\n"
    )
    messages = {
        "first": "IndexError: list index out of range (mine.py:4, in parse)",
        "second": "`tools` has no 'steps'; did you mean 'step'? (mine.py:6, in second)",
        "third": "max_tokens must be an integer, got 'a' (mine.py:8, in third)",
    }
    for name, message in messages.items():
        args = ["countdown", "-M", tiny, "-L", "1", "--budget", "tokens=60", "-f", "1"]
        done = treegen("search", *args, "-m", f"{own}:{name}", "-o", tmp_path / name)
        assert done.code == 1 and message in done.err, done.err


def test_failed_searches_are_reported_by_every_command(
    treegen: Command, tiny: Path, tmp_path: Path
) -> None:
    own = tmp_path / "broken.py"
    own.write_text("async def broken(root, tools):\n    raise ValueError('no luck')\n")
    args = ["countdown", "-M", tiny, "-L", "5", "--budget", "tokens=60", "-f", "1"]
    done = treegen("search", *args, "--compare", f"sample,{own}:broken", "-o", tmp_path / "run")
    assert done.code == 1
    assert done.err.count("failed: ValueError: no luck") == 3
    assert "2 more searches failed" in done.err
    assert "5 searches failed; see the errors above" in done.err
    run = tmp_path / "run" / "broken-broken"
    shown = treegen("show", run)
    assert (
        "5 searches failed; the first error, in the search of problem " in shown.err
        and "no luck" in shown.err
    )
    assert shown.out.count("failed") >= 5
    (tree, *_) = map(json.loads, (run / "trees.jsonl").read_text().splitlines())
    drawn = treegen("show", run, "--tree", tree["problem_id"])
    assert "failed: ValueError: no luck" in drawn.out
    assert treegen("report", run, "--no-plots", "-o", tmp_path / "page.html").code == 0
    single = treegen("search", *args, "-L", "1", "-m", f"{own}:broken", "-o", tmp_path / "one")
    assert "1 search failed; see the errors above" in single.err
    again = ["-L", "1", "--repeats", "5", "-m", f"{own}:broken", "-o", tmp_path / "again"]
    several = treegen("search", *args, *again)
    assert "5 searches failed; see the errors above" in several.err
    assert several.err.count("no luck") == 1 and "4 more searches failed" in several.err
    (results,) = several.document["runs"]
    assert results["num_failed"] == 5 and len(results["errors"]) == 1
    shown = treegen("show", tmp_path / "one")
    assert "1 search failed; the error, in the search of problem " in shown.err
    compared = treegen("compare", tmp_path / "run" / "sample", run, "--no-plots")
    assert "differ in: method 'sample' / " in compared.out
    assert not any(part in compared.out for part in ("arguments.", "random numbers:", "samples:"))
    assert "conclusion: none, because all 5 searches of B failed" in compared.out
    assert compared.document["failed"] == "all 5 searches of B failed"
    refused = treegen("show", tmp_path / "run").error
    assert "contains run directories; use one of" in refused and "broken-broken" in refused
