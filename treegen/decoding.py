"""Decode steps: which rows the next one has, and its launch behind the one under way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from treegen.attention import Level
from treegen.attention.level import to_host
from treegen.layout import Ints
from treegen.passes import RunParts, decode_batch, decode_levels
from treegen.sampling import Draws, SamplingBatch, draw
from treegen.transfer import Fetch, to_device, to_device_together


@dataclass(frozen=True, slots=True)
class Flight:
    """Draws of rows that may be under way. serials: tell whether a slot is still the same row's."""

    slots: Ints
    serials: Ints
    draws: Draws
    fetch: Fetch

    @classmethod
    def of(cls, slots: Ints, serials: Ints, draws: Draws) -> Flight:
        """Draws on their way to the host."""
        tensors = (draws.tokens_PN, draws.logprobs_PN, draws.lse_P, draws.top_tokens_PK,
                   draws.top_logprobs_PK)  # fmt: skip
        return cls(slots, serials, draws, Fetch([t for t in tensors if t is not None]))


class DecodeSteps:
    """Launches the decode steps of one run."""

    def __init__(self, run: RunParts) -> None:
        """Steps of the live rows, drawn as their parameter sets say; `usage` is kept up."""
        self._run = run
        self._state: tuple[Ints, list[Level], SamplingBatch, int] | None = None

    def next_rows(self, flight: Flight | None) -> tuple[Ints, Ints, Ints]:
        """Rows of the next step, their tokens so far, and where in the last step each was, or -1.

        flight: that step if its tokens are not known yet; that a row reaches its limit is.
        """
        order, rows = self._run.live.order, self._run.live.rows
        counts = rows.count[order]
        if flight is None:
            return order, counts, np.full(len(order), -1)
        place = np.full(len(rows.serial), -1)
        place[flight.slots] = np.arange(len(flight.slots))
        source = place[order]
        source[flight.serials[source] != rows.serial[order]] = -1
        counts = counts + (source >= 0)
        goes_on = (source < 0) | (counts < rows.limit[order])
        if goes_on.all():
            return order, counts, source
        return order[goes_on], counts[goes_on], source[goes_on]

    def launch(self, order: Ints, counts: Ints, source: Ints, before: Flight | None) -> Flight:
        """Queue a decode step of the rows that `next_rows` gave, behind the last one."""
        run, usage = self._run, self._run.usage
        rows, device = run.live.rows, run.model.device
        levels, sampling, shared_keys = self._row_state(order)
        tokens = rows.tokens[order, rows.count[order] - 1].astype(np.int64)
        tokens_T, source_T, seeds_T, counts_T = to_device_together(
            [tokens, source, rows.seed[order], counts], device
        )
        if before is not None and (source >= 0).any():
            drawn_T = before.draws.tokens_PN[:, 0][source_T.clamp(min=0)]
            tokens_T = torch.where(source_T >= 0, drawn_T, tokens_T)
        batch = decode_batch(rows, order, counts, tokens_T, levels, run.cache, device, run.impl)
        usage.impl = batch.levels.impl
        logits = run.model.forward(batch)
        usage.count_kernels(batch.levels.kernels)
        draws = draw(logits, seeds_T[:, None], counts_T[:, None], sampling)
        ends = rows.stop[order] + counts
        usage.key_tokens_read += shared_keys + int((ends - rows.base[order]).sum())
        usage.key_tokens_unshared += int(ends.sum())
        usage.peak_rows = max(usage.peak_rows, len(order))
        usage.decode_steps += 1
        return Flight.of(order, rows.serial[order], draws)

    def _row_state(self, order: Ints) -> tuple[list[Level], SamplingBatch, int]:
        """What changes only when rows come or go: shared levels and sampling parameters."""
        run = self._run
        if self._state is not None and self._state[0] is order:
            return self._state[1:]
        device = run.model.device
        levels = decode_levels(run.live.rows.chain[order], run.store, device)
        keys = sum(int(to_host(level).kv_len_G.sum()) for level in levels)
        used, index = np.unique(run.live.rows.params[order], return_inverse=True)
        sampling = SamplingBatch.of(
            [run.param_sets[i].params for i in used], to_device(index, device)
        )
        self._state = order, levels, sampling, keys
        return self._state[1:]
