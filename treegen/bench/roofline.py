"""The least time that a decode step can take on a device of known ceilings.

A step of T live rows is a chain of parts, each of which takes at least what its FLOPs take at the
device's best rate and what its bytes take at the memory's, whichever is longer:

    layers     2 T W FLOPs, W numbers read, where W counts the matrices of all layers
    level i    2 T_i H (k + v) K_i FLOPs per group and layer, K_i keys read once per group,
               for each depth of the tree that is an attention part of its own
    own keys   the same, where every row reads the keys that no level reads for it
    head       2 T d V FLOPs, d V numbers read, T V logits written
    sampling   T V logits read

H: query heads; k, v: widths of a key and a value; d: width of the model; V: vocabulary. T_i rows
share a group of level i, which has K_i keys.

The floor is the sum of the parts. Norms, rotary embedding, activations and the queries themselves
are left out, so it cannot be reached. Attention's FLOPs are charged at the rate of dense attention,
all others at that of matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from treegen.bench.ceilings import Ceilings
from treegen.plan.plan import Plan
from treegen.spec import LayerSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from treegen.model.model import Model


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a decode step of a model reads and computes.

    layer_weights: numbers in the matrices of all layers.
    hidden: the width of the output matrix.
    vocab_size: logits of a row.
    q_heads: query heads of a layer.
    layers: keys and values of each layer.
    itemsize: bytes of one number.
    weight_itemsize: bytes of one number in the matrices of the layers, if another; 1 is FP8.
    cache_itemsize: likewise in keys and values.
    """

    layer_weights: int
    hidden: int
    vocab_size: int
    q_heads: int
    layers: tuple[LayerSpec, ...]
    itemsize: int
    weight_itemsize: int = 0
    cache_itemsize: int = 0


@dataclass(frozen=True, slots=True)
class LevelWork:
    """The attention of one level in one layer.

    pairs: pairs of a row and a key that it sees.
    keys: keys that are read.
    """

    name: str
    pairs: float
    keys: float


@dataclass(frozen=True, slots=True)
class Floor:
    """The least seconds of one step, by part."""

    parts: dict[str, float]

    @property
    def seconds(self) -> float:
        """The least seconds of the whole step."""
        return sum(self.parts.values())

    @property
    def parts_ms(self) -> dict[str, float]:
        """The parts in milliseconds."""
        return {name: part * 1e3 for name, part in self.parts.items()}


def size_of(model: Model) -> ModelSize | str:
    """Return the sizes of a model, or why no roofline can be drawn for it.

    Those of a tensor-parallel model are one rank's. So the roofline is that of all GPUs together,
    each with a part of the work, without what they exchange.
    """
    module: PreTrainedModel = model.module
    if any(window is not None for window in model.spec.windows):
        return "its layers have sliding windows"
    head = module.get_output_embeddings()
    inner = [part for part in module.modules() if isinstance(part, nn.Linear) and part is not head]
    numbers = sum(part.weight.numel() for part in inner)
    known = {id(part.weight) for part in (*inner, head, module.get_input_embeddings())}
    others = [name for name, p in module.named_parameters() if p.dim() > 1 and id(p) not in known]
    if others:
        return f"{others[0]} is no plain matrix (a mixture of experts, say)"
    text = module.config.get_text_config(decoder=True)
    q_heads, kv_heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None)
    if model.ranks is not None and model.spec.layers[0].kv_heads != (kv_heads or q_heads):
        q_heads //= model.ranks.size  # else each rank computes attention whole
    return ModelSize(
        layer_weights=numbers,
        hidden=head.weight.shape[1],
        vocab_size=head.weight.shape[0],
        q_heads=q_heads,
        layers=model.spec.layers,
        itemsize=model.dtype.itemsize,
        weight_itemsize=min((part.weight.element_size() for part in inner), default=1),
        cache_itemsize=model.cache_dtype.itemsize,
    )


def levels_of(plan: Plan, rows: int, generated: float) -> list[LevelWork]:
    """Return what the first rows of a plan read in a step.

    Keys are shared as the plan shares them: a kept segment is read once for all rows below it.

    rows: how many rows.
    generated: keys of generated tokens that each row has.
    """
    below: dict[int, int] = {}
    own = 0.0
    for request in plan.order.tolist():
        mine = min(plan.requests[request].rows, rows)
        rows -= mine
        if not mine:
            continue
        last = plan.segments[int(plan.segment_of[request])]
        own += mine * ((0 if last.kept else last.stop - last.base) + generated)
        for segment in plan.path(request):
            if segment.kept:
                below[segment.index] = below.get(segment.index, 0) + mine
    depths: dict[int, list[tuple[int, int]]] = {}
    for index, count in below.items():
        segment = plan.segments[index]
        depths.setdefault(segment.depth, []).append((count, segment.stop - segment.base))
    shared = [
        LevelWork(
            f"level {depth}",
            sum(count * keys for count, keys in groups),
            sum(keys for _, keys in groups),
        )
        for depth, groups in sorted(depths.items())
    ]
    return [*shared, LevelWork("own keys", own, own)]


def step_floor(size: ModelSize, ceilings: Ceilings, rows: float, levels: list[LevelWork]) -> Floor:
    """Return the least time of a decode step.

    rows: live rows.
    levels: what attention reads; empty for a step without attention.
    """

    def part(flops: float, numbers: float, rate: float, itemsize: int = size.itemsize) -> float:
        return max(flops / rate, numbers * itemsize / ceilings.memory)

    weights, logits = size.layer_weights, rows * size.vocab_size
    head = size.hidden * size.vocab_size
    rate = ceilings.fp8 if size.weight_itemsize == 1 and ceilings.fp8 else ceilings.matmul
    weight_bytes = weights * (size.weight_itemsize or size.itemsize)
    parts = {"layers": max(2 * rows * weights / rate, weight_bytes / ceilings.memory)}
    for level in levels:
        parts[level.name] = sum(
            part(
                2 * level.pairs * size.q_heads * (layer.k_dim + layer.v_dim),
                level.keys * layer.kv_heads * (layer.k_dim + layer.v_dim),
                ceilings.attention,
                size.cache_itemsize or size.itemsize,
            )
            for layer in size.layers
        )
    parts["head"] = part(2 * rows * head, head + logits, ceilings.matmul)
    parts["sampling"] = part(0.0, logits, ceilings.matmul)
    return Floor(parts)
