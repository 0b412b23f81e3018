"""Reward models whose head is a small network that transformers has no class for.

Qwen's process reward models (`ForProcessRewardModel`) and reward models (`ForRewardModel`) come
with their own code, which is not run: their layers are transformers', and their head is two
matrices with a ReLU in between, named `score.0` and `score.2`. Skywork's process reward models
(`ForPrmModel`) have a value head with one output, named `v_head.summary`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModel

from treegen.errors import ModelError

_QWENS_MARK: Final = "<extra_0>"


class RewardModel(nn.Module):
    """The layers of a language model, with a head on each token or on the last one.

    Attributes:
        base_model: The layers.
        score: The head.
        config: The configuration, with the head's number of labels.
        read_at: The verifier settings with which such models are published; empty if unknown.
    """

    def __init__(self, body: Any, head: nn.Sequential, *, pooled: bool, read_at: str = "") -> None:
        super().__init__()
        self.base_model, self.score, self._pooled = body, head, pooled
        self.read_at = read_at
        self.config: Any = body.config
        self.config.num_labels = head[-1].out_features

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The type to compute in."""
        return next(self.parameters()).dtype

    def get_output_embeddings(self) -> None:
        """Return None, because the model predicts no tokens."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        """Return logits [R, tokens, labels], or [R, labels] at each text's last token."""
        hidden = self.base_model(input_ids=input_ids, attention_mask=attention_mask)
        logits: Tensor = self.score(hidden.last_hidden_state)
        if self._pooled:
            is_text = input_ids != self.config.pad_token_id
            places = torch.arange(input_ids.shape[1], device=input_ids.device)
            last = (places * is_text).argmax(-1)
            logits = logits[torch.arange(len(logits), device=last.device), last]
        return SimpleNamespace(logits=logits)


def read_reward_model(
    directory: Path, config: Any, dtype: torch.dtype, tokenizer: Any, *, pooled: bool
) -> RewardModel:
    """Load a reward model with a head of its own.

    Args:
        directory: The checkpoint's directory.
        config: Its configuration.
        dtype: The type to compute in.
        tokenizer: Its tokenizer, whose vocabulary shows whether it has a mark for steps.
        pooled: Whether to judge only at the last token.

    Raises:
        ModelError: a weight is missing.
    """
    body, info = AutoModel.from_pretrained(
        directory,
        config=config,
        dtype=dtype,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    if info["missing_keys"]:
        raise ModelError(
            f"{directory} has no weights for {min(info['missing_keys'])}; download it again"
        )
    head_weights: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            heads = ("score.", "v_head.")
            names = [name for name in stored.keys() if name.startswith(heads)]  # noqa: SIM118
            head_weights |= {name: stored.get_tensor(name) for name in names}
    if "v_head.summary.weight" in head_weights:
        head = nn.Sequential(_linear(head_weights, "v_head.summary", directory, dtype))
        return RewardModel(body, head, pooled=pooled, read_at=r"mark=\n and separator=\n")
    first, second = (
        _linear(head_weights, name, directory, dtype) for name in ("score.0", "score.2")
    )
    marked = not pooled and _QWENS_MARK in tokenizer.get_vocab()
    return RewardModel(
        body,
        nn.Sequential(first, nn.ReLU(), second),
        pooled=pooled,
        read_at=f"mark={_QWENS_MARK}" if marked else "",
    )


def _linear(
    weights: Mapping[str, Tensor], name: str, directory: Path, dtype: torch.dtype
) -> nn.Linear:
    if f"{name}.weight" not in weights:
        raise ModelError(f"{directory} has no weights for {name}.weight; download it again")
    weight, bias = weights[f"{name}.weight"].to(dtype), weights.get(f"{name}.bias")
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
    return layer
