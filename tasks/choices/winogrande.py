r"""WinoGrande: which of two words fills a blank.

Data: https://winogrande.allenai.org (dev.jsonl, train_xl.jsonl), or allenai/winogrande on the
Hugging Face hub. The answers of the test split are not published. One row:

    {"qID": "1", "sentence": "The cup did not fit on the shelf as the _ was too big.",
     "option1": "cup", "option2": "shelf", "answer": "1"}

The score is that of lm-eval's `winogrande`, and of Trinh and Le (https://arxiv.org/abs/1806.02847),
who call it partial scoring. The prompt is the sentence up to the blank, filled with each option.
The rest of the sentence, the same for both, is scored, and the option with the likelier rest is the
answer. So a long or rare option has no disadvantage. The metric is `acc`.
"""

from typing import Any, Final

from treegen.tasks.choices.item import ChoiceItem, check, id_of, place
from treegen.tasks.choices.task import ChoiceTask
from treegen.tasks.common.jsonl import text_field
from treegen.tasks.common.sources import HubTable, Source

_BLANK: Final = "_"


class WinoGrande(ChoiceTask):
    """The option after which the rest of the sentence is likelier."""

    name = "winogrande"
    metrics = ("acc",)
    source = Source(
        task="winogrande",
        bundled="winogrande_sample.jsonl",
        hub=HubTable("allenai/winogrande", ("validation", "train"), ("winogrande_xl",)),
        files={"validation": ("dev.jsonl",), "train": ("train_xl.jsonl",)},
    )

    def item(self, row: dict[str, Any]) -> ChoiceItem:
        """Return the item of a row; its options fill the gap between the parts of the sentence."""
        before, blank, after = text_field(row, "sentence").partition(_BLANK)
        if not blank:
            raise ValueError("sentence must have a blank (_)")
        if not after.strip():
            raise ValueError("nothing of the sentence is left after the blank, so nothing to score")
        options = text_field(row, "option1"), text_field(row, "option2")
        return check(
            ChoiceItem(
                id=id_of(row, "qID"),
                prompt=before,
                choices=options,
                gold=place(row.get("answer"), "answer") - 1,
                rest=after.strip(),
            )
        )
