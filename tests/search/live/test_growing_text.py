"""Text that grows: whole characters only, and nothing that may yet be a stop string."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from trained_tokenizers import trained
from transformers import AutoTokenizer

from treegen.demo import model_path
from treegen.prompts.token_bytes import token_bytes
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


class CountingText(TokenText):
    """Counts the tokens that are decoded."""

    num_decoded = 0

    def of(self, before: Sequence[int], tokens: Sequence[int]) -> str:
        self.num_decoded += len(before) + len(tokens)
        return super().of(before, tokens)


NAMES = ["gpt2", "llama3", "llama2", "mistral", "gemma"]


def check_stream(tokenizer: Any, ids: Sequence[int], rest: Sequence[int]) -> None:
    """Check that a stream sends endless tokens as the whole text has them, in linear time."""
    text, prompt = CountingText(tokenizer), tokenizer.encode("Question:")
    whole, expected = text.of(prompt, [*ids, *rest]), len(text.of(prompt, ids))
    text.num_decoded = 0
    growing = StreamedText(text, ["\n"], list(prompt), len(prompt))
    sent = ""
    for at, token in enumerate([*ids, *rest]):
        sent += growing.add([token])
        assert whole.startswith(sent + growing.pending)
        if at == len(ids) - 1:
            assert len(sent) >= expected - 150
    assert text.num_decoded < 200 * len(ids)
    assert sent + growing.end(whole) == whole


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "invalid", [b"\x80", b"\xe4\xbd", b"\xf0\x9f\x98", b"\xff\xe6\x97\xa5", b"", b"\xe4"]
)
def test_endless_invalid_bytes_are_sent_as_the_whole_text_has_them(
    invalid: bytes, name: str
) -> None:
    tokenizer = trained(name)
    bytes_of = token_bytes(tokenizer) or {}
    tokens_of = {data: token for token, data in bytes_of.items() if len(data) == 1}
    draw = random.Random(invalid)
    drawn = invalid * 400 or draw.randbytes(1500).translate(None, bytes(range(128)))
    ends = tokenizer.encode(" and \u65e5\u672c, \n", add_special_tokens=False)
    middle = [tokens_of[bytes([byte])] for byte in "\u65e5\u672c".encode()]
    ids = [tokens_of[bytes([byte])] for byte in b"\x80" + drawn]
    for rest in (ends, [*middle, *ends], []):
        check_stream(tokenizer, ids, rest)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_after_an_incomplete_character_are_decoded_a_few_times(name: str) -> None:
    """Tokens that the decoder skips, bytes of ASCII characters, and tokens of several bytes."""
    tokenizer = trained(name)
    bytes_of = token_bytes(tokenizer) or {}
    incomplete, ascii_byte = (
        next(token for token, data in bytes_of.items() if data == byte) for byte in (b"\xe4", b"A")
    )
    ascii_byte = tokenizer.get_vocab().get("<0x41>", ascii_byte)
    partial = [token for token, data in bytes_of.items() if len(data) > 1 and data[-1] > 127]
    ends = tokenizer.encode(" and \u65e5\u672c, \n", add_special_tokens=False)
    for token in (tokenizer.eos_token_id, len(tokenizer) + 5, ascii_byte, *partial):
        check_stream(tokenizer, [incomplete, *[token] * 600], ends)
