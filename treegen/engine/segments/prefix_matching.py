"""Matches kept prefixes with the segments of a run."""

from __future__ import annotations

from treegen.engine.segments.prefix_cache import CachedPrefix, PrefixCache
from treegen.engine.segments.segment import LiveSegment
from treegen.engine.segments.segment_states import SegmentStates
from treegen.prompts.radix import common_prefix


class PrefixMatcher:
    """Finds the kept prefix that has a segment's first tokens, and up to where it is usable."""

    def __init__(self, kept: PrefixCache, states: SegmentStates | None) -> None:
        """Set up a matcher; `states` is None for a model without recurrent layers."""
        self._kept, self._states = kept, states

    def match_roots(self, roots: list[LiveSegment]) -> None:
        """Record the longest matching prefix of each new segment, from these roots down."""
        for prefix in self._kept:
            level = list(roots)
            while level:
                segment = level.pop()
                shared = common_prefix(prefix.tokens[segment.start :], segment.tokens)
                if shared:
                    self._note(prefix, segment, segment.start + shared)
                    if segment.start + shared == segment.stop:
                        level += segment.children.values()

    def match_one(self, segment: LiveSegment) -> None:
        """Record the longest matching prefix of one segment below other segments."""
        for prefix in self._kept:
            self._note(prefix, segment, common_prefix(prefix.tokens, segment.path_tokens()))

    def find_match(self, segment: LiveSegment) -> tuple[CachedPrefix | None, int]:
        """Return the kept prefix that supplies a segment's first tokens, and up to which position.

        It is used only if the segment above is computed. Otherwise the segment above would be
        computed although this one counts as computed already.
        """
        prefix, covered = segment.reuse or (None, segment.start)
        covered = min(covered, segment.first_logit)
        if prefix is not None:
            covered = self._usable(prefix, covered)
        parent = segment.parent
        waits = parent is not None and parent.computed < segment.start
        if prefix is None or prefix.pages is None or covered <= segment.start or waits:
            return None, segment.start
        return prefix, covered

    def note_use(self, prefix: CachedPrefix, segment: LiveSegment, covered: int) -> int:
        """Record that a prefix supplied tokens; return how many were never computed before.

        Args:
            prefix: The kept prefix.
            segment: The segment.
            covered: Position up to which the prefix supplied tokens.
        """
        if self._states is not None:
            self._states.copy_from(prefix, segment, covered)
        new = covered - segment.was_computed
        segment.mark_computed(covered)
        segment.continued = True
        self._kept.touch(prefix)
        return max(new, 0)

    def _note(self, prefix: CachedPrefix, segment: LiveSegment, shared: int) -> None:
        usable = self._usable(prefix, shared)
        if usable > (segment.reuse or (prefix, segment.start))[1]:
            segment.reuse = prefix, usable

    def _usable(self, prefix: CachedPrefix, shared: int) -> int:
        """Return how many tokens of a kept prefix are usable if `shared` tokens match."""
        return shared if self._states is None else self._states.find_state_position(prefix, shared)
