"""`treegen audit` on runs whose model is elsewhere, on folders with corrupt runs, and on signs."""

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from audit_cases import NO_BEGIN, import_run
from cli_cases import Command
from huggingface_hub import constants

from treegen.report.audit.audit import audit_run
from treegen.report.audit.readers import value_of, with_plain_minus

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _name_model(run: Path, model: str, **free: Any) -> None:
    content = json.loads((run / "run.json").read_text())
    content["settings"]["free"] |= {"model": model, **free}
    (run / "run.json").write_text(json.dumps(content))


def test_the_tokenizer_is_read_from_the_local_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    asked: list[Any] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **_: asked.append(address))
    run = import_run(tmp_path, [("How many?", "18")], [[("The answer is 18.", "18", True)]])
    _name_model(run, "someone/small")
    audit = audit_run(run)
    (notice,) = (line for line in audit.notices if "tokenizer" in line)
    assert "'someone/small' is neither a directory nor in the local Hugging Face cache" in notice
    assert not audit.findings
    stored = tmp_path / "hub" / "models--someone--small"
    for folder in (stored / "refs", stored / "snapshots" / _COMMIT):
        folder.mkdir(parents=True)
    (stored / "refs" / "main").write_text(_COMMIT)
    (stored / "snapshots" / _COMMIT / "tokenizer_config.json").write_text(json.dumps(NO_BEGIN))
    (stored / "snapshots" / _COMMIT / "config.json").write_text('{"model_type": "gemma2"}')
    for free in ({}, {"revision": _COMMIT}):
        _name_model(run, "someone/small", **free)
        audit = audit_run(run)
        assert "begin-token-missing" in {finding.kind for finding in audit.findings}
        assert not any("tokenizer" in line for line in audit.notices)
    _name_model(run, "someone/small", revision="other")
    assert any("did not check the tokenizer" in line for line in audit_run(run).notices)
    assert not asked
    for name in ("~no-such-user/model", "../x", "demo\0"):
        _name_model(run, name)
        assert any("did not check the tokenizer" in line for line in audit_run(run).notices)


def test_the_tokenizer_of_bundled_models_is_read(tmp_path: Path) -> None:
    samples = [[("The answer is 18.", "18", True)]]
    run = import_run(tmp_path, [("How many?", "18")], samples, prompt="{question}")
    for model, kinds in (("demo", set()), ("demo-agent", {"template-not-applied"})):
        _name_model(run, model)
        audit = audit_run(run)
        assert {finding.kind for finding in audit.findings} == kinds
        assert not any("tokenizer" in line for line in audit.notices)


def test_the_other_runs_of_a_folder_are_audited(tmp_path: Path, treegen: Command) -> None:
    problems, wrong = [("How many?", "18")], [[("The answer is 18.", "17", False)]]
    runs = [import_run(tmp_path / name, problems, wrong) for name in "abcd"]
    folder = tmp_path / "runs"
    folder.mkdir()
    a, b, c, d = (
        Path(shutil.move(run, folder / name)) for run, name in zip(runs, "abcd", strict=True)
    )
    (a / "run.json").write_text("{")
    samples = (c / "samples.jsonl").read_bytes()
    (c / "samples.jsonl").write_bytes(b"\xff{\n" + samples)
    done = treegen("audit", folder, "--json")
    assert done.code == 2, done.err
    document = json.loads(done.out)
    assert [audit["run"] for audit in document["audits"]] == [str(b), str(d)]
    assert [each["run"] for each in document["unread"]] == [str(a), str(c)]
    lines = [line for line in done.err.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 2 and str(a) in lines[0] and str(c) in lines[1]
    done = treegen("audit", folder, "--fail-on", "high")
    assert done.code == 2 and done.out.count("HIGH right-answer-rejected") == 2
    assert done.err.count("Error: ") == 4
    done = treegen("audit", b, d, "--fail-on", "high", "--json")
    assert done.code == 1 and json.loads(done.out)["unread"] == []
    done = treegen("audit", folder, "--faulty-items", tmp_path / "nothing")
    assert done.code == 2 and done.err.count("Error: ") == 1 and not done.out


def test_notices_name_the_options_of_the_command(tmp_path: Path, treegen: Command) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "2 + 3?", "answer": "#### 5"}\n')
    run = str(tmp_path / "run")
    treegen("eval", "gsm8k", "--data", data, "--num-samples", "1", "--output-path", run)
    data.rename(tmp_path / "moved.jsonl")
    advice = "if the file has moved, pass its new path with"
    assert f"{advice} --data\n" in treegen("audit", run).out
    (audit,) = json.loads(treegen("audit", run, "--json").out)["audits"]
    assert audit["notices"][0].endswith(f"{advice} --data")
    assert audit_run(run).notices[0].endswith(f"{advice} data=")


@pytest.mark.parametrize("minus", ["\u2212", "\uff0d", "\ufe63", "\u2013", "\u2011"])
@pytest.mark.parametrize(
    "form",
    ["The answer is {}3.", "So it is below zero.\n#### {}3", r"Thus \boxed{{{}3}}.", "{}3"],
)
def test_signs_of_unicode_are_minus_signs(tmp_path: Path, minus: str, form: str) -> None:
    text = form.format(minus)
    run = import_run(tmp_path, [("What is it?", "-3")], [[(text, "3", False)]])
    assert [f.kind for f in audit_run(run).findings] == ["right-answer-rejected"]
    run = import_run(tmp_path / "other", [("What is it?", f"{minus}3")], [[(text, "-3", True)]])
    assert not audit_run(run).findings


@pytest.mark.parametrize(
    "text", ["3\u20135", "3 \u20135", "pages 3 \u2013 5", "x\u2013ray", "\u2013"]
)
def test_other_dashes_stay(text: str) -> None:
    assert with_plain_minus(text) == text


def test_values_with_signs_of_unicode() -> None:
    assert value_of("\u2212$1,200") == value_of("$\u20131,200") == value_of("-1200") == -1200
