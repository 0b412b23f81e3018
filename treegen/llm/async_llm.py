"""AsyncLLM: one LLM for many concurrent callers in event loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from treegen.common.checks import CacheMode, check_counts, check_int
from treegen.common.lifetimes import Closeable
from treegen.common.outputs import Completion, Score, Status, Usage
from treegen.common.params import MAX_COUNT, Params, SamplingParams, check_params
from treegen.errors import BusyError, InputError, StoppedError
from treegen.llm import LLM
from treegen.llm.arguments import missing_attribute, read_prompts, reject_unknown_arguments
from treegen.llm.base import BaseLLM
from treegen.llm.encoder import AsyncCall, NodeCall, Prompt, PromptEncoder
from treegen.llm.engine_loop import EngineLoop
from treegen.model.training.weight_updates import NewWeights
from treegen.prompts.plan.plan import Request
from treegen.prompts.replies import ReplyReader
from treegen.prompts.token_text import TokenText
from treegen.prompts.tree import chat_arguments
from treegen.search.live.run import StreamedTexts

if TYPE_CHECKING:
    from treegen.prompts.radix import Tokens
    from treegen.search.backend import Context
    from treegen.search.live.backend import LiveBackend

T = TypeVar("T")


class AsyncLLM(Closeable):
    """Accepts calls from any event loop, at any time, and batches all of them in the same steps.

    The samples of a call are those that `LLM.generate` would draw if the calls came one by one.
    The LLM cannot be used directly until `close`. To abort a call, cancel the task that awaits it,
    or close the iterator of `stream`.

    Attributes:
        llm: The LLM.
        encoder: Encodes prompts, and text that follows nodes.
        text: Decodes tokens.
        replies: Splits replies into reasoning, text and tool calls.
    """

    def __init__(
        self,
        llm: BaseLLM,
        *,
        max_waiting: int | None = None,
        tool_format: str | None = None,
        max_image_pixels: int | None = None,
        nodes: bool = False,
    ) -> None:
        """Start to serve calls.

        Args:
            llm: An LLM. A Cluster is an error, because it assigns only runs known as a whole.
            max_waiting: Maximum number of samples that wait, in addition to those being decoded;
                further calls raise BusyError. Default: no limit.
            tool_format: Format of the model's tool calls, a name in
                `treegen.prompts.replies.TOOL_FORMATS`. Default: the format that its chat template
                implies.
            max_image_pixels: Maximum number of pixels of all images of one call, for calls made on
                behalf of clients. Default: only the limit of each image, 67 million pixels.
            nodes: Whether `call_nodes` can be used. Default: False.

        Raises:
            InputError: an argument cannot be used, or another run of the LLM is not finished.
        """
        if not isinstance(llm, BaseLLM):
            raise InputError(f"AsyncLLM expects an LLM, got {llm!r:.60}; use AsyncLLM(LLM(model))")
        if not isinstance(llm, LLM):
            raise InputError(
                f"AsyncLLM does not support a {type(llm).__name__}, because its workers need all "
                "prompts of a run at once; start one process with an LLM for each GPU, or use "
                f"run, generate or search of the {type(llm).__name__}"
            )
        check_counts(max_waiting=max_waiting, max_image_pixels=max_image_pixels)
        self.llm = llm
        self.text = TokenText(llm.tokenizer)
        self.replies = ReplyReader(llm.tokenizer, tool_format)
        self.max_waiting, self.has_nodes = max_waiting, nodes
        self._engine_loop = EngineLoop(llm, nodes=nodes)
        self.encoder = PromptEncoder(
            llm, self._engine_loop.start_call, self._check_open, max_image_pixels
        )

    @reject_unknown_arguments
    async def generate(
        self,
        prompts: Iterable[Prompt],
        params: Params | None = None,
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        first: int = 0,
    ) -> tuple[list[Tokens], list[list[Completion]]]:
        """Return the token ids of each prompt, and its params.n completions; see `LLM.generate`.

        If the caller is cancelled, so are its samples.

        Args:
            prompts: Texts, token ids or chat messages.
            params: Sampling parameters of all prompts. Default: those of `SamplingParams()`.
            tools: Tools that the chat template lists. Default: none.
            chat_template_kwargs: Further arguments of the chat template. Default: none.
            first: With a seed, index of the first sample to draw of each prompt. Default: 0.

        Returns:
            Two lists with an item for each prompt: its token ids, an int32 array, and the list of
            its completions, by sample index.

        Raises:
            BusyError: too many samples wait.
            TreegenError: as for `LLM.generate`.
        """
        params = check_params(params)
        call = self._call(prompts, params, False, tools, chat_template_kwargs, first)
        by_prompt: list[list[Completion]] = []
        async for index, result in self._results(call):
            by_prompt = by_prompt or [[] for _ in call.prompts]
            by_prompt[index].append(result)
        for completions in by_prompt:
            completions.sort(key=lambda completion: completion.sample_index)
        return call.prompts, by_prompt

    @reject_unknown_arguments
    async def stream(
        self,
        prompts: Iterable[Prompt],
        params: Params | None = None,
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        parts: bool = False,
        first: int = 0,
    ) -> AsyncGenerator[tuple[int, Any], None]:
        """Yield the token ids of each prompt, then deltas and completions of its samples.

        A delta has the tokens that a sample has drawn since its last delta, and the text that is
        certain: whole characters, and nothing that may yet become a stop string. The deltas of a
        sample add up to its Completion, which comes last. Closing the iterator cancels the
        remaining samples.

        Args:
            prompts: As for `generate`.
            params: As for `generate`.
            tools: As for `generate`.
            chat_template_kwargs: As for `generate`.
            parts: Whether deltas also have the reasoning, the text and the tool calls, as far as
                they are known; see `treegen.prompts.replies`.
            first: As for `generate`.

        Yields:
            (index of the prompt, item). The first item of a prompt is its token ids, an array. Each
            further item is a `SampleDelta` with the `sample` index, `text`, `tokens` and
            `logprobs`, or the `Completion` of a finished sample.

        Raises:
            TreegenError: as for `generate`.
        """
        params = check_params(params)
        call = self._call(prompts, params, True, tools, chat_template_kwargs, first)
        texts = StreamedTexts(
            self.text,
            params.stops,
            self.replies if parts else None,
            tools,
            is_structured=params.structure is not None,
        )
        results = self._results(call)
        try:
            async for index, item in results:
                for event in texts.read(index, item):
                    yield index, event
        finally:
            await results.aclose()

    @reject_unknown_arguments
    async def score(self, prompts: Sequence[Sequence[int]], *, top: int = 0) -> list[Score]:
        """Return log-likelihoods of all tokens of each prompt except the first.

        Args:
            prompts: Token ids of each prompt.
            top: Number of most likely tokens to report at the position of each token. Default: 0.

        Raises:
            BusyError: too many samples wait.
            TreegenError: as for `LLM.score`.
        """
        check_int("top", top, minimum=0, maximum=MAX_COUNT)
        call = self._call(prompts, None, False, None, None, top=top)
        scores = {index: score async for index, score in self._results(call)}
        return [scores[index] for index in range(len(scores))]

    @reject_unknown_arguments
    async def encode(
        self,
        prompts: Iterable[Prompt],
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Tokens]:
        """Return the token ids of prompts.

        Args:
            prompts: As for `generate`.
            tools: As for `generate`.
            chat_template_kwargs: As for `generate`.

        Raises:
            TreegenError: as for `generate`.
        """
        requests = await self.encode_requests(
            prompts, tools=tools, chat_template_kwargs=chat_template_kwargs
        )
        return [request.tokens for request in requests]

    async def encode_requests(
        self,
        prompts: Iterable[Prompt],
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Request]:
        """Return prompts as requests, which hold their images.

        Args:
            prompts: As for `generate`.
            tools: As for `generate`.
            chat_template_kwargs: As for `generate`.

        Raises:
            TreegenError: as for `generate`.
        """
        contents = read_prompts(prompts)
        self._check_open()
        self._check_num(len(contents), "prompts")
        template = chat_arguments(tools, chat_template_kwargs)
        return await self.encoder.encode(contents, template)

    async def call_nodes(
        self,
        begin: Callable[[LiveBackend], Coroutine[Any, Any, T]],
        *,
        rows: int = 0,
        discard: Callable[[T], object] = lambda result: None,
    ) -> T:
        """Run a coroutine that uses nodes of searches, in the steps of all other calls.

        If the caller is cancelled, so is the coroutine.

        Args:
            begin: Makes the coroutine. It is called in the engine thread, gets the backend that
                computes nodes now, and awaits nothing else.
            rows: Number of samples and scores of which the call waits. Default: 0.
            discard: Frees a result that the caller does not get, in the engine thread.

        Raises:
            BusyError: too many samples wait.
            TreegenError: as for the coroutine.
        """
        if not self.has_nodes:
            raise InputError("this AsyncLLM was created without nodes; pass nodes=True to AsyncLLM")
        call = NodeCall(begin, rows, discard, asyncio.get_running_loop())
        with self._engine_loop.lock:
            self._check_open()
            self._check_num(rows, "samples")
            self._check_waiting(rows)
            self._engine_loop.start_node_call(call)
        try:
            result: T = await asyncio.wrap_future(call.future)
        except (asyncio.CancelledError, GeneratorExit):  # its event loop may be closed
            self._engine_loop.cancel_node_call(call)
            raise
        return result

    def release(self, backend: LiveBackend, contexts: Sequence[Context]) -> None:
        """Drop contexts of nodes, before the next step.

        Args:
            backend: The backend that made them.
            contexts: The contexts.
        """
        self._engine_loop.release(backend, contexts)

    async def update(
        self, weights: NewWeights, *, cache: CacheMode = "all", check_finite: bool = True
    ) -> int:
        """Load new weights between two steps, while calls are answered; see `LLM.update`.

        The weights are read in another thread. If the caller is cancelled, they are still loaded.

        Args:
            weights: As for `LLM.update`.
            cache: As for `LLM.update`.
            check_finite: As for `LLM.update`.

        Raises:
            TreegenError: as for `LLM.update`.
        """
        self._check_open()
        how: Any = {"cache": cache, "check_finite": check_finite}
        return await asyncio.to_thread(self.llm.update, weights, **how)

    @property
    def num_waiting(self) -> int:
        """Approximate number of samples that wait to be decoded."""
        return max(self._engine_loop.open_rows - self._engine_loop.status.rows, 0)

    def status(self) -> Status:
        """Return the status after the last step: active rows and pages in use."""
        return self._engine_loop.status

    def usages(self) -> list[Usage]:
        """Return the usage so far: one entry for each run that failed, then the current run's.

        All calls since the start are one run, unless an error ended it. A call has no usage of its
        own, because concurrent calls share their prompts and steps. `prompt_tokens_unshared` counts
        the prompts of `generate`, `stream` and `score`, and none of searches' nodes.
        """
        return self._engine_loop.usages()

    if not TYPE_CHECKING:  # to type checkers a class with __getattr__ has every attribute

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute(self, name)

    @property
    def failure(self) -> Exception | None:
        """The error that ended all service; None while calls can be served."""
        return self._engine_loop.failure

    def _call(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None,
        streams: bool,
        tools: Sequence[Any] | None,
        chat_template_kwargs: Mapping[str, Any] | None,
        first: int = 0,
        top: int = 0,
    ) -> AsyncCall:
        contents = read_prompts(prompts)
        template = chat_arguments(tools, chat_template_kwargs)
        num_rows = len(contents) * (1 if params is None or params.temperature == 0 else params.n)
        num_results = len(contents) * (1 if params is None else params.n)
        call = AsyncCall(
            params, streams, asyncio.get_running_loop(), num_rows, num_results, first, top
        )
        with self._engine_loop.lock:
            self._check_open()
            self._check_num(num_results, "samples")
            self._check_waiting(num_rows)
            self._engine_loop.expect(call)
            self.encoder.submit(call, contents, template)
        return call

    async def _results(self, call: AsyncCall) -> AsyncGenerator[tuple[int, Any], None]:
        """Yield the results that the engine hands out for a call, until the call is complete."""
        num_pending = call.num_pending
        try:
            while num_pending:
                batch = await call.queue.get()
                if isinstance(batch, Exception):
                    raise batch
                for index, item in batch:
                    num_pending -= isinstance(item, Completion | Score)
                    yield index, item
        finally:
            self._engine_loop.cancel(call)

    def _check_num(self, num: int, what: str) -> None:
        if self.max_waiting is None:
            return
        max_samples = self.max_waiting + self.llm.max_rows
        if num > max_samples:
            raise InputError(
                f"a call can request at most {max_samples:,} {what} (max_waiting plus max_rows), "
                f"got {num:,}; request fewer {what} at once"
            )

    def _check_waiting(self, num_rows: int) -> None:
        if self.max_waiting is None:
            return
        waiting = self.num_waiting
        if waiting and waiting + num_rows > self.max_waiting:
            raise BusyError(
                f"{waiting:,} samples are waiting, and the limit (max_waiting) is "
                f"{self.max_waiting:,}; try again later"
            )

    def _check_open(self) -> None:
        if self._engine_loop.failure is not None:
            raise self._engine_loop.failure
        if self._engine_loop.closing:
            raise StoppedError("this AsyncLLM is closed or closing; create a new AsyncLLM")

    def check(self) -> None:
        """Assert that pages, rows and requests are accounted for.

        Raises:
            StoppedError: it is closed.
        """
        self._check_open()
        self._engine_loop.check()

    def close(self, *, drain: bool = True) -> None:
        """Stop accepting calls and wait for the running ones; the LLM can be used afterwards.

        Args:
            drain: Whether to finish the running calls. False cancels them, and their callers get a
                StoppedError.
        """
        self._engine_loop.end()
        self.encoder.close()
        self._engine_loop.join(drain=drain)
