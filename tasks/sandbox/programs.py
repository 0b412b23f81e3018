"""Programs, their limits, test cases and results; a result has one of eight statuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from treegen.errors import InputError, TreegenError

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one run of a program. The first one reached decides the verdict.

    Raises:
        InputError: A limit is too low, too high or not a number.
    """

    cpu_seconds: float = 4.0
    """Seconds of CPU time. The verdict `timeout` depends on it, so scores do not depend on load."""
    wall_seconds: float | None = None
    """A safety net against programs that wait; by default three times the CPU time."""
    memory: int = 1024 * MIB
    """Bytes of address space. The interpreter itself takes about 50 MiB."""
    output: int = MIB
    """Bytes of stdout, or of the JSON of a returned value, in addition to four times the length of
    the expected answer. On stderr 64 times as many are allowed; only the end is kept."""
    threads: int = 64
    """Threads at once."""
    scratch: int = 16 * MIB
    """Bytes in the scratch directory."""
    files: int = 256
    """Files in the scratch directory."""
    open_files: int = 64
    """Open files at once."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value is not None and not 0 < value < 1 << 63:  # the kernel's limits have 64 bits
                raise InputError(f"{limit.name} must be more than 0 and below 2^63, got {value}")
        if self.wall_seconds is not None and self.wall_seconds < self.cpu_seconds:
            raise InputError(
                f"wall_seconds must be at least cpu_seconds ({self.cpu_seconds:g}), "
                f"got {self.wall_seconds:g}"
            )
        if self.memory < 64 * MIB:
            raise InputError(f"memory must be at least 64 MiB, got {self.memory} bytes")
        if self.open_files < 16:
            raise InputError(f"open_files must be at least 16, got {self.open_files}")

    @property
    def wall(self) -> float:
        """Wall seconds after which a program is killed."""
        return 3 * self.cpu_seconds if self.wall_seconds is None else self.wall_seconds


Compare = Callable[[Any, Any], bool]
"""`compare(output, expected)` returns whether an output is right. It runs in the trusted process on
the program's stdout (str), or on the value that its function returned, which is plain data, with
numpy values only if `Program.may_return_numpy` is set. It must return for every input, in time
about linear in the size of its input."""


class SandboxError(TreegenError):
    """The sandbox itself failed; nothing is known about the program."""


class HelperKilledError(SandboxError):
    """A helper or test program was killed or too slow, which says nothing about its sandbox."""


class ProgramStatus(StrEnum):
    """The status of one program on one test. `judge_error` means that the sandbox failed."""

    ACCEPTED = "accepted"
    WRONG_ANSWER = "wrong_answer"
    RUNTIME_ERROR = "runtime_error"
    COMPILE_ERROR = "compile_error"
    TIMEOUT = "timeout"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"
    JUDGE_ERROR = "judge_error"


@dataclass(frozen=True, slots=True)
class Program:
    """Python source as a model wrote it.

    A program without `fn_name` reads stdin and runs as `__main__`. A call-based program runs as a
    module named `solution`, so code under its `__main__` guard does not run.
    """

    source: str
    """The source."""
    fn_name: str | None = None
    """The function to call. It is looked up in the module, then as a method of a class `Solution`.
    None for a stdin program."""
    prelude: str = ""
    """Source that runs first in the same namespace, such as common imports."""
    may_return: bool = False
    """Whether a stdin program may run as the body of a function if it is not a valid script because
    it has a `return` or `nonlocal` at its top level."""
    may_return_numpy: bool = False
    """Whether results may contain numpy values, as the prelude of a call-based program encodes them
    for `value_json`. Otherwise the arrays and scalars of a result become lists and numbers."""


@dataclass(frozen=True, slots=True)
class TestCase:
    """One input and its expected answer."""

    __test__ = False  # pytest must not collect this class

    stdin: str | bytes = b""
    """The input of a stdin program."""
    args: Sequence[Any] = ()
    """The positional arguments of a call-based program: None, bool, int, float, complex, str and
    lists, tuples, dicts and sets of them."""
    expected: Any = None
    """The expected answer. Only the trusted process ever sees it."""


@dataclass(frozen=True, slots=True)
class TestResult:
    """The verdict of one test."""

    __test__ = False

    verdict: ProgramStatus
    seconds: float = 0.0
    """CPU seconds."""
    wall_seconds: float = 0.0
    """Elapsed seconds, including waiting."""
    memory: int = 0
    """Peak resident bytes."""
    detail: str = ""
    """One line for people: exit status, last line of stderr. The text cannot be trusted."""
    retried: bool = False
    """Whether the test was run a second time, after a timeout by wall time only."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The results of one program."""

    tests: tuple[TestResult, ...]
    """Results in the order of the tests. There are fewer if running stopped early: at the first
    failure if requested, and always at a judge error. A compile error is repeated for every
    test."""
    num_tests: int
    """Number of tests."""
    sandbox: str
    """The tier of the sandbox."""

    @property
    def verdict(self) -> ProgramStatus:
        """A judge error if there is one, otherwise the first failure, otherwise accepted."""
        verdicts = [test.verdict for test in self.tests]
        if ProgramStatus.JUDGE_ERROR in verdicts:
            return ProgramStatus.JUDGE_ERROR
        return next(
            (v for v in verdicts if v is not ProgramStatus.ACCEPTED), ProgramStatus.ACCEPTED
        )

    @property
    def accepted(self) -> bool:
        """Whether every test ran and passed.

        Raises:
            SandboxError: This is unknown, because the sandbox failed.
        """
        if self.verdict is ProgramStatus.JUDGE_ERROR:
            raise SandboxError(
                f"the judge failed, so there is no score: {self.tests[-1].detail}; judge the "
                "program again"
            )
        return self.verdict is ProgramStatus.ACCEPTED and len(self.tests) == self.num_tests


def check_program(program: Program, tests: Sequence[TestCase]) -> None:
    """Raise InputError for a program that cannot be tested. Without tests it would always pass.

    Raises:
        InputError: There are no tests, or they do not fit the program.
    """
    if not tests:
        raise InputError(
            "a program without tests cannot be judged; add a test, or remove the program"
        )
    if program.fn_name is not None and not program.fn_name.isidentifier():
        raise InputError(f"fn_name must be a Python name, got {program.fn_name!r}")
    if program.fn_name is not None and program.may_return:
        raise InputError("may_return cannot be used together with fn_name; remove one of the two")
    for index, test in enumerate(tests):
        if program.fn_name is None and test.args:
            raise InputError(
                f"test {index} has args, but the program has no fn_name; set fn_name to the "
                "function to call"
            )
