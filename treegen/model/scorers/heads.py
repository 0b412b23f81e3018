"""Heads of reward models: heads that transformers has no class for, and heads of two outputs.

Transformers has no class for some reward models whose head is a small network. Qwen's process
reward models (`ForProcessRewardModel`) and reward models (`ForRewardModel`) come with their own
code, which is not run: their layers are transformers', and their head is two matrices with a ReLU
in between, named `score.0` and `score.2`. Skywork's process reward models (`ForPrmModel`) have a
value head with one output, named `v_head.summary`.

A model with a head of two outputs runs as a language model with a vocabulary of two tokens. After a
text, the probability of token 0 is the probability of "right", and that of token 1 is the rest. So
any code that scores continuations can read them, on shared prefixes and cached pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModel

from treegen.errors import ModelError
from treegen.model.checkpoint.text_part import auto_class
from treegen.model.load import from_module

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from treegen.model.model import Model


_QWEN_MARK: Final = "<extra_0>"


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
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
            last = (positions * is_text).argmax(-1)
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
        pooled: Whether to compute logits only at the last token.

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
            f"{directory} has no weights for {min(info['missing_keys'])}; download the model again"
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
    first = _linear(head_weights, "score.0", directory, dtype)
    second = _linear(head_weights, "score.2", directory, dtype)
    marked = not pooled and _QWEN_MARK in tokenizer.get_vocab()
    return RewardModel(
        body,
        nn.Sequential(first, nn.ReLU(), second),
        pooled=pooled,
        read_at=f"mark={_QWEN_MARK}" if marked else "",
    )


def _linear(
    weights: Mapping[str, Tensor], name: str, directory: Path, dtype: torch.dtype
) -> nn.Linear:
    if f"{name}.weight" not in weights:
        raise ModelError(f"{directory} has no weights for {name}.weight; download the model again")
    bias = weights.get(f"{name}.bias")
    bias = None if bias is None else bias.to(dtype)
    return _make_linear(weights[f"{name}.weight"].to(dtype), bias)


def _make_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear layer with these parameters, in their type."""
    inputs, outputs, has_bias = weight.shape[1], len(weight), bias is not None
    layer = nn.Linear(inputs, outputs, bias=has_bias, dtype=weight.dtype, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


RIGHT: Final = 0
"""The token whose probability is that of the "right" output."""


# Neutral values of settings that change a language model's logits but not a classifier's.
_NEUTRAL_SETTINGS: Final = {
    "final_logit_softcapping": None,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
}


class _BinaryHead(nn.Module):
    """A head of two outputs: the logit of "right", and that of all other outputs together.

    The softmax of the first output is then the probability of "right" among all outputs of `head`,
    or the sigmoid of a single output.
    """

    def __init__(self, head: nn.Module, column: int) -> None:
        super().__init__()
        self.head, self._column = head, column
        # Some families read the dtype or the shape of their head's weight.
        self.weight = next(head.parameters())

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        right = logits[..., self._column]
        if logits.shape[-1] == 1:
            return torch.stack([right, torch.zeros_like(right)], dim=-1)
        other_logits = logits.clone()
        other_logits[..., self._column] = -torch.inf
        return torch.stack([right, other_logits.logsumexp(dim=-1)], dim=-1)


def slice_head(head: nn.Module, tokens: list[int]) -> nn.Linear:
    """Return the part of a language model's head that computes the logits of some tokens."""
    weight, bias = getattr(head, "weight", None), getattr(head, "bias", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ModelError(
            f"the model's head, {type(head).__name__}, has no weight matrix, so the logits of "
            "single tokens cannot be read; use a checkpoint with a linear head"
        )
    return _make_linear(weight[tokens], None if bias is None else bias[tokens])


def as_tree_model(module: PreTrainedModel, head: nn.Module, column: int, name: str) -> Model:
    """Return a Model with two outputs: column `column` of `head`, and all other columns together.

    Args:
        module: A language model or a classifier. It is changed: it uses treegen's attention from
            now on.
        head: The head to read.
        column: Its output that means "right".
        name: The model's name for messages.

    Raises:
        TreegenError: treegen cannot compute the model.
    """
    try:
        causal = module if module.get_output_embeddings() is not None else _causal(module)
        causal.set_output_embeddings(_BinaryHead(head, column))
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise ModelError(
            f"{name} has no head that can be replaced: {error}; use another reward model"
        ) from None
    if any(weight.is_meta for weight in causal.parameters()):
        raise ModelError(
            f"the modules of {name} differ from those of its family's language model; use "
            "another reward model"
        )
    model = from_module(causal, name=name, check=False)
    model.fixed_because = (
        f"{name} has the head of a reward model, so its weights cannot be updated; load the new "
        "model with load_verifier"
    )
    # No token ends a text that it only scores.
    model.spec = replace(model.spec, vocab_size=2, eos_token_ids=())
    return model


def _causal(module: PreTrainedModel) -> PreTrainedModel:
    """Return the family's language model with the layers of a classifier.

    It uses the classifier's own configuration, which is changed. With a copy, transformers before
    5.20 would not tell the layers which attention function to use.
    """
    config: Any = module.config
    for name, value in _NEUTRAL_SETTINGS.items():
        if hasattr(config, name):
            setattr(config, name, value)
    with torch.device("meta"):
        causal: PreTrainedModel = auto_class(config).from_config(config, dtype=module.dtype)
    body = module.base_model
    if body is module or type(body) is not type(causal.base_model):
        raise ModelError(
            "its layers differ from those of its family's language model; use another reward model"
        )
    setattr(causal, causal.base_model_prefix, body)
    return causal


def head_of(module: PreTrainedModel) -> nn.Module:
    """Return the module that turns a classifier's last hidden state into its outputs.

    Raises:
        ModelError: the classifier has no separate head.
    """
    head = getattr(module, "score", None)
    if not isinstance(head, nn.Module):
        raise ModelError(
            "the classifier does more than read the last hidden state; use another reward model"
        )
    return head
