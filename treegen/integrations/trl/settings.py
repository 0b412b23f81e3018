"""A trainer's settings as sampling parameters; what cannot be honoured is refused by name."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from treegen.common.params import SamplingParams
from treegen.errors import InputError

# Settings of transformers' generation, by their names there.
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
# What changes no sample, or is read elsewhere here.
_KNOWN: Final = (
    "do_sample",
    "eos_token_id",
    "pad_token_id",
    "bos_token_id",
    "cache_implementation",
    "use_cache",
)


def sampling_params(trainer: Any, *, seed: int) -> SamplingParams:
    """The parameters of one completion of a trainer's prompt.

    Log-probabilities are those of the draw, after temperature and filters, as TRL asks vLLM for.

    Raises:
        InputError: a setting of the trainer cannot be honoured.
    """
    given = {name: value for name, value in trainer.generation_kwargs.items() if value is not None}
    refused = [name for name in given if name not in (*_NAMES, *_KNOWN)]
    if refused:
        raise InputError(
            f"treegen cannot honour {', '.join(refused)} of the trainer's generation_kwargs; "
            f"it knows {', '.join((*_NAMES, *_KNOWN))}; leave out the others"
        )
    settings = {ours: given[theirs] for theirs, ours in _NAMES.items() if theirs in given}
    if not given.get("do_sample", True):
        settings["temperature"] = 0
    ends = given.get("eos_token_id", [])
    return SamplingParams(
        **settings,
        seed=seed,
        ignore_eos=True,  # for the trainer says at which tokens to end
        stop_token_ids=[ends] if isinstance(ends, int) else ends,
        logprobs_mode="processed_logprobs",
    )


def seed_of(trainer: Any, call: int, *, trains: bool) -> int:
    """The seed of a rollout: another one in each call, and the same in each run of the trainer.

    Args:
        call: How many rollouts came before it at this step, in training or in evaluation.
        trains: Which of the two it is for.
    """
    place = (trainer.accelerator.process_index, trainer.state.global_step, call)
    parts = (trainer.args.seed, *place, *(() if trains else (1,)))
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))
