"""Arguments of load_model, from_module and load_verifier that cannot be used are told of.

None is taken for another: a misspelt type of stored numbers would be found out by nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from treegen import Model, from_module, load_model
from treegen.errors import InputError
from treegen.search.reward import load_verifier

WRONG: list[Any] = [5, -1, 3.5, "x", "", "false", [], [5], {}, {"a": 1}, b"fp8", ("fp8",), object()]
TOLD = {
    "quantization": "quantization must be fp8 or mxfp4 or nvfp4 or none, got ",
    "kv_cache_dtype": "kv_cache_dtype must be auto or fp8, got ",
    "impl": "impl",
    "check": "check must be True or False, got ",
    "ranks": "ranks must be an instance of Ranks, got .*remove this argument",
    "images": "images must be True or False, got ",
    "trust_remote_code": "trust_remote_code must be True or False, got ",
}


def module_of(checkpoint: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint)


@pytest.mark.parametrize("name", TOLD)
def test_an_argument_of_loading_is_not_taken_for_another(checkpoint: Path, name: str) -> None:
    calls: list[Callable[..., Model]] = [lambda **given: load_model(checkpoint, **given)]
    if name not in ("images", "trust_remote_code"):
        module = module_of(checkpoint)
        calls.append(lambda **given: from_module(module, **given))
    for call in calls:
        for wrong in WRONG:
            with pytest.raises(InputError, match=TOLD[name]):
                call(**{"check": False, name: wrong})


@pytest.mark.parametrize("check", [True, False])
def test_what_predicts_no_tokens_is_no_language_model(checkpoint: Path, check: bool) -> None:
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    for module in (
        transformers.AutoModel.from_config(config),
        transformers.LlamaForSequenceClassification(config),
        transformers.LlamaForTokenClassification(config),
    ):
        message = f"{type(module).__name__} has no head that predicts tokens; load the model with "
        with pytest.raises(InputError, match=message):
            from_module(module, check=check)
    of_class: Any = transformers.LlamaForCausalLM
    with pytest.raises(InputError, match="requires a transformers model, got LlamaForCausalLM"):
        from_module(of_class, check=check)


@pytest.mark.parametrize("share", [True, False])
def test_where_and_how_a_verifier_is_read_is_told_of(checkpoint: Path, share: bool) -> None:
    for wrong in WRONG:
        for name, message in (("form", "form must be Seq"), ("device", "device must be auto, cpu")):
            with pytest.raises(InputError, match=message):
                load_verifier(checkpoint, share=share, **{name: wrong})
        if not isinstance(wrong, str):
            with pytest.raises(
                InputError, match="a model must be a directory or a name on the hub"
            ):
                load_verifier(wrong, share=share)
