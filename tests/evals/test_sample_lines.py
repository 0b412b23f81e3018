"""Files with a line for each sample: scores of the user's own, and labels by people."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from treegen.common import files
from treegen.errors import TreegenError
from treegen.evals.judging.judgements import labels_of
from treegen.evals.scoring.vote_tables import SCORES, VoteInputs

Read = Callable[[Path], Mapping[tuple[str, int], float]]


def _scores(path: Path) -> Mapping[tuple[str, int], float]:
    return VoteInputs.of(path.parent).scores


def _labels(path: Path) -> Mapping[tuple[str, int], float]:
    return labels_of(path, {"bad": 0.0, "good": 1.0}, "mine")


READERS = pytest.mark.parametrize(("read", "name"), [(_scores, "score"), (_labels, "label")])


@READERS
def test_only_newlines_end_lines_and_a_byte_order_mark_is_skipped(
    tmp_path: Path, read: Read, name: str
) -> None:
    path = tmp_path / SCORES
    line = '{"problem_id": "%s", "sample_index": %s, "%s": 0.5, "text": "a\u2028b\x85"}'
    lines = [line % ("p\u2029", "0", name), "", line % ("q", "1.0", name)]
    path.write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8", newline="")
    assert read(path) == {("p\u2029", 0): 0.5, ("q", 1): 0.5}


@READERS
def test_only_the_length_of_lines_is_limited(
    tmp_path: Path, read: Read, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`treegen verify` writes a line for each sample, and some runs have millions."""
    path = tmp_path / SCORES
    lines = [f'{{"problem_id": "p", "sample_index": {i}, "{name}": 0.5}}\n' for i in range(9)]
    path.write_text("".join(lines))
    monkeypatch.setattr(files.read_text, "__defaults__", (100,))
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 100)
    assert len(read(path)) == 9
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 20)
    with pytest.raises(TreegenError, match="a line has more than 20 B"):
        read(path)


def test_labels_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(TreegenError, match=r"none does not exist; check the path$"):
        _labels(tmp_path / "none")


@READERS
@pytest.mark.parametrize(
    ("index", "value", "reason"),
    [
        ("0.7", "0.5", "sample_index must be a whole number, got 0.7"),
        ("true", "0.5", "sample_index must be a whole number, got True"),
        ("1e999", "0.5", "sample_index must be a whole number, got inf"),
        ("0", "1" + "0" * 400, r"too large|must be from 0 to 1"),
        ("1", "0.5", "this sample already has a"),
    ],
)
def test_a_line_that_lies_is_an_error_that_names_it(
    tmp_path: Path, read: Read, name: str, index: str, value: str, reason: str
) -> None:
    path = tmp_path / SCORES
    rows = [("1", "0.5"), (index, value)]
    path.write_text(
        "".join(f'{{"problem_id": "p", "sample_index": {i}, "{name}": {v}}}\n' for i, v in rows)
    )
    with pytest.raises(TreegenError, match=reason) as caught:
        read(path)
    assert f"{SCORES}:2 " in str(caught.value) or f"{SCORES}, line 2: " in str(caught.value)
    assert len(str(caught.value)) < 500
