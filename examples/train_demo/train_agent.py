"""Train the small model that calls tools: `python -m train_demo.train_agent OUT`, in examples/.

OUT becomes a transformers checkpoint with a chat template, as train.py writes one without.
"""

import os
import random
from pathlib import Path

import click

from train_demo.batches import Group, Stage
from train_demo.documents import draw_document
from train_demo.episodes import EPISODES, SHORT_EPISODES, TEMPLATE
from train_demo.model import AGENT, TINY
from train_demo.tokenizer import EOS, train_agent_tokenizer
from train_demo.train import Training


def draw_text(draw: random.Random) -> str:
    """Draw the text of an episode, without the ends of replies."""
    return "".join(part.text for part in draw_document(draw, EPISODES)).replace(EOS, "")


def stages(steps: int | None, *, tiny: bool) -> tuple[Stage, ...]:
    """Return how training goes: at first only short episodes, then all."""
    if tiny:
        return Stage(5, (Group(SHORT_EPISODES, 2, 256),)), Stage(
            steps or 15, (Group(EPISODES, 1, 512),)
        )
    return Stage(600, (Group(SHORT_EPISODES, 8, 192),)), Stage(
        steps or 900, (Group(EPISODES, 4, 512),)
    )


@click.command()
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--tiny", is_flag=True, help="A smaller model and few steps, which learn little.")
@click.option("--steps", type=int, help="Of the main stage. Default: 900, or 15 with --tiny.")
@click.option("--seed", default=1, show_default=True)
@click.option("--save-every", default=500, show_default=True, help="Steps between saved states.")
def main(out: Path, tiny: bool, steps: int | None, seed: int, save_every: int) -> None:
    """Train a model that calls tools, and write it to OUT."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = train_agent_tokenizer(draw_text, seed, 200 if tiny else 2000)
    tokenizer.chat_template = TEMPLATE
    size = TINY if tiny else AGENT
    training = Training(tokenizer, stages(steps, tiny=tiny), seed=seed, size=size)
    training.train(out, 0, save_every=save_every, is_short=tiny)


if __name__ == "__main__":
    main()
