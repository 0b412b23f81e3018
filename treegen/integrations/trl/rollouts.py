"""The rollout function of TRL's trainers: on the trainer's own module, as one tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

from treegen.common.formatting import parse_bytes
from treegen.errors import InputError, ModelError
from treegen.integrations.trl.settings import sampling_params, seed_of
from treegen.integrations.trl.tree import RolloutTree, tree_of
from treegen.llm import LLM
from treegen.model.load import from_module
from treegen.model.module_patch import patch_module
from treegen.model.options import check_known

_SHARE: Final = 0.3  # of a GPU's free memory; as TRL gives to vLLM


class RolloutResult(dict[str, Any]):
    """What TRL wants of a rollout: prompt_ids, completion_ids and logprobs, by sample.

    tree: what the samples share.
    """

    tree: RolloutTree


@dataclass(slots=True)
class _TrainerLLM:
    """The LLM of a trainer.

    step: of the training. calls: rollouts there so far, in training (True) and in evaluation.
    """

    llm: LLM | None = None
    step: int = -1
    calls: Counter[bool] = field(default_factory=Counter)

    def seed(self, trainer: Any) -> int:
        """The seed of the next rollout. The module is in the mode that the trainer has set."""
        step, trains = trainer.state.global_step, trainer.model.training
        if self.step != step:
            self.step, self.calls = step, Counter()
        # A training that goes on from a checkpoint does not evaluate again what it has before.
        self.calls[trains] += 1
        return seed_of(trainer, self.calls[trains] - 1, trains=trains)


class Rollouts:
    """A rollout function with options. It serves any number of trainers."""

    def __init__(self, *, memory: int | str | None = None, **options: Any) -> None:
        """Nothing is allocated before the first rollout.

        Args:
            memory: Bytes of the key-value cache, which stays while the model is trained. By default
                three tenths of a GPU's free memory.
            options: Those of LLM for a loaded model, such as max_rows or eager.

        Raises:
            InputError: an option is not known.
        """
        check_known(options, "options of rollouts")
        if memory is not None:
            parse_bytes(memory)
        self._options = {"memory": memory, "compile": False, **options}
        self._served: WeakKeyDictionary[Any, _TrainerLLM] = WeakKeyDictionary()

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> RolloutResult:
        """One completion for each prompt, by the weights that the trainer's model has now.

        Equal prompts are computed once, and get different samples. The module is given back as it
        was; see `treegen.model.module_patch`. Another call draws other samples, and a training that
        is run again, or goes on from a checkpoint, the same.

        Raises:
            InputError: a setting of the trainer cannot be honoured.
            ModelError: the model cannot be used, or would give wrong numbers.
            TreegenError: as for `LLM.generate`.
        """
        module = _module_of(trainer)
        prompt_ids, images, _ = trainer._tokenize_prompts(prompts)
        if images is not None:
            raise InputError("prompts have images; take them out, treegen trains on text alone")
        served = self._served.setdefault(trainer, _TrainerLLM())
        params = sampling_params(trainer, seed=served.seed(trainer))
        with patch_module(module):
            llm = self._llm_for(trainer, module)
            prompt_ids = [list(ids) for ids in prompt_ids]
            drawn = [completions[0] for completions in llm.generate(prompt_ids, params)]
        result = RolloutResult(
            prompt_ids=prompt_ids,
            completion_ids=[list(sample.tokens) for sample in drawn],
            logprobs=[list(sample.logprobs) for sample in drawn],
        )
        texts = zip(result["prompt_ids"], result["completion_ids"], strict=True)
        result.tree = tree_of([before + after for before, after in texts])
        return result

    def _llm_for(self, trainer: Any, module: Any) -> LLM:
        """The LLM of a trainer; made at its first rollout, and anew if weights were replaced."""
        served = self._served[trainer]
        if served.llm is None or not _still_serves(served.llm, module):
            served.llm = None  # first, so that two caches are never there at once
            served.llm = self._llm(trainer, module)
        return served.llm

    def _llm(self, trainer: Any, module: Any) -> LLM:
        options = dict(self._options)
        if options["memory"] is None and module.device.type == "cuda":
            options["memory"] = int(_SHARE * torch.cuda.mem_get_info(module.device)[0])
        return LLM(from_module(module), tokenizer=trainer._tokenizer, **options)


rollout: Final = Rollouts()
"""The rollout function with default options."""


def _still_serves(llm: LLM, module: Any) -> bool:
    """Whether an LLM is of a module, and CUDA graphs find its weights where they were."""
    try:
        llm.model.check_weights()
    except ModelError:
        return False
    return llm.model.module is module


def _module_of(trainer: Any) -> Any:
    """The transformers module that a trainer trains, with its adapters live.

    Raises:
        InputError: its weights are not all here, or a text is not all that the adapters change.
    """
    if trainer.use_vllm:
        raise InputError("use_vllm keeps a second copy of the weights; leave it out")
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise InputError(
            "weights that are sharded by DeepSpeed or FSDP are not supported; "
            "train with DDP, or leave rollout_func out"
        )
    module = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(module, "get_base_model"):
        if any(config.is_prompt_learning for config in module.peft_config.values()):
            raise InputError(
                "adapters that learn prompts are not supported; LoRA and the like are; "
                "use one of those"
            )
        module = module.get_base_model()
    return module
