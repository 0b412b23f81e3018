"""Linear layers of one input, merged: the same numbers, whoever is called when with what."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import tiny_models
import torch
from torch import Tensor, nn

from treegen.model.linear import merged
from treegen.model.linear.merged import MergedLinears
from treegen.model.load import load_model


class Layer(nn.Module):
    """Three layers of one input, one of another, one that is called twice."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, size, bias=bias) for size in (8, 4, 2))
        self.other = nn.Linear(8, 4, bias=not bias)
        self.out = nn.Linear(14, 8)
        self.twice = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = torch.cat([self.q(x), self.k(x), self.v(x)], -1)
        y = self.out(heads) + self.other(x).repeat(1, 2)
        z: Tensor = self.twice(self.twice(y))
        return z


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_joined_layers_compute_the_same_until_they_are_undone(bias: bool) -> None:
    module = nn.ModuleList([Layer(bias), Layer(bias)])
    names = [name for name, _ in module.named_parameters()]
    inputs = [torch.randn(rows, 8) for rows in (1, 5, 64, 0)]
    want = [module[1](module[0](x)) for x in inputs]
    together = MergedLinears(module, lambda: module[1](module[0](inputs[0])))
    for layer in module:
        assert len({id(vars(part)["merged"]) for part in (layer.q, layer.k, layer.v)}) == 1
        assert all(type(part) is nn.Linear for part in (layer.other, layer.out, layer.twice))
    for x, y in zip(inputs, want, strict=True):
        torch.testing.assert_close(module[1](module[0](x)), y, atol=1e-6, rtol=1e-5)
    assert [name for name, _ in module.named_parameters()] == names
    together.undo()
    assert all(type(part) is nn.Linear for layer in module for part in layer.children())
    for x, y in zip(inputs, want, strict=True):
        torch.testing.assert_close(module[1](module[0](x)), y, atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_joined_layers_may_be_called_in_any_order_and_alone() -> None:
    layer = Layer(bias=True)
    q, k, v = copy.deepcopy((layer.q, layer.k, layer.v))
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    MergedLinears(layer, lambda: layer(x))
    for part, stock, given in (
        (layer.v, v, x),
        (layer.q, q, x),
        (layer.k, k, y),
        (layer.k, k, x),
        (layer.q, q, y),
        (layer.v, v, x),
        (layer.v, v, y),
        (layer.v, v, y),
        (layer.k, k, y),
        (layer.q, q, x),
    ):
        torch.testing.assert_close(part(given), stock(given), atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_joined_weights_are_stored_once_and_may_be_written() -> None:
    layer, other = Layer(bias=True), Layer(bias=True)
    x = torch.randn(3, 8)
    MergedLinears(layer, lambda: layer(x))
    storages = {part.weight.untyped_storage().data_ptr() for part in (layer.q, layer.k, layer.v)}
    assert len(storages) == 1
    layer.load_state_dict(other.state_dict())
    torch.testing.assert_close(layer(x), other(x), atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_what_is_tied_or_called_by_name_or_fits_nowhere_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, x = Layer(bias=False), torch.randn(3, 8)
    layer.k.weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)
    layer.q.weight = layer.k.weight
    MergedLinears(layer, lambda: (layer.q(x), layer.k(x)))
    MergedLinears(layer, lambda: (layer.q(x), layer.v(input=x), layer.other(x)))
    MergedLinears(layer.v, lambda: layer.v(x))

    def no_memory(parts: object) -> nn.Parameter:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(merged, "_merge_parameters", no_memory)
    short = Layer(bias=True)
    MergedLinears(short, lambda: short(x))
    for part in (*layer.children(), *short.children()):
        assert type(part) is nn.Linear


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama", ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]),
        ("qwen2", ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]),
        ("mixtral", ["q_proj", "k_proj", "v_proj"]),
        ("phi3", []),
        ("gpt2", []),
    ],
)
def test_families_have_siblings(family: str, names: list[str], tmp_path: Path) -> None:
    model = load_model(tiny_models.save_tiny_model(tmp_path, family), device="cpu", check=False)
    model.compile_layers(model.new_cache(4, 16), backend="aot_eager")
    model.compile_layers(model.new_cache(4, 16), backend="aot_eager")
    assert not model.uncompiled_because
    found = [name for name, part in model.module.named_modules() if hasattr(part, "merged")]
    layers = model.module.config.num_hidden_layers
    assert [name.split(".")[-1] for name in found] == names * layers
    model.reset()
    assert not [name for name, part in model.module.named_modules() if hasattr(part, "merged")]
