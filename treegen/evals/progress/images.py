"""The images of a job's problems, kept in its run."""

from collections.abc import Mapping, Sequence
from typing import Any

from treegen.errors import InputError
from treegen.evals.job import Job
from treegen.prompts.images.table import get_image_table
from treegen.runs import RunDir
from treegen.runs.images import RunImage, RunImages, keep_images


def keep_job_images(job: Job, run: RunDir, tokenizer: Any = None) -> None:
    """Keep the images of a job in its run, which has them then whatever becomes of the originals.

    Args:
        tokenizer: Of the model; it knows how many tokens images are. Without it, the images of a
            run that lacks no sample are kept again where they have been lost and the originals are
            there.

    Raises:
        InputError: an image has changed since the job was loaded.
        RunError: they cannot be written.
    """
    files = {image.sha256: image for problem in job.data.problems for image in problem.images}
    kept = RunImages.read(run.path) if files else None
    if kept is None or all(name in kept.images and kept.file(name) for name in files):
        return
    table = None if tokenizer is None else get_image_table(tokenizer)
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
            if tokenizer is None:
                return None
            raise

    keep_images(run.path, problems, content)
