"""Linear layers in FP8: the products of rounded numbers, alone and joined, in whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from cli_cases import Command
from devices import DEVICES
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from treegen import LLM, Node, SamplingParams
from treegen.errors import InputError
from treegen.model.linear import fp8
from treegen.model.linear.fp8 import (
    Fp8Linear,
    disable_input_rounding,
    fp8_linear,
    quantize_linears,
    quantize_rows,
)
from treegen.model.linear.merged import MergedLinears
from treegen.model.load import load_model
from treegen.model.load_check import check_model
from treegen.model.options import EngineOptions
from treegen.ops.attention.types import FP8


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(1, 16, 16), (7, 48, 32), (64, 256, 512), (0, 32, 16)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_rounded_numbers(
    device: str, shape: tuple[int, int, int], has_bias: bool
) -> None:
    rows, width, outputs = shape
    generator = torch.Generator().manual_seed(hash(shape) % 1000)
    kind = torch.bfloat16 if device == "cuda" else torch.float32

    def numbers(*size: int) -> torch.Tensor:
        spread = torch.rand(size[0], *[1] * (len(size) - 1), generator=generator) * 100
        return (torch.randn(*size, generator=generator) * spread).to(device, kind)

    input, weight = numbers(rows, width), numbers(outputs, width)
    bias = numbers(outputs) if has_bias else None
    weight8, scale_N = quantize_rows(weight)
    assert weight8.dtype == FP8
    got = fp8_linear(input, weight8, scale_N, bias).double()
    rounded, scale_M = quantize_rows(input)
    exact_weight = weight8.double() * scale_N.double()[:, None]
    # No number is off by more than a sixteenth, or what is left of the largest in its row.
    off = (exact_weight - weight.double()).abs()
    assert (off <= weight.double().abs() / 16 + scale_N.double()[:, None] * 2**-9).all()
    want = (rounded.double() * scale_M.double()[:, None]) @ exact_weight.T
    want = want if bias is None else want + bias.double()
    scale = input.double().abs() @ weight.double().abs().T + 1e-6
    limit = 1e-2 if device == "cuda" else 1e-6
    assert ((got - want).abs() <= limit * scale).all()


def test_rows_of_zeros_stay_zeros() -> None:
    weight8, scale_N = quantize_rows(torch.zeros(16, 32))
    assert fp8_linear(torch.zeros(3, 32), weight8, scale_N, None).eq(0).all()


def test_what_is_quantized_and_what_stays(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 24), nn.Linear(20, 16))
    quantize_linears(module, torch.device("cpu"))
    assert [type(part) is Fp8Linear for part in module] == [True, False, False]
    tiny_models.save_tiny_model(tmp_path, "mixtral")
    model = load_model(str(tmp_path), quantization="fp8")
    kinds = {name: type(part) for name, part in model.module.named_modules()}
    assert kinds["lm_head"] is nn.Linear
    assert kinds["model.layers.0.self_attn.q_proj"] is Fp8Linear
    assert not any(kind is Fp8Linear for name, kind in kinds.items() if "gate" in name)


class _Held(TorchDispatchMode):
    """Counts the bytes of tensors on the meta device: `most` at a time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's modes have no annotations
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor) and each.is_meta:
                storage = StorageWeakRef(each.untyped_storage())
                self._alive[storage.cdata] = storage, each.untyped_storage().nbytes()
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._alive.values()))
        return out


def test_the_device_never_holds_more_than_the_quantized_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    piece = 2**13
    monkeypatch.setattr(fp8, "_CHUNK_NUMBERS", piece)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=256,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    device, held = torch.device("meta"), _Held()
    whole = sum(p.nbytes for p in module.parameters())
    with held:
        quantize_linears(module, device)
        module.to(device)
    rounded = sum(p.nbytes for p in module.parameters())
    assert rounded < 0.6 * whole
    # A piece is held in 16 bits, and as floats a few times over.
    assert rounded <= held.most <= rounded + 20 * piece


def test_a_matrix_is_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    part = nn.Linear(48, 32)
    whole = quantize_rows(part.weight.data)
    monkeypatch.setattr(fp8, "_CHUNK_NUMBERS", 5 * 48)
    quantize_linears(nn.Sequential(part), torch.device("cpu"))
    assert isinstance(part, Fp8Linear)
    assert part.weight.float().equal(whole[0].float()) and part.scale.equal(whole[1])


def test_joined_layers_give_the_same_numbers() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(32, 48, bias=False), nn.Linear(32, 16, bias=False)
            self.gate, self.up = nn.Linear(64, 32), nn.Linear(64, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.cat([self.q(x), self.k(x)], -1)
            return torch.cat([self.gate(y), self.up(y)], -1)

    torch.manual_seed(0)
    layer, x = Layer().requires_grad_(False), torch.randn(5, 2, 32)
    quantize_linears(layer, torch.device("cpu"))
    want = layer(x)
    joined = MergedLinears(layer, lambda: layer(x))
    assert type(layer.q) is not Fp8Linear and layer(x).equal(want)
    joined.undo()
    assert type(layer.q) is Fp8Linear and layer(x).equal(want)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mixtral"])
def test_a_model_in_fp8_draws_the_same_however_it_shares(family: str, tmp_path: Path) -> None:
    tiny_models.save_tiny_model(tmp_path, family)
    tree = Node("Q: 1 + 1?\nA:", children=[Node(" 2", samples=6), Node(" two", samples=5)])
    params = SamplingParams(max_tokens=12, seed=3)
    drawn = []
    for sharing in ("all", "off"):
        llm = LLM(str(tmp_path), quantization="fp8", sharing=sharing, memory="8MiB", max_rows=7)
        drawn.append([c.tokens for c in llm.run(tree, params).completions])
    # Sums in another order may move an input over the edge between two numbers of FP8, rarely.
    assert sum(a != b for a, b in zip(*drawn, strict=True)) <= 2
    plain = LLM(str(tmp_path), memory="8MiB").score([("Q: 1 +", " 1?")])[0].logprobs
    rounded = llm.score([("Q: 1 +", " 1?")])[0].logprobs
    assert rounded != plain and rounded == pytest.approx(plain, abs=1.0)


def test_the_load_check_does_not_round_inputs(tmp_path: Path) -> None:
    tiny_models.save_tiny_model(tmp_path, "llama")
    model = load_model(str(tmp_path), quantization="fp8", check=False, device="cpu")
    part = next(p for p in model.module.modules() if isinstance(p, Fp8Linear))
    x = torch.randn(3, part.in_features)
    rounded = part(x)
    with disable_input_rounding(model.module):
        exact = part(x)
    assert not exact.equal(rounded) and part(x).equal(rounded)
    check_model(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int4"}, "quantization must be fp8"),
        ({"quantization": "fp8", "tensor_parallel_size": 2}, "with tensor_parallel_size"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        EngineOptions(model="demo", **options)  # type: ignore[arg-type]


def test_the_command_refuses_in_one_line(treegen: Command) -> None:
    done = treegen("eval", "gsm8k", "--model", "demo", "--quantization", "int4", "--limit", "1")
    assert done.code == 2 and "quantization must be fp8" in done.err


@pytest.mark.parametrize("option", ["--quantization", "--kv-cache-dtype"])
def test_a_run_goes_on_in_fp8(tmp_path: Path, treegen: Command, option: str) -> None:
    run, plain = tmp_path / "run", tmp_path / "plain"
    line = "eval gsm8k --limit 1 -n 2 --max-tokens 4 --memory 16MiB -q"
    name = option.removeprefix("--").replace("-", "_")
    assert treegen(line, option, "fp8", "-o", run).code == 0
    assert f'"{name}": "fp8"' in (run / "run.json").read_text()
    assert treegen("eval", "--resume", run, "-q").code == 0
    assert treegen(line, "-o", plain).code == 0
    refused = treegen("eval", "--resume", plain, option, "fp8", "-q")
    assert refused.code == 2 and name in refused.err


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(64, 32), (3072, 2048), (12_352, 2048), (4096, 14_336)]
)
def test_bits_of_a_row_do_not_depend_on_the_others(outputs: int, inputs: int) -> None:
    """By the library, of as many rows as a reproducible pass has at least, or more."""
    torch.manual_seed(0)
    weight, scale_N = quantize_rows(torch.randn(outputs, inputs, device="cuda"))
    x = torch.randn(4096, inputs, device="cuda", dtype=torch.bfloat16)
    whole = fp8_linear(x, weight, scale_N, None)
    for begin, end in ((0, 64), (100, 180), (17, 401), (512, 1536), (1000, 4096)):
        assert torch.equal(fp8_linear(x[begin:end], weight, scale_N, None), whole[begin:end])
