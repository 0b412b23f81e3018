"""The operations on nodes: each one is a call of the backend of live searches."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from treegen.common.outputs import Score
from treegen.common.params import SamplingParams
from treegen.errors import ContextError, StoppedError
from treegen.integrations.server.errors import StatusError
from treegen.integrations.server.node_answers import (
    count_cached,
    describe_node,
    describe_score,
    usage_of,
)
from treegen.integrations.server.node_types import (
    DropResult,
    ExtendFields,
    NodeAnswer,
    NodeResult,
    ReadResult,
    RewardResult,
    RootFields,
    SampleFields,
    SampleResult,
    Sampling,
    ScoreFields,
    ScoreResult,
    Usage,
)
from treegen.integrations.server.nodes import Changes, Client, NodeStore, ServedNode, Tree
from treegen.integrations.server.requests import RequestError, read_message, read_part
from treegen.llm.async_llm import AsyncLLM
from treegen.model.scorers.verifier import Verifier
from treegen.prompts.grammars import REQUESTED, parse_structure
from treegen.prompts.plan.draws import DrawCounter, hash_prompt
from treegen.prompts.token_bounds import TokenLowerBound
from treegen.prompts.tree import Parts, chat_arguments
from treegen.search.backend import BackendSample
from treegen.search.budget import SearchUsage
from treegen.search.budgeted_search import BudgetedSearch
from treegen.search.live.backend import LiveBackend
from treegen.search.live.pending import LiveContext
from treegen.search.reward import DECIMALS

_MOST_TOLD: Final = 2**21  # log-probabilities of one score operation, alternatives included
_MOST_GIVEN: Final = 2**20  # characters of given text that one operation may encode


class NodeCalls:
    """Runs operations of clients on their nodes.

    Attributes:
        store: The nodes.
    """

    def __init__(self, served: AsyncLLM, store: NodeStore, verifier: Verifier | None) -> None:
        """Create an object that runs nothing yet.

        Args:
            served: The model.
            store: The nodes.
            verifier: Computes rewards; None if the server has no verifier.
        """
        self._served, self.store, self._verifier = served, store, verifier
        self._verifying = asyncio.Lock()
        self._bound = TokenLowerBound(served.llm.tokenizer)

    # Operations

    async def root(self, client: Client, ask: RootFields, changes: Changes) -> NodeResult:
        """Create the root of a tree."""
        if (ask.prompt is None) == (ask.messages is None):
            raise RequestError("give either prompt or messages", "prompt")
        if ask.messages is None and (ask.tools or ask.chat_template_kwargs):
            raise RequestError("tools and chat_template_kwargs are for messages", "tools")
        if "chat_template" in (ask.chat_template_kwargs or {}):
            raise RequestError(
                "chat_template_kwargs cannot have a chat_template; leave it out",
                "chat_template_kwargs",
            )
        seed = secrets.randbits(48) if ask.seed is None else ask.seed
        params = _merge_params(SamplingParams(seed=seed), ask.params)
        messages = [read_message(message) for message in ask.messages or ()]
        content: Any = messages or ask.prompt
        template = chat_arguments(ask.tools, ask.chat_template_kwargs)
        with self.store.reserve(client, 1, 0):
            (tokens,) = await self._served.encode(
                [content], tools=ask.tools, chat_template_kwargs=ask.chat_template_kwargs
            )
            with self.store.reserve(client, 0, len(tokens)):
                given = content if isinstance(content, str) else tokens.tolist()

                async def begin(backend: LiveBackend) -> tuple[LiveBackend, LiveContext]:
                    return backend, backend.prompt(given, SearchUsage(), tokens)

                backend, context = await self._served.call_nodes(
                    begin, discard=lambda result: result[0].release(result[1])
                )
        origin = ask.name
        if origin is None:
            counter, prompt = DrawCounter(), hash_prompt(tokens)
            counter.advance(f"{prompt} searched", ask.repeat)
            origin = counter.origin_of_search(prompt)
        tree = Tree(
            client,
            backend,
            origin,
            params,
            self.store.lease(ask.lease_seconds),
            given if isinstance(given, str) else None,
            messages,
            template,
        )
        node = self.store.add_root(tree, context)
        changes.nodes.append(node)
        return NodeResult(node=describe_node(node), memory=self.store.memory(client))

    async def sample(
        self, client: Client, node: ServedNode, ask: SampleFields, changes: Changes
    ) -> SampleResult:
        """Draw children of a node."""
        nodes, usage = list[NodeAnswer](), Usage()
        with self._sampling(client, node, ask, changes) as (params, first):
            drawn, usage = await self._draw(node, range(first, first + ask.n), params)
            nodes = self._add_samples(node, first, drawn, changes)
        return SampleResult(nodes=nodes, usage=usage, memory=self.store.memory(client))

    async def stream(
        self, client: Client, node: ServedNode, ask: SampleFields
    ) -> AsyncGenerator[NodeAnswer | Usage, None]:
        """Draw children of a node, and yield each as soon as it has ended, then the usage."""
        changes = Changes()
        with self._sampling(client, node, ask, changes) as (params, first):
            draws = {
                asyncio.ensure_future(self._draw(node, range(index, index + 1), params)): index
                for index in range(first, first + ask.n)
            }
            usages, waiting = [], set(draws)
            try:
                while waiting:
                    done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    for task in sorted(done, key=draws.__getitem__):
                        drawn, usage = task.result()
                        usages.append(usage)
                        for answer in self._add_samples(node, draws[task], drawn, changes):
                            yield answer
            finally:
                for task in draws:
                    task.cancel()
                await asyncio.gather(*draws, return_exceptions=True)
        yield Usage(
            decoded_tokens=sum(usage.decoded_tokens for usage in usages),
            prefilled_tokens=sum(usage.prefilled_tokens for usage in usages),
        )

    async def extend(
        self, client: Client, node: ServedNode, ask: ExtendFields, changes: Changes
    ) -> NodeResult:
        """Append given text to a node."""
        self.store.check_depth(node)
        contents = [ask.text, ask.parts, ask.messages]
        if sum(content is not None for content in contents) != 1:
            raise RequestError("give exactly one of text, parts and messages", "text")
        tree = node.tree
        with tree.in_use(), self.store.reserve(client, 1, 0):
            index = changes.take(node, "num_extended", ask.index, 1)
            extend = await self._prepare_extension(node, ask)

            async def begin(backend: LiveBackend) -> LiveContext:
                return extend(_backend_of(tree, backend))

            context = await self._served.call_nodes(begin, discard=tree.backend.release)
            try:
                self._check_live(node)
                self._check_context(context.num_tokens)
                added = max(0, context.num_tokens - node.context.num_tokens)
                with self.store.reserve(client, 0, added):
                    pass
            except BaseException:
                self._served.release(tree.backend, [context])
                raise
            child = self.store.add_child(node, index, context, ask.text or "")
        changes.nodes.append(child)
        return NodeResult(node=describe_node(child), memory=self.store.memory(client))

    async def score(self, client: Client, node: ServedNode, ask: ScoreFields) -> ScoreResult:
        """Return the log-likelihoods of continuations of a node."""
        self._check_given("texts", *ask.texts)
        most = sum(map(len, ask.texts)) * (ask.top + 1)
        if most > _MOST_TOLD:
            raise RequestError(
                f"the texts may have {most:,} log-probabilities, and an answer has {_MOST_TOLD:,} "
                "at most; score fewer texts, or ask for fewer alternatives",
                "top" if ask.top else "texts",
            )
        tree, search = node.tree, self._new_search(node)

        async def begin(backend: LiveBackend) -> list[Score]:
            return await _backend_of(tree, backend).score(
                node.context, ask.texts, search, top=ask.top
            )

        with tree.in_use():
            scores = await self._served.call_nodes(begin, rows=len(ask.texts))
        if len(scores) < len(ask.texts):
            raise StoppedError("the server stops, and this call was not done")
        return ScoreResult(
            scores=[describe_score(score) for score in scores],
            usage=usage_of(search),
            memory=self.store.memory(client),
        )

    async def reward(self, client: Client, nodes: Sequence[ServedNode]) -> RewardResult:
        """Return the values that the verifier gives nodes."""
        verifier = self._verifier
        if verifier is None:
            raise StatusError(400, "the server has no verifier; compute the values yourself", "op")
        texts = []
        for node in nodes:
            if node.tree.prompt is None:
                raise RequestError(
                    "the verifier reads the text of the prompt, and this root was made of token "
                    "ids or messages; give the prompt as text",
                    "nodes",
                )
            answer = "".join(above.own_text for above in [*node.ancestors()][-2::-1])
            texts.append((node.tree.prompt, answer))
            node.tree.used = time.monotonic()
        async with self._verifying:
            values = await asyncio.to_thread(_read_values, verifier, texts)
        return RewardResult(rewards=values, memory=self.store.memory(client))

    async def read(self, client: Client, node: ServedNode) -> ReadResult:
        """Return a node with what it costs, and renew its lease."""
        tree = node.tree

        async def begin(backend: LiveBackend) -> tuple[int, list[int]]:
            _backend_of(tree, backend)
            ids = node.context.segment.path_tokens() if node.parent is None else ()
            return count_cached(node), list(map(int, ids))

        with tree.in_use():
            cached, ids = await self._served.call_nodes(begin)
            self._check_live(node)
        children = sorted(node.children, key=lambda child: (child.completion is None, child.index))
        below = list(node.walk())
        return ReadResult(
            node=describe_node(node, node.text or self._spell(ids)),
            children=[child.id for child in children],
            subtree_nodes=len(below),
            subtree_tokens=sum(other.num_tokens for other in below),
            cached_tokens=cached,
            memory=self.store.memory(client),
        )

    def drop(self, client: Client, node: ServedNode) -> DropResult:
        """Drop a node and all nodes below it."""
        nodes, tokens = self.store.drop(node)
        return DropResult(
            id=node.id,
            dropped_nodes=nodes,
            dropped_tokens=tokens,
            memory=self.store.memory(client),
        )

    # Parts of operations

    @contextmanager
    def _sampling(
        self, client: Client, node: ServedNode, ask: SampleFields, changes: Changes
    ) -> Iterator[tuple[SamplingParams, int]]:
        """Check a sample operation, and yield its parameters and the index of the first child."""
        params = _merge_params(node.tree.params, ask.params)
        if ask.n > self.store.limits.max_node_samples:
            raise RequestError(f"n must be at most {self.store.limits.max_node_samples:,}", "n")
        if params.temperature == 0 and ask.n > 1:
            raise RequestError("temperature 0 gives the same child n times; sample with n=1", "n")
        self.store.check_depth(node)
        room = max(self._served.llm.spec.context_length - node.context.num_tokens, 0)
        with (
            node.tree.in_use(),
            self.store.reserve(client, ask.n, ask.n * min(params.max_tokens, room)),
        ):
            yield params, changes.take(node, "num_drawn", ask.first, ask.n)

    async def _draw(
        self, node: ServedNode, indices: range, params: SamplingParams
    ) -> tuple[list[BackendSample], Usage]:
        """Return one sample per index, and what they took."""
        tree, search = node.tree, self._new_search(node)
        await self._served.prepare(params)
        self._check_live(node)

        async def begin(backend: LiveBackend) -> list[BackendSample]:
            samples = await _backend_of(tree, backend).sample(
                node.context, node.key, indices, params, search
            )
            return [sample for sample in samples if sample is not None]

        drawn = await self._served.call_nodes(
            begin, rows=len(indices), discard=partial(_release_samples, tree.backend)
        )
        if len(drawn) == len(indices) and node.is_live:
            return drawn, usage_of(search)
        self._release(tree, drawn)
        self._check_live(node)
        raise StoppedError("the server stops, and this call was not done")

    def _add_samples(
        self, node: ServedNode, first: int, drawn: Sequence[BackendSample], changes: Changes
    ) -> list[NodeAnswer]:
        """Add samples as children of a node.

        Args:
            node: The node above.
            first: Index of the first sample.
            drawn: The samples.
            changes: Records the nodes.
        """
        if not node.is_live:
            self._release(node.tree, drawn)
            self._check_live(node)
        answers = []
        for index, sample in enumerate(drawn, first):
            assert isinstance(sample.context, LiveContext)
            child = self.store.add_child(node, index, sample.context, "", sample.completion)
            changes.nodes.append(child)
            answers.append(describe_node(child))
        return answers

    async def _prepare_extension(
        self, node: ServedNode, ask: ExtendFields
    ) -> Callable[[LiveBackend], LiveContext]:
        """Return a function that extends a node; render messages and decode images before."""
        if ask.text is not None:
            self._check_given("text", ask.text)
            text = ask.text
            return lambda backend: backend.extend(node.context, text)
        if ask.parts is not None:
            parts: Parts = [read_part(part) for part in ask.parts]
            self._check_given("parts", *(part.get("text", "") for part in parts))
            await self._served.open_images(parts)
            return lambda backend: backend.extend(node.context, parts)
        turns = [read_message(message) for message in ask.messages or ()]
        rendered, images = await self._served.render_turns(
            turns, before=node.tree.messages, template=node.tree.template
        )
        self._check_given("messages", rendered)
        return lambda backend: backend.extend(node.context, rendered, images)

    def _check_given(self, param: str, *texts: str) -> None:
        """Reject texts that are too long, before they are encoded."""
        if sum(map(len, texts)) > _MOST_GIVEN:
            raise RequestError(
                f"one operation takes at most {_MOST_GIVEN:,} characters; give less", param
            )
        for text in texts:
            self._check_context(self._bound.of_text(text))

    def _check_context(self, num_tokens: int) -> None:
        most = self._served.llm.spec.context_length
        if num_tokens > most:
            raise ContextError(
                f"the text up to there has at least {num_tokens:,} tokens, and the model's context "
                f"{most:,}; give less"
            )

    @staticmethod
    def _check_live(node: ServedNode) -> None:
        if not node.is_live:
            raise StatusError(404, f"the node {node.id!r} was dropped during the call", "node")

    def _release(self, tree: Tree, samples: Sequence[BackendSample]) -> None:
        self._served.release(tree.backend, [sample.context for sample in samples])

    @staticmethod
    def _new_search(node: ServedNode) -> BudgetedSearch:
        """Return an object that counts one operation; the node's key follows the origin."""
        return BudgetedSearch("", None, node.tree.origin)

    def _spell(self, ids: Sequence[int]) -> str:
        """Return the text of the token ids of a prompt."""
        llm = self._served.llm
        if llm.images is not None:
            ids = llm.images.restore_placeholders(np.array(ids, dtype=np.int32)).tolist()
        text: str = llm.tokenizer.decode(ids, clean_up_tokenization_spaces=False) if ids else ""
        return text


def _backend_of(tree: Tree, backend: LiveBackend) -> LiveBackend:
    """Return the backend of a tree, which must be the one that computes now."""
    if tree.backend is not backend:
        raise StatusError(
            404,
            "the engine has failed and restarted, and the node is gone; create it again",
            "node",
        )
    return backend


def _release_samples(backend: LiveBackend, samples: Sequence[BackendSample]) -> None:
    for sample in samples:
        backend.release(sample.context)


def _merge_params(params: SamplingParams, ask: Sampling) -> SamplingParams:
    """Return sampling parameters with those of a request in place of their own."""
    fields = ask.model_dump(exclude_none=True)
    structure = parse_structure(fields)
    for name in REQUESTED:
        fields.pop(name, None)
    if isinstance(stop := fields.get("stop"), list):
        fields["stop"] = [text for text in stop if text]
    elif stop == "":
        del fields["stop"]
    fields |= structure
    return replace(params, **fields) if fields else params


def _read_values(verifier: Verifier, texts: Sequence[tuple[str, str]]) -> list[float]:
    encoded = [verifier.encode(question, answer) for question, answer in texts]
    verifier.scorer.check_length([ids for ids, _ in encoded])
    steps = verifier.read([ids for ids, _ in encoded], [ends for _, ends in encoded])
    return [round(verifier.reduce_steps(values), DECIMALS) for values in steps]
