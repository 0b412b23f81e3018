"""Columns of log-probabilities: what is in them, and that a stop at any part loses nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
from cli_cases import Command, write_jsonl

from treegen import LLM
from treegen.errors import DataError, InputError, RunError
from treegen.integrations.score_texts import Progress, read_texts, score_texts

PROMPT = "Once upon a time there was a tree, and "
LINES: list[dict[str, Any]] = [
    *({"id": f"a{i}", "prompt": PROMPT, "completion": f"it had {i} leaves."} for i in range(9)),
    {"text": "A text alone."},
    {"prompt": [5, 6, 7, 8], "completion": [9]},
    {"text": [11, 12, 13]},
    *({"prompt": PROMPT, "completion": "x" * i} for i in range(1, 6)),
]


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return load(checkpoint)


def load(path: Path) -> LLM:
    return LLM(str(path), check=False, device="cpu", dtype="float32", memory="8MiB")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [
        row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()
    ]


def check(folder: Path, llm: LLM, lines: list[dict[str, Any]], top: int) -> None:
    """Compare columns with what `LLM.score` says of each text alone."""
    rows = rows_of(folder)
    assert [row["id"] for row in rows] == [
        line.get("id", str(number)) for number, line in enumerate(lines, 1)
    ]
    for line, row in zip(lines, rows, strict=True):
        text = line.get("text", line.get("completion"))
        assert text is not None
        (score,) = llm.score([(line.get("prompt", type(text)()), text)], top=top)
        assert row["tokens"] == list(score.tokens)
        np.testing.assert_allclose(row["logprobs"], score.logprobs, atol=1e-5)
        if not top:
            assert "top_tokens" not in row
            continue
        assert score.top is not None
        np.testing.assert_allclose(row["top_logprobs"], score.top.logprobs, atol=1e-5)
        assert np.array(row["top_tokens"]).shape == score.top.tokens.shape


@pytest.mark.parametrize("top", [0, 3])
def test_columns_have_what_score_says(llm: LLM, tmp_path: Path, top: int) -> None:
    path, out = write_jsonl(tmp_path / "texts.jsonl", LINES), tmp_path / "out"
    parts = list(score_texts(llm, path, out, top=top, part=70))
    assert len(parts) > 2 and parts[-1].texts == len(LINES)
    assert parts[-1].tokens == sum(len(row["tokens"]) for row in rows_of(out))
    check(out, llm, LINES, top)


def test_a_prompt_is_computed_once(llm: LLM, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "texts.jsonl", LINES[:9])
    (done,) = score_texts(llm, path, tmp_path / "out", top=2)
    prompt = len(llm.tokenizer(PROMPT)["input_ids"])
    # The last token of a text needs not be computed, nor what texts have in common.
    assert prompt < done.computed <= prompt + done.tokens


def test_a_call_that_was_stopped_goes_on_and_takes_further_lines(llm: LLM, tmp_path: Path) -> None:
    path, out = write_jsonl(tmp_path / "texts.jsonl", LINES[:12]), tmp_path / "out"
    for _ in range(20):
        going = score_texts(llm, path, out, top=2, part=40)
        first = next(going)
        going.close()
        (out / "scores-999.4711.tmp").touch()
        if first.texts == 12 and not first.computed:
            break
    before = {each: each.read_bytes() for each in out.glob("*.parquet")}
    assert len(before) > 3
    assert list(score_texts(llm, path, out, top=2)) == [Progress(12, first.tokens, 0)]
    write_jsonl(path, LINES)
    *_, last = score_texts(llm, path, out, top=2)
    assert last.texts == len(LINES)
    assert all(each.read_bytes() == data for each, data in before.items())
    check(out, llm, LINES, 2)


def test_lines_can_be_added_after_a_last_one_without_a_line_break(llm: LLM, tmp_path: Path) -> None:
    path, out = write_jsonl(tmp_path / "texts.jsonl", LINES[:3]), tmp_path / "out"
    path.write_text(path.read_text().rstrip())
    list(score_texts(llm, path, out, top=2))
    write_jsonl(path, LINES[:5])
    list(score_texts(llm, path, out, top=2))
    check(out, llm, LINES[:5], 2)


def test_a_folder_of_something_else_is_refused(llm: LLM, tmp_path: Path) -> None:
    path, out = write_jsonl(tmp_path / "texts.jsonl", LINES), tmp_path / "out"
    list(score_texts(llm, path, out, top=2, part=40))
    with pytest.raises(
        RunError, match="scores that were made with a different top; choose another folder"
    ):
        next(score_texts(llm, path, out, top=3))
    write_jsonl(path, [{"text": "other"}, *LINES[1:]])
    with pytest.raises(RunError, match="scores of texts that are not the first"):
        next(score_texts(llm, path, out, top=2))
    write_jsonl(path, LINES)
    first, second, *_ = sorted(out.glob("*.parquet"))
    corrupt = first.read_bytes()
    first.write_bytes(corrupt[: len(corrupt) // 2])
    message = r"is corrupt .* remove this file and all later files"
    with pytest.raises(RunError, match=message):
        next(score_texts(llm, path, out, top=2))
    first.write_bytes(corrupt)
    second.unlink()
    with pytest.raises(RunError, match="does not match the number of rows in the earlier files"):
        next(score_texts(llm, path, out, top=2))


@pytest.mark.parametrize(
    "meta",
    [
        {"rows": "1", "tokens": 0, "seen": ""},
        {"rows": 1.0, "tokens": 0, "seen": ""},
        {"rows": 9, "tokens": 0, "seen": ""},
        {"rows": True, "tokens": 0, "seen": ""},
        {"rows": 1, "tokens": None, "seen": ""},
        {"rows": 1, "tokens": 0, "seen": 3},
        {"rows": 1},
        [1, 2, ""],
        5,
    ],
)
def test_a_file_that_says_something_else_of_itself_is_refused(
    llm: LLM, tmp_path: Path, meta: Any
) -> None:
    path, out = write_jsonl(tmp_path / "texts.jsonl", LINES[:2]), tmp_path / "out"
    list(score_texts(llm, path, out, top=2, part=1))
    first, _ = sorted(out.glob("*.parquet"))
    table = pq.read_table(first).replace_schema_metadata({"treegen": json.dumps(meta)})
    pq.write_table(table, first)
    with pytest.raises(RunError, match=r"scores-000000000\.parquet is corrupt"):
        next(score_texts(llm, path, out, top=2))


@pytest.mark.timeout(60)
def test_a_pipe_in_the_place_of_columns_is_not_waited_for(llm: LLM, tmp_path: Path) -> None:
    path, out = write_jsonl(tmp_path / "texts.jsonl", LINES[:2]), tmp_path / "out"
    list(score_texts(llm, path, out, top=2))
    (first,) = out.glob("*.parquet")
    first.unlink()
    os.mkfifo(first)
    with pytest.raises(RunError, match=r"is corrupt \(it is not a regular file\)"):
        next(score_texts(llm, path, out, top=2))


def test_a_folder_without_columns_is_of_nothing_yet(llm: LLM, tmp_path: Path) -> None:
    path, out = write_jsonl(tmp_path / "texts.jsonl", [{"text": ""}]), tmp_path / "out"
    with pytest.raises(InputError):
        next(score_texts(llm, path, out, top=3))
    write_jsonl(path, LINES)
    list(score_texts(llm, path, out, top=2))
    check(out, llm, LINES, 2)
    (out / "settings.json").unlink()
    with pytest.raises(RunError, match=r"settings\.json"):  # the columns may be of any model
        next(score_texts(llm, path, out, top=2))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"texts.jsonl:2 is not JSON"),
        ('{"prompt": "a"}', "2 must have either text, or prompt and completion"),
        (
            '{"text": "a", "prompt": "b", "completion": "c"}',
            "2: text cannot be used together with prompt",
        ),
        ('{"text": "a", "weight": 1}', "2 has unknown keys: weight"),
        ('{"id": "\\ud800", "text": "a"}', "2: id must be a valid Unicode string or an integer"),
        ('{"id": null, "text": "a"}', "2: id must be a valid"),
        ('{"id": "b", "text": "a \\ud800"}', "jsonl:2"),
        ('{"text": ""}', "2: text is empty; add a text, or remove the line"),
        ('{"text": []}', "2: text is empty; add a text, or remove the line"),
        ('{"text": 5}', "2: text must be a string or a list of token ids, got 5"),
        (
            '{"prompt": "a", "completion": [1]}',
            "2: prompt and completion must both be text or both",
        ),
        ('{"id": "b", "prompt": "a", "completion": ""}', "jsonl:2: the continuation adds no token"),
        ('{"id": "b", "text": [99999]}', "^[^']*jsonl:2 has the token id 99999"),
        ('{"id": "b", "text": [-1]}', "jsonl:2 has token ids outside"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(
    llm: LLM, tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises((DataError, InputError), match=message):
        list(score_texts(llm, path, tmp_path / "out", top=2))


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "fine"}\n', encoding="utf-8-sig")
    assert [text.text for text in read_texts(path)] == ["fine"]


def test_the_command_writes_what_datasets_can_read(
    checkpoint: Path, tmp_path: Path, treegen: Command
) -> None:
    path, out = write_jsonl(tmp_path / "texts.jsonl", LINES), tmp_path / "out"
    arguments = ["score-texts", str(path), "--model", str(checkpoint), "--top", "4", "-o", str(out)]
    result = treegen(*arguments, "--dtype", "float32", "--memory", "8MiB")
    assert result.code == 0, result.err
    document = result.document
    assert document["texts"] == len(LINES) and document["top"] == 4
    read = datasets.load_dataset(
        "parquet", data_files=str(out / "*.parquet"), cache_dir=str(tmp_path / "cache")
    )["train"]
    assert read[0]["id"] == "a0" and len(read[0]["top_tokens"][0]) == 4
    missing = treegen("score-texts", "none.jsonl", *arguments[2:])
    assert missing.code == 2 and missing.err == "Error: none.jsonl does not exist; check the path\n"
