"""A process for code that cannot be stopped: its limits, and what follows when they are hit."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from treegen.common.bounded import worker_server
from treegen.common.bounded.worker import FileWorker, count_cpu_seconds, end_workers
from treegen.errors import TreegenError

CODE = """
import ctypes, os, signal, sys, time

def prepare(setup):
    print("noise")
    def handle(request):
        name, value = request
        if name == "echo":
            return [setup, value]
        if name == "loop":
            while True:
                pass
        if name == "stubborn":
            while True:
                try:
                    while True:
                        pass
                except BaseException:
                    pass
        if name == "power":
            return 7 ** (10 ** 9) > 1
        if name == "memory":
            return len(bytearray(1 << 40))
        if name == "deep":
            return handle(request)
        if name == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if name == "kill" and not os.path.exists(value):
            open(value, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "kill":
            return "killed once"
        if name == "kill always":
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "print":
            sys.stdout.write("not an answer\\n")
            return value
        raise ValueError("two\\nlines")
    return handle
"""


@pytest.fixture
def worker(tmp_path: Path) -> FileWorker:
    return make(tmp_path, CODE)


def make(folder: Path, code: str, site: bool = False) -> FileWorker:
    file = folder / "code.py"
    file.write_text(code, encoding="ascii")
    return FileWorker(file, "set", seconds=0.1, memory=1 << 30, what="that tests", site=site)


@pytest.mark.parametrize("name", ["loop", "stubborn", "power", "memory", "deep", "crash"])
def test_a_request_over_the_limits_has_no_answer_and_the_next_one_has(
    worker: FileWorker, name: str
) -> None:
    for _ in range(2):
        assert worker.ask([name, 0]) is None
        assert worker.ask(["echo", "\ud800\u2028\0"]) == ["set", "\ud800\u2028\0"]


def test_the_cpu_time_of_requests_is_counted(worker: FileWorker) -> None:
    """A request that ends its process counts as its time limit."""
    for name in ("loop", "stubborn"):
        before = count_cpu_seconds()
        assert worker.ask([name, 0]) is None
        assert count_cpu_seconds() - before > 0.08
    end_workers()
    assert worker._process is None and worker.ask(["echo", 1]) == ["set", 1]


def test_what_the_code_prints_is_no_answer(worker: FileWorker) -> None:
    assert [worker.ask(["print", value]) for value in (1, 2)] == [1, 2]


def test_failing_code_is_told_in_one_line(worker: FileWorker, tmp_path: Path) -> None:
    with pytest.raises(TreegenError, match="process that tests failed: ValueError: two lines"):
        worker.ask(["fail", 0])
    assert worker.ask(["echo", 1]) == ["set", 1]
    with pytest.raises(TreegenError, match="failed to start: ModuleNotFoundError"):
        make(tmp_path, "import no_such_module").ask(0)


def test_a_worker_that_was_ended_says_so_and_starts_again(worker: FileWorker) -> None:
    worker.ask(["echo", 0])
    process = worker._process
    assert process is not None
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with pytest.raises(TreegenError, match="process that tests ended; try again"):
        worker.ask(["echo", 1])
    assert worker.ask(["echo", 2]) == ["set", 2]


def test_a_request_whose_process_is_killed_from_outside_is_asked_again(
    worker: FileWorker, tmp_path: Path
) -> None:
    """The out-of-memory killer of a busy machine must not make an answer wrong."""
    assert worker.ask(["kill", str(tmp_path / "mark")]) == "killed once"
    with pytest.raises(TreegenError, match="process that tests was killed twice by SIGKILL"):
        worker.ask(["kill always", 0])
    assert worker.ask(["echo", 2]) == ["set", 2]


def test_threads_get_their_own_answers(worker: FileWorker) -> None:
    found: dict[int, Any] = {}

    def ask(number: int) -> None:
        for _ in range(20):
            found.setdefault(number, []).append(worker.ask(["echo", number]))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [["set", number]] * 20 for number in range(4)}


def test_only_code_that_asks_for_them_sees_installed_packages(tmp_path: Path) -> None:
    code = "def prepare(setup):\n    import numpy\n    return lambda request: numpy.__name__\n"
    assert make(tmp_path, code, site=True).ask(0) == "numpy"
    with pytest.raises(TreegenError, match="No module named 'numpy'"):
        make(tmp_path, code).ask(0)


def test_a_worker_whose_process_was_killed_says_nothing(tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text("def prepare(setup):\n    return str\n")
    start = {"path": None, "file": str(code), "setup": None, "memory": 2**26, "seconds": 1.0}
    server = Path(worker_server.__file__)
    with subprocess.Popen(
        [sys.executable, "-IS", server], stdin=-1, stdout=-1, stderr=-1
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdout.close()
        process.stdin.write(json.dumps(start).encode() + b"\n")
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
