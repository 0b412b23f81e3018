"""How a run went over time: `progress.jsonl` in its directory, for a plot of it.

One line of JSON for each moment, further apart the longer a run takes: some 600 lines for an
hour, 1,300 for a month. Nothing depends on the file; a run whose disk refuses it goes on.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from treegen.evals.progress import Progress

NAME: Final = "progress.jsonl"
# The first moments are this many seconds apart, later ones a hundredth of the time so far.
_FIRST: Final = 0.25
_GROWTH: Final = 0.01


class Timeline:
    """The moments of one part of a run, appended as they come."""

    def __init__(self, folder: Path, part: int) -> None:
        """Append to the file in the run directory `folder`; part counts from 0."""
        self._part = part
        self._due = 0.0
        self._file: IO[str] | None = None
        with suppress(OSError):
            self._file = (folder / NAME).open("a", encoding="ascii")

    def note(self, progress: Progress, *, last: bool = False, **more: int) -> None:
        """Write a moment down if it is time for one, or nothing comes after it."""
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
            # One write, so that a moment is whole or not there; a kill may tear the last.
            self._file.write(json.dumps(moment, separators=(",", ":")) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None


def read_timeline(folder: Path) -> list[Mapping[str, Any]]:
    """Return the moments of a run in order; none if there are none, torn lines left out."""
    moments: list[Mapping[str, Any]] = []
    with suppress(OSError):
        for line in (folder / NAME).read_bytes().split(b"\n"):
            with suppress(ValueError):
                moment = json.loads(line)
                if isinstance(moment, dict) and {"part", "seconds", "tokens"} <= moment.keys():
                    moments.append(moment)
    return moments
