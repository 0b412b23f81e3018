"""A user's regular expression on a model's text, in bounded time.

Python's matcher can take exponential time, no check of a pattern can tell for sure, and a thread
that matches cannot be stopped. So matching is done by a process of its own, which gives up on a
text after a fixed CPU time: how busy the machine is does not change a score.
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
        """Raise InputError for what is no pattern."""
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
        """Return what the last match in a text says is the answer; None if there is none.

        None as well where matching takes longer than SECONDS. Of a very long text, the end is read.

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
