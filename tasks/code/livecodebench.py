r"""LiveCodeBench: problems of programming contests, each with the date of its contest.

Data: livecodebench/code_generation_lite on the Hugging Face hub, its files test.jsonl, test2.jsonl
to test6.jsonl. All fields are text. One row, shortened:

    {"question_title": "A+B", "question_content": "Print A+B. ...", "platform": "atcoder",
     "question_id": "abc301_a", "contest_date": "2023-05-13T00:00:00", "difficulty": "easy",
     "starter_code": "", "metadata": "{}", "private_test_cases": "eJxr...",
     "public_test_cases": "[{\"input\": \"1 2\", \"output\": \"3\", \"testtype\": \"stdin\"}]"}

If `metadata` has a func_name, the tests call that function, which may be a method of a class
Solution. Their inputs are JSON, one argument per line.

Prompt, extraction of answers and comparison of results are those of the published code,
https://github.com/LiveCodeBench/LiveCodeBench, for chat models. Its time limit is 6 seconds of wall
time for each test; here it is 6 seconds of CPU time. Each test runs in a fresh process here, and a
program that ends with an error is wrong whatever it printed.

Private tests are JSON, or the base64 of a zlib stream of a pickled text of JSON. They are never
unpickled, because `pickle.loads` executes what the file says. Only the one text is extracted.
"""

import base64
import binascii
import pickletools
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, ClassVar, Final

from treegen.common.params import SamplingParams
from treegen.errors import DataError, InputError
from treegen.evals.arguments import one_of
from treegen.evals.chat import with_role
from treegen.evals.task import TaskData, TaskOptions
from treegen.prompts.tree import Node
from treegen.tasks.apps.data import json_value
from treegen.tasks.code.task import MEMORY_HELP, TIMEOUT_HELP, CodeTask, check_name
from treegen.tasks.common.files import RowNumber, Rows, read_any, text_field
from treegen.tasks.common.sources import HubTable, Source, load_table
from treegen.tasks.programs.task import ProgramCases
from treegen.tasks.sandbox import Limits, SandboxPool, TestCase

# Opcodes in a pickle of one text: its frame, the text, and memo entries that are never read.
_OTHER_OPCODES: Final = ("PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP")
_TEXT_OPCODES: Final = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE")
_MAX_BYTES: Final = 1 << 30  # of the decompressed private tests of a problem

# The published scorer puts these imports before every program, and solutions rely on them. Later
# imports override earlier ones, so their order matters.
_MODULES: Final = """
string re datetime collections heapq bisect copy math random statistics itertools functools
operator io sys json builtins typing
"""
PRELUDE: Final = (
    "".join(f"from {name} import *\n" for name in _MODULES.split())
    + "import string, re, datetime, collections, heapq, bisect, copy, math, random, statistics\n"
    + "import itertools, functools, operator, io, sys, json\n"
    + "sys.setrecursionlimit(50000)\n"
)


def read_tests(public: Any, private: Any, fn_name: str | None) -> ProgramCases:
    """Return the tests in the fields of a row, the public ones first.

    Args:
        public: The public tests, as the row has them.
        private: The private tests, as the row has them.
        fn_name: The function to call; None for programs that print.

    Raises:
        ValueError: There are no tests, or they cannot be read.
    """
    cases = [
        *_parse_tests(public, "public_test_cases"),
        *_parse_tests(private, "private_test_cases"),
    ]
    if not cases:
        raise ValueError("the row has no tests")
    tests = []
    for case in cases:
        test_input, test_output = (case.get(name) for name in ("input", "output"))
        if not isinstance(test_input, str) or not isinstance(test_output, str):
            raise ValueError("the input and output of a test must be text")
        if fn_name is None:
            test_input.encode()  # raises ValueError for half of a surrogate pair
            tests.append(TestCase(stdin=test_input, expected=test_output))
        else:
            arguments = [json_value(line) for line in test_input.split("\n")]
            tests.append(TestCase(args=arguments, expected=json_value(test_output)))
    compare = same_lines if fn_name is None else same_value
    return ProgramCases(tuple(tests), compare, PRELUDE, fn_name)


def _parse_tests(field: Any, name: str) -> list[dict[str, Any]]:
    tests = field
    if isinstance(field, str):
        text = field.strip()
        tests = json_value(text if text.startswith("[") else unpack_text(text))
    if not isinstance(tests, list) or not all(isinstance(case, dict) for case in tests):
        raise ValueError(f"{name} is not a list of tests")
    return tests


def unpack_text(field: str) -> str:
    """Return the text from the base64 of a zlib stream of its pickle, without unpickling it.

    Raises:
        ValueError: The field has another format, or the pickle has other content than one text.
    """
    try:
        stream = zlib.decompressobj()
        data = stream.decompress(base64.b64decode(field, validate=True), _MAX_BYTES)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ValueError(f"private tests are neither JSON nor compressed: {error}") from None
    if stream.unconsumed_tail:
        raise ValueError("private tests are more than 1 GiB")
    texts = []
    try:
        for code, argument, _ in pickletools.genops(data):
            if code.name in _TEXT_OPCODES:
                texts.append(argument)
            elif code.name not in _OTHER_OPCODES:
                raise ValueError(
                    f"the pickle of private tests must contain only one text, got {code.name}"
                )
    except (ValueError, UnicodeDecodeError, IndexError, EOFError) as error:
        raise ValueError(f"private tests are not a pickled text: {error}") from None
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise ValueError("private tests must be one pickled text")
    return texts[0]


def same_lines(output: str, expected: str) -> bool:
    """Return whether output has the expected lines, ignoring space around lines and the whole.

    Two lines are the same if they are equal texts, or lists of equal decimal numbers.
    """
    lines, expected_lines = (text.strip().split("\n") for text in (output, expected))
    return len(lines) == len(expected_lines) and all(
        line.strip() == expected_line.strip() or _same_numbers(line, expected_line)
        for line, expected_line in zip(lines, expected_lines, strict=True)
    )


def _same_numbers(output: str, expected: str) -> bool:
    try:
        numbers = [Decimal(token) for token in output.split()]
        return numbers == [Decimal(token) for token in expected.split()]
    except (InvalidOperation, ValueError):
        return False


def same_value(output: Any, expected: Any) -> bool:
    """Return whether a result equals the expected one; a tuple counts as a list."""
    return bool((list(output) if isinstance(output, tuple) else output) == expected)


_SYSTEM: Final = (
    "You are an expert Python programmer. You will be given a question (problem specification) and "
    "will generate a correct Python program that matches the specification and passes all tests."
)
_STARTER: Final = (
    "You will use the following starter code to write the solution to the problem and enclose your "
    "code within delimiters."
)
_STDIN: Final = (
    "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly "
    "test on the sample inputs). Enclose your code within delimiters as follows. Ensure that when "
    "the python program runs, it reads the inputs, runs the algorithm and writes output to STDOUT."
)
_NUM_HUB_FILES: Final = 6
_RELEASE: Final = re.compile(r"(release_)?v([1-9][0-9]?)(?:_v([1-9][0-9]?))?")
_HUB: Final = "livecodebench/code_generation_lite"
_DIFFICULTIES: Final = ("easy", "medium", "hard")


@dataclass(frozen=True, slots=True)
class ContestProblem:
    """A problem of a contest."""

    difficulty: str
    platform: str
    day: str
    fn_name: str | None
    public: Any
    """Its public tests, as the data has them; they may take megabytes."""
    private: Any
    """Its private tests, as the data has them; they may take megabytes."""

    @property
    def cases(self) -> ProgramCases:
        """Its tests; raises ValueError if they cannot be read."""
        return read_tests(self.public, self.private, self.fn_name)


class LiveCodeBench(CodeTask):
    """Contest problems by pass@k. The program is the text between the last two fences."""

    name = "livecodebench"
    filters = ("tests",)
    source = Source(task="livecodebench", bundled="livecodebench_sample.jsonl", hub=HubTable(_HUB))
    extract = "last-fences"
    arguments: ClassVar[Mapping[str, str]] = {
        "from": "first date of problems, such as 2024-08-01",
        "to": "last date of problems",
        "difficulty": "easy, medium or hard; default: all",
        "release": "files to use: release_v6 (default) for the first six, v6 for the sixth, v4_v6 "
        "for the fourth to the sixth",
        "timeout": TIMEOUT_HELP.format("test", 6),
        "memory": MEMORY_HELP,
    }
    default_limits = Limits(cpu_seconds=6.0)

    # The sampling of the published code.
    sampling = SamplingParams(temperature=0.2, top_p=0.95, max_tokens=2000)
    num_samples = 10

    def rows(self, options: TaskOptions) -> tuple[Rows, str]:
        """Return the rows of the requested days and difficulty."""
        rows, source = self._read_release(options)
        first, last = (_parse_date(options.extra, name) for name in ("from", "to"))
        difficulty = one_of(options.extra, "difficulty", ("all", *_DIFFICULTIES), "all")
        if first and last and first > last:
            raise InputError(f"task argument from={first} is after to={last}; swap them")

        def select_rows() -> Iterator[tuple[int, dict[str, Any]]]:
            for line, row in rows:
                day = _contest_date(row)
                # A row without a date is kept, so that it is reported as unusable.
                in_range = day is None or (first or day) <= day <= (last or day)
                if in_range and difficulty in ("all", row.get("difficulty")):
                    yield line, row

        return select_rows(), source

    def record(self, row: dict[str, Any]) -> tuple[str, str, ContestProblem]:
        """Return the id, the prompt and the record of a row."""
        metadata = row.get("metadata") or "{}"
        metadata = json_value(metadata) if isinstance(metadata, str) else metadata
        fn_name = metadata.get("func_name") if isinstance(metadata, dict) else None
        if fn_name is not None:
            check_name(fn_name, "func_name")
        day = _contest_date(row)
        if day is None:
            raise ValueError("contest_date must be a date, such as 2024-08-01")
        problem = ContestProblem(
            difficulty=str(row.get("difficulty") or "unknown"),
            platform=str(row.get("platform") or ""),
            day=day.isoformat(),
            fn_name=fn_name,
            public=row.get("public_test_cases"),
            private=row.get("private_test_cases"),
        )
        _ = problem.cases  # read them once, to report unreadable tests now
        question = text_field(row, "question_content")
        starter = row.get("starter_code")
        prompt = _format_prompt(question, starter if isinstance(starter, str) else "")
        return text_field(row, "question_id"), prompt, problem

    def metadata(self, record: ContestProblem) -> dict[str, Any]:
        """Return the fields of a problem that reports may show."""
        names = ("difficulty", "platform", "day", "fn_name")
        return {name: getattr(record, name) for name in names}

    def tree(self, data: TaskData, num_samples: int) -> Node:
        """Return the tree system text -> problems -> samples."""
        below = with_role(Node("\n\n", children=super().tree(data, num_samples).children), "gap")
        return with_role(Node(_SYSTEM, children=[below]), "system")

    def program(self, problem_id: str, text: str) -> str | None:
        """Return the lines between the last two fences; None if they are blank or missing."""
        lines = text.split("\n")
        fences = [at for at, line in enumerate(lines) if "```" in line]
        code = "\n".join(lines[fences[-2] + 1 : fences[-1]]) if len(fences) > 1 else ""
        return code if code.strip() else None

    def make_cases(self, record: ContestProblem, judge: SandboxPool) -> ProgramCases:
        """Return the public and the private tests."""
        return record.cases

    def _read_release(self, options: TaskOptions) -> tuple[Rows, str]:
        """Return the rows of a release's files in a folder or on the hub, or those of one file.

        A folder need not have all files of the default release.
        """
        release = options.extra.get("release", f"release_v{_NUM_HUB_FILES}")
        numbers = _file_numbers(release)
        files = ["test.jsonl" if i == 1 else f"test{i}.jsonl" for i in numbers]
        if self.source.on_hub(options.data):
            if numbers[-1] > _NUM_HUB_FILES:
                raise InputError(
                    f"{release} is not available on the Hugging Face Hub, where {_HUB} ends at "
                    f"v{_NUM_HUB_FILES}; pass a local folder"
                )
            # Read the files, because datasets does not run the repository's loading script.
            table = load_table(
                _HUB,
                options.split or "test",
                splits=("test",),
                instead="a folder with its test.jsonl",
                path="json",
                data_files={"test": [f"hf://datasets/{_HUB}/{name}" for name in files]},
            )
            rows = ((line, dict(row)) for line, row in enumerate(table, start=1))
            return rows, f"{_HUB} {release}"
        folder = Path(options.data or "")
        if options.data is None or not folder.is_dir():
            return self.source.read(options.data, options.split)
        paths = [folder / name for name in files if (folder / name).is_file()]
        if not paths or ("release" in options.extra and len(paths) < len(files)):
            missing = next(name for name in files if folder / name not in paths)
            raise DataError(
                f"{missing} was not found in {folder}; pass the folder that you downloaded, or a "
                "file"
            )
        rows = (
            (RowNumber(line, path, line), row) for path in paths for line, row in read_any(path)
        )
        return rows, str(folder)


def _file_numbers(release: str) -> range:
    """Return the numbers of the files of a release, which the publishers name v6 or release_v6."""
    match = _RELEASE.fullmatch(release)
    first, last = (int(match[2]), int(match[3] or match[2])) if match else (1, 0)
    if match and match[1]:
        first = 1 if match[3] is None else 0
    if not 0 < first <= last:
        raise InputError(
            f"task argument release must be like release_v6, v6 or v4_v6, got {release!r}"
        )
    return range(first, last + 1)


def _format_prompt(question: str, starter: str) -> str:
    code = starter or "# YOUR CODE HERE"
    return (
        f"### Question:\n{question}\n\n### Format: {_STARTER if starter else _STDIN}\n"
        f"```python\n{code}\n```\n\n### Answer: (use the provided format with backticks)\n\n"
    )


def _contest_date(row: dict[str, Any]) -> date | None:
    try:
        return datetime.fromisoformat(str(row.get("contest_date"))).date()
    except ValueError:
        return None


def _parse_date(arguments: Any, name: str) -> date | None:
    text = arguments.get(name)
    if text is None:
        return None
    try:
        if re.fullmatch(r"\d{4}-\d{2}-\d{2}", text.strip()):
            return date.fromisoformat(text.strip())
    except ValueError:
        pass
    raise InputError(f"task argument {name} must be a date such as 2024-08-01, got {text!r}")
