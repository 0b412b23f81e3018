"""Audits a finished run or an imported log, without a model."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Final, Unpack

from treegen.common.files import as_path
from treegen.common.lifetimes import pause_gc
from treegen.errors import Message, TreegenError
from treegen.evals.config.base import OpenRunOptions
from treegen.evals.scoring.code_execution import ExecutionOptions
from treegen.evals.task_calls import format_error
from treegen.report.audit.answers import answer_kind, audit_answers
from treegen.report.audit.data_checks import audit_data, read_faulty_ids
from treegen.report.audit.equivalence import limit_time
from treegen.report.audit.findings import Audit, Finding, RuleEffect, sort_findings
from treegen.report.audit.programs import audit_programs, audit_solutions, list_solutions
from treegen.report.audit.prompt_checks import audit_prompts, find_tokenizer, prompt_texts
from treegen.report.audit.sample_checks import audit_samples
from treegen.report.load import load_run
from treegen.report.view import RunView

_SLOW: Final = ("mathematics", "code")


def audit_run(
    run: str | Path,
    *,
    faulty_items: Path | None = None,
    execution: ExecutionOptions | None = None,
    model: Path | None = None,
    **options: Unpack[OpenRunOptions],
) -> Audit:
    """Read a run and return what may make its score mislead, with the texts that show it.

    Nothing is sampled, and no program of a model is run. Reference solutions that are programs are
    run if `execution` permits it.

    Args:
        run: The directory of a run or of an imported log.
        faulty_items: A file with the ids of problems that are known to be faulty, one in each line.
        execution: Permission to run reference solutions; None without it.
        model: The directory of the run's model, if it has moved.
        options: See `treegen.evals.config.base.OpenRunOptions`.

    Raises:
        RunError: there is no run, or it is corrupt.
        InputError: `data` or `task` are not the problems or the task of the run, or `faulty_items`
            cannot be read.
        TreegenError: the audit fails.
    """
    faulty = None if faulty_items is None else read_faulty_ids(faulty_items)
    view = load_run(as_path("run", run), **options)
    return audit_view(view, faulty=faulty, execution=execution, model=model)


def audit_quickly(view: RunView) -> Audit:
    """Return the quick audit of a loaded run; if it fails, an audit that says why.

    The run is complete, so whatever its audit meets must not hide its results.
    """
    try:
        return audit_view(view, quick=True)
    except TreegenError as error:
        return _make_audit(view, "none", [], [], notices=[], failure=str(error))


@pause_gc()
def audit_view(
    view: RunView,
    *,
    faulty: dict[str, str] | None = None,
    quick: bool = False,
    execution: ExecutionOptions | None = None,
    model: Path | None = None,
) -> Audit:
    """Return the audit of a loaded run; see `audit_run`.

    Args:
        view: The run.
        faulty: Ids of faulty problems, from `read_faulty_ids`.
        quick: Whether to leave out what may take minutes or calls the task's scorer: formulas,
            programs, and references.
        execution: As for `audit_run`.
        model: As for `audit_run`.

    Raises:
        TreegenError: the audit fails.
    """
    try:
        return _audit(view, faulty or {}, quick, execution, model)
    except TreegenError:
        raise
    except Exception as error:
        raise TreegenError(
            f"the audit of {view.path} fails: {format_error(error)}; please report this with the "
            "sample that causes it"
        ) from error


def _audit(
    view: RunView,
    faulty: dict[str, str],
    quick: bool,
    execution: ExecutionOptions | None,
    model: Path | None,
) -> Audit:
    is_scored = _is_scored(view)
    kind = answer_kind(view)
    if not is_scored and kind != "code":  # programs are read without their verdicts
        kind = "none"
    is_read = not (quick and kind in _SLOW)
    findings: list[Finding] = []
    rules: list[RuleEffect] = []
    notices = list(_notices(view, kind, is_read, is_scored))
    if is_read:
        with limit_time() as limit:
            try:
                findings, rules = audit_answers(view, kind)
                if kind == "code":
                    findings += audit_programs(view)
            except TreegenError as error:  # such as a program for formulas that does not start
                notices.append(
                    Message(f"the audit could not read the answers again: {error.message.marked}")
                )
        notices += limit.notices
    prompts = prompt_texts(view)
    if model is None and not view.searched:
        try:
            model = find_tokenizer(view.info)
        except TreegenError as error:
            if view.info.free.get("model") != "unknown":  # as in imported logs that name none
                notices.append(
                    Message(f"the audit did not check the tokenizer: {error.message.marked}")
                )
    findings += [
        *audit_prompts(view, kind, prompts, model),
        *audit_samples(view, kind, is_scored=is_scored),
    ]
    findings += audit_data(view, kind if is_read else "none", prompts, faulty=faulty, quick=quick)
    if view.job is not None and (solutions := list_solutions(view.job)) and not quick:
        if execution is None:
            again = f"treegen audit {quote(str(view.path))} --allow-code-execution"
            notices.append(
                f"{len(solutions):,} reference solutions were not run; run the solutions with: "
                f"{again}"
            )
        else:
            findings += audit_solutions(view.job, solutions, execution)
            notices.append(f"the reference solutions of {len(solutions):,} problems were run")
    if faulty:
        num = sum(problem.id in faulty for problem in view.problems)
        notices.append(f"{num:,} of the {len(faulty):,} listed ids are problems of this run")
    return _make_audit(view, kind, findings, rules, notices=notices)


def _make_audit(
    view: RunView,
    kind: str,
    findings: Sequence[Finding],
    rules: Sequence[RuleEffect],
    *,
    notices: Sequence[str],
    failure: str | None = None,
) -> Audit:
    """Return an audit of a run; the arguments are as the fields of `Audit`."""
    return Audit(
        run=str(view.path),
        task=view.task,
        is_scored=_is_scored(view),
        answers=kind,
        num_samples=view.num_done,
        unit=view.unit,
        findings=sort_findings(findings),
        rules=tuple(rules),
        notices=tuple(notices),
        failure=failure,
    )


def _is_scored(view: RunView) -> bool:
    """Return whether a run has scores; a run with score=False is only scored when it is loaded."""
    if view.info.free.get("score") is not False or view.report is None:
        return view.report is not None
    with suppress(TreegenError), view.open() as run:
        return run.stored_results().get("report") is not None
    return False


def _notices(view: RunView, kind: str, is_read: bool, is_scored: bool) -> Iterator[str]:
    yield from view.notices
    if not is_read:
        command = f"treegen audit {quote(str(view.path))}"
        yield f"this quick audit did not check the answers ({kind}); run: {command}"
    if not is_scored and kind == "none":
        yield "the run has no scores, so the audit did not read its answers again"
    elif kind == "none" and not view.searched:
        yield (
            f"no public rule reads the answers of the task {view.task}, so the audit did "
            "not read the answers again"
        )
    if view.searched:
        yield "the audit does not check answers and prompts of a search run"
        if not any(problem.question for problem in view.problems):
            yield "the problems are not available, so the audit did not check the data"
    elif view.tree is None or view.job is None:
        yield "the problems are not available, so the audit did not check prompts and data"
    elif "imported" in view.info.identity and not any(
        problem.metadata.get("prompt") for problem in view.job.data.problems
    ):
        yield "the log has no prompts, so the audit did not check prompts"
