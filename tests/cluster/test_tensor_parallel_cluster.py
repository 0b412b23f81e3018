"""A worker of a cluster that is several processes, which compute one model together."""

import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from treegen import LLM, Cluster, Node, SamplingParams
from treegen.errors import InputError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs ray"),
]
TREE = Node(
    "Solve it.\n",
    children=[Node(f"Question {i}?", id=f"q{i}", samples=6) for i in range(12)],
    samples=0,
)
PARAMS = SamplingParams(max_tokens=40, seed=3)


def _followers(pid: int) -> list[int]:
    """The processes that a worker has started to compute with it."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"treegen.llm.follower" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


@pytest.mark.soak
def test_a_group_draws_what_one_process_draws_also_after_a_rank_is_killed(tiny: Path) -> None:
    want = LLM(str(tiny), memory="4MiB", max_rows=8).run(TREE, PARAMS)
    how: dict[str, Any] = {"memory": "4MiB", "max_rows": 8, "tensor_parallel_size": 2}
    with Cluster(str(tiny), workers=1, **how) as cluster:
        got = cluster.run(TREE, PARAMS)
        assert [c.tokens for c in got.completions] == [c.tokens for c in want.completions]
        loaded = cluster._pool.slots[0].loaded
        assert loaded is not None
        found = {}
        with cluster.stream(TREE, PARAMS) as stream:
            for number, completion in enumerate(stream):
                if number == 2:
                    (follower,) = _followers(loaded.pid)
                    os.kill(follower, signal.SIGKILL)
                found[completion.prompt_id, completion.sample_index] = completion.tokens
        assert found == {(c.prompt_id, c.sample_index): c.tokens for c in want.completions}
        assert cluster._pool.slots[0].num_processes == 2


def test_gpus_that_make_no_whole_groups_are_refused(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    with pytest.raises(InputError, match=r"into groups of 3 \(--tp\); request 3"):
        Cluster(str(tiny), gpus=4, tensor_parallel_size=3)
