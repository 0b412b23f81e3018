"""Scores of a reward model or verifier: a transformers sequence classifier."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from treegen.errors import InputError
from treegen.model.verifier import SEQUENCE, load_scorer, probabilities
from treegen.search.evaluate import Evaluate
from treegen.search.node import SearchNode
from treegen.search.strategies.common import check_counts


def whole_text(node: SearchNode) -> str:
    """The prompt and the text after it."""
    prompt = node.path[0].text
    if not prompt:
        raise InputError("the prompt was given as token ids; say what the model reads by text_of")
    return prompt + node.path_text


def reward_model(
    name: str | os.PathLike[str],
    *,
    text_of: Callable[[SearchNode], str] = whole_text,
    label: int | None = None,
    device: str | None = None,
    batch_size: int = 16,
    revision: str | None = None,
) -> Evaluate:
    """Evaluate nodes by a sequence classifier of transformers, which is loaded here.

    name: a checkpoint directory or a hub name; safetensors only.
    text_of: gives the text that the model reads; by default the prompt and the text so far.
    label: the output to take, by default the last, which for two labels is "right". The value is
    the sigmoid of the only output, or the softmax share of one among several.
    device: where it computes; by default a GPU if there is one.
    batch_size: texts to compute at once.
    revision: of a hub name.

    Each call is computed by itself, so that a search does not depend on the searches beside it.

    Raises InputError for arguments that cannot be used, ModelError for a model that cannot be
    loaded. The evaluation raises InputError for a text that is too long for the model.
    """
    check_counts(batch_size=batch_size)
    scorer = load_scorer(name, revision=revision, device=device, form=SEQUENCE)
    num_labels = int(scorer.model.config.num_labels)
    if label is not None and not 0 <= label < num_labels:
        raise InputError(f"label must be less than {num_labels}, got {label}")
    column = num_labels - 1 if label is None else label

    async def evaluate(nodes: Sequence[SearchNode]) -> list[float]:
        rows = scorer.tokenizer([text_of(node) for node in nodes])["input_ids"]
        values = [0.0] * len(nodes)
        for places in scorer.batches(rows, batch_size):
            scores = probabilities(scorer.logits([rows[place] for place in places]))
            for place, value in zip(places, scores[:, column].tolist(), strict=True):
                values[place] = value
        return values

    return evaluate
