"""Makes the certificate of a finished run."""

import hashlib
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any, Final

from treegen.common.files import open_regular, read_bytes, replace_file
from treegen.common.formatting import format_bytes
from treegen.errors import InputError, ModelError, RunError, arg
from treegen.evals.config.eval_settings import recall_choices
from treegen.evals.identity import computed_on, load_stored_job
from treegen.evals.job import Job, PreparedJob, prepare_job
from treegen.evals.model import check_machine, load_model_info
from treegen.evals.pipeline.listener import Listener
from treegen.evals.pipeline.program_scoring import check_execution_options, rescore_programs
from treegen.evals.pipeline.redraw import check_model
from treegen.evals.scoring.code_execution import ExecutionOptions
from treegen.evals.scoring.samples import aggregate, rounds_of, score_samples
from treegen.evals.scoring.verdict_cache import library_versions
from treegen.evals.scoring.vote_tables import VoteInputs
from treegen.evals.verdict import SampleScore
from treegen.report.audit.audit import audit_run
from treegen.report.certify import document
from treegen.report.certify.signature import HEADER, sign, signature_path
from treegen.report.changed_scores import list_changed_scores
from treegen.report.run_settings import short_model_name
from treegen.runs import RunDir, versions
from treegen.runs.files import check_no_link, describe_write_error, format_os_error, parse_json
from treegen.runs.settings import to_json

_CHUNK_BYTES: Final = 1 << 22
# Engine options that fit a run to a machine. They have no effect on samples beyond rounding.
_MACHINE_OPTIONS: Final[dict[str, Any]] = dict.fromkeys(
    ["memory", "page_size", "max_rows", "prefill_chunk", "speculate", "draft_model", "draft_tokens"]
)


def certify_run(
    path: Path,
    choices: Mapping[str, Any],
    listener: Listener,
    execution: ExecutionOptions | None = None,
) -> document.Certificate:
    """Return the certificate of a finished run.

    All samples are scored again, and all files of the model are hashed in full.

    Args:
        path: The directory of the run.
        choices: Where the problems are, as for `treegen.open_run`, and options of the model whose
            places have changed, by their names.
        listener: Receives messages.
        execution: Permission to run programs that the model wrote.

    Raises:
        RunError: there is no run, or it is corrupt.
        InputError: the run is not complete, has other scores or prompts than those computed now, or
            was imported or has early stopping; or its data are not the ones named.
        ModelError: the model cannot be read, or is not that of the run.
    """
    with RunDir.open(path) as run:
        job = load_job_of(run, choices)
        if run.missing > 0:
            raise InputError(
                f"{run.missing:,} of {run.info.planned:,} samples of the run {path} are "
                f"missing; finish the run with {arg('resume', str(path))} first"
            )
        try:
            model_path = locate_model(job)
        except ModelError as error:
            if "model" in choices:
                raise
            raise ModelError(
                f"{error.message.marked}, or pass the path of the model as {arg('model=')}"
            ) from None
        check_model(run, job.settings.engine)  # before all samples are scored
        part = describe_run(run, job, choices, listener, execution, model_path)
        if (stored := stored_report(run)) is None:
            raise InputError(
                f"{path}/results.json has no scores; run `treegen score {quote(str(path))}` first"
            )
        if find_changed_report(run, part.report):
            changed = list_changed_scores(stored, part.report)
            which = "".join(f" ({name} {a}, now {b})" for name, a, b in changed[:1])
            raise InputError(
                f"the scores in {path}/results.json differ from the scores that treegen "
                f"computes now{which}; if neither the task, the data nor treegen has changed, "
                f"{path}/samples.jsonl has: compare it with a copy; otherwise run "
                f"`treegen score {quote(str(path))}` first"
            )
        hashed, prepared = hash_model(job, listener), render_prompts(job)
        if problem := find_foreign_samples(run, prepared):
            raise InputError(
                f"{path}: {problem}; use the same model and treegen version as the run"
            )
    model = document.CertifiedModel(**hashed, prompts=describe_prompts(prepared))
    return document.Certificate(**dict(part), model=model)


def load_job_of(run: RunDir, choices: Mapping[str, Any]) -> Job:
    """Return the job of a run, without settings that only made it faster on its machine.

    Args:
        run: The run.
        choices: As for `certify_run`.

    Raises:
        InputError: the run was imported or has early stopping, or its data or task cannot be read.
    """
    if "imported" in run.info.identity:
        raise InputError(
            f"the run {run.path} was imported from the log of another tool, and the log does "
            "not record how the samples were drawn; certify a run that treegen sampled"
        )
    job = load_stored_job(choices, run)
    if job.settings.in_rounds:
        raise InputError(
            f"the run {run.path} used early stopping, so treegen cannot draw single samples "
            "again; certify a run without early stopping"
        )
    engine = replace(job.settings.engine, **_MACHINE_OPTIONS)
    return replace(job, settings=replace(job.settings, engine=engine))


def describe_run(
    run: RunDir,
    job: Job,
    choices: Mapping[str, Any],
    listener: Listener,
    execution: ExecutionOptions | None,
    model: Path | None = None,
) -> document.RunPart:
    """Return the parts of a certificate that need no weights; every sample is scored again.

    Args:
        run: The run.
        job: The job of the run.
        choices: As for `certify_run`.
        listener: Receives messages.
        execution: As for `certify_run`. Without it, programs keep their stored verdicts.
        model: The directory of the model, whose tokenizer the audit reads; None if it is not known.
    """
    info, task = run.info, job.task
    report, samples = _score(run, job, listener, execution)
    reading = {n: v for n, v in choices.items() if n in ("data", "task", "allow_task_code")}
    names = document.CertifiedFinding.model_fields
    audit = audit_run(run.path, model=model, **reading)
    return document.RunPart(
        run=document.CertifiedRun(
            created=info.created,
            fingerprint=info.fingerprint,
            planned=info.planned,
            resumes=len(info.resumes),
            model=short_model_name(str(recall_choices(run).get("model") or "")),
            settings=_to_json_value(info.identity),
            versions=_to_json_value(info.versions),
            computed_on=computed_on(info),
            run_json=document.hash_value(to_json(info)),
        ),
        task=document.CertifiedTask(
            name=task.name,
            version=task.version,
            filters=list(task.filters),
            arguments={name: str(value) for name, value in job.settings.options.extra.items()},
            libraries=library_versions(),
        ),
        data=document.CertifiedData(
            problems=document.hash_value(
                [[p.content, dict(p.metadata), p.group] for p in job.data.problems]
            ),
            num_problems=len(job.data.problems),
            examples=document.hash_value(job.data.examples),
            skipped=len(job.data.skipped),
        ),
        samples=samples,
        report=report,
        audit=[
            document.CertifiedFinding(**{name: getattr(finding, name) for name in names})
            for finding in audit.findings
        ],
        audit_version=versions()["treegen"],
    )


def _score(
    run: RunDir, job: Job, listener: Listener, execution: ExecutionOptions | None
) -> tuple[dict[str, Any], document.CertifiedSamples]:
    """Score all samples again; return the report, and the hashes of samples and verdicts."""
    check_execution_options([job.task], execution)
    scores: list[SampleScore] = []

    def collect(record: dict[str, Any], score: SampleScore | None) -> None:
        if score is not None:
            scores.append(score)

    rounds = rounds_of(job)
    with ExitStack() as stack:
        programs = rescore_programs(job, run, execution, listener, stack)
        score_samples(job, run, collect, program_scoring=programs, rounds=rounds, rescore=True)
    report = _to_json_value(aggregate(job, scores, rounds, VoteInputs.of(run.path)).to_json())
    verdicts = sorted(
        [
            s.problem_id,
            s.sample_index,
            [
                {name: [v.correct, v.credit] for name, v in verdicts.items()}
                for verdicts in (s.verdicts, s.by_length)
            ],
        ]
        for s in scores
    )
    return report, document.CertifiedSamples(
        samples_jsonl=run.digest(),
        num_samples=len(run.done),
        num_tokens=sum(score.num_tokens for score in scores),
        verdicts=document.hash_value(verdicts),
    )


def _to_json_value(value: object) -> Any:
    """Return a value as JSON would return it."""
    return parse_json(document.canonical(value).decode("ascii"))


def stored_report(run: RunDir) -> Any:
    """Return the report in results.json; None if there is none."""
    results = run.results()
    return results.get("report") if isinstance(results, dict) else None


def find_changed_report(run: RunDir, report: dict[str, Any]) -> list[str]:
    """Return the names of values in the stored report that differ from those of a report."""
    return [name for name, _, _ in document.find_differences(report, stored_report(run))]


def locate_model(job: Job) -> Path:
    """Return the directory or the GGUF file of a job's model.

    Raises:
        ModelError: there is no such model.
    """
    from treegen.model.checkpoint.files import locate

    return locate(job.settings.engine.model, job.settings.engine.revision, weights=True)


def hash_model(job: Job, listener: Listener) -> dict[str, dict[str, document.HashedFile]]:
    """Return the hashes of the files of a job's model and of its adapter, each read in full.

    Args:
        job: The job.
        listener: Receives how long hashing takes.

    Raises:
        ModelError: the model cannot be read.
    """
    from treegen.model.checkpoint.adapter import find_adapter
    from treegen.model.checkpoint.files import check_weights

    engine, start = job.settings.engine, time.monotonic()
    check_weights(directory := locate_model(job))
    adapter = None if engine.adapter is None else find_adapter(engine.adapter).directory
    hashed = {
        "files": _hash_files(directory),
        "adapter": {} if adapter is None else _hash_files(adapter),
    }
    sizes = [file.size for files in hashed.values() for file in files.values()]
    listener.tell(
        f"hashed {len(sizes):,} files of {engine.model}, {format_bytes(sum(sizes))}, in "
        f"{time.monotonic() - start:.1f} s"
    )
    return hashed


def render_prompts(job: Job) -> PreparedJob:
    """Return a job with the token ids of its prompts, without loading weights."""
    engine = job.settings.engine
    check_machine(engine)
    return prepare_job(job, load_model_info(engine))


def describe_prompts(prepared: PreparedJob) -> document.CertifiedPrompts:
    """Return the hashes of the token ids of prompts, and of the chat template."""
    digest, num_tokens = hashlib.sha256(), 0
    for name, parts in _list_prompt_tokens(prepared).items():
        num_tokens += sum(map(len, parts))
        hashes = [hashlib.sha256(part.astype("<i4").tobytes()).hexdigest() for part in parts]
        digest.update(document.canonical([name, hashes]) + b"\n")
    is_chat = prepared.job.settings.apply_chat_template
    template = prepared.model_info.tokenizer.chat_template if is_chat else None
    return document.CertifiedPrompts(
        token_ids=digest.hexdigest(),
        num_tokens=num_tokens,
        chat_template=None if template is None else document.hash_value(template),
    )


def _hash_files(directory: Path) -> dict[str, document.HashedFile]:
    """Return the hash of each file of a model, by its name."""
    from treegen.model.checkpoint.files import list_model_files

    hashed = {}
    for path in list_model_files(directory):
        digest, size = hashlib.sha256(), 0
        with open(open_regular(path), "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
        hashed[path.name] = document.HashedFile(size=size, sha256=digest.hexdigest())
    return hashed


def _list_prompt_tokens(prepared: PreparedJob) -> dict[str, list[Any]]:
    """Return the token ids of each prompt, and those of its choices if it has any, by problem."""
    if prepared.job.choices:
        prompts = prepared.choice_prompts
        return {prompt.id: [prompt.context, *prompt.sequences] for prompt in prompts}
    return {request.id: [request.tokens] for request in prepared.plan.requests}


def find_foreign_samples(run: RunDir, prepared: PreparedJob) -> str:
    """Return what is wrong with the prompts and seeds of the stored samples; empty if nothing is.

    Seeds follow from the seed of the run, so samples cannot be picked among many draws.

    Args:
        run: The run.
        prepared: Its job, with the prompts as they are rendered now.
    """
    from treegen.prompts.plan.draws import sample_seed

    hashes = {
        name: hashlib.blake2b(parts[0].astype("<i4").tobytes(), digest_size=16).hexdigest()
        for name, parts in _list_prompt_tokens(prepared).items()
    }
    requests = prepared.pair_requests()
    num_prompts = num_seeds = 0
    for record in run.records():
        name, index = record["problem_id"], record["sample_index"]
        num_prompts += record.get("prompt_hash") != hashes[name]
        if name in requests:
            request, params = requests[name]
            num_seeds += record.get("seed") != sample_seed(params.seed, request, index)
    if num_prompts:
        return f"the prompts of {num_prompts:,} samples differ from those that treegen renders now"
    return f"the seeds of {num_seeds:,} samples differ from those of the run" if num_seeds else ""


def _check_output(path: Path) -> None:
    """Raise InputError unless a certificate can be written to a path without loss of other data."""
    if os.path.isdir(path) or not os.path.isdir(path.parent):
        raise InputError(
            f"the certificate path {path} must be a file in an existing directory; choose "
            "another path"
        )
    if os.path.lexists(path):
        try:
            document.read_certificate(path)
        except InputError:
            why = "exists and is not a certificate; remove the file, or choose another path"
            raise InputError(f"{path} {why}") from None


def _check_signature(signature: Path) -> None:
    """Raise InputError if signing would overwrite a file that is not a signature."""
    if not os.path.lexists(signature):
        return
    try:
        with open(open_regular(signature), "rb") as file:
            begin = file.read(len(HEADER))
    except OSError as error:
        raise RunError(f"cannot read {signature}: {format_os_error(error)}") from error
    if begin != HEADER:
        raise InputError(
            f"{signature} exists and is not a signature; remove the file, or choose another path "
            "for the certificate"
        )


def write_certificate(
    run: Path,
    choices: Mapping[str, Any],
    listener: Listener,
    *,
    path: Path | None = None,
    key: Path | None = None,
    execution: ExecutionOptions | None = None,
) -> tuple[Path, document.Certificate]:
    """Certify a run, write the certificate and sign it; return its file and the certificate.

    Args:
        run: The directory of the run.
        choices: As for `certify_run`.
        listener: Receives messages.
        path: The file, which is new or a certificate. Default: certificate.json in the run.
        key: The key to sign with; see `treegen.report.certify.signature.sign`. None does not sign.
        execution: As for `certify_run`.

    Raises:
        RunError: as `certify_run`, or a file cannot be written.
        InputError: as `certify_run`, or the file is no place for a certificate, or the certificate
            cannot be signed, or is not to be signed and has a signature that would no longer hold.
    """
    if path is None:
        check_no_link(run, path := run / document.FILE)
    else:
        _check_output(path)
    signature = signature_path(path)
    if key is not None:
        _check_signature(signature)
    certificate = certify_run(run, choices, listener, execution)
    content = certificate.content()
    signed = None if key is None else sign(content, key)
    try:
        if signed is None and os.path.lexists(signature) and read_bytes(path) != content:
            raise InputError(
                f"the signature file {signature} belongs to another certificate; remove the "
                f"file, or sign again with {arg('sign=')}"
            )
        for file, data in ((path, content), (signature, signed)):
            if data is not None:
                with replace_file(file) as out:
                    out.write(data)
    except OSError as error:
        raise RunError(describe_write_error(path, error)) from error
    return path, certificate
