"""Rows of tokens to train on; which rows a step sees depends on the seed and its number alone."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from train_demo.documents import WRITE, Document, Mixture, draw_document


class Rows(NamedTuple):
    """Tokens in rows of one length, each with one more at the end to predict.

    tokens: int16. weights: float16, what the loss of each counts. smooth: bool, whether a digit is
    learned with label smoothing. All of shape [rows, length + 1].
    """

    tokens: torch.Tensor
    weights: torch.Tensor
    smooth: torch.Tensor


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of a step that are made alike."""

    mixture: Mixture
    rows: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.length


@dataclass(frozen=True, slots=True)
class Stage:
    """So many steps with the same groups of rows."""

    steps: int
    groups: tuple[Group, ...]

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return sum(group.tokens for group in self.groups)


class Steps(Dataset[list[Rows]]):
    """The rows of every step from a first one on: one after the other, the steps of each stage."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, stages: Sequence[Stage], seed: int, first: int
    ) -> None:
        """Nothing is drawn yet."""
        self._tokenizer = tokenizer
        self._stages = stages
        self._seed, self._first = seed, first

    def __len__(self) -> int:
        """How many steps there are."""
        return sum(stage.steps for stage in self._stages) - self._first

    def __getitem__(self, index: int) -> list[Rows]:
        """Return the rows of one step, a tensor of each group."""
        step = self._first + index
        draw = random.Random(f"step {self._seed} {step}")
        return [self._rows(draw, group) for group in stage_of(self._stages, step).groups]

    def _rows(self, draw: random.Random, group: Group) -> Rows:
        shape = group.rows, group.length + 1
        tokens = np.empty(shape, np.int16)
        weights = np.empty(shape, np.float16)
        smooth = np.empty(shape, bool)
        for row in range(group.rows):
            filled = 0
            while filled <= group.length:
                encoded = encode(self._tokenizer, draw_document(draw, group.mixture))
                taken = min(len(encoded.ids), group.length + 1 - filled)
                columns = slice(filled, filled + taken)
                tokens[row, columns] = encoded.ids[:taken]
                weights[row, columns] = encoded.weights[:taken]
                smooth[row, columns] = encoded.smooth[:taken]
                filled += taken
        return Rows(*map(torch.from_numpy, (tokens, weights, smooth)))


def stage_of(stages: Sequence[Stage], step: int) -> Stage:
    """Return the stage that a step belongs to."""
    for stage in stages:
        if step < stage.steps:
            return stage
        step -= stage.steps
    raise IndexError("the step is after the last stage")


class Encoded(NamedTuple):
    """A document's tokens from BOS to EOS, with what Part says of each."""

    ids: list[int]
    weights: list[float]
    smooth: list[bool]


def encode(tokenizer: PreTrainedTokenizerFast, document: Document) -> Encoded:
    """Tokenize a document part by part."""
    bpe = tokenizer.backend_tokenizer
    encoded = Encoded([int(tokenizer.bos_token_id)], [0.0], [False])
    encodings = bpe.encode_batch_fast([part.text for part in document], add_special_tokens=False)
    for part, encoding in zip(document, encodings, strict=True):
        encoded.ids.extend(encoding.ids)
        encoded.weights.extend([part.weight] * len(encoding.ids))
        encoded.smooth.extend([part.smooth] * len(encoding.ids))
    return Encoded(
        [*encoded.ids, int(tokenizer.eos_token_id)],
        [*encoded.weights, WRITE],
        [*encoded.smooth, False],
    )
