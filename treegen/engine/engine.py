"""One model with its cache: what all of its runs compute with, and the one that is under way."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from treegen.engine.compute.capture_budget import estimate_row_seconds
from treegen.engine.compute.decode_graphs import DecodeGraphs
from treegen.engine.compute.encoder_cache import EncoderCache
from treegen.engine.compute.model_runner import ModelRunner
from treegen.engine.compute.prefill_graphs import PrefillGraphs
from treegen.engine.param_set import ParamSet
from treegen.engine.rows.engine_run import EngineResources
from treegen.engine.scheduler import Scheduler
from treegen.engine.segments.expanded_kv import ExpandedKVOptions
from treegen.engine.segments.prefix_cache import PrefixCache
from treegen.engine.speculative.drafter_factory import DrafterFactory
from treegen.errors import InputError
from treegen.model.memory import make_cache
from treegen.model.model import Model
from treegen.model.model_info import ModelInfo
from treegen.model.options import EngineOptions
from treegen.model.reproducible import ALIGN, IMPL, check_dtype
from treegen.ops.cache.pool import PagedCache
from treegen.prompts.images.table import get_image_table
from treegen.prompts.plan.cost import DEVICE_COSTS, Sharing
from treegen.prompts.plan.plan import Plan, Request
from treegen.prompts.plan.requests import plan_requests


class Engine:
    """Computes the runs of one model, one at a time.

    cache: the pages of keys and values, and the slots of recurrent states.
    kept: prefixes whose pages stay between runs.
    graphs: replays decode steps; None to compute them eagerly. prefills: small prefill passes.
    guesser: how runs guess tokens.
    encodings: of images in prompts; None for a model that takes none.
    impl: the attention implementation.
    align: attention parts begin at multiples of so many positions.
    sharing: which tree levels are attention parts of their own.
    max_rows: most rows to decode at once.
    prefill_chunk: most tokens of a prefill pass.
    run_ahead: whether runs launch each pass before the last one's tokens are known.
    searches_ahead: whether searches do so.
    """

    def __init__(self, model: Model, options: EngineOptions, tokenizer: Any) -> None:
        """A cache for a model, and what else options ask for. tokenizer: that of the model.

        Raises InputError for an option that this model cannot do, CapacityError if no page fits.
        """
        self.model, self._ranks = model, model.ranks
        if self._ranks is not None and self._ranks.lead is not None:
            # Rank 0 alone guesses.
            self._ranks.lead.call_followers("engine", {**options.engine(), "speculate": None})
        on_gpu, eager = model.device.type == "cuda", options.eager
        self.impl = model.impl if options.impl == "auto" else options.impl
        self._copied: ExpandedKVOptions | None = None
        if model.can_expand_latents and not options.reproducible:
            self._copied = ExpandedKVOptions(model.spec, DEVICE_COSTS[model.device.type])
        self.align = 1
        if options.reproducible:
            check_dtype(model.dtype, model.device)
            if on_gpu:
                self.impl, self.align = IMPL, ALIGN
                model.make_reproducible()
        self.guesser = DrafterFactory(model, options, tokenizer)
        self.graphs: DecodeGraphs | None = None
        self.prefills: PrefillGraphs | None = None
        if on_gpu and not eager:
            self.graphs = DecodeGraphs(model.forward, estimate_row_seconds(model))
            if model.ranks is None:
                self.prefills = PrefillGraphs(model.forward)
            model.watch_weights()
        _, self.max_rows, self.prefill_chunk = options.sizes(model.device.type)
        self.sharing: Sharing = options.sharing
        self.cache: PagedCache = make_cache(model, options, self.guesser.kv_bytes_per_token)
        self.guesser.attach_cache(self.cache, graphs=self.graphs is not None)
        if self._ranks is not None and self._ranks.lead is not None:
            self.cache.on_copy = functools.partial(self._ranks.lead.call_followers, "copy_tokens")
        if on_gpu and (not eager if options.compile is None else options.compile):
            states = self.cache.states.layers if self.cache.states is not None else ()
            model.compile_layers(self.cache.layers, states)
        self.run_ahead = on_gpu if options.run_ahead is None else options.run_ahead
        # A row that was run ahead of its end has lost the recurrent state that a search goes on
        # from, which is then computed anew.
        is_hybrid = bool(model.spec.states)
        self.searches_ahead = self.run_ahead and not (is_hybrid and options.run_ahead is None)
        table = get_image_table(tokenizer)
        self.encodings: EncoderCache | None = None
        if table is not None and model.tower is not None:
            self.encodings = EncoderCache(table, model.tower)
        self.kept = PrefixCache(self.cache, max_pages=self.cache.pool.num_pages // 2)
        self._version = model.check_weights()
        self._starting = threading.Lock()
        self._running: weakref.ref[Scheduler] | None = None

    @property
    def num_states(self) -> int | None:
        """Recurrent states that there is room for; None for a model without recurrent layers."""
        return None if self.cache.states is None else self.cache.states.num_slots

    def facts(self, options: EngineOptions, tokenizer: Any) -> ModelInfo:
        """What is known of the model, now that it is loaded by these options."""
        model, pool = self.model, self.cache.pool
        return ModelInfo(
            engine=options,
            spec=model.spec,
            tokenizer=tokenizer,
            dtype=str(model.dtype).removeprefix("torch."),
            device_type=model.device.type,
            max_rows=self.max_rows,
            page_size=self.cache.page_size,
            memory=options.cache_bytes,
            num_pages=pool.num_pages,
            num_states=self.num_states,
            align=self.align,
            quantization=model.quantization,
        )

    def plan(self, requests: Sequence[Request]) -> Plan:
        """Lay requests out."""
        return plan_requests(
            requests,
            self.model.spec,
            device_type=self.model.device.type,
            sharing=self.sharing,
            max_rows=self.max_rows,
            align=self.align,
            # "one" level is the root as it is; a kept prefix then supplies a part of it.
            split_at=[p.tokens for p in self.kept] if self.sharing != "one" else [],
        )

    def check_fits(self, plan: Plan) -> None:
        """Raise CacheFullError for a plan with a prompt that the cache cannot hold even alone."""
        plan.check_fits(self.cache.pool.num_pages, self.cache.page_size, self.num_states)

    def scheduler(
        self,
        plan: Plan,
        param_sets: Sequence[ParamSet],
        samples: Sequence[Sequence[int]] = (),
        *,
        searches: bool = False,
        **options: Any,
    ) -> Scheduler:
        """The scheduler of a run, which has the cache until it is closed.

        Raises InputError while another run is not finished.

        Args:
            searches: Whether it is a run of searches.
            options: What `Scheduler` takes beside.
        """
        with self._starting:  # two threads must not both find the cache free
            self.check_ready()
            given = EngineResources(
                model=self.model,
                cache=self.cache,
                kept=self.kept,
                executor=self.executor(),
                max_rows=self.max_rows,
                prefill_chunk=self.prefill_chunk,
                run_ahead=self.searches_ahead if searches else self.run_ahead,
                copied=self._copied,
            )
            guessed = self.guesser.make_options()
            scheduler = Scheduler(plan, given, param_sets, samples, speculation=guessed, **options)
            # The reference is weak, so that a run ends when nothing refers to it any more.
            self._running = weakref.ref(scheduler)
        return scheduler

    def executor(self) -> ModelRunner:
        """What computes the passes of a run."""
        return ModelRunner(
            self.model,
            self.cache,
            self.graphs,
            self.impl,
            self._ranks,
            self.model.spec.vocab_size,
            self.guesser.executor,
            self.prefills,
            self.encodings,
        )

    def check_ready(self) -> None:
        """Raise InputError while another run is not finished, or if the model cannot be used."""
        if self._is_running():
            gc.collect()  # a search and its event loop refer to each other
        if self._is_running():
            raise InputError("another run of this LLM is not finished; use it up or close() it")
        if self._ranks is not None:
            self._ranks.check()
        version = self.model.check_weights()
        if version != self._version:  # what is kept was computed by weights that are gone
            self.kept.clear()
            self._version = version

    def _is_running(self) -> bool:
        running = self._running() if self._running is not None else None
        return running is not None and not running.closed
