"""Programs that must not get out, cheat or stay, and honest ones that must pass.

Each file of tests/hostile starts with comments: `expect` (and `also`) verdicts; `stdin` and
`answer` of an honest program; `call` [function, arguments, value]; `machine` where it makes raw
calls. A hostile program's answer is a random token that is nowhere to be found.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from treegen.tasks.sandbox import (
    Limits,
    Program,
    ProgramResult,
    ProgramStatus,
    SandboxPool,
    TestCase,
)
from treegen.tasks.sandbox.isolation import TIERS

FOLDER = Path(__file__).parent / "hostile"
MIB = 1 << 20
LIMITS = Limits(
    cpu_seconds=0.5,
    wall_seconds=1.5,
    memory=320 * MIB,
    output=1 << 17,
    threads=16,
    scratch=MIB,
    files=20,
)
PATIENT = replace(LIMITS, cpu_seconds=4.0, wall_seconds=8.0)

ADD = Program("a, b = map(int, input().split())\nprint(a + b)")
USABLE = [name for name in ("bubblewrap", "landlock") if not TIERS[name].unavailable()]


@dataclass(frozen=True, slots=True)
class Case:
    """One program, its test and the verdicts that are right."""

    name: str
    expect: frozenset[str]
    program: Program
    test: TestCase


def read_case(path: Path) -> Case:
    """Read a program and its header."""
    source = path.read_text(encoding="utf-8")
    comments = [line[2:] for line in source.splitlines()[2:] if line.startswith("# ")]
    head = dict(line.split(": ", 1) for line in comments if ": " in line)
    expect = f"{head['expect']} {head.get('also', '')}".split()
    answer: Any = json.loads(head["answer"]) if "answer" in head else secrets.token_hex(16)
    fn_name, args = None, ()
    if "call" in head:
        fn_name, args, *value = json.loads(head["call"])
        answer = eval(head["value"]) if "value" in head else value[0] if value else answer
    stdin = json.loads(head.get("stdin", '"3 4\\n"'))
    test = TestCase(stdin=stdin, args=args, expected=answer)
    return Case(path.stem, frozenset(expect), Program(source, fn_name=fn_name), test)


def load_cases() -> dict[str, Case]:
    """All programs that can run on this machine, by name."""
    cases = {}
    for path in sorted(FOLDER.glob("*.py")):
        if "# machine: x86_64" in path.read_text() and platform.machine() != "x86_64":
            continue
        cases[path.stem] = read_case(path)
    return cases


def judge_all(sandbox: str, cases: dict[str, Case]) -> dict[str, ProgramResult]:
    """Judge every program in one sandbox, all at once.

    A busy machine takes long to hand out memory, so programs that end by it have more time.
    """
    with (
        SandboxPool(sandbox, limits=LIMITS) as judge,
        SandboxPool(sandbox, limits=PATIENT) as patient,
    ):
        futures = {
            name: (patient if case.expect == {"memory_limit"} else judge).submit(
                case.program, [case.test], compare
            )
            for name, case in cases.items()
        }
        return {name: future.result() for name, future in futures.items()}


def verdict_of(
    judge: SandboxPool, source: str, expected: object = None, stdin: str = ""
) -> ProgramStatus:
    """Judge source on one test."""
    return judge.run(Program(source), [TestCase(stdin=stdin, expected=expected)], compare).verdict


def compare(output: Any, expected: Any) -> bool:
    """Compare as a strict judge would; an expected answer that leaked is a bug of ours."""
    if isinstance(output, str) and isinstance(expected, str):
        if len(expected) == 32:
            assert expected not in output, "the answer leaked"
        return output.split() == expected.split()
    return type(output) is type(expected) and bool(output == expected)


def traces() -> set[str]:
    """What a program could leave on this machine, as names: processes, files, IPC, sockets."""
    found = set()
    for folder in ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", os.path.dirname(os.__file__)):
        if os.path.isdir(folder):
            found |= {f"{folder}/{name}" for name in os.listdir(folder)}
    for table in ("shm", "sem", "msg"):
        path = Path(f"/proc/sysvipc/{table}")
        if path.exists():
            found |= {f"{table} {line}" for line in path.read_text().splitlines()[1:]}
    for folder in os.listdir("/proc"):
        if folder.isdigit():
            try:
                command = Path(f"/proc/{folder}/cmdline").read_bytes().replace(b"\0", b" ")
            except OSError:
                continue
            if b"treegen.tasks.sandbox" in command or b"bwrap" in command:
                found.add(f"process {folder} {command[:200]!r}")
    sockets = Path("/proc/net/unix").read_text().splitlines()
    found |= {line for line in sockets if "treegen" in line}
    ours = {name for name in found if "treegen" in name or "sem " in name or "shm " in name}
    # Ranks of a model that another test has on several processes meanwhile, and its runs.
    return {name for name in ours if not re.search(r"/treegen-((ranks|run)-|\w{8}$)", name)}


def left_since(before: set[str], seconds: float = 60.0) -> set[str]:
    """The traces since `before` that stay: those of other tests, beside this one, go away."""
    left = traces() - before
    deadline = time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left &= traces()
    return left


def python_for_everybody() -> str:
    """An interpreter that other users can start; that of a virtual environment may not be."""
    own = getattr(sys, "_base_executable", sys.executable)
    for name in (own, "/usr/bin/python3", "/usr/local/bin/python3"):
        command = [name, "-c", "import sys; assert sys.version_info >= (3, 11)"]
        try:
            done = subprocess.run(command, user=65432, group=65432, check=False, cwd="/")
        except OSError:
            continue
        if done.returncode == 0:
            return name
    import pytest  # here, because interpreters without pytest import this module

    pytest.skip("no Python 3.11 that other users can start")
