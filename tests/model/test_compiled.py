"""Compiled layers compute what the same layers compute uncompiled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from torch import Tensor

from treegen import LLM, Node, SamplingParams
from treegen.model.batch import Batch
from treegen.model.load import load_model
from treegen.model.model import Model
from treegen.ops.attention import Level, prepare
from treegen.ops.cache.pool import LayerKV

# Tokens of each pass and the position of the first; one token alone is a graph of its own.
PASSES = [(5, 0), (9, 5), (1, 14), (20, 15), (1, 35), (3, 36)]
# "aot_eager" also traces what a layer writes into its pool, which takes most of the time. `make
# soak` compiles all families with it; `make test` has llama, one family with windows and sinks, one
# with recurrent layers, and one with latents and selected keys.
FAMILIES = [
    ("llama", "aot_eager"),
    ("gemma2", "eager"),
    ("gpt2", "eager"),
    ("gpt_oss", "aot_eager"),
    ("deepseek_v32", "eager"),
    ("llama4", "eager"),
    *(
        pytest.param(family, "aot_eager", marks=pytest.mark.soak)
        for family in ("gemma2", "gpt2", "deepseek_v32", "llama4", "minimax_m3_vl_on_text")
    ),
]
HYBRID = [
    "qwen3_next",
    *(
        pytest.param(family, marks=pytest.mark.soak)
        for family in (
            "granitemoehybrid",
            "qwen3_5",
            "bamba",
            "falcon_h1",
            "nemotron_h",
            "lfm2",
            "lfm2_moe",
        )
    ),
]


def batch_of(pools: Sequence[LayerKV], num_tokens: int, start: int) -> Batch:
    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    generator = torch.Generator().manual_seed(start)
    positions = torch.arange(start, start + num_tokens)
    level = Level(
        q_start_G=ints([0]),
        q_stop_G=ints([num_tokens]),
        pages_GP=torch.arange(4)[None].int(),
        kv_len_G=ints([start + num_tokens]),
        kv_start_G=ints([0]),
        causal=True,
    )
    return Batch(
        tokens_T=torch.randint(3, 300, (num_tokens,), generator=generator),
        positions_T=positions,
        slots_T=positions.clone(),
        logits_at_S=torch.arange(num_tokens),
        levels=prepare([level], positions),
        layers=pools,
    )


def run(
    model: Model, pools: Sequence[LayerKV], passes: Sequence[tuple[int, int]] = PASSES
) -> list[Tensor]:
    return [model.forward(batch_of(pools, num, start)) for num, start in passes]


SIZES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 6},
    "llama4": {"num_hidden_layers": 6},
}


@pytest.mark.parametrize(("family", "backend"), FAMILIES)
def test_compiled_layers_give_the_same_logits(family: str, backend: str, tmp_path: Path) -> None:
    if not tiny_models.known((tiny_models.EXACT | tiny_models.HYBRID)[family][0]):
        pytest.skip(f"this transformers has no {family}")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = load_model(
        tiny_models.save_tiny_model(tmp_path, family, **SIZES.get(family, {})),
        device="cpu",
        check=False,
    )
    pools = model.new_cache(4, 16)
    want = run(model, pools)
    fresh = model.new_cache(4, 16)
    model.compile_layers(fresh, backend=backend)
    got = run(model, fresh)
    assert not model.uncompiled_because
    for actual, stock in zip(got, want, strict=True):
        torch.testing.assert_close(actual, stock, atol=1e-5, rtol=1e-5)
    for mine_kv, stock_kv in zip(fresh, pools, strict=True):
        torch.testing.assert_close(mine_kv.keys, stock_kv.keys, atol=1e-5, rtol=1e-5)
    if family in SIZES:
        # One graph for one token, one for all other numbers, whatever the number of layers.
        kinds = {"llama": 1, "llama4": 2}[family]
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2 * kinds


@pytest.mark.parametrize(
    ("family", "backend", "settings"),
    [
        (
            "glm_moe_dsa",
            "aot_eager",
            {
                "index_topk": 8,
                "num_hidden_layers": 2,
                "indexer_types": ["full", "shared"],
                "first_k_dense_replace": 0,
            },
        ),
        *(
            pytest.param(
                "minimax_m3_vl_on_text",
                backend,
                {"index_topk_blocks": 2, "index_block_size": 4},
                marks=marks,
            )
            for backend, marks in (("eager", ()), ("aot_eager", pytest.mark.soak))
        ),
    ],
)
def test_compiled_layers_select_the_same_keys(
    family: str, backend: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Layers select keys or blocks themselves, or use those that an earlier layer selects."""
    if not tiny_models.known(tiny_models.EXACT[family][0]):
        pytest.skip(f"this transformers has no {family}")
    torch._dynamo.reset()
    path = tiny_models.save_tiny_model(tmp_path, family, max_position_embeddings=64, **settings)
    model = load_model(path, device="cpu", check=False)
    pools, fresh = model.new_cache(4, 16), model.new_cache(4, 16)
    want = run(model, pools, PASSES[:2])
    model.compile_layers(fresh, backend=backend)
    got = run(model, fresh, PASSES[:2])
    assert not model.uncompiled_because
    for actual, stock in zip(got, want, strict=True):
        torch.testing.assert_close(actual, stock, atol=1e-5, rtol=1e-5)
    for mine_kv, stock_kv in zip(fresh, pools, strict=True):
        assert (mine_kv.index is None) == (stock_kv.index is None)
        if mine_kv.index is not None:
            torch.testing.assert_close(mine_kv.index, stock_kv.index, atol=1e-5, rtol=1e-5)
            assert mine_kv.index.any()


def test_a_model_that_cannot_be_compiled_runs_as_it_is(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = load_model(tiny_models.save_tiny_model(tmp_path, "llama"), device="cpu", check=False)
    want = run(model, model.new_cache(4, 16))
    layer = model.module.model.layers[0]
    stock = layer.forward

    def breaks(*args: object, **options: object) -> object:
        torch._dynamo.graph_break()
        return stock(*args, **options)

    layer.forward = breaks
    fresh = model.new_cache(4, 16)
    model.compile_layers(fresh, backend="eager")
    got = run(model, fresh)
    assert "cannot be compiled" in model.uncompiled_because
    for actual, expected in zip(got, want, strict=True):
        torch.testing.assert_close(actual, expected)


def test_models_beside_each_other_are_compiled_too(tmp_path: Path) -> None:
    """Dynamo counts the graphs of all models together; its own limit is eight, here two."""
    torch._dynamo.reset()
    models = [
        load_model(
            tiny_models.save_tiny_model(tmp_path / str(size), "llama", intermediate_size=size),
            device="cpu",
            check=False,
        )
        for size in (32, 40)
    ]
    with torch._dynamo.config.patch(recompile_limit=2):
        for model in models:
            want = run(model, model.new_cache(4, 16))
            pools = model.new_cache(4, 16)
            model.compile_layers(pools, backend="eager")
            torch.testing.assert_close(run(model, pools), want, atol=1e-5, rtol=1e-5)
            assert not model.uncompiled_because


def test_past_the_limit_of_graphs_layers_run_uncompiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr("treegen.model.compiled._MAX_GRAPHS", 1)
    model = load_model(tiny_models.save_tiny_model(tmp_path, "llama"), device="cpu", check=False)
    want = run(model, model.new_cache(4, 16))
    pools = model.new_cache(4, 16)
    with torch._dynamo.config.patch(recompile_limit=1):
        model.compile_layers(pools, backend="eager")
        torch.testing.assert_close(run(model, pools), want, atol=1e-5, rtol=1e-5)
    assert "cannot be compiled" in model.uncompiled_because


@pytest.mark.parametrize("family", HYBRID)
def test_compiled_recurrent_layers_draw_the_same(family: str, tmp_path: Path) -> None:
    """Prefill passes and decode steps, below a shared state and on states of their own."""
    torch._dynamo.reset()
    path = tiny_models.save_tiny_model(tmp_path, family)
    llm = LLM(str(path), device="cpu", check=False, memory="8MiB", prefill_chunk=9)
    tree = Node("Q: Bob has 14 pens", children=[Node(" a", samples=2), Node("b", samples=1)])
    params = SamplingParams(max_tokens=11, seed=1, ignore_eos=True)
    want = llm.run(tree, params).completions
    torch._dynamo.utils.counters.clear()
    assert llm.cache.states is not None
    llm.model.compile_layers(llm.cache.layers, llm.cache.states.layers, backend="aot_eager")
    got = llm.run(tree, params).completions
    assert not llm.model.uncompiled_because
    # Each kind of layer, for one token and for all other numbers.
    kinds = {"nemotron_h": 4, "lfm2_moe": 3}.get(family, 2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2 * kinds
    assert [c.tokens for c in got] == [c.tokens for c in want]
    for actual, expected in zip(got, want, strict=True):
        assert actual.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    llm.model.reset()
    assert [c.tokens for c in llm.run(tree, params).completions] == [c.tokens for c in want]
    # Another amount of memory is not compiled anew.
    torch._dynamo.utils.counters.clear()
    other = LLM(str(path), device="cpu", check=False, memory="5MiB", page_size=8, prefill_chunk=9)
    assert other.cache.states is not None
    other.model.compile_layers(other.cache.layers, other.cache.states.layers, backend="aot_eager")
    again = other.run(tree, params).completions
    assert [c.tokens for c in again] == [c.tokens for c in want]
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_another_amount_of_memory_is_not_compiled_anew(family: str, tmp_path: Path) -> None:
    path = tiny_models.save_tiny_model(tmp_path, family)
    params = SamplingParams(max_tokens=9, seed=1, ignore_eos=True)
    want: list[Any] = []
    graphs = []
    torch._dynamo.reset()
    for memory, page_size in (("8MiB", 16), ("5MiB", 8)):
        torch._dynamo.utils.counters.clear()
        llm = LLM(str(path), device="cpu", check=False, memory=memory, page_size=page_size)
        want = want or llm.generate(["Q: Bob has 14", "Is"], params)
        llm.model.compile_layers(llm.cache.layers, backend="eager")
        got = llm.generate(["Q: Bob has 14", "Is"], params)
        assert not llm.model.uncompiled_because
        assert [[c.tokens for c in each] for each in got] == [
            [c.tokens for c in each] for each in want
        ]
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] and not graphs[1]


def test_hybrids_that_share_a_module_run_uncompiled(tmp_path: Path) -> None:
    llm = LLM(str(tiny_models.save_tiny_model(tmp_path, "zamba2")), device="cpu", memory="8MiB")
    assert llm.cache.states is not None
    llm.model.compile_layers(llm.cache.layers, llm.cache.states.layers, backend="aot_eager")
    assert "must call attention once each" in llm.model.uncompiled_because
    assert llm.generate(["a b"], SamplingParams(max_tokens=3))
