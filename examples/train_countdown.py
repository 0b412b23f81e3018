"""Improve the demo model on number puzzles by GRPO, on a CPU in minutes.

    pip install '.[trl]'
    python examples/train_countdown.py
    python examples/train_countdown.py --loss stock    # TRL's own loss, for comparison

Each step draws puzzles, samples solutions of each with treegen, and rewards those that reach the
target. All prompts begin with the same solved examples, so a batch is one tree with a long trunk:
both the samples and the loss compute it once. Training never sees the puzzles that are scored
before and after.
"""

import random
import tempfile
import time
from typing import Any, Final

import click
import numpy as np
import torch
from datasets import Dataset
from train_demo.puzzles import Puzzle, puzzle
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from treegen import LLM, SamplingParams, from_module
from treegen.demo import model_path
from treegen.integrations.trl import rollout, with_tree_loss
from treegen.model.load import patch_module
from treegen.tasks.puzzles.countdown_text import SOLVE_HEADER, apply_steps, prompt, solve_head

NUMBERS: Final = 4
SHOWN: Final = 5  # solved examples in each prompt
SAMPLES: Final = 8  # of each puzzle
TOKENS: Final = 72
END: Final = "\n\n"


def draw_puzzles(num: int, seed: str, *, evaluation: bool) -> list[Puzzle]:
    draw = random.Random(seed)
    return [puzzle(draw, NUMBERS, evaluation=evaluation) for _ in range(num)]


def prompt_of(problem: Puzzle) -> str:
    shown = draw_puzzles(SHOWN, "shown", evaluation=False)
    blocks = [solve_head(each.numbers, each.target) + each.solution for each in shown]
    return prompt(SOLVE_HEADER, blocks, solve_head(problem.numbers, problem.target))


def solves(numbers: Any, target: int, text: str) -> bool:
    return apply_steps(numbers, text) == (target,)


def reward(completions: list[str], numbers: list[Any], target: list[int], **_: Any) -> list[float]:
    return [float(solves(*each)) for each in zip(numbers, target, completions, strict=True)]


def score(module: Any, tokenizer: Any, problems: list[Puzzle]) -> np.ndarray:
    """Return the share of solved samples of each problem."""
    params = SamplingParams(n=SAMPLES, temperature=1, max_tokens=TOKENS, stop=END, seed=1)
    with patch_module(module):
        llm = LLM(from_module(module), tokenizer=tokenizer, memory="256MiB")
        results = llm.generate([prompt_of(each) for each in problems], params)
    return np.array(
        [
            np.mean([solves(each.numbers, each.target, sample.text) for sample in samples])
            for each, samples in zip(problems, results, strict=True)
        ]
    )


def interval(shares: np.ndarray) -> str:
    """Return a mean and its interval of 95%, over problems."""
    half = 1.96 * shares.std(ddof=1) / len(shares) ** 0.5
    return f"{shares.mean():.3f} ({shares.mean() - half:.3f} to {shares.mean() + half:.3f})"


class Curve(TrainerCallback):
    """Prints the mean reward of every few steps as a bar."""

    EVERY: Final = 5

    def __init__(self) -> None:
        self._rewards: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "reward" not in logs:
            return
        self._rewards.append(logs["reward"])
        if len(self._rewards) % self.EVERY == 0:
            mean = float(np.mean(self._rewards[-self.EVERY :]))
            print(f"step {state.global_step:4}  reward {mean:.3f}  {'#' * round(80 * mean)}")


@click.command()
@click.option("--steps", default=60, show_default=True, help="Optimizer steps.")
@click.option("--puzzles", default=8, show_default=True, help="Puzzles of each step.")
@click.option("--learning-rate", default=1e-4, show_default=True)
@click.option("--held-out", default=200, show_default=True, help="Puzzles to score.")
@click.option("--loss", type=click.Choice(["tree", "stock"]), default="tree", show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(
    steps: int, puzzles: int, learning_rate: float, held_out: int, loss: str, seed: int
) -> None:
    """Train the demo model by GRPO, and score it before and after."""
    tokenizer = AutoTokenizer.from_pretrained(model_path(), pad_token="<|end|>")
    (end,) = tokenizer.encode(END, add_special_tokens=False)
    module = AutoModelForCausalLM.from_pretrained(model_path(), dtype="float32")
    problems = draw_puzzles(held_out, "held out", evaluation=True)
    drawn = draw_puzzles(steps * puzzles, f"training {seed}", evaluation=False)
    rows = [{"prompt": prompt_of(e), "numbers": e.numbers, "target": e.target} for e in drawn]
    trainer_class = with_tree_loss(GRPOTrainer) if loss == "tree" else GRPOTrainer
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(
            model=module,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(rows),
            reward_funcs=reward,
            rollout_func=rollout,
            callbacks=[Curve()],
            args=GRPOConfig(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=puzzles * SAMPLES,
                num_generations=SAMPLES,
                max_completion_length=TOKENS,
                generation_kwargs={"eos_token_id": end},
                learning_rate=learning_rate,
                lr_scheduler_type="constant_with_warmup",
                warmup_steps=5,
                seed=seed,
                bf16=False,
                use_cpu=True,
                gradient_checkpointing=False,
                report_to=[],
                logging_steps=1,
                save_strategy="no",
                disable_tqdm=True,
            ),
        )
        trainer.remove_callback(PrinterCallback)
        before = score(module, tokenizer, problems)
        print(f"before: {interval(before)} of samples solve a held-out puzzle", flush=True)
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
    after = score(module, tokenizer, problems)
    print(f"after:  {interval(after)}")
    print(f"gain:   {interval(after - before)}")
    print(f"{steps} steps in {seconds:.0f} s, {torch.get_num_threads()} threads, {loss} loss")


if __name__ == "__main__":
    main()
