"""Base class of the tasks on images: rows with images, no solved examples, greedy samples."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from treegen.evals.problem import Problem
from treegen.evals.task import TaskOptions
from treegen.prompts.images.loading import ImageFile
from treegen.tasks.common.images import RowImages
from treegen.tasks.common.problems import problems_of
from treegen.tasks.common.sources import HubTable, Source
from treegen.tasks.common.text_task import Loaded, TextTask, greedy

MOST_IMAGES: Final = 7
"""Maximum number of columns image_1, image_2 and so on of a row."""

Images = Callable[..., tuple[ImageFile, ...]]


class VisionTask(TextTask):
    """A question about images, answered by generated text.

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
        places = Source(task=self.name, bundled=self.bundled, hub=table, files=files)
        rows, source = places.read(options.data, options.split)
        in_files = options.data is not None and not places.on_hub(options.data)
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
    values = [row.get(f"image_{number}") for number in range(1, MOST_IMAGES + 1)]
    while values and values[-1] is None:
        values.pop()
    if None in values:
        raise ValueError(f"there is no image_{values.index(None) + 1}, but a later one")
    if not values:
        raise ValueError("no image_1")
    return values
