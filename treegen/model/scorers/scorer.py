"""Load reward models, and compute their outputs on whole texts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from treegen.errors import CapacityError, InputError, ModelError, arg

if TYPE_CHECKING:
    from torch import Tensor

SEQUENCE, TOKEN, CAUSAL = "SequenceClassification", "TokenClassification", "CausalLM"
FORMS: Final = (SEQUENCE, TOKEN, CAUSAL)
_FORMS: Final[Mapping[str, str]] = {
    SEQUENCE: SEQUENCE,
    TOKEN: TOKEN,
    CAUSAL: CAUSAL,
    "ProcessRewardModel": TOKEN,
    "PrmModel": TOKEN,
    "RewardModel": SEQUENCE,
}
"""The form of a model, by the ending of its architecture's name."""

# Models in use, by directory, fingerprint, device and form, so that none is loaded twice.
_in_use: WeakValueDictionary[tuple[str, str, str, str], Any] = WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class Scorer:
    """A loaded reward model."""

    model: Any
    """The transformers model."""
    tokenizer: Any
    """Its tokenizer."""
    form: str
    """SEQUENCE, TOKEN or CAUSAL."""
    length: int | None
    """Maximum tokens of a text; None for no limit."""

    def logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits of R texts of token ids, float32 [R, labels] or [R, tokens, labels].

        Raises:
            CapacityError: the device has not enough free memory.
        """
        import torch

        pad, longest = self.tokenizer.pad_token_id or 0, max(map(len, rows))
        ids = torch.full((len(rows), longest), pad)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        device = self.model.device
        try:
            with torch.inference_mode():
                output = self.model(input_ids=ids.to(device), attention_mask=mask.to(device))
                logits: Tensor = output.logits.float()
                return logits
        except torch.OutOfMemoryError:
            pass  # raise outside this block, which keeps the tensors of the pass
        raise CapacityError(
            f"{device} has no memory left to score {len(rows):,} texts of up to {longest:,} tokens "
            f"at once; lower {arg('batch_size=')} of the reward model, or give the LLM a smaller "
            f"cache ({arg('memory=')})"
        )

    def check_length(self, rows: Sequence[Sequence[int]]) -> None:
        """Raise InputError if a text is too long for the model."""
        longest = max(map(len, rows), default=0)
        if self.length is not None and longest > self.length:
            raise InputError(
                f"the text has {longest:,} tokens, but the reward model accepts at most "
                f"{self.length:,}; shorten the text"
            )

    def batches(self, rows: Sequence[Sequence[int]], size: int) -> list[list[int]]:
        """Group the indices of texts into batches of similar length, for less padding."""
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        # Without a padding token, a sequence classifier cannot find the last token.
        size = size if self.tokenizer.pad_token_id is not None or self.form != SEQUENCE else 1
        return [order[start : start + size] for start in range(0, len(order), size)]


def probabilities(logits: Tensor) -> Tensor:
    """Return the softmax of labels [..., labels]; the sigmoid if there is only one."""
    return logits.sigmoid() if logits.shape[-1] == 1 else logits.softmax(dim=-1)


def load_scorer(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    device: str | None = None,
    form: str | None = None,
    separate: bool = False,
) -> Scorer:
    """Load a reward model, from safetensors only.

    Args:
        name: A directory or a hub name.
        revision: The branch, tag or commit of a model on the hub.
        device: The device. Default: a GPU if there is one.
        form: SEQUENCE, TOKEN or CAUSAL. Default: as config.json says.
        separate: Whether to load a separate copy, because the caller will change the model.

    Raises:
        InputError: there is no such device or form.
        ModelError: the model cannot be loaded, does not fit into the device's free memory, or has
            none of the forms.
    """
    from treegen.model.checkpoint.files import (
        check_trust,
        check_weights,
        fingerprint,
        locate,
        read_raw_config,
    )
    from treegen.model.config import check_headers, resolve_device
    from treegen.model.tokenizer import load_tokenizer

    if form not in (None, *FORMS):
        raise InputError(f"form must be {', '.join(FORMS)} or None, got {form!r:.60}")
    device_name = str(resolve_device("auto" if device is None else device))
    directory = locate(name, revision, weights=True)
    raw = read_raw_config(directory)
    # The code that comes with such a model is not run, because treegen implements its head.
    has_own_head = _has_own_head(raw)
    form = form or _form_of(name, raw)
    if raw.get("auto_map") and not has_own_head:
        raise ModelError(
            f"{name} requires custom code (auto_map in config.json), which is not supported for "
            "reward models; if transformers can load the weights, remove auto_map from a local "
            "copy"
        )
    trusted = {k: v for k, v in raw.items() if k != "auto_map"}
    check_trust(trusted, "config.json", revision, local=True, trust=False)
    check_weights(directory)
    check_headers(directory, raw)
    tokenizer: Any = load_tokenizer(directory, with_config=not has_own_head)
    key = str(directory), fingerprint(directory), device_name, form
    model = None if separate else _in_use.get(key)
    if model is None:
        model = _read(name, directory, raw, form, tokenizer, device_name)
        _move(model, device_name, name)
        if not separate:
            _in_use[key] = model
    return Scorer(model, tokenizer, form, getattr(model.config, "max_position_embeddings", None))


def _move(model: Any, device: str, name: str | os.PathLike[str]) -> None:
    """Move a model to a device, or raise ModelError if the device has too little free memory."""
    import torch

    try:
        model.to(device)
        return
    except torch.OutOfMemoryError:
        size = sum(weight.nbytes for weight in model.parameters())
    raise ModelError(
        f"reward model {name} requires {size / 2**30:.1f} GiB, which exceeds the free memory of "
        f"{device}; use another device, or give the LLM a smaller cache ({arg('memory=')})"
    )


def _has_own_head(raw: Mapping[str, Any]) -> bool:
    named = [str(architecture) for architecture in raw.get("architectures") or ()]
    return any(architecture.endswith(("RewardModel", "PrmModel")) for architecture in named)


def _form_of(name: str | os.PathLike[str], raw: Mapping[str, Any]) -> str:
    named = [str(architecture) for architecture in raw.get("architectures") or ()]
    for ending, form in _FORMS.items():
        if any(architecture.endswith(f"For{ending}") for architecture in named):
            return form
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if set(named) & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}:  # such as GPT2LMHeadModel
        return CAUSAL
    raise ModelError(
        f"{name} is not a supported reward model: its architecture must end in "
        f"For{', For'.join(_FORMS)}, got {', '.join(named) or 'unknown'}; to use another model, "
        "pass your own function (by_function, Together)"
    )


def _read(
    name: str | os.PathLike[str],
    directory: Path,
    raw: Mapping[str, Any],
    form: str,
    tokenizer: Any,
    device: str,
) -> Any:
    import torch
    import transformers

    from treegen.common.formatting import summarize_error
    from treegen.model.checkpoint.load_report import quiet_loading
    from treegen.model.config import resolve_dtype

    try:
        config = transformers.AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        dtype = resolve_dtype("auto", config, torch.device(device))
        if _has_own_head(raw):
            from treegen.model.scorers.heads import read_reward_model

            config.pad_token_id = tokenizer.pad_token_id
            pooled = form == SEQUENCE
            with quiet_loading():
                body = read_reward_model(directory, config, dtype, tokenizer, pooled=pooled)
            return body.eval()
        # Older releases of transformers choose sdpa for such models, which ignores the soft cap.
        capped = getattr(config, "attn_logit_softcapping", None)
        with quiet_loading():
            model, info = getattr(transformers, f"AutoModelFor{form}").from_pretrained(
                directory,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                **({"attn_implementation": "eager"} if capped else {}),
            )
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"reward model {name} cannot be loaded: {summarize_error(error)}; check the name, "
            "or download the model again"
        ) from None
    if info["missing_keys"]:
        missing = min(info["missing_keys"])
        kind = {SEQUENCE: "sequence classifier", TOKEN: "token classifier"}.get(form, "model")
        raise ModelError(
            f"{name} is not a {kind}: it has no weights for {missing}; use another model"
        )
    # Decoders need this to find the last token of a padded text.
    model.config.pad_token_id = tokenizer.pad_token_id
    return model.eval()
