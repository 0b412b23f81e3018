"""Verifiers: tiny random models of each published form, against transformers read step by step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from cli_cases import Command
from tiny_models import config_of, save_drawn, tiny_tokenizer
from transformers import (
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
)

from treegen.errors import CapacityError, InputError, ModelError
from treegen.model.scorers.scorer import CAUSAL, load_scorer
from treegen.model.scorers.verifier import Verifier

CLASSES: dict[str, Any] = {
    "sequence": LlamaForSequenceClassification,
    "token": LlamaForTokenClassification,
    "causal": LlamaForCausalLM,
}
PAIRS = [
    ("How many?", "Three.\n\nNo, four.\n\nThe answer is 4."),
    ("Why?", "Because."),
    ("Who is it then?", "\n\nA\n\n \n\nB \n\nC"),
    ("", ""),
]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"


def save(folder: Path, form: str, *, labels: int = 2, chat: bool = False) -> Any:
    model = CLASSES[form](config_of("llama", max_position_embeddings=200, num_labels=labels))
    return save_drawn(model, folder, chat_template=TEMPLATE if chat else None)


def test_a_model_larger_than_the_free_memory_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "sequence")

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(LlamaForSequenceClassification, "to", fail)
    with pytest.raises(ModelError, match=r"requires 0.0 GiB, which exceeds the free memory of cpu"):
        load_scorer(tmp_path, device="cpu")


def test_texts_that_exceed_the_free_memory_are_refused_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "sequence")
    verifier = Verifier(scorer=load_scorer(tmp_path, device="cpu"))

    def fail(*_: Any, **inputs: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(LlamaForSequenceClassification, "forward", fail)
    message = r"cpu has no memory left to score 2 texts of up to \d+ tokens at once; lower batch"
    with pytest.raises(CapacityError, match=message) as caught:
        verifier.scores([("2 + 2?", "It is 4."), ("1 + 1?", "2")])
    assert caught.value.__context__ is None


def logits_after(model: Any, text: str, *, special: bool = True) -> torch.Tensor:
    """The model's last logits on a text alone."""
    ids = tiny_tokenizer()(text, add_special_tokens=special)["input_ids"]
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0]
    return found if found.dim() == 1 else found[-1]


@pytest.mark.parametrize("labels", [1, 3])
def test_outcomes_are_read_from_the_whole_text(tmp_path: Path, labels: int) -> None:
    model = save(tmp_path, "sequence", labels=labels)
    verifier = Verifier(scorer=load_scorer(tmp_path, device="cpu"), batch_size=3)
    for (question, answer), values in zip(PAIRS, verifier.values(PAIRS), strict=True):
        logits = logits_after(model, f"{question}\n{answer}")
        want = logits.sigmoid()[0] if labels == 1 else logits.softmax(0)[-1]
        assert values == pytest.approx([float(want)], abs=1e-5)


@pytest.mark.parametrize(
    ("form", "mark"),
    [("token", ""), ("token", "#"), ("token", " #\n"), ("causal", "#"), ("causal", " #\n")],
)
@pytest.mark.parametrize("chat", [False, True])
def test_steps_are_read_where_they_end(tmp_path: Path, form: str, mark: str, chat: bool) -> None:
    model = save(tmp_path, form, chat=chat)
    scorer = load_scorer(tmp_path, device="cpu")
    verifier = Verifier(scorer=scorer, mark=mark, tokens=("4", "5"), batch_size=2)
    found = verifier.values(PAIRS)
    for (question, answer), values in zip(PAIRS, found, strict=True):
        steps = [step for step in answer.split("\n\n") if step.strip()] or [answer]
        assert len(values) == len(steps)
        for number, value in enumerate(values):
            done = steps[: number + 1]
            body = "".join(f"{s}{mark}" for s in done) if mark else "\n\n".join(done)
            begin = f"<user>{question}</user><assistant>" if chat else f"{question}\n"
            if not body:  # nothing was said: the text is read at its end
                body = "</assistant>" if chat else ""
            text = (begin + body).rstrip() or begin + body
            logits = logits_after(model, text, special=not chat)
            if form == "causal":
                ids = [tiny_tokenizer()(t, add_special_tokens=False)["input_ids"][-1] for t in "45"]
                logits = logits[ids].flip(0)  # the right one last, as of a classifier
            assert value == pytest.approx(float(logits.softmax(0)[-1]), abs=1e-5)


def test_steps_become_one_number(tmp_path: Path) -> None:
    save(tmp_path, "token")
    scorer = load_scorer(tmp_path, device="cpu")
    steps = Verifier(scorer=scorer).values(PAIRS[:1])[0]
    assert len(steps) == 3
    want = {"last": steps[-1], "min": min(steps), "mean": sum(steps) / 3}
    want["product"] = steps[0] * steps[1] * steps[2]
    for reduce, value in want.items():
        got = Verifier(scorer=scorer, reduce=reduce).scores(PAIRS[:1])
        assert got == pytest.approx([value], abs=1e-6)


@pytest.mark.parametrize(
    ("form", "options", "message"),
    [
        ("causal", {}, "verifier requires a mark"),
        ("sequence", {"mark": "#"}, "remove the mark"),
        ("sequence", {"label": 2}, "label must be less than 2"),
        ("token", {"reduce": "max"}, "reduce must be one of"),
        ("token", {"label": "1"}, "label must be an integer or None"),
        ("token", {"batch_size": 0}, "batch_size must be at least 1"),
        ("causal", {"mark": "#", "tokens": "+-"}, r"tokens must be \(text, text\)"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, form: str, options: dict[str, Any], message: str
) -> None:
    save(tmp_path, form)
    with pytest.raises(InputError, match=message):
        Verifier(scorer=load_scorer(tmp_path, device="cpu"), **options)


def test_texts_and_models_that_cannot_be_read(tmp_path: Path) -> None:
    save(tmp_path, "token")
    verifier = Verifier(scorer=load_scorer(tmp_path, device="cpu"))
    with pytest.raises(InputError, match="accepts at most 200"):
        verifier.values([("q", "x" * 1000)])
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = ["LlamaModel"]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError, match="not a supported reward model"):
        load_scorer(tmp_path)


def test_a_run_is_scored_and_votes_by_it(tmp_path: Path, treegen: Command) -> None:
    run, model = tmp_path / "run", tmp_path / "verifier"
    save(model, "sequence")
    options = ["-n", "4", "--max-tokens", "24", "--memory", "16MiB"]
    assert treegen("eval", "gsm8k", "--limit", "3", *options, "-o", run, "-q").code == 0
    arguments = ["verify", run, "--verifier", model, "--device", "cpu", "-q"]
    assert treegen(*arguments).document["scores"] == 12
    whole = (run / "scores.jsonl").read_bytes()
    assert treegen(*arguments).document["scores"] == 12
    assert (run / "scores.jsonl").read_bytes() == whole  # there was nothing to do
    (run / "scores.jsonl").write_bytes(whole[: len(whole) // 2])  # what a kill leaves
    assert treegen(*arguments).document["scores"] == 12
    rows = (run / "scores.jsonl").read_text(encoding="utf-8").splitlines()
    keys = {(row["problem_id"], row["sample_index"]) for row in map(json.loads, rows)}
    assert len(keys) == len(rows) == 12
    scored = treegen("score", run, "--votes", "score,score:best")
    assert scored.code == 0 and "score" in json.dumps(
        scored.document["runs"][0]["report"]["tables"][-1]
    )
    other = treegen(*arguments, "--label", "0")
    assert other.code == 2 and "scores that this verifier did not compute" in other.err


def test_a_language_model_judges_whatever_its_class_is_called(tmp_path: Path) -> None:
    tiny_models.save_tiny_model(tmp_path, "gpt2")
    named = json.loads((tmp_path / "config.json").read_text())["architectures"]
    assert named == ["GPT2LMHeadModel"]
    assert load_scorer(tmp_path, device="cpu").form == CAUSAL
