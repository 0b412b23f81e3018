"""What a program gets from the judge: files, the body it may be, room for its answer."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_cases import ADD, LIMITS, USABLE, compare, verdict_of

from treegen.tasks.sandbox import Program, ProgramStatus, SandboxPool, TestCase
from treegen.tasks.sandbox.isolation import TIERS
from treegen.tasks.sandbox.process import SandboxProcess
from treegen.tasks.sandbox.runtime import _find_hidden, find_runtime

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


@pytest.fixture(scope="module", params=USABLE)
def judge(request: pytest.FixtureRequest) -> Iterator[SandboxPool]:
    with SandboxPool(request.param, limits=LIMITS, workers=2) as judge:
        yield judge


def test_programs_see_nothing_of_each_other(judge: SandboxPool) -> None:
    leave = "open('left', 'w').write('x')\nimport math, builtins\nmath.pi = 3\nbuiltins.x = 1"
    look = "import os, math, builtins\nprint(os.listdir(), math.pi > 3.1, hasattr(builtins, 'x'))"
    for _ in range(3):
        assert verdict_of(judge, leave, "") is ProgramStatus.ACCEPTED
        assert verdict_of(judge, look, "[] True False") is ProgramStatus.ACCEPTED


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
    hidden = _find_hidden([str(tmp_path)])
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
    with SandboxProcess(TIERS[sandbox], runtime, LIMITS) as cell:
        outcome = cell.run(Program(source), TestCase())
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


def test_programs_see_nothing_of_the_one_before(judge: SandboxPool) -> None:
    number = "import os\nprint(os.fstat(os.open('new', os.O_CREAT | os.O_WRONLY)).st_ino)"
    numbers: set[object] = set()

    def keep(output: object, expected: object) -> bool:
        numbers.add(output)
        return True

    for _ in range(3):
        assert judge.run(ADD, [TestCase("1 2", expected="3")], compare).accepted
        for _ in range(judge.workers):  # the next one may come to any of the sandboxes
            assert verdict_of(judge, LOOK, "False 0") is ProgramStatus.ACCEPTED
        assert verdict_of(judge, LEAVE, "") is ProgramStatus.ACCEPTED
        judge.run(Program(number), [TestCase()], keep)
    if judge.report.tier == "bubblewrap":  # Landlock's scratch directory is one of the host's
        assert len(numbers) == 1


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
def test_a_source_may_be_the_body_of_a_function(judge: SandboxPool, name: str) -> None:
    assert verdict_of(judge, BODIES[name], "5", "5") is ProgramStatus.COMPILE_ERROR
    program = Program(BODIES[name], prelude="import sys", may_return=True)
    (result,) = judge.run(program, [TestCase("5", expected="5")], compare).tests
    assert result.verdict is ProgramStatus.ACCEPTED, result


def test_an_invalid_function_body_is_a_compile_error(judge: SandboxPool) -> None:
    for source in ("return (", "class A:\n    return 1", "def f():\n    nonlocal x", "x = 1\n y"):
        program = Program(source, may_return=True)
        (result,) = judge.run(program, [TestCase(expected="")], compare).tests
        assert result.verdict is ProgramStatus.COMPILE_ERROR, source
        assert "SyntaxError" in result.detail or "IndentationError" in result.detail
    # A script stays one: what it defines are globals.
    script = Program("x = 1\nprint(globals()['x'])", may_return=True)
    assert judge.run(script, [TestCase(expected="1")], compare).accepted


def test_output_may_be_as_long_as_what_is_expected(judge: SandboxPool) -> None:
    size = LIMITS.output + (LIMITS.output >> 2)
    expected = "7 " * (size // 2)
    source = f"print('7 ' * {size // 2})"
    assert verdict_of(judge, source, expected) is ProgramStatus.ACCEPTED
    assert verdict_of(judge, source, "7") is ProgramStatus.OUTPUT_LIMIT
    call = Program(f"def f(): return [7] * {size}", fn_name="f")
    assert judge.run(call, [TestCase(expected=[7] * size)], compare).accepted
    assert judge.run(call, [TestCase(expected=[7])], compare).verdict is ProgramStatus.OUTPUT_LIMIT
