"""Decide how much memory the KV cache and the state slots get, and allocate them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import nn

from treegen.common.formatting import format_bytes
from treegen.common.host_memory import count_host_bytes
from treegen.common.lifetimes import collect_garbage
from treegen.common.spec import ModelSpec, sum_bytes
from treegen.errors import CacheFullError, CapacityError, arg
from treegen.model.linear.fp4 import FourBitExperts, Fp4Linear
from treegen.model.recurrent.state_batch import state_bytes_together
from treegen.ops.attention.key_selection import MAX_ELEMENTS
from treegen.ops.cache.pool import PagedCache
from treegen.ops.cache.state_cache import StateCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from treegen.model.model import Model
    from treegen.model.options import EngineOptions
    from treegen.model.parallel.ranks import Ranks

_LOGITS: Final = 2**28  # bytes to leave for logits
_PREFILL_LOGITS: Final = 2**26, 2**28  # minimum and maximum elements of a pass's logits
_BYTES_PER_LOGIT: Final = 8  # of a prefill pass: the logits and copies of them
_ROW_TOKENS: Final = 512  # tokens of keys that a row is assumed to have next to its state
_SPARE_STATES: Final = 64  # for the segments above the rows
_MIN_STATES: Final = 4
_SELECTION_TENSORS: Final = 6
"""Temporary tensors that are in memory together, in float32."""


def total_bytes(device: torch.device) -> int:
    """Return the total bytes of a GPU's memory, or of the host's within the container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return count_host_bytes()


def check_cache_bytes(size: int, device: torch.device) -> None:
    """Check that a cache of `size` bytes is not larger than the total memory of its device.

    Raises:
        CapacityError: the cache is larger.
    """
    total = total_bytes(device)
    if size > total:
        raise CapacityError(
            f"memory {format_bytes(size)} exceeds the memory of {device} "
            f"({format_bytes(total)}); set a smaller cache ({arg('memory=')})"
        )


def default_bytes(device: torch.device, activations: int = 0) -> int:
    """Return the bytes of the cache when the user gives no size.

    On a GPU this is most of the free memory; the rest is for activations, logits and CUDA graphs.
    On the host it is an eighth of the memory, at most 1 GiB.

    Args:
        device: The device of the cache.
        activations: Estimated bytes of activations in a pass.
    """
    if device.type == "cuda":
        empty_device_cache(device)
        free, _ = torch.cuda.mem_get_info(device)
        return max(free - max(int(free * 0.15), activations * 5 // 4 + _LOGITS), 0)
    return min(2**30, total_bytes(device) // 8)


def max_prefill_logits(device: torch.device) -> int:
    """Return how many logits a prefill pass may have, which bounds how many tokens it scores.

    On a GPU this depends on the memory that the cache leaves free. With few logits, scoring would
    need many passes, and the host takes longer to launch a short pass than the GPU to compute it.

    Args:
        device: The device of the model.
    """
    min_elements, max_elements = _PREFILL_LOGITS
    if device.type != "cuda":
        return min_elements
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    # A power of two, so that small differences of the free memory do not change the passes.
    while max_elements > min_elements and max_elements * _BYTES_PER_LOGIT > free:
        max_elements //= 2
    return max_elements


def activation_bytes(module: PreTrainedModel, num_tokens: int) -> int:
    """Estimate the bytes that a pass over `num_tokens` tokens holds at its peak, without logits.

    At the peak it holds the widest products of a layer and some of the layer's inputs.
    """
    skipped = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    head = module.get_output_embeddings()
    if head is not None:
        skipped.add(id(head.weight))
    experts = getattr(module.config.get_text_config(), "num_experts_per_tok", None) or 1
    peak, itemsize = 0, module.dtype.itemsize
    for weight in module.parameters():
        if weight.dim() < 2 or id(weight) in skipped:
            continue
        # One tensor holds all experts of a layer. Each token passes through a few of them.
        copies = experts if weight.dim() > 2 else 1
        narrow, wide = sorted(weight.shape[-2:])
        # The gate, its other factor and their product are as wide as the widest matrix.
        peak = max(peak, copies * (3 * wide + 4 * narrow) * itemsize)
    return peak * num_tokens


def scratch_bytes(module: PreTrainedModel, num_tokens: int) -> int:
    """Return the maximum bytes that a layer in 4 bits expands to in a pass of `num_tokens` tokens.

    Layers with the same input are merged, which about doubles the outputs of the widest.
    """
    layers = [part for part in module.modules() if isinstance(part, Fp4Linear | FourBitExperts)]
    if not layers or module.device.type != "cuda":
        return 0
    from treegen.model.linear import fp4_expansion

    chosen = getattr(module.config.get_text_config(), "num_experts_per_tok", None) or 1
    max_scratch = 0
    for part in layers:
        for weight in part.parameters(recurse=False):
            experts = len(weight) if isinstance(part, FourBitExperts) else 0
            pairs = num_tokens * chosen if experts else num_tokens
            if weight.dtype != torch.uint8 or not part.expands:
                continue
            if fp4_expansion.is_faster(pairs, experts, module.device):
                outputs = weight.shape[1] if experts else 2 * len(weight)
                inputs = 2 * weight[0, 0].numel() if experts else 2 * weight.shape[1]
                max_scratch = max(
                    max_scratch, fp4_expansion.scratch_bytes(outputs, inputs, experts)
                )
    return max_scratch


def selection_bytes(spec: ModelSpec, num_rows: int, itemsize: int) -> int:
    """Estimate the bytes of temporary tensors with which rows select keys and attend to them.

    Args:
        spec: The shape of the model.
        num_rows: The rows of a pass.
        itemsize: Bytes of a number of the type to compute in.
    """
    if not spec.index_topk:
        return 0
    # Queries of each head as wide as stored keys, twice, and its results in float32, twice.
    sizes = [
        (max(spec.num_heads, layer.kv_heads), layer.k_dim, layer.v_dim)
        if layer.latent is None
        else (layer.latent.heads, layer.k_dim, layer.latent.v_dim)
        for layer in spec.layers
    ]
    row = max(heads * (2 * k_dim * itemsize + 8 * v_dim) for heads, k_dim, v_dim in sizes)
    # Positions of selected keys: those of one selection in several types, of others in one.
    row += (12 + 4 * spec.index_selections) * spec.index_topk
    if spec.index_pool > 1:  # what the tokens of a block store, and two numbers in float32 for each
        width = max(layer.index_dim for layer in spec.layers)
        row += spec.index_pool * width * (itemsize + 8)
    return _SELECTION_TENSORS * MAX_ELEMENTS * 4 + num_rows * row


def empty_device_cache(device: torch.device) -> None:
    """Release GPU memory of models and caches that are no longer in use.

    They contain reference cycles, so Python frees them only at a garbage collection. torch also
    keeps freed memory, which then counts as used.
    """
    collect_garbage()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


class CacheSize(NamedTuple):
    """The capacity of a cache, without the padding page and the spare state slots."""

    pages: int
    """Pages of keys and values."""
    states: int | None
    """Slots for recurrent states; None without recurrent layers."""
    windows: int = 0
    """Additional slots of convolution windows, for rows that keep update lists."""


def cache_size(
    memory: int, spec: ModelSpec, page_size: int, max_rows: int, draft_token_bytes: int = 0
) -> CacheSize:
    """Return how many pages and state slots a cache of `memory` bytes can hold.

    With recurrent layers a row takes a state slot in addition to its keys, and a search node takes
    two. No more slots are made than `max_rows` can use. The slots get at most a quarter of the
    memory, or the share that the state has in a row of 512 tokens if that is more.

    Args:
        memory: Bytes of the cache, with that of a draft model.
        spec: The model's shape.
        page_size: Tokens per page.
        max_rows: Maximum samples decoded at once.
        draft_token_bytes: Bytes of a token's keys and values in the draft model's cache. A model
            with recurrent layers has no draft model.

    Raises:
        CacheFullError: not one page fits, or too few state slots to work with.
    """
    if not spec.states:
        token_bytes = spec.kv_bytes_per_token + draft_token_bytes
        pages = _num_pages(memory, token_bytes, page_size)
        if pages < 1:
            raise CacheFullError(
                f"{format_bytes(memory)} cannot hold a page of {page_size} tokens at "
                f"{token_bytes:,} bytes per token; set {arg('memory')} to at least "
                f"{2 * page_size * token_bytes:,} bytes"
            )
        return CacheSize(pages, None)
    size = _divide_memory(memory, spec, page_size, max_rows)
    if _is_enough(size):
        return size
    min_memory = max(memory, 1)
    while not _is_enough(_divide_memory(min_memory, spec, page_size, max_rows)):
        min_memory += -(-min_memory // 16)
    raise CacheFullError(
        f"{format_bytes(memory)} can hold only {max(size.states or 0, 0):,} recurrent states of "
        f"{format_bytes(spec.state_bytes)} and {max(size.pages, 0):,} pages of keys; set "
        f"{arg('memory')} to at least {min_memory:,} bytes"
    )


def _divide_memory(memory: int, spec: ModelSpec, page_size: int, max_rows: int) -> CacheSize:
    """Return the sizes of a cache with recurrent states; they may be too small or negative.

    The arguments are those of `cache_size`.
    """
    windows = 0
    if spec.delta is not None:
        window = sum(conv_state.num_bytes for layer in spec.states for conv_state in layer[:1])
        windows = max(min(max_rows, memory // 16 // window), 1)
        memory -= windows * window + spec.state_bytes  # one spare slot
    state, row = spec.state_bytes, spec.state_bytes + _ROW_TOKENS * spec.kv_bytes_per_token
    max_states = 2 * max_rows + _SPARE_STATES
    states = min(max(memory * state // row, memory // 4) // state - 1, max_states)
    pages = _num_pages(memory - (states + 1) * state, spec.kv_bytes_per_token, page_size)
    return CacheSize(pages, states, windows)


def _is_enough(size: CacheSize) -> bool:
    return size.pages > 0 and (size.states or 0) >= _MIN_STATES


def _num_pages(memory: int, token_bytes: int, page_size: int) -> int:
    """Return the number of pages in addition to the padding page; below 1 if none fits."""
    return memory // (page_size * token_bytes) - 1


def subtract_draft_cache(size: int, spec: ModelSpec, draft_token_bytes: int) -> int:
    """Return the cache bytes that remain for the model when a draft model shares its pages.

    Args:
        size: Bytes of both caches together.
        spec: The model's shape.
        draft_token_bytes: Bytes that each token takes in the other cache.
    """
    return size * spec.kv_bytes_per_token // (spec.kv_bytes_per_token + draft_token_bytes)


def make_cache(model: Model, options: EngineOptions, draft_token_bytes: int = 0) -> PagedCache:
    """Allocate the cache; without a given size, leave enough memory for the activations of a pass.

    Args:
        model: The loaded model.
        options: The cache size, the page size and the maximum number of rows.
        draft_token_bytes: Bytes of a token's keys and values in a draft model's cache, which uses
            the same pages. Default: no draft model.

    Raises:
        CapacityError: not one page fits, or too few state slots to work with, or the device has not
            enough free memory. With tensor parallelism, all ranks raise it.
    """
    page_size, max_rows, prefill_chunk = options.sizes(model.device.type)
    size = options.cache_bytes
    if size is None:
        activations = activation_bytes(model.module, prefill_chunk)
        layers = [sum_bytes(states) for states in model.spec.states]
        activations += state_bytes_together(layers, max_rows)
        num_rows = max(prefill_chunk, max_rows)
        activations += scratch_bytes(model.module, num_rows)
        activations += selection_bytes(model.spec, num_rows, model.dtype.itemsize)
        size = default_bytes(model.device, activations)
    with _fail_together(model.ranks):
        num_pages, num_states, num_windows = cache_size(
            size, model.spec, page_size, max_rows, draft_token_bytes
        )
    if model.ranks is not None:
        num_pages = model.ranks.all_reduce_min(num_pages)
    with _fail_together(model.ranks):
        states = None
        if num_states is not None:
            states = new_state_cache(model, num_states, num_windows)
        return PagedCache(model.new_cache(num_pages + 1, page_size), num_pages, page_size, states)


@contextmanager
def _fail_together(ranks: Ranks | None) -> Iterator[None]:
    """Raise a CapacityError of the block in all ranks, so that none waits for another."""
    try:
        yield
    except CapacityError as error:
        if ranks is not None:
            ranks.raise_together(error)
        raise
    if ranks is not None:
        ranks.raise_together(None)


def new_state_cache(model: Model, num_states: int, num_windows: int) -> StateCache:
    """Allocate the slots for the states of a model's recurrent layers.

    Args:
        model: The loaded model.
        num_states: State slots, without the spare ones.
        num_windows: Additional slots of convolution windows, for rows that keep update lists.
    """
    delta = model.spec.delta
    if delta is None:
        return StateCache(model.new_states(num_states + 1), num_states)
    return StateCache(model.new_states(num_states + 2, num_windows), num_states, delta)
