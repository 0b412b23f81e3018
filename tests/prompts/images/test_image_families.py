"""Every family said to take images, against transformers' own generate on each prompt alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from image_cases import far, table_of, tree_of
from tiny_images import MAKERS, NEEDED, TEXT, picture, save_tiny_vision_model

from treegen import LLM, Completion, ModelError, SamplingParams
from treegen.model.checkpoint.families import IMAGES, refuse_images
from treegen.model.checkpoint.text_part import auto_class

STEPS = 5
GREEDY = SamplingParams(max_tokens=STEPS, temperature=0, ignore_eos=True)
LIMIT = 1e-5  # of log-probabilities, in float32

Content = str | list[dict[str, Any]]


class Answer(NamedTuple):
    """What transformers' generate draws: tokens, their log-probabilities, tokens of the prompt."""

    tokens: list[int]
    logprobs: list[float]
    num_prompt: int


class Stock:
    """transformers' own model and processor of a checkpoint."""

    def __init__(self, directory: Path, processor: Any, tokenizer: Any) -> None:
        config = transformers.AutoConfig.from_pretrained(directory)
        kind = auto_class(config, images=True)
        self.model = kind.from_pretrained(directory, attn_implementation="eager")
        self.model.generation_config.eos_token_id = None
        self.processor, self.tokenizer = processor, tokenizer

    def answer(self, messages: Sequence[dict[str, Any]]) -> Answer:
        """The greedy answer to a chat."""
        given = self._inputs(messages)
        out = self.model.generate(
            **given,
            max_new_tokens=STEPS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        num = given["input_ids"].shape[1]
        tokens = out.sequences[0, num:].tolist()
        logprobs = torch.cat(out.logits).log_softmax(-1)
        return Answer(tokens, [float(logprobs[i, t]) for i, t in enumerate(tokens)], num)

    @torch.inference_mode()
    def score(
        self, messages: Sequence[dict[str, Any]], text: str, dtype: torch.dtype = torch.float32
    ) -> list[float]:
        """Log-probabilities of the tokens of a text that the assistant says."""
        num = self._inputs(messages)["input_ids"].shape[1]
        given = self._inputs(messages, text).to(dtype)  # what has floats
        logprobs = self.model.to(dtype)(**given).logits[0, num - 1 : -1].log_softmax(-1)
        said = given["input_ids"][0, num:, None]
        found: list[float] = logprobs.gather(1, said)[:, 0].tolist()
        return found

    def _inputs(self, messages: Sequence[dict[str, Any]], said: str = "") -> Any:
        """What the model gets for a chat, and for what the assistant has said."""
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        pictures = [
            part["image"]
            for message in messages
            if not isinstance(message["content"], str)
            for part in message["content"]
            if part["type"] == "image"
        ]
        return self.processor(
            text=[f"{text}{said}"],
            images=self._given(pictures),
            return_tensors="pt",
            add_special_tokens=False,
        )

    def _given(self, pictures: list[Any]) -> list[Any] | None:
        """Images as the processor takes them; Gemma's takes those of each prompt."""
        if pictures and isinstance(self.processor, transformers.Gemma3Processor):
            return [pictures]
        return pictures or None


@pytest.fixture(scope="module")
def stock_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Gives the directory of a family's checkpoint, and its stock model."""

    @cache
    def make(family: str) -> tuple[Path, Stock]:
        directory = save_tiny_vision_model(tmp_path_factory.mktemp(family), family, seed=1)
        llm = LLM(str(directory), images=True, device="cpu", memory="1MiB")
        return directory, Stock(directory, table_of(llm)._processor, llm.tokenizer)

    return make


def check(done: Completion, want: Answer, limit: float = LIMIT) -> None:
    assert list(done.token_ids) == want.tokens
    assert done.logprobs is not None
    assert far(done.logprobs, want.logprobs) < limit


@pytest.mark.parametrize("family", MAKERS)
def test_a_tree_with_images_decodes_like_each_prompt_alone(family: str, stock_of: Any) -> None:
    if family in NEEDED:
        pytest.importorskip(NEEDED[family])
    directory, stock = stock_of(family)
    root, prompts = tree_of(picture(1), picture(2, 30, 61))
    # Passes of 16 tokens end within images, and segments are of every length.
    llm = LLM(
        str(directory), images=True, device="cpu", memory="64MiB", page_size=4, prefill_chunk=16
    )
    result = llm.run(root, GREEDY)
    wanted = {name: stock.answer(messages) for name, messages in prompts.items()}
    for done in result.completions:
        check(done, wanted[done.prompt_id])
    assert result.usage.images_encoded == 2
    whole = sum(want.num_prompt for want in wanted.values())
    assert result.usage.prompt_tokens_computed < 0.7 * whole
    assert len({tuple(want.logprobs) for want in wanted.values()}) == len(wanted), "all look alike"
    again = llm.run(root, GREEDY)
    assert again.completions == result.completions
    assert again.usage.images_encoded == 0
    pairs = [(prompts[name], " the house and") for name in ("b", "other", "none")]
    for (messages, text), score in zip(pairs, llm.score(pairs), strict=True):
        want = stock.score(messages, text)
        if far(score.logprobs, want) >= LIMIT:  # as where recurrent layers round much
            exact = stock.score(messages, text, torch.float64)
            # The orders of sums differ by the CPU; stock's own distance measures the rounding.
            assert far(score.logprobs, exact) < 2 * far(want, exact)


def test_towers_attend_as_they_do_in_transformers(stock_of: Any) -> None:
    """Eagerly, the scores of all pairs of an image's patches would be stored in each layer."""
    llm = LLM(str(stock_of("qwen3_vl")[0]), images=True, memory="16MiB")
    assert llm.model.module.config.vision_config._attn_implementation == "sdpa"


@pytest.mark.gpu
@pytest.mark.parametrize("how", [{}, {"eager": True}], ids=["graphs", "eager"])
@pytest.mark.parametrize("family", MAKERS)
def test_on_a_gpu_too(family: str, how: dict[str, Any], stock_of: Any) -> None:
    """Towers, blocks that see each other and graphs, beside stock transformers on the CPU."""
    if family in NEEDED:
        pytest.importorskip(NEEDED[family])
    directory, stock = stock_of(family)
    root, prompts = tree_of(picture(1), picture(2, 30, 61))
    llm = LLM(
        str(directory),
        images=True,
        device="cuda",
        dtype="float32",
        memory="64MiB",
        page_size=16,
        prefill_chunk=16,
        **how,
    )
    result = llm.run(root, GREEDY)
    assert result.usage.impl == "triton"
    assert result.usage.images_encoded == 2
    for done in result.completions:
        check(done, stock.answer(prompts[done.prompt_id]), limit=5e-5)


def test_texts_that_see_what_comes_after_them_are_refused() -> None:
    text = {**TEXT, "use_bidirectional_attention": "all"}
    with pytest.raises(ModelError, match="all tokens of this gemma4 model"):
        refuse_images(transformers.Gemma4Config(text_config=text))
    with pytest.raises(ModelError, match="paligemma models cannot take images: each prompt token"):
        refuse_images(transformers.PaliGemmaConfig())
    with pytest.raises(ModelError, match="mllama models support only text"):
        refuse_images(transformers.MllamaConfig())


def test_every_family_that_takes_images_is_tested_here() -> None:
    assert sorted({name.split("-")[0] for name in MAKERS}) == list(IMAGES)
