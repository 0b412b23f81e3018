"""Structured output on tiny real checkpoints, and what is refused before anything runs."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from engine_cases import load
from transformers import AddedToken, AutoModelForCausalLM

from treegen import LLM, InputError, Node, SamplingParams
from treegen.common import bounded
from treegen.common.bounded.worker import FileWorker
from treegen.engine.features import grammars as row_grammars
from treegen.errors import ModelWarning
from treegen.prompts import grammars
from treegen.prompts.grammar_termination import has_finite_text, has_finite_value
from treegen.search import SearchNode

pytest.importorskip("llguidance")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "n": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["ok", "n"],
    "additionalProperties": False,
}
CHOICES = ["yes", "no", "yesterday", "Bob has 14 pens"]
WAYS: list[dict[str, Any]] = [
    {},
    {"max_rows": 7, "run_ahead": True},
    {"speculate": "ngram"},
    {"page_size": 4, "memory": 100_000, "prefill_chunk": 5},
]
PROMPTS = ["Q: Bob has 14 pens. How many?\nA:", "Is it so?", "Q: Bob has 14"]


def tree_of(samples: int) -> Node:
    return Node("", children=[Node(text, samples=samples, id=text) for text in PROMPTS], samples=0)


def brute(llm: LLM, texts: Sequence[str], before: str, vocab_size: int) -> list[int]:
    """The tokens after which a text still begins one of some texts, and the end if it is one."""
    found = []
    for token in range(vocab_size):
        piece = llm.tokenizer.decode([token])
        if piece and any(text.startswith(before + piece) for text in texts):
            found.append(token)
    ends = set(llm.spec.eos_token_ids)
    return [token for token in found if token not in ends] + sorted(ends) * (before in texts)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_rows": 3, "run_ahead": True},
        {"speculate": "ngram", "run_ahead": True},
        {"sharing": "off", "page_size": 4, "memory": 60_000},
    ],
)
def test_samples_are_those_of_the_masked_distribution(
    checkpoint: Path, options: dict[str, Any]
) -> None:
    """Each log-probability is the model's own, renormalized over what brute force allows."""
    llm = load(checkpoint, **options)
    stock = AutoModelForCausalLM.from_pretrained(checkpoint)
    params = SamplingParams(
        choice=CHOICES, max_tokens=30, seed=2, logprobs_mode="processed_logprobs", temperature=1.3
    )
    done = llm.run(tree_of(4), params).completions
    assert len({c.text for c in done}) > 1
    for c in done:
        assert c.finish_reason == "stop" and c.text in CHOICES
        prompt = llm.tokenizer(c.prompt_id)["input_ids"]
        with torch.no_grad():
            logits = stock(torch.tensor([[*prompt, *c.tokens]])).logits[0].float() / 1.3
        text = ""
        for at, (token, logprob) in enumerate(zip(c.tokens, c.logprobs, strict=True)):
            may = brute(llm, CHOICES, text, logits.shape[-1])
            assert token in may
            rest = [each.removeprefix(text) for each in CHOICES if each.startswith(text)]
            if all(each[:1] == rest[0][:1] != "" for each in rest):  # spelled as the tokenizer does
                assert logprob == 0
                text += llm.tokenizer.decode([token])
                continue
            own = logits[len(prompt) + at - 1, may].log_softmax(-1)[may.index(token)]
            assert logprob == pytest.approx(float(own), abs=1e-4)
            text += "" if token in llm.spec.eos_token_ids else llm.tokenizer.decode([token])


def test_json_is_of_its_schema_and_logprobs_are_the_models(checkpoint: Path) -> None:
    plain, fast = load(checkpoint), load(checkpoint, speculate="ngram", draft_tokens=6)
    params = SamplingParams(json_schema=SCHEMA, max_tokens=90, seed=3, logprobs=2, temperature=0.7)
    want, got = plain.run(tree_of(5), params), fast.run(tree_of(5), params)
    ended = 0
    for actual, expected in zip(want.completions, got.completions, strict=True):
        assert actual.tokens == expected.tokens
        assert actual.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        if actual.finish_reason == "stop":
            ended += 1
            found = json.loads(actual.text)
            assert set(found) == {"ok", "n"} and type(found["ok"]) is bool and 0 <= found["n"] <= 99
    assert ended
    # What a grammar spells in one way is guessed, and a pass draws several tokens of it.
    assert got.usage.accepted_tokens > 0


def test_all_kinds_end_as_they_should(checkpoint: Path) -> None:
    llm = load(checkpoint)
    for how, right in (
        ({"regex": "[ab]{3}-[0-9]{2}"}, lambda t: len(t) == 6 and t[3] == "-"),
        ({"grammar": 'start: "x" pair+\npair: "(" /[0-9]/ ")"'}, lambda t: t.startswith("x(")),
        ({"grammar": 'root ::= "x" ("y" | "z")'}, lambda t: t in ("xy", "xz")),
        ({"choice": ["one", "two"]}, lambda t: t in ("one", "two")),
    ):
        done = llm.generate(PROMPTS, SamplingParams(max_tokens=60, seed=1, n=3, **how))
        texts = [c.text for each in done for c in each if c.finish_reason == "stop"]
        assert texts and all(map(right, texts)), texts


@pytest.mark.parametrize("options", WAYS)
def test_lanes_change_no_sample(
    checkpoint: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows dealt among many lanes one by one, with two grammars at once and preemption."""
    params = [
        SamplingParams(n=7, json_schema=SCHEMA, max_tokens=25, seed=1),
        SamplingParams(n=7, regex="[a-f]{2,9}( [0-9]+)*", max_tokens=11, seed=2),
        SamplingParams(n=7, max_tokens=5, seed=3),
    ]

    def run() -> list[list[tuple[int, ...]]]:
        calls = load(checkpoint, **options).generate(PROMPTS, params)
        return [[each.tokens for each in call] for call in calls]

    monkeypatch.setattr(grammars, "_MAX_LANES", 1)
    whole = run()
    monkeypatch.setattr(row_grammars, "_ROWS_OF_LANE", 1)
    monkeypatch.setattr(grammars, "_num_lanes", lambda _seconds: 5)
    assert run() == whole


@pytest.mark.parametrize("options", WAYS)
def test_rows_with_the_same_text_share_masks_and_draw_the_same(
    checkpoint: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [
        SamplingParams(n=12, json_schema=SCHEMA, max_tokens=25, seed=1),
        SamplingParams(n=12, choice=["yes, it is", "yes, it was", "no"], max_tokens=30, seed=2),
        SamplingParams(n=12, json_schema=SCHEMA, max_tokens=15, temperature=0),
        SamplingParams(n=3, max_tokens=5, seed=3),
    ]
    num_masks = []
    build = row_grammars.RowGrammars._build_masks

    def count(self: Any, matchers: Any, drafts: Any = None, **rest: Any) -> Any:
        num_masks.append(len(matchers))
        return build(self, matchers, drafts, **rest)

    def run() -> tuple[list[list[tuple[int, ...]]], int]:
        num_masks.clear()
        calls = load(checkpoint, **options).generate(PROMPTS[:1] * 4, params)
        return [[sample.tokens for sample in call] for call in calls], sum(num_masks)

    monkeypatch.setattr(row_grammars.RowGrammars, "_build_masks", count)
    shared, num_shared = run()
    monkeypatch.setattr(row_grammars, "find_distinct", lambda keys: (np.arange(len(keys)),) * 2)
    alone, num_alone = run()
    assert shared == alone
    assert num_shared < num_alone * 0.8 or "speculate" in options


def test_a_row_that_shares_a_mask_shares_its_failure(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar that cannot go on ends all rows of its text, not only the first."""

    llm = load(checkpoint)
    (eos, *_) = llm.spec.eos_token_ids

    def fail(self: Any, slots: Any, matchers: Any, drafts: Any, table: Any) -> None:
        rows = self._run.rows
        has_failed = rows.count[slots] == 3
        self._failed[slots] = np.where(has_failed, rows.count[slots], -1)
        self._reasons |= dict.fromkeys(np.array(slots)[has_failed].tolist(), "made to fail")
        table[has_failed] = 0
        table[has_failed, eos // 32] = 1 << eos % 32

    monkeypatch.setattr(row_grammars.RowGrammars, "_record_failures", fail)
    params = SamplingParams(n=9, regex="abcdefgh[0-9]*", max_tokens=20, temperature=0)
    with pytest.warns(ModelWarning, match="made to fail"):
        (samples,) = llm.generate(PROMPTS[:1], params)
    assert [(len(sample.tokens), sample.finish_reason) for sample in samples] == [(3, "error")] * 9


def test_a_grammar_of_few_rows_has_one_lane(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows of others have begun in the same run."""
    made = []

    class Counted(grammars.Grammar):
        def _new(self) -> Any:
            made.append(self)
            return super()._new()

    monkeypatch.setattr(grammars, "Grammar", Counted)
    monkeypatch.setattr(grammars, "_num_lanes", lambda _seconds: 5)
    params = [
        SamplingParams(n=20, regex=regex, max_tokens=1, seed=1)
        for regex in ("a+", "b+", "c+", "d+", "e+")
    ]
    load(checkpoint).generate(["Is it so?"] * 5, params)
    assert len(made) == len(set(made)) == 5
    made.clear()
    load(checkpoint).generate(["Is it so?"], SamplingParams(n=70, regex="f+", max_tokens=1))
    assert len(made) == 3


def test_a_slow_grammar_has_few_lanes() -> None:
    assert [grammars._num_lanes(seconds) for seconds in (0, 0.001, 0.1, 0.4, 9)] == [
        16,
        16,
        5,
        1,
        1,
    ]


def test_a_search_goes_on_in_the_state_of_the_node(checkpoint: Path) -> None:
    llm = load(checkpoint)
    regex = "(ab|cd){2}-[0-9]{3}"
    with llm.session(SamplingParams(regex=regex, seed=1, max_tokens=3)) as session:
        root = session.root(PROMPTS[0])
        leaves = [root]
        for _ in range(8):
            found = session.sample(dict.fromkeys(leaves[:3], 2))
            leaves = [child for children in found.values() for child in children]
        texts = {leaf.path_text for leaf in leaves if leaf.finish_reason == "stop"}
        assert texts and all(len(text) == 8 and text[4] == "-" for text in texts)
        child = session.sample({root: 1})[root][0].extend("what is this?")
        with pytest.raises(InputError, match="is not a valid beginning of its regex"):
            session.sample({child: 1})


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("options", [{}, {"speculate": "ngram"}, {"run_ahead": True}])
def test_the_grammar_begins_after_the_thinking(
    is_special: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    size = tiny_models.VOCAB_SIZE + 2
    tiny_models.save_tiny_model(tmp_path, "llama", vocab_size=size)
    tokenizer = tiny_models.tiny_tokenizer().__class__.from_pretrained(tmp_path)
    tags = [
        AddedToken(tag, special=is_special, normalized=False) for tag in ("<think>", "</think>")
    ]
    tokenizer.add_tokens(tags, special_tokens=is_special)
    tokenizer.save_pretrained(tmp_path)
    llm = load(tmp_path, max_rows=5, **options)
    # Some samples open a thinking of their own, and some end it before their budget does.
    bias = {size - 2: 3.5, size - 1: 3.0}
    params = SamplingParams(choice=CHOICES, max_tokens=40, seed=4, logit_bias=bias)
    inside, outside = f"{PROMPTS[0]}<think>\n", PROMPTS[0]
    thought = answered = 0
    for budget in (None, 0, 5):
        limited = replace(params, max_thinking_tokens=budget)
        for number, each in enumerate(llm.generate([inside, outside], replace(limited, n=6))):
            for c in each:
                assert c.thinking is not None or number
                thought += number and c.thinking is not None
                if c.thinking is not None and not c.thinking.is_closed:
                    continue  # random weights may end a text while it thinks
                if c.finish_reason == "stop":
                    answered += 1
                    assert c.answer in CHOICES
                else:
                    assert any(choice.startswith(c.answer) for choice in CHOICES)
    assert thought and answered


@pytest.mark.parametrize("options", [{}, {"speculate": "ngram"}, {"run_ahead": True}])
def test_the_grammar_begins_after_a_closing_tag_that_other_tokens_spell(
    checkpoint: Path, options: dict[str, Any]
) -> None:
    llm = load(checkpoint, **options)
    (tag,) = llm.tokenizer.encode("A", add_special_tokens=False)
    (longer,) = llm.tokenizer.encode("Answer", add_special_tokens=False)
    params = SamplingParams(choice=CHOICES, max_tokens=40, seed=4, reasoning_tags=("Q", "A"))
    for bias in ({longer: 100.0}, {longer: 100.0, tag: -100.0}):
        for c in llm.generate(["Bob has Q"], replace(params, n=4, logit_bias=bias))[0]:
            assert c.tokens[0] == longer and c.thinking is not None and c.thinking.num_tokens == 1
            assert c.finish_reason == "stop" and c.text.removeprefix("Answer") in CHOICES


def test_a_budget_counts_from_the_start_of_each_sample_of_a_path(checkpoint: Path) -> None:
    llm = load(checkpoint)
    closing = tuple(llm.tokenizer.encode(" A:", add_special_tokens=False))
    # The samples do not close their reasoning themselves.
    bias = {id: -100.0 for id in range(tiny_models.VOCAB_SIZE) if "A" in llm.tokenizer.decode([id])}
    params = SamplingParams(
        choice=CHOICES, reasoning_tags=("Q", "A"), thinking_end=" A:", logit_bias=bias
    )
    texts: list[str] = []

    async def grow(root: SearchNode) -> None:
        (first,) = await root.sample(1, max_tokens=2)
        # The answers begin in this sample, or in one below it that has another budget.
        for num in (40, 3 + len(closing)):
            (second,) = await first.extend(" Q").sample(1, max_thinking_tokens=3, max_tokens=num)
            (third,) = await second.sample(1, max_tokens=40)
            assert second.tokens[3 : 3 + len(closing)] == closing
            texts.append((second.text + third.text).partition(" A:")[2])

    llm.search(grow, [("one", "Bob has Q")], params)
    assert len(texts) == 2 and set(texts) <= set(CHOICES)


@pytest.mark.parametrize(
    ("prompt", "regex", "tags"),
    [
        ("Bob has 14", "aQ[0-9]{3}", ("Q", "A")),  # opens it at the end of a sample
        ("so A", "Q[0-9]{3}", ("Q", "A")),  # opens it after reasoning
        ("Bob has 14", "<think>[0-9]{3}", ("<think>", "</think>")),  # by several tokens
    ],
)
def test_a_budget_does_not_end_the_text_of_a_grammar(
    prompt: str, regex: str, tags: tuple[str, str], checkpoint: Path
) -> None:
    llm = load(checkpoint)
    texts: list[str] = []

    async def grow(root: SearchNode) -> None:
        for num in (2, 40):
            (first,) = await root.sample(1, max_tokens=num)
            (second,) = await first.sample(1, max_tokens=40)
            texts.append(first.text + second.text)

    (opening, *_) = llm.tokenizer.encode(tags[0], add_special_tokens=False)
    params = SamplingParams(
        regex=regex, reasoning_tags=tags, max_thinking_tokens=0, logit_bias={opening: -100.0}
    )
    llm.search(grow, [("one", prompt)], params)
    assert len(texts) == 2 and all(re.fullmatch(regex, text) for text in texts)
    (completion,) = llm.generate([prompt], params)[0]
    assert completion.thinking is None and re.fullmatch(regex, completion.text)


@pytest.mark.parametrize("options", [{}, {"speculate": "ngram"}, {"run_ahead": True}])
@pytest.mark.parametrize(
    ("prompt", "thought", "budget"),
    [("so A", "", None), ("so A", "", 0), ("so Q", " A:", 0), ("so Q", "? A:", 1)],
)
def test_given_tokens_are_drawn_whatever_the_grammar_and_the_budget(
    prompt: str, thought: str, budget: int | None, options: dict[str, Any], checkpoint: Path
) -> None:
    llm = load(checkpoint, **options)
    params = SamplingParams(
        choice=CHOICES, max_tokens=40, reasoning_tags=("Q", "A"), thinking_end=" A:", seed=4
    )
    params = replace(params, max_thinking_tokens=budget)
    tokens = llm.tokenizer.encode(thought, add_special_tokens=False)
    plan = llm.plan(Node(prompt, id="one"), params)
    for choice in CHOICES:
        given = (*tokens, *llm.tokenizer.encode(choice[:2], add_special_tokens=False))
        (request,) = plan.requests
        given_plan = llm.model_info.plan([replace(request, forced=given)])
        with llm.start_plan(given_plan, params) as stream:
            (completion,) = stream
        assert completion.tokens[: len(given)] == given
        assert completion.text.removeprefix(thought) in CHOICES


MARKS = ("<|start|>", "<|end|>", "<|channel|>", "<|message|>")
HARMONY = (
    "Is it so?<|start|>assistant",
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>",
    "Bob has 14 pens",
)


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was trained to think in one channel and to answer in another."""
    path = tmp_path_factory.mktemp("harmony")
    size = tiny_models.VOCAB_SIZE + len(MARKS)
    tiny_models.save_tiny_model(path, "llama", vocab_size=size)
    tokenizer = tiny_models.tiny_tokenizer().__class__.from_pretrained(path)
    added = [AddedToken(mark, special=True, normalized=False) for mark in MARKS]
    tokenizer.add_tokens(added, special_tokens=True)
    tokenizer.chat_template = "<|channel|>final<|message|>"
    tokenizer.save_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    ids = torch.tensor([tokenizer("".join(HARMONY))["input_ids"]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("options", [{}, {"speculate": "ngram"}, {"run_ahead": True}])
def test_the_grammar_binds_the_final_channel_of_harmony(
    harmony: Path, options: dict[str, Any]
) -> None:
    llm = load(harmony, **options)
    question, thought, answer = HARMONY
    params = SamplingParams(choice=["yes", "no"], max_tokens=80, n=6, seed=1)
    # Samples think on their own, are cut short, or find the channel of the answer open.
    cases = [
        (question, replace(params, temperature=0, n=1), thought),
        (f"{question}<|channel|>analysis<|message|>", replace(params, max_thinking_tokens=0), ""),
        (f"{question}<|channel|>analysis<|message|>", replace(params, max_thinking_tokens=3), ""),
        (f"{question}{thought}", params, ""),
    ]
    (free,) = llm.generate([question], SamplingParams(temperature=0, max_tokens=60))
    assert answer in free[0].text
    for prompt, each, said in cases:
        for c in llm.generate([prompt], each)[0]:
            assert c.finish_reason == "stop" and c.answer in ("yes", "no"), (prompt, c)
            marked = llm.tokenizer.decode(c.tokens)
            assert marked.startswith(said)
            assert marked.removesuffix("</s>").endswith(c.answer)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"regex": "[0-9"}, "regex cannot be used"),
        ({"regex": "a("}, "regex cannot be used: unclosed group: (; correct the value"),
        ({"regex": "[z-a]"}, "range, the start must be <= the end: z-a; correct the value"),
        ({"regex": "(?!x)a"}, "look-ahead and look-behind, is not supported: (?!; correct"),
        ({"regex": r"\bfoo"}, r"regex cannot be used: look-around, such as \b, is not supported;"),
        ({"regex": r"(a)\1"}, r"regex cannot be used: backreferences are not supported: \1; corr"),
        ({"grammar": "start: b\nb: /a(/"}, "grammar cannot be used: at 2(4): unclosed group: (;"),
        ({"json_schema": {"type": "string", "pattern": "a("}}, "cannot be used: unclosed group: ("),
        ({"regex": f"{'a' * 300}("}, "regex cannot be used: unclosed group: (; correct the value"),
        ({"grammar": 'start: "a'}, "grammar cannot be used"),
        ({"grammar": 'start: "a" start'}, "the grammar matches no finite text"),
        ({"json_schema": {"type": "objekt"}}, "json_schema cannot be used: Invalid type"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable"),
        (
            {
                "json_schema": {
                    "type": "object",
                    "properties": {"a": {"$ref": "#"}},
                    "required": ["a"],
                }
            },
            "no finite JSON text can match json_schema",
        ),
        ({"json_schema": {"type": "object", "required": 5}}, "json_schema cannot be used"),
        ({"json_schema": {"type": "object", "required": [["a"]]}}, "json_schema cannot be used"),
        ({"json_schema": {"type": "array", "contains": {}}}, 'Unimplemented keys: ["contains"]'),
        ({"json_schema": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "use anyOf"),
    ],
)
def test_what_cannot_be_satisfied_is_refused_before_anything_runs(
    checkpoint: Path, how: dict[str, Any], message: str
) -> None:
    llm = load(checkpoint)
    with pytest.raises(InputError, match=re.escape(message)):
        llm.make_stop_conditions(SamplingParams(**how))


def test_a_hostile_structure_costs_a_bounded_time_and_one_line(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load(checkpoint)
    deep: dict[str, Any] = {"type": "null"}
    for _ in range(200):
        deep = {"type": "array", "items": deep, "minItems": 1}
    for how in (
        {"json_schema": deep},
        {"regex": "(" * 5_000 + "a" + ")" * 5_000},
        {"grammar": f"start: {'(' * 20_000} 'a' {')' * 20_000}"},
    ):
        with pytest.raises(InputError) as caught:
            llm.make_stop_conditions(SamplingParams(**how))
        assert len(str(caught.value)) < 300
    # What many patterns have in common takes several times longer with each further one.
    monkeypatch.setattr(grammars, "_MAX_COMPILE_SECONDS", 0.01)
    patterns = [{"type": "string", "pattern": f"a{{{size}}}"} for size in range(1, 20)]
    with pytest.raises(InputError, match=r"json_schema takes more than 0.01 seconds"):
        llm.make_stop_conditions(SamplingParams(json_schema={"allOf": patterns}))


def test_no_thread_goes_on_to_compile_a_grammar_that_takes_too_long(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load(checkpoint)
    file = Path(bounded.__file__).with_name("grammar_worker.py")
    worker = FileWorker(file, None, seconds=0.3, memory=1 << 30, what="", site=True)
    monkeypatch.setattr(grammars, "_WORKER", worker)
    before = {*threading.enumerate()}
    patterns = [{"type": "string", "pattern": f"a{{{size}}}"} for size in range(1, 40)]
    with pytest.raises(InputError, match="compiling json_schema takes too much time or memory"):
        llm.make_stop_conditions(SamplingParams(json_schema={"allOf": patterns}))
    for thread in {*threading.enumerate()} - before:
        thread.join(20)
        assert not thread.is_alive()
    assert llm.make_stop_conditions(SamplingParams(regex="a{40}")).grammar is not None


def test_the_time_to_compile_is_that_of_all_its_parts(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(make: Any) -> Any:
        def work(*given: Any) -> Any:
            time.sleep(0.7)
            return make(*given)

        return work

    llm = load(checkpoint)
    llm.make_stop_conditions(SamplingParams(choice=["a", "b"]))
    monkeypatch.setattr(grammars, "_MAX_COMPILE_SECONDS", 1.2)
    monkeypatch.setattr(grammars, "_compile_structure", late(grammars._compile_structure))
    monkeypatch.setattr(grammars, "_warm_up", late(grammars._warm_up))
    with pytest.raises(InputError, match=r"choice takes more than 1.2 seconds"):
        llm.make_stop_conditions(SamplingParams(choice=["a", "c"]))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"json_schema": "{"}, "json_schema cannot be read"),
        ({"json_schema": 5}, "json_schema cannot be read"),
        ({"regex": ""}, "regex must be text"),
        ({"choice": "yes"}, "choice must be a list"),
        ({"choice": []}, "choice must be a list of texts"),
        ({"choice": ["a"], "regex": "a"}, "regex and choice cannot be used together"),
        ({"regex": "a", "ignore_eos": True}, "remove ignore_eos"),
        ({"regex": "a", "min_tokens": 2}, "remove ignore_eos and min_tokens"),
    ],
)
def test_bad_values_are_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SamplingParams(**how)


@pytest.mark.parametrize(
    ("schema", "ends"),
    [
        ({"type": "object"}, True),
        (
            {
                "$defs": {"t": {"type": "object", "properties": {"left": {"$ref": "#/$defs/t"}}}},
                "$ref": "#/$defs/t",
            },
            True,
        ),
        (
            {
                "$defs": {
                    "t": {
                        "type": "object",
                        "properties": {"left": {"$ref": "#/$defs/t"}},
                        "required": ["left"],
                    }
                },
                "$ref": "#/$defs/t",
            },
            False,
        ),
        ({"type": "array", "items": {"$ref": "#"}}, True),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, False),
        (
            {"anyOf": [{"type": "array", "items": {"$ref": "#"}, "minItems": 1}, {"type": "null"}]},
            True,
        ),
        ({"type": ["null", "array"], "items": {"$ref": "#"}, "minItems": 1}, True),
        ({"$ref": "#"}, False),
        ({"allOf": [{"type": "string"}, {"$ref": "#"}]}, False),
        ({"anyOf": [{"$ref": "#/anyOf/0"}, {"type": "null"}]}, True),
        ({"allOf": [{"$ref": "#/allOf/0"}]}, False),
        ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1.0}, False),
        ({"type": "object", "properties": 1, "required": 5, "anyOf": 3, "allOf": {}}, True),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": float("inf")}, True),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": float("nan")}, True),
        ({"anyOf": [{"$ref": "#/anyOf/" + "9" * 5_000}]}, True),
    ],
)
def test_schemas_that_never_end_are_found(schema: dict[str, Any], ends: bool) -> None:
    assert has_finite_value(schema) is ends


def test_what_ends_is_found_in_time_that_grows_with_the_text() -> None:
    def chain(last: Any, needed: int) -> dict[str, Any]:
        """Arrays of arrays, of two items each: as many ways through as no computer counts."""
        items = [[{"$ref": f"#/$defs/d{at + 1}"}] * needed for at in range(3_000)]
        defs: dict[str, Any] = {
            f"d{at}": {"type": "array", "prefixItems": each, "minItems": needed}
            for at, each in enumerate(items)
        }
        return {"$defs": {**defs, "d3000": last}, "$ref": "#/$defs/d0"}

    assert has_finite_value(chain({"type": "null"}, 2))
    assert not has_finite_value(chain({"$ref": "#"}, 2))
    rules = "\n".join(f'r{at}: "a" r{at + 1} (r{at + 1})' for at in range(20_000))
    assert has_finite_text(f'start: r0\n{rules}\nr20000: "z"')
    assert not has_finite_text(f"start: r0\n{rules}\nr20000: r0")
    assert has_finite_text(f'start: {"(" * 50_000}"a"{")" * 50_000}')
    assert has_finite_text(f'start: "{chr(92)}"' * 50_000)  # quotes that are never closed


@pytest.mark.parametrize(
    ("grammar", "ends"),
    [
        ('start: "a" | "b" start', True),
        ('start: "b" start', False),
        ('start: x\nx: "a" y\ny: "b" x', False),
        ('start: x\nx: "a" y?\ny: "b" x', True),
        ('start: x ("," x)*\nx: "[" start "]"\n  | "q"', True),
        ('start: x+\nx: "[" start "]"', False),
        ('start: x~0..2\nx: "[" x "]"', True),
        ('start: WORD [x]\nWORD: /a+/ // a comment: x\nx: "(" x ")"', True),
        ('%llguidance {}\nstart[capture]: %json {"type": "object"} | start', True),
        ('start: "a|b" x{2}\nx: "c" | x', True),
    ],
)
def test_grammars_that_never_end_are_found(grammar: str, ends: bool) -> None:
    assert has_finite_text(grammar) is ends
