"""What is returned of samples that have ended."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from treegen.layout import Ints
from treegen.live_tree import LiveRequest
from treegen.results import Completion
from treegen.rows import RowTable
from treegen.sampling import sample_seed
from treegen.stopping import ParamSet, Verdict


@contextmanager
def _no_collection() -> Iterator[None]:
    """Meanwhile Python looks for no cycles, as thousands of new tuples would have it do."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_no_collection()
def completions_of(
    rows: RowTable, slots: Ints, requests: Sequence[LiveRequest], param_sets: Sequence[ParamSet]
) -> list[tuple[int, list[Completion]]]:
    """What slots have finished: the place of each that is over, and its samples.

    requests: of each slot. The slot of a greedy request has all its samples.
    """
    found: list[tuple[int, list[Completion]]] = []
    tokens = rows.tokens(slots)
    verdicts = _verdicts(rows, slots, tokens, requests, param_sets)
    over = sorted(verdicts)
    slots = slots[over]
    per_row = zip(
        over,
        rows.sample[slots].tolist(),
        rows.seed[slots].tolist(),
        rows.logprobs(slots),
        _alternatives(rows, slots),
        strict=True,
    )
    for at, sample, seed, logprobs, top in per_row:
        request, (reason, stop, text) = requests[at], verdicts[at]
        param_set, name = param_sets[request.params], request.spec.id
        num_top = param_set.params.logprobs
        named = [(sample, seed)]
        if param_set.is_greedy:
            run_seed = param_set.params.seed
            named = [(i, sample_seed(run_seed, request.spec, i)) for i in request.samples]
        completions = [
            Completion(
                prompt_id=name,
                sample_index=sample,
                seed=seed,
                text=text,
                tokens=tokens[at],
                logprobs=logprobs,
                finish_reason=reason,
                stop=stop,
                top_logprobs=tuple(pairs[:num_top] for pairs in top) if num_top else (),
            )
            for sample, seed in named
        ]
        found.append((at, completions))
    return found


def _verdicts(
    rows: RowTable,
    slots: Ints,
    tokens: Sequence[Sequence[int]],
    requests: Sequence[LiveRequest],
    param_sets: Sequence[ParamSet],
) -> dict[int, Verdict]:
    """How those of some slots end that do, by place."""
    found: dict[int, Verdict] = {}
    params = rows.params[slots]
    for index in np.unique(params).tolist():
        places = np.flatnonzero(params == index)
        limits = rows.limit[slots[places]].tolist()
        mine = places.tolist()
        verdicts = param_sets[index].stopping.verdicts(
            [requests[at].spec.tokens for at in mine], [tokens[at] for at in mine], limits
        )
        found.update((at, v) for at, v in zip(mine, verdicts, strict=True) if v is not None)
    return found


def _alternatives(rows: RowTable, slots: Ints) -> list[Sequence[tuple[tuple[int, float], ...]]]:
    """The likeliest (token, logprob) pairs at each token of slots."""
    if not rows.num_logprobs:
        return [()] * len(slots)
    both = zip(*rows.alternatives(slots), strict=True)
    pairs = (zip(ids, values, strict=True) for ids, values in both)
    # So many pairs at a time are those of one token.
    return [list(zip(*[each] * rows.num_logprobs, strict=True)) for each in pairs]
