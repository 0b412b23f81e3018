"""Verifier scores of the samples of a run, stored in the run directory for votes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from treegen.errors import InputError
from treegen.evals.scoring.vote_tables import SCORES
from treegen.evals.thinking import get_answer_text
from treegen.runs import RunDir, open_for_append

if TYPE_CHECKING:
    from treegen.evals.job import Job
    from treegen.model.scorers.verifier import Verifier

_AT_ONCE = 256  # samples of a batch; `stop` is polled between batches


def score_with_verifier(
    job: Job,
    run: RunDir,
    verifier: Verifier,
    by: dict[str, Any],
    *,
    stop: Callable[[], object] = lambda: None,
) -> Iterator[tuple[int, int]]:
    """Score every sample without a score, and store the scores.

    The verifier scores the answer of a sample, without its reasoning. Each line also has the value
    of each step.

    Args:
        job: The job of the run.
        run: The run, open for reading.
        verifier: The verifier.
        by: Identifies the verifier. The file must have no scores by another one, or by the user.
        stop: Polled before each batch; once it returns a true value, the iteration ends.

    Yields:
        (scored samples, all samples) after every batch.

    Raises:
        InputError: the file has scores by something else, or a text is too long for the verifier.
        RunError: the scores cannot be written.
    """
    questions = {problem.id: problem.question for problem in job.data.problems}
    records = [(r["problem_id"], r["sample_index"], get_answer_text(r)) for r in run.records()]
    path = run.path / SCORES
    with open_for_append(path, "scores.lock") as file:
        if any(row.get("by") != by for row in file.records()):
            raise InputError(f"{path} has scores by something else; move it away to score anew")
        left = [record for record in records if record[:2] not in file.keys]
        yield len(records) - len(left), len(records)
        for start in range(0, len(left), _AT_ONCE):
            if stop():
                return
            part = left[start : start + _AT_ONCE]
            values = verifier.values([(questions[key], text) for key, _, text in part])
            for (problem_id, index, _), steps in zip(part, values, strict=True):
                score = verifier.reduce_steps(steps)
                file.append(
                    {
                        "problem_id": problem_id,
                        "sample_index": index,
                        "score": score,
                        "steps": steps,
                        "by": by,
                    }
                )
            yield len(records) - len(left) + start + len(part), len(records)
