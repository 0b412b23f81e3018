"""Whole models whose latents are read by the Gluon kernel, in graphs and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import save_tiny_model

from treegen import LLM, Node, SamplingParams

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
WIDE = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "max_position_embeddings": 2048,
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the number of units of each launch of the kernel."""
    from treegen.ops.attention.gpu import stream_kernels

    counts: list[int] = []
    launch = stream_kernels.launch_stream

    def count(call: Any, units: Any, *rest: Any) -> None:
        counts.append(len(units))
        launch(call, units, *rest)

    monkeypatch.setattr(stream_kernels, "launch_stream", count)
    return counts


def errors_of(path: Path, impl: str, **options: Any) -> np.ndarray:
    """Draw samples below ragged problems; return how far each log-probability is from the score.

    Scores are computed without the kernel that decodes.
    """
    load: dict[str, Any] = {"dtype": "bfloat16", "device": "cuda", "memory": "256MiB"}
    prompts = [[3 + (7 * i + j) % 90 for j in range(13 * i + 1)] for i in range(9)]
    trunk = [3 + i * i % 90 for i in range(300)]
    root = Node(
        trunk, children=[Node(ids, samples=3 + 8 * i, id=str(i)) for i, ids in enumerate(prompts)]
    )
    params = SamplingParams(temperature=1, max_tokens=70, seed=5, logprobs=0, ignore_eos=True)
    llm = LLM(str(path), impl=impl, **load, **options)
    result = llm.run(root, params)
    del llm
    slow = LLM(str(path), impl="triton", eager=True, **load)
    errors = []
    for i, ids in enumerate(prompts):
        samples = result.of(str(i))
        scores = slow.score([(trunk + ids, list(sample.tokens)) for sample in samples])
        for sample, score in zip(samples, scores, strict=True):
            assert len(sample.tokens) == 70
            errors.append(np.subtract(sample.logprobs, score.logprobs))
    return np.array(errors)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("options", [{}, {"eager": True}, {"sharing": "off"}], ids=str)
def test_drawn_tokens_have_the_log_probabilities_of_scores(
    options: dict[str, Any], tmp_path: Path, launches: list[int]
) -> None:
    save_tiny_model(tmp_path, "deepseek_v3", dtype=torch.bfloat16, **WIDE)
    expected = errors_of(tmp_path, "triton", **options)
    assert not launches
    got = errors_of(tmp_path, "gluon", **options)
    assert launches
    # Routers send single tokens of 16-bit models to other experts, so quantiles are compared.
    for quantile in (0.5, 0.9, 0.99):
        limit = 1.5 * np.quantile(np.abs(expected), quantile) + 2e-3
        assert np.quantile(np.abs(got), quantile) <= limit
