"""A model that judges as one that treegen computes: its head gives two numbers, not a vocabulary.

Its shares after a text are then the probabilities of two tokens, 0 and 1, as a language model has
them. So whatever scores continuations can read them, on shared prefixes and pages of a cache.
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
"""The token whose probability is the share of the right output."""


# What a language model does to its logits, and a classifier does not.
_PLAIN: Final = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0}


class _BinaryHead(nn.Module):
    """A head of two outputs: the logit of what is right, and that of everything else together.

    The softmax share of the first is then that of the wanted output among all of `head`, or the
    sigmoid of the only one.
    """

    def __init__(self, head: nn.Module, column: int) -> None:
        super().__init__()
        self.head, self._column = head, column
        # Some families read the type or the shape of the weight of their head.
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
    """The part of a language model's head that gives the logits of some tokens."""
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
    """A Model of two outputs: what `head` gives in `column`, and all else.

    Args:
        module: A language model or a classifier, which attends by treegen from now on.

    Raises:
        TreegenError: treegen cannot compute it.
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
    # Nothing that it reads ends a text.
    model.spec = replace(model.spec, vocab_size=2, eos_token_ids=())
    return model


def _causal(module: PreTrainedModel) -> PreTrainedModel:
    """The family's language model, on the layers of a classifier.

    It has the classifier's own configuration, which is changed. With a copy transformers before
    5.20 would not tell the layers which function attends.
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
    """What turns the last hidden state into the outputs of a classifier.

    Raises:
        ModelError: it has none that stands alone.
    """
    head = getattr(module, "score", None)
    if not isinstance(head, nn.Module):
        raise ModelError(
            "the classifier does more than to read the last hidden state; take another reward model"
        )
    return head
