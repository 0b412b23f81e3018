"""Train the demo model on Countdown by GRPO on a CPU: samples of treegen, and the loss of trees.

    python examples/train_countdown.py
    python examples/train_countdown.py --in-flight

The samples of a training step are next lines of solutions: 16 for each of 40 puzzles of four
numbers, after zero, one or two right lines. The reward is 1 if the target can still be reached, and
otherwise 0. The test draws whole solutions of other puzzles. By default, a training step waits for
its samples. With --in-flight, samples go on while the weights change: a training step takes the
first 40 puzzles that are done, and the new weights finish the other samples. No puzzle occurs
twice.
docs/integrations/training.md shows the results.
"""

import random
from collections.abc import Iterator
from itertools import islice
from statistics import fmean
from typing import Any

import click
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from treegen import LLM, Completion, Node, SamplingParams
from treegen.demo import model_path
from treegen.evals.statistics.estimators import difference_interval, estimate
from treegen.tasks.puzzles.puzzle import (
    SOLVE_HEADER,
    PuzzleState,
    apply_steps,
    moves,
    prompt,
    reachable,
    solve_head,
    step_line,
)
from treegen.train import tree_logprobs, tree_of

Puzzle = tuple[tuple[int, ...], int, str]  # numbers, the target, and the lines that are given
Group = tuple[Puzzle, list[Completion]]
LINE = SamplingParams(max_tokens=24, stop=("\n",), include_stop=True, seed=0)
SOLUTION = SamplingParams(max_tokens=64, stop=("\n\n",), seed=0)
SAMPLES, PUZZLES, LR = 16, 40, 1e-4


def draw_puzzles(num: int, seed: int, used: set[Puzzle], max_hint_steps: int = 0) -> list[Puzzle]:
    """Draw new puzzles, whose targets are reached by random steps, and give some of the steps."""
    draw, puzzles = random.Random(seed), list[Puzzle]()
    while len(puzzles) < num:
        numbers = tuple(sorted(draw.choices(range(1, 14), k=4)))
        state: PuzzleState = numbers
        lines = list[str]()
        while len(state) > 1:
            step = draw.choice(moves(state, whole=True))
            lines.append(step_line(step) + "\n")
            state = step.left
        new = (numbers, int(state[0]), "")
        if new not in used and 0 < new[1] <= 50:
            used.add(new)
            puzzles.append((*new[:2], "".join(lines[: draw.randint(0, max_hint_steps)])))
    return puzzles


def prompt_of(puzzle: Puzzle) -> str:
    """The text before the lines to sample."""
    numbers, target, first_steps = puzzle
    return prompt(SOLVE_HEADER, (), solve_head(numbers, target) + first_steps)


def reward_of(puzzle: Puzzle, samples: list[Completion]) -> Tensor:
    """The reward of each sample: 1 if it is a legal step after which the target can be reached."""
    numbers, target, first_steps = puzzle
    size = len(numbers) - first_steps.count("\n") - 1
    lefts = [apply_steps(numbers, first_steps + completion.text) or () for completion in samples]
    return torch.tensor([1.0 * (len(s) == size and reachable(s, target, True)) for s in lefts])


def sample(llm: LLM, puzzles: list[Puzzle], num: int, params: SamplingParams) -> Iterator[Group]:
    """Yield each puzzle as soon as all of its samples have ended."""
    named = {str(puzzle): puzzle for puzzle in puzzles}
    leaves = [Node(prompt_of(named[name]), id=name, samples=num) for name in named]
    done: dict[str, list[Completion]] = {name: [] for name in named}
    with llm.stream(Node("", children=leaves), params) as stream:
        while stream.has_work:
            for completion in stream.step():
                done[completion.prompt_id].append(completion)
                if len(done[completion.prompt_id]) == num:
                    yield named[completion.prompt_id], done[completion.prompt_id]


def batches(llm: LLM, puzzles: list[Puzzle], in_flight: bool) -> Iterator[list[Group]]:
    """Yield the puzzles of each step with their samples."""
    size = len(puzzles) if in_flight else PUZZLES
    for at in range(0, len(puzzles), size):
        running = sample(llm, puzzles[at : at + size], SAMPLES, LINE)
        while batch := list(islice(running, PUZZLES)):
            yield batch


def loss_of(module: Any, llm: LLM, batch: list[Group]) -> Tensor:
    """The clipped loss of GRPO: a mean over all tokens of puzzles that have a choice."""
    texts, starts, advantages, old = [], [], [], []
    for puzzle, samples in batch:
        rewards, ids = reward_of(puzzle, samples), llm.tokenizer(prompt_of(puzzle)).input_ids
        if 0 < rewards.mean() < 1:
            advantages += ((rewards - rewards.mean()) / rewards.std()).tolist()
            texts += [ids + list(completion.tokens) for completion in samples]
            old += [torch.tensor(completion.logprobs) for completion in samples]
            starts += [len(ids)] * len(samples)
    losses = [torch.zeros(0, requires_grad=True)]
    news = tree_logprobs(module, tree_of(texts), prompt_lengths=starts)
    for new, before, advantage in zip(news, old, advantages, strict=True):
        ratio = (new - before).exp()
        losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
    return torch.cat(losses).sum() / max(1, sum(map(len, losses)))


def test(llm: LLM, puzzles: list[Puzzle]) -> list[float]:
    """The share of samples that solve each puzzle."""
    solved = {
        puzzle: fmean(
            apply_steps(puzzle[0], completion.text) == puzzle[1:2] for completion in samples
        )
        for puzzle, samples in sample(llm, puzzles, 4, SOLUTION)
    }
    return [solved[puzzle] for puzzle in puzzles]


@click.command()
@click.option("--in-flight", is_flag=True, help="Let samples go on while the weights change.")
@click.option("--steps", default=60, show_default=True, help="Steps of the optimizer.")
@click.option("--num-test", default=300, show_default=True, help="Puzzles of the test.")
def main(in_flight: bool, steps: int, num_test: int) -> None:
    """Train the demo model, and print its rewards and its scores before and after."""
    used: set[Puzzle] = set()
    held_out = draw_puzzles(num_test, 1, used)
    training = draw_puzzles(steps * PUZZLES, 2, used, max_hint_steps=2)
    module: Any = AutoModelForCausalLM.from_pretrained(model_path(), dtype="float32")
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=0)
    llm = LLM("demo", dtype="float32", max_rows=2 * PUZZLES * SAMPLES)
    before, curve, spanning = test(llm, held_out), list[float](), list[bool]()
    for step, batch in enumerate(batches(llm, training, in_flight), start=1):
        curve.append(fmean(float(reward_of(*group).mean()) for group in batch))
        spanning += [len(completion.versions) > 1 for _, samples in batch for completion in samples]
        click.echo(f"step {step}: reward {curve[-1]:.2f}")
        optimizer.zero_grad()
        loss_of(module, llm, batch).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        llm.update(module, cache="keep" if in_flight else "all")
    after = test(llm, held_out)
    click.echo("\n| steps | mean reward |\n|---|--:|")
    for at in range(0, len(curve), 5):
        part = curve[at : at + 5]
        click.echo(f"| {at + 1} to {at + len(part)} | {fmean(part):.2f} |")
    click.echo(f"\n{fmean(spanning):.0%} of the samples span several versions of weights")
    for name, result in (("before", estimate(before)), ("after", estimate(after))):
        click.echo(f"{name}: {result.value:.2f} ({result.low:.2f} to {result.high:.2f})")
    gains = [new - old for new, old in zip(after, before, strict=True)]
    click.echo(
        "change: {:+.2f} ({:+.2f} to {:+.2f})".format(fmean(gains), *difference_interval(gains))
    )


if __name__ == "__main__":
    main()
