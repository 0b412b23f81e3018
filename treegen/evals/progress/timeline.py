"""How a run went over time: `progress.jsonl` in its directory, for a plot.

The file has one line of JSON for each moment. Moments are further apart the longer a run takes:
some 600 lines for an hour, 1,300 for a month. Nothing depends on the file. If it cannot be
written, the run goes on.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from treegen.common.files.regular_files import open_regular
from treegen.evals.progress.run_progress import RunProgress
from treegen.runs.files import parse_json

NAME: Final = "progress.jsonl"
# The first moments are this many seconds apart, later ones a hundredth of the time so far.
_FIRST: Final = 0.25
_GROWTH: Final = 0.01
_MOST: Final = 1e18  # no run is longer, or has more of anything


class Timeline:
    """The moments of one part of a run, appended as they come."""

    def __init__(self, folder: Path, part: int) -> None:
        """Append to the file in the run directory `folder`. part: counts from 0."""
        self._part = part
        self._due = 0.0
        self._file: IO[str] | None = None
        with suppress(OSError):
            fd = open_regular(folder / NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            self._file = os.fdopen(fd, "a", encoding="ascii")

    def note(self, progress: RunProgress, *, last: bool = False, **more: int) -> None:
        """Write a moment if one is due. last: nothing comes after it, so write it in any case."""
        if self._file is None or (progress.seconds < self._due and not last):
            return
        self._due = progress.seconds + max(_FIRST, _GROWTH * progress.seconds)
        moment = {
            "part": self._part,
            "seconds": round(progress.seconds, 3),
            "done": progress.done,
            "tokens": progress.tokens,
            "rows": progress.rows,
            "pages": progress.pages,
            **more,
            "level_rows": [level.rows for level in progress.levels],
        }
        with suppress(OSError):
            # A moment is one write. So only the last one may be torn, by a kill.
            self._file.write(json.dumps(moment, separators=(",", ":")) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None


def read_timeline(folder: Path) -> list[Mapping[str, Any]]:
    """Return the moments of a run in order; empty if there is no file.

    Lines that are torn, or that are no moments, are left out.
    """
    moments: list[Mapping[str, Any]] = []
    with suppress(OSError), open(open_regular(folder / NAME), "rb") as file:
        for line in file:
            with suppress(ValueError):
                moment = parse_json(line.decode().strip())
                if _is_moment(moment):
                    moments.append(moment)
    return moments


def _is_moment(value: object) -> bool:
    if not isinstance(value, dict) or not {"part", "seconds", "tokens"} <= value.keys():
        return False
    told = [value[name] for name in value if name != "level_rows"]
    if "level_rows" in value:
        if not isinstance(value["level_rows"], list):
            return False
        told += value["level_rows"]
    return all(type(each) in (int, float) and 0 <= each < _MOST for each in told)
