"""Experts for tests: tiny layers of them, and which of them tokens choose."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM


def tiny_experts(family: str, *, min_dims: int = 1, **settings: Any) -> Any:
    """Return a model of one layer with six experts; weights of `min_dims` dimensions are drawn."""
    config = AutoConfig.for_model(
        family,
        vocab_size=64,
        hidden_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=6,
        num_local_experts=6,
        num_experts_per_tok=2,
        n_routed_experts=6,
        intermediate_size=32,
        moe_intermediate_size=32,
        **settings,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    for weight in model.parameters():
        if weight.dim() >= min_dims:
            weight.normal_()
    return model


def choose(tokens: int, each: int, num: int) -> Tensor:
    """Experts of each token. The last but one has nothing to do, and some choose none."""
    chosen_TX = torch.rand(tokens, num + 1).argsort(1)[:, :each]
    return torch.where(chosen_TX == num - 2, num - 1, chosen_TX)
