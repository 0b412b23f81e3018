"""Models with latent attention behind the server: what clients get is what `generate` draws."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from latent_cases import TRUNK, load
from serving import KEY, TEMPLATE, Running, listening
from tiny_models import save_tiny_model
from tool_schemas import tool

from treegen import LLM, SamplingParams
from treegen.prompts.replies.formats import TOOL_FORMATS

pytest.importorskip("openai")
import openai

pytest.importorskip("llguidance")

_TOOL = tool("add", {"x": {"enum": [1, 20]}}, required=["x"], additionalProperties=False)


def _loaded(path: Path) -> LLM:
    llm = load(path, memory="4MiB", max_rows=12, page_size=4, sharing="all")
    llm.tokenizer.chat_template = TEMPLATE
    return llm


def _draw_options(draw: random.Random) -> dict[str, Any]:
    """What to sample, in names that the server and SamplingParams share."""
    options: dict[str, Any] = {
        "n": draw.randint(1, 4),
        "seed": draw.randint(0, 9),
        "max_tokens": draw.randint(1, 20),
    }
    if draw.random() < 0.5:
        options |= {"temperature": draw.choice([0.0, 0.7]), "top_p": draw.choice([1.0, 0.9])}
    if draw.random() < 0.5:
        options |= {"presence_penalty": 1.0, "frequency_penalty": draw.choice([0.0, -0.5])}
    if draw.random() < 0.3:
        options |= {"repetition_penalty": 1.4, "bad_words": ["a", "the"]}
    if draw.random() < 0.4:
        options |= {"stop": ["e", "\n"]}
    return options


def _structure(draw: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """A grammar as a request and as SamplingParams have it."""
    kind, given = draw.choice([("regex", "(ab|c)[0-9]{1,4}"), ("choice", ["yes", "no"]), ("", "")])
    return ({f"guided_{kind}": given}, {kind: given}) if kind else ({}, {})


async def _completion(client: Any, draw: random.Random, want: LLM) -> None:
    """Samples of one prompt, told whole or in a stream."""
    options = _draw_options(draw)
    extra, more = _structure(draw)
    own = ("repetition_penalty", "bad_words")
    extra |= {name: options[name] for name in own if name in options}
    body = {name: value for name, value in options.items() if name not in own}
    prompt = TRUNK[: draw.randint(1, len(TRUNK))] + draw.choice(["Q:", " 17", "X"])
    params = SamplingParams(**options, **more, logprobs=2)
    (expected,) = want.generate([prompt], params)  # while others wait for their answers
    texts, reasons = [""] * params.n, [""] * params.n
    logprobs: list[list[float]] = [[] for _ in texts]
    if draw.random() < 0.6:
        pieces = await client.completions.create(
            model="demo", prompt=prompt, logprobs=2, stream=True, extra_body=extra, **body
        )
        async for piece in pieces:
            for choice in piece.choices:
                texts[choice.index] += choice.text
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
                logprobs[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
    else:
        whole = await client.completions.create(
            model="demo", prompt=prompt, logprobs=2, extra_body=extra, **body
        )
        for choice in whole.choices:
            texts[choice.index], reasons[choice.index] = choice.text, choice.finish_reason
            logprobs[choice.index] = choice.logprobs.token_logprobs
    assert texts == [c.text for c in expected]
    assert reasons == [c.finish_reason for c in expected]
    for actual, c in zip(logprobs, expected, strict=True):
        assert actual == pytest.approx(c.logprobs, abs=1e-4)


async def _call(client: Any, draw: random.Random) -> None:
    """A tool that must be called, told whole and in a stream."""
    body: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": draw.choice(["1 + 1", "Bob"])}],
        "tools": [_TOOL],
        "tool_choice": "required",
        "max_tokens": 120,
        "n": 2,
        "seed": draw.randint(0, 9),
        "presence_penalty": draw.choice([0.0, 0.4]),
        "parallel_tool_calls": False,
    }
    whole = await client.chat.completions.create(**body)
    calls: dict[int, list[Any]] = {0: [], 1: []}
    ends: dict[int, str] = {}
    async for piece in await client.chat.completions.create(stream=True, **body):
        for choice in piece.choices:
            calls[choice.index] += choice.delta.tool_calls or []
            ends[choice.index] = choice.finish_reason or ends.get(choice.index, "")
    for choice in whole.choices:
        expected = [
            (c.function.name, c.function.arguments) for c in choice.message.tool_calls or []
        ]
        actual = [(c.function.name, c.function.arguments) for c in calls[choice.index]]
        assert actual == expected and ends[choice.index] == choice.finish_reason
        assert choice.finish_reason == "length" or [name for name, _ in expected] == ["add"]


async def _all_at_once(running: Running, want: LLM, seed: int, num: int) -> None:
    async def one(number: int, client: Any) -> None:
        draw = random.Random(1000 * seed + number)
        await (_call(client, draw) if number % 5 == 4 else _completion(client, draw, want))

    async with openai.AsyncOpenAI(
        base_url=f"{running.url}/v1", api_key=KEY, max_retries=0, timeout=600
    ) as client:
        await asyncio.gather(*(one(number, client) for number in range(num)))


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:cannot determine this model")
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "kimi_linear"])
def test_many_clients_get_what_generate_draws(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_model(tmp_path, family, seed=1)
    want = load(path, sharing="off")
    with listening(_loaded(path)) as running:
        monkeypatch.setattr(running.served.replies, "format", TOOL_FORMATS["hermes"])
        for seed in range(3):
            asyncio.run(_all_at_once(running, want, seed, 25))
