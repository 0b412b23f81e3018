"""Makes the drafters of a model's runs: a user's function, n-grams, or a small model."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, Final

import numpy as np

from treegen.common.drafter import (
    NOTHING,
    DraftContext,
    Drafter,
    DraftFunction,
    Drafts,
    Ints,
    NewTokens,
    PromptInfo,
)
from treegen.engine.compute.decode_graphs import DecodeGraphs
from treegen.engine.compute.graph_pool import estimate_row_seconds, pad_num_query_rows
from treegen.engine.compute.model_runner import ModelRunner
from treegen.engine.features import Features
from treegen.engine.rows.engine_run import EngineRun
from treegen.engine.rows.queue import RowQueue
from treegen.engine.speculative.draft_length import AcceptanceEstimator, DraftLengthController
from treegen.engine.speculative.draft_model import (
    ModelDrafter,
    VocabAlignedModel,
    inspect_draft_model,
)
from treegen.engine.speculative.ngrams import NgramDrafter
from treegen.engine.speculative.speculation import SpeculationOptions, check_speculation
from treegen.errors import InputError
from treegen.model.load import load_model
from treegen.model.model import Model
from treegen.model.options import DRAFT_TOKENS, EngineOptions
from treegen.ops.cache.pool import PagedCache


class FunctionDrafter:
    """Calls a function once per step, for all rows."""

    def __init__(self, function: DraftFunction) -> None:
        """Set up a drafter that knows no row yet."""
        self._function = function
        self._rows: dict[int, DraftContext] = {}
        self._chance = AcceptanceEstimator()

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

    def run_deferred(self) -> None:
        """Do nothing: this drafter defers no work."""

    def draft(self, slots: Ints, room_R: Ints) -> Drafts:
        """Return the draft tokens of the function.

        Args:
            slots: Slots of the rows, [R].
            room_R: Maximum number of draft tokens of each row, [R].

        Raises:
            InputError: the function does not return a list of token ids for each row.
        """
        most = int(room_R.max(initial=0))
        tokens_RK = np.full((len(slots), most), NOTHING)
        drafts = self._function([self._rows[slot] for slot in slots.tolist()])
        try:
            if len(drafts) != len(slots):
                raise ValueError
            for row, guess in zip(tokens_RK, drafts, strict=True):
                ids = np.array(list(islice(guess, most)))
                if len(ids) and not np.issubdtype(ids.dtype, np.integer):
                    raise TypeError
                row[: len(ids)] = ids
        except (TypeError, ValueError):
            raise InputError(
                f"speculate's function must return a list of token ids for each of {len(slots)} "
                f"samples, got {drafts!r:.80}"
            ) from None
        chance_R = np.full(len(slots), self._chance.value)
        return Drafts(tokens_RK, chance_R, np.zeros(len(slots), dtype=np.int64))

    def update_acceptance(self, kind_R: Ints, tried_R: Ints, accepted_R: Ints) -> None:
        """Update the estimated acceptance rate.

        Args:
            kind_R: Not used; this drafter has one kind of draft tokens.
            tried_R: Number of tried draft tokens of each row, [R].
            accepted_R: Number of accepted draft tokens of each row, [R].
        """
        self._chance.learn(tried_R, accepted_R)


# Approximate number of tokens of a pass from which on computing takes longer than reading weights.
_FREE_TOKENS: Final = {"cpu": 16.0, "cuda": 150.0}
_SCOUTS: Final = 4  # samples that start early; 2 and 8 are about as fast


class DrafterFactory:
    """Makes drafters, and keeps what was learned about draft lengths between runs.

    Attributes:
        how: "ngram", a function, or "off"; None for the small model, if there is one.
        executor: Computes the passes of the small model; None without one.
    """

    def __init__(self, model: Model, options: EngineOptions, tokenizer: Any) -> None:
        """Set up drafting as the options require; this loads the small model, if there is one.

        Args:
            model: The model for which tokens are drafted.
            options: Options of the LLM.
            tokenizer: Tokenizer of the model.

        Raises:
            InputError: the model does not support the options.
            ModelError: the small model cannot be used.
        """
        check_speculation(options, model.spec)
        self.how: str | DraftFunction | None = options.speculate
        self.executor: ModelRunner | None = None
        self._most = options.draft_tokens or DRAFT_TOKENS
        weights = sum(weight.nbytes for weight in model.module.parameters())
        weight_keys = weights / model.spec.kv_bytes_per_token
        multiple = pad_num_query_rows(1) if model.device.type == "cuda" else 1
        self._pace = DraftLengthController(_FREE_TOKENS[model.device.type], weight_keys, multiple)
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
        """Bytes per token of the small model's keys and values; 0 without one."""
        return self._draft.spec.kv_bytes_per_token if self._draft is not None else 0

    def attach_cache(self, cache: PagedCache, *, graphs: bool) -> None:
        """Create the small model's cache, under the page numbers of the model's cache.

        Args:
            cache: The model's cache.
            graphs: Whether the small model's decode steps are replayed as CUDA graphs.
        """
        if self._draft is None:
            return
        num_pages, size = cache.pool.num_pages, cache.page_size
        draft_cache = PagedCache(self._draft.new_cache(num_pages + 1, size), num_pages, size)
        cache.on_copy = draft_cache.copy_tokens
        model = VocabAlignedModel(self._draft, self._vocab_size)
        replays = DecodeGraphs(model.forward, estimate_row_seconds(self._draft)) if graphs else None
        self.executor = ModelRunner(model, draft_cache, replays, "auto")

    def make_options(self) -> SpeculationOptions | None:
        """Return how a run drafts tokens; None if it does not."""
        how, beside = self.how, self.executor
        if how == "off" or (how is None and beside is None):
            return None

        def make(run: EngineRun, queue: RowQueue, features: Features) -> Drafter:
            if beside is not None:
                return ModelDrafter(run, queue, features, beside)
            return FunctionDrafter(how) if callable(how) else NgramDrafter()

        return SpeculationOptions(make, self._most, self._pace, _SCOUTS if how == "ngram" else 0)
