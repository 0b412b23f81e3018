"""Names of parameters in other tools, such as vLLM: their names here, or what to do instead.

A program that passes vLLM's default values to every call keeps working: `drop_neutral` removes
arguments whose values request what treegen does anyway.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, Final

from treegen.errors import arg


def _expand(names_by_value: Mapping[str, str]) -> dict[str, str]:
    """Return the value of each name. The given mapping has the names of each value as one text."""
    return {name: value for value, names in names_by_value.items() for name in names.split()}


FOREIGN: Final = _expand(
    {
        "model": "pretrained model_path model_name",
        "memory": "gpu_memory_utilization kv_cache_memory_bytes mem_fraction_static",
        "max_rows": "max_num_seqs batch_size max_connections",
        "prefill_chunk": "max_num_batched_tokens",
        "page_size": "block_size",
        "eager": "enforce_eager",
        "impl": "attention_backend",
        "speculate": "speculative_config spec_method",
        "draft_tokens": "num_speculative_tokens spec_tokens",
        "draft_model": "spec_model",
        "max_tokens": "max_new_tokens max_gen_toks max_completion_tokens",
        "min_tokens": "min_new_tokens",
        "stop": "until stop_strings",
        "n": "num_return_sequences best_of",
        "max_thinking_tokens": "thinking_token_budget",
        "logprobs": "top_logprobs",
        "num_samples": "n epochs repeats",
        "num_fewshot": "num_fewshot_examples few_shot shots n_shot nshot",
        "gpus": "num_gpus dp",
        "stop_token_ids": "eos_token_id",
        "bad_words": "bad_words_ids",
        "structured_outputs": "guided_decoding",
        "json_schema": "guided_json",
        "regex": "guided_regex",
        "grammar": "guided_grammar",
        "choice": "guided_choice",
        "adapter": "enable_lora lora_modules lora_path peft",
    }
)
"""Names of parameters in other tools, such as vLLM, and their names here."""
_A_SIZE: Final = " The value is a size, such as 60GiB, not a fraction"
OTHER_VALUES: Final = {"gpu_memory_utilization": _A_SIZE, "mem_fraction_static": _A_SIZE}
"""Names in other tools whose values have another form than here, with the form here."""

_LEAVE_OUT: Final = "remove this argument"
_NO_EXPERTS: Final = (
    "treegen does not report the experts that compute a token; remove this argument"
)
_MANY_MODELS: Final = (
    "use `treegen eval --gpus N` or Cluster, which load one copy of the model on each GPU"
)
_NO_UPLOAD: Final = (
    "uploads are not supported; use `treegen export` to write a run in other formats"
)
_BEAM_SEARCH: Final = "remove this argument; see treegen.search.beam for beam search"
_ANY_LENGTH: Final = "remove this argument: memory grows with the number of tokens"
_NO_SPECIAL_TOKENS: Final = "remove this argument: texts never contain special tokens"
NO_COUNTERPART: Final = {
    **_expand(
        {
            _LEAVE_OUT: (
                "chat_template_content_format tokenizer_mode load_format config_format swap_space "
                "cpu_offload_gb max_seq_len_to_capture max_lora_rank max_loras max_cpu_loras "
                "mm_processor_kwargs disable_custom_all_reduce distributed_executor_backend "
                "compilation_config skip_tokenizer_init disable_log_stats"
            ),
            _BEAM_SEARCH: "num_beams length_penalty early_stopping",
            _ANY_LENGTH: "max_seq_len context_length",
            _NO_SPECIAL_TOKENS: "skip_special_tokens spaces_between_special_tokens",
            _MANY_MODELS: "data_parallel_size dp",
            _NO_UPLOAD: "wandb_args wandb_config_args trackio_args hf_hub_log_args",
        }
    ),
    "do_sample": (
        "remove this argument: temperature=0.0 is greedy, and any other temperature samples"
    ),
    "max_model_len": (
        f"remove this argument: memory grows with the number of tokens, and {arg('max_rows')} "
        "limits the samples that are decoded at once"
    ),
    "max_samples": (
        f"use {arg('limit')} for the number of problems (--max-samples in lighteval), or "
        f"{arg('max_rows')} for the number of samples that are decoded at once (--max-samples "
        "in Inspect)"
    ),
    "load_in_4bit": f"set {arg('quantization')} to a format, or load a quantized checkpoint",
    "load_in_8bit": f"set {arg('quantization', 'fp8')}, or load a quantized checkpoint",
    "tokenizer": "remove this argument: treegen uses the tokenizer of the checkpoint",
    "enable_auto_tool_choice": (
        "remove this argument: the format of tool calls is recognized automatically"
    ),
    "tool_call_parser": (
        f"remove this argument, or set the format of tool calls with {arg('tool_format')}"
    ),
    "reasoning_parser": "remove this argument: the reasoning tags come from the chat template",
    "disable_log_requests": "remove this argument: treegen does not log requests",
    "uvicorn_log_level": "remove this argument: the server prints only its address and errors",
    "max_logprobs": f"remove this argument: logprobs and {arg('prompt_logprobs')} have no limit",
    "enable_prefix_caching": (
        "remove this argument: shared prefixes of prompts are always computed once"
    ),
    "enable_chunked_prefill": (
        f"remove this argument: prompts are computed in chunks of {arg('prefill_chunk')}"
    ),
    "pipeline_parallel_size": "pipeline parallelism is not supported; remove this argument",
    "enable_expert_parallel": (
        f"remove this argument: {arg('tensor_parallel_size')} divides the experts too"
    ),
    "limit_mm_per_prompt": "remove this argument: a prompt may have any number of images",
    "logits_processors": (
        f"logits processors are not supported; use {arg('logit_bias')}, allowed_token_ids or "
        "bad_words"
    ),
    "truncate_prompt_tokens": "cut the prompt's token ids before the call",
    "hf_overrides": "change config.json in a copy of the checkpoint",
    "runner": "remove this argument: treegen generates and scores text",
    "download_dir": "set the environment variable HF_HOME to the directory",
    "seed": "set the seed in the sampling parameters",
    "use_cache": (
        "set the directory of the run with --output-path, and continue the run with --resume"
    ),
    "cache_requests": "remove this argument: prompts are tokenized again for each run",
    "max_batch_size": (
        "remove this argument, or limit the samples that are decoded at once with --max-rows"
    ),
    "show_config": (
        "use --print-config to print all settings, or read them in the run.json of the run"
    ),
    "metadata": "pass the arguments of lm-eval tasks with -T NAME=VALUE",
}
"""Names in other tools that have no counterpart here, with advice."""


# Names that only some calls get, because other tools and commands use the same words.

SAMPLING_ADVICE: Final = {
    "best_of": (
        "set n to the number of samples to draw, and sort the completions by cumulative_logprob"
    ),
    "use_beam_search": _BEAM_SEARCH,
    "detokenize": "remove this argument: completions have text and tokens",
    "output_kind": (
        "remove this argument: LLM.generate returns finished samples, LLM.stream yields samples "
        "as they finish, and AsyncLLM.stream yields deltas"
    ),
    "stream_interval": "remove this argument: AsyncLLM.stream yields a delta after each step",
    "extra_args": "remove this argument: treegen has no plugins for sampling",
    "vllm_xargs": "remove this argument: treegen has no plugins for sampling",
    "flat_logprobs": (
        "remove this argument: Completion.logprobs always is a flat sequence of numbers"
    ),
    "logprob_token_ids": (
        "score the tokens: llm.score([(prompt_ids, [token_id])]), or set logprobs to a number of "
        "most likely tokens"
    ),
    "prompt_logprob_token_ids": "set prompt_logprobs to a number of most likely tokens",
    "prompt_logprob_start": "score a part of a text: llm.score([(context, continuation)])",
    "trace_decode_token_ids": "score the tokens: llm.score([(prompt_ids, token_ids)])",
    "repetition_detection": (
        "repetitions do not end samples; use repetition_penalty, frequency_penalty or "
        "no_repeat_ngram_size"
    ),
    "truncation_side": "cut the prompt's token ids before the call",
    "skip_clone": "remove this argument: SamplingParams is immutable",
    "output_text_buffer_length": _LEAVE_OUT,
    "skip_reading_prefix_cache": (
        "remove this argument: a prefix computed earlier has the same keys and values"
    ),
    "routed_experts_prompt_start": _NO_EXPERTS,
    "max_length": "set max_tokens, which does not count the prompt",
    "min_length": "set min_tokens, which does not count the prompt",
    "stream": "call LLM.stream with a tree, or AsyncLLM.stream",
    "response_format": "pass the schema as json_schema",
    "stop_words": "pass the strings as stop",
}
"""Names that other tools' sampling parameters have, with advice; see also FOREIGN."""
REQUEST_ADVICE: Final = {
    **SAMPLING_ADVICE,
    **_expand(
        {
            "treegen serve --chat-template sets the template of all chats": "chat_template",
            "remove it: the assistant continues a last message of its own, and "
            "otherwise answers": "add_generation_prompt continue_final_message",
            "remove it: prompts get special tokens, and messages only those of the "
            "chat template": "add_special_tokens",
            "pass them in chat_template_kwargs": "documents",
            "pass separate_reasoning": "include_reasoning",
            "remove it, or pass return_token_ids": (
                "return_tokens_as_token_ids return_token_offsets return_prompt_text "
                "return_assistant_tokens_mask"
            ),
            "set logprobs to a number of most likely tokens": (
                "logprob_token_ids prompt_logprob_token_ids"
            ),
            "repetitions do not end samples; pass repetition_penalty, frequency_penalty or "
            "no_repeat_ngram_size": "repetition_detection",
            "remove it: choices have text, and return_token_ids adds the token ids": ("detokenize"),
            "remove it": "output_kind stream_interval vllm_xargs extra_args",
            "remove it: the served model has at most one adapter": "lora_request",
            "remove it: images are prepared as the checkpoint specifies": (
                "mm_processor_kwargs media_io_kwargs"
            ),
            "transfers of keys and values between servers are not supported": (
                "kv_transfer_params ec_transfer_params"
            ),
            "embeddings are not supported; send text or token ids": "prompt_embeds",
        }
    ),
}
"""Fields of requests to vLLM's and OpenAI's servers, with advice; see also FOREIGN."""
ENGINE_ADVICE: Final = _expand(
    {
        "remove this argument: treegen generates and scores text": "task runner convert",
        "remove this argument: treegen runs the classes of transformers": (
            "model_impl model_class_overrides"
        ),
        "remove this argument: a run prints no statistics, and its usage has the counts": (
            "disable_log_stats enable_log_requests aggregate_engine_logging kv_cache_metrics "
            "kv_cache_metrics_sample cudagraph_metrics enable_mfu_metrics "
            "enable_logging_iteration_details enable_mm_processor_stats collect_detailed_traces "
            "otlp_traces_endpoint show_hidden_metrics_for_version enable_layerwise_nvtx_tracing "
            "jit_monitor_mode jit_monitor_verbose profiler_config ray_workers_use_nsight"
        ),
        _MANY_MODELS: (
            "data_parallel_rank data_parallel_start_rank data_parallel_size_local "
            "data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb "
            "data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend "
            "master_addr master_port nnodes node_rank distributed_timeout_seconds "
            "cpu_distributed_timeout_seconds"
        ),
        f"set {arg('device')} to the GPU, or use Cluster for several": "device_ids",
        f"remove this argument: {arg('tensor_parallel_size')} divides the experts too": (
            "enable_ep_weight_filter all2all_backend enable_elastic_ep enable_dbo ubatch_size "
            "dbo_decode_token_threshold dbo_prefill_token_threshold "
            "disable_nccl_for_dp_synchronization eplb_config enable_eplb "
            "expert_placement_strategy"
        ),
        _NO_EXPERTS: "enable_return_routed_experts",
        "only tensor parallelism is supported; remove this argument": (
            "prefill_context_parallel_size decode_context_parallel_size dcp_comm_backend "
            "dcp_kv_cache_interleave_size cp_kv_cache_interleave_size"
        ),
        f"offloading is not supported; lower {arg('memory')} or set {arg('quantization')}": (
            "offload_backend cpu_offload_params offload_group_size offload_num_in_group "
            "offload_prefetch_step offload_params kv_offloading_size kv_offloading_backend"
        ),
        "transfers of keys and values between engines are not supported; remove this argument": (
            "kv_transfer_config kv_events_config ec_transfer_config weight_transfer_config"
        ),
        f"remove this argument: {arg('images', True)} accepts images in chats": (
            "language_model_only enable_mm_embeds interleave_mm_strings media_io_kwargs "
            "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb "
            "mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype "
            "mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path "
            "mm_encoder_fp8_scale_save_margin skip_mm_profiling video_pruning_rate mm_tensor_ipc "
            "mm_ipc_gpu_memory_gb disable_chunked_mm_input allowed_local_media_path "
            "allowed_media_domains"
        ),
        f"remove this argument: {arg('adapter')} merges one adapter into the weights": (
            "default_mm_loras fully_sharded_loras lora_dtype lora_target_modules "
            "enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format "
            "enable_moe_shared_loras lora_extra_vocab_size long_lora_scaling_factors"
        ),
        f"{arg('memory')} sets the size of the KV cache": "num_gpu_blocks_override watermark",
        f"set {arg('prefill_chunk')}, the maximum number of prompt tokens in a pass": (
            "max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold "
            "max_num_scheduled_tokens prefill_schedule_interval scheduler_reserve_full_isl"
        ),
        f"remove this argument, or set {arg('run_ahead')}": "async_scheduling",
        "remove this argument: requests start in the order in which they arrive": (
            "scheduling_policy scheduler_cls"
        ),
        f"remove this argument; {arg('eager', True)} turns compiling and CUDA graphs off": (
            "cudagraph_capture_sizes max_cudagraph_capture_size optimization_level performance_mode"
        ),
        f"remove this argument; {arg('impl')} chooses the attention implementation": (
            "attention_config override_attention_dtype disable_cascade_attn "
            "enable_flashinfer_autotune"
        ),
        f"set {arg('quantization')} to a format, or load a quantized checkpoint": (
            "quantization_config allow_deprecated_quantization"
        ),
        f"set {arg('kv_cache_dtype')}": "calculate_kv_scales kv_cache_dtype_skip_layers",
        "pass sampling parameters to the call; SamplingParams.from_generation_config(llm) has "
        "those that the checkpoint recommends": "generation_config override_generation_config",
        "set logprobs_mode in the sampling parameters": "logprobs_mode",
        "remove this argument: treegen uses the tokenizer of the checkpoint": "tokenizer_revision",
        f"set {arg('revision')}": "code_revision",
        "set the environment variable HF_TOKEN to the token": "hf_token",
        "embeddings are not supported; use vLLM or sentence-transformers": (
            "pooler_config enable_prompt_embeds override_pooler_config"
        ),
        "close the LLM, and load it again later": "enable_sleep_mode",
        "remove this argument: shared prefixes of prompts are compared token by token": (
            "prefix_caching_hash_algo prefix_match_unit"
        ),
        "remove this argument: reasoning tags come from the chat template, or from "
        "reasoning_tags in the sampling parameters": "reasoning_parser_plugin reasoning_config",
        "remove this argument; llguidance computes structured output": (
            "structured_outputs_config guided_decoding_backend"
        ),
        "convert the weights to safetensors": "pt_load_map_location ignore_patterns",
        "remove this argument": (
            "model_weights served_model_name hf_config_path safetensors_load_strategy "
            "safetensors_prefetch_num_threads safetensors_prefetch_block_size ir_op_priority "
            "numa_bind numa_bind_nodes numa_bind_cpus moe_backend linear_backend "
            "max_parallel_loading_workers disable_sliding_window use_fp64_gumbel "
            "io_processor_plugin renderer_num_workers model_loader_extra_config "
            "disable_hybrid_kv_cache_manager diffusion_config enable_bf16x3_router_gemm "
            "worker_cls worker_extension_cls mamba_config kernel_config enable_cumem_allocator "
            "mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode "
            "mamba_backend enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds "
            "additional_config use_tqdm_on_load stream_interval kv_sharing_fast_prefill "
            "tokens_only shutdown_timeout fail_on_environ_validation gdn_prefill_backend "
            "preemption_mode num_scheduler_steps use_v2_block_manager num_lookahead_slots"
        ),
    }
)
"""Options of vLLM's `LLM` and `EngineArgs`, with advice; see also FOREIGN."""

# Values that request what treegen does anyway, by name. None always does.

_PLAIN: Final = (bool, int, float, str, list, tuple, dict)  # types that `==` compares to a bool
_EITHER: Final = (True, False)  # the value changes no result
_OFF: Final = (False,)
_EMPTY: Final[tuple[Any, ...]] = ({},)
_ONLY_NONE: Final = ()


def _assign(names: str, values: Sequence[Any]) -> dict[str, Sequence[Any]]:
    """Return the same values for each of some names, which are separated by spaces."""
    return dict.fromkeys(names.split(), values)


NEUTRAL_SAMPLING: Final[Mapping[str, Sequence[Any]]] = {
    "length_penalty": (1.0,),  # only beam search reads it
    "thinking_token_budget": (-1,),
    # Texts contain no special tokens.
    **_assign("spaces_between_special_tokens skip_clone", _EITHER),
    **_assign("use_beam_search early_stopping flat_logprobs skip_reading_prefix_cache", _OFF),
    **_assign("detokenize skip_special_tokens", (True,)),
    **_assign("logits_processors logprob_token_ids prompt_logprob_token_ids", ([], ())),
    **_assign("extra_args vllm_xargs", _EMPTY),
    **_assign("prompt_logprob_start routed_experts_prompt_start", (0,)),
    **_assign(
        "truncate_prompt_tokens truncation_side guided_decoding guided_json guided_regex "
        "guided_grammar guided_choice trace_decode_token_ids repetition_detection stream_interval",
        _ONLY_NONE,
    ),
}
"""For SamplingParams."""
NEUTRAL_CALL: Final[Mapping[str, Sequence[Any]]] = {
    "priority": (0,),
    "chat_template_content_format": ("auto",),
    **_assign("tokenization_kwargs mm_processor_kwargs reasoning_parser_kwargs", _EMPTY),
    **_assign(
        "lora_request prompt_adapter_request chat_template guided_options_request trace_headers "
        "data_parallel_rank prompt_text reasoning_ended",
        _ONLY_NONE,
    ),
}
"""For calls that take prompts or messages."""
NEUTRAL_REQUEST: Final[Mapping[str, Sequence[Any]]] = {
    **NEUTRAL_SAMPLING,
    **NEUTRAL_CALL,
    "documents": ([],),
    **_assign("media_io_kwargs kv_transfer_params ec_transfer_params", _EMPTY),
    **_assign(
        "echo return_tokens_as_token_ids return_token_offsets return_prompt_text "
        "return_assistant_tokens_mask",
        _OFF,
    ),
}
"""For requests to the server."""
NEUTRAL_ENGINE: Final[Mapping[str, Sequence[Any]]] = {
    "convert": ("auto", "none"),
    "model_impl": ("auto", "transformers"),
    "load_format": ("auto", "safetensors"),
    "logits_processors": ([], ()),
    "allowed_media_domains": ([],),
    "generation_config": ("vllm",),  # LLM.generate ignores generation_config.json
    "scheduling_policy": ("fcfs",),
    "seed": (0,),  # without a seed, samples are those of seed 0
    **_assign("task runner", ("auto", "generate")),
    **_assign("tokenizer_mode config_format", ("auto", "hf")),
    **_assign("allowed_local_media_path reasoning_parser", ("",)),
    **_assign("enable_chunked_prefill disable_log_stats", (True,)),
    **_assign("swap_space cpu_offload_gb offload_group_size", (0,)),
    **_assign(
        "pipeline_parallel_size data_parallel_size prefill_context_parallel_size "
        "decode_context_parallel_size",
        (1,),
    ),
    **_assign(
        "limit_mm_per_prompt mm_processor_kwargs hf_overrides rope_scaling compilation_config "
        "override_generation_config",
        _EMPTY,
    ),
    **_assign(
        "skip_tokenizer_init enforce_eager disable_custom_all_reduce enable_expert_parallel "
        "enable_eplb enable_lora enable_sleep_mode enable_prompt_embeds "
        "enable_return_routed_experts enable_log_requests disable_sliding_window "
        "disable_cascade_attn",
        _OFF,
    ),
    **_assign(
        "max_model_len max_num_seqs max_num_batched_tokens block_size kv_cache_memory_bytes "
        "num_gpu_blocks_override enable_prefix_caching distributed_executor_backend "
        "offload_params max_loras max_lora_rank max_cpu_loras hf_token tokenizer_revision "
        "code_revision download_dir quantization_config speculative_config spec_method "
        "spec_model spec_tokens attention_backend attention_config structured_outputs_config "
        "profiler_config pooler_config served_model_name",
        _ONLY_NONE,
    ),
}
"""For an LLM."""
_REQUESTED_TURN: Final = ("add_generation_prompt", "continue_final_message")


def _continues(messages: Any) -> bool | None:
    """Return whether the assistant continues the last message of all conversations, or of none.

    The result is None if only some conversations continue, or if the value is not messages.
    """
    if not isinstance(messages, list | tuple) or not messages:
        return None
    conversations = [messages] if isinstance(messages[0], Mapping) else messages
    if not all(isinstance(turns, list | tuple) and turns for turns in conversations):
        return None
    last = [turns[-1] for turns in conversations]
    kinds = {
        isinstance(turn, Mapping) and turn.get("role") == "assistant" and not turn.get("tool_calls")
        for turn in last
    }
    return kinds.pop() if len(kinds) == 1 else None


def _is_neutral(
    name: str, arguments: Mapping[str, Any], neutral: Mapping[str, Sequence[Any]]
) -> bool:
    """Return whether an unknown argument requests what treegen does anyway.

    Args:
        name: Its name.
        arguments: All arguments of the call, by name.
        neutral: Values that change nothing, by name.
    """
    value = arguments[name]
    if name in _REQUESTED_TURN and "messages" in arguments:
        continues = _continues(arguments["messages"])
        return value is (continues if name == "continue_final_message" else continues is False)
    if name == "add_special_tokens" and neutral is NEUTRAL_REQUEST:
        return value is ("messages" not in arguments)  # a chat template writes them itself
    if name == "best_of" and neutral in (NEUTRAL_SAMPLING, NEUTRAL_REQUEST):
        return value is None or value == arguments.get("n", 1)
    if name not in neutral:
        return False
    if name == "priority" and isinstance(value, list | tuple):
        return not any(value)
    return value is None or (isinstance(value, _PLAIN) and value in neutral[name])


def drop_neutral(
    arguments: Mapping[str, Any],
    known: Container[str],
    neutral: Mapping[str, Sequence[Any]],
) -> dict[str, Any]:
    """Return arguments without those of vLLM that request what treegen does anyway.

    Args:
        arguments: The arguments of a call, by name. The messages of a chat are "messages".
        known: The arguments that the call takes, which stay.
        neutral: Values that change nothing, by name, such as NEUTRAL_REQUEST.
    """
    return {
        name: value
        for name, value in arguments.items()
        if name in known or not _is_neutral(name, arguments, neutral)
    }


def advise_foreign(name: str, known: Container[str]) -> tuple[str | None, str]:
    """Return the known name for a name of another tool, or None, and advice without it, or "".

    Args:
        name: The unknown name.
        known: The known names.
    """
    ours = FOREIGN.get(name)
    while ours is not None and ours not in known:  # as vLLM's best_of is n, and n is num_samples
        ours = FOREIGN.get(ours)
    if ours is not None:
        return ours, ""
    return None, NO_COUNTERPART.get(name, "")


def describe_value(name: str) -> str:
    """Return the form of the value here for a name of another tool; "" if it is the same."""
    return OTHER_VALUES.get(name, "")
