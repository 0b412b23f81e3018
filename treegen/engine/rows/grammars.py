"""Grammars of rows: each row's state in its grammar, and the tokens that it may draw next.

A row's grammar state follows from its tokens: new tokens are read when its next mask is made. So
preemption needs no extra work, and in a search the path to a node is read like the row's own
tokens. The host makes masks while the device computes the logits to which they apply.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from treegen.common.device import StagingBuffer, to_device
from treegen.engine.compute.levels import Ints
from treegen.engine.param_set import ParamSet
from treegen.engine.rows.engine_run import EngineRun
from treegen.engine.rows.table import RowPhase
from treegen.engine.rows.verify_input import VerifyInput
from treegen.engine.segments.segment import LiveRequest, LiveSegment
from treegen.errors import InputError
from treegen.ops.sampling.masks import Masks
from treegen.prompts.radix import Tokens

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    from treegen.prompts.grammars import Grammar

_NO_MASK: Final = -1
_NO_ROW: Final = -2  # a serial number that no slot has
_ROWS_OF_LANE: Final = 32  # consecutive rows that use the same lane


@dataclass(slots=True, eq=False)
class _GrammarState:
    """The state of a text in its grammar.

    prompt: the end of the prompt before the text.
    before: drawn tokens on the path to a node of a search; the text begins with them.
    matcher: the matcher, which has read the text so far.
    lane: lane of the matcher, as in `Grammar.start`.
    begins: number of tokens before the grammar begins; None while the text may still be reasoning.
    num_read: number of tokens of the text that were read.
    """

    prompt: Tokens
    before: list[int]
    matcher: LLMatcher
    lane: int
    begins: int | None
    num_read: int = 0

    @property
    def is_bound(self) -> bool:
        """Whether the grammar restricts the next token."""
        return self.num_read == 0 if self.begins is None else self.num_read >= self.begins

    def copy(self) -> _GrammarState:
        """Return an independent copy for another row."""
        return replace(self, matcher=self.matcher.deep_copy())

    def read(self, tokens: Sequence[int], each: ParamSet) -> None:
        """Read the tokens of a text that were not read yet; `tokens` is the whole text."""
        start = max(self.num_read, self.begins or 0)
        if self.begins is None:
            self.begins = _find_grammar_start(self.prompt, tokens, each)
            start = self.begins or 0
        if self.begins is not None:
            self.matcher.consume_tokens(list(tokens[start:]))
        self.num_read = len(tokens)


class RowGrammars:
    """The grammars of the rows of one run.

    used: whether any row has had a grammar; until then, rows cost nothing here.
    """

    def __init__(self, run: EngineRun) -> None:
        """Set up a run in which no row has a grammar yet."""
        self._run = run
        self.used = False
        self._places: dict[
            int, tuple[int, _GrammarState]
        ] = {}  # by slot, with its row's serial number
        # By slot, for rows whose grammar has begun: serial number, tokens read, lane, and the
        # matcher. For these rows the numbers here are valid, not those in `_places`.
        self._bound = np.full((3, 0), _NO_ROW, dtype=np.int64)
        self._matchers = np.empty(0, dtype=object)
        self._staging = StagingBuffer(turns=2)
        self._words = 0  # number of 32-bit words of a mask
        self._num_begun: WeakKeyDictionary[Grammar, int] = WeakKeyDictionary()

    def begin(self, requests: Sequence[LiveRequest], slots_PN: Ints) -> Masks | None:
        """Register new rows; return the masks of their first draws.

        Args:
            requests: The requests of the rows.
            slots_PN: Slots of the rows, [requests, rows of each].
        """
        found: list[LLMatcher | None] = []
        extra: list[Sequence[int]] = []
        for request, slots in zip(requests, slots_PN.tolist(), strict=True):
            each = self._run.param_sets[request.params]
            grammar = each.stopping.grammar
            if grammar is None:
                found.append(None)
                extra.append(())
                continue
            self.used, self._words = True, grammar.num_words
            lanes = self._lanes_of(grammar, len(slots))
            # The last lane comes first, so that all lanes are created together.
            starts = {
                lane: start_state(request.segment, request.spec.tokens, each, grammar, lane)
                for lane in sorted(set(lanes), reverse=True)
            }
            for slot, lane in zip(slots, lanes, strict=True):
                self._places[slot] = int(self._run.rows.serial[slot]), starts[lane].copy()
            place = starts[lanes[0]]
            found.append(place.matcher if place.is_bound else None)
            extra.append(_may_open(place, each))
        return self._masks(found, extra)

    def masks(
        self, slots: Ints, serials: Ints, guesses: VerifyInput | None, num: int
    ) -> Masks | None:
        """Return the masks of a step; all tokens of its rows must be known.

        Args:
            slots: Slot of each query row.
            serials: Serial number of each query row's row.
            guesses: Draft tokens that the step verifies; None for one draw per row.
            num: Number of query rows of the step, padding included.
        """
        run, rows = self._run, self._run.rows
        firsts = np.arange(len(slots)) if guesses is None else guesses.offsets[:-1]
        alive = (rows.serial[slots] == serials) & (rows.phase[slots] == RowPhase.LIVE)
        firsts = firsts[alive[firsts]]
        places, matchers = self._advance_matchers(slots[firsts])
        if not matchers:
            return None
        at = firsts[places]
        drawing = slots[at].tolist()
        given: list[list[int]] | None = None
        if guesses is not None:
            given = [guesses.of_row(int(guesses.row_T[place])) for place in at.tolist()]
            at = np.concatenate(
                [place + np.arange(len(each) + 1) for place, each in zip(at, given, strict=True)]
            )
        index = np.full(num, _NO_MASK)
        index[at] = np.arange(len(at))
        bits = self._build_masks(matchers, given, slots=drawing)
        return Masks(bits, to_device(index, run.model.device))

    def _note_failed(
        self,
        slots: Sequence[int],
        matchers: Sequence[LLMatcher],
        given: Sequence[list[int]] | None,
        table: NDArray[np.int32],
    ) -> None:
        """Record rows whose matchers have failed, and so allow only the end of the text.

        A matcher may fail on draft tokens that its row does not draw. So the matcher is made again,
        and the row fails only if it draws the draft tokens up to the failure.

        Args:
            slots: Slot of each matcher's row.
            matchers: Matchers that have filled the table.
            given: Draft tokens of each row; None without drafts.
            table: The masks, including those after draft tokens.
        """
        rows, start = self._run.rows, 0
        rows.failed[slots] = -1
        for at, (slot, matcher) in enumerate(zip(slots, matchers, strict=True)):
            guesses = given[at] if given is not None else []
            if matcher.is_error():
                matcher = self._made_anew(slot).deep_copy()
                for place in range(len(guesses) + 1):
                    if place:
                        matcher.consume_token(guesses[place - 1])
                    bits = np.frombuffer(matcher.compute_bitmask(), np.int32)
                    table[start + place] = bits[: self._words]
                    if matcher.is_error():
                        rows.failed[slot] = rows.count[slot] + place
                        rows.reasons[slot] = _reason(matcher)
                        break
            start += len(guesses) + 1

    def _made_anew(self, slot: int) -> LLMatcher:
        """Replace the matcher of a row by a new one that has read only the row's tokens."""
        rows, place = self._run.rows, self._places[slot][1]
        grammar = self._run.param_sets[int(rows.params[slot])].stopping.grammar
        assert grammar is not None
        place.matcher = self._matchers[slot] = grammar.start(place.lane)
        tokens = [*place.before, *rows.tokens(np.array([slot]))[0]]
        place.matcher.consume_tokens(tokens[place.begins or 0 :])
        return place.matcher

    def get_forced_tokens(self, slots: Ints) -> dict[int, list[int]]:
        """Return the tokens that grammars force next, by index into `slots`.

        All tokens of the rows must be known.
        """
        found = zip(*self._advance_matchers(slots), strict=True)
        spelled = {int(place): matcher.compute_ff_tokens() for place, matcher in found}
        return {place: tokens for place, tokens in spelled.items() if tokens}

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
            if not num_R[row] or slot not in self._places:
                continue
            serial, place = self._places[slot]
            if serial != self._run.rows.serial[slot]:
                continue
            guesses = tokens_RK[row, : num_R[row]]
            if (matcher := matchers.get(row)) is not None:
                num_R[row] = matcher.validate_tokens(guesses.tolist())
                if matcher.is_error():  # perhaps because of a draft token
                    num_R[row] = 0
                    self._made_anew(slot)
            elif place.begins is not None:
                num_R[row] = min(num_R[row], max(place.begins - place.num_read - 1, 0))
            else:
                params = int(self._run.rows.params[slot])
                tags = self._run.param_sets[params].stopping.thinking
                assert tags is not None
                num_R[row] = tags.num_open(guesses)
        return num_R

    def _lanes_of(self, grammar: Grammar, num: int) -> list[int]:
        """Return lanes for further rows; few rows use only the first lane, which exists already."""
        begun = self._num_begun.get(grammar, 0)
        self._num_begun[grammar] = begun + num
        return [at // _ROWS_OF_LANE % grammar.num_lanes for at in range(begun, begun + num)]

    def _masks(
        self, matchers: Sequence[LLMatcher | None], extra: Sequence[Sequence[int]]
    ) -> Masks | None:
        known = [each for each in matchers if each is not None]
        if not known:
            return None
        index = np.full(len(matchers), _NO_MASK)
        index[[each is not None for each in matchers]] = np.arange(len(known))
        more = [(int(index[row]), token) for row, tokens in enumerate(extra) for token in tokens]
        bits = self._build_masks(known, more=[pair for pair in more if pair[0] >= 0])
        if failed := [each for each in known if each.is_error()]:
            raise InputError(f"a structure allows no first token: {_reason(failed[0])}; mend it")
        return Masks(bits, to_device(index, self._run.model.device))

    def _build_masks(
        self,
        matchers: Sequence[LLMatcher],
        given: Sequence[list[int]] | None = None,
        more: Sequence[tuple[int, int]] = (),
        slots: Sequence[int] = (),
    ) -> torch.Tensor:
        """Build the masks after each matcher's text and each of its drafts: int32 [masks, words].

        Args:
            matchers: The matchers.
            given: Draft tokens of each matcher's row; None without drafts.
            more: (index of a mask, token) pairs of further allowed tokens.
            slots: Slots of the matchers' rows, to record failures; empty for new rows.
        """
        num = len(matchers) + (sum(map(len, given)) if given is not None else 0)
        shape = num, self._words

        def write(flat: NDArray[Any]) -> None:
            table = flat.reshape(shape)
            _fill(matchers, given, table)
            if slots:
                self._note_failed(slots, matchers, given, table)
            for row, token in more:
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
        if (lack := len(rows.serial) - len(self._matchers)) > 0:
            self._bound = np.pad(self._bound, ((0, 0), (0, lack)), constant_values=_NO_ROW)
            self._matchers = np.append(self._matchers, np.empty(lack, dtype=object))
        serials, num_read, lanes = self._bound
        by_lane = np.argsort(lanes[slots], kind="stable")
        slots = slots[by_lane]
        last, unread = rows.last[slots], rows.count[slots] - num_read[slots]
        known = (serials[slots] == rows.serial[slots]) & (unread >= 0) & (unread <= 1)
        known &= ~self._run.param_sets.may_end(rows.params[slots], last)
        found = np.empty(len(slots), dtype=object)
        found[known] = self._matchers[slots[known]]
        reads = known & (unread == 1)
        num_read[slots[reads]] += 1
        new = list(zip(found[reads].tolist(), last[reads].tolist(), strict=True))
        for row in np.flatnonzero(~known).tolist():
            found[row] = self._catch_up(int(slots[row]), new)
        if new := [each for each in new if not each[0].is_error()]:
            consume_token_par(_threads(), new)  # a failure shows in `is_error`
        matchers = found.tolist()
        places = [place for place, matcher in enumerate(matchers) if matcher is not None]
        return by_lane[places], [matchers[place] for place in places]

    def _catch_up(self, slot: int, new: list[tuple[LLMatcher, int]]) -> LLMatcher | None:
        """Return the matcher of a row once it has read its tokens; None if any token is allowed.

        Args:
            slot: Slot of the row.
            new: Gets (matcher, last token) if the matcher still has to read the last token.
        """
        rows = self._run.rows
        serial, num, last = int(rows.serial[slot]), int(rows.count[slot]), int(rows.last[slot])
        known, place = self._places.get(slot, (-1, None))
        each = self._run.param_sets[int(rows.params[slot])]
        if place is None or known != serial or (num and last in each.stopping.ids):
            return None  # the row has no grammar, or is over
        if self._bound[0, slot] == serial:
            place.num_read = len(place.before) + int(self._bound[1, slot])
        unread = len(place.before) + num - place.num_read
        if unread == 1 and place.begins is not None and place.num_read >= place.begins:
            place.num_read += 1
            new.append((place.matcher, last))
        elif unread > 0:
            self._read(slot, place, num, each)
        if place.begins is not None and place.num_read >= place.begins:
            self._bound[:, slot] = serial, place.num_read - len(place.before), place.lane
            self._matchers[slot] = place.matcher
        return place.matcher if place.is_bound else None

    def _read(self, slot: int, place: _GrammarState, num: int, each: ParamSet) -> None:
        """Read the tokens of a row, out of `num`, that its state has not read yet."""
        rows, start, num_before = self._run.rows, place.num_read, len(place.before)
        new = rows.generated.between(slot, max(start - num_before, 0), num)
        tags = each.stopping.thinking
        if place.begins is None and start and tags and not tags.may_close(new):
            place.num_read = num_before + num  # the row is still reasoning
        elif place.begins is None:
            place.read([*place.before, *rows.tokens(np.array([slot]))[0]], each)
        else:
            place.num_read = num_before + num
            place.matcher.consume_tokens(new[max(place.begins - start, 0) :].tolist())


def start_state(
    segment: LiveSegment, prompt: Tokens, each: ParamSet, grammar: Grammar, lane: int = 0
) -> _GrammarState:
    """Return the grammar state in which a text below a segment starts.

    Args:
        segment: The segment at the end of the prompt.
        prompt: Tokens of the prompt; the end is enough.
        each: Sampling parameters of the text.
        grammar: Its grammar.
        lane: As in `Grammar.start`.

    Raises:
        InputError: the tokens drawn on the path to the segment do not fit the grammar.
    """
    stopping = each.stopping
    before = _drawn_before(segment, each.params.structure)
    if before:
        prompt = segment.path_tokens()[: -len(before)]
    thinks = stopping.thinking is not None and not stopping.thinking.closes(prompt)
    place = _GrammarState(prompt, before, grammar.start(lane), lane, None if thinks else 0)
    if before:
        place.read(before, each)
        if place.begins is not None:  # closing tags that were cut off are not continued
            place.begins = min(place.begins, len(before))
    elif thinks and (tags := stopping.thinking) and (tags.always or tags.opens(prompt)):
        place.num_read = -1  # so that the grammar does not restrict the first token
        if place.is_bound and not place.matcher.is_error():
            place.matcher.compute_bitmask()  # which fails if no token can follow
    if place.matcher.is_error():
        raise InputError(
            f"the text of the node cannot begin a text of its {(each.params.structure or '?')[0]} "
            f"({_reason(place.matcher)}); sample it without, or from a node above"
        )
    return place


def _drawn_before(segment: LiveSegment, structure: object) -> list[int]:
    """Return the tokens up to a segment's end, from the first one drawn for the same grammar."""
    path: list[LiveSegment] = []
    first = 0  # number of segments of the path that count
    for above in segment.path():
        path.append(above)
        if above.drawn and above.structure != structure:
            break
        if above.drawn:
            first = len(path)
    return [int(token) for above in path[:first][::-1] for token in above.tokens]


def _may_open(place: _GrammarState, each: ParamSet) -> Sequence[int]:
    """Return tokens allowed first in addition to the grammar's: the one that opens reasoning."""
    tags = each.stopping.thinking
    if tags is None or place.begins is not None or place.num_read or tags.opening_id is None:
        return ()
    return (tags.opening_id,)


def _find_grammar_start(prompt: Tokens, tokens: Sequence[int], each: ParamSet) -> int | None:
    """Return how many tokens of a text precede its grammar; None while it is reasoning."""
    tags, ids = each.stopping.thinking, np.array(tokens, dtype=np.int32)
    if tags is None or not tags.begins(prompt, ids):
        return 0
    if tags.is_open(prompt, ids):
        return None
    closed = tags.closed_at(prompt, ids, each.params)
    return None if tags.always and not closed else closed


def _reason(matcher: LLMatcher) -> str:
    """Return why a matcher has failed, in one line."""
    return shorten((matcher.get_error().splitlines() or ["no reason is given"])[0], 200)


def _fill(
    matchers: Sequence[LLMatcher], given: Sequence[list[int]] | None, table: NDArray[np.int32]
) -> None:
    """Write the masks of matchers into rows of a table, in parallel in several threads."""
    from llguidance.numpy import (
        fill_next_token_bitmask_par,
        fill_next_token_bitmask_par_with_draft_tokens,
    )

    if given is None:
        others = list(zip(matchers, range(len(matchers)), strict=True))
    else:
        table.fill(-1)  # masks of a draft token that does not fit, and of all drafts after it
        starts = itertools.accumulate((len(each) + 1 for each in given), initial=0)
        jobs = list(zip(matchers, starts, given, strict=False))
        if guessed := [job for job in jobs if job[2]]:
            fill_next_token_bitmask_par_with_draft_tokens(_threads(), guessed, table)
        others = [(matcher, start) for matcher, start, each in jobs if not each]
    if others:
        fill_next_token_bitmask_par(_threads(), others, table)


@functools.cache
def _threads() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor()
