r"""APPS: programming problems whose solutions are scored by running them on tests.

Data: https://github.com/hendrycks/apps (folders), or codeparrot/apps on the Hugging Face hub (JSON
Lines; all fields are text). One row, shortened:

    {"problem_id": 4136, "question": "You are given two integers $A$ and $B$. Print $A+B$. ...",
     "solutions": "[\"a, b = map(int, input().split())\\nprint(a + b)\"]",
     "input_output": "{\"inputs\": [\"1 2\\n\"], \"outputs\": [\"3\\n\"]}",
     "difficulty": "introductory", "url": "...", "starter_code": ""}

The prompt is that of the published training code, with solved examples before the problem. All
examples are nodes above all problems, so they are computed once for the whole run. A sample ends
when the model begins another problem. Other tools also stop at "\n---" and "\nANSWER" (--stop).
"""

from collections.abc import Sequence
from typing import ClassVar, Final

from treegen.common.params import SamplingParams
from treegen.common.spelling import did_you_mean
from treegen.errors import InputError
from treegen.evals.arguments import check_arguments, one_of, whole_number, words
from treegen.evals.chat import with_turns
from treegen.evals.problem import Problem
from treegen.evals.scoring.code_execution import ExecutionOptions
from treegen.evals.selection import select
from treegen.evals.task import TaskData, TaskDefaults, TaskOptions
from treegen.evals.truncation import droppable
from treegen.prompts.tree import Node
from treegen.runs import RunDir
from treegen.tasks.apps.compare import COMPARERS, Comparer
from treegen.tasks.apps.data import DIFFICULTIES, Row, load_rows
from treegen.tasks.apps.prompts import ANSWER, EXTRACTS, PROMPTS, ask, extract_program, load_shots
from treegen.tasks.common.sources import describe_examples, describe_problems, make_data_label
from treegen.tasks.programs.report import ProgramVerdict
from treegen.tasks.programs.scoring import SandboxScoring
from treegen.tasks.programs.task import ProgramCases, ProgramOutcome, ProgramTask, judge_limits
from treegen.tasks.sandbox import Limits, SandboxPool

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
    cases_kept = 16
    arguments: ClassVar = {
        "difficulty": "introductory, interview or competition, several with commas between",
        "starter": "all, with or without: problems by starter code",
        "prompt": "train (default) or eval: the form of the published training or evaluation code",
        "extract": "raw (default): the program is the whole sample; fenced: its first code block",
        "comparer": "comparison with the expected output: strict (default) or apps-official",
        "timeout": "seconds of CPU time per test; default 4. Three times that by the wall clock",
        "memory": "per program, such as 512MiB; default 1GiB",
        "max_timeouts": "timeouts after which the other tests of a program fail unrun; default 2",
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
            node = droppable(Node(shot, children=children))
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

    def judging(self, run: RunDir, execution: ExecutionOptions | None) -> SandboxScoring:
        """Return the verdicts on a run of the loaded task.

        Args:
            run: The run directory.
            execution: How programs may run; if None, only the stored verdicts are read.
        """
        return SandboxScoring(self, run, execution)

    def solutions(self, problem_id: str) -> list[str]:
        """Return the reference solutions of a loaded problem."""
        return self._rows[problem_id].solutions


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
                or f"; the data have {', '.join(difficulties_of_data)}"
            )
            raise InputError(f"there is no problem of difficulty {name!r}{hint}")
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
        raise InputError(f"none of {len(rows)} problems is left by {conditions}; leave one out")
    return chosen
