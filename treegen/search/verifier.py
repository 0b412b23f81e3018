"""Loads verifiers that share prefixes of texts, where treegen can compute their models."""

from __future__ import annotations

import os
import random
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from treegen.common.checks import check_argument_types
from treegen.errors import CapacityError, ModelError, ModelWarning, TreegenError
from treegen.model.scorers.scorer import CAUSAL, Scorer, load_scorer
from treegen.model.scorers.verifier import Verifier

if TYPE_CHECKING:
    from treegen.search.live.prefix_scorer import PrefixScorer

MEMORY: Final = "1GiB"
_TOY: Final = 24  # tokens of the text that tells whether treegen computes a model rightly

# Readers that are in use, which are not made twice.
_in_use: WeakValueDictionary[tuple[Any, ...], PrefixScorer] = WeakValueDictionary()


@check_argument_types
def load_verifier(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    device: str | None = None,
    form: str | None = None,
    share: bool = True,
    memory: int | str = MEMORY,
    **settings: Any,
) -> Verifier:
    """Load a model that judges, with a cache for what the texts share that it reads.

    Args:
        name: A checkpoint directory or a hub name; safetensors only.
        device: By default a GPU if there is one.
        form: By default what config.json says.
        share: Whether prefixes that texts share are computed once. Models that treegen cannot
            compute, such as encoders, read each text whole; a warning says so.
        memory: Bytes of the cache.
        settings: Those of `Verifier`.

    Raises:
        InputError: settings that cannot be used.
        ModelError: it cannot be loaded, or judges nothing.
        CapacityError: the cache is too small, or larger than the memory.
    """
    where: dict[str, Any] = {"revision": revision, "device": device, "form": form}
    if not share:
        return Verifier(scorer=load_scorer(name, **where), **settings)
    asked = tuple(str(settings.get(each)) for each in ("label", "tokens"))
    key = (*map(str, (name, *where.values(), memory)), *asked)
    reader = _in_use.get(key)
    if reader is not None:
        return Verifier(scorer=reader.scorer, reader=reader, **settings)
    verifier = Verifier(scorer=load_scorer(name, own=True, **where), **settings)
    try:
        reader = _in_use[key] = _reader(verifier, os.fspath(name), memory)
        return replace(verifier, reader=reader)
    except CapacityError:
        raise
    except (TreegenError, RuntimeError) as error:
        told = str(error).split("\n")[0]
    del verifier  # its layers may attend by treegen now, and two models may not fit
    warnings.warn(
        f"{os.fspath(name)} reads each text whole, because treegen cannot compute it: {told}",
        ModelWarning,
        stacklevel=2,
    )
    return Verifier(scorer=load_scorer(name, **where), **settings)


def _reader(verifier: Verifier, name: str, memory: int | str) -> PrefixScorer:
    """What computes a verifier's model from now on, compared with the model's own class."""
    from treegen.model.load_check import TOLERANCE
    from treegen.model.scorers.binary_head import as_tree_model, head_of, slice_head
    from treegen.search.live.prefix_scorer import PrefixScorer

    scorer = verifier.scorer
    module, column = scorer.model, 0
    if scorer.form == CAUSAL:
        head: Any = slice_head(module.get_output_embeddings(), verifier.token_ids())
    else:
        head, column = head_of(module), verifier.column
    row = _toy(scorer)
    parts = [row[: len(row) // 2], row]
    want = [verifier.read([part], [[len(part) - 1]])[0][0] for part in parts]
    model = as_tree_model(module, head, column, name)
    reader = PrefixScorer(model, scorer, memory=memory)
    limit = TOLERANCE[model.dtype]
    # The second text goes on from the first.
    got = [reader.score_prefixes([part], [[len(part) - 1]])[0][0] for part in parts]
    if not all(abs(a - b) <= limit for a, b in zip(got, want, strict=True)):
        told = f"{name} gives {got} for a toy text, and {want} by its own class"
        raise ModelError(f"{told}; try dtype float32, or another verifier")
    return reader


def _toy(scorer: Scorer) -> list[int]:
    """Some tokens, the same every time, none of them special."""
    special = set(scorer.tokenizer.all_special_ids)
    plain = [token for token in range(min(len(scorer.tokenizer), 5000)) if token not in special]
    length = min(_TOY, scorer.length or _TOY)
    return random.Random(0).choices(plain, k=length)
