"""Runs model-written programs in isolation, and decides whether their output is right.

The process that runs a program never holds the expected answer and never decides the verdict. The
sandbox does not protect against exploits of the kernel itself.
"""

from treegen.tasks.sandbox.canaries import SandboxReport
from treegen.tasks.sandbox.isolation import list_gaps
from treegen.tasks.sandbox.pool import SandboxPool
from treegen.tasks.sandbox.programs import (
    Compare,
    Limits,
    Program,
    ProgramResult,
    ProgramStatus,
    SandboxError,
    TestCase,
    TestResult,
)

__all__ = [
    "Compare",
    "Limits",
    "Program",
    "ProgramResult",
    "ProgramStatus",
    "SandboxError",
    "SandboxPool",
    "SandboxReport",
    "TestCase",
    "TestResult",
    "list_gaps",
]
