"""CUDA graphs without a GPU: capturing is faked, and a replay computes again."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from treegen.common import device as transfer
from treegen.engine.compute import decode_graphs, prefill_graphs
from treegen.engine.compute.decode_step import DecodeStep
from treegen.model.batch import Batch
from treegen.ops.attention.gpu import attend
from treegen.ops.sampling import draw
from treegen.ops.sampling.draw import Draws


class FakeGraph:
    """Replays by computing again, into the tensors that were there when it was captured."""

    again: Callable[[], None]
    pools: ClassVar[list[Any]] = []  # that graphs were captured with

    def replay(self) -> None:
        self.again()


def tensors_of(out: Draws | Tensor) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    return [out.tokens_PN, out.logprobs_PN, out.lse_P]


@contextlib.contextmanager
def faked() -> Iterator[pytest.MonkeyPatch]:
    """Capturing computes nothing, as on a GPU; what is captured holds garbage until replayed."""
    capturing: list[FakeGraph] = []
    last: list[Draws | Tensor] = []
    numbers = itertools.count()

    @contextlib.contextmanager
    def capture(
        graph: FakeGraph, pool: Any, stream: Any, capture_error_mode: str
    ) -> Iterator[None]:
        assert stream == "stream"
        capturing.append(graph)
        FakeGraph.pools.append(pool)
        yield
        capturing.clear()

    def computes_or_captures(owner: type) -> Callable[[Any, Any], Draws | Tensor]:
        compute = owner._compute  # type: ignore[attr-defined]

        def compute_or_capture(self: Any, static: DecodeStep | Batch) -> Draws | Tensor:
            if not capturing:
                last[:] = [compute(self, static)]
                return last[0]
            (before,) = last
            if isinstance(before, Tensor):
                out: Draws | Tensor = before.clone()
            else:
                tokens_PN, logprobs_PN, lse_P = (each.clone() for each in tensors_of(before))
                out = Draws(tokens_PN, logprobs_PN, lse_P, None, None)

            def again() -> None:
                for place, tensor in zip(
                    tensors_of(out), tensors_of(compute(self, static)), strict=True
                ):
                    place.copy_(tensor)

            for tensor in tensors_of(out):
                tensor.fill_(-(2**30))
            capturing[0].again = again
            return out

        return compute_or_capture

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr(torch.cuda, "Stream", lambda device: "stream")
        patch.setattr(torch.cuda, "current_stream", lambda device: "current")
        patch.setattr(torch.cuda, "set_stream", lambda stream: None)
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(numbers)))
        patch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *_: None, raising=False)
        patch.setattr(torch.cuda, "graph", capture)
        for owner in (decode_graphs.DecodeGraphs, prefill_graphs.PrefillGraphs):
            patch.setattr(owner, "_compute", computes_or_captures(owner))
        for module in (decode_graphs, prefill_graphs):
            patch.setattr(module, "weak_ref_tensor", lambda tensor: tensor)
        patch.setattr(attend, "_INTERPRETED", True)  # so that it plans on a CPU
        patch.setattr(
            draw,
            "AsyncHostCopy",
            lambda tensors: transfer.AsyncHostCopy([t.clone() for t in tensors]),
        )
        yield patch
