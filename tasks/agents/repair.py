"""A puzzle of small Python files with bugs: the model edits files and runs the public tests.

Hidden tests with other arguments decide whether the files are right. They are in no file, and their
expected results never leave this process, so no action can read or change them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, ClassVar, Final

from treegen.search.environments.file_tools import make_tool
from treegen.search.environments.memory import MoveError, ToolGame
from treegen.tasks.agents.functions import FUNCTIONS, Arguments, Function
from treegen.tasks.sandbox import Limits, Program, ProgramStatus, SandboxPool, TestCase

LIMITS: Final = Limits(cpu_seconds=2.0, output=1 << 18)
NUM_PUBLIC: Final = 4
NUM_HIDDEN: Final = 16
_MAX_CHARS: Final = 20_000
_MAX_DETAIL_CHARS: Final = 200
_MAX_CACHED: Final = 4096
_NOT_WRITTEN: Final = "raise NotImplementedError"

# Imports modules from texts, and returns the results of calls as JSON values.
_RUNNER: Final = """
import importlib.abc as _abc, importlib.util as _util, sys as _sys

class _Files(_abc.MetaPathFinder, _abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return _util.spec_from_loader(name, self) if name + ".py" in _FILES else None

    def exec_module(self, module):
        name = module.__name__ + ".py"
        exec(compile(_FILES[name], name, "exec"), module.__dict__)

_sys.meta_path.insert(0, _Files())

def run_cases(name, cases):
    results = []
    for arguments in cases:
        try:
            results.append(["value", getattr(__import__(name), name)(*arguments)])
        except Exception as error:
            results.append(["error", f"{type(error).__name__}: {error}"[:200]])
    return results
"""


@dataclass(frozen=True, slots=True)
class RepairLevel:
    """How difficult a puzzle is."""

    num_files: int
    num_bugs: int
    num_unwritten: int
    """Number of functions without a body."""


LEVELS: Final = {
    "easy": RepairLevel(num_files=1, num_bugs=1, num_unwritten=0),
    "medium": RepairLevel(num_files=3, num_bugs=2, num_unwritten=0),
    "hard": RepairLevel(num_files=4, num_bugs=2, num_unwritten=1),
}


@dataclass(frozen=True, slots=True)
class CallCase:
    """One call of a function, and what it must return."""

    function: str
    arguments: Arguments
    expected: Any

    @property
    def call(self) -> str:
        """The call as Python code."""
        return f"{self.function}({', '.join(map(repr, self.arguments))})"


@dataclass(frozen=True, slots=True)
class RepairPuzzle:
    """Files with bugs, and their tests."""

    files: Mapping[str, str]
    """By path, the texts that the model gets."""
    public: tuple[CallCase, ...]
    hidden: tuple[CallCase, ...]
    solution: Mapping[str, str]
    """By path, right texts."""


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a call."""

    case: CallCase
    passed: bool
    shown: str
    """What it returned or raised, for the model."""


def make_puzzle(level: str, seed: str) -> RepairPuzzle:
    """Return the puzzle that a level and a seed decide.

    Args:
        level: One of LEVELS.
        seed: Any text.
    """
    how, draw = LEVELS[level], random.Random(f"repair {level} {seed}")
    functions = draw.sample(FUNCTIONS, how.num_files)
    broken = draw.sample(functions, how.num_bugs + how.num_unwritten)
    files, public, hidden = {}, [], []
    for function in functions:
        source = function.source
        if function in broken[: how.num_bugs]:
            source = source.replace(*draw.choice(function.bugs))
        elif function in broken:
            head, quotes, _ = source.rpartition('"""')
            source = f"{head}{quotes}\n    {_NOT_WRITTEN}\n"
        cases = _draw_cases(function, source, draw)
        files[f"{function.name}.py"] = source
        public += cases[:NUM_PUBLIC]
        hidden += cases[NUM_PUBLIC:]
    solution = {f"{function.name}.py": function.source for function in functions}
    return RepairPuzzle(files, tuple(public), tuple(hidden), solution)


def _draw_cases(function: Function, source: str, draw: random.Random) -> list[CallCase]:
    """Return different cases; if the source is wrong, it fails public and hidden ones."""
    correct, draft = function.load(), function.load(source)
    is_right = source == function.source
    while True:
        cases: dict[str, CallCase] = {}
        for _ in range(50 * (NUM_PUBLIC + NUM_HIDDEN)):
            case = CallCase(function.name, arguments := function.draw(draw), correct(*arguments))
            cases.setdefault(case.call, case)
            if len(cases) == NUM_PUBLIC + NUM_HIDDEN:
                break
        drawn_cases = list(cases.values())
        failed = [_fails(draft, case) for case in drawn_cases]
        if is_right or (any(failed[:NUM_PUBLIC]) and any(failed[NUM_PUBLIC:])):
            return drawn_cases


def _fails(function: Any, case: CallCase) -> bool:
    try:
        return bool(function(*case.arguments) != case.expected)
    except Exception:
        return True


class CaseRunner:
    """Runs cases on files in treegen's sandbox. Copies of games share one runner and its results.

    Args:
        pool: The sandbox.
    """

    def __init__(self, pool: SandboxPool) -> None:
        self._pool = pool
        self._lock = Lock()
        self._results: dict[tuple[str, ...], list[CallResult]] = {}

    def __deepcopy__(self, memo: object) -> CaseRunner:
        return self

    def describe(self) -> list[str]:
        """Return lines for the user: the sandbox and its gaps."""
        return self._pool.report.lines()

    def close(self) -> None:
        """Close the sandbox."""
        self._pool.close()

    def run(self, files: Mapping[str, str], cases: Sequence[CallCase]) -> list[CallResult]:
        """Return the result of each case; equal cases on equal files run once.

        Args:
            files: The texts of the files, by path.
            cases: Cases, grouped by function.

        Raises:
            SandboxError: The sandbox failed.
        """
        key = json.dumps(dict(files), sort_keys=True), *(case.call for case in cases)
        with self._lock:
            results = self._results.get(key)
        if results is None:
            results = []
            for function in dict.fromkeys(case.function for case in cases):
                results += self._run(
                    files, [selected for selected in cases if selected.function == function]
                )
            with self._lock:
                if len(self._results) >= _MAX_CACHED:
                    self._results.clear()
                self._results[key] = results
        return results

    def _run(self, files: Mapping[str, str], cases: Sequence[CallCase]) -> list[CallResult]:
        """Run the cases of one function in one program."""
        program = Program(
            f"_FILES = {json.dumps(dict(files))}\n{_RUNNER}", fn_name="run_cases", may_return=False
        )
        returned: list[Any] = []
        test = TestCase(
            args=(cases[0].function, [list(case.arguments) for case in cases]),
            expected=[case.expected for case in cases],
        )

        def record_output(output: Any, expected: Any) -> bool:
            returned[:] = [output]
            return True

        (result,) = self._pool.run(program, [test], record_output).tests
        outputs = returned[0] if result.verdict is ProgramStatus.ACCEPTED else None
        if not isinstance(outputs, list) or len(outputs) != len(cases):
            status = str(result.verdict).replace("_", " ")
            return [CallResult(case, False, f"{status}: {result.detail}") for case in cases]
        return [_judge(case, output) for case, output in zip(cases, outputs, strict=True)]


def _judge(case: CallCase, output: Any) -> CallResult:
    match output:
        case ["value", value]:
            is_right = value == case.expected and type(value) is type(case.expected)
            try:
                shown = f"returned {value!r}"[:_MAX_DETAIL_CHARS]
            except ValueError:  # Python does not write ints of more than 4,300 digits
                shown = "returned an int that is too long to show"
            return CallResult(case, is_right, shown)
        case ["error", str(error)]:
            return CallResult(case, False, f"raised {error}"[:_MAX_DETAIL_CHARS])
        case _:
            return CallResult(case, False, "returned nothing that can be read")


@dataclass(slots=True)
class RepairGame(ToolGame):
    """One state of the files."""

    tools: ClassVar = (
        make_tool("list_files", "List the files."),
        make_tool("read_file", "Return the text of a file.", path="Path of the file."),
        make_tool(
            "write_file", "Replace the whole text of a file.", path="Path of it.", text="New text."
        ),
        make_tool(
            "replace",
            "Replace a text that occurs once in a file by another.",
            path="Path of the file.",
            old="The text to replace.",
            new="The text to put in its place.",
        ),
        make_tool("run_tests", "Run the public tests, and show which pass."),
        make_tool("submit", "End the work; the hidden tests then decide."),
    )
    pure_tools: ClassVar = frozenset({"list_files", "read_file", "run_tests"})

    files: dict[str, str]
    public: tuple[CallCase, ...]
    runner: CaseRunner
    is_submitted: bool = False

    @property
    def reward(self) -> float:
        """The share of public tests that pass."""
        results = self.runner.run(self.files, self.public)
        return sum(result.passed for result in results) / len(results)

    @property
    def is_done(self) -> bool:
        """Whether the model has submitted."""
        return self.is_submitted

    def describe(self) -> str:
        """Return the list of files."""
        return "Files: " + ", ".join(sorted(self.files))

    # The tools

    def do_list_files(self) -> str:
        """List the files."""
        return self.describe()

    def do_read_file(self, path: str) -> str:
        """Return the text of a file."""
        return self._text(path)

    def do_write_file(self, path: str, text: str) -> str:
        """Replace the text of a file."""
        self._text(path)
        if len(text) > _MAX_CHARS:
            raise MoveError(f"A file has at most {_MAX_CHARS:,} characters.")
        self.files[path] = text
        return f"Wrote {path}."

    def do_replace(self, path: str, old: str, new: str) -> str:
        """Replace a text in a file.

        Args:
            path: Path of the file.
            old: A text that occurs once in it.
            new: The text to put in its place.
        """
        text = self._text(path)
        if not old or text.count(old) != 1:
            raise MoveError(f"The text to replace occurs {text.count(old) if old else 0} times.")
        return self.do_write_file(path, text.replace(old, new))

    def do_run_tests(self) -> str:
        """Run the public tests."""
        results = self.runner.run(self.files, self.public)
        lines = [
            f"pass {result.case.call}"
            if result.passed
            else f"FAIL {result.case.call}: expected {result.case.expected!r}, {result.shown}"
            for result in results
        ]
        passed = sum(result.passed for result in results)
        return "\n".join([*lines, f"{passed} of {len(results)} public tests pass."])

    def do_submit(self) -> str:
        """End the work."""
        self.is_submitted = True
        return "Submitted."

    def _text(self, path: str) -> str:
        if path not in self.files:
            raise MoveError(f"There is no file {path[:40]!r}; {self.describe()}.")
        return self.files[path]


def introduce(puzzle: RepairPuzzle) -> str:
    """Return the text that asks the model to repair the files of a puzzle."""
    return (
        "Some functions in these Python files have bugs or are not written yet. Change the files "
        "so that every function does what its docstring says. Hidden tests decide, with other "
        "arguments than the public ones. Call one tool at a time, and submit at the end.\n\n"
        f"Files: {', '.join(sorted(puzzle.files))}"
    )
