"""What masks of a grammar cost: samples that are JSON of a schema, against samples without one.

Masks are made on the host while the device computes. The figures of docs/benchmarks/features.md
come from

    python examples/benchmarks/structured.py --shape qwen3-4b --rows 1024 --prefix 2048
"""

from __future__ import annotations

import json
from typing import Any, Final

import click
import numpy as np
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from treegen.bench.decode import Bench
from treegen.bench.shapes import byte_tokenizer, load_or_build
from treegen.bench.workloads import Workload, decode_cases
from treegen.cli.bench.decode import check_runs, measure_cases
from treegen.cli.bench.options import RUNS, int_list_option, int_option, shape_or_model
from treegen.cli.main import script
from treegen.cli.options.options import add_options
from treegen.cli.terminal.render import json_line
from treegen.common.params import SamplingParams
from treegen.errors import InputError

STRUCTURED: Final = "structured"
"""The mode in which every sample is forced to be JSON of a schema."""
_ITEM: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["person", "place", "thing"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "score": {"type": "number"},
        "seen": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
    },
    "required": ["name", "kind", "count", "score", "seen", "tags"],
    "additionalProperties": False,
}
_LETTERS: Final = "etaoinshrdlucmfwypvbgkjqxz"  # most frequent first
_SIGNS: Final = " \n\t.,;:()[]{}'=+-*/<>_0123456789\""


class StructuredBench(Bench):
    """Runs treegen with a grammar in turn with treegen's other modes."""

    turn_modes = (*Bench.turn_modes, STRUCTURED)

    def params(self, workload: Workload, mode: str) -> SamplingParams:
        """Return parameters under which each sample has more objects than it has tokens."""
        if mode != STRUCTURED:
            return super().params(workload, mode)
        schema = {"type": "array", "items": _ITEM, "minItems": workload.max_tokens}
        return SamplingParams(max_tokens=workload.max_tokens, json_schema=schema)


def word_tokenizer(vocab_size: int) -> Any:
    """Return a tokenizer whose tokens resemble those of a trained one: words, signs, letters.

    A text is still encoded byte by byte. Grammar masks take as long as with a trained tokenizer.
    """
    tokenizer = byte_tokenizer()
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary, rng = document["model"]["vocab"], np.random.default_rng(0)
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    chance = 1 / np.arange(2, 28)
    while len(vocabulary) < vocab_size:
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
            if len(vocabulary) < vocab_size:
                spelled = "".join(part for part, _ in as_bytes.pre_tokenize_str(text))
                vocabulary.setdefault(spelled, len(vocabulary))
    trained = type(tokenizer.backend_tokenizer).from_str(json.dumps(document))
    return PreTrainedTokenizerFast(tokenizer_object=trained, bos_token="<s>", eos_token="</s>")


@script
@click.option("--shape", metavar="NAME", help="Random weights of this shape. Default: llama3-8b.")
@int_list_option("--rows", "Samples decoded at once.", default="1024")
@int_list_option("--prefix", "Prompt tokens that all share.", default="2048")
@int_option("--new-tokens", 64, "Tokens of each sample.", minimum=2)
@add_options(*RUNS)
def main(
    shape: str | None, rows: list[int], prefix: list[int], new_tokens: int, **options: Any
) -> None:
    """Samples that have to be JSON of a schema, against samples of as many tokens without one."""
    if options["ranks"] > 1:
        raise InputError("--tp is not supported by this benchmark; remove --tp")
    shape = shape_or_model(shape, options["model"], "llama3-8b")
    cases = decode_cases(rows, prefix, new_tokens, modes=("all", STRUCTURED))
    check_runs(cases, options)
    how = {name: options[name] for name in ("dtype", "device", "quantization", "kv_cache_dtype")}
    model, tokenizer = load_or_build(shape, options["model"], **how)
    if shape:
        tokenizer = word_tokenizer(model.spec.vocab_size)
    _, document = measure_cases(cases, model, tokenizer, options, bench_type=StructuredBench)
    json_line({"bench": "decode", **document})


if __name__ == "__main__":
    main()
