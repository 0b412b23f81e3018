"""A text never has fewer tokens than its length tells, whatever the tokenizer does to it."""

from __future__ import annotations

import random

import pytest
from tokenizers.pre_tokenizers import PreTokenizer
from trained_tokenizers import BUILDERS, FRAGMENTS, random_text, trained
from transformers import AddedToken, PreTrainedTokenizerFast

from treegen.prompts.token_bytes import TokenLowerBound
from treegen.prompts.tokens import longer_prompt, tokenize
from treegen.prompts.tree import Node

TELLING = ("gpt2", "llama3", "qwen", "digits from the right", "llama2", "mistral", "gemma")


def num_tokens(text: str, tokenizer: PreTrainedTokenizerFast) -> int:
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


@pytest.mark.parametrize("name", BUILDERS)
def test_no_text_has_fewer_tokens(name: str) -> None:
    tokenizer = trained(name)
    least = TokenLowerBound(tokenizer)
    assert (least.of_chars(1) > 0) == (name in TELLING)
    draw = random.Random(name)
    longest = sorted(tokenizer.get_vocab(), key=len)[-40:]
    hard = [*FRAGMENTS, *map(tokenizer.convert_tokens_to_string, ([word] for word in longest))]
    texts = [random_text(seed, 60) for seed in range(60)]
    texts += [draw.choice(hard) * draw.randint(1, 300) for _ in range(200)]
    # What NFC composes to one character, and marks that it puts in another order.
    texts += ["\u03b1\u0313\u0300\u0345" * 99, "\u0301\u0323" * 99, "\u1100\u1161\u11a8" * 99]
    tight = 0.0
    for text in texts:
        num = num_tokens(text, tokenizer)
        assert least.of_text(text) <= num, text[:80]
        tight = max(tight, least.of_text(text) / max(num, 1))
    assert tight > (0.2 if name == "qwen" else 0.8) or name not in TELLING


def test_a_token_that_takes_the_spaces_beside_it_tells_nothing_of_its_text() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained("gpt2").backend_tokenizer)
    tokenizer.add_tokens([AddedToken("<gap>", lstrip=True, rstrip=True, normalized=False)])
    text = " " * 10_000 + "<gap>" + " " * 10_000
    assert num_tokens(text, tokenizer) == 1
    least = TokenLowerBound(tokenizer)
    assert least.of_text(text) == 0 and least.of_text("a" * 10_000) > 0


def test_of_a_pre_tokenizer_of_python_code_nothing_is_known() -> None:
    class Nothing:
        def pre_tokenize(self, text: object) -> None:
            """Cut nothing."""

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained("gpt2").backend_tokenizer)
    assert TokenLowerBound(tokenizer).of_chars(1) == 1
    tokenizer.backend_tokenizer.pre_tokenizer = PreTokenizer.custom(Nothing())
    assert TokenLowerBound(tokenizer).of_chars(1) == 0


@pytest.mark.parametrize("name", ["llama3", "llama2", "wordpiece"])
def test_only_a_prompt_that_cannot_fit_is_called_longer(name: str) -> None:
    tokenizer = trained(name)
    word = max((word for word in tokenizer.get_vocab() if word.isalpha()), key=len)
    draw = random.Random(name)
    for _ in range(50):
        text = draw.choice([word * 40, random_text(draw.randrange(99), 40), "\n" * 400])
        middle: str | list[int] = [5] * draw.randrange(1, 30) if draw.random() < 0.5 else " and "
        tree = Node(text, children=[Node(middle, children=[Node(text, samples=1, id="q")])])
        (prompt,) = tokenize(tree, tokenizer)
        most = draw.randrange(len(prompt.tokens) + 20)
        found = longer_prompt(tree, tokenizer, most)
        assert found is None or (found[0] == "q" and most < found[1] <= len(prompt.tokens))
    found = longer_prompt(Node("a " * 100_000, samples=1, id="q"), tokenizer, 90)
    assert (found is not None) == (name in TELLING)
