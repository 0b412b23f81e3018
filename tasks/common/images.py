"""Images in the rows of a task's data, in every form in which data sets are published."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from treegen.errors import InputError
from treegen.evals.task import TaskOptions
from treegen.prompts.images.loading import ImageFile
from treegen.runs.images import RunImages


class RowImages:
    """Reads images of rows: paths, data URLs, bytes, or Parquet's records of these.

    If an image file cannot be read any more, the image stored in the resumed or opened run is used.
    """

    def __init__(self, options: TaskOptions, folder: Path | None) -> None:
        """Open the images of the stored run, if there is one.

        Args:
            options: Options of the task; `options.kept` names the stored run.
            folder: Folder that paths are relative to; None if the data are not files.
        """
        self._folder = folder
        self._stored = None if options.kept is None else RunImages.read(options.kept)

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
                f"image {number + 1} is a {type(value).__name__}; give a path, a data URL or bytes"
            )
        try:
            return ImageFile.of(data if "://" in data else self._path(data))
        except InputError as error:
            if stored := self._of_run(problem_id, number, data):
                return stored
            remedy = f"; paths go from {self._folder}: fix the path, or put the file there"
            is_path = "://" not in data and not Path(data).is_absolute()
            raise ValueError(f"{error}{remedy if self._folder and is_path else ''}") from None

    def _path(self, text: str) -> Path:
        if self._folder is None:
            raise InputError(f"image {text} has a relative path, but the data are not in a folder")
        return self._folder / text

    def _of_run(self, problem_id: str, number: int, path: str) -> ImageFile | None:
        if self._stored is None or number >= len(images := self._stored.of(problem_id)):
            return None
        image = images[number]
        data = self._stored.content(image.sha256)
        # An image without stored bytes gets the path from the data, so that a reader can open it.
        name = str(self._folder / path) if data is None and self._folder else image.name
        return ImageFile(name, image.sha256, image.size, data)
