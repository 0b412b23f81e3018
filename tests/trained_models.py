"""Trains the tiny models that tests need to have learnt a few texts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM


def save_trained_model(
    directory: Path,
    config: Any,
    tokenizer: Any,
    loss_of: Callable[[Any], Tensor],
    *,
    steps: int,
    enough: float = 0.0,
    max_loss: float,
    rate: float = 3e-3,
    one_cycle: bool = False,
) -> Path:
    """Train a model from random weights, and write it with its tokenizer.

    Args:
        loss_of: Returns the loss of the model.
        steps: Maximum number of steps.
        enough: Loss at which training ends early.
        max_loss: Maximum loss at the end.
        rate: Learning rate.
        one_cycle: Whether the rate follows one cycle.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        cycle = torch.optim.lr_scheduler.OneCycleLR
        schedule = cycle(optimizer, rate, total_steps=steps) if one_cycle else None
        for _ in range(steps):
            loss = loss_of(model)
            if loss < enough:
                break
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
    assert loss < max_loss, loss
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
