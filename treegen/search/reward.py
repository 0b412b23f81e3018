"""Verifiers and reward models for searches.

`load_verifier` adds a prefix cache where treegen can compute the model. Values are computed in one
batch for the nodes of many searches.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from treegen.common.checks import check_argument_types, check_counts
from treegen.errors import CapacityError, InputError, ModelError, ModelWarning, TreegenError
from treegen.model.scorers.scorer import CAUSAL, SEQUENCE, Scorer, load_scorer
from treegen.model.scorers.verifier import BATCH_SIZE, Verifier
from treegen.search.evaluate import Evaluate
from treegen.search.external_calls import BatchedFunction
from treegen.search.tree.node import SearchNode

if TYPE_CHECKING:
    import torch

    from treegen.search.live.prefix_scorer import PrefixScorer

MEMORY: Final = "1GiB"
_NUM_CHECK_TOKENS: Final = 24  # of the text on which treegen compares a model with its own class

# The prefix scorers in use, by their settings, so that equal settings share one.
_prefix_scorers: WeakValueDictionary[tuple[Any, ...], PrefixScorer] = WeakValueDictionary()


def load_verifier(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    device: str | torch.device | None = None,
    form: str | None = None,
    share: bool = True,
    memory: int | str = MEMORY,
    **settings: Any,
) -> Verifier:
    """Load a verifier with a prefix cache, so that text which nodes share is computed once.

    Args:
        name: A checkpoint directory or a hub name; safetensors only.
        revision: Revision of a hub name; by default the hub's default.
        device: Device to compute on; by default a GPU if there is one.
        form: "SequenceClassification", "TokenClassification" or "CausalLM"; by default what
            config.json says.
        share: Whether to compute shared prefixes of texts once. If treegen cannot compute the
            model, such as an encoder, the model reads each text whole, with a warning.
        memory: Size of the cache, in bytes or as text such as "1GiB".
        **settings: Settings of `Verifier`.

    Raises:
        InputError: Settings cannot be used.
        ModelError: The model cannot be loaded, or gives no judgements.
        CapacityError: The cache is too small, or larger than the memory.
    """
    where: dict[str, Any] = {"revision": revision, "device": device, "form": form}
    if not share:
        return Verifier(scorer=load_scorer(name, **where), **settings)
    from treegen.common.formatting import summarize_error
    from treegen.model.checkpoint.files import check_weights, fingerprint, locate
    from treegen.model.config import resolve_device

    resolve_device("auto" if device is None else device)  # raises before files are read
    directory = locate(name, revision, weights=True)
    check_weights(directory)
    output_settings = (settings.get(setting) for setting in ("label", "tokens"))
    identity = directory, fingerprint(directory)  # a checkpoint may have been overwritten
    key = tuple(map(str, (*identity, *where.values(), memory, *output_settings)))
    reader = _prefix_scorers.get(key)
    if reader is not None:
        return Verifier(scorer=reader.scorer, reader=reader, **settings)
    verifier = Verifier(scorer=load_scorer(name, separate=True, **where), **settings)
    try:
        reader = _prefix_scorers[key] = _make_prefix_scorer(verifier, os.fspath(name), memory)
        return replace(verifier, reader=reader)
    except CapacityError:
        raise
    except (TreegenError, RuntimeError) as error:
        reason = summarize_error(error)
    del verifier  # its layers may already use treegen's attention, and two models may not fit
    warnings.warn(
        f"{os.fspath(name)} computes every text from its start, because treegen cannot share the "
        f"computation of common prefixes: {reason}",
        ModelWarning,
        stacklevel=2,
    )
    return Verifier(scorer=load_scorer(name, **where), **settings)


def _make_prefix_scorer(verifier: Verifier, name: str, memory: int | str) -> PrefixScorer:
    """Return the prefix scorer of a verifier, checked against the model's own class."""
    from treegen.model.load_check import TOLERANCE
    from treegen.model.scorers.heads import as_tree_model, head_of, slice_head
    from treegen.search.live.prefix_scorer import PrefixScorer

    scorer = verifier.scorer
    module, column = scorer.model, 0
    if scorer.form == CAUSAL:
        head: Any = slice_head(module.get_output_embeddings(), verifier.token_ids())
    else:
        head, column = head_of(module), verifier.column
    row = _pick_ordinary_tokens(scorer)
    parts = [row[: len(row) // 2], row]
    expected = [verifier.read([part], [[len(part) - 1]])[0][0] for part in parts]
    model = as_tree_model(module, head, column, name)
    reader = PrefixScorer(model, scorer, memory=memory)
    limit = TOLERANCE[model.dtype]
    # The second text continues the first, so this also checks the cache.
    computed = [reader.score_prefixes([part], [[len(part) - 1]])[0][0] for part in parts]
    if not all(abs(a - b) <= limit for a, b in zip(computed, expected, strict=True)):
        mismatch = (
            f"{name} computes the scores {computed} for test texts, but the class of the "
            f"checkpoint computes {expected}"
        )
        raise ModelError(f"{mismatch}; use dtype float32, or another verifier")
    return reader


def _pick_ordinary_tokens(scorer: Scorer) -> list[int]:
    """Return a fixed list of ordinary (not special) token ids."""
    special = set(scorer.tokenizer.all_special_ids)
    plain = [token for token in range(min(len(scorer.tokenizer), 5000)) if token not in special]
    length = min(_NUM_CHECK_TOKENS, scorer.length or _NUM_CHECK_TOKENS)
    return random.Random(0).choices(plain, k=length)


Encoded = tuple[list[int], list[int]]
"""Token ids of a text, and the positions after which it is judged."""

# Smaller differences are noise that depends on the rest of the batch.
_DECIMALS: Final = 6


def compute_values(verifier: Verifier, texts: Sequence[Encoded]) -> list[float]:
    """Return the value of each encoded text; see `by_verifier`."""
    values = verifier.read([ids for ids, _ in texts], [ends for _, ends in texts])
    return [round(verifier.reduce_steps(step_values), _DECIMALS) for step_values in values]


def whole_text(node: SearchNode) -> str:
    """Return the prompt and the text after it."""
    return prompt_text(node) + node.path_text


def prompt_text(node: SearchNode) -> str:
    """Return the prompt of a node's tree."""
    prompt = node.path[0].text
    if not prompt:
        raise InputError(
            "the prompt was passed as token ids; pass a function that returns the text of the "
            "prompt (question_of or text_of)"
        )
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
    """Evaluate each node by a verifier: its value judges the steps so far, from 0 to 1.

    The evaluation raises InputError for a text that is too long for the model.

    Args:
        verifier: From `load_verifier`; its `reduce` combines the values of the steps.
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
        batch_size: As for `by_verifier`. A model that reads each text whole computes at most 16
            texts at once, or this number if it is lower.
        revision: Revision of a hub name; by default the hub's default.
        memory: Size of the cache for prefixes that texts share, in bytes or as text such as "1GiB".

    Raises:
        InputError: An argument cannot be used.
        ModelError: The model cannot be loaded.
    """
    verifier = load_verifier(
        name,
        revision=revision,
        device=device,
        form=SEQUENCE,
        memory=memory,
        label=label,
        batch_size=min(batch_size, BATCH_SIZE),
    )

    def encode(node: SearchNode) -> Encoded:
        ids = list(verifier.scorer.tokenizer(text_of(node))["input_ids"])
        return ids, [verifier.last(ids)]

    return _evaluate(verifier, encode, "reward", batch_size)


def _evaluate(
    verifier: Verifier, encode: Callable[[SearchNode], Encoded], name: str, batch_size: int
) -> Evaluate:
    check_counts(batch_size=batch_size)

    batched = BatchedFunction(partial(compute_values, verifier), size=batch_size)

    async def evaluate(nodes: Sequence[SearchNode]) -> list[float]:
        if not nodes:
            return []
        texts = [encode(node) for node in nodes]
        verifier.scorer.check_length([ids for ids, _ in texts])  # fails before joining a batch
        values = await batched(nodes[0], texts)
        for node, value in zip(nodes, values, strict=True):
            node.scores[name] = value
        return values

    return evaluate
