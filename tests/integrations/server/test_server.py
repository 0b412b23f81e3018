"""The server, asked by the real OpenAI client and by clients that mean no good."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from serving import HTTP, KEY, TEMPLATE, Running, draining, listening
from shallow_demo import shallow_demo
from tool_model import CALL, QUESTION, save_tool_model
from tool_schemas import ADD, tool

from treegen import LLM, AsyncLLM, Completion, InputError, SamplingParams
from treegen.prompts.replies.formats import TOOL_FORMATS

pytest.importorskip("openai")
import openai

from treegen.integrations.server.app import Server
from treegen.integrations.server.errors import for_client
from treegen.integrations.server.run import _GracefulServer, config_of, serve
from treegen.integrations.server.sockets import bind_socket, prepare_to_listen

PROMPT = "Question: Tom has 3 apples and buys 5 more. How many apples does Tom have?\nAnswer:"
CHAT = [{"role": "user", "content": "Tom has 3 apples"}]


def demo() -> LLM:
    how: Any = {"device": "cpu", "memory": "64MiB", "max_rows": 64, "check": False}
    llm = LLM(str(shallow_demo()), dtype="float32", **how)
    llm.tokenizer.chat_template = TEMPLATE
    return llm


def test_advice_for_clients_names_options_of_the_server() -> None:
    problem = "the tokenizer has no chat template"
    message = (
        f"{problem}; load the model with chat_template='TEMPLATE', use a chat model, or pass text"
    )
    advice = "start the server with --chat-template TEMPLATE, use a chat model, or pass text"
    assert for_client(message) == f"{problem}; {advice}"


@pytest.fixture(name="model", scope="module")
def _model() -> LLM:
    return demo()


@pytest.fixture(name="running")
def _running(model: LLM) -> Iterator[Running]:
    with listening(model) as running:
        yield running


@pytest.fixture(name="client")
def _client(running: Running) -> Iterator[openai.OpenAI]:
    http = openai.DefaultHttpxClient(verify=False)
    url = f"{running.url}/v1"
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, http_client=http) as client:
        yield client


@pytest.fixture(name="reference", scope="module")
def _reference() -> LLM:
    return demo()


def test_answers_are_those_of_generate(client: openai.OpenAI, reference: LLM) -> None:
    got = client.completions.create(
        model="demo", prompt=PROMPT, n=4, seed=1, max_tokens=30, stop=["\n", "is"], logprobs=2
    )
    want = reference.generate(
        [PROMPT], SamplingParams(n=4, seed=1, max_tokens=30, stop=["\n", "is"], logprobs=2)
    )[0]
    assert [(c.index, c.text, c.finish_reason) for c in got.choices] == [
        (c.sample_index, c.text, c.finish_reason) for c in want
    ]
    seen: set[int] = set()
    for choice, each in zip(got.choices, want, strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == pytest.approx(each.logprobs, abs=1e-4)
        assert choice.logprobs.top_logprobs is not None
        assert choice.logprobs.tokens is not None
        # As with OpenAI and vLLM, the drawn token is there even if it is not one of the two.
        for top, likely, token, logprob in zip(
            choice.logprobs.top_logprobs,
            each.top_logprobs,
            each.tokens,
            each.logprobs,
            strict=True,
        ):
            want_top = dict(likely) | {token: logprob}
            assert sorted(top.values()) == pytest.approx(sorted(want_top.values()), abs=1e-4)
        drawn = zip(choice.logprobs.tokens, choice.logprobs.top_logprobs, strict=True)
        assert all(token in top for token, top in drawn)
        seen |= {len(top) for top in choice.logprobs.top_logprobs}
        assert "".join(choice.logprobs.tokens).startswith(each.text)
    assert seen == {2, 3}
    assert got.usage is not None
    assert got.usage.completion_tokens == sum(c.num_tokens for c in want)
    assert got.usage.prompt_tokens == len(reference.tokenizer(PROMPT)["input_ids"])


def test_chat_answers_are_those_of_generate(client: openai.OpenAI, reference: LLM) -> None:
    got = client.chat.completions.create(
        model="demo",
        messages=CHAT,  # type: ignore[arg-type]
        n=2,
        seed=1,
        max_completion_tokens=12,
        logprobs=True,
        top_logprobs=3,
        temperature=0.8,
        top_p=0.9,
        logit_bias={"20": -5},
        user="me",
    )
    params = SamplingParams(
        n=2, seed=1, max_tokens=12, logprobs=3, temperature=0.8, top_p=0.9, logit_bias={20: -5}
    )
    want = reference.generate([CHAT], params)[0]
    assert [c.message.content for c in got.choices] == [c.text for c in want]
    for choice, each in zip(got.choices, want, strict=True):
        assert choice.logprobs is not None and choice.logprobs.content is not None
        logprobs = [token.logprob for token in choice.logprobs.content]
        assert logprobs == pytest.approx(each.logprobs, abs=1e-4)
        assert {len(token.top_logprobs) for token in choice.logprobs.content} == {3}
        for token in choice.logprobs.content:
            assert token.token in {other.token for other in token.top_logprobs}


def test_penalties_and_what_is_usual_are_those_of_generate(model: LLM, reference: LLM) -> None:
    body = {
        "prompt": PROMPT,
        "n": 2,
        "seed": 3,
        "max_tokens": 20,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "bad_words": ["the"],
    }
    usual = {"temperature": 0.4, "top_k": 9, "repetition_penalty": 1.9}
    params = SamplingParams(
        n=2,
        seed=3,
        max_tokens=20,
        frequency_penalty=1.5,
        repetition_penalty=1.2,
        no_repeat_ngram_size=3,
        bad_words=["the"],
        temperature=0.4,
        top_k=9,
    )
    (want,) = reference.generate([PROMPT], params)
    with listening(model, default_params=usual) as running:
        found = running.post("completions", body).json()
    assert [choice["text"] for choice in found["choices"]] == [c.text for c in want]


def test_structured_output_in_all_its_names(running: Running, reference: LLM) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    }
    body: dict[str, Any] = {"n": 3, "seed": 2, "max_tokens": 60}
    of_schema = SamplingParams(**body, json_schema=schema)
    named = {"name": "n", "schema": schema, "strict": True}
    for path, options in (
        ("completions", {"prompt": PROMPT, "guided_json": schema}),
        ("completions", {"prompt": PROMPT, "structured_outputs": {"json": schema}}),
        (
            "chat/completions",
            {"messages": CHAT, "response_format": {"type": "json_schema", "json_schema": named}},
        ),
    ):
        found = running.post(path, {**body, **options}).json()["choices"]
        prompt: Any = options.get("prompt", CHAT)
        (want,) = reference.generate([prompt], of_schema)
        texts = [each["text"] if "text" in each else each["message"]["content"] for each in found]
        assert texts == [c.text for c in want]
        ended = [t for t, c in zip(texts, want, strict=True) if c.finish_reason == "stop"]
        assert all(set(json.loads(text)) == {"n"} for text in ended)
    found = running.post("completions", {**body, "prompt": PROMPT, "guided_choice": ["x", "yz"]})
    assert {each["text"] for each in found.json()["choices"]} <= {"x", "yz"}
    anything = {"messages": CHAT, "response_format": {"type": "json_object"}, "max_tokens": 40}
    (choice,) = running.post("chat/completions", anything).json()["choices"]
    assert choice["message"]["content"].lstrip().startswith("{")


def test_thinking_has_a_budget_and_is_given_apart(running: Running, reference: LLM) -> None:
    body = {
        "messages": CHAT,
        "n": 3,
        "seed": 5,
        "max_tokens": 40,
        "max_thinking_tokens": 6,
        "chat_template_kwargs": {"reasoning": "on"},
    }
    params = SamplingParams(n=3, seed=5, max_tokens=40, max_thinking_tokens=6)
    (want,) = reference.generate([CHAT], params, chat_template_kwargs={"enable_thinking": True})
    assert all(c.thinking is not None and c.thinking.is_forced for c in want)

    def messages(**more: Any) -> list[Any]:
        found = running.post("chat/completions", json.dumps({**body, **more}).encode()).json()
        return [choice["message"] for choice in found["choices"]]

    assert [m["content"] for m in messages()] == [c.text for c in want]
    for message, c in zip(messages(separate_reasoning=True), want, strict=True):
        assert message["content"] == c.answer
        assert message["reasoning_content"] + "\n</think>\n\n" + c.answer == c.text.lstrip("\n")
    streamed = running.post(
        "chat/completions",
        json.dumps({**body, "separate_reasoning": True, "stream": True}).encode(),
    ).text
    said: dict[tuple[int, str], str] = {}
    for line in streamed.split("\n\n")[:-2]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            for name in ("content", "reasoning_content"):
                key = choice["index"], name
                said[key] = said.get(key, "") + choice["delta"].get(name, "")
    for index, message in enumerate(messages(separate_reasoning=True)):
        for name in ("content", "reasoning_content"):
            assert said[index, name] == message[name]
    off = messages(separate_reasoning=True, chat_template_kwargs={"reasoning": "off"})
    assert all("reasoning_content" not in message for message in off)


def test_a_structured_answer_of_a_thinking_model_is_the_structure_alone(running: Running) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"n": {"enum": ["</think>", 7]}, "m": {"const": 1}},
        "required": ["n", "m"],
        "additionalProperties": False,
    }
    body: dict[str, Any] = {
        "messages": CHAT,
        "n": 4,
        "seed": 5,
        "max_tokens": 60,
        "logprobs": True,
        "top_logprobs": 2,
    }
    kinds: dict[str, Any] = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        "guided_choice": ["yes", "no"],
    }
    for reasoning in ("on", "off"):
        thinks: dict[str, Any] = {"chat_template_kwargs": {"reasoning": reasoning}}
        thinks |= {"max_thinking_tokens": 6} if reasoning == "on" else {}
        for name, kind in kinds.items():
            ask = {**body, **thinks, name: kind}
            choices = running.post("chat/completions", json.dumps(ask).encode()).json()["choices"]
            streamed = running.post(
                "chat/completions", json.dumps({**ask, "stream": True}).encode()
            ).text
            said: dict[tuple[int, str], str] = {}
            for line in streamed.split("\n\n")[:-2]:
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    for part in ("content", "reasoning_content"):
                        key = choice["index"], part
                        said[key] = said.get(key, "") + choice["delta"].get(part, "")
            for choice in choices:
                message = choice["message"]
                assert choice["finish_reason"] == "stop"
                assert bool(message.get("reasoning_content")) == (reasoning == "on")
                for part in ("content", "reasoning_content"):
                    assert said[choice["index"], part] == message.get(part, "")
                if name == "guided_choice":
                    assert message["content"] in ("yes", "no")
                else:
                    found = json.loads(message["content"])
                    assert found in ({"n": "</think>", "m": 1}, {"n": 7, "m": 1})
                    assert message["content"] == json.dumps(found)  # no white space to get lost in
                content = choice["logprobs"]["content"]
                whole = b"".join(bytes(each["bytes"]) for each in content).decode()
                assert whole.endswith(message["content"])
                assert all(len(each["top_logprobs"]) == 2 for each in content)


@pytest.mark.parametrize("stop", [None, ["apples", "\n\n"]])
def test_a_stream_adds_up_to_the_whole(client: openai.OpenAI, stop: Any) -> None:
    options: dict[str, Any] = {"model": "demo", "n": 3, "seed": 5, "max_tokens": 40, "stop": stop}
    whole = client.completions.create(prompt=[PROMPT, "Tom"], logprobs=1, **options)
    texts, reasons, usage = [""] * 6, [""] * 6, None
    tokens: list[list[str]] = [[] for _ in texts]
    for piece in client.completions.create(
        prompt=[PROMPT, "Tom"],
        logprobs=1,
        stream=True,
        stream_options={"include_usage": True},
        **options,
    ):
        usage = piece.usage
        for choice in piece.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or ""
            tokens[choice.index] += (choice.logprobs and choice.logprobs.tokens) or []
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert tokens == [choice.logprobs and choice.logprobs.tokens for choice in whole.choices]
    assert usage == whole.usage

    chat_messages: Any = CHAT
    chat = client.chat.completions.create(messages=chat_messages, **options)
    said = [""] * 3
    parts: Any = client.chat.completions.create(messages=chat_messages, stream=True, **options)
    for part in parts:
        for each in part.choices:
            said[each.index] += each.delta.content or ""
    assert said == [choice.message.content for choice in chat.choices]


@pytest.mark.filterwarnings("ignore:cannot determine this model")
def test_a_stream_with_tools_adds_up_to_the_whole(client: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    options: dict[str, Any] = {
        "model": "demo",
        "messages": CHAT,
        "n": 2,
        "seed": 1,
        "max_tokens": 9,
        "logprobs": True,
        "tools": [tool],
    }
    whole = client.chat.completions.create(**options)
    chunks: dict[int, list[Any]] = {0: [], 1: []}
    for piece in client.chat.completions.create(stream=True, **options):
        chunks[piece.choices[0].index].append(piece.choices[0])
    for choice in whole.choices:
        begun, *rest = chunks[choice.index]
        assert begun.delta.role == "assistant" and len(rest) > 3
        assert "".join(r.delta.content or "" for r in rest) == choice.message.content
        assert choice.logprobs is not None and choice.logprobs.content is not None
        logprobs = [token.logprob for token in choice.logprobs.content]
        streamed = [t.logprob for r in rest if r.logprobs for t in r.logprobs.content]
        assert streamed == pytest.approx(logprobs, abs=1e-4)
        assert rest[-1].finish_reason == choice.finish_reason


@pytest.mark.parametrize("writer", ["qwen3_coder", "mistral"])
def test_tool_calls_are_found_whole_and_in_streams(tmp_path: Path, writer: str) -> None:
    llm = LLM(str(save_tool_model(tmp_path / "model", writer)), memory="32MiB", dtype="float32")
    options: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 120,
        "tools": ADD,
    }
    with (
        listening(llm) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key=KEY, max_retries=0) as client,
    ):
        (whole,) = client.chat.completions.create(**options).choices
        pieces = [p.choices[0] for p in client.chat.completions.create(stream=True, **options)]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    (call,) = whole.message.tool_calls or []
    streamed = [each for p in pieces for each in p.delta.tool_calls or []]
    assert call.type == "function" and len(streamed) == 1 and streamed[0].index == 0
    for function in (call.function, streamed[0].function):
        assert function is not None and function.arguments is not None
        found = {"name": function.name, "arguments": json.loads(function.arguments)}
        assert found == CALL
    assert "".join(p.delta.content or "" for p in pieces) == ""
    assert pieces[-1].finish_reason == "tool_calls"
    assert call.id and streamed[0].id and (writer != "mistral" or len(call.id) == 9)


def test_a_model_is_made_to_call_a_tool(
    running: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo model has never seen a tool: without a grammar it calls none."""
    properties = {"x": {"enum": [1, 20, 300]}, "is_big": {"type": "boolean"}}
    monkeypatch.setattr(running.served.replies, "format", TOOL_FORMATS["hermes"])
    monkeypatch.setattr(running.served.replies, "_is_warned", True)
    names = ("add", 'say "hi"')
    tools: list[Any] = [
        tool(name, properties, required=["x"], additionalProperties=False) for name in names
    ]
    options: dict[str, Any] = {
        "model": "demo",
        "messages": CHAT,
        "tools": tools,
        "temperature": 1.0,
        "max_tokens": 400,
        "seed": 5,
        "parallel_tool_calls": False,
    }
    named = {"type": "function", "function": {"name": names[1]}}
    (free,) = client.chat.completions.create(**options).choices
    assert free.message.tool_calls is None
    for choice, expected in (("required", set(names)), (named, {names[1]})):
        forced = {**options, "tool_choice": choice}
        choices = client.chat.completions.create(**forced, n=6).choices
        found = [
            [
                (c.function.name, json.loads(c.function.arguments))
                for c in each.message.tool_calls or []
            ]
            for each in choices
        ]
        for calls, each in zip(found, choices, strict=True):
            assert each.finish_reason == "tool_calls" and each.message.content is None
            ((name, arguments),) = calls
            assert name in expected
            assert arguments["x"] in (1, 20, 300) and arguments.keys() <= {"x", "is_big"}
        pieces = list(client.chat.completions.create(**forced, stream=True))
        said = [p.choices[0].delta for p in pieces]
        (call,) = [call for delta in said for call in delta.tool_calls or []]
        assert (call.function.name, json.loads(call.function.arguments)) == found[0][0]
        assert not any(delta.content for delta in said)
    # Where the format has no grammar, the client is told which have.
    monkeypatch.setattr(running.served.replies, "format", TOOL_FORMATS["glm"])
    response = running.post("chat/completions", {**options, "tool_choice": "required"})
    assert response.status_code == 400
    assert "'glm'" in response.text and "hermes" in response.text


def test_a_prompt_asked_for_again_gets_the_next_sample(running: Running, reference: LLM) -> None:
    async def ask() -> list[str]:
        http = openai.DefaultAsyncHttpxClient(verify=False)
        url = f"{running.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, http_client=http) as client:
            calls = [
                client.completions.create(model="demo", prompt="Tom was", max_tokens=12)
                for _ in range(8)
            ]
            return [(await call).choices[0].text for call in map(asyncio.ensure_future, calls)]

    want = reference.generate(["Tom was"], SamplingParams(n=8, max_tokens=12))[0]
    assert sorted(asyncio.run(ask())) == sorted(each.text for each in want)


def test_prompts_come_in_all_forms(running: Running, client: openai.OpenAI, reference: LLM) -> None:
    ids = reference.tokenizer(PROMPT)["input_ids"]
    options: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 5}
    texts = [
        [choice.text for choice in client.completions.create(prompt=prompt, **options).choices]
        for prompt in (PROMPT, ids, [PROMPT], [ids, ids])
    ]
    assert texts == [texts[0]] * 3 + [texts[0] * 2]
    echoed = client.completions.create(prompt=PROMPT, echo=True, logprobs=0, **options).choices[0]
    assert echoed.text == PROMPT + texts[0][0]
    context, rest = ids[:1], ids[1:]
    score = reference.score([(context, rest)])[0]
    assert echoed.logprobs is not None and echoed.logprobs.token_logprobs is not None
    assert echoed.logprobs.token_logprobs[1 : len(ids)] == pytest.approx(score.logprobs, abs=1e-4)
    (score,) = reference.score([(context, rest)], top=3)
    assert score.top is not None
    for echoed in (
        client.completions.create(prompt=PROMPT, echo=True, logprobs=3, **options).choices[0],
        client.completions.create(
            model="demo", prompt=[PROMPT, "x"], echo=True, max_tokens=0, logprobs=3
        ).choices[0],
    ):
        assert echoed.logprobs is not None and echoed.logprobs.top_logprobs is not None
        first, *tops = echoed.logprobs.top_logprobs[: len(ids)]
        assert first is None
        for top, want in zip(tops, score.top.logprobs, strict=True):
            # The prompt's token is there too, last if it is not one of the three.
            assert len(top) in (3, 4)
            likely = sorted(top.values(), reverse=True)[:3]
            assert likely == pytest.approx(want.tolist(), abs=1e-4)
    more = {"max_tokens": 4, "prompt_logprobs": 3, "temperature": 0, "n": 2}
    bodies: dict[str, Any] = {
        "completions": {"prompt": PROMPT},
        "chat/completions": {"messages": CHAT},
    }
    for name, body in bodies.items():
        for choice in running.post(name, json.dumps(body | more).encode()).json()["choices"]:
            none, *by_token = choice["prompt_logprobs"]
            assert none is None and all(3 <= len(each) <= 4 for each in by_token)
            if name == "completions":
                for token, top, value in zip(rest, by_token, score.logprobs, strict=True):
                    assert top[str(token)]["logprob"] == pytest.approx(value, abs=1e-4)
    only = client.completions.create(
        model="demo", prompt=[PROMPT, "x"], echo=True, max_tokens=0, logprobs=0
    )
    assert [choice.text for choice in only.choices] == [PROMPT, "x"]
    assert only.choices[0].logprobs is not None
    assert only.choices[0].logprobs.token_logprobs == pytest.approx(
        [None, *score.logprobs], abs=1e-4
    )


def test_a_message_has_the_text_of_all_its_parts(running: Running, reference: LLM) -> None:
    parts = [{"type": "text", "text": "Tom has 3"}, {"type": "text", "text": "apples"}]
    messages = [{"role": "user", "content": parts}]
    body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    got = running.post("chat/completions", body).json()["prompt_token_ids"]
    (want,) = reference.generate([messages], SamplingParams(max_tokens=1))
    assert got == want.prompt_token_ids
    assert "Tom has 3\napples" in reference.tokenizer.decode(got)
    both = {"type": "image_url", "image_url": IMAGE, "text": "apples"}  # is an image, not a text
    body["messages"] = [{"role": "user", "content": [both]}]
    assert running.post("chat/completions", body).status_code == 400


@pytest.mark.parametrize(
    ("written", "arguments"),
    [('{"a": null, "b": {"c": null}}', {"a": None, "b": {"c": None}}), ("", {}), ("{}", {})],
)
def test_arguments_of_earlier_calls_stay_as_they_are(
    written: str, arguments: dict[str, Any]
) -> None:
    requests = pytest.importorskip("treegen.integrations.server.requests")
    function = {"name": "add", "arguments": written}
    calls = [{"id": "1", "type": "function", "function": function}]
    message = requests.read_message({"role": "assistant", "content": None, "tool_calls": calls})
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": arguments}


FORCED = {
    "messages": CHAT,
    "tool_choice": "required",
    "tools": [{"type": "function", "function": {"name": "add"}}],
}
IMAGE = {"url": "data:image/png;base64,iVBORw0KGgo="}
REFUSED: list[tuple[Any, int, str]] = [
    (b"", 400, "is not JSON"),
    (b"[" * 9_000, 400, "is not JSON"),
    (b"[1]", 400, "not a JSON object"),
    (b'{"prompt": "a", "temperature": NaN}', 400, "NaN"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5_000 + b"}", 400, "JSON"),
    (b"\xff\xfe{", 400, "is not JSON"),
    (b"x" * 2**17, 413, "bytes"),
    ({}, 400, "prompt must be"),
    ({"prompt": {"a": 1}}, 400, "prompt must be"),
    ({"prompt": [1, "a"]}, 400, "prompt must be"),
    ({"prompt": [10**9]}, 400, "token id"),
    ({"prompt": "\ud800"}, 400, "content"),
    ({"prompt": "a" * 60_000}, 400, "the prompt has 60,001 tokens"),
    ({"prompt": ["a", "a" * 60_000]}, 400, "prompt '1' has 60,001 tokens"),
    ({"prompt": "a", "wings": 2}, 400, "wings is not supported; remove it"),
    ({"prompt": "a", "temprature": 2}, 400, "is not supported; did you mean 'temperature'?"),
    ({"prompt": "a", "length_penalty": 2}, 400, "length_penalty is not supported; remove it"),
    (
        {"prompt": "a", "allowed_token_ids": [10**6]},
        400,
        "allowed_token_ids contains token 1000000",
    ),
    ({"prompt": "a", "presence_penalty": 3}, 400, "presence_penalty must be"),
    ({"prompt": "a", "bad_words": "b"}, 400, "bad_words must be"),
    ({"prompt": "a", "bad_words": ["\ud800"]}, 400, "lone surrogate U+D800"),
    ({"prompt": "a", "best_of": 3}, 400, "best_of"),
    ({"prompt": "a", "suffix": "b"}, 400, "suffix is not supported; remove it"),
    ({"prompt": "a", "n": 10**6}, 400, "samples (--max-waiting plus --max-rows), got 1,000,000"),
    ({"prompt": "a", "n": True}, 400, "n must be"),
    ({"prompt": "a", "min_tokens": 10**30, "max_tokens": 10**30}, 400, "min_tokens must be"),
    ({"prompt": "a" * 9_000, "echo": True, "n": 150}, 400, "echo would return"),
    (
        {"prompt": "a" * 3_000, "echo": True, "logprobs": 20, "n": 60},
        400,
        "exceed the limit per response",
    ),
    (
        {"prompt": ["a b c d " * 99] * 60, "prompt_logprobs": 20, "n": 9},
        400,
        "exceed the limit per response",
    ),
    ({"prompt": "a", "prompt_logprobs": 21}, 400, "prompt_logprobs"),
    ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, 400, "cannot be streamed"),
    ({"prompt": ["a"] * 999, "echo": True, "max_tokens": 0}, 400, "a call can request at most"),
    ({"prompt": "a", "x" * 9_000: 1}, 400, "xxx"),
    ({"prompt": "a", "top_k": "x" * 9_000}, 400, "top_k must be"),
    ({"prompt": "a", "temperature": "hot"}, 400, "temperature"),
    ({"prompt": "a", "temperature": 10**400}, 400, ""),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    ({"prompt": "a", "logprobs": 99}, 400, "logprobs must be at most 20, got 99"),
    ({"prompt": "a", "logprobs": "all"}, 400, "and a number in a completion"),
    ({"prompt": "a", "logprobs": True}, 400, "and a number in a completion"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, 400, "the key 'x' of logit_bias must be an integer"),
    ({"prompt": "a", "logit_bias": {"5": "x"}}, 400, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"99999": 1}}, 400, "logit_bias"),
    ({"prompt": "a", "stop": 5}, 400, "stop must be a string or a list, got 5"),
    ({"prompt": "a", "stop": ["a"] * 99}, 400, "stop must have at most 64 items"),
    ({"prompt": "a", "stop": "a" * 9_000}, 400, "stop must have at most 1,000 characters"),
    ({"prompt": "a", "stream_options": {}, "stream": 1}, 400, "stream must be true or false"),
    ({"prompt": "a", "stream": True, "stream_options": {"x": 1}}, 400, "stream_options.x is not"),
    ({"prompt": "a", "tools": []}, 400, "POST chats to /v1/chat/completions"),
    ({"prompt": "a", "max_completion_tokens": 5}, 400, "is not supported; use max_tokens"),
    ({"prompt": "a", "max_new_tokens": 5}, 400, "did you mean 'max_tokens'?"),
    ({"prompt": "a", "skip_special_tokens": False}, 400, "texts never contain special tokens"),
    ({"prompt": "a", "truncate_prompt_tokens": 4}, 400, "cut the prompt's token ids"),
    ({"prompt": "a", "cache_salt": "s"}, 400, "all clients of the server share"),
    ({"prompt": "a", "use_beam_search": True}, 400, "/v1/search/beam/chat/completions"),
    ({"prompt": "a", "include_stop": 1}, 400, "include_stop must be True or False"),
    ({"prompt": "a", "first": 2}, 400, "first needs a seed"),
    ({"prompt": "a", "first": -1, "seed": 1}, 400, "first must be at least 0, got -1"),
    ({"messages": CHAT, "prompt": "a"}, 400, "POST texts to /v1/completions"),
    ({"messages": CHAT, "best_of": 2}, 400, "best_of is not supported; use n"),
    ({"messages": CHAT, "functions": []}, 400, "functions is not supported; use tools"),
    ({"messages": CHAT, "chat_template": "x"}, 400, "treegen serve with --chat-template TEMPLATE"),
    ({"messages": CHAT, "logprobs": 5}, 400, "must be true or false in a chat"),
    ({"messages": CHAT, "include_stop": True, "separate_reasoning": True}, 400, "without its stop"),
    ({"prompt": "a", "model": "gpt-5"}, 404, "not served"),
    ({"messages": []}, 400, "messages"),
    ({"messages": [5]}, 400, "message"),
    ({"messages": [5] * 10_001}, 400, "the body has 10,001 values or fields that are not"),
    ({"prompt": "a", "bad_words": ["a"] * 1_001}, 400, "at most 1,000 words"),
    (
        {"messages": CHAT, "chat_template_kwargs": dict.fromkeys(map(str, range(1_001)), 1)},
        400,
        "chat_template_kwargs must have at most 1,000 items",
    ),
    ({"messages": [{"role": "user"}]}, 400, "content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "a data URL"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": IMAGE}]}]},
        400,
        "was loaded without image support; remove it",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, 400, "tool_calls"),
    ({"messages": CHAT, "response_format": {"type": "json"}}, 400, "response_format"),
    ({"messages": CHAT, "response_format": {"type": "json_schema"}}, 400, "json_schema.schema"),
    ({"prompt": "a", "guided_regex": "[0-9"}, 400, "regex cannot be used"),
    ({"prompt": "a", "guided_regex": "\ud800"}, 400, "regex has the lone surrogate U+D800"),
    ({"prompt": "a", "guided_regex": "a", "guided_choice": ["a"]}, 400, "cannot be used together"),
    ({"prompt": "a", "structured_outputs": {"wings": 2}}, 400, "wings"),
    ({"messages": CHAT, "tool_choice": {"type": "function"}}, 400, "tool_choice"),
    ({"messages": CHAT, "tools": 5}, 400, "tools"),
    ({"messages": CHAT, "top_logprobs": 2}, 400, "logprobs=true"),
    ({"messages": CHAT, "chat_template_kwargs": {"tokenize": True}}, 400, "tokenize"),
    ({"messages": CHAT, "chat_template_kwargs": {"chat_template": "x"}}, 400, "chat_template"),
    ({"messages": CHAT, "echo": True}, 400, "echo"),
    ({"messages": CHAT, "max_thinking_tokens": -1}, 400, "max_thinking_tokens"),
    (
        {"messages": CHAT, "chat_template_kwargs": {"effort": 1}},
        400,
        "does not read the arguments effort",
    ),
    ({"messages": CHAT, "tool_choice": "required"}, 400, "tool_choice forces a call"),
    ({"messages": CHAT, "tool_choice": "any"}, 400, "use auto, none, required"),
    (FORCED | {"response_format": {"type": "json_object"}}, 400, "cannot be used together"),
    (FORCED | {"tools": [{"type": "function"}]}, 400, "a function with a name"),
    (
        FORCED | {"tool_choice": {"type": "function", "function": {"name": "fly"}}},
        400,
        "no tool 'fly'",
    ),
    ({"prompt": "a", "tool_choice": "required"}, 400, "tool_choice"),
    ({"messages": CHAT, "reasoning_effort": "low"}, 400, "chat_template_kwargs={"),
    ({"prompt": "a", "return_token_ids": True, "stream": True}, 400, "cannot be streamed"),
    ({"messages": CHAT, "separate_reasoning": 1}, 400, "separate_reasoning"),
    (
        {"messages": CHAT, "chat_template_kwargs": {"reasoning": "high"}},
        400,
        "has only enable_thinking",
    ),
]


HARMLESS: dict[str, Any] = {
    "priority": 3,
    "user": "me",
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "return_tokens_as_token_ids": False,
    "include_stop_str_in_output": False,
}
"""Parameters that clients of vLLM always send, with vLLM's defaults."""


def test_parameters_that_change_nothing_are_ignored(running: Running) -> None:
    more = {"seed": 1, "max_tokens": 4}
    for path, body in (
        ("completions", {"prompt": "a b", "add_special_tokens": True}),
        ("chat/completions", {"messages": CHAT, "add_special_tokens": False, "echo": False}),
    ):
        plain = {name: value for name, value in body.items() if name in ("prompt", "messages")}
        if path != "completions":
            body |= {"add_generation_prompt": True, "continue_final_message": False}
        got = running.post(path, {**body, **more, **HARMLESS}).json()
        assert got["choices"] == running.post(path, {**plain, **more}).json()["choices"]


def test_a_request_may_choose_the_id_of_its_response(running: Running) -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("completions", {"prompt": "a"}, "cmpl"),
        ("chat/completions", {"messages": CHAT}, "chatcmpl"),
    ]
    for path, body, start in cases:
        body |= {"max_tokens": 1, "request_id": "mine"}
        assert running.post(path, body).json()["id"] == f"{start}-mine"


@pytest.mark.parametrize("name", ["include_stop", "include_stop_str_in_output"])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_the_text_may_have_its_stop(running: Running, path: str, name: str) -> None:
    body: dict[str, Any] = {"prompt": PROMPT} if path == "completions" else {"messages": CHAT}
    body |= {"seed": 1, "max_tokens": 40, "ignore_eos": True}

    def text(**more: Any) -> tuple[str, str]:
        (choice,) = running.post(path, {**body, **more}).json()["choices"]
        content = choice["text"] if path == "completions" else choice["message"]["content"]
        streamed = ""
        response = running.post(path, {**body, **more, "stream": True})
        for line in response.text.splitlines():
            if line.startswith("data: {"):
                (piece,) = json.loads(line.removeprefix("data: "))["choices"]
                streamed += piece.get("text", "") + (piece.get("delta", {}).get("content") or "")
        assert streamed == content
        return content, choice["finish_reason"]

    whole, _ = text()
    stop = whole[len(whole) // 2 :][:3]
    before = whole[: whole.index(stop)]
    assert text(stop=stop) == (before, "stop")
    assert text(stop=stop, **{name: True}) == (before + stop, "stop")


def test_an_error_names_the_field_at_fault(running: Running) -> None:
    for fields, name in (
        ({"wings": 2}, "wings"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"top_k": -2}, "top_k"),
        ({"temperature": -1}, "temperature"),
        ({"prompt": [10**9]}, None),
    ):
        response = running.post("completions", json.dumps({"prompt": "a", **fields}).encode())
        assert response.json()["error"]["param"] == name, (fields, response.text)


def test_what_cannot_be_done_is_refused_by_name(running: Running) -> None:
    for body, status, message in REFUSED:
        is_chat = isinstance(body, dict) and "messages" in body
        if isinstance(body, dict):
            body = json.dumps(body).encode()
        response = running.post("chat/completions" if is_chat else "completions", body)
        assert response.status_code == status, (body[:99], response.text)
        error = response.json()["error"]
        assert message in error["message"], (body[:99], error)
        assert len(error["message"]) <= 1_000  # it does not give back what was sent
        assert error["code"] == status


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (f"Bearer {KEY}", 200),
        (f"bearer {KEY}", 200),
        (f"BEARER  {KEY}", 200),
        (KEY, 401),
        (f"Basic {KEY}", 401),
        ("Bearer", 401),
        (f"Bearer {KEY}x", 401),
        (f"Bearer{KEY}", 401),
        ("", 401),
        (f"Bearer Bearer {KEY}", 401),
        ("Bearer \xe4", 401),
    ],
)
def test_keys_have_a_scheme_in_any_case(running: Running, given: str, status: int) -> None:
    headers = {b"authorization": given.encode("latin-1")}
    response = HTTP.get(f"{running.url}/v1/models", headers=headers)
    assert response.status_code == status
    if status == 401:
        assert response.headers["www-authenticate"] == "Bearer"
        assert "Authorization: Bearer KEY" in response.json()["error"]["message"]


def test_without_a_key_pages_of_other_sites_cannot_ask(model: LLM) -> None:
    ask = {"prompt": "a", "max_tokens": 1}
    with listening(model, key=None) as running:

        def posted(host: str, kind: str | None = "application/json") -> int:
            head = {"host": host, **({} if kind is None else {"content-type": kind})}
            url = f"{running.url}/v1/completions"
            return HTTP.post(url, content=json.dumps(ask), headers=head).status_code

        here = f":{running.port}"
        for host in (
            f"127.0.0.1{here}",
            f"localhost{here}",
            f"LOCALHOST{here}",
            "localhost",
            f"[::1]{here}",
            "[::1]",
            "10.1.2.3",
            "localhost:80",
        ):
            assert posted(host) == 200, host
        for host in (
            f"evil.example{here}",
            "evil.example",
            f"127.0.0.1.evil.example{here}",
            "",
            f"localhost.evil.example{here}",
            "::1",
            "[127.0.0.1]",
            "127.1",
            "2130706433",
            "localhost:evil",
            "[::1]evil",
            "127.0.0.1:",
        ):
            assert posted(host) == 403, host
            for path in ("/v1/models", "/metrics", "/health"):
                assert HTTP.get(f"{running.url}{path}", headers={"host": host}).status_code == 403
        assert posted("localhost", "Application/JSON; charset=utf-8") == 200
        for kind in (
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data",
            None,
            "",
            "text/plain; application/json",
            "application/jsonp",
        ):
            assert posted("localhost", kind) == 415, kind
    with listening(model) as running:  # what has a key may have any name
        head = {"host": "models.example", "authorization": f"Bearer {KEY}"}
        assert HTTP.get(f"{running.url}/v1/models", headers=head).status_code == 200


def test_keys_models_health_and_metrics(running: Running, client: openai.OpenAI) -> None:
    assert [card.id for card in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    stranger = client.with_options(api_key="guess")
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with pytest.raises(openai.AuthenticationError):
        stranger.completions.create(model="demo", prompt="a")
    assert HTTP.get(f"{running.url}/metrics").status_code == 401
    assert HTTP.get(f"{running.url}/health").json() == {"status": "ok"}
    assert HTTP.get(f"{running.url}/v1/completions").status_code == 405
    assert HTTP.get(f"{running.url}/else").json()["error"]["code"] == 404
    for method, path, advice in (
        ("GET", "/v1/completions", "use POST"),
        ("POST", "/v1/models", "use GET"),
        ("DELETE", "/health", "use GET"),
    ):
        answer = HTTP.request(method, f"{running.url}{path}").json()
        message = f"{path} does not take {method} requests; {advice}"
        assert answer["error"]["message"] == message
    for path, advice in (
        ("tokenize", "max_tokens=0 and return_token_ids=true"),
        ("v1/score", "generates and scores text"),
        ("chat/completions", "the base_url ends in /v1"),
    ):
        assert advice in HTTP.post(f"{running.url}/{path}", json={}).json()["error"]["message"]
    body = {"prompt": PROMPT, "echo": True, "max_tokens": 0, "return_token_ids": True}
    (choice,) = running.post("completions", body).json()["choices"]
    assert choice["prompt_token_ids"] == running.served.llm.tokenizer(PROMPT)["input_ids"]
    for route, hint in (
        ("responses", "chat completions"),
        ("embeddings", "computes no embeddings"),
    ):
        answer = HTTP.post(f"{running.url}/v1/{route}", json={"model": "demo", "input": "a"})
        assert answer.status_code == 404
        message = answer.json()["error"]["message"]
        assert hint in message and "POST /v1/chat/completions" in message
    client.completions.create(model="demo", prompt="a", max_tokens=7, extra_body={"min_tokens": 7})
    metrics = HTTP.get(f"{running.url}/metrics", headers={"authorization": f"Bearer {KEY}"}).text
    assert "treegen_decoded_tokens_total 7.0" in metrics
    assert 'treegen_requests_total{path="/v1/models",status="401"} 1.0' in metrics


def test_echo_tells_the_most_likely_tokens_of_a_prompt(
    running: Running, client: openai.OpenAI
) -> None:
    ask: Any = {"model": "demo", "temperature": 0, "logprobs": 1}
    tokens = running.served.llm.tokenizer("Tom has 3 apples and")["input_ids"]
    drawn = client.completions.create(
        prompt=tokens, max_tokens=12, extra_body={"return_token_ids": True}, **ask
    )
    own: Any = drawn.choices[0]
    assert own.prompt_token_ids == tokens and len(own.token_ids) == 12
    whole = [*tokens, *own.token_ids]
    for most in (0, 1):  # lm-eval's local-completions asks for one
        completion = client.completions.create(prompt=whole, max_tokens=most, echo=True, **ask)
        found, logprobs = completion.choices[0].logprobs, own.logprobs
        assert found is not None and found.top_logprobs and found.token_logprobs
        assert len(found.top_logprobs) == len(whole) + most
        assert found.top_logprobs[0] is None and found.token_logprobs[0] is None
        assert None not in found.top_logprobs[1:] and None not in found.token_logprobs[1:]
        for at, (top, logprob) in enumerate(
            zip(logprobs.top_logprobs, logprobs.token_logprobs, strict=True), len(tokens)
        ):
            assert found.top_logprobs[at] == pytest.approx(top, abs=1e-4)
            # The draw was greedy, so the most likely token is the one that is there.
            assert list(top.values()) == pytest.approx([logprob], abs=1e-6)
        for at in range(1, len(tokens)):
            likely = found.top_logprobs[at]
            assert found.tokens[at] in likely and len(likely) in (1, 2)
            assert max(likely.values()) >= found.token_logprobs[at] - 1e-6
    create: Any = client.chat.completions.create
    chat = create(model="demo", messages=CHAT, max_tokens=3, extra_body={"return_token_ids": True})
    assert len(chat.choices[0].token_ids) == chat.usage.completion_tokens
    assert len(chat.prompt_token_ids) == chat.usage.prompt_tokens


def test_a_crowd_is_told_to_come_again(running: Running, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="demo",
        prompt=PROMPT,
        n=100,
        max_tokens=300,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    with pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(model="demo", prompt=PROMPT, n=90)
    assert refused.value.response.headers["retry-after"] == "1"
    stream.close()
    running.wait_until_idle()
    client.completions.create(model="demo", prompt=PROMPT, n=90, max_tokens=2)


@pytest.mark.parametrize("streams", [False, True])
def test_who_hangs_up_takes_the_samples_along(running: Running, streams: bool) -> None:
    body = {"prompt": PROMPT, "n": 20, "max_tokens": 3_000, "ignore_eos": True, "stream": streams}
    with closing(_sent(running, json.dumps(body).encode())):
        while not running.served.status().rows:
            time.sleep(0.01)
    running.wait_until_idle()
    assert running.served.usages()[-1].decoded_tokens < 20 * 3_000


def _request(body: bytes, *, length: int | None = None) -> bytes:
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


def _sent(running: Running, body: bytes, *, length: int | None = None) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", running.port))
    connection.sendall(_request(body, length=length))
    return connection


def test_a_body_that_does_not_come_is_not_waited_for(model: LLM) -> None:
    with (
        listening(model, body_seconds=0.2) as running,
        closing(_sent(running, b'{"prompt":', length=50)) as connection,
    ):
        connection.settimeout(30)
        assert b" 408 " in connection.recv(100).splitlines()[0]


def test_a_request_that_does_not_begin_is_not_waited_for(
    model: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treegen.integrations.server.run._HEAD_SECONDS", 1.5)
    begun = b"POST /v1/completions HTTP/1.1\r\nX"
    body = json.dumps({"prompt": "a", "max_tokens": 80, "ignore_eos": True}).encode()
    with listening(model) as running:
        address = "127.0.0.1", running.port
        connections = [socket.create_connection(address, timeout=30) for _ in range(2)]
        connections[0].sendall(begun)
        connections.append(_sent(running, body))
        connections[2].settimeout(30)
        while not connections[2].recv(10_000).endswith(b"}}"):  # the end of the answer
            pass
        connections[2].sendall(begun)
        for connection in connections:
            with closing(connection):
                assert connection.recv(100) == b""


@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_is_closed_ends_the_server_in_order(model: LLM, ignored: bool) -> None:
    with AsyncLLM(model) as served:
        server = _GracefulServer(config_of(Server(served, name="demo").app()), served, 0, print)
        before = signal.getsignal(signal.SIGHUP)
        handler = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else before)
        try:
            with server.capture_signals():
                signal.raise_signal(signal.SIGHUP)
            assert server.should_exit == (not ignored)
        finally:
            assert signal.signal(signal.SIGHUP, handler) is (signal.SIG_IGN if ignored else before)


def test_what_is_not_answered_in_time_is_told_so(model: LLM) -> None:
    key = "schl\u00fcssel"
    with AsyncLLM(model) as served:
        answers = []

        def ask(url: str, streams: bool) -> None:
            body = {"prompt": PROMPT, "max_tokens": 3_000, "ignore_eos": True, "stream": streams}
            headers = {b"authorization": f"Bearer {key}".encode()}
            answers.append(
                HTTP.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
            )

        with draining(served, api_key=key) as running:
            url = running.url
            asking = [threading.Thread(target=ask, args=(url, each)) for each in (False, True)]
            for each in asking:
                each.start()
            while served.status().rows < 2:
                time.sleep(0.01)
        for each in asking:
            each.join()
    assert sorted(each.status_code for each in answers) == [200, 503]
    assert all("stopping and did not finish this call" in each.text for each in answers)
    assert model.cache.pool.num_used == 0


def test_who_does_not_read_is_hung_up_on(model: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treegen.integrations.server.run._READ_SECONDS", 0.2)
    body = {"prompt": "Tom", "n": 20, "max_tokens": 3_000, "ignore_eos": True, "stream": True}
    with AsyncLLM(model) as served, draining(served) as running:
        with closing(_sent(running, json.dumps(body).encode())):
            while not served.status().rows:
                time.sleep(0.01)
            running.wait_until_idle()
        assert served.usages()[-1].decoded_tokens < 20 * 3_000


def test_who_reads_slowly_gets_a_whole_answer(model: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treegen.integrations.server.run._READ_SECONDS", 1)
    monkeypatch.setattr("treegen.integrations.server.errors._PIECE_BYTES", 2**16)
    prompts = [f"{number} {PROMPT}" * 50 for number in range(160)]
    body = json.dumps({"prompt": prompts, "echo": True, "max_tokens": 0}).encode()
    received = bytearray()
    with (
        AsyncLLM(model) as served,
        draining(served) as running,
        closing(socket.socket()) as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", running.port))
        connection.sendall(_request(body))
        while not received.endswith(b"}}"):  # the end of the answer
            time.sleep(0.015)
            piece = connection.recv(2**14)
            assert piece, f"hung up on after {len(received):,} bytes"
            received += piece
    answer = json.loads(received.partition(b"\r\n\r\n")[2])
    assert [choice["text"] for choice in answer["choices"]] == prompts


def test_two_servers_do_not_share_an_address() -> None:
    """The second one knows before it has loaded its model, though the first one still loads."""
    with bind_socket("127.0.0.1", 0) as first, pytest.raises(InputError, match="choose another"):
        bind_socket("127.0.0.1", first.getsockname()[1])


@pytest.mark.parametrize(
    ("host", "port", "reason"),
    [
        ("a" * 64, 0, "cannot listen at a"),
        ("127.0.0.1", 65_536, "between 0 and 65535, got 65536"),
        ("127.0.0.1", -1, "got -1"),
    ],
)
def test_addresses_that_cannot_be_are_refused(host: str, port: int, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        bind_socket(host, port)


def test_two_servers_that_take_over_an_address_do_not_share_it(model: LLM) -> None:
    with bind_socket("127.0.0.1", 0) as first, socket.socket() as second:
        for each in (first, second):
            prepare_to_listen(each)
        second.bind(first.getsockname())  # as where connections of a former server are about to end
        first.listen()
        with pytest.raises(InputError, match="choose another port"):
            serve(model, second, name="demo")


def test_an_address_whose_last_connections_are_about_to_end_is_free() -> None:
    with bind_socket("127.0.0.1", 0) as former:
        prepare_to_listen(former)
        former.listen()
        address = former.getsockname()
        with socket.create_connection(address) as client:
            former.accept()[0].close()
            assert client.recv(1) == b""
    with bind_socket(*address) as taken:
        assert taken.getsockname() == address


def test_rubbish_in_or_after_a_body_ends_the_connection(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    chunked = "Transfer-Encoding: chunked\r\n\r\n"
    for key, rest in (
        (KEY, f"{chunked}rubbish\r\n"),
        ("guess", f"{chunked}rubbish\r\n"),  # which is answered without reading the body
        ("guess", chunked),
        (KEY, "Content-Length: 2\r\n\r\n{}rubbish"),
    ):
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
        )
        head += "Content-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", running.port), timeout=30) as connection:
            connection.sendall(f"{head}{rest}".encode())
            assert b" 40" in connection.recv(10_000).splitlines()[0]
            with suppress(ConnectionError):
                connection.sendall(b"rubbish\r\n\r\n")
                while connection.recv(10_000):
                    pass
    assert [each for each in caplog.records if each.levelname == "ERROR"] == []


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_good_clients_are_served_among_bad_ones(
    running: Running, reference: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    """500 at once: 300 whose answers must be right, and 200 that send rubbish, stall or vanish."""
    draw = random.Random(1)
    good = [_good_body(draw, number) for number in range(300)]

    async def ask(client: openai.AsyncOpenAI, number: int, body: dict[str, Any]) -> list[str]:
        await asyncio.sleep(draw.random() * 4)
        while True:
            try:
                if number % 3:
                    got = await client.completions.create(model="demo", **body)
                    return [choice.text for choice in got.choices]
                texts = [""] * body["n"]
                async for piece in await client.completions.create(
                    model="demo", stream=True, **body
                ):
                    for choice in piece.choices:
                        texts[choice.index] += choice.text
                    if number % 2:
                        await asyncio.sleep(0.05)  # reads slowly
                return texts
            except openai.RateLimitError as busy:
                wait = float(busy.response.headers["retry-after"])
                await asyncio.sleep(wait * (0.5 + draw.random()))

    async def all_at_once() -> list[list[str]]:
        async with openai.AsyncOpenAI(
            base_url=f"{running.url}/v1", api_key=KEY, max_retries=0, timeout=600
        ) as client:
            bad = [
                asyncio.create_task(_misbehave(running.port, way, random.Random(way)))
                for way in range(200)
            ]
            answers = await asyncio.gather(*(ask(client, *each) for each in enumerate(good)))
            await asyncio.gather(*bad)
            return answers

    answers = asyncio.run(all_at_once())
    want: list[list[Completion]] = [
        reference.generate([body["prompt"]], _params(body))[0] for body in good
    ]
    assert answers == [[each.text for each in completions] for completions in want]
    running.wait_until_idle()
    assert [each for each in caplog.records if each.levelname == "ERROR"] == []
    assert running.served.usages()[:-1] == []  # no run has failed


def _good_body(draw: random.Random, number: int) -> dict[str, Any]:
    prompt = PROMPT[: draw.choice([20, 45, 60, len(PROMPT)])] + draw.choice(["", " a"])
    return {
        "prompt": prompt,
        "n": draw.choice([1, 1, 2, 4]),
        "seed": number,
        "max_tokens": draw.choice([1, 6, 20]),
        "temperature": draw.choice([0, 0.7, 1]),
        "top_p": draw.choice([1, 0.8]),
        "stop": draw.choice([None, ["."], ["apples", "\n"]]),
        "logprobs": draw.choice([None, 0, 2]),
    }


async def _misbehave(port: int, way: int, draw: random.Random) -> None:
    """One bad client: what it sends, how fast, and when it is gone."""
    await asyncio.sleep(draw.random() * 4)
    options = {"prompt": PROMPT, "n": 9, "max_tokens": 900, "ignore_eos": True}
    whole = json.dumps({**options, "stream": draw.random() < 0.5}).encode()
    torn = bytearray(whole)
    for _ in range(draw.randint(1, 6)):
        torn[draw.randrange(len(torn))] = draw.randrange(256)
    # One in five asks for a lot and leaves; the others send what cannot be answered.
    body = [
        whole,
        bytes(torn).replace(b"900", b"9"),
        draw.randbytes(draw.randint(1, 3_000)),
        draw.choice([b"[", b'{"a":', b'"\\ud800']) * draw.randint(1, 20_000),
        b'{"prompt": "' + b"x" * draw.choice([50_000, 200_000, 3_000_000]) + b'"}',
    ][way % 5]
    head = [
        f"POST /v1/{draw.choice(['completions', 'chat/completions'])} HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Authorization: Bearer {draw.choice([KEY, KEY, KEY, 'guess'])}",
        draw.choice(
            [
                f"Content-Length: {len(body)}",
                f"Content-Length: {len(body) + 50}",
                f"Content-Length: {max(len(body) - 50, 0)}",
                "Transfer-Encoding: chunked",
                "Content-Length: many",
            ]
        ),
    ]
    sent = ("\r\n".join(head) + "\r\n\r\n").encode() + body
    if draw.random() < 0.2:
        sent = sent[: draw.randrange(len(sent))]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        step = draw.choice([len(sent), len(sent), max(len(sent) // 20, 1)])
        for start in range(0, len(sent), step):
            writer.write(sent[start : start + step])
            await writer.drain()
            await asyncio.sleep(0 if step == len(sent) else 0.1)
        async with asyncio.timeout(draw.choice([0.01, 0.2, 3])):
            status = (await reader.readline()).split()[1:2]
            assert status in ([], [b"200"]) or status[0].startswith(b"4"), status
            await reader.read(draw.choice([1, 1_000, 100_000]))
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.close()


def _params(body: dict[str, Any]) -> SamplingParams:
    given = {name: value for name, value in body.items() if name != "prompt" and value is not None}
    return SamplingParams(**given)
