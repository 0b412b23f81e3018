"""Inputs of sampling in addition to logits: parameters, and the text that penalties read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treegen.engine.compute.levels import Ints, build_shared_levels, make_level, pad_tables
from treegen.engine.compute.model_runner import StepRows
from treegen.engine.rows.engine_run import EngineRun
from treegen.engine.segments.segment import NEVER, LiveRequest
from treegen.ops.attention import HostLevel
from treegen.ops.sampling.token_history import TokenHistory


def build_step_rows(run: EngineRun, slots: Ints, levels: Sequence[HostLevel]) -> StepRows:
    """Build the inputs that stay the same while the same rows are decoded.

    Args:
        run: Shared state of the run.
        slots: Slots of the rows.
        levels: Shared levels above the rows.
    """
    sets, index = run.param_sets_of(run.rows.params[slots])
    drawn = None
    if any(param_set.params.looks_back for param_set in sets):
        requests, place = np.unique(run.rows.request[slots], return_inverse=True)
        drawn = find_generated_spans([run.requests[number] for number in requests.tolist()])[place]
    masked = any(param_set.stopping.grammar is not None for param_set in sets)
    return StepRows(levels, [s.params for s in sets], [s.bias for s in sets], index, drawn, masked)


def find_generated_spans(requests: Sequence[LiveRequest]) -> Ints:
    """Return where texts of requests were drawn: first positions and ends, [requests, runs, 2].

    All tokens after a prompt are drawn, and in a search some tokens of the prompt too.
    """
    runs: list[list[tuple[int, int]]] = []
    for request in requests:
        drawn: list[tuple[int, int]] = [(request.segment.stop, NEVER)]
        for segment in request.segment.path():
            if not segment.drawn:
                continue
            first, stop = drawn[-1]
            if segment.stop == first:
                drawn[-1] = segment.start, stop
            else:
                drawn.append((segment.start, segment.stop))
        runs.append(drawn)
    spans = np.zeros((len(runs), max(map(len, runs), default=1), 2), dtype=np.int64)
    for row, drawn in enumerate(runs):
        spans[row, : len(drawn)] = drawn
    return spans


def build_prompt_histories(run: EngineRun, requests: Sequence[LiveRequest]) -> TokenHistory:
    """Return the prompts of requests; their keys are computed once the earlier passes finish."""
    segments = [request.segment for request in requests]
    place = np.arange(len(segments) + 1)
    chains = np.full((len(segments), max(len(each.above) for each in segments)), -1)
    for row, segment in enumerate(segments):
        chains[row, : len(segment.above)] = segment.above
    tables = [segment.table for segment in segments if segment.table is not None]
    assert len(tables) == len(segments), "a prompt is not in place"
    stop, base = (np.array([getattr(each, at) for each in segments]) for at in ("stop", "base"))
    own = make_level(place[:-1], place[1:], pad_tables(tables), stop - base, base, causal=True)
    levels = [*build_shared_levels(chains, place, run.store.keys_of), own]
    return run.executor.build_histories(levels, stop, find_generated_spans(requests))
