"""`treegen eval`: sample tasks with a model, score the samples, and write run directories."""

from contextlib import closing
from functools import partial
from typing import Any

import click

from treegen.cli.judge.options import JUDGE, loading_of, plan_judging, show_judged
from treegen.cli.options.command import GroupedCommand
from treegen.cli.options.options import (
    ALL_FILTERS,
    OUTPUT,
    QUIET,
    WRITE_OUT,
    add_option_groups,
    collect_choices,
    pop_execution_options,
    task_names,
)
from treegen.cli.options.workers import resolve_workers, take_cluster


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
@click.option(
    "--no-score",
    "--predict-only",
    "score",
    flag_value=False,
    default=None,
    help="Only sample; `treegen score` scores later.",
)
@click.option("--log-tokens", is_flag=True, help="Store token ids with the texts.")
@WRITE_OUT
@ALL_FILTERS
@QUIET
def command(
    output: str | None,
    resume: str | None,
    write_out: bool,
    all_filters: bool,
    quiet: bool,
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
    from treegen.common.formatting import safe_text
    from treegen.evals.judging.models import JudgeLoader
    from treegen.evals.pipeline.adapters import evaluate_adapters
    from treegen.evals.pipeline.evaluation import evaluate_all
    from treegen.evals.pipeline.execution import ModelLoader
    from treegen.report.load import compare_rows
    from treegen.report.run_settings import describe_results

    tasks = task_names(params)
    cluster, execution = take_cluster(params), pop_execution_options(params)
    several = adapter if len(adapter) > 1 else ()
    asked = collect_choices(params if several else {**params, "adapter": adapter})
    judging = {"rubric": rubric, "wordings": wordings, "verdicts": verdicts}
    plan = plan_judging(judge, judging, asked)
    if judge:
        asked["judged_by"] = None if plan is None else plan.to_json()
    allowed = " --allow-code-execution" if execution else ""
    terminal = Terminal(quiet=quiet, resume="eval", flags=allowed)
    models = ModelLoader(
        places=resolve_workers(cluster, asked), stays=plan is not None or resume is not None
    )
    how: dict[str, Any] = {
        "output": output,
        "resume": resume,
        "execution": execution,
        "show_prompts": write_out,
        "check_judges": lambda kept: JudgingPlan.check_kept(kept, loading_of(asked)),
    }
    if several:
        rows = evaluate_adapters(several, tasks, asked, models, terminal, **how)
    else:
        rows = [evaluate_all(tasks, asked, models, terminal, **how)]
    found = [each for row in rows for each in row]
    for each in found if not quiet else ():
        if shortened := each.results["shortened"]:
            render.notice(
                f"{shortened:,} prompts were too long for the model and have fewer "
                "solved examples; see dropped in samples.jsonl"
            )
        render.echo("")
        render.show_report(each.results, each.report, all_filters=all_filters)
        render.pictures(each.report, each.path)
        render.echo("")
    documents = [{"run": str(each.path), **render.without_parts(each.results)} for each in found]
    complaints = [each.complaint for each in found if each.complaint]
    with closing(models), JudgeLoader(models) as judges:
        for each, document in zip(found, documents, strict=True):
            if each.judged_by is None:
                continue
            kept = plan or JudgingPlan.of_json(each.judged_by, loading_of(asked))
            judged = kept.judge(
                each.path,
                listener=terminal,
                models=judges,
                follow=partial(terminal.count, again=each.again),
                allow_task_code=True,
            )
            show_judged(judged, quiet=quiet)
            document["judged"] = judged.to_json()
            complaints += judged.complaints
    differences = []
    for a, b, told in compare_rows(rows, allow_task_code="allow_task_code" in asked):
        if not quiet:
            render.echo(safe_text(f"{b} against {a}\n\n{told}"))
        differences.append({"run_a": a, "run_b": b, **told.to_json()})
    for each in found if not quiet else ():
        render.show_headline(describe_results(each.results, short=True), each.report, each.path)
    render.json_line({"runs": documents, **({"compared": differences} if several else {})})
    if missing := sum(each.missing for each in found):
        complaints.insert(0, f"{missing:,} samples were not drawn; {found[0].again}")
    render.exit_with_complaints(complaints)
