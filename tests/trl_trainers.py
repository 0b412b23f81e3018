"""Small TRL trainers with rollouts that can be replayed; run as a program, several ranks."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny_module, tiny_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from treegen.integrations.trl import rollout, with_tree_loss

PROMPTS = ["Ann has 3 apples", "Ann has 14 apples and Bob", "Question:", "Answer: They"]
SETTINGS = {
    "max_steps": 2,
    "max_completion_length": 10,
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "disable_tqdm": True,
}


def stored_module(folder: Path, family: str = "llama", **settings: Any) -> PreTrainedModel:
    """Return a module that is stored in a folder, so that TRL can load it as a reference."""
    tiny_module(family, **settings).save_pretrained(folder / family)
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder / family, attn_implementation="eager", dtype="float32"
    )
    return loaded


class Replayed:
    """A rollout function that returns the same rollouts again after `rewind`."""

    def __init__(self, inner: Any = rollout) -> None:
        self.inner, self.at = inner, 0
        self.results: list[dict[str, Any]] = []

    def rewind(self) -> Replayed:
        self.at = 0
        return self

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        if self.at == len(self.results):
            self.results.append(self.inner(prompts, trainer))
        self.at += 1
        return dict(self.results[self.at - 1])


def different_letters(completions: Sequence[str], **_: Any) -> list[float]:
    return [float(len(set(each))) for each in completions]


def make_trainer(
    trainer_class: Any, config: Any, module: Any, folder: Path, rollout_func: Any, **settings: Any
) -> Any:
    from datasets import Dataset

    return trainer_class(
        model=module,
        args=config(output_dir=str(folder), **{**SETTINGS, **settings}),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        reward_funcs=different_letters,
        processing_class=tiny_tokenizer(),
        rollout_func=rollout_func,
    )


def fixed_rollout(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
    """Return completions that depend on the prompt and on its place in the whole batch."""
    first = trainer.accelerator.process_index * len(prompts)
    ids = trainer.processing_class(list(prompts))["input_ids"]
    after = []
    for place, prompt in enumerate(prompts, start=first):
        generator = torch.Generator().manual_seed(len(prompt) + 100 * trainer.state.global_step)
        trunk = torch.randint(3, 300, (4,), generator=generator).tolist()
        generator.manual_seed(place)
        num = int(torch.randint(1, 6, (), generator=generator))
        after.append(trunk + torch.randint(3, 300, (num,), generator=generator).tolist())
    logprobs = [[0.0] * len(each) for each in after]
    return {"prompt_ids": ids, "completion_ids": after, "logprobs": logprobs}


def train(kind: str, folder: Path, rank: int, size: int) -> None:
    """Train as one rank; the first stores the weights."""
    import trl

    module = stored_module(folder / f"rank{rank}")
    name = "RLOO" if kind == "rloo" else "GRPO"
    settings: dict[str, Any] = {"loss_type": kind} if name == "GRPO" else {}
    trainer = make_trainer(
        with_tree_loss(getattr(trl, f"{name}Trainer")),
        getattr(trl, f"{name}Config"),
        module,
        folder,
        fixed_rollout,
        per_device_train_batch_size=8 // size,
        ddp_backend="gloo" if size > 1 else None,
        **settings,
    )
    trainer.train()
    assert trainer.accelerator.num_processes == size
    if trainer.accelerator.process_index == 0:
        torch.save(trainer.accelerator.unwrap_model(trainer.model).state_dict(), folder / "weights")


def main(kind: str, folder: Path, size: int) -> None:
    """Train with one process per rank; this process is rank 0 and forks the others.

    They are forked once everything is imported, because an import takes longer than the training.
    """
    for name in ("datasets", "trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer"):
        import_module(name)
    os.environ["WORLD_SIZE"] = str(size)
    gc.freeze()  # collections in a fork would copy all pages
    pids = []
    for rank in reversed(range(size)):
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        if rank and not (pid := os.fork()):
            train(kind, folder, rank, size)
            return
        if rank:
            pids.append(pid)
    train(kind, folder, 0, size)
    for pid in pids:
        assert os.waitpid(pid, 0) == (pid, 0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    os._exit(0)  # finalizing the modules takes seconds
