"""`treegen search` with a verifier, and with several searches of each problem."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_cases import Command
from small_searches import save_tiny_verifier
from transformers import LlamaForCausalLM, LlamaForTokenClassification

from treegen.report.load import load_run
from treegen.runs import SearchRunDir
from treegen.search.reward import load_verifier
from treegen.search.tree.records import SearchTree

pytestmark = pytest.mark.usefixtures("elsewhere")

FEW = ["-L", "2", "--budget", "tokens=300", "-f", "1", "--memory", "4MiB", "--width", "2"]
FEW += ["--max-tokens", "20"]
STEPS = [*FEW, "--step-tokens", "10"]
SPLIT = r"separator=\n"


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verifier")
    for name, kind in (("tokens", LlamaForTokenClassification), ("marks", LlamaForCausalLM)):
        save_tiny_verifier(folder / name, kind, 2)
    return folder


def records_of(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    with SearchRunDir.open(path) as run:
        return {(r["problem_id"], r["sample_index"]): r for r in run.records()}


def test_values_are_those_of_the_verifier(
    tiny: Path, verifier: Path, treegen: Command, tmp_path: Path
) -> None:
    arguments = ["search", "gsm8k", "-m", "beam", "-M", str(tiny), *STEPS, "-q"]
    judged = ["--verifier", str(verifier / "tokens"), "--verifier-arg", "reduce=min"]
    run = tmp_path / "run"
    done = treegen(*arguments, *judged, "--verifier-arg", SPLIT, "-o", str(run))
    assert done.code == 0, done.err
    judge = load_verifier(verifier / "tokens", device="cpu", reduce="min", separator="\n")
    with SearchRunDir.open(run) as opened:
        stored = dict(opened.info.identity["search"])
    assert stored["evaluate"] == f"reward:{verifier / 'tokens'}"
    assert stored["verifier_args"] == {"reduce": "min", "separator": "\n"}
    problems = {problem.id: problem.question for problem in load_run(run).problems}
    num = 0
    for (problem_id, _), record in records_of(run).items():
        tree = SearchTree.from_json(record["nodes"])
        for node in tree.nodes[1:]:
            if "verifier" not in node.scores:  # the budget was used up
                assert node.score is None
                continue
            (want,) = judge.scores([(problems[problem_id], tree.path_text(node.id))])
            assert node.scores["verifier"] == node.score == pytest.approx(want, abs=2e-4)
            num += 1
    assert num > 4
    again = treegen(*arguments, *judged, "--resume", str(run))
    assert again.code == 2 and "verifier_args" in again.err
    other = treegen("search", "--resume", str(run), "-q")
    assert other.code == 0, other.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--verifier-arg", "reduce=min"], "requires a verifier; pass --verifier"),
        (
            ["--verifier", "V", "--evaluate", "logprob"],
            "--verifier and --evaluate cannot be used together",
        ),
        (["--verifier", "V", "--verifier-arg", "reduce=max"], "reduce must be one of"),
        (["--verifier", "V", "--verifier-arg", "marks=x"], "did you mean 'mark'"),
        (["--verifier", "V", "--verifier-arg", "min"], "must be name=value"),
        (["--verifier", "V", "--verifier-arg", "tokens=+"], "two tokens"),
        (["--verifier", "V", "--verifier-arg", "label=-1"], "label must be"),
        (["--verifier", "V", "--verifier-arg", "chat=maybe"], "true or false"),
        (["--verifier", "V", "--verifier-memory", "much"], "much"),
        (["--verifier", "M"], "such as --verifier-arg mark=+ and"),
        (["--verifier", "nowhere"], "nowhere"),
        (["--repeats", "0"], "--repeats must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    tiny: Path, verifier: Path, treegen: Command, tmp_path: Path, options: list[str], message: str
) -> None:
    places = {"V": str(verifier / "tokens"), "M": str(verifier / "marks")}
    given = [places.get(each, each) for each in options]
    done = treegen("search", "countdown", "-M", str(tiny), *FEW, *given, "-o", str(tmp_path / "r"))
    assert done.code == 2 and message in done.err
    assert not (tmp_path / "r").exists()


def test_several_searches_of_each_problem(tiny: Path, treegen: Command, tmp_path: Path) -> None:
    arguments = ["search", "countdown", "-m", "sample", "-M", str(tiny), *FEW]
    one, run = tmp_path / "one", tmp_path / "run"
    assert treegen(*arguments, "-q", "-o", str(one)).code == 0
    done = treegen(*arguments, "--repeats", "3", "-o", str(run))
    assert done.code == 0, done.err
    assert "6 searches of problems" in done.out and "pass@1" in done.out and "pass@3" in done.out
    (document,) = done.document["runs"]
    assert sorted(document["pass@k"]) == ["1", "2", "3"] and document["planned"] == 6
    records = records_of(run)
    assert len(records) == 6 and {index for _, index in records} == {0, 1, 2}
    for (problem_id, index), record in records_of(one).items():
        texts = [[node["text"] for node in records[problem_id, i]["nodes"]] for i in range(3)]
        assert [node["text"] for node in record["nodes"]] == texts[index]
        assert texts[0] != texts[1] != texts[2]
    view = load_run(run)
    assert [len(problem.samples) for problem in view.problems] == [3, 3]
    shown = treegen("show", str(run), "--tree", view.problems[0].id)
    assert [each["index"] for each in shown.document["searches"]] == [0, 1, 2]
    assert all(f"{view.problems[0].id} #{i}, sample: " in shown.out for i in range(3))
    listed = treegen("show", str(run)).document["trees"]
    ids = [problem.id for problem in view.problems]
    assert [(t["id"], t["index"]) for t in listed] == [(id, i) for id in ids for i in range(3)]
    assert treegen("report", str(run), "-q", "--no-plots").code == 0
    whole = (run / "trees.jsonl").read_bytes()
    (run / "trees.jsonl").write_bytes(whole[: len(whole) // 2])  # what a kill leaves
    again = treegen("search", "--resume", str(run), "-q")
    assert again.code == 0, again.err
    for key, record in records_of(run).items():
        want = [node["text"] for node in records[key]["nodes"]]
        assert [node["text"] for node in record["nodes"]] == want
