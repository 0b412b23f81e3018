"""`treegen eval` of a model that thinks: what is asked of it, stored, scored and shown."""

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from cli_cases import (
    Command,
    assert_same_samples,
    build_checkpoint,
    copy_part,
    results_of,
    samples_of,
)

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}"
)
FEW = ["--limit", 3, "-n", 4, "--memory", "8MiB", "--num-fewshot", 1, "--seed", 2]
CHAT = ["--apply-chat-template", "--max-tokens", 30, "--gen-kwargs", "ignore_eos=true"]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose chat template opens a thinking unless it is told not to."""
    folder = build_checkpoint(tmp_path_factory.mktemp("thinker") / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_a_budget_closes_what_would_not_end(
    treegen: Command, thinker: Path, tmp_path: Path
) -> None:
    run, free = tmp_path / "run", tmp_path / "free"
    done = treegen(
        "eval", "gsm8k", "-M", thinker, *FEW, *CHAT, "--max-thinking-tokens", 6, "-o", run
    )
    assert done.code == 0, done.err
    records = samples_of(run)
    assert len(records) == 12
    for record in records:
        thinking = record["thinking"]
        assert thinking["closed"] and thinking["forced"]
        # The tag is spelled by many tokens of this tokenizer.
        assert 6 < thinking["tokens"] < record["num_tokens"] == 30
        assert record["text"][: thinking["end"]].endswith("\n</think>")
    found = results_of(run)["thinking"]
    assert (found["samples"], found["thinking"], found["closed"], found["forced"]) == (12,) * 4
    assert found["thinking_tokens"] + found["answer_tokens"] == 12 * 30
    assert "12 ended at the budget" in done.out
    values = metrics_of(run)
    assert (values["truncated"], values["truncated_thinking"], values["truncated_answer"]) == (
        1,
        0,
        1,
    )

    part = copy_part(run, tmp_path / "part", 5)
    assert treegen("eval", "--resume", part).code == 0
    assert_same_samples(part, run)
    changed = treegen("eval", "--resume", part, "--max-thinking-tokens", 7)
    assert "sampling.max_thinking_tokens: 6 -> 7 (--max-thinking-tokens)" in changed.error

    done = treegen("eval", "gsm8k", "-M", thinker, *FEW, *CHAT, "-o", free)
    assert done.code == 0 and "12 never ended" in done.out
    values = metrics_of(free)
    assert (values["truncated"], values["truncated_thinking"], values["invalid"]) == (1, 1, 1)
    assert all(r["thinking"]["end"] == len(r["text"]) for r in samples_of(free))


def test_thinking_off_reaches_the_prompt(treegen: Command, thinker: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = treegen(
        f"eval gsm8k -M {thinker} --reasoning off --write-out -o {run} --max-thinking-tokens 4",
        *FEW,
        *CHAT,
    )
    assert done.code == 0, done.err
    assert "assistant:<think>\n\n</think>\n\n" in done.err + done.out
    assert not any(
        "thinking" in record or "</think>" in record["text"] for record in samples_of(run)
    )
    assert "truncated_thinking" not in metrics_of(run)
    again = treegen("eval", "--resume", run, "--reasoning", "on")
    assert 'prompt.reasoning: "off" -> "on" (--reasoning)' in again.error


def test_the_parts_are_shown(treegen: Command, thinker: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    budget = ["--max-thinking-tokens", 3, "--thinking-end", r"\n</think>\nThe answer is"]
    assert treegen("eval", "gsm8k", "-M", thinker, *FEW, *CHAT, *budget, "-o", run).code == 0
    problem = samples_of(run)[0]["problem_id"]
    done = treegen("show", run, "--problem", problem)
    assert done.code == 0 and re.search(r"\[reasoning, \d+ tokens\]", done.out)
    assert "[answer]\nThe answer is" in done.out
    sample = done.document["samples"][0]
    assert sample["thinking"]["forced"] and sample["text"].count("</think>") == 1
    assert treegen("report", run, "--no-plots").code == 0
    page = (run / "report.html").read_text()
    (blob,) = re.findall(r'id="run-1-index"[^>]*>([^<]*)<', page)
    columns = json.loads(gzip.decompress(base64.b64decode(blob)))["samples"]
    texts = json.loads(
        gzip.decompress(base64.b64decode(re.findall(r'id="run-1-texts-0"[^>]*>([^<]*)<', page)[0]))
    )
    for text, start in zip(texts, columns["answer_at"], strict=True):
        utf16 = text.encode("utf-16-le")
        thinking = utf16[: 2 * start].decode("utf-16-le")
        assert thinking.endswith("</think>") if "</think>" in text else thinking == text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--reasoning", "on"], "also pass --apply-chat-template"),
        ([*CHAT, "--reasoning", "high"], "has only enable_thinking"),
        ([*CHAT, "--reasoning", "maybe"], "reasoning must be one of auto, on, off"),
        ([*CHAT, "--max-thinking-tokens", 30], "must be less than --max-tokens 30"),
        (
            [*CHAT, "--max-thinking-tokens", 3, "--stop", r"\n"],
            "occurs in the text that ends the reasoning",
        ),
        ([*CHAT, "--max-thinking-tokens", 3, "--thinking-end", "ok"], "must contain the tag"),
    ],
)
def test_what_cannot_be_done_is_said_before_weights_are_loaded(
    treegen: Command, thinker: Path, tmp_path: Path, options: list[Any], message: str
) -> None:
    done = treegen("eval", "gsm8k", "-M", thinker, *FEW, *options, "-o", tmp_path / "run")
    assert done.code == 2 and message in done.error
    assert not (tmp_path / "run").exists()


def test_a_budget_needs_tags(treegen: Command, tiny: Path, tmp_path: Path) -> None:
    arguments = ["gsm8k", "-M", tiny, *FEW, *CHAT, "--max-thinking-tokens", 5]
    done = treegen("plan", *arguments)
    assert done.code == 2 and "--reasoning-tags '<think>' '</think>'" in done.error
    run = tmp_path / "run"
    done = treegen("eval", *arguments, "--reasoning-tags", "assistant:", "|", "-o", run)
    assert done.code == 0, done.err
    assert all(record["thinking"]["closed"] for record in samples_of(run))


def metrics_of(run: Path) -> dict[str, float]:
    return {row["metric"]: row["value"] for row in results_of(run)["report"]["metrics"]}
