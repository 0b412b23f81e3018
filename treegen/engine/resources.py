"""The resources that all runs of an engine share, and the creation of a run from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from treegen.common.outputs import Usage
from treegen.common.spec import ModelSpec
from treegen.engine.compute.model_runner import ModelRunner
from treegen.engine.features import Features
from treegen.engine.features.budgets import ThinkingBudgets
from treegen.engine.features.confidence import ConfidenceStops
from treegen.engine.features.encoder_cache import EncoderCache
from treegen.engine.features.expanded_kv import ExpandedKVCache
from treegen.engine.features.grammars import RowGrammars
from treegen.engine.features.recurrent_states import InPlaceRowStates, RecurrentSegmentStates
from treegen.engine.features.update_lists import RowUpdateLists
from treegen.engine.param_set import ParamSet, ParamTable
from treegen.engine.rows.engine_run import EngineRun, RowStates
from treegen.engine.rows.table import RowTable
from treegen.engine.segments.prefix_cache import PrefixCache
from treegen.engine.segments.segment import SegmentStates
from treegen.engine.segments.store import SegmentStore
from treegen.engine.weight_update_gate import UpdateGate
from treegen.model.batch import ForwardModel
from treegen.ops.cache.pool import PagedCache
from treegen.prompts.plan.cost_model import DEVICE_COSTS
from treegen.prompts.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResources:
    """The model, the cache and the settings that all runs of an engine use."""

    model: ForwardModel
    """The model, as far as the engine sees it."""
    cache: PagedCache
    """The paged KV cache."""
    prefix_cache: PrefixCache
    """Prefixes whose pages stay between runs."""
    model_runner: ModelRunner
    """Computes the passes."""
    max_rows: int
    """Maximum number of rows decoded at once."""
    prefill_chunk: int
    """Maximum number of tokens of a prefill pass."""
    run_ahead: bool = False
    """Whether each pass is launched before the results of the previous one are known, so that a GPU
    does not wait for the host. A row that has ended is then computed in one step too many."""
    latent_spec: ModelSpec | None = None
    """The model, if some segments get expanded keys and values in addition to latents."""
    images: EncoderCache | None = None
    """Image embeddings of prompts; None for a model that takes no images."""
    gate: UpdateGate = field(default_factory=UpdateGate)
    """Separates steps from updates of the weights."""


def new_run(
    plan: Plan,
    resources: EngineResources,
    param_sets: Sequence[ParamSet],
    samples: Sequence[Sequence[int]],
    *,
    recomputes_last: bool,
) -> tuple[EngineRun, Features]:
    """Create a run and its features.

    Args:
        plan: The requests and their segments.
        resources: The model, the cache and the settings of the engine.
        param_sets: The sampling parameters known now; at least one set.
        samples: Indices of the samples to draw, for each request of the plan.
        recomputes_last: Whether later requests may need the last token of a segment computed again.
    """
    cache, model_runner, images = resources.cache, resources.model_runner, resources.images
    first, *further = param_sets
    num_logprobs = max(param_set.params.logprobs for param_set in param_sets)
    cache.pool.peak_used = cache.pool.num_used
    store = SegmentStore(
        plan,
        cache,
        resources.prefix_cache,
        states=SegmentStates()
        if cache.states is None
        else RecurrentSegmentStates(cache.states, recomputes_last=recomputes_last),
        images=images.table if images is not None else None,
        rotary=images.rotary if images is not None else None,
    )
    run = EngineRun(
        model=resources.model,
        cache=cache,
        prefix_cache=resources.prefix_cache,
        model_runner=model_runner,
        max_rows=resources.max_rows,
        store=store,
        rows=RowTable(min(num_logprobs, len(first.stopping.may_end))),
        usage=Usage(
            num_pages=cache.pool.num_pages,
            page_size=cache.page_size,
            impl=model_runner.impl,
            prompt_tokens_unshared=sum(
                len(request.tokens) * (len(indices) if request.rows else 1)
                for request, indices in zip(plan.requests, samples, strict=True)
            ),
        ),
        param_sets=ParamTable(first),
        gate=resources.gate,
    )
    if run.gate.version:
        run.rows.generated.record_versions()
    if any(param_set.params.reports_signals for param_set in param_sets):
        run.rows.generated.record_signals()
    for param_set in further:
        run.param_sets.add(param_set, lambda: range(len(run.param_sets)))
    expanded = None
    if (spec := resources.latent_spec) is not None:
        cost = DEVICE_COSTS[resources.model.device.type]
        expanded = ExpandedKVCache(cache, store, model_runner, spec, cost)
    grammars = RowGrammars(run)
    return run, Features(
        states=_row_states(run, recomputes_last=recomputes_last),
        budgets=ThinkingBudgets(run, grammars),
        confidence=ConfidenceStops(run),
        grammars=grammars,
        images=images,
        expanded=expanded,
    )


def _row_states(run: EngineRun, *, recomputes_last: bool) -> RowStates:
    """Return the recurrent states of a run's rows."""
    states = run.cache.states
    if states is None:
        return RowStates()
    if states.delta is not None:
        return RowUpdateLists(run.rows, states)
    return InPlaceRowStates(run.rows, states, per_row=2 if recomputes_last else 1)
