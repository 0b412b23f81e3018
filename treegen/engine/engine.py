"""The engine: one model with its cache and CUDA graphs, which all runs of an LLM share."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from treegen.common.checks import CacheMode
from treegen.common.device import use_device
from treegen.common.lifetimes import collect_garbage
from treegen.common.spec import ModelSpec
from treegen.engine.compute.cuda_graphs import estimate_row_seconds
from treegen.engine.compute.decode_graphs import DecodeGraphs
from treegen.engine.compute.model_runner import ModelRunner
from treegen.engine.compute.prefill_graphs import PrefillGraphs
from treegen.engine.features.encoder_cache import EncoderCache
from treegen.engine.param_set import ParamSet
from treegen.engine.resources import EngineResources
from treegen.engine.scheduler import Scheduler
from treegen.engine.segments.prefix_cache import CachedPrefix, PrefixCache
from treegen.engine.segments.segment import LiveRequest
from treegen.engine.speculative.speculation import DrafterFactory
from treegen.engine.weight_update_gate import UpdateGate
from treegen.errors import CapacityError, InputError, arg
from treegen.model.memory import make_cache
from treegen.model.model import Model
from treegen.model.model_info import ModelInfo
from treegen.model.options import EngineOptions
from treegen.model.reproducible import ALIGN, IMPL, check_dtype
from treegen.model.training.rank_updates import SharedWeights
from treegen.model.training.weight_updates import StagedWeights
from treegen.ops.cache.pool import PagedCache
from treegen.ops.cache.state_cache import NO_STATE, StateCache
from treegen.prompts.plan.cost_model import Sharing
from treegen.prompts.plan.plan import Plan, Request
from treegen.prompts.plan.requests import plan_requests


class Engine:
    """Computes the runs of one model, one at a time.

    Attributes:
        cache: The paged KV cache, with the slots of recurrent states.
        prefix_cache: Prefixes whose pages stay between runs.
        graphs: CUDA graphs of decode steps; None computes them eagerly.
        prefills: CUDA graphs of small prefill passes; None computes them eagerly.
        drafters: Makes the drafters of runs.
        encoder_cache: Image embeddings of prompts; None for a model that takes no images.
        impl: The attention implementation.
        align: Attention levels begin at multiples of this number of positions.
        sharing: Which tree levels become attention levels of their own.
        max_rows: Maximum number of rows decoded at once.
        prefill_chunk: Maximum number of tokens of a prefill pass.
        run_ahead: Whether runs launch each pass before the tokens of the previous one are known.
        searches_run_ahead: The same for searches.
        gate: Separates steps from updates of the weights.
    """

    def __init__(self, model: Model, options: EngineOptions, tokenizer: Any) -> None:
        """Create the cache of a model, and prepare the model as the options require.

        Args:
            model: The loaded model.
            options: Options of the LLM.
            tokenizer: Tokenizer of the model.

        Raises:
            InputError: the model does not support an option.
            CapacityError: no page fits.
        """
        self.model, self._ranks = model, model.ranks
        on_gpu, eager = model.device.type == "cuda", options.eager
        self.impl = model.impl if options.impl == "auto" else options.impl
        expands = model.can_expand_latents and not options.reproducible
        self._latent_spec = model.spec if expands else None
        self.align = 1
        if options.reproducible:
            check_dtype(model.dtype, model.device)
            if on_gpu:
                self.impl, self.align = IMPL, ALIGN
                model.make_reproducible()
        self.drafters = DrafterFactory(model, options, tokenizer)
        # The options are checked before the other ranks are called: an error would end these ranks.
        if self._ranks is not None:
            self._ranks.fixed_order = options.reproducible
        if self._ranks is not None and self._ranks.leader is not None:
            # Only rank 0 drafts tokens.
            self._ranks.leader.call_followers("engine", {**options.engine(), "speculate": None})
        self.graphs: DecodeGraphs | None = None
        self.prefills: PrefillGraphs | None = None
        if on_gpu and not eager:
            self.graphs = DecodeGraphs(model.forward, estimate_row_seconds(model))
            if model.ranks is None:
                self.prefills = PrefillGraphs(model.forward)
            model.watch_weights()
        _, self.max_rows, self.prefill_chunk = options.sizes(model.device.type)
        self.sharing: Sharing = options.sharing
        self.cache: PagedCache = make_cache(model, options, self.drafters.kv_bytes_per_token)
        self.drafters.attach_cache(self.cache, graphs=self.graphs is not None)
        if self._ranks is not None and self._ranks.leader is not None:
            self.cache.on_copy = functools.partial(self._ranks.leader.call_followers, "copy_tokens")
        if on_gpu and (not eager if options.compile is None else options.compile):
            states = self.cache.states.layers if self.cache.states is not None else ()
            model.compile_layers(self.cache.layers, states)
        self.run_ahead = on_gpu if options.run_ahead is None else options.run_ahead
        # A row that ran ahead past its end has lost the recurrent state from which a search
        # continues, so this state would have to be computed again.
        is_hybrid = bool(model.spec.states)
        self.searches_run_ahead = self.run_ahead and not (is_hybrid and options.run_ahead is None)
        self.encoder_cache: EncoderCache | None = None
        if model.images is not None and model.tower is not None:
            self.encoder_cache = EncoderCache(model.images, model.tower)
        self.prefix_cache = PrefixCache(self.cache, max_pages=self.cache.pool.num_pages // 2)
        self._version: tuple[int, ...] = model.check_weights()
        self.gate = UpdateGate()
        self._starting = threading.Lock()
        self._running: weakref.ref[Scheduler] | None = None
        self._user = ""  # names the object that started the run and continues it

    @property
    def num_states(self) -> int | None:
        """Number of recurrent state slots; None for a model without recurrent layers."""
        return None if self.cache.states is None else self.cache.states.num_slots

    def make_model_info(self, options: EngineOptions, tokenizer: Any) -> ModelInfo:
        """Return the properties of the loaded model that plans and reports use."""
        model, pool = self.model, self.cache.pool
        return ModelInfo(
            engine=options,
            spec=model.spec,
            tokenizer=tokenizer,
            images=model.images,
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
        """Plan the segments and attention levels of requests."""
        return plan_requests(
            requests,
            self.model.spec,
            device_type=self.model.device.type,
            sharing=self.sharing,
            max_rows=self.max_rows,
            align=self.align,
            # With "one" the only level is the whole root; a cached prefix then supplies part of it.
            split_at=[p.tokens for p in self.prefix_cache] if self.sharing != "one" else [],
        )

    def check_fits(self, plan: Plan) -> None:
        """Raise CacheFullError if a single prompt of a plan is too long for the cache."""
        plan.check_fits(self.cache.pool.num_pages, self.cache.page_size, self.num_states)

    def make_scheduler(
        self,
        plan: Plan,
        param_sets: Sequence[ParamSet],
        samples: Sequence[Sequence[int]] = (),
        *,
        searches: bool = False,
        user: str = "",
        **options: Any,
    ) -> Scheduler:
        """Create the scheduler of a run, which owns the cache until the scheduler is closed.

        Args:
            plan: The requests and their segments.
            param_sets: Sampling parameters and their stop conditions; at least one set.
            samples: Indices of the samples to draw, for each request of the plan.
            searches: Whether it is a run of searches.
            user: Names the object that continues the run, for error messages. Default: the caller.
            **options: Further arguments of `Scheduler`.

        Raises:
            InputError: another run is not finished.
        """
        with self._starting:  # two threads must not both find the cache free
            self.check_ready()
            resources = EngineResources(
                model=self.model,
                cache=self.cache,
                prefix_cache=self.prefix_cache,
                model_runner=self.make_model_runner(),
                max_rows=self.max_rows,
                prefill_chunk=self.prefill_chunk,
                run_ahead=self.searches_run_ahead if searches else self.run_ahead,
                latent_spec=self._latent_spec,
                images=self.encoder_cache,
                gate=self.gate,
            )
            scheduler = Scheduler(
                plan,
                resources,
                param_sets,
                samples,
                speculation=self.drafters.make_options(),
                **options,
            )
            # The reference is weak, so that an abandoned run is collected and ends.
            self._running, self._user = weakref.ref(scheduler), user
        return scheduler

    def make_model_runner(self) -> ModelRunner:
        """Return the model runner that computes the passes of a run."""
        return ModelRunner(
            self.model,
            self.cache,
            self.graphs,
            self.impl,
            self._ranks,
            self.model.spec.vocab_size,
            self.drafters.draft_runner,
            self.prefills,
        )

    def check_ready(self) -> None:
        """Raise InputError while another run is not finished, or if the model cannot be used."""
        if self._is_running():
            collect_garbage()  # a search and its event loop refer to each other
        if self._is_running():
            if self._user:
                raise InputError(
                    f"this LLM is in use by an {self._user}; call the {self._user} instead, or "
                    "close it first"
                )
            raise InputError(
                "another run of this LLM is not finished; iterate to the end of that run, or call "
                "its close()"
            )
        if self._ranks is not None:
            self._ranks.check()
        self.gate.check()
        version = self.model.check_weights()
        if version != self._version:  # cached prefixes were computed with the old weights
            self.prefix_cache.clear()
            self._version = version

    def update(self, weights: StagedWeights | SharedWeights, mode: CacheMode) -> int:
        """Replace the weights between two steps; return their version.

        Args:
            weights: The weights.
            mode: What is computed again; see `LLM.update`.

        Raises:
            InputError: the mode is not supported.
            ModelError: weights of the module were replaced; nothing is written.
        """
        if mode == "shared" and self.align > 1 and self.model.spec.states:
            raise InputError(
                f"{arg('cache', 'shared')} is not supported with a reproducible LLM with "
                f"recurrent layers; use {arg('cache', 'all')}"
            )
        with self._starting:
            self.model.check_weights()  # first, because an error must leave the old weights
            with self.gate.update() as version, use_device(self.model.device):
                if self.model.device.type == "cuda":
                    torch.cuda.synchronize()
                weights.write()
                if self.model.device.type == "cuda":
                    torch.cuda.synchronize()
                if self.encoder_cache is not None:
                    self.encoder_cache.clear()
                running = self._running() if self._is_running() and self._running else None
                if running is not None:
                    running.schedule_update(mode)
                elif mode != "keep":
                    self.prefix_cache.clear()
                if mode != "keep":
                    self._version = ()  # so that a run that takes no more step leaves no old prefix
                elif self._version:
                    self._version = self.model.check_weights()
                self.model.fingerprint = weights.fingerprint
        return version

    def _is_running(self) -> bool:
        running = self._running() if self._running is not None else None
        return running is not None and not running.closed


def insert_prefix(
    request: LiveRequest, name: str, cache: PagedCache, prefix_cache: PrefixCache
) -> None:
    """Keep the pages of a computed prompt, and copies of its recurrent states.

    Args:
        request: The request of the prompt.
        name: The caller's name for the prefix.
        cache: The paged KV cache.
        prefix_cache: The prefix cache.

    Raises:
        CapacityError: no slots are left for its recurrent states.
    """
    segment = request.segment
    assert segment.table is not None, "a prompt to keep has no pages"
    slots = [segment.end_state, segment.penultimate_state]
    if cache.states is not None:
        _make_room(name, sum(slot != NO_STATE for slot in slots), cache.states, prefix_cache)
        slots = [_copy_state(slot, cache.states) for slot in slots]
    pages = cache.pool.share(segment.table)
    prefix_cache.add(CachedPrefix(name, request.spec.tokens, pages, 0, *slots))


def plan_prefix(
    name: str,
    requests: Sequence[Request],
    spec: ModelSpec,
    device_type: str,
    cache: PagedCache,
    prefix_cache: PrefixCache,
) -> Plan:
    """Return the plan that computes prompts, to keep them under one name.

    Args:
        name: The caller's name for the prefixes, for messages.
        requests: The prompts.
        spec: Description of the model.
        device_type: Device type of the model, such as "cuda".
        cache: The paged KV cache.
        prefix_cache: The prefix cache.

    Raises:
        CapacityError: there are too many tokens, or too many recurrent states.
    """
    plan = plan_requests(
        [Request(r.id, r.tokens, samples=0, rows=0, max_tokens=1) for r in requests],
        spec,
        device_type=device_type,
        sharing="off",  # so that the page table of a prompt begins at its first token
        split_at=[prefix.tokens for prefix in prefix_cache],
    )
    _check_room(name, plan, cache, prefix_cache)
    return plan


def _check_room(name: str, plan: Plan, cache: PagedCache, prefix_cache: PrefixCache) -> None:
    page_size, max_pages = cache.page_size, prefix_cache.max_pages
    needed = sum(plan.table_pages(segment, page_size) for segment in plan.segments)
    if needed > max_pages:
        raise CapacityError(
            f"prefix {name!r} needs {needed * page_size:,} cache tokens, but at most "
            f"{max_pages * page_size:,} are available for kept prefixes; give the cache more memory"
        )
    if cache.states is not None:
        # Each segment has two states while it is computed, and cached prefixes get copies.
        states = 2 * (len(plan.segments) + len(plan.requests))
        if states > cache.states.num_slots:
            raise CapacityError(
                f"prefix {name!r} needs {states:,} recurrent states, but the cache has room for "
                f"{cache.states.num_slots:,}; give the cache more memory"
            )


def _make_room(name: str, num_slots: int, states: StateCache, prefix_cache: PrefixCache) -> None:
    for other in prefix_cache:
        if states.num_free < num_slots and other.name != name:
            prefix_cache.remove(other)
    if states.num_free < num_slots:
        raise CapacityError(
            f"prefix {name!r} needs {num_slots} slots for recurrent states, but {states.num_free} "
            f"are free; give the cache more memory"
        )


def _copy_state(slot: int, states: StateCache) -> int:
    if slot == NO_STATE:
        return NO_STATE
    copy = states.allocate_one()
    states.copy(slot, copy)
    return copy
