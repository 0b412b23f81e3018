"""Which decode steps are captured and which replayed; without a GPU, capturing is faked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from engine_cases import tokens_of as tokens_by_key
from faked_graphs import FakeGraph, faked
from fakes import HistoryModel, drain, expected, scheduler_of
from guessing import Always
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from treegen.bench.shapes import SHAPES, build_model
from treegen.common import device as transfer
from treegen.common.drafter import DraftContext
from treegen.common.params import SamplingParams
from treegen.engine.compute import decode_graphs
from treegen.engine.compute.cuda_graphs import estimate_row_seconds
from treegen.engine.compute.decode_step import FORCED, NUM_INPUTS, DecodeStep, DeferredDraws
from treegen.engine.compute.prefill_graphs import PrefillGraphs
from treegen.engine.speculative.speculation import FunctionDrafter, SpeculationOptions
from treegen.model.batch import Batch
from treegen.ops.attention.gpu.work_units import WorkShape
from treegen.ops.attention.level import HostLevel
from treegen.ops.cache.pool import LayerKV, PagedCache
from treegen.ops.sampling.batch import SamplingBatch
from treegen.ops.sampling.draw import Draws
from treegen.prompts.plan.compile import compile_plan
from treegen.prompts.plan.plan import Request

CPU = torch.device("cpu")
POOL = LayerKV(torch.zeros(2, 64, 2, 8), torch.zeros(2, 64, 2, 8))
CACHE = PagedCache([POOL], 99, 64)
ROW = 1e-3  # seconds that a row takes; a capture takes 0.08
GREEDY = SamplingParams(temperature=0)


@pytest.fixture
def patched() -> Iterator[pytest.MonkeyPatch]:
    with faked() as patch:
        yield patch


def forward(batch: Batch) -> Tensor:
    """Plans attention as a layer would; says which token is the most likely after each."""
    batch.levels.state.work(WorkShape(len(batch.tokens_T), 2, 4, 64, False))
    return torch.nn.functional.one_hot(after(batch.tokens_T[batch.logits_at_S]), 500).float()


def after(tokens: Tensor) -> Tensor:
    return (7 * tokens + 3) % 500


def step(
    num_rows: int, drawn: Tensor | None = None, source: Sequence[int] | None = None
) -> DecodeStep:
    """A decode step: a prefix of 100 keys that all rows share, and some keys of their own.

    Args:
        drawn: The last step's tokens, and which of them each row goes on from.
        source: The last step's tokens, and which of them each row goes on from.
    """
    index = np.arange(num_rows)
    zero = np.zeros(1, dtype=np.int64)
    pages = np.array([[0, 1]])
    shared = HostLevel(zero, zero + num_rows, pages, zero + 100, zero, causal=False)
    own = HostLevel(index, index + 1, index[:, None], index % 5 + 1, index * 0 + 100, causal=False)
    inputs_8T = torch.arange(1, num_rows + 1).repeat(NUM_INPUTS, 1)
    inputs_8T[1] = -1 if source is None else torch.tensor(source)
    inputs_8T[FORCED] = -1
    levels = triton_levels([shared, own], inputs_8T)
    sampling = SamplingBatch.of([GREEDY], torch.zeros(num_rows, dtype=torch.int64))
    return DecodeStep(inputs_8T, drawn, levels, sampling, CACHE)


def triton_levels(levels: Sequence[HostLevel], inputs_8T: Tensor) -> Any:
    from treegen.ops.attention import prepare_host

    return prepare_host(levels, inputs_8T[2], CPU, "triton")


def tokens_of(draws: Draws | DeferredDraws) -> list[int]:
    assert isinstance(draws, Draws)
    tokens: list[int] = draws.tokens_PN[:, 0].tolist()
    return tokens


def sizes(found: decode_graphs.DecodeGraphs) -> list[int]:
    return [entry.step.num_rows for entry in found._graphs]


def with_copies(num_rows: int, first: int, stop: int) -> DecodeStep:
    """The step of `step`, of which some rows also read a copy of 600 keys."""
    a_step = step(num_rows)
    one = np.ones(1, dtype=np.int64)
    level = HostLevel(first * one, stop * one, np.arange(10)[None], 600 * one, 0 * one, False)
    inputs = a_step.inputs_8T
    levels = triton_levels([replace(level, copied=True), *a_step.levels.levels], inputs)
    return replace(a_step, levels=levels)


def test_a_graph_reads_copies_of_latents_too(patched: pytest.MonkeyPatch) -> None:
    """Its lists are for all live rows, though copies may be of some of them."""

    def on_latents(batch: Batch) -> Tensor:
        copies = batch.levels.copies
        if copies is not None:
            assert copies.positions_T is batch.levels.positions_T
            copies.state.work(WorkShape(len(batch.tokens_T), 128, 1, 64, True))
        return forward(batch)

    found = decode_graphs.DecodeGraphs(on_latents, ROW)
    for rows, first, stop in ((100, 0, 100), (98, 0, 98), (97, 0, 40), (99, 20, 99)):
        a_step = with_copies(rows, first, stop)
        assert tokens_of(found.run(a_step)) == after(torch.arange(1, rows + 1)).tolist()
        entry = found._graphs[-1]
        assert entry.copies is not None
        (work,) = entry.copies._lists.values()
        # The dense kernel takes what all live rows read, and nothing that some of them do.
        assert (work.dense is not None) == (stop - first == rows)
        assert len(a_step.levels.kernels) == 3
    found.run(step(98))
    assert [entry.copies is None for entry in found._graphs][-1]


def test_padding_and_a_replay_leave_the_live_rows_alone(patched: pytest.MonkeyPatch) -> None:
    found = decode_graphs.DecodeGraphs(forward, ROW)
    assert tokens_of(found.run(step(100))) == after(torch.arange(1, 101)).tolist()
    assert sizes(found) == [112]
    for rows in (98, 109, 97):
        a_step = step(rows)
        assert tokens_of(found.run(a_step)) == after(torch.arange(1, rows + 1)).tolist()
        (entry,) = found._graphs
        assert entry.step.inputs_8T[:, :rows].equal(a_step.inputs_8T)
        assert not entry.step.inputs_8T[:, rows:].any()
        assert a_step.levels.kernels == ("triton", "triton")


def test_rows_go_on_from_the_tokens_of_the_last_step(patched: pytest.MonkeyPatch) -> None:
    """Whether it was replayed, captured, or run by someone else; rows come and go meanwhile."""
    found = decode_graphs.DecodeGraphs(forward, ROW)
    drawn = torch.arange(200, 300)[:, None]
    rng = np.random.default_rng(0)
    for turn in range(60):
        rows = 5000 if turn == 50 else int(rng.integers(1, 130))
        source_T = torch.from_numpy(rng.integers(-1, len(drawn), rows))
        last = drawn[:, 0].clone()
        draws = found.run(step(rows, drawn, source_T.tolist()))
        assert isinstance(draws, Draws)
        known = torch.arange(1, rows + 1)
        want = after(torch.where(source_T >= 0, last[source_T.clamp(min=0)], known))
        assert tokens_of(draws) == want.tolist()
        drawn = draws.tokens_PN
        if turn % 7 == 3:  # an eager step came between
            drawn = after(torch.arange(rows + 20))[:, None]
        if turn == 50:
            assert found.num_graphs == 1, "graphs that read from elsewhere are gone"
            *before, last = FakeGraph.pools
            assert last not in before, "torch refuses a pool that no graph uses any more"
    assert found.num_graphs > 1


def test_a_larger_graph_serves_until_its_padding_has_cost_a_capture(
    patched: pytest.MonkeyPatch,
) -> None:
    found = decode_graphs.DecodeGraphs(forward, ROW)
    found.run(step(64))
    for _ in range(2):
        found.run(step(32))
    assert sizes(found) == [64], "64 rows were computed in vain"
    found.run(step(16))
    assert sizes(found) == [64, 16], "they would be 112"
    for _ in range(9):  # those of a step that fits cost nothing
        found.run(step(16))
        found.run(step(64))
    assert sizes(found) == [16, 64]


def test_few_rows_are_not_computed_by_a_graph_of_many(patched: pytest.MonkeyPatch) -> None:
    found = decode_graphs.DecodeGraphs(forward, ROW)
    for rows in (128, 4):
        found.run(step(rows))
    assert sizes(found) == [128, 4]


def test_a_row_takes_as_long_as_the_weights_that_it_is_computed_with() -> None:
    dense, of_experts = (
        build_model(SHAPES[name], device="cpu")[0] for name in ("tiny", "tiny-delta")
    )
    expected = sum(weight.nbytes for weight in dense.module.parameters())
    assert estimate_row_seconds(dense) == pytest.approx(expected / 650e12)
    numbers = [weight.nbytes for weight in of_experts.module.parameters()]
    assert 0 < estimate_row_seconds(of_experts) * 650e12 < sum(numbers), "two of four experts"


def test_the_graph_that_was_used_last_is_dropped_last(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(decode_graphs, "_MAX_GRAPHS", 2)
    found = decode_graphs.DecodeGraphs(forward, ROW)
    found.run(step(1))
    found.run(step(16))
    found.run(step(1))
    found.run(step(128))
    assert sizes(found) == [2, 128]


@pytest.mark.parametrize("error", [RuntimeError, torch.cuda.OutOfMemoryError])
def test_where_nothing_can_be_captured_steps_run_eagerly(
    error: type[RuntimeError], patched: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def refuse(*_: Any, **__: Any) -> Iterator[None]:
        raise error("no way\nat all")
        yield

    patched.setattr(torch.cuda, "graph", refuse)
    streams: list[str] = []
    patched.setattr(torch.cuda, "set_stream", streams.append)
    found = decode_graphs.DecodeGraphs(forward, ROW)
    for _ in range(2):
        assert tokens_of(found.run(step(20))) == after(torch.arange(1, 21)).tolist()
    assert found.num_graphs == 0
    assert found.eager_because == "the step cannot be captured: no way"
    assert streams == ["current"], "where a capture cannot end, torch leaves its stream current"


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6),
    sharing=st.sampled_from(["all", "auto", "off"]),
    max_rows=st.integers(1, 24),
    extra_pages=st.integers(0, 12),
    eos_bias=st.sampled_from([-20.0, 1.0]),
    how=st.sampled_from(
        [
            {},
            {"temperature": 0.0},
            {"temperature": 0.7},
            {"top_k": 3},
            {"min_tokens": 5, "logit_bias": {1: 2.0, 3: -4.0}},
            {"frequency_penalty": 0.9, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
            {"regex": "a(c|d)?(e|dd){1,2}"} if find_spec("llguidance") else {},
        ]
    ),
    run_ahead=st.booleans(),
    guesses=st.booleans(),
)
def test_replayed_steps_draw_what_steps_without_graphs_draw(
    lengths: list[tuple[int, int]],
    sharing: str,
    max_rows: int,
    extra_pages: int,
    eos_bias: float,
    how: dict[str, Any],
    run_ahead: bool,
    guesses: bool,
) -> None:
    """A whole run on graphs that compute again when replayed, whatever comes and goes."""
    params = SamplingParams(max_tokens=12, seed=5, **how)
    requests = [
        Request(
            f"p{i}",
            np.array([2, 3, 4, 5, 6, 7][: 2 + i % 5] + [8 + i] * length, np.int32),
            samples,
            min(samples, 1) if params.temperature == 0 else samples,
            12,
        )
        for i, (length, samples) in enumerate(lengths)
    ]
    plan = compile_plan(requests, token_bytes=64, num_layers=1, sharing=sharing)  # type: ignore[arg-type]
    model = HistoryModel(eos_bias=eos_bias)
    pages = max(plan.get_single_row_pages(i, 3) for i in range(len(requests))) + extra_pages
    cache = model.new_cache(pages, 3)

    def planned(batch: Batch) -> Tensor:
        batch.levels.state.work(WorkShape(len(batch.tokens_T), 1, 1, 3, False))
        return model.forward(batch)

    want = expected(model, plan, params)
    speculation = SpeculationOptions(lambda *_: Foreseeing(want), 5) if guesses else None
    with faked():
        found, passes = decode_graphs.DecodeGraphs(planned, ROW), PrefillGraphs(planned)
        scheduler = scheduler_of(
            plan,
            model,
            cache,
            params,
            max_rows=max_rows,
            run_ahead=run_ahead,
            graphs=found,
            prefills=passes,
            speculation=speculation,
        )
        got = tokens_by_key(drain(scheduler))
    assert found.eager_because is None and passes.eager_because is None
    assert got == want


def test_passes_beside_a_capture_are_not_measured(patched: pytest.MonkeyPatch) -> None:
    """A capture takes as long as ten passes, which says nothing of passes."""
    model, measured = HistoryModel(eos_bias=-20.0), list[bool]()

    class Noting(Always):
        def measure(self, tokens: int, keys: int, seconds: float, *, verified: bool) -> None:
            measured.append(verified)

    params = SamplingParams(max_tokens=40, seed=5)
    requests = [
        Request(f"p{i}", np.array([2, 3, 4, 8 + i], np.int32), 6, 6, 40 - 7 * i) for i in range(3)
    ]
    plan = compile_plan(requests, token_bytes=64, num_layers=1)
    want = expected(model, plan, params)

    def planned(batch: Batch) -> Tensor:
        batch.levels.state.work(WorkShape(len(batch.tokens_T), 1, 1, 3, False))
        return model.forward(batch)

    found = decode_graphs.DecodeGraphs(planned, ROW)
    speculation = SpeculationOptions(lambda *_: Foreseeing(want), 5, Noting(150.0, 1e9))
    scheduler = scheduler_of(
        plan,
        model,
        model.new_cache(99, 3),
        params,
        graphs=found,
        speculation=speculation,
        run_ahead=True,
    )
    was_fresh = False
    while scheduler.has_work:
        captured, num = found.num_captured, len(measured)
        scheduler.step()
        is_fresh = found.num_captured > captured
        assert len(measured) == num or not (is_fresh or was_fresh)
        was_fresh = is_fresh
    assert any(measured) and found.num_captured > 1


class Foreseeing(FunctionDrafter):
    """Guesses some of what samples will draw, and some of what they will not."""

    def __init__(self, samples: Mapping[tuple[str, int], tuple[int, ...]]) -> None:
        rng = np.random.default_rng(0)

        def guess(contexts: Sequence[DraftContext]) -> list[list[int]]:
            found = []
            for context in contexts:
                tokens = samples[context.prompt_id, context.sample_index]
                right = list(tokens[len(context.tokens) :])[: int(rng.integers(6))]
                found.append([*right, int(rng.integers(24))])
            return found

        super().__init__(guess)


def test_tensors_of_one_piece_of_memory_are_fetched_as_one() -> None:
    """As the results of a draw are: tokens and two floats side by side in 16 bytes a row."""
    whole = torch.arange(14).view(7, 2) * 10**12
    floats = whole.view(torch.float32)
    apart = torch.rand(3, 2)
    tensors = [
        whole[:5, 0],
        floats[:5, 2],
        floats[1:, 3],
        apart.T,
        apart[:0],
        whole[0, 0].expand(4),
    ]
    copied: list[int] = []

    def copy(raw: Tensor) -> Tensor:
        copied.append(len(raw))
        return raw.clone()

    copies = transfer.copy_together(tensors, copy)
    assert copied == [whole.nbytes, apart.nbytes]
    wanted = [tensor.clone() for tensor in tensors]
    whole.zero_()
    apart.zero_()
    for found, want in zip(copies, wanted, strict=True):
        assert found.dtype == want.dtype and found.numpy().tobytes() == want.numpy().tobytes()


def test_arrays_that_travel_together_arrive_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    monkeypatch.setattr(
        transfer, "to_device", lambda array, _: torch.from_numpy(np.ascontiguousarray(array))
    )
    for _ in range(200):
        arrays: list[NDArray[Any]] = []
        for _ in range(int(rng.integers(1, 6))):
            shape = tuple(rng.integers(0, 5, rng.integers(1, 4)))
            array = (rng.random(shape) * 100).astype(rng.choice(["i4", "i8", "f4", "f8", "u1"]))
            arrays.append(array.T if rng.random() < 0.3 else array)
        tensors = transfer.to_device_together(arrays, torch.device("cuda"))
        for array, tensor in zip(arrays, tensors, strict=True):
            assert np.array_equal(tensor.numpy(), array)
            assert tensor.dtype == torch.from_numpy(np.ascontiguousarray(array)).dtype


def test_tensors_are_filled_from_memory_that_is_used_again() -> None:
    rng = np.random.default_rng(0)
    staging = transfer.StagingBuffer(turns=3)
    for dtype in (torch.int32, torch.int64) * 20:
        target = torch.full((4, 30), -1, dtype=dtype)
        wanted = rng.integers(0, 99, int(rng.integers(1, 121)))

        def write(flat: NDArray[Any], wanted: NDArray[np.int64] = wanted) -> None:
            flat[:] = wanted

        staging.fill(target, len(wanted), write)
        flat = target.view(-1)
        assert flat[: len(wanted)].tolist() == wanted.tolist()
        assert (flat[len(wanted) :] == -1).all(), "the rest is left alone"


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tensors_that_are_sent_beside_the_work_arrive_whole(kind: str) -> None:
    """Their memory on the host and on the device is used again while others are on their way."""
    device = torch.device(kind)
    size = 2**22 if kind == "cuda" else 2**10
    busy = torch.rand(2**11, 2**11, device=device) if kind == "cuda" else torch.rand(9, 9)
    found, reserved = [], 0
    for number in range(40):
        staging = transfer.StagingBuffer(turns=2)
        for turn in range(3):
            busy = (busy @ busy).clamp(-1, 1)

            def write(flat: NDArray[np.int32], mark: int = 3 * number + turn) -> None:
                flat[:] = mark

            sent = staging.send((size // 64, 64), torch.int32, device, write)
            found.append((torch.stack([sent.min(), sent.max()]), 3 * number + turn))
        if kind == "cuda":
            if number == 9:
                torch.cuda.synchronize()
                reserved = torch.cuda.memory_reserved()
            del sent
    assert all(ends.tolist() == [mark, mark] for ends, mark in found)
    if kind == "cuda":  # each run has a staging of its own
        assert torch.cuda.memory_reserved() <= reserved + 2**25
