"""Keeps a prompt that a run has computed for later runs."""

from __future__ import annotations

from collections.abc import Sequence

from treegen.common.spec import ModelSpec
from treegen.engine.segments.prefix_cache import PrefixCache
from treegen.engine.segments.segment import LiveRequest
from treegen.errors import CapacityError
from treegen.ops.cache.pool import PagedCache
from treegen.ops.cache.state_cache import NO_STATE, StateCache
from treegen.prompts.plan.plan import Plan, Request
from treegen.prompts.plan.requests import plan_requests


def insert_prefix(request: LiveRequest, name: str, cache: PagedCache, kept: PrefixCache) -> None:
    """Keep the pages of a computed prompt, and copies of its recurrent states.

    Args:
        request: The request of the prompt.
        name: The caller's name for the prefix.
        cache: The paged KV cache.
        kept: The prefix cache.

    Raises:
        CapacityError: no slots are left for its recurrent states.
    """
    segment = request.segment
    assert segment.table is not None, "a prompt to keep is not in place"
    slots = [segment.end_state, segment.last_state]
    if cache.states is not None:
        _make_room(name, sum(slot != NO_STATE for slot in slots), cache.states, kept)
        slots = [_copy_state(slot, cache.states) for slot in slots]
    end_state, last_state = slots
    kept.add(
        name,
        request.spec.tokens,
        cache.pool.share(segment.table),
        end_state=end_state,
        last_state=last_state,
    )


def plan_prefix(
    name: str,
    requests: Sequence[Request],
    spec: ModelSpec,
    device_type: str,
    cache: PagedCache,
    kept: PrefixCache,
) -> Plan:
    """Return the plan that computes prompts, to keep them under one name.

    Args:
        name: The caller's name for the prefixes, for messages.
        requests: The prompts.
        spec: Description of the model.
        device_type: Device type of the model, such as "cuda".
        cache: The paged KV cache.
        kept: The prefix cache.

    Raises:
        CapacityError: there are too many tokens, or too many recurrent states.
    """
    plan = plan_requests(
        [Request(r.id, r.tokens, samples=0, rows=0, max_tokens=1) for r in requests],
        spec,
        device_type=device_type,
        sharing="off",  # so that the page table of a prompt begins at its first token
        split_at=[prefix.tokens for prefix in kept],
    )
    _check_room(name, plan, cache, kept)
    return plan


def _check_room(name: str, plan: Plan, cache: PagedCache, kept: PrefixCache) -> None:
    page_size, most = cache.page_size, kept.max_pages
    needed = sum(plan.table_pages(segment, page_size) for segment in plan.segments)
    if needed > most:
        raise CapacityError(
            f"prefix {name!r} needs {needed * page_size:,} cache tokens but at most "
            f"{most * page_size:,} are kept; give more memory"
        )
    if cache.states is not None:
        # Each segment has two states while it is computed, and kept prefixes get copies.
        states = 2 * (len(plan.segments) + len(plan.requests))
        if states > cache.states.num_slots:
            raise CapacityError(
                f"prefix {name!r} needs {states:,} recurrent states while it is computed, but "
                f"{cache.states.num_slots:,} fit; give more memory"
            )


def _make_room(name: str, wanted: int, states: StateCache, kept: PrefixCache) -> None:
    for other in kept:
        if states.num_free < wanted and other.name != name:
            kept.remove(other)
    if states.num_free < wanted:
        raise CapacityError(
            f"prefix {name!r} needs {wanted} slots for recurrent states, but {states.num_free} are "
            "free; give more memory"
        )


def _copy_state(slot: int, states: StateCache) -> int:
    if slot == NO_STATE:
        return NO_STATE
    copy = states.allocate_one()
    states.copy(slot, copy)
    return copy
