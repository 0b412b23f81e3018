"""Rollouts of TRL's trainers: samples from the trainer's own module, as one tree.

Use it by `rollout_func=treegen.integrations.trl.rollout`. `RolloutTree` is the prefix tree of a
rollout's samples, for trainers that compute shared prefixes once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
import torch

from treegen.common.checks import CacheMode, check_cache_mode
from treegen.common.formatting import parse_bytes
from treegen.common.params import SamplingParams
from treegen.errors import InputError, ModelError
from treegen.integrations.trl_loss import with_tree_loss as with_tree_loss
from treegen.llm import LLM
from treegen.model.load import from_module, patch_module
from treegen.model.options import check_known
from treegen.prompts.rollout_tree import RolloutTree as RolloutTree
from treegen.prompts.rollout_tree import Segment as Segment
from treegen.prompts.rollout_tree import tree_of as tree_of

# Fields of SamplingParams by their names in the generation settings of transformers.
_PARAM_NAMES: Final = {
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
_ALLOWED: Final = (
    "do_sample",
    "eos_token_id",
    "pad_token_id",
    "bos_token_id",
    "cache_implementation",
    "use_cache",
)
_MEMORY_SHARE: Final = 0.3  # share of a GPU's free memory, as TRL gives to vLLM


class RolloutResult(dict[str, Any]):
    """What TRL expects of a rollout: prompt_ids, completion_ids and logprobs, by sample."""

    tree: RolloutTree
    """What the samples share."""


@dataclass(slots=True)
class _TrainerLLM:
    """The LLM of a trainer."""

    llm: LLM | None = None  # the LLM; None before the first rollout
    step: int = -1  # the training step of the last rollout
    # Number of rollouts in that step, in training (True) and in evaluation (False).
    calls: Counter[bool] = field(default_factory=Counter)

    def seed(self, trainer: Any) -> int:
        """Return the seed of the next rollout, which is the same in each run of the trainer.

        The mode of the module (`training`) shows whether this is an evaluation.
        """
        step, trains = trainer.state.global_step, trainer.model.training
        if self.step != step:
            self.step, self.calls = step, Counter()
        # Count evaluations apart, because a resumed training does not repeat earlier evaluations.
        call_key = (trainer.accelerator.process_index, step, self.calls[trains])
        self.calls[trains] += 1
        parts = (trainer.args.seed, *call_key, *(() if trains else (1,)))
        return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))


class Rollouts:
    """A rollout function with options. It serves any number of trainers."""

    def __init__(self, *, memory: int | str | None = None, **options: Any) -> None:
        """Store the options; nothing is allocated before the first rollout.

        Args:
            memory: Size of the key-value cache, in bytes or as text such as "8GiB". It stays
                allocated while the model is trained. By default three tenths of a GPU's free
                memory.
            **options: Options of LLM for a loaded model, such as max_rows or eager.

        Raises:
            InputError: An option is unknown.
        """
        check_known(options, "options of rollouts")
        if memory is not None:
            parse_bytes(memory)
        self._options = {"memory": memory, "compile": False, **options}
        self._served: WeakKeyDictionary[Any, _TrainerLLM] = WeakKeyDictionary()

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> RolloutResult:
        """Return one completion per prompt, by the current weights of the trainer's model.

        Equal prompts are computed once, and get different samples. The module is restored
        afterwards; see `treegen.model.load.patch_module`. Each call draws other samples. A
        training that is repeated, or resumed from a checkpoint, draws the same samples.

        Args:
            prompts: The prompts, as TRL passes them.
            trainer: The trainer.

        Raises:
            InputError: A setting of the trainer is not supported.
            ModelError: The model cannot be used, or would give wrong numbers.
            TreegenError: As for `LLM.generate`.
        """
        module = _module_of(trainer)
        prompt_ids = self._encode(prompts, trainer)
        served = self._served.setdefault(trainer, _TrainerLLM())
        params = _sampling_params(trainer, seed=served.seed(trainer))
        with patch_module(module):
            llm = self._llm_for(trainer, module)
            result = self._draw(llm, prompts, prompt_ids, params)
        texts = zip(result["prompt_ids"], result["completion_ids"], strict=True)
        result.tree = tree_of([before + after for before, after in texts])
        return result

    def _encode(self, prompts: Sequence[Any], trainer: Any) -> list[list[int]]:
        """Return the token ids of prompts."""
        prompt_ids, images, _ = trainer._tokenize_prompts(prompts)
        if images is not None:
            raise InputError(
                "prompts have images, but treegen trains only on text; remove the images"
            )
        return [list(ids) for ids in prompt_ids]

    def _draw(
        self,
        llm: LLM,
        prompts: Sequence[Any],
        prompt_ids: list[list[int]],
        params: SamplingParams,
    ) -> RolloutResult:
        """Return what TRL expects, with a completion of each prompt.

        Args:
            llm: The LLM of the trainer.
            prompts: The prompts, as TRL passes them.
            prompt_ids: Their token ids.
            params: The sampling parameters.
        """
        samples = [completions[0] for completions in llm.generate(prompt_ids, params)]
        return RolloutResult(
            prompt_ids=prompt_ids,
            completion_ids=[list(sample.tokens) for sample in samples],
            logprobs=[list(sample.logprobs) for sample in samples],
        )

    def _llm_for(self, trainer: Any, module: Any) -> LLM:
        """Return the LLM of a trainer, created at first use and again when weights are replaced."""
        served = self._served[trainer]
        if served.llm is None or not _still_serves(served.llm, module):
            served.llm = None  # first, so that two caches never exist at once
            options = dict(self._options)
            if options["memory"] is None and module.device.type == "cuda":
                options["memory"] = int(_MEMORY_SHARE * torch.cuda.mem_get_info(module.device)[0])
            served.llm = LLM(from_module(module), tokenizer=trainer._tokenizer, **options)
        return served.llm


rollout: Final = Rollouts()
"""The rollout function with default options."""


class WeightTransfer:
    """Loads a trainer's weights into an LLM; the `weight_transfer` of TRL's AsyncGRPOTrainer.

    The LLM goes on sampling meanwhile. Weights that the trainer does not train stay.
    """

    def __init__(self, llm: LLM, *, cache: CacheMode = "keep") -> None:
        """Set up the transfer.

        Args:
            llm: The LLM that samples. An AsyncLLM may serve it.
            cache: As for `LLM.update`. Default: the keys of the old weights stay.

        Raises:
            InputError: there is no such mode.
        """
        check_cache_mode(cache)
        self._llm, self._cache = llm, cache

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the weights of the trainer.

        Raises:
            TreegenError: as for `LLM.update`.
        """

        def all_weights() -> Iterator[tuple[str, torch.Tensor]]:
            sent = set()
            for name, tensor in iterator:
                sent.add(name)
                yield name, tensor
            for name, weight in self._llm.model.module.named_parameters():
                if name not in sent:
                    yield name, weight

        self._llm.update(all_weights(), cache=self._cache)

    def init_weight_transfer(self) -> None:
        """Do nothing, because the LLM is in this process."""

    def pause(self) -> None:
        """Do nothing, because an update waits for the end of a step."""

    resume = destroy = pause


def _still_serves(llm: LLM, module: Any) -> bool:
    """Return whether an LLM uses this module, and its weights are where CUDA graphs find them."""
    try:
        llm.model.check_weights()
    except ModelError:
        return False
    return llm.model.module is module


def _module_of(trainer: Any) -> Any:
    """Return the transformers module that a trainer trains, with its adapters active.

    Raises:
        InputError: The weights are sharded, vLLM holds a second copy, or an adapter learns prompts.
    """
    if trainer.use_vllm:
        raise InputError(
            "use_vllm is not supported, because vLLM would keep a second copy of the weights; "
            "set use_vllm=False"
        )
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise InputError(
            "weights that are sharded by DeepSpeed or FSDP are not supported; train with DDP, or "
            "remove rollout_func"
        )
    module = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(module, "get_base_model"):
        if any(config.is_prompt_learning for config in module.peft_config.values()):
            raise InputError(
                "prompt-learning adapters are not supported; use LoRA or a similar kind"
            )
        module = module.get_base_model()
    return module


def _sampling_params(trainer: Any, *, seed: int) -> SamplingParams:
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
    unsupported = [name for name in set_kwargs if name not in (*_PARAM_NAMES, *_ALLOWED)]
    if unsupported:
        raise InputError(
            f"treegen does not support {', '.join(unsupported)} in the trainer's "
            f"generation_kwargs; use only {', '.join((*_PARAM_NAMES, *_ALLOWED))}"
        )
    settings = {
        param: set_kwargs[option] for option, param in _PARAM_NAMES.items() if option in set_kwargs
    }
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
