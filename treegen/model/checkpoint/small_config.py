"""Small random copies of a model, in which the boundaries that its configuration declares are low.

A boundary is a number of tokens at which attention or positions change, such as a sliding window, a
chunk, the number of keys that an indexer selects, or the original context of scaled positions.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from transformers import PretrainedConfig, PreTrainedModel

_BOUNDARY: Final = re.compile(
    r"window|chunk|block|span|extent|floor|stride|top_?k|budget|pool|compress|segment|landmark"
    r"|local|recent|original_max_position"
)
_NOT_TOKENS: Final = re.compile(
    r"expert|moe|group|router|head|layer|dim|theta|freq|hidden|feed_forward|rank|vocab|token_id"
    r"|mtp|image|audio|vision|conv|interval|pattern|type|multiple|quant"
)
_ROPE: Final = "rope_parameters"
_ALL_ITEMS: Final = "*"
"""In a path, this key matches every item of a list; lists often have an item for each layer."""
_LAYER_AFFIX: Final = re.compile(r"^(per_)?layers?_|_(per|of)_layers?$|_by_layers?$")
"""Affixes of the names of lists that have an item for each layer."""
_BLOCK_COUNT: Final = re.compile(r"top_?k_blocks|local_blocks")
"""Numbers of blocks, not of tokens."""

_BLOCKS: Final = {
    "index_topk": 16,
    "index_kpool": 8,
    "indexer_budget": 16,
    "indexer_compress_ratio": 8,
    "index_topk_blocks": 2,
    "index_block_size": 8,
    "index_local_blocks": 1,
}
"""Numbers of selected keys in copies of models that select blocks, and settings of blocks."""
_LOW_TOPK: Final = 8
"""The number of selected keys in copies of other models."""

_WIDTH: Final = re.compile(r"(^|_)(hidden_size|intermediate_size|n_embd|d_model|ffn_dim)$")
_HEADS: Final = re.compile(r"(^|_)(heads|n_head)$")
_ATTENTION_HEADS: Final = re.compile(r"(^|_)(attention_heads|key_value_heads|n_head)$")
_INDEX_HEADS: Final = re.compile("^index(er)?_n_heads$")
_NUM_INDEX_HEADS: Final = 16
"""With fewer heads, some keys have no positive product in any head. Their scores are all zero, and
which of them transformers selects depends on the device. Heads that each select blocks for some
attention heads shrink with those."""
_EXPERTS: Final = re.compile(r"^(num|n)_(local_|routed_)?experts$")
_MAX_EXPERTS: Final = 16
_MIN_WIDTH: Final = 32
_WIDTH_MULTIPLE: Final = 16
"""Products of experts require rows of whole 16 bytes."""
_MIN_LAYERS: Final = 4
_MAX_LAYERS: Final = 12
_DEPTHS: Final = ("num_hidden_layers", "num_layers", "n_layers", "encoder_layers", "depth")
_VOCAB_SIZE: Final = 512
_MAX_WEIGHTS: Final = 40_000_000
"""Numbers in the weights of a copy, which takes half a second to build."""


def find_boundaries(config: PretrainedConfig, context_length: int) -> dict[str, int]:
    """Return the boundaries that lie inside the context, by the path of the setting.

    A path has the names of nested settings; of the numbers in a list, the smallest counts.

    Args:
        config: A model's configuration.
        context_length: Its context in tokens.
    """
    text = config.get_text_config(decoder=True)
    boundaries: dict[str, int] = {}
    for path, value in _iter_numbers(text.to_dict()):
        if 1 < value < context_length and _is_boundary(path):
            boundaries[path] = min(value, boundaries.get(path, value))
    return boundaries


def _iter_numbers(settings: Any, path: str = "") -> Iterator[tuple[str, int]]:
    """Yield the integers in nested settings with their paths."""
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            yield from _iter_numbers(value, f"{path}.{name}" if path else str(name))
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from _iter_numbers(value, f"{path}.{_ALL_ITEMS}")
    elif type(settings) is int:
        yield path, settings


def _is_boundary(path: str) -> bool:
    """Return whether a path is that of a number of tokens at which a model changes."""
    names = [_LAYER_AFFIX.sub("", name) if _ALL_ITEMS in path else name for name in path.split(".")]
    if names[0] == _ROPE:
        return "original_max_position" in path
    is_other = any(map(_NOT_TOKENS.search, names))
    return any(map(_BOUNDARY.search, names)) and not is_other


def low_selection(config: PretrainedConfig) -> dict[str, int]:
    """Return the boundaries of a copy that selects few keys, of a model that selects keys."""
    text = config.get_text_config(decoder=True)
    blocks = {name: value for name, value in _BLOCKS.items() if getattr(text, name, None)}
    return blocks if len(blocks) > 1 else {"index_topk": _LOW_TOPK}


def iter_small_copies(
    config: PretrainedConfig, boundaries: Mapping[str, int]
) -> Iterator[PretrainedConfig]:
    """Yield copies with few layers and other boundaries, first those with small widths.

    Args:
        config: A model's configuration.
        boundaries: The new value of each boundary.

    Yields:
        Configurations. Some families cannot be built from some of them.
    """
    for factor, heads, vocab_size, tower_factor in (
        (64, _HEADS, _VOCAB_SIZE, 1),
        (64, _ATTENTION_HEADS, _VOCAB_SIZE, 1),
        (8, _HEADS, _VOCAB_SIZE, 1),
        (1, _HEADS, _VOCAB_SIZE, 1),
        (64, _HEADS, None, 1),
        (64, _HEADS, _VOCAB_SIZE, 64),
    ):
        small = copy.deepcopy(config)
        if getattr(small, "quantization_config", None) is not None:
            del small.quantization_config
        text = small.get_text_config(decoder=True)
        try:
            for path, value in boundaries.items():
                low = min(value, 2) if _BLOCK_COUNT.search(path) else value
                _set_number(text, path.split("."), low)
            _keep_first_layers(text)
            _shrink_towers(small, text, tower_factor)
            _divide_widths(text, factor, heads)
            if vocab_size is not None:
                for part in {id(part): part for part in (small, text)}.values():
                    _limit_vocabulary(part, vocab_size)
        except Exception:  # a strict configuration refuses the value
            continue
        yield small


def _set_number(holder: Any, steps: Sequence[str], value: int) -> None:
    """Set the number at the end of a path, or each number above 1 in a list."""
    step, *steps_below = steps
    if step == _ALL_ITEMS:
        keys: Iterable[Any] = range(len(holder))
    elif isinstance(holder, Mapping):
        keys = [key for key in holder if str(key) == step]
    else:
        keys = [step]
    for key in keys:
        is_config = isinstance(holder, PretrainedConfig)
        old = getattr(holder, key) if is_config else holder[key]
        if steps_below:
            _set_number(old, steps_below, value)
        elif is_config:
            setattr(holder, key, value)
        elif step != _ALL_ITEMS or (type(old) is int and old > 1):
            holder[key] = value


def _keep_first_layers(text: PretrainedConfig) -> None:
    """Keep the first layers, enough for one of each type and with each setting."""
    num_layers = text.num_hidden_layers
    lists = {
        name: value
        for name, value in vars(text).items()
        if isinstance(value, list) and len(value) == num_layers
    }
    first_of_kinds = [values.index(value) + 1 for values in lists.values() for value in values]
    num_kept = min(num_layers, max([_MIN_LAYERS, *first_of_kinds]), _MAX_LAYERS)
    text.num_hidden_layers = num_kept
    for name, value in lists.items():
        setattr(text, name, value[:num_kept])
    overrides = _layer_overrides(text)
    for layer in [layer for layer in overrides if layer >= num_kept]:
        del overrides[layer]


def _shrink_towers(config: PretrainedConfig, text: PretrainedConfig, factor: int) -> None:
    """Keep one layer of each tower for images or sound, which text does not reach.

    Args:
        config: The configuration to change.
        text: Its text part, which stays.
        factor: A power of two by which the widths of towers are divided, as far as that fits.
    """
    towers = [getattr(config, name, None) for name in config.sub_configs]
    for tower in towers:
        if isinstance(tower, PretrainedConfig) and tower is not text:
            for name in _DEPTHS:
                if type(getattr(tower, name, None)) is int:
                    setattr(tower, name, 1)
            if factor > 1:
                _divide_widths(tower, factor, _HEADS)
    if config is not text:  # projectors between towers and text
        _set_numbers(config, _divide_numbers(vars(config), factor, _HEADS))


def _divide_widths(text: PretrainedConfig, factor: int, heads: re.Pattern[str]) -> None:
    """Divide widths and numbers of heads by a factor, or by the largest that fits; limit experts.

    Args:
        text: The configuration to change.
        factor: A power of two.
        heads: Matches the names of the numbers of heads that shrink with the widths.
    """
    settings = vars(text)
    # If layers differ in a setting, its attribute cannot be read. `vars` has the setting of layers
    # without a value of their own.
    num_heads = settings.get("num_attention_heads") or text.num_attention_heads
    while factor > 1 and (text.hidden_size // factor < _MIN_WIDTH or num_heads % factor):
        factor //= 2
    numbers = _divide_numbers(settings, factor, heads)
    for name, value in settings.items():
        if type(value) is int and _EXPERTS.search(name):
            numbers[name] = min(value, _MAX_EXPERTS)
        elif type(value) is int and _fixes_index_heads(settings, name):
            numbers[name] = _NUM_INDEX_HEADS
    _set_numbers(text, numbers)
    for overrides in _layer_overrides(text).values():
        overrides.update(_divide_numbers(overrides, factor, heads))


def _layer_overrides(text: PretrainedConfig) -> dict[int, dict[str, Any]]:
    """Return the settings of single layers that differ from those of the model, to be changed."""
    spec = vars(text).get("_heterogeneity_spec")
    return {} if spec is None else spec.per_layer_overrides


def _divide_numbers(
    settings: Mapping[str, Any], factor: int, heads: re.Pattern[str]
) -> dict[str, int]:
    """Return the widths and numbers of heads in settings, divided by a factor."""
    divided: dict[str, int] = {}
    for name, value in settings.items():
        if factor == 1 or type(value) is not int or _EXPERTS.search(name):
            continue
        if _WIDTH.search(name):
            width = value // factor // _WIDTH_MULTIPLE * _WIDTH_MULTIPLE
            divided[name] = max(width, _MIN_WIDTH)
        elif heads.search(name) and not _fixes_index_heads(settings, name):
            divided[name] = value // factor if value % factor == 0 else 1
    return divided


def _fixes_index_heads(settings: Mapping[str, Any], name: str) -> bool:
    """Return whether a setting is a number of index heads that all select the same keys."""
    return bool(_INDEX_HEADS.search(name)) and "index_topk_blocks" not in settings


def _set_numbers(config: PretrainedConfig, numbers: Mapping[str, int]) -> None:
    for name, value in numbers.items():
        setattr(config, name, value)


def _limit_vocabulary(part: PretrainedConfig, vocab_size: int) -> None:
    """Limit the vocabulary, and replace special tokens that lie outside of it."""
    if isinstance(getattr(part, "vocab_size", None), int):
        part.vocab_size = min(part.vocab_size, vocab_size)
    pad = getattr(part, "pad_token_id", None)
    if isinstance(pad, int) and pad >= vocab_size:
        part.pad_token_id = None


@torch.no_grad()
def build_random_model(
    kind: type[PreTrainedModel], config: PretrainedConfig
) -> PreTrainedModel | None:
    """Return a model on the CPU with random weights in float32; None if it is too large.

    Args:
        kind: The class of the model.
        config: Its configuration.
    """
    with torch.device("meta"):
        size = sum(weight.numel() for weight in kind(copy.deepcopy(config)).parameters())
    if size > _MAX_WEIGHTS:
        return None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # for numbers that are not drawn below
        module: PreTrainedModel = kind._from_config(copy.deepcopy(config), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for weight in module.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim < 2:  # norms and biases: keep the values that the family starts from
            weight.add_(0.1 * noise)
        else:  # wide enough that logits depend on the context
            weight.copy_(1.5 * noise / weight.shape[-1] ** 0.5)
    return module
