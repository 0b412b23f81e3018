"""Suggestions for misspelled words and arguments, and for names of other tools."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import FrozenInstanceError
from typing import Any, Final, TypeVar

from treegen.errors import InputError, arg

_Kind = TypeVar("_Kind", bound=type)

_SHORTEST: Final = 3  # characters of a word that may be part of a known one


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return '; did you mean ...?' for the nearest known words, or ""."""
    near = find_near(word, known)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def find_near(word: str, known: Iterable[str]) -> list[str]:
    """Return at most two known words that a user may have meant, the nearest first.

    These are words with few typing errors, words that begin or end with `word`, and the start of
    `word`, such as `eval` for `evaluate`. A word that only shares a part with `word` means
    something else, as `max_rows` does for `max_logprobs`.

    Args:
        word: The word that the user typed.
        known: The known words.
    """
    typed = word.lower()
    near: list[tuple[int, str]] = []
    for other in known:
        longest = max(len(typed), len(other))
        most = min(max(longest // 3, longest // 2 and 1), 3)
        if abs(len(typed) - len(other)) <= most:
            distance = _count_typing_errors(typed, other.lower())
            if distance <= most:
                near.append((distance, other))
                continue
        name = other.lower()
        is_part = name.startswith(typed) or name.endswith(typed)
        if name and typed.startswith(name):  # `evaluate` for `eval`, but no further words
            is_part = typed[len(name)] not in "_-"
        if is_part and min(len(typed), len(name)) >= _SHORTEST:
            near.append((4, other))
    near.sort(key=lambda pair: pair[0])
    return [other for _, other in near[:2]]


def _count_typing_errors(a: str, b: str) -> int:
    """Return how many characters were added, left out, replaced or swapped with their neighbour."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, char in enumerate(a):
        above = row
        row = [i + 1]
        for j, other in enumerate(b):
            cost = min(above[j] + (char != other), above[j + 1] + 1, row[j] + 1)
            if i and j and char == b[j - 1] and a[i - 1] == other:
                cost = min(cost, before[j - 1] + 1)
            row.append(cost)
        before = above
    return row[-1]


FOREIGN: Final = {
    "pretrained": "model",
    "gpu_memory_utilization": "memory",
    "kv_cache_memory_bytes": "memory",
    "mem_fraction_static": "memory",
    "max_num_seqs": "max_rows",
    "batch_size": "max_rows",
    "max_connections": "max_rows",
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
    "few_shot": "num_fewshot",
    "shots": "num_fewshot",
    "n_shot": "num_fewshot",
    "nshot": "num_fewshot",
    "num_gpus": "gpus",
    "dp": "gpus",
    "model_path": "model",
    "model_name": "model",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
    "bad_words_ids": "bad_words",
    "guided_decoding": "structured_outputs",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
    "enable_lora": "adapter",
    "lora_modules": "adapter",
    "lora_path": "adapter",
    "peft": "adapter",
}
"""Names of parameters in other tools, such as vLLM, and their names here."""
_A_SIZE: Final = " The value is a size, such as 60GiB, not a fraction"
_OTHER_VALUES: Final = {"gpu_memory_utilization": _A_SIZE, "mem_fraction_static": _A_SIZE}
"""Names in other tools whose values have another form than here, with the form here."""

_LEAVE_OUT: Final = "remove this argument"
_MANY_MODELS: Final = (
    "use `treegen eval --gpus N` or Cluster, which load one copy of the model on each GPU"
)
_NO_UPLOAD: Final = (
    "uploads are not supported; use `treegen export` to write a run in other formats"
)
_NO_COUNTERPART: Final = {
    "do_sample": (
        "remove this argument: temperature=0.0 is greedy, and any other temperature samples"
    ),
    "num_beams": "remove this argument; see treegen.search.beam for beam search",
    "length_penalty": "remove this argument; see treegen.search.beam for beam search",
    "early_stopping": "remove this argument; see treegen.search.beam for beam search",
    "max_model_len": (
        f"remove this argument: memory grows with the number of tokens, and {arg('max_rows')} "
        "limits the samples that are decoded at once"
    ),
    "max_seq_len": "remove this argument: memory grows with the number of tokens",
    "context_length": "remove this argument: memory grows with the number of tokens",
    "max_samples": (
        f"use {arg('limit')} for the number of problems (--max-samples in lighteval), or "
        f"{arg('max_rows')} for the number of samples that are decoded at once (--max-samples "
        "in Inspect)"
    ),
    "load_in_4bit": f"set {arg('quantization')} to a format, or load a quantized checkpoint",
    "load_in_8bit": f"set {arg('quantization', 'fp8')}, or load a quantized checkpoint",
    "tokenizer": "remove this argument: treegen uses the tokenizer of the checkpoint",
    "enable_auto_tool_choice": (
        "remove this argument: the format of tool calls is recognized automatically"
    ),
    "tool_call_parser": (
        f"remove this argument, or set the format of tool calls with {arg('tool_format')}"
    ),
    "reasoning_parser": "remove this argument: the reasoning tags come from the chat template",
    "chat_template_content_format": _LEAVE_OUT,
    "disable_log_requests": "remove this argument: treegen does not log requests",
    "uvicorn_log_level": "remove this argument: the server prints only its address and errors",
    "max_logprobs": f"remove this argument: logprobs and {arg('prompt_logprobs')} have no limit",
    "enable_prefix_caching": (
        "remove this argument: shared prefixes of prompts are always computed once"
    ),
    "enable_chunked_prefill": (
        f"remove this argument: prompts are computed in chunks of {arg('prefill_chunk')}"
    ),
    "pipeline_parallel_size": "pipeline parallelism is not supported; remove this argument",
    "data_parallel_size": _MANY_MODELS,
    "dp": _MANY_MODELS,
    "enable_expert_parallel": (
        f"remove this argument: {arg('tensor_parallel_size')} divides the experts too"
    ),
    "limit_mm_per_prompt": "remove this argument: a prompt may have any number of images",
    "logits_processors": (
        f"logits processors are not supported; use {arg('logit_bias')}, allowed_token_ids or "
        "bad_words"
    ),
    "skip_special_tokens": "remove this argument: texts never contain special tokens",
    "spaces_between_special_tokens": "remove this argument: texts never contain special tokens",
    "truncate_prompt_tokens": "cut the prompt's token ids before the call",
    "tokenizer_mode": _LEAVE_OUT,
    "load_format": _LEAVE_OUT,
    "config_format": _LEAVE_OUT,
    "swap_space": _LEAVE_OUT,
    "cpu_offload_gb": _LEAVE_OUT,
    "max_seq_len_to_capture": _LEAVE_OUT,
    "max_lora_rank": _LEAVE_OUT,
    "max_loras": _LEAVE_OUT,
    "max_cpu_loras": _LEAVE_OUT,
    "hf_overrides": "change config.json in a copy of the checkpoint",
    "mm_processor_kwargs": _LEAVE_OUT,
    "disable_custom_all_reduce": _LEAVE_OUT,
    "distributed_executor_backend": _LEAVE_OUT,
    "compilation_config": _LEAVE_OUT,
    "skip_tokenizer_init": _LEAVE_OUT,
    "runner": "remove this argument: treegen generates and scores text",
    "download_dir": "set the environment variable HF_HOME to the directory",
    "seed": "set the seed in the sampling parameters",
    "disable_log_stats": _LEAVE_OUT,
    "use_cache": (
        "set the directory of the run with --output-path, and continue the run with --resume"
    ),
    "cache_requests": "remove this argument: prompts are tokenized again for each run",
    "max_batch_size": (
        "remove this argument, or limit the samples that are decoded at once with --max-rows"
    ),
    "show_config": (
        "use --print-config to print all settings, or read them in the run.json of the run"
    ),
    "metadata": "pass the arguments of lm-eval tasks with -T NAME=VALUE",
    "wandb_args": _NO_UPLOAD,
    "wandb_config_args": _NO_UPLOAD,
    "trackio_args": _NO_UPLOAD,
    "hf_hub_log_args": _NO_UPLOAD,
}
"""Names in other tools that have no counterpart here, with advice."""


def advise_foreign(name: str, known: Container[str]) -> tuple[str | None, str]:
    """Return the known name for a name of another tool, or None, and advice without it, or "".

    Args:
        name: The unknown name.
        known: The known names.
    """
    ours = FOREIGN.get(name)
    while ours is not None and ours not in known:  # as vLLM's best_of is n, and n is num_samples
        ours = FOREIGN.get(ours)
    if ours is not None:
        return ours, ""
    return None, _NO_COUNTERPART.get(name, "")


def describe_value(name: str) -> str:
    """Return the form of the value here for a name of another tool; "" if it is the same."""
    return _OTHER_VALUES.get(name, "")


def hint_at(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean NAME=?" for an unknown name, or advice, or ""."""
    known = list(known)
    ours, advice = advise_foreign(name, known)
    if advice:
        return f"; {advice}"
    near = [ours] if ours else find_near(name, known)
    if not near:
        return ""
    suggestions = " or ".join(arg(f"{other}=") for other in near)
    return f"; did you mean {suggestions}?{describe_value(name)}"


def hints_at(names: Sequence[str], hint: Callable[[str], str], otherwise: str = "") -> str:
    """Return the hints for unknown names, each after its name if there are several.

    Args:
        names: The unknown names.
        hint: Returns the hint for a name as `hint_at` does.
        otherwise: The end of the text if a name has no hint.
    """
    hints = [hint(name) for name in names]
    if len(names) == 1:
        return hints[0] or otherwise
    text = "".join(
        f"; {name}: {part.removeprefix('; ')}"
        for name, part in zip(names, hints, strict=True)
        if part
    )
    return text if all(hints) else f"{text}{otherwise}"


def with_hints(kind: _Kind) -> _Kind:
    """Make a dataclass raise InputError for an unknown argument, and say how to change a field."""
    init: Callable[..., None] = kind.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def init_checked(self: object, *args: Any, **arguments: Any) -> None:
        try:
            init(self, *args, **arguments)
        except TypeError:
            check_field_names(kind, arguments)
            raise

    def _refuse_change(_: object, name: str, value: object) -> None:
        raise FrozenInstanceError(
            f"{kind.__name__} cannot be changed; use dataclasses.replace(params, {name}=...)"
        )

    kind.__init__ = init_checked  # type: ignore[misc]
    kind.__setattr__ = _refuse_change  # type: ignore[assignment]
    return kind


def check_field_names(kind: Any, names: Iterable[object]) -> None:
    """Raise InputError for a name that is no argument of a public dataclass."""
    fields = list(kind.__dataclass_fields__)
    if unknown := [str(name) for name in names if name not in fields]:
        title = kind.__name__
        hints = hints_at(
            unknown,
            lambda name: hint_at(name, fields),
            f"; `help(treegen.{title})` lists all parameters",
        )
        raise InputError(f"{title} has no {' and no '.join(map(repr, unknown))}{hints}")
