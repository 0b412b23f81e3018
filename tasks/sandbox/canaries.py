"""Tests a sandbox by trying to break out of it. A sandbox that any attempt escapes is never used.

The same attempts ("canaries") first run without a sandbox. An attempt that fails even there proves
nothing, and is listed as not checked.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treegen.common.files import create_locked, sweep
from treegen.errors import InputError, arg
from treegen.tasks.sandbox.child import REPORT
from treegen.tasks.sandbox.isolation import TIERS, SandboxTier, Workspace
from treegen.tasks.sandbox.process import SandboxProcess
from treegen.tasks.sandbox.programs import (
    MIB,
    HelperKilledError,
    Limits,
    Program,
    SandboxError,
    TestCase,
)
from treegen.tasks.sandbox.runtime import (
    EXTERNAL_SIGNALS,
    Runtime,
    retry_if_killed,
    run_unconfined,
    signal_name,
    signal_of,
)

MakeWorkspace = Callable[[SandboxTier], Workspace | None]

_HINT = f"use another {arg('sandbox=')}"
_LIMITS = Limits(cpu_seconds=5.0, wall_seconds=30.0, memory=256 * MIB)

# Reads {"secret": path, ...} from stdin and prints which of its attempts succeeded.
_CANARY = """
import ctypes, fcntl, json, mmap, os, signal, socket, subprocess, sys, tempfile
bait = json.loads(sys.stdin.read())
out = {}
def attempt(action):
    try:
        out[action.__name__] = bool(action())
    except BaseException as error:
        out[action.__name__] = False
@attempt
def read_host_file():
    return open(bait["secret"]).read() == bait["token"]
@attempt
def read_installed_package():
    return len(open(bait["module"]).read()) > 0
@attempt
def see_environment():
    texts = [repr(dict(os.environ))]
    for pid in ("self", "1", str(os.getppid())):
        try: texts.append(open(f"/proc/{pid}/environ").read())
        except OSError: pass
    return any(bait["token"] in text for text in texts)
@attempt
def write_host_file():
    return open(bait["drop"], "w").write("x")
@attempt
def connect_tcp():
    return socket.create_connection(("127.0.0.1", bait["port"]), 2)
@attempt
def connect_unix():
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(bait["unix"])
    return True
@attempt
def signal_process():
    os.kill(bait["pid"], 0)
    return True
@attempt
def list_processes():
    return any(name.isdigit() for name in os.listdir("/proc"))
@attempt
def start_program():
    return subprocess.run([sys.executable, "-S", "-c", ""]).returncode == 0
@attempt
def exceed_memory():
    return bool(mmap.mmap(-1, bait["too_much"], mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
@attempt
def map_shared_memory():
    return bool(mmap.mmap(-1, 4096, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS))
@attempt
def map_zero_device():
    return bool(mmap.mmap(os.open("/dev/zero", os.O_RDWR), 4096, mmap.MAP_SHARED))
@attempt
def allocate_beyond_file():
    with tempfile.TemporaryFile() as file:
        fallocate = ctypes.CDLL(None).fallocate
        fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        return fallocate(file.fileno(), 1, 0, 4096) == 0  # FALLOC_FL_KEEP_SIZE
@attempt
def lock_host_file():
    with open(os.__file__) as first, open(os.__file__) as second:
        fcntl.flock(first, fcntl.LOCK_SH)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True  # the first lock is a real one
@attempt
def reopen_report():
    report = bait.get("report", os.pipe()[1])
    return os.open(f"/proc/self/fd/{report}", os.O_RDONLY | os.O_NONBLOCK) >= 0
@attempt
def share_memory():
    segment = ctypes.CDLL(None).shmget(0, 4096, 0o1600)
    ctypes.CDLL(None).shmctl(segment, 0, None)  # IPC_RMID
    return segment >= 0
@attempt
def fork():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return True
print(json.dumps(out))
"""
_USES_SCRATCH = """
import os
assert os.listdir() == []
open("note", "w").write("x")
assert open("note").read() == "x"
import threading
thread = threading.Thread(target=print, args=("works",))
thread.start()
thread.join()
"""


@dataclass(frozen=True, slots=True)
class SandboxReport:
    """The chosen sandbox, what it does not protect against, and the attempts to escape from it."""

    tier: str
    """The name of the sandbox's tier."""
    missing: tuple[str, ...]
    """What it does not protect against."""
    held: tuple[str, ...]
    """The attempts that succeed outside of the sandbox and failed inside."""
    not_checked: tuple[str, ...]
    """The attempts that fail on this machine even outside."""
    refused: tuple[str, ...]
    """Stronger sandboxes, and why they are not used."""

    def lines(self) -> list[str]:
        """Return the report for people, one item per line."""
        lines = [f"sandbox: {self.tier}"]
        lines += [f"not protected: {item}" for item in self.missing]
        lines += [f"not used: {item}" for item in self.refused]
        lines += [f"not checked: {item}" for item in self.not_checked]
        return lines


def _no_workspace(tier: SandboxTier) -> Workspace | None:
    return None


def choose_tier(
    sandbox: str, runtime: Runtime, make_workspace: MakeWorkspace = _no_workspace
) -> tuple[SandboxTier, SandboxReport]:
    """Choose the tier of a sandbox, and prove that it holds.

    Without workspaces, a tier that holds is not tested again in this process.

    Args:
        sandbox: Name of a tier, or "auto" for the strongest one that works here.
        runtime: The interpreter and the files that programs may read.
        make_workspace: Returns the empty directory in which the programs of a tier run; see
            `SandboxProcess`.

    Raises:
        InputError: There is no tier of this name.
        SandboxError: No allowed tier holds here; the message says what is missing.
    """
    if sandbox != "auto" and sandbox not in TIERS:
        raise InputError(
            f"{arg('sandbox')} must be one of auto, {', '.join(TIERS)}, got {sandbox!r}"
        )
    if sandbox == "none":
        tier = TIERS["none"]
        retry_if_killed(lambda: _check_works(tier, runtime, make_workspace))
        return tier, SandboxReport("none", tier.missing(), (), (), ())
    names = [name for name in TIERS if name != "none"] if sandbox == "auto" else [sandbox]
    refused: list[str] = []
    for name in names:
        tier = TIERS[name]
        reason = tier.unavailable()
        if not reason:
            try:
                is_cacheable = make_workspace is _no_workspace
                verify = verify_once if is_cacheable else verify_tier
                attempt = functools.partial(verify, tier, runtime, make_workspace)
                passed, not_checked = retry_if_killed(attempt)
            except HelperKilledError:
                raise  # says nothing about this sandbox, so do not fall back to a weaker one
            except SandboxError as error:
                reason = str(error)
            else:
                report = SandboxReport(name, tier.missing(), passed, not_checked, tuple(refused))
                return tier, report
        refused.append(f"{name}: {reason}")
    raise SandboxError(
        f"no sandbox works here ({'; '.join(refused)}); install bubblewrap, use a "
        f"kernel with Landlock, or pass {arg('sandbox', 'none')} to run code from the model "
        "without a sandbox"
    )


def verify_tier(
    tier: SandboxTier, runtime: Runtime, make_workspace: MakeWorkspace = _no_workspace
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Run the canaries without and with the tier.

    Args:
        tier: The tier.
        runtime: The interpreter and the files that programs may read.
        make_workspace: See `choose_tier`.

    Returns:
        The names of the attempts that the tier stopped, and of those that fail even outside.

    Raises:
        SandboxError: An attempt succeeds inside, or the canaries do not run.
    """
    _check_works(tier, runtime, make_workspace)
    with _plant_targets() as bait:
        token = bait["token"]
        control = run_unconfined(
            [runtime.python, "-s", "-S", "-P", "-B", "-c", _CANARY],
            {"TREEGEN_CANARY": token, "LD_LIBRARY_PATH": runtime.library_path},
            json.dumps(bait),
        )
        Path(bait["drop"]).unlink(missing_ok=True)
        if (number := signal_of(control.returncode)) in EXTERNAL_SIGNALS:
            raise HelperKilledError(
                f"the test programs of the sandbox were ended by {signal_name(number)}; try again"
            )
        if control.returncode:
            raise SandboxError(
                "the test programs do not run even outside the sandbox: "
                f"{control.stderr[-300:]}; {_HINT}"
            )
        outside: dict[str, bool] = json.loads(control.stdout)
        bait["report"] = REPORT
        output = _run(tier, runtime, make_workspace, _CANARY, stdin=json.dumps(bait))
        inside: dict[str, bool] = json.loads(output)
        if Path(bait["drop"]).exists():
            inside["write_host_file"] = True
    escaped = [name for name, success in inside.items() if success]
    if escaped:
        raise SandboxError(
            "the sandbox does not isolate programs: a program inside the sandbox could "
            f"{', '.join(escaped)}; {_HINT}"
        )
    passed = tuple(name for name, success in outside.items() if success)
    return passed, tuple(name for name, success in outside.items() if not success)


verify_once = functools.cache(verify_tier)
"""Calls `verify_tier`, but not again for a tier that holds."""


def _check_works(tier: SandboxTier, runtime: Runtime, make_workspace: MakeWorkspace) -> None:
    """Raise SandboxError if a harmless program does not run in the sandbox."""
    if _run(tier, runtime, make_workspace, _USES_SCRATCH) != "works\n":
        raise SandboxError(
            f"a harmless test program does not run in the sandbox {tier.name}; {_HINT}"
        )


def _run(
    tier: SandboxTier,
    runtime: Runtime,
    make_workspace: MakeWorkspace,
    source: str,
    *,
    stdin: str = "",
) -> str:
    """Return what a test program prints in the sandbox.

    Raises:
        HelperKilledError: Something killed the program, or it did not end in time.
        SandboxError: The program fails.
    """
    with SandboxProcess(tier, runtime, _LIMITS, make_workspace(tier)) as process:
        outcome = process.run(Program(source), TestCase(stdin=stdin))
    number = signal_of(outcome.exit_info["status"])
    if number in EXTERNAL_SIGNALS and not outcome.exit_info["killed"]:
        raise HelperKilledError(
            f"the test programs of the sandbox were ended by {signal_name(number)}; try again"
        )
    if outcome.exit_info["killed"] == "wall":
        raise HelperKilledError(
            f"a test program of the sandbox did not end within {_LIMITS.wall:g} s; try again on a "
            "machine with less load"
        )
    if outcome.exit_info["status"] != 0:
        words = (outcome.stderr or outcome.report).decode("utf-8", "replace").strip()
        raise SandboxError(
            f"the test programs do not run inside the sandbox: {words[-300:]}; {_HINT}"
        )
    return outcome.stdout.decode("utf-8", "replace")


@contextlib.contextmanager
def _plant_targets() -> Iterator[dict[str, Any]]:
    """Create targets that a program must not reach: a file, a variable, two servers, a process."""
    token = secrets.token_hex(16)
    above = Path(tempfile.gettempdir())
    sweep(above, "treegen-canary-*")  # killed processes may have left folders
    folder = above / f"treegen-canary-{secrets.token_hex(8)}"
    try:
        with (
            create_locked(folder, folder=True),
            socket.create_server(("127.0.0.1", 0)) as tcp,
            socket.socket(socket.AF_UNIX) as unix,
        ):
            folder.chmod(0o755)
            secret = folder / "secret"
            secret.write_text(token)
            unix.bind(f"\0treegen-{token}")
            unix.listen()
            yield {
                "token": token,
                "secret": str(secret),
                "drop": str(folder / "drop"),
                "port": tcp.getsockname()[1],
                "unix": f"\0treegen-{token}",
                "pid": os.getpid(),
                "too_much": 2 * _LIMITS.memory,
                "module": __file__,
            }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
