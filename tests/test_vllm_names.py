"""Scripts that were written for vLLM: its names of calls, arguments, prompts and outputs."""

import copy
import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from treegen import (
    LLM,
    InputError,
    Node,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)

_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", memory="16MiB")


@pytest.fixture
def chat_llm(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    monkeypatch.setattr(llm.tokenizer, "chat_template", _TEMPLATE)
    return llm


def test_a_basic_script(llm: LLM) -> None:
    prompts = ["Q: 2 + 3?\nA:", "Q: Tom has 4 pens.\nA:"]
    sampling_params = SamplingParams(n=2, temperature=0.8, top_p=0.95, max_tokens=8, seed=1)
    outputs = llm.generate(prompts, sampling_params)
    assert [output.prompt for output in outputs] == prompts
    for index, output in enumerate(outputs):
        assert output.request_id == str(index)
        assert output.finished
        assert output.prompt_token_ids == llm.tokenizer(prompts[index])["input_ids"]
        for place, completion in enumerate(output.outputs):
            assert completion.index == place
            assert completion.text == output[place].text
            assert completion.token_ids == completion.tokens
            assert completion.cumulative_logprob == pytest.approx(sum(completion.logprobs))
            assert completion.finish_reason in ("stop", "length")
            assert completion.stop_reason == completion.stop


def test_the_log_probabilities_of_a_prompt(llm: LLM) -> None:
    ids = llm.tokenizer("Q: 2 + 3?\nA:")["input_ids"]
    (output,) = llm.generate([ids], SamplingParams(n=2, max_tokens=1, prompt_logprobs=2))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs is output[1].prompt_logprobs
    (score,) = llm.score([(ids[:1], ids[1:])])
    assert output.prompt_logprobs.tokens == score.tokens == tuple(ids[1:])
    assert output.prompt_logprobs.logprobs == pytest.approx(score.logprobs, abs=1e-4)
    assert llm.generate([ids], SamplingParams(max_tokens=1))[0].prompt_logprobs is None


def test_an_output_is_a_list_of_completions(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=4, seed=1)
    (output,) = llm.generate(["Q: 2 + 3?"], params)
    assert isinstance(output, RequestOutput)
    assert isinstance(output, list)
    assert output == output.outputs == list(output)
    assert len(output) == 3
    for again in (pickle.loads(pickle.dumps(output)), copy.deepcopy(output)):
        assert again == output
        assert (again.prompt, again.prompt_token_ids) == (output.prompt, output.prompt_token_ids)
    assert repr(output).startswith("RequestOutput(request_id='0', prompt='Q: 2 + 3?', outputs=[")


def test_forms_of_prompts(llm: LLM) -> None:
    text = "Q: 2 + 3?\nA:"
    ids = llm.tokenizer(text)["input_ids"]
    params = SamplingParams(max_tokens=4, seed=1)
    forms: list[Any] = [
        text,
        [text],
        ids,
        [ids],
        {"prompt": text},
        [{"prompt": text}],
        {"prompt_token_ids": ids},
        [{"prompt_token_ids": ids, "prompt": text, "multi_modal_data": None}],
    ]
    outputs = [llm.generate(form, params) for form in forms]
    assert all(len(output) == 1 for output in outputs)
    assert len({output[0][0].text for output in outputs}) == 1
    assert all(output[0].prompt_token_ids == ids for output in outputs)
    assert [output[0].prompt for output in outputs[:4]] == [text, text, None, None]


@pytest.mark.parametrize(
    ("prompts", "why"),
    [
        (
            [{"role": "user", "content": "Hi"}],
            r"a single conversation; pass the conversation to llm\.chat",
        ),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "pass images as parts of chat"),
        (
            {"prompt_embeds": [1.0]},
            "a prompt has the unknown key 'prompt_embeds'; pass text, token ids",
        ),
        ([{}], "a dict must have the key prompt or prompt_token_ids"),
        ([{"prompt": 5}], "content must be a string, .*, got int"),
        (5, "prompts must be a list"),
        ([("name", "a")], r"got a \(name, prompt\) pair; pass only the prompt, or call llm\.run"),
        (Node("a"), r"got Node; pass the root of a tree to llm\.run"),
        ([Node("a")], r"got Node; pass the root of a tree to llm\.run"),
    ],
)
def test_prompts_that_cannot_be_used(llm: LLM, prompts: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        llm.generate(prompts)


def test_trees_that_are_no_nodes(llm: LLM) -> None:
    calls: list[Any] = [llm.run, llm.stream, llm.plan]
    for call in calls:
        for tree in ("a", ["a"], [Node("a")]):
            with pytest.raises(InputError, match=r"pass the root Node, or .* to llm\.generate"):
                call(tree)
    with pytest.raises(InputError, match=r"the tree must be a Node, got int; pass the root Node$"):
        llm.run(5)  # type: ignore[arg-type]


def test_no_maximum_number_of_tokens() -> None:
    llm = LLM("demo", memory="32MiB")
    params = SamplingParams(max_tokens=None, seed=1, ignore_eos=True)  # type: ignore[arg-type]
    ids = llm.tokenizer("Q: 2 + 3?\nA:")["input_ids"]
    ids *= (llm.spec.context_length - 20) // len(ids)
    for limited in (params, replace(params, max_tokens=10**6)):
        (output,) = llm.generate([ids], limited)
        assert len(ids) + len(output[0].tokens) == llm.spec.context_length
        assert output[0].finish_reason == "length"


def test_names_of_dtypes() -> None:
    for name, dtype in (("half", "float16"), ("float", "float32")):
        with LLM("demo", memory="8MiB", dtype=name, check=False) as llm:
            assert llm.facts.dtype == dtype


def test_names_of_arguments(chat_llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    params = SamplingParams(max_tokens=4, seed=1)
    chat = [{"role": "user", "content": "2 + 3?"}]
    calls: list[tuple[Any, Any]] = [(chat_llm.generate, "2 + 3?"), (chat_llm.chat, chat)]
    for call, prompt in calls:
        plain = call(prompt, params)
        named = call(prompt, sampling_params=params, use_tqdm=False)
        assert plain == named
        capsys.readouterr()
        assert call(prompt, sampling_params=params, use_tqdm=True) == plain
        assert "1/1" in capsys.readouterr().err
        with pytest.raises(InputError, match="params and sampling_params are two names"):
            call(prompt, params, sampling_params=params)
    assert chat_llm.generate(prompts="2 + 3?", sampling_params={"max_tokens": 1})


def test_a_chat_has_its_rendered_prompt(chat_llm: LLM) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("2 + 3?", "4?")]
    outputs = chat_llm.chat(chats, sampling_params=SamplingParams(max_tokens=4))
    assert [output.prompt for output in outputs] == [
        "<user>2 + 3?\n<assistant>",
        "<user>4?\n<assistant>",
    ]
    assert pickle.loads(pickle.dumps(outputs[0])).prompt == outputs[0].prompt


def test_allowed_token_ids(llm: LLM) -> None:
    digits = sorted({llm.tokenizer(f" {digit}")["input_ids"][0] for digit in range(4)})
    params = SamplingParams(n=6, max_tokens=5, seed=3, allowed_token_ids=digits)
    prompts = ["Q: 2 + 3?\nA:", "Q: Tom has 4 pens.\nA:"]
    free = SamplingParams(n=6, max_tokens=5, seed=3)
    limited, unlimited = llm.generate(prompts, [params, free])
    for completion in limited:
        assert len(completion.tokens) == 5
        assert set(completion.tokens) <= set(digits)
    texts = [completion.text for completion in unlimited]
    assert [completion.text for completion in llm.generate(prompts[1], free)[0]] == texts
    (processed,) = llm.generate(prompts[:1], replace(params, logprobs_mode="processed_logprobs"))
    assert [c.tokens for c in processed] == [c.tokens for c in limited]
    assert min(c.cumulative_logprob for c in processed) > min(c.cumulative_logprob for c in limited)
    everything = replace(free, allowed_token_ids=range(llm.spec.vocab_size))
    assert [completion.text for completion in llm.generate(prompts[1], everything)[0]] == texts
    with pytest.raises(InputError, match="allowed_token_ids contains token 1000000"):
        llm.generate(prompts, SamplingParams(allowed_token_ids=[1, 1_000_000]))
    ends = list(llm.spec.eos_token_ids)
    with pytest.raises(InputError, match="min_tokens excludes every"):
        llm.generate(prompts, SamplingParams(allowed_token_ids=ends, min_tokens=1))
    assert llm.generate(prompts[0], SamplingParams(allowed_token_ids=ends))[0][0].text == ""


def test_top_k_of_minus_one_keeps_all() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(logprobs=None) == SamplingParams()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("structured_outputs", "ours"),
    [
        ({"choice": ["yes", "no"]}, {"choice": ("yes", "no")}),
        ({"regex": "[0-9]+", "json": None}, {"regex": "[0-9]+"}),
        ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"json": {"type": "array"}}, {"json_schema": {"type": "array"}}),
        ({"json_object": True}, {"json_schema": {"type": "object"}}),
        (StructuredOutputsParams(choice=["a"]), {"choice": ("a",)}),
    ],
)
def test_structured_outputs(structured_outputs: dict[str, Any], ours: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=structured_outputs)
    assert params == SamplingParams(**ours)
    assert replace(params, max_tokens=3).structure == params.structure


def test_structured_outputs_that_cannot_be_used() -> None:
    with pytest.raises(InputError, match="does not support 'structural_tag'; use one of: ch"):
        SamplingParams(structured_outputs={"structural_tag": "a"})
    with pytest.raises(InputError, match="structured_outputs must be an object, such as"):
        SamplingParams(structured_outputs=["a"])  # type: ignore[arg-type]
    with pytest.raises(
        InputError, match="choice is also set in structured_outputs; pass choice once"
    ):
        SamplingParams(choice=["a"], structured_outputs={"choice": ["b"]})
    with pytest.raises(InputError, match="regex and choice cannot be used together"):
        SamplingParams(regex="a", structured_outputs={"choice": ["b"]})


def test_a_choice(llm: LLM) -> None:
    params = SamplingParams(n=4, structured_outputs={"choice": ["Positive", "Negative"]})
    (output,) = llm.generate("It is wonderful! ", params)
    assert {completion.text for completion in output} <= {"Positive", "Negative"}


def test_sampling_parameters_cannot_be_changed() -> None:
    with pytest.raises(
        FrozenInstanceError, match=r"dataclasses.replace\(params, max_tokens=\.\.\.\)"
    ):
        SamplingParams().max_tokens = 5  # type: ignore[misc]


def test_default_sampling_parameters(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("embed", "computes no embeddings"),
        ("encode", "llm.tokenizer encodes text"),
        ("classify", r"llm\.score\(\[\(prompt, name\)\]\)"),
        ("beam_search", "treegen.search.beam"),
        ("reward", "load_verifier"),
    ],
)
def test_calls_that_treegen_lacks(llm: LLM, name: str, why: str) -> None:
    with pytest.raises(InputError, match=f"LLM has no {name}: .*{why}"):
        getattr(llm, name)("a")
    assert not hasattr(llm, name)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("LoRARequest", r"LLM\(model, adapter=DIR\)"),
        ("GuidedDecodingParams", "structured_outputs="),
        ("EngineArgs", "pass the options to LLM"),
        ("TokensPrompt", "prompt_token_ids"),
    ],
)
def test_classes_that_treegen_lacks(name: str, why: str) -> None:
    with pytest.raises(InputError, match=f"treegen has no {name}: .*{why}"):
        exec(f"from treegen import {name}")


def test_a_score_of_two_texts(llm: LLM) -> None:
    call: Any = llm.score
    with pytest.raises(InputError, match="compares texts with a cross-encoder"):
        call("a", ["b", "c"])
    with pytest.raises(InputError, match="generate takes 2 positional arguments"):
        llm.generate("a", None, None)  # type: ignore[call-arg]
