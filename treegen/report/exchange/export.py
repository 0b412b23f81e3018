"""`export_run`: a run, complete or not, in a format that other tools read."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Unpack, cast

from treegen.common.files import as_path
from treegen.common.formatting import replace_surrogates
from treegen.common.spelling import did_you_mean
from treegen.errors import InputError, RunError
from treegen.evals.config.base import OpenRunOptions
from treegen.evals.problem import list_references
from treegen.prompts.images.loading import describe_content
from treegen.prompts.tree import Message, Prompt, prompts_of
from treegen.report.certify.document import Certificate, load_own_certificate
from treegen.report.load import load_run
from treegen.report.run_settings import short_model_name
from treegen.report.view import ProblemView, RunView, StoredTree, settings_group
from treegen.runs.files import check_no_link, describe_write_error
from treegen.runs.record_format import Key


@dataclass(frozen=True)  # without slots, for cached_property
class ExportedRun:
    """A loaded run for export."""

    view: RunView
    """Its problems and scored samples."""
    records: Mapping[Key, Mapping[str, Any]]
    """The stored records by key."""
    prompts: Mapping[str, str | list[Message]] = field(default_factory=dict)
    """The whole prompt of each problem by id, as text or as chat messages with texts only; empty if
    the data of the run are not available, and for searches."""

    @cached_property
    def model(self) -> str:
        """The name of the model on the hub, or the last part of a path."""
        return short_model_name(str(self.view.info.free.get("model") or "unknown"))

    @cached_property
    def sampling(self) -> Mapping[str, Any]:
        """The sampling parameters, by the names of `SamplingParams`."""
        info = self.view.info
        return settings_group(info, "sampling") or settings_group(info, "draw")

    @cached_property
    def task_args(self) -> dict[str, str]:
        """The arguments of the task (`-T`); empty for an imported log, which has none."""
        arguments = self.view.info.free.get("extra")
        if "imported" in self.view.info.identity or not isinstance(arguments, Mapping):
            return {}
        return {
            replace_surrogates(str(name)): replace_surrogates(str(value))
            for name, value in arguments.items()
        }

    @cached_property
    def system_instruction(self) -> str | None:
        """The system text, in characters that files can store; None without one."""
        text = settings_group(self.view.info, "prompt").get("system_instruction")
        return replace_surrogates(str(text)) if text else None

    @cached_property
    def version(self) -> str:
        """The version of the task."""
        return str(settings_group(self.view.info, "task").get("version", ""))

    @cached_property
    def fields(self) -> Mapping[str, Mapping[str, Any]]:
        """The line of each problem in the data file by id, if the task keeps it."""
        job = self.view.job
        if job is None:
            return {}
        return {
            problem.id: json.loads(
                replace_surrogates(
                    json.dumps(problem.fields, default=_describe_value, ensure_ascii=False)
                )
            )
            for problem in job.data.problems
            if problem.fields
        }

    @cached_property
    def trees(self) -> Mapping[Key, StoredTree]:
        """The trees of a search run, by (problem, repeat); empty for other runs."""
        return {(tree.problem_id, tree.repeat): tree for tree in self.view.trees}

    @cached_property
    def certificate(self) -> Certificate | None:
        """The certificate in the run's directory; None without one of these samples."""
        return None if self.view.searched else load_own_certificate(self.view.path)

    def digest(self, what: str) -> bytes:
        """Return a hash that identifies this run's export, the same each time."""
        content = f"{self.view.info.fingerprint} {self.view.info.created} {what}"
        return hashlib.sha256(content.encode()).digest()


def read_full_run(path: Path, **options: Unpack[OpenRunOptions]) -> ExportedRun:
    """Read a run for export.

    Args:
        path: The directory of the run.
        options: See `treegen.evals.config.base.OpenRunOptions`.

    Raises:
        RunError: there is no run, it is corrupt, or has no sample yet.
        InputError: `data` or `task` are not the problems or the task of the run.
    """
    view = load_run(path, **options)
    records = view.read_records()
    for (problem_id, index), row in records.items():
        try:
            datetime.fromisoformat(row.get("time") or view.info.created)
        except ValueError as error:
            raise RunError(
                f"{path}: the time of sample {index} of problem {problem_id!r:.60} cannot be "
                f"read ({error}); restore the file from a copy"
            ) from None
    if not view.num_done:
        raise RunError(
            f"the run {path} has no finished {view.unit} to export; wait for the run, or resume "
            "the run"
        )
    prompts = {} if view.tree is None else {p.id: _join_prompt(p) for p in prompts_of(view.tree)}
    return ExportedRun(view, records, prompts)


def _join_prompt(prompt: Prompt) -> str | list[Message]:
    """Return a prompt as messages if it has some, else as text with token ids as numbers.

    The messages have the names of images in place of the images.
    """
    if any(node.has_messages for node in prompt.path):
        messages = cast("list[Message]", [m for node in prompt.path for m in node.content])
        return [{**m, "content": describe_content(m.get("content"))} for m in messages]
    parts = (node.content for node in prompt.path if node.content)
    return "".join(part if isinstance(part, str) else f"{list(part)}" for part in parts)


def _describe_value(value: object) -> str:
    """Return a value of a data file that JSON lacks, such as a date, as text."""
    return f"{len(value):,} bytes" if isinstance(value, bytes) else str(value)


def export_references(problem: ProblemView) -> list[str]:
    """Return the right answers of a problem, in characters that files can store."""
    return [replace_surrogates(answer) for answer in list_references(problem.answer)]


def plain_text(prompt: str | list[Message]) -> str:
    """Return a prompt as one text; messages begin with their role."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{turn.get('role')}: {turn['content']}" for turn in prompt)


# Name -> the module whose `write` makes it, and the default `path` of its files below the run.
_WRITERS: Final = {
    "inspect": ("treegen.report.exchange.to_inspect", "{name}.eval"),
    "every-eval-ever": ("treegen.report.exchange.to_every_eval_ever", "every-eval-ever"),
    "lm-eval": ("treegen.report.exchange.to_lm_eval", "lm-eval"),
    "parquet": ("treegen.report.exchange.to_parquet", "parquet"),
}
FORMATS: Final = tuple(_WRITERS)
_PANDAS_FORMATS: Final = ("csv", "tsv")


def suggest_frames(to: str, run: str | os.PathLike[str]) -> str:
    """Return how pandas writes a format; empty if `treegen.open_run` does not help.

    Args:
        to: The name of the format.
        run: The run.
    """
    if to.lower() not in _PANDAS_FORMATS:
        return ""
    code = f"treegen.open_run({os.fspath(run)!r}).samples().to_csv('samples.csv')"
    return f"; for CSV, run this in Python (extra pandas): {code}"


def export_run(
    run: str | os.PathLike[str],
    to: str,
    path: str | os.PathLike[str] | None = None,
    **options: Unpack[OpenRunOptions],
) -> list[Path]:
    """Write a run in another format and return the files.

    Args:
        run: Its directory. The run may be in progress; then its finished samples are written.
        to: "inspect" (a log of Inspect AI, one `.eval` file), "every-eval-ever" (the shared schema
            of that name), "lm-eval" (results and samples as lm-evaluation-harness writes them), or
            "parquet" (tables of samples, problems, metrics and search nodes).
        path: The file of "inspect", for the others a folder; by default within the run.
        options: data=, task= and allow_task_code=, as for `treegen.open_run`.

    Raises:
        RunError: there is no run, it is corrupt or has no sample, a file cannot be written, or a
            symbolic link leads from the default path out of the run.
        InputError: the format is not known, the run has no content for it, a package is not
            installed, or `data` or `task` are not the run's problems or task.
    """
    return export_with_notices(run, to, path, **options)[0]


def export_with_notices(
    run: str | os.PathLike[str],
    to: str,
    path: str | os.PathLike[str] | None = None,
    **options: Unpack[OpenRunOptions],
) -> tuple[list[Path], Sequence[str]]:
    """Write a run as `export_run` does; return the files, and what the run lacks.

    Args:
        run: See `export_run`.
        to: See `export_run`.
        path: See `export_run`.
        options: See `export_run`.
    """
    directory = as_path("run", run)
    if not isinstance(to, str) or to not in _WRITERS:
        hint = did_you_mean(str(to), FORMATS) or f"; known: {', '.join(FORMATS)}"
        raise InputError(f"there is no format {to!r:.60}{hint}{suggest_frames(str(to), run)}")
    target = None if path is None else as_path("path", path)
    full_run = read_full_run(directory, **options)
    module, default = _WRITERS[to]
    write: Callable[[ExportedRun, Path], list[Path]] = import_module(module).write
    if target is None:
        target = directory / default.format(name=full_run.view.name)
        earlier = (path for path in target.rglob("*") if path.is_dir())  # files are replaced
        for folder in (target, *earlier):
            check_no_link(directory, folder)
    try:
        return write(full_run, target), full_run.view.notices
    except OSError as error:
        raise RunError(describe_write_error(error.filename or target, error)) from error
