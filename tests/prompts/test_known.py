"""Token ids that are kept for prompts that come again."""

import numpy as np

from treegen.prompts.known import KnownPrompts, key_of


def test_the_least_recently_used_leave() -> None:
    known = KnownPrompts(most=10)
    tokens = {name: np.arange(size, dtype=np.int32) for name, size in (("a", 4), ("b", 5))}
    for name, ids in tokens.items():
        known.put(name, ids)
    assert known.get("a") is tokens["a"]
    known.put("c", np.arange(3, dtype=np.int32))
    assert known.get("b") is None
    assert known.get("a") is tokens["a"]
    known.put("huge", np.arange(11, dtype=np.int32))
    assert known.get("huge") is None
    known.put(None, tokens["a"])
    assert known.get(None) is None


def test_what_stands_for_a_prompt() -> None:
    chat = [{"role": "user", "content": "a"}]
    keys = [key_of("a", {}), key_of(chat, {}), key_of(chat, {"wide": 1}), key_of('[["a"], {}]', {})]
    assert None not in keys and len(set(keys)) == 4
    assert key_of("a", {"wide": 1}) is None  # which is refused
    assert key_of([5, 6], {}) is None
    assert key_of([], {}) is None
    assert key_of(chat, {"wide": object()}) is None
