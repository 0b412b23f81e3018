"""What `treegen certify` says: of moved models, added metrics, versions, and files of keys."""

import codecs
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from certified_run import certified as certified
from certified_run import copied as copied
from cli_cases import Command

import treegen as package
from treegen.report.certify.document import canonical, read_certificate

pytestmark = pytest.mark.timeout(600)


def _line(out: str, what: str) -> str:
    (line,) = (line for line in out.splitlines() if line.startswith(what))
    return line


def test_a_moved_model_is_named_by_an_option(
    certified: Path, tmp_path: Path, treegen: Command
) -> None:
    moved = (certified / "model").rename(tmp_path / "moved")
    try:
        done = treegen("certify", certified / "run")
        assert (
            done.code == 2
            and "does not exist; check the path, or pass the path of the model as --model"
            in done.err
        )
        assert "path of the model as --model" in done.err
        file = tmp_path / "certificate.json"
        done = treegen("certify", certified / "run", "--model", moved, "-o", file)
        assert done.code == 0, done.err
        done = treegen("certify", certified / "run", "--model", tmp_path / "nowhere")
        assert done.code == 2 and "--model" not in done.err
    finally:
        moved.rename(certified / "model")
    assert file.read_bytes() == (certified / "run" / "certificate.json").read_bytes()


def test_added_metrics_can_be_left_out_again(copied: Path, treegen: Command) -> None:
    file = copied / "certificate.json"
    for ks in ("none", "2,4"):
        assert treegen("score", copied, "--pass-hat-k", ks).code == 0
        assert treegen("certify", copied).code == 0
        assert treegen("score", copied, "--pass-hat-k", "3").code == 0
        done = treegen("certify", "--check", file)
        remedy = f"`treegen score {copied} --pass-hat-k {ks}` gives the certified metrics"
        assert done.code == 1 and remedy in _line(done.out, "scores")
        assert treegen("score", copied, "--pass-hat-k", ks).code == 0
        done = treegen("certify", "--check", file)
        assert done.code == 0 and "--pass-hat-k" not in done.out


def test_metrics_of_the_eval_can_be_left_out(tmp_path: Path, treegen: Command) -> None:
    run = tmp_path / "run"
    words = ["-L", "2", "-n", "3", "--pass-hat-k", "2", "-o", run]
    assert treegen("eval", "gsm8k", *words).code == 0
    for _ in range(2):  # it stays left out
        done = treegen("score", run, "--pass-hat-k", "none", "--json")
        results = json.loads((run / "results.json").read_text())
        assert results["settings"]["pass_hat_ks"] == [] and "pass^2" not in done.out
    assert treegen("certify", run).code == 0


@pytest.mark.parametrize("ks", ["0", "x", "-1", ""])
def test_the_remedy_allows_only_what_is_accepted(copied: Path, ks: str, treegen: Command) -> None:
    for name in ("--pass-hat-k", "--k", "--maj"):
        done = treegen("score", copied, name, ks)
        assert done.code == 2 and "integers from 1 to" in done.err


def test_other_versions_of_the_audit_are_named(
    copied: Path, treegen: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = copied / "certificate.json"
    certificate, before = read_certificate(file)
    assert certificate.audit_version == package.__version__
    content = json.loads(before)
    content["audit"] = content["audit"][1:] or [
        {"kind": "empty-sample", "severity": "low", "count": 1, "total": 20, "unit": "samples"}
    ]
    for version, words in (
        (package.__version__, None),
        ("0.0.1", f"audited by treegen 0.0.1, now {package.__version__}"),
        (None, f"audited by treegen another version, now {package.__version__}"),
    ):
        content["audit_version"] = version
        if version is None:
            del content["audit_version"]
        file.write_bytes(canonical(content, indent=2) + b"\n")
        done = treegen("certify", "--check", file)
        line = _line(done.out, "audit")
        assert done.code == 1 and "DOES NOT HOLD" in line
        assert words in line if words else "audited by" not in line
    content["audit"] = json.loads(before)["audit"]
    file.write_bytes(canonical(content, indent=2) + b"\n")  # as from before the version was stored
    assert treegen("certify", "--check", file).code == 0


def test_an_edited_sample_does_not_hold(copied: Path, certified: Path, treegen: Command) -> None:
    lines = (copied / "samples.jsonl").read_text().splitlines(keepends=True)
    record = json.loads(lines[2])
    for edited in (json.dumps({**record, "text": "18"}) + "\n", "{\n"):
        (copied / "samples.jsonl").write_text("".join([*lines[:2], edited, *lines[3:]]))
        for options in ((), ("--model", certified / "model")):
            done = treegen("certify", "--check", copied / "certificate.json", *options)
            assert done.code == 1 and not done.document["holds"]
            assert _line(done.out, "samples ").startswith("samples       DOES NOT HOLD  samples.")
            assert "samples.jsonl, line 3: " in done.out and "--resume" not in done.out
            assert "not checked    because a sample is corrupt" in _line(done.out, "scores")
    assert "restore the file" in treegen("certify", copied).error


def test_with_another_model_only_the_model_does_not_hold(
    certified: Path, copied: Path, tmp_path: Path, treegen: Command
) -> None:
    shutil.copytree(certified / "model", other := tmp_path / "model")
    config = json.loads((other / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ messages }}"
    (other / "tokenizer_config.json").write_text(json.dumps(config))
    done = treegen("certify", "--check", copied / "certificate.json", "--model", other)
    assert done.code == 1
    assert [line.split()[0] for line in done.out.splitlines() if "DOES NOT HOLD" in line] == [
        "model"
    ]
    assert "pass the model of the run with --model" in _line(done.out, "model")
    for what in ("audit", "prompts", "redraw"):
        line = _line(done.out, what)
        assert line.split(maxsplit=1)[1] == "not checked    because the model differs"


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_files_of_keys_may_have_a_byte_order_mark(
    copied: Path, tmp_path: Path, treegen: Command
) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    assert treegen("certify", copied, "--sign", key).code == 0
    assert treegen("certify", copied, "--sign", key).code == 0  # signs again
    other = tmp_path / "other.json.sig"
    other.write_text("notes")
    done = treegen("certify", copied, "--sign", key, "-o", tmp_path / "other.json")
    assert done.code == 2 and f"{other} exists and is not a signature" in done.error
    assert other.read_text() == "notes" and not (tmp_path / "other.json").exists()
    public = Path(f"{key}.pub").read_text()
    for text in (public, f'me@example.org namespaces="treegen" {public}'):
        for mark, encoding in (
            (codecs.BOM_UTF8, "utf-8"),
            (codecs.BOM_UTF16_LE, "utf-16-le"),
            (codecs.BOM_UTF16_BE, "utf-16-be"),
        ):
            signer = tmp_path / "signer"
            signer.write_bytes(mark + text.replace("\n", "\r\n").encode(encoding))
            done = treegen("certify", "--check", copied / "certificate.json", "--signer", signer)
            assert done.code == 0 and "holds" in _line(done.out, "signature"), done.out
