"""Workers of Ray that take images: sent with the job, each encoded once by a worker."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from image_cases import far, image_question, table_of, tree_of
from tiny_images import picture, save_tiny_vision_model

from treegen import LLM, CapacityError, Cluster, Node, SamplingParams
from treegen.llm.cluster.jobs import PackedPlan, begin_sampling, begin_with_images, pickle_job
from treegen.llm.cluster.worker import Worker, WorkerInfo, from_checkpoint
from treegen.prompts.images.table import ImageTable
from treegen.prompts.plan.requests import build_sample_requests
from treegen.search import SearchNode

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
OPTIONS: dict[str, Any] = {"images": True, "memory": "16MiB", "max_rows": 8}
PARAMS = SamplingParams(max_tokens=6, seed=3, ignore_eos=True)


@pytest.fixture(scope="module", name="directory")
def _directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision_model(tmp_path_factory.mktemp("model"), "qwen2_vl", seed=1)


@pytest.fixture(scope="module", name="llm")
def _llm(directory: Path) -> LLM:
    return LLM(str(directory), device="cpu", **OPTIONS)


@pytest.fixture(scope="module", name="cluster")
def _cluster(directory: Path) -> Iterator[Cluster]:
    with Cluster(str(directory), workers=2, **OPTIONS) as started:
        yield started


@pytest.mark.soak
def test_workers_draw_and_score_as_one_llm(llm: LLM, cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "b.png"
    picture(2, 30, 61).save(file)
    root, prompts = tree_of(picture(1), str(file))
    one, many = llm.run(root, PARAMS), cluster.run(root, PARAMS)
    assert [c.token_ids for c in many.completions] == [c.token_ids for c in one.completions]
    for actual, expected in zip(many.completions, one.completions, strict=True):
        assert far(actual.logprobs, expected.logprobs) < 1e-5
    assert 2 <= many.usage.images_encoded <= 4
    pairs = [(prompts["top"], text) for text in (" yes", " no", " a house")]
    for scored, expected_score in zip(cluster.score(pairs), llm.score(pairs), strict=True):
        assert far(scored.logprobs, expected_score.logprobs) < 1e-5


@pytest.mark.soak
def test_workers_search_below_images(llm: LLM, cluster: Cluster) -> None:
    async def look_twice(root: SearchNode) -> str:
        """Draw below an image, and below one that is appended."""
        from PIL import Image

        (first,) = await root.sample(1)
        other = Image.new("RGB", (40, 28), (200, 10, 10))
        (second,) = await first.extend([{"type": "image", "image": other}]).sample(1)
        return f"{first.text}|{second.text}"

    problems = [(f"p{i}", image_question(picture(30 + i % 3), "Why?")) for i in range(6)]
    want = llm.search(look_twice, problems, PARAMS)
    got = cluster.search(look_twice, problems, PARAMS)
    assert [each.error for each in got] == [None] * 6
    assert [each.value for each in got] == [each.value for each in want]


def test_a_worker_takes_images_with_its_job(llm: LLM, directory: Path) -> None:
    """As in a process of its own, to which the job is sent."""
    tree = Node(
        samples=0,
        children=[
            Node(image_question(picture(seed), text)) for seed in (50, 51) for text in ("a", "b")
        ],
    )
    want = llm.run(tree, PARAMS)
    requests = build_sample_requests(tree, llm.tokenizer, PARAMS, llm.spec, llm.images)
    table, plan = table_of(llm), llm.engine.plan(requests)
    images = table.export_images([segment.tokens for segment in plan.segments])
    assert all(isinstance(image.source, bytes) for image in images)
    sampling = partial(begin_sampling, PackedPlan.of(plan, [PARAMS] * 4))
    job = partial(begin_with_images, images, sampling)
    worker = Worker()
    loaded = worker.load(
        from_checkpoint, {"model": str(directory), "device": "cpu", **OPTIONS}, (), 1
    )
    assert isinstance(loaded, WorkerInfo), loaded
    for number in range(2):  # the second time nothing is encoded again
        worker.begin(number, pickle_job(job))
        outcome = worker.turn(number, [(key, [0]) for key in range(4)], 0, 60.0, {})
        assert outcome.failure is None
        assert outcome.usage.images_encoded == (0 if number else 2)
        drawn = {key: done for key, _, done in outcome.results}
        assert [drawn[key].token_ids for key in range(4)] == [c.token_ids for c in want.completions]
        worker.end(number)


def test_an_image_has_the_same_ids_where_it_is_sent(llm: LLM) -> None:
    buffer = io.BytesIO()
    picture(41).save(buffer, "PNG")
    here = table_of(llm)
    tokens = llm.plan(Node(image_question(buffer.getvalue()))).requests[0].tokens
    there = ImageTable(here._processor, here.placeholder, here.vocab_size)
    for _ in range(2):
        there.import_images(here.export_images([tokens]))
    (piece, _), *_ = here.pieces(tokens)
    (sent, _), *_ = there.pieces(tokens)
    assert (sent.digest, sent.first) == (piece.digest, piece.first)
    assert there.inputs(sent).keys() == here.inputs(piece).keys()
    other = ImageTable(here._processor, here.placeholder, here.vocab_size)
    other._allocate_ids = lambda number, num: piece.first  # type: ignore[method-assign]
    other.add(picture(42))
    with pytest.raises(CapacityError, match="create a new Cluster"):
        other.import_images(here.export_images([tokens]))
