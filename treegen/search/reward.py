"""Scores of a reward model or verifier: a transformers sequence classifier."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from treegen.errors import InputError, ModelError
from treegen.search.evaluate import Evaluate
from treegen.search.node import SearchNode
from treegen.search.strategies.common import check_counts

if TYPE_CHECKING:
    from torch import Tensor

# By directory and device: what is asked for again while it is in use is not loaded twice.
_in_use: WeakValueDictionary[tuple[str, str], Any] = WeakValueDictionary()


def whole_text(node: SearchNode) -> str:
    """The prompt and the text after it."""
    prompt = node.path[0].text
    if not prompt:
        raise InputError("the prompt was given as token ids; say what the model reads by text_of")
    return prompt + node.path_text


def reward_model(
    name: str | os.PathLike[str],
    *,
    text_of: Callable[[SearchNode], str] = whole_text,
    label: int | None = None,
    device: str | None = None,
    batch_size: int = 16,
    revision: str | None = None,
) -> Evaluate:
    """Evaluate nodes by a sequence classifier of transformers, which is loaded here.

    name: a checkpoint directory or a hub name; safetensors only.
    text_of: gives the text that the model reads; by default the prompt and the text so far.
    label: the output to take, by default the last, which for two labels is "right". The value is
    the sigmoid of the only output, or the softmax share of one among several.
    device: where it computes; by default a GPU if there is one.
    batch_size: texts to compute at once.
    revision: of a hub name.

    Each call is computed by itself, so that a search does not depend on the searches beside it.

    Raises InputError for arguments that cannot be used, ModelError for a model that cannot be
    loaded. The evaluation raises InputError for a text that is too long for the model.
    """
    check_counts(batch_size=batch_size)
    model, tokenizer, length = _load(name, revision, device)
    num_labels = int(model.config.num_labels)
    if label is not None and not 0 <= label < num_labels:
        raise InputError(f"label must be less than {num_labels}, got {label}")
    column = num_labels - 1 if label is None else label

    async def evaluate(nodes: Sequence[SearchNode]) -> list[float]:
        encoded = tokenizer([text_of(node) for node in nodes])["input_ids"]
        longest = max(map(len, encoded), default=0)
        if length is not None and longest > length:
            raise InputError(
                f"a text has {longest:,} tokens but the reward model reads {length:,}; shorten "
                "what it reads by text_of"
            )
        # Texts of like lengths are computed together, for less padding.
        order = sorted(range(len(nodes)), key=lambda index: len(encoded[index]))
        size = batch_size if tokenizer.pad_token_id is not None else 1
        values = [0.0] * len(nodes)
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            scores = _scores(model, tokenizer.pad_token_id, [encoded[index] for index in rows])
            for index, value in zip(rows, scores[:, column].tolist(), strict=True):
                values[index] = value
        return values

    return evaluate


def _load(
    name: str | os.PathLike[str], revision: str | None, device: str | None
) -> tuple[Any, Any, int | None]:
    """The model, its tokenizer, and the most tokens that it reads."""
    import torch

    from treegen.model.files import (
        check_trust,
        check_weights,
        load_tokenizer,
        locate,
        read_raw_config,
    )

    directory = locate(name, revision, weights=True)
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_trust(read_raw_config(directory), "config.json", revision, local=True, trust=False)
    check_weights(directory)
    tokenizer: Any = load_tokenizer(directory)
    model = _in_use.get((str(directory), where))
    if model is None:
        model = _in_use[str(directory), where] = _read(name, directory, tokenizer).to(where)
    return model, tokenizer, getattr(model.config, "max_position_embeddings", None)


def _read(name: str | os.PathLike[str], directory: Path, tokenizer: Any) -> Any:
    from transformers import AutoModelForSequenceClassification

    from treegen.model.files import one_line

    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            directory, use_safetensors=True, local_files_only=True, output_loading_info=True
        )
    except Exception as error:
        raise ModelError(f"reward model {name} cannot be loaded: {one_line(error)}") from None
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])[0]
        raise ModelError(f"{name} is no sequence classifier: it has no weights for {missing}")
    # Decoders need it to find the last token of a padded text.
    model.config.pad_token_id = tokenizer.pad_token_id
    return model.eval()


def _scores(model: Any, pad_id: int | None, rows: Sequence[Sequence[int]]) -> Tensor:
    """Probabilities of the labels of texts, float32 [texts, labels]. rows: token ids of each."""
    import torch

    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), pad_id or 0)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
    with torch.inference_mode():
        device = model.device
        logits: Tensor = model(
            input_ids=ids.to(device), attention_mask=mask.to(device)
        ).logits.float()
    return logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(dim=1)
