"""Keep a prompt that a run has computed for later runs."""

from __future__ import annotations

from treegen.cache.kept import KeptPrefix, KeptPrefixes
from treegen.cache.pool import PagedCache
from treegen.cache.states import NO_STATE, StateCache
from treegen.engine.segment import LiveRequest
from treegen.errors import CapacityError


def keep_prompt(
    request: LiveRequest, name: str, cache: PagedCache, kept: KeptPrefixes
) -> KeptPrefix:
    """Keep the pages of a prompt that is in place, and copies of its recurrent states.

    Raises:
        CapacityError: there are no slots left for its recurrent states.
    """
    segment = request.segment
    assert segment.table is not None, "a prompt to keep is not in place"
    slots = [segment.end_state, segment.last_state]
    if cache.states is not None:
        _make_room(name, sum(slot != NO_STATE for slot in slots), cache.states, kept)
        slots = [_copied(slot, cache.states) for slot in slots]
    end_state, last_state = slots
    return kept.add(
        name, request.spec.tokens, cache.pool.share(segment.table),
        end_state=end_state, last_state=last_state,
    )  # fmt: skip


def _make_room(name: str, wanted: int, states: StateCache, kept: KeptPrefixes) -> None:
    for other in kept:
        if states.num_free < wanted and other.name != name:
            kept.remove(other)
    if states.num_free < wanted:
        raise CapacityError(
            f"prefix {name!r} needs {wanted} slots for recurrent states, but {states.num_free} are "
            "free; give more memory"
        )


def _copied(slot: int, states: StateCache) -> int:
    if slot == NO_STATE:
        return NO_STATE
    copy = states.take()
    states.copy(slot, copy)
    return copy
