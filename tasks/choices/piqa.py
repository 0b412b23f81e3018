r"""PIQA: which of two ways reaches an everyday goal.

Data: https://yonatanbisk.com/piqa (valid.jsonl, with valid-labels.lst in the same folder), or
baber/piqa on the Hugging Face hub. The answers of the test split are not published. One row; its
label may be in the other file, one label per line:

    {"goal": "Dry wet shoes.", "sol1": "Fill them with paper.", "sol2": "Fill them with water.",
     "label": 0}

Prompt and score are those of lm-eval's `piqa`: `Question: {goal}\nAnswer:` and each solution after
a space; `acc` and `acc_norm`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from treegen.errors import DataError
from treegen.tasks.choices.item import ChoiceItem, check, id_of, place
from treegen.tasks.choices.task import ChoiceTask
from treegen.tasks.common.files import Rows, read_text
from treegen.tasks.common.jsonl import text_field
from treegen.tasks.common.sources import HubTable, Source


class PIQA(ChoiceTask):
    """The likelier of two solutions."""

    name = "piqa"
    source = Source(
        task="piqa",
        bundled="piqa_sample.jsonl",
        hub=HubTable("baber/piqa", ("validation", "train")),
        files={"validation": ("valid.jsonl",)},
    )

    def item(self, row: dict[str, Any]) -> ChoiceItem:
        """Return the item of a row."""
        goal = text_field(row, "goal")
        solutions = text_field(row, "sol1"), text_field(row, "sol2")
        gold = place(row.get("label"), "label")
        return check(ChoiceItem(id_of(row, "id"), f"Question: {goal}\nAnswer:", solutions, gold))

    def add_answers(self, rows: Rows, place: str) -> Rows:
        """Return rows with the labels of the label file in the same folder, if there is one."""
        path = Path(place)
        labels = path.with_name(f"{path.stem}-labels.lst")
        if not path.is_file() or not labels.is_file():
            return rows
        return _add_labels(rows, labels)


def _add_labels(rows: Rows, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    labels = read_text(path).split()
    numbered = list(rows)
    if len(labels) != len(numbered):
        raise DataError(
            f"{path} has {len(labels)} labels for {len(numbered)} rows; "
            "take both files of one split"
        )
    for (line, row), label in zip(numbered, labels, strict=True):
        yield line, {**row, "label": label}
