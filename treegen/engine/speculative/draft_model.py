"""A drafter that draws from a draft model, with the same random numbers as the rows.

Its keys and values are in separate pools, under the same page numbers as those of the target model.
So it shares the tree, the copies and the evictions, and needs no page management: both models
compute each prefill pass. Tokens that a row drew without drafts are computed before its next draft.

A draw looks a random number up in the cumulative distribution, and only row and step determine the
number. So if both models have similar distributions, the draft model draws the same token.

Legend: R rows, K draft tokens of a row, T query rows of a pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from treegen.common.device import AsyncHostCopy
from treegen.common.drafter import Drafts, NewTokens, PromptInfo
from treegen.common.spec import ModelSpec
from treegen.engine.compute.decode_step import SLOT
from treegen.engine.compute.levels import Ints, build_shared_levels, expand_offsets, make_level
from treegen.engine.compute.model_runner import ModelRunner, PrefillInputs, StepInputs
from treegen.engine.features import Features
from treegen.engine.passes.pass_inputs import (
    build_step_inputs,
    build_step_rows,
    compute_slot_mapping,
)
from treegen.engine.rows.engine_run import EngineRun
from treegen.engine.rows.queue import RowQueue
from treegen.engine.speculative.draft_length import SingleRateDrafter
from treegen.errors import InputError, arg
from treegen.model.batch import Batch, ForwardModel
from treegen.model.config import load_spec
from treegen.model.options import EngineOptions
from treegen.model.tokenizer import load_tokenizer
from treegen.ops.sampling.draw import Draws

_MIN_ACCEPTANCE: Final = 0.3  # a token is drafted if it is accepted with at least this probability
_CATCH_UP_TOKENS: Final = 2048  # maximum tokens of rows in a pass that computes missing keys


def inspect_draft_model(options: EngineOptions, tokenizer: Any, dtype: torch.dtype) -> ModelSpec:
    """Return the spec of the draft model, before any weights are loaded.

    Args:
        options: Options of the LLM, which name the draft model.
        tokenizer: Tokenizer of the target model.
        dtype: The type in which both models compute.

    Raises:
        InputError: the draft model has another tokenizer, or recurrent layers.
        ModelError: the draft model cannot be used.
    """
    name = options.draft_model
    assert name is not None
    draft_tokenizer = load_tokenizer(name, trust_remote_code=options.trust_remote_code)
    if tokenizer.get_vocab() != draft_tokenizer.get_vocab():
        raise InputError(
            f"{arg('draft_model')} {name} and the model have different tokenizers; use a draft "
            "model with the same tokenizer"
        )
    spec = load_spec(
        name, dtype, device="cpu", ranks=1, trust_remote_code=options.trust_remote_code
    )
    if spec.states:
        raise InputError(
            f"{arg('draft_model')} {name} has recurrent layers, which are not supported in a "
            "draft model; choose another draft model"
        )
    return spec


class VocabAlignedModel:
    """A model whose logits are cut or padded with -inf to another model's vocabulary size."""

    def __init__(self, model: ForwardModel, vocab_size: int) -> None:
        """Wrap a model to return `vocab_size` logits."""
        self._model, self._vocab_size = model, vocab_size

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self._model.device

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits [S, V] of the query rows in batch.logits_at_S."""
        logits_SV = self._model.forward(batch)
        missing = self._vocab_size - logits_SV.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits_SV, (0, missing), value=-torch.inf)
        return logits_SV[:, : self._vocab_size]


class ModelDrafter(SingleRateDrafter):
    """Draws the next tokens of rows from a draft model, in K + 1 passes over all rows.

    The last pass only computes the keys of the last draft token, which may be accepted.
    """

    def __init__(
        self, run: EngineRun, queue: RowQueue, features: Features, runner: ModelRunner
    ) -> None:
        """Set up the drafter of a run.

        Args:
            run: Shared state of the run.
            queue: Its rows.
            features: Its optional features.
            runner: Model runner of the draft model.
        """
        super().__init__()
        self._run, self._queue, self._features = run, queue, features
        self._runner = runner
        # By slot: serial number of the slot's last row, and the position up to which the draft
        # model has computed the row's keys.
        self._serials = np.empty(0, dtype=np.int64)
        self._num_computed = np.empty(0, dtype=np.int64)

    def observe(self, new: NewTokens, request_of: Callable[[int], PromptInfo]) -> None:
        """Do nothing: this drafter reads the tokens from the rows."""

    def draft(self, slots: Ints, room_R: Ints) -> Drafts:
        """Draw draft tokens from the draft model.

        Args:
            slots: Slots of the rows, [R].
            room_R: Maximum number of draft tokens of each row, [R].
        """
        rows, num = self._run.rows, len(slots)
        room_R = self._queue.reserve_lookahead(slots, rows.count[slots], room_R)
        rate = min(max(self.acceptance_rate, 0.01), 0.99)  # the estimated acceptance rate
        length = max(int(math.log(_MIN_ACCEPTANCE) / math.log(rate)), 1)
        max_drafts = min(int(room_R.max(initial=0)), length)
        chance_R, kind_R = np.full(num, self.acceptance_rate), np.zeros(num, dtype=np.int64)
        if not max_drafts:
            return Drafts(np.empty((num, 0), dtype=np.int64), chance_R, kind_R)
        self._catch_up(slots)
        drafts = self._draw(slots, np.minimum(room_R, max_drafts), max_drafts)
        self._num_computed[slots] += np.minimum(room_R, max_drafts) + 1
        (tokens_RK,) = AsyncHostCopy([drafts]).wait()
        return Drafts(tokens_RK, chance_R, kind_R)

    def _draw(self, slots: Ints, room_R: Ints, max_drafts: int) -> Tensor:
        """Return the tokens that the draft model draws, [R, K], on the device."""
        rows, num = self._run.rows, len(slots)
        offsets, indices = np.arange(num + 1), np.arange(num)
        levels = build_shared_levels(rows.chain[slots], offsets, self._run.store.keys_of)
        # Tokens that a grammar forbids are removed before the drafts are verified.
        step_rows = replace(build_step_rows(self._run, slots, levels), masked=False)
        tokens_of_steps = []
        for step in range(max_drafts + 1):
            # A row without room writes to the padding page, and its draws are not used.
            has_room = step <= room_R
            counts = rows.count[slots] + np.minimum(step, room_R)
            source = indices if step else np.full(num, -1)
            forced = self._features.budgets.get_forced_tokens(slots, counts)
            inputs, own_level = build_step_inputs(self._run, slots, counts, source, forced)
            inputs[SLOT, ~has_room] = 0
            draws, _ = self._runner.decode(
                StepInputs(
                    inputs,
                    own_level,
                    step_rows,
                    uses_previous_draws=step > 0,
                    states=None,
                    graphs=True,
                )
            )
            assert isinstance(draws, Draws)
            if step < max_drafts:
                tokens_of_steps.append(draws.tokens_PN[:, 0].clone())
        return torch.stack(tokens_of_steps, dim=1)

    def _catch_up(self, slots: Ints) -> None:
        """Compute the missing keys of tokens that rows have generated before their last tokens."""
        rows = self._run.rows
        num_new = len(rows.serial) - len(self._serials)
        self._serials = np.pad(self._serials, (0, num_new), constant_values=-1)
        self._num_computed = np.pad(self._num_computed, (0, num_new))
        fresh = slots[self._serials[slots] != rows.serial[slots]]
        self._serials[fresh], self._num_computed[fresh] = rows.serial[fresh], rows.stop[fresh]
        num_needed = rows.stop[slots] + rows.count[slots] - 1
        # Keys of rejected draft tokens are computed again.
        self._num_computed[slots] = np.minimum(self._num_computed[slots], num_needed)
        while len(behind := slots[self._num_computed[slots] < num_needed]):
            missing = rows.stop[behind] + rows.count[behind] - 1 - self._num_computed[behind]
            num_R = np.minimum(missing, max(_CATCH_UP_TOKENS // len(behind), 1))
            self._runner.prefill(self._build_catch_up_inputs(behind, num_R))
            self._num_computed[behind] += num_R

    def _build_catch_up_inputs(self, slots: Ints, num_R: Ints) -> PrefillInputs:
        """Return the inputs of a pass over the next `num_R` generated tokens of each row."""
        rows, store = self._run.rows, self._run.rows.generated
        offsets, row_T, index_T = expand_offsets(num_R)
        slots_T, base = slots[row_T], rows.base[slots]
        positions_T = self._num_computed[slots_T] + index_T
        pages = rows.table[slots, : int(rows.num_pages[slots].max())]
        keys = self._num_computed[slots] + num_R - base
        at_T = positions_T - base[row_T]
        return PrefillInputs(
            tokens=store.at(store.tokens, slots_T, positions_T - rows.stop[slots_T]).astype(
                np.int64
            ),
            positions=positions_T,
            slots=compute_slot_mapping(pages[row_T], at_T, self._run.cache.page_size),
            logit_indices=np.empty(0, dtype=np.int64),
            levels=[
                *build_shared_levels(rows.chain[slots], offsets, self._run.store.keys_of),
                make_level(offsets[:-1], offsets[1:], pages, keys, base, causal=True),
            ],
            pieces=None,
        )
