"""Which prefill passes are captured and which replayed; without a GPU, capturing is faked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from faked_graphs import faked
from torch import Tensor

from treegen.common.device import StagingBuffer
from treegen.engine.compute import prefill_graphs
from treegen.engine.compute.prefill_graphs import PrefillGraphs
from treegen.model.batch import Batch
from treegen.ops.attention import HostLevel, prepare_host
from treegen.ops.attention.gpu.state import StaticState
from treegen.ops.attention.gpu.work_units import WorkShape
from treegen.ops.cache.pool import LayerKV

CPU = torch.device("cpu")
POOL = LayerKV(torch.zeros(2, 64, 2, 8), torch.zeros(2, 64, 2, 8))


@pytest.fixture
def patched() -> Iterator[pytest.MonkeyPatch]:
    with faked() as patch:
        yield patch


class Model:
    """Plans attention as a layer would. Its logits tell the token, its position and its slot."""

    def __init__(self) -> None:
        self.eager = 0

    def forward(self, batch: Batch) -> Tensor:
        self.eager += 1
        batch.levels.state.work(WorkShape(len(batch.tokens_T), 2, 4, 64, False))
        at = batch.logits_at_S
        return torch.stack([x[at] for x in (batch.tokens_T, batch.positions_T, batch.slots_T)], 1)


def a_pass(rng: np.random.Generator, lengths: Sequence[int], num_wanted: int) -> Batch:
    """Pieces of some lengths below a prefix of 70 keys."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    num, zero = int(offsets[-1]), np.zeros(1, dtype=np.int64)
    shared = HostLevel(zero, zero + num, np.array([[0, 1]]), zero + 70, zero, causal=False)
    start, stop = offsets[:-1], offsets[1:]
    pages = rng.integers(1, 2, (len(lengths), 1))
    own = HostLevel(start, stop, pages, stop - start, start * 0 + 70, causal=True)
    tokens, positions, slots = (torch.from_numpy(rng.integers(1, 64, num)) for _ in range(3))
    wanted = torch.from_numpy(np.sort(rng.choice(num, min(num_wanted, num), replace=False)))
    levels = prepare_host([shared, own], positions, CPU, "triton")
    return Batch(tokens, positions, slots, wanted, levels, [POOL])


def want_of(batch: Batch) -> list[list[int]]:
    columns = (batch.tokens_T, batch.positions_T, batch.slots_T)
    found: list[list[int]] = torch.stack([x[batch.logits_at_S] for x in columns], 1).tolist()
    return found


def test_passes_of_any_size_give_what_they_give_eagerly(patched: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    model = Model()
    found = PrefillGraphs(model.forward)
    for _ in range(150):
        lengths = rng.integers(1, int(rng.choice([4, 30, 200])), int(rng.integers(1, 6))).tolist()
        batch = a_pass(rng, lengths, int(rng.integers(0, 90)))
        assert found.run(batch).tolist() == want_of(batch)
    for entry in found._graphs:
        batch = a_pass(rng, [3], 1)
        with torch.inference_mode():
            prefill_graphs._fill(entry.memory, len(entry.batch.tokens_T), batch, StagingBuffer(1))
        for tensor in (entry.batch.tokens_T, entry.batch.positions_T, entry.batch.slots_T):
            assert not tensor[3:].any(), "the rest writes to page 0"
    assert found.eager_because is None and found.num_graphs > 3


def test_a_size_is_captured_when_it_comes_again(patched: pytest.MonkeyPatch) -> None:
    rng, model = np.random.default_rng(1), Model()
    found = PrefillGraphs(model.forward)
    found.run(a_pass(rng, [20], 1))
    assert found.num_graphs == 0
    found.run(a_pass(rng, [25], 1))
    assert [len(entry.batch.tokens_T) for entry in found._graphs] == [32]
    for length in (17, 30, 9, 32):  # 9 tokens go through the graph of 32
        batch = a_pass(rng, [length], 1)
        assert found.run(batch).tolist() == want_of(batch)
    assert found.num_graphs == 1
    found.run(a_pass(rng, [300], 1))
    found.run(a_pass(rng, [5000], 1))
    assert found.num_graphs == 1


def test_sizes_whose_passes_fit_no_graph_are_captured_ever_more_rarely(
    patched: pytest.MonkeyPatch,
) -> None:
    patched.setattr(StaticState, "load", lambda *_: False)
    rng, model = np.random.default_rng(2), Model()
    found = PrefillGraphs(model.forward)
    for _ in range(60):
        found.run(a_pass(rng, [20], 1))
    assert found.num_graphs == 4  # after 2, 4, 8 and 16 more


def test_the_graph_that_was_used_last_is_dropped_last(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(prefill_graphs, "_MAX_GRAPHS", 2)
    rng = np.random.default_rng(3)
    found = PrefillGraphs(Model().forward)
    for length in (20, 20, 400, 400, 20, 1000, 1000):
        found.run(a_pass(rng, [length], 1))
    assert [len(entry.batch.tokens_T) for entry in found._graphs] == [32, 1024]


def test_where_nothing_can_be_captured_passes_run_eagerly(patched: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no way\nat all")

    patched.setattr(torch.cuda, "graph", refuse)
    rng = np.random.default_rng(4)
    found = PrefillGraphs(Model().forward)
    for _ in range(4):
        batch = a_pass(rng, [20, 3], 2)
        assert found.run(batch).tolist() == want_of(batch)
    assert found.num_graphs == 0 and found.eager_because == "the pass cannot be captured: no way"
