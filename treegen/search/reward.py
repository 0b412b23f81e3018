"""Values from reward models and verifiers, computed in one batch for the nodes of many searches."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final

from treegen.common.checks import check_argument_types
from treegen.errors import InputError
from treegen.model.scorers.scorer import SEQUENCE
from treegen.model.scorers.verifier import Verifier
from treegen.search.evaluate import Evaluate
from treegen.search.external_calls import BatchedFunction
from treegen.search.strategies.common import check_counts
from treegen.search.tree.node import SearchNode
from treegen.search.verifier import MEMORY, load_verifier

Encoded = tuple[list[int], list[int]]
"""Token ids of a text, and the positions after which it is judged."""

# Smaller differences are noise that depends on the rest of the batch.
_DECIMALS: Final = 6


def whole_text(node: SearchNode) -> str:
    """Return the prompt and the text after it."""
    return prompt_text(node) + node.path_text


def prompt_text(node: SearchNode) -> str:
    """Return the prompt of a node's tree."""
    prompt = node.path[0].text
    if not prompt:
        raise InputError("the prompt was given as token ids; say what the model reads by text_of")
    return prompt


def path_text(node: SearchNode) -> str:
    """Return the text after the prompt."""
    return node.path_text


@check_argument_types
def by_verifier(
    verifier: Verifier,
    *,
    question_of: Callable[[SearchNode], str] = prompt_text,
    answer_of: Callable[[SearchNode], str] = path_text,
    name: str = "verifier",
    batch_size: int = 64,
) -> Evaluate:
    """Evaluate nodes by a verifier: the value is that of their steps so far, from 0 to 1.

    The evaluation raises InputError for a text that is too long for the model.

    Args:
        verifier: From `load_verifier`; its `reduce` says how values of steps become one.
        question_of: Returns the question that the verifier reads; by default the prompt.
        answer_of: Returns the answer that the verifier reads; by default the text after the prompt.
        name: Name under which the values are stored in `node.scores`.
        batch_size: Number of texts that is worth a call while other searches decode. Texts of all
            running searches are computed together.
    """

    def encode(node: SearchNode) -> Encoded:
        return verifier.encode(question_of(node), answer_of(node))

    return _evaluate(verifier, encode, name, batch_size)


@check_argument_types
def reward_model(
    name: str | os.PathLike[str],
    *,
    text_of: Callable[[SearchNode], str] = whole_text,
    label: int | None = None,
    device: str | None = None,
    batch_size: int = 64,
    revision: str | None = None,
    memory: int | str = MEMORY,
) -> Evaluate:
    """Load a sequence classifier of transformers and evaluate nodes by it.

    The evaluation raises InputError for a text that is too long for the model.

    Args:
        name: A checkpoint directory or a hub name; safetensors only.
        text_of: Returns the text that the model reads; by default the prompt and the text so far.
        label: Index of the output to take, by default the last, which for two labels is "right".
            The value is the sigmoid of a single output, or the softmax share of one among several.
        device: Device to compute on; by default a GPU if there is one.
        batch_size: As for `by_verifier`.
        revision: Revision of a hub name; by default the hub's default.
        memory: Size of the cache for prefixes that texts share, in bytes or as text such as "1GiB".

    Raises:
        InputError: An argument cannot be used.
        ModelError: The model cannot be loaded.
    """
    verifier = load_verifier(
        name, revision=revision, device=device, form=SEQUENCE, memory=memory, label=label
    )

    def encode(node: SearchNode) -> Encoded:
        ids = list(verifier.scorer.tokenizer(text_of(node))["input_ids"])
        return ids, [verifier.last(ids)]

    return _evaluate(verifier, encode, "reward", batch_size)


def _evaluate(
    verifier: Verifier, encode: Callable[[SearchNode], Encoded], name: str, batch_size: int
) -> Evaluate:
    check_counts(batch_size=batch_size)

    def compute(texts: list[Encoded]) -> list[float]:
        values = verifier.read([ids for ids, _ in texts], [ends for _, ends in texts])
        return [round(verifier.reduce_steps(each), _DECIMALS) for each in values]

    together = BatchedFunction(compute, size=batch_size)

    async def evaluate(nodes: Sequence[SearchNode]) -> list[float]:
        if not nodes:
            return []
        texts = [encode(node) for node in nodes]
        verifier.scorer.check_length([ids for ids, _ in texts])  # fails before joining a batch
        values = await together(nodes[0], texts)
        for node, value in zip(nodes, values, strict=True):
            node.scores[name] = value
        return values

    return evaluate
