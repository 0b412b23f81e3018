"""Files of other people are read with limits on size, lines, nesting and aliases.

The files here are sparse: they have a terabyte and take no space on the disk.
"""

import os
import time
from pathlib import Path

import pytest
from cli_cases import Command
from foreign_logs import STAMP, generated_rows, write_lm_eval
from report_cases import make_run

from treegen.common import files
from treegen.common.files import FileTooLargeError, read_bytes, read_lines, read_text
from treegen.common.yaml_texts import parse_yaml
from treegen.errors import TreegenError
from treegen.report.exchange import import_log

pytestmark = pytest.mark.timeout(120)

NESTED = "[" * 100_000


def make_sparse(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, 1 << 40)
    return path


def make_aliases(levels: int, form: str = "[{}]") -> str:
    """Return YAML of a few lines that stands for 9**levels values."""
    lines = ["a0: &a0 {k: v}"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} " + form.format(", ".join([f"*a{level - 1}"] * 9)))
    return "\n".join(lines)


def test_large_file_is_not_read(tmp_path: Path) -> None:
    path = make_sparse(tmp_path / "large")
    for read in (read_bytes, read_text):
        with pytest.raises(FileTooLargeError, match=r"it has more than 256\.0 MiB"):
            read(path)
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    with pytest.raises(FileTooLargeError, match="it has more than 4 B"):
        read_bytes(path, 4)


@pytest.mark.usefixtures("elsewhere")
def test_file_larger_than_the_memory_is_not_read(
    tmp_path: Path, treegen: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "count_host_bytes", lambda: 1 << 10)
    path = tmp_path / "a.jsonl"
    path.touch()
    os.truncate(path, 1 << 20)
    error = treegen("eval", "gsm8k", "-M", "demo", "--data", path).error
    assert f"cannot read {path}: its 1.0 MiB do not fit into memory; pass a smaller part" in error


def test_file_that_states_no_size_is_read_up_to_the_limit() -> None:
    path = Path("/proc/self/status")
    assert path.stat().st_size == 0
    assert read_text(path).startswith("Name:")
    with pytest.raises(FileTooLargeError):
        read_text(path, 10)


def test_text_is_that_of_path_read_text(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("a\r\nb\rc\n\r\u2028ä".encode())
    assert read_text(path) == path.read_text(encoding="utf-8")


def test_lines_end_at_newlines_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"a\r\n\n\x85\x0cb\nlast")
    with path.open("rb") as file:
        assert [*read_lines(path)] == [*file]
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 4)
    assert len([*read_lines(path)]) == 4
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 3)
    with pytest.raises(FileTooLargeError, match="a line has more than 3 B"):
        [*read_lines(path)]


def test_large_run_json(tmp_path: Path, treegen: Command) -> None:
    run = make_run(tmp_path / "run", num_problems=2, num_samples=2)
    make_sparse(run / "run.json")
    error = treegen("show", run).error
    assert "run.json: it has more than 256.0 MiB, which is more than usual" in error


def test_long_lines_of_a_run_and_a_log(
    tmp_path: Path, treegen: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", num_problems=2, num_samples=2)
    log = write_lm_eval(tmp_path / "logs", {"task": generated_rows()})
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 64, raising=False)
    assert "samples.jsonl: a line has more than 64 B" in treegen("show", run).error
    with pytest.raises(TreegenError, match="a line has more than 64 B"):
        import_log(log, tmp_path / "imported")


@pytest.mark.parametrize("name", ["log.json", f"results_{STAMP}.json"])
def test_large_logs(name: str, tmp_path: Path, treegen: Command) -> None:
    if name == "log.json":
        pytest.importorskip("inspect_ai")
    path = make_sparse(tmp_path / name)
    assert "it has more than" in treegen("import", path, "-o", tmp_path / "run").error


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("--config", "a.yaml"),
        ("--json-schema", "a.json"),
        ("--data", "a.jsonl"),
        ("--data", "a.csv"),
        ("--data", "a.jsonl.gz"),
        ("--samples", "a.json"),
        ("--chat-template", "a.jinja"),
    ],
)
def test_large_files_of_an_eval(option: str, name: str, treegen: Command, tmp_path: Path) -> None:
    path = make_sparse(tmp_path / name)
    error = treegen("eval", "gsm8k", "-M", "demo", option, path).error
    assert "it has more than" in error, error


@pytest.mark.parametrize("name", ["own.yaml", "own.jinja"])
def test_large_rubrics(name: str, tmp_path: Path, treegen: Command) -> None:
    run = make_run(tmp_path / "run", num_problems=2, num_samples=1)
    done = treegen("judge", run, "--judge", "demo", "--rubric", make_sparse(tmp_path / name))
    assert "must have at most 1,000,000 bytes; shorten the file" in done.error


# YAML

BAD_YAML = {
    "nested": (f"a: {NESTED}", "nested more than 100 levels deep"),
    "aliases": (make_aliases(9), "with aliases, values have more than 10,000,000 characters"),
    "merged": (make_aliases(9, "{{<<: [{}]}}"), "with aliases, values have more than 10,000,000"),
    "long": (f"a: &a {'x' * 200_000}\nb: [{', '.join(['*a'] * 99)}]", "with aliases, values have"),
    "itself": ("a: &a [1, [*a]]", "the value of 'a' contains itself"),
    "number": (f"a: {':'.join(['1'] * 100_000)}", "a number has more than 1,000 digits"),
    "month": ("a: 2024-13-01", "month must be in"),
    "empty int": ("a: !!int ''", "string index out of range"),
}


@pytest.mark.parametrize("name", BAD_YAML)
def test_bad_yaml_ends_in_one_short_error(name: str) -> None:
    text, reason = BAD_YAML[name]
    start = time.monotonic()
    with pytest.raises(ValueError, match=reason) as caught:
        parse_yaml(text)
    assert "\n" not in str(caught.value) and time.monotonic() - start < 2


def test_aliases_and_merge_keys_of_ordinary_size_are_read() -> None:
    text = "a: &a {x: 1}\nb: [*a, *a]\nc: {<<: *a, y: 2}\n"
    assert parse_yaml(text) == {"a": {"x": 1}, "b": [{"x": 1}] * 2, "c": {"x": 1, "y": 2}}
    assert parse_yaml("") is None
    assert parse_yaml("[" * 100 + "]" * 100) is not None
    for number in (f"'{'1' * 2000}'", "-" * 2000):  # these are texts
        assert parse_yaml(f"a: {number}") == {"a": number.strip("'")}


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("name", ["nested", "aliases", "itself"])
def test_bad_yaml_of_configs_and_rubrics(name: str, tmp_path: Path, treegen: Command) -> None:
    text, reason = BAD_YAML[name]
    (path := tmp_path / "bad.yaml").write_text(text)
    assert reason in treegen("eval", "gsm8k", "-M", "demo", "--config", path).error
    run = make_run(tmp_path / "run", num_problems=2, num_samples=1)
    assert reason in treegen("judge", run, "--judge", "demo", "--rubric", path).error


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("name", ["nested", "aliases", "itself", "large"])
def test_bad_tasks_of_lm_eval(name: str, tmp_path: Path, treegen: Command) -> None:
    pytest.importorskip("lm_eval")
    text, reason = BAD_YAML.get(name, ("", "it has more than"))
    bad = tmp_path / "tasks" / "bad.yaml"
    bad.parent.mkdir()
    bad.write_text(f"task: bad\n{text}\n")
    if name == "large":
        make_sparse(bad)
    (including := bad.with_name("including.yaml")).write_text("task: mine\ninclude: bad.yaml\n")
    for path in (bad, including):
        done = treegen("eval", path, "-M", "demo")
        assert reason in done.error, done.err
    assert "lm-eval has no task" in treegen("eval", f"lm-eval:bad@{bad.parent}", "-M", "demo").error


# JSON


@pytest.mark.usefixtures("elsewhere")
def test_deeply_nested_json_ends_in_an_error(tmp_path: Path, treegen: Command) -> None:
    (path := tmp_path / "nested.json").write_text(NESTED)
    for arguments in (
        ("eval", "gsm8k", "-M", "demo", "--json-schema", path),
        ("eval", "gsm8k", "-M", "demo", "--samples", path),
        ("eval", "gsm8k", "-M", "demo", "--data", path),
        ("import", path, "-o", tmp_path / "imported"),
    ):
        done = treegen(*arguments)
        assert done.code == 2 and "Traceback" not in done.err, done.err
    run = make_run(tmp_path / "run", num_problems=2, num_samples=1)
    (run / "run.json").write_text(NESTED)
    assert "run.json is corrupt (the JSON is nested too deeply)" in treegen("show", run).error
