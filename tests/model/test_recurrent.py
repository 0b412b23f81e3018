"""The object that recurrent layers of transformers get in place of a cache."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import HYBRID, config_of, save_tiny_model
from torch import Tensor, nn
from transformers import DynamicCache

from treegen import LLM, SamplingParams
from treegen.common.spec import DeltaSpec, LayerSpec, ModelSpec, StateSpec
from treegen.errors import CacheFullError, ModelError
from treegen.model.checkpoint.text_part import auto_class
from treegen.model.config import load_spec
from treegen.model.load import from_module, load_model
from treegen.model.memory import cache_size
from treegen.model.recurrent.layer_states import CACHE_ARGUMENTS, LayerStates, cache_argument
from treegen.model.recurrent.layers import StateProbe, use_states, wrap_recurrent


def test_windows_and_states_are_those_of_transformers_own_cache() -> None:
    """Pieces shorter and longer than the window, the first of them padded."""
    generator = torch.Generator().manual_seed(0)
    for lengths in ([1, 1, 2, 5, 1], [2, 1], [7, 1, 3], [3, 4]):
        stock = DynamicCache(config=config_of(*HYBRID["lfm2"][:1], **HYBRID["lfm2"][1]))
        states = LayerStates({})
        assert states.get_conv_state(0) is None and not states.has_previous_state(0)
        for length in lengths:
            new = torch.randn(2, 6, length, generator=generator)
            want = stock.update_conv_state(new, 0, conv_kernel_size=4)
            got = states.update_conv_state(new, 0, conv_kernel_size=4)
            torch.testing.assert_close(got, want, rtol=0, atol=0)
            kept = stock.layers[0].conv_states[0]
            torch.testing.assert_close(states.get_conv_state(0), kept, rtol=0, atol=0)
            assert states.layers[0].conv_states[0] is states.get_conv_state(0)
    state = torch.ones(2, 3)
    assert states.update_recurrent_state(state, 0) is states.get_recurrent_state(0)
    assert states.recurrent_states[0] is state and states.has_previous_state()
    states.set_linear_cache(0, state)
    assert states.get_linear_cache(0) is state and not states.is_recording_past(0)


class Convolution(nn.Module):
    """A recurrent layer as authors write it, whose cache has one of the names of transformers."""

    def remember(self, x: Tensor, cache: Any) -> Tensor:
        """The last three inputs, the newest of which is the output."""
        out: Tensor = cache.update_conv_state(x.mT, 0, conv_kernel_size=3)[..., -x.shape[1] :].mT
        return out


class ByCache(Convolution):
    def forward(self, hidden_states: Tensor, cache: Any = None) -> Tensor:
        return self.remember(hidden_states, cache)


class ByCacheParams(Convolution):
    def forward(self, hidden_states: Tensor, cache_params: Any, **_: Any) -> Tensor:
        return self.remember(hidden_states, cache_params)


class ByPastKeyValues(Convolution):
    def forward(self, hidden_states: Tensor, past_key_values: Any = None) -> Tensor:
        return self.remember(hidden_states, past_key_values)


def maps_old_names(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As the decorator of transformers 5.24 does."""

    @functools.wraps(forward)
    def mapped(*args: Any, **kwargs: Any) -> Tensor:
        if "cache_params" in kwargs:
            warnings.warn("`cache_params` is deprecated", FutureWarning, stacklevel=2)
            kwargs["cache"] = kwargs.pop("cache_params")
        return forward(*args, **kwargs)

    return mapped


class Decorated(ByCache):
    forward = maps_old_names(ByCache.forward)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (ByCache, "cache"),
        (ByCacheParams, "cache_params"),
        (ByPastKeyValues, "past_key_values"),
        (Decorated, "cache"),
    ],
)
def test_layers_get_their_states_whatever_the_cache_is_called(
    kind: type[Convolution], name: str
) -> None:
    assert cache_argument(kind.forward) == name
    model = nn.Sequential(kind())
    (layer,) = wrap_recurrent(model)
    x = torch.randn(1, 4, 2, generator=torch.Generator().manual_seed(0))
    for given in (None, *CACHE_ARGUMENTS):
        states = StateProbe()
        with use_states(states):
            # A model of transformers passes its own cache on, which is None here.
            out = model[0](x, **({} if given is None else {given: None}))
        assert torch.equal(out, x)
        assert [(each.kind, each.shape) for each in states.states[layer.index]] == [
            ("conv", (2, 3))
        ]


def test_a_layer_that_takes_no_cache_is_refused() -> None:
    class Closed(Convolution):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return self.remember(hidden_states, LayerStates({}))

        def keep(self, cache: Any) -> None:
            cache.update_conv_state(None, 0)

    assert cache_argument(Closed.forward) is None
    with pytest.raises(ModelError, match="Closed keeps a state outside its arguments"):
        wrap_recurrent(Closed())


def test_a_wrapped_model_is_itself_outside_of_passes() -> None:
    model_type, settings = HYBRID["qwen3_next"]
    config = config_of(model_type, **settings)
    module = auto_class(config).from_config(config).eval()
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        want = module(ids, use_cache=False).logits
        layers = wrap_recurrent(module)
        assert wrap_recurrent(module) == layers and len(layers) == 3
        module.set_attn_implementation("eager")
        torch.testing.assert_close(module(ids, use_cache=False).logits, want)
        cached = module(ids[:, :9], use_cache=True)
        name = cache_argument(module.forward)
        assert name is not None
        rest = module(ids[:, 9:], **{name: cached[name]}).logits
    torch.testing.assert_close(rest, want[:, 9:], rtol=1e-4, atol=1e-4)
    assert from_module(module).spec.states == from_module(module).spec.states


def test_the_spec_counts_states(tmp_path: Path) -> None:
    spec = load_spec(save_tiny_model(tmp_path, "qwen3_next"), "bfloat16", device="cpu")
    conv, recurrent = spec.states[0]
    assert (conv.kind, conv.shape, conv.dtype) == ("conv", (64, 4), "bfloat16")
    assert (recurrent.kind, recurrent.shape, recurrent.dtype) == ("recurrent", (4, 8, 8), "float32")
    assert not recurrent.is_stepwise
    assert spec.state_bytes == 3 * (64 * 4 * 2 + 4 * 8 * 8 * 4)
    assert len(spec.layers) == 1 and spec.kv_bytes_per_token == 2 * (8 + 8) * 2
    model = load_model(tmp_path, device="cpu", check=False)
    assert [[tuple(t.shape) for t in each] for each in model.new_states(5)] == [
        [(5, 64, 4), (5, 4, 8, 8)]
    ] * 3


def test_scans_without_a_state_to_start_from_are_noticed(tmp_path: Path) -> None:
    spec = load_spec(save_tiny_model(tmp_path, "jamba"))
    assert [[s.is_stepwise for s in each] for each in spec.states] == [[False, True]] * 2


def test_kernels_of_other_packages_are_not_run_without_data(tmp_path: Path) -> None:
    """As flash-linear-attention and causal-conv1d, which take no tensors without data."""
    save_tiny_model(tmp_path / "model", "lfm2")
    for package, names in (
        ("causal_conv1d", ("causal_conv1d_fn", "causal_conv1d_update")),
        ("fla", ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")),
    ):
        text = "".join(f"def {n}(*a, **k):\n    raise RuntimeError('no data')\n" for n in names)
        (tmp_path / f"{package}.py").write_text(text)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from treegen.model.config import load_spec\n"
        f"print(len(load_spec({str(tmp_path / 'model')!r}).states))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "2", done.stderr


def test_pure_recurrent_models_are_refused_for_what_they_are() -> None:
    config = config_of("mamba2", num_heads=8, head_dim=8, state_size=8, n_groups=1)
    with pytest.raises(ModelError, match="none of its layers computes attention"):
        from_module(auto_class(config).from_config(config))


def spec_of(state_bytes: int, kv_bytes: int) -> ModelSpec:
    """Of a model with so many bytes of state, and of keys and values per token."""
    state = StateSpec("recurrent", 0, (state_bytes // 4,), "float32", 4)
    layer = LayerSpec(1, kv_bytes // 4, kv_bytes // 4)
    states = ((state,),) if state_bytes else ()
    return ModelSpec("m", "m", (layer,), 9, 99, (), 2, states=states)


def test_the_memory_is_shared_out_between_keys_and_states() -> None:
    # As Qwen3.6-35B-A3B has them: most of it goes to states.
    large, memory = spec_of(60 << 20, 20 << 10), 64 << 30
    pages, states, _ = cache_size(memory, large, 64, 4096)
    assert states is not None and 900 < states < 1024
    taken = (states + 1) * large.state_bytes + (pages + 1) * 64 * large.kv_bytes_per_token
    assert memory * 0.98 < taken <= memory
    # As LFM2 has them: no more than max_rows asks for.
    assert cache_size(8 << 30, spec_of(60 << 10, 12 << 10), 64, 256).states == 2 * 256 + 64
    assert cache_size(1 << 20, spec_of(0, 1 << 10), 16, 8) == (63, None, 0)
    with pytest.raises(CacheFullError, match=r"recurrent states of 60\.0 MiB"):
        cache_size(128 << 20, large, 64, 256)


@pytest.mark.parametrize("kv_bytes", [256, 64 << 10])
@pytest.mark.parametrize("state_bytes", [1 << 10, 1 << 20])
@pytest.mark.parametrize("delta", [None, DeltaSpec(1, 1, 16, 16, 2)])
def test_the_size_that_an_error_names_is_enough(
    kv_bytes: int, state_bytes: int, delta: DeltaSpec | None
) -> None:
    spec = spec_of(state_bytes, kv_bytes)
    window = StateSpec("conv", 0, (4096,), "bfloat16", 2)
    spec = replace(spec, states=((window, *spec.states[0]),), delta=delta)
    for memory in (0, 1000, state_bytes):
        with pytest.raises(CacheFullError) as caught:
            cache_size(memory, spec, 64, 256)
        named = re.search(r"at least ([\d,]+) bytes", str(caught.value))
        assert named is not None
        size = cache_size(int(named[1].replace(",", "")), spec, 64, 256)
        assert size.pages >= 1 and (size.states or 0) >= 4


def test_a_text_may_have_as_many_tokens_as_a_state_has_heads(tmp_path: Path) -> None:
    """Layers of minimax return their state [N, heads, ...] beside their output [N, length, ...]."""
    llm = LLM(str(save_tiny_model(tmp_path, "minimax")), device="cpu", memory="4MiB")
    prompts = [[5, 6, 7, 8], [9, 8, 7, 6, 5, 4, 3]]
    params = SamplingParams(temperature=0, max_tokens=6)
    together = llm.generate(prompts, params)
    alone = [llm.generate([prompt], params)[0] for prompt in prompts]
    assert [each[0].tokens for each in together] == [each[0].tokens for each in alone]
