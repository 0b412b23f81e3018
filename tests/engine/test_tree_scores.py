"""Log-probabilities of a whole tree by an engine, and those of the loss and of the rollout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_module, tiny_tokenizer
from tree_cases import degenerate_trees, random_tree

from treegen import LLM, InputError, SamplingParams, from_module
from treegen.model.load import patch_module
from treegen.prompts.rollout_tree import RolloutTree, tree_of
from treegen.train import tree_logprobs


def check(tree: RolloutTree, top: int = 0, prompt_lengths: list[int] | None = None) -> None:
    """Compare scores with the log-probabilities of the loss, on the very same module."""
    module: Any = tiny_module()
    num_tokens = 0

    def count(_: Any, inputs: tuple[torch.Tensor]) -> None:
        nonlocal num_tokens
        num_tokens += inputs[0].numel()

    with patch_module(module):
        llm = LLM(from_module(module, check=False), tokenizer=tiny_tokenizer(), memory="16MiB")
        hook = module.get_input_embeddings().register_forward_pre_hook(count)
        scores = llm.score(tree, top=top, prompt_lengths=prompt_lengths)
        hook.remove()
    assert num_tokens <= tree.num_tokens
    with torch.no_grad():
        wanted = tree_logprobs(module, tree, prompt_lengths=prompt_lengths)
    for sample, (score, want) in enumerate(zip(scores, wanted, strict=True)):
        start = prompt_lengths[sample] if prompt_lengths else 1
        assert list(score.tokens) == tree.text(sample)[start:]
        torch.testing.assert_close(torch.tensor(score.logprobs), want, atol=1e-5, rtol=0)
        if top:
            assert score.top is not None and score.top.tokens.shape == (len(want), top)
            assert (score.top.logprobs[:, 0] >= score.logprobs).all()


@pytest.mark.parametrize("depth", [1, 3, 6])
def test_scores_of_random_trees_are_the_log_probabilities_of_the_loss(depth: int) -> None:
    check(random_tree(20 + depth, depth=depth), top=3)


@pytest.mark.parametrize("tree", degenerate_trees().values(), ids=degenerate_trees().keys())
def test_scores_of_degenerate_trees(tree: RolloutTree) -> None:
    check(tree)


def test_scores_of_completions_alone() -> None:
    tree = tree_of([[5, 6, 7, *after] for after in ([8, 9], [8, 10, 11], [], [12], [8, 9])])
    check(tree, top=2, prompt_lengths=[3] * 5)


def test_the_log_probabilities_of_a_rollout_are_those_of_the_loss() -> None:
    module: Any = tiny_module()
    prompt = [5, 6, 7, 8]
    with patch_module(module):
        llm = LLM(from_module(module, check=False), tokenizer=tiny_tokenizer(), memory="16MiB")
        params = SamplingParams(
            n=8, max_tokens=12, seed=1, temperature=0.7, logprobs_mode="processed_logprobs"
        )
        samples = llm.generate([prompt], params)[0].outputs
    tree = tree_of([prompt + list(sample.tokens) for sample in samples])
    values = tree_logprobs(module, tree, prompt_lengths=[4] * 8, temperature=0.7)
    for sample, value in zip(samples, values, strict=True):
        torch.testing.assert_close(torch.tensor(sample.logprobs), value.detach(), atol=1e-5, rtol=0)


def test_prompt_lengths_are_for_trees() -> None:
    module = tiny_module()
    llm = LLM(from_module(module, check=False), tokenizer=tiny_tokenizer(), memory="16MiB")
    with pytest.raises(InputError, match="prompt_lengths needs a RolloutTree"):
        llm.score([([5], [6])], prompt_lengths=[1])
    assert llm.score(tree_of([])) == [] and llm.score([]) == []
    with pytest.raises(InputError, match="top must be at least 0"):
        llm.score(tree_of([[]]), top=-1)
