"""BOS tokens that come twice, and ends of turns that end no sample: users are told, once."""

from __future__ import annotations

import asyncio
import json
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from engine_cases import load
from transformers import AddedToken
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from treegen import LLM, AsyncLLM, Node, SamplingParams
from treegen.errors import ModelWarning

CHAT = [{"role": "user", "content": "Is it so?"}]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARAMS = SamplingParams(max_tokens=3, seed=1)


def saved(path: Path, *, eos: str = "</s>", bos: bool = True) -> Path:
    """A tiny model with a chat template, whose tokenizer adds BOS to any text."""
    from tokenizers.processors import TemplateProcessing

    tiny_models.save_tiny_model(path, "llama", vocab_size=tiny_models.VOCAB_SIZE + 2)
    tokenizer = tiny_models.tiny_tokenizer().__class__.from_pretrained(path)
    marks = [AddedToken(mark, special=True) for mark in ("<|im_start|>", "<|im_end|>")]
    tokenizer.add_tokens(marks, special_tokens=True)
    if bos:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    tokenizer.chat_template = TEMPLATE
    tokenizer.eos_token = eos
    tokenizer.save_pretrained(path)
    return path


def rendered(tokenizer: PreTrainedTokenizerBase) -> str:
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str) and text.startswith("<s>")
    return text


@pytest.mark.parametrize("how", ["generate", "node", "score", "search", "async"])
def test_a_second_bos_is_told_once_and_ids_stay_those_of_the_tokenizer(
    how: str, tmp_path: Path
) -> None:
    llm = load(saved(tmp_path, eos="<|im_end|>"))
    text = rendered(llm.tokenizer)
    ids = llm.tokenizer(text)["input_ids"]
    assert ids[:2] == [0, 0]

    def run() -> None:
        if how == "generate":
            llm.generate([text, "plain"], PARAMS)
        elif how == "node":
            llm.run(Node(text[:4], children=[Node(text[4:], samples=2, id="a")], samples=0), PARAMS)
        elif how == "score":
            llm.score([(text, "yes")])
        elif how == "search":
            with llm.session(PARAMS) as session:
                session.sample({session.root(text): 1})
        else:

            async def ask() -> None:
                served = AsyncLLM(llm)
                read, _ = await served.generate([text], PARAMS)
                assert read[0].tolist() == ids
                await asyncio.to_thread(served.close)

            asyncio.run(ask())

    with pytest.warns(ModelWarning, match="begins with '<s>' twice.*messages") as record:
        run()
    assert len(record) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if how != "async":  # another AsyncLLM tells it once more
            run()
        llm.chat(CHAT, PARAMS)  # treegen's own rendering has one
    assert not [request for request in _prompts(llm) if request[:2] == [0, 0]]


def _prompts(llm: LLM) -> list[list[int]]:
    return [r.tokens.tolist() for r in llm.plan(Node(CHAT, samples=1), PARAMS).requests]


def test_no_warning_where_nothing_is_twice(tmp_path: Path) -> None:
    for bos in (True, False):
        llm = load(saved(tmp_path / str(bos), eos="<|im_end|>", bos=bos))
        text = rendered(llm.tokenizer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            llm.generate(["plain", text if not bos else text.removeprefix("<s>")], PARAMS)
            llm.chat(CHAT, PARAMS)


def test_a_sample_ends_at_the_end_that_the_tokenizer_names(tmp_path: Path) -> None:
    """The configuration names another token, as files of fine-tuned models do."""
    llm = load(saved(tmp_path, eos="<|im_end|>"))
    end = llm.tokenizer.convert_tokens_to_ids("<|im_end|>")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eos_token_id"] == 1 != end
    assert llm.spec.eos_token_ids == (1, end) == llm.model.spec.eos_token_ids
    params = SamplingParams(max_tokens=30, seed=1, logit_bias={end: 60.0})
    (done,) = llm.chat(CHAT, params)[0]
    assert (done.finish_reason, done.stop, done.text) == ("stop", end, "")


def test_the_end_of_turns_is_looked_for_within_the_limits_of_templates(tmp_path: Path) -> None:
    """A template may loop only for messages that are not those of the user."""
    llm = load(saved(tmp_path))
    llm.tokenizer.chat_template = (
        "{% if messages[-1].role == 'assistant' %}{% for i in range(99999) %}{% for j in "
        "range(99999) %}{% endfor %}{% endfor %}{% endif %}" + TEMPLATE
    )
    begin = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert llm.chat(CHAT, PARAMS)[0]
    assert time.monotonic() - begin < 60


def test_an_end_of_turn_that_ends_no_sample_is_told_once(tmp_path: Path) -> None:
    llm = load(saved(tmp_path))
    end = llm.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert llm.spec.eos_token_ids == (1,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.generate(["plain"], PARAMS)  # no turn
    with pytest.warns(ModelWarning, match=rf"im_end.*stop_token_ids=.{end}") as record:
        llm.chat([CHAT, CHAT], PARAMS)
    assert len(record) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.chat(CHAT, PARAMS)
    for own in ({"stop_token_ids": [end]}, {"stop": "<|im_end|>"}):
        again: Any = load(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again.chat(CHAT, SamplingParams(max_tokens=3, seed=1, **own))
