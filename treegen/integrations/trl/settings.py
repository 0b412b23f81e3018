"""Converts a trainer's settings to sampling parameters; unsupported settings are errors."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from treegen.common.params import SamplingParams
from treegen.errors import InputError

# Fields of SamplingParams, by their names in transformers' generation.
_NAMES: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
}
# Settings that change no sample, or that are read elsewhere in this module.
_KNOWN: Final = (
    "do_sample",
    "eos_token_id",
    "pad_token_id",
    "bos_token_id",
    "cache_implementation",
    "use_cache",
)


def sampling_params(trainer: Any, *, seed: int) -> SamplingParams:
    """Return the sampling parameters of one completion of a trainer's prompt.

    Log-probabilities are those of the sampled distribution, after temperature and filters, as TRL
    requests from vLLM.

    Args:
        trainer: The trainer.
        seed: Seed of the rollout.

    Raises:
        InputError: A setting of the trainer is not supported.
    """
    set_kwargs = {
        name: value for name, value in trainer.generation_kwargs.items() if value is not None
    }
    refused = [name for name in set_kwargs if name not in (*_NAMES, *_KNOWN)]
    if refused:
        raise InputError(
            f"treegen cannot honour {', '.join(refused)} of the trainer's generation_kwargs; "
            f"it knows {', '.join((*_NAMES, *_KNOWN))}; leave out the others"
        )
    settings = {ours: set_kwargs[theirs] for theirs, ours in _NAMES.items() if theirs in set_kwargs}
    if not set_kwargs.get("do_sample", True):
        settings["temperature"] = 0
    ends = set_kwargs.get("eos_token_id", [])
    return SamplingParams(
        **settings,
        seed=seed,
        ignore_eos=True,  # because the trainer gives the tokens that end a completion
        stop_token_ids=[ends] if isinstance(ends, int) else ends,
        logprobs_mode="processed_logprobs",
    )


def seed_of(trainer: Any, call: int, *, trains: bool) -> int:
    """Return the seed of a rollout: new in each call, and the same in each run of the trainer.

    Args:
        trainer: The trainer.
        call: Number of earlier rollouts in this step, counted apart for training and evaluation.
        trains: Whether the rollout is for training; otherwise it is for evaluation.
    """
    place = (trainer.accelerator.process_index, trainer.state.global_step, call)
    parts = (trainer.args.seed, *place, *(() if trains else (1,)))
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))
