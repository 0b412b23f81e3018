"""Copies of the images of a job's problems in its run directory."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from treegen.errors import InputError
from treegen.evals.job import Job
from treegen.runs import RunDir
from treegen.runs.images import RunImage, RunImages, keep_images

if TYPE_CHECKING:
    from treegen.llm.base import BaseLLM


def keep_job_images(job: Job, run: RunDir, llm: "BaseLLM | None" = None) -> None:
    """Copy the images of a job into its run, so that the run does not depend on the originals.

    Args:
        job: The job of the run.
        run: The run.
        llm: The model, which counts the tokens of images. None for a run without missing samples:
            lost images are then copied again if the originals still exist.

    Raises:
        InputError: an image has changed since the job was loaded.
        RunError: the images cannot be written.
    """
    files = {image.sha256: image for problem in job.data.problems for image in problem.images}
    kept = RunImages.read(run.path) if files else None
    if kept is None or all(name in kept.images and kept.file(name) for name in files):
        return
    table = None if llm is None else llm.images
    known = {
        name: kept.images.get(name)
        or RunImage(
            name, image.name, image.size, None if table is None else table.add(image.source).num
        )
        for name, image in files.items()
    }
    problems: Mapping[str, Sequence[RunImage]] = {
        problem.id: [known[image.sha256] for image in problem.images]
        for problem in job.data.problems
        if problem.images
    }

    def content(name: str) -> bytes | None:
        try:
            return files[name].content()
        except InputError:
            if llm is None:
                return None
            raise

    keep_images(run.path, problems, content)
