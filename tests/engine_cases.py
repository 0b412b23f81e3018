"""What tests of engines share: an LLM of a tiny checkpoint, and the same model in transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import EXACT, HYBRID, known, save_tiny_model
from transformers import AutoConfig

from treegen import LLM, Completion, Node
from treegen.model.checkpoint.text_part import auto_class

FEW_SHOT = "Q: Ann has 3 apples.\nA: The answer is 3.\n\n" * 2
QUESTIONS = ["Q: Bob has 14 pens and 2 caps. How many?\nA:", "Q: Cy?\nA:", "Q: How many?\nA:"]


def load(path: Path, **options: Any) -> LLM:
    """Load a checkpoint with a small cache, unchecked, on the CPU."""
    return LLM(str(path), **{"check": False, "device": "cpu", "memory": "8MiB", **options})


def tree_of(samples: int, few_shot: str = FEW_SHOT) -> Node:
    """The questions below an example, with their numbers as ids."""
    leaves = [Node(text, samples=samples, id=str(i)) for i, text in enumerate(QUESTIONS)]
    return Node(few_shot, children=leaves)


def tokens_of(completions: Iterable[Completion]) -> dict[tuple[str, int], tuple[int, ...]]:
    """The tokens of samples, by prompt and index."""
    return {(c.prompt_id, c.sample_index): c.tokens for c in completions}


@functools.cache
def stock_of(path: Path) -> Any:
    """The model in transformers, which generates beyond the end of the text."""
    config = AutoConfig.from_pretrained(path)
    stock = auto_class(config).from_pretrained(path, attn_implementation="eager")
    stock.generation_config.eos_token_id = None
    return stock


def generate_greedily(
    stock: Any, ids: list[int], num_tokens: int
) -> tuple[tuple[int, ...], list[float]]:
    """Greedy tokens after a prompt by transformers with its own cache, and their logprobs."""
    out = stock.generate(
        torch.tensor([ids]),
        do_sample=False,
        max_new_tokens=num_tokens,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = tuple(out.sequences[0, len(ids) :].tolist())
    rows = torch.cat(out.logits).log_softmax(-1)
    return tokens, [float(row[token]) for row, token in zip(rows, tokens, strict=True)]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Saves a tiny model of a family, once for each seed of its weights."""

    @functools.cache
    def save(family: str, seed: int = 1) -> Path:
        model_type, _ = (EXACT | HYBRID)[family]
        if not known(model_type):
            pytest.skip(f"this transformers has no {model_type}")
        return save_tiny_model(tmp_path_factory.mktemp(family), family, seed=seed)

    return save
