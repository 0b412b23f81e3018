r"""HellaSwag: which of four endings follows a short text.

Data: https://github.com/rowanz/hellaswag (hellaswag_val.jsonl), or Rowan/hellaswag on the Hugging
Face hub. The answers of the test split are not published. One row:

    {"ind": 1, "activity_label": "Baking", "ctx_a": "A man opens an oven.", "ctx_b": "he",
     "endings": ["takes a cake out.", "swims.", "sings to it.", "paints."], "label": 0}

Prompt and score are those of lm-eval's `hellaswag`: `{activity_label}: {ctx_a} {ctx_b}`, the first
letter of ctx_b in upper case and the rest of it in lower case, without the text in brackets from
WikiHow's pages; the endings, cleaned in the same way, after a space; `acc` and `acc_norm`.
"""

import re
from typing import Any, Final

from treegen.tasks.choices.item import ChoiceItem, check, place, texts_of
from treegen.tasks.choices.task import ChoiceTask
from treegen.tasks.common.jsonl import text_field
from treegen.tasks.common.sources import HubTable, Source

_BRACKETS: Final = re.compile(r"\[[^\]\n]*\]")


class HellaSwag(ChoiceTask):
    """The likeliest of four endings."""

    name = "hellaswag"
    source = Source(
        task="hellaswag",
        bundled="hellaswag_sample.jsonl",
        hub=HubTable("Rowan/hellaswag", ("validation", "train")),
        files={"validation": ("hellaswag_val.jsonl",), "train": ("hellaswag_train.jsonl",)},
    )

    def item(self, row: dict[str, Any]) -> ChoiceItem:
        """Return the item of a row."""
        label, first = text_field(row, "activity_label"), text_field(row, "ctx_a")
        second = row.get("ctx_b")
        if not isinstance(second, str):
            raise ValueError("ctx_b must be text")
        endings = texts_of(row.get("endings"), "endings")
        return check(
            ChoiceItem(
                id="",
                prompt=_clean_text(f"{label}: {first} {second.capitalize()}"),
                choices=tuple(map(_clean_text, endings)),
                gold=place(row.get("label"), "label"),
                metadata={"activity": label},
            )
        )


def _clean_text(text: str) -> str:
    """Return a text without the marks of WikiHow's pages, by the same steps as lm-eval."""
    text = text.strip().replace(" [title]", ". ")
    return _BRACKETS.sub("", text).replace("  ", " ")
