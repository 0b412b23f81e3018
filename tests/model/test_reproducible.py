"""Reproducible passes: what is refused, and batches with rows to spare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
import torch._dynamo
import torch._inductor.compile_fx
import torch._inductor.config

from treegen import LLM, Node, SamplingParams
from treegen.errors import InputError
from treegen.model.batch import Batch, use_batch
from treegen.model.compiled import CompiledLayers
from treegen.model.config import load_spec
from treegen.model.recurrent.state_batch import StateBatch
from treegen.model.reproducible import (
    ALIGN,
    build_warmup_batch,
    check_dtype,
    check_reproducible,
    compiler_options,
    pad_batch,
    reproducible_spec,
)
from treegen.ops.attention import HostLevel, prepare_host
from treegen.ops.cache.pool import LayerKV
from treegen.ops.recurrence import RowSlots
from treegen.prompts.plan.compile import compile_plan
from treegen.prompts.plan.plan import Request

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def test_what_is_not_reproducible_is_refused() -> None:
    check_reproducible(CUDA, "auto", 64)
    check_reproducible(CPU, "reference", 5)
    with pytest.raises(InputError, match="requires impl 'invariant', got 'flash'"):
        check_reproducible(CUDA, "flash", 64)
    with pytest.raises(InputError, match="multiple of 16, got 40"):
        check_reproducible(CUDA, "auto", 40)
    check_dtype(torch.bfloat16, CUDA)
    with pytest.raises(InputError, match="requires the dtype float32 or bfloat16, got flo"):
        check_dtype(torch.float16, CUDA)
    with pytest.raises(InputError, match="on cpu requires the dtype float32"):
        LLM("demo", device="cpu", dtype="bfloat16", reproducible=True)


def test_rows_have_states_of_their_own_on_a_gpu(tmp_path: Path) -> None:
    tiny_models.save_tiny_model(tmp_path, "qwen3_next")
    spec = load_spec(tmp_path, device="cpu")
    assert spec.delta is not None and reproducible_spec(spec, CPU) is spec
    assert reproducible_spec(spec, CUDA) == replace(spec, delta=None)
    demo = load_spec("demo", device="cpu")
    assert reproducible_spec(demo, CUDA) == demo
    llm = LLM(str(tmp_path), device="cpu", dtype="float32", memory="4MiB", reproducible=True)
    assert llm.spec.delta is not None


def test_latents_are_refused_on_a_gpu(tmp_path: Path) -> None:
    tiny_models.save_tiny_model(tmp_path, "deepseek_v3")
    with pytest.raises(InputError, match="the products of queries and latents depend on"):
        reproducible_spec(load_spec(tmp_path, device="cpu"), CUDA)


def test_recurrent_layers_that_are_refused(tmp_path: Path) -> None:
    tiny_models.save_tiny_model(tmp_path / "a", "jamba")
    llm = LLM(str(tmp_path / "a"), device="cpu", memory="4MiB", check=False)
    with pytest.raises(
        InputError, match=r"\(jamba\) .*layers run on transformers' code; remove reproducible"
    ):
        llm.engine.model.make_reproducible()
    tiny_models.save_tiny_model(tmp_path / "b", "bamba", time_step_limit=(0.01, 1.0))
    llm = LLM(str(tmp_path / "b"), device="cpu", memory="4MiB", check=False)
    with pytest.raises(
        InputError, match="its time steps have limits that do not apply to single tokens"
    ):
        llm.engine.model.make_reproducible()


OPTIONS = compiler_options()
TRUNK = "Q: Ann has 3 apples and Bob 14.\nA: The answer is 17.\n\n" * 2


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe", "bamba", "lfm2", "olmo_hybrid"])
def test_a_token_at_a_time_recurrent_layers_compute_the_same(family: str, tmp_path: Path) -> None:
    """By the operators that a reproducible GPU has, in several arrangements, on a CPU."""
    if not tiny_models.known(tiny_models.HYBRID[family][0]):
        pytest.skip("this transformers does not have it")
    tiny_models.save_tiny_model(tmp_path, family)
    plain = LLM(str(tmp_path), device="cpu", dtype="float32", memory="8MiB", check=False)
    model, spec = plain.model, plain.spec
    leaves = [
        Node(f"Q: Bob has {7 * i % 31} pens{' or so' * (i % 3)}.\nA:", samples=2, id=str(i))
        for i in range(5)
    ]
    params = SamplingParams(max_tokens=9, seed=5)

    def run(llm: LLM) -> dict[Any, Any]:
        found = llm.run(Node(TRUNK, children=leaves), params).completions
        return {(c.prompt_id, c.sample_index): c for c in found}

    want = run(plain)
    model.spec = replace(spec, delta=None)
    others: list[dict[str, Any]] = [
        {},
        {"max_rows": 3},
        {"sharing": "off"},
        {"sharing": "all", "prefill_chunk": 11},
    ]
    for options in others:
        llm = LLM(model, tokenizer=plain.tokenizer, **{"memory": "8MiB", **options})
        # Beside what sets how a GPU computes, this is `make_reproducible`.
        model._reproducible, model._stock_spec = True, model.spec
        got = run(llm)
        assert {key: c.tokens for key, c in got.items()} == {k: c.tokens for k, c in want.items()}
        for key, c in got.items():
            assert c.logprobs == pytest.approx(want[key].logprobs, abs=1e-4)


def test_a_pass_has_rows_to_spare_which_nothing_reads() -> None:
    zeros = torch.zeros(2, 4, 1, 8)
    ends = np.arange(1, 4)
    level = HostLevel(
        ends - 1, ends, np.ones((3, 1), np.int64), ends, np.zeros(3, np.int64), causal=False
    )
    positions = torch.arange(3)
    batch = Batch(
        torch.tensor([5, 6, 7]),
        positions,
        torch.arange(4, 7),
        torch.tensor([2]),
        prepare_host([level], positions, CPU),
        [LayerKV(zeros, zeros)],
    )
    longer = pad_batch(batch)
    assert longer.tokens_T.tolist() == [5, 6, 7, *[0] * 61]
    assert longer.slots_T.tolist() == [4, 5, 6, *[0] * 61]
    assert longer.levels.positions_T is not None and len(longer.levels.positions_T) == 64
    assert longer.logits_at_S.tolist() == [2]
    assert pad_batch(longer) is longer


def test_rows_to_spare_have_nobodys_states() -> None:
    rows = RowSlots(torch.tensor([[3, 4], [5, 4]]))
    longer = StateBatch([], [], rows).with_rows(2)
    assert longer.in_order and longer.rows is not None
    assert longer.rows.inputs_RT.tolist() == [[3, 4, -1, -1], [5, 4, 0, 0]]
    assert StateBatch([], [], rows).with_rows(0).rows is rows
    assert StateBatch([], []).with_rows(9).rows is None


def test_parts_begin_at_blocks() -> None:
    """The last tokens of a shared segment that fill no block are read with what is below it."""
    trunk = np.arange(37, dtype=np.int32)
    requests = [
        Request(f"{i}", np.concatenate([trunk, np.full(20 + i, 50 + i, np.int32)]), 4, 4, 8)
        for i in range(3)
    ]
    plan = compile_plan(requests, token_bytes=64, num_layers=1, sharing="all", align=ALIGN)
    root, *leaves = plan.segments
    assert (root.is_cascaded, root.base, root.base_below) == (True, 0, 32)
    for leaf in leaves:
        assert (leaf.start, leaf.base, leaf.base_below) == (37, 32, leaf.stop // 16 * 16)
    assert plan.stored_tokens == 37 + 20 + 21 + 22  # nothing is computed twice
    short = compile_plan(
        [Request(f"{i}", trunk[: 9 + i], 4, 4, 8) for i in range(2)],
        token_bytes=64,
        num_layers=1,
        sharing="all",
        align=ALIGN,
    )
    assert [(segment.is_cascaded, segment.reason) for segment in short.segments] == [
        (False, "no whole block")
    ] * 2


@pytest.mark.parametrize("sharing", ["auto", "all"])
def test_samples_do_not_depend_on_where_parts_begin(sharing: str) -> None:
    texts = [
        f"Q: Tom has {i * 37 % 51} apples{' or so' * (i % 3)}. How many?\nA:" for i in range(4)
    ]
    leaves = [Node(text, samples=3, id=str(i)) for i, text in enumerate(texts)]
    tree = Node("Q: Ann has 3 apples.\nA: The answer is 3.\n\n" * 2, children=leaves)
    found = []
    for align in (1, ALIGN):
        llm = LLM("demo", device="cpu", dtype="float32", sharing=sharing, memory="4MiB")  # type: ignore[arg-type]
        llm.engine.align = align
        result = llm.run(tree, SamplingParams(max_tokens=12, seed=3))
        found.append([completion.tokens for completion in result.completions])
    assert found[0] == found[1]


def test_no_kernel_is_chosen_by_timing_whatever_was_compiled_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers that are traced twice, as the first are, beside others with kernels that are timed."""
    found: list[tuple[bool, bool]] = []

    def compiled(
        module: torch.fx.GraphModule, _inputs: object, *, config_patches: Any, **_others: Any
    ) -> Any:
        with torch._inductor.config.patch(config_patches):
            config = torch._inductor.config
            found.append((config.deterministic, config.triton.autotune_pointwise))
        return module.forward

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compiled)
    usual = torch._inductor.config.deterministic, torch._inductor.config.triton.autotune_pointwise
    torch._dynamo.reset()
    for options in (None, OPTIONS):
        llm = LLM("demo", device="cpu", memory="2MiB")
        layers = CompiledLayers(llm.engine.model.module, llm.cache.layers, options=options)
        with use_batch(build_warmup_batch(llm.cache.layers, CPU, "auto")):
            llm.engine.model.module(torch.zeros(1, 1024, dtype=torch.int64), use_cache=False)
        layers.undo()
    torch._dynamo.reset()
    assert found == [usual, (True, False)]
