"""The judge's parts, each alone: the filter of system calls, encoded values, reports."""

from __future__ import annotations

import contextlib
import errno
import itertools
import operator
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_cases import LIMITS, MIB, compare
from hypothesis import given
from hypothesis import strategies as st

from treegen.tasks.sandbox import Program, ProgramStatus, TestCase, helper, seccomp, value_json
from treegen.tasks.sandbox.pool import decide
from treegen.tasks.sandbox.process import ProcessOutcome
from treegen.tasks.sandbox.seccomp import ALWAYS, SOMETIMES


def test_a_report_that_makes_no_sense_is_the_programs_failure() -> None:
    program = Program("def f(): pass", fn_name="f")
    ended = {"status": 0, "cpu": 0.0, "wall": 0.0, "memory": 0, "killed": None, "dirty": False}

    def verdict(report: bytes) -> ProgramStatus:
        outcome = ProcessOutcome(ended, b"", b"", report, MIB, overflow=False)
        return decide(program, TestCase(expected=None), outcome, LIMITS, compare).verdict

    for report in (b"ready\ncompiled", b"ready\ncompiled\n", b"ready\ncompiled\n\xff\n\0"):
        assert verdict(report) is ProgramStatus.RUNTIME_ERROR
    for report in (b"ready", b"ready\n", b"ready\ncompile_error"):
        assert verdict(report) is ProgramStatus.COMPILE_ERROR


def test_a_forged_numpy_array_is_a_wrong_answer() -> None:
    """Comparing an array with a longer list raises ValueError, which would leave no verdict."""
    ended = {"status": 0, "cpu": 0.0, "wall": 0.0, "memory": 0, "killed": None}
    for forged in ('{"numpy":["int64",1,5]}', '[{"numpy":["int64",0,5]}]', '{"numpy":["a",1]}'):
        report = f"ready\ncompiled\nresult {forged}\n".encode()
        outcome = ProcessOutcome(ended, b"", b"", report, MIB, overflow=False)
        program = Program("def f(): pass", fn_name="f")
        result = decide(program, TestCase(expected=[1, 2]), outcome, LIMITS, operator.eq)
        assert result.verdict is ProgramStatus.WRONG_ANSWER
        assert "cannot be read" in result.detail


def test_a_file_that_is_removed_meanwhile_does_not_hide_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(5):
        (tmp_path / str(index)).write_text("x" * 10_000)
    scan = os.scandir

    @contextlib.contextmanager
    def scan_and_remove(folder: str) -> Iterator[list[os.DirEntry[str]]]:
        with scan(folder) as entries:
            listed = list(entries)
        os.remove(listed[0].path)
        yield listed

    monkeypatch.setattr(os, "scandir", scan_and_remove)
    setup = {"kind": "workspace", "scratch": str(tmp_path)}
    num_files, num_bytes = helper._measure_scratch(setup, 100)
    assert num_files == 4 and num_bytes >= 40_000


def filtered(machine: str, number: int, *arguments: int) -> int:
    """What the filter of a machine answers to a call, by its own instructions."""
    words = [{"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine], 0, 0]
    for argument in (*arguments, *[0] * (6 - len(arguments))):
        words += [argument & 0xFFFFFFFF, argument >> 32]
    data = dict(zip(range(4, 64, 4), words, strict=True)) | {0: number}
    code = list(struct.iter_unpack("=HBBI", seccomp.assemble(machine)))
    at, value = 0, 0
    while True:
        operation, if_true, if_false, operand = code[at]
        at += 1
        if operation == 0x06:
            return int(operand)
        if operation == 0x20:
            value = data[operand]
        elif operation == 0x54:
            value &= operand
        else:
            hit = value == operand if operation == 0x15 else value >= operand
            at += if_true if hit else if_false


@pytest.mark.parametrize("machine", seccomp.machines())
def test_system_call_filters_check_arguments(machine: str) -> None:
    allow, refuse, pretend = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000
    number = {**ALWAYS[machine], **SOMETIMES[machine]}

    def answer(name: str, *arguments: int) -> int:
        return filtered(machine, number[name], *arguments)

    wanted = {0x22: allow, 0x4022: allow, 0x20022: allow, 0x02: allow, 0x01: allow}
    wanted |= {0x21: refuse, 0x08: refuse, 0x28: refuse, 0x40022: refuse, 0x23: refuse, 0: refuse}
    for flags, want in wanted.items():
        assert answer("mmap", 0, 4096, 3, flags) == want, hex(flags)
    assert (
        "fallocate" not in number and filtered(machine, {"x86_64": 285}.get(machine, 47)) == refuse
    )
    for flags, want in {
        0: allow,
        0x40: allow,
        0x4040: allow,
        1: refuse,
        0x41: refuse,
        0x8000: refuse,
        0x4000000: refuse,
        0x20000000: refuse,
    }.items():
        assert answer("sendto", 3, 0, 1, flags, 0, 0) == want, hex(flags)
    assert answer("sendto", 3, 0, 1, 0, 1 << 40, 0) == refuse  # an address
    for flags, want in {
        0: allow,
        2: allow,
        0x142: allow,
        1: refuse,
        0x2000: refuse,
        0x40000000: refuse,
    }.items():
        assert answer("recvfrom", 3, 0, 1, flags, 0, 0) == want, hex(flags)
    for advice, want in {
        4: allow,
        8: allow,
        14: allow,
        102: allow,
        9: refuse,
        12: refuse,
        20: refuse,
        21: refuse,
        22: refuse,
        100: refuse,
    }.items():
        assert answer("madvise", 0, 4096, advice) == want, advice
    assert [answer("flock", 5, how) for how in (1, 2, 6, 8)] == [pretend] * 4
    assert [answer("fcntl", 5, what) for what in (3, 5, 6, 7)] == [allow, allow, pretend, pretend]
    assert [answer("fcntl", 5, what) for what in (8, 10, 37, 1024)] == [refuse] * 4
    assert answer("getsockopt", 3, 1, 4) == allow
    assert answer("getsockopt", 3, 1, 77) == refuse
    assert answer("read", 0) == allow
    assert filtered(machine, 0x3FFF) == refuse


def test_filters_assemble_for_every_machine() -> None:
    for machine in seccomp.machines():
        code = seccomp.assemble(machine)
        assert len(code) % 8 == 0
        assert len(code) // 8 < 4096


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.sets(st.integers())
    ),
    max_leaves=8,
)


@given(PLAIN)
def test_values_come_back_as_they_were(value: object) -> None:
    back = value_json.loads(value_json.dumps(value))
    assert back == value
    assert repr(type(back)) == repr(type(value))


def test_keys_of_one_hash_are_refused_and_many_keys_are_not() -> None:
    far = 2**61 - 1
    for value in ({(0,) * 9 + (n * far,) for n in range(17)}, {n * far: 0 for n in range(17)}):
        with pytest.raises(ValueError, match="one hash"):
            value_json.loads(value_json.dumps([value]))
    with pytest.raises(ValueError, match="one hash"):
        value_json.loads('{"set":[' + ",".join(["0"] * 17) + "]}")
    points = set(itertools.product((-1, -2), repeat=4))
    many = {n: str(n) for n in range(30_000)}
    for honest in (points, many, set(many), {(n, -(n % 3)): n for n in range(20_000)}):
        assert value_json.loads(value_json.dumps(honest)) == honest


@given(
    st.text()
    | st.builds(str.__mul__, st.sampled_from(["[", '{"dict":[', '{"tuple":']), st.integers(1, 5000))
    | st.sampled_from(
        ['{"int":"z"}', "{}", '{"set":[[1]]}', '{"set":1}', "9" * 50, '{"a":1,"b":2}']
    )
    | st.sampled_from(['{"dict":[[1]]}', '{"int":5}', '{"set":{"a":1}}', "[" * 200 + "]" * 200])
)
def test_a_forged_value_is_refused_or_plain(text: str) -> None:
    try:
        value = value_json.loads(text)
    except ValueError:
        return
    assert isinstance(value, None | bool | int | float | str | list | tuple | dict | set)
