"""Build the requests of a plan from user prompts: token ids, rows and limits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from treegen.common.params import SamplingParams
from treegen.errors import CapacityError, ContextError, InputError, arg
from treegen.prompts.bos_eos import warn_of_unended_turns
from treegen.prompts.expansion import bound_levels
from treegen.prompts.images.table import ImageTable
from treegen.prompts.plan.compile import compile_plan
from treegen.prompts.plan.cost_model import Sharing, cost_of
from treegen.prompts.plan.draws import hash_prompt
from treegen.prompts.plan.plan import Plan, Request
from treegen.prompts.radix import Tokens
from treegen.prompts.tokens import TokenPrompt, encode_texts, find_too_long_prompt, tokenize
from treegen.prompts.tree import (
    MAX_TOKEN_ID,
    Message,
    Node,
    expansions_of,
    name_prompt,
)

if TYPE_CHECKING:
    from treegen.common.spec import ModelSpec

ScoreInput = str | Sequence[int]
ScoreContext = ScoreInput | Sequence[Message]
"""The context of a continuation to score."""
_MAX_SAMPLES: Final = 10**8  # of a run, because memory holds a number for each sample


def build_sample_requests(
    tree: Node,
    tokenizer: Any,
    params: SamplingParams | Sequence[SamplingParams],
    spec: ModelSpec,
    images: ImageTable | None = None,
) -> list[Request]:
    """Return one request for each sampled node of a tree, in declared order.

    Args:
        tree: The root of the prompt tree.
        tokenizer: The model's tokenizer.
        params: The sampling parameters of all nodes, or one for each node.
        spec: The model's sizes and limits.
        images: The model's images; None if it takes none.

    Raises:
        TreeError: the tree has no samples, or generates levels.
        InputError: a prompt has no tokens, or tokens that the model does not have, or the number of
            params differs from the number of sampled nodes.
        CapacityError: a prompt leaves no room for a token in the model's context, or there are more
            than 100 million samples.
    """
    check_length(tree, tokenizer, spec, images)
    prompts = tokenize(tree, tokenizer, images)
    return requests_of_prompts(prompts, tokenizer, params, spec, images)


def requests_of_prompts(
    prompts: Sequence[TokenPrompt],
    tokenizer: Any,
    params: SamplingParams | Sequence[SamplingParams],
    spec: ModelSpec,
    images: ImageTable | None = None,
) -> list[Request]:
    """Return one request for each prompt; see `build_sample_requests`.

    Args:
        prompts: The tokenized prompts.
        tokenizer: The tokenizer that made their tokens.
        params: The sampling parameters of all prompts, or one for each.
        spec: The model's sizes and limits.
        images: The model's images; None if it takes none.
    """
    all_params = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    if len(all_params) != len(prompts):
        raise InputError(
            f"got {len(all_params)} sampling parameters for {len(prompts)} sampled nodes; pass one "
            "for each sampled node"
        )
    if any(prompt.node.has_messages for prompt in prompts):
        warn_of_unended_turns(tokenizer, spec.eos_token_ids, all_params)
    total = sum(prompt.samples for prompt in prompts)
    if total > _MAX_SAMPLES:
        raise CapacityError(
            f"one run can have at most {_MAX_SAMPLES:,} samples, got {total:,}; request fewer "
            "samples, or use several runs with different seeds"
        )
    return [
        _request(prompt, prompt_params, spec, images, num_prompts=len(prompts))
        for prompt, prompt_params in zip(prompts, all_params, strict=True)
    ]


def build_flat_requests(
    contents: Sequence[str | Sequence[int] | Sequence[Message]],
    params: Sequence[SamplingParams],
    tokenizer: Any,
    spec: ModelSpec,
    template: Mapping[str, Any],
    images: ImageTable | None = None,
) -> list[Request]:
    """Return one request per flat prompt, named by its index and seeded by its token ids.

    Args:
        contents: Each prompt's text, token ids or chat messages.
        params: The sampling parameters of each prompt.
        tokenizer: The model's tokenizer.
        spec: The model's sizes and limits.
        template: Arguments of the chat template.
        images: The model's images; None if it takes none.

    Raises:
        InputError: a prompt has no tokens, or tokens that the model does not have.
        CapacityError: a prompt leaves no room for a token in the model's context.
    """
    leaves = [
        Node(content, samples=prompt_params.n, id=str(i), template=template)
        for i, (content, prompt_params) in enumerate(zip(contents, params, strict=True))
    ]
    tree = Node("", children=leaves, samples=0)
    return [
        replace(request, origin=hash_prompt(request.tokens))
        for request in build_sample_requests(tree, tokenizer, params, spec, images)
    ]


def expand_requests(
    tree: Node,
    tokenizer: Any,
    params: SamplingParams,
    spec: ModelSpec,
    images: ImageTable | None = None,
) -> list[Request]:
    """Return one request for each node of a tree that generates levels, in declared order.

    A request has as many samples as the largest of its levels can have rows.

    Args:
        tree: The root of the prompt tree.
        tokenizer: The model's tokenizer.
        params: The sampling parameters of the run; levels may override some.
        spec: The model's sizes and limits.
        images: The model's images; None if it takes none.

    Raises:
        TreeError: the tree generates no levels, or has samples too.
        InputError: a prompt has no tokens, or tokens that the model does not have.
        CapacityError: a prompt leaves no room for a token in the model's context.
    """
    prompts = []
    for expansion in expansions_of(tree):
        *path, last = expansion.path
        rows = max(bound.rows for bound in bound_levels(expansion.node.expand, params))
        prompt = Node(last.content, samples=rows, id=expansion.id, template=last.template)
        for above in reversed(path):
            prompt = Node(above.content, children=[prompt], samples=0, template=above.template)
        prompts.append(prompt)
    root = Node("", children=prompts, samples=0)
    return build_sample_requests(root, tokenizer, params, spec, images)


def check_length(
    tree: Node,
    tokenizer: Any,
    spec: ModelSpec,
    images: ImageTable | None = None,
    *,
    generates: bool = True,
) -> None:
    """Reject prompts whose number of characters alone shows that they do not fit; encodes nothing.

    Args:
        tree: The root of the prompt tree.
        tokenizer: The model's tokenizer.
        spec: The model's sizes and limits.
        images: The model's images; None if it takes none.
        generates: Whether at least one token will be drawn after the prompt. Default: True.

    Raises:
        TreeError: the tree has no samples, or generates levels.
        ContextError: a prompt is too long for the model's context.
    """
    if too_long := find_too_long_prompt(tree, tokenizer, spec.context_length - generates, images):
        prompt, num_tokens = too_long
        raise _too_long(prompt.name, num_tokens, spec, qualifier="at least ", generates=generates)


def _too_long(
    name: str, num_tokens: int, spec: ModelSpec, *, qualifier: str = "", generates: bool = True
) -> ContextError:
    return ContextError(
        f"{name} has {qualifier}{num_tokens:,} tokens, "
        f"{num_tokens + generates - spec.context_length:,} more than fit into the model's context "
        f"of {spec.context_length:,}{(' with one generated token' if generates else '')}; shorten "
        "the prompt"
    )


def _request(
    prompt: TokenPrompt,
    params: SamplingParams,
    spec: ModelSpec,
    images: ImageTable | None,
    *,
    num_prompts: int,
) -> Request:
    check_vocabulary(prompt.id, prompt.tokens, spec, images)
    if params.prompt_logprobs is not None and images and images.has_images(prompt.tokens):
        raise InputError(
            f"{arg('prompt_logprobs')} cannot be used together with images, but prompt "
            f"{prompt.id!r} has an image; remove the argument or the image"
        )
    room = spec.context_length - len(prompt.tokens)
    if room < 1:
        raise _too_long(name_prompt(prompt.id, num_prompts), len(prompt.tokens), spec)
    return Request(
        id=prompt.id,
        tokens=prompt.tokens,
        samples=prompt.samples,
        rows=min(prompt.samples, 1) if params.temperature == 0 else prompt.samples,
        max_tokens=min(params.max_tokens, room),
        origin=hash_prompt(prompt.tokens) if prompt.node.id is None else None,
        score_from=1 if params.prompt_logprobs is not None and len(prompt.tokens) > 1 else None,
        top=params.prompt_logprobs or 0,
        images=prompt.images,
    )


def check_vocabulary(
    name: str, tokens: np.ndarray[Any, Any], spec: ModelSpec, images: ImageTable | None = None
) -> None:
    """Check the token ids of a prompt.

    Args:
        name: The prompt's name in error messages.
        tokens: The token ids, `[tokens]`.
        spec: The model's sizes and limits.
        images: The images whose ids may be among the tokens; None if there are none.

    Raises:
        InputError: the model does not have one of the ids, or it needs whole, separated images and
            the prompt has part of an image or adjacent images.
    """
    if images is not None:
        with suppress(KeyError):
            if images.blocks is not None:
                images.blocks.check(name, tokens)
            tokens = images.restore_placeholders(tokens)
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < spec.vocab_size:
        worst = int(tokens.max()) if int(tokens.min()) >= 0 else int(tokens.min())
        raise InputError(
            f"prompt {name!r} has the token id {worst}, but the token ids of the model are 0 to "
            f"{spec.vocab_size - 1}; use the tokenizer of the model"
        )


def as_token_ids(name: str, ids: Sequence[int]) -> Tokens:
    """Return the user's token ids as an array.

    Args:
        name: Their name in error messages.
        ids: The token ids.

    Raises:
        InputError: they are not a list of integers, or out of range.
    """
    try:
        array = np.asarray(ids)
    except (TypeError, ValueError):  # lists of different lengths, or a tensor on a GPU
        array = np.empty((0, 0))
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise InputError(f"{name} must be a list of token ids (integers)")
    if len(array) and not 0 <= int(array.min()) <= int(array.max()) <= MAX_TOKEN_ID:
        raise InputError(
            f"{name} has token ids outside 0 to {MAX_TOKEN_ID:,}; use the model's token ids"
        )
    return array.astype(np.int32)


def build_score_requests(
    pairs: Sequence[tuple[ScoreContext, ScoreInput]],
    tokenizer: Any,
    spec: ModelSpec,
    images: ImageTable | None = None,
    *,
    top: int = 0,
) -> list[Request]:
    """Return one request for each (context, continuation) pair, both text or both token ids.

    A context may also be chat messages. Its continuation is a text that begins the assistant's
    turn, or that continues the last message if that is the assistant's.

    The text of a pair is tokenized jointly. The continuation starts at the first token that differs
    from the tokens of the context alone, so a token across the boundary belongs to the
    continuation. A context without tokens gets the BOS token, or else the EOS token.

    Args:
        pairs: The (context, continuation) pairs.
        tokenizer: The model's tokenizer.
        spec: The model's sizes and limits.
        images: The model's images; None if it takes none.
        top: How many most likely tokens to report at each position. Default: 0.

    Raises:
        InputError: a pair is not two texts or two lists of token ids, a continuation has no token
            or has an image, or an empty context has no token to replace it.
        TreeError: chat messages are malformed.
        CapacityError: a pair does not fit the model's context.
    """
    texts: list[str] = []
    chats: list[Node] = []
    for index, pair in enumerate(pairs):
        is_pair = isinstance(pair, Sequence) and not isinstance(pair, str | bytes)
        if not is_pair or len(pair) != 2:
            raise InputError(f"pair {index} must be (context, continuation), got {pair!r:.80}")
        context, continuation = pair
        if isinstance(continuation, str) and (chat := _get_messages(context)) is not None:
            chats.append(Node(chat, samples=1))  # checks the messages before one is extended
            chats.append(Node(_append_reply(chat, continuation), samples=1))
            continue
        if isinstance(context, str) != isinstance(continuation, str):
            raise InputError(
                f"pair {index}: pass the context and the continuation both as text or both as "
                "token ids"
            )
        if isinstance(context, str) and isinstance(continuation, str):
            texts += [context, context + continuation]
    encoded = iter(encode_texts(texts, tokenizer))
    chat_tree = Node("", children=chats, samples=0)
    rendered = iter(tokenize(chat_tree, tokenizer, images) if chats else ())
    requests = []
    for index, (context, continuation) in enumerate(pairs):
        name = f"pair {index}"
        is_chat = isinstance(continuation, str) and _get_messages(context) is not None
        if isinstance(context, str) or is_chat:
            if is_chat:
                before, sequence = next(rendered).tokens, next(rendered).tokens
            else:
                before, sequence = next(encoded), next(encoded)
            shared = min(len(before), len(sequence))
            different = before[:shared] != sequence[:shared]
            start = int(different.argmax()) if different.any() else shared
        else:
            parts = [as_token_ids(name, ids) for ids in (context, continuation)]  # type: ignore[arg-type]
            start, sequence = len(parts[0]), np.concatenate(parts)
        if start == len(sequence):
            raise InputError(
                f"{name}: the continuation adds no token to the context; pass a continuation "
                "with at least one token"
            )
        if start == 0:
            sequence, start = np.concatenate([_get_empty_context(name, tokenizer), sequence]), 1
        check_vocabulary(name, sequence, spec, images)
        if images is not None and images.has_images(sequence[start:]):
            raise InputError(f"{name}: the continuation contains an image, which cannot be scored")
        check_scored(name, len(sequence), spec)
        requests.append(Request(name, sequence, 0, 0, max_tokens=1, score_from=start, top=top))
    return requests


def _get_messages(context: Any) -> Sequence[Message] | None:
    """Return the messages of a context; None if it has none."""
    is_list = isinstance(context, Sequence) and not isinstance(context, str)
    return context if is_list and context and isinstance(context[0], Mapping) else None


def _append_reply(messages: Sequence[Message], text: str) -> list[Message]:
    """Return messages followed by a text of the assistant's."""
    *above, last = messages
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return [*messages, {"role": "assistant", "content": text}]
    content = last.get("content")
    if isinstance(content, list | tuple):
        return [*above, {**last, "content": [*content, {"type": "text", "text": text}]}]
    return [*above, {**last, "content": f"{content}{text}"}]


def check_scored(name: str, num_tokens: int, spec: ModelSpec) -> None:
    """Check the number of tokens to score; the last token is not an input of the model.

    Args:
        name: The text's name in error messages.
        num_tokens: Tokens of the context and the continuation.
        spec: The model's sizes and limits.

    Raises:
        CapacityError: there are more tokens than the model's context plus one.
    """
    if num_tokens > spec.context_length + 1:
        raise CapacityError(
            f"{name} has {num_tokens:,} tokens, {num_tokens - spec.context_length - 1:,} more than "
            f"the maximum of {spec.context_length + 1:,} (the model's context and one more token); "
            "shorten the text"
        )


def _get_empty_context(name: str, tokenizer: Any) -> Tokens:
    """Return the token that replaces an empty context.

    Raises:
        InputError: the tokenizer has neither a BOS nor an EOS token.
    """
    for kind in ("bos_token_id", "eos_token_id"):
        token = getattr(tokenizer, kind, None)
        if token is not None:
            return np.array([token], dtype=np.int32)
    raise InputError(
        f"{name}: the context has no tokens, and the tokenizer has no BOS or EOS token; pass a "
        "context with at least one token"
    )


def plan_requests(
    requests: Sequence[Request],
    spec: ModelSpec,
    *,
    device_type: str,
    sharing: Sharing,
    max_rows: int | None = None,
    split_at: Collection[Any] = (),
    align: int = 1,
) -> Plan:
    """Return the plan of some requests for a model on a type of device; see `compile_plan`.

    Args:
        requests: The requests.
        spec: The model's sizes and limits.
        device_type: Type of the device, such as "cpu"; it chooses the cost model.
        sharing: Which segments get an attention level of their own.
        max_rows: Maximum rows decoded at once. Default: all rows.
        split_at: Further token sequences at whose ends segments are split.
        align: Attention parts begin at multiples of this many positions.

    Raises:
        InputError: `sharing` is not one of `SHARING`.
    """
    return compile_plan(
        requests,
        token_bytes=spec.kv_bytes_per_token,
        num_layers=len(spec.layers),
        sharing=sharing,
        cost=cost_of(device_type, max((layer.kv_heads for layer in spec.layers), default=1)),
        max_rows=max_rows,
        split_at=list(split_at),
        align=align,
        spec=spec,
    )
