r"""MBPP: short Python programs from one sentence and three tests.

Data: https://github.com/google-research/google-research/tree/master/mbpp (mbpp.jsonl, and
sanitized-mbpp.json), or google-research-datasets/mbpp on the Hugging Face hub. One row of each:

    {"task_id": 11, "text": "Write a function to ...", "code": "def f(x): ...",
     "test_list": ["assert f(1) == 2", "assert ...", "assert ..."], "test_setup_code": "",
     "challenge_test_list": []}
    {"task_id": 11, "prompt": "Write a function to ...", "code": "def f(x): ...",
     "test_imports": [], "test_list": ["assert f(1) == 2", "assert ...", "assert ..."]}

Prompt and score are those of the paper (https://arxiv.org/abs/2108.07732): three few-shot examples
(tasks 2, 3 and 4 of the data), and tasks 11 to 510 as problems:

    You are an expert Python programmer, and here is your task: {text} Your code should pass these
    tests:\n\n{tests}\n[BEGIN]\n{code}\n[DONE]

A program passes if it and its tests run to the end. `challenge_test_list` is not run.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Final

from treegen.common.params import SamplingParams
from treegen.errors import DataError, InputError, arg
from treegen.evals.arguments import one_of
from treegen.evals.chat import Turn
from treegen.evals.problem import Problem
from treegen.evals.task import TaskOptions
from treegen.tasks.code.calls import assert_cases
from treegen.tasks.code.task import CodeTask, code_arguments
from treegen.tasks.common.fewshot import make_examples
from treegen.tasks.common.files import Rows, read_any, text_field
from treegen.tasks.common.sources import HubTable, Source
from treegen.tasks.programs.task import ProgramCases, block_that_defines
from treegen.tasks.sandbox import Limits, SandboxPool

# The first and last task number of each split, as in the published data.
SPLITS: Final = {
    "test": (11, 510),
    "prompt": (1, 10),
    "validation": (511, 600),
    "train": (601, 974),
}
_SHOTS: Final = (2, 3, 4)
_SETS: Final = ("full", "sanitized")
_FILES: Final = {"full": "mbpp.jsonl", "sanitized": "sanitized-mbpp.json"}
_ASK: Final = (
    "You are an expert Python programmer, and here is your task: {} Your code should pass these "
    "tests:\n\n{}\n"
)


@dataclass(frozen=True, slots=True)
class MBPPProblem:
    """A program to write."""

    number: int
    """Number of the task in the data."""
    text: str
    """The description of the program."""
    code: str
    """A solution."""
    setup: str
    """Code that runs after the program and before the tests, such as imports."""
    tests: tuple[str, ...]
    """The tests, one assert each."""

    @property
    def question(self) -> str:
        """The prompt, up to where the program begins."""
        return _ASK.format(self.text, "\n".join(self.tests))


class MBPP(CodeTask):
    """Short programs from a sentence and three tests, by pass@k.

    form=completion is the published form: the program is the sample, which ends at [DONE]. With
    form=chat it is the last block of code that defines a function called by the tests.
    """

    name = "mbpp"
    version = "2"
    filters = ("tests",)
    source = Source(
        task="mbpp",
        bundled="mbpp_sample.jsonl",
        hub=HubTable("google-research-datasets/mbpp", tuple(SPLITS)),
    )
    arguments: ClassVar[Mapping[str, str]] = code_arguments(
        3, set="full (default) or sanitized: which of the two sets, on the hub or in a folder"
    )
    default_limits = Limits(cpu_seconds=3.0)

    # 80 samples at temperature 0.5, as in the paper.
    sampling = SamplingParams(temperature=0.5, max_tokens=512, stop=("[DONE]",))
    num_samples = 80
    num_shots = 3

    def rows(self, options: TaskOptions) -> tuple[Rows, str]:
        """Return the rows of a split, selected by their numbers, and the name of their source."""
        split = options.split or "test"
        if split not in SPLITS:
            raise InputError(f"mbpp has no split {split!r}; use one of {', '.join(SPLITS)}")
        rows, source = self._read(options, split)
        if self.source.on_hub(options.data):
            return rows, source
        low, high = SPLITS[split]
        chosen = [(line, row) for line, row in rows if low <= _number(row, low) <= high]
        if not chosen:
            raise DataError(
                f"{source} has no task from {low} to {high} (split {split}); use another "
                "split, or pass the complete file"
            )
        return chosen, source

    def record(self, row: dict[str, Any]) -> tuple[str, str, MBPPProblem]:
        """Return the id, the prompt and the record of a row."""
        task = _task(row)
        prompt = f"{task.question}[BEGIN]\n"
        if self.extract == "chat":
            prompt = f"{task.question}Put the program into a markdown code block.\n"
        return f"MBPP/{task.number}", prompt, task

    def examples(self, options: TaskOptions, problems: Sequence[Problem]) -> tuple[Turn, ...]:
        """Return tasks 2, 3, 4, 1, 5 and so on to 10 as examples, or the first tasks of a file."""
        num_shots = options.num_fewshot
        if num_shots is None and options.fewshot_file is None:
            num_shots = self.defaults.num_fewshot
        if options.fewshot_data is not None:
            raise InputError(
                f"{arg('fewshot_data')} is not supported, because mbpp uses tasks 2, 3 and 4 as "
                f"examples; remove {arg('fewshot_data')}, or pass {arg('fewshot_file')}"
            )
        if num_shots == 0:
            return ()
        if options.fewshot_file is not None:
            source = options.fewshot_file
            rows = read_any(Path(source))
        else:
            rows, source = self._read(options, "prompt")
            row_of = {_number(row, 0): (line, row) for line, row in rows}
            low, high = SPLITS["prompt"]
            numbers = dict.fromkeys((*_SHOTS, *range(low, high + 1)))
            rows = [row_of[number] for number in numbers if number in row_of]
        tasks = make_examples(rows, source, _task)
        if num_shots is not None and num_shots > len(tasks):
            raise InputError(
                f"{arg('num_fewshot')} is {num_shots}, but {source} has {len(tasks)} tasks "
                f"for few-shot examples; lower the number, or pass {arg('fewshot_file')}"
            )
        problem_ids = {problem.id for problem in problems}
        shots = tasks[:num_shots]
        if any(f"MBPP/{task.number}" in problem_ids for task in shots):
            raise DataError(
                f"a few-shot example from {source} is also a problem of this run; exclude the "
                f"problem with {arg('limit=')}, or use other examples"
            )
        return tuple((f"{task.question}[BEGIN]\n", f"{task.code}\n[DONE]") for task in shots)

    def program(self, problem_id: str, text: str) -> str | None:
        """Return the program in a sample; None if there is none."""
        if self.extract == "completion":
            return text if text.strip() else None
        return block_that_defines(text, _find_called_names(self.records[problem_id].tests))

    def solutions(self, problem_id: str) -> list[str]:
        """Return the sample with the solution of the data."""
        return [self.sample_of("", self.records[problem_id].code)]

    def make_cases(self, record: MBPPProblem, judge: SandboxPool) -> ProgramCases:
        """Return the one test of a problem: all of its test statements, run to the end."""
        return assert_cases("\n".join([record.setup, *record.tests]))

    def _read(self, options: TaskOptions, split: str) -> tuple[Rows, str]:
        """Return the rows of a split on the hub, or all rows of other data."""
        part = one_of(options.extra, "set", _SETS, _SETS[0])
        assert self.source.hub is not None
        hub = replace(self.source.hub, configs=(part,))
        source = replace(self.source, hub=hub, files={"test": (_FILES[part],)})
        return source.read(options.data, split if source.on_hub(options.data) else None)


def _number(row: dict[str, Any], default: int) -> int:
    """Return the number of a row, or the default; `_task` reports a missing number later."""
    number = row.get("task_id")
    return number if isinstance(number, int) and not isinstance(number, bool) else default


def _task(row: dict[str, Any]) -> MBPPProblem:
    number = row.get("task_id")
    if isinstance(number, bool) or not isinstance(number, int):
        raise ValueError("task_id must be an integer")
    tests = row.get("test_list")
    if not isinstance(tests, list) or not tests:
        raise ValueError("the row has no tests")
    setup = row.get("test_setup_code") or ""
    imports = row.get("test_imports") or []
    return MBPPProblem(
        number=number,
        text=text_field(row, "text" if "text" in row else "prompt"),
        code=text_field(row, "code"),
        setup="\n".join(chain([str(setup)] if setup else [], map(str, imports))),
        tests=tuple(text_field({"test_list": test}, "test_list") for test in tests),
    )


def _find_called_names(tests: Sequence[str]) -> list[str]:
    """Return the names of functions that tests call, which a program may have to define."""
    names: dict[str, None] = {}
    for test in tests:
        try:
            tree = ast.parse(test)
        except (SyntaxError, ValueError, RecursionError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names[node.func.id] = None
    return list(names)
