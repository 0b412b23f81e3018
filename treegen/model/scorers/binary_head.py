"""Turn a model that judges into one with two outputs, which treegen computes as a language model.

After a text, the probabilities of its two tokens, 0 and 1, are the model's shares. So any code that
scores continuations can read them, on shared prefixes and cached pages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from treegen.errors import ModelError
from treegen.model.checkpoint.text_part import auto_class
from treegen.model.load import from_module

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from treegen.model.model import Model

RIGHT: Final = 0
"""The token whose probability is the share of the "right" output."""


# Neutral values of settings that change a language model's logits but not a classifier's.
_PLAIN: Final = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0}


class _BinaryHead(nn.Module):
    """A head of two outputs: the logit of "right", and that of all other outputs together.

    The softmax share of the first output is then that of the wanted output among all outputs of
    `head`, or the sigmoid of a single output.
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
        others = logits.clone()
        others[..., self._column] = -torch.inf
        return torch.stack([right, others.logsumexp(dim=-1)], dim=-1)


def slice_head(head: nn.Module, tokens: list[int]) -> nn.Linear:
    """Return the part of a language model's head that gives the logits of some tokens."""
    weight, bias = getattr(head, "weight", None), getattr(head, "bias", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ModelError(
            f"the model's head, {type(head).__name__}, has no weight matrix, so the logits of "
            "single tokens cannot be read; use a checkpoint with a linear head"
        )
    part = nn.Linear(
        weight.shape[1], len(tokens), bias=bias is not None, dtype=weight.dtype, device="meta"
    )
    part.weight = nn.Parameter(weight[tokens].clone(), requires_grad=False)
    if bias is not None:
        part.bias = nn.Parameter(bias[tokens].clone(), requires_grad=False)
    return part


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
            f"{name} has no head that can be replaced: {error}; take another reward model"
        ) from None
    if any(weight.is_meta for weight in causal.parameters()):
        raise ModelError(f"{name} has other parts than its family's language model; take another")
    model = from_module(causal, name=name, check=False)
    # No token ends a text that it only scores.
    model.spec = replace(model.spec, vocab_size=2, eos_token_ids=())
    return model


def _causal(module: PreTrainedModel) -> PreTrainedModel:
    """Return the family's language model with the layers of a classifier.

    It uses the classifier's own configuration, which is changed. With a copy, transformers before
    5.20 would not tell the layers which attention function to use.
    """
    config: Any = module.config
    for name, value in _PLAIN.items():
        if hasattr(config, name):
            setattr(config, name, value)
    with torch.device("meta"):
        causal: PreTrainedModel = auto_class(config).from_config(config, dtype=module.dtype)
    body = module.base_model
    if body is module or type(body) is not type(causal.base_model):
        raise ModelError(
            "its layers are not those of its family's language model; take another reward model"
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
            "the classifier does more than to read the last hidden state; take another reward model"
        )
    return head
