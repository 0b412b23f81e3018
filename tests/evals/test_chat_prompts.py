"""Prompts of tasks as chat messages, what stops a sample there, and resuming older runs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Command, results_of, samples_of, write_jsonl

from treegen.errors import InputError
from treegen.evals.config.eval_settings import resolve_eval_settings, stored_choices
from treegen.evals.identity import run_settings
from treegen.evals.job import load_job
from treegen.prompts.tree import prompts_of
from treegen.runs import RunDir

SHOTS = [
    {"question": "1 + 1?", "target": "One and one. The answer is 2."},
    {"question": "2 + 2?", "target": "Two and two. The answer is 4."},
]


def messages(settings: Mapping[str, Any], problem: int = 0) -> list[Mapping[str, str]]:
    """The chat messages of one problem of a task."""
    job = load_job(resolve_eval_settings({"model": "x", "apply_chat_template": True, **settings}))
    (node,) = prompts_of(job.tree)[problem].path[1:]
    return list(node.content)  # type: ignore[arg-type]


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.fixture
def gsm8k(tmp_path: Path) -> dict[str, Any]:
    shots = write_jsonl(tmp_path / "shots.jsonl", SHOTS)
    data = write_jsonl(tmp_path / "data.jsonl", [{"question": "3 + 3?", "answer": "#### 6"}])
    return {"task": "gsm8k", "data": str(data), "fewshot_file": str(shots)}


def test_a_turn_per_shot_as_in_lm_eval(gsm8k: dict[str, Any]) -> None:
    """lm-eval's default with --apply_chat_template: fewshot_as_multiturn."""
    want = [
        turn("user", "Q: 1 + 1?\nA:"),
        turn("assistant", "One and one. The answer is 2."),
        turn("user", "Q: 2 + 2?\nA:"),
        turn("assistant", "Two and two. The answer is 4."),
        turn("user", "Q: 3 + 3?\nA:"),
    ]
    assert messages(gsm8k) == want
    assert messages({**gsm8k, "system_instruction": "Be brief."}) == [
        turn("system", "Be brief."),
        *want,
    ]


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("system", "joined"),
    [
        ("You are a poet.", "Be brief.\n\nYou are a poet."),
        ([part("You are a poet.")], [part("Be brief.\n\n"), part("You are a poet.")]),
        ([part("\nYou are a poet.")], [part("Be brief."), part("\nYou are a poet.")]),
    ],
    ids=["text", "parts", "whitespace"],
)
def test_a_system_instruction_joins_the_system_turn_of_a_chat(
    tmp_path: Path, system: Any, joined: Any
) -> None:
    chat = [turn("system", system), turn("user", "Write.")]
    data = write_jsonl(tmp_path / "data.jsonl", [{"messages": chat, "answer": "x"}])
    task = {"task": "jsonl", "data": str(data), "extra": {"messages_field": "messages"}}
    assert messages(task) == chat
    assert messages({**task, "system_instruction": "Be brief."}) == [
        turn("system", joined),
        turn("user", "Write."),
    ]


def test_all_shots_in_one_turn_on_request(gsm8k: dict[str, Any]) -> None:
    (only,) = messages({**gsm8k, "fewshot_as_multiturn": False})
    plain = load_job(resolve_eval_settings({"model": "x", **gsm8k}))
    text = "".join(str(node.content) for node in prompts_of(plain.tree)[0].path)
    assert only == turn("user", text)


@pytest.mark.parametrize("task", ["gsm8k", "apps", "countdown", "needle"])
@pytest.mark.parametrize("shots", [0, 2])
def test_turns_hold_what_the_plain_prompt_holds(task: str, shots: int) -> None:
    """Whatever a task shows, in whatever form: turns take turns, and nothing is left out."""
    settings = {"task": task, "num_fewshot": shots, "limit": 2, "num_samples": 1}
    if task == "needle":
        settings["extra"] = {"length": "3000", "questions": "5"}
    plain = load_job(resolve_eval_settings({"model": "x", **settings}))
    for number in range(2):
        found = messages(settings, number)
        text = "".join(str(node.content) for node in prompts_of(plain.tree)[number].path)
        assert [each["role"] for each in found] == ["user", "assistant"] * shots + ["user"]
        assert "".join("".join(m["content"] for m in found).split()) == "".join(text.split())


def test_lm_evals_mmlu_has_its_description_as_the_system_turn(tmp_path: Path) -> None:
    for split in ("dev", "test"):
        (tmp_path / split).mkdir()
        row = f"{split}?,w,x,y,z,C\n"
        (tmp_path / split / f"world_religions_{split}.csv").write_text(row)
    settings = {
        "task": "mmlu",
        "data": str(tmp_path),
        "num_fewshot": 1,
        "extra": {"form": "lm-eval"},
        "system_instruction": "Be brief.",
    }
    description = "questions (with answers) about world religions.\n\n"
    assert messages(settings) == [
        turn("system", f"Be brief.\n\nThe following are multiple choice {description}"),
        turn("user", "dev?\nA. w\nB. x\nC. y\nD. z\nAnswer:"),
        turn("assistant", "C"),
        turn("user", "test?\nA. w\nB. x\nC. y\nD. z\nAnswer:"),
    ]


def test_stops_are_those_of_lm_evals_gsm8k_cot(gsm8k: dict[str, Any]) -> None:
    def stops(**more: Any) -> tuple[str, ...]:
        return resolve_eval_settings({"model": "x", **gsm8k, **more}).sampling.stops

    other = {"extra": {"form": "self-consistency"}}
    assert stops() == ("Q:", "</s>", "<|im_end|>")
    assert stops(**other) == ("Q:", "\n\n")
    # A chat model's reply goes on after a blank line, unless the user says otherwise.
    assert stops(apply_chat_template=True, **other) == ("Q:",)
    assert stops(apply_chat_template=True, stop=["\n\n"]) == ("\n\n",)
    assert resolve_eval_settings({"task": "jsonl", "model": "x"}).sampling.stops == ("\n\n",)
    assert (
        resolve_eval_settings(
            {"task": "jsonl", "model": "x", "apply_chat_template": True}
        ).sampling.stops
        == ()
    )
    with pytest.raises(InputError, match=r"form must be one of cot, self-consistency"):
        stops(extra={"form": "maj"})
    with pytest.raises(
        InputError, match="requires chat messages; also pass apply_chat_template=True"
    ):
        stops(fewshot_as_multiturn=True)


def test_a_run_from_before_there_were_turns_continues_as_it_was(
    gsm8k: dict[str, Any], tmp_path: Path
) -> None:
    """Its run.json says nothing of turns: all shots were one turn; and it has the old stops."""
    chat = {"model": "x", **gsm8k, "apply_chat_template": True}
    old = resolve_eval_settings({**chat, "fewshot_as_multiturn": False, "stop": ["Q:", "\n\n"]})
    settings = run_settings(load_job(old), dtype="float32", fingerprint="x")
    assert "fewshot_as_multiturn" not in json.dumps(settings.identity)
    with RunDir.create(tmp_path / "run", settings) as run:
        again = resolve_eval_settings({}, stored_choices(run.info))
    assert (again.fewshot_as_multiturn, again.sampling.stops) == (False, ("Q:", "\n\n"))
    resumed = run_settings(load_job(again), dtype="float32", fingerprint="x")
    assert resumed.fingerprint == settings.fingerprint
    new = run_settings(load_job(resolve_eval_settings(chat)), dtype="float32", fingerprint="x")
    assert new.fingerprint != settings.fingerprint


def test_turns_from_the_command_line(treegen: Command, tiny: Path, tmp_path: Path) -> None:
    few = ["--limit", 1, "-n", 1, "--max-tokens", 3, "-f", 2, "-M", tiny, "--apply-chat-template"]
    many = treegen("eval", "gsm8k", *few, "--fewshot_as_multiturn", "-o", tmp_path / "many")
    one = treegen("eval", "gsm8k", *few, "--no-fewshot-as-multiturn", "-o", tmp_path / "one")
    assert (many.code, one.code) == (0, 0), many.err + one.err
    hashes = [samples_of(tmp_path / name)[0]["prompt_hash"] for name in ("many", "one")]
    assert hashes[0] != hashes[1]
    assert results_of(tmp_path / "many")["settings"]["fewshot_as_multiturn"] is True
    assert treegen("eval", "--resume", tmp_path / "one", "-q").code == 0
    error = treegen("eval", "--resume", tmp_path / "one", "--fewshot-as-multiturn").error
    assert "prompt.fewshot_as_multiturn: " in error and "(--fewshot-as-multiturn)" in error
    plan = treegen("plan", "gsm8k", *few, "--write-out")
    assert plan.out.startswith("gsm8k: the prompt of gsm8k-0, from the next line on\n")
    head = plan.out.partition("(the prompt ends with the line before)")[0]
    assert head.count("The answer is ") == 2
    assert plan.out.partition("\nreference: ")[2].split("\n")[0].isdecimal()
    shown = treegen("eval", "gsm8k", *few, "--write-out", "-q", "-o", tmp_path / "shown")
    assert head in shown.err and shown.out == ""
