"""GPUs that join the Ray cluster during a run, or leave it."""

import importlib
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from treegen import LLM, Cluster, Node, SamplingParams, WorkerError
from treegen.llm.cluster.placement import Placement
from treegen.llm.cluster.worker import make_llm_options
from treegen.model.options import EngineOptions

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs ray"),
]
NODE = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Ray cluster with one node, which has a GPU as far as Ray knows; workers use the CPU."""
    monkeypatch.setattr(
        "treegen.llm.cluster.cluster.make_llm_options",
        lambda options, device: make_llm_options(options, "cpu"),
    )
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster as RayCluster

    started: Any = RayCluster(
        initialize_head=True, head_node_args=NODE | {"include_dashboard": False}
    )
    yield started
    started.shutdown()


def test_a_gpu_that_joins_takes_work(nodes: Any, tiny: Path) -> None:
    tree = Node(
        "Go.",
        samples=0,
        children=[Node(f"Question {i}?", id=str(i), samples=40) for i in range(40)],
    )
    params = SamplingParams(max_tokens=150, seed=1, ignore_eos=True)
    options = EngineOptions(model=str(tiny), memory="4MiB", max_rows=8)
    found = {}
    with Cluster.at(Placement("cuda", None, address=nodes.address), options) as cluster:
        assert cluster.num_workers == 1
        nodes.add_node(**NODE)
        with cluster.stream(tree, params) as stream:
            while stream.has_work and sum(w.tokens > 0 for w in stream.workers()) < 2:
                found.update({(c.prompt_id, c.sample_index): c.tokens for c in stream.step()})
            assert stream.has_work and cluster.num_workers == 2
    few = Node("Go.", samples=0, children=[Node("Question 0?", id="0", samples=40)])
    for each in LLM(str(tiny), memory="4MiB").run(few, params).completions:
        key = (each.prompt_id, each.sample_index)
        assert found.get(key, each.tokens) == each.tokens


def test_a_cluster_that_loses_all_its_gpus_ends_the_run(
    nodes: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = Node("Go.", children=[Node("Question?", id="0", samples=400)], samples=0)
    params = SamplingParams(max_tokens=150, seed=1, ignore_eos=True)
    options = EngineOptions(model=str(tiny), memory="4MiB", max_rows=8)
    # This process stays on the node whose GPU somebody else has.
    ray: Any = importlib.import_module("ray")
    ray.init(address=nodes.address, log_to_driver=False)
    try:
        other = ray.remote(num_cpus=0, num_gpus=1)(_Idle).remote()
        ray.get(other.__ray_ready__.remote())
        node = nodes.add_node(**NODE)
        while not ray.available_resources().get("GPU"):
            time.sleep(0.1)
        with Cluster.at(Placement("cuda", None, address=nodes.address), options) as cluster:
            assert cluster.num_workers == 1
            stream = cluster.stream(tree, params)
            assert next(stream).num_tokens == 150
            monkeypatch.setattr("treegen.llm.cluster.worker_pool.PATIENCE", 3.0)
            nodes.remove_node(node)
            with pytest.raises(WorkerError, match=r"no worker is left \(Ray found no room"):
                list(stream)
    finally:
        ray.shutdown()


class _Idle:
    """Has a GPU and does nothing with it."""
