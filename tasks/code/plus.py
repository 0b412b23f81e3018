r"""HumanEval+ and MBPP+: the tasks of HumanEval and MBPP with many more inputs (EvalPlus).

Data: https://github.com/evalplus/evalplus, its HumanEvalPlus.jsonl.gz and MbppPlus.jsonl.gz. One
row, shortened:

    {"task_id": "HumanEval/53", "prompt": "def add(x: int, y: int): ...", "entry_point": "add",
     "canonical_solution": "    return x + y\n", "contract": "...", "atol": 0,
     "base_input": [[0, 1], [2, 3]], "plus_input": [[0, 0], [123456789, 987654321]]}

Prompt, stop strings and score are those of EvalPlus (https://arxiv.org/abs/2305.01210). The
function is called with each input, and its result is compared with that of the reference solution.
`base` scores by the inputs of the original data set only, `plus` by all. Results may differ by
`atol`, floats by 1e-6. `contract` describes the valid inputs and is not used.

EvalPlus limits each call to 1 second of wall time, or 4 times the time of the reference. Here up to
256 calls have 10 seconds of CPU time together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final

from treegen.common.params import SamplingParams
from treegen.tasks.code.calls import CALLS, build_expected, call_cases, is_expected, is_listed
from treegen.tasks.code.humaneval import CHAT
from treegen.tasks.code.task import CodeTask, check_name, code_arguments, without_credit
from treegen.tasks.common.files import text_field
from treegen.tasks.common.sources import Source
from treegen.tasks.programs.report import ProgramVerdict
from treegen.tasks.programs.task import ProgramCases, ProgramOutcome, block_that_defines
from treegen.tasks.sandbox import Limits, SandboxPool

Arguments = list[Any]

# JSON has no tuples, sets or complex numbers. EvalPlus writes lists or texts for them, and decides
# by the number of the task which ones to convert back. In the functions below, a depth says which
# lists become tuples: at depth 1 each argument, at depth 2 each element of each argument.


def _tuples_at(depth: int, value: Any) -> Any:
    """Return a value whose lists at a depth are tuples; at depth 1 the list itself becomes one."""
    if depth == 1:
        return tuple(value)
    return [_tuples_at(depth - 1, item) for item in value]


def _convert_items(depth: int, arguments: Arguments) -> Arguments:
    return [_tuples_at(depth, argument) for argument in arguments]


def _convert_first(depth: int, arguments: Arguments) -> Arguments:
    """Convert the lists of the first argument only."""
    return [_tuples_at(depth, arguments[0]), *arguments[1:]]


def _convert_all(value: Any) -> Any:
    return tuple([_convert_all(item) for item in value]) if isinstance(value, list) else value


def _convert_sets(arguments: Arguments) -> Arguments:
    # EvalPlus writes an empty list for {}, which is an empty dict.
    return [[set(item) if isinstance(item, list) and item else {} for item in arguments[0]]]


def _convert_mixed_items(arguments: Arguments) -> Arguments:
    return [tuple(tuple(item) if isinstance(item, list) else item for item in arguments[0])]


def _convert_dict_values(arguments: Arguments) -> Arguments:
    return [{key: tuple(value) for key, value in arguments[0].items()}, *arguments[1:]]


_DEPTH_1: Final = (
    "2 116 132 143 222 261 273 394 399 421 424 429 470 560 579 596 616 630 726 740 744 809"
)
_CONVERSIONS: Final[Mapping[str, Callable[[Arguments], Arguments]]] = {
    _DEPTH_1: partial(_convert_items, 1),
    "63 64 70 94 120 237 272 299 400 409 417 438 473 614 780": partial(_convert_items, 2),
    "75 413 444 753": partial(_convert_first, 2),
    "106 750": lambda arguments: [arguments[0], tuple(arguments[1])],
    "115": _convert_sets,
    "124": lambda arguments: [float(arguments[0]), complex(arguments[1])],
    "250 307 405 446 617 720 763 808": partial(_convert_first, 1),
    "259 401 445": lambda arguments: [tuple(map(tuple, argument)) for argument in arguments],
    "278": _convert_mixed_items,
    "722": _convert_dict_values,
    "252": lambda arguments: [complex(arguments[0])],
    "580 615 791": lambda arguments: list(_convert_all(arguments)),
}
_CONVERSION_OF_TASK: Final = {
    number: convert for numbers, convert in _CONVERSIONS.items() for number in numbers.split()
}


def mbpp_arguments(task_id: str, arguments: Arguments) -> Arguments:
    """Return the arguments of a call of MBPP+ as Python values.

    Args:
        task_id: Id of the task, such as "Mbpp/2".
        arguments: The arguments as JSON holds them.

    Raises:
        ValueError: The arguments do not have the form that this task needs.
    """
    convert = _CONVERSION_OF_TASK.get(task_id.rpartition("/")[2])
    if convert is None:
        return arguments
    try:
        return convert(arguments)
    except (TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"an input does not have the format of task {task_id}: {error}") from None


_STOPS: Final = ("\nif __name__", "\ndef main(", "\nprint(")
# Temperature and top_p as for HumanEval.
_SAMPLING: Final = SamplingParams(temperature=0.2, top_p=0.95, max_tokens=768)


@dataclass(frozen=True, slots=True)
class PlusTask:
    """A function to write."""

    prompt: str
    entry_point: str
    """The function's name."""
    solution: str
    """The rest of a right program, after the prompt."""
    base: list[list[Any]]
    """The arguments of each call with an input of the original data set."""
    plus: list[list[Any]]
    """The arguments of each further call."""
    atol: float
    """Absolute tolerance of results."""


class PlusBase(CodeTask):
    """Base class of HumanEval+ and MBPP+."""

    filters = ("plus", "base")
    kind: ClassVar[str]
    """"humaneval" or "mbpp", whose functions may have the same name and different rules."""
    arguments: ClassVar[Mapping[str, str]] = code_arguments(10, of=f"{CALLS} calls")
    default_limits = Limits(cpu_seconds=10.0, output=4 << 20)

    def record(self, row: dict[str, Any]) -> tuple[str, str, PlusTask]:
        """Return the id, the prompt and the record of a row."""
        name = text_field(row, "task_id")
        entry_point = text_field(row, "entry_point")
        check_name(entry_point, "entry_point")
        atol = row.get("atol", 0)
        if isinstance(atol, bool) or not isinstance(atol, int | float):
            raise ValueError("atol must be a number")
        task = PlusTask(
            prompt=text_field(row, "prompt"),
            entry_point=entry_point,
            solution=text_field(row, "canonical_solution"),
            base=[self.python_values(name, call) for call in _read_calls(row, "base_input")],
            plus=[self.python_values(name, call) for call in _read_calls(row, "plus_input")],
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

    def solutions(self, problem_id: str) -> list[str]:
        """Return the sample with the canonical solution."""
        task = self.records[problem_id]
        return [self.sample_of(task.prompt, task.solution)]

    def make_cases(self, record: PlusTask, judge: SandboxPool) -> ProgramCases:
        """Return tests that call the function, first with the inputs of the original data set."""
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
        """Return the verdict by all inputs, and by those of the original data set alone."""
        base = -(-len(self.records[problem_id].base) // CALLS)
        return {"plus": without_credit(outcome), "base": outcome.first(base)}


class HumanEvalPlus(PlusBase):
    """HumanEval with the inputs of EvalPlus, by pass@k."""

    name = "humaneval-plus"
    version = "2"
    kind = "humaneval"
    sampling = replace(
        _SAMPLING, stop=(*_STOPS, "\ndef ", "\nclass ", "\nimport ", "\nfrom ", "\nassert ")
    )
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
    sampling = replace(_SAMPLING, stop=(*_STOPS, '\n"""', "\nassert"))
    source = Source(
        task="mbpp-plus",
        bundled="mbpp_plus_sample.jsonl",
        files={"test": ("MbppPlus.jsonl", "MbppPlus.jsonl.gz")},
    )

    def python_values(self, task_id: str, call: list[Any]) -> list[Any]:
        """Return the arguments of a call with the tuples and sets that JSON does not have."""
        return mbpp_arguments(task_id, call)


def _read_calls(row: dict[str, Any], name: str) -> list[list[Any]]:
    calls = row.get(name)
    if calls is None:
        raise ValueError(
            f"no {name}: the file must have the format of EvalPlus (HumanEvalPlus.jsonl, "
            "MbppPlus.jsonl)"
        )
    # MBPP+ has an empty text if a task has no further inputs.
    if not calls:
        return []
    if not isinstance(calls, list) or not all(isinstance(call, list) for call in calls):
        raise ValueError(f"{name} is not a list of lists of arguments")
    return calls
