"""The loss of TRL's trainers, from one pass over the tree of a batch.

TRL's trainers call the model for log-probabilities and entropies, not for logits. Here they get the
same numbers from a packed tree, and compute their loss from them as always.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treegen.common.device import to_device
from treegen.errors import InputError
from treegen.model.training.trainable import check_trainable, unwrap
from treegen.model.training.tree_logprobs import check_tokens, pack_tree, use_tree_attention
from treegen.prompts.rollout_tree import tree_of

# B rows of a batch, L columns, N tokens that are no padding, T packed tokens

_IGNORED_LABEL: Final = -100
"""The label of a token without a log-probability."""
_DERIVED_INPUTS: Final = ("use_cache", "seq_idx", "cu_seq_lens", "max_length")
"""Beginnings of the names of inputs that can be computed from the other inputs."""

Trainer = TypeVar("Trainer")


def with_tree_loss(trainer_class: type[Trainer]) -> type[Trainer]:
    """Return a subclass of a TRL trainer that computes what samples share once.

    All arguments, losses, metrics and callbacks are those of the trainer. Its log-probabilities
    (policy, old and reference) come from one pass over the tree of a batch. The subclass of an
    `RLOOTrainer` also takes `rollout_func`, as `GRPOTrainer` does.

    Args:
        trainer_class: `GRPOTrainer`, `RLOOTrainer`, `SFTTrainer` or a subclass of one.

    Raises:
        InputError: It is another class.
    """
    trl: Any = import_module("trl")
    mixins = {
        trl.SFTTrainer: _TreeSFT,
        trl.GRPOTrainer: _TreeGRPO,
        trl.RLOOTrainer: _TreeRLOO,
    }
    for base, mixin in mixins.items():
        if isinstance(trainer_class, type) and issubclass(trainer_class, base):
            return type(trainer_class.__name__, (mixin, trainer_class), {})
    raise InputError(
        "the tree loss supports only GRPOTrainer, RLOOTrainer, SFTTrainer and their subclasses, "
        f"got {getattr(trainer_class, '__name__', trainer_class)}"
    )


class _TreeSFT:
    """Overrides a method of SFTTrainer."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of TRL, with log-probabilities from a tree."""
        return super().compute_loss(_TreeModel(model), inputs, *args, **kwargs)  # type: ignore[misc]


class _TreeGRPO:
    """Overrides a method of GRPOTrainer and of RLOOTrainer."""

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._get_per_token_logps_and_entropies(_TreeModel(model), *args, **kwargs)  # type: ignore[misc]


class _TreeRLOO(_TreeGRPO):
    """Lets RLOOTrainer take a rollout function, as GRPOTrainer does."""

    def __init__(
        self, *args: Any, rollout_func: Callable[..., Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.rollout_func = rollout_func
        self._prompts: Sequence[Any] = ()

    def _generate(self, prompts: Sequence[Any]) -> Any:
        self._prompts = prompts
        return super()._generate(prompts)  # type: ignore[misc]

    def _generate_single_turn(self, *args: Any) -> Any:
        if self.rollout_func is None:
            return super()._generate_single_turn(*args)  # type: ignore[misc]
        return self.rollout_func(self._prompts, self)["completion_ids"]


class _TreeModel:
    """A model that TRL calls for log-probabilities of a batch, and that computes a tree."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, fused_lm_head: bool = False, **inputs: Any) -> Any:
        """Return what the model returns, computed from the tree of the batch.

        Args:
            fused_lm_head: Whether TRL needs log-probabilities. Otherwise it needs logits.
            **inputs: The inputs of the model.

        Raises:
            InputError: an input cannot be packed.
            ModelError: the gradients would not be those of single texts.
        """
        if not fused_lm_head:
            if torch.is_grad_enabled():
                raise InputError(
                    "the tree loss computes only log-probabilities, but this loss needs logits; "
                    "remove compute_loss_func and label_smoothing_factor"
                )
            return self._model(**inputs)
        input_ids, labels = inputs.pop("input_ids"), inputs.pop("labels")
        batch = _PackedBatch(
            input_ids, labels, inputs.pop("attention_mask", None), inputs.pop("position_ids", None)
        )
        has_router_loss = inputs.pop("output_router_logits", False)
        _check_inputs(inputs)
        base = unwrap(self._model)
        spec = check_trainable(base)
        check_tokens(batch.tokens, batch.positions, spec.vocab_size, spec.context_length)
        device = input_ids.device
        tokens, positions, next_tokens, counts = (
            to_device(array[None], device)
            for array in (batch.tokens, batch.positions, batch.next_tokens, batch.counts)
        )
        # TRL weighs each token's share of the router's loss by the mask. Attention takes none.
        router = {"output_router_logits": True, "attention_mask": counts}
        with use_tree_attention(base):
            output = self._model(
                input_ids=tokens,
                position_ids=positions,
                shift_labels=next_tokens,
                treegen=batch.layout,
                fused_lm_head=True,
                **(router if has_router_loss else {"attention_mask": None}),
            )
        return batch.unpack(output)


def _check_inputs(inputs: Mapping[str, Any]) -> None:
    """Raise InputError for inputs that a packed tree has no place for, such as images."""
    for name, value in inputs.items():
        if value is not None and not name.startswith(_DERIVED_INPUTS):
            raise InputError(f"the batch has {name}, but the tree loss supports only text")


class _PackedBatch:
    """The tree of a batch, in which each token has a single next token to score.

    Rows share a token while they share the next one to score, too. So the last token before a
    branch is packed once for each branch.
    """

    def __init__(
        self,
        ids_BL: Tensor,
        labels_BL: Tensor,
        mask_BL: Tensor | None,
        positions_BL: Tensor | None,
    ) -> None:
        """Pack a batch as TRL makes it.

        Args:
            ids_BL: Token ids. A row is one text, or several one after the other.
            labels_BL: Token ids to score, and -100 for the others.
            mask_BL: Whether each token is no padding; None if there is no padding.
            positions_BL: Position of each token in its text; None if a row is one text.

        Raises:
            InputError: a row has padding between its tokens.
        """
        ids = ids_BL.cpu().numpy().astype(np.int64)
        next_ids = np.full_like(ids, _IGNORED_LABEL)
        next_ids[:, :-1] = labels_BL[:, 1:].cpu().numpy()
        is_text = np.ones_like(ids, bool) if mask_BL is None else mask_BL.cpu().numpy() != 0
        is_first = is_text & ~np.pad(is_text, ((0, 0), (1, 0)))[:, :-1]
        if (is_first.sum(1) > 1).any():
            raise InputError(
                "a row of the batch has padding between tokens; pad only at the beginning or the "
                "end"
            )
        if positions_BL is not None:
            is_first |= is_text & (positions_BL.cpu().numpy() == 0)
        keys, keys_N = np.unique(_pack_pairs(ids, next_ids)[is_text], return_inverse=True)
        texts = np.split(keys_N, np.flatnonzero(is_first[is_text]))[1:]
        packed = pack_tree(tree_of([text.tolist() for text in texts]))
        self.layout, self.positions = packed.layout, packed.positions
        self.tokens, self.next_tokens = _unpack_pairs(keys[packed.tokens])
        packed_indices_N = np.concatenate([*packed.samples, np.zeros(0, np.int64)])
        self.counts = np.bincount(packed_indices_N, minlength=len(self.tokens))
        packed_indices = np.zeros_like(ids)
        packed_indices[is_text] = packed_indices_N
        self._packed_indices, is_scored = (
            to_device(array[:, :-1], ids_BL.device)
            for array in (packed_indices, is_text & (next_ids != _IGNORED_LABEL))
        )
        self._is_scored = is_scored

    def unpack(self, output: Any) -> Any:
        """Return an output of the batch [B, L - 1] from one of the packed tokens [1, T]."""
        values = {
            name: value[0][self._packed_indices].masked_fill(~self._is_scored, 0)
            for name, value in output.items()
            if isinstance(value, Tensor) and value.dim() == 2
        }
        values["label_mask"] = self._is_scored
        return type(output)(**values, aux_loss=output.aux_loss)


def _pack_pairs(tokens: NDArray[np.int64], next_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return one number for each pair of a token and the next token."""
    return tokens << 32 | next_tokens & 0xFFFFFFFF


def _unpack_pairs(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the tokens and the next tokens of pairs that `_pack_pairs` returned."""
    return keys >> 32, keys.astype(np.int32).astype(np.int64)
