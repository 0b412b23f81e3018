"""The table of rows: what it hands back of what was generated."""

from __future__ import annotations

import numpy as np

from treegen.rows import RowTable


def test_what_was_generated_comes_back_as_python_numbers() -> None:
    rows = RowTable(num_logprobs=2)
    slots = rows.add(3)[::-1]
    held: dict[int, list[tuple[int, float]]] = {slot: [] for slot in slots.tolist()}
    for step, some in enumerate((slots, slots[:2], slots[1:2])):
        tokens = 10**6 * step + some
        logprobs = np.float32(-0.1) * some.astype(np.float32)
        top = np.stack([tokens, tokens + 1], axis=1), np.stack([logprobs, -logprobs], axis=1)
        rows.append(some, tokens, logprobs, *top)
        for slot, *pair in zip(some.tolist(), tokens.tolist(), logprobs.tolist(), strict=True):
            held[slot].append((pair[0], pair[1]))
    tokens_of = [tuple(token for token, _ in held[slot]) for slot in slots.tolist()]
    assert rows.generated(slots, rows.tokens) == tokens_of
    assert {type(token) for tokens in tokens_of for token in tokens} == {int}
    logprobs_of = [tuple(value for _, value in held[slot]) for slot in slots.tolist()]
    assert rows.generated(slots, rows.logprobs) == logprobs_of
    # Several numbers a token come in one row.
    top_of = [tuple(i for t in tokens for i in (t, t + 1)) for tokens in tokens_of]
    assert rows.generated(slots, rows.top_tokens) == top_of
    assert rows.generated(slots[:0], rows.tokens) == []
