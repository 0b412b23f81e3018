"""`treegen bench cluster`: the same job on one worker and on two."""

from importlib.util import find_spec

import pytest
from cli_cases import Command

from treegen.bench.cluster import ClusterJob


def test_some_tokens_end_the_samples_of_a_job() -> None:
    params = ClusterJob(mean_tokens=64).params(320)
    assert len(params.stop_token_ids) == 5 and params.max_tokens == 256 and not params.stop
    assert ClusterJob(max_tokens=9).params(320).max_tokens == 9
    longer = ClusterJob(mean_tokens=500).params(320)  # than the vocabulary
    assert len(longer.stop_token_ids) == 1 and max(longer.stop_token_ids) < 320


@pytest.mark.soak
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
def test_it_times_the_same_samples_on_one_worker_and_on_two(
    treegen: Command,
) -> None:
    done = treegen(
        "bench cluster --workers 2 --problems 6 --samples 3 --prefix 40 --problem-tokens 8"
        " --mean-tokens 8 --memory 4MiB"
    )
    assert done.code == 0, done.err
    one, two = done.document["results"]
    assert (one["workers"], two["workers"]) == (1, 2)
    assert one["tokens"] == two["tokens"] > 18
    assert two["prompt_tokens"] <= one["prompt_tokens"] + 40 + 8
    assert done.document["startup_seconds"] > 0 and done.document["warm_up_seconds"] > 0
    assert "|      2|" in done.out


@pytest.mark.soak
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
def test_workers_share_the_samples_of_few_problems(treegen: Command) -> None:
    """Fewer problems than keep two workers busy, with many samples each."""
    done = treegen(
        "bench cluster --workers 2 --problems 1 --samples 64 --prefix 20"
        " --problem-tokens 8 --mean-tokens 8 --max-tokens 16 --memory 4MiB"
    )
    assert done.code == 0, done.err
    one, two = done.document["results"]
    assert one["tokens"] == two["tokens"] <= 64 * 16
    assert two["prompt_tokens"] == 2 * one["prompt_tokens"]
