"""What a call draws, and what its arguments mean: on a tiny checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from engine_cases import load
from fakes import LetterTokenizer, make_stop_conditions
from transformers import AutoModelForCausalLM

from treegen import LLM, Node, SamplingParams
from treegen.common.outputs import Completion
from treegen.errors import CapacityError, InputError, TreeError, TreegenError
from treegen.prompts.plan.draws import row_seed
from treegen.search import AskTell, Budget, Expand, SampleRequest, SearchNode

FREE = SamplingParams(max_tokens=4, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=4, ignore_eos=True, seed=0)
EOS = 1


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return load(checkpoint)


def tokens_of(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.tokens for completion in completions]


async def draw_four(root: SearchNode) -> list[SearchNode]:
    return await root.sample(4)


def paths_of(results: Sequence[Any]) -> list[list[str]]:
    return [[node.text for node in result.tree.nodes] for result in results]


# Random numbers


def correlation(outcomes_CN: np.ndarray[Any, Any]) -> float:
    """Mean correlation between the rows: of calls, at equal sample index."""
    matrix = np.corrcoef(outcomes_CN)
    return float(matrix[np.triu_indices(len(matrix), 1)].mean())


def test_outcomes_of_separate_calls_do_not_go_up_and_down_together(llm: LLM) -> None:
    one = SamplingParams(max_tokens=1, temperature=2.0, ignore_eos=True, n=60)
    tree = SamplingParams(max_tokens=1, temperature=2.0, ignore_eos=True)

    async def solve(root: SearchNode) -> list[SearchNode]:
        return await root.sample(60)

    def flat(prompt: str) -> list[int]:
        return [c.tokens[0] for c in llm.generate([prompt], one)[0]]

    def declared(prompt: str) -> list[int]:
        return [c.tokens[0] for c in llm.run(Node(prompt, samples=60), tree).completions]

    def session(prompt: str) -> list[int]:
        with llm.session(tree) as opened:
            root = opened.root(prompt)
            return [child.tokens[0] for child in opened.sample({root: 60})[root]]

    prompts = [f"Q: Bob has {i} pens.\nA:" for i in range(12)]
    half = llm.spec.vocab_size / 2
    for draw in (flat, declared, session):
        outcomes = np.array([draw(prompt) for prompt in prompts]) < half
        assert abs(correlation(outcomes)) < 0.05, draw.__name__
    # With one name for all, every call draws with the same numbers.
    same = [llm.run(Node(p, samples=60, id="0"), tree).completions for p in prompts]
    assert correlation(np.array([[c.tokens[0] for c in each] for each in same]) < half) > 0.4


def test_calls_with_one_prompt_draw_further_samples_until_there_is_a_seed(checkpoint: Path) -> None:
    llm = load(checkpoint)
    many = SamplingParams(max_tokens=4, ignore_eos=True, seed=0, n=9)
    three = SamplingParams(max_tokens=4, ignore_eos=True, n=3)
    (want,) = llm.generate(["one"], many)
    assert llm.generate(["one"], many) == [want]
    first = llm.generate(["one", "other"], three)
    again = llm.generate(["other", "one"], three)
    # A prompt that is given twice in a call goes on as well, with and without a seed.
    twice = llm.generate(["two", "two"], SamplingParams(max_tokens=4, ignore_eos=True, n=3, seed=0))
    assert len(set(tokens_of(twice[0] + twice[1]))) == 6
    by_node = llm.run(Node("one", samples=3), FREE).completions
    drawn = [*first[0], *again[1], *by_node]
    assert tokens_of(drawn) == tokens_of(want) and [c.seed for c in drawn] == [c.seed for c in want]
    assert [c.sample_index for c in drawn] == [0, 1, 2] * 3
    assert not set(tokens_of(first[1])) & set(tokens_of(again[0]))
    # A run that skips is one that is resumed.
    with llm.stream(Node("one", samples=3), FREE, skip=[("0", 0), ("0", 2)]) as resumed:
        assert tokens_of(list(resumed)) == tokens_of(want)[1:2]


def test_a_call_that_is_refused_uses_up_no_samples(checkpoint: Path) -> None:
    llm = load(checkpoint)
    unknown = SamplingParams(max_tokens=4, logit_bias={llm.spec.vocab_size: 1.0})
    for call in (
        lambda: llm.generate(["one"], unknown),
        lambda: llm.stream(Node("one", samples=1), unknown),
        lambda: llm.generate(["one", "long " * 10_000], FREE),
    ):
        with pytest.raises(TreegenError):
            call()
    ((sample,),) = llm.generate(["one"], FREE)
    ((first,),) = llm.generate(["one"], SEEDED)
    assert (sample.sample_index, sample.seed) == (0, first.seed)


def test_named_nodes_keep_their_seeds(llm: LLM) -> None:
    tree = Node("", children=[Node("a", id="a", samples=2), Node("b", samples=2)])
    for seed, params in ((0, FREE), (0, FREE), (0, SEEDED)):
        named = [c for c in llm.run(tree, params).completions if c.prompt_id == "a"]
        assert [c.seed for c in named] == [row_seed(seed, "a", i) for i in range(2)]
    greedy = SamplingParams(temperature=0, max_tokens=2)
    assert [c.seed for c in llm.run(Node("a", id="a", samples=2), greedy).completions] == [
        row_seed(0, "a", 0),
        row_seed(0, "a", 1),
    ]


def test_unnamed_searches_are_those_of_their_prompts(llm: LLM) -> None:
    def search(problems: Sequence[Any], params: SamplingParams = SEEDED) -> list[list[str]]:
        return paths_of(llm.search(draw_four, problems, params))

    want = search(["one", "other"])
    assert search(["other", "one"]) == want[::-1]
    first, second = search(["one", "one"])
    assert first == want[0] and second[1:] != want[0][1:]
    assert search(["one"], FREE) != search(["one"], FREE)
    assert search([("x", "one")], FREE) == search([("x", "one")], FREE)
    tree = Node("one", expand=[Expand(4)])
    assert paths_of(llm.expand(tree, SEEDED)) == paths_of(llm.expand(tree, SEEDED)) == want[:1]
    assert paths_of(llm.expand(tree, FREE)) != paths_of(llm.expand(tree, FREE))
    with llm.session(SEEDED) as session:
        roots = [session.root("one"), session.root("one"), session.root("one", name="0")]
        children = session.sample(dict.fromkeys(roots, 4))
        assert [[n.text for n in root.walk()] for root in roots[:2]] == [first, second]
        assert len({child.tokens for each in children.values() for child in each}) == 12
    by_hand = AskTell(draw_four, ["one", "two", "one"])
    requests = [r for r in by_hand.ask() if isinstance(r, SampleRequest)]
    assert len({seed for request in requests for seed in request.seeds}) == 12
    assert [request.id for request in requests] == ["0/0:4", "1/0:4", "2/0:4"]
    by_hand.close()


# Stops


def test_a_stop_string_that_is_a_special_token_stops_at_the_token(llm: LLM) -> None:
    end = {EOS: 100.0}
    for stop, bias, eos in (("</s>", end, True), ("<pad>", {2: 100.0}, False)):
        for include in (False, True):
            params = SamplingParams(
                max_tokens=6,
                min_tokens=2,
                ignore_eos=eos,
                stop=["Zq", stop],
                logit_bias=bias,
                include_stop_str_in_output=include,
            )
            ((completion,),) = llm.generate(["Q: how"], params)
            assert (completion.stop, completion.finish_reason) == (stop, "stop")
            assert len(completion.tokens) == 3
            assert completion.text.endswith(stop) == include
    # The model's own end is told as such, whatever it is called.
    ((ended,),) = llm.generate(["Q"], SamplingParams(stop="</s>", logit_bias=end))
    assert (ended.stop, ended.text) == (EOS, "")


def test_include_stop_leaves_the_text_of_stop_tokens(llm: LLM) -> None:
    letter = llm.tokenizer("k", add_special_tokens=False)["input_ids"][0]
    for include, text in ((False, ""), (True, "k")):
        params = SamplingParams(
            stop_token_ids=[letter], logit_bias={letter: 100}, include_stop=include
        )
        ((completion,),) = llm.generate(["Q"], params)
        assert (completion.text, completion.stop, completion.tokens) == (text, letter, (letter,))
        with llm.session(params) as session:
            root = session.root("Q")
            (child,) = session.sample({root: 1})[root]
            assert child.num_context_tokens == root.num_context_tokens + include


def test_a_search_goes_on_after_a_special_stop_as_its_text_says(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, stop="<pad>", logit_bias={2: 100})
    with llm.session(params) as session:
        root = session.root("Q")
        for include in (False, True):
            (child,) = session.sample({root: 1}, include_stop=include)[root]
            assert child.num_context_tokens == root.num_context_tokens + include
            assert child.text == "<pad>" * include


def test_min_tokens_holds_back_stop_tokens_and_strings(llm: LLM) -> None:
    biased = {EOS: 100.0}
    for least in (0, 1, 4):
        for temperature in (0.0, 1.0):
            params = SamplingParams(
                max_tokens=9, min_tokens=least, logit_bias=biased, temperature=temperature, n=3
            )
            for completion in llm.generate(["Q: what"], params)[0]:
                assert len(completion.tokens) == least + 1 and completion.tokens[-1] == EOS
                assert EOS not in completion.tokens[:-1]
    letter = llm.tokenizer("k", add_special_tokens=False)["input_ids"][0]
    strings = SamplingParams(
        max_tokens=9, min_tokens=3, stop=["kk", "k"], logit_bias={letter: 100.0}
    )
    ((completion,),) = llm.generate(["Q"], strings)
    # The first that ends after the least tokens: the "kk" of the third and fourth.
    assert completion.tokens == (letter,) * 4 and (completion.text, completion.stop) == ("kk", "kk")


# Arguments


def test_each_prompt_may_have_parameters_of_its_own(llm: LLM) -> None:
    prompts = ["Q: one", "Q: two", "Q: one", "Q: three"]
    each = [
        SamplingParams(max_tokens=3, seed=1, n=2, ignore_eos=True),
        SamplingParams(max_tokens=7, seed=2, top_k=3, logprobs=2, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=5, n=3, ignore_eos=True),
        SamplingParams(max_tokens=9, seed=4, logit_bias={7: 3.5, 9: -5}, min_tokens=5),
    ]
    together = llm.generate(prompts, each)
    for prompt, params, completions in zip(prompts, each, together, strict=True):
        (alone,) = llm.generate([prompt], params)
        assert tokens_of(completions) == tokens_of(alone)
        assert all(len(c.tokens) <= params.max_tokens for c in completions)
        assert [len(c.top_logprobs) for c in completions] == [len(c.top_logprobs) for c in alone]
    with pytest.raises(InputError, match="3 params for 4 prompts"):
        llm.generate(prompts, each[:3])
    for wrong in (["n"] * 4, 3):
        with pytest.raises(InputError, match=r"params (must be|is a)"):
            llm.generate(prompts, wrong)  # type: ignore[arg-type]


def test_each_node_of_a_tree_may_have_parameters_of_its_own(llm: LLM) -> None:
    leaves = [Node(f" {name}", samples=3, id=name) for name in ("one", "two", "three")]
    each = [
        SamplingParams(max_tokens=3, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=7, seed=2, top_k=3, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
    ]
    together = llm.run(Node("Q:", children=leaves), each).completions
    apart = [
        completion
        for leaf, params in zip(leaves, each, strict=True)
        for completion in llm.run(Node("Q:", children=[leaf]), params).completions
    ]
    assert tokens_of(together) == tokens_of(apart)
    with llm.stream(Node("Q:", children=leaves), each, skip=[("two", 0), ("two", 2)]) as resumed:
        left = {(c.prompt_id, c.sample_index): c.tokens for c in resumed}
    assert left == {
        (c.prompt_id, c.sample_index): c.tokens
        for c in together
        if (c.prompt_id, c.sample_index) not in {("two", 0), ("two", 2)}
    }
    # Without names and seeds, the samples of a prompt are numbered on through the tree.
    unnamed = Node("", children=[Node("Q: one", samples=2), Node("Q: one", samples=2)])
    assert len(set(tokens_of(llm.run(unnamed, [FREE, FREE]).completions))) == 4
    with pytest.raises(InputError, match="2 sampling parameters for 3 sampled nodes"):
        llm.run(Node("Q:", children=leaves), each[:2])
    with pytest.raises(InputError, match=r"params (must be|is a)"):
        llm.run(Node("Q:", children=leaves), ["n"] * 3)  # type: ignore[list-item]


def test_what_cannot_be_honoured_is_refused_by_name(llm: LLM) -> None:
    eight = SamplingParams(n=8)
    tree = Node("a")
    for call in (
        lambda: llm.run(tree, eight),
        lambda: llm.stream(tree, eight),
        lambda: llm.plan(tree, eight),
        lambda: llm.session(eight),
        lambda: llm.search(draw_four, ["a"], eight),
        lambda: llm.expand(Node("a", expand=[Expand(1)]), eight),
    ):
        with pytest.raises(InputError, match=r"n=8 is supported only in LLM\.generate"):
            call()
    with pytest.raises(InputError, match="logit_bias contains token 9999"):
        llm.generate(["a"], SamplingParams(logit_bias={9999: 1.0}))
    for options, name in (
        ({"dtype": "bfloat16"}, "dtype"),
        ({"device": "cuda"}, "device"),
        ({"check": False}, "check"),
        ({"revision": "main"}, "revision"),
        ({"trust_remote_code": True}, "trust_remote_code"),
    ):
        with pytest.raises(InputError, match=f"{name}= has an effect only when a model is loaded"):
            LLM(llm.model, tokenizer=llm.tokenizer, memory="1MiB", **options)
    for wrong, why in (
        ({"eager": "false"}, "eager must be True or False"),
        ({"max_rows": 2.5}, "max_rows must"),
        ({"page_size": "16"}, "page_size must be an integer"),
    ):
        with pytest.raises(InputError, match=why):
            LLM("no such folder", **wrong)


def test_a_loaded_models_own_impl_is_used(checkpoint: Path) -> None:
    from treegen.model.load import load_model
    from treegen.model.tokenizer import load_tokenizer

    model = load_model(str(checkpoint), check=False, device="cpu", impl="reference")
    tokenizer = load_tokenizer(str(checkpoint))
    for impl, used in (("auto", "reference"), ("cpu", "cpu")):
        llm = LLM(model, tokenizer=tokenizer, memory="1MiB", impl=impl)
        assert llm.run(Node("a", samples=3), SEEDED).usage.impl == used
    with pytest.raises(InputError, match="impl must be auto or one of"):
        LLM(model, tokenizer=tokenizer, memory="1MiB", impl="foo")


def test_what_is_no_list_or_budget_is_refused(llm: LLM) -> None:
    for problems in ("abc", b"abc", {"a": "b"}, 5):
        with pytest.raises(InputError, match="problems must be a list"):
            llm.search(draw_four, problems)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="prompts must be a list"):
        llm.generate(5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="pairs must be a list"):
        llm.score("ab")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"pair 0 must be .*, got 'ab'"):
        llm.score(["ab"])  # type: ignore[list-item]
    for budget in (100, "100", {"tokens": 5}):
        with pytest.raises(InputError, match="budget must be a Budget"):
            llm.search(draw_four, ["a"], budget=budget)  # type: ignore[arg-type]
    faulty: list[dict[str, Any]] = [{"tokens": 2.5}, {"tokens": 10**20}, {"calls": "9"}]
    for limits in (*faulty, {"nodes": True}, {"seconds": float("nan")}):
        with pytest.raises(InputError, match=f"budget {next(iter(limits))} must be"):
            Budget(**limits)
    for count in ("2", 2.5, True):
        with pytest.raises(InputError, match="rows must be an integer"):
            llm.search(draw_four, ["a"], rows=count)  # type: ignore[arg-type]
    for ids in ([5.0, 6.5], ["a"], [2**40], [-1]):
        with pytest.raises(InputError, match="token id"):
            llm.score([(ids, [5])])  # type: ignore[list-item]
        with pytest.raises(InputError, match="token id"):
            llm.generate([ids])  # type: ignore[arg-type]

    async def ask(root: SearchNode) -> object:
        return root.search.prompt([5.0, 6.5])  # type: ignore[list-item]

    with pytest.warns(RuntimeWarning, match="the only search failed"):
        (result,) = llm.search(ask, ["a"], SEEDED)
    assert "integer" in (result.error or "")
    # What can be read once is read once.
    assert len(llm.generate((text for text in ("a", "b")), FREE)) == 2
    assert len(llm.search(draw_four, iter(["a", "b"]), FREE)) == 2
    assert len(llm.score(pair for pair in [("a", "b")])) == 1


# Scores


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_score_needs_no_place_for_its_last_token(family: str, tmp_path: Path) -> None:
    tiny_models.save_tiny_model(tmp_path, family)
    small = load(tmp_path, prefill_chunk=64)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    length = small.spec.context_length
    ids = [3 + i * i % 290 for i in range(length + 1)]
    whole, last, short = small.score([(ids[:-3], ids[-3:]), (ids[:-1], ids[-1:]), (ids[:4], [9])])
    with torch.no_grad():
        logprobs = stock(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
    want = [float(logprobs[length - k, ids[length - k + 1]]) for k in (3, 2, 1)]
    assert whole.logprobs == pytest.approx(want, abs=1e-3)
    assert last.logprobs == pytest.approx(want[2:], abs=1e-3)
    assert short.tokens == (9,)
    with pytest.raises(CapacityError, match="1 more than the maximum"):
        small.score([([5, *ids[:-1]], ids[-1:])])
    with small.session() as session:
        root = session.root(ids[:-1])
        assert session.score({root: ["Q"]})[root][0].tokens
        with pytest.raises(CapacityError, match="more than the maximum"):
            session.score({root: ["Q."]})


def test_contexts_without_a_token_begin_with_the_tokenizers_own(llm: LLM) -> None:
    merged = llm.tokenizer("Ann", add_special_tokens=False)["input_ids"]
    assert len(merged) < len(llm.tokenizer("A", add_special_tokens=False)["input_ids"]) + 2
    bos = [llm.tokenizer.bos_token_id]
    pairs: list[Any] = [("", " yes"), ("a context", " yes"), ("A", "nn"), ([], [7, 8])]
    empty, plain, spanning, ids = llm.score(pairs)
    yes = llm.tokenizer(" yes", add_special_tokens=False)["input_ids"]
    want = llm.score([(bos, yes), ("a context", " yes"), (bos, merged), (bos, [7, 8])])
    for got, expected in zip((empty, plain, spanning, ids), want, strict=True):
        assert got.tokens == expected.tokens
        assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    with pytest.raises(InputError, match="continuation adds no token"):
        llm.score([("a", "")])


def test_scores_come_as_they_are_known(checkpoint: Path) -> None:
    llm = load(checkpoint, prefill_chunk=16)
    pairs = [(f"{i} context of some length, number", f" {i} and so on") for i in range(8)]
    want = llm.score(pairs)
    with llm.score_stream(pairs) as stream:
        first = next(stream)
        with pytest.raises(InputError, match="not finished"):
            llm.score(pairs)
        rest = list(stream)
    got = dict([first, *rest])
    assert len(rest) == 7 and [got[i].tokens for i in range(8)] == [w.tokens for w in want]
    for i, score in enumerate(want):
        assert got[i].logprobs == pytest.approx(score.logprobs, abs=1e-4)
    llm.score_stream(pairs).close()
    assert llm.cache.pool.num_used == 0 and llm.score([]) == []


# Chat


def test_chat_templates_take_tools_and_arguments(llm: LLM) -> None:
    llm.tokenizer.chat_template = (
        "{% for t in tools or [] %}<{{ t.name }}>{% endfor %}{% for m in messages %}[{{ m.role }}] "
        "{{ m.content or m.tool_calls[0].name }}\n{% endfor %}"
        "{% if thinking %}[think]{% endif %}[assistant] "
    )
    user: dict[str, Any] = {"role": "user", "content": "hi"}
    call: dict[str, Any] = {"role": "assistant", "tool_calls": [{"name": "add"}]}
    messages: list[dict[str, Any]] = [user, call, {"role": "tool", "content": "4"}]
    tools = [{"name": "add"}, {"name": "sub"}]
    text = "<add><sub>[user] hi\n[assistant] add\n[tool] 4\n[think][assistant] "
    want = llm.tokenizer.encode(text, add_special_tokens=False)
    try:
        root = Node([user], samples=0, template={"tools": tools, "thinking": False})
        tree = Node(messages[1:], id="x", template={"thinking": True})
        (request,) = llm.plan(Node(root.content, children=[tree], template=root.template)).requests
        assert request.tokens.tolist() == want
        options: dict[str, Any] = {"tools": tools, "chat_template_kwargs": {"thinking": True}}
        flat = llm.generate([messages], SEEDED, **options)
        assert tokens_of(flat[0]) == tokens_of(llm.generate([want], SEEDED)[0])

        async def length(node: SearchNode) -> int:
            await asyncio.sleep(0)
            return node.num_context_tokens

        (result,) = llm.search(length, [messages], SEEDED, **options)
        assert result.value == len(want)
        with llm.session() as session:
            assert session.root(messages, **options).num_context_tokens == len(want)
        # A last turn that calls tools is over: the assistant's next one follows.
        (request,) = llm.plan(Node([user, call], id="y")).requests
        assert llm.tokenizer.decode(request.tokens).endswith("[assistant] add\n[assistant] ")
        with pytest.raises(InputError, match="does not start with chat messages"):
            llm.generate(["text"], SEEDED, **options)
        with pytest.raises(TreeError, match="template cannot contain 'tokenize'"):
            Node([user], template={"tokenize": True})
        with pytest.raises(TreeError, match="content'\\] must be a string, got None"):
            Node([{"role": "assistant", "content": None}])
    finally:
        llm.tokenizer.chat_template = None


def test_min_tokens_and_stop_strings_by_hand() -> None:
    rng = np.random.default_rng(6)
    ended = 0
    for _ in range(300):
        least = int(rng.integers(0, 6))
        stops = ["".join(rng.choice(list("cde"), rng.integers(1, 4))) for _ in range(2)]
        stopping = make_stop_conditions(SamplingParams(stop=stops, min_tokens=least, max_tokens=12))
        tokens = rng.integers(2, 5, 12).tolist()
        text = LetterTokenizer().decode(tokens)
        expected = None
        for count in range(least + 1, 13):
            found = [(count - len(s), s) for s in stops if text[:count].endswith(s)]
            if found:
                start, stop = min(found)
                expected = count, ("stop", stop, text[:start])
                break
        got = None
        for count in range(1, 13):
            if ending := stopping.endings([[2]], [tokens[:count]], [99])[0]:
                got = count, ending
                break
        assert got == expected
        ended += expected is not None
    assert ended > 100
