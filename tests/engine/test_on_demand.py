"""A run of a plan whose work comes in parts draws what the whole run draws."""

import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from treegen import LLM, Node, SamplingParams
from treegen.common.outputs import Completion
from treegen.engine.on_demand_stream import OnDemandStream
from treegen.errors import InputError
from treegen.prompts.plan.requests import build_sample_requests, build_score_requests

TREE = Node(
    "Solve it.\n",
    children=[
        Node(
            f"{'Some words that are shared. ' * shared}",
            children=[
                Node(f"Question {shared}{number}?", id=f"{shared}{number}", samples=samples)
                for number, samples in enumerate((7, 1, 12))
            ],
            samples=0,
        )
        for shared in (1, 9)
    ],
    samples=0,
)
PAIRS = [
    ("The sun is", " warm"),
    ("The sun is", " wide"),
    ("The sun is warm", " and"),
    ("Far", "away"),
]


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(str(tiny), memory="1MiB", max_rows=6, prefill_chunk=50)


def _known(found: Sequence[Completion]) -> dict[tuple[str, int], tuple[int, ...]]:
    pairs = {(each.prompt_id, each.sample_index): each.tokens for each in found}
    assert len(pairs) == len(found), "a sample came twice"
    return pairs


def _draw(stream: OnDemandStream, parts: list[tuple[int, list[int]]]) -> list[Completion]:
    """Deal parts one after another, with steps between them, and some taken back on the way."""
    found: list[Completion] = []
    with stream:
        while stream.has_work or parts:
            if parts and (random.random() < 0.4 or not stream.has_work):
                stream.add_work([parts.pop() for _ in range(random.randint(1, min(3, len(parts))))])
            if random.random() < 0.2:
                parts += stream.withdraw(random.randint(1, 9))
            if stream.has_work:
                found += stream.step()
                stream.scheduler.check()
                stream.levels()
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_parts_draw_the_samples_of_the_whole(llm: LLM, seed: int, temperature: float) -> None:
    params = SamplingParams(max_tokens=20, seed=seed, temperature=temperature)
    whole = llm.run(TREE, params)
    requests = build_sample_requests(TREE, llm.tokenizer, params, llm.spec)
    parts = []
    for place, request in enumerate(requests):
        indices = list(range(request.samples))
        if temperature == 0.0:
            parts.append((place, indices))
            continue
        random.shuffle(indices)
        while indices:
            cut = random.randint(1, len(indices))
            parts.append((place, indices[:cut]))
            indices = indices[cut:]
    random.shuffle(parts)
    stream = llm.open_planned_stream(llm.plan(TREE, params), [params] * len(requests))
    found = _draw(stream, parts)
    assert _known(found) == _known(whole.completions)
    assert stream.usage.prompt_tokens_unshared == sum(
        len(requests[int(key)].tokens) * request.samples
        for key, request in enumerate(whole.plan.requests)
    )
    assert llm.cache.pool.num_used == 0


@pytest.mark.parametrize("seed", range(3))
def test_parts_have_the_scores_of_the_whole(llm: LLM, seed: int) -> None:
    random.seed(seed)
    pairs = PAIRS + [("The sun is warm and wide", f" w{index}") for index in range(12)]
    expected = llm.score(pairs)
    plan = llm._plan(build_score_requests(pairs, llm.tokenizer, llm.spec))
    stream = llm.open_planned_stream(plan, [SamplingParams()] * len(pairs))
    parts: list[tuple[int, list[int]]] = [(place, []) for place in range(len(pairs))]
    random.shuffle(parts)
    assert _draw(stream, parts) == []
    for index, score in enumerate(expected):
        assert stream.scores[index].tokens == score.tokens
        assert stream.scores[index].logprobs == pytest.approx(score.logprobs, abs=1e-5)


def test_scores_that_the_running_pass_computes_are_not_withdrawn(tiny: Path) -> None:
    """Another worker would compute them again."""
    llm = LLM(str(tiny), memory="1MiB", run_ahead=True)
    plan = llm._plan(build_score_requests(PAIRS, llm.tokenizer, llm.spec))
    with llm.open_planned_stream(plan, [SamplingParams()] * len(PAIRS)) as stream:
        stream.add_work((place, []) for place in range(len(PAIRS)))
        withdrawn: list[int] = []
        while stream.has_work:
            stream.step()
            withdrawn += [place for place, _ in stream.withdraw(1)]
        assert sorted([*stream.scores, *withdrawn]) == list(range(len(PAIRS)))
        assert stream.usage.prompt_tokens_unshared == sum(
            len(plan.requests[place].tokens) for place in stream.scores
        )


def test_scores_are_read_between_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = llm._plan(build_score_requests(PAIRS, llm.tokenizer, llm.spec))
    in_step, has_read = threading.Event(), threading.Event()
    with llm.open_planned_stream(plan, [SamplingParams()] * len(PAIRS)) as stream:
        stream.add_work((place, []) for place in range(len(PAIRS)))
        step = stream.scheduler.step

        def slow_step() -> list[Completion]:
            in_step.set()
            assert not has_read.wait(0.1)
            return step()

        def read() -> None:
            assert in_step.wait(60) and stream.scores is not None
            has_read.set()

        monkeypatch.setattr(stream.scheduler, "step", slow_step)
        reader = threading.Thread(target=read)
        reader.start()
        stream.step()
        reader.join()
    assert has_read.is_set()


def test_what_prompts_share_is_computed_once_though_work_comes_in_rounds(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, seed=2)
    with llm.open_stream(TREE, params) as stream:
        computed = []
        for index in range(3):
            stream.add_work([(place, [index]) for place in (0, 2, 3, 5)])
            while stream.has_work:
                stream.step()
            computed.append(stream.usage.prompt_tokens_computed)
        own = sum(
            len(stream.plan.requests[place].tokens) - next(stream.plan.path(place)).start
            for place in (0, 2, 3, 5)
        )
    assert computed[1] - computed[0] == computed[2] - computed[1] == own < computed[0]
    with llm.stream(TREE, params) as stream, pytest.raises(InputError, match=r"LLM\.open_stream"):
        stream.add_work([(0, [0])])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("sample", [None, 1])
def test_samples_are_cancelled_by_the_prompt_of_the_plan(
    llm: LLM, temperature: float, sample: int | None
) -> None:
    params = SamplingParams(max_tokens=20, seed=1, temperature=temperature, ignore_eos=True)
    with llm.open_stream(TREE, params) as stream:
        first, second = stream.plan.requests[2].id, stream.plan.requests[0].id
        stream.add_work([(2, [0, 1]), (0, [1]), (0, [0])])
        for _ in range(3):
            stream.step()
        stream.cancel(second, sample)
        found = [(each.prompt_id, each.sample_index) for each in stream]
    kept = [(second, 0)] if sample is not None else []
    assert sorted(found) == sorted([(first, 0), (first, 1), *kept])
    assert llm.cache.pool.num_used == 0
