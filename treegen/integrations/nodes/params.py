"""Sampling parameters in the protocol of nodes. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from treegen.common.params import MAX_COUNT, MAX_SEED, SamplingParams
from treegen.common.structured_outputs import STRUCTURES
from treegen.errors import InputError, arg
from treegen.prompts.grammars import REQUESTED, parse_structure

Token = Annotated[int, Field(ge=0, le=MAX_COUNT)]
_Phrase = Annotated[str, Field(max_length=10_000)]
_MAX_STRUCTURE_CHARS: Final = 2**18  # characters of a structure, which is compiled before sampling
_Structure = Annotated[str, Field(max_length=_MAX_STRUCTURE_CHARS)]
Variables = Annotated[dict[str, Any], Field(max_length=1_000)]
"""Variables of a chat template."""
_KeyToken = Annotated[int, Field(strict=False)]  # keys of JSON objects are text


class NodeModel(BaseModel):
    """Base of the models of the protocol. Unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class Sampling(NodeModel):
    """Sampling parameters, as in `treegen.SamplingParams`; null is the default of the tree."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: (
        Annotated[str, Field(max_length=1_000)]
        | Annotated[list[Annotated[str, Field(max_length=1_000)]], Field(max_length=64)]
        | None
    ) = None
    stop_token_ids: Annotated[list[Token], Field(max_length=1_000)] | None = None
    ignore_eos: bool | None = None
    include_stop: bool | None = None
    """Whether the text of a child has the stop string that ended it."""
    include_stop_str_in_output: bool | None = None
    """vLLM's name of include_stop."""
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    """Seed of these samples; null is the seed of the root."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Number of most likely alternatives to report per token. The log-probabilities of the tokens
    themselves are always reported."""
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] | None = None
    logit_bias: Annotated[dict[_KeyToken, float], Field(max_length=10_000)] | None = None
    allowed_token_ids: Annotated[list[Token], Field(max_length=100_000)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    bad_words: Annotated[list[_Phrase], Field(max_length=1_000)] | None = None
    json_schema: dict[str, Any] | bool | _Structure | None = None
    regex: _Structure | None = None
    grammar: _Structure | None = None
    choice: Annotated[list[_Phrase], Field(max_length=10_000)] | None = None
    response_format: dict[str, Any] | None = None
    """The structure of a sample in OpenAI's form; see also json_schema, regex, grammar, choice. Any
    of them replaces the structure of the tree; the type text replaces it by none."""
    structured_outputs: dict[str, Any] | None = None
    """The structure of a sample in vLLM's form."""
    confidence: Annotated[int, Field(ge=0, le=1_000)] | None = None
    min_confidence: float | None = None
    confidence_window: int | None = None
    self_certainty: bool | None = None
    max_thinking_tokens: int | None = None
    reasoning_tags: Literal["auto"] | list[str] | None = None
    thinking_end: str | None = None


def sampling_fields(params: SamplingParams) -> dict[str, Any]:
    """Return sampling parameters as the JSON of `Sampling`, without those that have the default.

    Args:
        params: Sampling parameters; `n` and `prompt_logprobs` are not among the fields.
    """
    default = SamplingParams()
    values = {
        name: getattr(params, name) for name in Sampling.model_fields if hasattr(params, name)
    }
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if value != getattr(default, name)
    }


def read_structure(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of SamplingParams for the structure that a request specifies.

    Args:
        fields: The fields of the request.

    Raises:
        InputError: The structure is malformed or too large.
    """
    structure = {name: fields[name] for name in STRUCTURES if name in fields}
    structure |= parse_structure(fields)
    for name, value in structure.items():
        with suppress(RecursionError):  # SamplingParams raises an error for it
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            size = len(text)
            if size > _MAX_STRUCTURE_CHARS:
                raise InputError(
                    f"{arg(name)} has {size:,} characters, more than the limit of "
                    f"{_MAX_STRUCTURE_CHARS:,}; simplify the value"
                )
    return structure


def merge_params(params: SamplingParams, overrides: Sampling) -> SamplingParams:
    """Return sampling parameters with those of a request in place of their own.

    Args:
        params: Sampling parameters.
        overrides: Parameters of a request.

    Raises:
        InputError: A parameter cannot be used.
    """
    fields = overrides.model_dump(exclude_none=True)
    structure = read_structure(fields)
    if not fields.keys().isdisjoint((*STRUCTURES, *REQUESTED)):
        fields = dict.fromkeys(STRUCTURES) | fields  # a sample has one structure
    for name in REQUESTED:
        fields.pop(name, None)
    if (stop := fields.get("stop")) is not None:
        fields["stop"] = [text for text in ([stop] if isinstance(stop, str) else stop) if text]
    fields |= structure
    return replace(params, **fields) if fields else params
