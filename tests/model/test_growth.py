"""Files of tokenizers and adapters that would take all memory or all time."""

import base64
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from treegen.common.bounded.patterns import first_matches
from treegen.errors import InputError, ModelError
from treegen.model.checkpoint.adapter import CONFIG, WEIGHTS, read_adapter
from treegen.model.tokenizer import check_growth, load_tokenizer


def replace(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def charsmap(*replaced: str) -> dict[str, Any]:
    table = b"\0" * 8
    data = len(table).to_bytes(4, "little") + table + b"\0".join(t.encode() for t in replaced)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


TEN = [replace("aaaaaaaaaa", String="a")] * 10
GROWING = {
    "normalizer": {
        "replacements": sequence(*TEN),
        "nested": sequence(sequence(*TEN[:5]), sequence(*TEN[:5])),
        "expressions": sequence(*[replace("ab", Regex="a?")] * 6),
        "one": replace("a" * 1000, String="a"),
        "before": {"type": "Prepend", "prepend": "a" * 5000},
        "before and more": sequence(
            {"type": "Prepend", "prepend": "a" * 100}, *[replace("aa", String="a")] * 7
        ),
        "characters": charsmap("a" * 1000),
    },
    "decoder": {"replacements": {"type": "Sequence", "decoders": TEN}},
    "post_processor": {
        "copies": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 9,
            "pair": [],
            "special_tokens": {},
        }
    },
}


def with_settings(model: Path, to: Path, **settings: Any) -> Path:
    to.mkdir(exist_ok=True)
    for name in ("tokenizer_config.json", "config.json"):
        (to / name).write_bytes((model / name).read_bytes())
    document = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    (to / "tokenizer.json").write_text(json.dumps(document | settings), encoding="utf-8")
    return to


@pytest.mark.parametrize(
    ("part", "kind"), [(part, kind) for part, kinds in GROWING.items() for kind in kinds]
)
def test_a_tokenizer_that_lets_texts_grow_is_refused(
    checkpoint: Path, tmp_path: Path, part: str, kind: str
) -> None:
    directory = with_settings(checkpoint, tmp_path / "grows", **{part: GROWING[part][kind]})
    with pytest.raises(ModelError, match=f"tokenizer.json: the {part} .*use another tokenizer"):
        load_tokenizer(str(directory))


@pytest.mark.parametrize(
    "normalizer",
    [
        None,
        {"type": "NFKC"},
        sequence({"type": "Prepend", "prepend": "\u2581"}, replace("\u2581", String=" ")),
        sequence(charsmap("\u0635\u0644\u0649 " * 4), replace("\u2581", Regex=" {2,}")),
        sequence(*[replace("'", String="''")] * 20),
        sequence(replace(" ", Regex=r"\s+"), {"type": "Lowercase"}),
    ],
)
def test_what_tokenizers_do_is_taken(tmp_path: Path, normalizer: Any) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"normalizer": normalizer}))
    check_growth(tmp_path)


def test_a_long_part_of_words_is_refused(tmp_path: Path) -> None:
    settings = {"model": {"type": "WordPiece", "continuing_subword_prefix": "#" * 5000}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="characters, got 5,000; use another tokenizer"):
        check_growth(tmp_path)


def adapter(directory: Path, patterns: dict[str, float]) -> Path:
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "alpha_pattern": patterns}
    (directory / CONFIG).write_text(json.dumps(settings))
    save_file({"a.lora_A.weight": torch.zeros(1, 1)}, directory / WEIGHTS)
    return directory


def test_patterns_of_an_adapter_are_matched_as_peft_matches_them(tmp_path: Path) -> None:
    found = read_adapter(adapter(tmp_path, {"q_proj": 3, r"layers\.1\..*": 5, "k": 7}))
    names = ["model.q_proj", "layers.1.q_proj", "layers.1.k_proj", "k", "q_proj.x", "sk"]
    assert list(found.alphas(names).values()) == [3, 3, 5, 7, 2, 2]


def test_a_pattern_of_an_adapter_that_takes_for_ever_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treegen.common.bounded.patterns.MATCH_SECONDS", 0.3)
    found = read_adapter(adapter(tmp_path, {"(a+)+b": 3}))
    begin = time.monotonic()
    with pytest.raises(ModelError, match=r"alpha_pattern .*take more than 0\.3 s"):
        found.alphas(["a" * 5000])
    assert time.monotonic() - begin < 60


def test_matching_nothing_starts_no_process() -> None:
    assert first_matches([], ["a", "b"], "x") == [None, None]
    with pytest.raises(InputError, match=r"x: '\(' is not a regular expression"):
        first_matches(["("], ["a"], "x")
