r"""HumanEval: Python functions that continue a signature and a docstring.

Data: https://github.com/openai/human-eval (HumanEval.jsonl.gz), which comes with treegen under its
MIT licence, or openai/openai_humaneval on the Hugging Face hub. One row, shortened:

    {"task_id": "HumanEval/53", "prompt": "def add(x: int, y: int):\n    \"\"\"Add two numbers ...",
     "canonical_solution": "    return x + y\n", "entry_point": "add",
     "test": "def check(candidate):\n    assert candidate(0, 1) == 1\n ..."}

Prompt, stop strings and score are those of the paper (https://arxiv.org/abs/2107.03374) and of its
scorer: the prompt with the completion, a newline, the tests, and `check({entry_point})` must run to
the end. The published time limit is 3 seconds of wall time; here it is 3 seconds of CPU time.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from treegen.common.params import SamplingParams
from treegen.evals.task import TaskOptions
from treegen.tasks.code.calls import assert_cases
from treegen.tasks.code.task import CodeTask, check_name, code_arguments
from treegen.tasks.common.files import text_field
from treegen.tasks.common.sources import HubTable, Source
from treegen.tasks.programs.task import ProgramCases, block_that_defines, text_before
from treegen.tasks.sandbox import Limits, SandboxPool

STOPS: Final = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
CHAT: Final = (
    "Please provide a self-contained Python script that solves the following problem in a markdown "
    "code block:\n```python\n{}\n```\n"
)


class HumanEval(CodeTask):
    """Functions from docstrings, by pass@k.

    form=completion is the published form: the program is the prompt followed by the sample. With
    form=chat the program is the part of the prompt before the function, followed by the last block
    of code that defines the function.
    """

    name = "humaneval"
    version = "2"
    filters = ("tests",)
    source = Source(
        task="humaneval", bundled="HumanEval.jsonl.gz", hub=HubTable("openai/openai_humaneval")
    )
    arguments: ClassVar[Mapping[str, str]] = code_arguments(3)
    default_limits = Limits(cpu_seconds=3.0)

    # Temperature and top_p of the paper for pass@1, which draws 200 samples.
    sampling = SamplingParams(temperature=0.2, top_p=0.95, max_tokens=512, stop=STOPS)

    def record(self, row: dict[str, Any]) -> tuple[str, str, dict[str, str]]:
        """Return the id, the prompt and the record of a row: its prompt, entry_point and test.

        If the row has a canonical_solution, the record has it as `solution`.
        """
        function = {name: text_field(row, name) for name in ("prompt", "entry_point", "test")}
        check_name(function["entry_point"], "entry_point")
        if isinstance(solution := row.get("canonical_solution"), str):
            function["solution"] = solution
        prompt = function["prompt"]
        prompt = CHAT.format(prompt.strip()) if self.extract == "chat" else prompt
        return text_field(row, "task_id"), prompt, function

    def program(self, problem_id: str, text: str) -> str | None:
        """Return the program in a sample; None if there is none."""
        function = self.records[problem_id]
        if self.extract == "completion":
            return f"{function['prompt']}{text}"
        code = block_that_defines(text, [function["entry_point"]])
        if code is None:
            return None
        return f"{text_before(function['prompt'], function['entry_point'])}{code}"

    def solutions(self, problem_id: str) -> list[str]:
        """Return the sample with the canonical solution; none if the data have no solution."""
        function = self.records[problem_id]
        if "solution" not in function:
            return []
        return [self.sample_of(function["prompt"], function["solution"])]

    def make_cases(self, record: Mapping[str, str], judge: SandboxPool) -> ProgramCases:
        """Return the one test of a function: all of its test statements, run to the end."""
        return assert_cases(f"{record['test']}\ncheck({record['entry_point']})")

    def label(self, options: TaskOptions) -> str:
        """Return an empty label, because the bundled problems are the published ones."""
        return ""

    def describe_source(self, options: TaskOptions, source: str, num: int) -> str:
        """Return one line that names the source of the problems.

        Args:
            options: Options of the run.
            source: Name of the source.
            num: Number of problems.
        """
        if options.data is None:
            return f"problems: {num:,} of the published ones, which come with treegen"
        return f"problems: {num:,} of {source}"
