"""What of a request's tokens a model reads, if they are too long for it: as lm-eval's `hf`."""

from collections.abc import Sequence

from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from treegen.errors import CapacityError, InputError

Pair = tuple[list[int], list[int]]
"""The tokens of a context and of its continuation."""


def fitting(context: list[int], continuation: list[int], max_length: int) -> Pair:
    """Return a context without its first tokens where it is too long, and its continuation.

    Raises:
        CapacityError: the continuation alone is too long.
    """
    if len(continuation) > max_length:
        raise CapacityError(
            f"a continuation has {len(continuation):,} tokens, more than the model's length of "
            f"{max_length:,}"
        )
    # The last token is no input of the model.
    return context[-(max_length + 1 - len(continuation)) :], continuation


def truncate_prompt(tokens: list[int], max_tokens: int, max_length: int) -> list[int]:
    """Return a prompt without its first tokens where its answer has no room.

    Raises:
        InputError: there is no room for any prompt.
    """
    room = max_length - max_tokens
    if room < 1:
        raise InputError(
            f"max_gen_toks={max_tokens} leaves no room for a prompt in the model's length of "
            f"{max_length}; lower it"
        )
    return tokens[-room:]


def windows(tokens: Sequence[int], prefix: int | None, max_length: int) -> list[Pair]:
    """Return a text in windows of the model's length, each with what stands before it.

    Args:
        prefix: The token that stands before the first one.
    """
    rolled = get_rolling_token_windows(tokens, prefix, max_length, 1)
    return [(list(context), list(rest)) for context, rest in map(make_disjoint_window, rolled)]
