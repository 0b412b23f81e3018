"""Calls of an AsyncLLM, and threads that encode their prompts in order of arrival.

Grammars and bad words are compiled and images decoded first, each kind in a separate thread, so
that other calls do not wait for a large one.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from treegen.common.params import SamplingParams
from treegen.errors import InputError, StoppedError
from treegen.prompts.chat_images import has_image_files, has_images, open_images, render_turns
from treegen.prompts.plan.requests import build_flat_requests
from treegen.prompts.radix import Tokens
from treegen.prompts.tree import Message, Parts
from treegen.search.live.pending import AppendedText, AppendedTextEncoder

if TYPE_CHECKING:
    from treegen.llm import LLM
    from treegen.prompts.images.table import PlacedImage
    from treegen.prompts.plan.plan import Request
    from treegen.search.live.backend import LiveBackend
    from treegen.search.live.pending import LiveContext
    from treegen.search.session import Started

Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(slots=True, eq=False)
class AsyncCall:
    """One call: prompts with the same parameters, and their state."""

    params: SamplingParams | None
    """Sampling parameters; None only scores the prompts."""
    streams: bool
    """Whether tokens are handed out as they are drawn."""
    loop: asyncio.AbstractEventLoop
    """The caller's event loop."""
    rows: int
    """Rows that count towards the limit of waiting samples; 0 once no caller waits."""
    num_pending: int
    """Number of results that the engine has not handed out."""
    first: int = 0
    """With a seed, index of the first sample to draw."""
    top: int = 0
    """Number of most likely tokens to report per token, where prompts are only scored."""
    prompts: list[Tokens] = field(default_factory=list)
    """Token ids of the prompts, once they are encoded."""
    requests: list[Request] = field(default_factory=list)
    """Requests of the prompts, once they are encoded."""
    queue: asyncio.Queue[list[tuple[int, Any]] | Exception] = field(default_factory=asyncio.Queue)
    """Batches of (index of the prompt, item), or an error, for the caller."""
    numbers: list[int] = field(default_factory=list)
    """Numbers of its requests in the run."""
    is_over: bool = False
    """Whether the engine has finished or dropped the call."""


@dataclass(slots=True, eq=False)
class NodeCall:
    """A coroutine that uses nodes of searches, and its state."""

    begin: Callable[[LiveBackend], Coroutine[Any, Any, Any]]
    """Makes the coroutine, which awaits samples and scores of the backend."""
    rows: int
    """Rows that count towards the limit of waiting samples; 0 once no caller waits."""
    discard: Callable[[Any], object]
    """Frees a result that no caller gets; called in the engine thread."""
    loop: asyncio.AbstractEventLoop
    """The event loop of the caller."""
    future: Future[Any] = field(default_factory=Future)
    """Gets the result, unless the caller has cancelled it."""
    started: Started[Any] | None = None
    """Its state in the engine thread, once it has started."""
    is_over: bool = False
    """Whether the engine has finished or dropped the call."""


_Result = TypeVar("_Result")
_MAX_CACHED_TOKENS: Final = 2**22  # tokens of all cached prompts together
TOKENS_PER_ENTRY: Final = 64
"""Tokens that a cached prompt counts in addition to its own, for its key and its array."""


class PromptEncoder:
    """Encodes the prompts of calls in a separate thread, after their grammars and images."""

    def __init__(
        self,
        llm: LLM,
        on_encoded: Callable[[AsyncCall, Exception | None], None],
        check_open: Callable[[], None],
        max_image_pixels: int | None = None,
    ) -> None:
        """Start threads that wait for prompts, grammars and images.

        Args:
            llm: The LLM whose tokenizer encodes the prompts.
            on_encoded: Called in a thread with each call once its requests are set, and with the
                error if encoding failed.
            check_open: Raises an error once the AsyncLLM is closed or has failed.
            max_image_pixels: Maximum number of pixels of all images of one call. Default: only the
                limit of each image.
        """
        self._llm, self._on_encoded, self._check_open = llm, on_encoded, check_open
        # Encoding changes settings of the tokenizer, so two threads cannot share it.
        self._tokenizer = copy.deepcopy(llm.tokenizer)
        self._appended = AppendedTextEncoder(self._tokenizer, llm.spec, llm.images)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="treegen-encode")
        # A grammar or many bad words may take long to compile; other calls do not wait for them.
        self._grammars = ThreadPoolExecutor(1, thread_name_prefix="treegen-compile")
        self._images = ThreadPoolExecutor(1, thread_name_prefix="treegen-images")
        self._max_image_pixels = max_image_pixels
        self._cache = PromptCache()

    def submit(self, call: AsyncCall, contents: list[Any], template: dict[str, Any]) -> None:
        """Encode the prompts of a call in the threads.

        Args:
            call: The call, which gets the requests.
            contents: Its prompts: texts, token ids or chat messages.
            template: Arguments of the chat template.
        """
        params = call.params or SamplingParams()
        stages: deque[tuple[ThreadPoolExecutor, Callable[[], object]]] = deque()
        if _compiles_long(params):
            stages.append((self._grammars, partial(self._llm.make_stop_conditions, params)))
        if has_images(contents):
            stages.append((self._images, partial(self._open_images, contents)))
        stages.append((self._thread, partial(self._encode, call, contents, template)))
        self._start_next(call, stages)

    async def encode(self, contents: list[Any], template: dict[str, Any]) -> list[Request]:
        """Return the requests of prompts."""
        await self._open_images_of(contents)
        return await self._run_in(
            self._thread, self._requests, contents, SamplingParams(), template
        )

    async def prepare(self, params: SamplingParams) -> None:
        """Compile the stop strings and the grammar of sampling parameters.

        Raises:
            InputError: the params name tokens that the model does not have, or no valid grammar.
        """
        thread = self._grammars if _compiles_long(params) else self._thread
        await self._run_in(thread, self._llm.make_stop_conditions, params)

    async def render_turns(
        self, turns: Sequence[Message], **how: Any
    ) -> tuple[str, list[PlacedImage]]:
        """Return the text and the images of messages after a reply.

        Args:
            turns: The messages.
            **how: Further arguments of `prompts.chat_images.render_turns`.

        Raises:
            InputError: the messages cannot be used.
        """
        await self._open_images_of([turns])
        render = partial(render_turns, turns, self._tokenizer, self._llm.images, **how)
        return await self._run_in(self._thread, render)

    async def encode_extension(
        self, context: LiveContext, content: str | Parts, images: Sequence[PlacedImage] = ()
    ) -> AppendedText:
        """Return text for `LiveBackend.extend`.

        Args:
            context: The context of the node; a coroutine of `call_nodes` has read its `ids`.
            content: Text, or texts and images.
            images: The images whose placeholders are in the text. Default: none.

        Raises:
            TreegenError: the content cannot be encoded.
        """
        if not isinstance(content, str):
            await self._open_images_of([[{"role": "user", "content": content}]])
        encode = self._appended.encode_extension
        return await self._run_in(self._thread, encode, context, content, images)

    async def encode_scored(self, context: LiveContext, texts: Sequence[str]) -> list[Tokens]:
        """Return the token ids of texts for `LiveBackend.score`.

        Args:
            context: The context of the node; a coroutine of `call_nodes` has read its `ids`.
            texts: The texts.

        Raises:
            TreegenError: a text cannot be scored.
        """
        return await self._run_in(self._thread, self._appended.encode_scored, context, texts)

    def close(self) -> None:
        """Encode all submitted prompts, then end the threads."""
        self._grammars.shutdown(wait=True)
        self._images.shutdown(wait=True)
        self._thread.shutdown(wait=True)

    async def _open_images_of(self, contents: list[Any]) -> None:
        if has_images(contents):
            await self._run_in(self._images, self._open_images, contents)

    async def _run_in(
        self, thread: ThreadPoolExecutor, function: Callable[..., _Result], *args: Any
    ) -> _Result:
        """Return the result of a function that runs in a thread.

        Args:
            thread: The thread.
            function: The function.
            *args: Its arguments.

        Raises:
            StoppedError: the AsyncLLM is closed.
        """

        def run() -> _Result:
            try:
                return function(*args)
            except Exception:
                raise
            except BaseException as error:
                raise _convert_panic(error) from error

        self._check_open()
        try:
            result = asyncio.get_running_loop().run_in_executor(thread, run)
        except RuntimeError:  # the thread was ended meanwhile
            raise StoppedError("this AsyncLLM was closed during the call") from None
        return await result

    def _requests(
        self, contents: list[Any], params: SamplingParams, template: dict[str, Any]
    ) -> list[Request]:
        prompt_params = [params] * len(contents)
        key = key_of(contents[0], template) if len(contents) == 1 else None
        cached = self._cache.get(key)
        if cached is not None:
            contents, template = [cached.tolist()], {}
        spec, images = self._llm.spec, self._llm.images
        requests = build_flat_requests(
            contents, prompt_params, self._tokenizer, spec, template, images
        )
        if key is not None and not requests[0].images:  # the cache does not keep images
            self._cache.put(key, requests[0].tokens)
        return requests

    def _start_next(
        self, call: AsyncCall, stages: deque[tuple[ThreadPoolExecutor, Callable[[], object]]]
    ) -> None:
        """Run the next stage of a call in its thread, and then the later ones."""
        thread, run = stages.popleft()

        def run_stage() -> None:
            failure: Exception | None = None
            try:
                if not call.is_over:
                    run()
            except BaseException as error:
                failure = _convert_panic(error)
            if stages and failure is None:
                self._start_next(call, stages)
            else:
                self._on_encoded(call, failure)

        thread.submit(run_stage)

    def _open_images(self, contents: list[Any]) -> None:
        open_images(contents, self._llm.images, self._max_image_pixels)

    def _encode(self, call: AsyncCall, contents: list[Any], template: dict[str, Any]) -> None:
        params = call.params or SamplingParams()
        self._llm.make_stop_conditions(params)  # in this thread, because it may take a while
        call.requests = self._requests(contents, params, template)
        call.prompts = [request.tokens for request in call.requests]


def _compiles_long(params: SamplingParams) -> bool:
    return params.structure is not None or bool(params.banned_words)


def _convert_panic(error: BaseException) -> Exception:
    """Return an error as an Exception, which a panic of the tokenizer's library is not."""
    if isinstance(error, Exception):
        return error
    return InputError(f"the tokenizer failed on the prompt: {error}; use a different text")


class PromptCache:
    """Maps texts and conversations to their token ids. Not thread-safe."""

    def __init__(self, max_tokens: int = _MAX_CACHED_TOKENS) -> None:
        """Create an empty cache.

        Args:
            max_tokens: Maximum tokens to keep, over all prompts; the least recently used prompts
                are evicted.
        """
        self._max_tokens, self._num_tokens = max_tokens, 0
        self._tokens: OrderedDict[bytes, Tokens] = OrderedDict()

    def get(self, key: bytes | None) -> Tokens | None:
        """Return the token ids of a prompt; None if they are not cached."""
        if key is None or key not in self._tokens:
            return None
        self._tokens.move_to_end(key)
        return self._tokens[key]

    def put(self, key: bytes | None, tokens: Tokens) -> None:
        """Store the token ids of a prompt unless they are cached already."""
        if key is None or key in self._tokens:
            return
        self._tokens[key] = tokens
        self._num_tokens += len(tokens) + TOKENS_PER_ENTRY
        while self._num_tokens > self._max_tokens:
            self._num_tokens -= len(self._tokens.popitem(last=False)[1]) + TOKENS_PER_ENTRY


def key_of(content: object, template: Mapping[str, Any]) -> bytes | None:
    """Return the cache key of a prompt; None for token ids and for content that is not JSON.

    Conversations with image files have no key either, because a file may change. The key is a hash,
    because a conversation may be much larger than the text its template renders.

    Args:
        content: Text, token ids or chat messages.
        template: Arguments of the chat template.
    """
    if isinstance(content, str):
        return None if template else _hash(f"text {content}")
    if not isinstance(content, list) or not content or not isinstance(content[0], Mapping):
        return None
    try:
        key = _hash(json.dumps([content, template]))
        return None if has_image_files([content]) else key
    except (TypeError, ValueError, RecursionError, InputError):
        return None


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).digest()
