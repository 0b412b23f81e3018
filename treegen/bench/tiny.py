"""A small random-weight checkpoint with a real architecture for benchmarks, and prompts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LETTERS: Final = "etaoinshrdlucmfwypvbgkjqxz"  # most frequent first
_SIGNS: Final = " \n\t.,;:()[]{}'=+-*/<>_0123456789\""
FEW_SHOT: Final = "Q: Tom has 3 pens and buys 4 more. How many?\nA: 3 + 4 = 7.\n\n" * 8


def questions(num: int) -> list[str]:
    """Return questions to ask after the solved examples of `FEW_SHOT`."""
    return [
        f"Q: Ann has {i} pens and gives {i % 7} away. How many?\nA:" for i in range(10, 10 + num)
    ]


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer whose tokens are <s>, </s> and the 256 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {letter: i + 2 for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _fast(tokenizer)


def _fast(tokenizer: Any) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast

    made: PreTrainedTokenizerBase = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    )
    return made


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerBase:
    """Return a tokenizer whose tokens resemble those of a trained one: words, signs, letters.

    A text is still encoded byte by byte. Grammar masks take as long as with a trained tokenizer.
    """
    import numpy as np
    from tokenizers import pre_tokenizers

    tokenizer: Any = byte_tokenizer()
    made = json.loads(tokenizer.backend_tokenizer.to_str())
    known, rng = made["model"]["vocab"], np.random.default_rng(0)
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    chance = 1 / np.arange(2, 28)
    while len(known) < vocab_size:
        letters = "".join(rng.choice(list(_LETTERS), 2**16, p=chance / chance.sum()))
        signs = "".join(rng.choice(list(_SIGNS), 2**16))
        starts = rng.integers(0, 2**16 - 16, 2**14).tolist()
        lengths = np.clip(rng.poisson(4.5, 2**14) + 2, 2, 16).tolist()
        for start, length, kind in zip(starts, lengths, rng.random(2**14).tolist(), strict=True):
            word = letters[start : start + length]
            if kind < 0.1:
                word = signs[start : start + 1 + length % 4]
            elif kind < 0.25:
                word = "".join(chr(0x4E00 + ord(letter) * 37 % 2000) for letter in word[:3])
            elif kind < 0.35:
                word = word.capitalize()
            text = word if kind < 0.6 else f" {word}"
            if len(known) < vocab_size:
                spelled = "".join(part for part, _ in as_bytes.pre_tokenize_str(text))
                known.setdefault(spelled, len(known))
    return _fast(type(tokenizer.backend_tokenizer).from_str(json.dumps(made)))


@contextmanager
def checkpoint(model: str | None) -> Iterator[str]:
    """Yield `model`, or if it is None a tiny checkpoint, which is removed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            make_checkpoint(Path(folder))
        yield model or folder


def make_checkpoint(folder: Path) -> None:
    """Write a Llama checkpoint (4 layers, 8 query heads, 2 KV heads) and a byte-level tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
