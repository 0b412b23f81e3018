"""What is said of a file that cannot be read."""

from pathlib import Path

import pytest

from treegen.common.files import describe_read_error


def told(path: Path) -> str:
    with pytest.raises(OSError) as caught:
        path.read_bytes()
    return describe_read_error(path, caught.value)


def test_a_missing_file_is_told_by_the_names_that_are_like_it(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").touch()
    assert told(tmp_path / "tset.jsonl").endswith("does not exist; did you mean 'test.jsonl'?")
    assert told(tmp_path / "q").endswith("q does not exist; check the path")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    path = tmp_path / "dta" / "test.jsonl"
    where = f"{path} does not exist: there is no {tmp_path / 'dta'}; did you mean 'data'?"
    assert told(path) == where


def test_a_relative_name_is_looked_for_where_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test.jsonl").touch()
    assert told(Path("test.json")) == "test.json does not exist; did you mean 'test.jsonl'?"


def test_a_folder_is_told_with_a_file_of_it(tmp_path: Path) -> None:
    (tmp_path / "b.csv").touch()
    assert told(tmp_path).endswith("it is a folder; name a file in it, such as b.csv")


def test_other_reasons_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert told(tmp_path / "file" / "in").endswith("is a file; check the path")
    assert "chmod u+r" in describe_read_error("x", PermissionError(13, "Permission denied"))
    assert "cannot read x: Input/output error" in describe_read_error(
        "x", OSError(5, "Input/output error")
    )
