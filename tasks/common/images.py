"""Images in the rows of a task's data, and the base class of the tasks on images."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

from treegen.errors import InputError
from treegen.evals.problem import Problem
from treegen.evals.task import TaskOptions
from treegen.prompts.images.loading import ImageFile
from treegen.runs.images import RunImages
from treegen.tasks.common.sources import HubTable, Source, problems_of
from treegen.tasks.common.text_task import Loaded, TextTask, greedy


class RowImages:
    """Reads images of rows: paths, data URLs, bytes, or Parquet's records of these.

    If an image file cannot be read any more, the image stored in the resumed or opened run is used.
    """

    def __init__(self, options: TaskOptions, folder: Path | None) -> None:
        """Open the images of the stored run, if there is one.

        Args:
            options: Options of the task; `options.run_dir` names the stored run.
            folder: Folder that paths are relative to; None if the data are not files.
        """
        self._folder = folder
        self._stored = None if options.run_dir is None else RunImages.read(options.run_dir)

    def read(self, value: Any, problem_id: str, number: int) -> ImageFile:
        """Return one image.

        Args:
            value: The image: a path, a URL, a data URL, bytes, or a mapping with "bytes" and
                "path".
            problem_id: Id of the problem.
            number: Index of the image among those of the problem, from 0.

        Raises:
            ValueError: The image cannot be used; the message names it and says what to do.
        """
        data, name = value, ""
        if isinstance(value, Mapping) and set(value) <= {"bytes", "path"}:
            name = str(value.get("path") or "")
            data = name if value.get("bytes") is None else value["bytes"]
        if isinstance(data, bytes) or (isinstance(data, str) and data.startswith("data:")):
            try:
                image = ImageFile.within(data, name)
                return image if name else replace(image, path=f"{problem_id}-{number + 1}")
            except InputError as error:
                raise ValueError(str(error)) from None
        if not isinstance(data, str) or not data:
            raise ValueError(
                f"image {number + 1} must be a path, a data URL or bytes, got "
                f"{type(value).__name__}"
            )
        try:
            return ImageFile.of(data if "://" in data else self._path(data))
        except InputError as error:
            if stored := self._of_run(problem_id, number, data):
                return stored
            remedy = f"; check the path, which is relative to {self._folder}"
            is_path = "://" not in data and not Path(data).is_absolute()
            raise ValueError(f"{error}{remedy if self._folder and is_path else ''}") from None

    def _path(self, text: str) -> Path:
        if self._folder is None:
            raise InputError(
                f"the path of image {text} must be absolute, because the data are not in a folder"
            )
        return self._folder / text

    def _of_run(self, problem_id: str, number: int, path: str) -> ImageFile | None:
        if self._stored is None or number >= len(images := self._stored.of(problem_id)):
            return None
        image = images[number]
        data = self._stored.content(image.sha256)
        # An image without stored bytes gets the path from the data, so that a reader can open it.
        name = str(self._folder / path) if data is None and self._folder else image.name
        return ImageFile(name, image.sha256, image.size, data)


MAX_IMAGES: Final = 7
"""Maximum number of columns image_1, image_2 and so on of a row."""

Images = Callable[..., tuple[ImageFile, ...]]


class VisionTask(TextTask):
    """A question about images, answered by a greedy sample, without few-shot examples.

    Subclasses define a name, filters, their table on the hub, a bundled file, and methods that make
    a problem from a row and score a text.
    """

    bundled: ClassVar[str]
    table: ClassVar[HubTable]
    """The table on the hub, unless `hub` chooses one by the task's arguments."""
    extra: Mapping[str, str] = {}
    """The task's arguments."""
    defaults = greedy(max_tokens=1024)

    def hub(self) -> HubTable:
        """Return the table of the hub that the task's arguments select."""
        return self.table

    def problem(self, row: dict[str, Any], line: int, images: Images) -> Problem:
        """Return the problem of a row; raise ValueError with the reason if it has none.

        Args:
            row: The row.
            line: Line number of the row, from 1.
            images: Reads images of the row, given the problem's id and their values.
        """
        raise NotImplementedError

    def is_selected(self, problem: Problem) -> bool:
        """Return whether the task's arguments select a problem."""
        return True

    def read(self, options: TaskOptions) -> Loaded:
        """Return the questions that the task's arguments select, with their images."""
        self.extra = options.extra
        table = self.hub()
        files = {split: (f"{split}-00000-of-00001.parquet",) for split in table.splits}
        source_of_rows = Source(task=self.name, bundled=self.bundled, hub=table, files=files)
        rows, source = source_of_rows.read(options.data, options.split)
        in_files = options.data is not None and not source_of_rows.on_hub(options.data)
        of_row = RowImages(options, Path(source).parent if in_files else None)

        def images(problem_id: str, values: Sequence[Any]) -> tuple[ImageFile, ...]:
            return tuple(of_row.read(value, problem_id, at) for at, value in enumerate(values))

        problems, skipped = problems_of(
            rows, source, lambda row, line: self.problem(row, line, images)
        )
        return list(filter(self.is_selected, problems)), skipped, source


def numbered_images(row: Mapping[str, Any]) -> list[Any]:
    """Return the images in the columns image_1, image_2 and so on, or in the list `images`."""
    if isinstance(listed := row.get("images"), list):
        return listed
    values = [row.get(f"image_{number}") for number in range(1, MAX_IMAGES + 1)]
    while values and values[-1] is None:
        values.pop()
    if None in values:
        raise ValueError(
            f"image_{values.index(None) + 1} is missing, but the row has a later image"
        )
    if not values:
        raise ValueError("no image_1")
    return values
