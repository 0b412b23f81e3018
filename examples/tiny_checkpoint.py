"""Build a tiny Llama checkpoint with random weights, to try treegen without a download.

    python examples/tiny_checkpoint.py .demo/tiny

The tokenizer is a byte-level BPE trained on the bundled problems. The weights are random, so what
the model writes is noise; everything else about it is an ordinary transformers checkpoint.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import click
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

DATA = Path(__file__).resolve().parent.parent / "tasks" / "data"
BOS, EOS = "<|begin|>", "<|end|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def texts(folder: Path) -> Iterator[str]:
    """Yield every string field of every JSON line in a folder."""
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.strip():
                yield from (value for value in json.loads(line).values() if isinstance(value, str))


def build_tokenizer(vocab_size: int, context_length: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE that starts every text with BOS and can encode any text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts(DATA), trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--layers", default=2, show_default=True)
@click.option("--hidden", default=64, show_default=True, help="Hidden size; heads are 16 wide.")
@click.option("--vocab-size", default=1024, show_default=True, help="At most; 258 at least.")
@click.option("--context", default=4096, show_default=True, help="Longest sequence in tokens.")
@click.option("--seed", default=0, show_default=True, help="Seed of the random weights.")
def main(folder: Path, layers: int, hidden: int, vocab_size: int, context: int, seed: int) -> None:
    """Write a checkpoint with random weights to FOLDER."""
    tokenizer = build_tokenizer(vocab_size, context)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 16,
        num_key_value_heads=max(1, hidden // 32),
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    print(f"{folder}: {model.num_parameters():,} random parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
