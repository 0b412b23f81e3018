"""The options of an LLM stand once: as arguments, as settings of a run, and on the command line."""

import inspect
from dataclasses import fields
from typing import Any

import pytest

from treegen import LLM, InputError
from treegen.cli.options.pairs import MODEL_ARGS
from treegen.model.options import EngineOptions, Sizes


def test_an_llm_takes_the_options_with_their_defaults() -> None:
    taken = inspect.signature(LLM).parameters.values()
    defaults = {
        each.name: each.default
        for each in taken
        if each.name not in ("model", "tokenizer", "others")
    }
    assert defaults == {each.name: each.default for each in fields(EngineOptions)[1:]}
    assert list(MODEL_ARGS) == [field.name for field in fields(EngineOptions)]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"sharing": "some"}, "sharing must be one of auto, all, one, off, got 'some'"),
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"prefill_chunk": "8"}, "prefill_chunk must be an integer"),
        ({"run_ahead": 1}, "run_ahead must be True or False"),
        ({"memory": "much"}, "memory must be a number of bytes"),
    ],
)
def test_what_no_machine_takes_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        EngineOptions(model="m", **options)


def test_sizes_are_those_given_or_the_devices_own() -> None:
    options = EngineOptions(model="m", max_rows=3, memory="2KiB")
    assert options.sizes("cpu") == Sizes(page_size=16, max_rows=3, prefill_chunk=2048)
    assert options.sizes("cuda") == Sizes(page_size=64, max_rows=3, prefill_chunk=8192)
    assert options.cache_bytes == 2048
