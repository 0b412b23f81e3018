"""Certificates: every edit is found, honest runs hold, and signatures and foreign files."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from certified_run import certified as certified
from certified_run import copied as copied
from cli_cases import Command, write_jsonl
from foreign_logs import generated_rows, write_lm_eval
from report_cases import edit_run, make_run, set_fingerprint

from treegen import demo, evaluate
from treegen.errors import InputError, TreegenError
from treegen.evals.pipeline.listener import Listener
from treegen.report.certify import signature
from treegen.report.certify.build import (
    certify_run,
    describe_run,
    load_job_of,
    write_certificate,
)
from treegen.report.certify.check import CertificateCheck, check_certificate
from treegen.report.certify.document import (
    Certificate,
    canonical,
    find_differences,
    find_other_conditions,
    read_certificate,
)
from treegen.report.certify.signature import HEADER
from treegen.report.exchange import export_run, import_log
from treegen.runs import RunDir
from treegen.runs.record_format import decode_record, encode_record

pytestmark = pytest.mark.timeout(600)


def _check(folder: Path, run: Path | None = None, **options: Any) -> CertificateCheck:
    run = run or folder / "run"
    choices = {"model": str(folder / "model")}
    return check_certificate(run / "certificate.json", None, choices, Listener(), **options)


def _results(check: CertificateCheck) -> dict[str, bool | None]:
    return {part.what: part.holds for part in check.checks}


def test_an_untouched_run_holds(certified: Path) -> None:
    check = _check(certified, redraw=20, redraw_seed=0)
    assert check.holds, str(check)
    assert _results(check) == {
        "signature": None,
        **dict.fromkeys(("settings", "data", "task", "samples", "scores", "results.json"), True),
        **dict.fromkeys(("audit", "model", "prompts", "redraw"), True),
    }
    assert "20 of 20 have the same tokens" in str(check) and "chosen by seed 0" in str(check)
    again = certify_run(certified / "run", {}, Listener())
    assert again.content() == (certified / "run" / "certificate.json").read_bytes()


def test_a_large_tolerance_is_in_the_result(certified: Path) -> None:
    at_default = _check(certified, redraw=1, redraw_seed=0, tolerance=1e-3)
    assert "tolerance" not in _results(at_default)
    line = _check(certified, redraw=1, redraw_seed=0, tolerance=0.5).checks[-1]
    assert line.what == "tolerance" and line.holds is None
    assert "WARNING: 0.5 is larger than the default for this run, 0.001" in line.detail


@contextmanager
def _edited(path: Path, content: bytes) -> Iterator[None]:
    before = path.read_bytes()
    assert content != before
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)


Edit = Callable[[random.Random, Path], tuple[Path, bytes]]


def _other(rng: random.Random, value: Any) -> Any:
    """Return a value of the same type that differs by little."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + rng.choice([-1, 1])
    if isinstance(value, float):
        return value + rng.choice([-1, 1]) * 10.0 ** rng.randrange(-6, 0)
    if isinstance(value, list):
        place = rng.randrange(len(value)) if value else 0
        return [_other(rng, v) if i == place else v for i, v in enumerate(value)] or [1]
    if value is None:
        return "x"
    place = rng.randrange(len(value) + 1)
    new = rng.choice([c for c in "0123456789abcdef" if value[place : place + 1] != c])
    return f"{value[:place]}{new}{value[place + 1 :]}"


def _edit_sample(rng: random.Random, folder: Path) -> tuple[Path, bytes]:
    path = folder / "run" / "samples.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    place = rng.randrange(len(lines))
    record = decode_record(lines[place])
    name = rng.choice([n for n in record if n not in ("problem_id", "sample_index", "time")])
    record[name] = _other(rng, record[name])
    lines[place] = encode_record(record)
    return path, b"".join(lines)


def _edit_settings(rng: random.Random, folder: Path) -> tuple[Path, bytes]:
    path = folder / "run" / "run.json"
    content = json.loads(path.read_text())
    if rng.random() < 0.5:
        group = content["settings"]["identity"]
        if rng.random() < 0.8:
            group = group[rng.choice(["sampling", "prompt"])]
        names = [n for n in group if not isinstance(group[n], dict)]
    else:
        group = (
            content[rng.choice(["versions"])] if rng.random() < 0.5 else content["settings"]["free"]
        )
        names = [n for n in group if n not in ("extra", "sources", "data", "fewshot_file", "model")]
    name = rng.choice(names)
    group[name] = _other(rng, group[name])
    set_fingerprint(content)
    return path, json.dumps(content).encode()


def _leaves(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from _leaves(inner, (*at, key))
    else:
        yield at


def _edit_leaf(rng: random.Random, content: Any, *, within: str = "") -> None:
    *above, last = rng.choice([at for at in _leaves(content) if not within or at[0] == within])
    for key in above:
        content = content[key]
    content[last] = [1] if content[last] in ([], {}) else _other(rng, content[last])


def _edit_score(rng: random.Random, folder: Path) -> tuple[Path, bytes]:
    path = folder / "run" / "results.json"
    content = json.loads(path.read_text())
    _edit_leaf(rng, content, within="report")
    return path, json.dumps(content).encode()


def _edit_data(rng: random.Random, folder: Path) -> tuple[Path, bytes]:
    path = folder / rng.choice(["words.jsonl", "words_fewshot.jsonl"])
    lines = path.read_text().splitlines()
    place = rng.randrange(4)
    row = json.loads(lines[place])
    name = rng.choice(["question", "target" if "target" in row else "answer"])
    text, mark, number = row[name].rpartition("#### ")  # the task reads the number alone
    row[name] = f"{text}{mark}{_other(rng, number)}"
    lines[place] = json.dumps(row)
    return path, "\n".join(lines).encode()


def _edit_model(rng: random.Random, folder: Path) -> tuple[Path, bytes]:
    path = rng.choice(sorted((folder / "model").iterdir()))
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return path, bytes(content)


def _edit_template(rng: random.Random, folder: Path) -> tuple[Path, bytes]:
    path = folder / "model" / "tokenizer_config.json"
    content = json.loads(path.read_text())
    content["chat_template"] = f"{{{{ messages[{rng.randrange(9)}].content }}}}"
    return path, json.dumps(content).encode()


def _edit_certificate(rng: random.Random, folder: Path) -> tuple[Path, bytes]:
    path = folder / "run" / "certificate.json"
    content = json.loads(path.read_text())
    # These versions may be others where a run is checked.
    libraries, version = content["task"].pop("libraries"), content.pop("audit_version")
    _edit_leaf(rng, content)
    content["task"]["libraries"], content["audit_version"] = libraries, version
    return path, canonical(content, indent=2) + b"\n"


_KINDS: tuple[Edit, ...] = (
    _edit_sample,
    _edit_sample,
    _edit_sample,
    _edit_settings,
    _edit_score,
    _edit_data,
    _edit_model,
    _edit_model,
    _edit_template,
    _edit_certificate,
)


@pytest.mark.parametrize("num", [30, pytest.param(200, marks=pytest.mark.soak)])
def test_every_single_edit_is_found(num: int, certified: Path) -> None:
    rng = random.Random(55)
    missed = []
    for number in range(num):
        edit = _KINDS[number % len(_KINDS)]
        path, content = edit(rng, certified)
        before = path.read_bytes()
        with _edited(path, content):
            try:
                found = not _check(certified).holds
            except TreegenError:
                found = True
        if not found:
            same = [i for i, (a, b) in enumerate(zip(before, content, strict=False)) if a != b]
            missed.append((number, edit.__name__, content[max(0, same[0] - 60) : same[0] + 60]))
    assert not missed
    assert _check(certified).holds


_FORGERIES: dict[str, Callable[[Any], Any]] = {
    "text": lambda text: text.replace("answer is ", "answer is 1"),
    "logprob": lambda logprob: logprob + 0.05,
    "tokens": lambda tokens: [*tokens[:-1], 5],
    "num_tokens": lambda count: count + 1,
    "finish_reason": lambda _: "length",
}


def test_forged_samples_that_are_certified_are_found_by_drawing_them_again(
    certified: Path, copied: Path
) -> None:
    from treegen.evals.pipeline.rescoring import rescore_run

    path = copied / "samples.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    places = [i for i, line in enumerate(lines) if b"answer is " in line]
    for place, (name, forge) in zip(places, _FORGERIES.items(), strict=False):
        record = decode_record(lines[place])
        lines[place] = encode_record({**record, name: forge(record[name])})
    path.write_bytes(b"".join(lines))
    rescore_run(copied, {}, Listener())
    write_certificate(copied, {}, Listener())
    check = _check(certified, copied, redraw=20)
    assert [part.what for part in check.checks if part.holds is False] == ["redraw"]
    assert "15 of 20 have the same tokens" in str(check) and "5 differ, such as" in str(check)


def test_seeds_and_prompts_follow_from_the_settings(certified: Path, copied: Path) -> None:
    path = copied / "samples.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    record = decode_record(lines[3])
    for name, value in (("seed", 7), ("prompt_hash", "0" * 32)):
        path.write_bytes(b"".join([*lines[:3], encode_record({**record, name: value}), *lines[4:]]))
        with pytest.raises(InputError, match="of 1 samples differ from"):
            certify_run(copied, {"model": str(certified / "model")}, Listener())
    del record["seed"]
    path.write_bytes(b"".join([*lines[:3], encode_record(record), *lines[4:]]))
    assert "the seeds of 1 samples differ from" in str(_check(certified, copied))


def test_samples_left_out_are_missing(certified: Path, copied: Path) -> None:
    """A certificate made by hand of the right samples alone agrees with its run."""
    path = copied / "samples.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-3]))
    with RunDir.open(copied) as run:
        part = describe_run(run, load_job_of(run, {}), {}, Listener(), None)
    certificate, _ = read_certificate(copied / "certificate.json")
    forged = Certificate(**dict(part), model=certificate.model)
    (copied / "certificate.json").write_bytes(forged.content())
    assert "3 of 20 samples are missing" in str(_check(certified, copied))


def test_a_certificate_of_another_model_is_found(certified: Path, copied: Path) -> None:
    """run.json names another model, and the certificate lists the files of the right one."""
    other = {"fingerprint": "0" * 32}
    edit_run(copied, lambda run: run["settings"]["identity"]["model"].update(other))
    with RunDir.open(copied) as run:
        part = describe_run(run, load_job_of(run, {}), {}, Listener(), None)
    certificate, _ = read_certificate(copied / "certificate.json")
    forged = Certificate(**dict(part), model=certificate.model)
    (copied / "certificate.json").write_bytes(forged.content())
    found = _results(_check(certified, copied, redraw=1))
    assert found["settings"] and found["model"] is False and found["redraw"] is None


def test_the_page_shows_what_the_command_prints(
    repository: Path, tmp_path: Path, treegen: Command
) -> None:
    run, file = repository / "examples" / "run", tmp_path / "example.json"
    assert treegen("certify", run, "--model", "demo", "-o", file).code == 0
    words = ["--model", "demo", "--redraw", "20", "--redraw-seed", "1"]
    done = treegen("certify", run, "--check", file, *words)
    assert done.code == 0, done.err
    page = (repository / "docs" / "trust.md").read_text()

    def lines(text: str) -> set[str]:
        found = re.sub(r"(at most|largest difference) [0-9.e-]+", r"\1 X", text).splitlines()
        return {line for line in found if "other versions here" not in line}

    assert lines(done.out) <= lines(page)


def test_choices_are_scored_again(tmp_path: Path, treegen: Command) -> None:
    rows = [
        {
            "id": str(i),
            "question": f"What is {i} + 1?",
            "choices": {"text": [str(i + 1), str(i), "9"], "label": ["A", "B", "C"]},
            "answerKey": "A",
        }
        for i in range(4)
    ]
    data = write_jsonl(tmp_path / "data.jsonl", rows)
    run = tmp_path / "run"
    evaluate("arc-easy", "demo", data=str(data), num_fewshot=0, output=run, progress=False)
    done = treegen("certify", run)
    assert done.code == 0, done.err
    file = run / "certificate.json"
    done = treegen("certify", "--check", file, "--model", "demo", "--redraw", "9")
    assert done.code == 0 and "4 of 4 have the same tokens" in done.out, done.out
    path = run / "samples.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    record = decode_record(lines[0])
    record["choice_logprobs"][0] += 1
    path.write_bytes(b"".join([encode_record(record), *lines[1:]]))
    assert treegen("score", run).code == 0 and treegen("certify", run).code == 0
    done = treegen("certify", "--check", file, "--model", "demo", "--redraw", "9")
    assert done.code == 1 and "choice_logprobs" in done.out, done.out


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_signatures_are_those_of_openssh(
    certified: Path, copied: Path, tmp_path: Path, treegen: Command
) -> None:
    keys = []
    for name in ("mine", "theirs"):
        keys.append(tmp_path / name)
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys[-1])]
        subprocess.run(words, check=True)
    public, other = (Path(f"{key}.pub") for key in keys)
    file = copied / "certificate.json"
    done = treegen("certify", copied, "--sign", keys[0], "--json")
    assert done.code == 0 and (copied / "certificate.json.sig").is_file(), done.err

    def result(*words: object) -> tuple[int, str]:
        done = treegen("certify", "--check", file, *words)
        return done.code, done.out.splitlines()[0] if done.out else done.err

    code, line = result("--signer", public)
    assert code == 0 and line.split()[:2] == ["signature", "holds"]
    code, line = result()
    assert code == 0 and "the signature with ED25519 key SHA256:" in line
    assert line.split()[:2] == ["signature", "valid"] and line.endswith("pass --signer FILE")
    code, line = result("--signer", other)
    assert code == 1 and "DOES NOT HOLD" in line
    (both := tmp_path / "both").write_text(f"# ours\n{other.read_text()}{public.read_text()}")
    code, line = result("--signer", both)
    assert code == 0 and line.split()[:2] == ["signature", "holds"]
    code, line = result("--signer", keys[0])
    assert code == 2 and "mine contains no public SSH key; pass a file" in line
    allowed = tmp_path / "allowed"
    allowed.write_text(f'me@example.org namespaces="treegen" {public.read_text()}')
    assert result("--signer", allowed)[0] == 0
    allowed.write_text(f'me@example.org namespaces="git" {public.read_text()}')
    assert result("--signer", allowed)[0] == 1
    allowed.write_text(f"me@example.org {public.read_text()}")
    stock = ["ssh-keygen", "-Y", "verify", "-f", str(allowed), "-I", "me@example.org"]
    stock += ["-n", "treegen", "-s", f"{file}.sig"]
    assert subprocess.run(stock, input=file.read_bytes(), check=False).returncode == 0
    content = json.loads(file.read_text())
    content["task"]["libraries"]["sympy"] = "0"
    with _edited(file, canonical(content, indent=2) + b"\n"):
        for options in (["--signer", public], []):
            code, line = result(*options)
            assert code == 1 and "DOES NOT HOLD" in line
    other_model = ["certify", copied, "--model", certified / "model"]
    assert treegen(*other_model).code == 0  # the same content, so the signature still holds
    (copied / "certificate.json.sig").unlink()
    code, line = result("--signer", public)
    assert code == 1 and "does not exist" in line


def test_without_ssh_keygen_a_signature_is_an_error(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (key := tmp_path / "key").write_text("ssh-ed25519 AAAA")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match="install OpenSSH"):
        write_certificate(copied, {}, Listener(), key=key)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a certificate"),
        (b"[]", "not a certificate"),
        (b'{"format": "treegen-certificate"}', "'run': Field required"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"audit": NaN}', "not a certificate"),
        (b"\xff\xfe", "not a certificate"),
    ],
)
def test_a_foreign_file_is_an_early_error(
    tmp_path: Path, treegen: Command, content: bytes, message: str
) -> None:
    file = tmp_path / "certificate.json"
    file.write_bytes(content)
    done = treegen("certify", "--check", file)
    assert done.code == 2 and message in done.err and "Traceback" not in done.err


def test_a_file_in_another_form_is_an_error(copied: Path, treegen: Command) -> None:
    file = copied / "certificate.json"
    text = file.read_text()
    changes = [
        ('"audit"', '"other": 1, "audit"', "not permitted"),
        ('"schema_version": 1', '"schema_version": 2', "schema_version"),
        ('"schema_version": 1', '"schema_version": 1,\n  "schema_version": 1', "canonical"),
        ('"planned": 20', '"planned": 1e999', "planned"),
        ('"planned": 20', '"planned": -1', "planned"),
        ('"value": 1.0', '"value": 1e999', "canonical"),
    ]
    for old, new, message in changes:
        if old in text:
            file.write_text(text.replace(old, new, 1))
            done = treegen("certify", "--check", file)
            assert done.code == 2 and message in done.err, done.err
    file.unlink()
    file.symlink_to("/dev/zero")
    assert treegen("certify", "--check", file).code == 2


def test_names_in_a_certificate_are_no_paths(certified: Path, copied: Path, tmp_path: Path) -> None:
    (secret := tmp_path / "secret.json").write_text("{}")
    file = copied / "certificate.json"
    content = json.loads(file.read_text())
    files = content["model"]["files"]
    files[f"../{secret.name}"] = files.pop("config.json")
    file.write_bytes(canonical(content, indent=2) + b"\n")
    check = _check(certified, copied)
    assert not check.holds and "certified null" in str(check)


def test_runs_that_cannot_be_certified_are_errors(
    certified: Path,
    copied: Path,
    tmp_path: Path,
    treegen: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(certified / "model", changed := tmp_path / "model")
    config = json.loads((changed / "generation_config.json").read_text())
    (changed / "generation_config.json").write_text(json.dumps({**config, "top_k": 3}))
    with monkeypatch.context() as context:  # the model is checked before samples are scored
        context.setattr("treegen.report.certify.build.describe_run", None)
        done = treegen("certify", copied, "--model", changed)
        assert done.code == 2 and "is not the model of" in done.err
    results = json.loads((copied / "results.json").read_text())
    results["report"]["metrics"][0]["value"] = 1.0
    (copied / "results.json").write_text(json.dumps(results))
    done = treegen("certify", copied)
    assert done.code == 2 and "treegen score" in done.err
    lines = (copied / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (copied / "samples.jsonl").write_bytes(b"".join(lines[:-1]))
    done = treegen("certify", copied)
    assert done.code == 2 and "1 of 20 samples of the run" in done.err
    samples = (copied / "samples.jsonl").read_bytes()
    for path in (
        copied / "samples.jsonl",
        copied,
        ".",
        "",
        tmp_path / "missing" / "c.json",
    ):
        done = treegen("certify", copied, "-o", path)
        assert (
            done.code == 2 and "choose another path" in done.err and len(done.err.splitlines()) == 1
        ), path
    assert (copied / "samples.jsonl").read_bytes() == samples
    for words in (
        ["certify"],
        ["certify", copied, "--redraw", "3"],
        ["certify", "--check", "x", "--sign", "y"],
        ["certify", "--check", "x", "--tolerance", "1"],
        ["certify", "--check", certified / "run" / "certificate.json", "--redraw", "2"],
    ):
        assert treegen(*words).code == 2


def test_a_tolerance_is_checked_before_the_run_is(certified: Path, treegen: Command) -> None:
    words = ["certify", "--check", certified / "run" / "certificate.json", "--model", "nowhere"]
    for value in ("nan", "inf", "-1"):
        done = treegen(*words, "--redraw", "1", "--tolerance", value)
        assert done.code == 2 and "--tolerance must be at least 0 and finite" in done.err
        assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize(
    "option", [("--adapter", "x"), ("--device", "cpu"), ("--trust-remote-code",)]
)
def test_options_of_a_model_need_the_model(
    option: tuple[str, ...], certified: Path, treegen: Command
) -> None:
    done = treegen("certify", "--check", certified / "run" / "certificate.json", *option)
    assert done.code == 2 and f"{option[0]} has no effect without --model" in done.err


def test_the_audit_holds_where_the_model_is_elsewhere(tmp_path: Path, treegen: Command) -> None:
    """Findings on the tokenizer are those of the model named, not of the place in the run."""
    shutil.copytree(demo.model_path(), model := tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    run = tmp_path / "run"
    evaluate("gsm8k", str(model), output=run, limit=2, num_samples=1, max_tokens=8, progress=False)
    write_certificate(run, {}, Listener())
    certificate, _ = read_certificate(run / "certificate.json")
    assert "template-not-applied" in {finding.kind for finding in certificate.audit}
    moved = model.rename(tmp_path / "moved")
    for words in ([], ["--model", moved]):
        done = treegen("certify", "--check", run / "certificate.json", *words)
        assert done.code == 0, done.out
    content = json.loads((run / "certificate.json").read_text())
    content["audit"] = [f for f in content["audit"] if f["kind"] != "template-not-applied"]
    (run / "certificate.json").write_bytes(canonical(content, indent=2) + b"\n")
    done = treegen("certify", "--check", run / "certificate.json", "--model", moved)
    assert done.code == 1 and 'now [{"kind": "template-not-applied"' in done.out


def test_metrics_that_were_added_are_named(copied: Path, treegen: Command) -> None:
    assert treegen("score", copied, "--pass-hat-k", "2").code == 0
    done = treegen("certify", "--check", copied / "certificate.json")
    (line,) = (line for line in done.out.splitlines() if line.startswith("scores"))
    assert done.code == 1 and "report.metrics: certified [], now [{" in line and "pass^2" in line


def test_runs_with_early_stopping_are_refused(tmp_path: Path, treegen: Command) -> None:
    done = treegen("certify", make_run(tmp_path / "run", stop_when="decided", stop_batch=4))
    assert done.code == 2 and "used early stopping" in done.err
    assert "resume" not in done.err


def test_imported_runs_are_refused(tmp_path: Path, treegen: Command) -> None:
    log = write_lm_eval(tmp_path / "log", {"gsm8k": generated_rows()})
    (run, *_) = import_log(log, tmp_path / "imported")
    done = treegen("certify", run)
    assert done.code == 2 and "imported" in done.err


def test_compare_and_exports_know_certificates(
    certified: Path, tmp_path: Path, treegen: Command
) -> None:
    run, other = certified / "run", tmp_path / "other"
    certificate, content = read_certificate(run / "certificate.json")
    assert certificate.content() == content
    done = treegen("compare", run, run, "--no-plots")
    assert done.code == 0 and "certificates" not in done.err
    settings: dict[str, Any] = {
        "data": str(certified / "words.jsonl"),
        "fewshot_file": str(certified / "words_fewshot.jsonl"),
        "task_args": {"form": "self-consistency"},
    }
    model = str(certified / "model")
    settings |= {"limit": 4, "num_samples": 5, "progress": False, "temperature": 0.9}
    evaluate("gsm8k", model, output=other, **settings)
    write_certificate(other, {}, Listener())
    done = treegen("compare", run, other, "--no-plots", "--json")
    assert "differ in more than the model: settings.sampling.temperature 0.7 / 0.9" in done.err
    assert json.loads(done.out)["certified_differences"]
    (aggregate, _) = export_run(run, "every-eval-ever", tmp_path / "every")
    details = json.loads(aggregate.read_text())["eval_library"]["additional_details"]
    assert details["certificate_sha256"] == certificate.sha256
    pytest.importorskip("inspect_ai")
    (log,) = export_run(run, "inspect", tmp_path / "log.json")
    stored = json.loads(log.read_text())["eval"]["metadata"]["treegen"]["certificate"]
    assert stored["sha256"] == certificate.sha256
    assert not list(find_differences(stored["content"], json.loads(content)))


def test_settings_of_a_certificate_may_have_any_content(certified: Path) -> None:
    certificate, _ = read_certificate(certified / "run" / "certificate.json")
    run = certificate.run.model_copy(update={"settings": {"model": "x"}})
    changed = certificate.model_copy(update={"run": run})
    assert not find_other_conditions(changed, changed)


def test_signers_may_have_any_name_in_a_locale_of_ascii(tmp_path: Path) -> None:
    program = tmp_path / "ssh-keygen"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    (tmp_path / "c.sig").write_bytes(HEADER)
    (tmp_path / "signers").write_text("ssh-ed25519 AAAAx \u00e9\n", encoding="utf-8")
    code = (
        "from pathlib import Path; from treegen.report.certify.signature import verify; "
        "print(verify(b'{}', Path('c.sig'), Path('signers')))"
    )
    locale = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, **locale, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "no signer in signers made the signature" in done.stdout, done.stderr


def test_a_program_that_does_not_end_or_start_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "ssh-keygen"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    (tmp_path / "c.sig").write_bytes(HEADER)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(signature, "_SECONDS", 0.2)
    with pytest.raises(InputError, match=r"cannot be run: .* timed out"):
        signature.verify(b"{}", tmp_path / "c.sig", None)
    program.write_text("no program")
    with pytest.raises(InputError, match=r"cannot be run: .* [Ee]xec format error"):
        signature.verify(b"{}", tmp_path / "c.sig", None)
