"""Audits a finished run or an imported log, without a model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, Unpack

from treegen.common.garbage_collection import pause_gc
from treegen.evals.config.base import OpenRunOptions
from treegen.report.audit.answers import answer_kind, audit_answers
from treegen.report.audit.data_checks import audit_data
from treegen.report.audit.equivalence import limit_time
from treegen.report.audit.findings import Audit, sort_findings
from treegen.report.audit.programs import audit_programs
from treegen.report.audit.prompt_checks import audit_prompts
from treegen.report.audit.sample_checks import audit_samples
from treegen.report.load import load_run
from treegen.report.view import RunView

_SLOW: Final = ("mathematics", "code")


def audit_run(run: str | Path, **options: Unpack[OpenRunOptions]) -> Audit:
    """Read a run and return what may make its score mislead, with the texts that show it.

    Nothing is sampled, and no program of a model is run.

    Args:
        run: The directory of a run or of an imported log.
        options: See `treegen.evals.config.base.OpenRunOptions`.

    Raises:
        RunError: there is no run, or it is damaged.
        InputError: `data` or `task` are not the problems or the task of the run.
    """
    return audit_view(load_run(Path(run), **options))


@pause_gc()
def audit_view(view: RunView, *, quick: bool = False) -> Audit:
    """Return the audit of a loaded run; see `audit_run`.

    Args:
        view: The run.
        quick: Whether to leave out what may take minutes: formulas, programs, and references that
            a user's own task scores.
    """
    kind = answer_kind(view)
    is_read = not (quick and kind in _SLOW)
    with limit_time() as limit:
        findings, rules = audit_answers(view, kind) if is_read else ([], [])
        if kind == "code" and is_read:
            findings += audit_programs(view)
    findings += [*audit_prompts(view, kind), *audit_samples(view)]
    findings += audit_data(view, kind if is_read else "none", quick=quick)
    return Audit(
        run=str(view.path),
        task=view.task,
        answers=kind,
        num_samples=view.num_done,
        findings=sort_findings(findings),
        rules=tuple(rules),
        notices=(*_notices(view, kind, is_read), *limit.notices),
    )


def _notices(view: RunView, kind: str, is_read: bool) -> Iterator[str]:
    yield from map(str, view.notices)
    if not is_read:
        yield f"the {kind} was not read again here; treegen audit {view.path} does that"
    if kind == "none":
        yield f"no public rule reads answers like those of {view.task}, so they were not read again"
    if kind == "code" and is_read:
        yield "programs were not run, so reference solutions were not checked"
    if view.tree is None or view.job is None:
        yield "the problems are not available, so prompts and data were not checked"
    elif "imported" in view.info.identity and not any(
        problem.metadata.get("prompt") for problem in view.job.data.problems
    ):
        yield "the log has no prompts, so they were not checked"
