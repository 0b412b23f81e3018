"""Text that grows: whole characters only, and nothing that may yet be a stop string."""

from __future__ import annotations

import random

import pytest
from transformers import AutoTokenizer

from treegen.demo import model_path
from treegen.prompts.token_text import TokenText
from treegen.search.live.run import StreamedText

WHOLE = "na\u00efve \U0001f600\U0001f600 \u65e5\u672c apples\n\nand pears"


@pytest.mark.parametrize("stop", [None, "\u672c apples", "\n\nand", "\U0001f600 \u65e5", "s"])
def test_pieces_add_up_to_the_text_before_the_stop(stop: str | None) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    draw, prompt = random.Random(0), tokenizer.encode("Question:")
    ids = tokenizer.encode(WHOLE, add_special_tokens=False)
    text = WHOLE if stop is None else WHOLE[: WHOLE.index(stop)]
    for _ in range(20):
        growing = StreamedText(
            TokenText(tokenizer), [stop] if stop else [], list(prompt), len(prompt)
        )
        rest, pieces = list(ids), []
        while rest:
            num = draw.choice([1, 1, 2, 5])
            pieces.append(growing.add(rest[:num]))
            rest = rest[num:]
            if stop and stop in "".join([*pieces, growing.pending]):
                break
            assert text.startswith("".join(pieces))
        assert "\ufffd" not in "".join(pieces)
        pieces = pieces[:-1] if stop else pieces  # the engine ends the sample there
        sent = "".join(pieces)
        assert text.startswith(sent)
        growing.sent = sent
        assert sent + growing.end(text) == text
