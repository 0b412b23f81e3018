"""The process that matches users' patterns; see treegen.tasks.jsonl.patterns.

It imports nothing of treegen. The first line of input is the pattern and the seconds per text, as
JSON. Each further line is a text as JSON, and is answered by a line of JSON: the last match, or
null. A text that takes more CPU seconds gets null, too.
"""

import json
import re
import signal
import sys
from types import FrameType


class Slow(Exception):
    """The time for one text is over."""


def give_up(signum: int, frame: FrameType | None) -> None:
    """End the match that is running; the matcher looks for signals as it goes."""
    raise Slow


def last_match(pattern: re.Pattern[str], text: str, seconds: float) -> str | None:
    """Return the first group of the last match, or all of it where there is no group."""
    found = None
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        for match in pattern.finditer(text):
            found = match[1] if pattern.groups else match[0]
        signal.setitimer(signal.ITIMER_PROF, 0)
    except Slow:
        return None
    return found


def main() -> None:
    """Answer until the input ends."""
    source, seconds = json.loads(sys.stdin.buffer.readline())
    pattern = re.compile(source)
    signal.signal(signal.SIGPROF, give_up)
    # The terminal sends Ctrl-C to all processes; this one ends with its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin.buffer:
        answer = last_match(pattern, json.loads(line), seconds)
        sys.stdout.buffer.write(json.dumps(answer).encode("ascii") + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
