r"""HumanEval+ and MBPP+: the tasks of HumanEval and MBPP with many more inputs (EvalPlus).

Data: https://github.com/evalplus/evalplus, its HumanEvalPlus.jsonl.gz and MbppPlus.jsonl.gz. One
row, shortened:

    {"task_id": "HumanEval/53", "prompt": "def add(x: int, y: int): ...", "entry_point": "add",
     "canonical_solution": "    return x + y\n", "contract": "...", "atol": 0,
     "base_input": [[0, 1], [2, 3]], "plus_input": [[0, 0], [123456789, 987654321]]}

Prompt, stop strings and score are those of EvalPlus (https://arxiv.org/abs/2305.01210). The
function is called with each input, and its result is compared with that of the reference solution.
`base` scores by the published inputs only, `plus` by all. Results may differ by `atol`, floats by
1e-6. `contract` describes the valid inputs and is not used.

EvalPlus limits each call to 1 second of wall time, or 4 times the time of the reference. Here up to
256 calls have 10 seconds of CPU time together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

from treegen.common.params import SamplingParams
from treegen.evals.task import TaskDefaults
from treegen.tasks.code.answers import block_that_defines
from treegen.tasks.code.calls import CALLS, CallCases, call_cases
from treegen.tasks.code.humaneval import CHAT
from treegen.tasks.code.plus_compare import build_expected, is_expected, is_listed
from treegen.tasks.code.plus_inputs import mbpp_arguments
from treegen.tasks.code.task import FORM, MEMORY, TIMEOUT, CodeTask, whole
from treegen.tasks.common.jsonl import text_field
from treegen.tasks.common.sources import Source
from treegen.tasks.programs.outcomes import ProgramOutcome
from treegen.tasks.programs.report import ProgramVerdict
from treegen.tasks.sandbox import Limits, SandboxPool

_STOPS: Final = ("\nif __name__", "\ndef main(", "\nprint(")


@dataclass(frozen=True, slots=True)
class PlusTask:
    """A function to write: its prompt, name, right solution, inputs and tolerance."""

    prompt: str
    entry_point: str
    solution: str
    base: list[list[Any]]
    plus: list[list[Any]]
    atol: float


class PlusBase(CodeTask):
    """Base class of HumanEval+ and MBPP+.

    kind: which of the two it is, for the rules of single tasks.
    stops: stop strings in addition to those of both.
    """

    filters = ("plus", "base")
    kind: ClassVar[str]
    stops: ClassVar[tuple[str, ...]]
    arguments: ClassVar[Mapping[str, str]] = {
        "form": FORM,
        "timeout": TIMEOUT.format(10).replace("test", f"{CALLS} calls"),
        "memory": MEMORY,
    }
    given_limits = Limits(cpu_seconds=10.0, output=4 << 20)

    @property
    def defaults(self) -> TaskDefaults:
        """Temperature and top_p as for HumanEval."""
        chat = self.extract == "chat"
        sampling = SamplingParams(
            temperature=0.2,
            top_p=0.95,
            max_tokens=2048 if chat else 768,
            stop=() if chat else (*_STOPS, *self.stops),
        )
        return TaskDefaults(sampling=sampling, num_samples=20, num_fewshot=0)

    def record(self, row: dict[str, Any]) -> tuple[str, str, PlusTask]:
        """Return the id, the prompt and the record of a row."""
        name = text_field(row, "task_id")
        entry_point = text_field(row, "entry_point")
        if not entry_point.isidentifier():
            raise ValueError(f"entry_point {entry_point[:40]!r} is not a Python name")
        atol = row.get("atol", 0)
        if isinstance(atol, bool) or not isinstance(atol, int | float):
            raise ValueError("atol must be a number")
        task = PlusTask(
            prompt=text_field(row, "prompt"),
            entry_point=entry_point,
            solution=text_field(row, "canonical_solution"),
            base=[self.python_values(name, call) for call in _calls(row, "base_input")],
            plus=[self.python_values(name, call) for call in _calls(row, "plus_input")],
            atol=atol,
        )
        if not task.base:
            raise ValueError("base_input is empty: a program without tests cannot be judged")
        prompt = CHAT.format(task.prompt.strip()) if self.extract == "chat" else task.prompt
        return name, prompt, task

    def python_values(self, task_id: str, call: list[Any]) -> list[Any]:
        """Return the arguments of a call with the Python types that the task expects."""
        return call

    def program(self, problem_id: str, text: str) -> str | None:
        """Return the program in a sample; None if there is none."""
        task = self.records[problem_id]
        if self.extract == "completion":
            return f"{task.prompt}{text}"
        return block_that_defines(text, [task.entry_point])

    def make_cases(self, record: PlusTask, judge: SandboxPool) -> CallCases:
        """Return the calls of a function, those with the published inputs first."""
        kind, name = self.kind, record.entry_point
        return call_cases(
            judge,
            name,
            f"{record.prompt}{record.solution}",
            [record.base, record.plus],
            partial(is_expected, kind, name),
            partial(build_expected, kind, name, record.atol),
            listed=is_listed(kind, name),
        )

    def score_outcome(self, problem_id: str, outcome: ProgramOutcome) -> dict[str, ProgramVerdict]:
        """Return the verdict by all inputs, and by the published inputs alone."""
        base = -(-len(self.records[problem_id].base) // CALLS)
        return {"plus": whole(outcome), "base": outcome.first(base)}


class HumanEvalPlus(PlusBase):
    """HumanEval with the inputs of EvalPlus, by pass@k."""

    name = "humaneval-plus"
    version = "2"
    kind = "humaneval"
    stops = ("\ndef ", "\nclass ", "\nimport ", "\nfrom ", "\nassert ")
    source = Source(
        task="humaneval-plus",
        bundled="humaneval_plus_sample.jsonl",
        files={"test": ("HumanEvalPlus.jsonl", "HumanEvalPlus.jsonl.gz")},
    )


class MBPPPlus(PlusBase):
    """MBPP with the inputs of EvalPlus, by pass@k."""

    name = "mbpp-plus"
    version = "2"
    kind = "mbpp"
    stops = ('\n"""', "\nassert")
    source = Source(
        task="mbpp-plus",
        bundled="mbpp_plus_sample.jsonl",
        files={"test": ("MbppPlus.jsonl", "MbppPlus.jsonl.gz")},
    )

    def python_values(self, task_id: str, call: list[Any]) -> list[Any]:
        """Return the arguments of a call with the tuples and sets that JSON does not have."""
        return mbpp_arguments(task_id, call)


def _calls(row: dict[str, Any], name: str) -> list[list[Any]]:
    found = row.get(name)
    if found is None:
        raise ValueError(
            f"no {name}: this is not the form of EvalPlus's own files (HumanEvalPlus.jsonl, "
            "MbppPlus.jsonl)"
        )
    # MBPP+ has an empty text if a task has no further inputs.
    if not found:
        return []
    if not isinstance(found, list) or not all(isinstance(call, list) for call in found):
        raise ValueError(f"{name} is not a list of lists of arguments")
    return found
