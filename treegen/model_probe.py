"""A forward pass without data: how a model's layers call attention, before weights are read."""

import copy
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PretrainedConfig

from treegen.errors import ModelError
from treegen.model_attention import PROBE, Probe
from treegen.model_files import one_line


class _NothingChosen(TorchDispatchMode):
    """Lets loops over chosen experts run on tensors without data: no expert was chosen."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.nonzero.default:
            return torch.empty((0, args[0].dim()), dtype=torch.int64, device="meta")
        return func(*args, **(kwargs or {}))


class _NothingHolds(TorchFunctionMode):
    """Lets questions about values be asked of tensors without data: the answer is no."""

    _ANSWERS: Final = {
        torch.Tensor.__bool__: False,
        torch.Tensor.__contains__: False,
        torch.Tensor.__int__: 0,
        torch.Tensor.item: 0,
    }

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in self._ANSWERS and args[0].is_meta:
            return self._ANSWERS[func]
        return func(*args, **(kwargs or {}))


def probe_layers(
    config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool
) -> tuple[Probe, int]:
    """Run the model on three tokens without data; return its attention calls and vocabulary."""
    probe = Probe()
    num_tokens = 3
    ids_1T = torch.zeros(1, num_tokens, dtype=torch.int64, device="meta")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                # Building a model writes into its configuration.
                copy.deepcopy(config),
                dtype=dtype,
                attn_implementation=PROBE,
                # The loop over the experts chosen; grouped matmuls refuse tensors without data.
                experts_implementation="eager",
                trust_remote_code=trust_remote_code,
            ).eval()
        # torch's modes have no annotations.
        chosen = _NothingChosen()  # type: ignore[no-untyped-call]
        with chosen, _NothingHolds(), torch.inference_mode():
            logits: Tensor = model(
                input_ids=ids_1T, position_ids=ids_1T, use_cache=False, treegen=probe
            ).logits
    except ModelError as error:
        raise ModelError(f"{config.model_type} models cannot be used: {error}") from None
    except Exception as error:
        raise ModelError(
            f"{config.model_type} models cannot be used: a forward pass with an attention function "
            f"of our own fails with {type(error).__name__}: {one_line(error)}"
        ) from None
    num_layers = config.get_text_config(decoder=True).num_hidden_layers
    if [call.layer for call in probe.calls] != list(range(num_layers)):
        raise ModelError(
            f"{config.model_type} models cannot be used: {len(probe.calls)} calls of the attention "
            f"function for {num_layers} layers, but each layer must call it exactly once"
        )
    for call in probe.calls:
        dtypes = {call.q_THK.dtype, call.k_TGK.dtype, call.v_TGV.dtype}
        if call.q_THK.shape[0] != num_tokens or dtypes != {dtype}:
            raise ModelError(
                f"{config.model_type} models cannot be used: layer {call.layer} calls attention "
                f"with {call.q_THK.shape[0]} of {num_tokens} rows in {dtypes}, not {dtype}"
            )
    return probe, logits.shape[-1]
