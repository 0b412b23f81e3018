r"""ARC: science questions for schools with three to five choices, in an easy and a hard set.

Data: https://allenai.org/data/arc, or allenai/ai2_arc on the Hugging Face hub. A row of each:

    {"id": "A1", "question": {"stem": "What melts?", "choices": [{"text": "ice", "label": "A"},
     {"text": "sand", "label": "B"}]}, "answerKey": "A"}
    {"id": "A1", "question": "What melts?", "choices": {"text": ["ice", "sand"],
     "label": ["A", "B"]}, "answerKey": "A"}

Prompt and score are those of lm-eval's `arc_easy` and `arc_challenge`:
`Question: {question}\nAnswer:` and the text of each choice after a space; `acc` and `acc_norm`.
"""

from typing import Any

from treegen.tasks.choices.item import ChoiceItem, check, id_of, texts_of
from treegen.tasks.choices.task import ChoiceTask
from treegen.tasks.common.jsonl import text_field
from treegen.tasks.common.sources import HubTable, Source


def _source(task: str, part: str, bundled: str) -> Source:
    return Source(
        task=task,
        bundled=bundled,
        hub=HubTable("allenai/ai2_arc", ("test", "validation", "train"), (part,)),
        files={
            "test": (f"{part}-Test.jsonl",),
            "validation": (f"{part}-Dev.jsonl",),
            "train": (f"{part}-Train.jsonl",),
        },
    )


class ARCEasy(ChoiceTask):
    """The questions of ARC that simple methods answer."""

    name = "arc-easy"
    source = _source("arc-easy", "ARC-Easy", "arc_easy_sample.jsonl")

    def item(self, row: dict[str, Any]) -> ChoiceItem:
        """Return the item of a row in either form; a label names the right choice."""
        question, choices = row.get("question"), row.get("choices")
        if isinstance(question, dict):
            choices = question.get("choices")
            question = question.get("stem")
        if isinstance(choices, list) and all(isinstance(choice, dict) for choice in choices):
            choices = {name: [choice.get(name) for choice in choices] for name in ("text", "label")}
        if not isinstance(choices, dict):
            raise ValueError("choices must be a list, or an object of lists")
        labels = texts_of(choices.get("label"), "label")
        key = text_field({"answerKey": row.get("answerKey")}, "answerKey")
        if key not in labels:
            raise ValueError(f"answerKey {key!r:.40} is none of its labels; it must be one of them")
        question_text = text_field({"question": question}, "question")
        texts = texts_of(choices.get("text"), "text")
        name = id_of(row, "id")
        return check(
            ChoiceItem(name, f"Question: {question_text}\nAnswer:", texts, labels.index(key))
        )


class ARCChallenge(ARCEasy):
    """The questions of ARC that simple methods get wrong."""

    name = "arc-challenge"
    source = _source("arc-challenge", "ARC-Challenge", "arc_challenge_sample.jsonl")
