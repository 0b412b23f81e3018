"""Store the samples of a run as they end, with verdicts and usage, and copies of its images."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treegen.errors import InputError
from treegen.evals.job import Job
from treegen.evals.progress.run_progress import AccuracyCounter
from treegen.evals.progress.usage import UsageLog
from treegen.evals.scoring.code_execution import ProgramScoring
from treegen.evals.scoring.run_verdicts import RunVerdicts
from treegen.evals.scoring.samples import restore_rounds
from treegen.runs import RunDir
from treegen.runs.images import RunImage, RunImages, keep_images

if TYPE_CHECKING:
    from treegen.prompts.images.table import ImageTable


class SampleRecorder:
    """Stores the samples of a run as they end, scores each, and counts the right ones.

    Attributes:
        run: The run.
        usage_log: The usage of the run.
        rounds: Early stopping, which receives every sample; None without it.
        tally: The accuracy so far; None if samples are not scored during sampling.
    """

    def __init__(
        self,
        job: Job,
        run: RunDir,
        program_scoring: ProgramScoring | None = None,
        verdicts: RunVerdicts | None = None,
    ) -> None:
        """Read the stored samples of the run.

        Args:
            job: The job of the run.
            run: The run, open for writing.
            program_scoring: Scores the samples if they are programs.
            verdicts: The verdicts on the stored samples that are known.
        """
        self.run = run
        self._job, self._program_scoring = job, program_scoring
        self._headline = job.task.filters[0]
        self._verdicts: RunVerdicts | None = None
        if job.settings.score and not job.task.executes_code:
            self._verdicts = verdicts or RunVerdicts(job)
        self.usage_log = UsageLog(run)
        self.rounds = restore_rounds(job, run, self._verdicts)
        self._counter = AccuracyCounter(job.data.problems)
        self.tally = self._counter if self._verdicts else program_scoring
        if self._verdicts:
            for record, by_filter in self._verdicts.read_stored(run):
                self._counter.count(record["problem_id"], by_filter[self._headline].correct)
        elif program_scoring:
            for record in run.records():
                program_scoring.add(record)

    def add(self, record: dict[str, Any]) -> None:
        """Store a finished sample, and score it."""
        self._job.annotate_record(record)
        answer = None
        if self._verdicts is None:
            self.run.append(record)
        else:
            verdict = self._verdicts.append(self.run, record)[self._headline]
            self._counter.count(record["problem_id"], verdict.correct)
            answer = verdict.answer
        self.usage_log.count()
        if self._program_scoring:
            self._program_scoring.add(record)
        if self.rounds:
            self.rounds.add(record, answer)

    def close(self) -> None:
        """Keep the verdicts of a run that is not finished, for the call that resumes it."""
        unfinished = self.run.missing > 0 or self.rounds is not None
        if self._verdicts is not None and unfinished:
            self._verdicts.save(self.run)


def keep_job_images(job: Job, run: RunDir, table: "ImageTable | None" = None) -> None:
    """Copy the images of a job into its run, so that the run does not depend on the originals.

    Args:
        job: The job of the run.
        run: The run.
        table: The model's images, which counts their tokens. None for a run without missing
            samples: lost images are then copied again if the originals still exist.

    Raises:
        InputError: an image has changed since the job was loaded.
        RunError: the images cannot be written.
    """
    files = {image.sha256: image for problem in job.data.problems for image in problem.images}
    stored = RunImages.read(run.path) if files else None
    if stored is None or all(name in stored.images and stored.file(name) for name in files):
        return
    images = {
        name: stored.images.get(name)
        or RunImage(
            name, image.name, image.size, None if table is None else table.add(image.source).num
        )
        for name, image in files.items()
    }
    problems: Mapping[str, Sequence[RunImage]] = {
        problem.id: [images[image.sha256] for image in problem.images]
        for problem in job.data.problems
        if problem.images
    }

    def content(name: str) -> bytes | None:
        try:
            return files[name].content()
        except InputError:
            if table is None:
                return None
            raise

    keep_images(run.path, problems, content)
