"""The engine on a GPU: greedy tokens equal stock transformers, with and without CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from attention_cases import Group, make_case, paged
from transformers import AutoConfig

from treegen import LLM, Node, SamplingParams
from treegen.engine.compute import decode_graphs
from treegen.errors import InputError
from treegen.model.checkpoint.text_part import auto_class
from treegen.ops.attention import attend
from treegen.prompts.plan.cost_model import Sharing

pytestmark = pytest.mark.gpu
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

FEW_SHOT = "Q: Ann has 3 apples.\nA: The answer is 3.\n\n" * 2
QUESTIONS = [
    "Q: Bob has 14 pens and 2 caps. How many?\nA:",
    "Q: Cy?\nA:",
    "Q: How many have we?\nA:",
]
FAMILIES = ["llama", "gemma2", "gpt_oss", "deepseek_v3", "mistral_swa", "gpt2", "cohere2", "qwen3"]
FAMILIES += ["llama4"]  # attends within chunks
FAMILIES += ["gemma3_on_text", "llava_on_text", "mistral3_on_text", "qwen2_5_vl_on_text"]
FAMILIES += ["qwen3_next", "lfm2", "bamba", "jamba", "minimax", "kimi_linear"]  # partly recurrent


@pytest.fixture
def graphs_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """No graph serves fewer rows: padding of so small models would never cost a capture."""
    monkeypatch.setattr(decode_graphs, "CAPTURE_SECONDS", 0.0)


def tree_of(samples: int) -> Node:
    leaves = [Node(text, samples=samples, id=str(i)) for i, text in enumerate(QUESTIONS)]
    return Node(FEW_SHOT, children=leaves)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_stock_generation(family: str, tmp_path: Path) -> None:
    tiny_models.save_tiny_model(tmp_path, family)
    kind = auto_class(AutoConfig.from_pretrained(tmp_path))
    stock = kind.from_pretrained(tmp_path, attn_implementation="eager").cuda()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    modes: list[tuple[Sharing, dict[str, Any]]] = [
        ("all", {}),
        ("off", {}),
        ("auto", {"eager": True}),
        ("auto", {}),
        ("auto", {"compile": False, "run_ahead": False}),
    ]
    for sharing, how in modes:
        llm = LLM(
            str(tmp_path), dtype="float32", device="cuda", memory="32MiB", sharing=sharing, **how
        )
        result = llm.run(tree_of(3), params)
        assert result.usage.impl == "triton"
        for index, question in enumerate(QUESTIONS):
            ids = torch.tensor([llm.tokenizer(FEW_SHOT + question)["input_ids"]]).cuda()
            out = stock.generate(ids, do_sample=False, max_new_tokens=12, eos_token_id=None)
            want = out[0, ids.shape[1] :].tolist()
            assert [list(c.tokens) for c in result.of(str(index))] == [want] * 3


@pytest.mark.parametrize(
    "family", ["qwen3_next", "gpt_oss", "deepseek_v3", "qwen3_moe", "nemotron_h"]
)
def test_steps_of_experts_are_replayed(family: str, tmp_path: Path) -> None:
    """In 16 bits. In float32 torch computes their products by way of the CPU."""
    tiny_models.save_tiny_model(tmp_path, family)
    llm = LLM(str(tmp_path), dtype="bfloat16", device="cuda", memory="32MiB", check=False)
    result = llm.run(tree_of(20), SamplingParams(max_tokens=20, seed=3))
    assert result.usage.eager_because == ""
    assert llm.engine.graphs is not None and llm.engine.graphs.num_graphs > 0


@pytest.mark.parametrize("family", ["qwen3_5", "olmo_hybrid", "lfm2", "bamba", "falcon_h1"])
def test_steps_of_recurrent_layers_are_replayed(
    family: str, tmp_path: Path, graphs_of_any_size: None
) -> None:
    """Rows come and go, list updates and fold them, in graphs of several sizes."""
    tiny_models.save_tiny_model(tmp_path, family)
    params = SamplingParams(max_tokens=40, seed=3, stop=["a"])
    drawn = []
    options: dict[str, Any] = {"dtype": "float32", "device": "cuda", "max_rows": 48}
    for eager in (True, False):
        llm = LLM(str(tmp_path), eager=eager, memory="32MiB", **options)
        result = llm.run(tree_of(60), params)
        drawn.append([c.tokens for c in result.completions])
        if not eager:
            assert llm.engine.graphs is not None and llm.engine.graphs.eager_because is None
            assert 1 < llm.engine.graphs.num_graphs < result.usage.decode_steps / 2
            assert llm.model.uncompiled_because == ""
    assert sum(a != b for a, b in zip(*drawn, strict=True)) <= 4


@pytest.mark.parametrize("how", [{}, {"reproducible": True, "dtype": "bfloat16"}])
def test_small_prefill_passes_are_replayed(how: dict[str, Any], tmp_path: Path) -> None:
    """Prompts of many lengths, alone and several in a pass: as if no pass were a graph."""
    tiny_models.save_tiny_model(tmp_path, "llama", head_dim=16)
    rng = np.random.default_rng(0)
    options: dict[str, Any] = {"dtype": "float32", "device": "cuda", "memory": "32MiB"} | how
    replaying, launching = (LLM(str(tmp_path), **options) for _ in range(2))
    launching.engine.prefills = None
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=1)
    for _ in range(40):
        lengths = rng.integers(1, int(rng.choice([9, 60, 240])), int(rng.integers(1, 5)))
        prompts = [rng.integers(3, 250, length).tolist() for length in lengths]
        pairs = zip(
            replaying.generate(prompts, params), launching.generate(prompts, params), strict=True
        )
        for one, other in pairs:
            assert one[0].tokens == other[0].tokens
            if how:
                assert one[0].logprobs == other[0].logprobs, "to the bit"
            assert np.allclose(one[0].logprobs, other[0].logprobs, atol=1e-4)
    prefills = replaying.engine.prefills
    assert prefills is not None and prefills.eager_because is None and prefills.num_graphs > 2


def test_recurrent_layers_of_transformers_are_not_reproducible(tmp_path: Path) -> None:
    tiny_models.save_tiny_model(tmp_path, "jamba")
    with pytest.raises(InputError, match="its recurrent layers run on transformers' code"):
        LLM(str(tmp_path), dtype="bfloat16", device="cuda", memory="32MiB", reproducible=True)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"frequency_penalty": 0.7, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
        {"regex": "([a-f]{3} ){2,9}"},
    ],
)
def test_replayed_steps_draw_what_eager_steps_draw(
    how: dict[str, Any], tmp_path: Path, graphs_of_any_size: None
) -> None:
    """Rows come and go, so graphs of several sizes are captured, reused and outgrown."""
    tiny_models.save_tiny_model(tmp_path, "llama")
    if "regex" in how:
        pytest.importorskip("llguidance")
    params = SamplingParams(max_tokens=40, seed=3, stop=["z"] if how else ["a"], **how)
    tokens = []
    for eager, run_ahead in ((False, False), (True, False), (False, True)):
        llm = LLM(
            str(tmp_path),
            dtype="float32",
            device="cuda",
            memory="32MiB",
            max_rows=48,
            eager=eager,
            run_ahead=run_ahead,
        )
        result = llm.run(tree_of(60), params)
        tokens.append([c.tokens for c in result.completions])
        graphs = llm.engine.graphs
        assert (graphs is None) == eager
        if graphs is not None:
            assert graphs.eager_because is None
            assert 1 < graphs.num_graphs < result.usage.decode_steps / 2
    for others in tokens[1:]:
        different = sum(a != b for a, b in zip(tokens[0], others, strict=True))
        # float32 sums in another order may flip a draw that lies on a boundary, rarely.
        assert different <= 2


@needs_two
def test_a_second_gpu_draws_what_the_first_one_draws(tmp_path: Path) -> None:
    tiny_models.save_tiny_model(tmp_path, "llama")
    params = SamplingParams(max_tokens=40, seed=3)
    drawn = []
    for device in ("cuda:0", "cuda:1"):
        llm = LLM(str(tmp_path), dtype="float32", device=device, memory="32MiB")
        drawn.append([c.tokens for c in llm.run(tree_of(8), params).completions])
    assert drawn[0] == drawn[1]


@needs_two
def test_attention_runs_where_its_tensors_are() -> None:
    """Whichever GPU is the current one."""
    groups = [[Group(0, 9, 700)], [Group(i, i + 1, 1 + i, 700) for i in range(9)]]
    case = make_case(groups, [800] * 9)
    keys, values, levels = paged(case, torch.float32, 16)
    names = ("q_start_G", "q_stop_G", "pages_GP", "kv_len_G", "kv_start_G")
    outs = []
    for device in ("cuda:0", "cuda:1"):
        moved = [
            replace(level, **{name: getattr(level, name).to(device) for name in names})
            for level in levels
        ]
        q, positions = case.q.to(device, torch.float32), case.positions.to(device)
        out = attend(q, keys.to(device), values.to(device), moved, positions, impl="triton")
        outs.append(out.cpu())
    assert torch.equal(*outs)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("", {}),
        ("", {"dtype": "float32"}),
        ("", {"quantization": "fp8"}),
        ("gpt_oss", {}),
        ("mixtral", {}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"dtype": "float32"}),
        ("qwen3_moe", {"quantization": "fp8"}),
        ("qwen2_moe", {}),
        ("qwen3_next", {}),
        ("qwen3_5_moe", {}),
        ("bamba", {}),
        ("lfm2", {}),
    ],
)
def test_reproducible_samples_depend_on_nothing_else(
    family: str, how: dict[str, str], eager: bool, tmp_path: Path
) -> None:
    """To the bit: in part, alone, with few rows or pages, shared or not."""
    problems = {
        f"p{i}": f"Q: Ann has {7 * i % 31} apples{' or so' * (i % 3)}.\nA:" for i in range(9)
    }
    params = SamplingParams(max_tokens=40, seed=5)
    model_type, _ = (tiny_models.EXACT | tiny_models.HYBRID).get(family, ("llama", {}))
    if not tiny_models.known(model_type):
        pytest.skip(f"this transformers has no {model_type}")
    is_hybrid = family in tiny_models.HYBRID
    if family:
        # Heads of 16 numbers. Those of some families are as many as the model is wide.
        sizes: dict[str, dict[str, Any]] = {
            "bamba": {"hidden_size": 64, "mamba_n_heads": 16},
            "lfm2": {"hidden_size": 64},
        }
        tiny_models.save_tiny_model(tmp_path, family, **sizes.get(family, {"head_dim": 16}))

    def run(names: list[str], samples: int = 8, **options: Any) -> dict[Any, Any]:
        llm = LLM(
            str(tmp_path) if family else "demo",
            device="cuda",
            reproducible=True,
            eager=eager,
            **{"dtype": "bfloat16", "memory": "64MiB", **how, **options},
        )
        leaves = [Node(problems[name], samples=samples, id=name) for name in names]
        result = llm.run(Node(FEW_SHOT, children=leaves), params)
        assert result.usage.impl == "invariant"
        return {(c.prompt_id, c.sample_index): (c.tokens, c.logprob) for c in result.completions}

    little = "3MiB" if is_hybrid or how.get("dtype") == "float32" else "900KiB"
    names = list(problems)
    whole = run(names)
    parts: dict[str, dict[Any, Any]] = {
        "reversed": run(names[::-1]),
        "two": run(names[2:4]),
        "one": run(names[5:6], samples=1),
        "few rows": run(names, max_rows=5),
        "few pages": run(names, memory=little, page_size=16),
        "nothing shared": run(names, sharing="off"),
        "all shared": run(names, sharing="all", prefill_chunk=40),
    }
    different = {
        name: [(key, part[key], whole[key]) for key in part if part[key] != whole[key]]
        for name, part in parts.items()
    }
    assert not any(different.values()), different
