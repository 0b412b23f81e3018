"""The real command, killed at random moments, ends after resuming with the right samples.

Each command is a process of its own, with its own signals and files.
"""

import base64
import contextlib
import gzip
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cli_cases import Command, assert_same_samples, results_of, samples_of
from fork_server import ForkServer, send

from treegen.evals.judging.judgement_files import get_slot, read_records
from treegen.runs import RunDir

SERVER = """
import atexit, gc, os, signal, sys
gc.disable()
import treegen.cli.eval, treegen.evals.pipeline.evaluation, treegen.llm.llm
import treegen.report.plots, treegen.report.text, treegen.tasks.gsm8k
from fork_server import serve
from transformers.models.llama import modeling_llama
from treegen.__main__ import main

def run(job):
    # As a shell starts a command; the server's own pipes are not for it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for number, name in ((1, "out"), (2, "err")):
        path = f"{job['log']}.{name}"
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    sys.argv[1:] = job["args"]
    atexit._clear()  # a new process has no functions of other modules either
    sys.exit(main())

gc.freeze()  # collections in a fork would copy all pages
gc.enable()
serve(run)
"""
KILLS = int(os.environ.get("TREEGEN_TEST_KILLS", "20"))
COUNTED = ("samples", "sample_tokens", "prompt_tokens_unshared")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
# Rows end one after another, so that there is something to lose at every moment.
RUN = ["-L", "4", "-n", "10", "--max-tokens", "40", "--stop", "e", "-b", "4", "--memory", "4MiB"]


class Ended(NamedTuple):
    code: int
    out: str
    err: str


@dataclass
class Server:
    """Starts `treegen` commands in processes of their own, one at a time."""

    forks: ForkServer
    log: Path

    def start(self, *args: object) -> int:
        """Start a command and return its process id."""
        return self.forks.start({"args": [str(arg) for arg in args], "log": str(self.log)})

    def wait(self) -> Ended:
        code = self.forks.wait()
        out, err = (Path(f"{self.log}.{name}").read_text() for name in ("out", "err"))
        return Ended(code, out, err)

    def run(self, *args: object) -> Ended:
        self.start(*args)
        return self.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with ForkServer(SERVER) as forks:
        yield Server(forks, tmp_path_factory.mktemp("server") / "log")


class Whole(NamedTuple):
    """An undisturbed run: where it is, and how long it took."""

    path: Path
    seconds: float


@pytest.fixture(scope="module")
def whole(server: Server, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    path = tmp_path_factory.mktemp("runs") / "whole"
    start = time.monotonic()
    done = server.run("eval", "gsm8k", "-M", tiny, *RUN, "-o", path)
    assert done.code == 0, done.err
    assert len({r["num_tokens"] for r in samples_of(path)}) > 5
    return Whole(path, time.monotonic() - start)


@dataclass
class Tally:
    kills: int = 0
    codes: Counter[int] = field(default_factory=Counter)
    hints: int = 0


def wait_for_samples(path: Path, pid: int, before: int = 0) -> None:
    """Wait until a command has stored something, or has ended."""
    deadline = time.monotonic() + 60
    while size_of(path) <= before and alive(pid) and time.monotonic() < deadline:
        time.sleep(0.001)


def size_of(path: Path) -> int:
    samples = path / "samples.jsonl"
    return samples.stat().st_size if samples.exists() else 0


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it may go between opening and reading
        return False
    return state != "Z"


def kill_and_resume(
    server: Server,
    command: Sequence[object],
    path: Path,
    whole: Whole,
    chance: random.Random,
    tally: Tally,
    signals: Sequence[signal.Signals],
) -> None:
    """Start a run again and again, killing it each time, until the signals are used up."""
    for number in signals:
        before = size_of(path)
        pid = server.start(*command)
        if chance.random() < 0.4:  # at any moment of its life, getting ready included
            time.sleep(chance.uniform(0, whole.seconds))
        else:  # once it has stored something
            wait_for_samples(path, pid, before)
            time.sleep(chance.expovariate(1 / 0.01))
        with contextlib.suppress(ProcessLookupError):
            send(pid, number)
        ended = server.wait()
        assert "Traceback" not in ended.err, ended.err
        tally.codes[ended.code] += 1
        if ended.code == 0:  # it was quicker
            shutil.rmtree(path)
            continue
        tally.kills += 1
        assert ended.code in (-number, 128 + number), ended
        if ended.code == 128 + number:
            last = ended.err.splitlines()[-1]
            assert last.startswith(f"stopped by {signal.Signals(number).name}")
            if "run directory" in ended.err:
                assert last.endswith(f"continue with: treegen eval --resume {path}"), last
                tally.hints += 1
    for _ in range(2):  # the second time there is nothing to do
        ended = server.run(*command)
        assert ended.code == 0, ended.err
        assert_same_samples(path, whole.path)
    assert not list(path.glob("*.tmp"))
    results, expected = results_of(path), results_of(whole.path)
    assert results["report"] == expected["report"] and results["complete"]


def test_killed_three_times_a_run_ends_with_the_right_samples(
    server: Server, tiny: Path, whole: Whole, tmp_path: Path
) -> None:
    path, tally = tmp_path / "run", Tally()
    command = ["eval", "gsm8k", "-M", tiny, *RUN, "-o", path, "--resume"]
    kill_and_resume(server, command, path, whole, random.Random(1), tally, SIGNALS)
    assert tally.kills > 0


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_killed_many_times_runs_end_with_the_right_samples(
    server: Server, tiny: Path, whole: Whole, tmp_path: Path
) -> None:
    chance, tally = random.Random(2), Tally()
    chains = 0
    while tally.kills < KILLS:
        path = tmp_path / f"run-{chains}"
        command = ["eval", "gsm8k", "-M", tiny, *RUN, "-o", path, "--resume"]
        signals = [chance.choice(SIGNALS) for _ in range(6)]
        kill_and_resume(server, command, path, whole, chance, tally, signals)
        chains += 1
    assert tally.codes[-signal.SIGKILL] > KILLS // 12
    assert tally.codes[130] > KILLS // 20 and tally.codes[143] > KILLS // 20
    assert tally.hints > KILLS // 6


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_killed_many_times_runs_are_judged_in_the_end(
    server: Server, tiny: Path, tmp_path: Path
) -> None:
    """Only the first command says that they are to be judged."""
    chance, kills, chain = random.Random(4), 0, 0
    begin = ["eval", "gsm8k", "-M", tiny, *RUN, "--judge", tiny, "--wordings", "1", "-o"]
    start = time.monotonic()
    assert server.run(*begin, tmp_path / "whole").code == 0
    seconds = time.monotonic() - start
    want = judgements_of(tmp_path / "whole")
    assert len(want) == 40
    while kills < KILLS:
        path = tmp_path / f"{chain}"
        resume = ["eval", "--resume", path, "--json"]
        for _ in range(6):
            command = resume if (path / "run.json").exists() else [*begin, path]
            pid = server.start(*command)
            if chance.random() < 0.5:  # as samples or judgements are stored
                pattern = chance.choice(["samples.jsonl", "evals/scoring/*/judgements.jsonl"])
                goal = sum(each.stat().st_size for each in path.glob(pattern)) + 1
                while alive(pid) and sum(e.stat().st_size for e in path.glob(pattern)) < goal:
                    time.sleep(0.001)
                time.sleep(chance.expovariate(1 / 0.01))
            else:
                time.sleep(chance.uniform(0, seconds))
            number = chance.choice(SIGNALS)
            with contextlib.suppress(ProcessLookupError):
                send(pid, number)
            ended = server.wait()
            assert ended.code in (0, -number, 128 + number), ended.err
            assert "Traceback" not in ended.err, ended.err
            kills += ended.code != 0
            if ended.code == 128 + number and "are stored" in ended.err:
                assert f"continue with: treegen eval --resume {path}" in ended.err
        kept = judgements_of(path) if (path / "judged").exists() else {}
        for _ in range(2):
            ended = server.run(*resume)
            assert ended.code == 0, ended.err
            (run,) = json.loads(ended.out)["runs"]
            assert run["judged"]["done"] == run["judged"]["planned"] == 40
        found = judgements_of(path)
        # The chances are a run's own: so is what stands around answers in its prompts.
        assert found.keys() == want.keys()
        assert kept.items() <= found.items()
        chain += 1


def judgements_of(path: Path) -> dict[Any, list[float]]:
    """The chances of the choices, by what is judged; nothing is judged twice."""
    (folder,) = (path / "judged").iterdir()
    records = [*read_records(path, folder.name)]
    found = {(r["problem_id"], get_slot(r)): r["choice_logprobs"] for r in records}
    assert len(found) == len(records)
    return found


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)],
)
def test_exit_codes_and_resume_commands_after_signals(
    server: Server, tiny: Path, tmp_path: Path, number: int, code: int
) -> None:
    path = tmp_path / "a run"
    # Long enough that the signal always comes in its midst.
    long = ["-n", "400", "--max-tokens", "80", "-b", "8"]
    pid = server.start("eval", "gsm8k", "-M", tiny, *long, "-o", path)
    wait_for_samples(path, pid)
    send(pid, number)
    ended = server.wait()
    assert (ended.code, ended.out) == (code, "")
    with RunDir.open(path) as run:
        done = len(run.done)
    assert 0 < done < 9600
    if code > 0:
        assert ended.err.splitlines()[-1] == (
            f"stopped by {signal.Signals(number).name}; {done:,} of 9,600 samples are stored; "
            f"continue with: treegen eval --resume '{path}'"
        )
        results = results_of(path)
        assert (results["complete"], results["done"]) == (False, done)


def outputs_of_programs(server: Server, path: Path) -> dict[str, Any]:
    """What is told of a run of programs, without what it took and when."""
    page = path.with_suffix(".html")
    outputs: dict[str, Any] = {"before": results_of(path)}
    for command in (["report", path, "-o", page], ["score", path]):
        ended = server.run(*command)
        assert ended.code == 0, ended.err
    # The costs stand below the tables.
    outputs["tables"] = ended.out.partition("\nprompt tokens")[0]
    outputs["after"] = results_of(path)
    for results in (outputs["before"], outputs["after"]):
        usage = results.pop("usage")
        results["usage"] = {name: usage[name] for name in COUNTED}
        del results["parts"]
    html = page.read_text()
    outputs["page"] = {
        name: json.loads(gzip.decompress(base64.b64decode(packed)))
        for name, packed in re.findall(r'base64" id="([^"]*)">([^<]*)', html)
    }
    for prompt in outputs["page"]["run-1-index"]["prompts"]:
        prompt["logprob"] = pytest.approx(prompt["logprob"], abs=1e-4)
    outputs["shown"] = re.findall(r"<t[dh][^>]*>.*", html)
    return outputs


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_reports_on_programs_do_not_depend_on_kills(server: Server, tmp_path: Path) -> None:
    """Killed while it samples, judges, scores or makes a page, and resumed."""
    chance, kills, chain = random.Random(3), 0, 0
    run = ["eval", "apps", "-M", "demo", "-L", "8", "-n", "6", "--max-tokens", "100", "-q"]
    run += ["--allow-code-execution", "--resume", "-o"]
    start = time.monotonic()
    assert server.run(*run, tmp_path / "whole" / "run").code == 0
    seconds = time.monotonic() - start
    want = outputs_of_programs(server, tmp_path / "whole" / "run")
    while kills < 2 * KILLS:
        path = tmp_path / f"{chain}" / "run"
        for _ in range(4):
            others = [["score", path, "--allow-code-execution"], ["report", path]]
            command = chance.choice([[*run, path], *others])
            if not (path / "run.json").exists():
                command = [*run, path]
            pid = server.start(*command)
            if command[0] == "eval" and chance.random() < 0.7:  # as samples or verdicts are stored
                pattern = chance.choice(["samples.jsonl", "verdicts-*.jsonl"])
                more = chance.randint(1, 4000)
                goal = sum(each.stat().st_size for each in path.glob(pattern)) + more
                while alive(pid) and sum(e.stat().st_size for e in path.glob(pattern)) < goal:
                    time.sleep(0.001)
            else:
                time.sleep(chance.uniform(0, seconds))
            with contextlib.suppress(ProcessLookupError):
                send(pid, signal.SIGKILL)
            ended = server.wait()
            assert ended.code in (0, -signal.SIGKILL), ended.err
            kills += ended.code != 0
        for _ in range(2):
            ended = server.run(*run, path)
            assert ended.code == 0, ended.err
        assert_same_samples(path, tmp_path / "whole" / "run")
        assert outputs_of_programs(server, path) == want
        chain += 1


def test_a_second_process_on_the_same_run_is_refused(
    server: Server, tiny: Path, treegen: Command, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    pid = server.start("eval", "gsm8k", "-M", tiny, "-n", "400", "-b", "8", "-o", path)
    try:
        wait_for_samples(path, pid)
        error = treegen("eval", "--resume", path).error
        assert f"{path} is in use by process {pid}" in error
        done = treegen("score", path)  # reading is allowed
        assert (
            done.code == 0
            and f"results.json was not rewritten: {path} is in use by process {pid}" in done.err
        )
    finally:
        send(pid, signal.SIGKILL)
        server.wait()


def test_a_full_disk_keeps_what_was_finished(
    tiny: Path, whole: Whole, treegen: Command, small_disk: Path
) -> None:
    path, filler = small_disk / "run", small_disk / "filler"
    filler.write_bytes(bytes(240 * 1024))
    error = treegen("eval", "gsm8k", "-M", tiny, *RUN, "-o", path).error
    assert "no space left on device" in error and "free some disk space" in error
    assert error.endswith(f"continue with --resume {path}")
    with RunDir.open(path) as run:
        kept = len(run.done)
    assert 0 < kept < 40 and f"{kept} finished samples are kept" in error
    filler.unlink()
    done = treegen("eval", "--resume", path)
    assert done.code == 0, done.err
    assert_same_samples(path, whole.path)


def test_signals_end_commands_though_the_tests_run_under_nohup(
    repository: Path, tmp_path: Path
) -> None:
    (tmp_path / "test_own.py").write_text(
        "import signal\n\n\ndef test_own() -> None:\n"
        "    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):\n"
        "        assert signal.getsignal(number) is not signal.SIG_IGN\n"
    )
    code = (
        "import signal, sys, pytest\n"
        "for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "sys.path.insert(0, 'tests')\n"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-p', 'conftest', sys.argv[1]]))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_fork_server_ends_unfinished_commands(server: Server, tmp_path: Path) -> None:
    left = server.start("tasks")
    pid = server.start("tasks")  # without waiting for the one before
    assert pid > 1 and pid != left
    assert server.wait().code == 0
    with pytest.raises(AssertionError):
        send(0, signal.SIGKILL)
