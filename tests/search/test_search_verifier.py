"""Verifiers over what texts share: each published form against transformers' own class."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_drawn, tiny_tokenizer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Gemma2Config,
    Gemma2ForSequenceClassification,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    Qwen2Config,
    Qwen2ForTokenClassification,
)
from transformers import LlamaConfig as Config

from treegen.common.bounded.templates import render_chat
from treegen.errors import CapacityError, InputError, ModelError, ModelWarning
from treegen.model.scorers import verifier as verifiers
from treegen.model.scorers.scorer import load_scorer
from treegen.model.scorers.verifier import Verifier
from treegen.search import reward
from treegen.search.live import prefix_scorer
from treegen.search.live.prefix_scorer import PrefixScorer
from treegen.search.reward import load_verifier

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 400,
    "pad_token_id": 2,
}


def save(
    folder: Path, kind: Any = LlamaForTokenClassification, config: Any = Config, **changes: Any
) -> Path:
    model = kind(config(**{**SHAPE, "num_labels": 2, **changes}))
    save_drawn(model, folder, chat_template=TEMPLATE)
    return folder


def tree_of_texts(rng: random.Random, num: int) -> list[tuple[str, str]]:
    """Questions, and answers of a tree: each goes on from an earlier one, or is one again."""
    pairs = [(question, "") for question in ("How many?", "How much is it?")]
    while len(pairs) < num:
        question, answer = rng.choice(pairs)
        step = "".join(rng.choices("abc 123.", k=rng.randint(1, 14)))
        longer = f"{answer}{step}" + rng.choice(["", "\n\n"])
        pairs.append((question, longer if len(longer) < 60 else answer))
    rng.shuffle(pairs)
    return pairs


def both(folder: Path, **settings: Any) -> tuple[Verifier, Verifier]:
    shared = load_verifier(folder, device="cpu", memory="2MiB", **settings)
    return shared, load_verifier(folder, device="cpu", share=False, **settings)


@pytest.mark.parametrize(
    ("kind", "settings", "changes"),
    [
        (LlamaForSequenceClassification, {}, {"num_labels": 1}),
        (LlamaForSequenceClassification, {"label": 0}, {"num_labels": 3}),
        (LlamaForTokenClassification, {"reduce": "min"}, {}),
        (LlamaForTokenClassification, {"mark": "#", "chat": False}, {"num_labels": 1}),
        (LlamaForCausalLM, {"mark": " #\n", "tokens": ("4", "5")}, {}),
        (LlamaForCausalLM, {"mark": "+", "tokens": ("+", "-"), "turns": True}, {}),
    ],
)
def test_shared_prefixes_give_what_whole_texts_give(
    tmp_path: Path, kind: Any, settings: dict[str, Any], changes: dict[str, Any]
) -> None:
    shared, whole = both(save(tmp_path, kind, **changes), **settings)
    rng, reader = random.Random(3), shared.reader
    assert isinstance(reader, PrefixScorer) and whole.reader is None
    pairs = tree_of_texts(rng, 40)
    want = whole.values(pairs)
    got: list[list[float]] = []
    while len(got) < len(pairs):
        got += shared.values(pairs[len(got) : len(got) + rng.randint(1, 9)])
    assert [len(each) for each in got] == [len(each) for each in want]
    for actual, expected in zip(got, want, strict=True):
        assert actual == pytest.approx(expected, abs=2e-6)
    assert shared.values(pairs) == got  # they are remembered
    assert reader.usage.prompt_tokens_computed < 0.7 * sum(
        len(shared.encode(*pair)[0]) for pair in pairs
    )
    reader._scheduler.check()


def test_a_small_cache_is_enough(tmp_path: Path) -> None:
    save(tmp_path)
    small = load_verifier(tmp_path, device="cpu", memory="160KiB")
    whole = load_verifier(tmp_path, device="cpu", share=False)
    pairs = tree_of_texts(random.Random(5), 60)
    for actual, expected in zip(small.values(pairs), whole.values(pairs), strict=True):
        assert actual == pytest.approx(expected, abs=2e-6)
    assert small.reader is not None
    tiny = load_verifier(tmp_path, device="cpu", memory="24KiB")
    with pytest.raises(CapacityError, match="a text to judge"):
        tiny.values([("How many?", "x" * 150)])
    short = [("", "a")]
    assert tiny.values(short)[0] == pytest.approx(whole.values(short)[0], abs=2e-6)
    with pytest.raises(InputError, match="accepts at most 400"):
        small.values([("How many?", "x" * 500)])


def test_a_model_in_use_is_not_loaded_twice(tmp_path: Path) -> None:
    save(tmp_path)
    first, again = (load_verifier(tmp_path, device="cpu", reduce=each) for each in ("min", "mean"))
    assert first.reader is again.reader is not None and first.scorer is again.scorer
    assert load_verifier(tmp_path, device="cpu", label=0).reader is not first.reader


@pytest.mark.parametrize("share", [True, False])
def test_a_checkpoint_that_was_overwritten_is_loaded_again(tmp_path: Path, share: bool) -> None:
    first = load_verifier(save(tmp_path), device="cpu", share=share)
    again = load_verifier(save(tmp_path, num_labels=3), device="cpu", share=share)
    assert (first.column, again.column) == (1, 2)
    pairs = [("How many?", "6")]
    assert first.values(pairs) != again.values(pairs)


def test_a_text_is_hashed_once_for_all_its_prefixes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_bytes = 0

    class Counting:
        def __init__(self, data: bytes = b"", **settings: Any) -> None:
            self._hash = hashlib.blake2b(**settings)
            self.update(data)

        def update(self, data: bytes) -> None:
            nonlocal num_bytes
            num_bytes += len(data)
            self._hash.update(data)

        def digest(self) -> bytes:
            return self._hash.digest()

    monkeypatch.setattr(prefix_scorer, "blake2b", Counting)
    reader = load_verifier(save(tmp_path), device="cpu", memory="2MiB").reader
    assert reader is not None
    num_bytes = 0
    (values,) = reader.score_prefixes([range(5, 105)], [[*range(100)]])
    assert num_bytes == 400 and len(set(values)) == 100


def test_models_that_share_nothing_read_whole_texts(tmp_path: Path) -> None:
    save(tmp_path, BertForSequenceClassification, BertConfig)
    with pytest.warns(ModelWarning, match="computes every text from its start"):
        verifier = load_verifier(tmp_path, device="cpu")
    assert verifier.reader is None and 0 < verifier.scores([("a", "b")])[0] < 1


def test_an_error_without_text_is_named_by_its_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(reward, "_make_prefix_scorer", fail)
    with pytest.warns(ModelWarning, match="common prefixes: RuntimeError$"):
        assert load_verifier(save(tmp_path), device="cpu").reader is None


def test_caps_of_outputs_are_a_language_models_and_those_of_attention_a_classifiers_too(
    tmp_path: Path,
) -> None:
    changes = {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.0, "head_dim": 8}
    save(tmp_path, Gemma2ForSequenceClassification, Gemma2Config, **changes)
    shared, whole = both(tmp_path)
    pairs = tree_of_texts(random.Random(1), 9)
    assert shared.reader is not None
    for actual, expected in zip(shared.values(pairs), whole.values(pairs), strict=True):
        assert actual == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("ending", ["ProcessRewardModel", "RewardModel"])
def test_heads_of_two_layers_are_read_without_their_code(tmp_path: Path, ending: str) -> None:
    """A checkpoint as Qwen publishes them."""
    save(tmp_path, Qwen2ForTokenClassification, Qwen2Config)
    weights = load_file(tmp_path / "model.safetensors")
    weights = {name: each for name, each in weights.items() if not name.startswith("score")}
    generator = torch.Generator().manual_seed(0)
    outputs = 2 if ending == "ProcessRewardModel" else 1
    for name, shape in {"0.weight": (32, 32), "0.bias": (32,), "2.weight": (outputs, 32)}.items():
        weights[f"score.{name}"] = torch.randn(*shape, generator=generator) / 3
    weights["score.2.bias"] = torch.zeros(outputs)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = [f"Qwen2For{ending}"]
    config["auto_map"] = {"AutoModel": f"modeling_own.Qwen2For{ending}"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if ending == "ProcessRewardModel":  # its tokenizer knows the mark that it was trained with
        marked = tmp_path / "marked"
        shutil.copytree(tmp_path, marked)
        tokenizer = copy.deepcopy(tiny_tokenizer())
        tokenizer.add_tokens("<extra_0>", special_tokens=True)
        tokenizer.save_pretrained(marked)
        with pytest.raises(InputError, match="set mark=<extra_0>"):
            load_verifier(marked, device="cpu")
    shared, whole = both(tmp_path)
    assert shared.reader is not None
    module = load_scorer(tmp_path, device="cpu").model
    for question, answer in tree_of_texts(random.Random(2), 12):
        ids, ends = shared.encode(question, answer)
        with torch.inference_mode():
            hidden = module.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0, ends]
            hidden = torch.relu(hidden @ weights["score.0.weight"].T + weights["score.0.bias"])
            logits = hidden @ weights["score.2.weight"].T + weights["score.2.bias"]
        want = logits.sigmoid()[:, 0] if outputs == 1 else logits.softmax(-1)[:, 1]
        for verifier in (shared, whole):
            (values,) = verifier.values([(question, answer)])
            assert values == pytest.approx(want.tolist(), abs=1e-5)


def test_value_heads_are_read_at_newlines(tmp_path: Path) -> None:
    """A checkpoint as Skywork publishes them; question, steps and newlines are tokenized apart."""
    folder = save(tmp_path, Qwen2ForTokenClassification, Qwen2Config)
    weights = load_file(tmp_path / "model.safetensors")
    weights = {name: each for name, each in weights.items() if not name.startswith("score")}
    generator = torch.Generator().manual_seed(0)
    weights["v_head.summary.weight"] = torch.randn(1, 32, generator=generator) / 3
    weights["v_head.summary.bias"] = torch.ones(1)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = ["Qwen2ForPrmModel"]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(InputError, match=r"set mark=\\n and separator=\\n"):
        load_verifier(folder, device="cpu")
    shared, whole = both(folder, mark="\n", separator="\n")
    assert shared.reader is not None
    tokenizer, module = shared.scorer.tokenizer, load_scorer(folder, device="cpu").model
    (newline,) = tokenizer("\n", add_special_tokens=False)["input_ids"]
    want: list[int] = tokenizer("How many?\n")["input_ids"]
    flags = []
    for step in ("One and", "two.", "So 3."):
        want += [*tokenizer(step, add_special_tokens=False)["input_ids"], newline]
        flags.append(len(want) - 1)
    if tokenizer.bos_token_id is not None and want[0] != tokenizer.bos_token_id:
        want, flags = [tokenizer.bos_token_id, *want], [place + 1 for place in flags]
    assert shared.encode("How many?", "One and\ntwo.\n\nSo 3.") == (want, flags)
    with torch.inference_mode():
        hidden = module.base_model(input_ids=torch.tensor([want])).last_hidden_state[0, flags]
        logits = hidden @ weights["v_head.summary.weight"].T + weights["v_head.summary.bias"]
    for verifier in (shared, whole):
        (values,) = verifier.values([("How many?", "One and\ntwo.\nSo 3.")])
        assert values == pytest.approx(logits.sigmoid()[:, 0].tolist(), abs=1e-5)
    with pytest.raises(
        InputError, match="a mark of white space cannot be used together with a chat"
    ):
        load_verifier(folder, device="cpu", mark="\n", chat=True)


def test_models_that_cannot_be_read_as_published_are_refused_by_name(tmp_path: Path) -> None:
    folder = save(tmp_path, LlamaForSequenceClassification, num_labels=19)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    code = {"AutoModelForSequenceClassification": "modeling_custom.LlamaForRewardModelWithGating"}
    for architecture, message in (
        ("LlamaForRewardModelWithGating", "got LlamaForRewardModelWithGating"),
        (
            "LlamaForSequenceClassification",
            "requires custom code .* is not supported for reward models",
        ),
    ):
        changed = {**config, "architectures": [architecture], "auto_map": code}
        (tmp_path / "config.json").write_text(json.dumps(changed), encoding="utf-8")
        with pytest.raises(ModelError, match=message):
            load_verifier(folder, device="cpu")


def test_turns_are_read_where_the_model_would_answer(tmp_path: Path) -> None:
    save(tmp_path, LlamaForCausalLM)
    verifier = load_verifier(tmp_path, device="cpu", mark="+", turns=True)
    ids, ends = verifier.encode("How many?", "One.\n\nTwo.")
    first = "<user>How many? One.</user><assistant>"
    second = f"{first}+</assistant><user>Two.</user><assistant>"
    texts = [verifier.scorer.tokenizer.decode(ids[: end + 1]) for end in ends]
    assert texts == [first, second]
    with pytest.raises(InputError, match="turns require"):
        load_verifier(save(tmp_path / "other"), device="cpu", turns=True)


CHAT = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}<|end|>\n{% endfor %}"
MARKED = "{% for m in messages %}+{{ m.role }}+ {{ m.content }} +/{{ m.role }}+{% endfor %}"


@pytest.mark.parametrize("template", [TEMPLATE, CHAT, MARKED])
@pytest.mark.parametrize("mark", ["+", " +\n", "yes"])
def test_each_turn_is_read_where_the_chat_so_far_has_its_mark(
    template: str, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, LlamaForCausalLM)
    verifier = load_verifier(tmp_path, device="cpu", mark=mark, turns=True, share=False)
    tokenizer = verifier.scorer.tokenizer
    tokenizer.chat_template = template
    rendered: list[str] = []

    def render(*given: Any) -> str:
        rendered.append(render_chat(*given))
        return rendered[-1]

    monkeypatch.setattr(verifiers, "render_chat", render)
    steps = [f"{number} + 1+ is{mark}yes " for number in range(30)]
    ids, ends = verifier.encode("How + many?", "\n\n".join(steps))
    assert len(rendered) == 2  # whatever the number of steps
    messages: list[dict[str, str]] = []
    for number, end in enumerate(ends):
        content = steps[number] if number else f"How + many? {steps[0]}"
        messages.append({"role": "user", "content": content.strip()})
        before = render_chat(tokenizer, [*messages, {"role": "assistant", "content": ""}])
        messages.append({"role": "assistant", "content": mark})
        text = render_chat(tokenizer, messages)
        at = next(i for i in range(len(before)) if before[i] != text[i])
        at = text.index(mark.strip(), at - 1 if template == MARKED else at)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        first = next(i for i, (_, stop) in enumerate(encoded["offset_mapping"]) if stop > at)
        assert end == first - 1 and ids[:first] == encoded["input_ids"][:first]
    assert ids == encoded["input_ids"] and len(ends) == len(steps)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% for m in messages[-2:] %}{{ m.content }}{% endfor %}",
    ],
)
def test_a_template_that_changes_the_marks_is_refused(template: str, tmp_path: Path) -> None:
    save(tmp_path, LlamaForCausalLM)
    verifier = load_verifier(tmp_path, device="cpu", mark="yes", turns=True, share=False)
    verifier.scorer.tokenizer.chat_template = template
    with pytest.raises(ModelError, match="chat template changes the mark; remove turns"):
        verifier.encode("How many?", "1\n\n2")


def test_an_answer_of_all_private_characters_is_refused(tmp_path: Path) -> None:
    save(tmp_path, LlamaForCausalLM)
    verifier = load_verifier(tmp_path, device="cpu", mark="yes", turns=True, share=False)
    with pytest.raises(InputError, match="contains all private-use characters"):
        verifier.encode("How many?", "".join(map(chr, range(0xE000, 0xF900))))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_shares_prefixes_too(tmp_path: Path, dtype: torch.dtype) -> None:
    config = Config(
        **{**SHAPE, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4},
        num_labels=2,
    )
    torch.manual_seed(0)
    LlamaForTokenClassification(config).to(dtype).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    shared = load_verifier(tmp_path, memory="64MiB")
    whole = load_verifier(tmp_path, share=False)
    assert isinstance(shared.reader, PrefixScorer) and whole.scorer.model.device.type == "cuda"
    pairs = tree_of_texts(random.Random(4), 200)
    limit = 2e-3 if dtype == torch.float32 else 0.03
    got, num_read = [], 0
    for part in (pairs[:70], pairs[70:]):
        got += shared.values(part)
        encoded = [shared.encode(*pair) for pair in part]
        prefixes = {tuple(ids[: end + 1]) for ids, ends in encoded for end in ends}
        num_read += sum(map(len, prefixes))
    for actual, expected in zip(got, whole.values(pairs), strict=True):
        assert actual == pytest.approx(expected, abs=limit)
    assert shared.reader.usage.prompt_tokens_computed < 0.5 * num_read
    shared.reader._scheduler.check()
