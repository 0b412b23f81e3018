"""Prompts with and without images and everything else at once, against a run with room for all.

Each mix is drawn from a seed: prompts, images at any turn, memory, pages, passes, guesses; then
trees, kept prefixes, searches, scores, calls that are broken off and calls that come together.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_cases import far, user
from PIL import Image
from tiny_images import MAKERS, NEEDED, picture, save_tiny_vision_model

from treegen import LLM, AsyncLLM, InputError, Node, SamplingParams
from treegen.search import SearchNode

LIMIT = 1e-5  # of log-probabilities, in float32
# Of recurrent layers, in chunks of other lengths: transformers' own are as far from float64.
ROUNDED = 1e-4
WORDS = ["What?", "Why is it so?", "Look: ", "the house", " and", "A thing.", "Say"]
Outcome = list[tuple[tuple[int, ...], tuple[float, ...]]]


@pytest.fixture(scope="module")
def roomy_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, LLM]]:
    """Gives the checkpoint of a family, and an LLM that has room for all and shares nothing."""

    @cache
    def make(family: str) -> tuple[Path, LLM]:
        directory = save_tiny_vision_model(tmp_path_factory.mktemp(family), family, seed=2)
        return directory, LLM(
            str(directory), images=True, device="cpu", memory="64MiB", sharing="off"
        )

    return make


class Mix:
    """What is asked, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.pictures = [picture(3 * seed + i, *size) for i, size in enumerate(self._sizes())]
        self.chats = [self._chat() for _ in range(self.chance.randint(2, 5))]
        self.chats += [[*self.chats[0], {"role": "assistant", "content": "So."}, self._turn(1)]]
        self.seed = seed

    def _sizes(self) -> list[tuple[int, int]]:
        sizes = [(40, 28), (30, 61), (28, 28), (64, 20)]
        return self.chance.sample(sizes, 3)

    def _turn(self, images: int) -> dict[str, Any]:
        parts: list[Image.Image | str] = [self.chance.choice(self.pictures) for _ in range(images)]
        parts += self.chance.sample(WORDS, self.chance.randint(1, 3))
        self.chance.shuffle(parts)
        return user(*parts)

    def _chat(self) -> list[dict[str, Any]]:
        turns = [self._turn(self.chance.choice([0, 1, 1, 2]))]
        while self.chance.random() < 0.4:
            turns.append({"role": "assistant", "content": self.chance.choice(WORDS)})
            turns.append(self._turn(self.chance.choice([0, 0, 1])))
        return turns

    def params(self) -> SamplingParams:
        more: dict[str, Any] = self.chance.choice(
            [{"temperature": 0}, {"temperature": 0.8}, {"repetition_penalty": 1.2, "top_p": 0.9}]
        )
        return SamplingParams(
            max_tokens=self.chance.randint(2, 24), ignore_eos=True, seed=self.seed, **more
        )

    def options(self, roomy: LLM) -> dict[str, Any]:
        """How the other LLM computes: with few pages, in small passes."""
        longest = max(len(roomy.plan(Node(chat)).requests[0].tokens) for chat in self.chats)
        tokens = int((longest + 160) * self.chance.uniform(1.2, 2.5))
        slots = 96 * roomy.spec.state_bytes  # a node's, a row's, and those on the way to them
        return {
            "memory": tokens * roomy.spec.kv_bytes_per_token + slots,
            "page_size": self.chance.choice([2, 4, 16]),
            "prefill_chunk": self.chance.choice([1, 5, 13, 64, 512]),
            "max_rows": self.chance.choice([1, 3, 12]),
            "run_ahead": self.chance.random() < 0.5,
            "sharing": self.chance.choice(["auto", "all", "one", "off"]),
            "speculate": None if roomy.spec.states else self.chance.choice([None, None, "ngram"]),
        }

    def steps(self) -> list[Callable[[LLM], Outcome]]:
        """What is asked of both LLMs, one after another."""
        ways = [self._tree, self._kept, self._search, self._scores, self._together, self._broken]
        return [way(self.params()) for way in self.chance.sample(ways, len(ways))]

    def _tree(self, params: SamplingParams) -> Callable[[LLM], Outcome]:
        leaves = [
            Node(chat, samples=self.chance.randint(1, 4), id=f"tree {i}")
            for i, chat in enumerate(self.chats)
        ]
        return lambda llm: outcome_of(llm.run(Node(children=leaves, samples=0), params).completions)

    def _kept(self, params: SamplingParams) -> Callable[[LLM], Outcome]:
        prefix, others = self.chance.choice(self.chats), self.chance.sample(self.chats, 2)

        def ask(llm: LLM) -> Outcome:
            with llm.keep(Node(prefix)):
                return outcome_of(done for (done,) in llm.chat([prefix, *others], params))

        return ask

    def _search(self, params: SamplingParams) -> Callable[[LLM], Outcome]:
        roots = [(f"search {i}", chat) for i, chat in enumerate(self.chats[:3])]
        parts, num = self._turn(1)["content"], 2 if params.temperature else 1

        async def look(root: SearchNode) -> Outcome:
            first = await root.sample(num)
            below = [each.extend(parts) for each in first] + [root.extend(parts).extend(" Now")]
            drawn = await asyncio.gather(*(each.sample(num) for each in below))
            scores = await below[0].score([" yes", " no way"])
            return outcome_of([*first, *(each for some in drawn for each in some), *scores])

        def ask(llm: LLM) -> Outcome:
            results = llm.search(look, roots, params)
            assert [result.error for result in results] == [None] * len(roots)
            found: Outcome = []
            for result in results:
                assert isinstance(result.value, list)
                found += result.value
            return found

        return ask

    def _scores(self, _params: SamplingParams) -> Callable[[LLM], Outcome]:
        pairs = [(chat, text) for chat in self.chats for text in (" yes", " no way")]
        return lambda llm: outcome_of(llm.score(pairs))

    def _together(self, params: SamplingParams) -> Callable[[LLM], Outcome]:
        async def ask(llm: LLM) -> Outcome:
            with AsyncLLM(llm, max_waiting=1000) as served:
                calls = (served.generate([chat], params) for chat in self.chats)
                found = await asyncio.gather(*calls)
            return outcome_of(done for _, (completions,) in found for done in completions)

        return lambda llm: asyncio.run(ask(llm))

    def _broken(self, params: SamplingParams) -> Callable[[LLM], Outcome]:
        tree = Node(children=[Node(chat, samples=3) for chat in self.chats], samples=0)

        def ask(llm: LLM) -> Outcome:
            with llm.stream(tree, params) as stream:
                next(iter(stream))
            return []

        return ask


def outcome_of(found: Any) -> Outcome:
    """Tokens and log-probabilities of completions or scores."""
    return [(tuple(each.tokens), tuple(each.logprobs)) for each in found]


def check_mix(made: tuple[Path, LLM], seed: int) -> None:
    directory, roomy = made
    mix = Mix(seed)
    options = mix.options(roomy)
    limit = ROUNDED if roomy.spec.states else LIMIT
    tight = LLM(str(directory), images=True, device="cpu", check=False, **options)
    for step in mix.steps():
        want, got = step(roomy), step(tight)
        assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want], options
        for (_, actual), (_, expected) in zip(got, want, strict=True):
            # Digits of a sum are as coarse as its largest part: at -20 a step of float32 is 2e-6.
            coarse = max(1.0, -min(expected, default=0.0) / 10)
            assert not actual or far(actual, expected) < limit * coarse, options
    assert tight.engine.encoder_cache is not None
    assert tight.engine.encoder_cache.num_encoded <= len(mix.pictures)
    pool = tight.cache.pool
    assert pool.num_free == pool.num_pages


def test_a_mix_is_as_with_room_for_all(roomy_of: Any) -> None:
    check_mix(roomy_of("gemma3"), 1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 14))
@pytest.mark.parametrize("family", MAKERS)
def test_many_mixes_are_as_with_room_for_all(family: str, seed: int, roomy_of: Any) -> None:
    if family in NEEDED:
        pytest.importorskip(NEEDED[family])
    check_mix(roomy_of(family), seed)


@pytest.mark.parametrize(
    "page_size", [8, *(pytest.param(size, marks=pytest.mark.soak) for size in (4, 16))]
)
def test_no_segment_begins_within_an_image_that_sees_itself(page_size: int, roomy_of: Any) -> None:
    """Prompts that part soon after an image share whole pages up to it, and none of its own."""
    directory, roomy = roomy_of("gemma3")
    llm = LLM(str(directory), images=True, device="cpu", memory="1MiB", page_size=page_size)
    image, params = picture(5), SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    chats = [[user("Look at it: ", image, text)] for text in ("?", "!", "", " is it.")]
    want = [done.tokens for (done,) in roomy.chat(chats, params)]
    with llm.session(params) as session:
        got = []
        for chat in chats:  # each comes when the one before is computed
            root = session.root(chat)
            got += [each.tokens for each in session.sample({root: 1})[root]]
        store = session.backend.scheduler.run.store
        assert store.blocks is not None
        for segment in store.segments.values():
            tokens = [*segment.path_tokens(), 0]
            begin = segment.start
            assert store.blocks.around(np.array(tokens), begin) == (begin, begin)
    assert got == want


def test_parts_of_images_are_refused_where_tokens_see_those_after_them(roomy_of: Any) -> None:
    _, llm = roomy_of("gemma3")
    tokens = llm.plan(Node([user("Look: ", picture(5), "?")])).requests[0].tokens.tolist()
    image = [token for token in tokens if token >= llm.spec.vocab_size]
    first = tokens.index(image[0])
    params = SamplingParams(max_tokens=1, temperature=0)
    for ids in (tokens[: first + 3], tokens[first + 1 :], [*image, *image, 5]):
        with pytest.raises(InputError, match="pass complete images"):
            llm.generate([ids], params)
    assert llm.generate([tokens[: first + len(image)]], params)
