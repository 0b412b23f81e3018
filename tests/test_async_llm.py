"""AsyncLLM: many callers at once get what LLM.generate gives, and none disturbs another."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from types import ModuleType
from typing import Any

import pytest
from shallow_demo import shallow_demo

from treegen import LLM, AsyncLLM, Completion, InputError, Node, SamplingParams
from treegen.errors import BusyError, InternalError, NumericsError, StoppedError
from treegen.prompts import grammars, stops
from treegen.search.budget import SearchUsage
from treegen.search.budgeted_search import BudgetedSearch
from treegen.search.live.backend import LiveBackend
from treegen.search.live.run import LiveRun, SampleDelta

pytestmark = pytest.mark.usefixtures("frozen_objects")
PROMPT = "Tom has 3 apples and buys 5 more. How many apples does Tom have?\n"
LONG = SamplingParams(max_tokens=600, ignore_eos=True)


def demo() -> LLM:
    return LLM(str(shallow_demo()), device="cpu", dtype="float32", memory="64MiB")


@pytest.fixture(scope="module")
def loaded() -> LLM:
    return demo()


@pytest.fixture(name="served")
def _served(loaded: LLM) -> Iterator[AsyncLLM]:
    with AsyncLLM(loaded, max_waiting=40) as found:
        yield found
    assert loaded.cache.pool.num_used == 0


def facts(completions: list[Completion]) -> list[tuple[Any, ...]]:
    return sorted((c.text, c.tokens, c.finish_reason, c.stop, c.seed) for c in completions)


def test_texts_of_the_shallow_model_vary(loaded: LLM) -> None:
    """Otherwise, equal texts would prove little."""
    params = SamplingParams(n=8, max_tokens=40, ignore_eos=True, seed=1)
    tokens = [c.tokens for c in loaded.generate([PROMPT], params)[0]]
    assert len(set(tokens)) == 8 and all(len(set(each)) > 10 for each in tokens)


def test_single_calls_get_the_samples_of_one_call() -> None:
    served = AsyncLLM(demo())  # an LLM counts the calls of a prompt, which the seeds follow from

    async def ask() -> list[Completion]:
        one = SamplingParams(max_tokens=24)
        calls = [served.generate([PROMPT], one) for _ in range(6)]
        return [found[0][0] for _, found in await asyncio.gather(*calls)]

    got = asyncio.run(ask())
    served.check()
    served.close()
    want = demo().generate([PROMPT], SamplingParams(n=6, max_tokens=24))[0]
    assert facts(got) == facts(want)
    # They were taken together: one step less would not do.
    assert served.usages()[0].decode_steps < 6 * 23


def test_a_call_with_a_seed_is_as_generate(served: AsyncLLM) -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=12, logprobs=2, stop=["s"])
    prompts = [PROMPT, "x", PROMPT]
    tokens, got = asyncio.run(served.generate(prompts, params))
    served.close()
    want = served.llm.generate(prompts, params)
    assert [[c.text for c in each] for each in got] == [[c.text for c in each] for each in want]
    for actual, expected in zip(chain(*got), chain(*want), strict=True):
        # A busy machine may share out its products among other numbers of threads.
        likely = [
            sum((alternatives for alternatives in c.top_logprobs), ()) for c in (actual, expected)
        ]
        assert [token for token, _ in likely[0]] == [token for token, _ in likely[1]]
        assert [p for _, p in likely[0]] == pytest.approx([p for _, p in likely[1]], abs=1e-4)
    assert len(tokens) == 3


def test_usage_counts_the_prompts_of_all_calls(served: AsyncLLM) -> None:
    async def ask() -> int:
        params = SamplingParams(n=3, max_tokens=2)
        (ids,), _ = await served.generate([PROMPT], params)
        await served.generate([PROMPT, PROMPT], params)
        async for _ in served.stream([PROMPT], SamplingParams(max_tokens=2)):
            pass
        await served.score([ids.tolist()])
        return len(ids)

    length = asyncio.run(ask())
    (usage,) = served.usages()
    assert usage.prompt_tokens_unshared == (3 + 6 + 1 + 1) * length
    assert usage.prompt_tokens_computed <= 2 * length


def test_names_of_vllm_get_advice(served: AsyncLLM) -> None:
    calls: list[Any] = [served.generate, served.stream]
    for call in calls:
        with pytest.raises(InputError, match="has no 'request_id'; remove the argument"):
            call([PROMPT], SamplingParams(), request_id="1")
        with pytest.raises(InputError, match=r"has no 'sampling_params'; did you mean params=\?"):
            call([PROMPT], sampling_params=SamplingParams())
    anyway: dict[str, Any] = {"lora_request": None, "priority": 0, "trace_headers": None}
    _, found = asyncio.run(served.generate([PROMPT], SamplingParams(max_tokens=2), **anyway))
    assert len(found[0]) == 1
    with pytest.raises(InputError, match="AsyncLLM has no abort: cancel the task"):
        served.abort  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(served, "chat")


def test_a_stream_gives_tokens_as_they_come(served: AsyncLLM) -> None:
    async def ask(params: SamplingParams) -> None:
        drawn: dict[int, list[int]] = {}
        ended = []
        async for place, item in served.stream([PROMPT], params):
            assert place == 0
            if isinstance(item, SampleDelta):
                drawn.setdefault(item.sample, []).extend(item.tokens)
            elif isinstance(item, Completion):
                ended.append(item.sample_index)
                tokens = drawn[item.sample_index]
                assert tuple(tokens) == item.tokens[: len(tokens)]
                assert len(tokens) >= len(item.tokens) - 1
        assert sorted(ended) == list(range(params.n))

    asyncio.run(ask(SamplingParams(n=3, max_tokens=12)))
    asyncio.run(ask(SamplingParams(n=2, max_tokens=9, temperature=0)))


@pytest.mark.parametrize("temperature", [0, 1])
def test_what_a_stream_tells_adds_up(served: AsyncLLM, temperature: float) -> None:
    async def ask() -> None:
        params = SamplingParams(
            n=3, max_tokens=40, seed=2, temperature=temperature, stop=["he", "\n"], logprobs=2
        )
        deltas: dict[tuple[int, int], list[SampleDelta]] = defaultdict(list)
        ended = 0
        async for place, item in served.stream([PROMPT, "Tom"], params):
            if isinstance(item, SampleDelta):
                deltas[place, item.sample].append(item)
            elif isinstance(item, Completion):
                chunks = deltas.pop((place, item.sample_index))
                assert "".join(each.text for each in chunks) == item.text
                assert tuple(chain(*(each.tokens for each in chunks))) == item.tokens
                assert tuple(chain(*(each.logprobs for each in chunks))) == item.logprobs
                assert tuple(chain(*(each.top for each in chunks))) == item.top_logprobs
                ended += 1
        assert ended == 6 and not deltas

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("module", "name", "slow_params"),
    [
        (grammars, "_compile_structure", {"choice": ["never", "ever"]}),
        (stops, "word_tokens", {"bad_words": ["apples"]}),
    ],
)
def test_nobody_waits_for_the_grammar_or_the_bad_words_of_another(
    served: AsyncLLM,
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    name: str,
    slow_params: dict[str, Any],
) -> None:
    pytest.importorskip("llguidance")
    is_served, compiled = threading.Event(), getattr(module, name)

    def slow(what: Any, *more: Any) -> Any:
        assert not what or is_served.wait(60)
        return compiled(what, *more)

    monkeypatch.setattr(module, name, slow)

    async def ask() -> str:
        params = SamplingParams(max_tokens=20, **slow_params)
        held = asyncio.ensure_future(served.generate([PROMPT], params))
        await asyncio.sleep(0.1)
        await served.generate([PROMPT], SamplingParams(max_tokens=3))
        assert not held.done()
        is_served.set()
        _, [[found]] = await held
        return found.text

    text = asyncio.run(asyncio.wait_for(ask(), 100))
    assert text in slow_params["choice"] if "choice" in slow_params else "apples" not in text


def test_who_leaves_takes_the_samples_along(served: AsyncLLM) -> None:
    async def ask() -> None:
        left = asyncio.create_task(served.generate([PROMPT], LONG))
        stream = served.stream([PROMPT], LONG)
        async for _, item in stream:
            if isinstance(item, SampleDelta):
                break
        while served.status().rows < 2:
            await asyncio.sleep(0.005)
        await stream.aclose()
        left.cancel()
        while served.status().rows or served.num_waiting:
            await asyncio.sleep(0.01)
        served.check()

    asyncio.run(ask())


def test_who_is_cancelled_makes_room_at_once(loaded: LLM) -> None:
    """Not only after the next step, which may take long."""
    params = SamplingParams(max_tokens=4, n=4)

    async def ask(served: AsyncLLM) -> None:
        for turns in range(40):
            left = asyncio.create_task(served.generate([PROMPT], params))
            for _ in range(turns % 4):
                await asyncio.sleep(0)
            left.cancel()
            with suppress(asyncio.CancelledError):
                await left
        _, (found,) = await served.generate([PROMPT], params)
        assert len(found) == 4 and served.num_waiting == 0
        served.check()

    with AsyncLLM(loaded, max_waiting=4) as served:
        asyncio.run(ask(served))


def test_by_default_any_number_of_samples_may_wait() -> None:
    params, num_calls = SamplingParams(n=16, max_tokens=2), 30

    async def ask(served: AsyncLLM) -> list[int]:
        calls = [served.generate([f"{place} apples"], params) for place in range(num_calls)]
        calls.append(served.generate([PROMPT] * num_calls, params))
        found = [completions for _, completions in await asyncio.gather(*calls)]
        return [len(each) for each in chain(*found)]

    llm = LLM(str(shallow_demo()), device="cpu", dtype="float32", memory="64MiB", max_rows=32)
    with AsyncLLM(llm) as served:
        assert served.max_waiting is None
        assert asyncio.run(ask(served)) == [16] * (2 * num_calls)
        served.check()


def test_mistakes_and_a_crowd_are_refused_alone(served: AsyncLLM) -> None:
    async def ask() -> None:
        good = asyncio.create_task(served.generate([PROMPT], SamplingParams(max_tokens=100, n=40)))
        await asyncio.sleep(0)
        with pytest.raises(BusyError, match=r"the limit \(max_waiting\) is 40"):
            await served.generate([PROMPT], SamplingParams(n=10))
        await good
        refused: list[tuple[str | list[int], SamplingParams, str]] = [
            ([10**6], SamplingParams(), "token id 1000000"),
            (
                PROMPT,
                SamplingParams(n=9_999),
                r"at most [\d,]+ samples \(max_waiting plus max_rows\), got 9,999; request fewer",
            ),
            (PROMPT, SamplingParams(logit_bias={10**6: 1}), "logit_bias contains token"),
        ]
        for prompt, params, message in refused:
            with pytest.raises(InputError, match=message):
                await served.generate([prompt], params)
        many: Any = [SamplingParams()]
        for call in (served.generate([PROMPT], many), anext(served.stream([PROMPT], many))):
            with pytest.raises(
                InputError, match="params must be SamplingParams or a dict of them, got list"
            ):
                await call
        with pytest.raises(InputError, match="a call can request at most"):
            await served.encode([PROMPT] * 9_999)
        scores = await served.score([[5, 6, 7], [5, 6, 8]])
        assert [score.tokens for score in scores] == [(6, 7), (6, 8)]
        with pytest.raises(InputError, match="this LLM is in use by an AsyncLLM"):
            served.llm.generate([PROMPT])

    asyncio.run(ask())
    served.check()


def test_the_largest_numbers_disturb_nobody(served: AsyncLLM) -> None:
    most, tags = 2**31 - 1, ("<think>", "</think>")
    huge: list[dict[str, Any]] = [
        {"min_tokens": most, "max_tokens": 10**30},
        {"max_thinking_tokens": most, "reasoning_tags": tags},
        {"confidence": most, "min_confidence": 0.1, "confidence_window": most},
        {"top_k": 10**30, "logprobs": 10**30},
        {"stop_token_ids": [10**30]},
    ]

    async def ask() -> None:
        params = [SamplingParams(**{"max_tokens": 3, **each}) for each in huge]
        calls = [asyncio.create_task(served.generate([PROMPT], each)) for each in params]
        while not served.status().rows:
            await asyncio.sleep(0.005)
        calls.pop(0).cancel()
        for call in calls:
            assert (await call)[1][0][0].num_tokens
        assert len(served.usages()) == 1  # no run has failed

    asyncio.run(ask())
    served.check()


def test_its_llm_cannot_be_used_until_it_is_closed(loaded: LLM) -> None:
    for nodes in (False, True):
        with AsyncLLM(loaded, nodes=nodes):
            for call in (lambda: loaded.generate("a"), lambda: AsyncLLM(loaded)):
                with pytest.raises(InputError, match="in use by an AsyncLLM; call the AsyncLLM"):
                    call()
        assert loaded.generate("a", SamplingParams(max_tokens=1))
    with (
        loaded.stream(Node("a", samples=2)) as stream,
        pytest.raises(InputError, match="another run of this LLM is not finished"),
    ):
        next(stream)
        loaded.generate("a")


def test_closing_waits_for_calls_or_ends_them(loaded: LLM) -> None:
    async def ask(drain: bool) -> Any:
        served = AsyncLLM(loaded)
        call = asyncio.create_task(served.generate([PROMPT], SamplingParams(max_tokens=30)))
        while not served.status().rows:
            await asyncio.sleep(0.005)
        await asyncio.to_thread(served.close, drain=drain)
        with pytest.raises(InputError, match="is closed"):
            await served.generate([PROMPT])
        return await call

    assert asyncio.run(ask(True))[1][0][0].num_tokens
    with pytest.raises(InputError, match="did not finish"):
        asyncio.run(ask(False))


def test_a_prompt_that_is_encoded_while_it_closes_gets_the_same_error(loaded: LLM) -> None:
    with AsyncLLM(loaded) as served:
        served.encoder.close()
        with pytest.raises(StoppedError, match="closed during the call"):
            asyncio.run(served.encoder.encode([PROMPT], {}))


def test_closing_waits_for_calls_of_nodes_that_count_no_rows(loaded: LLM) -> None:
    async def begin(backend: LiveBackend) -> int:
        search, context = BudgetedSearch("", None, None), backend.prompt(PROMPT, SearchUsage())
        (sample,) = await backend.sample(context, "/", range(1), LONG, search)
        assert sample is not None
        return sample.completion.num_tokens

    async def ask() -> int:
        served = AsyncLLM(loaded, nodes=True)
        call = asyncio.create_task(served.call_nodes(begin))
        while not served.status().rows:
            await asyncio.sleep(0.005)
        await asyncio.to_thread(served.close)
        return await asyncio.wait_for(call, 60)

    assert asyncio.run(ask()) == LONG.max_tokens


def test_a_result_whose_event_loop_was_closed_is_discarded(loaded: LLM) -> None:
    """At once, also while the task that awaited it is not collected."""
    discarded: queue.Queue[int] = queue.Queue()

    async def begin(backend: LiveBackend) -> int:
        search, context = BudgetedSearch("", None, None), backend.prompt(PROMPT, SearchUsage())
        await backend.sample(context, "/", range(1), LONG, search)
        return 7

    async def ask() -> asyncio.Task[int]:
        call = asyncio.create_task(served.call_nodes(begin, discard=discarded.put))
        while not served.status().rows:
            await asyncio.sleep(0.005)
        return call

    with AsyncLLM(loaded, nodes=True) as served:
        loop = asyncio.new_event_loop()
        call: Any = loop.run_until_complete(ask())
        loop.close()
        assert discarded.get(timeout=60) == 7
        call._log_destroy_pending = False
        del call
    assert discarded.empty()


def test_after_a_run_has_failed_others_are_served(
    loaded: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, fails = loaded.model.forward, [False]

    def bad(batch: Any) -> Any:
        logits = forward(batch)
        return logits * float("nan") if fails[0] else logits

    monkeypatch.setattr(loaded.model, "forward", bad)

    async def ask() -> None:
        calls = [asyncio.create_task(served.generate([PROMPT], LONG)) for _ in range(3)]
        while not served.status().rows:
            await asyncio.sleep(0.005)
        fails[0] = True
        for call in calls:
            with pytest.raises(NumericsError):
                await call
        fails[0] = False
        assert served.failure is None
        assert (await served.generate([PROMPT], SamplingParams(max_tokens=3)))[1][0][0].num_tokens
        assert len(served.usages()) == 2

    with AsyncLLM(loaded) as served:
        asyncio.run(ask())
        served.check()


def test_a_failure_while_a_call_is_dropped_stops_nobody_else(
    served: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancel, fails = LiveRun.cancel, [True]

    def bad(run: LiveRun, number: int) -> None:
        if fails and fails.pop():
            raise NumericsError("the pass under way has failed")
        cancel(run, number)

    async def ask() -> None:
        left = asyncio.create_task(served.generate([PROMPT], LONG))
        other = asyncio.create_task(served.generate([PROMPT], LONG))
        while served.status().rows < 2:
            await asyncio.sleep(0.005)
        monkeypatch.setattr(LiveRun, "cancel", bad)
        left.cancel()
        with pytest.raises(NumericsError):
            await other
        found = await served.generate([PROMPT], SamplingParams(max_tokens=3))
        assert found[1][0][0].num_tokens
        assert served.num_waiting == 0

    asyncio.run(ask())
    served.check()


def test_a_panic_while_a_call_is_admitted_ends_the_call(
    served: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        """An error of a library that is not an Exception."""

    def bad(*arguments: Any, **options: Any) -> list[int]:
        raise Panic("index out of bounds")

    async def generate() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(LiveRun, "add", bad)
            with pytest.raises(InternalError, match="index out of bounds"):
                await asyncio.wait_for(served.generate([PROMPT]), 30)
        assert served.num_waiting == 0
        assert (await served.generate([PROMPT], SamplingParams(max_tokens=3)))[1][0][0].num_tokens

    asyncio.run(generate())
    served.check()
