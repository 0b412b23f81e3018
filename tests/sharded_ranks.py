"""Two ranks that check gradients of tree losses over weights that FSDP2 has sharded."""

from __future__ import annotations

import copy
import gc
import os
import sys
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from tiny_models import config_of, spread_weights
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from treegen.integrations.trl_loss import _TreeModel
from treegen.train import tree_logprobs, tree_of

SIZE = 2
ACCELERATE: Any = import_module("accelerate.utils.fsdp_utils")
PLUGIN: Any = import_module("accelerate").FullyShardedDataParallelPlugin


def texts_of(rank: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(rank)
    trunk = torch.randint(3, 300, (12,), generator=draw).tolist()
    return [
        trunk + torch.randint(3, 300, (num,), generator=draw).tolist() for num in (3, 5 + rank, 4)
    ]


def tree_loss(module: nn.Module, rank: int) -> Tensor:
    values = tree_logprobs(module, tree_of(texts_of(rank)), prompt_lengths=[8] * 3)
    return sum((row * (1 + at)).sum() for at, row in enumerate(values))  # type: ignore[return-value]


def lone_loss(module: nn.Module, rank: int) -> Tensor:
    """A loss for which only the first rank has tokens to score."""
    texts = texts_of(rank)
    lengths = [len(text) if rank else 8 for text in texts]
    return torch.cat(tree_logprobs(module, tree_of(texts), prompt_lengths=lengths)).sum()


def trl_loss(module: nn.Module, rank: int) -> Tensor:
    """A loss as TRL computes it, with its own head, from a padded batch."""
    texts = [torch.tensor(text) for text in texts_of(rank)]
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=2)
    mask = nn.utils.rnn.pad_sequence(
        [torch.ones_like(text) for text in texts], batch_first=True, padding_value=0
    )
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :8] = -100
    output = _TreeModel(module)(
        input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True
    )
    loss: Tensor = (output.log_probs * torch.arange(1, 4)[:, None]).sum()
    return loss


def shard(module: Any) -> None:
    """Shard a module layer by layer."""
    for layer in module.model.layers:
        fully_shard(layer)
    fully_shard(module)


def shard_as_accelerate(module: Any) -> None:
    """Shard a module as Trainer does with `fsdp_version` 2."""
    plugin = PLUGIN(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    state = SimpleNamespace(fsdp_plugin=plugin)
    ACCELERATE.fsdp2_prepare_model(
        SimpleNamespace(
            state=state, mixed_precision="no", device=torch.device("cpu"), is_main_process=True
        ),
        module,
    )
    assert all(isinstance(layer, FSDPModule) for layer in module.model.layers)


def check(
    family: str,
    loss_of: Callable[[nn.Module, int], Tensor],
    shard_it: Callable[[Any], None],
    **settings: Any,
) -> None:
    rank = dist.get_rank()
    module: Any = AutoModelForCausalLM.from_config(config_of(family, **settings))
    spread_weights(module, 0)
    module.train()
    module.gradient_checkpointing_enable({"use_reentrant": False})
    whole = copy.deepcopy(module)
    for each in (whole, module):
        if loss_of is trl_loss:
            add_fused_lm_head(each)
    # The mean of a loss for each rank, as that of FSDP.
    (sum(loss_of(whole, other) for other in range(SIZE)) / SIZE).backward()  # type: ignore[union-attr]
    shard_it(module)
    assert issubclass(type(module), FSDPModule)
    loss_of(module, rank).backward()
    wanted = dict(whole.named_parameters())
    for name, weight in module.named_parameters():
        want, got = wanted[name].grad, weight.grad
        assert (want is None) == (got is None), name
        if want is not None:
            assert float(want.norm()) > 0 and want.isfinite().all(), name
            assert (got.full_tensor() - want).norm() <= 1e-5 * want.norm(), (family, name)


def check_all(store: str, rank: int) -> None:
    """Run all checks as one rank."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE)
    for family in ("qwen3_moe", "gemma3_text"):
        check(family, tree_loss, shard)
    check("llama", tree_loss, shard_as_accelerate)
    check("llama", lone_loss, shard)
    for ties in (False, True):
        check("llama", trl_loss, shard_as_accelerate, tie_word_embeddings=ties)
    dist.destroy_process_group()


if __name__ == "__main__":
    # The other rank is forked, because the imports take longer than the checks.
    gc.freeze()  # collections in a fork would copy all pages
    pid = os.fork()
    check_all(sys.argv[1], rank=0 if pid else 1)
    assert not pid or os.waitpid(pid, 0) == (pid, 0)
    os._exit(0)  # finalizing the modules takes seconds
