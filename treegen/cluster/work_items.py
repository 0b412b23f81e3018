"""Makes work items from the requests of a plan: their order and their costs."""

from __future__ import annotations

from collections.abc import Sequence

from treegen.cluster.dispatcher import WorkItem
from treegen.prompts.plan.plan import Plan


def sort_depth_first(plan: Plan) -> list[int]:
    """Return the requests of a plan depth first, with the longest of sibling subtrees first."""
    longest = [segment.stop for segment in plan.segments]
    children: dict[int, list[int]] = {}
    for segment in reversed(plan.segments):  # children come after their parents
        children.setdefault(segment.parent, []).append(segment.index)
        if segment.parent >= 0:
            longest[segment.parent] = max(longest[segment.parent], longest[segment.index])
    found: list[int] = []
    stack = [-1]
    while stack:
        index = stack.pop()
        if index >= 0:
            found += plan.segments[index].requests
        below = reversed(children.get(index, ()))  # equally long siblings stay in the plan's order
        stack += sorted(below, key=lambda each: -longest[each])[::-1]
    return found


def sample_items(plan: Plan, samples: Sequence[Sequence[int]]) -> list[WorkItem]:
    """Return the work items for drawing some samples of each request."""
    items = []
    for place in sort_depth_first(plan):
        request, wanted = plan.requests[place], tuple(samples[place])
        if not wanted:
            continue
        whole = request.rows < request.samples
        own = plan.segments[int(plan.segment_of[place])]
        prompt = (own.stop - own.start) / (1 if whole else len(wanted))
        items.append(WorkItem(place, wanted, request.max_tokens + prompt, whole))
    return items


def score_groups(plan: Plan) -> list[list[int]]:
    """Return the requests to score, grouped by context."""
    groups: dict[int, list[int]] = {}
    for place in sort_depth_first(plan):
        first = (plan.requests[place].score_from or 1) - 1
        above = next(s for s in plan.path(place) if s.start <= first)
        groups.setdefault(above.index, []).append(place)
    return list(groups.values())


def score_items(plan: Plan, groups: Sequence[Sequence[int]]) -> list[WorkItem]:
    """Return the work items for scoring groups of requests."""
    items = []
    for number, group in enumerate(groups):
        own = {segment.index: segment for place in group for segment in plan.path(place)}
        tokens = sum(s.stop - s.start for s in own.values() if s.rows <= len(group))
        items.append(WorkItem(number, tuple(range(len(group))), max(tokens, 1) / len(group)))
    return items
