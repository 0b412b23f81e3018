"""Which decode steps are captured and which replayed; without a GPU, capturing is faked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from treegen import graphs, transfer
from treegen.attention.level import HostLevel
from treegen.attention.triton_state import Shape, TritonState
from treegen.attention.types import Prepared
from treegen.batch import Batch
from treegen.cache import LayerKV

triton = pytest.importorskip("treegen.attention.triton")

CPU = torch.device("cpu")
POOL = LayerKV(torch.zeros(2, 64, 2, 8), torch.zeros(2, 64, 2, 8))


class FakeGraph:
    """Replays nothing."""

    def pool(self) -> int:
        return 1

    def replay(self) -> None:
        pass


@pytest.fixture(autouse=True)
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(graphs, "_borrowed", lambda tensor: tensor)


def forward(batch: Batch) -> Tensor:
    """Plans attention as a layer would; the logits of a row are its token."""
    batch.levels.state.work(Shape(len(batch.tokens_T), 2, 4, 64, False))
    return batch.tokens_T[batch.logits_at_S, None].float()


def step(num_rows: int) -> Batch:
    """A decode step: a prefix of 100 keys that all rows share, and some keys of their own."""
    index = np.arange(num_rows)
    zero = np.zeros(1, dtype=np.int64)
    pages = np.array([[0, 1]])
    shared = HostLevel(zero, zero + num_rows, pages, zero + 100, zero, causal=False)
    own = HostLevel(index, index + 1, index[:, None], index % 5 + 1, index * 0 + 100, causal=False)
    tokens_T = torch.arange(1, num_rows + 1)
    state = TritonState((shared, own), CPU)
    levels = Prepared((), tokens_T, "triton", triton.Triton(), state, None)
    return Batch(tokens_T, tokens_T, tokens_T, tokens_T - 1, levels, [POOL], decode=True)


def sizes(found: graphs.DecodeGraphs) -> list[int]:
    return [entry.num_rows for entry in found._graphs]


def test_padding_and_a_replay_leave_the_live_rows_alone() -> None:
    found = graphs.DecodeGraphs(forward)
    assert found.run(step(100))[:, 0].tolist() == list(range(1, 101))
    assert sizes(found) == [112]
    batch = step(98)
    assert len(found.run(batch)) == 98
    (entry,) = found._graphs
    assert entry.inputs_3T[:, :98].tolist() == [list(range(1, 99))] * 3
    assert not entry.inputs_3T[:, 98:].any()
    assert batch.levels.kernels == ("triton", "triton")


def test_a_larger_graph_serves_until_its_padding_would_have_paid_for_a_capture() -> None:
    found = graphs.DecodeGraphs(forward)
    found.run(step(64))
    for _ in range(16):  # each of them wastes half a step
        found.run(step(32))
    assert sizes(found) == [64]
    found.run(step(32))
    found.run(step(32))
    assert sizes(found) == [64, 32]
    found.run(step(4))  # the others are more than four times as large
    assert sizes(found) == [64, 32, 4]


def test_the_graph_that_was_used_last_is_dropped_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_MAX_GRAPHS", 2)
    found = graphs.DecodeGraphs(forward)
    found.run(step(1))
    found.run(step(16))
    found.run(step(1))
    found.run(step(128))
    assert sizes(found) == [1, 128]


@pytest.mark.parametrize("error", [RuntimeError, torch.cuda.OutOfMemoryError])
def test_where_nothing_can_be_captured_steps_run_eagerly(
    error: type[RuntimeError], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def refuse(*_: Any, **__: Any) -> Iterator[None]:
        raise error("no way\nat all")
        yield

    monkeypatch.setattr(torch.cuda, "graph", refuse)
    found = graphs.DecodeGraphs(forward)
    for _ in range(2):
        assert found.run(step(20))[:, 0].tolist() == list(range(1, 21))
    assert found.num_graphs == 0
    assert found.off == "the step cannot be captured: no way"


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
