"""Data in packed files: as unpacked ones, and a file that is made to fill the memory is refused."""

import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from treegen.common.files import max_unpacked_size
from treegen.errors import DataError
from treegen.tasks.common.files import column, csv_rows, parse_rows, read_any

_MIB = 1 << 20
ROW = b'{"question": "How many?", "answer": "2"}\n'


def _gzip(path: Path, unit: bytes) -> Path:
    with gzip.open(path, "wb", compresslevel=1) as file:
        block = unit * (_MIB // len(unit))
        for _ in range(80 * _MIB // len(block)):
            file.write(block)
    return path


def _one_value(path: Path) -> Path:
    """A long text in every row, which is stored once."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 500, pa.int32()), pa.array(["x" * _MIB]))
    pq.write_table(pa.table({"question": texts}), path)
    return path


def _in_lists(path: Path) -> Path:
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 500, pa.int32()), pa.array(["x" * _MIB]))
    lists = pa.ListArray.from_arrays(pa.array(range(501), pa.int32()), texts)
    pq.write_table(pa.table({"question": lists}), path)
    return path


def _many_texts(path: Path) -> Path:
    table = pa.table({"question": ["y" * 10_000] * 8_000})
    pq.write_table(table, path, compression="zstd", use_dictionary=False)
    return path


def _no_values(path: Path) -> Path:
    pq.write_table(pa.table({"question": pa.nulls(9_000_000)}), path)
    return path


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("zeros.jsonl.gz", lambda path: _gzip(path, bytes(4096))),
        ("lines.jsonl.gz", lambda path: _gzip(path, b"\n" * 4096)),
        ("rows.jsonl.gz", lambda path: _gzip(path, ROW * 100)),
        ("one.parquet", _one_value),
        ("lists.parquet", _in_lists),
        ("texts.parquet", _many_texts),
        ("none.parquet", _no_values),
    ],
)
def test_a_file_that_is_made_to_fill_the_memory_is_refused(
    tmp_path: Path, name: str, make: Callable[[Path], Path]
) -> None:
    path = make(tmp_path / name)
    assert path.stat().st_size < 2 * _MIB
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"more than .* if you trust the file, ") as caught:
            list(read_any(path))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert peak < 5 * max_unpacked_size(path.stat().st_size) // 2


def test_blank_lines_take_no_extra_memory() -> None:
    content = b"\n" * (_MIB // 2) + ROW
    tracemalloc.start()
    try:
        ((line, row),) = parse_rows(content, "here")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (line, row) == (_MIB // 2 + 1, json.loads(ROW))
    assert peak < 2 * _MIB


def test_rows_share_the_names_of_their_fields() -> None:
    (_, one), (_, other) = parse_rows(b'{"the question": 1}\n' * 2, "here")
    assert next(iter(one)) is next(iter(other))


def test_a_csv_file_takes_its_size_while_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("question,answer\n" + "1+1?,2\n" * (_MIB // 4))
    tracemalloc.start()
    try:
        num_rows = sum(1 for _ in csv_rows(file))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_rows == _MIB // 4
    assert peak < 2 * file.stat().st_size


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"question,answer\ncaf\xe9?,2\n", "a.csv is not UTF-8; save the file as UTF-8"),
        (b"caf\xe9,answer\n1+1?,2\n", "a.csv is not UTF-8; save the file as UTF-8"),
        (
            b"question,answer\n" + b"x" * 200_000 + b",2\n",
            r"a.csv, line 2: field larger than field limit \(131072\); fix the line, or save the "
            "rows as JSON Lines",
        ),
    ],
)
def test_a_csv_file_that_cannot_be_read_is_an_error(
    tmp_path: Path, content: bytes, error: str
) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError, match=error):
        list(csv_rows(tmp_path / "a.csv"))


def test_packed_rows_are_those_of_the_unpacked_file(tmp_path: Path) -> None:
    rows = [
        {"id": at, "texts": [f"{at}" * (at % 7), None], "more": {"share": at / 7}}
        for at in range(3000)
    ]
    content = "\r\n".join(map(json.dumps, rows)).encode()
    (tmp_path / "a.jsonl").write_bytes(content)
    half = len(content) // 2  # members of a gzip file are one after another
    (tmp_path / "a.jsonl.gz").write_bytes(
        gzip.compress(content[:half]) + gzip.compress(content[half:]) + bytes(8)
    )
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=1100)
    expected = list(enumerate(rows, start=1))
    for name in ("a.jsonl", "a.jsonl.gz", "a.parquet"):
        assert list(read_any(tmp_path / name)) == expected
    pq.write_table(pa.table({"question": pa.array([], pa.string())}), tmp_path / "a.parquet")
    assert not list(read_any(tmp_path / "a.parquet"))


def test_max_unpacked_size() -> None:
    """Rows that repeat a long text pass, and so do large files of pictures."""
    assert max_unpacked_size(1000) == 64 * _MIB
    assert max_unpacked_size(2 * _MIB) == 200 * _MIB
    assert max_unpacked_size(100 * _MIB) == 1024 * _MIB
    assert max_unpacked_size(4096 * _MIB) == 8 * 4096 * _MIB


def test_lines_of_a_csv_file_have_the_numbers_that_ids_were_made_of(tmp_path: Path) -> None:
    """The row after an empty line has the number of that line, as with csv.DictReader."""
    file = tmp_path / "a.csv"
    file.write_text("question,answer\n1+1?,2\n\n2+2?,4\n3+3?,6\n")
    rows = [(line, row["answer"]) for line, row in csv_rows(file)]
    assert rows == [(2, "2"), (3, "4"), (5, "6")]


def test_a_csv_row_with_a_comma_outside_quotes_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text('question,answer\n"One, or two?",2, \nOne, or two?,2\n')
    rows = csv_rows(file)
    assert next(iter(rows)) == (2, {"question": "One, or two?", "answer": "2"})
    with pytest.raises(DataError, match="line 3 has more cells than the header; put quotes"):
        list(rows)


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("a.csv", "question,answer,answer\n1+1?,2,3\n", "has two columns named 'answer'; rename"),
        ("a.jsonl", '{"answer": "2", "answer": "3"}', "line 1 has two fields named 'answer'; fix"),
        ("a.json", '[{"answer": "2", "answer": "3"}]', "has two fields named 'answer'; rename"),
        ("a.parquet", None, "has two columns named 'answer'; rename"),
    ],
)
def test_two_columns_of_the_same_name_are_an_error(
    tmp_path: Path, name: str, content: str | None, error: str
) -> None:
    file = tmp_path / name
    if content is None:
        pq.write_table(pa.table([["2"], ["3"]], names=["answer", "answer"]), file)
    else:
        file.write_text(content)
    with pytest.raises(DataError, match=error):
        list(read_any(file))


def test_the_error_of_two_columns_shows_the_beginning_of_a_long_name() -> None:
    line = b'{"%s": 1, "%s": 2}' % (b"k" * 100_000, b"k" * 100_000)
    with pytest.raises(DataError, match="has two fields named 'kkk") as raised:
        list(parse_rows(line, "a.jsonl"))
    assert len(str(raised.value)) < 200


def test_a_spreadsheet_may_write_columns_without_a_name(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("question,answer,,\n1+1?,2,,\n")
    assert next(iter(read_any(file))) == (2, {"question": "1+1?", "answer": "2", "": ""})


def test_two_columns_that_differ_in_case_are_an_error_if_a_task_reads_them() -> None:
    row = {"Answer": "2", " answer": "3", "answer ": None, "question": "1+1?"}
    assert column(row, ("question", "answer")) == "1+1?"
    with pytest.raises(ValueError, match="columns 'Answer' and ' answer' differ only in case or"):
        column(row, ("answer",))
