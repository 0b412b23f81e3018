"""Arguments of other libraries' `generate` are refused with what to give in their place."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from treegen import LLM, InputError, Node, SamplingParams, evaluate
from treegen.common.spelling import find_near
from treegen.integrations.server.requests import parse_request


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", memory="16MiB")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"generation_config": None}, r"has no 'generation_config'; did you mean params=\?"),
        ({"prompt_token_ids": [1]}, r"has no 'prompt_token_ids'; did you mean prompts=\?"),
        ({"max_tokens": 5}, r"; use params=SamplingParams\(max_tokens=5\)"),
        ({"max_new_tokens": 5}, r"; use params=SamplingParams\(max_tokens=5\)"),
        ({"num_return_sequences": 3}, r"; use params=SamplingParams\(n=3\)"),
        ({"lora_request": object()}, r"; load the adapter with LLM\(model, adapter=DIR\)"),
        ({"attention_mask": None}, "; remove the argument"),
        ({"tool": []}, r"; did you mean tools=\?"),
        (
            {"temprature": 1, "use_tqm": True},
            r"'temprature' and no 'use_tqm'; temprature: use params=SamplingParams"
            r"\(temperature=1\); use_tqm: did you mean use_tqdm=\?",
        ),
        ({"xyz": 1}, "; the arguments are prompts, params, tools, chat_template_kwargs, progress"),
    ],
)
def test_generate_tells_what_to_give(llm: LLM, given: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        llm.generate(["a"], **given)


@pytest.mark.parametrize(
    ("prompts", "ids"),
    [
        ([np.array([1, 2]), np.array([3])], [[1, 2], [3]]),
        ([torch.tensor([1, 2])], [[1, 2]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([{"prompt_token_ids": np.array([1, 2])}], [[1, 2]]),
        (np.array([1, 2]), [[1, 2]]),
        (torch.tensor([1, 2]), [[1, 2]]),
    ],
)
def test_prompts_may_be_arrays_of_token_ids(llm: LLM, prompts: Any, ids: list[list[int]]) -> None:
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1))
    assert [output.prompt_token_ids for output in outputs] == ids


def test_other_calls_tell_it_too(llm: LLM) -> None:
    node: Any = Node("a")
    with pytest.raises(InputError, match=r"run has no 'temperature'; use params=SamplingParams"):
        llm.run(node, temperature=0.5)  # type: ignore[call-arg]
    with pytest.raises(InputError, match=r"run has no 'sampling_params'; did you mean params=\?"):
        llm.run(node, sampling_params=None)  # type: ignore[call-arg]
    with pytest.raises(InputError, match=r"run has no 'use_tqdm'; did you mean progress=\?"):
        llm.run(node, use_tqdm=False)  # type: ignore[call-arg]
    with pytest.raises(InputError, match="score has no 'n'; the arguments are pairs, top"):
        llm.score([("a", "b")], n=1)  # type: ignore[call-arg]


def test_calls_keep_their_signatures(llm: LLM) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        llm.generate()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("max_new_tokens", r"; did you mean max_tokens=\?"),
        ("guided_json", r"; did you mean json_schema=\?"),
        ("stop_strings", r"; did you mean stop=\?"),
        ("length_penalty", "; remove this argument; see treegen.search.beam for beam search"),
        ("guided_decoding", r"; did you mean structured_outputs=\?"),
        ("do_sample", "; remove this argument: temperature=0.0 is greedy"),
        ("tempratur", r"; did you mean temperature=\?"),
    ],
)
def test_sampling_parameters_tell_what_to_give(name: str, why: str) -> None:
    given: dict[str, Any] = {name: 2}
    with pytest.raises(InputError, match=f"SamplingParams has no '{name}'{why}"):
        SamplingParams(**given)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("max_model_len", "remove this argument: memory grows with the number of tokens"),
        ("seed", "set the seed in the sampling parameters"),
        ("download_dir", "set the environment variable HF_HOME"),
        ("max_logprobs", "remove this argument: logprobs and prompt_logprobs have no limit"),
        ("pipeline_parallel_size", "pipeline parallelism is not supported"),
        ("gpu_memory_utilization", r"did you mean memory=\?"),
        ("tensor_paralel_size", r"did you mean tensor_parallel_size=\?"),
    ],
)
def test_an_llm_tells_what_to_give(name: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        LLM("demo", **{name: 4096})  # type: ignore[arg-type]


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_request_may_ask_for_what_the_server_does_anyway(is_chat: bool) -> None:
    body: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "Hi"}]} if is_chat else {"prompt": "a"}
    )
    anyway = {
        "add_special_tokens": not is_chat,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "priority": 0,
        **({"echo": False, "add_generation_prompt": True} if is_chat else {}),
    }
    given = parse_request({**body, **anyway}, is_chat=is_chat)
    assert given == parse_request(body, is_chat=is_chat)
    for name in ("add_special_tokens", "skip_special_tokens", "use_beam_search"):
        with pytest.raises(InputError, match=f"^{name} is not supported; "):
            parse_request({**body, name: not anyway[name]}, is_chat=is_chat)


def test_hints_name_only_near_words() -> None:
    known = ["stop_token_ids", "max_rows", "presence_penalty", "tensor_parallel_size", "n", "top_p"]
    for word in ("allowed_token_ids", "max_logprobs", "length_penalty", "pipeline_parallel_size"):
        assert find_near(word, known) == []
    assert find_near("stop_tokn_ids", known) == ["stop_token_ids"]
    assert find_near("mxa_rows", known) == ["max_rows"]
    assert find_near("parallel_size", known) == ["tensor_parallel_size"]
    assert find_near("Top_P", known) == ["top_p"]
    assert find_near("x", known) == find_near("", known) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda **names: LLM("demo", **names),
        lambda **names: evaluate("gsm8k", **names),
        SamplingParams,
    ],
)
def test_each_unknown_name_gets_its_hint(call: Callable[..., object]) -> None:
    with pytest.raises(InputError) as caught:
        call(max_model_len=5, pipeline_parallel_size=2, qwertz=1)
    message = str(caught.value)
    assert "max_model_len: remove this argument: memory grows with the number of tokens" in message
    assert "pipeline_parallel_size: pipeline parallelism is not supported" in message
    assert "qwertz" in message and "qwertz:" not in message


def test_a_name_of_vllm_that_is_renamed_twice() -> None:
    with pytest.raises(InputError, match=r"no setting 'best_of'; did you mean num_samples=\?"):
        evaluate("gsm8k", best_of=4)
