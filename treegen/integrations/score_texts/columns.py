"""The files of columns: compressed Parquet, one row per text, in the order of the input.

    id             text
    tokens         list of int32: the token ids of the text, without those of its prompt
    logprobs       list of float32: the natural-log probability of each token
    top_tokens     list of [K] int32: the likeliest tokens at each position, likeliest first
    top_logprobs   list of [K] float32: their log-probabilities

A file is written whole or not at all. Its name has the number of its first row, and its metadata
has the extent up to its end, from which the next file continues.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from treegen.common.files.reading import open_regular
from treegen.common.files.temporary_files import replace_file
from treegen.common.outputs import Score
from treegen.errors import RunError
from treegen.runs.files import format_os_error, sync_directory

_META: Final = b"treegen"
_PATTERN: Final = "scores-*.parquet"


@dataclass(frozen=True, slots=True)
class WrittenExtent:
    """How far some files go."""

    rows: int = 0
    """Number of texts in them."""
    tokens: int = 0
    """Number of tokens of these texts."""
    seen: str = ""
    """Hash of the input up to there."""


def write_part(
    folder: Path, start: WrittenExtent, ids: Sequence[str], scores: Sequence[Score], seen: str
) -> WrittenExtent:
    """Write the next rows; return how far the files go now.

    Args:
        folder: Folder of the files.
        start: How far the earlier files go.
        ids: Id of each text.
        scores: Score of each text.
        seen: Hash of the input up to the last text.

    Raises:
        RunError: The file cannot be written.
    """
    tokens = sum(len(score.tokens) for score in scores)
    end = WrittenExtent(start.rows + len(ids), start.tokens + tokens, seen)
    table = _table(ids, scores).replace_schema_metadata({_META: json.dumps(asdict(end)).encode()})
    path = folder / f"scores-{start.rows:09d}.parquet"
    try:
        with replace_file(path) as file:
            pq.write_table(table, file, compression="zstd")
        sync_directory(folder)
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {format_os_error(error)}; what is done is kept"
        ) from error
    return end


def read_extent(folder: Path) -> WrittenExtent:
    """Return how far the files of a folder go.

    Raises:
        RunError: A file is damaged, or one is missing.
    """
    at = WrittenExtent()
    for path in sorted(folder.glob(_PATTERN)):
        if path.name != f"scores-{at.rows:09d}.parquet":
            raise RunError(
                f"{path} does not follow on the files before it; "
                "restore those from a copy, or give another folder"
            )
        try:
            at = _reached_by(path, at)
        except (pa.ArrowException, OSError, KeyError, AttributeError, ValueError) as error:
            reason = format_os_error(error) if isinstance(error, OSError) else error
            raise RunError(
                f"{path} is damaged ({reason}); remove it and those after it to score them anew"
            ) from None
    return at


def _reached_by(path: Path, start: WrittenExtent) -> WrittenExtent:
    """Return how far a file goes that continues from `start`."""
    with open(open_regular(path), "rb") as file:
        parquet = pq.ParquetFile(file)
        extent = json.loads((parquet.schema_arrow.metadata or {})[_META])
        kinds = {name: type(value) for name, value in extent.items()}
        if kinds != {"rows": int, "tokens": int, "seen": str}:
            raise ValueError("it does not say what rows it has")
        if extent["rows"] != start.rows + parquet.metadata.num_rows:
            raise ValueError("it has not the rows that it says")
    return WrittenExtent(**extent)


def _table(ids: Sequence[str], scores: Sequence[Score]) -> Any:
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
