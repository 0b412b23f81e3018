"""A decode step as one computation, from the last drawn tokens to the next ones.

All numbers of the rows are in one tensor, `inputs_8T`. One copy moves it to the device, and a CUDA
graph reads it from a fixed address.

Letters: T rows, P rows of the previous step, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from treegen.common.device import to_device
from treegen.model.batch import Batch
from treegen.model.recurrent.state_batch import StateBatch
from treegen.ops.attention import PreparedLevels
from treegen.ops.cache.pool import PagedCache
from treegen.ops.sampling.batch import SamplingBatch
from treegen.ops.sampling.draw import Draws, can_divide, draw, draw_vocab_parallel
from treegen.ops.sampling.logits import Masks
from treegen.ops.sampling.token_history import TokenHistory

if TYPE_CHECKING:
    from treegen.model.parallel.ranks import Ranks

TOKEN, SOURCE, POSITION, SLOT, SEED, COUNT, FORCED, ROTARY = range(8)
NUM_INPUTS: Final = 8


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One decode step of T rows."""

    inputs_8T: Tensor
    """int64, by first index: TOKEN: the row's last token, if it is known. SOURCE: index of that
    token in drawn_P1, or -1 if it is known. POSITION: its position. SLOT: the cache slot for its
    key and value. SEED: the row's seed. COUNT: how many tokens the row has drawn. FORCED: the token
    that replaces the row's draw, or -1. ROTARY: its rotary position, which images may shift. They
    may be on the host until `on_device` moves them or a CUDA graph copies them."""
    drawn_P1: Tensor | None
    """The tokens that the previous step draws; None if all of them are known."""
    levels: PreparedLevels
    """Attention levels of the rows."""
    sampling: SamplingBatch
    """Sampling parameters of the rows."""
    cache: PagedCache
    """The cache with the pages that the rows read and write."""
    states: StateBatch | None = None
    """The recurrent states that the rows read and write; None for a model without any."""
    texts: TokenHistory | None = None
    """The text before each draw; None if no draw depends on it."""
    ranks: Ranks | None = None
    """The ranks that compute the step together; None for one process."""
    vocab_size: int = 0
    """Size of the vocabulary, of which each rank has the logits of a part."""

    @property
    def draws_vocab_parallel(self) -> bool:
        """Whether each rank draws from its part of the logits."""
        if self.ranks is None or not self.sampling.is_plain:
            return False
        return can_divide(self.inputs_8T.device)

    @property
    def num_rows(self) -> int:
        """T, the number of rows."""
        return self.inputs_8T.shape[1]

    def on_device(self) -> DecodeStep:
        """Return the step with its inputs moved to the device, if they are on the host."""
        device = self.levels.device
        if self.inputs_8T.device.type == device.type:
            return self
        inputs_8T = to_device(self.inputs_8T.numpy(), device)
        levels = self.levels.with_positions(inputs_8T[POSITION])
        return replace(self, inputs_8T=inputs_8T, levels=levels)

    def compute(self, forward: Callable[[Batch], Tensor]) -> Draws | DeferredDraws:
        """Draw the next token of each row."""
        return self.draw(self.logits(forward))

    def logits(self, forward: Callable[[Batch], Tensor]) -> Tensor:
        """Return the logits after each row's last token, [T, V], or this rank's part of them."""
        inputs = self.inputs_8T
        tokens_T = inputs[TOKEN]
        if self.drawn_P1 is not None:
            source_T = inputs[SOURCE]
            drawn_T = self.drawn_P1[:, 0][source_T.clamp(min=0)]
            tokens_T = torch.where(source_T >= 0, drawn_T, tokens_T)
        rows_T = torch.arange(self.num_rows, device=inputs.device)
        positions_T, slots_T = inputs[POSITION], inputs[SLOT]
        gathers_logits, layers = not self.draws_vocab_parallel, self.cache.layers
        self.cache.record_tokens(slots_T, tokens_T)
        batch = Batch(
            tokens_T,
            positions_T,
            slots_T,
            rows_T,
            self.levels,
            layers,
            self.states,
            gathers_logits,
            rotary_AT=inputs[ROTARY, None],
        )
        return forward(batch)

    def draw(self, logits_TV: Tensor) -> Draws | DeferredDraws:
        """Draw one token for each row from its logits, [T, V]; deferred if masks are pending."""
        is_follower = self.ranks is not None and self.ranks.rank > 0
        if self.sampling.masked and not is_follower:
            return DeferredDraws(self, logits_TV)
        return self.draw_now(logits_TV)

    def draw_now(self, logits_TV: Tensor, masks: Masks | None = None) -> Draws:
        """Draw one token for each row from its logits, [T, V].

        Args:
            logits_TV: The logits, or this rank's part of them.
            masks: The tokens that rows may draw; None for all tokens.
        """
        inputs, ranks = self.inputs_8T, self.ranks
        row_inputs = inputs[SEED, :, None], inputs[COUNT, :, None], self.sampling, inputs[FORCED]
        if ranks is not None and self.draws_vocab_parallel:
            part = ranks.get_vocab_range(self.vocab_size)
            draws = draw_vocab_parallel(
                logits_TV, *row_inputs, part, ranks.all_gather, ranks.all_reduce
            )
            # A collective that a dead rank aborts leaves garbage. As a token outside the embedding
            # it would fail on the device, which ends this process before it can raise WorkerError.
            draws.tokens_PN.clamp_(0, self.vocab_size - 1)
            return draws
        if ranks is not None and ranks.rank:
            # Rank 0 draws. The other ranks need only the tokens, as inputs of the next step.
            tokens_T1 = ranks.broadcast(inputs.new_empty(len(logits_TV), 1))
            zeros_T = logits_TV.new_zeros(len(logits_TV))
            return Draws(tokens_T1, zeros_T[:, None], zeros_T, None, None)
        draws = draw(logits_TV, *row_inputs, self.texts, masks)
        if ranks is not None:
            ranks.broadcast(draws.tokens_PN.clone(memory_format=torch.contiguous_format))
        return draws


@dataclass(frozen=True, slots=True)
class DeferredDraws:
    """A step whose logits are computed or being computed, and whose draws wait for masks."""

    step: DecodeStep
    logits_TV: Tensor

    @property
    def num_rows(self) -> int:
        """Number of rows of the step."""
        return len(self.logits_TV)

    def draw(self, masks: Masks | None) -> Draws:
        """Draw one token for each row from the tokens that its mask allows."""
        return self.step.draw_now(self.logits_TV, masks)
