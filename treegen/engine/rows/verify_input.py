"""Draft tokens that a step verifies: their query rows, and which of them are accepted.

Legend: R rows, K maximum number of draft tokens of a row, T query rows of the step.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treegen.engine.compute.levels import Ints, expand_offsets


class VerifyInput:
    """Draft tokens of R rows. Each row has one query row more than it has draft tokens.

    Attributes:
        num_R: Number of draft tokens of each row.
        kind_R: Kind of evidence behind each row's draft tokens.
        offsets: [R + 1], the query rows of row r are offsets[r] to offsets[r + 1].
        row_T, place_T: The row of each query row, and its index among those of the row.
    """

    def __init__(self, tokens_RK: Ints, num_R: Ints, kind_R: Ints) -> None:
        """Set up the draft tokens of a step.

        Args:
            tokens_RK: Draft tokens, [R, K], of which the first `num_R` of each row count.
            num_R: Number of draft tokens of each row, [R].
            kind_R: Kind of evidence behind each row's draft tokens, [R].
        """
        self.num_R, self.kind_R = num_R, kind_R
        self._tokens_RK = tokens_RK
        self._accepted_R: Ints | None = None
        self.offsets, self.row_T, self.place_T = expand_offsets(num_R + 1)

    def inputs(self, last_R: Ints) -> Ints:
        """Return the input token of each query row, [T]; `last_R` has each row's last token."""
        tokens = np.concatenate([last_R[:, None], self._tokens_RK], axis=1)
        return tokens[self.row_T, self.place_T]

    def of_row(self, row: int) -> list[int]:
        """Return the draft tokens of a row."""
        tokens: list[int] = self._tokens_RK[row, : self.num_R[row]].tolist()
        return tokens

    def num_accepted(self, drawn_T: Ints) -> Ints:
        """Return how many draft tokens of each row, from the first on, the row has drawn.

        Args:
            drawn_T: Drawn token of each query row, [T]; the same at each call, since the result is
                kept.
        """
        if self._accepted_R is None:
            most = self._tokens_RK.shape[1]
            place_K = np.arange(most)
            at_RK = np.minimum(self.offsets[:-1, None] + place_K, len(self.row_T) - 1)
            wrong_RK = drawn_T[at_RK] != self._tokens_RK
            wrong_RK |= place_K >= self.num_R[:, None]
            self._accepted_R = np.where(wrong_RK.any(axis=1), wrong_RK.argmax(axis=1), most)
        return self._accepted_R

    def find_accepted_rows(self, drawn_T: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """Return the query rows whose draws count, and whether each is the last of its row."""
        left_T = self.num_accepted(drawn_T)[self.row_T] - self.place_T
        draws = np.flatnonzero(left_T >= 0)
        return draws, left_T[draws] == 0
