"""LLM: a model, its cache, and the calls that sample from it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from treegen.common.checks import CacheMode, check_bool, check_cache_mode
from treegen.common.drafter import DraftFunction
from treegen.common.foreign_names import NEUTRAL_ENGINE, drop_neutral
from treegen.common.params import Params, SamplingParams, check_tree_params
from treegen.engine.engine import Engine, insert_prefix, plan_prefix
from treegen.engine.on_demand_stream import OnDemandStream
from treegen.engine.param_set import ParamSet, param_sets
from treegen.engine.segments.prefix_cache import Kept
from treegen.engine.segments.segment import LiveRequest
from treegen.engine.stream import Stream
from treegen.errors import InputError, arg
from treegen.llm.base import BaseLLM
from treegen.model.config import resolve_device
from treegen.model.model import Model
from treegen.model.model_info import ModelInfo
from treegen.model.options import EngineOptions, check_known
from treegen.model.rank_processes import check_machine, load_with_tokenizer, prepare_loaded
from treegen.model.training.rank_updates import stage_update
from treegen.model.training.weight_updates import NewWeights
from treegen.ops.cache.pool import PagedCache
from treegen.prompts.bos_eos import end_ids
from treegen.prompts.plan.cost_model import Sharing
from treegen.prompts.plan.draws import DrawCounter
from treegen.prompts.plan.plan import Plan, Request
from treegen.prompts.stops import StopConditions, StopConditionsCache
from treegen.prompts.tree import Node

if TYPE_CHECKING:
    from treegen.search.live.backend import LiveBackend
    from treegen.search.live.run import LiveRun
    from treegen.search.run import SearchRun
    from treegen.search.session import Session
    from treegen.search.tree.node import SearchFn
    from treegen.search.tree.result import SearchProblem


class LLM(BaseLLM):
    """A transformers model that samples from prompt trees.

    An LLM has one run at a time. `run`, `generate`, `score`, `expand` and `search` finish before
    they return. A `stream`, `score_stream`, `search_stream` or `session` must be exhausted or
    closed before the next call. Threads may share a stream; a search run or a session belongs to
    one thread.

    Attributes:
        model, tokenizer, spec: The model, its tokenizer and its description.
        engine: The model's KV cache and CUDA graphs, shared by all runs.
    """

    def __init__(  # noqa: PLR0913 -- users name these settings of an engine
        self,
        model: str | Model,
        *,
        tokenizer: Any = None,
        dtype: str = "auto",
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
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
        speculate: str | DraftFunction | None = None,
        draft_model: str | None = None,
        draft_tokens: int | None = None,
        adapter: str | None = None,
        images: bool = False,
        chat_template: str | None = None,
        **others: Never,
    ) -> None:
        """Load a model from a directory or by hub name, or use a loaded one.

        Args:
            model: A directory, a hub name, or a loaded `Model`. A loaded `Model` serves only the
                last LLM that was made of it, and excludes dtype, quantization, kv_cache_dtype,
                device, check, revision, trust_remote_code, tensor_parallel_size, adapter and
                images.
            tokenizer: The tokenizer of a loaded `Model`; None, or the same name, if model is a
                name.
            dtype: The type to compute in, such as "bfloat16". Default: the checkpoint's on a GPU,
                float32 on a CPU.
            quantization: "fp8" rounds the weight matrices of the layers to 8 bits as they load, and
                their inputs during each pass. GPUs that multiply FP8 are then faster, and need half
                the memory; other devices are slower. docs/models/weights.md reports the effect on
                results. None keeps the matrices of an FP8 checkpoint as stored on GPUs that
                multiply FP8, and keeps weights in 4 bits (MXFP4 experts, NVFP4) if they would take
                more than half of a GPU when expanded. "mxfp4" and "nvfp4" always keep them on GPUs
                in bfloat16, and "none" expands all weights.
            kv_cache_dtype: "fp8" stores keys and values in 8 bits (e4m3), so that twice as many fit
                and are read in the same time; "auto" stores them in dtype.
            device: "auto", "cpu", "cuda" or "cuda:N".
            memory: Bytes of the key-value cache, such as "2GiB". Default: 85% of a GPU's free
                memory, or less if a pass needs more than the rest; on a CPU 1 GiB, or an eighth of
                the memory if that is less.
            page_size: Tokens per cache page. Default: 16 on a CPU, 64 on a GPU.
            max_rows: Maximum number of samples decoded at once. Default: 256 on a CPU, 4,096 on a
                GPU.
            prefill_chunk: Maximum number of prompt tokens computed in one pass. Default: 2,048 on a
                CPU, 8,192 on a GPU.
            sharing: Which tree levels become attention levels of their own; see `compile_plan`.
            impl: Attention implementation: "auto", "cpu", "triton" (with cuDNN for a long trunk),
                "gluon" (as "triton", with another kernel for latents on Hopper), "flash", "flash4",
                "xformers" or "reference". For a loaded `Model`, "auto" is the implementation it was
                loaded with.
            eager: On a GPU, skip compiling and CUDA graphs: faster start, slower decoding.
            compile: Compile the decoder layers on a GPU, which takes some seconds at first use.
                Models with recurrent layers are compiled only if treegen's own operators run these
                layers. Default: compile on a GPU unless eager.
            run_ahead: Launch each pass before the tokens of the previous pass are known; see
                `Scheduler`. Default: only on a GPU.
            reproducible: On a GPU, compute each sample bit for bit as if it were alone, which is
                slower; docs/reproducibility.md explains how, and for which models.
            check: Compare the model with stock transformers at load time.
            revision: Branch, tag or commit of a hub name. Default: the newest one.
            trust_remote_code: Whether code that comes with the model may run.
            tensor_parallel_size: Number of GPUs (on a CPU, processes) that each hold a part of
                every layer. Sizes such as memory apply to each of them.
            speculate: Propose draft tokens, so that a pass draws several tokens per sample. "ngram"
                proposes tokens from other samples and the prompt. A function proposes tokens for
                all samples of a step, which it gets as a `DraftContext`. Samples do not change: a
                draft token is accepted only if the sample draws it. None and "off" turn this off.
            draft_model: A directory or hub name of a small model with the same tokenizer that
                proposes the tokens. It runs on the same device, and its keys use a part of
                `memory`.
            draft_tokens: Maximum number of draft tokens per sample and pass. Default: 12. Needs
                speculate or draft_model.
            adapter: A directory or hub name of a LoRA adapter saved by peft (also rsLoRA and DoRA).
                It is merged into the weights in float32 as they load.
            images: Accept images in chats, for a family that docs/models.md lists. The vision tower
                is loaded too, and takes memory.
            chat_template: A chat template, or a file with one, that replaces the tokenizer's own.
                A base model has none, and needs one for `chat`.
            **others: Unknown arguments, which raise InputError with a hint. Options of vLLM that
                request what treegen does anyway are ignored.

        Raises:
            InputError: an option cannot be used.
            ModelError: the model cannot be loaded.
            CapacityError: no page fits, or memory is more than the machine has.
        """
        arguments = locals()
        check_known(drop_neutral(others, (), NEUTRAL_ENGINE), "the arguments of LLM")
        if isinstance(model, str) and tokenizer == model:
            tokenizer = None  # vLLM's way to name the checkpoint's own tokenizer
        arguments["model"] = model.spec.name if isinstance(model, Model) else model
        options = EngineOptions(
            **{field.name: arguments[field.name] for field in fields(EngineOptions)}
        )
        if isinstance(model, Model) != (tokenizer is not None):
            raise InputError(
                "tokenizer= is required with a loaded Model and not supported otherwise"
            )
        check_machine(options, model.device if isinstance(model, Model) else resolve_device(device))
        if isinstance(model, Model):
            self.tokenizer, self.model = prepare_loaded(model, tokenizer, options), model
        else:
            self.tokenizer, self.model = load_with_tokenizer(options)
        ends = end_ids(self.model.spec.eos_token_ids, self.tokenizer)
        self.model.spec = replace(self.model.spec, eos_token_ids=ends)
        self.spec, self.images = self.model.spec, self.model.images
        self.fingerprint = self.model.fingerprint
        self.engine = Engine(self.model, options, self.tokenizer)
        self.model_info = self.engine.make_model_info(options, self.tokenizer)
        self._stoppings = StopConditionsCache()
        self._num_named = 0
        self._draw_counter = DrawCounter()

    @property
    def cache(self) -> PagedCache:
        """The paged KV cache, with the slots of recurrent states."""
        return self.engine.cache

    # Sampling

    def _open_stream(self, plan: Plan, params: Sequence[SamplingParams]) -> Stream:
        return self.open_planned_stream(plan, params)

    def _plan(self, requests: Sequence[Request]) -> Plan:
        return self.engine.plan(requests)

    def adopt_plan(self, plan: Plan, model_info: ModelInfo) -> Plan:
        """Return a plan for this LLM; segments end where kept prefixes end."""
        return (
            self._plan(plan.requests)
            if self.list_prefixes()
            else super().adopt_plan(plan, model_info)
        )

    def _check_ready(self) -> None:
        self.engine.check_ready()

    def _start(
        self,
        plan: Plan,
        params: Sequence[SamplingParams],
        samples: Sequence[Sequence[int]],
        *,
        keep_as: str | None = None,
    ) -> Stream:
        self.engine.check_fits(plan)

        def keep(request: LiveRequest) -> None:
            assert keep_as is not None
            insert_prefix(request, keep_as, self.engine.cache, self.engine.prefix_cache)

        sets, params_of = param_sets(params, self.make_stop_conditions)
        scheduler = self.engine.make_scheduler(
            plan,
            sets,
            samples,
            params_of=params_of,
            on_prefilled=keep if keep_as is not None else None,
        )
        return Stream(plan, scheduler)

    def open_planned_stream(self, plan: Plan, params: Sequence[SamplingParams]) -> OnDemandStream:
        """Start a run that does only the work added by `OnDemandStream.add_work`.

        The workers of a cluster use it.

        Args:
            plan: Plan of all requests; the run uses the segments and levels of this plan.
            params: Sampling parameters of each request.

        Raises:
            CacheFullError: a single prompt is too long for the cache.
            InputError: another run of this LLM is not finished.
        """
        self.engine.check_fits(plan)
        sets, params_of = param_sets(params, self.make_stop_conditions)
        nothing = np.empty(0, dtype=np.int64)
        empty = replace(plan, requests=(), segments=(), segment_of=nothing, order=nothing)
        scheduler = self.engine.make_scheduler(empty, sets)
        return OnDemandStream(plan, scheduler, params_of)

    def close(self) -> None:
        """End the other ranks of a tensor-parallel model, which otherwise end with this process.

        A model's memory is freed once no object refers to the LLM.
        """
        self.model.close()

    def open_live_run(self, *, nodes: bool = False, user: str = "") -> LiveRun:
        """Start a run that accepts flat prompts at any time; see `treegen.search.live.run.LiveRun`.

        Args:
            nodes: Whether nodes of searches may share the run. Default: False.
            user: Names the object that continues the run, for error messages. Default: the caller.

        Raises:
            InputError: another run of this LLM is not finished.
        """
        from treegen.search.live.run import LiveRun

        backend = None
        if nodes:
            # Another thread uses the LLM's tokenizer to prepare calls.
            tokenizer = copy.deepcopy(self.tokenizer)
            backend = self._search_backend(SamplingParams(), tokenizer, searches=False, user=user)
            scheduler = backend.scheduler
        else:
            sets, _ = param_sets([], self.make_stop_conditions)
            scheduler = self.engine.make_scheduler(self._plan([]), sets, user=user)
        return LiveRun(
            scheduler,
            self.spec,
            make_stop_conditions=self.make_stop_conditions,
            draw_counter=self._draw_counter,
            backend=backend,
        )

    def make_stop_conditions(self, params: SamplingParams) -> StopConditions:
        """Return the stop conditions of sampling parameters; slow for new stop strings.

        Raises:
            InputError: logit_bias or allowed_token_ids names a token that the model does not have,
                or no token may be drawn.
        """
        spec = self.spec
        biased, allowed = [token for token, _ in params.biases], params.allowed_token_ids
        for name, tokens in (("logit_bias", biased), ("allowed_token_ids", allowed)):
            if tokens and tokens[-1] >= spec.vocab_size:
                raise InputError(
                    f"{name} contains token {tokens[-1]}, but the model's token ids are 0 to "
                    f"{spec.vocab_size - 1}; remove the token"
                )
        stopping = self._stoppings.of(params, self.tokenizer, spec.eos_token_ids, spec.vocab_size)
        if allowed is not None and params.min_tokens and stopping.ids.issuperset(allowed):
            raise InputError(
                f"{arg('allowed_token_ids')} contains only tokens that end a sample, so "
                "min_tokens excludes every allowed token; remove min_tokens"
            )
        return stopping

    # Search

    def session(self, params: Params | None = None) -> Session:
        """Start a session that samples trees step by step; see `treegen.search.session.Session`.

        Args:
            params: Default sampling parameters of nodes.

        Raises:
            InputError: params cannot be used, or another run of this LLM is not finished.
        """
        from treegen.search.session import Session

        params = check_tree_params(params)
        return Session(self._search_backend(params), params)

    def _start_searches(
        self, fn: SearchFn, problems: Sequence[SearchProblem], *, params: SamplingParams, **how: Any
    ) -> SearchRun:
        """Start a search of each problem; `how` has further arguments of `SearchRun`."""
        from treegen.search.run import SearchRun

        backend = self._search_backend(params)
        try:
            return SearchRun(backend, fn, problems, params=params, **how)
        except BaseException:
            backend.close()
            raise

    def _search_backend(
        self,
        params: SamplingParams,
        tokenizer: Any = None,
        *,
        searches: bool = True,
        user: str = "",
    ) -> LiveBackend:
        from treegen.search.live.backend import LiveBackend

        empty = self._plan([])
        return LiveBackend(
            tokenizer=self.tokenizer if tokenizer is None else tokenizer,
            spec=self.spec,
            images=self.images,
            params=params,
            max_rows=self.max_rows,
            make_stop_conditions=self.make_stop_conditions,
            make_scheduler=lambda stopping, on_search_sample: self.engine.make_scheduler(
                empty,
                [ParamSet(params, stopping)],
                searches=searches,
                user=user,
                on_search_sample=on_search_sample,
            ),
            make_plan=self._plan,
            draw_counter=self._draw_counter,
        )

    # New weights

    @property
    def weights_version(self) -> int:
        """The number of updates of the weights so far."""
        return self.engine.gate.version

    def update(
        self, weights: NewWeights, *, cache: CacheMode = "all", check_finite: bool = True
    ) -> int:
        """Load new weights between two steps, also while samples are drawn.

        Any thread may call it. All weights are checked before the first one is written, so an error
        leaves the old ones. Matrices in FP8 are rounded again. Tokens that are drawn afterwards
        have the new version in `Completion.versions`.

        Args:
            weights: A module of transformers, also with LoRA adapters of PEFT or inside of DDP;
                (name, tensor) pairs or a dict with the names of the module or of its checkpoints;
                or the directory of a checkpoint. All weights must be given. Tensors may be on
                another device and have another float type. They must not change until the call
                returns.
            cache: What is computed again with the new weights. "keep": nothing; later tokens read
                the keys, values and recurrent states of the old weights, kept prefixes included.
                "shared": prompts, and in searches also generated texts from which others branch;
                the unfinished samples keep their own keys, values and states. "all": everything.
                "shared" and "all" drop kept prefixes.
            check_finite: Whether to refuse a tensor with NaN or infinities, if the old has none.

        Returns:
            The version of the new weights: 1 for the first update.

        Raises:
            InputError: the weights do not fit the model, or an argument cannot be used.
            ModelError: the weights of this model cannot be updated, or the checkpoint cannot be
                read.
            CapacityError: the new weights in FP8 do not fit next to the old ones.
            WorkerError: a rank of a tensor-parallel model has failed.
        """
        check_cache_mode(cache)
        check_bool("check_finite", check_finite)
        staged = stage_update(self.model, weights, check_finite=check_finite)
        version = self.engine.update(staged, cache)
        self.fingerprint = self.model.fingerprint
        return version

    # Prefixes kept between calls

    def keep(self, prefix: str | Node, *, name: str | None = None) -> Kept:
        """Compute a prefix now and keep its keys and values for later calls.

        Later prompts that start with the same tokens do not compute them again. Use the result in a
        `with` statement, or `drop` the prefix by name. Kept prefixes take at most half of the
        cache; the least recently used one is evicted first. All are evicted once a weight of the
        model has been written to.

        Args:
            prefix: Text, or a node; the whole paths to its leaves are then kept.
            name: Name for `drop`. Default: a new name is made up.

        Raises:
            InputError: the name is no text or taken, or another run of this LLM is not finished.
            TreeError: the tree is malformed.
            CapacityError: the prefix is too long for the model or for half of the cache.
        """
        tree = Node(prefix) if isinstance(prefix, str) else prefix
        if name is not None and not isinstance(name, str):
            raise InputError(f"name must be a string, got {name!r:.60}")
        if not name:
            self._num_named += 1
            name = f"prefix-{self._num_named}"
        if any(name == other for other, _ in self.list_prefixes()):
            raise InputError(f"prefix {name!r} already exists; drop it or use another name")
        requests = self._sample_requests(tree, SamplingParams())
        prefixes, device_type = self.engine.prefix_cache, self.model.device.type
        plan = plan_prefix(name, requests, self.spec, device_type, self.cache, prefixes)
        try:
            params = [SamplingParams()] * len(requests)
            with self._start(plan, params, [[]] * len(requests), keep_as=name) as stream:
                list(stream)
        except BaseException:
            prefixes.drop(name)
            raise
        return Kept(prefixes, [prefix for prefix in prefixes if prefix.name == name], stream.usage)

    def list_prefixes(self) -> list[tuple[str, int]]:
        """Return names and token counts of kept prefixes, least recently used first."""
        return [(prefix.name, len(prefix.tokens)) for prefix in self.engine.prefix_cache]

    def drop(self, name: str) -> None:
        """Drop a kept prefix; its pages are freed once no run needs them.

        Args:
            name: Name of the prefix.

        Raises:
            InputError: no prefix has the name.
        """
        if not self.engine.prefix_cache.drop(name):
            names = ", ".join(sorted({prefix for prefix, _ in self.list_prefixes()})) or "none"
            raise InputError(f"the kept prefix {name!r} was not found; kept prefixes: {names}")
