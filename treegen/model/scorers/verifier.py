"""Verifiers: reward models that judge answers to questions, as a whole or step by step.

There are three published forms: a classifier of the whole text, a token classifier read at the end
of each step, and a language model that predicts one of two tokens at a mark after each step. For
the last, the steps are in one text, or each is a turn of a chat that the model answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from treegen.common.bounded.templates import render_chat
from treegen.common.checks import check_int, checked_class
from treegen.errors import InputError, ModelError, arg
from treegen.model.scorers.scorer import CAUSAL, SEQUENCE, Scorer, probabilities

REDUCE: Final[Mapping[str, Callable[[Sequence[float]], float]]] = {
    "last": lambda values: values[-1],
    "min": min,
    "product": lambda values: float(np.prod(values)),
    "mean": lambda values: float(np.mean(values)),
}
"""Functions that reduce the values of steps to one number."""
BATCH_SIZE: Final = 16
"""Texts that a model computes at once by default."""


class Reader(Protocol):
    """Computes probabilities of "right" on shared prefixes, as `PrefixScorer` does."""

    def score_prefixes(
        self, rows: Sequence[Sequence[int]], ends: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Return, for each text of token ids, the probabilities of "right" after its `ends`.

        The ends of each text ascend.
        """


@checked_class
@dataclass(frozen=True, slots=True, kw_only=True)
class Verifier:
    """Scores answers to questions, from 0 to 1."""

    scorer: Scorer
    """The model."""
    reader: Reader | None = None
    """Computes the model on prefixes that texts share; None computes each text whole."""
    label: int | None = None
    """The output to read. Default: the last, which is "right" if there are two."""
    tokens: tuple[str, str] = ("+", "-")
    """The two tokens that a language model predicts at a mark: right and wrong."""
    separator: str = "\n\n"
    """The text between the steps of an answer."""
    mark: str = ""
    """The text that replaces the separator after each step; the model is read where it ends. Empty
    for a token classifier that is read at the last token of each step. A mark of white space alone
    is tokenized separately from the steps, and there is no chat then."""
    reduce: str = "last"
    """How the values of steps become one number, a key of REDUCE."""
    chat: bool | None = None
    """Whether to put question and answer in the model's chat format. Default: if it has one."""
    turns: bool = False
    """Whether each step is a user turn in the chat, the first together with the question, and the
    mark is the model's turn. The model is then read before the mark."""
    batch_size: int = BATCH_SIZE
    """Texts to compute at once if there is no reader."""

    def __post_init__(self) -> None:
        form, tokenizer = self.scorer.form, self.scorer.tokenizer
        check_int("batch_size", self.batch_size, minimum=1)
        if self.reduce not in REDUCE:
            raise InputError(
                f"{arg('reduce')} must be one of {', '.join(REDUCE)}, got {self.reduce!r}"
            )
        if form == CAUSAL and not self.mark:
            raise InputError(
                "a language model as verifier requires a mark and two tokens for right and "
                f"wrong steps; set both to the values used in training, such as {arg('mark')}=+ "
                f"and {arg('tokens')}=+,-"
            )
        if form == SEQUENCE and self.mark:
            raise InputError("a mark is not supported with a sequence classifier; remove the mark")
        read_at = getattr(self.scorer.model, "read_at", "")
        if read_at and not self.mark:
            raise InputError(f"this reward model requires a mark after each step; set {read_at}")
        if form != CAUSAL and self.label is not None:
            num = int(self.scorer.model.config.num_labels)
            if not 0 <= self.label < num:
                raise InputError(f"{arg('label')} must be less than {num}, got {self.label}")
        if form != SEQUENCE and not tokenizer.is_fast:
            raise InputError(
                "scoring steps requires a fast tokenizer, which returns the positions of "
                "tokens; use another model"
            )
        if not self.separator:
            raise InputError("the separator between steps must not be empty")
        if form == CAUSAL:
            self.token_ids()
        if self.mark.isspace() and (self.chat or self.turns):
            raise InputError(
                "a mark of white space cannot be used together with a chat template; remove chat"
            )
        if self.turns and (form != CAUSAL or self.chat is False or not self._has_chat):
            raise InputError("turns require a language model with a chat template; remove turns")

    @property
    def _has_chat(self) -> bool:
        return bool(getattr(self.scorer.tokenizer, "chat_template", None))

    def scores(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Return the score of each (question, answer)."""
        return [self.reduce_steps(values) for values in self.values(pairs)]

    def reduce_steps(self, values: Sequence[float]) -> float:
        """Reduce the values of an answer's steps to one number."""
        return float(REDUCE[self.reduce](values))

    def values(self, pairs: Sequence[tuple[str, str]]) -> list[list[float]]:
        """Return the values of the steps of each (question, answer); one value for a whole text.

        Raises:
            InputError: a text is too long for the model.
            CapacityError: the memory does not suffice.
        """
        read = [self.encode(*pair) for pair in pairs]
        return self.read([ids for ids, _ in read], [ends for _, ends in read])

    def read(
        self, rows: Sequence[Sequence[int]], ends: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Return the probabilities of "right" in texts of token ids, after the tokens at `ends`.

        Raises:
            InputError: a text is too long for the model.
            CapacityError: the memory does not suffice.
        """
        self.scorer.check_length(rows)
        if self.reader is not None:
            return self.reader.score_prefixes(rows, ends)
        probs: list[list[float]] = [[] for _ in rows]
        for indices in self.scorer.batches(rows, self.batch_size):
            logits = self.scorer.logits([rows[index] for index in indices])
            for row, index in enumerate(indices):
                pooled = self.scorer.form == SEQUENCE
                logits_SL = logits[row, None if pooled else ends[index]]
                if self.scorer.form == CAUSAL:
                    probs_S = logits_SL[:, self.token_ids()].softmax(dim=-1)[:, 0]
                else:
                    probs_S = probabilities(logits_SL)[:, self.column]
                probs[index] = [float(prob) for prob in probs_S]
        return probs

    @property
    def column(self) -> int:
        """The output of a classifier that means "right"."""
        if self.label is not None:
            return self.label
        return int(self.scorer.model.config.num_labels) - 1

    def token_ids(self) -> list[int]:
        """Return the ids of the tokens that a language model predicts: right and wrong.

        Raises:
            InputError: a text has no token.
        """
        chosen_ids = []
        for text in self.tokens:
            ids = self.scorer.tokenizer(text, add_special_tokens=False)["input_ids"]
            if not ids:
                raise InputError(
                    f"{text!r} is not in the vocabulary of the verifier's tokenizer; pass other "
                    "tokens"
                )
            chosen_ids.append(int(ids[-1]))  # a tokenizer may put a space token first
        return chosen_ids

    def last(self, ids: Sequence[int]) -> int:
        """Return the index of the last token that is not padding, where a classifier is read."""
        pad = self.scorer.tokenizer.pad_token_id
        return max((index for index, token in enumerate(ids) if token != pad), default=0)

    def encode(self, question: str, answer: str) -> tuple[list[int], list[int]]:
        """Return the token ids of a text, and the indices of the tokens after which it is read."""
        tokenizer, form = self.scorer.tokenizer, self.scorer.form
        if self.turns:
            return self._encode_turns(question, answer)
        if self.mark.isspace():
            return self._encode_separately(question, answer)
        steps = [answer] if form == SEQUENCE else _steps(answer, self.separator)
        body, ends = "", []
        for number, step in enumerate(steps):
            body += step if self.mark or not number else f"{self.separator}{step}"
            body += self.mark
            ends.append(len(body.rstrip()))
        if self.chat and not self._has_chat:
            raise InputError("the verifier has no chat template; remove --chat")
        chat = self._has_chat if self.chat is None else self.chat
        text = f"{question}\n{body}"
        if chat:
            turns = [("user", question), ("assistant", body)]
            messages = [{"role": role, "content": content} for role, content in turns]
            text = render_chat(tokenizer, messages)
        at = text.rfind(body.strip())
        if at < 0:
            raise ModelError("the verifier's chat template changes the answer; remove chat")
        if form == SEQUENCE:
            ids = list(tokenizer(text, add_special_tokens=not chat)["input_ids"])
            return ids, [self.last(ids)]
        encoded = tokenizer(text, add_special_tokens=not chat, return_offsets_mapping=True)
        at -= len(body) - len(body.lstrip())
        # Find the first token that reaches the end of each step.
        ids, end_indices = (
            encoded["input_ids"],
            _token_stops(encoded).searchsorted(at + np.array(ends)),
        )
        return list(ids), end_indices.clip(max=len(ids) - 1).tolist()

    def _encode_separately(self, question: str, answer: str) -> tuple[list[int], list[int]]:
        """Tokenize question, steps and marks separately, as Skywork's models are trained."""
        tokenizer, ends = self.scorer.tokenizer, []
        ids = list(tokenizer(f"{question}\n")["input_ids"])
        bos = tokenizer.bos_token_id
        if bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        for step in _steps(answer, self.separator):
            for text in (step, self.mark):
                part_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
                ids += part_ids if text is step else part_ids[-1:]
            ends.append(len(ids) - 1)
        return ids, ends

    def _encode_turns(self, question: str, answer: str) -> tuple[list[int], list[int]]:
        """Tokenize a chat whose replies are marks, which is read before each mark."""
        tokenizer, mark = self.scorer.tokenizer, self.mark.strip()
        steps = _steps(answer, self.separator)
        steps[0] = f"{question} {steps[0]}"

        def render(reply: str) -> str:
            turns = [[("user", step.strip()), ("assistant", reply)] for step in steps]
            messages = [{"role": role, "content": text} for pair in turns for role, text in pair]
            return render_chat(tokenizer, messages)

        text = render(self.mark)
        # Other text may contain the mark, so a character that occurs nowhere else shows its places.
        private_use = map(chr, range(0xE000, 0xF900))
        placeholder = next((character for character in private_use if character not in text), "")
        if not placeholder:
            raise InputError("the answer contains all private-use characters; remove some of them")
        parts = render(self.mark.replace(mark, placeholder)).split(placeholder)
        if len(parts) != len(steps) + 1 or mark.join(parts) != text:
            raise ModelError(
                "the verifier's chat template changes the mark; remove turns, or pass another mark"
            )
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts = np.cumsum([len(part) for part in parts[:-1]]) + np.arange(len(steps)) * len(mark)
        # The token before the first one that ends after the start of the mark.
        ends = _token_stops(encoded).searchsorted(starts, side="right") - 1
        return list(encoded["input_ids"]), np.maximum(ends, 0).tolist()


def _token_stops(encoded: Any) -> NDArray[np.int64]:
    """Return where each token of an encoded text ends, never before an earlier token does."""
    return np.maximum.accumulate([stop for _, stop in encoded["offset_mapping"]])


def _steps(answer: str, separator: str) -> list[str]:
    """Return the steps of an answer without blank ones; at least one."""
    return [step for step in answer.split(separator) if step.strip()] or [answer]
