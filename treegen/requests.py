"""From what a user declares to the requests of a plan: token ids, rows and limits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from treegen.cost import COSTS, Sharing
from treegen.errors import CapacityError, InputError
from treegen.expansion import bound_levels
from treegen.params import SamplingParams
from treegen.plan import Plan, Request, compile_plan
from treegen.tokens import TokenPrompt, encode_texts, tokenize
from treegen.tree import Node, expansions_of

if TYPE_CHECKING:
    from treegen.model_spec import ModelSpec

ScoreInput = str | Sequence[int]


def sample_requests(
    tree: Node, tokenizer: Any, params: SamplingParams, spec: ModelSpec
) -> list[Request]:
    """One request per sampled node of a tree, in declared order.

    Raises CapacityError for a prompt that leaves no room for a token in the model's context.
    """
    return [_request(prompt, prompt.samples, params, spec) for prompt in tokenize(tree, tokenizer)]


def expand_requests(
    tree: Node, tokenizer: Any, params: SamplingParams, spec: ModelSpec
) -> list[Request]:
    """One request per node of a tree that levels are generated below, in declared order.

    It has as many samples as the largest of its levels has rows at most.
    """
    paths = []
    for expansion in expansions_of(tree):
        prompt = Node(expansion.path[-1].content, samples=1, id=expansion.id)
        for above in expansion.path[-2::-1]:
            prompt = Node(above.content, children=[prompt], samples=0)
        rows = max(bound.rows for bound in bound_levels(expansion.levels, params))
        paths.append((prompt, rows))
    prompts = tokenize(Node("", children=[path for path, _ in paths], samples=0), tokenizer)
    return [
        _request(prompt, rows, params, spec)
        for prompt, (_, rows) in zip(prompts, paths, strict=True)
    ]


def _request(prompt: TokenPrompt, samples: int, params: SamplingParams, spec: ModelSpec) -> Request:
    check_vocabulary(prompt.id, prompt.tokens, spec)
    room = spec.context_length - len(prompt.tokens)
    if room < 1:
        raise CapacityError(
            f"prompt {prompt.id!r} has {len(prompt.tokens):,} tokens, "
            f"{1 - room:,} too many for the model's context of {spec.context_length:,} "
            "and one generated token; shorten it or use fewer shots"
        )
    return Request(
        id=prompt.id,
        tokens=prompt.tokens,
        samples=samples,
        rows=min(samples, 1) if params.temperature == 0 else samples,
        max_tokens=min(params.max_tokens, room),
    )


def check_vocabulary(name: str, tokens: np.ndarray[Any, Any], spec: ModelSpec) -> None:
    """Raise InputError for a token id that the model does not have."""
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < spec.vocab_size:
        worst = int(tokens.max()) if int(tokens.min()) >= 0 else int(tokens.min())
        raise InputError(
            f"prompt {name!r} has token id {worst}, but the model's ids are 0 to "
            f"{spec.vocab_size - 1}; use the model's own tokenizer"
        )


def score_requests(
    pairs: Sequence[tuple[ScoreInput, ScoreInput]], tokenizer: Any, spec: ModelSpec
) -> list[Request]:
    """One request per (context, continuation) pair, both text or both token ids.

    Text is tokenised jointly; the continuation starts where its tokens part from the context's
    own, so a token that spans the boundary belongs to the continuation.
    """
    texts: list[str] = []
    for index, (context, continuation) in enumerate(pairs):
        if isinstance(context, str) != isinstance(continuation, str):
            raise InputError(f"pair {index}: give context and continuation both as text or as ids")
        if isinstance(context, str) and isinstance(continuation, str):
            texts += [context, context + continuation]
    encoded = iter(encode_texts(texts, tokenizer))
    requests = []
    for index, (context, continuation) in enumerate(pairs):
        if isinstance(context, str):
            before, whole = next(encoded), next(encoded)
            shared = min(len(before), len(whole))
            different = before[:shared] != whole[:shared]
            start = int(different.argmax()) if different.any() else shared
        else:
            start = len(context)
            whole = np.array([*context, *continuation], dtype=np.int32)
        name = f"pair {index}"
        check_vocabulary(name, whole, spec)
        if start == 0 or start == len(whole):
            what = "context" if start == 0 else "continuation"
            raise InputError(f"{name}: the {what} has no token of its own; give it at least one")
        if len(whole) > spec.context_length:
            raise CapacityError(
                f"{name} has {len(whole):,} tokens, {len(whole) - spec.context_length:,} more "
                f"than the model's context of {spec.context_length:,}; shorten it"
            )
        requests.append(Request(name, whole, samples=0, rows=0, max_tokens=1, score_from=start))
    return requests


def plan_requests(
    requests: Sequence[Request],
    spec: ModelSpec,
    *,
    device_type: str,
    sharing: Sharing,
    max_rows: int | None = None,
    split_at: Collection[Any] = (),
) -> Plan:
    """The plan of some requests for a model on a kind of device."""
    return compile_plan(
        requests,
        token_bytes=spec.kv_bytes_per_token,
        num_layers=len(spec.layers),
        sharing=sharing,
        cost=COSTS["cpu" if device_type == "cpu" else "cuda"],
        max_rows=max_rows,
        split_at=list(split_at),
    )
