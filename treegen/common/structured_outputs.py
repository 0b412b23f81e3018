"""Structures that a sample must have: reading and checking the parameters that give one."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypedDict

from treegen.common.checks import as_tuple
from treegen.errors import InputError, arg

STRUCTURES: Final = ("json_schema", "regex", "grammar", "choice")
"""Parameters that give a sample a structure; at most one of them may be given."""


class StructuredOutputsParams(TypedDict, total=False):
    """The structure of a sample in vLLM's form, for `SamplingParams.structured_outputs`."""

    json: Any
    """A JSON schema: a mapping, JSON as text, or a pydantic model."""
    regex: str | None
    """A regular expression."""
    grammar: str | None
    """A grammar in Lark's or GBNF's form."""
    choice: Sequence[str] | None
    """Texts, one of which the sample must be."""
    json_object: bool | None
    """Whether the sample must be a JSON object."""


_OF_VLLM: Final = {"json": "json_schema", **{name: name for name in STRUCTURES[1:]}}


def read_structured_outputs(value: Any) -> dict[str, Any]:
    """Return the parameters in STRUCTURES that vLLM's `structured_outputs` gives.

    Args:
        value: A mapping of `json`, `regex`, `grammar`, `choice` or `json_object` to a value.

    Raises:
        InputError: it is not such a mapping.
    """
    if not isinstance(value, Mapping):
        raise InputError(
            f"{arg('structured_outputs')} must be an object, such as "
            '{"choice": ["yes", "no"]}; got '
            f"{value!r:.80}"
        )
    parameters_given = {name: item for name, item in value.items() if item not in (None, False)}
    parameters: dict[str, Any] = {}
    if parameters_given.pop("json_object", False):
        parameters["json_schema"] = {"type": "object"}
    if unknown := parameters_given.keys() - _OF_VLLM.keys():
        raise InputError(
            f"{arg('structured_outputs')} does not support {min(unknown)!r:.80}; use one of: "
            f"{', '.join(sorted(_OF_VLLM))}"
        )
    return parameters | {_OF_VLLM[name]: item for name, item in parameters_given.items()}


def check_structure(name: str, value: Any) -> Any:
    """Return a parameter in STRUCTURES in its standard form.

    Args:
        name: Its name.
        value: Its value.

    Raises:
        InputError: it cannot be used.
    """
    if name == "json_schema":
        return _schema_text(value)
    if name == "choice":
        if isinstance(value, str):
            raise InputError(f"{arg('choice')} must be a list of texts, got {value!r}")
        texts = as_tuple("choice", value)
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise InputError(
                f"{arg('choice')} must be a list of texts that are not empty, got {texts!r}"
            )
        return texts
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{name} must be text that is not empty, got {value!r}")
    return value


def _schema_text(schema: Any) -> str:
    """Return a JSON schema as text; raises InputError if it is not one."""
    if hasattr(schema, "model_json_schema"):  # a pydantic model
        schema = schema.model_json_schema()
    try:
        if isinstance(schema, str):
            schema = json.loads(schema)
        if not isinstance(schema, Mapping | bool):
            raise ValueError("the schema must be an object")
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"{arg('json_schema')} cannot be read: {error}; pass an object, its JSON text or a "
            "pydantic model"
        ) from None
