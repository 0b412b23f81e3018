"""Models that two processes compute together draw and score as one process does."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from engine_cases import FEW_SHOT, QUESTIONS, tree_of
from gathering_ranks import gather_one_column, load_in_order
from guessing import Always, Knowing, guessed
from transformers import AutoConfig

from treegen import LLM, SamplingParams
from treegen.common.outputs import Completion
from treegen.engine.compute.model_runner import ModelRunner
from treegen.errors import InputError, ModelError
from treegen.model.config import load_spec
from treegen.model.load import load_model
from treegen.model.rank_processes import RankGroup
from treegen.prompts.plan.cost_model import CostModel
from treegen.search import SearchNode

PAIRS = [("Q: Ann has", " 3 apples"), ("Q: Ann has", " 14 pens"), ("", "Ann")]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {},  # windows, soft caps, also of logits
    "gemma": {"tie_word_embeddings": True},
    "mistral_swa": {"vocab_size": 321},  # which two do not divide
    "phi3": {},  # attention is whole on each rank
    "olmo2": {},
    "mixtral": {},
    "qwen3_moe": {},
    "deepseek_v3": {},
    "granitemoe": {},
    "gpt_neox": {},
    "gemma3_on_text": {},
}


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    """Two processes, which load one model after another."""
    with RankGroup(2, "cpu") as group:
        yield group


def load(group: RankGroup, path: Path) -> LLM:
    model = group.load(partial(load_model, str(path)))
    return LLM(model, tokenizer=tiny_models.tiny_tokenizer(), memory="4MiB", max_rows=16)


def alone(path: Path) -> LLM:
    return LLM(str(path), device="cpu", memory="4MiB", max_rows=16)


def tokens_of(completions: tuple[Completion, ...]) -> list[tuple[int, ...]]:
    return [completion.tokens for completion in completions]


TOLERANCE = 2e-5  # each side is rounded by its own order of sums
STRUCTURED = find_spec("llguidance") is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_draw_and_score_as_one_process(
    family: str, group: RankGroup, tmp_path: Path
) -> None:
    tiny_models.save_tiny_model(tmp_path, family, **FAMILIES[family])
    if not AutoConfig.from_pretrained(tmp_path).get_text_config().base_model_tp_plan:
        pytest.skip(f"this transformers has no tensor-parallel plan for {family}")
    one, two = alone(tmp_path), load(group, tmp_path)
    all_params = [
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
        SamplingParams(max_tokens=8, seed=3, top_p=0.9, top_k=50, min_p=0.01, logprobs=2),
    ]
    if family == "llama":  # in the other families, ranks draw from their logits in the same way
        all_params += [
            SamplingParams(max_tokens=12, seed=3),
            SamplingParams(max_tokens=8, seed=3, frequency_penalty=1.5, no_repeat_ngram_size=2),
            SamplingParams(max_tokens=8, seed=3, regex="([ab]{2}|[0-9]+)x" if STRUCTURED else None),
        ]
    for params in all_params:
        want, got = one.run(tree_of(2), params), two.run(tree_of(2), params)
        assert tokens_of(got.completions) == tokens_of(want.completions)
        for actual, expected in zip(got.completions, want.completions, strict=True):
            assert actual.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    for score, expected_score in zip(two.score(PAIRS), one.score(PAIRS), strict=True):
        assert score.tokens == expected_score.tokens
        assert score.logprobs == pytest.approx(expected_score.logprobs, abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "phi3"])
def test_products_in_one_order_are_added_up_too(
    family: str, group: RankGroup, tmp_path: Path
) -> None:
    tiny_models.save_tiny_model(tmp_path, family)
    want = alone(tmp_path).run(tree_of(3), SamplingParams(max_tokens=12, seed=3))
    model = group.load(partial(load_in_order, str(tmp_path)))
    assert any(getattr(part, "product", None) is not None for part in model.module.modules())
    two = LLM(model, tokenizer=tiny_models.tiny_tokenizer(), memory="4MiB", max_rows=16)
    got = two.run(tree_of(3), SamplingParams(max_tokens=12, seed=3))
    for actual, expected in zip(got.completions, want.completions, strict=True):
        assert actual.tokens == expected.tokens
        assert actual.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


_TOGETHER: list[dict[str, Any]] = [
    {"temperature": 0, "repetition_penalty": 1.7, "prompt_logprobs": 3},
    {"presence_penalty": 1.0, "frequency_penalty": -0.5, "bad_words": ["a"], "logprobs": 2},
    {"no_repeat_ngram_size": 2, "top_p": 0.9, "prompt_logprobs": 1},
    {"reasoning_tags": ("?", "Bob"), "max_thinking_tokens": 3, "thinking_end": "Bob"},
    *([{"regex": "([ab]{2}|[0-9]+){1,4}x", "frequency_penalty": 0.7}] * STRUCTURED),
]


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("how", ["plain", "guesses"])
def test_two_ranks_where_samples_have_everything(
    family: str, how: str, group: RankGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties, grammars, budgets and log-probabilities of prompts, with few pages."""
    monkeypatch.setattr("treegen.engine.speculative.speculation.DraftLengthController", Always)
    tiny_models.save_tiny_model(tmp_path, family)
    params = [
        SamplingParams(n=3, seed=5 + i, max_tokens=24, **each) for i, each in enumerate(_TOGETHER)
    ]
    prompts = [f"{FEW_SHOT}{QUESTIONS[i % 3]}" for i in range(len(params))]
    one = alone(tmp_path)
    model = group.load(partial(load_model, str(tmp_path)))
    pages = 60 * 16 * one.spec.kv_bytes_per_token
    two = LLM(
        model,
        tokenizer=tiny_models.tiny_tokenizer(),
        memory=pages,
        max_rows=7,
        page_size=4,
        run_ahead=how == "plain",
    )
    want = one.generate(prompts, params)
    if how == "guesses":
        guessed(two, Knowing([c for each in want for c in each]))
    for actual, expected in zip(chain(*two.generate(prompts, params)), chain(*want), strict=True):
        assert actual.tokens == expected.tokens and actual.thinking == expected.thinking
        assert actual.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)
        scores, expected_scores = actual.prompt_logprobs, expected.prompt_logprobs
        assert (scores is None) == (expected_scores is None)
        if (
            scores is not None
            and expected_scores is not None
            and scores.top
            and expected_scores.top
        ):
            assert scores.logprobs == pytest.approx(expected_scores.logprobs, abs=TOLERANCE)
            assert scores.top.logprobs == pytest.approx(expected_scores.top.logprobs, abs=TOLERANCE)
    pairs = [(context, text) for context, text in PAIRS if context]
    for score, expected_score in zip(two.score(pairs, top=4), one.score(pairs, top=4), strict=True):
        assert score.top is not None and expected_score.top is not None
        assert score.top.logprobs == pytest.approx(expected_score.top.logprobs, abs=TOLERANCE)


def test_each_rank_has_a_part_of_the_heads_and_of_the_cache(
    group: RankGroup, tmp_path: Path
) -> None:
    tiny_models.save_tiny_model(tmp_path)
    two = load(group, tmp_path)
    assert [layer.kv_heads for layer in two.spec.layers] == [1, 1]
    assert two.spec == load_spec(tmp_path, ranks=2)
    assert 2 * two.spec.kv_bytes_per_token == load_spec(tmp_path).kv_bytes_per_token
    weights = dict(two.model.module.named_parameters())
    assert weights["model.layers.0.self_attn.q_proj.weight"].shape == (16, 32)
    assert weights["model.layers.0.mlp.down_proj.weight"].shape == (32, 24)
    assert weights["lm_head.weight"].shape == (160, 32)


def test_a_tied_output_matrix_takes_no_memory(group: RankGroup, tmp_path: Path) -> None:
    tiny_models.save_tiny_model(tmp_path, tie_word_embeddings=True)
    module = load(group, tmp_path).model.module
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    assert head.weight.untyped_storage().data_ptr() == embedding.weight.untyped_storage().data_ptr()


def test_searches_preemption_cancelling_and_kept_prefixes(group: RankGroup, tmp_path: Path) -> None:
    """Whatever rank 0 decides, the other one computes the same passes."""
    tiny_models.save_tiny_model(tmp_path)

    async def search(root: SearchNode) -> list[str]:
        children = await root.sample(4, max_tokens=6)
        best = max(children, key=lambda child: child.logprob)
        deeper = await best.sample(2, max_tokens=5)
        return [node.text for node in (*children, *deeper)]

    drawn = []
    for llm in (alone(tmp_path), load(group, tmp_path)):
        found = llm.search(search, QUESTIONS, SamplingParams(seed=5, max_tokens=6))
        texts = [result.value for result in found]
        with llm.keep(FEW_SHOT):
            kept = llm.run(tree_of(6), SamplingParams(max_tokens=40, seed=2, ignore_eos=True))
        stream = llm.stream(tree_of(6), SamplingParams(max_tokens=30, seed=2, ignore_eos=True))
        for _ in range(12):
            stream.step()
        stream.cancel("0", 1)
        stream.cancel("1")
        rest = sorted((c.prompt_id, c.sample_index, c.tokens) for c in stream)
        drawn.append((texts, tokens_of(kept.completions), rest))
    assert drawn[0] == drawn[1]


def test_run_ahead_and_compiled_layers(group: RankGroup, tmp_path: Path) -> None:
    tiny_models.save_tiny_model(tmp_path)
    params = SamplingParams(max_tokens=20, seed=3)
    want = alone(tmp_path).run(tree_of(3), params)
    model = group.load(partial(load_model, str(tmp_path)))
    llm = LLM(model, tokenizer=tiny_models.tiny_tokenizer(), memory="4MiB", run_ahead=True)
    assert tokens_of(llm.run(tree_of(3), params).completions) == tokens_of(want.completions)


def test_guessed_tokens(group: RankGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treegen.engine.speculative.speculation.DraftLengthController", Always)
    tiny_models.save_tiny_model(tmp_path, "llama")
    params = SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
    plain = alone(tmp_path).run(tree_of(4), params)
    two = load(group, tmp_path)
    again = guessed(two, Knowing(plain.completions)).run(tree_of(4), params)
    assert tokens_of(again.completions) == tokens_of(plain.completions)
    assert again.usage.tokens_per_step > 1.4
    ngrams = guessed(two, "ngram").run(tree_of(4), params)
    assert tokens_of(ngrams.completions) == tokens_of(plain.completions)


@pytest.mark.parametrize(
    ("family", "settings", "size", "message"),
    [
        ("gpt2", {}, 2, "gpt2 models cannot be divided among GPUs: transformers has no tensor-p"),
        ("dbrx", {}, 2, "dbrx models cannot be divided among GPUs: transformers has no tensor-pa"),
        ("gemma3n", {}, 2, "its layers compute statistics over all activations"),
        (
            "cohere",
            {},
            2,
            "cohere models cannot be divided among 2 GPUs: the forward pass of a shard failed",
        ),
        ("llama", {}, 3, "llama models cannot be divided among 3 GPUs: .*q_proj \\(4\\) is not"),
        ("llama", {"intermediate_size": 45}, 2, "width of .* \\(45\\) is not divisible by 2"),
        ("qwen3_5", {}, 2, "they have recurrent layers; use one GPU"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_processes_start(
    family: str, settings: dict[str, Any], size: int, message: str, tmp_path: Path
) -> None:
    tiny_models.save_tiny_model(tmp_path, family, **settings)
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(ModelError, match=message):
        LLM(str(tmp_path), device="cpu", tensor_parallel_size=size)


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    tiny_models.save_tiny_model(tmp_path)
    with pytest.raises(InputError, match="tensor_parallel_size must be"):
        LLM(str(tmp_path), device="cpu", tensor_parallel_size=0)


def test_columns_that_ranks_gather_are_dense(group: RankGroup) -> None:
    """Kernels read them by their sizes alone, and the compiler counts on it."""
    gathered: Any = group.load(gather_one_column)
    assert gathered.is_contiguous()
    assert gathered.tolist() == [[[0, 10], [1, 11], [2, 12]], [[3, 13], [4, 14], [5, 15]]]


def test_a_second_group_in_one_process_is_refused(group: RankGroup) -> None:
    with pytest.raises(InputError, match="this process already has a tensor-parallel model"):
        RankGroup(2, "cpu")


def test_ranks_read_copies_of_latents(
    group: RankGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads are divided, latents are not; each rank makes the copies of its own heads."""
    monkeypatch.setattr(CostModel, "should_expand", lambda *_: True)
    tiny_models.save_tiny_model(tmp_path, "minicpm3")
    one = alone(tmp_path)
    model = group.load(partial(load_model, str(tmp_path)))
    two = LLM(
        model, tokenizer=tiny_models.tiny_tokenizer(), memory="4MiB", max_rows=16, sharing="all"
    )
    assert two.spec.kv_bytes_per_token == one.spec.kv_bytes_per_token
    assert two.spec.latent is not None and two.spec.latent.heads == 2
    copied: list[int] = []
    write = ModelRunner.write_copies

    def noted(self: ModelRunner, slots: Any, targets: Any) -> None:
        copied.append(len(slots))
        write(self, slots, targets)

    monkeypatch.setattr(ModelRunner, "write_copies", noted)
    params = SamplingParams(max_tokens=12, seed=3)
    want, got = one.run(tree_of(3), params), two.run(tree_of(3), params)
    assert tokens_of(got.completions) == tokens_of(want.completions) and copied
    for actual, expected in zip(got.completions, want.completions, strict=True):
        assert actual.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)
