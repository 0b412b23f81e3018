"""A byte-level BPE of about two thousand tokens, in which every digit is a token."""

import random
from collections.abc import Iterator
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from train_demo.documents import LONG, SHORT, draw_document
from treegen.tasks.needle.text import NAMES

BOS, EOS = "<|begin|>", "<|end|>"
VOCAB_SIZE: Final = 2048
CONTEXT: Final = 4096

# One digit, a word, or punctuation, each with the space before it; line ends; tabs.
_SPLIT: Final = r" ?\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\n+|\t+|\s"


def _texts(seed: int, documents: int) -> Iterator[str]:
    # Often enough for each name to become one token: then it is found again by looking once.
    yield from [f" {' '.join(NAMES)}"] * (documents // 10)
    draw = random.Random(f"tokenizer {seed}")
    for number in range(documents):
        parts = draw_document(draw, LONG if number % 20 == 0 else SHORT)
        yield "".join(part.text for part in parts)


def train_tokenizer(seed: int, documents: int = 4000) -> PreTrainedTokenizerFast:
    """Train on documents drawn by a seed; every text begins with BOS."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_texts(seed, documents), trainer)
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
