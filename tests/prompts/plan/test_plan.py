"""Plans: what is shared, kept and folded, and the account of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treegen.errors import CacheFullError, InputError
from treegen.prompts.plan import draws
from treegen.prompts.plan.compile import compile_plan
from treegen.prompts.plan.cost_model import (
    DEVICE_COSTS,
    SHARING,
    CostModel,
    Sharing,
    cost_of,
)
from treegen.prompts.plan.draws import DrawCounter
from treegen.prompts.plan.plan import Plan, Request
from treegen.prompts.radix import RadixNode, build, common_prefix


def plan_of(
    lists: list[list[int]],
    samples: int = 4,
    sharing: Sharing = "auto",
    cost: CostModel = DEVICE_COSTS["cpu"],
    **more: object,
) -> Plan:
    requests = [
        Request(f"p{i}", np.array(tokens, dtype=np.int32), samples, samples, max_tokens=10)
        for i, tokens in enumerate(lists)
    ]
    return compile_plan(
        requests,
        token_bytes=4096,
        num_layers=2,
        sharing=sharing,
        cost=cost,
        **more,  # type: ignore[arg-type]
    )


prompt_lists = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12
)


def test_a_plan_tells_how_many_rows_are_decoded_at_once() -> None:
    limited = str(plan_of([[0, 1], [0, 2]], 40, max_rows=32))
    assert "2 prompts, 80 samples in 80 rows, at most 32 at once (max_rows)\n" in limited
    assert "prompt tokens read per step, if all rows were decoded at once: " in limited
    for max_rows in (None, 80):
        text = str(plan_of([[0, 1], [0, 2]], 40, max_rows=max_rows))
        assert "80 samples in 80 rows\n" in text
        assert "prompt tokens read per step: " in text


@given(prompt_lists, st.sampled_from(SHARING), st.integers(0, 3))
def test_segments_tile_every_prompt(lists: list[list[int]], sharing: Sharing, samples: int) -> None:
    plan = plan_of(lists, samples, sharing)
    assert sorted(plan.order.tolist()) == list(range(len(lists)))
    for index, tokens in enumerate(lists):
        path = list(plan.path(index))[::-1]
        assert np.concatenate([segment.tokens for segment in path]).tolist() == tokens
        base = 0
        for segment in path:
            assert segment.base == base
            base = segment.stop if segment.is_cascaded else base
    assert plan.stored_tokens <= sum(map(len, lists))
    assert plan.unshared_tokens == sum(map(len, lists)) * max(samples, 1)
    for segment in plan.segments:
        below = [i for i in range(len(lists)) if segment in plan.path(i)]
        places = sorted(plan.order.tolist().index(i) for i in below)
        assert places == list(range(places[0], places[-1] + 1)), "rows are not contiguous"
        assert segment.rows == samples * len(below)


@given(prompt_lists, st.integers(1, 4))
def test_keys_read_are_counted_as_the_levels_read_them(lists: list[list[int]], rows: int) -> None:
    """read_tokens equals walking over every row with the page tables that it would have."""
    for sharing in SHARING:
        plan = plan_of(lists, rows, sharing)
        total = sum(s.stop - s.base for s in plan.segments if s.is_cascaded)
        for index, request in enumerate(plan.requests):
            segment = plan.segments[plan.segment_of[index]]
            total += 0 if segment.is_cascaded else (segment.stop - segment.base) * request.rows
        assert plan.read_tokens == total
    assert plan_of(lists, rows, "off").read_tokens == plan.unshared_read_tokens


def test_sharing_says_what_is_kept() -> None:
    lists = [[1] * 500 + [2] * 300 + [i] for i in range(3, 6)] + [[1] * 500 + [9]]
    kept = {
        sharing: [(s.depth, s.is_cascaded) for s in plan_of(lists, 8, sharing).segments]
        for sharing in SHARING
    }
    assert kept["off"] == [(d, False) for d, _ in kept["off"]]
    assert kept["one"] == [(d, d == 0) for d, _ in kept["one"]]
    assert kept["all"] == [(d, True) for d, _ in kept["all"]]
    # One token is not worth a part of its own, hundreds are.
    assert kept["auto"] == [(0, True), (1, True), (2, False), (2, False), (2, False), (1, False)]
    with pytest.raises(InputError, match="sharing must be one of auto, all, one, off, got 'most'"):
        plan_of(lists, 8, "most")  # type: ignore[arg-type]


def test_one_row_is_always_folded() -> None:
    for segment in plan_of([[1] * 5000], samples=1, sharing="all").segments:
        assert not segment.is_cascaded
        assert segment.reason == "one row"


def test_rows_at_once_bound_what_sharing_can_save() -> None:
    cost = CostModel(group_us=100, row_us=0, bytes_per_us=2048)
    lists = [[1] * 10 + [i] for i in range(2, 5)]
    assert plan_of(lists, 40, cost=cost).segments[0].is_cascaded
    assert not plan_of(lists, 40, cost=cost, max_rows=5).segments[0].is_cascaded


def test_groups_of_a_level_divide_what_it_costs() -> None:
    """Twenty tokens read again by ten rows cost 180 us; a launch costs as much for all groups."""
    cost = CostModel(group_us=0, row_us=0, bytes_per_us=1, level_us=400)
    assert cost.saving(10, 20, 1.0, live_rows=10) == 180 - 400
    assert cost.saving(10, 20, 1.0, live_rows=100) == 180 - 40
    waits = replace(cost, key_us=3, busy_rows=20)
    assert waits.saving(10, 20, 1.0, live_rows=10) == 180 - 400 + 20 * 3 * (1 / 2 - 1 / 16)
    assert waits.saving(10, 20, 1.0, live_rows=100) == 180 - 40 + 20 * 3 * (1 - 1 / 16) / 10
    assert waits.saving(1, 20, 1.0, live_rows=1) == -400  # one row is split like the part
    lists = [[i] * 20 + [100] for i in range(10)]
    cost = CostModel(group_us=0, row_us=0, bytes_per_us=2048, level_us=400)
    for prompts, is_cascaded in ((lists[:1], False), (lists, True)):
        plan = plan_of(prompts, 10, cost=cost)
        assert {s.is_cascaded for s in plan.segments if s.rows == 10} == {is_cascaded}


@pytest.mark.parametrize(
    ("rows", "tokens", "kv_heads", "width", "is_cascaded"),
    [
        (16, 1024, 8, 64, True),
        (16, 512, 8, 64, False),
        (16, 1024, 4, 128, False),
        (8, 2048, 8, 128, True),
        (16, 1024, 2, 256, False),
        (64, 1024, 2, 256, True),
        (2, 4096, 4, 128, False),
        (4, 1024, 32, 128, True),
    ],
)
def test_few_rows_share_what_was_measured_to_pay(
    rows: int, tokens: int, kv_heads: int, width: int, is_cascaded: bool
) -> None:
    """The faster choice of two measured ones on an H200, in bfloat16 and with 64 own keys."""
    saving = cost_of("cuda", kv_heads).saving(rows, tokens, kv_heads * width * 4, rows)
    assert (saving > 0) == is_cascaded


def test_a_plan_prints_what_it_shares() -> None:
    text = str(plan_of([[1] * 500 + [2, 3], [1] * 500 + [4, 5]], samples=8))
    assert text.splitlines() == [
        "2 prompts, 16 samples in 16 rows",
        "level 0: 1 segments, 500 tokens, 1 kept, 0 folded (reading once pays: 1)",
        "level 1: 2 segments, 4 tokens, 0 kept, 2 folded (too short for its rows: 2)",
        "prompt tokens computed and stored: 504 (2.0 MiB) instead of 8,032 (31.4 MiB)",
        "prompt tokens read per step: 532 (2.1 MiB) instead of 8,032 (31.4 MiB)",
    ]


def test_split_at_cuts_segments_where_a_kept_prefix_ends() -> None:
    lists = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]]
    prefix = np.array([1, 2, 9], dtype=np.int32)
    plan = plan_of(lists, split_at=[prefix])
    assert [(s.start, s.stop) for s in plan.segments] == [(0, 2), (2, 4), (4, 5), (4, 5)]
    assert all(len(segment.requests) + segment.rows for segment in plan.segments)


def test_pages_and_rows_that_fit() -> None:
    """By hand: 8 shared tokens, two problems of 3, rows of 10 - 1 stored tokens, pages of 4."""
    plan = plan_of([[1] * 8 + [2, 3, 4], [1] * 8 + [5, 6, 7]], samples=3, sharing="all")
    assert [plan.table_pages(segment, 4) for segment in plan.segments] == [2, 1, 1]
    assert plan.row_pages(0, 4) == 3
    assert plan.get_single_row_pages(0, 4) == 2 + 1 + 3
    assert [plan.rows_that_fit(pages, 4) for pages in (5, 6, 8, 9, 12, 15, 16, 100)] == [
        0,
        1,
        1,
        2,
        3,
        3,
        4,
        6,
    ]
    folded = plan_of([[1] * 8 + [2, 3, 4], [1] * 8 + [5, 6, 7]], samples=3, sharing="off")
    # A child of a folded segment shares its full pages; a row copies the partly filled one.
    assert [folded.table_pages(segment, 4) for segment in folded.segments] == [2, 1, 1]
    assert folded.row_pages(0, 4) == -(-(3 + 9) // 4)


def test_ten_thousand_leaves_are_planned() -> None:
    """10,000 leaves under five levels, which take a second or two of one core."""
    rng = np.random.default_rng(0)
    base = rng.integers(0, 30_000, 200)
    lists = [
        [*base, *([a] * 20), *([b] * 30), *([c] * 20), *([d] * 50)]
        for a in range(10)
        for b in range(10)
        for c in range(10)
        for d in range(10)
    ]
    requests = [
        Request(str(i), np.array(tokens, dtype=np.int32), 40, 40, 256)
        for i, tokens in enumerate(lists)
    ]
    plan = compile_plan(requests, token_bytes=4096, num_layers=2)
    levels = plan.levels()
    assert [level.segments for level in levels] == [1, 10, 100, 1000, 10_000]
    assert plan.stored_tokens == 200 + 10 * 20 + 100 * 30 + 1000 * 20 + 10_000 * 50


def test_recurrent_states_are_counted_beside_pages() -> None:
    plan = replace(plan_of([[1, 2, 3], [1, 2, 4], [5]], samples=3), state_bytes=2048)
    text = "recurrent states: one for each segment (8.0 KiB) and one for each live row"
    assert f"{text} (2.0 KiB each)" in str(plan)
    assert "recurrent" not in str(plan_of([[1, 2]]))
    # Two segments above a sample, or one, and the sample's own.
    assert [plan.get_single_row_states(i) for i in range(3)] == [3, 3, 2]
    assert plan.rows_that_fit(1000, 4) == 9
    for states, rows in ((3, 1), (5, 3), (6, 3), (7, 4), (9, 6), (13, 9), (99, 9)):
        assert plan.rows_that_fit(1000, 4, states) == rows, states
    plan.check_fits(1000, 4, 3)
    with pytest.raises(
        CacheFullError, match=r"prompt 'p0' needs 3 recurrent states of 2\.0 KiB .* holds only 2"
    ):
        plan.check_fits(1000, 4, 2)


# How many samples of unnamed prompts were drawn before


def test_however_many_prompts_are_asked_for_no_sample_is_drawn_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draws, "_MAX_COUNTED_PROMPTS", 3)
    counter, drawn = DrawCounter(), set[tuple[str, int]]()
    for turn in range(200):
        origin, num = f"p{turn * turn % 17 % 7}", 1 + turn % 3
        within = DrawCounter(counter) if turn % 5 == 0 else counter
        first = within.advance(origin, num)
        if within is not counter:
            counter.update(within)
        counter.forget()
        samples = {(origin, first + index) for index in range(num)}
        assert not samples & drawn, "a sample is drawn twice"
        drawn |= samples
        assert len(counter._counts) <= 3
    assert counter.num("never asked for") >= counter._forgotten > 0


def test_a_prompt_that_is_asked_for_again_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "_MAX_COUNTED_PROMPTS", 2)
    counter = DrawCounter()
    for origin in ("a", "b", "a", "c"):  # "b" was asked for the longest ago
        counter.advance(origin, 5)
        counter.forget()
    assert (counter.num("a"), counter.num("c")) == (10, 5)
    assert counter.num("b") == 5


def test_one_call_numbers_all_of_its_prompts_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "_MAX_COUNTED_PROMPTS", 2)
    counter = DrawCounter()
    assert [counter.advance(f"p{i}", 3) for i in range(9)] == [0] * 9


# The radix tree over tokens, against its definition


def arrays(lists: list[list[int]]) -> list[np.ndarray[tuple[int], np.dtype[np.int32]]]:
    return [np.array(tokens, dtype=np.int32) for tokens in lists]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=14))
def test_shared_prefixes_are_nodes_and_nothing_else_is(lists: list[list[int]]) -> None:
    roots = build(arrays(lists))
    seen: list[int] = []

    def visit(node: RadixNode, start: int) -> list[int]:
        assert node.stop > start
        below = list(node.sequences)
        for child in node.children:
            below += visit(child, node.stop)
        # A node is where sequences end or part; all below it agree up to its end.
        assert node.sequences or len(node.children) > 1
        assert len({tuple(lists[i][: node.stop]) for i in below}) == 1
        assert all(len(lists[i]) == node.stop for i in node.sequences)
        next_tokens = [lists[child.first][node.stop] for child in node.children]
        assert len(set(next_tokens)) == len(next_tokens)
        assert node.first == min(below)
        assert [c.first for c in node.children] == sorted(c.first for c in node.children)
        return below

    for root in roots:
        seen += visit(root, 0)
    assert sorted(seen) == list(range(len(lists)))
    assert len({lists[root.first][0] for root in roots}) == len(roots)


def test_common_prefix() -> None:
    a, b, empty = arrays([[1, 2, 3], [1, 2, 4, 5], []])
    assert common_prefix(a, b) == 2
    assert common_prefix(a, a) == 3
    assert common_prefix(a[:2], b) == 2
    assert common_prefix(empty, b) == 0


def test_an_empty_sequence_is_the_root_of_all_others() -> None:
    (root,) = build(arrays([[1, 2], [], [1, 3], [4]]))
    assert root.stop == 0 and root.sequences == [1] and root.first == 0
    assert [child.stop for child in root.children] == [1, 1]
    assert [child.sequences for child in root.children] == [[], [3]]
    (root,) = build(arrays([[], []]))
    assert root.sequences == [0, 1] and not root.children
