r"""APPS: programming problems whose solutions are scored by running them on tests.

Data: https://github.com/hendrycks/apps (folders), or codeparrot/apps on the Hugging Face hub (JSON
Lines; all fields are text). One row, shortened:

    {"problem_id": 4136, "question": "You are given two integers $A$ and $B$. Print $A+B$. ...",
     "solutions": "[\"a, b = map(int, input().split())\\nprint(a + b)\"]",
     "input_output": "{\"inputs\": [\"1 2\\n\"], \"outputs\": [\"3\\n\"]}",
     "difficulty": "introductory", "url": "...", "starter_code": ""}

The prompt is that of the published training code, with few-shot examples before the problem. All
examples are nodes above all problems, so they are computed once for the whole run. A sample ends
when the model begins another problem. Other tools also stop at "\n---" and "\nANSWER" (--stop).

The form of a problem without starter code; the published evaluation code uses another, see `ask`:

    \nQUESTION:\n{question}\n\n\nUse Standard Input format\n\nANSWER:\n
"""

import io
import re
import tokenize
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Final

from treegen.common.params import SamplingParams
from treegen.common.spelling import did_you_mean
from treegen.errors import DataError, InputError, arg
from treegen.evals.arguments import check_arguments, one_of, whole_number, words
from treegen.evals.chat import with_turns
from treegen.evals.problem import Problem
from treegen.evals.scoring.code_execution import ExecutionOptions
from treegen.evals.selection import select
from treegen.evals.task import TaskData, TaskDefaults, TaskOptions
from treegen.evals.truncation import mark_droppable
from treegen.prompts.tree import Node
from treegen.runs import RunDir
from treegen.tasks.apps.compare import COMPARERS, Comparer
from treegen.tasks.apps.data import (
    DIFFICULTIES,
    HUB_NAMES,
    LoadedRows,
    Row,
    load_bundled_shots,
    load_rows,
    load_split,
)
from treegen.tasks.common.fewshot import normalize_text, rank
from treegen.tasks.common.sources import describe_examples, describe_problems, make_data_label
from treegen.tasks.programs.report import ProgramVerdict
from treegen.tasks.programs.scoring import SandboxScoring
from treegen.tasks.programs.task import (
    ProgramCases,
    ProgramOutcome,
    ProgramTask,
    between_fences,
    fenced_blocks,
    judge_limits,
)
from treegen.tasks.sandbox import Limits, SandboxPool

PROMPTS: Final = ("train", "eval")
ANSWER: Final = "\nANSWER:\n"
EXTRACTS: Final = ("raw", "fenced")

# The beginning of a program, which prose does not have.
_CODE: Final = re.compile(
    r"\s*+(?:(?:import|from)[ ]\w|#|@\w|(?:async[ ]+)?def[ ]\w|class[ ]\w+[(:]|\w+[ ]*\(|\"\"\""
    r"|\w[\w, .\[\]]*+[ ]*[-+*/|&]?=|(?:for|while|if|with)[ ].*:[ \t]*$|try:|print\b)",
    re.MULTILINE,
)
_TAB_SIZE: Final = 8  # the width of a tab for Python's tokenizer
_NEW_INDENT: Final = 4


def ask(question: str, starter: str, *, calls: bool, form: str) -> str:
    """Return the prompt of a problem, up to where the program begins.

    The training form describes the input by whether there is starter code, the evaluation form by
    whether the tests call a function.

    Args:
        question: Text of the problem.
        starter: The starter code; empty if there is none.
        calls: Whether the tests call a function.
        form: One of PROMPTS.
    """
    if form == "train":
        kind = "Call-Based" if starter else "Standard Input"
        return f"\nQUESTION:\n{question}\n{starter}\n\nUse {kind} format\n{ANSWER}"
    kind = "Call-Based" if calls else "Standard Input"
    code = f"\n{starter}" if starter else ""
    return f"\nQUESTION:\n{question}{code}\nUse {kind} format{ANSWER}"


def extract_program(text: str, extract: str) -> str | None:
    """Return the program in a completion; None if there is none.

    Args:
        text: The completion.
        extract: "raw" uses all of it. "fenced" uses the first block marked as Python, otherwise the
            first block without a mark, up to its closing fence or the end. A single fence closes a
            block that the prompt has opened if code comes before it.
    """
    program = text if extract == "raw" else _extract_fenced(text)
    return program if program and not program.isspace() else None


def _extract_fenced(text: str) -> str | None:
    blocks = list(fenced_blocks(text))
    parts = between_fences(text)
    if len(parts) == 2 and _CODE.match(parts[0]) and not any(language for language, _ in blocks):
        return parts[0]
    for languages in (("python", "python3", "py"), ("",)):
        for language, code in blocks:
            if language in languages:
                return code
    return None


def with_tabs(source: str) -> str:
    """Return a solution indented by tabs, as in the published training code.

    Lines inside strings stay unchanged. So does a source that cannot be tokenized, such as one with
    inconsistent indentation.
    """
    source = "\n".join(line.rstrip("\r") for line in source.split("\n")).rstrip() + "\n"
    try:
        depth_at, in_string = _layout(source)
    except (tokenize.TokenError, SyntaxError):
        return source
    lines = source.split("\n")
    shift = 0
    for row, line in enumerate(lines):
        body = line.lstrip(" \t")
        if row in in_string or not body:
            continue
        width = len(line[: len(line) - len(body)].expandtabs(_TAB_SIZE))
        if row in depth_at:
            shift = _NEW_INDENT * depth_at[row] - width
        tabs, spaces = divmod(max(0, width + shift), _NEW_INDENT)
        lines[row] = "\t" * tabs + " " * spaces + body
    return "\n".join(lines)


def _layout(source: str) -> tuple[dict[int, int], set[int]]:
    """Return the depth of each row that begins a statement, and the rows that continue a string."""
    depth_at: dict[int, int] = {}
    in_string: set[int] = set()
    depth, begins = 0, True
    opened: list[int] = []  # rows where f-strings begin, because their parts are separate tokens
    comments: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        name = tokenize.tok_name[token.type]
        first, last = token.start[0] - 1, token.end[0] - 1
        if name in ("INDENT", "DEDENT"):
            depth += 1 if name == "INDENT" else -1
        elif name == "COMMENT" and begins:
            comments.append(first)  # a comment has the depth of the statement after it
        elif name == "NEWLINE":
            begins = True
        elif name not in ("NL", "COMMENT", "ENDMARKER"):
            if begins:
                depth_at |= dict.fromkeys([*comments, first], depth)
                comments.clear()
            begins = False
        if name == "STRING":
            in_string |= set(range(first + 1, last + 1))
        elif name == "FSTRING_START":
            opened.append(first)
        elif name == "FSTRING_END":
            in_string |= set(range(opened.pop() + 1, last + 1))
    return depth_at | dict.fromkeys(comments, 0), in_string


# Longer examples would fill the context.
_MAX_CHARS: Final = 12_000


def load_shots(
    options: TaskOptions, problems: Sequence[Row], default: int, *, calls: bool, form: str
) -> tuple[tuple[str, ...], bool]:
    """Return examples that are no problems of the run, and whether they are treegen's own.

    With a few-shot file, its first examples are used. Otherwise examples are drawn by seed: from
    fewshot_data; or from the train split next to the problems, if it has enough; or from the
    bundled examples.

    Args:
        options: Few-shot options and seed of the run.
        problems: Problems of the run.
        default: Number of examples if the user gives none.
        calls: Whether to use examples with starter code, otherwise examples without it.
        form: The form of the prompt, one of PROMPTS.

    Raises:
        InputError: There are fewer examples than requested.
        DataError: An example cannot be read, or is a problem of the run.
    """
    num_shots = default if options.num_fewshot is None else options.num_fewshot
    if num_shots == 0:
        return (), False
    bundled = load_bundled_shots()
    problem_questions = {normalize_text(row.question) for row in problems}
    if options.fewshot_file is not None:
        source = load_rows(options.fewshot_file, None)
        for number, row in enumerate(source.rows[:num_shots], start=1):
            if normalize_text(row.question) in problem_questions:
                raise DataError(
                    f"few-shot example {number} in {source.source} is also a problem of this run; "
                    "remove the example"
                )
        shots = _format_shots(source.rows, form, num_shots)
    else:
        for source in (_source(options), *([bundled] if options.fewshot_data is None else [])):
            rows = _draw_examples(source, problem_questions, options.seed, calls=calls)
            shots = _format_shots(rows, form, num_shots)
            if len(shots) == num_shots:
                break
    if len(shots) < num_shots:
        raise InputError(
            f"{arg('num_fewshot')} is {num_shots}, but {source.source} has {len(shots)} "
            f"few-shot examples {'with' if calls else 'without'} starter code that are not in "
            f"this run; lower the number, or set {arg('fewshot_data')} to other examples"
        )
    return tuple(shots), source.source == bundled.source


def _draw_examples(
    source: LoadedRows, problem_questions: Collection[str], seed: int, *, calls: bool
) -> list[Row]:
    fit = [
        row
        for row in source.rows
        if bool(row.starter) == calls and normalize_text(row.question) not in problem_questions
    ]
    return sorted(fit, key=lambda row: rank(seed, row.question))


def _source(options: TaskOptions) -> LoadedRows:
    if options.fewshot_data not in (None, "train"):
        return load_rows(options.fewshot_data, None)
    if options.data in HUB_NAMES:
        return load_rows(options.data, "train")
    if options.data is not None:
        data = Path(options.data)
        folder = data if data.is_dir() else data.parent
        if (folder / "train").is_dir() or (folder / "train.jsonl").is_file():
            return load_split(folder, "train")
        if (folder.parent / "train").is_dir():
            return load_split(folder.parent, "train")
        if options.fewshot_data == "train":
            raise DataError(
                f"no train split was found next to {data}; set {arg('fewshot_data')} to a path"
            )
    elif options.fewshot_data == "train":
        raise DataError(
            f"the bundled problems have no train split; set {arg('fewshot_data')} to a path"
        )
    return load_bundled_shots()


def _format_shots(rows: Sequence[Row], form: str, num_shots: int) -> list[str]:
    """Return the first examples that have a usable solution and are not too long."""
    shots: list[str] = []
    for row in rows:
        if len(shots) == num_shots:
            break
        with suppress(ValueError):
            if solutions := row.solutions:
                prompt = ask(row.question, row.starter, calls=row.fn_name is not None, form=form)
                shot = prompt + with_tabs(solutions[0])
                if len(shot) <= _MAX_CHARS:
                    shots.append(shot)
    return shots


_STARTER: Final = ("all", "with", "without")


class APPS(ProgramTask):
    """Programming problems by pass@k, in a sandbox.

    The filter is the name of the comparer: `strict`, or `apps-official` for published numbers.
    """

    name = "apps"
    version = "2"
    filters: tuple[str, ...] = ("strict",)
    all_tests = True
    headline = "strict_accuracy"
    difficulties = DIFFICULTIES
    max_cached_problems = 16
    arguments: ClassVar = {
        "difficulty": "introductory, interview or competition, or several separated by commas",
        "starter": "problems to use, by starter code: all (default), with or without",
        "prompt": "train (default) or eval: the form of the published training or evaluation code",
        "extract": "raw (default): the program is the whole sample; fenced: its first code block",
        "comparer": "comparison with the expected output: strict (default) or apps-official",
        "timeout": "seconds of CPU time per test; default 4; the wall-time limit is three times "
        "as long",
        "memory": "memory limit of a program, such as 512MiB; default 1GiB",
        "max_timeouts": "timeouts after which the other tests of a program fail without running; "
        "default 2",
    }
    # Temperature and top_p of the paper Large Language Monkeys, which draws at least as many
    # samples.
    defaults: Final = TaskDefaults(
        sampling=SamplingParams(temperature=0.6, top_p=0.95, max_tokens=512, stop=("\nQUESTION",)),
        num_samples=128,
        num_fewshot=2,
    )

    def __init__(self) -> None:
        """Use the default options until `load` sets others."""
        super().__init__()
        self.comparer: Comparer = COMPARERS["strict"]
        self.limits = Limits()
        self.max_timeouts = 2
        self.extract = "raw"
        self._rows: dict[str, Row] = {}

    def load(self, options: TaskOptions) -> TaskData:
        """Read problems and examples. A problem is never one of its own examples.

        Raises:
            InputError: An option is invalid, or no problem or too few examples are left.
            DataError: Problems or examples cannot be read, or an example is a problem.
        """
        extra = options.extra
        check_arguments(self.name, extra, self.arguments)
        form = one_of(extra, "prompt", PROMPTS, "train")
        starter = one_of(extra, "starter", _STARTER, "all")
        self.extract = one_of(extra, "extract", EXTRACTS, "raw")
        self.comparer = COMPARERS[one_of(extra, "comparer", tuple(COMPARERS), "strict")]
        self.filters = (self.comparer.name,)
        self.limits = judge_limits(extra, Limits())
        self.max_timeouts = whole_number(extra, "max_timeouts") or 2
        self.forget_cases()
        loaded = load_rows(options.data, options.split)
        rows = _select_rows(loaded.rows, words(extra, "difficulty"), starter)
        problems = select([_problem(row, form) for row in rows], options)
        selected_ids = {problem.id for problem in problems}
        self._rows = {row.id: row for row in loaded.rows if row.id in selected_ids}
        shots, is_bundled = load_shots(
            options,
            list(self._rows.values()),
            self.defaults.num_fewshot,
            calls=starter == "with",
            form=form,
        )
        return TaskData(
            problems=problems,
            source=loaded.source,
            num_fewshot=len(shots),
            skipped=loaded.skipped,
            fewshot_of={"": shots} if shots else {},
            label=make_data_label(options.data, own_examples=is_bundled),
            notes=(
                describe_problems(options.data, loaded.source, len(problems)),
                *((describe_examples(options, len(shots)),) if is_bundled else ()),
            ),
        )

    def tree(self, data: TaskData, num_samples: int) -> Node:
        """Return the tree examples -> problems -> samples.

        If a prompt does not fit the model's context, its last examples are left out.
        """
        children = [
            Node(problem.question, samples=num_samples, id=problem.id) for problem in data.problems
        ]
        for shot in reversed(data.fewshot_of.get("", ())):
            question, answer, program = shot.rpartition(ANSWER)
            node = mark_droppable(Node(shot, children=children))
            children = [with_turns(node, [(f"{question}{answer}", program)])]
        return Node("", children=children)

    def program(self, problem_id: str, text: str) -> str | None:
        """Return the program in a sample; None if there is none."""
        return extract_program(text, self.extract)

    def read_cases(self, problem_id: str, judge: SandboxPool) -> ProgramCases:
        """Return the tests of a loaded problem."""
        return self._rows[problem_id].suite.cases(self.comparer)

    def score_outcome(self, problem_id: str, outcome: ProgramOutcome) -> dict[str, ProgramVerdict]:
        """Return the verdict on a program by filter."""
        return {self.comparer.name: outcome.verdicts}

    def open_scoring(self, run: RunDir, execution: ExecutionOptions | None) -> SandboxScoring:
        """Return the verdicts on a run of the loaded task.

        Args:
            run: The run directory.
            execution: How programs may run; if None, only the stored verdicts are read.
        """
        return SandboxScoring(self, run, execution)

    def solutions(self, problem_id: str) -> list[str]:
        """Return samples with the reference solutions of a loaded problem."""
        programs = self._rows[problem_id].solutions
        if self.extract == "raw":
            return programs
        return [f"```python\n{program}\n```" for program in programs]


def _problem(row: Row, form: str) -> Problem:
    prompt = ask(row.question, row.starter, calls=row.fn_name is not None, form=form)
    names = ("difficulty", "url", "fn_name", "num_tests", "line")
    metadata = {name: getattr(row, name) for name in names}
    # The tests themselves may take megabytes. Their digest is enough to detect a change.
    return Problem(row.id, prompt, f"tests {row.digest}", metadata)


def _select_rows(rows: Sequence[Row], difficulties: Sequence[str], starter: str) -> list[Row]:
    difficulties_of_data = sorted({row.difficulty for row in rows})
    for name in difficulties:
        if name not in difficulties_of_data:
            hint = (
                did_you_mean(name, difficulties_of_data)
                or f"; use one of {', '.join(difficulties_of_data)}"
            )
            raise InputError(f"no problem has difficulty {name!r}{hint}")
    chosen = [
        row
        for row in rows
        if (not difficulties or row.difficulty in difficulties)
        and (starter == "all" or bool(row.starter) == (starter == "with"))
    ]
    if not chosen:
        conditions = f"starter={starter}" + (
            f", difficulty={','.join(difficulties)}" * bool(difficulties)
        )
        raise InputError(
            f"none of the {len(rows)} problems matches {conditions}; remove one of the conditions"
        )
    return chosen
