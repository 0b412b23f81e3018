"""A small random-weight checkpoint for benchmarks, and prompts: real architecture, no meaning."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FEW_SHOT: Final = "Q: Tom has 3 pens and buys 4 more. How many?\nA: 3 + 4 = 7.\n\n" * 8


def questions(num: int) -> list[str]:
    """Return questions to ask after the solved examples of `FEW_SHOT`."""
    return [
        f"Q: Ann has {i} pens and gives {i % 7} away. How many?\nA:" for i in range(10, 10 + num)
    ]


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer whose tokens are <s>, </s> and the 256 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {letter: i + 2 for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made: PreTrainedTokenizerBase = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    )
    return made


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
