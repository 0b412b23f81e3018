"""The load check: a toy tree must give the logits of transformers' own attention.

The toy has a shared prefix, two branches of different length, and one decoded token on each, so it
covers three levels, prefill and decode. It runs on the loaded weights in their dtype and takes
about a second. Its keys and values stay in that dtype, even if the cache uses FP8.

The toy is shorter than the windows, chunks and the like of a real model. Families that are tested
(`families.EXACT` and others) are tested beyond them. For any other family, small random copies of
the model are checked in the same way, with these boundaries so low that the toy crosses them. So
are models that select keys, whatever their family.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from treegen.common.device import without_autocast
from treegen.common.formatting import summarize_error
from treegen.common.version import tested_versions
from treegen.errors import ModelError, ModelWarning, arg
from treegen.model.attention_hook import ATTENTION
from treegen.model.batch import Batch
from treegen.model.checkpoint.families import is_tested
from treegen.model.checkpoint.small_config import (
    build_random_model,
    find_boundaries,
    iter_small_copies,
    low_selection,
)
from treegen.model.checkpoint.text_part import attention_of_text
from treegen.model.config import warn_context
from treegen.model.linear.fp8 import disable_input_rounding
from treegen.model.recurrent.layer_states import forward_in_two_steps, forward_options
from treegen.model.recurrent.state_batch import Piece, states_of_pieces, states_of_rows
from treegen.ops.attention import Level, prepare
from treegen.ops.cache.pool import LayerKV
from treegen.ops.cache.state_cache import NO_STATE

if TYPE_CHECKING:
    from treegen.model.model import Model

# R query rows, V vocabulary, N tokens of a sequence


_Wrap = Callable[[Any], "Model"]


class _Toy(NamedTuple):
    """The lengths of a toy tree in tokens; one decoded token follows each branch."""

    prefix: int
    branches: tuple[int, int]


_TOY: Final = _Toy(11, (5, 2))
_COPY_TOY: Final = _Toy(12, (28, 4))
_LOW: Final = (8, 16)
"""Boundaries of random copies. The toy crosses 8 in its prefix, and 16 in one branch and in the
decode step of the other."""
_MIN_CONTEXT: Final = 128
"""A family whose context would be shorter is refused."""
_COPY_TOLERANCE: Final = 0.01
# Short enough that rows of every branch of the toy exceed it.
TOY_WINDOW: Final = 6
_PAGE: Final = 64

# Allowed distance from stock attention as a share of the logits' own spread.
TOLERANCE: Final = {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.1}
# The most that rounding may excuse. Unrelated logits differ by 1.4 of their spread.
_MAX_LIMIT: Final = 0.7


def check_model(model: "Model") -> None:
    """Check that the logits of a toy tree equal those of transformers' own attention.

    Raises:
        ModelError: a forward pass fails, or the logits differ.
    """
    try:
        error, limit = _error_and_limit(model)
    except RuntimeError as problem:
        raise ModelError(
            f"{model.spec.name} cannot be used, because a test forward pass failed "
            f"({summarize_error(problem)}); try {arg('dtype', 'float32')}, or another version of "
            "transformers"
        ) from None
    if not error <= limit:
        raise ModelError(
            f"{model.spec.model_type} models cannot be used: on a small tree in {model.dtype}, "
            f"the logits differ from those with transformers' own attention by {error:.2g} "
            f"relative to their spread (limit {limit:.2g}), so samples would be wrong; try "
            f"{arg('dtype', 'float32')}, or pass {arg('check', False)} to skip this check"
        )


def check_boundaries(model: "Model", wrap: _Wrap) -> None:
    """Check a model beyond the boundaries that its configuration declares.

    A model that selects keys must cross the number of keys that it selects. In an untested family,
    the context of the model ends at a boundary beyond which the logits may be wrong.

    Args:
        model: The model.
        wrap: Makes a model of a transformers module, without a check.

    Raises:
        ModelError: the model selects other keys than transformers, or its context would be too
            short to be of use.
    """
    config, declared = model.module.config, model.spec.context_length
    names = config.model_type, config.get_text_config(decoder=True).model_type
    is_stock = type(model.module).__module__.startswith("transformers.")
    if model.spec.index_topk:
        _check_selection(model, wrap)
    if is_stock and any(map(is_tested, names)):
        return
    boundaries = find_boundaries(config, declared)
    if not boundaries or (matches := _matches_beyond(model, [*boundaries], wrap)):
        return
    results = {name: _matches_beyond(model, [name], wrap) for name in boundaries}
    uncrossed = {name: length for name, length in boundaries.items() if not results[name]}
    name, length = min((uncrossed or boundaries).items(), key=lambda item: item[1])
    why = "the logits of a small random copy of the model differ from"
    if (results[name] if uncrossed else matches) is None:
        why = "no small random copy of the model can be built or run, to compare its logits with"
    why += " those with transformers' own attention"
    if length < _MIN_CONTEXT:
        raise ModelError(
            f"{model.spec.model_type} models cannot be used: beyond {length} tokens ({name}), "
            f"{why}, so samples could be wrong; report the model, or pass {arg('check', False)} to "
            "skip this check"
        )
    warn_context(model.spec.name, declared, length, f"{why} ({name})")
    model.spec = replace(model.spec, context_length=length)


def _matches_beyond(model: "Model", boundaries: Sequence[str], wrap: _Wrap) -> bool | None:
    """Return whether random copies in which boundaries are low give the logits of stock attention.

    None is returned if a copy cannot be built or run.
    """
    for low in _LOW:
        matches = _matches_stock_attention(model, dict.fromkeys(boundaries, low), wrap)
        if not matches:
            return matches
    return True


def _check_selection(model: "Model", wrap: _Wrap) -> None:
    """Check that a random copy of a model selects the keys that transformers selects."""
    name, topk = model.spec.model_type, model.spec.index_topk
    crosses = _matches_stock_attention(model, low_selection(model.module.config), wrap)
    if crosses is None:
        warnings.warn(
            f"samples of this {name} model beyond {topk:,} tokens are not compared with "
            "transformers' own attention, because no small copy of the model can be built",
            ModelWarning,
            stacklevel=2,
        )
    elif not crosses:
        raise ModelError(
            f"{name} models cannot be used beyond {topk:,} tokens: the logits of a small random "
            "copy differ from those with transformers' own attention; install "
            f"'{tested_versions('transformers')}', or pass {arg('check', False)} to skip this "
            "check"
        )


def _matches_stock_attention(
    model: "Model", boundaries: Mapping[str, int], wrap: _Wrap
) -> bool | None:
    """Return whether a random copy with these boundaries gives the logits of stock attention.

    None is returned if no copy can be built or run.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the copy's own context
        for config in iter_small_copies(model.module.config, boundaries):
            try:
                module = build_random_model(type(model.module), config)
                if module is None:
                    continue
                small = wrap(module)
                sequences = _sequences(small, _COPY_TOY)
                stock = _stock_logits(small, sequences)
                computed = _tree_logits(small, sequences, _COPY_TOY)
            except Exception:  # the family cannot be built in this size, or does not run
                continue
            return (
                max(rows.max().item() for rows in _row_errors(computed, stock)) <= _COPY_TOLERANCE
            )
    return None


def _error_and_limit(model: "Model") -> tuple[float, float]:
    """Return the error of the toy tree's logits against stock attention, and its limit."""
    sequences = _sequences(model, _TOY)
    limit = TOLERANCE[model.dtype]
    with _toy_window(model), disable_input_rounding(model.module):
        stock = _stock_logits(model, sequences)
        if not all(bool(logits.isfinite().all()) for logits in stock):
            raise ModelError(
                f"{model.spec.name} returns logits that are not finite in {model.dtype} with "
                "transformers' own attention; try dtype float32, or another checkpoint"
            )
        error = _relative_error(_tree_logits(model, sequences, _TOY), stock)
        if error > limit and model.dtype != torch.float32:
            # In deep models with many experts, rounding alone routes tokens to other experts, with
            # stock attention too.
            noise = _relative_error(_stock_logits(model, sequences, perturb=True), stock)
            limit = min(max(limit, 3 * noise), _MAX_LIMIT)
    return error, limit


def _sequences(model: "Model", toy: _Toy) -> list[Tensor]:
    """Return the two token sequences [N] of the toy: deterministic, without special tokens."""
    text = model.module.config.get_text_config(decoder=True)
    special: set[int] = set()
    for config in (model.module.config, text):
        for name, value in config.to_dict().items():
            if "token_id" in name or "token_index" in name:
                special |= set(value) if isinstance(value, list) else {value}
    plain = [i for i in range(min(model.spec.vocab_size, 5000)) if i not in special]
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(plain), (toy.prefix + sum(toy.branches) + 2,), generator=generator)
    tokens = torch.tensor(plain)[picks].to(model.device)
    prefix, first, second, tails = tokens.split([toy.prefix, *toy.branches, 2])
    return [torch.cat([prefix, first, tails[:1]]), torch.cat([prefix, second, tails[1:]])]


@contextlib.contextmanager
def _toy_window(model: "Model") -> Iterator[None]:
    """While open, shrink the model's sliding windows so that the short toy exceeds them."""
    text = model.module.config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None)
    widths = {w for w in model.spec.windows if w is not None}
    if window is None or widths != {window} or window <= TOY_WINDOW:
        yield
        return
    # Some layers store the width; other layers and stock masks read it from the configuration.
    holders: list[Any] = [
        m for m in model.module.modules() if getattr(m, "sliding_window", None) == window
    ]
    holders.append(text)
    for holder in holders:
        holder.sliding_window = TOY_WINDOW
    try:
        yield
    finally:
        for holder in holders:
            holder.sliding_window = window


class _CountedPools(list[LayerKV]):
    """The page pools of the layers. They record which layers ask for their pool."""

    def __init__(self, pools: Sequence[LayerKV]) -> None:
        super().__init__(pools)
        self.indices: list[int] = []

    def __getitem__(self, index: Any) -> Any:
        self.indices.append(index)
        return super().__getitem__(index)


def _tree_logits(model: "Model", sequences: Sequence[Tensor], toy: _Toy) -> list[Tensor]:
    """Return the logits [N, V] of each sequence, computed as a tree: shared prefix rows once."""
    # Page 0 holds the prefix, 1 and 2 the branches, 3 and 4 the decoded tokens.
    pools = model.new_cache(num_pages=5, page_size=_PAGE, dtype=model.dtype)
    # States: slot 0 is spare, 1 is the state after the prefix, 2 and 3 after the branches, where
    # decoding continues in place. Rows with update lists have windows in slots 4 and 5, and pages
    # from slot 6 on.
    states = model.new_states(num_slots=10)
    prefix, branches = toy
    ends = [prefix + n for n in branches]
    first, rows = branches[0], sum(branches)
    trunk = ([(0, rows)], [0], [prefix], [0], False)
    prefix_RV = _pass(
        model,
        (pools, states),
        [_Span(sequences[0][:prefix], 0, 0, NO_STATE, 1)],
        [([(0, prefix)], [0], [prefix], [0], True)],
    )
    branch_RV = _pass(
        model,
        (pools, states),
        [_Span(s[prefix:-1], prefix, 1 + i, 1, 2 + i) for i, s in enumerate(sequences)],
        [trunk, ([(0, first), (first, rows)], [1, 2], list(branches), [prefix] * 2, True)],
    )
    tail_RV = _pass(
        model,
        (pools, states),
        [
            _Span(s[-1:], end, 3 + i, 2 + i, 2 + i)
            for i, (s, end) in enumerate(zip(sequences, ends, strict=True))
        ],
        [
            ([(0, 2)], [0], [prefix], [0], False),
            ([(0, 1), (1, 2)], [1, 2], list(branches), [prefix] * 2, False),
            ([(0, 1), (1, 2)], [3, 4], [1, 1], ends, False),
        ],
        decodes=True,
    )
    return [
        torch.cat([prefix_RV, branch_RV[:first], tail_RV[:1]]),
        torch.cat([prefix_RV, branch_RV[first:], tail_RV[1:]]),
    ]


class _Span(NamedTuple):
    """Consecutive tokens, their first position and page, and the state slots before and after."""

    tokens: Tensor
    start: int
    page: int
    read_slot: int
    write_slot: int


_Groups = tuple[list[tuple[int, int]], list[int], list[int], list[int], bool]


def _pass(
    model: "Model",
    cache: tuple[Sequence[LayerKV], Sequence[Sequence[Tensor]]],
    spans: Sequence[_Span],
    levels: Sequence[_Groups],
    decodes: bool = False,
) -> Tensor:
    """Run one forward pass over spans; return the logits [R, V] of all rows.

    Args:
        model: The model.
        cache: The page pools, and the state tensors of recurrent layers.
        spans: The tokens of the pass.
        levels: The attention levels: row ranges, pages, key lengths, key starts, and causality.
        decodes: Whether this is a decode step, in which rows may keep update lists.
    """
    pools, states = cache
    lengths = [len(span.tokens) for span in spans]
    offsets = [sum(lengths[:at]) for at in range(len(spans))]
    pieces = [
        Piece(offset, length, span.read_slot, span.write_slot)
        for offset, length, span in zip(offsets, lengths, spans, strict=True)
    ]
    tokens_R = torch.cat([span.tokens for span in spans])
    span_indices = [(span, torch.arange(len(span.tokens), device=model.device)) for span in spans]
    positions_R = torch.cat([span.start + index for span, index in span_indices])
    slots_R = torch.cat([span.page * _PAGE + index for span, index in span_indices])
    prepared = prepare(
        [_make_level(level, model.device) for level in levels], positions_R, impl=model.impl
    )
    counted = _CountedPools(pools)
    batch = states_of_pieces(pieces, states) if states else None
    delta = model.spec.delta
    if decodes and delta is not None:
        read_slots = np.array([span.read_slot for span in spans])
        pages = 6 * delta.pages + np.arange(2 * (delta.pages + delta.own_pages))
        rows = np.stack([read_slots, 0 * read_slots, read_slots, [4, 5]])
        batch = states_of_rows(np.concatenate([rows, pages.reshape(-1, 2)]), states)
    logits_RV = model.forward(
        Batch(
            tokens_T=tokens_R,
            positions_T=positions_R,
            slots_T=slots_R,
            logits_at_S=torch.arange(len(tokens_R), device=model.device),
            levels=prepared,
            layers=counted,
            states=batch,
        )
    )
    # Attention reads the pages of each layer once, and so does an indexer that selects keys.
    readers = [at for at, pool in enumerate(pools) for _ in range(1 + (pool.index is not None))]
    if sorted(counts := counted.indices) != readers:
        times = f"{len(counts)} times instead of {len(readers)} times"
        raise ModelError(f"{model.spec.model_type} read its pages {times}; use another model")
    return logits_RV


def _make_level(groups: _Groups, device: torch.device) -> Level:
    rows, pages, lengths, starts, causal = groups

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return Level(
        q_start_G=ints([start for start, _ in rows]),
        q_stop_G=ints([stop for _, stop in rows]),
        pages_GP=ints(pages)[:, None],
        kv_len_G=ints(lengths),
        kv_start_G=ints(starts),
        causal=causal,
    )


@torch.inference_mode()
def _stock_logits(
    model: "Model", sequences: Sequence[Tensor], *, perturb: bool = False
) -> list[Tensor]:
    """Return the logits [N, V] of each sequence alone with transformers' own attention.

    Args:
        model: The model.
        sequences: The token sequences [N].
        perturb: Whether to change the input embeddings by about one rounding error.
    """
    module: nn.Module = model.module
    generator = torch.Generator(model.device).manual_seed(0)

    def _round_again(_module: nn.Module, _inputs: Any, embedded: Tensor) -> Tensor:
        """Add noise of one rounding error to the embeddings; a forward hook."""
        noise = torch.randn(embedded.shape, generator=generator, device=model.device)
        return (embedded * (1 + torch.finfo(model.dtype).eps * noise)).to(embedded.dtype)

    embeddings = model.module.get_input_embeddings()
    hook = embeddings.register_forward_hook(_round_again) if perturb else contextlib.nullcontext()
    config = model.module.config
    model.module.set_attn_implementation(attention_of_text(config, "eager"))
    # Some recurrent layers use other formulas for single tokens than for a whole text. Follow
    # generate: compute the prompt as a whole, then the last token.
    forward = forward_in_two_steps if model.spec.states else _forward_at_once
    try:
        with without_autocast(model.device), hook:
            return [model.gather_logits(forward(module, s[None])).float() for s in sequences]
    finally:
        model.module.set_attn_implementation(attention_of_text(config, ATTENTION))


def _forward_at_once(module: nn.Module, ids_1N: Tensor) -> Tensor:
    logits_NV: Tensor = module(input_ids=ids_1N, **forward_options(module)).logits[0]
    return logits_NV


def _relative_error(computed: Sequence[Tensor], stock: Sequence[Tensor]) -> float:
    """Return the distance between logits of the toy as a share of their spread.

    Rows belong to three parts: the prefix, the branches, and the decoded tokens. The error of a
    part is that of its median row (the lower one of two), because in 16 bits a single row may be
    routed to other experts. The largest error of the three parts is returned.
    """
    parts: list[list[Tensor]] = [[], [], []]
    for error_N in _row_errors(computed, stock):
        lengths = [_TOY.prefix, len(error_N) - _TOY.prefix - 1, 1]
        for part, rows in zip(parts, error_N.split(lengths), strict=True):
            part.append(rows)
    return max(torch.cat(part).median().item() for part in parts)


def _row_errors(computed: Sequence[Tensor], stock: Sequence[Tensor]) -> list[Tensor]:
    """Return the distance of each row [N] as a share of the spread; NaN counts as infinity."""
    spread = torch.cat(list(stock)).double().std(dim=-1).mean().clamp_min(1e-12)
    pairs = [(a.double(), b.double()) for a, b in zip(computed, stock, strict=True)]
    errors = [(a - b).square().mean(dim=-1).sqrt() / spread for a, b in pairs]
    return [error_N.nan_to_num(nan=float("inf")) for error_N in errors]
