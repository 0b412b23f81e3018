"""Storage of judgements: a folder for each judge run, in the folder `judged` of a run.

    judged/NAME/judging.json       the rubric, the judge, and how verdicts were obtained
    judged/NAME/judgements.jsonl   replies of the judge, one line each, appended as they arrive

Lines hold texts and log-probabilities but no scores, so a judge run can be scored again without
its model.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

from treegen.errors import RunError
from treegen.evals.judging.rubric import Rubric
from treegen.evals.judging.settings import JudgeRun, JudgeSettings
from treegen.evals.thinking import get_answer_text
from treegen.runs import RecordFile, RunDir, open_for_append
from treegen.runs.files import check_no_link, format_os_error, read_json, write_json

FOLDER: Final = "judged"
FILE: Final = "judgements.jsonl"
_INFO: Final = "judging.json"
TOO_LONG: Final = "too_long"
"""The field of a line whose prompt is too long for the judge, so that the judge did not run."""

Slot = tuple[tuple[tuple[int, int], ...], int, int, int]
"""The key of a judgement within a problem: answers, wording, criterion and repeat.

The answers are (run, sample) pairs in the order in which the prompt shows them.
"""


def begin(
    run: RunDir, compared: Sequence[RunDir], judge: str, fingerprint: str, settings: JudgeSettings
) -> JudgeRun:
    """Create the folder of a judge run, or find the existing one, and store its settings.

    Args:
        run: The run in whose directory the judgements are stored.
        compared: Further runs, whose answers are compared with those of `run`.
        judge: Directory or name of the judge.
        fingerprint: Hash of the judge's weights.
        settings: Settings of judging.

    Returns:
        The judge run, named like its folder.

    Raises:
        RunError: the folder cannot be made or written.
    """
    runs = tuple(_run_to_json(one) for one in (run, *compared))
    identity = {
        **settings.identity(),
        "fingerprint": fingerprint,
        "runs": [one["fingerprint"] + one["created"] for one in runs],
    }
    words = (settings.rubric.name, Path(judge).name or judge, _hash(identity))
    name = "-".join(re.sub(r"[^\w.]+", "_", word)[:40].strip("._") or "_" for word in words)
    judging = JudgeRun(
        name, judge, fingerprint, settings, runs, mark=f"ANSWER_{_hash(identity['runs'])}"
    )
    folder = run.path / FOLDER / name
    check_no_link(run.path, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"cannot create the folder {folder}: {format_os_error(error)}; check the "
            "permissions of the parent folder"
        ) from error
    info = folder / _INFO
    if not info.exists() or read_json(info) != judging.to_json():
        write_json(info, judging.to_json())
    return judging


def read_judgings(path: Path) -> list[JudgeRun]:
    """Return the judge runs of the run in a directory, sorted by name.

    Raises:
        RunError: a file is corrupt.
    """
    judgings = []
    for info in sorted((path / FOLDER).glob(f"*/{_INFO}")):
        try:
            judgings.append(JudgeRun.of_json(info.parent.name, read_json(info)))
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{info} is corrupt ({error}); restore it from a copy") from None
    return judgings


def read_records(path: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of a judge run, each once, in the order in which they were stored.

    Args:
        path: Directory of the run.
        name: Name of the judge run.

    Yields:
        Judgements as they are stored.
    """
    file = path / FOLDER / name / FILE
    if file.exists():
        with closing(RecordFile(file, writable=False)) as records:
            yield from records.records()


def get_slot(record: Mapping[str, Any]) -> Slot:
    """Return the slot of a line.

    Raises:
        RunError: the line is corrupt.
    """
    try:
        answers = tuple((int(run), int(index)) for run, index in record["answers"])
        return answers, int(record["wording"]), int(record["criterion"]), int(record["repeat"])
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"a line of {FILE} has no valid answers, wording, criterion and repeat ({error}); "
            "remove the line"
        ) from None


def read_verdict(record: Mapping[str, Any], rubric: Rubric) -> str | None:
    """Return the verdict in the text of a line, after its reasoning; None if it is unreadable."""
    return None if record.get(TOO_LONG) else rubric.read(get_answer_text(record))


class JudgementFile:
    """The lines of a judge run, open for appending; each slot of a problem has at most one line."""

    def __init__(self, file: RecordFile, rubric: Rubric) -> None:
        self._file = file
        self.done: dict[tuple[str, Slot], str] = {}
        """The hash of the prompt of each stored judgement, by (problem, slot)."""
        self.verdicts: dict[tuple[str, Slot], str | None] = {}
        """The verdict in each text that was stored on opening, by (problem, slot)."""
        self._next_indices = file.next_indices()
        for record in file.records():
            key = record["problem_id"], get_slot(record)
            self.done[key] = str(record["prompt_hash"])
            if "text" in record:
                self.verdicts[key] = read_verdict(record, rubric)

    @property
    def notices(self) -> tuple[str, ...]:
        """Messages about damage at the end of the file that was repaired."""
        return tuple(self._file.notices)

    def add(self, problem_id: str, slot: Slot, fields: Mapping[str, Any]) -> None:
        """Append the judgement of a slot.

        Args:
            problem_id: The problem of the judged answers.
            slot: Answers, wording, criterion and repeat.
            fields: Further fields of the line, `prompt_hash` among them.

        Raises:
            RunError: the slot already has a judgement.
        """
        if (problem_id, slot) in self.done:
            raise RunError(f"a judgement of problem {problem_id!r} is already stored for {slot}")
        answers, wording, criterion, repeat = slot
        self._file.append(
            {
                "problem_id": problem_id,
                "sample_index": self._next_indices[problem_id],
                "answers": [list(answer) for answer in answers],
                "wording": wording,
                "criterion": criterion,
                "repeat": repeat,
                **fields,
            }
        )
        self._next_indices[problem_id] += 1
        self.done[problem_id, slot] = str(fields["prompt_hash"])

    def sync(self) -> None:
        """Flush all lines to disk, so that they survive a power failure."""
        self._file.sync()


@contextmanager
def open_judgements(path: Path, judging: JudgeRun) -> Iterator[JudgementFile]:
    """Open the lines of a judge run for appending, locked against other processes.

    Args:
        path: Directory of the run.
        judging: The judge run.

    Yields:
        The open file.

    Raises:
        RunError: another process has it open, or the file is corrupt or cannot be written.
    """
    with open_for_append(path / FOLDER / judging.name / FILE, "judging.lock") as file:
        yield JudgementFile(file, judging.settings.rubric)


def _hash(content: object) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _run_to_json(run: RunDir) -> dict[str, str]:
    return {
        "path": str(run.path),
        "fingerprint": str(run.info.fingerprint),
        "created": str(run.info.created),
    }
