"""Ends samples: frees their pages at once, and makes their completions over the next steps.

Thousands of samples may reach their limit in one step, and making their completions takes as long
as many steps. So other rows get the pages of ended samples at once, but the slots only once the
completions have been reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np

from treegen.common.lifetimes import pause_gc
from treegen.common.outputs import Completion, Thinking
from treegen.engine.compute.levels import Ints
from treegen.engine.features import Features
from treegen.engine.param_set import ParamSet
from treegen.engine.requests.admission import AdmissionController
from treegen.engine.rows.engine_run import EngineRun
from treegen.engine.rows.queue import RowQueue
from treegen.engine.rows.table import RowPhase, RowTable
from treegen.engine.rows.token_store import NUM_SIGNALS
from treegen.engine.segments.segment import LiveRequest
from treegen.ops.cache.pool import Pages
from treegen.ops.sampling.confidence import CERTAINTY, CONFIDENCE
from treegen.prompts.plan.draws import sample_seed
from treegen.prompts.radix import Tokens
from treegen.prompts.stops import Ending

_TOKENS_PER_ROW = 4  # tokens to report in a step for each live row, which draws one token in a step
_MAX_REPORT_STEPS = 16  # samples that ended together are reported over at most this many steps
_NO_PAGES: Final[Pages] = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class GeneratedSegment:
    """The content of the segment made of a finished sample."""

    tokens: Tokens
    """The token ids of the segment."""
    num_generated: int
    """Number of leading tokens that the sample has generated itself."""


class OutputProcessor:
    """Ends the samples of one run.

    Attributes:
        waiting: Slots whose samples have finished and are not reported.
    """

    def __init__(
        self,
        run: EngineRun,
        queue: RowQueue,
        features: Features,
        admission: AdmissionController,
        on_search_sample: Callable[[LiveRequest, Completion], GeneratedSegment] | None,
    ) -> None:
        """Set up the processor of one run.

        Args:
            run: Shared state of the run.
            queue: Moves rows between phases.
            features: Its optional features.
            admission: Removes the rows of ended samples from their requests.
            on_search_sample: Returns the content of the segment of a search's sample; None outside
                of searches.
        """
        self._run, self._queue, self._features = run, queue, features
        self._admission, self._on_search_sample = admission, on_search_sample
        self._finished: list[Completion] = []  # not taken yet
        self.waiting: Ints = np.empty(0, dtype=np.int64)
        self._waiting_requests: list[LiveRequest] = []  # the requests of these slots
        self._min_tokens = 0  # to report in each step, so that waiting samples do not pile up

    @property
    def has_more(self) -> bool:
        """Whether some sample has ended and was not taken yet."""
        return bool(self._finished or self._waiting_requests)

    def end(self, slots: Ints) -> None:
        """End those samples in slots that have finished; the last token of each may end it."""
        rows = self._run.rows
        requests = [self._run.requests[index] for index in rows.request[slots].tolist()]
        # A sample at its limit has finished whatever its text is, so its report can wait. No
        # running pass has its row: `next_rows` leaves out rows that reach their limit. Two kinds
        # are reported at once: samples of a search, which continues with their text, and samples of
        # one token, whose text is made quickly.
        makes_segments = np.array([request.makes_segments for request in requests])
        can_wait = (rows.count[slots] >= np.maximum(rows.limit[slots], 2)) & ~makes_segments
        for chosen, end in ((can_wait, self._defer), (~can_wait, self._end_now)):
            if chosen.any():
                end(slots[chosen], [requests[at] for at in np.flatnonzero(chosen).tolist()])

    def report_batch(self) -> None:
        """Report as many samples as fit into the time of a step, or more if many wait."""
        tokens = self._run.rows.count[self.waiting].cumsum()
        max_tokens = max(_TOKENS_PER_ROW * len(self._queue.live_slots), self._min_tokens)
        self._report(max(int(tokens.searchsorted(max_tokens, side="right")), 1))

    def report_all(self) -> None:
        """Report all samples that have ended."""
        self._report(len(self._waiting_requests))

    def take_finished(self) -> list[Completion]:
        """Return samples that were reported and not taken yet; each is returned once."""
        finished, self._finished = self._finished, []
        return finished

    def _defer(self, slots: Ints, requests: Sequence[LiveRequest]) -> None:
        self.waiting = np.concatenate([self.waiting, slots])
        self._waiting_requests += requests
        self._min_tokens = max(
            self._min_tokens, int(self._run.rows.count[self.waiting].sum()) // _MAX_REPORT_STEPS
        )
        self._retire(slots, requests)

    def _report(self, num: int) -> None:
        if not self._waiting_requests:
            return
        slots, requests = self.waiting[:num], self._waiting_requests[:num]
        by_index = self._build_completions(slots, requests)
        self.waiting, self._waiting_requests = self.waiting[num:], self._waiting_requests[num:]
        self._min_tokens = self._min_tokens if self._waiting_requests else 0
        self._finished += [completion for _, completions in by_index for completion in completions]
        self._queue.release(slots)

    def _end_now(self, slots: Ints, requests: Sequence[LiveRequest]) -> None:
        by_index = self._build_completions(slots, requests)
        for _, completions in by_index:
            self._finished += completions
        finished = [at for at, _ in by_index]
        slots, requests = slots[finished], [requests[at] for at in finished]
        samples = [completions[0] for _, completions in by_index]
        chosen = [at for at, request in enumerate(requests) if request.makes_segments]
        if chosen:
            self._adopt_as_segments(
                slots[chosen], [requests[at] for at in chosen], [samples[at] for at in chosen]
            )
        self._retire(slots, requests)
        self._queue.release(slots)

    def _retire(self, slots: Ints, requests: Sequence[LiveRequest]) -> None:
        """Remove finished rows from their requests; they keep their slots until reported."""
        ended: dict[LiveRequest, list[int]] = {}
        for slot, request in zip(slots.tolist(), requests, strict=True):
            ended.setdefault(request, []).append(slot)
        for request, row_slots in ended.items():
            indices = set(self._run.rows.sample[row_slots].tolist())
            if self._run.param_sets[request.params].is_greedy:
                # One row has all samples. The report reads their indices from the request, so they
                # stay. In a search they are removed, because the samples are reported already.
                indices = set(request.samples) if request.makes_segments else set()
            request.samples[:] = [index for index in request.samples if index not in indices]
        if ended:
            self._admission.remove_rows(ended, ended=True)

    def _adopt_as_segments(
        self, slots: Ints, requests: Sequence[LiveRequest], completions: Sequence[Completion]
    ) -> None:
        """Make segments of the generated tokens of rows; a segment takes over its row's pages.

        Args:
            slots: The slot of each row, [N].
            requests: The request of each row.
            completions: The completion of each row.
        """
        assert self._on_search_sample is not None
        run, rows, store = self._run, self._run.rows, self._run.store
        contents = [*map(self._on_search_sample, requests, completions)]
        num_tokens = np.array([len(content.tokens) for content in contents])
        in_place = (rows.phase[slots] == RowPhase.LIVE) & (num_tokens > 0)
        tables = iter(rows.take_tables(slots[in_place]))
        columns = zip(
            requests,
            completions,
            contents,
            slots.tolist(),
            in_place.tolist(),
            rows.count[slots].tolist(),
            rows.base[slots].tolist(),
            rows.chain[slots].tolist(),
            strict=True,
        )
        for request, completion, content, slot, has_pages, count, base, chain in columns:
            key = request.index, completion.sample_index
            if not len(content.tokens):
                run.sample_segments[key] = store.retain(request.segment)
                continue
            states = None
            if has_pages:
                states = self._queue.states.transfer_states(slot, content.num_generated)
            run.sample_segments[key] = store.adopt(
                request.segment,
                content.tokens,
                num_computed=min(content.num_generated, count - 1),
                table=next(tables) if has_pages else _NO_PAGES,
                base=base,
                above=tuple(index for index in chain if index >= 0),
                params=run.param_sets[request.params].params,
                states=states,
            )

    @pause_gc()
    def _build_completions(
        self, slots: Ints, requests: Sequence[LiveRequest]
    ) -> list[tuple[int, list[Completion]]]:
        """Make the completions of those slots whose samples have finished.

        Args:
            slots: Slots to look at, [N].
            requests: The request of each slot. A slot has one sample; that of a greedy request has
                all samples.

        Returns:
            (index into `slots`, completions) pairs.
        """
        rows, param_sets = self._run.rows, self._run.param_sets
        tokens = list(rows.tokens(slots))
        endings = _find_finish_reasons(rows, slots, tokens, requests, param_sets)
        self._features.confidence.add_endings(endings, slots, tokens, requests)
        self._features.grammars.change_endings(endings, slots, tokens, requests)
        finished = sorted(endings)
        slots = slots[finished]
        per_row = zip(
            finished,
            rows.sample[slots].tolist(),
            rows.seed[slots].tolist(),
            rows.logprobs(slots),
            rows.versions(slots),
            _collect_alternatives(rows, slots, param_sets),
            _collect_signals(rows, slots, param_sets),
            strict=True,
        )
        by_index: list[tuple[int, list[Completion]]] = []
        for at, sample, seed, logprobs, versions, top, (confidences, certainties) in per_row:
            request, (reason, stop, text) = requests[at], endings[at]
            num = len(tokens[at])  # a sample that failed has fewer tokens than its row
            param_set = param_sets[request.params]
            num_top = param_set.params.logprobs
            thinking = _split_thinking(param_set, request, tokens[at], text)
            completions = [
                Completion(
                    prompt_id=request.spec.id,
                    sample_index=sample_index,
                    seed=row_seed,
                    text=text,
                    tokens=tokens[at],
                    logprobs=logprobs[:num],
                    finish_reason=reason,
                    stop=stop,
                    top_logprobs=tuple(pairs[:num_top] for pairs in top[:num]) if num_top else (),
                    confidences=confidences[:num],
                    certainties=certainties[:num],
                    thinking=thinking,
                    prompt_logprobs=request.score,
                    versions=_run_lengths(versions[:num]),
                )
                for sample_index, row_seed in _list_samples(param_set, request, sample, seed)
            ]
            by_index.append((at, completions))
        return by_index


def _run_lengths(versions: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return runs of equal versions as (version, length) pairs; empty if all are 0."""
    if not any(versions):
        return ()
    return tuple((version, len(list(run))) for version, run in groupby(versions))


def _split_thinking(
    param_set: ParamSet, request: LiveRequest, tokens: tuple[int, ...], text: str
) -> Thinking | None:
    """Return the thinking of a sample; None if its parameters have no thinking tags."""
    tags = param_set.stopping.thinking
    if tags is None:
        return None
    return tags.split(
        request.spec.tokens,
        tokens,
        text,
        param_set.params.max_thinking_tokens,
        is_structured=param_set.stopping.grammar is not None,
    )


def _list_samples(
    param_set: ParamSet, request: LiveRequest, sample: int, seed: int
) -> list[tuple[int, int]]:
    """Return the index and the seed of each sample of a row: one, or all of a greedy request."""
    if not param_set.is_greedy:
        return [(sample, seed)]
    run_seed = param_set.params.seed
    return [(index, sample_seed(run_seed, request.spec, index)) for index in request.samples]


def _find_finish_reasons(
    rows: RowTable,
    slots: Ints,
    tokens: Sequence[Sequence[int]],
    requests: Sequence[LiveRequest],
    param_sets: Sequence[ParamSet],
) -> dict[int, Ending]:
    """Return how the samples end, by index into `slots`; running samples have no entry."""
    by_index: dict[int, Ending] = {}
    params = rows.params[slots]
    for index in np.unique(params).tolist():
        slot_indices = np.flatnonzero(params == index)
        limits = rows.limit[slots[slot_indices]].tolist()
        indices = slot_indices.tolist()
        endings = param_sets[index].stopping.endings(
            [requests[at].spec.tokens for at in indices], [tokens[at] for at in indices], limits
        )
        by_index.update((at, v) for at, v in zip(indices, endings, strict=True) if v is not None)
    return by_index


def _collect_signals(
    rows: RowTable, slots: Ints, param_sets: Sequence[ParamSet]
) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """Return confidences and self-certainties of all tokens, for each slot that reports them."""
    signals: list[tuple[tuple[float, ...], tuple[float, ...]]] = [((), ())] * len(slots)
    if not rows.generated.signals.shape[-1]:
        return signals
    params_of = [param_sets[index].params for index in rows.params[slots].tolist()]
    reporting = [at for at, params in enumerate(params_of) if params.reports_signals]
    if reporting:
        for at, both in zip(reporting, rows.signals(slots[reporting]), strict=True):
            confidences = both[CONFIDENCE::NUM_SIGNALS] if params_of[at].confidence else ()
            certainties = both[CERTAINTY::NUM_SIGNALS] if params_of[at].self_certainty else ()
            signals[at] = confidences, certainties
    return signals


def _collect_alternatives(
    rows: RowTable, slots: Ints, param_sets: Sequence[ParamSet]
) -> list[Sequence[tuple[tuple[int, float], ...]]]:
    """Return the most likely (token, logprob) pairs at each token of slots that report them."""
    alternatives: list[Sequence[tuple[tuple[int, float], ...]]] = [()] * len(slots)
    if not rows.num_logprobs:
        return alternatives
    reports = [param_sets[index].params.logprobs > 0 for index in rows.params[slots].tolist()]
    reporting = np.flatnonzero(reports)
    both = zip(*rows.alternatives(slots[reporting]), strict=True)
    for at, (ids, values) in zip(reporting.tolist(), both, strict=True):
        pairs = zip(ids, values, strict=True)
        # Each token has `num_logprobs` consecutive pairs.
        alternatives[at] = list(zip(*[pairs] * rows.num_logprobs, strict=True))
    return alternatives
