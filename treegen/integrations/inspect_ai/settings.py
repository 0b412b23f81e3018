"""Converts Inspect's settings of one generation to sampling parameters."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from inspect_ai.model import GenerateConfig

from treegen.common.params import SamplingParams
from treegen.errors import InputError
from treegen.prompts.grammars import REQUESTED, parse_structure

# Fields of SamplingParams, by their names in Inspect.
_NAMES: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_tokens": "max_tokens",
    "seed": "seed",
    "num_choices": "n",
    "stop_seqs": "stop",
    "logit_bias": "logit_bias",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "reasoning_tokens": "max_thinking_tokens",
    "prompt_logprobs": "prompt_logprobs",
}
_EXTRA: Final = (
    "min_p",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words",
)
_REFUSED: Final = (
    "best_of",
    "modalities",
    "effort",
    "verbosity",
    "reasoning_mode",
)


def sampling_params(
    config: GenerateConfig, usual: Mapping[str, Any] = MappingProxyType({})
) -> SamplingParams:
    """Return the sampling parameters of a generation.

    Args:
        config: Inspect's settings.
        usual: Defaults for settings that are not given, before those of SamplingParams.

    Raises:
        InputError: A setting is not supported, or has an invalid value.
    """
    refused = [name for name in _REFUSED if getattr(config, name, None) is not None]
    extra = {k: v for k, v in (config.extra_body or {}).items() if k != "chat_template_kwargs"}
    refused += [f"extra_body[{name!r}]" for name in extra if name not in (*_EXTRA, *REQUESTED)]
    if refused:
        raise InputError(
            f"treegen cannot honour {', '.join(refused)}; leave out such; of extra_body it knows "
            f"{', '.join((*_EXTRA, *REQUESTED, 'chat_template_kwargs'))}"
        )
    set_fields = {ours: getattr(config, theirs) for theirs, ours in _NAMES.items()}
    set_fields = {name: value for name, value in set_fields.items() if value is not None}
    structure = parse_structure({name: extra.pop(name) for name in REQUESTED if name in extra})
    if config.response_schema is not None:
        structure["json_schema"] = config.response_schema.json_schema.model_dump(exclude_none=True)
    if config.top_logprobs and not config.logprobs:
        raise InputError("top_logprobs needs logprobs; give logprobs=True too")
    arguments = {**usual, **set_fields, **extra, **structure}
    return SamplingParams(**arguments, logprobs=config.top_logprobs or 0)


def template_arguments(config: GenerateConfig, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the chat template.

    Args:
        config: Inspect's settings of the generation, whose arguments take precedence.
        given: Arguments that were given for the model.

    Raises:
        InputError: `chat_template_kwargs` of `extra_body` is not a mapping.
    """
    request_arguments = (config.extra_body or {}).get("chat_template_kwargs", {})
    if not isinstance(request_arguments, dict):
        raise InputError(f"chat_template_kwargs must be a mapping, got {request_arguments!r:.80}")
    effort = config.reasoning_effort
    return {
        **given,
        **({} if effort is None else {"reasoning_effort": effort}),
        **request_arguments,
    }
