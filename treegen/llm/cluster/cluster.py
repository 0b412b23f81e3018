"""Cluster: an LLM that distributes its runs to several workers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from treegen.common.checks import check_argument_types, check_counts
from treegen.common.cores import count_cores
from treegen.common.foreign_names import NEUTRAL_ENGINE, drop_neutral
from treegen.common.params import SamplingParams
from treegen.engine.stream import Stream
from treegen.errors import InputError
from treegen.llm import LLM
from treegen.llm.arguments import missing_attribute
from treegen.llm.base import BaseLLM
from treegen.llm.cluster import jobs
from treegen.llm.cluster.cluster_run import ClusterRun
from treegen.llm.cluster.dispatcher import (
    Dispatcher,
    WorkItem,
    sample_items,
    score_groups,
    score_items,
)
from treegen.llm.cluster.placement import Placement, parse_placement
from treegen.llm.cluster.ray_session import RaySession
from treegen.llm.cluster.streams import ClusterScores, ClusterSearchRun, ClusterStream
from treegen.llm.cluster.worker import from_checkpoint, make_llm_options
from treegen.llm.cluster.worker_pool import WorkerPool, make_no_workers_error, max_threads
from treegen.model.options import EngineOptions, check_known
from treegen.model.tokenizer import load_image_processor, load_tokenizer, read_chat_template
from treegen.prompts.plan.draws import DrawCounter, hash_prompt
from treegen.prompts.plan.plan import Plan, Request
from treegen.prompts.plan.requests import as_token_ids, check_vocabulary
from treegen.prompts.radix import Tokens
from treegen.prompts.tokens import encode_texts

if TYPE_CHECKING:
    from treegen.search.tree.node import SearchFn
    from treegen.search.tree.result import SearchProblem


class Cluster(BaseLLM):
    """Many LLMs used as one: each worker has the model, and does a part of every run.

    It samples, scores and searches as LLM does: seed, prompt and index determine a sample's draws,
    not the worker. This process plans, assigns work and collects results, and needs no GPU. Use it
    in a `with` statement, or `close` it: until then workers occupy their GPUs.

    Sessions and kept prefixes are in the memory of one model, so only an LLM has them.
    """

    @check_argument_types
    def __init__(
        self,
        model: str,
        *,
        gpus: str | int | None = None,
        workers: int | None = None,
        address: str | None = None,
        before: Sequence[Callable[[], object]] = (),
        **engine: Any,
    ) -> None:
        """Start workers, and wait until each has loaded the model.

        Args:
            model: A directory or hub name.
            gpus: "all", a number of GPUs, or the GPUs of this machine to use, such as "0,2". Each
                GPU gets one worker, or each group of tensor_parallel_size GPUs. Default: all GPUs.
            workers: Number of workers on CPUs, instead of gpus.
            address: Address of a running Ray cluster of which this machine is a node: "auto" or
                HOST:PORT. Default: start Ray here and stop it with this process.
            before: Functions that each worker calls before it loads the model, for example to load
                another model.
            **engine: Further arguments of LLM. Sizes, such as memory, apply to each worker.

        Raises:
            InputError: arguments contradict each other, or name something that does not exist.
            WorkerError: workers cannot be started.
            TreegenError: as for `LLM`.
        """
        engine = drop_neutral(engine, EngineOptions.__dataclass_fields__, NEUTRAL_ENGINE)
        check_known(engine, "the arguments of Cluster", ("gpus", "workers", "address", "before"))
        options = EngineOptions(model=model, **engine)
        placement = parse_placement(gpus, workers, address, device=options.device)
        self._open(placement, options, before)

    @classmethod
    def at(
        cls,
        placement: Placement,
        options: EngineOptions,
        before: Sequence[Callable[[], object]] = (),
        *,
        tokenizer: Any = None,
        make: Callable[[dict[str, Any]], LLM] = from_checkpoint,
    ) -> Cluster:
        """Return a cluster with a known placement.

        Args:
            placement: Where the workers run.
            options: Options of each worker's LLM.
            before: Functions that each worker calls before it loads the model.
            tokenizer: Tokenizer of a model that is not a checkpoint. Default: the checkpoint's.
            make: Function of the options with which each worker makes its LLM. Default: load the
                checkpoint.
        """
        cluster = cls.__new__(cls)
        cluster._open(placement, options, before, tokenizer, make)
        return cluster

    def _open(
        self,
        placement: Placement,
        options: EngineOptions,
        before: Sequence[Callable[[], object]],
        tokenizer: Any = None,
        make: Callable[[dict[str, Any]], LLM] = from_checkpoint,
    ) -> None:
        # Workers on other machines get the text, because they may not have the file.
        options = replace(options, chat_template=read_chat_template(options.chat_template))
        self.tokenizer = tokenizer or load_tokenizer(
            options.model, **options.source, chat_template=options.chat_template
        )
        processor = load_image_processor(options, self.tokenizer) if options.images else None
        session = RaySession(placement, count_cores())
        try:
            how = make_llm_options(options, placement.device)
            self._pool = _start_workers(session, placement, how, before, make)
        except BaseException:
            session.close()
            raise
        # The pool, and not the cluster, because an open run uses the pool.
        self._stop = weakref.finalize(self._pool, session.close)
        loaded = [slot.loaded for slot in self._pool.slots if slot.loaded is not None]
        first = loaded[0]
        self.spec, self.fingerprint = first.model_info.spec, first.fingerprint
        if processor is not None:
            self.images = processor.enable_images(
                self.tokenizer,
                self.spec.vocab_size,
                keep_template=options.chat_template is not None,
            )
        self.model_info = replace(
            first.model_info,
            engine=options,
            tokenizer=self.tokenizer,
            images=self.images,
            num_pages=min(slot.num_pages for slot in loaded),
        )
        self._draw_counter = DrawCounter()
        self._max_workers: int | None = None
        self._current: weakref.ref[ClusterRun] | None = None
        self._closed = False

    @property
    def num_workers(self) -> int:
        """Number of workers that run or are starting."""
        return sum(not slot.over for slot in self._pool.slots)

    def limit(self, workers: int | None) -> None:
        """Make later runs use only the first `workers` workers; None uses all."""
        check_counts(workers=workers)
        self._max_workers = workers

    def close(self) -> None:
        """End the open run, stop the workers, and stop Ray if it was started for them."""
        if not self._closed:
            self._closed = True
            if (run := self._get_open_run()) is not None:
                run.close()
            self._pool.close()
            self._stop()

    if not TYPE_CHECKING:  # to type checkers a class with __getattr__ has every attribute

        def __getattr__(self, name: str) -> Any:
            if name in ("model", "engine") or (name[0] != "_" and hasattr(LLM, name)):
                raise AttributeError(
                    f"a Cluster has no {name}, because {name} belongs to a single model; use an LLM"
                )
            raise missing_attribute(self, name)

    # Implementation of the calls

    def _plan(self, requests: Sequence[Request]) -> Plan:
        return self.model_info.plan_unchecked(requests)

    def _check_ready(self) -> None:
        if self._closed:
            raise InputError("the cluster is closed; create a new Cluster")
        if self._get_open_run() is not None:
            raise InputError(
                "another run of this Cluster is not finished; read that run to its end, or call "
                "its close()"
            )

    def _get_open_run(self) -> ClusterRun | None:
        run = self._current() if self._current is not None else None
        return None if run is None or run.closed else run

    def _start(
        self, plan: Plan, params: Sequence[SamplingParams], samples: Sequence[Sequence[int]]
    ) -> Stream:
        plan.check_fits(self.model_info.num_pages or 0, self.model_info.page_size)
        packed = jobs.PackedPlan.of(plan, params)
        prompts = [segment.tokens for segment in plan.segments]
        if all(not request.samples for request in plan.requests):
            groups = score_groups(plan)
            names = [plan.requests[group[0]].id for group in groups]
            job = partial(jobs.begin_scoring, packed, groups)
            run = self._run(job, score_items(plan, groups), names, prompts)
            return ClusterScores(plan, run, groups)
        items, names = sample_items(plan, samples), [request.id for request in plan.requests]
        run = self._run(partial(jobs.begin_sampling, packed), items, names, prompts)
        return ClusterStream(plan, run)

    def _open_stream(self, plan: Plan, params: Sequence[SamplingParams]) -> Stream:
        return self._start(plan, params, [[] for _ in plan.requests])

    def _start_searches(
        self, fn: SearchFn, problems: Sequence[SearchProblem], *, params: SamplingParams, **how: Any
    ) -> ClusterSearchRun:
        self._check_ready()
        for problem in problems:
            if not isinstance(problem.content, str):
                ids = as_token_ids(problem.name, problem.content)
                check_vocabulary(problem.name, ids, self.spec, self.images)
        problems = self._with_origins(problems, params.seed)
        job = partial(jobs.begin_searching, fn, problems, {"params": params, **how})
        names = [problem.name for problem in problems]
        # A search cannot be split, and its duration is unknown.
        items = [WorkItem(key, (0,)) for key in range(len(problems))]
        prompts = [np.array(p.content) for p in problems if not isinstance(p.content, str)]
        run = self._run(job, items, names, prompts, parts=how["concurrency"])
        return ClusterSearchRun(problems, run)

    def _run(
        self,
        job: jobs.WorkerJob,
        items: Sequence[WorkItem],
        names: Sequence[str],
        prompts: Iterable[Tokens],
        *,
        parts: int | None = None,
    ) -> ClusterRun:
        self._check_ready()
        if self.images is not None and (images := self.images.export_images(prompts)):
            job = partial(jobs.begin_with_images, images, job)
        slots = self._pool.slots[: self._max_workers]
        if all(slot.over for slot in slots):
            raise make_no_workers_error(slots)
        dispatcher = Dispatcher(items, [slot.number for slot in slots if not slot.over])
        run = ClusterRun(
            self._pool,
            job,
            dispatcher,
            names.__getitem__,
            parts=parts,
            max_workers=self._max_workers,
        )
        self._current = weakref.ref(run)
        return run

    def _with_origins(
        self, problems: Sequence[SearchProblem], seed: int | None
    ) -> list[SearchProblem]:
        """Return problems with the origins of their draws, so that the worker does not matter."""
        counter = self._draw_counter if seed is None else DrawCounter()
        unnamed = [problem for problem in problems if not problem.is_named]
        texts = [problem.content for problem in unnamed if isinstance(problem.content, str)]
        encoded = iter(encode_texts(texts, self.tokenizer))
        origins = {
            problem.name: counter.origin_of_search(
                hash_prompt(next(encoded) if isinstance(problem.content, str) else problem.content)
            )
            for problem in unnamed
        }
        return [replace(problem, origin=origins.get(problem.name)) for problem in problems]


def _start_workers(
    session: RaySession,
    placement: Placement,
    options: dict[str, Any],
    before: Sequence[Any],
    make: Callable[[dict[str, Any]], LLM],
) -> WorkerPool:
    """Start the workers; raise InputError if there are not enough GPUs."""
    free = session.get_free_resources()
    on_gpus = placement.device == "cuda"
    num_gpus = int(free.get("GPU", 0))
    count = placement.count if placement.count is not None else num_gpus
    per_worker = int(options["tensor_parallel_size"])
    if on_gpus and not num_gpus:
        raise InputError("Ray has no free GPU; use workers on CPUs (--workers N)")
    if on_gpus and count > num_gpus:
        raise InputError(f"{count} GPUs were requested (--gpus), but Ray has only {num_gpus} free")
    if on_gpus:
        if (count % per_worker and placement.count is not None) or count < per_worker:
            raise InputError(
                f"{count} GPUs (--gpus) cannot be divided into groups of {per_worker} (--tp); "
                f"request {max(count // per_worker, 1) * per_worker}"
            )
        count //= per_worker
    threads = min(max(1, int(free.get("CPU", 1) // count)), max_threads())
    pool = WorkerPool(
        session=session,
        options=options,
        before=before,
        make=make,
        # A Ray that this process started has no other users, so no CPUs need to be reserved.
        cpus=(1 if on_gpus else threads) if placement.address else 0,
        gpus=per_worker if on_gpus else 0,
        threads=threads,
        adds_joined_gpus=on_gpus and placement.count is None,
    )
    try:
        pool.start(count)
    except BaseException:
        pool.close()
        raise
    return pool
