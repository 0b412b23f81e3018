"""The GPU's kernels where two processes compute a model, in Triton's interpreter on a CPU.

Run it as `TRITON_INTERPRET=1 pytest tests/model/test_tensor_parallel_kernels.py`.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

from treegen import LLM, Node, SamplingParams
from treegen.model.load import load_model
from treegen.model.rank_processes import RankGroup

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or torch.cuda.is_available(),
    reason="for TRITON_INTERPRET=1 without a GPU",
)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("gemma2", {"vocab_size": 321}),  # which two do not divide
        ("llama", {"vocab_size": 9000}),  # more than one block of the draws' kernel
    ],
)
def test_two_ranks_attend_and_draw_in_parts(
    family: str, settings: dict[str, Any], group: RankGroup, tmp_path: Path
) -> None:
    tiny_models.save_tiny_model(tmp_path, family, **settings)
    leaves = [Node(text, samples=2, id=text) for text in ("Q: Bob has 2 caps.\nA:", "Q: Cy?\nA:")]
    tree = Node("Q: Ann has 3 apples.\n", children=leaves)
    one = LLM(str(tmp_path), device="cpu", memory="4MiB")
    model = group.load(partial(load_model, str(tmp_path), impl="triton"))
    two = LLM(model, tokenizer=tiny_models.tiny_tokenizer(), memory="4MiB", run_ahead=True)
    for params in (
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
        SamplingParams(max_tokens=5, seed=3),
    ):
        want, got = one.run(tree, params), two.run(tree, params)
        assert got.usage.impl == "triton"
        for actual, expected in zip(got.completions, want.completions, strict=True):
            assert actual.tokens == expected.tokens
            assert actual.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
