"""Truncation of requests that are too long for the model, as in lm-eval's `hf`."""

from collections.abc import Sequence

from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from treegen.errors import CapacityError, InputError

Pair = tuple[list[int], list[int]]
"""The token ids of a context and of its continuation."""


def fitting(context: list[int], continuation: list[int], max_length: int) -> Pair:
    """Return a context, truncated on the left if it is too long, and its continuation.

    Args:
        context: Token ids of the context.
        continuation: Token ids of the continuation.
        max_length: Maximum number of tokens that the model reads.

    Raises:
        CapacityError: The continuation alone is too long.
    """
    if len(continuation) > max_length:
        raise CapacityError(
            f"a continuation has {len(continuation):,} tokens, more than the model's length of "
            f"{max_length:,}"
        )
    # The model does not read the last token, so one more token fits.
    return context[-(max_length + 1 - len(continuation)) :], continuation


def truncate_prompt(tokens: list[int], max_tokens: int, max_length: int) -> list[int]:
    """Return a prompt, truncated on the left to leave room for its answer.

    Args:
        tokens: Token ids of the prompt.
        max_tokens: Maximum number of tokens of the answer.
        max_length: Maximum number of tokens of prompt and answer.

    Raises:
        InputError: There is no room for any prompt.
    """
    room = max_length - max_tokens
    if room < 1:
        raise InputError(
            f"max_gen_toks={max_tokens} leaves no room for a prompt in the model's length of "
            f"{max_length}; lower it"
        )
    return tokens[-room:]


def windows(tokens: Sequence[int], prefix: int | None, max_length: int) -> list[Pair]:
    """Split a text into windows of the model's length, each with the tokens before it as context.

    Args:
        tokens: Token ids of the text.
        prefix: The token before the first one.
        max_length: Maximum number of tokens that the model reads.
    """
    rolled = get_rolling_token_windows(tokens, prefix, max_length, 1)
    return [(list(context), list(rest)) for context, rest in map(make_disjoint_window, rolled)]
