"""BOS and EOS tokens: those around a text, ids that end samples, and warnings.

Warnings are about doubled BOS tokens and unended turns.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Final
from weakref import WeakSet

from treegen.common.bounded.templates import TemplateError, render_chat
from treegen.common.params import SamplingParams
from treegen.errors import ModelWarning
from treegen.prompts.radix import Tokens

_PROBE_ANSWER: Final = "The answer of a probe"
_warned_of_double_bos: WeakSet[Any] = WeakSet()  # tokenizers with a warning that was issued already
_warned_of_unended_turns: WeakSet[Any] = WeakSet()


def end_ids(eos_token_ids: Sequence[int], tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that end a sample: those of the model's files, and the tokenizer's EOS.

    vLLM stops at both too. Files of fine-tuned models often name only the base model's EOS.
    """
    eos = getattr(tokenizer, "eos_token_id", None)
    return tuple(dict.fromkeys((*eos_token_ids, *([eos] if isinstance(eos, int) else []))))


def warn_of_double_bos(tokenizer: Any, encoded: Iterable[Tokens]) -> None:
    """Warn once per tokenizer if a text already contains the BOS token that the tokenizer adds.

    The ids are not changed: they stay those of `tokenizer(text)`.
    """
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None or tokenizer in _warned_of_double_bos:
        return
    if any(len(ids) > 1 and ids[0] == bos == ids[1] for ids in encoded):
        _warned_of_double_bos.add(tokenizer)
        warnings.warn(
            f"a prompt begins with {tokenizer.bos_token!r} twice: the text contains the token, and "
            "the tokenizer adds it again. A chat template has probably been applied already; pass "
            "the chat messages (LLM.chat, /v1/chat/completions), token ids, or text without the "
            "token",
            ModelWarning,
            stacklevel=2,
        )


def warn_of_unended_turns(
    tokenizer: Any, eos_token_ids: Sequence[int], params: Iterable[SamplingParams]
) -> None:
    """Warn once per tokenizer if some sample does not stop where its chat template ends a turn.

    Args:
        tokenizer: A tokenizer with a chat template.
        eos_token_ids: The ids that end a sample.
        params: The samples' parameters, whose own stops may end a turn.
    """
    if tokenizer in _warned_of_unended_turns:
        return
    _warned_of_unended_turns.add(tokenizer)
    name, id = _turn_end(tokenizer)
    if id is None or id in eos_token_ids:
        return
    if all(id in p.stop_token_ids or name in p.stops or p.ignore_eos for p in params):
        return
    warnings.warn(
        f"the chat template ends a turn with {name!r} (token {id}), but the model's files do not "
        "list this token as an end-of-sequence token, so a sample may continue with further turns. "
        f"Set eos_token_id in generation_config.json to this token, or pass stop_token_ids=[{id}]",
        ModelWarning,
        stacklevel=2,
    )


def _turn_end(tokenizer: Any) -> tuple[str, int | None]:
    """Return the token that a chat template writes after an answer; "" and None if there is none.

    The template may reject the probe, or write no token there.
    """
    question = {"role": "user", "content": "Hello"}
    answer = {"role": "assistant", "content": _PROBE_ANSWER}
    try:
        text = render_chat(tokenizer, [question, answer])
    except TemplateError:
        return "", None
    _, separator, after = text.rpartition(_PROBE_ANSWER)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    for id, token in added.items():
        if separator and str(token) and after.lstrip().startswith(str(token)):
            return str(token), id
    return "", None


def find_special_tokens(
    tokenizer: Any, add_special_tokens: bool
) -> tuple[list[int], list[int]] | None:
    """Return the special tokens before and after any text; None if they depend on the text."""
    if not add_special_tokens:
        return [], []
    probes = ["a", "b c", " a\n", ""]
    for name in ("bos_token", "eos_token"):
        # Some tokenizers add no special token to a text that begins or ends with it already.
        token = getattr(tokenizer, name, None)
        probes += [f"{token}a", f"a{token}"] if token else []
    bare = tokenizer(probes, add_special_tokens=False, verbose=False)["input_ids"]
    full = tokenizer(probes, verbose=False)["input_ids"]
    for split in range(len(full[0]) - len(bare[0]) + 1):
        before, after = full[0][:split], full[0][split + len(bare[0]) :]
        if all(f == [*before, *b, *after] for f, b in zip(full, bare, strict=True)):
            return before, after
    return None
