"""Speculative decoding: chooses the draft tokens that a step verifies, and learns from results.

A step that verifies drafts needs the last tokens of its rows, so it is launched only after the
results of the previous step are known.

The drafter of a run is a user's function, n-grams, or a draft model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from treegen.common.drafter import (
    NOTHING,
    DraftContext,
    Drafter,
    DraftFunction,
    Drafts,
    NewTokens,
    PromptInfo,
)
from treegen.common.spec import ModelSpec
from treegen.engine.compute.cuda_graphs import estimate_row_seconds, pad_num_query_rows
from treegen.engine.compute.decode_graphs import DecodeGraphs
from treegen.engine.compute.levels import Ints
from treegen.engine.compute.model_runner import ModelRunner
from treegen.engine.features import Features
from treegen.engine.passes.decode import InFlightStep
from treegen.engine.rows.engine_run import EngineRun
from treegen.engine.rows.queue import RowQueue
from treegen.engine.rows.table import VerifyInput
from treegen.engine.speculative.draft_length import DraftLengthController, SingleRateDrafter
from treegen.engine.speculative.draft_model import (
    ModelDrafter,
    VocabAlignedModel,
    inspect_draft_model,
)
from treegen.engine.speculative.ngrams import NgramDrafter
from treegen.errors import InputError, arg
from treegen.model.load import load_model
from treegen.model.model import Model
from treegen.model.options import DRAFT_TOKENS, EngineOptions
from treegen.ops.cache.pool import PagedCache

_CERTAIN: Final = 0.95  # assumed acceptance rate of tokens that a grammar forces
_FORCED: Final = -1  # kind of the draft tokens that a grammar forces, which no drafter has


def check_speculation(options: EngineOptions, spec: ModelSpec) -> None:
    """Raise InputError if a model cannot verify draft tokens."""
    if options.speculates and spec.states:
        option = arg("speculate" if options.draft_model is None else "draft_model")
        raise InputError(
            f"{option} is not supported with {spec.name}, because the states of recurrent layers "
            f"cannot be reset after a rejected draft token; remove {option}"
        )


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """Settings of speculative decoding in a run."""

    make_drafter: Callable[[EngineRun, RowQueue, Features], Drafter]
    """Creates the drafter of a run."""
    max_draft_tokens: int
    """Maximum number of draft tokens of a row that a step verifies."""
    length_controller: DraftLengthController | None = None
    """Decides how many draft tokens are verified; None for all."""
    early_samples: int = 0
    """Number of samples of a prompt that start early, so that their tokens can be drafts for its
    other samples."""


class SpeculativeDecoder:
    """Proposes the draft tokens of one run, and learns from their acceptance."""

    def __init__(
        self, run: EngineRun, queue: RowQueue, features: Features, options: SpeculationOptions
    ) -> None:
        """Set up a run without draft tokens yet.

        Args:
            run: Shared state of the run.
            queue: Its rows.
            features: Its optional features.
            options: Settings of speculative decoding.
        """
        self._run, self._queue, self._options = run, queue, options
        self._features, self._drafter = features, options.make_drafter(run, queue, features)
        # Acceptance of the last step's draft tokens, and how many of them, and of those being
        # verified, are expected to be accepted.
        self._acceptance: list[tuple[Ints, Ints, Ints]] = []
        self._last_expected = self._expected = 0.0
        self._keys = 0  # number of keys that the last step read in each layer
        self._captured, self._disturbed = run.model_runner.num_captured, False
        self._vocab_size = len(run.param_sets[0].stopping.may_end)
        if options.length_controller is not None:
            options.length_controller.begin()

    def is_due(self) -> bool:
        """Return whether the next step should verify draft tokens, if any pay."""
        num_rows, controller = len(self._queue.live_slots), self._options.length_controller
        if controller is None or not num_rows:
            return num_rows > 0
        return controller.is_due(num_rows, self._keys, self._options.max_draft_tokens)

    def measure(self, flight: InFlightStep, seconds: float) -> None:
        """Record the time of a step."""
        self._keys = flight.keys
        # If a step is captured, it and the step launched before it take longer.
        captured, self._captured = self._captured, self._run.model_runner.num_captured
        disturbed, self._disturbed = self._disturbed, self._captured != captured
        if self._options.length_controller is not None and not (disturbed or self._disturbed):
            verified = flight.verify_input is not None
            self._options.length_controller.measure(
                len(flight.slots), flight.keys, seconds, verified=verified
            )

    def propose(self, order: Ints, counts: Ints) -> VerifyInput | None:
        """Return the draft tokens that the next step verifies; None without any.

        The pages that they need are added to the rows.

        Args:
            order: Slots of the rows, depth first.
            counts: Number of tokens of each row, all of which must be known.
        """
        room_R = np.minimum(self._max_draft_lengths(order, counts), self._options.max_draft_tokens)
        drafts = self._insert_forced(order, self._drafter.draft(order, room_R))
        tokens_RK = drafts.tokens_RK
        if not tokens_RK.shape[1]:
            return None
        is_token_RK = (tokens_RK >= 0) & (tokens_RK < self._vocab_size)
        num_R = np.where(is_token_RK.all(axis=1), tokens_RK.shape[1], is_token_RK.argmin(axis=1))
        num_R = np.minimum(num_R, room_R)
        if self._features.grammars.used:
            num_R = self._features.grammars.count_allowed_drafts(order, tokens_RK, num_R)
        if self._options.length_controller is not None:
            num_R, self._expected = self._options.length_controller.choose_lengths(
                num_R, drafts.chance_R, self._keys, self._options.max_draft_tokens, drafts.later_R
            )
        num_R = self._queue.reserve_lookahead(order, counts, num_R)
        return VerifyInput(tokens_RK, num_R, drafts.kind_R) if num_R.any() else None

    def _insert_forced(self, order: Ints, drafts: Drafts) -> Drafts:
        """Return the drafts, with tokens that a row's grammar forces in place of its drafts."""
        grammars = self._features.grammars
        forced = grammars.get_forced_tokens(order) if grammars.used else {}
        if not forced:
            return drafts
        width = max(drafts.tokens_RK.shape[1], *map(len, forced.values()))
        short = width - drafts.tokens_RK.shape[1]
        tokens_RK = np.pad(drafts.tokens_RK, ((0, 0), (0, short)), constant_values=NOTHING)
        chance_R, kind_R = drafts.chance_R.copy(), drafts.kind_R.copy()
        later_R = drafts.later_R.copy() if drafts.later_R is not None else None
        for row, tokens in forced.items():
            tokens_RK[row], chance_R[row], kind_R[row] = NOTHING, _CERTAIN, _FORCED
            tokens_RK[row, : len(tokens)] = tokens
            if later_R is not None:
                later_R[row] = _CERTAIN
        return Drafts(tokens_RK, chance_R, kind_R, later_R)

    def _max_draft_lengths(self, order: Ints, counts: Ints) -> Ints:
        """Return the maximum number of draft tokens of each row.

        A row must not draw past its limit, nor past the count at which its thinking budget is
        checked.
        """
        limits = np.minimum(
            self._run.rows.limit[order], self._features.budgets.get_check_counts(order, counts)
        )
        return np.maximum(limits - counts - 1, 0)

    def run_deferred(self) -> None:
        """Learn from recorded results; called while the device computes a pass."""
        self._drafter.run_deferred()
        for kind_R, tried_R, accepted_R in self._acceptance:
            own = kind_R != _FORCED
            self._drafter.update_acceptance(kind_R[own], tried_R[own], accepted_R[own])
            if self._options.length_controller is not None:
                self._options.length_controller.record_accepted(
                    self._last_expected, int(accepted_R.sum())
                )
        self._acceptance.clear()
        self._last_expected = self._expected

    def record(self, flight: InFlightStep, tokens_N: Ints, alive_N: NDArray[np.bool_]) -> None:
        """Record the draws of a step, before they are added to the rows.

        Args:
            flight: The step.
            tokens_N: The drawn tokens.
            alive_N: Whether the row of each draw still exists.
        """
        rows, verify_input = self._run.rows, flight.verify_input
        if verify_input is None:
            slots, tokens_RA = flight.slots[alive_N], tokens_N[alive_N, None]
            num_R = np.ones(len(slots), dtype=np.int64)
        else:
            accepted_R = verify_input.num_accepted(tokens_N)
            tried_R, kind_R = np.minimum(accepted_R + 1, verify_input.num_R), verify_input.kind_R
            has_drafts = verify_input.num_R > 0
            self._acceptance.append(
                (kind_R[has_drafts], tried_R[has_drafts], accepted_R[has_drafts])
            )
            first = verify_input.offsets[:-1]
            alive_R = alive_N[first]
            num_R, first = accepted_R[alive_R] + 1, first[alive_R]
            slots = flight.slots[first]
            offsets = np.arange(int(num_R.max(initial=1)))
            tokens_RA = tokens_N[np.minimum(first[:, None] + offsets, len(tokens_N) - 1)]
        if len(slots):
            new = NewTokens(
                slots, rows.request[slots], rows.sample[slots], rows.count[slots], tokens_RA, num_R
            )
            self._drafter.observe(new, lambda number: self._run.requests[number].spec)


class FunctionDrafter(SingleRateDrafter):
    """Calls a function once per step, for all rows."""

    def __init__(self, function: DraftFunction) -> None:
        """Set up a drafter that knows no row yet."""
        super().__init__()
        self._function = function
        self._rows: dict[int, DraftContext] = {}

    def observe(self, new: NewTokens, request_of: Callable[[int], PromptInfo]) -> None:
        """Add new tokens to the texts of rows."""
        columns = (new.slots, new.request, new.sample, new.count, new.num_R)
        columns_of_rows = zip(*(column.tolist() for column in columns), new.tokens_RA, strict=True)
        for slot, request, sample, count, num, tokens in columns_of_rows:
            if not count:
                prompt = request_of(request)
                self._rows[slot] = DraftContext(prompt.id, sample, prompt.tokens.tolist(), [])
            generated = self._rows[slot].tokens
            assert isinstance(generated, list)
            generated += tokens[:num].tolist()

    def draft(self, slots: Ints, room_R: Ints) -> Drafts:
        """Return the draft tokens of the function.

        Args:
            slots: Slots of the rows, [R].
            room_R: Maximum number of draft tokens of each row, [R].

        Raises:
            InputError: the function does not return a list of token ids for each row.
        """
        max_drafts = int(room_R.max(initial=0))
        tokens_RK = np.full((len(slots), max_drafts), NOTHING)
        drafts = self._function([self._rows[slot] for slot in slots.tolist()])
        try:
            if len(drafts) != len(slots):
                raise ValueError
            for row, guess in zip(tokens_RK, drafts, strict=True):
                ids = np.array(list(islice(guess, max_drafts)))
                if len(ids) and not np.issubdtype(ids.dtype, np.integer):
                    raise TypeError
                row[: len(ids)] = ids
        except (TypeError, ValueError):
            raise InputError(
                f"speculate's function must return a list of token ids for each of {len(slots)} "
                f"samples, got {drafts!r:.80}"
            ) from None
        chance_R = np.full(len(slots), self.acceptance_rate)
        return Drafts(tokens_RK, chance_R, np.zeros(len(slots), dtype=np.int64))


# Approximate number of tokens in a pass above which computing takes longer than reading weights.
_FREE_TOKENS: Final = {"cpu": 16.0, "cuda": 150.0}
_EARLY_SAMPLES: Final = 4  # samples that start early; 2 and 8 are about as fast


class DrafterFactory:
    """Makes drafters, and keeps what was learned about draft lengths between runs.

    Attributes:
        speculate: "ngram", a function, or "off"; None with a draft model or without drafting.
        draft_runner: Computes the passes of the draft model; None without one.
    """

    def __init__(self, model: Model, options: EngineOptions, tokenizer: Any) -> None:
        """Set up drafting as the options require, and load the draft model if they name one.

        Args:
            model: The model for which tokens are drafted.
            options: Options of the LLM.
            tokenizer: Tokenizer of the model.

        Raises:
            InputError: the model does not support the options.
            ModelError: the draft model cannot be loaded.
        """
        check_speculation(options, model.spec)
        self.speculate: str | DraftFunction | None = options.speculate
        self.draft_runner: ModelRunner | None = None
        self._max_draft_tokens = options.draft_tokens or DRAFT_TOKENS
        weights = sum(weight.nbytes for weight in model.module.parameters())
        weight_keys = weights / model.spec.kv_bytes_per_token
        multiple = pad_num_query_rows(1) if model.device.type == "cuda" else 1
        self._length_controller = DraftLengthController(
            _FREE_TOKENS[model.device.type], weight_keys, multiple
        )
        self._vocab_size = model.spec.vocab_size
        self._draft: Model | None = None
        if options.draft_model is not None:
            inspect_draft_model(options, tokenizer, model.dtype)
            self._draft = load_model(
                options.draft_model,
                device=str(model.device),
                dtype=str(model.dtype).removeprefix("torch."),
                check=options.check,
                trust_remote_code=options.trust_remote_code,
            )

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes per token of the draft model's keys and values; 0 without one."""
        return self._draft.spec.kv_bytes_per_token if self._draft is not None else 0

    def attach_cache(self, cache: PagedCache, *, graphs: bool) -> None:
        """Create the draft model's cache, under the page numbers of the model's cache.

        Args:
            cache: The model's cache.
            graphs: Whether the draft model's decode steps are replayed as CUDA graphs.
        """
        if self._draft is None:
            return
        num_pages, size = cache.pool.num_pages, cache.page_size
        draft_cache = PagedCache(self._draft.new_cache(num_pages + 1, size), num_pages, size)
        cache.on_copy = draft_cache.copy_tokens
        model = VocabAlignedModel(self._draft, self._vocab_size)
        replays = DecodeGraphs(model.forward, estimate_row_seconds(self._draft)) if graphs else None
        self.draft_runner = ModelRunner(model, draft_cache, replays, "auto")

    def make_options(self) -> SpeculationOptions | None:
        """Return how a run drafts tokens; None if it does not."""
        speculate, draft_runner = self.speculate, self.draft_runner
        if speculate == "off" or (speculate is None and draft_runner is None):
            return None

        def _make_drafter(run: EngineRun, queue: RowQueue, features: Features) -> Drafter:
            if draft_runner is not None:
                return ModelDrafter(run, queue, features, draft_runner)
            return FunctionDrafter(speculate) if callable(speculate) else NgramDrafter()

        return SpeculationOptions(
            _make_drafter,
            self._max_draft_tokens,
            self._length_controller,
            _EARLY_SAMPLES if speculate == "ngram" else 0,
        )
