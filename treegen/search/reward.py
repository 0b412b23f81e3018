"""Values of reward models and verifiers, computed together for the nodes of many searches."""

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
"""Token ids of a text, and the places after which it is judged."""

# Shares that differ by less differ by what was computed beside them.
_DECIMALS: Final = 6


def whole_text(node: SearchNode) -> str:
    """The prompt and the text after it."""
    return prompt_text(node) + node.path_text


def prompt_text(node: SearchNode) -> str:
    """The prompt of a node's tree."""
    prompt = node.path[0].text
    if not prompt:
        raise InputError("the prompt was given as token ids; say what the model reads by text_of")
    return prompt


def path_text(node: SearchNode) -> str:
    """The text after the prompt."""
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
        question_of: What it reads; by default the prompt, and the text after it.
        answer_of: What it reads; by default the prompt, and the text after it.
        name: The values are noted under it in `node.scores`.
        batch_size: Texts that are worth a call while other searches decode. Those of all searches
            under way are computed together.
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
    """Evaluate nodes by a sequence classifier of transformers, which is loaded here.

    Raises InputError for arguments that cannot be used, ModelError for a model that cannot be
    loaded. The evaluation raises InputError for a text that is too long for the model.

    Args:
        name: A checkpoint directory or a hub name; safetensors only.
        text_of: Gives the text that the model reads; by default the prompt and the text so far.
        label: The output to take, by default the last, which for two labels is "right". The value
            is the sigmoid of the only output, or the softmax share of one among several.
        device: Where it computes; by default a GPU if there is one.
        batch_size: As for `by_verifier`.
        revision: Of a hub name.
        memory: Bytes of its cache, for what texts share.
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
        verifier.scorer.check_length([ids for ids, _ in texts])  # before others wait for it
        values = await together(nodes[0], texts)
        for node, value in zip(nodes, values, strict=True):
            node.scores[name] = value
        return values

    return evaluate
