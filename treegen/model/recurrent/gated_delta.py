"""Compute gated delta rule layers with treegen's own operator.

A transformers layer takes a whole text or one token per sequence, and its states must be gathered
and scattered. The operator takes all tokens of a pass, reads and writes states in their slots, and
lets rows of a decode step share their initial states (see `treegen.ops.recurrence`). Weights,
projections and norm are those of the transformers layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from treegen.common.spec import DeltaSpec, StateSpec
from treegen.model.recurrent.state_batch import StateRun, delta_pass, has_state_shapes
from treegen.ops.recurrence import DeltaInputs, DeltaStates

# T tokens of a pass, D width of the model, C channels of the convolution, W width of its windows,
# H value heads, G key heads, K key dim, V value dim, N sequences that run together, of L tokens


class Projected(NamedTuple):
    """The projections of a layer's inputs: [T, C], [T, H * V], [T, H] and [T, H]."""

    mixed_TC: Tensor
    z: Tensor
    b_TH: Tensor
    a_TH: Tensor


# Linear layers are called in transformers' order, so that those with the same input are merged.


def _project_qwen3_next(layer: Any, hidden_TD: Tensor) -> Projected:
    qkvz, ba = layer.in_proj_qkvz(hidden_TD[None]), layer.in_proj_ba(hidden_TD[None])
    q, k, v, z, b, a = layer.fix_query_key_value_ordering(qkvz, ba)
    mixed = torch.cat([part.flatten(2) for part in (q, k, v)], -1)
    return Projected(mixed[0], z[0], b[0], a[0])


def _project_qwen3_5(layer: Any, hidden_TD: Tensor) -> Projected:
    mixed, z = layer.in_proj_qkv(hidden_TD), layer.in_proj_z(hidden_TD)
    return Projected(mixed, z, layer.in_proj_b(hidden_TD), layer.in_proj_a(hidden_TD))


def _project_olmo(layer: Any, hidden_TD: Tensor) -> Projected:
    mixed = [layer.q_proj(hidden_TD), layer.k_proj(hidden_TD), layer.v_proj(hidden_TD)]
    b, a = layer.b_proj(hidden_TD), layer.a_proj(hidden_TD)
    return Projected(torch.cat(mixed, -1), layer.g_proj(hidden_TD), b, a)


# For each class of layers: its projections, and the names of its norm and its last projection.
KNOWN: Final[dict[str, tuple[Callable[[Any, Tensor], Projected], str, str]]] = {
    "Qwen3NextGatedDeltaNet": (_project_qwen3_next, "norm", "out_proj"),
    "Qwen3_5GatedDeltaNet": (_project_qwen3_5, "norm", "out_proj"),
    "Qwen3_5MoeGatedDeltaNet": (_project_qwen3_5, "norm", "out_proj"),
    "OlmoHybridGatedDeltaNet": (_project_olmo, "o_norm", "o_proj"),
}
_REQUIRED_ATTRIBUTES: Final = (
    "conv1d",
    "A_log",
    "dt_bias",
    "num_k_heads",
    "num_v_heads",
    "head_k_dim",
    "head_v_dim",
)


def make_spec(layer: Any, states: Sequence[StateSpec], dtype: torch.dtype) -> DeltaSpec | None:
    """Return the layout of rows' update lists; None for a layer that the operator does not support.

    Args:
        layer: The layer.
        states: The states that it keeps.
        dtype: The type of its convolution window.
    """
    if not all(hasattr(layer, name) for name in _REQUIRED_ATTRIBUTES):
        return None
    spec = DeltaSpec(
        layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim, dtype.itemsize
    )
    channels = 2 * spec.k_heads * spec.k_dim + spec.v_heads * spec.v_dim
    conv = layer.conv1d
    kernel_size = conv.weight.shape[-1]
    # A window has a spare column, so it also contains the window of the previous token.
    fits = has_state_shapes(
        states, dtype, (channels, kernel_size), (spec.v_heads, spec.k_dim, spec.v_dim)
    )
    plain = conv.bias is None and getattr(layer, "activation", None) in ("silu", "swish")
    return spec if fits and plain and spec.v_heads % spec.k_heads == 0 else None


def forward(
    layer: Any, hidden_1TD: Tensor, windows: Tensor, states: Tensor, operator: Callable[..., Tensor]
) -> Tensor:
    """Return the output [1, T, D] of a layer, and update its states.

    Args:
        layer: The layer.
        hidden_1TD: Its inputs [1, T, D].
        windows: Convolution windows in state slots [slots, C, W].
        states: States in state slots [slots, H, K, V].
        operator: `gated_delta`, or its custom operator.
    """
    project, norm, last = KNOWN[type(layer).__name__]
    projected = project(layer, hidden_1TD[0])
    strength = 2.0 if getattr(layer, "allow_neg_eigval", False) else 1.0
    core_THV = operator(
        projected.mixed_TC,
        projected.b_TH,
        projected.a_TH,
        layer.conv1d.weight,
        layer.A_log,
        layer.dt_bias,
        windows,
        states,
        layer.num_k_heads,
        strength,
    )
    core = core_THV.reshape(-1, core_THV.shape[-1])
    core = getattr(layer, norm)(core, projected.z.reshape(core.shape))
    out_TD: Tensor = getattr(layer, last)(core.view(hidden_1TD.shape[1], -1))
    return out_TD[None]


def gated_delta(
    mixed_TC: Tensor,
    b_TH: Tensor,
    a_TH: Tensor,
    conv_C1W: Tensor,
    a_log_H: Tensor,
    dt_bias_H: Tensor,
    windows: Tensor,
    states: Tensor,
    k_heads: int,
    strength: float,
) -> Tensor:
    """Return the recurrence's output at each token of a pass, [T, H, V], and update its states.

    Args:
        mixed_TC: Queries, keys and values of all heads before the convolution [T, C].
        b_TH: Inputs of the update strengths [T, H].
        a_TH: Inputs of the gates [T, H].
        conv_C1W: Weights of the convolution [C, 1, columns].
        a_log_H: Logarithms of the decay rates [H].
        dt_bias_H: Biases of the gates [H].
        windows: Convolution windows in state slots [slots, C, W].
        states: States in state slots [slots, H, K, V].
        k_heads: The number of key heads, G.
        strength: The maximum update strength.
    """
    _, v_heads, k_dim, v_dim = states.shape
    cache = DeltaStates(
        windows, states, DeltaSpec(k_heads, v_heads, k_dim, v_dim, windows.itemsize)
    )
    inputs = DeltaInputs(mixed_TC, a_TH, b_TH, conv_C1W[:, 0], a_log_H, dt_bias_H, strength)
    return delta_pass(inputs, cache, _gated_delta_rule)


def _gated_delta_rule(
    inputs: DeltaInputs, spec: DeltaSpec, mixed_NLC: Tensor, state: Tensor | None, run: StateRun
) -> tuple[Tensor, Tensor]:
    # Imported here because it is slow to import.
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    keys = spec.k_heads * spec.k_dim
    parts = mixed_NLC.split([keys, keys, spec.v_heads * spec.v_dim], -1)
    group_size = spec.v_heads // spec.k_heads
    q, k = (
        part.unflatten(-1, (spec.k_heads, -1)).repeat_interleave(group_size, 2)
        for part in parts[:2]
    )
    a, b = (tensor.view(run.num, run.length, -1) for tensor in (inputs.a_TH, inputs.b_TH))
    out_and_state: tuple[Tensor, Tensor] = torch_chunk_gated_delta_rule(
        q,
        k,
        parts[2].unflatten(-1, (spec.v_heads, -1)),
        g=-inputs.a_log_H.float().exp() * softplus(a.float() + inputs.dt_bias_H),
        beta=b.sigmoid() * inputs.strength,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out_and_state
