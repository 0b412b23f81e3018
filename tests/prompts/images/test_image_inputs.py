"""What families and checkpoints take, as `treegen models` and the documentation tell."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from cli_cases import Command, inspect_model
from tiny_images import picture, save_tiny_vision_model

from treegen import LLM, SamplingParams
from treegen.errors import ModelError
from treegen.model.checkpoint.families import IMAGES, ON_TEXT, SOUND, inputs_of
from treegen.model.config import read_config
from treegen.model.tokenizer import load_tokenizer
from treegen.model.vision import load_processor


def test_the_table_of_inputs_is_that_of_the_code(repository: Path) -> None:
    spec = importlib.util.spec_from_file_location("hooks", repository / "docs" / "hooks.py")
    assert spec is not None and spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = (repository / "docs" / "models.md").read_text(encoding="utf-8")
    table = hooks.on_page_markdown(page).split("## Text, images, sound")[1]
    rows = re.findall(r"^\| `(\w+)` \| yes \| (yes)? ?\| (yes)? ?\|?$", table, re.MULTILINE)
    assert {name for name, *_ in rows} == {*ON_TEXT, *IMAGES, *SOUND}
    for name, images, sound in rows:
        assert (bool(images), bool(sound)) == (name in IMAGES, name in SOUND)
    assert inputs_of("qwen3_vl") == ("text", "images")
    assert inputs_of("llama") == ("text",) and inputs_of("bloom") == ()


def test_families_are_listed_by_what_they_take(treegen: Command) -> None:
    document = inspect_model(treegen)
    takes = {each["type"]: each["takes"] for each in document["families"]}
    assert takes["qwen3_vl"] == ["text", "images"]
    assert takes["llama"] == ["text"] and takes["bloom"] == []


def test_a_checkpoint_tells_how_many_tokens_images_become(tmp_path: Path, treegen: Command) -> None:
    save_tiny_vision_model(tmp_path, "qwen3_vl", seed=1)
    small, large = inspect_model(treegen, tmp_path, "--image-size", "40x32,300x200")["image_tokens"]
    assert (small["width"], small["height"], large["width"]) == (40, 32, 300)
    config = read_config(str(tmp_path), tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    table = load_processor(tmp_path, config, tokenizer).table(384)
    for each in (small, large):
        image = picture(1, each["width"], each["height"])
        assert each["tokens"] == table.add(image).num
    shown = treegen("models", tmp_path, "--image-size", "40x32")
    assert f"takes: text, images; tokens of an image: 40 x 32 pixels {small['tokens']}" in shown.out
    assert "left out, without --images: model.visual" in shown.out


@pytest.mark.parametrize("text", ["0x3", "3", "x", "10x10,", "99999x99999", "1e3x5", "-1x5"])
def test_sizes_that_cannot_be(text: str, tmp_path: Path, treegen: Command) -> None:
    assert "--image-size" in treegen("models", tmp_path, f"--image-size={text}").error
    assert "--image-size" in treegen("models", "--image-size=3x3").error


def test_a_checkpoint_without_its_processor_says_so(tmp_path: Path, treegen: Command) -> None:
    save_tiny_vision_model(tmp_path, "llava", seed=1)
    (tmp_path / "processor_config.json").unlink()
    for file in tmp_path.glob("preprocessor*"):
        file.unlink()
    document = inspect_model(treegen, tmp_path)
    assert document["takes"] == ["text"] and document["image_tokens"] == []
    assert "processor" in document["no_images"]
    assert "images cannot be used" in treegen("models", tmp_path).out


@pytest.mark.parametrize("value", [2**31, -1, 2.5, "many", True])
def test_a_number_of_tokens_that_no_image_has_is_refused_at_once(
    tmp_path: Path, value: object
) -> None:
    save_tiny_vision_model(tmp_path, "llava")
    file = tmp_path / "processor_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"num_additional_image_tokens": value}))
    with pytest.raises(
        ModelError, match=r"num_additional_image_tokens must be a number of tokens, got"
    ):
        LLM(str(tmp_path), device="cpu", images=True, check=False)


def test_settings_of_another_model_are_told_of(tmp_path: Path) -> None:
    save_tiny_vision_model(tmp_path, "llava")
    file = tmp_path / "processor_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"num_additional_image_tokens": 3}))
    llm = LLM(str(tmp_path), device="cpu", images=True, check=False)
    content = [{"type": "image", "image": picture(1)}, {"type": "text", "text": "a"}]
    with pytest.raises(ModelError, match=r"the model cannot encode an image: .* do not match"):
        llm.chat([{"role": "user", "content": content}], SamplingParams(max_tokens=1))
