"""The judge from outside: verdicts, limits, failures of its own, and what is left after it."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import signal
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_cases import LIMITS, MIB, compare, traces
from hypothesis import given
from hypothesis import strategies as st

from treegen.errors import InputError
from treegen.tasks.judge import (
    Judge,
    JudgeError,
    Limits,
    Program,
    ProgramResult,
    Test,
    TestResult,
    Verdict,
    canaries,
    seccomp,
    values,
)
from treegen.tasks.judge.cell import Cell, Outcome
from treegen.tasks.judge.decide import decide
from treegen.tasks.judge.runtime import _hidden, find_runtime
from treegen.tasks.judge.sandbox import TIERS
from treegen.tasks.judge.syscalls import ALWAYS, SOMETIMES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

ADD = Program("a, b = map(int, input().split())\nprint(a + b)")
USABLE = [name for name in ("bubblewrap", "landlock") if not TIERS[name].unavailable()]


@pytest.fixture(scope="module", params=USABLE)
def judge(request: pytest.FixtureRequest) -> Iterator[Judge]:
    with Judge(request.param, limits=LIMITS, workers=2) as judge:
        yield judge


def verdict_of(judge: Judge, source: str, expected: object = None, stdin: str = "") -> Verdict:
    """Judge source on one test."""
    return judge.run(Program(source), [Test(stdin=stdin, expected=expected)], compare).verdict


def test_each_test_has_its_own_verdict(judge: Judge) -> None:
    tests = [Test("1 2", expected="3"), Test("1 2", expected="4"), Test("x", expected="3")]
    result = judge.run(ADD, tests, compare)
    want = [Verdict.ACCEPTED, Verdict.WRONG_ANSWER, Verdict.RUNTIME_ERROR]
    assert [test.verdict for test in result.tests] == want
    assert result.verdict is Verdict.WRONG_ANSWER
    assert not result.accepted
    assert "ValueError" in result.tests[2].detail
    assert result.sandbox == judge.report.tier


def test_stopping_at_the_first_failure_is_no_pass(judge: Judge) -> None:
    tests = [Test("1 2", expected="3"), Test("1 2", expected="4"), Test("1 2", expected="3")]
    result = judge.run(ADD, tests, compare, stop_at_failure=True)
    assert len(result.tests) == 2
    assert result.num_tests == 3
    assert not result.accepted
    assert not ProgramResult(result.tests[:1], 3, "landlock").accepted


@pytest.mark.parametrize(
    "source",
    ["def f(:", "print(1)\0", "print('\ud800')", "(" * 5000, "-" * 200_000 + "1", "\tx\n  y"],
    ids=["syntax", "nul", "surrogate", "nested", "deep", "tabs"],
)
def test_compile_errors(judge: Judge, source: str) -> None:
    tests = [Test(expected="")] * 2
    result = judge.run(Program(source), tests, compare)
    assert [test.verdict for test in result.tests] == [Verdict.COMPILE_ERROR] * 2


def test_a_coding_cookie_means_nothing(judge: Judge) -> None:
    source = "# -*- coding: utf-7 -*-\n# +AAo-print('hidden')\nprint('shown')"
    assert verdict_of(judge, source, "shown") is Verdict.ACCEPTED


def test_names_and_text_beyond_ascii(judge: Judge) -> None:
    source = "\u03b1, \u00df = input().split()\nprint(\u03b1 + \u00df + '\U0001f600')"
    assert verdict_of(judge, source, "\u00e9\u4e2d\U0001f600", "\u00e9 \u4e2d") is Verdict.ACCEPTED


def test_bytes_that_are_no_text_are_a_wrong_answer(judge: Judge) -> None:
    source = "import sys\nsys.stdout.buffer.write(bytes(range(256)))"
    assert verdict_of(judge, source, "x") is Verdict.WRONG_ANSWER


def test_a_prelude_runs_first(judge: Judge) -> None:
    source = (
        "from __future__ import annotations\ndef f(x: List[int]) -> int:\n    return sqrt(x[0])"
    )
    program = Program(source, fn_name="f", prelude="from math import *\nfrom typing import *")
    assert judge.run(program, [Test(args=[[9]], expected=3.0)], compare).accepted


def test_a_call_does_not_run_the_main_guard(judge: Judge) -> None:
    source = "def f(x): return x\nif __name__ == '__main__': raise SystemExit(1)"
    program = Program(source, fn_name="f")
    assert judge.run(program, [Test(args=["a"], expected="a")], compare).accepted


def test_programs_see_nothing_of_each_other(judge: Judge) -> None:
    leave = "open('left', 'w').write('x')\nimport math, builtins\nmath.pi = 3\nbuiltins.x = 1"
    look = "import os, math, builtins\nprint(os.listdir(), math.pi > 3.1, hasattr(builtins, 'x'))"
    for _ in range(3):
        assert verdict_of(judge, leave, "") is Verdict.ACCEPTED
        assert verdict_of(judge, look, "[] True False") is Verdict.ACCEPTED


@pytest.mark.parametrize("sandbox", USABLE)
def test_installed_packages_cannot_be_read_unless_given(sandbox: str, tmp_path: Path) -> None:
    for folder in [tmp_path, *tmp_path.parents[:-1]]:
        if folder.stat().st_uid == os.getuid():  # a program may be another user
            folder.chmod(folder.stat().st_mode | 0o755)
    packages = "lib/site-packages"
    names = ["top.txt", "lib/own.txt", f"{packages}/given/code.txt"]
    names += [f"{packages}/treegen/answers.txt", "lib/dist-packages/hidden.txt"]
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    usual = find_runtime()
    hidden = _hidden([str(tmp_path)])
    assert sorted(os.path.basename(path) for path in hidden) == ["dist-packages", "site-packages"]
    runtime = dataclasses.replace(
        usual,
        read=(*usual.read, str(tmp_path)),
        hidden=(*usual.hidden, *hidden),
        shown=(str(tmp_path / packages / "given"),),
    )
    source = f"""
for name in {names}:
    try:
        print(name, open({str(tmp_path)!r} + "/" + name).read())
    except OSError:
        pass
    try:
        open({str(tmp_path)!r} + "/{packages}/new", "w")
    except OSError:
        continue
    print("written")
"""
    with Cell(TIERS[sandbox], runtime, LIMITS) as cell:
        outcome = cell.run(Program(source), Test())
    assert outcome.stdout.decode() == "".join(f"{name} x\n" for name in names[:3]), outcome


LOOK = """
import gc, os, sys
frame, seen = sys._getframe(), []
while frame:
    seen += [frame.f_locals, *frame.f_locals.values(), *frame.f_globals.values()]
    frame = frame.f_back
seen += gc.get_objects()
print(any(isinstance(x, dict) and {"status", "cpu", "wall"} <= x.keys() for x in seen))
print(os.stat(".").st_mtime_ns)
"""
LEAVE = """
import os
open("left", "w").close()
try:
    os.remove("left")
except OSError:
    pass
"""


def test_programs_see_nothing_of_the_one_before(judge: Judge) -> None:
    number = "import os\nprint(os.fstat(os.open('new', os.O_CREAT | os.O_WRONLY)).st_ino)"
    numbers: set[object] = set()

    def keep(output: object, expected: object) -> bool:
        numbers.add(output)
        return True

    for _ in range(3):
        assert judge.run(ADD, [Test("1 2", expected="3")], compare).accepted
        for _ in range(judge.workers):  # the next one may come to any of the sandboxes
            assert verdict_of(judge, LOOK, "False 0") is Verdict.ACCEPTED
        assert verdict_of(judge, LEAVE, "") is Verdict.ACCEPTED
        judge.run(Program(number), [Test()], keep)
    if judge.report.tier == "bubblewrap":  # Landlock's scratch directory is one of the host's
        assert len(numbers) == 1


def test_a_report_that_makes_no_sense_is_the_programs_failure() -> None:
    program = Program("def f(): pass", fn_name="f")
    ended = {"status": 0, "cpu": 0.0, "wall": 0.0, "memory": 0, "killed": None, "dirty": False}

    def verdict(told: bytes) -> Verdict:
        outcome = Outcome(ended, b"", b"", told, MIB, overflow=False)
        return decide(program, Test(expected=None), outcome, LIMITS, compare).verdict

    for told in (b"ready\ncompiled", b"ready\ncompiled\n", b"ready\ncompiled\n\xff\n\0"):
        assert verdict(told) is Verdict.RUNTIME_ERROR
    for told in (b"ready", b"ready\n", b"ready\ncompile_error"):
        assert verdict(told) is Verdict.COMPILE_ERROR


def test_output_may_be_as_long_as_what_is_expected(judge: Judge) -> None:
    size = LIMITS.output + (LIMITS.output >> 2)
    expected = "7 " * (size // 2)
    source = f"print('7 ' * {size // 2})"
    assert verdict_of(judge, source, expected) is Verdict.ACCEPTED
    assert verdict_of(judge, source, "7") is Verdict.OUTPUT_LIMIT
    call = Program(f"def f(): return [7] * {size}", fn_name="f")
    assert judge.run(call, [Test(expected=[7] * size)], compare).accepted
    assert judge.run(call, [Test(expected=[7])], compare).verdict is Verdict.OUTPUT_LIMIT


BODIES = {
    "return": """
import sys
from math import *
n = int(input())
if n > floor(2.5):
    print(n)
    sys.stdout.flush()
    return
print("small")
""",
    "nonlocal": """
n = 0
def add():
    nonlocal n
    n += int(input())
add()
print(n)
""",
    "global": """
n = 1
def add():
    global n
    n += int(input()) - 1
add()
print(n)
return n
""",
    "guard": """
def main():
    print(input())
if __name__ == "__main__":
    main()
    return
""",
    "text": """
text = '''a
  b'''
assert len(text) == 5
print(input())
return
""",
}


@pytest.mark.parametrize("name", list(BODIES))
def test_a_source_may_be_the_body_of_a_function(judge: Judge, name: str) -> None:
    assert verdict_of(judge, BODIES[name], "5", "5") is Verdict.COMPILE_ERROR
    program = Program(BODIES[name], prelude="import sys", may_return=True)
    (result,) = judge.run(program, [Test("5", expected="5")], compare).tests
    assert result.accepted, result


def test_what_is_no_body_either_stays_a_compile_error(judge: Judge) -> None:
    for source in ("return (", "class A:\n    return 1", "def f():\n    nonlocal x", "x = 1\n y"):
        program = Program(source, may_return=True)
        (result,) = judge.run(program, [Test(expected="")], compare).tests
        assert result.verdict is Verdict.COMPILE_ERROR, source
        assert "SyntaxError" in result.detail or "IndentationError" in result.detail
    # A script stays one: what it defines are globals.
    script = Program("x = 1\nprint(globals()['x'])", may_return=True)
    assert judge.run(script, [Test(expected="1")], compare).accepted


def test_the_order_of_a_set_is_the_same_in_every_run() -> None:
    orders: set[str] = set()

    def keep(output: str, expected: object) -> bool:
        orders.add(output)
        return True

    for sandbox in [*USABLE, "none"]:
        with Judge(sandbox, workers=1) as judge:
            judge.run(Program("print({'a', 'b', 'c', 'd', 'e'})"), [Test()], keep)
    assert len(orders) == 1


def test_only_a_program_that_worked_is_judged_again_alone() -> None:
    sleeper = "import time\ntime.sleep(100)"
    worker = f"import time\nwhile time.process_time() < 0.2: pass\n{sleeper}"
    limits = Limits(cpu_seconds=1.0, wall_seconds=1.0)
    with Judge(USABLE[0], limits=limits, workers=2) as judge:
        futures = [judge.submit(Program(s), [Test()] * 2, compare) for s in (sleeper, worker)]
        others = [judge.submit(ADD, [Test("1 2", expected="3")], compare) for _ in range(20)]
        assert all(other.result().accepted for other in others)
        results = [future.result().tests for future in futures]
    assert [[test.verdict for test in tests] for tests in results] == [[Verdict.TIMEOUT] * 2] * 2
    assert [[test.retried for test in tests] for tests in results] == [
        [False, False],
        [True, False],
    ]


def test_time_is_cpu_time(judge: Judge) -> None:
    waits = "import time\ntime.sleep(1.0)\nprint('done')"  # longer than the CPU limit
    (result,) = judge.run(Program(waits), [Test(expected="done")], compare).tests
    assert result.accepted
    assert result.seconds < 0.3
    assert result.wall_seconds > 0.9


def test_a_comparer_that_fails_is_no_verdict(judge: Judge) -> None:
    def broken(output: str, expected: object) -> bool:
        raise ZeroDivisionError

    future = judge.submit(ADD, [Test("1 2", expected="3")], broken)
    assert future.result().verdict is Verdict.JUDGE_ERROR
    with pytest.raises(JudgeError, match="comparer"):
        _ = future.result().accepted
    with pytest.raises(JudgeError, match="comparer"):
        judge.run(ADD, [Test("1 2", expected="3")], broken)


def test_a_helper_that_died_is_replaced(judge: Judge) -> None:
    assert judge.run(ADD, [Test("1 2", expected="3")], compare).accepted
    for cell in list(judge._cells):
        cell._process.kill()
        cell._process.wait()
    assert judge.run(ADD, [Test("1 2", expected="3")], compare).accepted


def test_a_fault_of_ours_is_no_verdict_and_ends_nothing(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> TestResult:
        raise IndexError("none there")

    monkeypatch.setattr("treegen.tasks.judge.pool.decide", broken)
    result = judge.submit(ADD, [Test("1 2", expected="3")], compare).result()
    assert result.verdict is Verdict.JUDGE_ERROR
    assert "IndexError: none there" in result.tests[0].detail


def test_an_unknown_score_is_not_false() -> None:
    with pytest.raises(JudgeError):
        _ = TestResult(Verdict.JUDGE_ERROR).accepted


def test_bad_arguments() -> None:
    with pytest.raises(InputError, match="sandbox must be"):
        Judge("docker")
    with pytest.raises(InputError, match="workers"):
        Judge(workers=0)
    with pytest.raises(InputError, match="not installed"):
        Judge(packages=["no_such_package"])
    with pytest.raises(InputError, match="cpu_seconds"):
        Limits(cpu_seconds=0)
    with pytest.raises(InputError, match="wall_seconds"):
        Limits(cpu_seconds=2, wall_seconds=1)
    with pytest.raises(InputError, match="memory"):
        Limits(memory=MIB)


def test_nothing_passes_without_tests() -> None:
    with Judge("none", workers=1) as judge:
        with pytest.raises(InputError, match="no tests"):
            judge.submit(ADD, [], compare)
        with pytest.raises(InputError, match="fn_name"):
            judge.submit(ADD, [Test(args=[1])], compare)
        with pytest.raises(InputError, match="may_return"):
            judge.submit(Program("", fn_name="f", may_return=True), [Test()], compare)
        with pytest.raises(InputError, match="plain data"):
            judge.run(Program("", fn_name="f"), [Test(args=[object()])], compare)


def test_no_sandbox_must_be_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("treegen.tasks.judge.landlock.version", lambda: 0)
    with pytest.raises(JudgeError, match=r"bwrap is not installed.*no Landlock.*sandbox='none'"):
        Judge("auto")
    with Judge("none", workers=1) as judge:
        assert judge.report.tier == "none"
        assert judge.report.missing
        result = judge.run(ADD, [Test("1 2", expected="3")], compare)
    assert result.accepted
    assert result.sandbox == "none"


def test_canaries_get_out_of_what_does_not_hold() -> None:
    with pytest.raises(JudgeError, match=r"does not hold: .*read_host_file.*fork"):
        canaries.prove(TIERS["none"], find_runtime())


@pytest.mark.parametrize("sandbox", USABLE)
def test_every_canary_was_able_to_get_out(sandbox: str) -> None:
    held, not_checked = canaries.prove(TIERS[sandbox], find_runtime())
    assert len(held) + len(not_checked) == 17
    assert {"read_host_file", "write_host_file", "fork", "exceed_memory"} <= set(held)
    assert {"read_installed_package", "map_shared_memory", "lock_host_file"} <= set(held)


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
def test_filters_look_at_arguments(machine: str) -> None:
    allow, refuse, pretend = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000
    number = {**ALWAYS[machine], **SOMETIMES[machine]}

    def answer(name: str, *arguments: int) -> int:
        return filtered(machine, number[name], *arguments)

    wanted = {0x22: allow, 0x4022: allow, 0x20022: allow, 0x02: allow, 0x01: allow}
    wanted |= {0x21: refuse, 0x08: refuse, 0x28: refuse, 0x40022: refuse, 0x23: refuse, 0: refuse}
    for flags, want in wanted.items():
        assert answer("mmap", 0, 4096, 3, flags) == want, hex(flags)
    assert [answer("fallocate", 5, mode, 0, 9) for mode in (0, 1, 3, 16)] == [allow] + [refuse] * 3
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


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.05, 0.1, 0.2, 0.4])
@pytest.mark.parametrize("sandbox", [*USABLE, "none"])
def test_nothing_survives_a_judge_that_is_killed(sandbox: str, delay: float) -> None:
    script = textwrap.dedent(f"""
        from treegen.tasks.judge import Judge, Limits, Program, Test
        judge = Judge({sandbox!r}, limits=Limits(cpu_seconds=60), workers=1)
        program = Program("open('left', 'w').write('x')\\nwhile True: pass")
        judge.submit(program, [Test()], lambda *_: True)
        import time; print("running", flush=True); time.sleep(60)
    """)
    before = traces()
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"running\n"
        time.sleep(delay)  # from before its helper is started to when the program runs
        os.kill(process.pid, signal.SIGKILL)
    time.sleep(0.5)  # a helper that is still starting shows nothing yet
    deadline = time.monotonic() + 10
    while (left := traces() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == set()


def test_throughput(judge: Judge) -> None:
    judge.run(ADD, [Test("1 2", expected="3")], compare)
    started = time.perf_counter()
    futures = [judge.submit(ADD, [Test("1 2", expected="3")] * 5, compare) for _ in range(40)]
    assert all(future.result().accepted for future in futures)
    rate = 200 / (time.perf_counter() - started) / judge.workers
    assert rate >= 40, f"{rate:.0f} tests a second for each core"


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.sets(st.integers())
    ),
    max_leaves=20,
)


@given(PLAIN)
def test_values_come_back_as_they_were(value: object) -> None:
    back = values.decode(values.encode(value))
    assert back == value
    assert repr(type(back)) == repr(type(value))


def test_keys_of_one_hash_are_refused_and_many_keys_are_not() -> None:
    far = 2**61 - 1
    for value in ({(0,) * 9 + (n * far,) for n in range(17)}, {n * far: 0 for n in range(17)}):
        with pytest.raises(ValueError, match="one hash"):
            values.decode(values.encode([value]))
    with pytest.raises(ValueError, match="one hash"):
        values.decode('{"set":[' + ",".join(["0"] * 17) + "]}")
    points = set(itertools.product((-1, -2), repeat=4))
    many = {n: str(n) for n in range(30_000)}
    for honest in (points, many, set(many), {(n, -(n % 3)): n for n in range(20_000)}):
        assert values.decode(values.encode(honest)) == honest


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
        value = values.decode(text)
    except ValueError:
        return
    assert isinstance(value, None | bool | int | float | str | list | tuple | dict | set)
