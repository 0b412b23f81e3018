"""Write a run as Parquet tables, the frames of `treegen.report.frames`."""

import json
from pathlib import Path
from typing import Any

from treegen.common.files import replace_file
from treegen.common.formatting import replace_surrogates
from treegen.report.exchange.export import ExportedRun
from treegen.report.frames import Frames


def write(run: ExportedRun, folder: Path) -> list[Path]:
    """Write a file for each table that has rows and return the files.

    Raises:
        InputError: pandas is not installed.
        OSError: a file cannot be written.
    """
    frames = Frames(run.view, run.records)
    tables = {
        "samples": frames.samples(),
        "problems": frames.problems(),
        "metrics": frames.metrics(),
        "nodes": frames.nodes(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, table in tables.items():
        if not len(table):
            continue
        for column in table.columns:
            if table[column].dtype == object or str(table[column].dtype) == "str":
                table[column] = _unify_types(table[column])
        path = folder / f"{name}.parquet"
        with replace_file(path) as file:
            table.to_parquet(file, index=False)
        files.append(path)
    return files


def _unify_types(column: Any) -> Any:
    """Return a column of texts, of lists of one type, or of JSON values if types differ."""
    column = column.astype(object)
    values = [value for value in column if value is not None and value == value]
    kinds = {type(value) for value in values}
    if kinds == {list} and len({type(item) for value in values for item in value}) < 2:
        return column

    def to_text(value: Any) -> str | None:
        if value is None or value != value:  # pandas uses NaN for missing values
            return None
        return replace_surrogates(value if isinstance(value, str) else json.dumps(value))

    return column.map(to_text) if kinds & {str, dict, list, tuple} or len(kinds) > 1 else column
