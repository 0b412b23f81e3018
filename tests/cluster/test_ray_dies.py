"""Ray's own processes die under a command: it ends soon, says what to do, and loses no sample."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_cases import assert_same_samples
from processes import descendants, living

from treegen.llm.cluster import ray_session
from treegen.llm.cluster.dispatcher import Dispatcher, WorkItem
from treegen.llm.cluster.placement import Placement
from treegen.llm.cluster.ray_session import RayMonitor, RaySession
from treegen.llm.cluster.worker import from_checkpoint
from treegen.llm.cluster.worker_pool import WorkerPool

EVAL = shlex.split(
    "eval gsm8k --num-fewshot 1 -L 4 -n 100 --max-tokens 80 -q --memory 4MiB -b 6 --dtype float32"
)
LAST = 120.0  # seconds for what Ray has started to end; two of its helpers wait for a minute


def test_a_process_that_listens_no_more_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as raylet,
    ):
        node = {
            "NodeID": "a",
            "NodeManagerAddress": "::1",
            "NodeManagerPort": raylet.getsockname()[1],
        }
        here = SimpleNamespace(
            get_node_id=lambda: "a", gcs_address=f"127.0.0.1:{server.getsockname()[1]}"
        )
        ray: Any = SimpleNamespace(
            get_runtime_context=lambda: here,
            nodes=lambda: [node],
            is_initialized=lambda: False,
            init=lambda **_: None,
        )
        monkeypatch.setattr(ray_session, "_POLL_SECONDS", 0.0)
        monkeypatch.setattr(ray_session, "_import_ray", lambda private: ray)
        both, of_server = RayMonitor(ray, patience=60.0), RayMonitor(ray, patience=60.0)
        private = RaySession(Placement("cpu", 1), 1)
        # A driver on a machine that is no node.
        of_server._raylet = private.monitor._raylet = None
        assert not both.describe_failure() and not of_server.describe_failure()
    assert "raylet died" in both.describe_failure() and "raylet died" in both.describe_failure()
    assert "gcs_server died" in private.monitor.describe_failure()
    assert private.monitor.refused_since is not None
    assert not of_server.describe_failure() and not of_server.describe_failure()  # may start again
    monkeypatch.setattr(of_server, "_patience", 0.0)
    assert "gcs_server died" in of_server.describe_failure()


def test_no_gpus_are_looked_for_while_rays_server_is_down() -> None:
    """The call would wait for the server, and Ray would end this process meanwhile."""
    monitor = SimpleNamespace(refused_since=1.0)
    session: Any = SimpleNamespace(monitor=monitor, get_free_resources=None)
    pool = WorkerPool(session, {}, (), from_checkpoint, 0, 1, 1, adds_joined_gpus=True)
    assert not pool.add_joined_gpus()


def test_a_dealer_leaves_out_what_is_open_and_what_waits() -> None:
    dispatcher = Dispatcher([WorkItem(key, (0, 1)) for key in range(4)], [0, 1])
    assert [part.key for part in dispatcher.assign(0, num_decoded=1, num_rows=3)] == [0, 1]
    assert dispatcher.done(0, 0, 0) and dispatcher.done(0, 0, 1)
    assert dispatcher.cancel_remaining() == [1, 2, 3]
    assert not dispatcher.has_work and not dispatcher.done(0, 1, 0)
    dispatcher.put(WorkItem(1, (1,)))
    assert not dispatcher.has_work and not dispatcher.cancel_remaining()


def test_many_prompts_are_left_out_in_linear_time() -> None:
    dispatcher = Dispatcher([WorkItem(key, (0,)) for key in range(30_000)], [0, 1])
    start = time.process_time()
    assert len(dispatcher.cancel_remaining()) == 30_000
    assert time.process_time() - start < 1  # it took ten seconds when each prompt was searched for


def _has(name: str) -> Callable[[int, Path], bool]:
    return lambda pid, _: any(name in each for each in descendants(pid).values())


def _stored(count: int) -> Callable[[int, Path], bool]:
    return lambda _, file: file.exists() and file.read_bytes().count(b"\n") >= count


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
@pytest.mark.parametrize("victim", ["raylet/raylet", "gcs/gcs_server"])
@pytest.mark.parametrize(
    "moment", [_has("raylet/raylet"), _has("ray::Worker"), _stored(1), _stored(200)]
)
def test_rays_processes_are_killed(
    tiny: Path, tmp_path: Path, victim: str, moment: Callable[[int, Path], bool]
) -> None:
    path, whole = tmp_path / "run", tmp_path / "whole"
    command = [sys.executable, "-m", "treegen", *EVAL, "-M", str(tiny)]
    killed = subprocess.Popen(
        [*command, "--workers", "2", "-o", path, "--json"],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    while killed.poll() is None and not moment(killed.pid, path / "samples.jsonl"):
        time.sleep(0.02)
    below = descendants(killed.pid)
    for (pid, _), name in below.items():
        if victim in name:
            os.kill(pid, signal.SIGKILL)
    out, err = killed.communicate(timeout=300)
    kept = path / "samples.jsonl"
    stored = kept.read_bytes().count(b"\n") if kept.exists() else 0
    assert "Traceback" not in err, err
    if killed.returncode == 1:
        assert "Ray stopped, because Ray's process" in err and f"--resume {path}" in err, err
        (run,) = json.loads(out)["runs"]
        assert run["done"] == stored < run["planned"] == 400
    elif killed.returncode == 2:  # nothing was drawn yet
        # Ray's own lines come first where its server dies while it starts.
        errors = [line for line in err.splitlines() if not line.startswith("[")]
        assert len(errors) == 1 and errors[0].startswith("Error: ") and not stored, err
    else:
        assert (killed.returncode, stored) == (0, 400), err  # it had drawn everything by then
    for each in (path, whole):
        subprocess.run([*command, "-o", each, "--resume"], check=True, capture_output=True)
    assert_same_samples(path, whole)
    deadline = time.monotonic() + LAST
    while left := below.keys() & living().keys():
        assert time.monotonic() < deadline, f"processes of Ray are left: {left}"
        time.sleep(0.5)
