"""A byte-level BPE of about two thousand tokens, in which every digit is a token."""

import random
from collections.abc import Callable, Iterator
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from train_demo.documents import LONG, SHORT, draw_document
from treegen.tasks.needle.text import NAMES

BOS, EOS = "<|begin|>", "<|end|>"
VOCAB_SIZE: Final = 2048
AGENT_VOCAB_SIZE: Final = 2048
CONTEXT: Final = 4096

# One digit, a word, or punctuation, each with the space before it; line ends; tabs.
_SPLIT: Final = r" ?\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\n+|\t+|\s"
# Before all that, the fixed parts of episodes. So a name is the same token wherever it stands.
_PHRASES: Final = "|".join(
    (
        r"tools:[^\n]*\n",
        r"\n?(?:user|assistant|tool):\n",
        r'<tool_call>\n\{"name": "',
        r'", "arguments": \{(?:"|\}\}\n</tool_call>)',
        r'"\}\}\n</tool_call>|", "|": "',
        r"Your goal: put the (?:(?:clean|hot|cold) )?| into or onto the ",
        r"\. You have \d+ actions; [^\n]*\n\n",
        r"You are in the |\. Exits: | to the |\. You see the |\.? It contains ",
        r" \((?:closed|empty)\)|\), the |, the |\)\.(?=\n)",
        r"You (?:take|put|open) the | from the |The | \(|, ",
        r"Some functions in these [^\n]*\n\n|Files: ",
        r" +(?= )|",
    )
)


def _texts(seed: int, documents: int) -> Iterator[str]:
    # Often enough for each name to become one token: then it is found again by looking once.
    yield from [f" {' '.join(NAMES)}"] * (documents // 10)
    draw = random.Random(f"tokenizer {seed}")
    for number in range(documents):
        parts = draw_document(draw, LONG if number % 20 == 0 else SHORT)
        yield "".join(part.text for part in parts)


def train_tokenizer(seed: int, documents: int = 4000) -> PreTrainedTokenizerFast:
    """Train on documents drawn by a seed; every text begins with BOS."""
    return _train(_texts(seed, documents), _SPLIT, VOCAB_SIZE)


def train_agent_tokenizer(
    draw_text: Callable[[random.Random], str], seed: int, documents: int
) -> PreTrainedTokenizerFast:
    """Train on episodes, with few tokens for what tool calls have in common."""
    draw = random.Random(f"tokenizer {seed}")
    texts = (draw_text(draw) for _ in range(documents))
    return _train(texts, _PHRASES + _SPLIT, AGENT_VOCAB_SIZE)


def _train(texts: Iterator[str], split: str, vocab_size: int) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
