"""Rows whose text has a grammar: where each is in it, and which tokens it may draw next.

Where a row is follows from its tokens: those that it was not asked about yet are read when its next
mask is made. So preemption needs nothing, and in a search the way to a node is read as the row's
own. Masks are made on the host while the device computes the logits that they are for.
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
_ROWS_OF_LANE: Final = 32  # rows that come one after another and take the same lane


@dataclass(slots=True, eq=False)
class _GrammarState:
    """Where a text is in its grammar.

    prompt: the end of what comes before the text.
    before: drawn tokens on the way to a node of a search; the text begins with them.
    matcher: has read the text so far.
    lane: of the matcher, as in `Grammar.start`.
    begins: tokens of the text before its grammar begins; None as long as it may think.
    num_read: tokens of the text that were looked at.
    """

    prompt: Tokens
    before: list[int]
    matcher: LLMatcher
    lane: int
    begins: int | None
    num_read: int = 0

    @property
    def is_bound(self) -> bool:
        """Whether the next token must go on in the grammar, or begin it."""
        return self.num_read == 0 if self.begins is None else self.num_read >= self.begins

    def copy(self) -> _GrammarState:
        """The same for another row."""
        return replace(self, matcher=self.matcher.deep_copy())

    def read(self, tokens: Sequence[int], each: ParamSet) -> None:
        """Read a text, all of it, as far as it was not read before."""
        start = max(self.num_read, self.begins or 0)
        if self.begins is None:
            self.begins = _find_grammar_start(self.prompt, tokens, each)
            start = self.begins or 0
        if self.begins is not None:
            self.matcher.consume_tokens(list(tokens[start:]))
        self.num_read = len(tokens)


class RowGrammars:
    """The grammars of the rows of one run.

    used: whether some row has had one. Without any, nothing is done for rows.
    """

    def __init__(self, run: EngineRun) -> None:
        """No row has a grammar."""
        self._run = run
        self.used = False
        self._places: dict[
            int, tuple[int, _GrammarState]
        ] = {}  # by slot, with its row's serial number
        # By slot, of rows that are bound for good: serial number, tokens read, lane, and the
        # matcher. Of these the numbers here hold, and not that of the place.
        self._bound = np.full((3, 0), _NO_ROW, dtype=np.int64)
        self._matchers = np.empty(0, dtype=object)
        self._staging = StagingBuffer(turns=2)
        self._words = 0  # of a mask
        self._num_begun: WeakKeyDictionary[Grammar, int] = WeakKeyDictionary()

    def begin(self, requests: Sequence[LiveRequest], slots_PN: Ints) -> Masks | None:
        """Note new rows, [requests, rows of each]; returns what their first draws may give."""
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
            starts = {
                lane: start_state(request.segment, request.spec.tokens, each, grammar, lane)
                for lane in sorted(set(lanes), reverse=True)  # the last makes them all
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
        """What a step's rows may draw, whose tokens are all known by now.

        Args:
            slots: Of each query row.
            serials: Of each query row.
            guesses: What they verify; None for one draw of each row.
            num: Query rows of the step, those that fill it up among them.
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
        """Note rows whose matchers have failed, which then allow nothing but the end of a text.

        A matcher may fail on guesses that its row does not draw. So it is made anew, and the row
        fails only if it draws the guesses up to the failure.

        Args:
            slots: The row of each matcher.
            matchers: They have filled the table.
            given: The guesses of each; None where there are none.
            table: The masks, those after guesses among them.
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
        """Replace the matcher of a row by one that has read its tokens, and nothing else."""
        rows, place = self._run.rows, self._places[slot][1]
        grammar = self._run.param_sets[int(rows.params[slot])].stopping.grammar
        assert grammar is not None
        place.matcher = self._matchers[slot] = grammar.start(place.lane)
        tokens = [*place.before, *rows.tokens(np.array([slot]))[0]]
        place.matcher.consume_tokens(tokens[place.begins or 0 :])
        return place.matcher

    def get_forced_tokens(self, slots: Ints) -> dict[int, list[int]]:
        """The tokens that rows can only draw next, by place in `slots`, as their grammars spell it.

        All tokens of the rows are known.
        """
        found = zip(*self._advance_matchers(slots), strict=True)
        spelled = {int(place): matcher.compute_ff_tokens() for place, matcher in found}
        return {place: tokens for place, tokens in spelled.items() if tokens}

    def count_allowed_drafts(self, slots: Ints, tokens_RK: Ints, num_R: Ints) -> Ints:
        """How many guesses of each row, from the first on, its grammar allows, of `num_R`.

        A row that thinks is guessed no further than to the token that may end its thinking: what
        it may draw after that is not known yet. All tokens of the rows are known.
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
                if matcher.is_error():  # by a guess, perhaps
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
        """The lanes of further rows. A grammar of few needs the first alone, which is there."""
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
        """Masks after each matcher's text, and after each of its guesses: int32 [masks, words].

        Args:
            given: The guesses of each; None where there are none.
            more: Further tokens of masks.
            slots: The rows of the matchers, to note failures; none for rows that begin.
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
        """The matchers of rows, once they have read all tokens, and the places of these rows.

        The other rows may draw any token. Of most rows one token is new, which all matchers read at
        once, in several threads. Matchers come by lane, so that few threads want the same one.
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
            consume_token_par(_threads(), new)  # a matcher that fails says so in `is_error`
        matchers = found.tolist()
        places = [place for place, matcher in enumerate(matchers) if matcher is not None]
        return by_lane[places], [matchers[place] for place in places]

    def _catch_up(self, slot: int, new: list[tuple[LLMatcher, int]]) -> LLMatcher | None:
        """The matcher of a row, once it has read all tokens; None if the row may draw any.

        Args:
            new: A last token that it has to read yet is added here.
        """
        rows = self._run.rows
        serial, num, last = int(rows.serial[slot]), int(rows.count[slot]), int(rows.last[slot])
        known, place = self._places.get(slot, (-1, None))
        each = self._run.param_sets[int(rows.params[slot])]
        if place is None or known != serial or (num and last in each.stopping.ids):
            return None  # without a grammar, or over
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
        """Read the tokens of a row, of which there are `num`, that its place has not seen yet."""
        rows, start, num_before = self._run.rows, place.num_read, len(place.before)
        new = rows.generated.between(slot, max(start - num_before, 0), num)
        tags = each.stopping.thinking
        if place.begins is None and start and tags and not tags.may_close(new):
            place.num_read = num_before + num  # it thinks on
        elif place.begins is None:
            place.read([*place.before, *rows.tokens(np.array([slot]))[0]], each)
        else:
            place.num_read = num_before + num
            place.matcher.consume_tokens(new[max(place.begins - start, 0) :].tolist())


def start_state(
    segment: LiveSegment, prompt: Tokens, each: ParamSet, grammar: Grammar, lane: int = 0
) -> _GrammarState:
    """Where a text below a segment begins in its grammar.

    Args:
        prompt: The end of the prompt is enough.
        lane: As in `Grammar.start`.

    Raises:
        InputError: what was drawn on the way to the segment cannot be a part of such a text.
    """
    stopping = each.stopping
    before = _drawn_before(segment, each.params.structure)
    if before:
        prompt = segment.path_tokens()[: -len(before)]
    thinks = stopping.thinking is not None and not stopping.thinking.closes(prompt)
    place = _GrammarState(prompt, before, grammar.start(lane), lane, None if thinks else 0)
    if before:
        place.read(before, each)
        if place.begins is not None:  # what was to close a thinking, and was cut, is not gone on
            place.begins = min(place.begins, len(before))
    elif thinks and (tags := stopping.thinking) and (tags.always or tags.opens(prompt)):
        place.num_read = -1  # so that it is bound by nothing
        if place.is_bound and not place.matcher.is_error():
            place.matcher.compute_bitmask()  # which fails if no token can follow
    if place.matcher.is_error():
        raise InputError(
            f"the text of the node cannot begin a text of its {(each.params.structure or '?')[0]} "
            f"({_reason(place.matcher)}); sample it without, or from a node above"
        )
    return place


def _drawn_before(segment: LiveSegment, structure: object) -> list[int]:
    """The tokens from the first that was drawn for the same grammar up to a segment's end."""
    path: list[LiveSegment] = []
    first = 0  # how many of them count
    for above in segment.path():
        path.append(above)
        if above.drawn and above.structure != structure:
            break
        if above.drawn:
            first = len(path)
    return [int(token) for above in path[:first][::-1] for token in above.tokens]


def _may_open(place: _GrammarState, each: ParamSet) -> Sequence[int]:
    """Tokens that a text may begin with beside those of its grammar: one that opens a thinking."""
    tags = each.stopping.thinking
    if tags is None or place.begins is not None or place.num_read or tags.opening_id is None:
        return ()
    return (tags.opening_id,)


def _find_grammar_start(prompt: Tokens, tokens: Sequence[int], each: ParamSet) -> int | None:
    """How many tokens of a text come before its grammar; None as long as it thinks."""
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
    """Write the masks of matchers into rows of a table, all at once in several threads."""
    from llguidance.numpy import (
        fill_next_token_bitmask_par,
        fill_next_token_bitmask_par_with_draft_tokens,
    )

    if given is None:
        others = list(zip(matchers, range(len(matchers)), strict=True))
    else:
        table.fill(-1)  # of a guess that does not fit, and those after it
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
