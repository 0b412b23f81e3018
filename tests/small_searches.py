"""The demo model for tests that compare searches, settings of small trees, and a verifier."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from shallow_demo import shallow_demo
from tiny_models import config_of, save_drawn

from treegen import LLM
from treegen.model import config

SMALL: Final[Mapping[str, Mapping[str, Any]]] = {
    "sample": {},
    "best-of-n": {"num_samples": 4},
    "majority": {"num_samples": 6, "width": 3, "answer": "number"},
    "beam": {"width": 2, "expand": 2, "depth": 2, "step_tokens": 8},
    "dvts": {"width": 2, "expand": 2, "depth": 2, "step_tokens": 8},
    "rebase": {"width": 2, "expand": 2, "depth": 2, "step_tokens": 8, "choose": "vote"},
    "tot-bfs": {"width": 2, "expand": 2, "depth": 2, "step_tokens": 8},
    "tot-dfs": {"expand": 2, "depth": 30, "step_tokens": 8},
    "best-first": {"expand": 2, "step_tokens": 8},
    "mcts": {"expand": 2, "depth": 3, "iterations": 6, "batch": 2, "step_tokens": 8},
    "ab-mcts": {"depth": 3, "iterations": 6, "rule": "a", "step_tokens": 8},
    "rstar": {
        "expand": 2,
        "depth": 3,
        "iterations": 4,
        "checks": 2,
        "answer": "text",
        "step_tokens": 8,
    },
    "self-refine": {"rounds": 1, "chains": 2},
}
"""By method, the options of chats that shape a small tree, and those of the method's own."""


def exact_demo(chat_template: str | None = None, *, memory: str = "64MiB") -> LLM:
    """Return the shallow demo model in float64.

    In float32, a batch of another size may change the sixth digit of a log-probability, because it
    adds numbers in another order. That is enough to exchange two nodes of equal values. In float64,
    the difference is far below what float32 log-probabilities show, so trees are equal.

    Args:
        chat_template: The chat template; None for none.
        memory: Size of the cache.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(config.DTYPES, "float64", torch.float64)
        how: Any = {"device": "cpu", "memory": memory, "max_rows": 64, "check": False}
        llm = LLM(str(shallow_demo()), dtype="float64", **how)
    if chat_template is not None:
        llm.tokenizer.chat_template = chat_template
    return llm


def save_tiny_verifier(
    directory: Path, kind: Any, num_labels: int, chat_template: str | None = None
) -> Path:
    """Write a verifier with random weights and a tokenizer to a directory, and return it.

    Args:
        directory: The directory.
        kind: Class of the model, such as LlamaForSequenceClassification.
        num_labels: Number of its outputs.
        chat_template: The tokenizer's chat template; None for none.
    """
    model = kind(config_of("llama", max_position_embeddings=400, num_labels=num_labels))
    save_drawn(model, directory, chat_template=chat_template)
    return directory
