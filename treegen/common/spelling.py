"""Suggestions for misspelled words and for names of other tools."""

import difflib
from collections.abc import Iterable
from typing import Final

from treegen.errors import arg


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return '; did you mean ...?' for the closest known words, or ""."""
    close = difflib.get_close_matches(word, list(known), n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


FOREIGN: Final = {
    "pretrained": "model",
    "gpu_memory_utilization": "memory",
    "kv_cache_memory_bytes": "memory",
    "max_num_seqs": "max_rows",
    "batch_size": "max_rows",
    "max_num_batched_tokens": "prefill_chunk",
    "block_size": "page_size",
    "enforce_eager": "eager",
    "attention_backend": "impl",
    "speculative_config": "speculate",
    "num_speculative_tokens": "draft_tokens",
    "max_new_tokens": "max_tokens",
    "max_gen_toks": "max_tokens",
    "min_new_tokens": "min_tokens",
    "until": "stop",
    "num_return_sequences": "n",
    "best_of": "n",
    "thinking_token_budget": "max_thinking_tokens",
    "n": "num_samples",
    "epochs": "num_samples",
    "repeats": "num_samples",
    "num_fewshot_examples": "num_fewshot",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
    "bad_words_ids": "bad_words",
    "structured_outputs": "json_schema",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
    "enable_lora": "adapter",
    "lora_modules": "adapter",
}
"""Names of parameters in other tools, such as vLLM, and their names here."""

_NO_COUNTERPART: Final = {
    "do_sample": "leave it out: temperature=0.0 is greedy, any other draws",
    "num_beams": "leave it out; for beams see treegen.search.beam",
    "max_model_len": "leave it out: memory follows the tokens, and max_rows bounds the samples",
    "enable_prefix_caching": "leave it out: what prompts share is always computed once",
    "skip_special_tokens": "leave it out: texts have no special tokens",
}
"""Names in other tools that have no counterpart here, with advice."""


def hint_at(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean NAME=?" for an unknown name, or advice, or ""."""
    known = list(known)
    foreign = FOREIGN.get(name)
    if foreign is not None and foreign in known:
        return f"; did you mean {arg(foreign + '=')}?"
    if name in _NO_COUNTERPART:
        return f"; {_NO_COUNTERPART[name]}"
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(arg(name + '=') for name in close)}?" if close else ""
