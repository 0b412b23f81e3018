"""LLM on tiny real checkpoints: against stock transformers, and against itself."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import tiny_models
import torch
from engine_cases import FEW_SHOT, QUESTIONS, generate_greedily, load, stock_of, tokens_of, tree_of

from treegen import LLM, Node, SamplingParams
from treegen.common.outputs import Completion
from treegen.engine.segments.page_tables import SegmentPageTables
from treegen.engine.segments.prefix_cache import CachedPrefix
from treegen.engine.segments.segment import SegmentStates
from treegen.engine.stream import ScoreStream, Stream
from treegen.errors import CapacityError, InputError, ModelError, NumericsError
from treegen.model.tokenizer import load_tokenizer
from treegen.prompts.stops import StopConditions, StopConditionsCache, StopStrings

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
FAMILIES = ["llama", "gpt2", "gemma2", "gpt_oss", "deepseek_v3", "mixtral", "cohere2", "gemma3n"]


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return load(checkpoint)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_stock_generation(family: str, tmp_path: Path) -> None:
    """Ragged problems under one prefix, in a pool so small that rows come one after another."""
    tiny_models.save_tiny_model(tmp_path, family)
    llm, stock = load(tmp_path), stock_of(tmp_path)
    plan = llm.plan(tree_of(3), GREEDY)
    pages = max(plan.get_single_row_pages(i, 4) for i in range(3)) + 2
    small = load(tmp_path, memory=pages * 4 * llm.spec.kv_bytes_per_token, page_size=4)
    for engine in (llm, small):
        result = engine.run(tree_of(3), GREEDY)
        for index, question in enumerate(QUESTIONS):
            ids = engine.tokenizer(FEW_SHOT + question)["input_ids"]
            want, _ = generate_greedily(stock, ids, GREEDY.max_tokens)
            assert [c.tokens for c in result.of(str(index))] == [want] * 3
        assert result.usage.prompt_tokens_computed == result.plan.stored_tokens


def test_samples_are_the_same_whatever_the_budget(checkpoint: Path, llm: LLM) -> None:
    """Memory, rows at once, chunks, pages and sharing change nothing in float32 on a CPU."""
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8, seed=3, stop=["\n", "Q"])
    want = llm.run(tree_of(4), params)
    tight = max(want.plan.get_single_row_pages(i, 4) for i in range(3)) + 1
    for options in (
        {"max_rows": 1},
        {"max_rows": 5, "prefill_chunk": 7},
        {"page_size": 3},
        {"sharing": "off"},
        {"sharing": "all"},
        {"sharing": "one", "max_rows": 4},
        {"memory": tight * 4 * llm.spec.kv_bytes_per_token, "page_size": 4},
        {"memory": 2 * tight * 4 * llm.spec.kv_bytes_per_token, "page_size": 4},
        {"impl": "reference"},
    ):
        got = load(checkpoint, **options).run(tree_of(4), params)
        for a, b in zip(want.completions, got.completions, strict=True):
            assert (a.prompt_id, a.sample_index, a.seed) == (b.prompt_id, b.sample_index, b.seed)
            assert (a.tokens, a.text, a.finish_reason) == (b.tokens, b.text, b.finish_reason)
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_a_sample_does_not_depend_on_its_neighbours(llm: LLM) -> None:
    """Alone, with other prompts, with fewer samples, or with some skipped: the same."""
    params = SamplingParams(max_tokens=8, seed=12)
    want = tokens_of(llm.run(tree_of(4), params).completions)
    alone = Node(FEW_SHOT, children=[Node(QUESTIONS[1], samples=2, id="1")])
    assert tokens_of(llm.run(alone, params).completions).items() <= want.items()
    done = {("0", 0), ("0", 3), *(("2", i) for i in range(4))}
    with llm.stream(tree_of(4), params, skip=done) as stream:
        rest = tokens_of(stream)
    assert rest == {key: want[key] for key in want.keys() - done}
    assert len(set(want.values())) > 8, "samples differ from one another"
    other = tokens_of(llm.run(tree_of(4), SamplingParams(max_tokens=8, seed=13)).completions)
    assert other != want


def test_logprobs_are_those_of_the_model(checkpoint: Path, llm: LLM) -> None:
    params = SamplingParams(temperature=0.7, max_tokens=6, logprobs=3, ignore_eos=True)
    for c in llm.run(tree_of(2), params).completions:
        ids = llm.tokenizer(FEW_SHOT + QUESTIONS[int(c.prompt_id)])["input_ids"]
        with torch.no_grad():
            logits = stock_of(checkpoint)(torch.tensor([[*ids, *c.tokens]])).logits[
                0, len(ids) - 1 : -1
            ]
        want = logits.log_softmax(-1)
        chosen = want[range(len(c.tokens)), list(c.tokens)]
        torch.testing.assert_close(torch.tensor(c.logprobs), chosen, atol=1e-4, rtol=0)
        assert c.logprob == pytest.approx(float(chosen.sum()), abs=1e-3)
        top = torch.tensor([[value for _, value in row] for row in c.top_logprobs])
        torch.testing.assert_close(top, want.topk(3).values, atol=1e-4, rtol=0)


def test_scores_are_log_likelihoods_with_the_context_computed_once(
    checkpoint: Path, llm: LLM
) -> None:
    pairs = [
        (FEW_SHOT + question, answer)
        for question in QUESTIONS
        for answer in (" yes", " no", " The answer is 14.", " yes")
    ]
    scores = llm.score(pairs)
    for (context, continuation), score in zip(pairs, scores, strict=True):
        ids = llm.tokenizer(context + continuation)["input_ids"]
        start = len(ids) - len(score.tokens)
        assert ids[start:] == list(score.tokens)
        with torch.no_grad():
            logits = stock_of(checkpoint)(torch.tensor([ids])).logits[0, start - 1 : -1]
        want = logits.log_softmax(-1)[range(len(score.tokens)), ids[start:]]
        torch.testing.assert_close(torch.tensor(score.logprobs), want, atol=1e-4, rtol=0)
        assert score.is_greedy == (logits.argmax(-1).tolist() == ids[start:])
    ids_pairs = [([5, 6, 7], [8, 9]), ([5, 6, 7, 8], [9])]
    by_ids = llm.score(ids_pairs)
    assert by_ids[0].logprobs[1:] == pytest.approx(by_ids[1].logprobs, abs=1e-5)
    assert by_ids[0].tokens == (8, 9)


def test_scoring_in_small_chunks_changes_nothing(checkpoint: Path, llm: LLM) -> None:
    pairs = [(FEW_SHOT, " a b c"), (FEW_SHOT + " a", " b d e f"), ("Q", " x" * 20)]
    want = llm.score(pairs)
    for options in ({"prefill_chunk": 1}, {"prefill_chunk": 5, "page_size": 2}, {"sharing": "all"}):
        for a, b in zip(want, load(checkpoint, **options).score(pairs), strict=True):
            assert a.tokens == b.tokens
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_flat_prompts_share_what_they_have_in_common(llm: LLM) -> None:
    prompts = [FEW_SHOT + question for question in QUESTIONS]
    params = SamplingParams(max_tokens=5, n=3, seed=1)
    flat = llm.generate(prompts, params)
    assert [len(completions) for completions in flat] == [3, 3, 3]
    plan = llm.plan(Node("", children=[Node(text) for text in prompts]))
    assert plan.stored_tokens < 0.6 * plan.unshared_tokens
    ids = [llm.tokenizer(text)["input_ids"] for text in prompts]
    by_ids = llm.generate(ids, params)
    assert [tokens_of(c) for c in by_ids] == [tokens_of(c) for c in flat]
    assert llm.generate([], params) == []


def test_a_new_segment_reads_its_path_once_for_all_kept_prefixes() -> None:
    tokens, reads = np.arange(8, dtype=np.int32), []

    def path_tokens() -> Any:
        reads.append(tokens)
        return tokens

    prefixes = [CachedPrefix(str(num), tokens[:num], None) for num in (2, 5, 3)]
    segment: Any = SimpleNamespace(start=0, reuse=None, path_tokens=path_tokens)
    cache: Any = None
    SegmentPageTables(cache, cast(Any, prefixes), SegmentStates()).match_one(segment)
    assert segment.reuse == (prefixes[1], 5) and len(reads) == 1
    SegmentPageTables(cache, cast(Any, []), SegmentStates()).match_one(segment)
    assert len(reads) == 1


def test_a_kept_prefix_is_not_computed_again(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, seed=4)
    want = llm.run(tree_of(3), params)
    shared = len(llm.tokenizer(FEW_SHOT)["input_ids"])
    used = llm.cache.pool.num_used
    with llm.keep(FEW_SHOT, name="shots") as kept:
        assert kept.usage.prompt_tokens_computed == shared
        assert llm.list_prefixes() == [("shots", shared)]
        for _ in range(2):
            got = llm.run(tree_of(3), params)
            assert tokens_of(got.completions) == tokens_of(want.completions)
            reused = got.usage.prompt_tokens_reused
            assert reused >= shared - 1, "the last token may merge with what follows"
            assert got.usage.prompt_tokens_computed == want.usage.prompt_tokens_computed - reused
        longer = llm.keep(FEW_SHOT + QUESTIONS[0], name="longer")
        assert longer.usage.prompt_tokens_computed < shared
        with pytest.raises(InputError, match="prefix 'shots' already exists"):
            llm.keep("other", name="shots")
    assert [name for name, _ in llm.list_prefixes()] == ["longer"]
    whole = llm.generate([FEW_SHOT + QUESTIONS[0]], params)  # all but its last token is kept
    assert whole[0][0].tokens
    llm.drop("longer")
    assert llm.cache.pool.num_used == used
    with pytest.raises(
        InputError, match="the kept prefix 'longer' was not found; kept prefixes: none"
    ):
        llm.drop("longer")


def test_all_leaves_of_a_kept_node_stay(llm: LLM) -> None:
    leaves = [Node(text) for text in ("a b", "a c", "d" * 40)]
    used = llm.cache.pool.num_used
    with llm.keep(Node(FEW_SHOT, children=leaves)) as kept:
        names = [name for name, _ in llm.list_prefixes()]
        assert names == [kept.name] * 3
        result = llm.run(Node(FEW_SHOT + "a c and more"), SamplingParams(max_tokens=2))
        assert result.usage.prompt_tokens_reused > len(llm.tokenizer(FEW_SHOT)["input_ids"])
    assert llm.cache.pool.num_used == used
    with llm.keep("x"), llm.keep("y"):
        assert len({name for name, _ in llm.list_prefixes()}) == 2


def test_kept_prefixes_leave_least_recently_used_first(checkpoint: Path) -> None:
    llm = load(checkpoint, memory=40 * 4 * load(checkpoint).spec.kv_bytes_per_token, page_size=4)
    texts = ["apples are red. " * 3, "bears have fur. " * 3, "cats drink milk. " * 3]
    for name, text in zip("abc", texts, strict=True):
        llm.keep(text, name=name)
    assert [name for name, _ in llm.list_prefixes()][-1] == "c"
    assert len(llm.list_prefixes()) < 3
    assert llm.cache.pool.num_used <= 20
    # Work that needs their pages gets them.
    plan = llm.plan(Node("z" * 100), SamplingParams(max_tokens=20))
    assert plan.get_single_row_pages(0, 4) > llm.cache.pool.num_free
    assert len(llm.run(Node("z" * 100), SamplingParams(max_tokens=20)).completions) == 1
    with pytest.raises(CapacityError, match="needs 152 cache tokens, but at most 76 are available"):
        llm.keep("d" * 150)


def test_stop_strings_cut_the_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, stop=["e", "an"], seed=2)
    stopped = [c for c in llm.run(tree_of(10), params).completions if isinstance(c.stop, str)]
    assert stopped
    for c in stopped:
        assert "e" not in c.text and "an" not in c.text
        assert c.finish_reason == "stop"
    kept = SamplingParams(max_tokens=60, stop=["e", "an"], seed=2, include_stop=True)
    for c in llm.run(tree_of(10), kept).completions:
        if isinstance(c.stop, str):
            assert c.text.endswith(c.stop)


def test_a_stream_that_is_left_gives_what_has_ended_and_has_no_more_work(
    checkpoint: Path,
) -> None:
    llm = load(checkpoint, run_ahead=True, max_rows=24)
    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=2)
    want = {(c.prompt_id, c.sample_index): c for c in llm.run(tree_of(24), params).completions}
    stream = llm.stream(tree_of(24), params)
    first = [next(stream), next(stream)]
    stream.close()
    rest = stream.take_finished()
    assert not stream.has_work and list(stream) == stream.take_finished() == []
    got = {(c.prompt_id, c.sample_index): c for c in first + rest}
    assert len(got) == len(first + rest) == 24
    assert all(want[key] == completion for key, completion in got.items())


def test_stop_conditions_are_those_of_the_tokenizer_as_it_is(checkpoint: Path) -> None:
    one, other = load_tokenizer(str(checkpoint)), load_tokenizer(str(checkpoint))
    stoppings = StopConditionsCache()

    def of(tokenizer: Any, *stops: str) -> StopConditions:
        return stoppings.of(SamplingParams(stop=list(stops)), tokenizer, (1,), 400)

    first = of(one, "Q")
    assert of(one, "Q") is first and of(one, "Q", "A") is not first and of(other, "Q") is not first
    one.add_tokens(["Q!"])
    assert of(one, "Q").may_end.sum() == first.may_end.sum() + 1


def test_the_table_of_stop_strings_is_made_once(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def table(self: StopStrings, vocab_size: int) -> Any:
        made.append(self.stops)
        return np.ones(vocab_size, dtype=np.bool_)

    monkeypatch.setattr(StopStrings, "_table", table)
    llm = load(checkpoint)
    for seed in range(3):
        llm.run(tree_of(3), SamplingParams(max_tokens=4, stop=["\n"], seed=seed))
        llm.run(tree_of(3), SamplingParams(max_tokens=3 + seed, stop=["\n", "Q"], temperature=0))
        llm.session(SamplingParams(max_tokens=4, stop="\n", seed=seed)).close()
    assert made == [("\n",), ("\n", "Q")]


def test_chat_messages_are_prompts_too(llm: LLM) -> None:
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
    llm.tokenizer.chat_template = template
    try:
        system = [{"role": "system", "content": "Answer briefly."}]
        asks = [Node([{"role": "user", "content": q}], samples=2) for q in QUESTIONS]
        result = llm.run(Node(system, children=asks), SamplingParams(max_tokens=4))
        want = llm.tokenizer.encode(
            f"[system] Answer briefly.\n[user] {QUESTIONS[1]}\n[assistant] ",
            add_special_tokens=False,
        )
        assert result.plan.requests[1].tokens.tolist() == want
        assert len(result.completions) == 6
    finally:
        llm.tokenizer.chat_template = None


def test_of_threads_that_start_runs_at_once_one_does(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_are_here = threading.Barrier(2)
    check_weights = llm.model.check_weights

    def meet() -> tuple[int, ...]:
        with suppress(threading.BrokenBarrierError):
            both_are_here.wait(0.5)
        return check_weights()

    monkeypatch.setattr(llm.model, "check_weights", meet)
    with ThreadPoolExecutor(2) as threads:
        starts = [threads.submit(llm.stream, tree_of(3), SamplingParams()) for _ in range(2)]
    failures = [start.exception() for start in starts]
    (stream,) = [start.result() for start in starts if start.exception() is None]
    assert sum(isinstance(each, InputError) for each in failures) == 1
    stream.close()
    llm.cache.pool.check(llm.engine.prefix_cache.tables())


@pytest.mark.parametrize("kind", ["completions", "scores"])
def test_threads_may_share_a_stream(llm: LLM, kind: str) -> None:
    params = SamplingParams(max_tokens=12, seed=8)

    def begin() -> Stream | ScoreStream:
        if kind == "scores":
            return llm.score_stream([(q, f" {i}") for q in QUESTIONS for i in range(20)])
        return llm.stream(tree_of(16), params)

    stream = begin()
    with ThreadPoolExecutor(4) as threads:
        parts = list(threads.map(lambda _: list(stream), range(4)))
    assert sorted(map(str, chain.from_iterable(parts))) == sorted(map(str, begin()))
    # One that is closed by another thread just ends.
    stream = begin()
    with ThreadPoolExecutor(1) as threads:
        rest = threads.submit(list, stream)
        next(stream, None)
        stream.close()
        rest.result()
    llm.cache.pool.check(llm.engine.prefix_cache.tables())


def test_a_copy_of_an_llm_is_the_same_one_and_it_is_not_pickled(llm: LLM) -> None:
    assert copy.copy(llm) is llm and copy.deepcopy([llm])[0] is llm
    with pytest.raises(InputError, match="LLM cannot be pickled"):
        pickle.dumps(llm)


def test_a_stream_yields_as_samples_finish_and_can_be_left(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, seed=8)
    used = llm.cache.pool.num_used
    stream = llm.stream(tree_of(8), params)
    first = next(stream)
    assert isinstance(first, Completion)
    with pytest.raises(InputError, match="another run of this LLM is not finished"):
        llm.run(tree_of(3))
    stream.cancel("0")
    stream.cancel("1", 3)
    rest = list(stream)
    gone = {("1", 3), *(("0", i) for i in range(8))} - {(first.prompt_id, first.sample_index)}
    assert not gone & tokens_of(rest).keys()
    with pytest.raises(InputError, match="no sampled node has the id '9'"):
        stream.cancel("9")
    for wrong in ("1", 1.5, True, [1]):
        with pytest.raises(InputError, match="sample_index must be an integer"):
            stream.cancel("1", wrong)  # type: ignore[arg-type]
    with llm.stream(tree_of(8), params) as abandoned:
        next(abandoned)
    assert llm.cache.pool.num_used == used
    dropped = llm.stream(tree_of(8), params)
    next(dropped)
    del dropped  # without close
    assert llm.cache.pool.num_used == used
    assert len(llm.run(tree_of(2), params).completions) == 6


def test_the_account_says_why_graphs_were_not_used(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert llm.run(tree_of(2), GREEDY).usage.eager_because == ""
    graphs = SimpleNamespace(
        eager_because="no capture", run=lambda step: step.compute(llm.model.forward)
    )
    monkeypatch.setattr(llm.engine, "graphs", graphs)
    assert llm.run(tree_of(2), GREEDY).usage.eager_because == "no capture"


def test_weights_may_be_written_into_a_compiled_model_but_not_replaced(checkpoint: Path) -> None:
    torch._dynamo.reset()
    llm, tree = load(checkpoint), Node("Ann has 3 apples.")
    module: Any = llm.model.module
    llm.model.compile_layers(llm.cache.layers, backend="aot_eager")
    other = copy.deepcopy(stock_of(checkpoint))
    for weight in other.parameters():
        weight.data.mul_(torch.rand_like(weight) + 0.5)
    ids = llm.tokenizer(tree.content)["input_ids"]
    before = llm.run(tree, GREEDY).completions[0].tokens
    module.load_state_dict(other.state_dict())
    after = llm.run(tree, GREEDY).completions[0].tokens
    assert before != after
    assert after == generate_greedily(other, ids, GREEDY.max_tokens)[0]
    module.load_state_dict({k: v.clone() for k, v in other.state_dict().items()}, assign=True)
    with pytest.raises(ModelError, match="weights of the module were replaced"):
        llm.run(tree, GREEDY)
    anew = LLM(llm.model, tokenizer=llm.tokenizer, memory="8MiB")
    assert anew.run(tree, GREEDY).completions[0].tokens == after


def test_a_full_gpu_says_what_to_do(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with monkeypatch.context() as patch:
        patch.setattr(llm.model, "_forward", full)
        with pytest.raises(
            CapacityError, match=r"cpu has no memory left for a forward pass.*max_rows="
        ):
            llm.generate(["a"], GREEDY)
    monkeypatch.setattr("treegen.model.model._zeros", full)
    with pytest.raises(CapacityError, match=r"a cache of .* exceeds the free memory of cpu"):
        llm.model.new_cache(4, 16)


def test_scores_known_before_an_error_are_returned(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that launches passes ahead learns scores in the step in which the next pass fails."""
    pairs = [(f"{i} context of some length, number", f" {i} and so on") for i in range(8)]

    def count_scores(run_ahead: bool, num_passes: int) -> int:
        llm, num_left = load(checkpoint, prefill_chunk=16, run_ahead=run_ahead), [num_passes]
        forward = llm.model.forward

        def forward_or_fail(batch: Any) -> torch.Tensor:
            num_left[0] -= 1
            if num_left[0] < 0:
                raise torch.OutOfMemoryError("full")
            return forward(batch)

        monkeypatch.setattr(llm.model, "forward", forward_or_fail)
        num_scores = 0
        with pytest.raises(CapacityError, match="no memory left"):
            for _ in llm.score_stream(pairs):
                num_scores += 1
        return num_scores

    counts = [[count_scores(ahead, num) for num in (3, 5, 8)] for ahead in (False, True)]
    assert counts[0] == counts[1] and counts[0][0] > 0


def test_after_an_error_the_next_run_works(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, passes = llm.model.forward, [0]

    def broken(batch: Any) -> torch.Tensor:
        passes[0] += 1
        logits = forward(batch)
        return logits * torch.nan if passes[0] == 4 else logits

    used = llm.cache.pool.num_used
    monkeypatch.setattr(llm.model, "forward", broken)
    finished = []
    with pytest.raises(NumericsError, match="are not numbers for prompt '0' sample 0 token 2"):
        for completion in llm.stream(tree_of(4), SamplingParams(max_tokens=20, seed=1)):
            finished.append(completion)
    assert llm.cache.pool.num_used == used
    assert len(llm.run(tree_of(2), SamplingParams(max_tokens=4)).completions) == 6


def test_prompts_that_cannot_be_run_are_refused_with_the_numbers(
    checkpoint: Path, llm: LLM
) -> None:
    ids = [5] * tiny_models.CONTEXT_LENGTH
    with pytest.raises(CapacityError, match=r"'long' has 256 tokens, 1 more than fit .* of 256"):
        llm.run(Node("", children=[Node(ids, id="long"), Node([5], id="short")]))
    only_one = llm.run(Node(ids[1:]), SamplingParams(max_tokens=50, ignore_eos=True))
    assert [c.finish_reason for c in only_one.completions] == ["length"]
    assert only_one.completions[0].num_tokens == 1
    with pytest.raises(
        InputError, match=r"token id 320, but the token ids of the model are 0 to 319"
    ):
        llm.run(Node([3, 320]))
    with pytest.raises(CapacityError, match=r"one run can have at most .*, got 10,000,000,000"):
        llm.plan(Node("a", samples=10**10))
    tiny = load(checkpoint, memory=10 * 16 * llm.spec.kv_bytes_per_token)
    with pytest.raises(
        CapacityError, match=r"needs 176 cache tokens, but the cache holds only 144 "
    ):
        tiny.run(Node([5] * 130), SamplingParams(max_tokens=20))
    with pytest.raises(CapacityError, match="cannot hold a page of 16 tokens"):
        load(checkpoint, memory=1000)
    for bad in ("lots", "-1", 0, "0GiB"):
        with pytest.raises(InputError, match="memory must be a number of bytes"):
            load(checkpoint, memory=bad)
    with pytest.raises(InputError, match="max_rows must be at least 1, got 0"):
        load(checkpoint, max_rows=0)
    with pytest.raises(InputError, match="sharing must be one of"):
        load(checkpoint, sharing="some")
    with pytest.raises(InputError, match="skip contains sample 9"):
        llm.stream(tree_of(3), skip=[("0", 9)])
    with pytest.raises(InputError, match="prompts must be a list"):
        llm.generate(5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="the continuation adds no token to the context"):
        llm.score([("abc", "")])
    with pytest.raises(InputError, match="continuation both as text or both as token ids"):
        llm.score([("abc", [1])])
    with pytest.raises(InputError, match=r"content\[1\] must be a chat message, got str"):
        llm.score([([{"role": "user", "content": "a"}, "b"], "c")])  # type: ignore[list-item]
