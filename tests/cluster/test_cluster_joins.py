"""A GPU that joins the Ray cluster during a run takes work."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from treegen import LLM, Cluster, Node, SamplingParams
from treegen.cluster.places import Places
from treegen.cluster.worker import loading
from treegen.options import EngineOptions

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs ray"),
]
NODE = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Ray cluster with one node, which has a GPU as far as Ray knows."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster as RayCluster

    started: Any = RayCluster(
        initialize_head=True, head_node_args=NODE | {"include_dashboard": False}
    )
    yield started
    started.shutdown()


def test_a_gpu_that_joins_takes_work(
    nodes: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "treegen.cluster.cluster.loading", lambda options, device: loading(options, "cpu")
    )
    tree = Node("Go.", samples=0, children=[
        Node(f"Question {i}?", id=str(i), samples=40) for i in range(40)
    ])  # fmt: skip
    params = SamplingParams(max_tokens=150, seed=1, ignore_eos=True)
    options = EngineOptions(model=str(tiny), memory="4MiB", max_rows=8)
    found = {}
    with Cluster.at(Places("cuda", None, address=nodes.address), options) as cluster:
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
