"""Models that judge texts: reward models and verifiers, of outcomes or of each step.

Three forms are published: a classifier of the whole text, a classifier of tokens read where a step
ends, and a language model that is asked at a mark after each step, and says one of two tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

import numpy as np

from treegen.errors import InputError, ModelError

if TYPE_CHECKING:
    from torch import Tensor

SEQUENCE, TOKEN, CAUSAL = "SequenceClassification", "TokenClassification", "CausalLM"
REDUCE: Final[Mapping[str, Callable[[Sequence[float]], float]]] = {
    "last": lambda values: values[-1],
    "min": min,
    "product": lambda values: float(np.prod(values)),
    "mean": lambda values: float(np.mean(values)),
}
"""How the values of steps become one number."""

# By directory, device and form: what is asked for again while it is in use is not loaded twice.
_in_use: WeakValueDictionary[tuple[str, str, str], Any] = WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class Scorer:
    """A loaded model that judges.

    form: SEQUENCE, TOKEN or CAUSAL. length: the most tokens that it reads; None for no limit.
    """

    model: Any
    tokenizer: Any
    form: str
    length: int | None

    def logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Logits of texts of R token ids, float32 [R, labels], or [R, tokens, labels]."""
        import torch

        pad, longest = self.tokenizer.pad_token_id or 0, max(map(len, rows))
        ids = torch.full((len(rows), longest), pad)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        with torch.inference_mode():
            device = self.model.device
            found = self.model(input_ids=ids.to(device), attention_mask=mask.to(device))
            logits: Tensor = found.logits.float()
        return logits

    def batches(self, rows: Sequence[Sequence[int]], size: int) -> list[list[int]]:
        """Places of texts that are computed together: those of like lengths, for less padding."""
        longest = max(map(len, rows), default=0)
        if self.length is not None and longest > self.length:
            raise InputError(
                f"a text has {longest:,} tokens but the reward model reads {self.length:,}; "
                "shorten what it reads"
            )
        order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
        # Without a token for padding, a sequence classifier does not find the last token.
        size = size if self.tokenizer.pad_token_id is not None or self.form != SEQUENCE else 1
        return [order[start : start + size] for start in range(0, len(order), size)]


def probabilities(logits: Tensor) -> Tensor:
    """Shares of the labels [..., labels]; of a single one its sigmoid."""
    return logits.sigmoid() if logits.shape[-1] == 1 else logits.softmax(dim=-1)


def load_scorer(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    device: str | None = None,
    form: str | None = None,
) -> Scorer:
    """Load a model that judges; safetensors only.

    device: by default a GPU if there is one. form: by default what config.json says.

    Raises:
        ModelError: it cannot be loaded, or is of none of the forms.
    """
    import torch

    from treegen.model.files import (
        check_trust,
        check_weights,
        load_tokenizer,
        locate,
        read_raw_config,
    )

    directory = locate(name, revision, weights=True)
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    raw = read_raw_config(directory)
    check_trust(raw, "config.json", revision, local=True, trust=False)
    check_weights(directory)
    form = form or _form_of(name, raw)
    tokenizer: Any = load_tokenizer(directory)
    model = _in_use.get((str(directory), where, form))
    if model is None:
        model = _read(name, directory, form, tokenizer).to(where)
        _in_use[str(directory), where, form] = model
    return Scorer(model, tokenizer, form, getattr(model.config, "max_position_embeddings", None))


def _form_of(name: str | os.PathLike[str], raw: Mapping[str, Any]) -> str:
    named = [str(each) for each in raw.get("architectures") or ()]
    for form in (SEQUENCE, TOKEN, CAUSAL):
        if any(each.endswith(f"For{form}") for each in named):
            return form
    raise ModelError(
        f"{name} is no model that judges: its architectures are {', '.join(named) or 'unknown'}; "
        f"one must end in For{SEQUENCE}, For{TOKEN} or For{CAUSAL}"
    )


def _read(name: str | os.PathLike[str], directory: Path, form: str, tokenizer: Any) -> Any:
    import transformers

    from treegen.model.files import one_line

    try:
        model, info = getattr(transformers, f"AutoModelFor{form}").from_pretrained(
            directory, use_safetensors=True, local_files_only=True, output_loading_info=True
        )
    except Exception as error:
        raise ModelError(f"reward model {name} cannot be loaded: {one_line(error)}") from None
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])[0]
        kind = {SEQUENCE: "sequence classifier", TOKEN: "token classifier"}.get(form, "model")
        raise ModelError(f"{name} is no {kind}: it has no weights for {missing}")
    # Decoders need it to find the last token of a padded text.
    model.config.pad_token_id = tokenizer.pad_token_id
    return model.eval()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifier:
    """Gives answers to questions a score, from 0 to 1.

    scorer: the model.
    label: the output to take, by default the last, which of two is "right".
    tokens: of a language model, the two tokens that it says at a mark: right and wrong.
    separator: the text between the steps of an answer.
    mark: a text that is put after each step in place of it; the model is read where it ends. Empty
    for a token classifier that is read at the last token of each step.
    reduce: how the values of steps become one, of REDUCE.
    chat: put question and answer in the model's chat format; None does so if it has one.
    batch_size: texts to compute at once.
    """

    scorer: Scorer
    label: int | None = None
    tokens: tuple[str, str] = ("+", "-")
    separator: str = "\n\n"
    mark: str = ""
    reduce: str = "last"
    chat: bool | None = None
    batch_size: int = 16

    def __post_init__(self) -> None:
        form, tokenizer = self.scorer.form, self.scorer.tokenizer
        if self.reduce not in REDUCE:
            raise InputError(f"reduce must be one of {', '.join(REDUCE)}, got {self.reduce!r}")
        if form == CAUSAL and not self.mark:
            raise InputError(
                "a language model judges steps at a mark: give the text that it was trained with "
                "(--mark), and the two tokens that it says there (--tokens)"
            )
        if form == SEQUENCE and self.mark:
            raise InputError("a sequence classifier reads the whole text; leave the mark out")
        if form != CAUSAL and self.label is not None:
            num = int(self.scorer.model.config.num_labels)
            if not 0 <= self.label < num:
                raise InputError(f"label must be less than {num}, got {self.label}")
        if form != SEQUENCE and not tokenizer.is_fast:
            raise InputError("steps need a tokenizer that tells where tokens stand (a fast one)")
        if form == CAUSAL:
            self._token_ids()

    def scores(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """The score of each (question, answer)."""
        return [self.reduced(values) for values in self.values(pairs)]

    def reduced(self, values: Sequence[float]) -> float:
        """The values of an answer's steps as one number."""
        return float(REDUCE[self.reduce](values))

    def values(self, pairs: Sequence[tuple[str, str]]) -> list[list[float]]:
        """The values of the steps of each (question, answer); one for a whole text.

        Raises:
            InputError: a text is too long for the model.
        """
        read = [self._encode(*pair) for pair in pairs]
        rows = [ids for ids, _ in read]
        found: list[list[float]] = [[] for _ in pairs]
        for places in self.scorer.batches(rows, self.batch_size):
            logits = self.scorer.logits([rows[place] for place in places])
            for row, place in enumerate(places):
                ends = read[place][1]
                mine = logits[row, None] if self.scorer.form == SEQUENCE else logits[row, ends]
                found[place] = self._shares(mine)
        return found

    def _shares(self, logits_SL: Tensor) -> list[float]:
        """The share of the right one at each step."""
        if self.scorer.form == CAUSAL:
            return [float(x) for x in logits_SL[:, self._token_ids()].softmax(dim=-1)[:, 0]]
        column = logits_SL.shape[1] - 1 if self.label is None else self.label
        return [float(x) for x in probabilities(logits_SL)[:, column]]

    def _token_ids(self) -> list[int]:
        found = []
        for text in self.tokens:
            ids = self.scorer.tokenizer(text, add_special_tokens=False)["input_ids"]
            if not ids:
                raise InputError(f"{text!r} is no token of the verifier")
            found.append(int(ids[-1]))  # before it a tokenizer may put a space of its own
        return found

    def _encode(self, question: str, answer: str) -> tuple[list[int], list[int]]:
        """The token ids of a text, and which of them end a step."""
        tokenizer, form = self.scorer.tokenizer, self.scorer.form
        steps = [answer] if form == SEQUENCE else _steps(answer, self.separator)
        body, ends = "", []
        for number, step in enumerate(steps):
            body += step if self.mark or not number else f"{self.separator}{step}"
            body += self.mark
            ends.append(len(body.rstrip()))
        has_chat = bool(getattr(tokenizer, "chat_template", None))
        if self.chat and not has_chat:
            raise InputError("the verifier has no chat template; leave --chat out")
        chat = has_chat if self.chat is None else self.chat
        text = f"{question}\n{body}"
        if chat:
            turns = [("user", question), ("assistant", body)]
            messages = [{"role": role, "content": content} for role, content in turns]
            text = tokenizer.apply_chat_template(messages, tokenize=False)
        at = text.rfind(body.strip())
        if at < 0:
            raise ModelError("the verifier's chat template changes the answer; try it without chat")
        if form == SEQUENCE:
            return list(tokenizer(text, add_special_tokens=not chat)["input_ids"]), []
        encoded = tokenizer(text, add_special_tokens=not chat, return_offsets_mapping=True)
        stops = np.array([stop for _, stop in encoded["offset_mapping"]])
        at -= len(body) - len(body.lstrip())
        # The first token that reaches the end of the step. Later ones stop further on.
        places = [int(np.argmax(stops >= at + end)) for end in ends]
        return list(encoded["input_ids"]), places


def _steps(answer: str, separator: str) -> list[str]:
    """The steps of an answer, blank ones left out; at least one."""
    return [step for step in answer.split(separator) if step.strip()] or [answer]
