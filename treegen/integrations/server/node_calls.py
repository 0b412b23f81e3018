"""The operations on nodes: each one is a call of the backend of live searches."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
from pydantic_core import PydanticSerializationError

from treegen.common.outputs import Score
from treegen.common.params import SamplingParams
from treegen.errors import StoppedError
from treegen.integrations.nodes import protocol
from treegen.integrations.nodes.params import merge_params
from treegen.integrations.server.errors import StatusError, run_exclusively
from treegen.integrations.server.given_text import (
    GivenText,
    name_field_in_errors,
    read_judged_text,
)
from treegen.integrations.server.node_answers import (
    check_answer_size,
    count_cached,
    describe_node,
    describe_score,
    describe_subtree,
    sum_usages,
    usage_of,
)
from treegen.integrations.server.nodes import (
    Changes,
    Client,
    NodeStore,
    Reservation,
    ServedNode,
    Tree,
)
from treegen.integrations.server.requests import RequestError
from treegen.llm.async_llm import AsyncLLM
from treegen.model.scorers.verifier import Verifier
from treegen.prompts.chat_images import without_images
from treegen.prompts.plan.draws import DrawCounter, hash_prompt
from treegen.search.backend import BackendSample
from treegen.search.budget import SearchUsage
from treegen.search.budgeted_search import BudgetedSearch
from treegen.search.live.backend import LiveBackend
from treegen.search.live.pending import LiveContext
from treegen.search.reward import compute_values

T = TypeVar("T")

_MAX_PARAMS_CHARS: Final = 2**16  # characters of the sampling parameters that a tree keeps, as JSON
_MESSAGE_CHARS: Final = 16_384  # characters of messages that a tree keeps, in addition to
_MESSAGE_CHARS_PER_TOKEN: Final = 16


class NodeCalls:
    """Runs operations of clients on their nodes.

    Attributes:
        store: The nodes.
        texts: Checks and renders the texts of clients.
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
        self.texts = GivenText(served)

    # Operations

    async def root(
        self, client: Client, fields: protocol.RootFields, changes: Changes
    ) -> protocol.NodeResult:
        """Create the root of a tree.

        Args:
            client: The client.
            fields: The request.
            changes: Records what the operation changes.
        """
        prompt = self.texts.read_root(fields)
        seed = secrets.randbits(48) if fields.seed is None else fields.seed
        with name_field_in_errors("params"):
            params = merge_params(SamplingParams(seed=seed), fields.params)
        try:
            size = len(fields.params.model_dump_json(exclude_none=True))
        except PydanticSerializationError:
            raise RequestError(
                "params are nested too deeply; use a flatter schema", "params"
            ) from None
        if size > _MAX_PARAMS_CHARS:
            raise RequestError(
                f"the parameters of a tree have {size:,} characters, but a tree stores at most "
                f"{_MAX_PARAMS_CHARS:,}; send the large parameters with each sample request",
                "params",
            )
        with self.store.reserve(client, 1, 0):
            request = await self.texts.encode_root(client, prompt)
            tokens = request.tokens
            with self.store.reserve(client, 0, len(tokens), (None, prompt.field)):
                content = fields.prompt if isinstance(fields.prompt, str) else tokens.tolist()

                async def begin(backend: LiveBackend) -> tuple[LiveBackend, LiveContext]:
                    # The request holds the prompt's images until its segment does.
                    return backend, backend.prompt(content, SearchUsage(), request.tokens)

                backend, context = await self._served.call_nodes(
                    begin, discard=lambda result: result[0].release(result[1])
                )
        origin = fields.name
        if origin is None:
            counter, digest = DrawCounter(), hash_prompt(tokens)
            counter.advance(f"{digest} searched", fields.repeat)
            origin = counter.origin_of_search(digest)
        tree = Tree(
            client,
            backend,
            origin,
            params,
            self.store.lease(fields.lease_seconds),
            content if isinstance(content, str) else None,
        )
        # Only later turns need them. What is far larger than its tokens is not kept, because tokens
        # are limited and other memory is not.
        earlier = [without_images(message) for message in prompt.messages]
        if len(
            json.dumps([earlier, prompt.template])
        ) <= _MESSAGE_CHARS + _MESSAGE_CHARS_PER_TOKEN * len(tokens):
            tree.messages, tree.template = earlier, prompt.template
        node = self.store.add_root(tree, context)
        changes.nodes.append(node)
        return protocol.NodeResult(node=describe_node(node), memory=self.store.memory(client))

    async def sample(
        self, client: Client, node: ServedNode, fields: protocol.SampleFields, changes: Changes
    ) -> protocol.SampleResult:
        """Draw children of a node.

        Args:
            client: The client.
            node: The node.
            fields: The request.
            changes: Records what the operation changes.
        """
        with self._sampling(client, node, fields, changes) as (params, first, _):
            samples, usage = await self._draw(node, range(first, first + fields.n), params)
            nodes = self._add_samples(node, first, samples, changes)
        return protocol.SampleResult(nodes=nodes, usage=usage, memory=self.store.memory(client))

    async def stream(
        self, client: Client, node: ServedNode, fields: protocol.SampleFields
    ) -> AsyncGenerator[protocol.NodeAnswer | protocol.NodeUsage, None]:
        """Draw children of a node, and yield each as soon as it has ended, then the usage.

        Args:
            client: The client.
            node: The node.
            fields: The request.
        """
        changes = Changes()
        with self._sampling(client, node, fields, changes) as (params, first, reserved):
            draws = {
                asyncio.ensure_future(self._draw(node, range(index, index + 1), params)): index
                for index in range(first, first + fields.n)
            }
            usages, waiting = [], set(draws)
            try:
                while waiting:
                    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    for task in sorted(done, key=draws.__getitem__):
                        waiting.discard(task)
                        samples, usage = task.result()
                        usages.append(usage)
                        reserved.release_part(1, reserved.tokens // reserved.nodes)
                        for answer in self._add_samples(node, draws[task], samples, changes):
                            yield answer
            except BaseException:
                if not changes.nodes:  # otherwise the client may know some
                    changes.undo(self.store)
                raise
            finally:
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
                for task in waiting:
                    _free_unclaimed(task, lambda result: self._release(node.tree, result[0]))
        yield sum_usages(usages)

    async def extend(
        self, client: Client, node: ServedNode, fields: protocol.ExtendFields, changes: Changes
    ) -> protocol.NodeResult:
        """Append given text to a node.

        Args:
            client: The client.
            node: The node.
            fields: The request.
            changes: Records what the operation changes.
        """
        self.store.check_depth(node)
        field = self.texts.field_of(fields)
        tree = node.tree
        with tree.in_use(), self.store.reserve(client, 1, 0):
            index = changes.take(node, "num_extended", fields.index, 1)
            encoded = await self.texts.encode_extension(node, fields)
            self._check_live(node)

            async def begin(backend: LiveBackend) -> LiveContext:
                return _with_ids(_backend_of(tree, backend).extend(node.context, encoded))

            context = await self._served.call_nodes(begin, discard=tree.backend.release)
            try:
                self._check_live(node)
                self.texts.check_context(context.num_tokens)
                added = max(0, context.num_tokens - node.context.num_tokens)
                with self.store.reserve(client, 0, added, (None, field)):
                    pass
            except BaseException:
                self._served.release(tree.backend, [context])
                raise
            child = self.store.add_child(node, index, context, fields.text or "")
        changes.nodes.append(child)
        return protocol.NodeResult(node=describe_node(child), memory=self.store.memory(client))

    async def score(
        self, client: Client, node: ServedNode, fields: protocol.ScoreFields
    ) -> protocol.ScoreResult:
        """Return the log-likelihoods of continuations of a node.

        Args:
            client: The client.
            node: The node.
            fields: The request.
        """
        check_answer_size([fields])
        if not all(fields.texts):
            raise RequestError("a text is empty; send at least one token to score", "texts")
        tree, search = node.tree, BudgetedSearch("", None, node.tree.origin)

        async def begin(backend: LiveBackend) -> list[Score]:
            return await _backend_of(tree, backend).score(
                node.context, encoded, search, top=fields.top
            )

        with tree.in_use():
            encoded = await self.texts.encode_scored(node, fields.texts)
            self._check_live(node)
            scores = await self._call(node, begin, rows=len(fields.texts))
        if len(scores) < len(fields.texts):
            raise StoppedError("the server is stopping and did not finish this call")
        return protocol.ScoreResult(
            scores=[describe_score(score) for score in scores],
            usage=usage_of(search),
            memory=self.store.memory(client),
        )

    async def reward(self, client: Client, nodes: Sequence[ServedNode]) -> protocol.RewardResult:
        """Return the values that the verifier gives nodes."""
        verifier = self._verifier
        if verifier is None:
            raise StatusError(400, "the server has no verifier; restart it with --verifier", "op")
        texts = [read_judged_text(node) for node in nodes]

        def verify() -> list[float]:
            return compute_values(verifier, [verifier.encode(*text) for text in texts])

        with ExitStack() as used:
            for tree in {node.tree for node in nodes}:
                used.enter_context(tree.in_use())
            # A cancelled call cannot stop its thread, so the verifier stays locked until it ends.
            values = await run_exclusively(self._verifying, lambda: asyncio.to_thread(verify))
        return protocol.RewardResult(rewards=values, memory=self.store.memory(client))

    async def read(self, client: Client, node: ServedNode) -> protocol.ReadResult:
        """Return a node with what it costs, and renew its lease."""
        tree = node.tree

        async def begin(backend: LiveBackend) -> tuple[int, list[int]]:
            _backend_of(tree, backend)
            ids = node.context.segment.path_tokens() if node.parent is None else ()
            return count_cached(node), list(map(int, ids))

        with tree.in_use():
            cached, ids = await self._served.call_nodes(begin)
            self._check_live(node)
        text = node.text or self._decode_prompt(ids)
        return describe_subtree(node, text, cached, self.store.memory(client))

    def drop(self, client: Client, node: ServedNode) -> protocol.DropResult:
        """Drop a node and all nodes below it."""
        nodes, tokens = self.store.drop(node)
        memory = self.store.memory(client)
        return protocol.DropResult(
            id=node.id, dropped_nodes=nodes, dropped_tokens=tokens, memory=memory
        )

    # Parts of operations

    @contextmanager
    def _sampling(
        self, client: Client, node: ServedNode, fields: protocol.SampleFields, changes: Changes
    ) -> Iterator[tuple[SamplingParams, int, Reservation]]:
        """Check a sample operation; yield its parameters, its first index, and its reservation.

        Args:
            client: The client.
            node: The node.
            fields: The request.
            changes: Records the indices.
        """
        with name_field_in_errors("params"):
            params = merge_params(node.tree.params, fields.params)
        if fields.n > self.store.limits.max_node_samples:
            raise RequestError(f"n must be at most {self.store.limits.max_node_samples:,}", "n")
        if params.temperature == 0 and fields.n > 1:
            raise RequestError(
                "at temperature 0, all n children are the same; sample with n=1", "n"
            )
        self.store.check_depth(node)
        num_left = max(self._served.llm.spec.context_length - node.context.num_tokens, 0)
        with (
            node.tree.in_use(),
            self.store.reserve(
                client,
                fields.n,
                fields.n * min(params.max_tokens, num_left),
                ("n", "params.max_tokens"),
            ) as reserved,
        ):
            yield params, changes.take(node, "num_drawn", fields.first, fields.n), reserved

    async def _draw(
        self, node: ServedNode, indices: range, params: SamplingParams
    ) -> tuple[list[BackendSample], protocol.NodeUsage]:
        """Return one sample per index, and what they took."""
        tree, search = node.tree, BudgetedSearch("", None, node.tree.origin)
        with name_field_in_errors("params"):
            await self._served.encoder.prepare(params)
        self._check_live(node)

        async def begin(backend: LiveBackend) -> list[BackendSample]:
            samples = await _backend_of(tree, backend).sample(
                node.context, node.key, indices, params, search
            )
            completed = [sample for sample in samples if sample is not None]
            for sample in completed:
                assert isinstance(sample.context, LiveContext)
                _with_ids(sample.context)
            return completed

        def discard(samples: list[BackendSample]) -> None:
            for sample in samples:
                tree.backend.release(sample.context)

        new_samples = await self._call(node, begin, rows=len(indices), discard=discard)
        if len(new_samples) == len(indices) and node.is_live:
            return new_samples, usage_of(search)
        self._release(tree, new_samples)
        self._check_live(node)
        raise StoppedError("the server is stopping and did not finish this call")

    async def _call(
        self, node: ServedNode, begin: Callable[[LiveBackend], Coroutine[Any, Any, T]], **how: Any
    ) -> T:
        """Return the result of a call that ends early if the node is dropped.

        Args:
            node: The node.
            begin: As for `AsyncLLM.call_nodes`.
            **how: Further arguments of `AsyncLLM.call_nodes`.
        """
        call: asyncio.Task[T] = asyncio.create_task(self._served.call_nodes(begin, **how))
        node.calls.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            _free_unclaimed(call, partial(self._release, node.tree))
            self._check_live(node)
            raise
        finally:
            node.calls.discard(call)

    def _add_samples(
        self, node: ServedNode, first: int, samples: Sequence[BackendSample], changes: Changes
    ) -> list[protocol.NodeAnswer]:
        """Add samples as children of a node.

        Args:
            node: The node above.
            first: Index of the first sample.
            samples: The samples.
            changes: Records the nodes.
        """
        if not node.is_live:
            self._release(node.tree, samples)
            self._check_live(node)
        answers = []
        for index, sample in enumerate(samples, first):
            assert isinstance(sample.context, LiveContext)
            child = self.store.add_child(node, index, sample.context, "", sample.completion)
            changes.nodes.append(child)
            answers.append(describe_node(child))
        return answers

    @staticmethod
    def _check_live(node: ServedNode) -> None:
        if not node.is_live:
            raise StatusError(404, f"the node {node.id!r} was dropped during the call", "node")

    def _release(self, tree: Tree, results: Sequence[Any]) -> None:
        """Release the samples among results."""
        samples = [result for result in results if isinstance(result, BackendSample)]
        self._served.release(tree.backend, [sample.context for sample in samples])

    def _decode_prompt(self, ids: Sequence[int]) -> str:
        """Return the text of the token ids of a prompt."""
        llm = self._served.llm
        if llm.images is not None:
            ids = llm.images.restore_placeholders(np.array(ids, dtype=np.int32)).tolist()
        text: str = llm.tokenizer.decode(ids, clean_up_tokenization_spaces=False) if ids else ""
        return text


def _free_unclaimed(task: asyncio.Future[T], free: Callable[[T], object]) -> None:
    """Free the result of a task that nobody gets, if it has one."""
    if task.done() and not task.cancelled() and task.exception() is None:
        free(task.result())


def _backend_of(tree: Tree, backend: LiveBackend) -> LiveBackend:
    """Return the backend of a tree, which must be the one that computes now."""
    if tree.backend is not backend:
        raise StatusError(
            404,
            "the engine failed and was restarted, so the node is lost; create the node again",
            "node",
        )
    return backend


def _with_ids(context: LiveContext) -> LiveContext:
    """Return a context after reading its `ids`, which only the thread of the engine may do."""
    _ = context.ids
    return context
