"""Train the demo model: `python -m train_demo.train OUT`, from the folder examples/.

OUT becomes a transformers checkpoint, with the state of the training beside it; the same command
continues a run that was stopped. Everything is drawn by --seed.
"""

import math
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click
import torch
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from train_demo.batches import Group, Rows, Stage, Steps, encode, stage_of
from train_demo.documents import LONG, LOOKUP, READ, SHORT
from train_demo.evaluate import evaluate
from train_demo.model import (
    DEMO,
    TINY,
    Size,
    build_model,
    digit_tokens,
    loss_of,
    optimizers,
    save,
)
from train_demo.tokenizer import CONTEXT, train_tokenizer

# The shares of the steps in which the learning rates rise, and in which they fall to zero.
WARMUP: Final = 0.01
DECAY: Final = 0.4


def stages(steps: int | None, *, tiny: bool) -> tuple[Stage, ...]:
    """Return how training goes: at first only looking up facts nearby, then everything.

    Several layers have to learn their parts of a look-up before it is of any use. Among all the
    other skills that took the model too long; alone it takes two minutes.
    """
    if tiny:
        short, long = Group(SHORT, 4, 512), Group(LONG, 1, 1024)
        return Stage(10, (Group(LOOKUP, 4, 256),)), Stage(steps or 50, (short, long))
    short, long = Group(SHORT, 64, 2048), Group(LONG, 8, CONTEXT)
    return Stage(4000, (Group(LOOKUP, 64, 512),)), Stage(steps or 6500, (short, long))


def rate(step: int, steps: int) -> float:
    """Return the learning rate of a step as a share of the full one."""
    return min(1.0, (step + 1) / (WARMUP * steps), (steps - step) / (DECAY * steps))


class Training:
    """A model on its way through the stages; its state is in `file` every so often."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, plan: tuple[Stage, ...], *, seed: int, size: Size
    ) -> None:
        """Begin with random weights."""
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.set_float32_matmul_precision("high")
        torch.manual_seed(seed)
        self.tokenizer, self.plan, self.seed = tokenizer, plan, seed
        self.steps = sum(stage.steps for stage in plan)
        self.model: LlamaForCausalLM = build_model(tokenizer, size).to(self.device)
        self.tools = optimizers(self.model, self.device)
        self.step = 0
        self._rates = [options["lr"] for options in self._options()]
        self._digits = digit_tokens(tokenizer).to(self.device)
        on_gpu = self.device.type == "cuda"
        self._loss_of = torch.compile(loss_of, dynamic=False) if on_gpu else loss_of

    def run(self, workers: int) -> Iterator[list[torch.Tensor]]:
        """Take the steps that are left; yields the loss of each group of rows after each."""
        loader = DataLoader(
            Steps(self.tokenizer, self.plan, self.seed, self.step),
            batch_size=None,
            num_workers=workers,
            prefetch_factor=4 if workers else None,
            pin_memory=self.device.type == "cuda",
        )
        for groups in loader:
            losses = self._learn(groups)
            self.step += 1
            yield losses

    def train(self, out: Path, workers: int, *, save_every: int, is_short: bool) -> None:
        """Go on from the state in a directory, take the steps that are left, and write the model.

        Args:
            out: The directory.
            workers: Processes that make data.
            save_every: Steps between saved states.
            is_short: Whether to tell more often, of fewer documents.
        """
        out.mkdir(parents=True, exist_ok=True)
        state, documents = out / "state.pt", 4 if is_short else 40
        if state.exists():
            self.restore(state)
        stages = ", ".join(f"{one.steps:,} steps of {one.tokens:,} tokens" for one in self.plan)
        print(
            f"{self.model.num_parameters():,} parameters, {len(self.tokenizer):,} tokens in the "
            f"vocabulary, {stages}, from step {self.step:,}",
            flush=True,
        )
        start = since = time.monotonic()
        num_tokens = 0
        for losses in self.run(workers):
            num_tokens += stage_of(self.plan, self.step - 1).tokens
            if self.step % (10 if is_short else 100) == 0:
                loss_text = " ".join(f"{float(loss):.4f}" for loss in losses)
                if not all(math.isfinite(loss) for loss in losses):
                    raise SystemExit(
                        f"step {self.step}: the loss is {loss_text}; start again with another seed"
                    )
                speed = num_tokens / (time.monotonic() - since)
                print(f"step {self.step:6,}  loss {loss_text}  {speed:,.0f} tokens/s", flush=True)
                since, num_tokens = time.monotonic(), 0
            if self.step % save_every == 0 and self.step < self.steps:
                self.store(state)
                _tell(self.check(documents))
        self.store(state)
        _tell(self.check(documents))
        save(self.model, self.tokenizer, out)
        print(f"{out}: done in {time.monotonic() - start:,.0f} s", flush=True)

    def _learn(self, groups: list[Rows]) -> list[torch.Tensor]:
        stage = stage_of(self.plan, self.step)
        for options, full in zip(self._options(), self._rates, strict=True):
            options["lr"] = full * rate(self.step, self.steps)
        losses = []
        for rows, group in zip(groups, stage.groups, strict=True):
            on_gpu = self.device.type == "cuda"
            with torch.autocast(self.device.type, torch.bfloat16, enabled=on_gpu):
                loss = self._loss_of(self.model, self._placed(rows), self._digits)
            (loss * group.tokens / stage.tokens).backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for tool in self.tools:
            tool.step()
            tool.zero_grad(set_to_none=True)
        return losses

    def _options(self) -> list[dict[str, Any]]:
        # Read again each time, because restoring an optimizer replaces its options.
        return [options for tool in self.tools for options in tool.param_groups]

    def _placed(self, rows: Rows) -> Rows:
        tokens, weights, smooth = (tensor.to(self.device, non_blocking=True) for tensor in rows)
        return Rows(tokens.long(), weights, smooth)

    def store(self, file: Path) -> None:
        """Write all that is needed to go on, at once or not at all."""
        part = file.with_suffix(".part")
        state = {
            "model": self.model.state_dict(),
            "optimizers": [tool.state_dict() for tool in self.tools],
            "step": self.step,
            "run": [self.seed, self.steps],
        }
        torch.save(state, part)
        part.replace(file)

    def restore(self, file: Path) -> None:
        """Go on from what `store` has written."""
        state: dict[str, Any] = torch.load(file, map_location=self.device, weights_only=True)
        if state["run"] != [self.seed, self.steps]:
            raise click.UsageError(
                f"{file} belongs to a run with seed {state['run'][0]} and {state['run'][1]:,} "
                "steps; pass the same options, or choose another directory"
            )
        self.model.load_state_dict(state["model"])
        for tool, saved in zip(self.tools, state["optimizers"], strict=True):
            tool.load_state_dict(saved)
        self.step = state["step"]

    @torch.no_grad()
    def check(self, documents: int) -> dict[str, float]:
        """Return, by kind of document, how much of what is to be written is the most likely."""
        accuracies = {}
        for maker, _ in (pair for group in self.plan[-1].groups for pair in group.mixture):
            draw = random.Random(f"check {self.seed} {maker.__name__}")
            right = total = 0
            for _ in range(documents):
                encoded = encode(self.tokenizer, maker(draw))
                tokens = torch.tensor([encoded.ids[:CONTEXT]], device=self.device)
                learn = torch.tensor(encoded.weights[1:CONTEXT], device=self.device) > READ
                guess = self.model(input_ids=tokens[:, :-1], use_cache=False).logits[0].argmax(-1)
                right += int((guess == tokens[0, 1:])[learn].sum())
                total += int(learn.sum())
            accuracies[maker.__name__] = right / total
        return accuracies


@click.command()
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--tiny", is_flag=True, help="A very small model, for trying this on a CPU.")
@click.option("--steps", type=int, help="Of the main stage. Default: 6500, or 50 with --tiny.")
@click.option("--seed", default=1, show_default=True)
@click.option("--workers", type=int, help="Processes that make data. Default: cores less two.")
@click.option("--save-every", default=1000, show_default=True, help="Steps between saved states.")
@click.option(
    "--evaluate",
    "limit",
    default=40,
    show_default=True,
    help="Problems of each task to score at the end; 0 for none.",
)
def main(
    out: Path,
    tiny: bool,
    steps: int | None,
    seed: int,
    workers: int | None,
    save_every: int,
    limit: int,
) -> None:
    """Train a model, write it to OUT and score it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    plan = stages(steps, tiny=tiny)
    if workers is None:
        workers = 0 if tiny else max(1, (os.cpu_count() or 4) - 2)
    tokenizer = train_tokenizer(seed, 400 if tiny else 6000)
    training = Training(tokenizer, plan, seed=seed, size=TINY if tiny else DEMO)
    training.train(out, workers, save_every=save_every, is_short=tiny)
    if limit:
        evaluate(out, limit)


def _tell(accuracies: dict[str, float]) -> None:
    shares = "  ".join(f"{kind} {share:.3f}" for kind, share in accuracies.items())
    print(f"of the tokens to be written, right by greedy choice: {shares}", flush=True)


if __name__ == "__main__":
    main()
