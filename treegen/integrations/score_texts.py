"""Writes the log-probabilities of a file's texts, and the most likely tokens, into Parquet files.

`score_texts` scores the texts part by part. Each part is a file of compressed Parquet, one row per
text, in the order of the input:

    id             text
    tokens         list of int32: the token ids of the text, without those of its prompt
    logprobs       list of float32: the natural-log probability of each token
    top_tokens     list of [K] int32: the K most likely tokens at each position, most likely first
    top_logprobs   list of [K] float32: their log-probabilities

K is the argument `top`; if it is 0, the last two columns are absent.

A file is written whole or not at all. Its name has the number of its first row, and its metadata
has the extent up to its end, from which the next file continues.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from treegen.common.checks import check_argument_types, check_int
from treegen.common.files import describe_read_error, open_regular, read_lines, replace_file
from treegen.common.outputs import Score
from treegen.common.params import MAX_COUNT
from treegen.errors import DataError, InputError, RunError, TreegenError
from treegen.prompts.plan.plan import Request
from treegen.prompts.plan.requests import ScoreInput, build_score_requests
from treegen.runs.files import (
    Lock,
    describe_write_error,
    format_os_error,
    parse_json,
    read_json,
    sync_directory,
    write_json,
)

if TYPE_CHECKING:
    from treegen.llm.base import BaseLLM

_METADATA_KEY: Final = b"treegen"
_FILE_PATTERN: Final = "scores-*.parquet"


@dataclass(frozen=True, slots=True)
class WrittenExtent:
    """The rows that some files contain."""

    rows: int = 0
    """Number of texts in them."""
    tokens: int = 0
    """Number of tokens of these texts."""
    seen: str = ""
    """Hash of the input up to there."""


def write_part(
    folder: Path, start: WrittenExtent, ids: Sequence[str], scores: Sequence[Score], digest: str
) -> WrittenExtent:
    """Write the next rows; return the rows that all files contain now.

    Args:
        folder: Folder of the files.
        start: The rows that the earlier files contain.
        ids: Id of each text.
        scores: Score of each text.
        digest: Hash of the input up to the last text.

    Raises:
        RunError: The file cannot be written.
    """
    tokens = sum(len(score.tokens) for score in scores)
    end = WrittenExtent(start.rows + len(ids), start.tokens + tokens, digest)
    table = _make_table(ids, scores).replace_schema_metadata(
        {_METADATA_KEY: json.dumps(asdict(end)).encode()}
    )
    path = folder / f"scores-{start.rows:09d}.parquet"
    try:
        with replace_file(path) as file:
            pq.write_table(table, file, compression="zstd")
        sync_directory(folder)
    except OSError as error:
        raise RunError(f"{describe_write_error(path, error)}; finished texts are stored") from error
    return end


def read_extent(folder: Path) -> WrittenExtent:
    """Return the rows that the files of a folder contain.

    Raises:
        RunError: A file is corrupt, or one is missing.
    """
    extent = WrittenExtent()
    for path in sorted(folder.glob(_FILE_PATTERN)):
        if path.name != f"scores-{extent.rows:09d}.parquet":
            raise RunError(
                f"the name of {path} does not match the number of rows in the earlier files, so a "
                "file is missing or was renamed; restore the folder from a copy, or choose "
                "another folder"
            )
        try:
            extent = _read_part_extent(path, extent)
        except (pa.ArrowException, OSError, KeyError, AttributeError, ValueError) as error:
            reason = format_os_error(error) if isinstance(error, OSError) else error
            raise RunError(
                f"{path} is corrupt ({reason}); remove this file and all later files, so that "
                "treegen scores their texts again"
            ) from None
    return extent


def _read_part_extent(path: Path, start: WrittenExtent) -> WrittenExtent:
    """Return the rows up to the end of a file that continues from `start`."""
    with open(open_regular(path), "rb") as file:
        parquet = pq.ParquetFile(file)
        extent = parse_json((parquet.schema_arrow.metadata or {})[_METADATA_KEY].decode())
        kinds = {name: type(value) for name, value in extent.items()}
        if kinds != {"rows": int, "tokens": int, "seen": str}:
            raise ValueError("the file does not state which rows the file contains")
        if extent["rows"] != start.rows + parquet.metadata.num_rows:
            raise ValueError("the number of rows differs from the number that the file states")
    return WrittenExtent(**extent)


def _make_table(ids: Sequence[str], scores: Sequence[Score]) -> Any:
    stops = np.cumsum([0, *(len(score.tokens) for score in scores)], dtype=np.int32)

    def rows(values: Any) -> Any:
        return pa.ListArray.from_arrays(pa.array(stops), values)

    def concatenate(values: Any, kind: Any) -> Any:
        return pa.array(np.concatenate([np.asarray(value, dtype=kind) for value in values]))

    columns = {
        "id": pa.array(ids, pa.string()),
        "tokens": rows(concatenate([score.tokens for score in scores], np.int32)),
        "logprobs": rows(concatenate([score.logprobs for score in scores], np.float32)),
    }
    tops = [score.top for score in scores if score.top is not None]
    if tops:
        width = tops[0].tokens.shape[1]
        for name in ("tokens", "logprobs"):
            flat = pa.array(np.concatenate([getattr(top, name).ravel() for top in tops]))
            columns[f"top_{name}"] = rows(pa.FixedSizeListArray.from_arrays(flat, width))
    return pa.table(columns)


_KEYS: Final = {"id", "text", "prompt", "completion"}  # keys of a line
_MAX_PAIRS: Final = (
    2**24
)  # maximum (token, log-probability) pairs of a part, which is held in memory
_MAX_TOKENS: Final = 2**20  # tokens of a part
_ENCODING_BATCH: Final = 64  # texts that are encoded at once


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of `score_texts`."""

    texts: int
    """Number of texts in the files."""
    tokens: int
    """Number of their scored tokens."""
    computed: int
    """Number of tokens that went through the model in this call, including prompts; shared tokens
    count once."""


@dataclass(frozen=True, slots=True)
class InputText:
    """One line."""

    id: str
    """Its id, or the number of its line."""
    where: str
    """The file and the number of the line."""
    context: ScoreInput
    """The text or token ids before the scored text."""
    text: ScoreInput
    """The text or token ids to score."""
    seen: str
    """Hash of the file up to the end of this line, as if a line break followed."""


@check_argument_types
def score_texts(
    llm: BaseLLM,
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    top: int = 0,
    part: int = _MAX_PAIRS,
) -> Generator[Progress, None, None]:
    """Score the texts of a file into files of columns; yield after each file that was written.

    Texts whose columns exist are not computed again. So a call that was stopped is resumed by
    repeating it, and the file may have gained lines. Texts of a part are computed as one tree.

    Args:
        llm: An LLM or a Cluster.
        path: File of JSON lines; see `read_texts`.
        folder: Folder of the Parquet files, whose columns hold the scores.
        top: Number of most likely tokens to write at the position of each token.
        part: Maximum number of most likely tokens of a part, which bounds the memory. A part has at
            least one text.

    Raises:
        InputError: An argument or a text cannot be used; the message names the text's line.
        CapacityError: A text is too long for the model or the cache.
        RunError: The folder has columns of other texts or settings, or cannot be written.
    """
    if not callable(getattr(llm, "score_stream", None)):
        raise InputError(f"llm must be an LLM, got {llm!r:.60}; pass LLM(model)")
    check_int("top", top, minimum=0, maximum=MAX_COUNT)
    check_int("part", part, minimum=1)
    path, folder = Path(path), Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"cannot create {folder}: {format_os_error(error)}; choose another folder"
        ) from error
    with Lock(folder / "scores.lock"):
        extent, computed = read_extent(folder), 0
        _check_settings(llm, folder, top, extent)
        texts = read_texts(path)
        _skip_scored_texts(texts, extent, path, folder)
        for part_texts, requests in _split_into_parts(llm, texts, top, part):
            pairs: list[Any] = [
                (r.tokens[: r.score_from], r.tokens[r.score_from :]) for r in requests
            ]
            with llm.score_stream(pairs, top=top) as stream:
                by_index = dict(stream)
                stream.check_complete()
            scores = [by_index[index] for index in range(len(by_index))]
            extent = write_part(
                folder, extent, [text.id for text in part_texts], scores, part_texts[-1].seen
            )
            computed += stream.usage.prompt_tokens_computed
            yield Progress(extent.rows, extent.tokens, computed)
        if not extent.rows:
            raise InputError(f"{path} has no texts; write at least one line")
        if not computed:
            yield Progress(extent.rows, extent.tokens, 0)


def _check_settings(llm: BaseLLM, folder: Path, top: int, extent: WrittenExtent) -> None:
    """Write the settings of the columns, or compare them with those of existing columns."""
    path = folder / "settings.json"
    settings: dict[str, Any] = {
        "model": llm.fingerprint,
        "dtype": llm.model_info.dtype,
        "top": top,
    }
    if not extent.rows:
        write_json(path, settings)
        return
    stored = read_json(path)
    if stored != settings:
        stored = stored if isinstance(stored, dict) else {}
        names = [name for name in settings if stored.get(name) != settings[name]]
        raise RunError(
            f"{folder} contains scores that were made with a different {' and '.join(names)}; "
            "choose another folder"
        )


def _skip_scored_texts(
    texts: Iterator[InputText], extent: WrittenExtent, path: Path, folder: Path
) -> None:
    """Skip the texts that are scored already, and check that they are the same."""
    if not extent.rows:
        return
    last = next(islice(texts, extent.rows - 1, None), None)
    if last is None or last.seen != extent.seen:
        raise RunError(
            f"{folder} contains scores of texts that are not the first texts of {path}; choose "
            "another folder"
        )


def _split_into_parts(
    llm: BaseLLM, texts: Iterator[InputText], top: int, max_logprobs: int
) -> Iterator[tuple[list[InputText], list[Request]]]:
    """Yield texts with their requests, as many at a time as fit the memory."""
    part_texts: list[InputText] = []
    requests: list[Request] = []
    pairs = tokens = 0
    while batch := list(islice(texts, _ENCODING_BATCH)):
        for text, request in zip(batch, _encode_batch(llm, batch), strict=True):
            num_pairs = (len(request.tokens) - (request.score_from or 0)) * max(top, 1)
            if part_texts and (
                pairs + num_pairs > max_logprobs or tokens + len(request.tokens) > _MAX_TOKENS
            ):
                yield part_texts, requests
                part_texts, requests, pairs, tokens = [], [], 0, 0
            part_texts.append(text)
            requests.append(request)
            pairs, tokens = pairs + num_pairs, tokens + len(request.tokens)
    if part_texts:
        yield part_texts, requests


def _encode_batch(llm: BaseLLM, batch: list[InputText]) -> list[Request]:
    try:
        pairs = [(entry.context, entry.text) for entry in batch]
        return build_score_requests(pairs, llm.tokenizer, llm.spec, llm.images)
    except TreegenError as error:
        for text in batch:  # find the text at fault
            try:
                build_score_requests(
                    [(text.context, text.text)], llm.tokenizer, llm.spec, llm.images
                )
            except TreegenError as problem:
                reason = str(problem).removeprefix("prompt 'pair 0'").removeprefix("pair 0")
                between = "" if reason[:1] in (" ", ":") else ": "
                raise type(problem)(f"{text.where}{between}{reason}") from None
        raise error


def read_texts(path: Path) -> Iterator[InputText]:
    """Yield the texts of a file of JSON lines, each with `text`, or with `prompt` and `completion`.

    Their values are text or token ids. A line may have an `id`.

    Raises:
        InputError: The file cannot be read.
        DataError: A line has another form; the message has its number.
    """
    digest = hashlib.sha256()
    try:
        for number, line in enumerate(read_lines(path), 1):
            digest.update(line if line.endswith(b"\n") else line + b"\n")
            if line.strip():
                yield _text_of(line, f"{path}:{number}", number, digest.hexdigest())
    except OSError as error:
        raise InputError(describe_read_error(path, error)) from error


def _text_of(line: bytes, where: str, number: int, digest: str) -> InputText:
    try:
        row = parse_json(line.decode("utf-8-sig"))
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error}); fix or remove the line") from None
    if not isinstance(row, dict) or not (
        {"text"} <= row.keys() or {"prompt", "completion"} <= row.keys()
    ):
        raise DataError(
            f"{where} must have either text, or prompt and completion; add the missing keys"
        )
    if unknown := row.keys() - _KEYS:
        raise DataError(
            f"{where} has unknown keys: {', '.join(sorted(unknown))}; use only id, and either "
            "text or prompt and completion"
        )
    if "text" in row and len(row.keys() & _KEYS - {"id"}) > 1:
        raise DataError(
            f"{where}: text cannot be used together with prompt or completion; remove one of the "
            "two"
        )
    text = _get_content(where, "text" if "text" in row else "completion", row)
    if "text" in row and not text:
        raise DataError(f"{where}: text is empty; add a text, or remove the line")
    empty: ScoreInput = "" if isinstance(text, str) else []
    context = empty if "text" in row else _get_content(where, "prompt", row)
    if isinstance(context, str) != isinstance(text, str):
        raise DataError(f"{where}: prompt and completion must both be text or both be token ids")
    return InputText(_id_of(row.get("id", number), where), where, context, text, digest)


def _id_of(value: Any, where: str) -> str:
    if type(value) is int:
        return str(value)
    if not isinstance(value, str) or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise DataError(
            f"{where}: id must be a valid Unicode string or an integer, got {value!r:.60}"
        )
    return value


def _get_content(where: str, name: str, row: dict[str, Any]) -> ScoreInput:
    value = row[name]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(token) is int for token in value):
        return value
    raise DataError(f"{where}: {name} must be a string or a list of token ids, got {value!r:.60}")
