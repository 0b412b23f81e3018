"""Checks a certificate: against its signature, its run, its model, and samples drawn again."""

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any, Final

from treegen.common.formatting import format_bytes, safe_line
from treegen.errors import InputError, ModelError, arg
from treegen.evals.job import Job, PreparedJob
from treegen.evals.pipeline.listener import Listener
from treegen.evals.pipeline.redraw import (
    Redraw,
    check_model,
    check_tolerance,
    redraw_samples,
)
from treegen.evals.scoring.code_execution import ExecutionOptions
from treegen.report.audit.prompt_checks import OF_TOKENIZERS
from treegen.report.certify.build import (
    describe_prompts,
    describe_run,
    find_changed_report,
    find_foreign_samples,
    hash_model,
    load_job_of,
    locate_model,
    render_prompts,
    stored_report,
)
from treegen.report.certify.document import (
    Certificate,
    RunPart,
    find_differences,
    read_certificate,
)
from treegen.report.certify.signature import signature_path, verify
from treegen.report.changed_scores import list_changed_scores
from treegen.runs import RunDir
from treegen.runs.record_file import CorruptLineError

_MAX_NAMES: Final = 3
_MAX_CHARS: Final = 160  # of a value in a message
_MODEL_PARTS: Final = {
    "model": "--model DIR checks it",
    "prompts": "--model DIR checks it",
    "redraw": "--model DIR --redraw 20 draws samples again",
}
"""The parts that need the model, and the options that check them."""
_PARTS: Final = (
    "settings",
    "data",
    "task",
    "samples",
    "scores",
    "results.json",
    "audit",
    *_MODEL_PARTS,
)
_OTHER_MODEL: Final = "because the model differs"
_WORDS: Final = {True: "holds", False: "DOES NOT HOLD", None: "not checked"}


@dataclass(frozen=True, slots=True)
class PartCheck:
    """The result of checking one part of a certificate."""

    what: str
    """The part, such as "samples"."""
    holds: bool | None
    """Whether the part is as certified; None if it was not checked."""
    detail: str
    """What was compared, or the first differences."""
    word: str = ""
    """A word to print instead of the usual one for `holds`; empty for the usual one."""


@dataclass(frozen=True, slots=True)
class CertificateCheck:
    """The results of checking a certificate."""

    certificate: str
    """The file."""
    sha256: str
    """The hash of the file."""
    checks: tuple[PartCheck, ...]

    @property
    def holds(self) -> bool:
        """Whether no part that was checked differs from the certificate."""
        return all(check.holds is not False for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Return the checks as plain dicts and lists."""
        return {**asdict(self), "holds": self.holds}

    def __str__(self) -> str:
        lines = [f"{c.what:<12}  {c.word or _WORDS[c.holds]:<13}  {c.detail}" for c in self.checks]
        return "\n".join(map(safe_line, lines))


def check_certificate(
    file: Path,
    run: Path | None,
    choices: Mapping[str, Any],
    listener: Listener,
    *,
    execution: ExecutionOptions | None = None,
    signer: Path | None = None,
    redraw: int = 0,
    redraw_seed: int | None = None,
    tolerance: float | None = None,
) -> CertificateCheck:
    """Check a certificate, which may come from somebody else.

    Everything in it is computed again from the run and compared; every sample is scored again. If
    the choices name a model, its files are hashed and the prompts are rendered.

    Args:
        file: The certificate.
        run: The directory of its run. None takes the directory of the file.
        choices: Where the problems and the model are, as for `certify_run`.
        listener: Receives messages and progress.
        execution: Permission to run the programs that the model wrote again; without it, their
            stored verdicts are compared.
        signer: A public key, or a file of allowed signers.
        redraw: Number of samples to draw again; needs a model.
        redraw_seed: Chooses these samples. None takes a random seed, which the author of the
            certificate cannot know.
        tolerance: As for `treegen.evals.pipeline.redraw.redraw_samples`.

    Raises:
        InputError: the file is not a certificate, or an argument cannot be used.
        RunError: there is no run in the directory.
        TreegenError: the data or the model cannot be read.
    """
    if redraw < 0:
        raise InputError(f"{arg('redraw')} must be at least 0, got {redraw}")
    if redraw and "model" not in choices:
        raise InputError(
            f"{arg('redraw', redraw)} needs {arg('model=')}; pass the directory or the name "
            "of the model"
        )
    for name in ("adapter", "device", "trust_remote_code"):
        if name in choices and "model" not in choices:
            raise InputError(
                f"{arg(f'{name}=')} has no effect without {arg('model=')}, because then no model "
                f"is checked; set {arg('model=')} too"
            )
    check_tolerance(tolerance)
    certificate, content = read_certificate(file)
    redraw_run = None
    if redraw:
        seed = secrets.randbelow(2**32) if redraw_seed is None else redraw_seed
        redraw_run = partial(
            redraw_samples, listener=listener, num=redraw, seed=seed, tolerance=tolerance
        )
    checks = [PartCheck("signature", *verify(content, signature_path(file), signer))]
    path = file.parent if run is None else run
    try:
        checks += _compare_all(certificate, path, choices, listener, execution, redraw_run)
    except CorruptLineError as error:
        checks += [
            PartCheck(what, False, error.problem)
            if what == "samples"
            else PartCheck(what, None, "because a sample is corrupt")
            for what in _PARTS
        ]
    return CertificateCheck(str(file), certificate.sha256, tuple(checks))


def _compare_all(
    certificate: Certificate,
    path: Path,
    choices: Mapping[str, Any],
    listener: Listener,
    execution: ExecutionOptions | None,
    redraw_run: Callable[[RunDir, PreparedJob], Redraw] | None,
) -> list[PartCheck]:
    """Return the checks of everything but the signature.

    Args:
        certificate: The certificate.
        path: The directory of its run.
        choices: As for `check_certificate`.
        listener: As for `check_certificate`.
        execution: As for `check_certificate`.
        redraw_run: Draws samples again; None to skip this check.
    """
    with RunDir.open(path) as opened:
        job = load_job_of(opened, choices)
        model = locate_model(job) if "model" in choices else None
        recomputed = describe_run(opened, job, choices, listener, execution, model)
        checks = [*_compare_run(certificate, opened, job, recomputed, execution)]
        if "model" in choices:
            of_model = [*_compare_model(certificate, opened, job, listener, redraw_run)]
        else:
            of_model = [PartCheck(what, None, how) for what, how in _MODEL_PARTS.items()]
        if of_model[0].holds is False:  # the audit would read the tokenizer of another model
            checks.append(PartCheck("audit", None, _OTHER_MODEL))
        else:
            checks.append(_compare_audits(certificate, recomputed, has_model=model is not None))
        return checks + of_model


def _compare_run(
    certificate: Certificate,
    run: RunDir,
    job: Job,
    recomputed_part: RunPart,
    execution: ExecutionOptions | None,
) -> Iterator[PartCheck]:
    """Yield the checks that need no model.

    Args:
        certificate: The certificate.
        run: The run.
        job: The job of the run.
        recomputed_part: The parts of a certificate that treegen computes from the run now.
        execution: As for `check_certificate`.
    """
    recomputed, certified = (
        part.model_dump(mode="json") for part in (recomputed_part, certificate)
    )
    libraries = [values["task"].pop("libraries") for values in (certified, recomputed)]
    verdicts = [values["samples"].pop("verdicts") for values in (recomputed, certified)]
    done = recomputed_part.samples.num_samples
    for what, name, how in (
        ("settings", "run", f"{run.info.planned:,} samples planned"),
        ("data", "data", f"{recomputed_part.data.num_problems:,} problems"),
        ("task", "task", f"{job.task.name} {job.task.version}"),
    ):
        yield _compare(what, certified[name], recomputed[name], how)
    part_check = _compare(
        "samples", certified["samples"], recomputed["samples"], f"{done:,} samples"
    )
    if part_check.holds and run.missing > 0:
        planned = run.info.planned
        part_check = PartCheck(
            "samples", False, f"{run.missing:,} of {planned:,} samples are missing"
        )
    yield part_check
    recomputed_scores, scores = (
        {"verdicts": verdict, "report": values["report"]}
        for verdict, values in zip(verdicts, (recomputed, certified), strict=True)
    )
    how = f"{done:,} samples scored again, {len(recomputed['report']['metrics']):,} metrics"
    scored = _compare("scores", scores, recomputed_scores, how)
    changed = list_changed_scores(certified["report"], recomputed["report"])
    if changed:
        lines = [f"{name}: certified {a}, now {b}" for name, a, b in changed]
        total = sum(1 for _ in find_differences(scores, recomputed_scores))
        scored = replace(scored, detail=_join_first(lines, max(total, len(lines))))
    before, now = (_list_pass_hat_ks(part, job) for part in (certificate, recomputed_part))
    if before != now:
        command = f"treegen score {quote(str(run.path))} --pass-hat-k {before}"
        why = f"`{command}` gives the certified metrics"
        scored = replace(scored, detail=f"{scored.detail}; {why}")
    if job.task.executes_code and execution is None and scored.holds:
        how = "as the stored verdicts give; --allow-code-execution runs the programs again"
        scored = PartCheck("scores", None, how)
    yield scored
    yield _compare_stored_report(run, recomputed["report"])
    differences = list(find_differences(libraries[0], libraries[1]))
    if differences:
        versions = ", ".join(f"{name} {a} / {b}" for name, a, b in differences)
        yield PartCheck("libraries", None, f"other versions here: {versions}")


def _compare_stored_report(run: RunDir, report: dict[str, Any]) -> PartCheck:
    """Compare the report that treegen computes from a run now with that in `results.json`."""
    stored = stored_report(run)
    if stored is None:
        return PartCheck("results.json", False, "results.json has no scores")
    names = find_changed_report(run, report)
    changed = list_changed_scores(stored, report)
    lines = [f"{name}: stored {a}, now {b}" for name, a, b in changed] or names
    detail = _join_first(lines, max(len(names), len(lines))) or "the same scores"
    return PartCheck("results.json", not names, detail)


def _list_pass_hat_ks(part: RunPart, job: Job) -> str:
    """Return the value of --pass-hat-k that gives the metrics of a report."""
    metrics = part.report.get("metrics")
    rows = metrics if isinstance(metrics, list) else []
    names = {str(row.get("metric")) for row in rows if isinstance(row, Mapping)}
    ks = [str(k) for k in range(1, job.settings.num_samples + 1) if f"pass^{k}" in names]
    return ",".join(ks) or "none"


def _compare_audits(
    certificate: RunPart, recomputed_part: RunPart, *, has_model: bool
) -> PartCheck:
    """Return whether two audits are the same; without a model, apart from what needs its tokenizer.

    Args:
        certificate: The certificate.
        recomputed_part: The parts of a certificate that treegen computes from the run now.
        has_model: Whether the model was named.
    """
    certified, recomputed = (
        [
            finding.model_dump(mode="json")
            for finding in part.audit
            if has_model or finding.kind not in OF_TOKENIZERS
        ]
        for part in (certificate, recomputed_part)
    )
    high = sum(finding["severity"] == "high" for finding in recomputed)
    how = f"{len(recomputed):,} findings, {high:,} high"
    check = _compare("audit", {"audit": certified}, {"audit": recomputed}, how)
    before, now = certificate.audit_version or "another version", recomputed_part.audit_version
    if not check.holds and before != now:
        why = f"audited by treegen {before}, now {now}, whose rules may differ"
        check = replace(check, detail=f"{check.detail}; {why}")
    return check


def _compare_model(
    certificate: Certificate,
    run: RunDir,
    job: Job,
    listener: Listener,
    redraw_run: Callable[[RunDir, PreparedJob], Redraw] | None,
) -> Iterator[PartCheck]:
    """Yield the checks that need the model.

    Args:
        certificate: The certificate.
        run: The run.
        job: The job of the run, with the model to check.
        listener: Receives how long hashing takes.
        redraw_run: Draws samples again; None to skip this check.
    """
    certified = certificate.model.model_dump(mode="json")
    files = hash_model(job, listener)
    now = {
        kind: {name: file.model_dump(mode="json") for name, file in hashed.items()}
        for kind, hashed in files.items()
    }
    stored = {kind: certified[kind] for kind in now}
    size = format_bytes(sum(file.size for hashed in files.values() for file in hashed.values()))
    how = f"{len(files['files']):,} files"
    if files["adapter"]:
        how += f" and {len(files['adapter']):,} of the adapter {job.settings.engine.adapter}"
    checked = _compare("model", stored, now, f"{how}, {size}")
    try:
        check_model(run, job.settings.engine)
    except ModelError as error:
        checked = PartCheck("model", False, error.message.rename(_spell_option))
    yield checked
    if not checked.holds:  # tokenizers and weights are not loaded if others are expected
        yield from (PartCheck(what, None, _OTHER_MODEL) for what in [*_MODEL_PARTS][1:])
        return
    prepared = render_prompts(job)
    prompts = describe_prompts(prepared)
    how = f"{prompts.num_tokens:,} tokens, and the seeds of all samples"
    checked = _compare("prompts", certified["prompts"], prompts.model_dump(mode="json"), how)
    if checked.holds and (problem := find_foreign_samples(run, prepared)):
        checked = PartCheck("prompts", False, problem)
    yield checked
    if redraw_run is None:
        yield PartCheck("redraw", None, "--redraw 20 draws samples again")
    else:
        result = redraw_run(run, prepared)
        yield PartCheck("redraw", result.holds, str(result))
        if result.tolerance is not None and result.tolerance > result.default_tolerance:
            why = (
                f"WARNING: {result.tolerance:g} is larger than the default for this run, "
                f"{result.default_tolerance:g}, so forged samples may pass the redraw"
            )
            yield PartCheck("tolerance", None, why)


def _spell_option(reference: str) -> str:
    """Return the option for a parameter that a message refers to; see `treegen.errors.arg`."""
    return f"--{reference.rstrip('=').replace('_', '-')}"


def _compare(what: str, certified: object, recomputed: object, detail: str) -> PartCheck:
    """Return whether two JSON values are the same.

    Args:
        what: The name of the check.
        certified: The value in the certificate.
        recomputed: The value as it is now.
        detail: The text if they are the same.
    """
    changed = [
        f"{name}: certified {json.dumps(a)[:_MAX_CHARS]}, now {json.dumps(b)[:_MAX_CHARS]}"
        for name, a, b in find_differences(certified, recomputed)
    ]
    return PartCheck(what, not changed, _join_first(changed) or detail)


def _join_first(names: Sequence[str], total: int | None = None) -> str:
    """Return the first names, and how many more there are.

    Args:
        names: The names.
        total: Number of all names, if there are more than those given.
    """
    shown = names[:_MAX_NAMES]
    left = (len(names) if total is None else total) - len(shown)
    return "; ".join(shown) + (f"; and {left:,} more" if left else "")
