"""Adapters of models that take images: merged into the language model and into the tower."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from image_cases import far, tree_of
from tiny_images import picture, save_tiny_vision_model

from treegen import LLM, SamplingParams

peft = pytest.importorskip("peft")
OPTIONS: dict[str, Any] = {"images": True, "device": "cpu", "memory": "16MiB"}
PARAMS = SamplingParams(max_tokens=5, seed=1, ignore_eos=True, temperature=0.7)


def save_adapted(directory: Path, adapter: Path, merged: Path) -> list[str]:
    """Write a random adapter, and its model merged by peft; returns what it adapts."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(directory)
    modules = ["q_proj", "v_proj", "qkv", "fc1"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=modules))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    adapted.save_pretrained(adapter)
    shutil.copytree(directory, merged)
    adapted.merge_and_unload().save_pretrained(merged)
    return sorted(adapted.targeted_module_names)


def test_an_adapter_changes_the_tower_too(tmp_path: Path) -> None:
    directory = save_tiny_vision_model(tmp_path / "base", "qwen2_vl", seed=1)
    names = save_adapted(directory, tmp_path / "adapter", tmp_path / "merged")
    assert any("visual" in name for name in names) and any("layers" in name for name in names)
    llm = LLM(str(directory), adapter=str(tmp_path / "adapter"), **OPTIONS)
    root, _ = tree_of(picture(1), picture(2, 30, 61))
    got = llm.run(root, PARAMS)
    want = LLM(str(tmp_path / "merged"), **OPTIONS).run(root, PARAMS)
    for actual, expected in zip(got.completions, want.completions, strict=True):
        assert actual.token_ids == expected.token_ids
        assert far(actual.logprobs, expected.logprobs) < 2e-5
    # A model that is given text alone leaves out what the adapter has for the tower.
    llm, merged = (
        LLM(str(path), adapter=adapter, device="cpu", memory="4MiB")
        for path, adapter in ((directory, str(tmp_path / "adapter")), (tmp_path / "merged", None))
    )
    chat = [{"role": "user", "content": "What?"}]
    assert llm.chat(chat, PARAMS)[0][0].token_ids == merged.chat(chat, PARAMS)[0][0].token_ids
