"""Tokenizes, truncates and decodes texts as lm-eval's `hf` does."""

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.models.utils import has_bos_prefix, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from treegen.common.bounded.templates import TemplateError, render_chat
from treegen.errors import CapacityError, InputError

_log = logging.getLogger(__name__)


class HarnessTokenizer:
    """A tokenizer with lm-eval's settings."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | int | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
    ) -> None:
        """Wrap a tokenizer; the other arguments are those of lm-eval's `hf`.

        Args:
            tokenizer: The tokenizer.
            add_bos_token: Whether to add the first token; None leaves this to the tokenizer.
            prefix_token_id: The token that replaces an empty context; by default the first or the
                end-of-sequence token.
            think_end_token: Text or id of the token that ends the reasoning; None for no reasoning.
            enable_thinking: Argument of the chat template; None does not pass it.
            chat_template_args: Further arguments of the chat template.
        """
        if add_bos_token is not None:
            # A tokenizer may add no first token even with add_special_tokens=True.
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.add_bos_token = add_bos_token
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._tokenizer = tokenizer
        self._add_bos_token = add_bos_token
        is_id = isinstance(think_end_token, str) and think_end_token.isdigit()
        self._think_end = int(think_end_token) if think_end_token and is_id else think_end_token
        self._chat_arguments = {**(chat_template_args or {}), **thinking}
        self.eos_token_id: int | None = tokenizer.eos_token_id
        begin: int | None = tokenizer.bos_token_id
        candidates = (prefix_token_id, begin, self.eos_token_id)
        self.prefix_token_id = next((token for token in candidates if token is not None), None)
        self.eos = self._decode(self.eos_token_id)
        self._prefix = self._decode(self.prefix_token_id)

    def _decode(self, token: int | None) -> str | None:
        return None if token is None else self._tokenizer.decode([token])

    @property
    def has_reasoning(self) -> bool:
        """Whether samples begin with reasoning."""
        return self._think_end is not None

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Return the token ids of a text that is scored; see `encode_prompt`."""
        return self._encode(text, self._prefix, add_special_tokens)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of a prompt. No first token is added if the text begins with it."""
        return self._encode(text, self._tokenizer.bos_token, None)

    def _encode(self, text: str, begin: str | None, special: bool | None) -> list[int]:
        if special is None:
            special = False if has_bos_prefix(text, begin) else self._add_bos_token
        how = {} if special is None else {"add_special_tokens": special}
        tokens: list[int] = self._tokenizer.encode(text, **how)
        return tokens

    def chat(self, history: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        """Return the prompt of a conversation, without system turn if the template rejects it."""
        try:
            return self._apply_template(history, add_generation_prompt)
        except TemplateError:
            _log.warning(
                "the chat template rejected the conversation; treegen removes the system turn"
            )
            history = [turn for turn in history if turn["role"] != "system"]
            return self._apply_template(history, add_generation_prompt)

    def _apply_template(
        self, history: Sequence[Mapping[str, str]], add_generation_prompt: bool
    ) -> str:
        return render_chat(
            self._tokenizer,
            history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self._chat_arguments,
        )

    def answer(self, tokens: Sequence[int], until: Sequence[str]) -> str:
        """Return the answer in a sample: after the reasoning, and up to the first stop string."""
        end, is_token = self._think_end, isinstance(self._think_end, int)
        if is_token and end in tokens:
            tokens = tokens[len(tokens) - tokens[::-1].index(end) :]
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        answer: str = postprocess_generated_text(
            text.lstrip() if is_token else text,
            stop=list(until),
            think_end_token=None if is_token else end,
        )
        return answer


Pair = tuple[list[int], list[int]]
"""The token ids of a context and of its continuation."""


def truncate_context(context: list[int], continuation: list[int], max_length: int) -> Pair:
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
            f"a continuation has {len(continuation):,} tokens, but max_length is {max_length:,}; "
            "shorten the continuation or raise max_length"
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
            f"max_gen_toks={max_tokens} leaves no room for a prompt within the maximum length of "
            f"{max_length}; lower max_gen_toks"
        )
    return tokens[-room:]


def split_into_windows(tokens: Sequence[int], prefix: int | None, max_length: int) -> list[Pair]:
    """Split a text into windows of the model's length, each with the tokens before it as context.

    Args:
        tokens: Token ids of the text.
        prefix: The token before the first one.
        max_length: Maximum number of tokens that the model reads.
    """
    rolled = get_rolling_token_windows(tokens, prefix, max_length, 1)
    return [
        (list(context), list(continuation))
        for context, continuation in map(make_disjoint_window, rolled)
    ]
