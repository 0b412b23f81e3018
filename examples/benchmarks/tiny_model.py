"""A small random-weight checkpoint and prompts for it, which several benchmarks here use."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from treegen.bench.shapes import byte_tokenizer

ABOUT: Final = "a random 4-layer Llama of width 256"
FEW_SHOT: Final = "Q: Tom has 3 pens and buys 4 more. How many?\nA: 3 + 4 = 7.\n\n" * 8


def questions(num: int) -> list[str]:
    """Return questions to ask after the few-shot examples of `FEW_SHOT`."""
    return [
        f"Q: Ann has {i} pens and gives {i % 7} away. How many?\nA:" for i in range(10, 10 + num)
    ]


@contextmanager
def checkpoint(model: str | None) -> Iterator[str]:
    """Yield `model`, or if it is None a tiny checkpoint, which is removed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            make_checkpoint(Path(folder))
        yield model or folder


def make_checkpoint(folder: Path) -> None:
    """Write a Llama checkpoint (4 layers, 8 query heads, 2 KV heads) and a byte-level tokenizer."""
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
