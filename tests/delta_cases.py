"""Random steps of the gated delta rule and of Mamba2, and what transformers makes of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus
from transformers.models.bamba.modeling_bamba import mamba2_selective_state_update
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from treegen.common.spec import DeltaSpec
from treegen.ops import recurrence
from treegen.ops.recurrence import DeltaInputs, DeltaStates, RowSlots
from treegen.ops.recurrence.types import offsets

_WIDTH = 4


def own_slots(reads: Tensor, writes: Tensor) -> RowSlots:
    """Rows with states of their own."""
    return RowSlots(torch.stack([reads, writes]))


class Case:
    """Rows below two states, in slots 1 and 2, with slots of their own and lists in others.

    want: [tokens, T, H, V] what transformers reads. last: its states after all tokens.
    windows: [tokens + 1, T, C, W] the inputs of the convolution before each token.
    """

    def __init__(
        self,
        seed: int,
        num_rows: int,
        num_tokens: int = 16,
        dtype: torch.dtype = torch.float32,
        heads: tuple[int, int, int, int] = (2, 6, 8, 12),
        itemsize: int = 0,
        device: str = "cpu",
        by: Any = recurrence,
        corrects: bool = True,
    ) -> None:
        """itemsize: of lists. by: what has the operator. corrects: False for Mamba2."""
        generator = torch.Generator().manual_seed(seed)
        self.spec = spec = DeltaSpec(*heads, itemsize or dtype.itemsize, corrects)
        self._by = by
        channels = 2 * spec.k_heads * spec.k_dim + spec.v_heads * spec.v_dim

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        length = spec.pages + spec.own_pages  # pages of a list
        shared = -(-num_rows * spec.own_pages // spec.pages)
        num_slots = 3 + 2 * num_rows + shared
        self.base = torch.randint(1, 3, (num_rows,), generator=generator).sort().values
        order = torch.randperm(num_rows, generator=generator)
        self.own = 3 + order  # where a row's state is or will be
        self.window = self.own
        # A list begins in pages of its own, and goes on in a slot that is cut.
        first = (3 + 2 * num_rows) * spec.pages
        own_pages = first + torch.arange(num_rows * spec.own_pages).view(num_rows, -1)
        cut = (3 + num_rows + order)[:, None] * spec.pages + torch.arange(spec.pages)
        self.pages = torch.cat([own_pages, cut], 1).T.contiguous()
        assert len(self.pages) == length
        windows = normal(num_slots, channels, _WIDTH).to(dtype)
        states = normal(num_slots, spec.v_heads, spec.k_dim, spec.v_dim) * 0.3
        # Slots that are not in use may hold anything.
        states[3:] = float("nan")
        self.listed = torch.zeros(num_rows, dtype=torch.int64)
        self.most = torch.randint(
            3, min(40, length * spec.page_tokens), (num_rows,), generator=generator
        )
        self.folds = 0
        self.mixed = normal(num_tokens, num_rows, channels).to(dtype)
        self.a = normal(num_tokens, num_rows, spec.v_heads)
        self.b = normal(num_tokens, num_rows, spec.v_heads)
        self.weights = normal(channels, _WIDTH).to(dtype)
        self.a_log = torch.rand(spec.v_heads, generator=generator).mul(8).add(0.01).log()
        self.dt_bias = normal(spec.v_heads) - 3
        self.bias = self.skip = None
        if not corrects:
            self.bias, self.skip = normal(channels).to(dtype), normal(spec.v_heads)
        self._compute(windows[self.base], states[self.base].clone())
        self.states = DeltaStates(windows.to(device), states.to(device), spec)
        self.states.windows[self.own.to(device)] = self.states.windows[self.base.to(device)]
        self.states.states[self.own.to(device)] = self.states.states[self.base.to(device)]
        self.device = device

    def _compute(self, window: Tensor, state: Tensor) -> None:
        spec, outs, windows = self.spec, [], [window]
        dims = [(spec.k_heads, spec.k_dim)] * 2 + [(spec.v_heads, spec.v_dim)]
        bias = None if self.bias is None else self.bias.float()
        self._steps: list[tuple[Tensor, ...]] = []
        for mixed, a, b in zip(self.mixed, self.a, self.b, strict=True):
            whole = torch.cat([windows[-1], mixed[..., None]], -1)
            windows.append(whole[..., 1:])
            weights = self.weights.float()[:, None]
            out = silu(conv1d(whole.float(), weights, bias, groups=mixed.shape[-1])[..., -1])
            q, k, v = (
                out[:, at : at + heads * dim].unflatten(-1, (heads, dim))
                for at, (heads, dim) in zip(offsets(spec), dims, strict=True)
            )
            if self.skip is not None:
                self._steps.append((q, k, v, a))
                got, state = self._mamba2(self._steps[-1], state)
                outs.append(got)
                continue
            q, k = (x.repeat_interleave(spec.v_heads // spec.k_heads, 1) for x in (q, k))
            g = -self.a_log.exp() * softplus(a + self.dt_bias)
            self._steps.append((q, k, v, g, b.sigmoid()))
            got, state = _rule(self._steps[-1], state)
            outs.append(got)
        self.want, self.last, self.windows = torch.stack(outs), state, torch.stack(windows)

    def _mamba2(self, given: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
        c, b, x, dt = given
        assert self.skip is not None
        k_dim, v_dim = self.spec.k_dim, self.spec.v_dim
        state_HVK = state.transpose(-1, -2).contiguous()
        out: Tensor = mamba2_selective_state_update(
            state_HVK,
            x,
            dt[..., None].expand(-1, -1, v_dim),
            -self.a_log.exp()[:, None, None].expand(-1, v_dim, k_dim),
            b,
            c,
            self.skip[:, None].expand(-1, v_dim),
            self.dt_bias[:, None].expand(-1, v_dim),
            dt_softplus=True,
        )
        return out, state_HVK.transpose(-1, -2).contiguous()

    def rounded_states(self) -> float:
        """The error of the same rule on states that are rounded to bfloat16 after each token."""
        state = self.states.states[self.base].cpu()
        outs = []
        for given in self._steps:
            out, state = (_rule if self.skip is None else self._mamba2)(given, state)
            state = state.bfloat16().float()
            outs.append(out)
        got, want = torch.stack(outs).double(), self.want.double()
        return float((got - want).norm() / want.norm())

    def inputs(self, t: int) -> DeltaInputs:
        """What token t gives the operator."""
        mixed, a, b, weights, a_log, dt_bias = (
            each.to(self.device)
            for each in (
                self.mixed[t],
                self.a[t],
                self.b[t],
                self.weights,
                self.a_log,
                self.dt_bias,
            )
        )
        own = (None if x is None else x.to(self.device) for x in (self.bias, self.skip))
        return DeltaInputs(mixed, a, b, weights, a_log, dt_bias, 1.0, *own)

    def slots(self, t: int) -> RowSlots:
        """Where the rows' states are before token t."""
        window = self.base if t == 0 else self.window
        rows = [self.base, self.listed, window, self.window, *self.pages]
        return RowSlots(torch.stack(rows).to(self.device))

    def list_step(self, t: int) -> Tensor:
        """What token t reads, of rows that list their updates."""
        out: Tensor = self._by.step(self.inputs(t), self.states, self.slots(t))
        self.listed += 1
        return out.cpu()

    def fold(self, rows: Tensor) -> None:
        """Give rows states of their own."""
        device = self.device
        self._by.fold_update_lists(
            self.states,
            self.base[rows].to(device),
            self.own[rows].to(device),
            self.listed[rows].to(device),
            self.pages[:, rows].to(device),
        )
        self.base[rows], self.listed[rows] = self.own[rows], 0
        self.folds += len(rows)

    def decode(self, num_tokens: int) -> float:
        """Decode all rows with lists; returns the largest error."""
        worst = 0.0
        for t in range(num_tokens):
            due = (self.listed >= self.most).nonzero()[:, 0]
            if len(due):
                self.fold(due)
            worst = max(worst, float((self.list_step(t) - self.want[t]).abs().max()))
        return worst


def _rule(given: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta = (each[:, None] for each in given)
    out, state = torch_recurrent_gated_delta_rule(
        q,
        k,
        v,
        g=g,
        beta=beta,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out[:, 0], state
