"""Runs model-written programs where they can do no harm, and says whether they are right.

The process that runs a program never holds the expected answer and never decides the verdict. The
sandbox is no boundary against exploits of the kernel itself.
"""

from treegen.tasks.judge.canaries import SandboxReport
from treegen.tasks.judge.limits import Limits
from treegen.tasks.judge.pool import Judge
from treegen.tasks.judge.sandbox import gaps
from treegen.tasks.judge.verdicts import (
    Compare,
    JudgeError,
    JudgeVerdict,
    Program,
    ProgramResult,
    Test,
    TestResult,
)

__all__ = [
    "Compare",
    "Judge",
    "JudgeError",
    "JudgeVerdict",
    "Limits",
    "Program",
    "ProgramResult",
    "SandboxReport",
    "Test",
    "TestResult",
    "gaps",
]
