"""LLM: a model, its cache, and the calls that sample from it."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from treegen.attention.api import choose
from treegen.cache.kept import KeptPrefix, KeptPrefixes
from treegen.cache.pool import PagedCache
from treegen.cache.states import StateCache
from treegen.engine.dealt import DealtStream
from treegen.engine.execute import Executor
from treegen.engine.graphs import DecodeGraphs
from treegen.engine.keeping import keep_prompt
from treegen.engine.scheduler import Scheduler
from treegen.engine.segment import LiveRequest
from treegen.engine.stream import RunResult, ScoreStream, Stream
from treegen.errors import CapacityError, InputError
from treegen.model import memory as mem
from treegen.model.config import resolve_device
from treegen.model.files import load_tokenizer
from treegen.model.leading import devices_of, load_in_parts
from treegen.model.load import load_model
from treegen.model.model import Model
from treegen.model.ranks import Ranks
from treegen.model.reproducible import ALIGN, IMPL, check_dtype, check_layers, check_reproducible
from treegen.options import LOADING, EngineOptions
from treegen.outputs import Completion, Score, Usage
from treegen.params import SamplingParams, check_int
from treegen.plan.cost import Sharing
from treegen.plan.plan import Plan, Request
from treegen.plan.requests import (
    ScoreInput,
    expand_requests,
    flat_requests,
    plan_requests,
    sample_requests,
    score_requests,
)
from treegen.plan.unnamed import DrawnBefore
from treegen.prompts.expansion import sum_levels
from treegen.prompts.stops import Stopping, Stoppings
from treegen.prompts.tree import Message, Node, as_list, chat_arguments, expansions_of, generates
from treegen.sampling.param_set import ParamSet

if TYPE_CHECKING:
    import torch

    from treegen.search.budget import Budget
    from treegen.search.live.backend import LiveBackend
    from treegen.search.live.run import LiveRun
    from treegen.search.node import SearchFn, SearchNode
    from treegen.search.problems import SearchProblem
    from treegen.search.result import Found, SearchResult
    from treegen.search.run import SearchRun
    from treegen.search.session import Session


_HYBRID: Final = "the model has recurrent layers"  # whose steps find their states by slot


class LLM:
    """A transformers model that samples from prompt trees.

    It has one run at a time. `run`, `generate`, `score`, `expand` and `search` finish before they
    return. A `stream`, `score_stream`, `search_stream` or `session` must be used up or closed
    before the next call.
    """

    _ranks: Ranks | None = None

    def __init__(
        self,
        model: str | Model,
        *,
        tokenizer: Any = None,
        dtype: str = "auto",
        device: str = "auto",
        memory: int | str | None = None,
        page_size: int | None = None,
        max_rows: int | None = None,
        prefill_chunk: int | None = None,
        sharing: Sharing = "auto",
        impl: str = "auto",
        eager: bool = False,
        compile: bool | None = None,
        run_ahead: bool | None = None,
        reproducible: bool = False,
        check: bool = True,
        revision: str | None = None,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
    ) -> None:
        """Load a model from a directory or by hub name, or take one that is loaded.

        model: a directory, a hub name, or a loaded `Model`. A loaded one serves only the last LLM
        that was made of it. With it dtype, device, check, revision, trust_remote_code and
        tensor_parallel_size must be left out.
        tokenizer: that of a loaded `Model`; None for a name.
        dtype: the type to compute in, such as "bfloat16".
        device: "auto", "cpu", "cuda" or "cuda:N".
        memory: bytes of the key-value cache, such as "2GiB". By default 85% of a GPU's free memory,
        or less if a pass needs more than the rest; on a CPU 1 GiB, or an eighth of the memory if
        that is less.
        page_size: tokens per cache page; by default 16 on a CPU, 64 on a GPU.
        max_rows: most samples to decode at once; by default 256 on a CPU, 4,096 on a GPU.
        prefill_chunk: most prompt tokens to compute in one pass; by default 2,048 on a CPU, 8,192
        on a GPU.
        sharing: which tree levels are attention parts of their own; see `compile_plan`.
        impl: how attention is computed: "auto", "cpu", "triton" (with cuDNN for a long trunk),
        "flash", "xformers" or "reference". For a loaded `Model`, "auto" is what it was loaded with.
        eager: on a GPU, start at once, without compiling and without CUDA graphs, and run slower.
        compile: compile the decoder layers, on a GPU; it takes some seconds at first use. None
        compiles on a GPU unless eager. Models with recurrent layers run without compiling and
        without CUDA graphs.
        run_ahead: launch each pass before the last one's tokens are known; see `Scheduler`. None
        does so on a GPU.
        check: compare the model with stock transformers when it is loaded.
        revision: of a hub name.
        trust_remote_code: whether code that comes with the model may run.
        tensor_parallel_size: GPUs (or on a CPU processes) that each have a part of every layer.
        Sizes such as memory are those of each.

        Raises InputError for an option that cannot be used, ModelError for a model that cannot be
        loaded, CapacityError if no page fits or memory is more than the machine has.
        """
        options = EngineOptions(
            model=model.spec.name if isinstance(model, Model) else model,
            dtype=dtype,
            device=device,
            memory=memory,
            page_size=page_size,
            max_rows=max_rows,
            prefill_chunk=prefill_chunk,
            sharing=sharing,
            impl=impl,
            eager=eager,
            compile=compile,
            run_ahead=run_ahead,
            reproducible=reproducible,
            check=check,
            revision=revision,
            trust_remote_code=trust_remote_code,
            tensor_parallel_size=tensor_parallel_size,
        )
        if isinstance(model, Model) != (tokenizer is not None):
            raise InputError("a loaded Model needs tokenizer=; a model's name must not have one")
        check_machine(options, model.device if isinstance(model, Model) else resolve_device(device))
        if isinstance(model, Model):
            usual = EngineOptions(model=options.model)
            for name in LOADING:
                if getattr(options, name) != getattr(usual, name):
                    raise InputError(f"{name} is for loading a model, and this one is loaded")
            model.reset()
            self.tokenizer, self.model = tokenizer, model
        else:
            self.tokenizer = load_tokenizer(
                model, revision=revision, trust_remote_code=trust_remote_code
            )
            loading = {name: getattr(options, name) for name in LOADING}
            if loading.pop("tensor_parallel_size") == 1:
                self.model = load_model(model, impl=impl, **loading)
            else:
                self.model = load_in_parts(model, tensor_parallel_size, impl=impl, **loading)
        self._ranks = ranks = self.model.ranks
        if ranks is not None and ranks.lead is not None:
            ranks.lead.tell("engine", options.engine())
        self.spec = self.model.spec
        self._stoppings = Stoppings()
        self._graphs: DecodeGraphs | None = None
        on_gpu = self.model.device.type == "cuda"
        is_hybrid = bool(self.spec.states)
        self._impl = self.model.impl if impl == "auto" else impl
        self._align = 1
        if reproducible:
            check_dtype(self.model.dtype, self.model.device)
            check_layers(self.spec, self.model.device)
            if on_gpu:
                self._impl, self._align = IMPL, ALIGN
                self.model.make_reproducible()
        if on_gpu and not eager:
            self._graphs = DecodeGraphs(self.model.forward)
            if is_hybrid:
                self._graphs.off = _HYBRID
            self.model.watch_weights()
        page_size, self.max_rows, self.prefill_chunk = options.sizes(self.model.device.type)
        size = options.cache_bytes
        if size is None:
            activations = mem.activation_bytes(self.model.module, self.prefill_chunk)
            activations += mem.recurrence_bytes(self.spec, self.max_rows)
            size = mem.default_bytes(self.model.device, activations)
        num_pages, num_states = mem.cache_size(size, self.spec, page_size, self.max_rows)
        if ranks is not None:
            num_pages = ranks.least(num_pages)
        self.sharing: Sharing = sharing
        states = None
        if num_states is not None:
            states = StateCache(self.model.new_states(num_states + 1), num_states)
        self.cache = PagedCache(
            self.model.new_cache(num_pages + 1, page_size), num_pages, page_size, states
        )
        if ranks is not None and ranks.lead is not None:
            self.cache.on_copy = functools.partial(ranks.lead.tell, "copy_tokens")
        if on_gpu and (not eager if compile is None else compile):
            if is_hybrid:
                self.model.uncompiled_because = _HYBRID
            else:
                self.model.compile_layers(self.cache.layers)
        self._run_ahead = on_gpu if run_ahead is None else run_ahead
        # A row that was run ahead of its end has lost the recurrent state that a search goes on
        # from, which is then computed anew.
        self._searches_ahead = self._run_ahead and not (is_hybrid and run_ahead is None)
        self._kept = KeptPrefixes(self.cache, max_pages=num_pages // 2)
        self._num_named = 0
        self._before = DrawnBefore()
        self._starting = threading.Lock()
        self._running: weakref.ref[Scheduler] | None = None

    @property
    def fingerprint(self) -> str:
        """What stands for the weights."""
        return self.model.fingerprint

    # Sampling

    def plan(self, tree: Node, params: SamplingParams | None = None) -> Plan:
        """What running a tree would share, store and read; nothing is computed.

        If a tree declares generated levels, its prompts are planned as if all rows of the largest
        level were drawn below them. `Plan.generated` then sums up the levels.

        Raises:
            TreeError: the tree is malformed.
            InputError: the tokenizer or the chat template refuses a prompt.
            CapacityError: a prompt is too long for the model.
        """
        params = _of_tree(params)
        if not generates(tree):
            return self._plan(sample_requests(tree, self.tokenizer, params, self.spec))
        requests = expand_requests(tree, self.tokenizer, params, self.spec)
        levels = [each.levels for each in expansions_of(tree)]
        return replace(self._plan(requests), generated=sum_levels(levels, params))

    def stream(
        self,
        tree: Node,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        skip: Collection[tuple[str, int]] = (),
    ) -> Stream:
        """Sample a tree; an iterator over completions as they finish.

        The draws of a sample follow from the seed, the node's id and the sample's index. For a node
        without an id they follow from the prompt's tokens. Then, as with `generate`, another call
        with the same prompt draws further samples, unless params have a seed or `skip` is given.

        params: of all sampled nodes, or one for each in the order that the tree declares.
        skip: (prompt id, sample index) pairs that are not wanted, as when a run is resumed. The
        other samples are the same with or without them.

        Raises what `plan` raises, InputError for params or skip that cannot be used and while
        another run of this LLM is not finished, CacheFullError for a prompt that the cache cannot
        hold even alone. The iterator raises NumericsError for logits that are not numbers, and
        CapacityError if the GPU's memory is full.
        """
        given = _of_nodes(params)
        requests = sample_requests(tree, self.tokenizer, given, self.spec)
        each = [given] * len(requests) if isinstance(given, SamplingParams) else given
        known = {request.id: request.samples for request in requests}
        skipped = defaultdict(set)
        for prompt_id, index in skip:
            if index not in range(known.get(prompt_id, 0)):
                raise InputError(f"skip names sample {index} of {prompt_id!r}, not in the tree")
            skipped[prompt_id].add(index)
        samples = [[i for i in range(r.samples) if i not in skipped[r.id]] for r in requests]
        self._check_ready()
        before = DrawnBefore(None if any(skipped.values()) else self._before)
        requests = before.continued_flat(requests, [own.seed for own in each])
        stream = self._start(self._plan(requests), each, samples)
        self._before.update(before)  # Only now, because a call that is refused draws nothing.
        return stream

    def run(
        self, tree: Node, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> RunResult:
        """Sample a tree to its end; completions in the order the tree declares.

        params: as for `stream`.

        Raises:
            TreegenError: as for `stream` and its iterator.
        """
        return _finished(self.stream(tree, params))

    def generate(
        self,
        prompts: Iterable[str | Sequence[int] | Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[list[Completion]]:
        """params.n completions of each flat prompt; shared prefixes are found in the tokens.

        params: of all prompts, or one for each.
        tools, chat_template_kwargs: for the chat template.

        The draws of a sample follow from the prompt's tokens and the sample's index. Without a seed
        another call with the same prompt draws further samples: its indices go on after those that
        this LLM has drawn. With a seed each call draws the same samples. A prompt that is given
        twice in one call gets different samples each time.

        Raises:
            InputError: params are not as many as prompts, and as for `stream`.
            TreegenError: as for `stream` and its iterator.
        """
        contents = as_list("prompts", prompts)
        each = _of_each(params, len(contents))
        if not contents:
            return []
        template = chat_arguments(tools, chat_template_kwargs)
        requests = flat_requests(contents, each, self.tokenizer, self.spec, template)
        self._check_ready()
        before = DrawnBefore(self._before)
        requests = before.continued_flat(requests, [own.seed for own in each])
        samples = [range(request.samples) for request in requests]
        stream = self._start(self._plan(requests), each, samples)
        self._before.update(before)  # Only now, because a call that is refused draws nothing.
        result = _finished(stream)
        grouped: list[list[Completion]] = [[] for _ in contents]
        for completion in result.completions:
            grouped[int(completion.prompt_id)].append(completion)
        return grouped

    def score(self, pairs: Iterable[tuple[ScoreInput, ScoreInput]]) -> list[Score]:
        """Log-likelihood of each continuation given its context.

        A context that several pairs share is computed once. If a context is empty, or all its
        tokens merge with the continuation's, the tokenizer's beginning-of-sequence token takes its
        place, or else the end-of-sequence token.

        Raises:
            InputError: pairs cannot be used, or another run of this LLM is not finished.
            CapacityError: a pair is too long for the model or for the cache.
            NumericsError: logits are not numbers.
        """
        pairs = as_list("pairs", pairs)
        if not pairs:
            return []
        with self.score_stream(pairs) as stream:
            scores = dict(stream)
            stream.check_whole()
        return [scores[index] for index in range(len(scores))]

    def score_stream(self, pairs: Iterable[tuple[ScoreInput, ScoreInput]]) -> ScoreStream:
        """The scores of `score` as they are known; an iterator over (index of the pair, score).

        Raises what `score` raises. NumericsError comes from the iterator.
        """
        requests = score_requests(as_list("pairs", pairs), self.tokenizer, self.spec)
        plan = self._plan(requests)
        params = [SamplingParams()] * len(requests)
        return ScoreStream(self._start(plan, params, [[] for _ in requests]))

    @property
    def num_states(self) -> int | None:
        """Recurrent states that there is room for; None for a model without recurrent layers."""
        return None if self.cache.states is None else self.cache.states.num_slots

    def _plan(self, requests: Sequence[Request]) -> Plan:
        return plan_requests(
            requests,
            self.spec,
            device_type=self.model.device.type,
            sharing=self.sharing,
            max_rows=self.max_rows,
            align=self._align,
            # "one" level is the root as it is; a kept prefix then supplies a part of it.
            split_at=[p.tokens for p in self._kept] if self.sharing != "one" else [],
        )

    def _start(
        self,
        plan: Plan,
        params: Sequence[SamplingParams],
        samples: Sequence[Sequence[int]],
        *,
        keep_as: str | None = None,
    ) -> Stream:
        plan.check_fits(self.cache.pool.num_pages, self.cache.page_size, self.num_states)

        def keep(request: LiveRequest) -> None:
            assert keep_as is not None
            keep_prompt(request, keep_as, self.cache, self._kept)

        sets, params_of = self._param_sets(params)
        scheduler = self._scheduler(
            plan,
            **sets,
            params_of=params_of,
            samples=samples,
            on_prefilled=keep if keep_as is not None else None,
        )
        return Stream(plan, scheduler, self.model, self._graphs)

    def follow(self, plan: Plan, params: Sequence[SamplingParams]) -> DealtStream:
        """Begin a run of which only what `DealtStream.deal` adds is done; for a cluster's workers.

        plan: with all requests, which are laid out here as it says. params: of each request.

        Raises CacheFullError for a prompt that the cache cannot hold even alone, InputError while
        another run of this LLM is not finished.
        """
        plan.check_fits(self.cache.pool.num_pages, self.cache.page_size, self.num_states)
        sets, params_of = self._param_sets(params)
        nothing = np.empty(0, dtype=np.int64)
        empty = replace(plan, requests=(), segments=(), segment_of=nothing, order=nothing)
        scheduler = self._scheduler(empty, **sets, samples=[])
        return DealtStream(plan, scheduler, self.model, self._graphs, params_of)

    def _param_sets(self, params: Sequence[SamplingParams]) -> tuple[dict[str, Any], list[int]]:
        """The sampling parameters of a scheduler, and the index of each request's among them."""
        # Of equal ones, rows are drawn and ended together.
        sets = {each.drawing: each for each in params or [SamplingParams()]}
        place = {drawing: index for index, drawing in enumerate(sets)}
        first, *further = (ParamSet(each, self.stopping_of(each)) for each in sets.values())
        named = {"params": first.params, "stopping": first.stopping, "further": further}
        return named, [place[each.drawing] for each in params]

    def _scheduler(self, plan: Plan, **options: Any) -> Scheduler:
        """The scheduler of a run, which has the cache until it is closed."""
        with self._starting:  # two threads must not both find the cache free
            self._check_ready()
            scheduler = Scheduler(
                plan,
                self.model,
                self.cache,
                self._kept,
                graphs=self._graphs,
                max_rows=self.max_rows,
                prefill_chunk=self.prefill_chunk,
                impl=self._impl,
                executor=self.executor(),
                **{"run_ahead": self._run_ahead, **options},
            )
            # The reference is weak, so that a run ends when nothing refers to it any more.
            self._running = weakref.ref(scheduler)
        return scheduler

    def executor(self) -> Executor:
        """What computes the passes of a run."""
        ranks, size = self._ranks, self.spec.vocab_size
        return Executor(self.model, self.cache, self._graphs, self._impl, ranks, size)

    def close(self) -> None:
        """End the other ranks of a tensor-parallel model; without it they end with this process."""
        self.model.close()

    def open(self) -> LiveRun:
        """A run that takes flat prompts while it goes; see `treegen.search.live.run.LiveRun`.

        Raises:
            InputError: another run of this LLM is not finished.
        """
        from treegen.search.live.run import LiveRun

        params = SamplingParams()
        scheduler = self._scheduler(
            self._plan([]), params=params, stopping=self.stopping_of(params), samples=[]
        )
        return LiveRun(scheduler, self.spec, stopping_of=self.stopping_of, before=self._before)

    def stopping_of(self, params: SamplingParams) -> Stopping:
        """What ends the samples of some parameters; it takes a while for new stop strings.

        Raises:
            InputError: logit_bias names a token that the model does not have.
        """
        spec = self.spec
        if params.biases and (token := params.biases[-1][0]) >= spec.vocab_size:
            raise InputError(
                f"logit_bias has token {token}, but the model's ids are 0 to {spec.vocab_size - 1}"
            )
        return self._stoppings.of(params, self.tokenizer, spec.eos_token_ids, spec.vocab_size)

    def _check_ready(self) -> None:
        if self._is_running():
            gc.collect()  # a search and its event loop refer to each other
        if self._is_running():
            raise InputError("another run of this LLM is not finished; use it up or close() it")
        if self._ranks is not None:
            self._ranks.check()
        self.model.check_weights()

    def _is_running(self) -> bool:
        running = self._running() if self._running is not None else None
        return running is not None and not running.closed

    # Search

    def session(self, params: SamplingParams | None = None) -> Session:
        """Search trees that are sampled step by step; see `treegen.search.session.Session`.

        params: how nodes sample by default.

        Raises:
            InputError: params cannot be used, or another run of this LLM is not finished.
        """
        from treegen.search.session import Session

        params = _of_tree(params)
        return Session(self._search_backend(params), params)

    def search(
        self,
        fn: SearchFn,
        problems: Iterable[Any],
        params: SamplingParams | None = None,
        *,
        concurrency: int = 64,
        budget: Budget | None = None,
        rows: int = 8,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[SearchResult]:
        """Run a search of each problem, many at once; results in the order of the problems.

        fn: `async def fn(root)`, which samples from the nodes of one problem's tree. It may return
        a Found, a node or nodes (the best first), or anything else; see `treegen.search`.
        problems: prompts (text, token ids or chat messages), or (name, prompt) pairs.
        params: how nodes sample by default.
        concurrency: most searches at once.
        budget: of each search.
        rows: samples that one search is expected to have under way. It decides which segments of
        the prompts are attention parts of their own.
        tools, chat_template_kwargs: for the chat template.

        The draws of a search follow from its name and the seed, whatever runs beside it. Without a
        name they follow from the prompt's tokens. Then, as with `generate`, another search of the
        same prompt draws other samples, unless params have a seed.

        The result of a search that fails has the error and the tree so far. If all searches fail,
        a warning says so. Raises what `search_stream` and its iterator raise.
        """
        from treegen.search.result import warn_if_all_failed

        stream = self.search_stream(
            fn,
            problems,
            params,
            concurrency=concurrency,
            budget=budget,
            rows=rows,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        with stream as run:
            results = {result.name: result for result in run}
        warn_if_all_failed(list(results.values()))
        return [results[name] for name in run.names]

    def search_stream(
        self,
        fn: SearchFn,
        problems: Iterable[Any],
        params: SamplingParams | None = None,
        *,
        concurrency: int = 64,
        budget: Budget | None = None,
        rows: int = 8,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> SearchRun:
        """The results of `search` as they finish; an iterator. The arguments are those of `search`.

        Raises InputError for an argument that cannot be used, for two problems with one name, and
        while another run of this LLM is not finished. Errors of the model itself, such as
        NumericsError, come from the iterator and end all searches.
        """
        from treegen.search.budget import check_budget
        from treegen.search.problems import named
        from treegen.search.session import flat_content

        for name, value in (("concurrency", concurrency), ("rows", rows)):
            check_int(name, value, least=1)
        check_budget(budget)
        template = chat_arguments(tools, chat_template_kwargs)
        found = named(problems, lambda content: flat_content(content, self.tokenizer, template))
        return self._start_searches(
            fn,
            found,
            params=_of_tree(params),
            concurrency=concurrency,
            budget=budget,
            rows=rows,
        )

    def _start_searches(
        self, fn: SearchFn, problems: Sequence[SearchProblem], *, params: SamplingParams, **how: Any
    ) -> SearchRun:
        """Searches of problems; how: what `SearchRun` takes."""
        from treegen.search.run import SearchRun

        backend = self._search_backend(params)
        try:
            return SearchRun(backend, fn, problems, params=params, **how)
        except BaseException:
            backend.close()
            raise

    def expand(
        self,
        tree: Node,
        params: SamplingParams | None = None,
        *,
        concurrency: int = 64,
        budget: Budget | None = None,
        rows: int | None = None,
    ) -> list[SearchResult]:
        """Generate the levels that nodes of a tree declare; one result per such node.

        rows: as for `search`; by default those of the largest level.
        concurrency, budget: as for `search`.

        Raises:
            TreeError: the tree is malformed or generates nothing.
            CapacityError: a prompt is too long for the model.
            TreegenError: as for `search`.
        """
        from treegen.search.problems import SearchProblem
        from treegen.search.strategies.expand import expand

        params = _of_tree(params)
        expansions = {each.id: each for each in expansions_of(tree)}
        requests = expand_requests(tree, self.tokenizer, params, self.spec)
        rows = max(request.rows for request in requests) if rows is None else rows

        async def run(root: SearchNode) -> Found:
            return await expand(root, expansions[root.search.name].levels)

        problems = [
            SearchProblem(
                request.id,
                expansions[request.id].text or request.tokens.tolist(),
                is_named=expansions[request.id].path[-1].id is not None,
            )
            for request in requests
        ]
        return self.search(run, problems, params, concurrency=concurrency, budget=budget, rows=rows)

    def _search_backend(self, params: SamplingParams) -> LiveBackend:
        from treegen.search.live.backend import LiveBackend

        empty = self._plan([])
        return LiveBackend(
            tokenizer=self.tokenizer,
            spec=self.spec,
            params=params,
            max_rows=self.max_rows,
            stopping_of=self.stopping_of,
            make_scheduler=lambda stopping, on_grown: self._scheduler(
                empty,
                params=params,
                stopping=stopping,
                samples=[],
                on_grown=on_grown,
                run_ahead=self._searches_ahead,
            ),
            make_plan=self._plan,
            before=self._before,
        )

    # Prefixes kept between calls

    def keep(self, prefix: str | Node, *, name: str | None = None) -> Kept:
        """Compute a prefix now and keep its keys and values for later calls.

        prefix: text, or a node; then the whole paths of its leaves are kept.
        name: to `drop` it by; by default one is made.

        Later prompts that start with the same tokens do not compute them again. Use it in a `with`
        statement, or `drop` it by name. Kept prefixes take at most half of the cache; the least
        recently used one leaves first.

        Raises:
            InputError: the name is taken, or another run of this LLM is not finished.
            TreeError: the tree is malformed.
            CapacityError: the prefix is too long for the model or for half of the cache.
        """
        tree = Node(prefix) if isinstance(prefix, str) else prefix
        if not name:
            self._num_named += 1
            name = f"prefix-{self._num_named}"
        if any(name == other for other, _ in self.kept()):
            raise InputError(f"a prefix named {name!r} is kept already; drop it or choose a name")
        requests = [
            Request(r.id, r.tokens, samples=0, rows=0, max_tokens=1)
            for r in sample_requests(tree, self.tokenizer, SamplingParams(), self.spec)
        ]
        # With sharing off, the page table of a prompt begins at its first token.
        plan = plan_requests(
            requests,
            self.spec,
            device_type=self.model.device.type,
            sharing="off",
            split_at=[kept.tokens for kept in self._kept],
        )
        page_size, most = self.cache.page_size, self._kept.max_pages
        needed = sum(plan.table_pages(segment, page_size) for segment in plan.segments)
        if needed > most:
            raise CapacityError(
                f"prefix {name!r} needs {needed * page_size:,} cache tokens but at most "
                f"{most * page_size:,} are kept; give more memory"
            )
        if self.num_states is not None:
            # While it is computed each part has two, and what is kept gets copies.
            states = 2 * (len(plan.segments) + len(requests))
            if states > self.num_states:
                raise CapacityError(
                    f"prefix {name!r} needs {states:,} recurrent states while it is computed, but "
                    f"{self.num_states:,} fit; give more memory"
                )
        try:
            params = [SamplingParams()] * len(requests)
            with self._start(plan, params, [[]] * len(requests), keep_as=name) as stream:
                list(stream)
        except BaseException:
            self._kept.drop(name)
            raise
        prefixes = [prefix for prefix in self._kept if prefix.name == name]
        return Kept(self._kept, prefixes, stream.usage)

    def kept(self) -> list[tuple[str, int]]:
        """Names and token counts of kept prefixes, least recently used first."""
        return [(prefix.name, len(prefix.tokens)) for prefix in self._kept]

    def drop(self, name: str) -> None:
        """Forget a kept prefix; its pages are free once no run needs them.

        Raises:
            InputError: no prefix has the name.
        """
        if not self._kept.drop(name):
            names = ", ".join(sorted({kept for kept, _ in self.kept()})) or "none"
            raise InputError(f"no kept prefix is named {name!r}; kept: {names}")


def check_machine(options: EngineOptions, device: torch.device) -> None:
    """Raise InputError or CapacityError for options that a device cannot do with any model."""
    choose(options.impl, device)
    if options.tensor_parallel_size > 1:
        devices_of(options.tensor_parallel_size, options.device)
    if options.reproducible:
        check_reproducible(device, options.impl, options.sizes(device.type).page_size)
    if options.cache_bytes is not None:
        mem.check_cache_bytes(options.cache_bytes, device)


def _finished(stream: Stream) -> RunResult:
    """Use a run up; completions in the order of its prompts."""
    with stream:
        completions = list(stream)
        stream.check_whole()
    place = {request.id: i for i, request in enumerate(stream.plan.requests)}
    completions.sort(key=lambda c: (place[c.prompt_id], c.sample_index))
    return RunResult(tuple(completions), stream.usage, stream.plan)


def _of_tree(params: SamplingParams | None) -> SamplingParams:
    """Check parameters for trees and searches, which say themselves how many samples they take."""
    params = _checked(params)
    if params.n != 1:
        raise InputError(
            f"n={params.n} is for LLM.generate; a tree says how many per node (Node(samples=)), a "
            "search what it samples (node.sample(n))"
        )
    return params


def _of_nodes(
    params: SamplingParams | Sequence[SamplingParams] | None,
) -> SamplingParams | list[SamplingParams]:
    """Check the parameters of all nodes of a tree, or of each node."""
    if params is None or isinstance(params, SamplingParams):
        return _of_tree(params)
    return [_of_tree(own) for own in as_list("params", params)]


def _of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num: int
) -> list[SamplingParams]:
    """The parameters of each of `num` prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [_checked(params)] * num
    each = [_checked(own) for own in as_list("params", params)]
    if len(each) != num:
        raise InputError(f"there are {len(each)} params for {num} prompts; give one for each")
    return each


def _checked(params: SamplingParams | None) -> SamplingParams:
    if params is not None and not isinstance(params, SamplingParams):
        raise InputError(f"params is a {type(params).__name__}; give SamplingParams")
    return params or SamplingParams()


class Kept:
    """A kept prefix. Leaving its `with` block drops it.

    name: to drop it by.
    usage: what was computed for it.
    """

    def __init__(self, store: KeptPrefixes, prefixes: list[KeptPrefix], usage: Usage) -> None:
        """Made by `LLM.keep`."""
        self._store, self._prefixes, self.usage = store, prefixes, usage
        self.name = prefixes[0].name

    def __enter__(self) -> Kept:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        for prefix in self._prefixes:
            self._store.remove(prefix)
