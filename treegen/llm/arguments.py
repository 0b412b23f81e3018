"""Arguments of an LLM's calls: their forms, their names in vLLM and transformers, and hints."""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from treegen.common.foreign_names import FOREIGN, NEUTRAL_CALL, SAMPLING_ADVICE, drop_neutral
from treegen.common.outputs import Completion, RequestOutput
from treegen.common.params import Params, SamplingParams, check_params, check_tree_params
from treegen.common.spelling import find_near, suggest_argument, suggest_arguments
from treegen.errors import InputError, MissingNameError
from treegen.prompts.tree import Message, as_list

if TYPE_CHECKING:
    from treegen.model.model_info import ModelInfo
    from treegen.prompts.plan.plan import Request

_TREEGEN_NAMES: Final = {
    "sampling_params": "params",
    "generation_config": "params",
    "inputs": "prompts",
    "prompt": "prompts",
    "prompt_token_ids": "prompts",
    "use_tqdm": "progress",
}
"""Arguments of vLLM's and transformers' `generate` that have another name here."""
_NEXT_TURN_ADVICE: Final = (
    "remove the argument: the assistant continues a last message of its own, and otherwise answers"
)
_ARGUMENT_ADVICE: Final = {
    "lora_request": "load the adapter with LLM(model, adapter=DIR)",
    "attention_mask": "remove the argument: prompts need no padding",
    "pad_token_id": "remove the argument: prompts need no padding",
    "chat_template": "load the model with LLM(model, chat_template=TEMPLATE), a template or a file",
    "add_generation_prompt": _NEXT_TURN_ADVICE,
    "continue_final_message": _NEXT_TURN_ADVICE,
    "chat_template_content_format": "remove the argument: content may be text or a list of parts",
    "request_id": "remove the argument: an output refers to its prompt by its index in the call",
    "data_parallel_rank": "remove the argument: a Cluster assigns prompts to its workers",
    "priority": "remove the argument: requests start in the order in which they arrive",
    "tokenization_kwargs": "pass token ids, such as llm.tokenizer(text, ...).input_ids",
    "mm_processor_kwargs": "remove the argument: images are prepared as the checkpoint specifies",
    "trace_headers": "remove the argument: treegen sends no traces",
    "prompt_text": "pass only the prompt",
}
"""Arguments of other libraries that treegen does not have, with advice."""
_CALL_ADVICE: Final = {
    "beam_search": (
        "draw n samples and sort the samples by cumulative_logprob, or search with llm.search and "
        "treegen.search.beam"
    ),
    "embed": "treegen computes no embeddings; use vLLM or sentence-transformers",
    "encode": "llm.tokenizer encodes text; treegen returns no hidden states or embeddings",
    "classify": "score the class names: llm.score([(prompt, name)])",
    "reward": "load a reward model with treegen.search.load_verifier",
    "renderer": "pass text, token ids or messages to generate",
    "llm_engine": "call the methods of the LLM; llm.stream yields completions as they finish",
    "sleep": "close the LLM: llm.close()",
    "wake_up": "load the model again: LLM(model)",
    "update": (
        "pass new weights to the update call of an LLM in this process, or send the weights to a "
        "server at POST /v1/weights"
    ),
    "update_weights": "load new weights: llm.update(weights)",
    "reset_prefix_cache": "drop kept prefixes by name: llm.drop(name)",
    "reset_mm_cache": "treegen keeps no prepared images between calls",
    "set_tokenizer": "pass tokenizer= with a loaded Model to LLM",
    "collective_rpc": "llm.model is the model in this process",
    "apply_model": "llm.model is the model in this process",
    "start_profile": "use a profiler of PyTorch; the usage of a run has counts and seconds",
    "stop_profile": "use a profiler of PyTorch; the usage of a run has counts and seconds",
    "get_metrics": "the usage of a run has counts: llm.run(tree).usage",
    "model_config": "llm.spec has the sizes of the model",
    "preprocess_chat": "pass the messages to llm.chat; output.prompt is the rendered chat",
    "preprocess_cmpl": "pass the prompts to llm.generate",
    "enqueue": "use AsyncLLM for requests that arrive at any time",
    "wait_for_completion": "use AsyncLLM for requests that arrive at any time",
    "from_engine_args": "pass the options to LLM",
}
"""Calls of vLLM's `LLM` that treegen does not have, with advice."""
_ASYNC_CALL_ADVICE: Final = {
    "abort": "cancel the task that awaits generate, or close the iterator of stream",
    "add_request": "await generate, or iterate over stream",
    "chat": "pass the messages to generate, in a list",
    "run": "pass flat prompts to generate, which finds their shared prefixes",
    "get_tokenizer": "served.llm.tokenizer is the tokenizer",
    "tokenizer": "served.llm.tokenizer is the tokenizer",
    "get_model_config": "served.llm.spec has the sizes of the model",
    "check_health": "failure is None while calls can be served",
    "is_running": "failure is None while calls can be served",
    "errored": "failure is the error that ended all service, or None",
    "shutdown": "close it: served.close()",
    "do_log_stats": "usages() has counts",
    "search": "close the AsyncLLM and use llm.search, or send nodes to `treegen serve`",
}
"""Calls of vLLM's `AsyncLLM`, and of treegen's `LLM`, that `AsyncLLM` does not have."""
_SCORE_ADVICE: Final = (
    "score takes one list of (context, continuation) pairs and returns log-likelihoods; vLLM's "
    "score(text, texts) compares texts with a cross-encoder, which treegen does not run"
)
_SAMPLING_FIELDS: Final = frozenset(SamplingParams.__dataclass_fields__)
_PROMPT_KEYS: Final = ("prompt", "prompt_token_ids")

PromptInput = str | Sequence[int] | Sequence[Message] | Mapping[str, Any]
"""Text, token ids, chat messages, or a dict with `prompt` or `prompt_token_ids`."""
_Call = TypeVar("_Call", bound=Callable[..., Any])


def reject_unknown_arguments(call: _Call) -> _Call:
    """Make a method raise InputError with a hint for an argument that it does not have.

    Arguments of vLLM that request what treegen does anyway are accepted.
    """
    parameters = inspect.signature(call).parameters.values()
    _, *names = (parameter.name for parameter in parameters)
    positional = sum(parameter.kind is not parameter.KEYWORD_ONLY for parameter in parameters) - 1

    @functools.wraps(call)
    def call_checked(self: object, *args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        arguments = drop_neutral(arguments, names, NEUTRAL_CALL)
        kwargs = {name: value for name, value in kwargs.items() if name in arguments}
        if unknown := [name for name in kwargs if name not in names]:
            hints = suggest_arguments(
                unknown,
                lambda name: _hint(name, kwargs[name], names),
                f"; the arguments are {', '.join(names)}",
            )
            listed = " and no ".join(map(repr, unknown))
            raise InputError(f"{call.__name__} has no {listed}{hints}")
        if len(args) > positional:
            raise InputError(
                _SCORE_ADVICE
                if call.__name__ == "score"
                else f"{call.__name__} takes {positional} positional arguments, "
                f"{' and '.join(names[:positional])}; pass the others by name"
            )
        return call(self, *args, **kwargs)

    return cast(_Call, call_checked)


def _hint(name: str, value: Any, names: list[str]) -> str:
    if name in _ARGUMENT_ADVICE:
        return f"; {_ARGUMENT_ADVICE[name]}"
    if _TREEGEN_NAMES.get(name) in names:
        return f"; did you mean {_TREEGEN_NAMES[name]}=?"
    if "params" in names:
        if name in SAMPLING_ADVICE:
            return f"; {SAMPLING_ADVICE[name]}"
        own_name = FOREIGN.get(name, name)
        if own_name not in _SAMPLING_FIELDS and not find_near(name, names):
            own_name = next(iter(find_near(name, _SAMPLING_FIELDS)), "")
        if own_name in _SAMPLING_FIELDS:
            return f"; use params=SamplingParams({own_name}={value!r:.40})"
    return suggest_argument(name, names)


def missing_attribute(owner: object, name: str) -> AttributeError:
    """Return the error for an attribute that an LLM lacks; a call of vLLM gets advice."""
    kind = type(owner).__name__
    advice = {**_CALL_ADVICE, **_ASYNC_CALL_ADVICE} if kind == "AsyncLLM" else _CALL_ADVICE
    if name in advice:
        return MissingNameError(f"{kind} has no {name}: {advice[name]}")
    return AttributeError(f"{kind!r} object has no attribute {name!r}")


def choose_name(name: str, value: Any, alias: str, other: Any) -> Any:
    """Return the value of an argument that has two names.

    Args:
        name: treegen's name of the argument.
        value: Its value under this name; None if it is not given.
        alias: vLLM's name of the argument.
        other: Its value under vLLM's name; None if it is not given.

    Raises:
        InputError: both are given.
    """
    if value is not None and other is not None:
        raise InputError(
            f"{name} and {alias} are two names for the same argument; pass only one of the two"
        )
    return other if value is None else value


def read_prompts(prompts: Iterable[PromptInput] | PromptInput) -> list[Any]:
    """Return the prompts of a call as texts, token ids or chat messages.

    Args:
        prompts: A list of prompts, or one prompt: a text, token ids (a list, an array or a tensor),
            or a dict with `prompt` or `prompt_token_ids`.

    Raises:
        InputError: an item is a chat message, or a dict with other keys.
    """
    if isinstance(prompts, str | Mapping):
        prompts = [prompts]
    contents = as_list("prompts", prompts)
    # Arrays and tensors also have __index__; those with dimensions are prompts, and not token ids.
    if contents and hasattr(contents[0], "__index__") and not getattr(contents[0], "ndim", 0):
        return [contents]
    for item in contents:
        if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
            raise InputError(
                "a prompt has no name here, got a (name, prompt) pair; pass only the prompt, or "
                "call llm.run with a Node(prompt, id=name) for each prompt"
            )
    contents = [_read_prompt(item) if isinstance(item, Mapping) else item for item in contents]
    return [item.tolist() if getattr(item, "ndim", 0) == 1 else item for item in contents]


def _read_prompt(item: Mapping[str, Any]) -> Any:
    """Return the text or the token ids in a prompt that is a dict."""
    if "role" in item:
        raise InputError(
            "prompts must be a list of prompts, got a single conversation; pass the conversation "
            "to llm.chat, or put the conversation in a list"
        )
    values = {name: value for name, value in item.items() if value is not None}
    if values.get("multi_modal_data"):
        raise InputError(
            "multi_modal_data is not supported in a prompt; pass images as parts of chat "
            "messages to llm.chat"
        )
    if unknown := sorted(set(values) - {*_PROMPT_KEYS, "multi_modal_data"}):
        raise InputError(
            f"a prompt has the unknown key {unknown[0]!r}; pass text, token ids, chat messages, "
            f"or a dict with {' or '.join(_PROMPT_KEYS)}"
        )
    if not set(values) & set(_PROMPT_KEYS):
        raise InputError(
            f"a prompt that is a dict must have the key {' or '.join(_PROMPT_KEYS)}; add one of "
            "the keys"
        )
    # vLLM reads the ids if both are given.
    return values.get("prompt_token_ids", values.get("prompt"))


def repeat_params(
    params: SamplingParams | Sequence[SamplingParams], num: int
) -> Sequence[SamplingParams]:
    """Return the parameters of each of `num` requests."""
    return [params] * num if isinstance(params, SamplingParams) else params


def find_missing_samples(
    requests: Sequence[Request], skip: Collection[tuple[str, int]]
) -> tuple[list[list[int]], bool]:
    """Return the indices of the samples to draw for each request, and whether any is skipped.

    Raises:
        InputError: `skip` names a sample that no request has.
    """
    num_of = {request.id: request.samples for request in requests}
    skipped = defaultdict(set)
    for pair in as_list("skip", skip):
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise InputError(
                f"skip must contain pairs of a prompt id and a sample index, got {pair!r:.60}"
            )
        prompt_id, index = pair
        num = num_of.get(prompt_id, 0) if isinstance(prompt_id, str) else 0
        if not isinstance(index, int) or not 0 <= index < num:
            raise InputError(
                f"skip contains sample {index} of {prompt_id!r}, which is not in the tree; remove "
                "the sample from skip"
            )
        skipped[prompt_id].add(index)
    samples = [[i for i in range(r.samples) if i not in skipped[r.id]] for r in requests]
    return samples, any(skipped.values())


def check_node_params(
    params: Params | Sequence[Params] | None,
) -> SamplingParams | list[SamplingParams]:
    """Check the parameters of all nodes of a tree, or of each node."""
    if params is None or isinstance(params, SamplingParams | Mapping):
        return check_tree_params(params)
    return [check_tree_params(one) for one in as_list("params", params)]


def expand_params(params: Params | Sequence[Params] | None, num: int) -> list[SamplingParams]:
    """Check parameters and return those of each of `num` prompts."""
    if params is None or isinstance(params, SamplingParams | Mapping):
        return [check_params(params)] * num
    checked = [check_params(one) for one in as_list("params", params)]
    if len(checked) != num:
        raise InputError(
            f"expected one SamplingParams for each prompt, got {len(checked)} params for {num} "
            "prompts"
        )
    return checked


def make_output(
    completions: Sequence[Completion], content: Any, request: Request, model_info: ModelInfo
) -> RequestOutput:
    """Return the output of a flat prompt.

    Args:
        completions: The completions of the prompt.
        content: The prompt as the caller gave it.
        request: The request of the prompt.
        model_info: The tokenizer and the images of the model.
    """
    tokens = request.tokens
    if model_info.images is not None:
        tokens = model_info.images.restore_placeholders(tokens)
    ids = tokens.tolist()
    prompt: Any = content if isinstance(content, str) else None
    if prompt is None and len(content) and isinstance(content[0], Mapping):
        decode = model_info.tokenizer.decode
        prompt = partial(decode, ids, clean_up_tokenization_spaces=False)
    return RequestOutput(completions, request_id=request.id, prompt=prompt, prompt_token_ids=ids)
