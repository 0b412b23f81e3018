"""Base class of tasks whose samples are programs, which are scored by running them.

Run directories store the outcomes of the programs, and reports read them.

Blocks of code in a reply are fenced as CommonMark defines. A fence may be indented in a list or be
part of a quotation. Three backticks that are indented further than a fence may be, as in a
docstring, belong to the code.
"""

import hashlib
import re
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import ClassVar, Final

from markdown_it import MarkdownIt

from treegen.common.formatting import parse_bytes
from treegen.errors import InputError
from treegen.evals.problem import Problem
from treegen.evals.verdict import Verdict
from treegen.tasks.programs.report import NO_PROGRAM, ProgramVerdict, ReportedTask
from treegen.tasks.sandbox import (
    Compare,
    Limits,
    Program,
    ProgramStatus,
    SandboxPool,
    TestCase,
    TestResult,
)

_LETTERS: Final = {
    ProgramStatus.ACCEPTED: "A",
    ProgramStatus.WRONG_ANSWER: "W",
    ProgramStatus.RUNTIME_ERROR: "R",
    ProgramStatus.COMPILE_ERROR: "C",
    ProgramStatus.TIMEOUT: "T",
    ProgramStatus.MEMORY_LIMIT: "M",
    ProgramStatus.OUTPUT_LIMIT: "O",
}
_NOT_RUN: Final = "-"
_VERDICTS: Final = {letter: verdict for verdict, letter in _LETTERS.items()}


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """The outcome of one program."""

    program: str | None
    """Its short hash; None if the sample has no program."""
    verdict: str
    """Accepted, or its first kind of failure."""
    tests: str
    """A letter for each test, A for accepted."""
    seconds: float = 0.0
    """CPU seconds of its longest test."""
    detail: str = ""
    """One line on the first failure."""
    sandbox: str = ""
    """The tier of the sandbox that it ran in."""

    @property
    def verdicts(self) -> ProgramVerdict:
        """The verdict for reports."""
        credit = self.tests.count(_LETTERS[ProgramStatus.ACCEPTED]) / max(1, len(self.tests))
        correct = self.verdict == ProgramStatus.ACCEPTED
        return ProgramVerdict(self.program, correct, credit, self.verdict)

    def first(self, num_tests: int) -> ProgramVerdict:
        """Return the verdict by the first `num_tests` tests alone."""
        accepted = _LETTERS[ProgramStatus.ACCEPTED]
        failed = next((status for status in self.tests[:num_tests] if status != accepted), None)
        verdict = self.verdict if failed else str(ProgramStatus.ACCEPTED)
        if self.program is None:
            verdict = NO_PROGRAM
        elif failed in _VERDICTS:
            verdict = str(_VERDICTS[failed])
        correct = verdict == ProgramStatus.ACCEPTED
        return ProgramVerdict(self.program, correct, outcome=verdict)


def program_hash(program: str) -> str:
    """Return the short hash that identifies a program."""
    data = program.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=8).hexdigest()


NO_OUTCOME: Final = ProgramOutcome(None, NO_PROGRAM, "")


def outcome_of(
    program: str, results: Sequence[TestResult], num_tests: int, sandbox: str
) -> ProgramOutcome:
    """Return the outcome of a program's results. Tests that did not run count as failed.

    Args:
        program: Short hash of the program.
        results: Results of its tests, in their order.
        num_tests: Number of tests of the problem.
        sandbox: Tier of the sandbox.
    """
    failed = next((test for test in results if test.verdict is not ProgramStatus.ACCEPTED), None)
    letters = "".join(_LETTERS[test.verdict] for test in results)
    return ProgramOutcome(
        program=program,
        verdict=str(failed.verdict if failed else ProgramStatus.ACCEPTED),
        tests=letters.ljust(num_tests, _NOT_RUN),
        seconds=round(max(test.seconds for test in results), 3),
        detail=failed.detail if failed else "",
        sandbox=sandbox,
    )


def judge_limits(arguments: Mapping[str, str], limits: Limits) -> Limits:
    """Return limits with the `timeout` and the `memory` of a task's arguments.

    Raises:
        InputError: The timeout or the memory is invalid.
    """
    timeout, memory = arguments.get("timeout"), arguments.get("memory")
    if timeout is not None:
        try:
            seconds = float(timeout)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds <= 3600:
            raise InputError(
                "task argument timeout must be a number of seconds above 0 and at most 3600, got "
                f"{timeout!r}"
            )
        limits = replace(limits, cpu_seconds=seconds)
    if memory is not None:
        limits = replace(limits, memory=parse_bytes(memory, "task argument memory"))
    return limits


@dataclass(frozen=True, slots=True)
class ProgramCases:
    """The tests of a problem, and how a program runs on them."""

    tests: tuple[TestCase, ...]
    compare: Compare
    """Returns whether an output is right, given (output, expected)."""
    prelude: str
    """Source that runs before the program."""
    fn_name: str | None = None
    """The function to call; None for programs that print."""
    suffix: str = ""
    """Source that follows the program, such as test statements."""
    may_return_numpy: bool = False
    """See `Program`."""

    def program(self, source: str) -> Program:
        """Return the program that runs for a source, which may have a `return` if it prints."""
        return Program(
            f"{source}{self.suffix}",
            fn_name=self.fn_name,
            prelude=self.prelude,
            may_return=self.fn_name is None,
            may_return_numpy=self.may_return_numpy,
        )


class ProgramTask(ReportedTask):
    """Programs in a sandbox. Sampling needs no permission; scoring runs the programs."""

    executes_code: Final = True
    limits: Limits
    """Limits of each run of a program."""
    max_timeouts = 1
    """After this many timeouts the remaining tests of a program fail without running."""
    extract: str
    """How the program is found in a sample."""
    max_cached_problems: ClassVar[int] = 64
    """Maximum problems whose tests are cached. A few suffice, because samples of one problem are
    scored at about the same time."""

    def __init__(self) -> None:
        """Use the default options until `load` sets others."""
        self._cached_cases = lru_cache(maxsize=self.max_cached_problems)(self.read_cases)

    @property
    def judged_by(self) -> str:
        """The rule that decides whether output is right, named by the headline's filter."""
        return self.filters[0]

    @abstractmethod
    def program(self, problem_id: str, text: str) -> str | None:
        """Return the program in a sample; None if there is none."""

    @abstractmethod
    def read_cases(self, problem_id: str, judge: SandboxPool) -> ProgramCases:
        """Return the tests of a loaded problem; see `cases`."""

    @abstractmethod
    def score_outcome(self, problem_id: str, outcome: ProgramOutcome) -> dict[str, ProgramVerdict]:
        """Return the verdict on a program by filter."""

    def cases(self, problem_id: str, judge: SandboxPool) -> ProgramCases:
        """Return the tests of a problem, which may need a run of its reference solution.

        Args:
            problem_id: Id of a loaded problem.
            judge: The sandbox in which a reference solution runs.

        Raises:
            SandboxError: The reference solution cannot be run.
        """
        return self._cached_cases(problem_id, judge)

    def forget_cases(self) -> None:
        """Drop cached tests, so that they are read anew."""
        self._cached_cases.cache_clear()

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Raise InputError, because a program must run to be scored.

        Raises:
            InputError: Always; use `open_scoring`.
        """
        raise InputError(f"{self.name} must run programs to score them; use open_scoring")


# Only this many characters at the end of a text are read.
MAX_CODE: Final = 100_000
_LANGUAGE: Final = re.compile(r"[A-Za-z0-9_+.-]+")
_LINE: Final = re.compile(r"^[ \t]*+(?:`{3,}+|~{3,}+)[^`\n]*+$\n?", re.MULTILINE)


@cache
def _parser() -> MarkdownIt:
    # With HTML blocks, a tag alone on its line, such as </think>, would hide a fence right below.
    rules = ("html_block", "reference", "heading", "lheading", "inline", "text_join")
    return MarkdownIt("commonmark").disable(rules)


def fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield (language in lower case, code) of each block that is not blank.

    A block without a closing fence ends with the text. Only the last MAX_CODE characters are read.
    """
    for token in _parser().parse(text[-MAX_CODE:]):
        if token.type == "fence" and token.content.strip():
            language = _LANGUAGE.search(token.info)
            yield language[0].strip(".").lower() if language else "", token.content


def between_fences(text: str) -> list[str]:
    """Return the parts of a text before, between and after all lines that look like fences.

    One of the parts is the program if the text has only a closing fence, because the opening one
    was in the prompt, or if a fence in a list is indented and its code is not.
    """
    return _LINE.split(text[-MAX_CODE:])


def defines(code: str, names: Collection[str]) -> bool:
    """Return whether a line of the code begins a definition of one of the names."""
    if not names:
        return False
    choice = "|".join(map(re.escape, names))
    match = re.search(
        rf"^(?:(?:async[ \t]+)?def|class)[ \t]+(?:{choice})\b|^(?:{choice})[ \t]*=", code, re.M
    )
    return match is not None


def block_that_defines(text: str, names: Collection[str]) -> str | None:
    """Return the last fenced block that defines one of the names, otherwise the last block.

    If no block defines one, the last part of the text between fences that does is the program;
    without fences this part is the whole answer. Returns None if there is no such part and no
    block.
    """
    blocks = [code for _, code in fenced_blocks(text)]
    for code in (*reversed(blocks), *reversed(between_fences(text))):
        if defines(code, names):
            return code
    return blocks[-1] if blocks else None


def text_before(prompt: str, name: str) -> str:
    """Return the part of a prompt before the function: imports and helper functions."""
    match = re.search(rf"^(?:async[ \t]+)?def[ \t]+{re.escape(name)}\b", prompt, re.MULTILINE)
    return prompt[: match.start()] if match else ""
