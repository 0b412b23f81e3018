"""Limits of request bodies: nothing else is served while the server reads a body."""

import gc
import json
from collections.abc import Mapping
from typing import Any

import pytest

from treegen import InputError, SamplingParams
from treegen.integrations.nodes.params import Sampling, merge_params
from treegen.integrations.server.requests import (
    RequestError,
    parse_request,
    read_json,
    read_message,
)


@pytest.mark.parametrize("piece", ["1,", '{"a":[', "[]"])
def test_a_json_text_has_a_limited_number_of_values(piece: str) -> None:
    text = (piece * (2**20 + 1)).encode()
    with pytest.raises(RequestError, match="the body has more than 1,048,576 values; send"):
        read_json(text)
    call = {"function": {"name": "f", "arguments": text.decode()}}
    with pytest.raises(RequestError, match="a tool call's arguments has more than 1,048,576"):
        read_message({"role": "assistant", "tool_calls": [call]})


def test_many_values_are_read_without_collecting_garbage() -> None:
    """Collections would traverse the values repeatedly, which takes seconds for a million lists."""
    generations: list[int] = []

    def record(phase: str, info: Mapping[str, Any]) -> None:
        generations.append(info["generation"])

    body = {"prompt": "a", "metadata": [[] for _ in range(200_000)]}
    text = json.dumps(body).encode()
    gc.collect()
    gc.callbacks.append(record)
    try:
        parse_request(read_json(text), is_chat=False)
    finally:
        gc.callbacks.remove(record)
    assert len(generations) < 10


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "a" * 2**18 + "a"},
        {"guided_choice": ["a" * 2**18]},
        {"structured_outputs": {"grammar": "a" * 2**18 + "a"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"enum": ["a" * 2**18]}},
            }
        },
    ],
)
def test_a_structure_has_a_limited_size(fields: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="more than the limit of 262,144; simplify the value"):
        parse_request({"prompt": "a", **fields}, is_chat=False)


def test_a_structure_of_nodes_has_a_limited_size() -> None:
    schema = {"enum": ["a" * 2**18]}
    for fields in ({"json_schema": schema}, {"structured_outputs": {"json": schema}}):
        with pytest.raises(InputError, match=r"json_schema has 262,1.. characters, more than the"):
            merge_params(SamplingParams(), Sampling(**fields))


def test_the_size_of_a_schema_is_its_number_of_characters() -> None:
    schema = {"enum": ["\u8bf4" * 2**17]}
    parsed = parse_request({"prompt": "a", "structured_outputs": {"json": schema}}, is_chat=False)
    assert parsed.sampling["json_schema"] == schema
