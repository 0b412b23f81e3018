"""Threads that share the stream of a run on workers take turns."""

import threading
from types import SimpleNamespace
from typing import Any

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
