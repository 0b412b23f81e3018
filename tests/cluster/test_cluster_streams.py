"""Streams of workers: threads that share one take turns, and a cluster may be gone before one."""

import gc
import threading
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from treegen import Cluster, Node, SamplingParams
from treegen.llm.cluster.streams import ClusterStream


def test_work_is_added_between_steps() -> None:
    in_step, is_added = threading.Event(), threading.Event()

    def step() -> list[Any]:
        in_step.set()
        assert not is_added.wait(0.1)
        return []

    run: Any = SimpleNamespace(step=step, add_work=lambda *_: is_added.set(), close=lambda: None)
    plan: Any = SimpleNamespace()
    with ClusterStream(plan, run) as stream:

        def add() -> None:
            assert in_step.wait(60)
            stream.add_work([])

        adder = threading.Thread(target=add)
        adder.start()
        stream.step()
        adder.join()
    assert is_added.is_set()


@pytest.mark.soak
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
@pytest.mark.parametrize("is_closed", [True, False])
def test_a_cluster_may_be_closed_or_dropped_before_its_stream(tiny: Path, is_closed: bool) -> None:
    model = Cluster(str(tiny), workers=1, memory="4MiB")
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)
    with model.stream(Node("a", samples=4), params) as stream:
        if is_closed:
            model.close()
            assert not list(stream) and not stream.step() and not stream.take_finished()
        else:
            del model
            gc.collect()
            assert len(list(stream)) == 4
