"""Forced calls and choices on a real checkpoint, in every format, however its marks are tokens.

What is drawn is compared with a loop that asks a new matcher and the stock model at each token.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from tool_schemas import tool
from transformers import AddedToken, AutoModelForCausalLM

from treegen import LLM, Completion, InputError, Node, SamplingParams
from treegen.errors import ModelWarning
from treegen.prompts.grammars import Grammar, _warm_up
from treegen.prompts.replies.arguments import ToolSchemas
from treegen.prompts.replies.call_grammars import _SYNTAXES, call_grammar
from treegen.prompts.replies.formats import TOOL_FORMATS
from treegen.prompts.replies.parser import ReplyParser
from treegen.prompts.replies.types import ToolCall

pytest.importorskip("llguidance")

MARKS = sorted(
    {
        mark
        for name in _SYNTAXES
        for mark in (*TOOL_FORMATS[name].literals, *TOOL_FORMATS[name].inner)
        if mark not in ("Action:", "{")
    }
    | {"<answer>", "</answer>"}
)
SIZE = tiny_models.VOCAB_SIZE + len(MARKS)
TOOLS = [
    tool(
        name,
        {"x": {"enum": ["one", "<tool_call>"]}},
        additionalProperties=False,
        required=["x"],
    )
    for name in ("search", "see")
]
WAYS = [(name, way) for name, ways in _SYNTAXES.items() for way in range(len(ways))]
CHOICES = ["<answer>4", "<answer>41</answer>"]
PROMPT = "Q: Bob has 14 pens. How many?\nA:"
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "run ahead": {"run_ahead": True, "max_rows": 5},
    "speculation": {"speculate": "ngram", "draft_tokens": 6, "run_ahead": True},
    "preemption": {"run_ahead": True},
    "both": {"speculate": "ngram", "page_size": 4},
}


def checkpoint_of(path: Path, kind: str) -> Path:
    """A tiny model whose tokenizer has all marks as tokens: special, added, or in pieces."""
    tiny_models.save_tiny_model(path, "llama", vocab_size=SIZE)
    tokenizer = tiny_models.tiny_tokenizer().__class__.from_pretrained(path)
    if kind != "in pieces":
        is_special = kind == "special"
        added = [AddedToken(mark, special=is_special, normalized=False) for mark in MARKS]
        tokenizer.add_tokens(added, special_tokens=is_special)
    tokenizer.save_pretrained(path)
    return path


def structures(tokenizer: Any) -> list[SamplingParams]:
    """What each format has to write, and two texts with marks that belong to no format."""
    how: dict[str, Any] = {
        "max_tokens": 250,
        "seed": 3,
        "temperature": 0.9,
        "logprobs_mode": "processed_logprobs",
    }
    found = []
    for name, way in WAYS:
        known = copy.copy(tokenizer)
        known.chat_template = _SYNTAXES[name][way].mark
        text = call_grammar(known, TOOL_FORMATS[name], TOOLS, is_single=True)
        found.append(SamplingParams(grammar=text, **how))
    schema = {"const": {"said": "<answer> and </answer>"}}
    return [
        *found,
        SamplingParams(choice=CHOICES, **how),
        SamplingParams(json_schema=schema, **how),
        SamplingParams(regex="<answer>[0-9]{1,3}</answer>", **how),
    ]


def check(place: int, done: Completion, tokenizer: Any) -> None:
    """Check that a sample is what it was asked to be."""
    assert done.finish_reason == "stop", (place, done)
    if place < len(WAYS):
        text = tokenizer.decode(done.tokens[:-1], clean_up_tokenization_spaces=False)
        (call,) = ReplyParser(TOOL_FORMATS[WAYS[place][0]], ToolSchemas(TOOLS)).end(text)
        assert isinstance(call, ToolCall), text
        assert call.name in ("search", "see") and call.arguments["x"] in ("one", "<tool_call>")
    elif place == len(WAYS):
        assert done.text in CHOICES
    elif place == len(WAYS) + 1:
        assert json.loads(done.text) == {"said": "<answer> and </answer>"}
    else:
        assert re.fullmatch("<answer>[0-9]{1,3}</answer>", done.text)


def slow_logprobs(llm: LLM, stock: Any, done: Completion, params: SamplingParams) -> list[float]:
    """The log-probability of each token, by the stock model and matchers that share nothing."""
    assert params.structure is not None
    grammar = Grammar(params.structure, llm.tokenizer, [llm.tokenizer.eos_token_id], SIZE)
    prompt = llm.tokenizer(PROMPT)["input_ids"]
    with torch.no_grad():
        logits = stock(torch.tensor([[*prompt, *done.tokens]])).logits[0].float()
    found = []
    for at, token in enumerate(done.tokens):
        matcher = grammar._new()
        assert matcher.consume_tokens(list(done.tokens[:at]))
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        assert not matcher.is_error()
        barred = np.unpackbits(bits, bitorder="little")[:SIZE] == 0
        own = logits[len(prompt) + at - 1] / params.temperature
        own[torch.from_numpy(barred)] = -torch.inf
        found.append(float(own.log_softmax(-1)[token]))
    return found


@pytest.mark.parametrize(
    ("kind", "ways"),
    [
        ("added", ["run ahead"]),
        ("special", ["speculation", "preemption"]),
        ("in pieces", ["both"]),
    ],
)
def test_forced_texts_are_whole_and_drawn_as_by_a_slow_loop(
    kind: str, ways: list[str], tmp_path: Path
) -> None:
    path = checkpoint_of(tmp_path, kind)
    stock = AutoModelForCausalLM.from_pretrained(path)
    drawn: dict[str, list[Completion]] = {}
    for name in ("plain", *ways):
        options = OPTIONS[name]
        llm = LLM(str(path), **{"device": "cpu", "memory": "8MiB", "check": False, **options})
        structured = structures(llm.tokenizer)
        nodes = [Node(PROMPT, samples=2, id=str(place)) for place in range(len(structured))]
        drawn[name] = []
        with llm.stream(Node("", children=nodes, samples=0), structured) as stream:
            for turn in itertools.count():
                if not stream.has_work:
                    break
                drawn[name] += stream.step()
                if name in ("preemption", "both") and turn % 4 == 3:
                    stream.scheduler._collect_results()
                    stream.scheduler._admission.reclaim_pages()
                stream.scheduler.check()
        drawn[name].sort(key=lambda done: (int(done.prompt_id), done.sample_index))
        assert bool(stream.usage.preemptions) == (name in ("preemption", "both"))
        assert bool(stream.usage.accepted_tokens) == ("speculate" in options)
        want = [done.tokens for done in drawn["plain"]]
        assert [done.tokens for done in drawn[name]] == want, name
    for done in drawn["plain"]:
        place = int(done.prompt_id)
        check(place, done, llm.tokenizer)
        if not done.sample_index:
            logprobs = slow_logprobs(llm, stock, done, structured[place])
            assert done.logprobs == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("kind", ["added", "special"])
def test_a_grammar_may_name_an_added_token_as_any_other(kind: str, tmp_path: Path) -> None:
    path = checkpoint_of(tmp_path, kind)
    llm = LLM(str(path), device="cpu", memory="8MiB", check=False)
    grammar = 'start: <answer> "<x>" /[<a]>/ <[1]>? // <answer>'
    (done,) = llm.generate([PROMPT], SamplingParams(grammar=grammar, max_tokens=9, seed=1))[0]
    assert done.tokens[0] == llm.tokenizer.convert_tokens_to_ids("<answer>")
    assert done.text.removeprefix("<answer>") in ("<x><>", "<x>a>")


LETTERS = "Is it so? abababababaaaaaaaabababaabaab"
AMBIGUOUS = 'start: s\ns: "a" | "b" | s s'


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let parsers give up on a text of AMBIGUOUS that has some tokens."""
    from llguidance import LLMatcher, LLParserLimits

    def new(grammar: Grammar) -> LLMatcher:
        limits = LLParserLimits(max_items_in_row=25)
        return _warm_up(LLMatcher(grammar._tokens, grammar._compiled, log_level=0, limits=limits))

    monkeypatch.setattr(Grammar, "_new", new)


@pytest.mark.usefixtures("narrow")
def test_a_structure_that_cannot_go_on_fails_its_sample_and_no_other(tmp_path: Path) -> None:
    tiny_models.save_tiny_model(tmp_path, "llama")
    params = SamplingParams(n=8, grammar=AMBIGUOUS, max_tokens=40, seed=1, logprobs=1, confidence=2)
    whole: list[Any] = []
    for options in OPTIONS.values():
        llm = LLM(str(tmp_path), **{"device": "cpu", "memory": "8MiB", "check": False, **options})
        with pytest.warns(ModelWarning, match="finish_reason 'error'.*26 items"):
            done = llm.generate([LETTERS], params)[0]
        found = [
            (
                c.finish_reason,
                c.stop,
                c.text,
                c.tokens,
                len(c.logprobs),
                len(c.top_logprobs),
                len(c.confidences),
            )
            for c in done
        ]
        whole = whole or found
        assert found == whole
    assert {"error", "stop"} == {each[0] for each in whole}
    for reason, stop, text, tokens, *lengths in whole:
        assert set(text) <= {"a", "b"} and lengths == [len(tokens)] * 3
        assert (stop is None) == (reason == "error") == (1 not in tokens)


@pytest.mark.usefixtures("narrow")
def test_a_search_cannot_go_on_from_a_sample_that_failed(tmp_path: Path) -> None:
    tiny_models.save_tiny_model(tmp_path, "llama")
    llm = LLM(str(tmp_path), device="cpu", memory="8MiB", check=False)
    params = SamplingParams(grammar=AMBIGUOUS, seed=1, max_tokens=40)
    with llm.session(params) as session:
        root = session.root(LETTERS)
        with pytest.warns(ModelWarning, match="finish_reason 'error'"):
            children = session.sample({root: 8})[root]
        (failed, *_) = [each for each in children if each.finish_reason == "error"]
        assert failed.stop is None and set(failed.text) <= {"a", "b"}
        with pytest.raises(InputError, match=r"is not a valid beginning of its grammar .*26 items"):
            session.sample({failed: 1})
        ended = next(each for each in children if each.finish_reason == "stop")
        assert session.sample({root: 1})[root] and ended.text


def test_a_node_after_which_a_structure_allows_no_token_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the matcher failed only in a step of the run, the searches of all others would end."""
    from llguidance import LLMatcher

    tiny_models.save_tiny_model(tmp_path, "llama")
    llm = LLM(str(tmp_path), device="cpu", memory="8MiB", check=False)
    with llm.session(SamplingParams(regex="[ab]+", seed=1, max_tokens=3)) as session:
        root = session.root(LETTERS)
        (child,) = session.sample({root: 1})[root]
        compute = LLMatcher.compute_bitmask

        def compute_and_fail(matcher: LLMatcher) -> bytes:
            bits = compute(matcher)
            matcher.consume_token(llm.tokenizer.encode("c", add_special_tokens=False)[0])
            return bits

        monkeypatch.setattr(LLMatcher, "compute_bitmask", compute_and_fail)
        with pytest.raises(InputError, match="is not a valid beginning of its regex"):
            session.sample({child: 1})
        monkeypatch.setattr(LLMatcher, "compute_bitmask", compute)
        assert session.sample({root: 1})[root]


def test_a_structure_without_a_first_token_is_refused(tmp_path: Path) -> None:
    llm = LLM(str(checkpoint_of(tmp_path, "added")), device="cpu", memory="8MiB", check=False)
    with pytest.raises(InputError, match="grammar cannot be used"):
        llm.make_stop_conditions(SamplingParams(grammar="start: <[9999]>"))
