"""A run as exports take it, complete or not: its scored samples, and its prompts as text."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

from treegen.errors import RunError
from treegen.evals.config.base import OpenRunOptions
from treegen.prompts.images.loading import describe_content
from treegen.prompts.tree import Message, Prompt, prompts_of
from treegen.report.load import load_run
from treegen.report.view import RunView
from treegen.runs import RunDir, SearchRunDir
from treegen.runs.record_lines import Key


@dataclass(frozen=True)  # without slots, for cached_property
class ExportedRun:
    """A loaded run for export."""

    view: RunView
    """Its problems and scored samples."""
    records: Mapping[Key, Mapping[str, Any]]
    """The stored records by key."""
    prompts: Mapping[str, str | list[Message]] = field(default_factory=dict)
    """The whole prompt of each problem by id, as text or as chat messages; empty if the data of the
    run are not available, and for searches."""

    @cached_property
    def model(self) -> str:
        """The name of the model: the last part of a directory's path."""
        model = str(self.view.info.free.get("model") or "unknown")
        return Path(model).name if Path(model).is_absolute() else model

    @cached_property
    def sampling(self) -> Mapping[str, Any]:
        """The sampling parameters, by the names of `SamplingParams`."""
        identity = self.view.info.identity
        sampling: Mapping[str, Any] = identity.get("sampling") or identity.get("draw") or {}
        return sampling

    @cached_property
    def version(self) -> str:
        """The version of the task."""
        task = self.view.info.identity.get("task")
        return str(task.get("version", "")) if isinstance(task, Mapping) else ""

    def digest(self, what: str) -> bytes:
        """Return a hash that identifies this run's export, the same each time."""
        content = f"{self.view.info.fingerprint} {self.view.info.created} {what}"
        return hashlib.sha256(content.encode()).digest()


def read_whole(path: Path, **asked: Unpack[OpenRunOptions]) -> ExportedRun:
    """Read a run for export.

    Args:
        path: The directory of the run.
        asked: See `treegen.evals.config.base.OpenRunOptions`.

    Raises:
        RunError: there is no run, it is damaged, or has no sample yet.
        InputError: `data` or `task` are not the problems or the task of the run.
    """
    view = load_run(path, **asked)
    with (SearchRunDir if view.searched else RunDir).open(path) as run:
        records = {(row["problem_id"], row["sample_index"]): row for row in run.records()}
    for (problem_id, index), row in records.items():
        try:
            datetime.fromisoformat(row.get("time") or view.info.created)
        except ValueError as error:
            raise RunError(
                f"the time of problem {problem_id!r:.60}, sample {index}, in {path} is damaged "
                f"({error}); restore the file"
            ) from None
    if not view.num_done:
        raise RunError(
            f"{path} has no finished {view.unit} yet, so nothing is exported; wait, or resume it"
        )
    prompts = {} if view.tree is None else {p.id: _content(p) for p in prompts_of(view.tree)}
    return ExportedRun(view, records, prompts)


def _content(prompt: Prompt) -> str | list[Message]:
    """Return a prompt as messages if it has some, else as text with token ids as numbers."""
    if any(node.has_messages for node in prompt.path):
        return [message for node in prompt.path for message in node.content]  # type: ignore[misc]
    parts = (node.content for node in prompt.path if node.content)
    return "".join(part if isinstance(part, str) else f"{list(part)}" for part in parts)


def plain_text(prompt: str | list[Message]) -> str:
    """Return a prompt as one text; messages begin with their role."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(
        f"{turn.get('role')}: {describe_content(turn.get('content'))}" for turn in prompt
    )
