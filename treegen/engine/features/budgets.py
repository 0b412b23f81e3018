"""Thinking budgets: finds rows that have used theirs up, and forces the tokens that close thinking.

A row is checked when its thinking may have used up its budget and all its tokens are known. If the
row opened its thinking itself, after space or by several tokens, it is checked again when the
budget counted from there is used up. If it is still thinking then, its next tokens are the closing
ones. The host chooses them, and they replace the draws of the pass. The text of a grammar
does not count as thinking, even if it contains the tags.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from treegen.engine.compute.levels import Ints
from treegen.engine.features.grammars import RowGrammars
from treegen.engine.rows.engine_run import EngineRun, RowFeature
from treegen.engine.segments.segment import LiveRequest

_NEVER: Final = -1
_NO_CHECK: Final = 2**62


class ThinkingBudgets(RowFeature):
    """The budgets of the rows of one run."""

    _fill = _NEVER

    def __init__(self, run: EngineRun, grammars: RowGrammars) -> None:
        """Set up a run in which no row has a budget yet; `grammars` has the rows' grammars."""
        super().__init__(run)
        self._grammars = grammars
        # By slot: the number of tokens at which to check the row; the number of tokens after which
        # tokens are forced; and the forced tokens.
        self._due: Ints = np.empty(0, dtype=np.int64)
        self._start: Ints = np.empty(0, dtype=np.int64)
        self._tokens: Ints = np.empty((0, 1), dtype=np.int64)

    def begin(self, requests: Sequence[LiveRequest], slots_PN: Ints) -> None:
        """Set the budgets and forced tokens of new rows, in place of those of rows before them.

        Args:
            requests: The requests of the rows.
            slots_PN: Slots of the rows, [requests, rows of each].
        """
        budgets = [self._run.param_sets[r.params].params.max_thinking_tokens for r in requests]
        self.used |= any(budget is not None for budget in budgets)
        self.used |= any(request.spec.forced for request in requests)
        if not self.used:
            return
        self._grow_arrays()
        self._due[slots_PN] = self._start[slots_PN] = _NEVER
        for request, slots, budget in zip(requests, slots_PN, budgets, strict=True):
            forced = request.spec.forced
            if forced:
                self._force(slots, forced, 0)
            tags = self._run.param_sets[request.params].stopping.thinking
            if tags is None or budget is None:
                continue
            # If the forced tokens use up the budget, they include the closing tokens.
            self._due[slots] = due = max(tags.first_due(request.spec.tokens, budget), len(forced))
            if not due:  # the prompt opens the thinking, which must end at once
                self._force(slots, tags.end, 0)

    def drop_within_grammars(self, requests: Sequence[LiveRequest], slots_PN: Ints) -> None:
        """Drop the budgets of new rows that continue the text of a grammar.

        Args:
            requests: The requests of the rows.
            slots_PN: Slots of the rows, [requests, rows of each]; their grammars are set up.
        """
        if self.used:
            has_begun = self._grammars.have_begun(slots_PN[:, 0])
            has_forced = np.array([bool(request.spec.forced) for request in requests])
            self._due[slots_PN[has_begun]] = _NEVER
            self._start[slots_PN[has_begun & ~has_forced]] = _NEVER

    def decide(self, order: Ints, counts: Ints, is_known: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Check rows whose thinking has used up its budget; return which rows can continue.

        It must be called only if a budget is `used`.

        Args:
            order: Slots of the rows.
            counts: Number of tokens of each row.
            is_known: Whether all tokens of each row are known. A row continues unless it must be
                checked and its tokens are not known.
        """
        due = self._due[order] == counts
        ready = due & is_known
        for slot in order[ready].tolist():
            self._check(slot)
        continues: NDArray[np.bool_] = ~due | ready
        return continues

    def get_check_counts(self, order: Ints, counts: Ints) -> Ints | int:
        """Return the number of tokens at which to check each row; a large number if never."""
        if not self.used:
            return _NO_CHECK
        due = self._due[order]
        return np.where(due > counts, due, _NO_CHECK)

    def _check(self, slot: int) -> None:
        rows = self._run.rows
        request = self._run.requests[int(rows.request[slot])]
        param_set = self._run.param_sets[int(rows.params[slot])]
        tags, budget = param_set.stopping.thinking, param_set.params.max_thinking_tokens
        assert tags is not None and budget is not None
        at = np.array([slot])
        (tokens,) = rows.tokens(at)
        due = tags.due(request.spec.tokens, tokens, budget)
        if self._grammars.have_begun(at).any():
            due = None
        if due is not None and due <= len(tokens):
            self._force(at, tags.end, len(tokens))
        else:
            self._due[slot] = _NEVER if due is None else due

    def _force(self, slots: Ints, tokens: Sequence[int], start: int) -> None:
        num_missing = len(tokens) - self._tokens.shape[1]
        if num_missing > 0:
            self._tokens = np.pad(self._tokens, ((0, 0), (0, num_missing)), constant_values=-1)
        self._tokens[slots] = -1
        self._tokens[slots, : len(tokens)] = tokens
        self._due[slots], self._start[slots] = _NEVER, start

    def get_forced_tokens(self, order: Ints, counts: Ints) -> Ints:
        """Return the forced next token of each row, or -1; `order` and `counts` as for `decide`."""
        if not self.used:
            return np.full(len(order), -1)
        start = self._start[order]
        offset = counts - start
        inside = (start != _NEVER) & (offset >= 0) & (offset < self._tokens.shape[1])
        return np.where(inside, self._tokens[order, np.where(inside, offset, 0)], -1)

    def get_first_forced_tokens(self, slots_PN: Ints) -> Ints | None:
        """Return the forced first token of each request's rows, or -1; None if no row has one."""
        if not self.used:
            return None
        slots = slots_PN[:, 0]
        forced = self.get_forced_tokens(slots, np.zeros_like(slots))
        return forced if (forced >= 0).any() else None
