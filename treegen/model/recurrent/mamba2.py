"""Compute Mamba2 layers with treegen's own operator, like gated delta rule layers.

Mamba2 is that rule without its correction: a token with key B, input x and time step dt turns a
state S into exp(A dt) S + B (dt x)' and reads it with C. So rows share states and keep update lists
in the same way; see `treegen.ops.recurrence`. Weights, projections and norm are those of the
transformers layer.

Texts are computed in chunks of tokens, by matrix products instead of a step per token. Within a
chunk a token reads earlier ones as in attention, with decaying weights. Chunks pass states to later
ones. See section 6 of the Mamba-2 paper (https://arxiv.org/abs/2405.21060).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from treegen.common.spec import DeltaSpec, StateSpec
from treegen.model.recurrent.state_batch import StateRun, delta_pass, has_state_shapes
from treegen.ops.recurrence import DeltaInputs, DeltaStates

# T tokens of a pass, D width of the model, C channels of the convolution, W width of its windows,
# H heads, V numbers of a head's input, G groups, K numbers of a group's key, R heads of a group,
# N sequences that run together, of L tokens; B chunks, of S tokens

KNOWN: Final = frozenset(
    {
        "BambaMixer",
        "FalconH1Mixer",
        "GraniteMoeHybridMambaLayer",
        "NemotronHMamba2Mixer",
        "Zamba2MambaMixer",
    }
)
_REQUIRED_ATTRIBUTES: Final = (
    "in_proj",
    "conv1d",
    "A_log",
    "dt_bias",
    "D",
    "norm",
    "out_proj",
    "num_heads",
    "n_groups",
    "head_dim",
    "ssm_state_size",
    "intermediate_size",
    "time_step_limit",
    "activation",
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
        layer.n_groups,
        layer.num_heads,
        layer.ssm_state_size,
        layer.head_dim,
        dtype.itemsize,
        corrects=False,
    )
    channels = 2 * spec.k_heads * spec.k_dim + spec.v_heads * spec.v_dim
    window = channels, layer.conv1d.weight.shape[-1]
    fits = has_state_shapes(states, dtype, window, (spec.v_heads, spec.v_dim, spec.k_dim))
    is_supported = layer.activation in ("silu", "swish") and spec.v_heads % spec.k_heads == 0
    return spec if fits and is_supported else None


def forward(
    layer: Any, hidden_1TD: Tensor, windows: Tensor, states: Tensor, operator: Callable[..., Tensor]
) -> Tensor:
    """Return the output [1, T, D] of a layer, and update its states.

    Args:
        layer: The layer.
        hidden_1TD: Its inputs [1, T, D].
        windows: Convolution windows in state slots [slots, C, W].
        states: States in state slots [slots, H, V, K].
        operator: `mamba2`, or its custom operator.
    """
    multiplier = getattr(layer, "ssm_in_multiplier", None)  # only in Falcon-H1
    projected = layer.in_proj(hidden_1TD if multiplier is None else hidden_1TD * multiplier)
    if multiplier is not None:
        projected = projected * layer.mup_vector
    inner = layer.num_heads * layer.head_dim
    gate, mixed, dt = projected.split(
        [inner, projected.shape[-1] - inner - layer.num_heads, layer.num_heads], -1
    )
    core_THV = operator(
        mixed[0],
        dt[0],
        layer.conv1d.weight,
        layer.conv1d.bias,
        layer.A_log,
        layer.dt_bias,
        layer.D,
        windows,
        states,
        layer.n_groups,
        *map(float, layer.time_step_limit),
    )
    core = core_THV.reshape(1, -1, inner)
    # Falcon-H1 may have no norm.
    is_bare = isinstance(layer.norm, torch.nn.Identity)
    core = core * silu(gate) if is_bare else layer.norm(core, gate)
    out: Tensor = layer.out_proj(core.to(hidden_1TD.dtype))
    return out


def mamba2(  # noqa: PLR0913 -- a custom operator takes tensors and numbers
    mixed_TC: Tensor,
    dt_TH: Tensor,
    conv_C1W: Tensor,
    conv_bias_C: Tensor | None,
    a_log_H: Tensor,
    dt_bias_H: Tensor,
    skip_H: Tensor,
    windows: Tensor,
    states: Tensor,
    groups: int,
    dt_min: float,
    dt_max: float,
) -> Tensor:
    """Return the recurrence's output at each token of a pass, [T, H, V], and update its states.

    Args:
        mixed_TC: Values, keys and queries of all heads before the convolution [T, C].
        dt_TH: Inputs of the time steps [T, H].
        conv_C1W: Weights of the convolution [C, 1, columns].
        conv_bias_C: Bias of the convolution [C]; None for none.
        a_log_H: Logarithms of the decay rates [H].
        dt_bias_H: Biases of the time steps [H].
        skip_H: Weights of each token's own value [H].
        windows: Convolution windows in state slots [slots, C, W].
        states: States in state slots, in transformers' shape [slots, H, V, K]; the memory is used
            as [slots, H, K, V].
        groups: The number of groups, G.
        dt_min: The minimum time step; transformers ignores it for a single token.
        dt_max: The maximum time step; transformers ignores it for a single token.
    """
    heads, v_dim, k_dim = states.shape[1:]
    spec = DeltaSpec(groups, heads, k_dim, v_dim, windows.itemsize, corrects=False)
    cache = DeltaStates(windows, states.view(-1, heads, k_dim, v_dim), spec)
    inputs = DeltaInputs(
        mixed_TC, dt_TH, dt_TH, conv_C1W[:, 0], a_log_H, dt_bias_H, 1.0, conv_bias_C, skip_H
    )
    return delta_pass(inputs, cache, partial(_scan, limits=(dt_min, dt_max)))


def _scan(
    inputs: DeltaInputs,
    spec: DeltaSpec,
    mixed_NLC: Tensor,
    state: Tensor | None,
    run: StateRun,
    *,
    limits: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    dt_min, dt_max = limits
    step_NLH = softplus(inputs.a_TH.float() + inputs.dt_bias_H.float()).clamp(dt_min, dt_max)
    step_NLH = step_NLH.view(run.num, run.length, -1)
    keys = spec.k_heads * spec.k_dim
    parts = mixed_NLC.float().split([spec.v_heads * spec.v_dim, keys, keys], -1)
    x = parts[0].unflatten(-1, (spec.v_heads, -1))
    k_NLGK, q_NLGK = (part.unflatten(-1, (spec.k_heads, -1)) for part in parts[1:])
    groups = spec.k_heads, -1
    if state is None:
        state = x.new_zeros(run.num, spec.v_heads, spec.k_dim, spec.v_dim)
    out_NLGRV, last_NGKRV = chunk_scan(
        (x * step_NLH[..., None]).unflatten(2, groups),
        (step_NLH * -inputs.a_log_H.float().exp()).unflatten(2, groups),
        k_NLGK,
        q_NLGK,
        state.unflatten(1, groups).transpose(2, 3),
    )
    skipped = 0.0 if inputs.skip_H is None else inputs.skip_H.float()[:, None] * x
    return out_NLGRV.flatten(2, 3) + skipped, last_NGKRV.transpose(2, 3).flatten(1, 2)


_CHUNK: Final = 128  # tokens per chunk
_WEIGHTS: Final = 2**28  # maximum bytes of the attention-like weights computed at once


def chunk_scan(
    x_NLGRV: Tensor,
    decay_NLGR: Tensor,
    keys_NLGK: Tensor,
    queries_NLGK: Tensor,
    state_NGKRV: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the output at each token, and the states after the last token.

    A token turns a state S into exp(decay) S + key x', and then reads it with its query. All
    tensors are float32.

    Args:
        x_NLGRV: Inputs of heads [N, L, G, R, V], times the time steps of their tokens.
        decay_NLGR: Logarithms of the factors by which tokens decay a state [N, L, G, R]; at most 0.
        keys_NLGK: Keys of groups [N, L, G, K].
        queries_NLGK: Queries of groups [N, L, G, K].
        state_NGKRV: States before the first token [N, G, K, R, V].

    Returns:
        The output at each token [N, L, G, R, V], and the states after the last token
            [N, G, K, R, V].
    """
    num, length = x_NLGRV.shape[:2]
    size = min(_CHUNK, 1 << max(length - 1, 0).bit_length())
    heads = decay_NLGR.shape[2:].numel()
    part = max(_WEIGHTS // (8 * num * size * size * heads), 1) * size
    outs = []
    for at in range(0, length, part):
        x, decay, keys, queries = (
            tensor[:, at : at + part] for tensor in (x_NLGRV, decay_NLGR, keys_NLGK, queries_NLGK)
        )
        out, state_NGKRV = _chunks(x, decay, keys, queries, state_NGKRV, size)
        outs.append(out)
    return torch.cat(outs, 1), state_NGKRV


def _chunks(
    x_NLGRV: Tensor,
    decay_NLGR: Tensor,
    keys_NLGK: Tensor,
    queries_NLGK: Tensor,
    state_NGKRV: Tensor,
    size: int,
) -> tuple[Tensor, Tensor]:
    num, length, groups, heads, width = x_NLGRV.shape
    padding = -length % size  # tokens that do not change the state

    def split_chunks(tensor: Tensor) -> Tensor:
        padded = pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, padding))
        parts: Tensor = padded.unflatten(1, (-1, size))
        return parts

    x_NBGSRV = split_chunks(x_NLGRV).transpose(2, 3)
    keys_NBGSK = split_chunks(keys_NLGK).transpose(2, 3)
    queries_NBGSK = split_chunks(queries_NLGK).transpose(2, 3)
    # Use float64, because differences of long sums may be much smaller than the sums.
    log_decay_NBGRS = split_chunks(decay_NLGR).permute(0, 1, 3, 4, 2).double().cumsum(-1)
    log_decay_between_NBGRSS = (
        log_decay_NBGRS[..., :, None] - log_decay_NBGRS[..., None, :]
    ).float()
    is_later_SS = torch.ones(size, size, dtype=torch.bool, device=x_NLGRV.device).triu(1)
    weights_NBGRSS = log_decay_between_NBGRSS.masked_fill_(is_later_SS, -torch.inf).exp_()
    weights_NBGRSS *= (queries_NBGSK @ keys_NBGSK.transpose(-1, -2))[:, :, :, None]
    within_NBGRSV = weights_NBGRSS @ x_NBGSRV.transpose(3, 4)

    decay_to_end_NBGSR = (
        (log_decay_NBGRS[..., -1:] - log_decay_NBGRS).float().exp_().transpose(-1, -2)
    )
    decayed_NBGSRV = x_NBGSRV * decay_to_end_NBGSR[..., None]
    chunk_NBGKRV = (keys_NBGSK.transpose(-1, -2) @ decayed_NBGSRV.flatten(-2)).unflatten(
        -1, (heads, width)
    )
    chunk_decay_NBGR = log_decay_NBGRS[..., -1].float().exp_()
    initial_NBGKRV = torch.empty_like(chunk_NBGKRV)
    for chunk in range(chunk_NBGKRV.shape[1]):
        initial_NBGKRV[:, chunk] = state_NGKRV
        state_NGKRV = (
            state_NGKRV * chunk_decay_NBGR[:, chunk, :, None, :, None] + chunk_NBGKRV[:, chunk]
        )

    across_NBGSRV = (queries_NBGSK @ initial_NBGKRV.flatten(-2)).unflatten(-1, (heads, width))
    across_NBGSRV *= log_decay_NBGRS.float().exp_().transpose(-1, -2)[..., None]
    out_NBSGRV = (within_NBGRSV.transpose(3, 4) + across_NBGSRV).transpose(2, 3)
    return out_NBSGRV.reshape(num, -1, groups, heads, width)[:, :length], state_NGKRV
