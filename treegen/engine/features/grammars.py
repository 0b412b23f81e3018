"""Grammars of rows: each row's state in its grammar, and the tokens that it may draw next.

A row's grammar state follows from its tokens: new tokens are read when its next mask is made. So
preemption needs no extra work, and in a search the path to a node is read like the row's own
tokens. The host makes masks while the device computes the logits to which they apply.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from treegen.common.device import StagingBuffer, to_device
from treegen.engine.compute.levels import Ints
from treegen.engine.features.grammar_state import (
    GrammarState,
    describe_failure,
    extend_hash,
    find_distinct,
    get_opening_tokens,
    start_state,
)
from treegen.engine.param_set import ParamSet
from treegen.engine.rows.engine_run import EngineRun
from treegen.engine.rows.table import RowPhase, VerifyInput
from treegen.engine.segments.segment import LiveRequest
from treegen.errors import InputError, ModelWarning
from treegen.ops.sampling.logits import Masks
from treegen.prompts.stops import Ending

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    from treegen.prompts.grammars import Grammar

_NO_MASK: Final = -1
_NO_ROW: Final = -2  # a serial number that no slot has
_ROWS_OF_LANE: Final = 32  # consecutive rows that use the same lane


class RowGrammars:
    """The grammars of the rows of one run.

    Attributes:
        used: Whether any row has had a grammar; until then, rows cost nothing here.
    """

    def __init__(self, run: EngineRun) -> None:
        """Set up a run in which no row has a grammar yet."""
        self._run = run
        self.used = False
        # By slot, with its row's serial number.
        self._states: dict[int, tuple[int, GrammarState]] = {}
        # By slot, for rows whose grammar has begun: serial number, tokens read, lane, a hash of the
        # grammar and of the text in it, and the matcher. For these rows the numbers here are valid,
        # not those in `_states`.
        self._bound = np.full((4, 0), _NO_ROW, dtype=np.int64)
        self._matchers = np.empty(0, dtype=object)
        # By slot: number of tokens of the row when its grammar failed, -1 if it has not, and why.
        self._failed: Ints = np.empty(0, dtype=np.int64)
        self._reasons: dict[int, str] = {}
        self._staging = StagingBuffer(turns=2)
        self._words = 0  # number of 32-bit words of a mask
        self._num_begun: WeakKeyDictionary[Grammar, int] = WeakKeyDictionary()

    def begin(self, requests: Sequence[LiveRequest], slots_PN: Ints) -> Masks | None:
        """Register new rows; return the masks of their first draws.

        Args:
            requests: The requests of the rows.
            slots_PN: Slots of the rows, [requests, rows of each].
        """
        matchers: list[LLMatcher | None] = []
        opening_tokens: list[Sequence[int]] = []
        for request, slots in zip(requests, slots_PN.tolist(), strict=True):
            param_set = self._run.param_sets[request.params]
            grammar = param_set.stopping.grammar
            if grammar is None:
                matchers.append(None)
                opening_tokens.append(())
                continue
            self.used, self._words = True, grammar.num_words
            lanes = self._assign_lanes(grammar, len(slots))
            # The last lane comes first, so that all lanes are created together.
            starts = {
                lane: start_state(request.segment, request.spec.tokens, param_set, grammar, lane)
                for lane in sorted(set(lanes), reverse=True)
            }
            for slot, lane in zip(slots, lanes, strict=True):
                self._states[slot] = int(self._run.rows.serial[slot]), starts[lane].copy()
            state = starts[lanes[0]]
            matchers.append(state.matcher if state.is_bound else None)
            opening_tokens.append(get_opening_tokens(state, param_set))
        if self.used:
            num_missing = len(self._run.rows.phase) - len(self._failed)
            self._failed = np.pad(self._failed, (0, num_missing), constant_values=-1)
            self._failed[slots_PN] = -1
        return self._build_first_masks(matchers, opening_tokens)

    def have_begun(self, slots: Ints) -> NDArray[np.bool_]:
        """Return whether the grammar of each row has begun, by the tokens that were read so far."""
        states = [self._states.get(slot, (_NO_ROW, None)) for slot in slots.tolist()]
        begun = [state is not None and state.begins is not None for _, state in states]
        serials = np.array([serial for serial, _ in states])
        has_begun: NDArray[np.bool_] = np.array(begun) & (serials == self._run.rows.serial[slots])
        return has_begun

    def change_endings(
        self,
        endings: dict[int, Ending],
        slots: Ints,
        tokens: list[tuple[int, ...]],
        requests: Sequence[LiveRequest],
    ) -> None:
        """Change the endings of samples whose grammar has failed, and cut their tokens there.

        Such a row was forced to draw an end of sequence, which the model did not choose.

        Args:
            endings: How samples end, by index into `slots`.
            slots: Slots of rows.
            tokens: The tokens of each.
            requests: The request of each.
        """
        if not self.used:
            return
        failed = self._failed[slots]
        for at in np.flatnonzero((failed >= 0) & (failed < self._run.rows.count[slots])).tolist():
            if at not in endings:
                continue
            spec, stopping = requests[at].spec, self._run.param_sets[requests[at].params].stopping
            tokens[at] = tokens[at][: int(failed[at])]
            endings[at] = "error", None, stopping.text(spec.tokens, tokens[at])
            warnings.warn(
                f"a sample of prompt {spec.id!r} ends with finish_reason 'error', because its "
                f"structure allows no further token: {self._reasons[int(slots[at])]}",
                ModelWarning,
                stacklevel=2,
            )

    def masks(
        self, slots: Ints, serials: Ints, verify_input: VerifyInput | None, num: int
    ) -> Masks | None:
        """Return the masks of a step; all tokens of its rows must be known.

        Args:
            slots: Slot of each query row.
            serials: Serial number of each query row's row.
            verify_input: Draft tokens that the step verifies; None for one draw per row.
            num: Number of query rows of the step, padding included.
        """
        run, rows = self._run, self._run.rows
        firsts = np.arange(len(slots)) if verify_input is None else verify_input.offsets[:-1]
        alive = (rows.serial[slots] == serials) & (rows.phase[slots] == RowPhase.LIVE)
        firsts = firsts[alive[firsts]]
        indices, matchers = self._advance_matchers(slots[firsts])
        if not matchers:
            return None
        at = firsts[indices]
        index = np.full(num, _NO_MASK)
        drawing = slots[at]
        if verify_input is None:
            chosen, index[at] = self._find_distinct_texts(drawing)
            bits = self._build_masks([matchers[i] for i in chosen], slots=drawing[chosen].tolist())
            self._copy_failures(drawing, drawing[chosen][index[at]])
        else:
            drafts = [verify_input.of_row(int(verify_input.row_T[first])) for first in at.tolist()]
            at = np.concatenate(
                [
                    first + np.arange(len(row_drafts) + 1)
                    for first, row_drafts in zip(at, drafts, strict=True)
                ]
            )
            index[at] = np.arange(len(at))
            bits = self._build_masks(matchers, drafts, slots=drawing.tolist())
        return Masks(bits, to_device(index, run.model.device))

    def _find_distinct_texts(self, slots: Ints) -> tuple[Ints, Ints]:
        """Find rows that share a mask: those with the same text in the same grammar.

        Args:
            slots: Slots of rows.

        Returns:
            The index of the first row of each text, ascending, and each row's position in it.
        """
        serials, *_, hashes = self._bound[:, slots]
        unique = -1 - np.arange(len(slots))
        return find_distinct(np.where(serials == self._run.rows.serial[slots], hashes, unique))

    def _copy_failures(self, slots: Ints, originals: Ints) -> None:
        """Record that rows have failed if the rows whose masks they share have.

        Args:
            slots: Slots of the rows.
            originals: For each row, the slot of the row whose matcher made its mask.
        """
        has_failed = self._failed[originals] >= 0
        self._failed[slots] = np.where(has_failed, self._run.rows.count[slots], -1)
        for at in np.flatnonzero(has_failed).tolist():
            self._reasons[int(slots[at])] = self._reasons[int(originals[at])]

    def _record_failures(
        self,
        slots: Sequence[int],
        matchers: Sequence[LLMatcher],
        drafts: Sequence[list[int]] | None,
        table: NDArray[np.int32],
    ) -> None:
        """Record rows whose matchers have failed, and so allow only the end of the text.

        A matcher may fail on draft tokens that its row does not draw. So the matcher is made again,
        and the row fails only if it draws the draft tokens up to the failure.

        Args:
            slots: Slot of each matcher's row.
            matchers: Matchers that have filled the table.
            drafts: Draft tokens of each row; None without drafts.
            table: The masks, including those after draft tokens.
        """
        rows, start = self._run.rows, 0
        self._failed[slots] = -1
        for at, (slot, matcher) in enumerate(zip(slots, matchers, strict=True)):
            row_drafts = drafts[at] if drafts is not None else []
            if matcher.is_error():
                matcher = self._remake_matcher(slot).deep_copy()
                for num_read in range(len(row_drafts) + 1):
                    if num_read:
                        matcher.consume_token(row_drafts[num_read - 1])
                    bits = np.frombuffer(matcher.compute_bitmask(), np.int32)
                    table[start + num_read] = bits[: self._words]
                    if matcher.is_error():
                        self._failed[slot] = rows.count[slot] + num_read
                        self._reasons[slot] = describe_failure(matcher)
                        break
            start += len(row_drafts) + 1

    def _remake_matcher(self, slot: int) -> LLMatcher:
        """Replace the matcher of a row by a new one that has read only the row's tokens."""
        rows, state = self._run.rows, self._states[slot][1]
        grammar = self._run.param_sets[int(rows.params[slot])].stopping.grammar
        assert grammar is not None
        state.matcher = self._matchers[slot] = grammar.start(state.lane)
        tokens = [*state.path_tokens, *rows.tokens(np.array([slot]))[0]]
        state.matcher.consume_tokens(tokens[state.begins or 0 :])
        return state.matcher

    def get_forced_tokens(self, slots: Ints) -> dict[int, list[int]]:
        """Return the tokens that grammars force next, by index into `slots`.

        All tokens of the rows must be known.
        """
        matchers = zip(*self._advance_matchers(slots), strict=True)
        forced = {int(index): matcher.compute_ff_tokens() for index, matcher in matchers}
        return {index: tokens for index, tokens in forced.items() if tokens}

    def count_allowed_drafts(self, slots: Ints, tokens_RK: Ints, num_R: Ints) -> Ints:
        """Return how many draft tokens of each row, from the first on, its grammar allows.

        The drafts of a row that is still reasoning end at the token that may end its reasoning,
        because the mask after that is not known yet. All tokens of the rows must be known.

        Args:
            slots: Slots of the rows, [R].
            tokens_RK: Draft tokens, [R, K].
            num_R: Number of draft tokens of each row, [R].
        """
        num_R = num_R.copy()
        matchers = dict(zip(*self._advance_matchers(slots), strict=True))
        for row, slot in enumerate(slots.tolist()):
            if not num_R[row] or slot not in self._states:
                continue
            serial, state = self._states[slot]
            if serial != self._run.rows.serial[slot]:
                continue
            drafts = tokens_RK[row, : num_R[row]]
            if (matcher := matchers.get(row)) is not None:
                num_R[row] = matcher.validate_tokens(drafts.tolist())
                if matcher.is_error():  # perhaps because of a draft token
                    num_R[row] = 0
                    self._remake_matcher(slot)
            elif state.begins is not None:
                num_R[row] = min(num_R[row], max(state.begins - state.num_read - 1, 0))
            else:
                params = int(self._run.rows.params[slot])
                tags = self._run.param_sets[params].stopping.thinking
                assert tags is not None
                num_R[row] = tags.num_open(drafts)
        return num_R

    def _assign_lanes(self, grammar: Grammar, num: int) -> list[int]:
        """Return lanes for further rows; few rows use only the first lane, which exists already."""
        begun = self._num_begun.get(grammar, 0)
        self._num_begun[grammar] = begun + num
        return [at // _ROWS_OF_LANE % grammar.num_lanes for at in range(begun, begun + num)]

    def _build_first_masks(
        self, matchers: Sequence[LLMatcher | None], opening_tokens: Sequence[Sequence[int]]
    ) -> Masks | None:
        bound = [matcher for matcher in matchers if matcher is not None]
        if not bound:
            return None
        index = np.full(len(matchers), _NO_MASK)
        index[[matcher is not None for matcher in matchers]] = np.arange(len(bound))
        extra_pairs = [
            (int(index[row]), token)
            for row, tokens in enumerate(opening_tokens)
            for token in tokens
            if index[row] >= 0
        ]
        bits = self._build_masks(bound, extra_pairs=extra_pairs)
        if failed := [matcher for matcher in bound if matcher.is_error()]:
            raise InputError(
                f"the structure allows no first token: {describe_failure(failed[0])}; correct the "
                "structure"
            )
        return Masks(bits, to_device(index, self._run.model.device))

    def _build_masks(
        self,
        matchers: Sequence[LLMatcher],
        drafts: Sequence[list[int]] | None = None,
        extra_pairs: Sequence[tuple[int, int]] = (),
        slots: Sequence[int] = (),
    ) -> torch.Tensor:
        """Build the masks after each matcher's text and each of its drafts: int32 [masks, words].

        Args:
            matchers: The matchers.
            drafts: Draft tokens of each matcher's row; None without drafts.
            extra_pairs: (index of a mask, token) pairs of further allowed tokens.
            slots: Slots of the matchers' rows, to record failures; empty for new rows.
        """
        num = len(matchers) + (sum(map(len, drafts)) if drafts is not None else 0)
        shape = num, self._words

        def write(flat: NDArray[Any]) -> None:
            table = flat.reshape(shape)
            _fill_bitmasks(matchers, drafts, table)
            if slots:
                self._record_failures(slots, matchers, drafts, table)
            for row, token in extra_pairs:
                table[row, token >> 5] |= np.int32(np.uint32(1 << (token & 31)).astype(np.int32))

        return self._staging.send(shape, torch.int32, self._run.model.device, write)

    def _advance_matchers(self, slots: Ints) -> tuple[Ints, list[LLMatcher]]:
        """Let matchers read all new tokens; return the indices of rows with a mask, and matchers.

        The remaining rows may draw any token. Most rows have one new token, which all matchers read
        in parallel, in several threads. Matchers are ordered by lane, so that few threads need the
        same lane.
        """
        from llguidance.numpy import consume_token_par

        rows = self._run.rows
        if (num_missing := len(rows.serial) - len(self._matchers)) > 0:
            self._bound = np.pad(self._bound, ((0, 0), (0, num_missing)), constant_values=_NO_ROW)
            self._matchers = np.append(self._matchers, np.empty(num_missing, dtype=object))
        serials, num_read, lanes, hashes = self._bound
        by_lane = np.argsort(lanes[slots], kind="stable")
        slots = slots[by_lane]
        last, unread = rows.last[slots], rows.count[slots] - num_read[slots]
        is_current = (serials[slots] == rows.serial[slots]) & (unread >= 0) & (unread <= 1)
        is_current &= ~self._run.param_sets.may_end(rows.params[slots], last)
        row_matchers = np.empty(len(slots), dtype=object)
        row_matchers[is_current] = self._matchers[slots[is_current]]
        reads = is_current & (unread == 1)
        num_read[slots[reads]] += 1
        hashes[slots[reads]] = extend_hash(hashes[slots[reads]], [last[reads]])
        new = list(zip(row_matchers[reads].tolist(), last[reads].tolist(), strict=True))
        for row in np.flatnonzero(~is_current).tolist():
            row_matchers[row] = self._catch_up(int(slots[row]), new)
        if new := [pair for pair in new if not pair[0].is_error()]:
            consume_token_par(_get_executor(), new)  # a failure shows in `is_error`
        matchers = row_matchers.tolist()
        indices = [index for index, matcher in enumerate(matchers) if matcher is not None]
        return by_lane[indices], [matchers[index] for index in indices]

    def _catch_up(self, slot: int, new: list[tuple[LLMatcher, int]]) -> LLMatcher | None:
        """Return the matcher of a row once it has read its tokens; None if any token is allowed.

        Args:
            slot: Slot of the row.
            new: Gets (matcher, last token) if the matcher still has to read the last token.
        """
        rows = self._run.rows
        serial, num, last = int(rows.serial[slot]), int(rows.count[slot]), int(rows.last[slot])
        owner, state = self._states.get(slot, (-1, None))
        param_set = self._run.param_sets[int(rows.params[slot])]
        if state is None or owner != serial or (num and last in param_set.stopping.ids):
            return None  # the row has no grammar, or has finished
        num_hashed = None
        if self._bound[0, slot] == serial:
            num_hashed = state.num_read = len(state.path_tokens) + int(self._bound[1, slot])
        unread = len(state.path_tokens) + num - state.num_read
        if unread == 1 and state.begins is not None and state.num_read >= state.begins:
            state.num_read += 1
            new.append((state.matcher, last))
        elif unread > 0:
            self._read(slot, state, num, param_set)
        if state.begins is not None and state.num_read >= state.begins:
            num_path, start = len(state.path_tokens), state.begins
            text_hash = id(param_set.stopping.grammar)
            if num_hashed is not None:
                start, text_hash = num_hashed, int(self._bound[3, slot])
            num_read = state.num_read - num_path
            generated = rows.generated.between(slot, max(start - num_path, 0), num_read)
            text_hash = extend_hash(text_hash, [*state.path_tokens[start:], *generated.tolist()])
            self._bound[:, slot] = serial, num_read, state.lane, text_hash
            self._matchers[slot] = state.matcher
        return state.matcher if state.is_bound else None

    def _read(self, slot: int, state: GrammarState, num: int, param_set: ParamSet) -> None:
        """Read the tokens of a row, out of `num`, that its state has not read yet."""
        rows, start, num_path = self._run.rows, state.num_read, len(state.path_tokens)
        tags, stop = param_set.stopping.thinking, num_path + num

        def tokens_from(first: int) -> list[int]:
            own = rows.generated.between(slot, max(first - num_path, 0), num)
            return [*state.path_tokens[first:], *own.tolist()]

        if state.begins is not None:
            state.num_read = stop
            state.matcher.consume_tokens(tokens_from(max(start, state.begins)))
            return
        if start and tags is not None:
            tail = tokens_from(max(start - tags.num_context, 0))
            if not tags.may_close(tail, stop - max(start, 0)):
                state.num_read = stop  # the row is still reasoning
                return
        state.read(tokens_from(0), param_set)


def _fill_bitmasks(
    matchers: Sequence[LLMatcher], drafts: Sequence[list[int]] | None, table: NDArray[np.int32]
) -> None:
    """Write the masks of matchers into rows of a table, in parallel in several threads."""
    from llguidance.numpy import (
        fill_next_token_bitmask_par,
        fill_next_token_bitmask_par_with_draft_tokens,
    )

    if drafts is None:
        without_drafts = list(zip(matchers, range(len(matchers)), strict=True))
    else:
        table.fill(-1)  # masks of a draft token that does not fit, and of all drafts after it
        starts = itertools.accumulate((len(row_drafts) + 1 for row_drafts in drafts), initial=0)
        jobs = list(zip(matchers, starts, drafts, strict=False))
        if with_drafts := [job for job in jobs if job[2]]:
            fill_next_token_bitmask_par_with_draft_tokens(_get_executor(), with_drafts, table)
        without_drafts = [(matcher, start) for matcher, start, row_drafts in jobs if not row_drafts]
    if without_drafts:
        fill_next_token_bitmask_par(_get_executor(), without_drafts, table)


@functools.cache
def _get_executor() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor()
