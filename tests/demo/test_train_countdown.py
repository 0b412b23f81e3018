"""The example that trains the demo model on Countdown."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import train_countdown
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from treegen import LLM
from treegen.demo import model_path
from treegen.tasks.puzzles.puzzle import apply_steps, reachable


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_countdown, "PUZZLES", 2)
    monkeypatch.setattr(train_countdown, "SAMPLES", 4)


@pytest.mark.parametrize("in_flight", [False, True])
def test_it_trains_and_reports(in_flight: bool) -> None:
    options = ["--steps", "3", "--num-test", "1", *(["--in-flight"] if in_flight else [])]
    done = CliRunner().invoke(train_countdown.main, options, catch_exceptions=False)
    assert done.exit_code == 0
    assert [int(step) for step in re.findall(r"step (\d+): reward [01]\.", done.output)] == [
        *range(1, 4)
    ]
    match = re.search(r"(\d+)% of the samples span several versions of weights", done.output)
    assert match and (int(match[1]) > 0) == in_flight
    assert re.search(r"change: [+-]\d\.\d\d \([+-]\d\.\d\d to ", done.output)


def test_puzzles_differ_and_can_be_solved() -> None:
    used: set[Any] = set()
    first = train_countdown.draw_puzzles(40, 1, used)
    second = train_countdown.draw_puzzles(40, 2, used, max_hint_steps=2)
    assert len({puzzle[:2] for puzzle in (*first, *second)}) == 80
    assert not any(given for _, _, given in first)
    assert {given.count("\n") for _, _, given in second} == {0, 1, 2}
    for numbers, target, given in (*first, *second):
        state = apply_steps(numbers, given)
        assert state is not None and reachable(state, target, True)


def test_a_step_is_rewarded_if_it_leads_on() -> None:
    cases = {
        "4 + 6 = 10 (left: 3 5 10)\n": 1,  # 5 * 3 + 10 = 25
        "4 * 3 = 12 (left: 5 6 12)\n": 0,
        "4 + 6 = 11 (left: 3 5 11)\n": 0,
        "4 + 6 = 10 (left: 3 5": 0,
        "\n": 0,
    }
    samples: Any = [SimpleNamespace(text=text) for text in cases]
    rewards = train_countdown.reward_of(((3, 4, 5, 6), 25, ""), samples)
    assert rewards.tolist() == list(cases.values())
    given = "4 + 6 = 10 (left: 3 5 10)\n"
    lines = {"3 * 5 = 15 (left: 10 15)\n": 1, "3 + 5 = 8 (left: 8 10)\n": 0, "\n": 0}
    samples = [SimpleNamespace(text=text) for text in lines]
    rewards = train_countdown.reward_of(((3, 4, 5, 6), 25, given), samples)
    assert rewards.tolist() == list(lines.values())


def test_the_loss_moves_towards_rewarded_samples() -> None:
    """The policy gradient, from single samples."""
    module: Any = AutoModelForCausalLM.from_pretrained(model_path(), dtype="float32")
    llm = LLM("demo", dtype="float32")
    puzzles = train_countdown.draw_puzzles(6, 3, set())
    batch = list(train_countdown.sample(llm, puzzles, 4, train_countdown.LINE))
    train_countdown.loss_of(module, llm, batch).backward()
    got = module.lm_head.weight.grad.clone()
    module.zero_grad()
    total, num = torch.zeros(()), 0
    for puzzle, samples in batch:
        rewards = train_countdown.reward_of(puzzle, samples)
        if rewards.std() == 0:
            continue
        prompt = llm.tokenizer(train_countdown.prompt_of(puzzle)).input_ids
        for sample, reward in zip(samples, rewards, strict=True):
            ids = torch.tensor([prompt + list(sample.tokens)])
            logprobs = module(ids).logits[0, :-1].log_softmax(-1)
            drawn = logprobs.gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0]
            total = total - (reward - rewards.mean()) / rewards.std() * drawn.sum()
            num += len(drawn)
    assert num
    (total / num).backward()
    torch.testing.assert_close(got, module.lm_head.weight.grad, atol=1e-5, rtol=1e-4)
