"""What computes passes: from their description on the host to logits and draws on the device.

A pass is described by numbers alone. So the ranks of a tensor-parallel model compute the same pass
from the same description, which rank 0 sends to the others before it computes it itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treegen.common.device import to_device, to_device_together
from treegen.common.params import SamplingParams
from treegen.engine.compute.decode_step import POSITION, DecodeStep, DeferredDraws
from treegen.engine.compute.levels import Ints
from treegen.engine.compute.padding import MOST_TOKENS
from treegen.engine.compute.token_checksum import STEPS, TokenChecksum
from treegen.errors import ModelError
from treegen.model.batch import Batch, ForwardModel, ImageRows
from treegen.model.model import Model
from treegen.model.recurrent.state_batch import Piece, fold_lists, states_of_pieces, states_of_rows
from treegen.ops.attention import HostLevel, Implementation, PreparedLevels, choose, prepare_host
from treegen.ops.cache.pool import PagedCache
from treegen.ops.sampling.batch import Bias, SamplingBatch
from treegen.ops.sampling.batch_cache import SamplingBatchCache
from treegen.ops.sampling.draw import Draws
from treegen.ops.sampling.masks import Masks
from treegen.ops.sampling.token_history import TokenHistory

if TYPE_CHECKING:
    from treegen.engine.compute.decode_graphs import DecodeGraphs
    from treegen.engine.compute.encoder_cache import EncoderCache
    from treegen.engine.compute.prefill_graphs import PrefillGraphs
    from treegen.model.parallel.ranks import RankLeader, Ranks


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """A prefill pass of T tokens.

    tokens: [T] ids.
    positions, slots: [T] as in `Batch`.
    wanted: the tokens after which logits are wanted.
    levels: what the tokens attend to.
    pieces: the tokens by sequence, for recurrent layers; None for a model without any.
    rotary: [3, T] as in `Batch`; None where images shift nothing.
    windowed: what the tokens attend to in layers with a window, where that is not `levels`.
    images: what stands in the places of images, on the host; None without any.
    """

    tokens: Ints
    positions: Ints
    slots: Ints
    wanted: Ints
    levels: Sequence[HostLevel]
    pieces: Sequence[Piece] | None
    rotary: Ints | None = None
    windowed: Sequence[HostLevel] | None = None
    images: ImageRows | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """What stays the same as long as the same rows are decoded.

    levels: the levels above their own tokens.
    params, biases: their sampling parameters, each once.
    index: [T] which of these each row has.
    drawn: [T, runs, 2] the runs of tokens that were drawn, as in `TokenHistory`; None if no draw
    depends on the text before it.
    masked: whether grammars say what some rows may draw, which is known later than the rest.
    """

    levels: Sequence[HostLevel]
    params: Sequence[SamplingParams]
    biases: Sequence[Bias]
    index: Ints
    drawn: Ints | None = None
    masked: bool = False


@dataclass(frozen=True, slots=True)
class StateInputs:
    """Where the recurrent states of a decode step of T rows are.

    inputs: [2, T] the slots that the rows read and write, or [4 + P, T] as in `RowSlots`.
    folds: [3 + P, F] each, the lists that are folded into states before the step, one after
    another. By row: the slots of the states that F lists go on from, those of the new states, how
    many updates there are, and their pages.
    """

    inputs: Ints
    folds: Sequence[Ints] = ()


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A decode step of T rows.

    inputs: [8, T] as in `DecodeStep`.
    own: the level of the rows' own tokens.
    rows: None if they are those of the step before.
    goes_on: whether some tokens are those that the step before draws.
    states: where the rows' recurrent states are; None for a model without any.
    graphs: whether it may be a CUDA graph.
    number: how many steps the run has had, from 0 on.
    """

    inputs: Ints
    own: HostLevel
    rows: StepRows | None
    goes_on: bool
    states: StateInputs | None
    graphs: bool
    number: int = 0


class ModelRunner:
    """Computes passes with one model and its cache, and leads or follows other ranks that do.

    graphs: replays decode steps; None to compute them eagerly.
    impl: the attention implementation.
    sampling: makes what rows are drawn with.
    encodings: of the images in prompts; None for a model that takes none.
    """

    def __init__(
        self,
        model: ForwardModel,
        cache: PagedCache,
        graphs: DecodeGraphs | None,
        impl: str,
        ranks: Ranks | None = None,
        vocab_size: int = 0,
        beside: ModelRunner | None = None,
        prefills: PrefillGraphs | None = None,
        encodings: EncoderCache | None = None,
    ) -> None:
        """ranks: those that compute together, of which this is one.

        Args:
            vocab_size: Logits of a row, where several ranks each have a part of them.
            beside: Of another model under the same pages, which computes the keys of prompts too.
            prefills: Replays small prefill passes, of a model that one process computes.
            encodings: Of the images in prompts.
        """
        self._beside, self.encodings = beside, encodings
        self._model, self._cache, self.graphs, self.impl = model, cache, graphs, impl
        self._ranks, self._vocab_size, self._prefills = ranks, vocab_size, prefills
        self._rows: StepRows | None = None
        self._sampling: SamplingBatch | None = None
        self.sampling = SamplingBatchCache(model.device)
        self._drawn_P1: Tensor | None = None
        self._agreement: TokenChecksum | None = None

    def check(self) -> None:
        """Raise WorkerError if what was computed may be wrong because a rank has failed."""
        if self._ranks is not None:
            self._ranks.check()

    @property
    def num_captured(self) -> int:
        """How many decode steps were captured as CUDA graphs, each of which takes long."""
        mine = self.graphs.num_captured if self.graphs is not None else 0
        return mine + (self._beside.num_captured if self._beside is not None else 0)

    @functools.cached_property
    def _implementation(self) -> Implementation:
        """The attention; to look for it at each pass would cost the host time."""
        return choose(self.impl, self._model.device)

    def prefill(self, given: PrefillInputs) -> tuple[Tensor, PreparedLevels]:
        """The logits [wanted, V] of a prefill pass, and how it attended."""
        if self._beside is not None:
            self._beside.prefill(replace(given, wanted=given.wanted[:0]))
        if self.encodings is not None:
            # Before others are told of the pass, which have no tower.
            images, tokens = self.encodings.gather_rows(given.tokens), given.tokens
            given = replace(
                given, images=images, tokens=self.encodings.table.restore_placeholders(tokens)
            )
        with self._begin_collective("prefill", given):
            device, cache = self._model.device, self._cache
            images = None if given.images is None else given.images.on(device)
            arrays = [given.tokens, given.positions, given.slots, given.wanted]
            prefills = self._prefills
            has_images = images is not None or given.rotary is not None
            if prefills is not None and (
                has_images or not prefills.can_capture(self._implementation)
            ):
                prefills = None
            # A graph is filled from the host.
            place = device if prefills is None else torch.device("cpu")
            tokens_T, positions_T, slots_T, wanted_S = to_device_together(arrays, place)
            states = None
            if given.pieces is not None and cache.states is not None:
                states = states_of_pieces(given.pieces, cache.states.layers)
            # What is captured reads latents as they are, in one form for all passes of its size.
            expands = prefills is None or len(given.tokens) > MOST_TOKENS
            levels, windowed = (
                None
                if each is None
                else prepare_host(each, positions_T, device, self._implementation, expands=expands)
                for each in (given.levels, given.windowed)
            )
            assert levels is not None
            rotary_AT = None if given.rotary is None else to_device(given.rotary, device)
            batch = Batch(
                tokens_T,
                positions_T,
                slots_T,
                wanted_S,
                levels,
                cache.layers,
                states,
                rotary_AT=rotary_AT,
                images=images,
                windowed=windowed,
            )
            if prefills is None:
                cache.note_tokens(slots_T, tokens_T)
                return self._model.forward(batch), levels
            cache.note_tokens(*to_device_together([given.slots, given.tokens], device))
            return prefills.run(batch), levels

    def build_histories(
        self, levels: Sequence[HostLevel], lengths: Ints, drawn: Ints
    ) -> TokenHistory:
        """The texts of rows that levels have, as `TokenHistory.of` reads them."""
        return TokenHistory.of(self._cache.tokens_S, self._cache.page_size, levels, lengths, drawn)

    def decode(self, given: StepInputs) -> tuple[Draws | DeferredDraws, PreparedLevels]:
        """The draws of a decode step, which are valid until the next one, and how it attended.

        Of rows with grammars the logits, which `finish` draws from.
        """
        told = given
        if given.rows is not None and given.rows is self._rows:
            told = replace(given, rows=None)
        with self._begin_collective("decode", told):
            device, cache, graphs = self._model.device, self._cache, self.graphs
            if given.rows is not None and given.rows is not self._rows:
                self._rows = given.rows
                self._sampling = self.sampling.of(
                    given.rows.params, given.rows.biases, given.rows.index
                )
                if given.rows.masked:
                    self._sampling = replace(self._sampling, masked=True)
            rows, sampling = self._rows, self._sampling
            assert rows is not None and sampling is not None
            # A graph is filled from the host.
            is_filled = (
                graphs is not None and given.graphs and graphs.can_capture(self._implementation)
            )
            inputs_8T = to_device(given.inputs, torch.device("cpu") if is_filled else device)
            levels = [*rows.levels, given.own]
            prepared = prepare_host(levels, inputs_8T[POSITION], device, self._implementation)
            states = None
            if given.states is not None and cache.states is not None:
                fold_lists(cache.states, given.states.folds)
                states = states_of_rows(given.states.inputs, cache.states.layers)
            drawn_P1 = self._drawn_P1 if given.goes_on else None
            texts = None
            if rows.drawn is not None and (self._ranks is None or not self._ranks.rank):
                texts = self.build_histories(levels, given.inputs[POSITION] + 1, rows.drawn)
            step = DecodeStep(
                inputs_8T,
                drawn_P1,
                prepared,
                sampling,
                cache,
                states,
                texts,
                self._ranks,
                self._vocab_size,
            )
            if graphs is not None and given.graphs and graphs.off and self._ranks is not None:
                # Others replay graphs, whose rows are padded, and this rank cannot.
                raise ModelError(f"a rank cannot use CUDA graphs: {graphs.off}; try eager=True")
            if graphs is None or not given.graphs:
                draws = step.compute(self._model.forward)
            else:
                draws = graphs.run(step)
            if isinstance(draws, Draws):
                self._note_drawn(draws, given.number)
            return draws, prepared

    def finish(self, undrawn: DeferredDraws, masks: Masks | None, number: int) -> Draws:
        """Draw from the logits of a step. number: as in `StepInputs`."""
        with torch.inference_mode():
            draws = undrawn.draw(masks)
        self._note_drawn(draws, number)
        return draws

    def _note_drawn(self, draws: Draws, number: int) -> None:
        self._drawn_P1 = draws.tokens_PN
        if self._ranks is not None:
            self._update_checksum(self._ranks, number, draws.tokens_PN)

    def _update_checksum(self, ranks: Ranks, number: int, tokens: Tensor) -> None:
        """Note the tokens of a step, and compare them now and then with what the others drew."""
        if self._agreement is None or number == 0:
            self._agreement = TokenChecksum(ranks)
        self._agreement.update(tokens)
        if number % STEPS == STEPS - 1:
            self._agreement.compare_ranks()

    def write_copies(self, slots: Ints, targets: Ints) -> None:
        """Make keys and values of latents in some slots, and write them into copies."""
        with self._begin_collective("write_copies", slots, targets):
            device, layers = self._model.device, self._cache.layers
            assert isinstance(self._model, Model)
            self._model.write_expanded(layers, *to_device_together([slots, targets], device))

    def copy_tokens(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """`PagedCache.copy_tokens`, of a follower."""
        self._cache.copy_tokens(source, target)

    def _begin_collective(self, name: str, *arguments: Any) -> _CollectiveGuard:
        lead = self._ranks.lead if self._ranks is not None else None
        if lead is not None:
            lead.call_followers(name, *arguments)
        return _CollectiveGuard(lead)


class _CollectiveGuard:
    """What ranks compute together. If this one fails in it, the others wait for it in vain."""

    def __init__(self, lead: RankLeader | None) -> None:
        self._lead = lead

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and self._lead is not None:
            self._lead.fail(f"rank 0 failed in a pass: {type(error).__name__}: {error}")
