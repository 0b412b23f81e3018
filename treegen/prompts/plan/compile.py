"""Build a plan: find what prompts share, and decide how decoding reads it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treegen.common.spec import ModelSpec
from treegen.prompts import radix
from treegen.prompts.plan.cost_model import (
    DEVICE_COSTS,
    CostModel,
    Sharing,
    check_sharing,
    decide_cascade,
    should_expand,
)
from treegen.prompts.plan.plan import Plan, PlanSegment, Request


def compile_plan(
    requests: Sequence[Request],
    *,
    token_bytes: int,
    num_layers: int,
    sharing: Sharing = "auto",
    cost: CostModel = DEVICE_COSTS["cpu"],
    max_rows: int | None = None,
    split_at: Sequence[radix.Tokens] = (),
    align: int = 1,
    spec: ModelSpec | None = None,
) -> Plan:
    """Build the plan of some requests.

    Args:
        requests: The requests; a plan keeps their order.
        token_bytes: Bytes of one token's keys and values, over all layers.
        num_layers: Attention layers of the model.
        sharing: Which segments get an attention level of their own. "auto": those that pay by the
            cost model; "all": every shared segment; "one": the roots only; "off": none, so that
            every row reads its whole prompt. Default: "auto".
        cost: The cost model of the device.
        max_rows: Maximum rows decoded at once, which bounds what sharing can save. Default: all
            rows.
        split_at: Further token sequences, such as cached prefixes. Segments are split at their
            ends.
        align: Attention parts begin at multiples of this many positions. The last tokens of a kept
            segment that fill no such block are folded. Default: 1.
        spec: The model, if it caches more than plain keys and values. Default: it does not.

    Raises:
        InputError: `sharing` is not one of `SHARING`.
    """
    check_sharing(sharing)
    nodes = _preorder([*(request.tokens for request in requests), *split_at], len(requests))
    segments: list[PlanSegment] = []
    layer_bytes = token_bytes / max(num_layers, 1)
    rows = _rows_below(nodes, requests)
    segment_of, order = np.zeros(len(requests), dtype=np.int64), list[int]()
    max_live = min(num_rows := sum(request.readers for request in requests), max_rows or num_rows)
    for index, (node, parent, sequences, first) in enumerate(nodes):
        segment_of[sequences] = index
        order += sequences
        above = segments[parent] if parent >= 0 else None
        start, base = (above.stop, above.base_below) if above else (0, 0)
        live = min(rows[index], max_live)
        stop = node.stop // align * align
        is_cascaded, reason = decide_cascade(
            sharing, live, stop - base, layer_bytes, cost, root=above is None, live_rows=max_live
        )
        expanded = is_cascaded and spec is not None and should_expand(spec, cost, live, stop)
        segments.append(
            PlanSegment(
                index=index,
                parent=parent,
                depth=above.depth + 1 if above else 0,
                start=start,
                stop=node.stop,
                tokens=requests[first].tokens[start : node.stop],
                rows=rows[index],
                requests=tuple(sequences),
                is_cascaded=is_cascaded,
                base=base,
                base_below=stop if is_cascaded else base,
                reason=f"{reason}, expanded" if expanded else reason,
                expanded=expanded,
            )
        )
    return Plan(
        requests=tuple(requests),
        segments=tuple(segments),
        segment_of=segment_of,
        order=np.array(order, dtype=np.int64),
        token_bytes=token_bytes,
        layer_bytes=layer_bytes,
        sharing=sharing,
        cost=cost,
        align=align,
        state_bytes=spec.state_bytes if spec is not None else 0,
        delta=spec.delta if spec is not None else None,
        copy_pages=spec.copy_pages if spec is not None else 0,
        max_rows=max_rows,
    )


# A node, the index of its parent's entry, its requests, and the first request at or below it.
_Entry = tuple[radix.RadixNode, int, list[int], int]


def _preorder(sequences: Sequence[radix.Tokens], num_requests: int) -> list[_Entry]:
    """Return the nodes with requests at or below them, depth first; requests come first."""
    entries: list[_Entry] = []
    stack = [(root, -1) for root in reversed(radix.build(sequences))]
    while stack:
        node, parent = stack.pop()
        if node.first >= num_requests:
            continue
        own_requests = [index for index in node.sequences if index < num_requests]
        entries.append((node, parent, own_requests, node.first))
        index = len(entries) - 1
        stack.extend((child, index) for child in reversed(node.children))
    return entries


def _rows_below(nodes: list[_Entry], requests: Sequence[Request]) -> list[int]:
    rows = [sum(requests[i].readers for i in own_requests) for _, _, own_requests, _ in nodes]
    for index in range(len(nodes) - 1, -1, -1):
        parent = nodes[index][1]
        if parent >= 0:
            rows[parent] += rows[index]
    return rows
