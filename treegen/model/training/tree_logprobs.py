"""Log-probabilities, with gradients, of all samples of a tree from one pass over its tokens.

The transformers module is the one that is trained. Only the name of its attention function changes,
during the forward pass and wherever gradient checkpointing runs layers again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, SupportsIndex

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, PreTrainedModel

from treegen.common.checks import check_argument_types
from treegen.common.device import to_device
from treegen.errors import ContextError, InputError, ModelError
from treegen.model.attention_hook import make_keyword_error, read_call
from treegen.model.checkpoint.text_part import attention_of_text
from treegen.model.load import configs_of, restoring_attention_names
from treegen.model.recurrent.layer_states import forward_options
from treegen.model.training.trainable import check_trainable, unwrap
from treegen.ops.attention.tree import TreeLayout, attend_tree
from treegen.ops.attention.types import AttentionOptions, Window
from treegen.prompts.rollout_tree import RolloutTree

# T tokens, H query heads, K key dimension, V value dimension

TREE: Final = "treegen_tree"
_CHECKPOINTING: Final = "_gradient_checkpointing_func"


def _attention(
    module: nn.Module, *tensors: Any, treegen: TreeLayout | None = None, **options: Any
) -> tuple[Tensor, None]:
    """Attend to the paths of a tree; return the output [1, T, H, V] and None for the weights.

    The other arguments are those of `read_call`.
    """
    if treegen is None:
        raise make_keyword_error(module)
    if rate := options.get("dropout"):
        raise ModelError(
            f"{type(module).__name__} calls attention with dropout {rate}, which gives all "
            "samples below a shared token the same random numbers; set dropout to 0, or call "
            "eval() on the module"
        )
    call = read_call(module, *tensors, **options)
    device_type = call.q_THK.device.type
    is_autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if is_autocast else call.v_TGV.dtype
    q_HTK, k_GTK, v_GTV = (
        x.transpose(0, 1).to(dtype) for x in (call.q_THK, call.k_TGK, call.v_TGV)
    )
    scale = q_HTK.shape[-1] ** -0.5 if call.scale is None else call.scale
    window = None if call.window is None else Window(call.window)
    if call.chunk is not None:
        window = Window(call.chunk, is_chunk=True)
    options_of_layer = AttentionOptions(scale, window, call.softcap, call.sinks_H)
    out_HTV = attend_tree(q_HTK, k_GTK, v_GTV, treegen, options_of_layer)
    return out_HTV.transpose(0, 1)[None].contiguous(), None


# A compiled module would compile the blocks of each new tree.
AttentionInterface.register(TREE, torch.compiler.disable(_attention))


@contextmanager
def use_tree_attention(module: PreTrainedModel) -> Iterator[None]:
    """While open, let a module use tree attention; also in later recomputations of its layers.

    Args:
        module: The module. Its forward pass gets a `TreeLayout` as `treegen`.
    """
    configs = configs_of(module)
    with restoring_attention_names(configs):
        module.set_attn_implementation(attention_of_text(module.config, TREE))
        names = [(config, config._attn_implementation_internal) for config in configs]

    @contextmanager
    def switch() -> Iterator[None]:
        with restoring_attention_names(configs):
            for config, name in names:
                config._attn_implementation_internal = name
            yield

    parts = [part for part in module.modules() if _CHECKPOINTING in vars(part)]
    before = [getattr(part, _CHECKPOINTING) for part in parts]
    try:
        for part, checkpoint in zip(parts, before, strict=True):
            setattr(part, _CHECKPOINTING, _wrap_checkpoint(checkpoint, switch))
        with switch():
            yield
    finally:
        for part, checkpoint in zip(parts, before, strict=True):
            setattr(part, _CHECKPOINTING, checkpoint)


def _wrap_checkpoint(
    checkpoint: Callable[..., Any], switch: Callable[[], Any]
) -> Callable[..., Any]:
    """Return a checkpoint function that uses tree attention whenever it runs a layer."""

    def run(layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def call(*inputs: Any, **options: Any) -> Any:
            with switch():
                return layer(*inputs, **options)

        return checkpoint(call, *args, **kwargs)

    return run


# S rows of logits, V vocabulary, T tokens of a tree, N distinct tokens to score, or tokens of a
# sample

_MAX_LOGITS: Final = 2**24
"""Maximum number of logits to convert to float32 at once."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedTree:
    """The tokens of a tree, packed depth first."""

    tokens: NDArray[np.int64]
    """The token ids [T]."""
    positions: NDArray[np.int64]
    """The position of each token in its texts [T]."""
    layout: TreeLayout
    """The location of the segments among the packed tokens."""
    samples: tuple[NDArray[np.int64], ...]
    """For each sample, the indices of its tokens among the packed ones [N]."""


def pack_tree(tree: RolloutTree) -> PackedTree:
    """Pack the tokens of a tree."""
    num = len(tree.segments)
    children: list[list[int]] = [[] for _ in range(num)]
    roots: list[int] = []
    for index, segment in enumerate(tree.segments):
        (roots if segment.parent is None else children[segment.parent]).append(index)
    order: list[int] = []
    stack = roots[::-1]
    while stack:
        order.append(stack.pop())
        stack += children[order[-1]][::-1]
    lengths = np.array([len(segment.tokens) for segment in tree.segments], dtype=np.int64)
    totals, depths = lengths.copy(), np.zeros(num, dtype=np.int64)
    for index in range(num - 1, -1, -1):
        if (parent := tree.segments[index].parent) is not None:
            totals[parent] += totals[index]
    for index, segment in enumerate(tree.segments):
        if segment.parent is not None:
            depths[index] = depths[segment.parent] + lengths[segment.parent]
    starts = np.empty(num, dtype=np.int64)
    starts[order] = np.cumsum(lengths[order]) - lengths[order]
    layout = TreeLayout(starts[order], (starts + totals)[order], depths[order], int(lengths.sum()))
    tokens = [token for index in order for token in tree.segments[index].tokens]
    # For each segment: the packed indices of its own tokens and of those of its ancestors.
    path_indices: list[NDArray[np.int64]] = []
    for index, segment in enumerate(tree.segments):
        own = starts[index] + np.arange(lengths[index])
        before = () if segment.parent is None else (path_indices[segment.parent],)
        path_indices.append(np.concatenate([*before, own]))
    samples = tuple(path_indices[index] for index in tree.last)
    return PackedTree(np.array(tokens, dtype=np.int64), layout.positions(), layout, samples)


@check_argument_types
def tree_logprobs(
    module: nn.Module,
    tree: RolloutTree,
    *,
    prompt_lengths: Sequence[SupportsIndex] | None = None,
    temperature: float = 1.0,
) -> list[Tensor]:
    """Return the log-probabilities of each sample's tokens, with gradients.

    One forward pass of the module computes each token of the tree once. The backward pass of any
    loss of the result does the same. Log-probabilities of tokens that samples share are the same
    numbers, and their gradients are summed.

    Args:
        module: A causal language model of transformers, also inside of DDP or of a PEFT adapter.
            The call changes none of its settings: its dtypes, the caller's autocast and gradient
            checkpointing stay in effect.
        tree: The samples.
        prompt_lengths: For each sample the number of first tokens without a log-probability, such
            as those of its prompt. Default: 1, because nothing predicts the first token of a text.
        temperature: A number that divides the logits.

    Returns:
        For each sample a tensor in float32, with one number for each token after its first
        `prompt_lengths` tokens.

    Raises:
        InputError: an argument cannot be used.
        ModelError: the gradients would not be those of single texts, as with dropout, recurrent
            layers and quantized weights.
        ContextError: a sample is longer than the model's context.
    """
    if not temperature > 0:
        raise InputError(f"temperature must be above 0, got {temperature}")
    base = unwrap(module)
    lengths = tree.check_prompt_lengths(prompt_lengths)
    packed = pack_tree(tree)
    spec = check_trainable(base)
    check_tokens(packed.tokens, packed.positions, spec.vocab_size, spec.context_length)
    targets = [sample[first:] for sample, first in zip(packed.samples, lengths, strict=True)]
    before = [
        sample[first - 1 : -1] if first < len(sample) else sample[:0]
        for sample, first in zip(packed.samples, lengths, strict=True)
    ]
    if not targets or not len(packed.tokens):
        requires_grad = torch.is_grad_enabled()
        return [torch.zeros(0, device=base.device, requires_grad=requires_grad) for _ in targets]
    # Each token has one predecessor, whichever sample it is read from.
    scored_N, first_N, inverse = np.unique(
        np.concatenate(targets), return_index=True, return_inverse=True
    )
    predictors_S, rows_N = np.unique(np.concatenate(before)[first_N], return_inverse=True)
    if not len(predictors_S):  # other ranks may wait for the passes of this one
        predictors_S = np.zeros(1, dtype=np.int64)
    arrays = predictors_S, rows_N, packed.tokens[scored_N], inverse
    predictors, rows, tokens, value_indices = (to_device(array, base.device) for array in arrays)
    logits_SV = _forward(module, base, packed, predictors)
    values_N = _SelectedLogprobs.apply(logits_SV, rows, tokens, 1 / temperature)  # type: ignore[no-untyped-call]
    return list(
        values_N[value_indices].split([len(tokens_of_target) for tokens_of_target in targets])
    )


def check_tokens(
    tokens_T: NDArray[np.int64], positions_T: NDArray[np.int64], vocab_size: int, context: int
) -> None:
    """Check the tokens of a packed tree.

    Args:
        tokens_T: The token ids [T].
        positions_T: Their positions [T].
        vocab_size: Number of token ids of the model.
        context: The longest text of the model.

    Raises:
        ContextError: a text is longer.
        InputError: a token has no embedding.
    """
    longest = int(positions_T.max(initial=-1)) + 1
    if longest > context:
        raise ContextError(
            f"a sample of the tree has {longest:,} tokens, but the model's context is "
            f"{context:,} tokens; remove or shorten the sample"
        )
    wrong = tokens_T[(tokens_T < 0) | (tokens_T >= vocab_size)]
    if len(wrong):
        raise InputError(
            f"the tree has token {wrong[0]}, but the model's token ids must be from 0 to "
            f"{vocab_size - 1}; use the model's own tokenizer"
        )


def _forward(module: nn.Module, base: Any, packed: PackedTree, predictors_S: Tensor) -> Tensor:
    """Return the logits [S, V] of some tokens of a packed tree."""
    keeps_rows = "logits_to_keep" in inspect.signature(base.forward).parameters
    tokens, positions = (
        to_device(array[None], base.device) for array in (packed.tokens, packed.positions)
    )
    with use_tree_attention(base):
        logits_SV: Tensor = module(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=None,
            treegen=packed.layout,
            **forward_options(base),
            **({"logits_to_keep": predictors_S} if keeps_rows else {}),
        ).logits[0]
    return logits_SV if keeps_rows else logits_SV[predictors_S]


class _SelectedLogprobs(torch.autograd.Function):
    """Log-probabilities of single tokens; rows are converted to float32 part by part."""

    @staticmethod
    def forward(
        ctx: Any, logits_SV: Tensor, rows_N: Tensor, tokens_N: Tensor, factor: float
    ) -> Tensor:
        """Return the log-probabilities [N] in float32.

        Args:
            ctx: The context of autograd.
            logits_SV: The logits [S, V].
            rows_N: The row of each token [N].
            tokens_N: The token ids [N].
            factor: A factor of all logits.
        """
        parts = logits_SV.split(max(1, _MAX_LOGITS // logits_SV.shape[1]))
        lse_S = torch.cat([_scale(part, factor).logsumexp(-1) for part in parts])
        ctx.save_for_backward(logits_SV, rows_N, tokens_N, lse_S)
        ctx.factor = factor
        return logits_SV[rows_N, tokens_N].float() * factor - lse_S[rows_N]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        logits_SV, rows_N, tokens_N, lse_S = ctx.saved_tensors
        sums_S = torch.zeros_like(lse_S).index_add_(0, rows_N, grad_N)
        step = max(1, _MAX_LOGITS // logits_SV.shape[1])
        grad_SV = torch.empty_like(logits_SV)
        for at in range(0, len(logits_SV), step):
            part = slice(at, at + step)
            p_SV = _scale(logits_SV[part], ctx.factor).sub_(lse_S[part, None]).exp_()
            grad_SV[part] = p_SV.mul_(-sums_S[part, None] * ctx.factor)
        grad_SV.index_put_((rows_N, tokens_N), (grad_N * ctx.factor).to(grad_SV.dtype), True)
        return grad_SV, None, None, None


def _scale(logits: Tensor, factor: float) -> Tensor:
    """Return a copy in float32 of logits times a factor."""
    copy = logits.to(torch.float32, copy=True)
    return copy if factor == 1 else copy.mul_(factor)
