"""The share of time in which a GPU works, from events recorded before and after each pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

if TYPE_CHECKING:
    from treegen.model.model import Model


class PassTimer:
    """The passes of a run, in the order of their launch. A replay of a CUDA graph is one pass."""

    def __init__(self) -> None:
        self._passes: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def wrap_timed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same function, recording each call as one more pass."""

        def call(*args: Any, **options: Any) -> Any:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            result = run(*args, **options)
            end.record()
            self._passes.append((begin, end))
            return result

        return call

    def share(self) -> float | None:
        """Return the time within passes over the time from first to last; None without passes.

        Copies between passes, and steps while they are captured, count as idle time.
        """
        if not self._passes:
            return None
        first, last = self._passes[0][0], self._passes[-1][1]
        last.synchronize()
        inside: float = sum(begin.elapsed_time(end) for begin, end in self._passes)
        whole: float = first.elapsed_time(last)
        return inside / whole


@contextmanager
def time_passes(model: Model) -> Iterator[PassTimer]:
    """Record the passes of a model on a GPU while the context is open, replayed or not."""
    clock = PassTimer()
    if model.device.type != "cuda":
        yield clock
        return
    replay = torch.cuda.CUDAGraph.replay
    with (
        patch.object(torch.cuda.CUDAGraph, "replay", clock.wrap_timed(replay)),
        patch.object(model, "forward", clock.wrap_timed(model.forward)),
    ):
        yield clock
