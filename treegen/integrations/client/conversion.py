"""Converts prompts, samples and scores between Python and the JSON of OpenAI's protocol."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from treegen.common.outputs import Completion, RequestOutput, Score, TopLogprobs
from treegen.common.params import SamplingParams
from treegen.errors import InputError
from treegen.integrations.nodes.conversion import encode_parts, versions_of
from treegen.prompts.plan.draws import hash_prompt, row_seed


def as_text_or_ids(content: Any) -> Any:
    """Return text or token ids, such as NumPy's, as JSON has them; None for anything else."""
    if isinstance(content, str):
        return content
    if isinstance(content, bytes | Mapping) or not isinstance(content, Iterable):
        return None
    items = list(content)
    if any(isinstance(item, bool) for item in items):
        return None
    try:
        return list(map(operator.index, items))
    except TypeError:
        return None


def check_prompt(content: Any) -> Any:
    """Return text, token ids or chat messages as JSON has them."""
    is_list = isinstance(content, list | tuple) and bool(content)
    if is_list and all(isinstance(message, Mapping) for message in content):
        return list(content)
    prompt = as_text_or_ids(content)
    if prompt or prompt == "":
        return prompt
    raise InputError(f"a prompt must be a string, token ids or chat messages, got {content!r:.80}")


def is_chat(content: Any) -> bool:
    """Return whether a prompt consists of chat messages."""
    return not isinstance(content, str) and isinstance(content[0], Mapping)


def encode_messages(messages: Any) -> list[dict[str, Any]]:
    """Return chat messages as the server reads them, with images as data URLs."""
    encoded = []
    for message in messages:
        content = message.get("content")
        encoded_content = encode_parts(content) if isinstance(content, list | tuple) else content
        encoded.append(
            {**message, "content": encoded_content} if "content" in message else dict(message)
        )
    return encoded


def prompt_tokens_of(content: Any, answer: Any) -> list[int]:
    """Return the token ids of a prompt.

    Args:
        content: The prompt.
        answer: The server's answer.
    """
    holder = answer if is_chat(content) else answer["choices"][0]
    tokens: list[int] = holder["prompt_token_ids"]
    return tokens


def output_of(
    index: str, content: Any, answer: Any, params: SamplingParams, first: int
) -> RequestOutput:
    """Return the output of one prompt.

    Args:
        index: Index of the prompt.
        content: The prompt.
        answer: The server's answer.
        params: Sampling parameters.
        first: With a seed, index of the prompt's first sample.
    """
    from_chat, completions = is_chat(content), []
    tokens = prompt_tokens_of(content, answer)
    origin = hash_prompt(tokens)
    for choice in answer["choices"]:
        if from_chat:
            logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        else:
            logprobs = choice["logprobs"]["token_logprobs"]
        completions.append(
            Completion(
                prompt_id=index,
                sample_index=choice["index"],
                # Without a seed, only the server knows the numbers of the samples.
                seed=0
                if params.seed is None
                else row_seed(params.seed, origin, first + choice["index"]),
                text=choice["message"]["content"] or "" if from_chat else choice["text"],
                tokens=tuple(choice["token_ids"]),
                logprobs=tuple(logprobs),
                finish_reason=choice["finish_reason"],
                versions=versions_of(choice.get("versions", ())),
            )
        )
    prompt = content if isinstance(content, str) else None
    return RequestOutput(completions, request_id=index, prompt=prompt, prompt_token_ids=tokens)


def score_of_choices(index: int, choices: Any, top: int) -> Score:
    """Return the score of a continuation, which starts where the tokens of the texts differ.

    Args:
        index: Index of the pair.
        choices: The server's choices for the context, and for the context with the continuation.
        top: Number of most likely tokens to report.
    """
    before, joint = choices
    shorter, tokens = before["prompt_token_ids"], joint["prompt_token_ids"]
    pairs = zip(shorter, tokens, strict=False)
    start = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(shorter), len(tokens)))
    if start == len(tokens) or not start:
        raise InputError(
            f"pair {index}: the context and the continuation must each have at least one token"
        )
    entries = joint["prompt_logprobs"][start:]
    choice_entries = [
        entry[str(token)] for entry, token in zip(entries, tokens[start:], strict=True)
    ]
    most_likely = [
        sorted(
            ((int(token), value["logprob"]) for token, value in entry.items() if value["rank"]),
            key=lambda pair: -pair[1],
        )[: max(1, top)]
        for entry in entries
    ]
    is_greedy = all(
        pairs[0][0] == token for pairs, token in zip(most_likely, tokens[start:], strict=True)
    )
    reported = None
    if top:
        reported = TopLogprobs(
            np.array([[token for token, _ in row] for row in most_likely], dtype=np.int32),
            np.array([[value for _, value in row] for row in most_likely], dtype=np.float32),
        )
    logprobs = tuple(entry["logprob"] for entry in choice_entries)
    return Score(tuple(tokens[start:]), logprobs, is_greedy, reported)
