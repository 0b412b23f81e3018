"""Checks that pages, states and rows of a run are accounted for, for tests and soak runs."""

from __future__ import annotations

import numpy as np

from treegen.engine.compute.levels import Ints
from treegen.engine.passes.decode import InFlightStep
from treegen.engine.passes.prefill import InFlightPrefill
from treegen.engine.rows.engine_run import EngineRun
from treegen.engine.rows.queue import RowQueue


def check_invariants(
    run: EngineRun,
    queue: RowQueue,
    waiting: Ints,
    flight: InFlightPrefill | InFlightStep | None,
    *,
    failed: bool,
) -> None:
    """Assert that pages and rows are accounted for and that rows are depth first.

    Args:
        run: Shared state of the run.
        queue: Its rows.
        waiting: Slots whose samples are over and not reported.
        flight: The pass whose results are not recorded yet; None if there is none.
        failed: Whether a pass has failed, and so may have lost rows.
    """
    run.store.check()
    tables = [*run.store.iter_page_tables(), *queue.tables(), *run.kept.tables()]
    run.pool.check(tables)
    if queue.states is not None:
        assert run.cache.states is not None
        mine, pages, windows = queue.states.get_owned_slots(queue.active())
        owned = [run.store.owned_states(), mine, run.kept.states()]
        run.cache.states.check(owned, pages, windows)
    if not failed:
        _check_slots(run, queue, waiting, flight)
    for ids in run.rows.chain[queue.order].T:
        runs = ids[np.flatnonzero(np.diff(ids, prepend=-2))]
        assert len(np.unique(runs[runs >= 0])) == (runs >= 0).sum(), "rows are not depth first"


def _check_slots(
    run: EngineRun, queue: RowQueue, waiting: Ints, flight: InFlightPrefill | InFlightStep | None
) -> None:
    """Assert that each row is in the place of its phase, and in its request until it ends."""
    rows = run.rows
    draws = [each.flight for each in flight.first] if isinstance(flight, InFlightPrefill) else []
    first = [drawn.slots[rows.serial[drawn.slots] == drawn.serials] for drawn in draws]
    queue.check(np.concatenate([np.empty(0, np.int64), *first]), waiting)
    owned = [slot for request in run.requests.values() for slot in request.slots or ()]
    alive = sorted(set(rows.used().tolist()).difference(waiting.tolist()))
    assert sorted(owned) == alive, "a row and its request do not agree"
