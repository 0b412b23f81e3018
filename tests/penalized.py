"""What a draw depends on beside the model, slowly and plainly: token by token, in Python."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from treegen.common.params import SamplingParams
from treegen.engine.param_set import ParamSet


def plain(params: SamplingParams) -> SamplingParams:
    """The parameters without all that `slow_logits` does."""
    return replace(
        params,
        presence_penalty=0,
        frequency_penalty=0,
        repetition_penalty=1,
        no_repeat_ngram_size=0,
        bad_words=(),
        logit_bias=None,
        min_tokens=0,
        json_schema=None,
        regex=None,
        grammar=None,
        choice=None,
    )


_GRAMMARS = {'start: pair pair?\npair: "a" ("d" | "e" "c")': "(a(d|ec)){1,2}"}
_LETTERS = [chr(97 + token) for token in range(24)]
_END = 1


@functools.cache
def language(structure: tuple[str, str]) -> frozenset[str]:
    """All texts of a choice, a known grammar, or a regular expression whose texts are short."""
    kind, text = structure
    if kind == "choice":
        return frozenset(json.loads(text))
    pattern = re.compile(_GRAMMARS.get(text, text))
    texts = ("".join(word) for size in range(8) for word in itertools.product("acde", repeat=size))
    return frozenset(filter(pattern.fullmatch, texts))


def allowed(structure: tuple[str, str], text: str) -> set[int]:
    """The tokens that may come after a text; none if it begins no text of the language."""
    known = language(structure)
    found = {
        at
        for at, letter in enumerate(_LETTERS)
        if at != _END and any(each.startswith(text + letter) for each in known)
    }
    return found if text not in known else found | {_END}


Budgets = Sequence[tuple[int, int | None]]
"""Where each sample of a text starts, and its budget for thinking. The last one is being drawn."""


def has_failed(text: Sequence[int], params: SamplingParams, budgets: Budgets) -> bool:
    """Whether nothing can follow a sample's text in its grammar.

    Args:
        text: The tokens of the sample and of all that is before it.
        params: Those of the sample.
        budgets: Of the samples from the first on that has the grammar.
    """
    if params.structure is None:
        return False
    bound = bound_text(text, params, budgets)
    return bound is not None and not allowed(params.structure, bound)


def bound_text(whole: Sequence[int], params: SamplingParams, budgets: Budgets) -> str | None:
    """What of a text its grammar is about; None as long as it thinks.

    What closes a thinking because its budget is used up is not gone on with by later samples.

    Args:
        whole: The text and all that is before it.
        params: Those of the last sample.
        budgets: Of the samples from the first on that has the grammar.
    """
    cut = budgets[0][0]
    prompt, text = whole[:cut], whole[cut:]
    shown = "".join(_LETTERS[token] for token in text if token != _END)
    if not params.reasoning_tags:
        return shown
    begin, end = params.reasoning_tags
    if _is_closed(prompt, params):
        return shown
    opened = bool(len(prompt)) and _LETTERS[prompt[-1]] == begin
    if not opened and not shown.startswith(begin):
        return shown
    if end not in shown:
        return None
    start = shown.index(end) + len(end)
    at = max(i for i, (first, _) in enumerate(budgets) if first - cut < start)
    (first, budget), later = budgets[at], budgets[at + 1 :]
    if budget is not None:
        stop = later[0][0] if later else len(whole)
        opened = first > 0 and _LETTERS[whole[first - 1]] == begin
        due = first + budget + (not opened)
        closing = (params.thinking_end or "")[: max(stop - due, 0)]
        is_open = opened or _LETTERS[whole[first]] == begin
        if is_open and due < cut + start and shown[due - cut :].startswith(closing):
            start = due - cut + len(closing if later else params.thinking_end or "")
    return None if start > len(shown) else shown[start:]


def _is_closed(prompt: Sequence[int], params: SamplingParams) -> bool:
    """Whether a prompt ends with what closes a thinking."""
    assert params.reasoning_tags is not None
    shown = "".join(_LETTERS[token] for token in prompt if token != _END)
    return shown.endswith(params.reasoning_tags[1])


def slow_logits(
    logits: Tensor,
    text: Sequence[int],
    drawn: Sequence[bool],
    each: ParamSet,
    step: int,
    budgets: Budgets = (),
) -> Tensor:
    """The logits [V] that a token is drawn from.

    Args:
        text: All tokens before it.
        drawn: Which of them were drawn.
        step: Tokens of the sample so far.
        budgets: Of the samples that have its grammar; by default only the one that it is of.
    """
    params, bias, logits = each.params, each.bias, logits.float().clone()
    if params.structure is not None:
        budgets = budgets or [(len(text) - step, params.max_thinking_tokens)]
        bound = bound_text(text, params, budgets)
        if bound is not None:
            may = allowed(params.structure, bound)
            tags = params.reasoning_tags
            if tags and budgets[0][0] == len(text) and not _is_closed(text, params):
                may.add(_LETTERS.index(tags[0]))
            logits[[token for token in range(len(logits)) if token not in may]] = -torch.inf
    for token, value, until in zip(bias.token, bias.value, bias.until, strict=True):
        if step < until:
            logits[int(token)] += float(value)
    for token in set(text):
        by = params.repetition_penalty
        logits[token] = logits[token] / by if logits[token] > 0 else logits[token] * by
    sampled = [token for token, is_drawn in zip(text, drawn, strict=True) if is_drawn]
    for token in set(sampled):
        logits[token] -= torch.tensor(params.frequency_penalty) * sampled.count(token)
        logits[token] -= params.presence_penalty
    banned = set()
    size = params.no_repeat_ngram_size
    for start in range(len(text) - size + 1 if size else 0):
        *before, last = text[start : start + size]
        if before == list(text[len(text) - size + 1 :]):
            banned.add(last)
    for *before, last in each.stopping.bad_words:
        begun = list(text[len(text) - len(before) :]) == before
        if begun and all(drawn[len(text) - len(before) :]):
            banned.add(last)
    given = logits.clone()
    given[list(banned)] = -torch.inf
    return given if (given > -torch.inf).any() else logits
