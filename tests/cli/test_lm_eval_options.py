"""Options that lm-eval's command has too: --samples, --log_samples, --check_integrity and so on."""

import json
import logging
from pathlib import Path

import pytest
from cli_cases import Command, samples_of

pytest.importorskip("lm_eval")

from lm_eval_tasks import write_tasks

FEW = ["--model", "demo", "-n", "1", "--max-tokens", "3", "--num-fewshot", "0"]
pytestmark = pytest.mark.usefixtures("elsewhere")


def test_documents_of_a_task_of_lm_eval(treegen: Command, tmp_path: Path) -> None:
    folder, run = write_tasks(tmp_path / "tasks", limit=4), tmp_path / "run"
    samples = json.dumps({"local_gsm8k_cot": [0, 3]})
    done = treegen(
        *("eval", "lm-eval:local_gsm8k_cot", "--include_path", folder, *FEW, "-o", run),
        *("--samples", samples, "--log_samples", "--check_integrity"),
    )
    assert done.code == 0, done.err
    names = [record["problem_id"] for record in samples_of(run)]
    assert sorted(names) == ["local_gsm8k_cot/0", "local_gsm8k_cot/3"]


def test_documents_of_an_own_task(treegen: Command, tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "samples.json"
    file.write_text('{"gsm8k": [1, 2]}')
    assert treegen("eval", "gsm8k", *FEW, "--samples", file, "-o", run).code == 0
    ranged = tmp_path / "ranged"
    done = treegen(
        "eval", "gsm8k", *FEW[:2], "--num-samples", 1, *FEW[4:], "-L", "2-3", "-o", ranged
    )
    assert done.code == 0, done.err
    same = [[record["problem_id"] for record in samples_of(path)] for path in (run, ranged)]
    assert len(same[0]) == 2 and same[0] == same[1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["gsm8k", "--samples", "nowhere"], "--samples must be JSON or the name of a JSON file"),
        (["gsm8k", "--samples", '{"a":' * 50_000], "--samples must be JSON or the name of a JSON"),
        (["gsm8k", "--samples", '{"gsm8k": 3}'], "--samples must have the form"),
        (["gsm8k", "--samples", '{"gsm8k": [1, 3]}'], "must be consecutive"),
        (["gsm8k", "--samples", '{"arc": [1]}'], "--samples names arc, but TASK is gsm8k"),
        (["gsm8k,apps", "--samples", '{"gsm8k": [1]}'], "--samples needs exactly one TASK"),
        (
            ["gsm8k", "-L", "2", "--samples", '{"gsm8k": [1]}'],
            "--samples cannot be used together with --limit",
        ),
        (["gsm8k", "--verbosity", "loud"], "'loud' is not one of"),
    ],
)
def test_what_cannot_be_used_is_refused(treegen: Command, args: list[str], message: str) -> None:
    assert message in treegen("eval", *args).error


def test_data_that_are_not_whole(treegen: Command, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n{"question": 5}\n')
    arguments = ["eval", "gsm8k", *FEW, "--data", data]
    assert treegen(*arguments, "-o", tmp_path / "run").code == 0
    error = treegen(*arguments, "-o", tmp_path / "no", "--check-integrity").error
    assert "treegen cannot use 1 lines of the data of gsm8k, such as" in error and "line 2" in error
    assert not (tmp_path / "no").exists()


def test_a_level_of_log_messages(treegen: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LMEVAL_LOG_LEVEL", raising=False)
    monkeypatch.setattr(logging, "basicConfig", lambda **how: levels.append(how["level"]))
    levels: list[str] = []
    assert treegen("eval", "nothing", "--verbosity", "debug").code == 2
    assert levels == ["DEBUG"]
