"""The tree loss in TRL's trainers, against the same trainers with TRL's own forward pass."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_tokenizer
from transformers import TrainerCallback
from trl_trainers import PROMPTS, SETTINGS, Replayed, make_trainer, stored_module, train

from treegen.errors import InputError, ModelError
from treegen.integrations.trl import rollout, with_tree_loss

trl = pytest.importorskip("trl.trainer", reason="needs trl")
datasets = pytest.importorskip("datasets")

pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning")

ROUTER = {"output_router_logits": True}
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "grpo": ("GRPO", "llama", {}, {"loss_type": "grpo", "beta": 0.1, "temperature": 0.7}),
    "dapo": ("GRPO", "llama", {}, {"loss_type": "dapo"}),
    "several steps for a rollout": (
        "GRPO",
        "llama",
        {},
        {"steps_per_generation": 2, "num_iterations": 2, "max_steps": 4},
    ),
    "entropy": (
        "GRPO",
        "llama",
        {},
        {"entropy_coef": 0.01, "top_entropy_quantile": 0.5, "gradient_accumulation_steps": 2},
    ),
    "loss of the router": ("GRPO", "qwen3_moe", ROUTER, {"router_aux_loss_coef": 0.1}),
    "rloo": ("RLOO", "llama", {}, {}),
}


def compare(ours: Any, stock: Any, limit: float = 1e-5) -> None:
    """Compare the weights and the logged metrics of two trainers."""
    wanted = dict(stock.model.named_parameters())
    for name, weight in ours.model.named_parameters():
        assert (weight - wanted[name]).norm() <= limit * wanted[name].norm(), name
    for one, other in zip(ours.state.log_history[:2], stock.state.log_history[:2], strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() & {"entropy", "aux_loss", "kl", "reward", "mean_token_accuracy"}:
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), name


def stock_class(kind: str) -> Any:
    """Return TRL's trainer; for RLOO one that takes a rollout function."""
    trainer: Any = getattr(trl, f"{kind}Trainer")
    if kind != "RLOO":
        return trainer
    forward = trainer._get_per_token_logps_and_entropies
    return type(
        "Stock", (with_tree_loss(trainer),), {"_get_per_token_logps_and_entropies": forward}
    )


@pytest.mark.parametrize("case", CASES)
def test_steps_give_the_weights_of_stock_trl(tmp_path: Path, case: str) -> None:
    kind, family, of_model, settings = CASES[case]
    rollouts, trainers = Replayed(), []
    for trainer_class in (stock_class(kind), with_tree_loss(getattr(trl, f"{kind}Trainer"))):
        module = stored_module(tmp_path, family, **of_model)
        config = getattr(trl, f"{kind}Config")
        trainer = make_trainer(
            trainer_class, config, module, tmp_path, rollouts.rewind(), **settings
        )
        trainer.train()
        trainers.append(trainer)
    compare(trainers[1], trainers[0])


class Gradients(TrainerCallback):  # type: ignore[misc]
    """Keeps the gradients of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def on_pre_optimizer_step(self, *_: Any, model: Any, **more: Any) -> None:
        self.steps.append({name: each.grad.clone() for name, each in model.named_parameters()})


def test_gradients_with_tied_embeddings_are_those_of_stock_trl(tmp_path: Path) -> None:
    """The steps are those of SGD, because AdamW turns rounding errors of gradients into steps."""
    rollouts, trainers, gradients = Replayed(), [], []
    for trainer_class in (trl.GRPOTrainer, with_tree_loss(trl.GRPOTrainer)):
        module = stored_module(tmp_path, tie_word_embeddings=True)
        how: Any = {"optim": "sgd", "learning_rate": 0.1}
        trainer = make_trainer(
            trainer_class, trl.GRPOConfig, module, tmp_path, rollouts.rewind(), **how
        )
        gradients.append(Gradients())
        trainer.add_callback(gradients[-1])
        trainer.train()
        trainers.append(trainer)
    compare(trainers[1], trainers[0], limit=1e-6)
    for stock, ours in zip(*(each.steps for each in gradients), strict=True):
        for name in stock:
            assert (ours[name] - stock[name]).norm() <= 1e-5 * stock[name].norm(), name


def test_log_probabilities_of_a_rollout_are_those_of_the_loss(tmp_path: Path) -> None:
    trainer = make_trainer(
        with_tree_loss(trl.GRPOTrainer),
        trl.GRPOConfig,
        stored_module(tmp_path),
        tmp_path,
        rollout,
        temperature=0.7,
    )
    result = rollout(PROMPTS[:1] * 8, trainer)
    num = max(map(len, result["completion_ids"]))
    rows = [
        before + after + [0] * (num - len(after))
        for before, after in zip(result["prompt_ids"], result["completion_ids"], strict=True)
    ]
    read = [
        [1] * (len(row) - num) + [1] * len(after)
        for row, after in zip(rows, result["completion_ids"], strict=True)
    ]
    mask = torch.tensor([each + [0] * (len(rows[0]) - len(each)) for each in read])
    seen: list[int] = []
    embedding = trainer.model.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda _, args: seen.append(args[0].numel()))
    with torch.no_grad():
        logprobs, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, torch.tensor(rows), mask, num
        )
    for got, want in zip(logprobs, result["logprobs"], strict=True):
        torch.testing.assert_close(got[: len(want)], torch.tensor(want), atol=1e-5, rtol=1e-5)
    # The last token before a branch is packed once for each branch.
    assert result.tree.num_tokens <= seen[0] <= result.tree.num_tokens + 8 < mask.sum()


SFT: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"packing": True, "per_device_train_batch_size": 1, "max_length": 128},
    "dft": {"loss_type": "dft", "gradient_accumulation_steps": 2},
}


def make_sft(folder: Path, trainer_class: Any, **settings: Any) -> Any:
    rows = [
        {"prompt": prompt, "completion": answer}
        for prompt in PROMPTS
        for answer in (" He has 8.", " He has 2 apples", " 8", " Bob")
    ]
    shared = {name: SETTINGS[name] for name in SETTINGS if "generations" not in name}
    shared.pop("max_completion_length")
    return trainer_class(
        model=stored_module(folder),
        args=trl.SFTConfig(output_dir=str(folder), **{**shared, **settings}),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tiny_tokenizer(),
    )


@pytest.mark.parametrize("case", SFT)
def test_sft_gives_the_weights_of_stock_trl(tmp_path: Path, case: str) -> None:
    trainers = []
    for trainer_class in (trl.SFTTrainer, with_tree_loss(trl.SFTTrainer)):
        trainers.append(make_sft(tmp_path, trainer_class, **SFT[case]))
        trainers[-1].train()
    compare(trainers[1], trainers[0])


def test_adapters_train_and_dropout_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    rollouts, trainers = Replayed(), []
    for trainer_class in (trl.GRPOTrainer, with_tree_loss(trl.GRPOTrainer)):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
        module = peft.get_peft_model(stored_module(tmp_path), config)
        trainer = make_trainer(
            trainer_class, trl.GRPOConfig, module, tmp_path, rollouts.rewind(), beta=0.1
        )
        trainer.train()
        trainers.append(trainer)
    compare(trainers[1], trainers[0])
    config = peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.1)
    module = peft.get_peft_model(stored_module(tmp_path), config)
    tree_class = with_tree_loss(trl.GRPOTrainer)
    trainer = make_trainer(tree_class, trl.GRPOConfig, module, tmp_path, rollout)
    with pytest.raises(ModelError, match=r"lora_dropout\.default \(Dropout\) has p 0\.1"):
        trainer.train()
    trainer = make_trainer(
        tree_class,
        trl.GRPOConfig,
        stored_module(tmp_path),
        tmp_path,
        rollout,
        neftune_noise_alpha=5,
    )
    with pytest.raises(ModelError, match="neftune_noise_alpha 5"):
        trainer.train()


@pytest.mark.filterwarnings("ignore:.label_smoothing_factor. is deprecated:FutureWarning")
def test_what_a_tree_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"GRPOTrainer, RLOOTrainer, SFTTrainer.*got int"):
        with_tree_loss(int)
    trainer = make_sft(tmp_path, with_tree_loss(trl.SFTTrainer), label_smoothing_factor=0.1)
    with pytest.raises(InputError, match="remove compute_loss_func and label_smoothing"):
        trainer.train()
    trainer = make_trainer(
        with_tree_loss(trl.GRPOTrainer), trl.GRPOConfig, stored_module(tmp_path), tmp_path, rollout
    )
    ids, mask = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[1, 0, 1, 1]])
    forward = trainer._get_per_token_logps_and_entropies
    with pytest.raises(InputError, match="padding between tokens"):
        forward(trainer.model, ids, mask, 2)
    with pytest.raises(InputError, match="the batch has token_type_ids"):
        forward(trainer.model, ids, torch.ones_like(ids), 2, token_type_ids=ids)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dapo", pytest.param("rloo", marks=pytest.mark.soak)])
def test_two_ranks_give_the_weights_of_one_process(tmp_path: Path, kind: str) -> None:
    program = str(Path(__file__).parents[2] / "trl_trainers.py")
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    train(kind, one, rank=0, size=1)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    command = [sys.executable, program, kind, str(two), "2"]
    with subprocess.Popen(command, env=environment, process_group=0) as ranks:
        try:
            assert ranks.wait(timeout=240) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(ranks.pid, signal.SIGKILL)
    weights = torch.load(two / "weights")
    for name, weight in torch.load(one / "weights").items():
        assert (weights[name] - weight).norm() <= 1e-5 * weight.norm(), name
