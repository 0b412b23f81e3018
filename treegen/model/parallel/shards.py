"""A rank's shard of a stock model: each matrix is cut as transformers' own plan says.

transformers names how each part of a family is cut (`tp_plan`), but its own implementation replaces
the `forward` of each part by one that handles distributed tensors. Here the parts stay plain
modules with smaller weights, so everything for plain modules still works: merged products, regional
compilation, CUDA graphs.

The output matrix is always cut over the vocabulary, and the embedding is whole on each rank. If
both are one matrix, the shard is a view. Experts are cut like other matrices if the plan says how
and their widths divide. Otherwise each rank has some whole experts, if the family has a plan for
that (`ep_plan`). Each rank has the router and therefore knows the choices of all rows. It computes
the rows of its own experts, and the ranks sum their outputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from treegen.errors import ModelError, arg
from treegen.model.checkpoint.families import NOT_TENSOR_PARALLEL
from treegen.model.parallel.ranks import gather_columns, linear_over_ranks, sum_over_ranks

# E experts, K chosen experts of a row, T rows, D width of a row

_REPLICATED: Final = frozenset(
    # Each rank has all of a part with one of these styles. The styles differ only in training.
    {"replicated_with_grad_allreduce", "mla_kv_a_proj", "replicate", "local_params"}
)
_STRIDE: Final = 16  # bytes; grouped products need strides that are multiples of it


class RowLinear(nn.Linear):
    """A linear layer with a shard of the inputs of each output; ranks sum their outputs."""

    product: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None
    """A function of input, weight and bias that replaces the library's product; None for the
    library's."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the output summed over ranks."""
        output: Tensor
        if self.product is not None:
            output = sum_over_ranks(self.product(input, self.weight, None))
        else:
            output = linear_over_ranks(input, self.weight)
        return output if self.bias is None else output + self.bias


class SplitRowLinear(RowLinear):
    """A `RowLinear` that selects its shard of a whole input."""

    start: int

    def forward(self, input: Tensor) -> Tensor:
        """Return the output summed over ranks."""
        return super().forward(input[..., self.start : self.start + self.in_features])


class GatheredLinear(nn.Linear):
    """A linear layer with a shard of the outputs; ranks gather their outputs."""

    ranks: int

    def forward(self, input: Tensor) -> Tensor:
        """Return the output gathered from all ranks."""
        gathered: Tensor = gather_columns(super().forward(input), self.ranks)
        return gathered


class VocabLinear(nn.Linear):
    """The output matrix for a shard of the vocabulary."""


def check_plan(module: PreTrainedModel) -> None:
    """Raise ModelError if the model's family has no plan, or one that gives wrong numbers."""
    config = module.config
    reason = NOT_TENSOR_PARALLEL.get(config.get_text_config(decoder=True).model_type)
    if not any("layers" in name for name in {**(module.tp_plan or {}), **_ep_plan(module)}):
        reason = "transformers has no tensor-parallel plan for them"
    if reason is not None:
        raise ModelError(
            f"{config.model_type} models cannot be divided among GPUs: {reason}; use one GPU "
            f"({arg('tensor_parallel_size', 1)})"
        )


def shard(module: PreTrainedModel, rank: int, size: int, uncut: Sequence[str] = ()) -> None:
    """Cut a whole model to the shard of one rank. The module may be without data.

    An output matrix that is the embedding stays whole until `tie_head`.

    Args:
        module: The model, which is changed.
        rank: The rank.
        size: The number of ranks.
        uncut: Names of parts that the rank keeps whole, such as an image tower that only rank 0
            runs.

    Raises:
        ModelError: the model cannot be divided among this many ranks.
    """
    check_plan(module)
    _Sharding(module, rank, size, tuple(f"{name}." for name in uncut)).run()


def tie_head(module: PreTrainedModel, rank: int, size: int) -> None:
    """Cut an output matrix that is the embedding to a view of it, once the module is on its device.

    Args:
        module: The model, which is changed.
        rank: The rank.
        size: The number of ranks.
    """
    head = module.get_output_embeddings()
    if type(head) is nn.Linear:
        _Sharding(module, rank, size).cut_head(head)


@dataclass(frozen=True, slots=True)
class _Sharding:
    """Cuts one model. Each `_cut_...` method implements one style of the plan."""

    module: PreTrainedModel
    rank: int
    size: int
    uncut: tuple[str, ...] = ()

    def run(self) -> None:
        plan = self._plan()
        head = self.module.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise self._make_error("its output layer is not nn.Linear")
        for name, part in list(self.module.named_modules()):
            if f"{name}.".startswith(self.uncut):
                continue
            style = plan.get(_pattern(name))
            if part is head or (isinstance(part, nn.Embedding) and style == "embedding_rowwise"):
                continue
            for key, weight in list(part._parameters.items()):
                inner = plan.get(_pattern(f"{name}.{key}"))
                if inner is not None and weight is not None:
                    part._parameters[key] = self._cut_parameter(f"{name}.{key}", weight, inner)
            if style is not None and style not in _REPLICATED:
                self._cut(name, part, style)
        if head.weight is not self.module.get_input_embeddings().weight:
            self.cut_head(head)

    def _plan(self) -> Mapping[str, str]:
        plan: Mapping[str, str] = self.module.tp_plan or {}
        styles = {
            name: style
            for name, _ in self.module.named_parameters()
            if (style := plan.get(_pattern(name), "replicate")) not in _REPLICATED
            and not name.startswith(self.uncut)
        }
        # Whether the shards of experts have sizes that kernels accept, by the experts' module.
        fits: dict[str, bool] = {}
        for name, style in styles.items():
            weight, owner = self.module.get_parameter(name), _pattern(name).rpartition(".")[0]
            dim, pieces = _pieces(weight.data, style)
            remainder = pieces[0].shape[dim] * weight.itemsize % (_STRIDE * self.size)
            fits[owner] = fits.get(owner, True) and not remainder
        return add_expert_parallelism(plan, _ep_plan(self.module), {n for n in fits if fits[n]})

    def _make_error(self, reason: str) -> ModelError:
        return ModelError(
            f"{self.module.config.model_type} models cannot be divided among {self.size} GPUs: "
            f"{reason}; choose another {arg('tensor_parallel_size')}"
        )

    def _cut(self, name: str, part: nn.Module, style: str) -> None:
        if style in ("moe_tp_experts", "all_reduce"):
            part.register_forward_hook(sum_output)
            return
        if style == EXPERT_MODULE:
            experts = [weight for weight in part._parameters.values() if weight is not None]
            shard_experts(
                part, self.rank, count=len(experts[0])
            )  # already cut to this rank's experts
            return
        if style == "moe_identity_expert":
            # Every rank computes this expert, and the ranks sum their outputs.
            part.register_forward_hook(lambda _part, _inputs, output: output / self.size)
            return
        cut: Callable[[str, nn.Linear], None] | None = getattr(self, f"_cut_{style}", None)
        if cut is None or type(part) is not nn.Linear:
            raise self._make_error(
                f"{name} ({type(part).__name__}) has the tensor-parallel plan {style!r}, which "
                "is not supported"
            )
        cut(name, part)
        part.out_features, part.in_features = part.weight.shape

    def _cut_colwise(self, name: str, part: nn.Linear) -> None:
        units = self._units(name, part)
        if units is None:
            start, stop = self._range(name, part.out_features)
        else:
            unit = part.out_features // units
            start, stop = (unit * at for at in self._heads(name, units))
        _keep(part, "weight", 0, start, stop)
        _keep(part, "bias", 0, start, stop)

    def _cut_rowwise(self, name: str, part: nn.Linear) -> None:
        _keep(part, "weight", 1, *self._range(name, part.in_features))
        part.__class__ = RowLinear

    def _cut_rowwise_split_input(self, name: str, part: nn.Linear) -> None:
        if part.in_features % self.size:
            return
        start, stop = self._range(name, part.in_features)
        _keep(part, "weight", 1, start, stop)
        part.__class__ = SplitRowLinear
        part.start = start  # type: ignore[assignment]

    def _cut_colwise_gather_output(self, name: str, part: nn.Linear) -> None:
        if part.out_features % self.size:
            return
        start, stop = self._range(name, part.out_features)
        _keep(part, "weight", 0, start, stop)
        _keep(part, "bias", 0, start, stop)
        part.__class__ = GatheredLinear
        part.ranks = self.size  # type: ignore[assignment]

    _cut_colwise_rep = _cut_colwise_gather_output
    _cut_rowwise_rep = _cut_rowwise_split_input

    def _cut_parameter(self, name: str, weight: nn.Parameter, style: str) -> nn.Parameter:
        """Return a shard of a parameter outside linear layers, such as a layer's experts [E, ...].

        With a packed style gate and up are two halves, and the rank keeps a shard of each.
        """
        shard = weight.data
        if style in _REPLICATED:
            return weight
        if style == EXPERT_WEIGHTS:
            if len(shard) % self.size:
                raise self._make_error(
                    f"the number of experts in {name} ({len(shard)}) is not divisible by "
                    f"{self.size}"
                )
            shard = shard.chunk(self.size)[self.rank].clone()
        elif style in ("packed_colwise", "packed_rowwise", "colwise", "rowwise"):
            dim, pieces = _pieces(shard, style)
            start, stop = self._range(name, pieces[0].shape[dim])
            shard = torch.cat([piece.narrow(dim, start, stop - start) for piece in pieces], dim)
        else:
            raise self._make_error(
                f"{name} has the tensor-parallel plan {style!r}, which is not supported"
            )
        return nn.Parameter(shard, requires_grad=False)

    def cut_head(self, head: nn.Linear) -> None:
        """Cut over the vocabulary; the last shard may be padded with rows of zeros."""
        weight, embedding = head.weight, self.module.get_input_embeddings().weight
        rows = -(-len(weight) // self.size)
        start, stop = rows * self.rank, min(rows * (self.rank + 1), len(weight))
        shard = weight.data[min(start, len(weight)) : stop]
        if len(shard) < rows:
            shard = torch.cat([shard, shard.new_zeros(rows - len(shard), shard.shape[1])])
        elif weight is not embedding:
            shard = shard.clone()
        head.weight = nn.Parameter(shard, requires_grad=False)
        if head.bias is not None:
            bias = head.bias.data[min(start, len(weight)) : stop]
            bias = torch.cat([bias, bias.new_zeros(rows - len(bias))])
            head.bias = nn.Parameter(bias, requires_grad=False)
        head.out_features = rows
        head.__class__ = VocabLinear

    def _range(self, name: str, width: int) -> tuple[int, int]:
        """Return where the rank's shard of `width` rows or columns begins and ends."""
        if width % self.size:
            raise self._make_error(f"the width of {name} ({width}) is not divisible by {self.size}")
        part = width // self.size
        return part * self.rank, part * (self.rank + 1)

    def _units(self, name: str, part: nn.Linear) -> int | None:
        """Return how many heads an attention projection makes; None for other layers.

        A head must not be cut.
        """
        parent = self.module.get_submodule(name.rpartition(".")[0])
        leaf, text = name.rpartition(".")[2], self.module.config.get_text_config(decoder=True)
        if "attn" not in name and "attention" not in name:
            return None
        width = getattr(parent, "head_dim", None)
        keys = getattr(parent, "k_proj", None)
        if leaf in ("k_proj", "v_proj") and isinstance(width, int) and isinstance(keys, nn.Linear):
            # The keys may already be cut when the values are, and have equally many heads.
            heads = self._kv_heads(parent, keys, width)
            return heads if part.out_features % heads == 0 else None
        all_heads = getattr(text, "num_attention_heads", None)
        if not isinstance(all_heads, int) or part.out_features % all_heads:
            return None
        return all_heads

    def _kv_heads(self, parent: nn.Module, keys: nn.Linear, width: int) -> int:
        heads: Any = parent.__dict__.get("_treegen_kv_heads")
        if heads is None:
            heads = max(keys.out_features // width, 1)
            parent.__dict__["_treegen_kv_heads"] = heads
            if heads % self.size and self.size % heads == 0:
                groups = getattr(parent, "num_key_value_groups", None)
                if isinstance(groups, int):
                    parent.num_key_value_groups = groups * heads // self.size
        return int(heads)

    def _heads(self, name: str, heads: int) -> tuple[int, int]:
        """Return the range of the rank's heads. Several ranks may share a key head."""
        if heads % self.size == 0:
            return self._range(name, heads)
        if name.rpartition(".")[2] in ("k_proj", "v_proj") and self.size % heads == 0:
            head = self.rank * heads // self.size
            return head, head + 1
        raise self._make_error(
            f"the number of heads in {name} ({heads}) is not divisible by {self.size}"
        )


def _ep_plan(module: PreTrainedModel) -> Mapping[str, str]:
    """Return the plan of expert parallelism, which older versions do not have as a public name."""
    plan: Mapping[str, str] | None = module._ep_plan
    return plan or {}


def _pattern(name: str) -> str:
    """Return a name in the form of plans, with * for numbers of layers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _pieces(weight: Tensor, style: str) -> tuple[int, tuple[Tensor, ...]]:
    """Return the dimension that a style cuts, and the tensors to cut: the whole, or gate and up."""
    dim = 0 if weight.dim() == 1 else -2 if style.endswith("colwise") else -1
    return dim, weight.chunk(2 if style.startswith("packed_") else 1, dim)


def _keep(part: nn.Module, name: str, dim: int, start: int, stop: int) -> None:
    """Keep a range of a parameter in memory of its own, so that the rest is freed."""
    weight = part._parameters.get(name)
    if weight is not None:
        data = weight.data.narrow(dim, start, stop - start).clone(
            memory_format=torch.contiguous_format
        )
        part._parameters[name] = nn.Parameter(data, requires_grad=False)


EXPERT_MODULE: Final = "ep_dispatch_experts"
"""The plan style of a module with whole experts."""
EXPERT_WEIGHTS: Final = "grouped_gemm"
"""The plan style of a parameter of all experts [E, ...], of which a rank keeps some."""


def add_expert_parallelism(
    plan: Mapping[str, str], ep_plan: Mapping[str, str], can_cut: Collection[str]
) -> dict[str, str]:
    """Return a plan that uses whole experts where the plan cannot cut the experts themselves.

    Args:
        plan: The tensor-parallel plan: styles by names of modules and parameters.
        ep_plan: The plan of expert parallelism, likewise.
        can_cut: Names of modules whose experts the plan can cut.
    """
    combined = dict(plan)
    experts = {
        key: key.rpartition(".")[0] for key, style in ep_plan.items() if style == EXPERT_WEIGHTS
    }
    for key, name in experts.items():
        if name not in can_cut:
            combined[key], combined[name] = EXPERT_WEIGHTS, EXPERT_MODULE
    return combined


def shard_experts(part: nn.Module, rank: int, count: int) -> None:
    """Make a module compute only the rows of its rank's experts, and sum the outputs over ranks.

    Args:
        part: The experts module, whose parameters already hold only this rank's experts. It is
            changed.
        rank: The rank.
        count: The number of experts per rank.
    """
    part.num_experts = count  # type: ignore[assignment]
    # A loop over experts has no index for "none of these". Grouped products skip index `count`.
    is_loop = not hasattr(part, "has_gate") or part.config._experts_implementation == "eager"  # type: ignore[union-attr]
    none = 0 if is_loop else count
    part._is_expert_parallel = True  # type: ignore[assignment]

    def select_rows(part: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(inputs) != 3:
            raise RuntimeError("its experts do not receive states, choices and weights")
        states_TD, chosen_TK, weights_TK = inputs
        is_other = chosen_TK // count != rank
        local_TK = torch.where(is_other, none, chosen_TK % count)
        return states_TD, local_TK, weights_TK.masked_fill(is_other, 0.0)

    part.register_forward_pre_hook(select_rows)
    part.register_forward_hook(sum_output)


def sum_output(part: nn.Module, inputs: object, output: Any) -> Any:
    """Sum the output of a mixture of experts over the ranks; a forward hook.

    Args:
        part: The module; unused.
        inputs: Its inputs; unused.
        output: Its output, or a tuple that starts with it.
    """
    if isinstance(output, tuple):
        return (sum_over_ranks(output[0].contiguous()), *output[1:])
    return sum_over_ranks(output.contiguous())
