"""The recurrences in torch, one token at a time: the reference for kernels, and the CPU version."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from treegen.ops.recurrence.types import (
    BASE,
    LISTED,
    NEXT_WINDOW,
    PAGES,
    READ_SLOTS,
    WINDOW,
    WRITE_SLOTS,
    Convolution,
    DeltaInputs,
    DeltaStates,
    RowSlots,
    offsets,
)

# Legend: T rows, H value heads, G key heads, K key dim, V value dim, C channels, W width of a
# window, P pages of an update list; N updates of a list or, in scans, sequences; F folded lists

_NORM = 1e-6


def step(layer: DeltaInputs, cache: DeltaStates, rows: RowSlots) -> Tensor:
    """Compute one token of each row. Windows and states (or update lists) are updated in place.

    Args:
        layer: The layer's inputs for T rows, and its weights.
        cache: Windows and states of the layer.
        rows: Where each row's window and its state or update list are.

    Returns:
        The output of each row [T, H, V], in the type of `mixed_TC`.
    """
    inputs = rows.inputs_RT
    window_at = (inputs[WINDOW], inputs[NEXT_WINDOW]) if rows.has_lists else (inputs[0], inputs[1])
    mixed_TC = silu(convolve(layer.mixed_TC, layer.convolution(cache), *window_at))
    q_THK, k_TGK, k_THK, v_THV = _heads(mixed_TC, cache)
    step_TH = softplus(layer.a_TH.float() + layer.dt_bias_H.float())
    gate_TH = -layer.a_log_H.float().exp() * step_TH
    corrects = cache.spec.corrects
    b_TH = layer.b_TH.float().sigmoid() * layer.strength if corrects else step_TH
    skipped_THV = 0.0 if layer.skip_H is None else layer.skip_H.float()[:, None] * v_THV
    if not rows.has_lists:
        s_THKV = cache.states[inputs[READ_SLOTS]] * gate_TH.exp()[..., None, None]
        u_THV = b_TH[..., None] * (v_THV - _read(s_THKV, k_THK) if corrects else v_THV)
        s_THKV += k_THK[..., None] * u_THV[..., None, :]
        cache.states[inputs[WRITE_SLOTS]] = s_THKV
        return (_read(s_THKV, q_THK) + skipped_THV).to(layer.mixed_TC.dtype)
    base_THKV = cache.states[inputs[BASE]]
    listed_T = inputs[LISTED]
    k_TNHK, u_TNHV, sum_TNH = _lists(cache, inputs[PAGES:], listed_T)
    sum_TH, weight_TNH = gate_TH, sum_TNH
    if k_TNHK.shape[1]:
        sum_TH, weight_TNH = _decay_weights(sum_TNH, listed_T, gate_TH)

    def read(x_THK: Tensor) -> Tensor:
        part_TNH = torch.einsum("tnhk,thk->tnh", k_TNHK, x_THK) * weight_TNH
        listed_THV = torch.einsum("tnh,tnhv->thv", part_TNH, u_TNHV)
        return sum_TH.exp()[..., None] * _read(base_THKV, x_THK) + listed_THV

    u_THV = b_TH[..., None] * (v_THV - read(k_THK) if corrects else v_THV)
    out_THV = read(q_THK) + (k_THK * q_THK).sum(-1, keepdim=True) * u_THV + skipped_THV
    _add(cache, inputs, k_TGK, u_THV, sum_TH)
    return out_THV.to(layer.mixed_TC.dtype)


def scan(
    layer: DeltaInputs,
    cache: DeltaStates,
    read_slots_N: Tensor,
    write_slots_N: Tensor,
    num_tokens: int,
) -> Tensor:
    """Compute `num_tokens` tokens of each of N sequences, one token after another.

    The order of each token's sums is fixed, so a token has the same bits whether it is computed
    alone or after others. Windows and states are updated in place.

    Args:
        layer: Inputs of all tokens of the first sequence, then of the next; and the weights.
        cache: Windows and states of the layer.
        read_slots_N: Slot of each sequence's state before its first token [N]; -1 at the start of a
            text.
        write_slots_N: Slot for each sequence's state after its last token [N].
        num_tokens: Tokens per sequence.

    Returns:
        The output at each token [T, H, V], with T = N * num_tokens.
    """
    _begin((cache.windows, cache.states), read_slots_N, write_slots_N)
    rows = RowSlots(torch.stack([write_slots_N, write_slots_N]))
    index_TN = _token_indices(len(write_slots_N), num_tokens, write_slots_N.device)
    out_THV = layer.mixed_TC.new_empty(index_TN.numel(), cache.spec.v_heads, cache.spec.v_dim)
    for index_N in index_TN:
        out_THV[index_N] = step(layer.rows(index_N), cache, rows)
    return out_THV


def convolve_runs(
    mixed_TC: Tensor,
    conv: Convolution,
    read_slots_N: Tensor,
    write_slots_N: Tensor,
    num_tokens: int,
) -> Tensor:
    """Compute the convolution at `num_tokens` tokens of each sequence [T, C], and update windows.

    Args:
        mixed_TC: Inputs of the convolution [T, C]: all tokens of the first sequence, then of the
            next.
        conv: The convolution.
        read_slots_N: Slot of each sequence's window before its first token [N]; -1 at the start of
            a text.
        write_slots_N: Slot for each sequence's window after its last token [N].
        num_tokens: Tokens per sequence.
    """
    _begin((conv.windows,), read_slots_N, write_slots_N)
    out_TC = torch.empty_like(mixed_TC)
    for index_N in _token_indices(len(write_slots_N), num_tokens, write_slots_N.device):
        out_NC = convolve(mixed_TC[index_N], conv, write_slots_N, write_slots_N)
        out_TC[index_N] = out_NC.to(out_TC.dtype)
    return out_TC


def _begin(tensors: tuple[Tensor, ...], read_slots_N: Tensor, write_slots_N: Tensor) -> None:
    """Copy each sequence's initial state, or zeros, to the slot in which it is updated."""
    for tensor in tensors:
        before = tensor[read_slots_N.clamp(min=0)]
        before[read_slots_N < 0] = 0
        tensor[write_slots_N] = before


def _token_indices(num: int, num_tokens: int, device: torch.device) -> Tensor:
    """Return the indices of all sequences' first tokens, second tokens, and so on [tokens, N]."""
    return torch.arange(num * num_tokens, device=device).view(num, num_tokens).T


def fold_update_lists(
    cache: DeltaStates, base_F: Tensor, target_F: Tensor, listed_F: Tensor, pages_PF: Tensor
) -> None:
    """Fold F update lists into states.

    Args:
        cache: Windows and states of the layer.
        base_F: Slots of the states to which the lists apply [F].
        target_F: Slots for the resulting states [F], which may equal `base_F`.
        listed_F: Number of updates in each list [F].
        pages_PF: Pages of each list [P, F].
    """
    k_FNHK, u_FNHV, sum_FNH = _lists(cache, pages_PF, listed_F)
    states_FHKV = cache.states[base_F].clone()
    if k_FNHK.shape[1]:
        sum_FH, weight_FNH = _decay_weights(sum_FNH, listed_F)
        states_FHKV *= sum_FH.exp()[..., None, None]
        states_FHKV += torch.einsum("fnhk,fnhv->fhkv", k_FNHK * weight_FNH[..., None], u_FNHV)
    cache.states[target_F] = states_FHKV


def _decay_weights(
    sum_TNH: Tensor, listed_T: Tensor, gate_TH: Tensor | float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the current sums of gates [T, H], and the current weight of each update [T, N, H].

    Args:
        sum_TNH: Sums of gates up to each update of the lists [T, N, H].
        listed_T: Number of updates in each list [T].
        gate_TH: Log gates of the tokens that follow the lists [T, H].
    """
    num_T, num_N = sum_TNH.shape[:2]
    index_N = torch.arange(num_N, device=listed_T.device)
    last_T = (listed_T - 1).clamp(min=0)
    before_TH = sum_TNH[torch.arange(num_T, device=last_T.device), last_T]
    sum_TH = gate_TH + torch.where((listed_T > 0)[:, None], before_TH, 0.0)
    live_TN1 = (index_N < listed_T[:, None])[..., None]
    return sum_TH, torch.where(live_TN1, (sum_TH[:, None] - sum_TNH).exp(), 0.0)


def convolve(
    mixed_TC: Tensor, conv: Convolution, read_slots_T: Tensor, write_slots_T: Tensor
) -> Tensor:
    """Compute the convolution at the new tokens [T, C] in float32, and append them to the windows.

    Args:
        mixed_TC: Inputs of the convolution [T, C].
        conv: The convolution.
        read_slots_T: Slot of each row's window before the token [T].
        write_slots_T: Slot for each row's window after the token [T].
    """
    conv_CW, bias_C, windows = conv
    extended_TCW = torch.cat([windows[read_slots_T], mixed_TC[..., None].to(windows.dtype)], -1)
    windows[write_slots_T] = extended_TCW[..., 1:]
    out_TC = (extended_TCW[..., -conv_CW.shape[-1] :].float() * conv_CW.float()).sum(-1)
    return out_TC if bias_C is None else out_TC + bias_C.float()


def _heads(mixed_TC: Tensor, cache: DeltaStates) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split inputs into queries [T, H, K], keys [T, G, K] and [T, H, K], and values [T, H, V]."""
    spec = cache.spec
    sizes = [(spec.k_heads, spec.k_dim)] * 2 + [(spec.v_heads, spec.v_dim)]
    q_TGK, k_TGK, v_THV = (
        mixed_TC.float()[:, at : at + heads * dim].unflatten(-1, (heads, dim))
        for at, (heads, dim) in zip(offsets(spec), sizes, strict=True)
    )
    if spec.corrects:
        q_TGK, k_TGK = _norm(q_TGK) * spec.k_dim**-0.5, _norm(k_TGK)
    per_head = spec.v_heads // spec.k_heads
    q_THK, k_THK = (x.repeat_interleave(per_head, 1) for x in (q_TGK, k_TGK))
    return q_THK, k_TGK, k_THK, v_THV


def _norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _NORM)


def _read(states_THKV: Tensor, x_THK: Tensor) -> Tensor:
    return (x_THK[..., None, :] @ states_THKV).squeeze(-2)


def _lists(cache: DeltaStates, pages: Tensor, listed_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys [T, N, H, K], values [T, N, H, V] and sums of gates [T, N, H] of lists, float32.

    Entries past the end of a list are zeros.
    """
    spec = cache.spec
    num = min(int(listed_T.max()) if len(listed_T) else 0, len(pages) * spec.page_tokens)
    used = -(-num // spec.page_tokens)
    pages_TP = pages[:used].T
    gates, keys, values = (
        # [T, P, G, n, ...] becomes [T, P * n, G, ...]
        part[pages_TP].transpose(2, 3).flatten(1, 2)[:, :num].float()
        for part in cache.views()
    )
    past_end_TN = torch.arange(num, device=pages.device) >= listed_T[:, None]
    # Memory that stored a state before may hold any bits, including NaN.
    for part in (gates, keys, values):
        part[past_end_TN] = 0.0
    per_head = spec.v_heads // spec.k_heads
    return keys.repeat_interleave(per_head, 2), values.flatten(2, 3), gates.flatten(2, 3)


def _add(cache: DeltaStates, inputs: Tensor, k_TGK: Tensor, u_THV: Tensor, sum_TH: Tensor) -> None:
    """Append an update to each list."""
    spec, listed_T = cache.spec, inputs[LISTED]
    gates, keys, values = cache.views()
    row = torch.arange(len(listed_T), device=listed_T.device)
    page = inputs[PAGES:][listed_T // spec.page_tokens, row]
    at = listed_T % spec.page_tokens
    heads = (spec.k_heads, spec.v_heads // spec.k_heads)
    gates[page, :, at] = sum_TH.unflatten(1, heads)
    keys[page, :, at] = k_TGK.to(keys.dtype)
    values[page, :, at] = u_THV.unflatten(1, heads).to(values.dtype)
