"""Scripts that were written for vLLM: its names of calls, arguments, prompts and outputs."""

import copy
import importlib.util
import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

import treegen
from treegen import (
    LLM,
    InputError,
    Node,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)

_SAMPLING = """
best_of use_beam_search length_penalty early_stopping logits_processors detokenize
skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens guided_decoding output_kind
extra_args flat_logprobs logprob_token_ids repetition_detection skip_clone output_text_buffer_length
skip_reading_prefix_cache thinking_token_budget routed_experts_prompt_start stream_interval
prompt_logprob_token_ids prompt_logprob_start trace_decode_token_ids
max_completion_tokens top_logprobs response_format
"""
"""Fields of vLLM's sampling parameters, and of OpenAI's requests, that treegen does not have."""
_OPTIONS = """
allowed_local_media_path async_scheduling attention_backend block_size calculate_kv_scales
code_revision compilation_config config_format convert cpu_offload_gb data_parallel_size
device_ids disable_cascade_attn disable_custom_all_reduce disable_log_stats disable_sliding_window
distributed_executor_backend download_dir enable_chunked_prefill enable_expert_parallel enable_lora
enable_prefix_caching enable_prompt_embeds enable_return_routed_experts enable_sleep_mode
enforce_eager fully_sharded_loras generation_config gpu_memory_utilization hf_overrides hf_token
ignore_patterns kv_cache_memory_bytes kv_offloading_size kv_transfer_config limit_mm_per_prompt
load_format logits_processors logprobs_mode lora_dtype max_cpu_loras max_logprobs max_lora_rank
max_loras max_model_len max_num_batched_tokens max_num_partial_prefills max_num_seqs
max_parallel_loading_workers mm_processor_cache_gb mm_processor_kwargs model_impl
model_loader_extra_config nnodes num_gpu_blocks_override optimization_level
override_generation_config pipeline_parallel_size pooler_config prefix_caching_hash_algo
profiler_config quantization_config ray_workers_use_nsight reasoning_parser runner
safetensors_load_strategy scheduler_cls scheduling_policy seed served_model_name
skip_tokenizer_init spec_method speculative_config stream_interval structured_outputs_config
swap_space task tokenizer_mode tokenizer_revision use_tqdm_on_load worker_cls
"""
"""Options of vLLM's `LLM` that treegen does not have."""
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
            assert llm.model_info.dtype == dtype


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
        ("CompletionOutput", "use treegen.Completion"),
        ("RequestOutputKind", "AsyncLLM.stream yields deltas"),
        ("PoolingOutput", "embeddings are not supported"),
    ],
)
def test_classes_that_treegen_lacks(name: str, why: str) -> None:
    with pytest.raises(InputError, match=f"treegen has no {name}: .*{why}"):
        exec(f"from treegen import {name}")
    with pytest.raises(ImportError, match=why):
        exec(f"from treegen import LLM, {name}")
    with pytest.raises(AttributeError, match=why):
        getattr(treegen, name)
    assert not hasattr(treegen, name)
    assert importlib.util.find_spec(f"treegen.no{name}") is None


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("from treegen.sampling_params import SamplingParams", "import SamplingParams or Struct"),
        ("from treegen.lora.request import LoRARequest", r"LLM\(model, adapter=DIR\)"),
        ("from treegen.engine.arg_utils import EngineArgs", "pass the options to LLM"),
        ("import treegen.outputs", "import RequestOutput, Completion or Score from treegen"),
    ],
)
def test_modules_that_treegen_lacks(statement: str, why: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"there is no module treegen.*{why}") as failed:
        exec(statement)
    assert isinstance(failed.value, InputError)
    assert failed.value.name is not None
    assert failed.value.name in statement


def test_other_missing_names_keep_pythons_errors() -> None:
    for statement in ("from treegen import nothing", "import treegen.nothing"):
        with pytest.raises(ImportError, match="nothing") as failed:
            exec(statement)
        assert not isinstance(failed.value, InputError)
    with pytest.raises(AttributeError, match="module 'treegen' has no attribute 'nothing'"):
        getattr(treegen, "nothing")  # noqa: B009


def test_sampling_parameters_of_vllm_have_advice() -> None:
    for name in _SAMPLING.split():
        with pytest.raises(InputError, match=f"SamplingParams has no '{name}'; ") as failed:
            SamplingParams(**{name: "x"})  # type: ignore[arg-type]
        assert "lists all parameters" not in str(failed.value)


def test_options_of_vllm_have_advice() -> None:
    for name in _OPTIONS.split():
        with pytest.raises(InputError, match=f"unknown names: {name}; ") as failed:
            LLM("demo", **{name: "x"})  # type: ignore[arg-type]
        assert "use one of" not in str(failed.value)


def test_values_that_request_what_treegen_does_anyway(chat_llm: LLM) -> None:
    anyway: dict[str, Any] = {
        "best_of": 2,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "detokenize": True,
        "logits_processors": None,
        "guided_decoding": None,
        "extra_args": {},
    }
    plain = SamplingParams(seed=1, max_tokens=4, n=2)
    assert SamplingParams(seed=1, max_tokens=4, n=2, **anyway) == plain
    assert replace(plain, **anyway) == plain
    given: dict[str, Any] = {"seed": 1, "max_tokens": 4, "n": 2, "skip_special_tokens": True}
    samples = chat_llm.generate("2 + 3?", plain)
    call: Any = chat_llm.generate
    assert call("2 + 3?", given, lora_request=None, priority=[0]) == samples
    with pytest.raises(InputError, match=r"priority.*the order in which they arrive"):
        call("2 + 3?", given, priority=[1])
    for name, value in (("detokenize", False), ("best_of", 3), ("logits_processors", [str])):
        with pytest.raises(InputError, match=f"has no '{name}'"):
            SamplingParams(n=2, **{name: value})  # type: ignore[arg-type]


def test_turns_that_treegen_takes_anyway(chat_llm: LLM) -> None:
    call: Any = chat_llm.chat
    params = SamplingParams(seed=1, max_tokens=4)
    question = [{"role": "user", "content": "2 + 3?"}]
    begun = [*question, {"role": "assistant", "content": "The"}]
    answers = {"add_generation_prompt": True, "continue_final_message": False}
    continues = {"add_generation_prompt": False, "continue_final_message": True}
    for messages, turn, other in (
        (question, answers, continues),
        ([question, question], answers, continues),
        (begun, continues, answers),
    ):
        plain = chat_llm.chat(messages, params)
        assert call(messages, params, chat_template=None, **turn) == plain
        assert call(messages=messages, params=params, **turn) == plain
        for name, value in other.items():
            with pytest.raises(InputError, match=f"chat has no '{name}'; remove the argument"):
                call(messages, params, **{name: value})
    with pytest.raises(InputError) as error:
        call(begun, params, **answers)
    assert str(error.value).count("the assistant continues a last message of its own") == 1
    with pytest.raises(InputError, match="add_generation_prompt"):
        call([question, begun], params, add_generation_prompt=True)


def test_options_that_request_what_treegen_does_anyway() -> None:
    given: dict[str, Any] = {
        "task": "generate",
        "tokenizer": "demo",
        "tokenizer_mode": "auto",
        "load_format": "auto",
        "seed": 0,
        "enforce_eager": False,
        "pipeline_parallel_size": 1,
        "swap_space": 0,
        "max_model_len": None,
        "hf_overrides": {},
        "disable_log_stats": True,
    }
    assert LLM("demo", memory="16MiB", **given).spec == LLM("demo", memory="16MiB").spec
    with pytest.raises(InputError, match="unknown names: load_format; remove this argument"):
        LLM("demo", load_format="dummy")  # type: ignore[arg-type]


def test_a_score_of_two_texts(llm: LLM) -> None:
    call: Any = llm.score
    with pytest.raises(InputError, match="compares texts with a cross-encoder"):
        call("a", ["b", "c"])
    with pytest.raises(InputError, match="generate takes 2 positional arguments"):
        llm.generate("a", None, None)  # type: ignore[call-arg]
