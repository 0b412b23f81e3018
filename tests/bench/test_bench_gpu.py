"""What `treegen bench` measures with, on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers_baseline import CONTINUOUS, GENERATE, TransformersBench

from treegen import LLM, Node, SamplingParams
from treegen.bench import attention, ceilings
from treegen.bench.decode import Settings, no_attention
from treegen.bench.shapes import SHAPES, build_model
from treegen.bench.workloads import DECODE_MODES, decode_cases
from treegen.model.memory import empty_device_cache

pytestmark = pytest.mark.gpu

SHAPE = dataclasses.replace(SHAPES["tiny"], head_dim=64, vocab_size=4096)


def test_every_mode_runs_as_cuda_graphs_and_its_memory_is_given_back() -> None:
    model, tokenizer = build_model(SHAPE, device="cuda")
    assert model.dtype == torch.bfloat16
    found = ceilings.measure(model.device, model.dtype, 0.05)
    assert min(found.matmul, found.attention, found.memory) > 1e9
    empty_device_cache(model.device)
    reserved = torch.cuda.memory_reserved(model.device)
    bench = TransformersBench(model, tokenizer, found, Settings(repeats=2, memory="64MiB"))
    against = (GENERATE, CONTINUOUS)
    modes = (*DECODE_MODES, *against)
    cases = decode_cases([8, 64], [300], 12, problems=4, problem_tokens=40, modes=modes)
    results = list(bench.measure(cases))
    bench.close()
    assert len(results) == 12
    for result in results:
        if result.mode not in against:
            assert not result.skipped and not result.notes, result
            assert result.device_bytes is not None and result.device_bytes > result.kv_bytes
            assert result.busy is not None and 0 < result.busy.low <= result.busy.high <= 1
        if result.mode == GENERATE:
            assert not result.skipped
    # Workspaces of matrix products stay.
    assert torch.cuda.memory_reserved(model.device) < reserved + 2**28


def test_no_attention_is_not_mixed_up_with_graphs_of_attention() -> None:
    model, tokenizer = build_model(SHAPE, dtype="float32", device="cuda")
    tree = Node("Ann has 3 apples. " * 5, samples=2)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def logprobs(impl: str, *, eager: bool) -> tuple[float, ...]:
        llm = LLM(model, tokenizer=tokenizer, memory="8MiB", impl=impl, eager=eager)
        return llm.run(tree, params).completions[0].logprobs

    with_attention = logprobs("auto", eager=False)
    with no_attention() as impl:
        replayed = logprobs(impl, eager=False)
        assert replayed == pytest.approx(logprobs(impl, eager=True), abs=1e-5)
    assert replayed != pytest.approx(with_attention, abs=1e-4)


def test_attention_is_timed_by_every_kernel() -> None:
    device = torch.device("cuda")
    found = ceilings.Ceilings("bfloat16", 6e14, 5e14, 4e12, "flash")
    (result,) = attention.measure(
        [(64, 1024, 128)], attention.Heads(), found, device=device, dtype=torch.bfloat16, repeats=3
    )
    assert "triton" in result.shared
    assert {"triton copies", "triton reread", "torch flash"} <= set(result.unshared)
    assert 0 < result.error < 2e-2 and result.share < 2
