"""The roofline of a decode step: its minimum time on a device with known ceilings.

A step of T live rows is a chain of parts. Each takes at least the time of its FLOPs at the device's
best rate or of its bytes at the memory's rate, whichever is longer:

    layers     2 T W FLOPs, W numbers read, where W counts the matrices of all layers
    level i    2 T_i H (k + v) K_i FLOPs per group and layer, K_i keys read once per group,
               for each depth of the tree that is an attention part of its own
    own keys   the same, for keys that each row reads for itself because no level reads them
    head       2 T d V FLOPs, d V numbers read, T V logits written
    sampling   T V logits read
    states     of a model with recurrent layers: see `state_bytes`

In a mixture of experts a row computes with some of the experts, and a step reads the experts that
at least one row is routed to, assuming random routing.

H: query heads; k, v: widths of a key and a value; d: width of the model; V: vocabulary. T_i rows
share a group of level i, which has K_i keys.

The floor is the sum of the parts. Norms, rotary embedding, activations and the queries themselves
are left out, so it cannot be reached. Attention's FLOPs are charged at the rate of dense attention,
all others at that of matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor, nn

from treegen.bench.ceilings import Ceilings
from treegen.common.spec import LayerSpec, ModelSpec
from treegen.prompts.plan.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from treegen.model.model import Model


@dataclass(frozen=True, slots=True)
class ExpertSize:
    """The experts of all layers."""

    weights: int
    """Numbers in the matrices of one expert, over all layers."""
    num: int
    """Experts of a layer."""
    per_row: int
    """Experts that a row is routed to."""

    def read(self, rows: float) -> float:
        """Return the expected number of weights that a step of `rows` rows reads."""
        return self.weights * self.num * float(1 - (1 - self.per_row / self.num) ** rows)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes that decide how much a decode step of a model reads and computes."""

    layer_weights: int
    """Numbers in the matrices of all layers."""
    hidden: int
    """The width of the output matrix."""
    vocab_size: int
    """Logits of a row."""
    q_heads: int
    """Query heads of a layer."""
    layers: tuple[LayerSpec, ...]
    """Keys and values of each layer."""
    itemsize: int
    """Bytes of one number."""
    weight_itemsize: int = 0
    """Bytes of one number in the matrices of the layers; 0 for `itemsize`, 1 is FP8."""
    cache_itemsize: int = 0
    """Bytes of one number in keys and values; 0 for `itemsize`."""
    experts: ExpertSize | None = None
    """Sizes of mixtures of experts, in addition to the matrices for all rows; None for none."""
    index_topk: int = 0
    """Number of keys that a row selects; 0 if it attends to all keys."""


@dataclass(frozen=True, slots=True)
class LevelWork:
    """The attention of one level in one layer."""

    name: str
    pairs: float
    """Number of (row, visible key) pairs."""
    keys: float
    """Number of keys that are read."""


@dataclass(frozen=True, slots=True)
class StepFloor:
    """The minimum seconds of one step, by part."""

    parts: dict[str, float]

    @property
    def seconds(self) -> float:
        """The minimum seconds of the whole step."""
        return sum(self.parts.values())

    @property
    def parts_ms(self) -> dict[str, float]:
        """The parts in milliseconds."""
        return {name: part * 1e3 for name, part in self.parts.items()}


def size_of(model: Model) -> ModelSize | str:
    """Return the sizes of a model, or the reason why it has no roofline.

    The sizes of a tensor-parallel model are those of one rank. So the roofline covers all GPUs
    together, each with its part of the work, but not their communication.
    """
    module: PreTrainedModel = model.module
    if any(window is not None for window in model.spec.windows):
        return "the layers have sliding windows"
    head = module.get_output_embeddings()
    if model.tower is not None:  # decode steps do not read the tower
        module = module.get_decoder()
    inner = [part for part in module.modules() if isinstance(part, nn.Linear) and part is not head]
    numbers = sum(part.weight.numel() for part in inner)
    counted = {id(part.weight) for part in (*inner, head, module.get_input_embeddings())}
    convolutions = [part.weight for part in module.modules() if isinstance(part, nn.Conv1d)]
    numbers += sum(weight.numel() for weight in convolutions)
    counted |= {id(weight) for weight in convolutions}
    experts = _experts(module)
    if experts is not None:
        inside = {name: p for name, p in module.named_parameters() if _of_experts(name, p)}
        numbers += sum(p.numel() for p in inside.values() if p.dim() == 2)
        counted |= {id(p) for p in inside.values()}
    uncounted = [
        name for name, p in module.named_parameters() if p.dim() > 1 and id(p) not in counted
    ]
    if uncounted:
        return f"{uncounted[0]} is not a plain matrix (for example, in a mixture of experts)"
    text = module.config.get_text_config(decoder=True)
    q_heads, kv_heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None)
    latent = model.spec.layers[0].latent
    if latent is not None:
        q_heads = latent.heads
    elif model.ranks is not None and model.spec.layers[0].kv_heads != (kv_heads or q_heads):
        q_heads //= model.ranks.size  # otherwise each rank computes the whole attention
    return ModelSize(
        layer_weights=numbers,
        hidden=head.weight.shape[1],
        vocab_size=head.weight.shape[0],
        q_heads=q_heads,
        layers=model.spec.layers,
        itemsize=model.dtype.itemsize,
        weight_itemsize=min((part.weight.element_size() for part in inner), default=1),
        cache_itemsize=model.cache_dtype.itemsize,
        experts=experts,
        index_topk=model.spec.index_topk,
    )


def _of_experts(name: str, weight: Tensor) -> bool:
    """Whether a weight belongs to experts or to the router."""
    *_, parent, leaf = name.split(".")
    return (parent == "experts" and weight.dim() == 3) or (parent, leaf) == ("gate", "weight")


def _experts(module: PreTrainedModel) -> ExpertSize | None:
    """Return the experts of a model if each layer stores its experts in one tensor; else None."""
    text = module.config.get_text_config(decoder=True)
    per_row = getattr(text, "num_experts_per_tok", None)
    weights = [p for name, p in module.named_parameters() if _of_experts(name, p) and p.dim() == 3]
    nums = {len(weight) for weight in weights}
    if per_row is None or len(nums) != 1:
        return None
    num = nums.pop()
    return ExpertSize(sum(weight.numel() for weight in weights) // num, num, per_row)


def state_bytes(spec: ModelSpec, plan: Plan, rows: int, generated: float) -> float:
    """Return the bytes of recurrent states that the first rows of a plan read and write per step.

    A row with its own state reads and writes it. Rows that list updates read the state above them
    once for all rows that share it, and each row reads its list until the list is folded. The
    result is the mean over the steps of rows that draw twice `generated` tokens.

    Args:
        spec: The model's sizes.
        plan: The plan of the prompts.
        rows: Number of live rows.
        generated: Mean number of tokens that a live row has generated.
    """
    windows = sum(2 * state.num_bytes for layer in spec.states for state in layer[:1])
    delta = spec.delta
    if delta is None:
        return 2 * rows * spec.state_bytes
    steps = np.arange(max(round(2 * generated), 1))
    total = 0.0
    for request in plan.order.tolist():
        live = min(plan.requests[request].rows, rows)
        rows -= live
        until = delta.shared_tokens(plan.requests[request].rows)
        listed = np.where(steps < until, steps, (steps - until) % delta.own_tokens)
        read = np.where(steps < until, 1, live) * delta.state_bytes
        read = read + live * listed * delta.token_bytes
        # A fold reads as much as a step, and writes a state.
        folds = (steps >= until) & (listed == 0)
        read = read + folds * live * 2 * delta.state_bytes
        total += (live > 0) * float(read.mean()) * len(spec.states) + live * windows
    return total


def levels_of(plan: Plan, rows: int, generated: float) -> list[LevelWork]:
    """Return the attention work per level of a step with the first rows of a plan.

    Keys are shared as the plan shares them: a cascaded segment is read once for all rows below it.

    Args:
        plan: The plan of the prompts.
        rows: Number of live rows.
        generated: Keys of generated tokens of each row.
    """
    below: dict[int, int] = {}
    own_keys = 0.0
    for request in plan.order.tolist():
        live = min(plan.requests[request].rows, rows)
        rows -= live
        if not live:
            continue
        last = plan.segments[int(plan.segment_of[request])]
        own_keys += live * ((0 if last.is_cascaded else last.stop - last.base) + generated)
        for segment in plan.path(request):
            if segment.is_cascaded:
                below[segment.index] = below.get(segment.index, 0) + live
    depths: dict[int, list[tuple[int, int]]] = {}
    for index, count in below.items():
        segment = plan.segments[index]
        depths.setdefault(segment.depth, []).append((count, segment.stop - segment.base))
    levels = []
    for depth, groups in sorted(depths.items()):
        pairs = sum(count * keys for count, keys in groups)
        levels.append(LevelWork(f"level {depth}", pairs, sum(keys for _, keys in groups)))
    return [*levels, LevelWork("own keys", own_keys, own_keys)]


def step_floor(
    size: ModelSize,
    ceilings: Ceilings,
    rows: float,
    levels: list[LevelWork],
    states: float = 0.0,
    drawn: float | None = None,
) -> StepFloor:
    """Return the minimum time of a decode step or of another pass.

    Args:
        size: The model's sizes.
        ceilings: The device's sustained rates.
        rows: Live rows.
        levels: The attention work per level; empty for a step without attention.
        states: Bytes of recurrent states that are read and written. Default: 0.
        drawn: Rows after which a token is drawn. Default: all.
    """
    drawn = rows if drawn is None else drawn
    memory, itemsize = ceilings.memory, size.itemsize
    pairs = sum(level.pairs for level in levels)
    if 0 < rows * size.index_topk < pairs:  # rows select keys, which takes time too
        share = rows * size.index_topk / pairs
        levels = [
            replace(level, pairs=level.pairs * share, keys=min(level.keys, level.pairs * share))
            for level in levels
        ]

    def attention(level: LevelWork, numbers: int, widths: int, itemsize: int) -> float:
        """Return the minimum seconds of one layer.

        Args:
            level: The work of the level.
            numbers: Elements read per key.
            widths: Width of a key plus that of a value.
            itemsize: Bytes per element.
        """
        flops = 2 * level.pairs * size.q_heads * widths
        return max(flops / ceilings.attention, level.keys * numbers * itemsize / memory)

    def layer_seconds(level: LevelWork, layer: LayerSpec) -> float:
        stored_size = size.cache_itemsize or itemsize
        stored = attention(level, layer.numbers, layer.k_dim + layer.v_dim, stored_size)
        form = layer.latent
        if form is None or level.pairs <= level.keys:
            return stored
        # Shared latents may instead be read as keys and values expanded from them.
        widths = form.k_dim + form.v_dim
        return min(stored, attention(level, form.expanded, widths, itemsize))

    weights, head = size.layer_weights, size.hidden * size.vocab_size
    logit_bytes = drawn * size.vocab_size * itemsize
    rate = ceilings.fp8 if size.weight_itemsize == 1 and ceilings.fp8 else ceilings.matmul
    used, read = float(weights), float(weights)
    if size.experts is not None:
        used += size.experts.weights * size.experts.per_row
        read += size.experts.read(rows)
    weight_bytes = read * (size.weight_itemsize or itemsize)
    head_bytes = head * itemsize + logit_bytes
    parts = {"layers": max(2 * rows * used / rate, weight_bytes / memory)}
    if states:
        parts["states"] = states / memory
    for level in levels:
        parts[level.name] = sum(layer_seconds(level, layer) for layer in size.layers)
    parts["head"] = max(2 * drawn * head / ceilings.matmul, head_bytes / memory)
    parts["sampling"] = logit_bytes / memory
    return StepFloor(parts)
