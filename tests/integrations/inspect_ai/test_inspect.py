"""The model provider, used by Inspect's own evals."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tiny_models import tiny_tokenizer
from tool_model import ANSWER, CALL, QUESTION, save_tool_model
from tool_texts import WRITERS

from treegen import LLM, SamplingParams
from treegen.errors import InputError

pytest.importorskip("inspect_ai.model")

from inspect_ai import Task, eval
from inspect_ai._util.error import PrerequisiteError
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import (
    ChatMessageAssistant,
    ChatMessageTool,
    ChatMessageUser,
    ContentImage,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    Model,
    ModelOutput,
    ResponseSchema,
    get_model,
)
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, ToolCall, ToolFunction, tool
from inspect_ai.util import JSONSchema

from treegen.integrations.inspect_ai.conversion import sampling_params, template_messages
from treegen.integrations.inspect_ai.provider import TreegenAPI


@tool
def now() -> Tool:
    """A tool that needs nothing."""

    async def execute() -> str:
        """Tell the time."""
        return "noon"

    return execute


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
QUESTIONS = ["Ann has 3 apples.", "Ann has 3 pears.", "Bob?"]


@tool
def add() -> Tool:
    async def execute(x: int, y: int) -> str:
        """Add two numbers.

        Args:
            x: The first.
            y: The second.
        """
        return str(x + y)

    return execute


@pytest.fixture(autouse=True)
def _traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSPECT_TRACE_FILE", str(tmp_path / "trace.log"))


@pytest.fixture(name="model")
def _model(checkpoint: Path) -> Iterator[Model]:
    model = loaded(checkpoint)
    with model:
        yield model
    assert api_of(model)._served.llm.cache.pool.num_used == 0


def loaded(directory: Path, **arguments: Any) -> Model:
    arguments = {"memory": "32MiB", "chat_template": TEMPLATE, **arguments}
    return get_model(f"treegen/{directory}", memoize=False, **arguments)


def api_of(model: Model) -> TreegenAPI:
    assert isinstance(model.api, TreegenAPI)
    return model.api


def run(task: Task, model: Model, tmp_path: Path, **settings: Any) -> EvalLog:
    (log,) = eval(task, model=model, display="none", log_dir=str(tmp_path), **settings)
    assert log.status == "success", log.error
    return log


def texts(log: EvalLog) -> dict[tuple[Any, int], list[str]]:
    assert log.samples is not None
    return {
        (each.id, each.epoch): [str(choice.message.content) for choice in each.output.choices]
        for each in log.samples
    }


def user_messages(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def test_an_eval_gets_the_samples_of_generate(
    model: Model, checkpoint: Path, tmp_path: Path
) -> None:
    task = Task([Sample(question, id=place) for place, question in enumerate(QUESTIONS)])
    settings: dict[str, Any] = {"max_tokens": 12, "temperature": 0.8, "top_p": 0.9, "top_k": 50}
    log = run(
        task,
        model,
        tmp_path,
        epochs=3,
        num_choices=2,
        seed=5,
        stop_seqs=["q"],
        logprobs=True,
        top_logprobs=3,
        prompt_logprobs=2,
        **settings,
    )
    llm = LLM(str(checkpoint), memory="32MiB")
    llm.tokenizer.chat_template = TEMPLATE
    params = SamplingParams(n=6, seed=5, stop=["q"], logprobs=3, **settings)
    want = llm.generate([user_messages(question) for question in QUESTIONS], params)
    # Each epoch has samples of its own: those that follow the earlier epochs'.
    got = texts(log)
    for place, completions in enumerate(want):
        for number in range(3):
            pair = completions[2 * number : 2 * number + 2]
            assert got[place, number + 1] == [each.text for each in pair]
    assert log.samples is not None
    first = next(each for each in log.samples if (each.id, each.epoch) == (0, 1)).output
    assert first.choices[1].logprobs is not None
    content = first.choices[1].logprobs.content
    assert [each.logprob for each in content] == pytest.approx(want[0][1].logprobs, abs=1e-4)
    assert all(len(each.top_logprobs or ()) == 3 for each in content)
    prompt_logprobs = first.choices[1].prompt_logprobs
    assert prompt_logprobs is not None
    (each,) = llm.generate([user_messages(QUESTIONS[0])], replace(params, n=1, prompt_logprobs=2))[
        0
    ]
    assert each.prompt_logprobs is not None
    logprobs = [token.logprob for token in prompt_logprobs.content]
    assert logprobs == pytest.approx(each.prompt_logprobs.logprobs, abs=1e-4)
    assert all(len(token.top_logprobs or ()) == 2 for token in prompt_logprobs.content)
    assert first.choices[0].stop_reason == ("max_tokens" if want[0][0].stop is None else "stop")
    assert first.usage is not None
    assert first.usage.output_tokens == sum(each.num_tokens for each in want[0][:2])
    # The same eval again has the same answers, and another seed others.
    again = run(task, model, tmp_path, epochs=3, num_choices=2, seed=5, stop_seqs=["q"], **settings)
    assert texts(again) == got
    other = run(task, model, tmp_path, epochs=3, num_choices=2, seed=6, stop_seqs=["q"], **settings)
    assert texts(other) != got


def test_calls_at_the_same_time_share_steps_and_prompts(
    model: Model, checkpoint: Path, tmp_path: Path
) -> None:
    task = Task([Sample(QUESTIONS[0])])
    log = run(task, model, tmp_path, epochs=100, max_tokens=16)
    usage = api_of(model)._served.usages()[-1]
    # Inspect's own default would begin with 20 at a time, and never have more than 100.
    assert usage.peak_rows > 20
    assert usage.decode_steps < 100 * 15 / 4
    assert usage.prompt_tokens_computed < 40
    llm = LLM(str(checkpoint), memory="32MiB")
    llm.tokenizer.chat_template = TEMPLATE
    want = llm.generate([user_messages(QUESTIONS[0])], SamplingParams(n=100, max_tokens=16))[0]
    got = [text for found in texts(log).values() for text in found]
    assert sorted(got) == sorted(each.text for each in want)
    assert run(task, model, tmp_path, max_tokens=4, max_connections=2).status == "success"


_SOME = ("hermes", "qwen3_coder", "harmony")
_NAMED = {
    "hermes, bare": "hermes",
    "llama, bare": "llama",
    "command_r, 1": "command_r",
    "pythonic": "pythonic",
}


@pytest.mark.parametrize(
    "writer",
    [*_SOME, *(pytest.param(w, marks=pytest.mark.soak) for w in WRITERS if w not in _SOME)],
)
def test_a_model_calls_tools_and_reads_their_results(tmp_path: Path, writer: str) -> None:
    with get_model(
        f"treegen/{save_tool_model(tmp_path / 'model', writer)}",
        memoize=False,
        memory="32MiB",
        tool_format=_NAMED.get(writer),
    ) as model:
        task = Task(
            [Sample(QUESTION, target="42")],
            solver=[use_tools(add()), generate()],
            scorer=includes(),
        )
        log = run(task, model, tmp_path, temperature=0, max_tokens=500, epochs=3)
    assert log.samples is not None
    for sample in log.samples:
        asks, calls, result, answer = sample.messages
        assert asks.text == QUESTION
        assert calls.role == "assistant" and calls.tool_calls is not None
        (call,) = calls.tool_calls
        assert {"name": call.function, "arguments": call.arguments} == CALL
        assert calls.text == ""
        assert result.role == "tool" and (result.text, result.tool_call_id) == ("42", call.id)
        assert answer.text == ANSWER
    assert log.results is not None
    assert log.results.scores[0].metrics["accuracy"].value == 1


def test_a_model_that_would_answer_is_made_to_call(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    messages: list[Any] = [
        ChatMessageUser(content=QUESTION),
        ChatMessageAssistant(
            content="", tool_calls=[ToolCall(id="1", function="add", arguments={"x": 17, "y": 25})]
        ),
        ChatMessageTool(content="42", tool_call_id="1"),
    ]
    config = GenerateConfig(temperature=0, max_tokens=200, parallel_tool_calls=False)

    async def ask(model: Model, choice: Any) -> ModelOutput:
        return await model.generate(messages, tools=[now()], tool_choice=choice, config=config)

    with get_model(f"treegen/{save_tool_model(tmp_path)}", memoize=False, memory="32MiB") as model:
        for choice, is_call in (("auto", False), ("any", True), (ToolFunction(name="now"), True)):
            message = asyncio.run(ask(model, choice)).message
            calls = [call.function for call in message.tool_calls or []]
            assert calls == ["now"] * is_call, message.text
            assert bool(message.text) != is_call


def test_what_the_checkpoint_recommends_holds_where_nobody_says(
    checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint, tmp_path / "model")
    file = tmp_path / "model" / "generation_config.json"
    file.write_text(json.dumps({"do_sample": True, "temperature": 0.3, "top_k": 4}))
    for arguments, want in (({}, (0.3, 4)), ({"sampling": "neutral"}, (1.0, 0))):
        api = api_of(loaded(tmp_path / "model", **arguments))
        params = sampling_params(GenerateConfig(top_p=0.8), api._defaults)
        assert (params.temperature, params.top_k, params.top_p) == (*want, 0.8)
        api.close()


def test_a_closed_model_ends_its_ranks(checkpoint: Path) -> None:
    api = api_of(loaded(checkpoint))
    with mock.patch.object(LLM, "close", autospec=True) as close:
        api.close()
    close.assert_called_once_with(api._served.llm)


def test_an_answer_has_the_schema_that_is_asked_for(model: Model) -> None:
    pytest.importorskip("llguidance")
    schema = ResponseSchema(
        name="answer",
        json_schema=JSONSchema(
            type="object",
            properties={"ok": JSONSchema(type="boolean")},
            required=["ok"],
            additionalProperties=False,
        ),
    )

    async def ask(**settings: Any) -> list[str]:
        config = GenerateConfig(max_tokens=60, num_choices=4, seed=1, **settings)
        output = await model.generate("Is it?", config=config)
        return [c.message.text for c in output.choices if c.stop_reason == "stop"]

    texts = asyncio.run(ask(response_schema=schema))
    assert texts and all(type(json.loads(text)["ok"]) is bool for text in texts)
    words = asyncio.run(ask(extra_body={"guided_choice": ["yes", "no"]}))
    assert words and set(words) <= {"yes", "no"}
    tagged = "<think>a</think>b"
    assert set(asyncio.run(ask(extra_body={"guided_choice": [tagged]}))) == {tagged}


def test_what_cannot_be_honoured_is_refused_by_name(model: Model) -> None:
    image = ContentImage(image="data:image/png;base64,iVBORw0KGgo=")

    async def ask(prompt: Any = "Ann", **settings: Any) -> Any:
        settings = {"max_tokens": 8, "max_retries": 0, **settings}
        return await model.generate(prompt, config=GenerateConfig(**settings))

    async def refused() -> None:
        for settings, message in (
            ({"presence_penalty": 2.5}, "presence_penalty"),
            ({"best_of": 3}, "best_of"),
            ({"effort": "low"}, "effort"),
            ({"verbosity": "low"}, "verbosity"),
            ({"reasoning_tokens": 5}, "a reasoning budget requires reasoning tags"),
            ({"top_logprobs": 2}, "needs logprobs"),
            ({"extra_body": {"wings": 2}}, "wings"),
            (
                {"extra_body": {"chat_template_kwargs": {"wide": True}}},
                "does not read the arguments wide",
            ),
            ({"reasoning_effort": "low"}, "does not read the arguments reasoning_effort"),
            ({"temperature": -1.0}, "temperature"),
            ({"logit_bias": {99_999: 1.0}}, "logit_bias"),
            ({"prompt": [ChatMessageUser(content=[image])]}, "was loaded without image support"),
        ):
            with pytest.raises(Exception, match=message):
                await ask(**settings)
        long = await ask("Ann " * 500)
        assert long.stop_reason == "model_length"
        assert "more than fit" in long.error
        extra = {"ignore_eos": True, "min_p": 0.1}
        assert (await ask(extra_body=extra)).stop_reason == "max_tokens"
        assert await model.api.tokenize("Ann") == tiny_tokenizer()("Ann")["input_ids"]

    asyncio.run(refused())


def test_a_model_that_cannot_be_loaded_is_a_clear_error(checkpoint: Path) -> None:
    with pytest.raises(PrerequisiteError, match="no/such/model"):
        get_model("treegen//no/such/model", memoize=False)
    with pytest.raises(PrerequisiteError, match="tool_format must be one of"):
        get_model("treegen//no/such/model", memoize=False, tool_format="xml")  # before it is loaded
    with pytest.raises(PrerequisiteError, match="wings"):
        loaded(checkpoint, wings=2)
    with pytest.raises(PrerequisiteError, match="base_url"):
        get_model(f"treegen/{checkpoint}", base_url="http://x", memoize=False)
    with pytest.raises(PrerequisiteError, match="must be a template or the path of a file"):
        loaded(checkpoint, chat_template="no/such.jinja")
    with pytest.raises(PrerequisiteError, match="chat_template_kwargs"):
        loaded(checkpoint, chat_template_kwargs="thinking")


def test_thoughts_have_a_budget(checkpoint: Path) -> None:
    with loaded(checkpoint, chat_template=TEMPLATE + "<think>{# </think> #}") as model:
        config = GenerateConfig(seed=1, max_tokens=30, reasoning_tokens=4)
        output = asyncio.run(model.generate("Ann", config=config))
        llm = api_of(model)._served.llm
    content = output.choices[0].message.content
    assert isinstance(content, list)
    thought, answer = content
    assert isinstance(thought, ContentReasoning) and isinstance(answer, ContentText)
    params = SamplingParams(seed=1, max_tokens=30, max_thinking_tokens=4)
    want = llm.generate([user_messages("Ann")], params)[0][0]
    assert want.thinking is not None and want.thinking.is_forced
    assert f"{thought.reasoning}\n</think>\n\n{answer.text}" == want.text


def test_thoughts_are_told_apart_and_come_back() -> None:
    thought = ChatMessageAssistant(
        content=[ContentReasoning(reasoning="Hm."), ContentText(text="Yes.")]
    )
    assert template_messages([thought]) == [
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    ]


def test_messages_name_model_arguments_as_inspect_takes_them(checkpoint: Path) -> None:
    with (
        loaded(checkpoint, chat_template=None) as model,
        pytest.raises(InputError, match="load the model with -M chat_template=TEMPLATE, use a"),
    ):
        asyncio.run(model.generate("Hello"))
    with pytest.raises(PrerequisiteError, match="-M sampling must be recommended or neutral"):
        loaded(checkpoint, sampling="best")
    with pytest.raises(PrerequisiteError, match="did you mean -M memory="):
        loaded(checkpoint, memroy="1GiB")
