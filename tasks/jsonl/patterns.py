"""A user's regular expression on a model's text, in bounded time.

Python's matcher can take exponential time. No check of a pattern can tell for sure, and a thread
that matches cannot be stopped. So a process of its own does the matching. It gives up on a text
after a fixed CPU time, so that a score does not depend on how busy the machine is.
"""

import json
import re
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Final

from treegen.errors import InputError, TreegenError

MAX_PATTERN: Final = 1000
MAX_TEXT: Final = 200_000
SECONDS: Final = 1.0
_WORKER: Final = Path(__file__).with_name("pattern_worker.py")


class Pattern:
    """A compiled pattern; the process starts with the first text and ends with this object."""

    def __init__(self, text: str) -> None:
        """Compile the pattern here, to check it.

        Raises:
            InputError: it is no regular expression, is too long, or has several groups.
        """
        if len(text) > MAX_PATTERN:
            raise InputError(f"the pattern has {len(text):,} characters; at most {MAX_PATTERN:,}")
        try:
            groups = re.compile(text).groups
        except (re.error, OverflowError, RecursionError) as error:
            raise InputError(f"{text!r} is not a regular expression: {error}") from None
        if groups > 1:
            raise InputError(
                f"pattern {text!r} has {groups} groups; the answer is the only group, or the whole "
                "match without one; write (?:...) for the others"
            )
        self._text = text
        self._worker: subprocess.Popen[bytes] | None = None

    def last(self, text: str) -> str | None:
        """Return the answer that the last match in a text gives; None if nothing matches.

        Returns None too if matching takes longer than SECONDS. Only the last MAX_TEXT characters of
        a text are searched.

        Raises:
            TreegenError: the process that matches ended.
        """
        worker = self._worker or self._start()
        assert worker.stdin is not None and worker.stdout is not None
        try:
            worker.stdin.write(_line(text[-MAX_TEXT:]))
            worker.stdin.flush()
            line = worker.stdout.readline()
        except OSError:
            line = b""
        if not line:
            self._worker = None
            raise TreegenError(f"the process that matches {self._text!r} ended; score again")
        found: str | None = json.loads(line)
        return found

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-IS", str(_WORKER)]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        weakref.finalize(self, _end, worker)
        assert worker.stdin is not None
        worker.stdin.write(_line([self._text, SECONDS]))
        self._worker = worker
        return worker


def _line(value: object) -> bytes:
    return json.dumps(value).encode("ascii") + b"\n"


def _end(worker: "subprocess.Popen[bytes]") -> None:
    assert worker.stdin is not None and worker.stdout is not None
    with suppress(OSError):
        worker.stdin.close()
    worker.wait()
    worker.stdout.close()
