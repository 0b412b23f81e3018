"""Loads verifiers, with a prefix cache where treegen can compute their models."""

from __future__ import annotations

import os
import random
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from treegen.errors import CapacityError, ModelError, ModelWarning, TreegenError
from treegen.model.scorers.scorer import CAUSAL, Scorer, load_scorer
from treegen.model.scorers.verifier import Verifier

if TYPE_CHECKING:
    import torch

    from treegen.search.live.prefix_scorer import PrefixScorer

MEMORY: Final = "1GiB"
_TOY: Final = 24  # tokens of the text that checks whether treegen computes a model correctly

# Readers in use, by their settings, so that equal settings share one reader.
_in_use: WeakValueDictionary[tuple[Any, ...], PrefixScorer] = WeakValueDictionary()


def load_verifier(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    device: str | torch.device | None = None,
    form: str | None = None,
    share: bool = True,
    memory: int | str = MEMORY,
    **settings: Any,
) -> Verifier:
    """Load a verifier, with a cache for the prefixes that the texts it reads share.

    Args:
        name: A checkpoint directory or a hub name; safetensors only.
        revision: Revision of a hub name; by default the hub's default.
        device: Device to compute on; by default a GPU if there is one.
        form: "SequenceClassification", "TokenClassification" or "CausalLM"; by default what
            config.json says.
        share: Whether prefixes that texts share are computed once. Models that treegen cannot
            compute, such as encoders, read each text whole, with a warning.
        memory: Size of the cache, in bytes or as text such as "1GiB".
        **settings: Settings of `Verifier`.

    Raises:
        InputError: Settings cannot be used.
        ModelError: The model cannot be loaded, or gives no judgements.
        CapacityError: The cache is too small, or larger than the memory.
    """
    where: dict[str, Any] = {"revision": revision, "device": device, "form": form}
    if not share:
        return Verifier(scorer=load_scorer(name, **where), **settings)
    output_settings = tuple(str(settings.get(each)) for each in ("label", "tokens"))
    key = (*map(str, (name, *where.values(), memory)), *output_settings)
    reader = _in_use.get(key)
    if reader is not None:
        return Verifier(scorer=reader.scorer, reader=reader, **settings)
    verifier = Verifier(scorer=load_scorer(name, separate=True, **where), **settings)
    try:
        reader = _in_use[key] = _reader(verifier, os.fspath(name), memory)
        return replace(verifier, reader=reader)
    except CapacityError:
        raise
    except (TreegenError, RuntimeError) as error:
        reason = str(error).split("\n")[0]
    del verifier  # its layers may already use treegen's attention, and two models may not fit
    warnings.warn(
        f"{os.fspath(name)} reads each text whole, because treegen cannot compute it: {reason}",
        ModelWarning,
        stacklevel=2,
    )
    return Verifier(scorer=load_scorer(name, **where), **settings)


def _reader(verifier: Verifier, name: str, memory: int | str) -> PrefixScorer:
    """Return the prefix scorer of a verifier, checked against the model's own class."""
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
    # The second text continues the first, so this also checks the cache.
    got = [reader.score_prefixes([part], [[len(part) - 1]])[0][0] for part in parts]
    if not all(abs(a - b) <= limit for a, b in zip(got, want, strict=True)):
        mismatch = f"{name} gives {got} for a toy text, and {want} by its own class"
        raise ModelError(f"{mismatch}; try dtype float32, or another verifier")
    return reader


def _toy(scorer: Scorer) -> list[int]:
    """Return a fixed list of ordinary (not special) token ids."""
    special = set(scorer.tokenizer.all_special_ids)
    plain = [token for token in range(min(len(scorer.tokenizer), 5000)) if token not in special]
    length = min(_TOY, scorer.length or _TOY)
    return random.Random(0).choices(plain, k=length)
