"""Lay out a prompt tree for decoding: what is stored once, what is shared, and why.

A Plan is an immutable value built from prompts without torch or a device, so it can be printed
before any weights are loaded. A segment is a span of tokens that all prompts below it share.
Segments and decode rows are numbered depth first, so the rows below any segment are consecutive,
however ragged the tree.

Every segment is stored once and prefilled once. The plan decides how decoding reads it:

    kept    The segment is a separate attention part: its keys are read once for all rows below
            (`PlanSegment.is_cascaded`).
    folded  The segment is read through the page tables of what is below it, once per table. This
            is best for a segment of one row, and for one too short to pay for a separate part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from treegen.common.formatting import format_bytes
from treegen.common.spec import DeltaSpec
from treegen.errors import CacheFullError, arg
from treegen.prompts import radix
from treegen.prompts.expansion import LevelBound
from treegen.prompts.images.table import PlacedImage
from treegen.prompts.plan.cost_model import CostModel, Sharing


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and the number of samples to draw from it."""

    id: str
    """Its name among the requests."""
    tokens: radix.Tokens
    """Its token ids."""
    samples: int
    """Number of completions to draw."""
    rows: int
    """Maximum decode rows. Greedy samples of one prompt are all equal and share one row."""
    max_tokens: int
    """Maximum generated tokens of a sample."""
    score_from: int | None = None
    """The first position with reported log-probabilities; None reports none."""
    origin: str | None = None
    """What the randomness of its samples depends on; None means the id."""
    first: int = 0
    """The number of its sample 0 among all samples of its origin."""
    top: int = 0
    """How many most likely tokens are reported at each of these positions."""
    forced: tuple[int, ...] = ()
    """The first tokens of each sample, which are not drawn. If they use up a thinking budget, they
    include the tokens that close the thinking."""
    images: tuple[PlacedImage, ...] = ()
    """The images in it, as far as they are known; see `ImageTable.keeps_all`."""

    @property
    def readers(self) -> int:
        """Query rows that read the tokens of the prompt: decode rows, and tokens to score."""
        if self.score_from is None:
            return self.rows
        return self.rows + len(self.tokens) - self.score_from


@dataclass(frozen=True, slots=True)
class PlanSegment:
    """Tokens that all rows below share."""

    index: int
    """Its index in the plan, depth first."""
    parent: int
    """Index of the segment that it continues; -1 for none."""
    depth: int
    """Segments above it; 0 for a root."""
    start: int
    """The position of its first token."""
    stop: int
    """The position after its last token."""
    tokens: radix.Tokens
    """Their ids."""
    rows: int
    """Decode rows below it, and tokens to score."""
    requests: tuple[int, ...]
    """Indices of the requests whose prompts end with it."""
    is_cascaded: bool
    """Whether it is a separate attention part."""
    base: int
    """First position in its page table: its start, or an earlier position where the segments above
    it are folded."""
    base_below: int
    """First position in the page tables of what is below it."""
    reason: str
    """Why it is kept or folded."""
    expanded: bool = False
    """Whether rows read a copy with the keys and values of all heads, expanded from its latents, as
    long as memory has room for the copy."""


@dataclass(frozen=True, slots=True)
class LevelSummary:
    """Counts of the segments of one depth, for display."""

    depth: int
    """Segments above each of them."""
    segments: int
    """Number of segments."""
    tokens: int
    """Number of their tokens."""
    rows: int
    """Number of rows below them."""
    kept: int
    """Number of segments that are separate attention parts."""
    reasons: tuple[tuple[str, int], ...]
    """Why segments are kept or folded, and how many for each reason."""


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """Prompts laid out as segments; the module's docstring explains how."""

    requests: tuple[Request, ...]
    """In the caller's order."""
    segments: tuple[PlanSegment, ...]
    """Depth first."""
    segment_of: NDArray[np.int64]
    """For each request, the index of the segment that its prompt ends with."""
    order: NDArray[np.int64]
    """The indices of the requests, depth first, which is the order of their rows."""
    token_bytes: int
    """Bytes of a token's keys and values, over all layers."""
    layer_bytes: float
    """The same in one layer, on average."""
    sharing: Sharing
    """The rule by which segments were kept; see `compile_plan`."""
    cost: CostModel
    """The cost model by which segments were kept; see `compile_plan`."""
    generated: tuple[LevelBound, ...] = ()
    """Levels that the tree declares to be generated below the prompts, if any."""
    align: int = 1
    """Attention parts begin at multiples of this many positions."""
    state_bytes: int = 0
    """Bytes of one recurrent state; 0 for a model without any."""
    delta: DeltaSpec | None = None
    """How rows list updates of states; None if each row has a state of its own."""
    copy_pages: int = 0
    """Pages that the keys and values of all heads take per page of latents."""
    max_rows: int | None = None
    """Maximum rows decoded at once, on each worker of a Cluster; None for all."""

    def __str__(self) -> str:
        """Return the tree level by level and what sharing saves, for display."""
        limited = self.max_rows is not None and self.max_rows < self.num_rows
        read = "read per step, if all rows were decoded at once" if limited else "read per step"
        lines = [
            f"{len(self.requests):,} prompts, {self.num_samples:,} samples in "
            f"{self.num_rows:,} rows"
            + (f", at most {self.max_rows:,} at once (max_rows)" if limited else "")
        ]
        lines += [
            f"level {level.depth}: {level.segments:,} segments, {level.tokens:,} tokens, "
            f"{level.kept:,} kept, {level.segments - level.kept:,} folded"
            f" ({', '.join(f'{reason}: {count:,}' for reason, count in level.reasons)})"
            for level in self.levels()
        ]
        for what, shared, apart in (
            ("computed and stored", self.stored_tokens, self.unshared_tokens),
            (read, self.read_tokens, self.unshared_read_tokens),
        ):
            size = format_bytes(shared * self.token_bytes)
            lines.append(
                f"prompt tokens {what}: {shared:,} ({size}) instead of {apart:,} "
                f"({format_bytes(apart * self.token_bytes)})"
            )
        if self.copied_tokens:
            count = sum(segment.expanded for segment in self.segments)
            lines.append(
                f"read expanded: {count:,} segments, {self.copied_tokens:,} tokens, whose keys and "
                f"values take {format_bytes(self.copy_bytes)} next to the latents while memory is "
                "free"
            )
        if self.state_bytes:
            size = format_bytes(len(self.segments) * self.state_bytes)
            slots = [self.row_slots(index) for index in range(len(self.requests))]
            row = format_bytes(round(max(slots, default=1) * self.state_bytes))
            live = f"one for each live row ({row} each)"
            if self.delta is not None:
                live = f"for each live row a list of updates, or a state ({row} each)"
            lines.append(f"recurrent states: one for each segment ({size}) and {live}")
        lines += [
            f"generated level {bound.level}: at most {bound.rows:,} rows, {bound.tokens:,} tokens"
            + (f"; {bound.kept:,} go on" if bound.kept < bound.rows else "")
            for bound in self.generated
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"Plan({len(self.requests):,} prompts, {self.num_samples:,} samples, "
            f"{self.stored_tokens:,} prompt tokens instead of {self.unshared_tokens:,})"
        )

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    @property
    def num_samples(self) -> int:
        """Number of samples to draw, over all prompts."""
        return sum(request.samples for request in self.requests)

    @property
    def num_rows(self) -> int:
        """Decode rows: one for each sample, or one for all greedy samples of a prompt."""
        return sum(request.rows for request in self.requests)

    @property
    def stored_tokens(self) -> int:
        """Prompt tokens that are stored and prefilled, each once."""
        return sum(segment.stop - segment.start for segment in self.segments)

    @property
    def unshared_tokens(self) -> int:
        """Prompt tokens that would be prefilled if every sample had its own prompt."""
        return sum(len(request.tokens) * max(request.samples, 1) for request in self.requests)

    @property
    def read_tokens(self) -> int:
        """Prompt keys that a step reads in each layer while all rows are live."""
        # For each folded segment, the page tables that read it: cascaded segments and rows below.
        tables = [sum(self.requests[i].rows for i in s.requests) for s in self.segments]
        total = 0
        for segment in reversed(self.segments):  # children before their parents
            num_readers = 1 if segment.is_cascaded else tables[segment.index]
            total += num_readers * (segment.stop - segment.start)
            if segment.parent >= 0:
                tables[segment.parent] += num_readers
        return total

    @property
    def copied_tokens(self) -> int:
        """Prompt tokens whose expanded keys and values of all heads the rows read."""
        return sum(s.base_below - s.base for s in self.segments if s.expanded)

    @property
    def copy_bytes(self) -> int:
        """Bytes that these keys and values take, in memory that would otherwise be free."""
        return self.copied_tokens * self.copy_pages * self.token_bytes

    @property
    def unshared_read_tokens(self) -> int:
        """Prompt keys that a step would read in each layer if every row read its whole prompt."""
        return sum(len(request.tokens) * request.rows for request in self.requests)

    def path(self, request: int) -> Iterator[PlanSegment]:
        """Yield the segments of one request, from the last one up to the root."""
        index = int(self.segment_of[request])
        while index >= 0:
            segment = self.segments[index]
            yield segment
            index = segment.parent

    def levels(self) -> list[LevelSummary]:
        """Return counts of the segments, by depth."""
        by_depth: dict[int, list[PlanSegment]] = {}
        for segment in self.segments:
            by_depth.setdefault(segment.depth, []).append(segment)
        return [
            LevelSummary(
                depth=depth,
                segments=len(members),
                tokens=sum(s.stop - s.start for s in members),
                rows=sum(s.rows for s in members),
                kept=sum(s.is_cascaded for s in members),
                reasons=tuple(Counter(s.reason for s in members).most_common()),
            )
            for depth, members in sorted(by_depth.items())
        ]

    def table_pages(self, segment: PlanSegment, page_size: int) -> int:
        """Return the pages that a segment adds; it shares the full pages of folded parents."""
        return segment_pages(segment.base, segment.start, segment.stop, page_size)

    def row_pages(self, request: int, page_size: int) -> int:
        """Return the pages that one row of a request has added by its last token."""
        segment = self.segments[self.segment_of[request]]
        return row_pages(
            segment.base_below, segment.stop, self.requests[request].max_tokens, page_size
        )

    def get_single_row_pages(self, request: int, page_size: int) -> int:
        """Return the pages that one row of a request needs with nothing else in memory."""
        pages = sum(self.table_pages(segment, page_size) for segment in self.path(request))
        return pages + (self.row_pages(request, page_size) if self.requests[request].rows else 0)

    def get_single_row_states(self, request: int) -> int:
        """Return the recurrent states that one row of a request needs with nothing else in memory.

        Each segment above the row has a state at its end, and the row has its own. A row that lists
        updates may need a slot for its list and one for the state that the list is folded into.
        """
        rows = bool(self.requests[request].rows) * (1 if self.delta is None else 2)
        return sum(1 for _ in self.path(request)) + rows

    def row_slots(self, request: int) -> float:
        """Return the recurrent-state slots that each row of a request takes."""
        if self.delta is None:
            return 1
        spec = self.requests[request]
        return self.delta.row_slots(spec.max_tokens, spec.rows)

    def rows_that_fit(self, num_pages: int, page_size: int, num_states: int | None = None) -> int:
        """Return how many rows a pool of pages holds at once, each at its full length.

        Args:
            num_pages: Pages of the pool.
            page_size: Tokens per page.
            num_states: Slots for recurrent states, for a model with recurrent layers.
        """
        seen: set[int] = set()
        used = rows = 0
        states: float | None = num_states
        for request in self.order:
            new = [s for s in self.path(request) if s.index not in seen]
            used += sum(self.table_pages(segment, page_size) for segment in new)
            seen.update(segment.index for segment in new)
            pages_per_row = self.row_pages(request, page_size)
            fit = min(self.requests[request].rows, (num_pages - used) // pages_per_row)
            if states is not None:
                states -= len(new)
                slots = self.row_slots(request)
                fit = min(fit, int(states / slots))
                states -= max(fit, 0) * slots
            rows += max(fit, 0)
            if fit < self.requests[request].rows:
                break
            used += fit * pages_per_row
        return rows

    def check_fits(self, num_pages: int, page_size: int, num_states: int | None = None) -> None:
        """Check that each prompt can be decoded, one row at a time if necessary.

        Args:
            num_pages: Pages of the pool.
            page_size: Tokens per page.
            num_states: Slots for recurrent states, for a model with recurrent layers.

        Raises:
            CacheFullError: some prompt does not fit even alone. The message names the prompt that
                needs most; memory that is enough for it is enough for all.
        """
        pages = [self.get_single_row_pages(index, page_size) for index in range(len(self.requests))]
        needed = max(pages, default=0)
        if needed > num_pages:
            request = self.requests[pages.index(needed)]
            raise CacheFullError(
                f"prompt {request.id!r} ({len(request.tokens):,} tokens, {arg('max_tokens')} "
                f"{request.max_tokens:,}) needs {needed * page_size:,} cache tokens, but the cache "
                f"holds only {num_pages * page_size:,} "
                f"({format_bytes(num_pages * page_size * self.token_bytes)}); increase "
                f"{arg('memory=')}, shorten the prompt or lower {arg('max_tokens')}"
            )
        states = [self.get_single_row_states(index) for index in range(len(self.requests))]
        if num_states is not None and max(states, default=0) > num_states:
            request = self.requests[states.index(max(states))]
            raise CacheFullError(
                f"prompt {request.id!r} needs {max(states):,} recurrent states of "
                f"{format_bytes(self.state_bytes)} (one for each level of its tree, and "
                f"{('one' if self.delta is None else 'two')} for a sample), but the cache holds "
                f"only {num_states:,}; increase {arg('memory=')}, or use a tree with fewer levels"
            )


def segment_pages(base: int, start: int, stop: int, page_size: int) -> int:
    """Return the pages that a segment adds to those of the folded segments before it in its table.

    Args:
        base: First position in the page table.
        start: Position of the segment's first token.
        stop: Position after its last token.
        page_size: Tokens per page.
    """
    return -(-(stop - base) // page_size) - (start - base) // page_size


def row_pages(base: int, stop: int, max_tokens: int, page_size: int) -> int:
    """Return the pages that a row has added below a prompt once it has `max_tokens` tokens.

    Args:
        base: First position in the row's page table.
        stop: Position after the prompt's last token.
        max_tokens: Generated tokens of the row.
        page_size: Tokens per page.
    """
    # The last sampled token is never an input, so its key is never stored.
    pages: int = -(-(stop + max_tokens - 1 - base) // page_size) - (stop - base) // page_size
    return max(pages, 1)
