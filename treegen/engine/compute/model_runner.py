"""Computes passes: from their description on the host to logits and draws on the device.

The description of a pass has only numbers. So the ranks of a tensor-parallel model compute the same
pass from the same description, which rank 0 sends to the other ranks before it computes the pass.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treegen.common.device import AsyncHostCopy, to_device, to_device_together, use_device
from treegen.common.params import SamplingParams
from treegen.engine.compute.cuda_graphs import MAX_CAPTURED_TOKENS
from treegen.engine.compute.decode_step import POSITION, DecodeStep, DeferredDraws
from treegen.engine.compute.levels import Ints
from treegen.errors import ModelError, WorkerError, arg
from treegen.model.batch import Batch, ForwardModel, ImageRows
from treegen.model.model import Model
from treegen.model.recurrent.state_batch import Piece, fold_lists, states_of_pieces, states_of_rows
from treegen.ops.attention import HostLevel, Implementation, PreparedLevels, choose, prepare_host
from treegen.ops.cache.pool import PagedCache
from treegen.ops.sampling.batch import Bias, SamplingBatch, SamplingBatchCache
from treegen.ops.sampling.draw import Draws
from treegen.ops.sampling.logits import Masks
from treegen.ops.sampling.token_history import TokenHistory

if TYPE_CHECKING:
    from treegen.engine.compute.decode_graphs import DecodeGraphs
    from treegen.engine.compute.prefill_graphs import PrefillGraphs
    from treegen.model.parallel.ranks import RankLeader, Ranks


_CHECKSUM_STEPS: Final = 64
"""Decode steps between two comparisons of checksums."""
# The factor is odd, so that no bit of an earlier step is lost.
_CHECKSUM_FACTOR: Final = 0x9E3779B97F4A7C15 - 2**64


class TokenChecksum:
    """A checksum of all drawn tokens, which is kept and compared on the device.

    The comparison is asynchronous. Its result is read at the next comparison.
    """

    def __init__(self, ranks: Ranks) -> None:
        """Set up the checksum before any token is drawn."""
        self._ranks = ranks
        self._sum = torch.zeros(1, dtype=torch.int64, device=ranks.device)
        self._sums: AsyncHostCopy | None = None

    def update(self, tokens: Tensor) -> None:
        """Add the tokens of a step to the sum."""
        self._sum.mul_(_CHECKSUM_FACTOR).add_(tokens.sum())

    def compare_ranks(self) -> None:
        """Compare with the other ranks, which must all call this, and restart from zero.

        Raises:
            WorkerError: at the previous comparison, ranks had drawn different tokens.
        """
        before, self._sums = self._sums, AsyncHostCopy([self._ranks.all_gather(self._sum)])
        self._sum = torch.zeros_like(self._sum)
        if before is not None:
            (sums,) = before.wait()
            if (sums != sums[0]).any():
                raise WorkerError(
                    "the ranks of a tensor-parallel model have drawn different tokens, so "
                    "samples of the last steps may be wrong; check the GPUs (dmesg, nvidia-smi "
                    "-q), and make a new LLM to continue"
                )


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """A prefill pass of T tokens."""

    tokens: Ints
    """Token ids, [T]."""
    positions: Ints
    """As in `Batch`, [T]."""
    slots: Ints
    """As in `Batch`, [T]."""
    logit_indices: Ints
    """Indices of the tokens after which logits are needed, [S]."""
    levels: Sequence[HostLevel]
    """Attention levels of the tokens."""
    pieces: Sequence[Piece] | None
    """The tokens by sequence, for recurrent layers; None for a model without recurrent layers."""
    rotary: Ints | None = None
    """As in `Batch`, [3, T]; None if images shift no positions."""
    windowed: Sequence[HostLevel] | None = None
    """Attention levels in layers with a window, if they differ from `levels`."""
    images: ImageRows | None = None
    """Embeddings at the positions of images, on the host; None without images."""


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """Inputs of decode steps that stay the same while the same rows are decoded."""

    levels: Sequence[HostLevel]
    """The levels above the rows' own tokens."""
    params: Sequence[SamplingParams]
    """The distinct sampling parameters of the rows."""
    biases: Sequence[Bias]
    """The distinct logit biases of the rows."""
    index: Ints
    """Index of each row's sampling parameters, [T]."""
    generated_spans: Ints | None = None
    """Runs of tokens that were drawn, as in `TokenHistory`, [T, runs, 2]; None if no draw depends
    on the text before it."""
    masked: bool = False
    """Whether grammars restrict the draws of some rows; their masks are known later than the other
    inputs."""


@dataclass(frozen=True, slots=True)
class StateInputs:
    """State slots of a decode step of T rows."""

    inputs: Ints
    """[2, T] the slots that the rows read and write, or [4 + P, T] as in `RowSlots`."""
    folds: Sequence[Ints] = ()
    """[3 + P, F] each, the update lists to fold into states before the step, in this order. The
    first index lists, for F lists: the slot of the state to which the list applies, the slot of the
    new state, the number of updates, and the P pages."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A decode step of T rows."""

    inputs: Ints
    """As in `DecodeStep`, [8, T]."""
    own_level: HostLevel
    """The level of the rows' own tokens."""
    rows: StepRows | None
    """Inputs that depend on the rows only; None if the rows are those of the previous step."""
    uses_previous_draws: bool
    """Whether some input tokens are those that the previous step draws."""
    states: StateInputs | None
    """State slots of the rows; None for a model without recurrent layers."""
    graphs: bool
    """Whether the step may run as a CUDA graph."""
    number: int = 0
    """Number of earlier steps of the run."""


class ModelRunner:
    """Computes passes with one model and its cache, alone or together with other ranks.

    Attributes:
        graphs: CUDA graphs of decode steps; None computes them eagerly.
        impl: The attention implementation.
        sampling: Caches the sampling inputs of rows.
    """

    def __init__(
        self,
        model: ForwardModel,
        cache: PagedCache,
        graphs: DecodeGraphs | None,
        impl: str,
        ranks: Ranks | None = None,
        vocab_size: int = 0,
        draft_runner: ModelRunner | None = None,
        prefills: PrefillGraphs | None = None,
    ) -> None:
        """Set up a runner.

        Args:
            model: The model.
            cache: Its paged KV cache.
            graphs: CUDA graphs of decode steps; None computes them eagerly.
            impl: The attention implementation.
            ranks: The ranks of a tensor-parallel model, seen from this one. Default: one process.
            vocab_size: Number of logits of a row, of which each of several ranks has a part.
            draft_runner: Runner of a draft model whose cache uses the same page tables. It also
                computes the keys of prompts. Default: none.
            prefills: CUDA graphs of small prefill passes, only without other ranks. Default: none.
        """
        self._draft_runner = draft_runner
        spec = model.spec if isinstance(model, Model) else None
        self._index_topk = spec.index_topk if spec is not None else 0
        self._pools_keys = spec is not None and spec.index_pool > 1
        self._model, self._cache, self.graphs, self.impl = model, cache, graphs, impl
        self._ranks, self._vocab_size, self._prefills = ranks, vocab_size, prefills
        self._rows: StepRows | None = None
        self._sampling: SamplingBatch | None = None
        self.sampling = SamplingBatchCache(model.device)
        self._drawn_P1: Tensor | None = None
        # A step for whose draws the other ranks wait, and its number.
        self._deferred: tuple[DeferredDraws, int] | None = None
        self._checksum: TokenChecksum | None = None

    def check(self) -> None:
        """Raise WorkerError if results may be wrong because a rank has failed."""
        if self._ranks is not None:
            self._ranks.check()

    @property
    def num_captured(self) -> int:
        """Number of decode steps captured as CUDA graphs so far; each capture takes long."""
        captured = self.graphs.num_captured if self.graphs is not None else 0
        return captured + (self._draft_runner.num_captured if self._draft_runner is not None else 0)

    @property
    def uncompiled_because(self) -> str:
        """Why the layers could not be compiled; empty if they were."""
        return self._model.uncompiled_because if isinstance(self._model, Model) else ""

    @functools.cached_property
    def _implementation(self) -> Implementation:
        """The attention implementation, cached because choosing it in each pass costs time."""
        return choose(self.impl, self._model.device)

    def prefill(self, inputs: PrefillInputs) -> tuple[Tensor, PreparedLevels]:
        """Compute a prefill pass; return its logits [S, V] and its prepared levels."""
        if self._draft_runner is not None:
            self._draft_runner.prefill(
                replace(inputs, logit_indices=inputs.logit_indices[:0], images=None)
            )
        with self._compute_together("prefill", inputs):
            device, cache = self._model.device, self._cache
            images = None if inputs.images is None else inputs.images.on(device)
            arrays = [inputs.tokens, inputs.positions, inputs.slots, inputs.logit_indices]
            prefills = None if self._exceeds_topk(inputs.positions) else self._prefills
            has_images = images is not None or inputs.rotary is not None
            if prefills is not None and (
                has_images or not prefills.can_capture(self._implementation)
            ):
                prefills = None
            # A graph's inputs are copied from the host.
            input_device = device if prefills is None else torch.device("cpu")
            tokens_T, positions_T, slots_T, logits_at_S = to_device_together(arrays, input_device)
            states = None
            if inputs.pieces is not None and cache.states is not None:
                states = states_of_pieces(inputs.pieces, cache.states.layers)
            # A captured pass reads latents unexpanded, so that all passes of its size are alike.
            expands = prefills is None or len(inputs.tokens) > MAX_CAPTURED_TOKENS
            levels, windowed = (
                None
                if group is None
                else prepare_host(group, positions_T, device, self._implementation, expands=expands)
                for group in (inputs.levels, inputs.windowed)
            )
            assert levels is not None
            rotary_AT = None if inputs.rotary is None else to_device(inputs.rotary, device)
            batch = Batch(
                tokens_T,
                positions_T,
                slots_T,
                logits_at_S,
                levels,
                cache.layers,
                states,
                rotary_AT=rotary_AT,
                images=images,
                windowed=windowed,
            )
            if prefills is None:
                cache.record_tokens(slots_T, tokens_T)
                return self._model.forward(batch), levels
            cache.record_tokens(*to_device_together([inputs.slots, inputs.tokens], device))
            return prefills.run(batch), levels

    def build_histories(
        self, levels: Sequence[HostLevel], lengths: Ints, generated_spans: Ints
    ) -> TokenHistory:
        """Return the texts of rows, as `TokenHistory.of` reads them.

        Args:
            levels: The levels that the rows read.
            lengths: Number of tokens of each row.
            generated_spans: Runs of tokens that were drawn, [rows, runs, 2].
        """
        return TokenHistory.of(
            self._cache.tokens_S, self._cache.page_size, levels, lengths, generated_spans
        )

    def decode(self, inputs: StepInputs) -> tuple[Draws | DeferredDraws, PreparedLevels]:
        """Compute a decode step; return its draws, valid until the next step, and its levels.

        If rows have grammars, it returns the logits instead, from which `finish` draws.
        """
        message = inputs
        if inputs.rows is not None and inputs.rows is self._rows:
            message = replace(inputs, rows=None)
        with self._compute_together("decode", message):
            device, cache, graphs = self._model.device, self._cache, self.graphs
            if self._exceeds_topk(inputs.inputs[POSITION]):
                graphs = None
            if inputs.rows is not None and inputs.rows is not self._rows:
                self._rows = inputs.rows
                self._sampling = self.sampling.of(
                    inputs.rows.params, inputs.rows.biases, inputs.rows.index
                )
                if inputs.rows.masked:
                    self._sampling = replace(self._sampling, masked=True)
            rows, sampling = self._rows, self._sampling
            assert rows is not None and sampling is not None
            # A graph's inputs are copied from the host.
            may_capture = (
                graphs is not None and inputs.graphs and graphs.can_capture(self._implementation)
            )
            inputs_8T = to_device(inputs.inputs, torch.device("cpu") if may_capture else device)
            levels = [*rows.levels, inputs.own_level]
            prepared = prepare_host(levels, inputs_8T[POSITION], device, self._implementation)
            states = None
            if inputs.states is not None and cache.states is not None:
                fold_lists(cache.states, inputs.states.folds)
                states = states_of_rows(inputs.states.inputs, cache.states.layers)
            drawn_P1 = self._drawn_P1 if inputs.uses_previous_draws else None
            texts = None
            if rows.generated_spans is not None and (self._ranks is None or not self._ranks.rank):
                texts = self.build_histories(
                    levels, inputs.inputs[POSITION] + 1, rows.generated_spans
                )
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
            if graphs is not None and inputs.graphs and graphs.eager_because and self._ranks:
                # The other ranks replay graphs, whose rows are padded, and this rank cannot.
                why = graphs.eager_because
                raise ModelError(f"a rank cannot use CUDA graphs: {why}; try {arg('eager', True)}")
            if graphs is None or not inputs.graphs:
                draws = step.compute(self._model.forward)
            else:
                draws = graphs.run(step)
            if isinstance(draws, Draws):
                self._record_drawn(draws, inputs.number)
            elif self._leader is not None:
                self._deferred = draws, inputs.number
            return draws, prepared

    def _exceeds_topk(self, positions: Ints) -> bool:
        """Return whether rows see more keys than they select, which is not part of CUDA graphs."""
        # The slots from which tokens pool index keys are no inputs of a graph either.
        return self._pools_keys or 0 < self._index_topk <= int(positions.max(initial=0))

    def finish(self, undrawn: DeferredDraws, masks: Masks | None, number: int) -> Draws:
        """Draw from the logits of a step.

        Args:
            undrawn: The logits of the step.
            masks: The tokens that rows may draw; None for all tokens.
            number: Number of earlier steps of the run.
        """
        self._deferred = None
        with self._compute_together():
            with torch.inference_mode():
                draws = undrawn.draw(masks)
            self._record_drawn(draws, number)
        return draws

    def drop_deferred(self) -> None:
        """Draw from the logits of a step that a failed run has not finished.

        The other ranks wait for these draws, and could compute nothing else before.
        """
        if self._deferred is not None and self._leader is not None and not self._leader.failed:
            undrawn, number = self._deferred
            with use_device(self._model.device):
                self.finish(undrawn, None, number)

    def _record_drawn(self, draws: Draws, number: int) -> None:
        self._drawn_P1 = draws.tokens_PN
        if self._ranks is not None:
            self._update_checksum(self._ranks, number, draws.tokens_PN)

    def _update_checksum(self, ranks: Ranks, number: int, tokens: Tensor) -> None:
        """Add a step's tokens to the checksum, and compare it every `_CHECKSUM_STEPS` steps."""
        if self._checksum is None or number == 0:
            self._checksum = TokenChecksum(ranks)
        self._checksum.update(tokens)
        if number % _CHECKSUM_STEPS == _CHECKSUM_STEPS - 1:
            self._checksum.compare_ranks()

    def write_copies(self, slots: Ints, targets: Ints) -> None:
        """Expand the latents in some cache slots, and write the keys and values into copies.

        Args:
            slots: Cache slots of the latents.
            targets: Slots of the copies.
        """
        with self._compute_together("write_copies", slots, targets):
            device, layers = self._model.device, self._cache.layers
            assert isinstance(self._model, Model)
            self._model.write_expanded(layers, *to_device_together([slots, targets], device))

    def copy_tokens(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Copy tokens in the cache of this rank; see `PagedCache.copy_tokens`."""
        self._cache.copy_tokens(source, target)

    @property
    def _leader(self) -> RankLeader | None:
        return self._ranks.leader if self._ranks is not None else None

    @contextmanager
    def _compute_together(self, name: str = "", *arguments: Any) -> Iterator[None]:
        """Let the other ranks call a method too, if it is named; end them if this rank fails.

        They would wait for this rank forever.
        """
        if self._leader is not None and name:
            self._leader.call_followers(name, *arguments)
        try:
            yield
        except BaseException as error:
            if self._leader is not None:
                self._leader.fail(
                    f"rank 0 failed in a forward pass: {type(error).__name__}: {error}"
                )
            raise
