"""The timeline of a run: `progress.jsonl` in its directory, for a plot.

The file has one line of JSON for each moment. The distance between moments grows with the time: an
hour has about 600 lines, a month 1,300. Nothing depends on the file, so a run continues if it
cannot be written.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from treegen.common.files import open_regular
from treegen.evals.progress.run_progress import RunProgress
from treegen.runs.files import parse_json

NAME: Final = "progress.jsonl"
# The first moments are this many seconds apart, later moments a hundredth of the time so far.
_FIRST: Final = 0.25
_GROWTH: Final = 0.01
_MOST: Final = 1e18  # larger numbers are damage: no run lasts so long, or has so much of anything


class Timeline:
    """Appends the moments of one attempt of a run to its file."""

    def __init__(self, folder: Path, part: int) -> None:
        """Open the file for appending.

        Args:
            folder: Directory of the run.
            part: Number of the attempt, from 0.
        """
        self._part = part
        self._due = 0.0
        self._file: IO[str] | None = None
        with suppress(OSError):
            fd = open_regular(folder / NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            self._file = os.fdopen(fd, "a", encoding="ascii")

    def note(self, progress: RunProgress, *, last: bool = False, **more: int) -> None:
        """Write a moment if one is due.

        Args:
            progress: The progress of the run.
            last: Whether this is the last moment, which is always written.
            **more: Further numbers of the moment, by name.
        """
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
            # Each moment is one write, so a kill can damage only the last line.
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

    Damaged lines are left out.
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
    numbers = [value[name] for name in value if name != "level_rows"]
    if "level_rows" in value:
        if not isinstance(value["level_rows"], list):
            return False
        numbers += value["level_rows"]
    return all(type(number) in (int, float) and 0 <= number < _MOST for number in numbers)
