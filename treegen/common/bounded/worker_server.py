"""The process of treegen.common.bounded.worker. It imports nothing of treegen.

The first line of input says what to run and how long. The process prepares it and forks. The copy
answers further lines, each with a line of JSON. If a request ends the copy, the process answers in
its place and forks again: what was prepared, such as slow imports, is not prepared twice.
"""

import importlib.util
import json
import os
import resource
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Any, BinaryIO

# A request that does not give up after its time is ended after this many times as long.
PATIENCE = 1.25
FROM_OUTSIDE = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL, signal.SIGTERM)


class Slow(BaseException):
    """The time for one request is over. No `except Exception` in the way catches it."""


def give_up(signum: int, frame: FrameType | None) -> None:
    """End what is running; Python looks for signals between two of its instructions."""
    raise Slow


def answer(handle: Any, request: object, seconds: float) -> dict[str, Any]:
    """Return a handler's answer; None if it takes more than `seconds` of CPU time, or memory."""
    try:
        try:
            # Nothing handles the second timer, so the system ends a process that runs C code.
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds * PATIENCE)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            return {"answer": handle(request)}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except (Slow, MemoryError, RecursionError):
        # The time may have ended between the two lines above.
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        return {"answer": None}
    except Exception as error:
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())}


def send(out: BinaryIO, reply: object) -> None:
    """Write one line."""
    # A text may have half of a surrogate pair, which has no UTF-8 otherwise.
    out.write(json.dumps(reply, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
    out.flush()


def load(start: dict[str, Any]) -> Any:
    """Return the handler that the first line asks for."""
    if start["path"] is not None:
        sys.path[:] = start["path"]
    spec = importlib.util.spec_from_file_location("worker_code", start["file"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.prepare(start["setup"])


def address_space() -> int:
    """Return the bytes of address space that this process has; 0 where that is not told."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def serve(handle: Any, start: dict[str, Any], out: BinaryIO) -> None:
    """Answer until the input ends."""
    signal.signal(signal.SIGPROF, give_up)
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = address_space() + start["memory"]
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for line in sys.stdin.buffer:
        request = json.loads(line.decode("utf-8", "surrogatepass"))
        send(out, answer(handle, request, start["seconds"]))


def main() -> None:
    """Prepare, then keep a copy of this process answering."""
    # The terminal sends Ctrl-C to all processes; this one ends with its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what other people's code prints is no answer
    start = json.loads(sys.stdin.buffer.readline())
    try:
        handle = load(start)
    except Exception as error:
        send(out, {"error": " ".join(f"{type(error).__name__}: {error}".split())})
        return
    send(out, {"answer": None})
    # The other side writes a line only after the answer to the last, so the input's buffer is empty
    # here and at every further fork.
    while True:
        copy = os.fork()
        if not copy:
            with suppress(BrokenPipeError):  # nobody waits for the answer any more
                serve(handle, start, out)
            os._exit(0)
        _, status = os.waitpid(copy, 0)
        if not os.WIFSIGNALED(status):
            break
        number = os.WTERMSIG(status)
        # No request sends these to its process: something on this machine has ended it.
        is_killed = number in FROM_OUTSIDE
        send(out, {"killed": signal.Signals(number).name} if is_killed else {"answer": None})


if __name__ == "__main__":
    main()
