"""`treegen eval` samples and scores tasks; `treegen plan` shows what a run would share."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from treegen.cli.judge import JUDGE, loading_of, plan_judging, show_judged
from treegen.cli.options.choices import (
    collect_choices,
    collect_tasks,
    make_execution,
    make_placement,
)
from treegen.cli.options.command import GroupedCommand
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
from treegen.common.files import read_text
from treegen.common.signals import NOTHING_DRAWN, note_on_interrupt
from treegen.errors import DataError, InputError

if TYPE_CHECKING:
    from treegen.api.judge_plan import JudgingPlan
    from treegen.api.judging import Judgings
    from treegen.cli.terminal.progress import Terminal
    from treegen.evals.pipeline.evaluation import EvaluationResult
    from treegen.evals.pipeline.execution import ModelLoader
    from treegen.report.view import RunView

# Below this number of problems, a line explains the width of intervals.
_FEW: Final = 20
# Options of lm-eval's command that `treegen eval` takes too.
_LM_EVAL_NAMES: Final = ("samples", "check_integrity", "verbosity")
_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_LM_EVAL: Final = (
    option(
        "--samples JSON|FILE",
        """Run only these documents, counted from 0, such as '{"TASK": [0, 5]}'.""",
    ),
    option("--log-samples", "No effect: treegen always stores samples.", expose_value=False),
    option(
        "--check-integrity",
        "Exit before loading the model if treegen cannot use a line of the data.",
    ),
    option(
        "--verbosity",
        "Lowest level of library log messages to print.",
        type=click.Choice(_LEVELS, case_sensitive=False),
    ),
)


def _pop_lm_eval_options(params: dict[str, Any], tasks: Sequence[str]) -> bool:
    """Remove lm-eval's options from a command's parameters, and apply them.

    Args:
        params: The parameters; `samples` becomes `ids` or `limit`.
        tasks: The names of the tasks.

    Returns:
        Whether to check the data before the model is loaded.
    """
    samples, check, verbosity = (params.pop(name) for name in _LM_EVAL_NAMES)
    if verbosity is not None:
        os.environ["LMEVAL_LOG_LEVEL"] = verbosity
        logging.basicConfig(level=verbosity, format="%(name)s: %(message)s")
    if samples is not None:
        if params["limit"] is not None or params["ids"]:
            raise InputError(
                "--samples cannot be used together with --limit or --sample-id; use only one "
                "of these options"
            )
        params.update(_choose_problems(_read_samples(samples), tasks))
    return bool(check)


def _read_samples(text_or_file: str) -> dict[str, list[int]]:
    """Return the documents of each task, counted from 0."""
    try:
        text = text_or_file if "{" in text_or_file else read_text(text_or_file)
        samples: dict[str, list[int]] = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"--samples must be JSON or the name of a JSON file: {error}; pass, for example, "
            """'{"TASK": [0, 5]}'"""
        ) from None
    is_valid = isinstance(samples, dict) and all(
        isinstance(indices, list) and indices and all(type(at) is int and at >= 0 for at in indices)
        for indices in samples.values()
    )
    if not is_valid or not samples:
        raise InputError(
            f"""--samples must have the form '{{"TASK": [0, 5]}}', got {text_or_file!r:.80}"""
        )
    return samples


def _choose_problems(samples: dict[str, list[int]], tasks: Sequence[str]) -> dict[str, Any]:
    """Return the choice of the problems of one task, by id or as a range."""
    from treegen.evals.registry import is_lm_eval

    if len(tasks) != 1:
        raise InputError("--samples needs exactly one TASK; run each task with its own command")
    if is_lm_eval(tasks[0]):
        return {"ids": tuple(f"{name}/{at}" for name, indices in samples.items() for at in indices)}
    if list(samples) != [tasks[0]]:
        raise InputError(
            f"--samples names {', '.join(samples)}, but TASK is {tasks[0]}; use the same name"
        )
    indices = samples[tasks[0]]
    if indices != list(range(indices[0], indices[0] + len(indices))):
        raise InputError(
            f"the numbers of {tasks[0]} in --samples must be consecutive; use --sample-id for "
            "other numbers"
        )
    return {"limit": f"{indices[0] + 1}-{indices[-1] + 1}"}


def _check_data(tasks: Sequence[str], choices: dict[str, Any]) -> None:
    """Load the data of tasks.

    Args:
        tasks: The names of the tasks.
        choices: The user's choices, by name.

    Raises:
        DataError: a line of the data cannot be used.
    """
    from treegen.evals.job import load_task_data
    from treegen.evals.registry import get_task
    from treegen.evals.task import TaskOptions

    named = {field.name for field in fields(TaskOptions)}
    options = TaskOptions(**{name: value for name, value in choices.items() if name in named})
    for name in tasks:
        task = get_task(name)
        task.configure(options.extra)
        skipped = load_task_data(task, options).skipped
        if skipped:
            raise DataError(
                f"treegen cannot use {len(skipped):,} lines of the data of {name}, such as "
                f"{skipped[0]}; correct these lines, or remove --check-integrity"
            )


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
    "Only sample; score later with `treegen score`.",
    "score",
    flag_value=False,
    default=None,
)
@option("--log-tokens", "Store token ids with the texts.")
@WRITE_OUT
@add_options(*_LM_EVAL)
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

    treegen stores each sample as it finishes. After an interruption, even a power failure, --resume
    draws the missing samples with the same random numbers, so they equal those of an uninterrupted
    run up to rounding. It then judges the samples with the run's --judge models; --judge none skips
    judging.

    With several --adapter, treegen loads the model once, makes a run in DIR/ADAPTER for each
    adapter, and compares the runs with the first. To continue, pass the same adapters and --resume
    DIR.

    \f
    Args:
        output: Run directory.
        resume: Directory of the run to continue.
        write_out: Whether to print the first prompt of each task.
        all_filters: Whether to show the results of every filter, not only of the first.
        judge: Models that judge the samples.
        rubric: Name of a rubric, or a .yaml or .jinja file.
        wordings: Number of wordings of the rubric to use.
        verdicts: How the judge gives its verdicts: by likelihood or by sampling.
        adapter: LoRA adapters saved by peft, merged into the model on load.
        **params: All other options, by parameter name.
    """
    with note_on_interrupt(NOTHING_DRAWN):  # imports take seconds
        from treegen.api.judge_plan import JudgingPlan
        from treegen.cli.terminal import render
        from treegen.cli.terminal.progress import Terminal
        from treegen.evals.pipeline.evaluation import evaluate_adapters, evaluate_all
        from treegen.evals.pipeline.execution import ModelLoader

    tasks = collect_tasks(params)
    checks_data = _pop_lm_eval_options(params, tasks)
    execution = make_execution(params)
    several = adapter if len(adapter) > 1 else ()
    choices = collect_choices(params if several else {**params, "adapter": adapter})
    if checks_data:
        _check_data(tasks, choices)
    judge_options = {"rubric": rubric, "wordings": wordings, "verdicts": verdicts}
    plan = plan_judging(judge, judge_options, choices)
    if judge:
        choices["judged_by"] = None if plan is None else plan.to_json()
    allowed = " --allow-code-execution" if execution else ""
    terminal = Terminal(resume="eval", flags=allowed)
    placement = make_placement(params, choices.get("device", "auto"))
    models = ModelLoader(placement=placement, keep_loaded=plan is not None or resume is not None)
    options: dict[str, Any] = {
        "output": output,
        "resume": resume,
        "execution": execution,
        "show_prompts": write_out,
        "check_judges": lambda stored: JudgingPlan.check_stored(stored, loading_of(choices)),
    }
    if several:
        rows = evaluate_adapters(several, tasks, choices, models, terminal, **options)
    else:
        rows = [evaluate_all(tasks, choices, models, terminal, **options)]
    results = [result for row in rows for result in row]
    if not is_quiet():
        _show_results(results, all_filters=all_filters)
    with closing(models):
        judged = _judge_runs(results, plan, loading_of(choices), models, terminal)
    documents, complaints = _describe_results(results, judged)
    differences = _compare(
        rows, allow_task_code="allow_task_code" in choices, all_filters=all_filters
    )
    _show_headlines(results)
    render.json_line({"runs": documents, **({"compared": differences} if several else {})})
    render.exit_with_complaints(complaints)


def _describe_results(
    results: "Sequence[EvaluationResult]", judged: "Sequence[Judgings | None]"
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the JSON document of each run, and sentences about what is missing or failed."""
    from treegen.cli.terminal.render import without_parts

    documents = [{"run": str(r.path), **without_parts(r.results)} for r in results]
    complaints = [result.unscored for result in results if result.unscored]
    for document, judgings in zip(documents, judged, strict=True):
        if judgings is not None:
            document["judged"] = judgings.to_json()
            complaints += judgings.describe_missing()
    if missing := sum(result.missing for result in results):
        complaints.insert(0, f"{missing:,} samples were not drawn; {results[0].resume_hint}")
    return documents, complaints


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
                f"{shortened:,} prompts were too long for the model, so treegen left out "
                "few-shot examples; see the field dropped in samples.jsonl"
            )
        render.echo("")
        render.show_report(result.results, result.report, all_filters=all_filters)
        render.save_heat_maps(result.report, result.path)
        render.echo("")


def _show_headlines(results: "Sequence[EvaluationResult]") -> None:
    """Print the headline of each run."""
    from treegen.cli.terminal import render
    from treegen.report.run_settings import describe_results

    for result in results:
        num = result.report.num_problems if result.report is not None else 0
        if 1 < num < _FEW:
            render.echo(f"intervals are wide because the run has only {num} problems")
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
    from treegen.evals.judging.pipeline import JudgeLoader

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
                follow=partial(terminal.count, again=result.resume_hint),
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
    from treegen.report.compare import compare_runs
    from treegen.report.load import load_run

    def load(result: "EvaluationResult") -> "RunView":
        return load_run(result.path, result.verdicts, allow_task_code=allow_task_code)

    first_views: dict[Path, RunView] = {}
    differences = []
    for row in rows[1:]:
        for a, b in zip(rows[0], row, strict=True):
            if a.missing or b.missing or a.report is None or b.report is None:
                continue  # unfinished, or not scored
            if a.path not in first_views:
                first_views[a.path] = load(a)
            comparison = compare_runs(first_views[a.path], load(b))
            listing = comparison.listing(all_filters=all_filters, more="--all-filters shows them")
            echo(f"{safe_text(f'{b.path} against {a.path}')}\n\n{listing}")
            differences.append({"run_a": str(a.path), "run_b": str(b.path), **comparison.to_json()})
    return differences


@click.command(
    "plan",
    cls=GroupedCommand,
    file=True,
    examples=("treegen plan gsm8k --n-samples 64 --model Qwen/Qwen3-0.6B",),
)
@add_option_groups("task", "data", "arguments", "model", "sampling")
@WRITE_OUT
@QUIET
def plan(write_out: bool, **params: Any) -> None:
    """Show the prompt tree of each TASK by level: tokens, bytes, rows that fit, and sharing.

    The command reads the tokenizer and the configuration of the model, but no weights.
    """
    from treegen.cli.terminal.progress import Terminal
    from treegen.cli.terminal.render import echo, json_line
    from treegen.evals.pipeline.evaluation import plan_tasks
    from treegen.report.plan_document import plan_document, plan_text

    terminal = Terminal()
    documents = []
    tasks = collect_tasks(params)
    for prepared in plan_tasks(tasks, collect_choices(params), terminal, show_prompts=write_out):
        documents.append(plan_document(prepared.job, prepared.model_info, prepared.plan))
        echo(plan_text(documents[-1]) + "\n")
    json_line({"plans": documents})
