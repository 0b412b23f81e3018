"""Reads a judging model's probability of "right" after prefixes of texts, with its own cache.

Texts of a search tree have common beginnings: the text of a node is that of its parent plus a step.
What texts share is computed and stored once, in this call and in later ones.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from treegen.common.outputs import Usage
from treegen.common.params import SamplingParams
from treegen.engine.compute.model_runner import ModelRunner
from treegen.engine.param_set import ParamSet
from treegen.engine.resources import EngineResources
from treegen.engine.scheduler import Scheduler
from treegen.engine.segments.prefix_cache import PrefixCache
from treegen.model.memory import make_cache
from treegen.model.model import Model
from treegen.model.options import EngineOptions
from treegen.model.scorers.heads import RIGHT
from treegen.model.scorers.scorer import Scorer
from treegen.prompts.plan.plan import Request
from treegen.prompts.plan.requests import plan_requests
from treegen.prompts.radix import Tokens
from treegen.prompts.stops import StopConditionsCache
from treegen.prompts.tokens import TAIL
from treegen.search.live.prompts import PromptIndex, check_fits

_ROWS: Final = 8  # expected number of texts below a shared segment
_CHUNK: Final = 2048  # tokens per pass; small, because the sampling model has most of the memory
_MAX_RECENT: Final = 4096  # segments kept for later texts
_MAX_VALUES: Final = 65536  # results kept for later calls


class PrefixScorer:
    """Reads a model of two outputs at the ends of prefixes of texts.

    The outputs are those of `treegen.model.scorers.heads`.

    Attributes:
        scorer: The model with its tokenizer, as it was loaded.
    """

    def __init__(self, model: Model, scorer: Scorer, *, memory: int | str) -> None:
        """Create the cache and an empty run.

        Args:
            model: The model with two outputs.
            scorer: The model with its tokenizer, as it was loaded.
            memory: Size of the cache, in bytes or as text such as "1GiB".

        Raises:
            CapacityError: The cache does not fit.
        """
        self._model, self.scorer = model, scorer
        self._options = EngineOptions(model=model.spec.name, memory=memory, prefill_chunk=_CHUNK)
        self._cache = make_cache(model, self._options)
        self._values: OrderedDict[bytes, float] = OrderedDict()
        self._lock = threading.Lock()  # a server's searches and its nodes share one reader
        self._begin()

    def _begin(self) -> None:
        """Start an empty run that uses the whole cache."""
        model, spec = self._model, self._model.spec
        _, max_rows, chunk = self._options.sizes(model.device.type)
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=2)
        stopping = StopConditionsCache().of(params, self.scorer.tokenizer, (), spec.vocab_size)
        self._scheduler = Scheduler(
            plan_requests([], spec, device_type=model.device.type, sharing="auto"),
            EngineResources(
                model=model,
                cache=self._cache,
                prefix_cache=PrefixCache(self._cache, 0),
                model_runner=ModelRunner(model, self._cache, None, model.impl),
                max_rows=max_rows,
                prefill_chunk=chunk,
            ),
            [ParamSet(params, stopping)],
            [],
        )
        store = self._scheduler.run.store
        self._prompts = PromptIndex(store, rows=_ROWS, max_recent=_MAX_RECENT)

    @property
    def usage(self) -> Usage:
        """Usage of the model so far."""
        return self._scheduler.usage

    @torch.inference_mode()
    def score_prefixes(
        self, rows: Sequence[Sequence[int]], ends: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Return, for each text, the probability of "right" after some of its tokens.

        Args:
            rows: Token ids of each text.
            ends: For each text, the indices of these tokens, in ascending order.

        Raises:
            CapacityError: A text does not fit the cache.
            NumericsError: The model's outputs are not finite.
        """
        texts = [np.array(row, dtype=np.int32) for row in rows]
        keys = [_hash_prefixes(*pair) for pair in zip(texts, ends, strict=True)]
        prefixes = {
            key: text[: end + 1]
            for text, text_ends, names in zip(texts, ends, keys, strict=True)
            for end, key in zip(text_ends, names, strict=True)
        }
        with self._lock:
            new = {key: prefix for key, prefix in prefixes.items() if key not in self._values}
            try:
                values = self._compute(new)
            except BaseException:
                self._scheduler.close()
                self._begin()
                raise
            for key in prefixes:
                if key not in values:
                    self._values.move_to_end(key)
                    values[key] = self._values[key]
            self._values.update(values)
            while len(self._values) > _MAX_VALUES:
                self._values.popitem(last=False)
            return [[values[key] for key in names] for names in keys]

    def _compute(self, prefixes: dict[bytes, Tokens]) -> dict[bytes, float]:
        scheduler, store = self._scheduler, self._scheduler.run.store
        keys = sorted(prefixes, key=lambda key: len(prefixes[key]))
        # Add shorter prefixes first, so that each prefix of a text continues the previous one.
        for number, key in enumerate(keys):
            tokens = prefixes[key]
            segment = self._prompts.find(tokens)
            try:
                spec = Request(str(number), tokens[-TAIL:], samples=1, rows=1, max_tokens=1)
                check_fits("a text to judge", segment, spec, self._cache)
                scheduler.add(spec, segment, 0, range(1), makes_segments=False)
            finally:
                store.release(segment)
        values: dict[bytes, float] = {}
        while scheduler.has_work:
            for completion in scheduler.step():
                logprobs = dict(completion.top_logprobs[0])
                values[keys[int(completion.prompt_id)]] = math.exp(logprobs[RIGHT])
        return values


def _hash_prefixes(text: NDArray[np.int32], ends: Sequence[int]) -> list[bytes]:
    """Return a hash of each prefix of a text; the last tokens are at `ends`, in ascending order."""
    digest, start, hashes = blake2b(digest_size=16), 0, []
    for end in ends:
        assert end + 1 >= start, "the ends must ascend"
        digest.update(text[start : end + 1].tobytes())
        hashes.append(digest.digest())
        start = end + 1
    return hashes
