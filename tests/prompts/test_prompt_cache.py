"""Token ids that are kept for prompts that come again."""

import tracemalloc

import numpy as np

from treegen.llm.encoder import TOKENS_PER_ENTRY, PromptCache, key_of


def test_the_least_recently_used_leave() -> None:
    known = PromptCache(max_tokens=10 + 2 * TOKENS_PER_ENTRY)
    tokens = {name: np.arange(size, dtype=np.int32) for name, size in ((b"a", 4), (b"b", 5))}
    for name, ids in tokens.items():
        known.put(name, ids)
    assert known.get(b"a") is tokens[b"a"]
    known.put(b"c", np.arange(3, dtype=np.int32))
    assert known.get(b"b") is None
    assert known.get(b"a") is tokens[b"a"]
    known.put(b"huge", np.arange(11 + TOKENS_PER_ENTRY, dtype=np.int32))
    assert known.get(b"huge") is None
    known.put(None, tokens[b"a"])
    assert known.get(None) is None


def test_what_is_kept_does_not_grow_with_what_a_template_leaves_out() -> None:
    chats = [
        [{"role": "user", "content": str(n), "name": "a name, again " * 9_000}] for n in range(30)
    ]
    tokens = np.arange(3, dtype=np.int32)
    tracemalloc.start()
    try:
        known = PromptCache()
        for chat in chats:
            known.put(key_of(chat, {}), tokens)
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()
    assert known.get(key_of(chats[0], {})) is tokens
    short = PromptCache(max_tokens=1_000)
    for n in range(100):
        short.put(key_of(str(n), {}), tokens[:1])
    assert short.get(key_of("0", {})) is None  # short prompts take room too
    assert short.get(key_of("99", {})) is not None


def test_what_stands_for_a_prompt() -> None:
    chat = [{"role": "user", "content": "a"}]
    keys = [key_of("a", {}), key_of(chat, {}), key_of(chat, {"wide": 1}), key_of('[["a"], {}]', {})]
    assert None not in keys and len(set(keys)) == 4
    assert key_of("a", {"wide": 1}) is None  # which is refused
    assert key_of([5, 6], {}) is None
    assert key_of([], {}) is None
    assert key_of(chat, {"wide": object()}) is None
