"""The process of treegen.common.bounded.worker. It imports nothing of treegen.

The first line of input names the file to run and its limits. The process loads the file and forks.
The child answers each further line with a line of JSON. If a request ends the child, the parent
answers in its place and forks again, so slow imports are not repeated.
"""

import importlib.util
import json
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from types import FrameType
from typing import Any, BinaryIO

# A request that is still running at this multiple of its time limit is killed.
KILL_FACTOR = 1.25
EXTERNAL_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL, signal.SIGTERM)


class TimeLimitReached(BaseException):
    """A request has reached its time limit. `except Exception` does not catch this."""


def raise_time_limit(signum: int, frame: FrameType | None) -> None:
    """Raise TimeLimitReached in the running code, between two of its instructions."""
    raise TimeLimitReached


def answer(handle: Any, request: object, seconds: float) -> dict[str, Any]:
    """Return a handler's answer, or its error.

    Args:
        handle: The handler.
        request: The request.
        seconds: Maximum CPU time.

    Returns:
        {"answer": ...}, with None if the time or the memory was too little; or {"error": message}.
        Both have the "seconds" of CPU time.
    """
    begin = time.process_time()
    reply = _answer(handle, request, seconds)
    return {**reply, "seconds": time.process_time() - begin}


def _answer(handle: Any, request: object, seconds: float) -> dict[str, Any]:
    try:
        try:
            # No handler catches the virtual timer, so it ends a process that is stuck in C code.
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds * KILL_FACTOR)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            return {"answer": handle(request)}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except (TimeLimitReached, MemoryError, RecursionError):
        # The time limit may have been reached between the two lines above.
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        return {"answer": None}
    except Exception as error:
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())}


def send(out: BinaryIO, reply: object) -> None:
    """Write one line of JSON."""
    # A text may have lone surrogates, which strict UTF-8 cannot encode.
    out.write(json.dumps(reply, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
    out.flush()


def load(start: dict[str, Any]) -> Any:
    """Return the handler that the first line of input names."""
    if start["path"] is not None:
        sys.path[:] = start["path"]
    spec = importlib.util.spec_from_file_location("worker_code", start["file"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.prepare(start["setup"])


def address_space() -> int:
    """Return the bytes of address space that this process uses; 0 if unknown."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def serve(handle: Any, start: dict[str, Any], out: BinaryIO) -> None:
    """Answer requests until the input ends.

    Args:
        handle: The handler of requests.
        start: The first line of input.
        out: Where answers are written.
    """
    signal.signal(signal.SIGPROF, raise_time_limit)
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    max_bytes = address_space() + start["memory"]
    if hard != resource.RLIM_INFINITY:
        max_bytes = min(max_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    for line in sys.stdin.buffer:
        request = json.loads(line.decode("utf-8", "surrogatepass"))
        send(out, answer(handle, request, start["seconds"]))


def main() -> None:
    """Load the handler, and keep a forked child that answers requests."""
    # The terminal sends Ctrl-C to all processes, but this process ends only when its input ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps prints of the file's code out of the answers
    start = json.loads(sys.stdin.buffer.readline())
    try:
        handle = load(start)
    except Exception as error:
        send(out, {"error": " ".join(f"{type(error).__name__}: {error}".split())})
        return
    send(out, {"answer": None})
    # The client writes a line only after the previous answer, so the input's buffer is empty here
    # and at every further fork.
    while True:
        child = os.fork()
        if not child:
            with suppress(BrokenPipeError):  # nobody waits for the answer any more
                serve(handle, start, out)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            break
        number = os.WTERMSIG(status)
        # Requests do not send these signals, so another process ended the child.
        is_killed = number in EXTERNAL_SIGNALS
        send(out, {"killed": signal.Signals(number).name} if is_killed else {"answer": None})


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # nobody waits for an answer any more
        os._exit(0)
