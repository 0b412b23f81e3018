"""`treegen eval`: sample tasks with a model, score the samples, and write run directories."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click

from treegen.cli.judge.options import JUDGE, loading_of, plan_judging, show_judged
from treegen.cli.options.choices import (
    collect_choices,
    collect_tasks,
    make_execution,
    make_placement,
)
from treegen.cli.options.command import GroupedCommand
from treegen.cli.options.lm_eval import OPTIONS as LM_EVAL
from treegen.cli.options.lm_eval import check_data, pop_lm_eval_options
from treegen.cli.options.options import (
    ALL_FILTERS,
    OUTPUT,
    QUIET,
    WRITE_OUT,
    add_option_groups,
    add_options,
    is_quiet,
    option,
)

# Below this number of problems, a line explains the width of intervals.
_FEW: Final = 20

if TYPE_CHECKING:
    from treegen.api.judge_plan import JudgingPlan
    from treegen.api.judging import Judgings
    from treegen.cli.terminal.progress import Terminal
    from treegen.evals.pipeline.evaluation import EvaluationResult
    from treegen.evals.pipeline.execution import ModelLoader


@click.command(
    "eval",
    cls=GroupedCommand,
    file=True,
    examples=(
        "treegen eval gsm8k --limit 4 --n-samples 8",
        "treegen eval math500 --model Qwen/Qwen3-0.6B -n 16 --maj 4,16 -o runs/math",
        "treegen eval --resume runs/math",
    ),
)
@add_option_groups(
    "task",
    "data",
    "arguments",
    "model",
    "cluster",
    "sampling",
    "stopping",
    "report",
    "execution",
    "task code",
)
@OUTPUT
@JUDGE
@option(
    "--no-score --predict-only",
    "Only sample; `treegen score` scores later.",
    "score",
    flag_value=False,
    default=None,
)
@option("--log-tokens", "Store token ids with the texts.")
@WRITE_OUT
@add_options(*LM_EVAL)
@ALL_FILTERS
@QUIET
def command(
    output: str | None,
    resume: str | None,
    write_out: bool,
    all_filters: bool,
    judge: tuple[str, ...],
    rubric: str | None,
    wordings: int | None,
    verdicts: Any,
    adapter: tuple[str, ...],
    **params: Any,
) -> None:
    """Sample every problem of each TASK, score the samples, and print the results.

    Everything is stored as it finishes. A run that was stopped, by a signal or by pulling the
    plug, continues with --resume and ends with the samples it would have had. It is judged too, by
    the --judge that it was begun with; --judge none leaves that out.

    Several --adapter are runs in DIR/ADAPTER each, compared with the first at the end; their model
    is read once. To continue them, give the same adapters and --resume DIR.
    """
    from treegen.api.judge_plan import JudgingPlan
    from treegen.cli.terminal import render
    from treegen.cli.terminal.progress import Terminal
    from treegen.evals.pipeline.evaluation import evaluate_adapters, evaluate_all
    from treegen.evals.pipeline.execution import ModelLoader

    tasks = collect_tasks(params)
    is_checked_first = pop_lm_eval_options(params, tasks)
    execution = make_execution(params)
    several = adapter if len(adapter) > 1 else ()
    choices = collect_choices(params if several else {**params, "adapter": adapter})
    if is_checked_first:
        check_data(tasks, choices)
    how = {"rubric": rubric, "wordings": wordings, "verdicts": verdicts}
    plan = plan_judging(judge, how, choices)
    if judge:
        choices["judged_by"] = None if plan is None else plan.to_json()
    allowed = " --allow-code-execution" if execution else ""
    terminal = Terminal(resume="eval", flags=allowed)
    places = make_placement(params, choices.get("device", "auto"))
    models = ModelLoader(places=places, stays=plan is not None or resume is not None)
    options: dict[str, Any] = {
        "output": output,
        "resume": resume,
        "execution": execution,
        "show_prompts": write_out,
        "check_judges": lambda kept: JudgingPlan.check_kept(kept, loading_of(choices)),
    }
    if several:
        rows = evaluate_adapters(several, tasks, choices, models, terminal, **options)
    else:
        rows = [evaluate_all(tasks, choices, models, terminal, **options)]
    results = [result for row in rows for result in row]
    if not is_quiet():
        _show_results(results, all_filters=all_filters)
    documents = [{"run": str(r.path), **render.without_parts(r.results)} for r in results]
    complaints = [result.complaint for result in results if result.complaint]
    with closing(models):
        judged = _judge_runs(results, plan, loading_of(choices), models, terminal)
    for document, judgings in zip(documents, judged, strict=True):
        if judgings is not None:
            document["judged"] = judgings.to_json()
            complaints += judgings.complaints
    differences = _compare(
        rows, allow_task_code="allow_task_code" in choices, all_filters=all_filters
    )
    _show_headlines(results)
    render.json_line({"runs": documents, **({"compared": differences} if several else {})})
    if missing := sum(result.missing for result in results):
        complaints.insert(0, f"{missing:,} samples were not drawn; {results[0].again}")
    render.exit_with_complaints(complaints)


def _show_results(results: "Sequence[EvaluationResult]", *, all_filters: bool) -> None:
    """Print the results of runs.

    Args:
        results: The results.
        all_filters: Whether to print the results of every filter.
    """
    from treegen.cli.terminal import render

    for result in results:
        if shortened := result.results["shortened"]:
            render.notice(
                f"{shortened:,} prompts were too long for the model and have fewer "
                "solved examples; see dropped in samples.jsonl"
            )
        render.echo("")
        render.show_report(result.results, result.report, all_filters=all_filters)
        render.pictures(result.report, result.path)
        render.echo("")


def _show_headlines(results: "Sequence[EvaluationResult]") -> None:
    """Print the headline of each run."""
    from treegen.cli.terminal import render
    from treegen.report.run_settings import describe_results

    for result in results:
        num = result.report.num_problems if result.report is not None else 0
        if 1 < num < _FEW:
            render.echo(f"intervals are wide because there are only {num} problems")
        about = describe_results(result.results, short=True)
        render.show_headline(about, result.report, result.path)


def _judge_runs(
    results: "Sequence[EvaluationResult]",
    plan: "JudgingPlan | None",
    load_options: Mapping[str, Any],
    models: "ModelLoader",
    terminal: "Terminal",
) -> "list[Judgings | None]":
    """Judge the samples of runs, print the verdicts, and return them.

    Args:
        results: The results of the runs.
        plan: How they are judged; None for the plan that each run names.
        load_options: How the judges of a run's own plan are loaded.
        models: Holds the model that sampled.
        terminal: Receives messages and progress.

    Returns:
        The judgements on each run; None for runs without judges.
    """
    from treegen.api.judge_plan import JudgingPlan
    from treegen.evals.judging.models import JudgeLoader

    judged: list[Judgings | None] = []
    with JudgeLoader(models) as judges:
        for result in results:
            if result.judged_by is None:
                judged.append(None)
                continue
            judgings = (plan or JudgingPlan.of_json(result.judged_by, load_options)).judge(
                result.path,
                listener=terminal,
                models=judges,
                follow=partial(terminal.count, again=result.again),
                allow_task_code=True,
            )
            show_judged(judgings)
            judged.append(judgings)
    return judged


def _compare(
    rows: "Sequence[Sequence[EvaluationResult]]", *, allow_task_code: bool, all_filters: bool
) -> list[dict[str, Any]]:
    """Print and return how the runs of each adapter differ from those of the first one.

    Args:
        rows: The runs of each adapter.
        allow_task_code: Whether to run the code of tasks that the runs name.
        all_filters: Whether to print the differences by every filter.
    """
    from treegen.cli.terminal.render import echo
    from treegen.common.formatting import safe_text
    from treegen.report.load import compare_rows

    differences = []
    for a, b, comparison in compare_rows(rows, allow_task_code=allow_task_code):
        listing = comparison.listing(all_filters=all_filters, more="--all-filters shows them")
        echo(f"{safe_text(f'{b} against {a}')}\n\n{listing}")
        differences.append({"run_a": a, "run_b": b, **comparison.to_json()})
    return differences
