"""Sparse attention beyond the keys that a token selects: no sample differs from transformers'."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from engine_cases import generate_greedily, stock_of
from guessing import Always, Knowing, guessed
from latent_cases import load, shared
from tiny_models import EXACT, HYBRID, known, save_tiny_model
from torch import Tensor

from treegen import LLM, Completion, Node, SamplingParams
from treegen.errors import ModelWarning
from treegen.model.checkpoint_report import inspect_checkpoint
from treegen.model.options import EngineOptions
from treegen.ops.attention import key_selection, sparse_attention
from treegen.prompts.plan.cost_model import CostModel
from treegen.search import SearchNode

FAMILIES = [
    "axk2",
    "deepseek_v32",
    "dots3_note_on_text",
    "glm_moe_dsa",
    "hy_v4",
    "hy_v4_vl_on_text",
    "mistral_large4_on_text",
]
NUM = 16
"""Keys that a token selects."""
# With many heads, hardly any two keys have the same score. Which of them stock attention selects on
# a CPU depends on the number of keys after them.
SETTINGS = {"index_topk": NUM, "index_n_heads": 16, "max_position_embeddings": 10 * NUM}
# Prompts of the tree fork inside blocks of 4 tokens, and between them.
BLOCK = 4
_AVERAGED = {"indexer_budget": NUM, "indexer_compress_ratio": BLOCK, "indexer_n_heads": 16}
BLOCKS: dict[str, dict[str, Any]] = {
    "glm5_next_on_text": {"index_topk": NUM, "index_kpool": BLOCK, "index_n_heads": 16},
    "minimax_m3_vl_on_text": {"index_topk_blocks": NUM // BLOCK, "index_block_size": BLOCK},
    "qwen4_exp": _AVERAGED,
    "qwen4_exp_on_text": _AVERAGED,
}
"""Families that select blocks of keys."""
# The layers of qwen4_exp_on_text are those of qwen4_exp.
OWN_BLOCKS = [
    pytest.param(family, marks=pytest.mark.soak) if family == "qwen4_exp_on_text" else family
    for family in BLOCKS
]
STEPS = 7
PARAMS = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
WAYS: dict[str, dict[str, Any]] = {
    "chosen": {},
    "gathered": {"MAX_MASKED": 0},
    "masked": {"MIN_WIDE_ROWS": 1, "MAX_MASKED": 10**9, "_reads_whole": lambda *_: True},
    "expanded": {"MIN_WIDE_ROWS": 2, "MAX_MASKED": 10**9, "rows_to_expand": lambda _: 1},
    "in_pieces": {"MIN_WIDE_ROWS": 2, "MAX_ELEMENTS": 500},
}


def force(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Score and read keys in one way."""
    for name, value in WAYS[way].items():
        for module in (key_selection, sparse_attention):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    # Copies of expanded keys are made for short nodes, and longer rows read latents beside them.
    monkeypatch.setattr(CostModel, "should_expand", lambda *_: way == "expanded")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    @functools.cache
    def save(family: str, **settings: Any) -> Path:
        model_type, _ = (EXACT | HYBRID)[family]
        if not known(model_type):
            pytest.skip(f"this transformers has no {model_type}")
        directory = tmp_path_factory.mktemp(family)
        sizes = {"max_position_embeddings": 10 * NUM, **BLOCKS.get(family, SETTINGS), **settings}
        return save_tiny_model(directory, family, seed=1, **sizes)

    return save


@functools.cache
def stock_logprobs(path: Path, ids: tuple[int, ...]) -> Tensor:
    """Stock log-probabilities after each token of a text, [tokens, vocabulary]."""
    with torch.inference_mode():
        logits: Tensor = stock_of(path)(torch.tensor([ids]), use_cache=False).logits[0]
        return logits.log_softmax(-1)


def check_completion(
    path: Path, prompt: Sequence[int], completion: Completion, limit: float = 1e-5
) -> None:
    """Check that a completion has the tokens and log-probabilities of greedy stock decoding."""
    rows = stock_logprobs(path, (*prompt, *completion.tokens))[len(prompt) - 1 : -1]
    assert list(completion.tokens) == rows.argmax(-1).tolist()
    assert completion.logprobs == pytest.approx(rows.amax(-1).tolist(), abs=limit)


def random_ids(num: int, seed: int = 2) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, 320, (num,), generator=generator).tolist()
    return ids


def ragged(samples: int = 1) -> Node:
    """Prompts of half, all, twice and four times the selected keys; pages of 4 are not full."""
    ids = random_ids(200)
    half = Node(ids[5 : NUM // 2], samples=samples, id="half")
    twice = Node(
        ids[60 : 60 + 2 * NUM - 19],
        children=[
            Node(ids[100:101], samples=samples, id="more than twice"),
            Node(ids[110 : 110 + 2 * NUM], samples=samples, id="four times"),
        ],
        samples=samples,
        id="twice",
    )
    wide = [Node(ids[20 + i : 22 + i], samples=samples, id=f"wide {i}") for i in range(5)]
    all_of = Node(ids[6 : NUM + 1], children=[*wide], samples=samples, id="all")
    long = Node(ids[30:44], children=[twice, Node(ids[:1], samples=samples, id="one")], samples=0)
    return Node(ids[:5], children=[half, all_of, long], samples=0)


def check_tree(llm: LLM, path: Path, limit: float = 1e-5, **params: Any) -> list[Completion]:
    """Check greedy samples of a ragged tree."""
    result = llm.run(ragged(), replace(PARAMS, **params))
    prompts = {request.id: request.tokens.tolist() for request in result.plan.requests}
    assert {NUM // 2, NUM, 2 * NUM, 4 * NUM} <= {len(prompt) for prompt in prompts.values()}
    assert len(result.completions) == len(prompts)
    for completion in result.completions:
        check_completion(path, prompts[completion.prompt_id], completion, limit)
    return list(result.completions)


@pytest.mark.parametrize(
    ("family", "way"),
    [
        *((family, "chosen") for family in FAMILIES),
        *((family, way) for family in FAMILIES[3::3] for way in WAYS if way != "chosen"),
        *((family, way) for family in BLOCKS for way in WAYS if way != "expanded"),
    ],
)
def test_a_ragged_tree_decodes_like_stock_transformers(
    family: str, way: str, saved: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(family)
    force(way, monkeypatch)
    options: dict[str, Any] = {"prefill_chunk": 29, "page_size": 4, "sharing": "all"}
    llm = load(path, check=True, **options) if way == "chosen" else shared(path, **options)
    assert llm.spec.context_length == 10 * NUM and llm.spec.index_topk == NUM
    # Sums in another order; and mistral_large4 multiplies its queries by large numbers.
    wide = way != "chosen" or "mistral_large4" in family
    check_tree(llm, path, 2e-5 if wide else 1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_earlier_keys_come_first_among_equal_scores(
    way: str, saved: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two heads, a quarter of the scores is zero. `torch.topk` takes any of them on a CPU."""
    path = saved("deepseek_v32", index_n_heads=2)
    force(way, monkeypatch)
    llm = shared(path, page_size=4, sharing="all")

    def topk(scores: Tensor, num: int, dim: int = -1, **_: Any) -> Any:
        values, indices = scores.sort(dim=dim, descending=True, stable=True)
        return _TopK(values[..., :num], indices[..., :num])

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", topk)
        check_tree(llm, path, 2e-5)


class _TopK(NamedTuple):
    values: Tensor
    indices: Tensor


@pytest.mark.parametrize("family", OWN_BLOCKS)
def test_a_text_decodes_as_by_generate(family: str, saved: Callable[..., Path]) -> None:
    """transformers selects the same blocks token by token, with a cache, as in a whole text."""
    path = saved(family)
    llm = shared(path, page_size=4)
    for num in (NUM - 1, 2 * NUM, 2 * NUM + 3, 4 * NUM - 2):
        ids = random_ids(num, seed=num)
        (completion,) = llm.generate([ids], replace(PARAMS, max_tokens=2 * BLOCK + 1))[0].outputs
        tokens, logprobs = generate_greedily(stock_of(path), ids, 2 * BLOCK + 1)
        assert completion.tokens == tokens
        assert completion.logprobs == pytest.approx(logprobs, abs=1e-5)


def test_with_more_local_blocks_than_selected_ones_the_context_ends(
    saved: Callable[..., Path],
) -> None:
    """No local block has a score, and transformers then takes any of them."""
    path = saved("minimax_m3_vl_on_text", index_local_blocks=NUM // BLOCK + 1)
    with pytest.warns(
        ModelWarning, match=f"{NUM} tokens instead of {10 * NUM}; .* sparse attention"
    ):
        llm = load(path)
    assert llm.spec.context_length == NUM and not llm.spec.index_topk


@pytest.mark.parametrize("num", [0, 2, NUM // BLOCK])
def test_local_blocks_are_always_selected(num: int, saved: Callable[..., Path]) -> None:
    path = saved("minimax_m3_vl_on_text", index_local_blocks=num)
    check_tree(load(path, page_size=4, sharing="all"), path)


@pytest.mark.parametrize(("heads", "key_heads"), [(1, 2), (4, 2), (2, 4)])
def test_index_heads_select_for_groups_of_heads(
    heads: int, key_heads: int, saved: Callable[..., Path]
) -> None:
    """An index head may select for several key heads, or for a part of the heads of one."""
    path = saved("minimax_m3_vl_on_text", index_n_heads=heads, num_key_value_heads=key_heads)
    check_tree(load(path, page_size=4, sharing="all"), path)


def test_layers_share_selected_blocks_beside_recurrent_layers(tmp_path: Path) -> None:
    if not known("glm5_next"):
        pytest.skip("this transformers has no glm5_next")
    settings: dict[str, Any] = {
        "layer_types": ["linear_attention", *["indexed_attention"] * 3],
        "indexer_types": ["full", "full", "shared", "full"],
        "max_position_embeddings": 10 * NUM,
        **BLOCKS["glm5_next_on_text"],
    }
    path = save_tiny_model(tmp_path, "glm5_next_on_text", seed=1, **settings)
    llm = load(path, page_size=4, sharing="all", check=True)
    assert [layer.index_dim for layer in llm.spec.layers] == [16, 0, 16]
    check_tree(llm, path)


@pytest.mark.parametrize("family", ["glm_moe_dsa", *OWN_BLOCKS])
def test_what_no_token_wrote_is_never_read(family: str, saved: Callable[..., Path]) -> None:
    path = saved(family)
    llm = shared(path, page_size=4, sharing="all", prefill_chunk=29)
    for layer in llm.cache.layers:
        layer.keys.fill_(math.nan)
        if layer.index is not None:
            layer.index.fill_(math.nan)
    check_tree(llm, path, 2e-5)


@pytest.mark.parametrize("family", ["glm_moe_dsa", *OWN_BLOCKS])
def test_few_pages_cached_prefixes_and_drafts(
    family: str, saved: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows lose their pages, start from cached prefixes, and verify drafts."""
    path = saved(family)
    llm = shared(path)
    few = LLM(
        llm.model,
        tokenizer=llm.tokenizer,
        page_size=3,
        max_rows=6,
        memory=70 * 3 * llm.spec.kv_bytes_per_token + 40 * llm.spec.state_bytes,
        prefill_chunk=11,
        sharing="all",
    )
    # How far stock sums over states are from float64 depends on the CPU.
    limit = 4e-5 if llm.spec.states else 2e-5
    want = check_tree(llm, path, limit)
    params = replace(PARAMS, max_tokens=20)
    prompts = {each.id: each.tokens.tolist() for each in few.plan(ragged(), params).requests}
    got: list[Completion] = []
    with few.stream(ragged(), params) as stream:
        for turn in itertools.count():
            if not stream.has_work:
                break
            got += stream.step()
            if turn % 4 == 3:
                stream.scheduler._collect_results()
                stream.scheduler._admission.reclaim_pages()
            stream.scheduler.check()
    assert stream.usage.preemptions and len(got) == len(want)
    for completion in got:
        check_completion(path, prompts[completion.prompt_id], completion, limit)
    if llm.spec.states:
        return  # models with recurrent layers verify no drafts
    monkeypatch.setattr("treegen.engine.speculative.speculation.DraftLengthController", Always)
    drafting = LLM(llm.model, tokenizer=llm.tokenizer, page_size=8, memory="2MiB")
    drafting.keep(llm.tokenizer.decode(random_ids(40, seed=5)))
    result = guessed(drafting, Knowing(want)).run(ragged(), PARAMS)
    assert result.usage.accepted_tokens
    assert [c.tokens for c in result.completions] == [c.tokens for c in want]


@pytest.mark.parametrize("family", ["hy_v4", *OWN_BLOCKS])
def test_scores_and_searches(family: str, saved: Callable[..., Path]) -> None:
    path = saved(family)
    llm = shared(path, page_size=4, max_rows=6, memory="1MiB")
    texts = [random_ids(num, seed=num) for num in (9, 30, 47, 90)]
    pairs = [(ids[:5], ids[5:]) for ids in texts]
    for score, (prompt, text) in zip(llm.score(pairs), pairs, strict=True):
        rows = stock_logprobs(path, (*prompt, *text))[len(prompt) - 1 : -1]
        each = rows.gather(-1, torch.tensor(text)[:, None])[:, 0]
        assert score.logprobs == pytest.approx(each.tolist(), abs=1e-5)

    async def grow(root: SearchNode) -> list[tuple[list[int], SearchNode]]:
        grown = [(texts[1], root.search.prompt(texts[1]))]
        for depth in range(5):
            before, node = grown[2 * depth]
            children = await node.sample(3, max_tokens=8)
            grown += [([*before, *child.tokens], child) for child in children]
        return grown[1:]

    (result,) = llm.search(grow, ["Q"], SamplingParams(seed=1, ignore_eos=True))
    grown: Any = result.value
    # In transformers, recurrent layers compute a whole text by other formulas than single tokens.
    limit = 2e-5 if llm.spec.states else 1e-5
    for text, node in grown:
        rows = stock_logprobs(path, tuple(text))[-len(node.tokens) - 1 : -1]
        each = rows.gather(-1, torch.tensor(node.tokens)[:, None])[:, 0]
        assert node.logprobs == pytest.approx(each.tolist(), abs=limit)
    assert max(len(text) for text, _ in grown) > 3 * NUM


@pytest.mark.parametrize(
    ("family", "dims"),
    [
        # Two of three layers have an indexer. The third one uses the keys that an earlier one
        # selects.
        ("glm_moe_dsa", [8, 0, 8]),
        # Two of four layers have index keys and their gates. The other two are recurrent.
        ("glm5_next_on_text", [16, 16]),
        ("minimax_m3_vl_on_text", [0, 8, 8]),
        ("qwen4_exp", [8]),
    ],
)
def test_a_token_takes_its_index_keys_too(
    family: str, dims: list[int], saved: Callable[..., Path]
) -> None:
    path = saved(family)
    llm = shared(path)
    report = inspect_checkpoint(EngineOptions(model=str(path), device="cpu"))
    stored = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for layer in llm.cache.layers
        for tensor in (layer.keys, layer.values, layer.index)
        if tensor is not None
    }
    pool = llm.cache.pool
    allocated = sum(stored.values()) / ((pool.num_pages + 1) * llm.cache.page_size)
    plan = llm.plan(ragged(2), PARAMS)
    document = report.document
    assert allocated == plan.token_bytes == document["kv_bytes_per_token"]
    assert [layer.index_dim for layer in llm.spec.layers] == dims
    assert document["index_bytes_per_token"] == llm.spec.index_bytes_per_token == 4 * sum(dims)
    assert document["index_topk"] == NUM
    stored_keys = f"index keys: {4 * sum(dims)} B a token, by which a token selects 16 keys"
    assert stored_keys in str(report)


def test_with_as_many_selected_keys_as_the_context_has_nothing_is_stored(
    saved: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved("glm_moe_dsa", index_topk=10 * NUM)
    llm = load(path)
    assert llm.spec.index_topk == llm.spec.index_bytes_per_token == 0
    assert all(layer.index is None for layer in llm.cache.layers)
    monkeypatch.setattr(key_selection, "select_keys", None)
    check_tree(llm, path)


def test_short_texts_are_read_like_those_of_other_models(
    saved: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a row that sees more keys than it selects, nothing is scored."""
    path = saved("deepseek_v32", index_topk=5 * NUM)
    monkeypatch.setattr(key_selection, "_score_rows", None)
    check_tree(load(path), path)


@pytest.mark.parametrize("family", ["deepseek_v32", *OWN_BLOCKS])
def test_index_keys_in_fp8(
    family: str, saved: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded index keys select most of the keys that exact ones select."""
    path = saved(family)
    plain, small = shared(path), load(path, kv_cache_dtype="fp8")
    assert 4 * small.spec.kv_bytes_per_token == plain.spec.kv_bytes_per_token
    prompt = Node(random_ids(6 * NUM), samples=1)

    def select(llm: LLM) -> Tensor:
        """Return a mask of the keys that rows of the first layer select, [rows, keys]."""
        selections: list[Tensor] = []
        stock = key_selection.select_keys

        def record(*args: Any) -> Tensor:
            selections.append(stock(*args))
            return selections[-1]

        with monkeypatch.context() as patch:
            patch.setattr("treegen.model.indexer.select_keys", record)
            llm.run(prompt, replace(PARAMS, max_tokens=1))
        positions_TS = selections[0][2 * NUM :].long()
        mask_TL = positions_TS.new_zeros((*positions_TS.shape[:-1], 6 * NUM + 1), dtype=torch.bool)
        return mask_TL.scatter_(-1, positions_TS % (6 * NUM + 1), True)[..., :-1]

    want_TL, got_TL = select(plain), select(small)
    assert want_TL.sum() == got_TL.sum() and abs(want_TL.sum(-1) - NUM).max() < BLOCK
    # A random selection shares a third of the keys with another one.
    share = ((want_TL & got_TL).sum() / want_TL.sum()).item()
    assert 0.85 < share < 1, share


@pytest.mark.gpu
@pytest.mark.parametrize("family", [*FAMILIES, *BLOCKS])
def test_a_gpu_selects_the_same_keys(family: str, saved: Callable[..., Path]) -> None:
    path = saved(family)
    for sharing, eager in (("all", False), ("all", True), ("off", False)):
        llm = load(path, device="cuda", dtype="float32", page_size=16, sharing=sharing, eager=eager)
        check_tree(llm, path, 1e-4)
