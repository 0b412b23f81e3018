"""Keys and values in FP8: attention to what is stored, writing, copying, memory, whole models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from cli_cases import Command
from devices import DEVICES
from tiny_models import save_tiny_model
from torch import Tensor

from treegen import LLM, Node, SamplingParams
from treegen.errors import InputError
from treegen.model.load import load_model
from treegen.model.options import EngineOptions
from treegen.ops.attention.types import FP8
from treegen.ops.cache.pool import LayerKV, PagedCache, write_kv
from treegen.prompts.plan.cost_model import Sharing

TREE = Node(
    "Question: Ann has 3 apples and Bob has 14.",
    children=[Node(" How many apples", samples=3), Node(" What do they have together?", samples=4)],
)


def _rounded(numbers: Tensor) -> Tensor:
    return numbers.float().clamp(-448, 448).to(FP8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_what_is_written_is_rounded_and_bounded(device: str, kind: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    spread = torch.logspace(-4, 4, 5)[:, None, None]
    k = (torch.randn(5, 3, 8, generator=generator) * spread).to(device, kind)
    v = (torch.randn(5, 3, 6, generator=generator) * spread).to(device, kind)
    keys = torch.zeros(4, 2, 3, 8, device=device).to(FP8)
    values = torch.zeros(4, 2, 3, 6, device=device).to(FP8)
    slots = torch.tensor([7, 0, 3, 2, 5], device=device)
    write_kv(keys, values, slots, k, v)
    for pool, new in ((keys, k), (values, v)):
        found = pool.view(-1, *pool.shape[2:])[slots]
        assert found.float().isfinite().all()
        assert torch.equal(found.float(), _rounded(new).float())
        assert pool.view(-1, *pool.shape[2:])[[1, 4, 6]].float().eq(0).all()


def test_tokens_are_copied_as_they_are() -> None:
    generator = torch.Generator().manual_seed(0)
    pools = [torch.randn(4, 2, 3, 8, generator=generator).to(FP8) for _ in range(2)]
    before = [pool.clone() for pool in pools]
    cache = PagedCache([LayerKV(*pools)], 3, 2)
    cache.copy_tokens(np.array([2, 5]), np.array([7, 3]))
    for pool, old in zip(pools, before, strict=True):
        new, was = (each.view(torch.uint8).view(-1, 3, 8) for each in (pool, old))
        assert torch.equal(new[[7, 3]], was[[2, 5]])


def _drawn(llm: LLM) -> list[list[int]]:
    params = SamplingParams(max_tokens=10, seed=4, ignore_eos=True)
    return [list(c.tokens) for c in llm.run(TREE, params).completions]


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3", "qwen3_next"])
def test_samples_do_not_depend_on_what_is_shared(family: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, family)
    kind = {"kv_cache_dtype": "fp8", "memory": "8MiB", "device": "cpu"}
    found = [
        _drawn(LLM(str(tmp_path), sharing=sharing, max_rows=rows, prefill_chunk=chunk, **kind))  # type: ignore[arg-type]
        for sharing, rows, chunk in (("all", 7, 2048), ("off", 7, 2048), ("auto", 3, 8))
    ]
    assert found[0] == found[1] == found[2]


def test_the_model_computes_with_rounded_keys(tmp_path: Path) -> None:
    """What stock attention gives if each layer's keys and values are rounded before it."""
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def rounding(module, query, key, value, mask, **options):  # type: ignore[no-untyped-def]
        kept = (_rounded(each).to(query.dtype) for each in (key, value))
        return sdpa_attention_forward(module, query, *kept, mask, **options)

    AttentionInterface.register("rounding_keys", rounding)
    save_tiny_model(tmp_path)
    llm = LLM(str(tmp_path), kv_cache_dtype="fp8", memory="8MiB", device="cpu")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="rounding_keys")
    prompt, answer = "Question: Ann has 3 apples", " and Bob has 14. How many?"
    ids = llm.tokenizer(prompt + answer, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        every = stock(ids).logits[0].log_softmax(-1)
    found = llm.score([(prompt, answer)])[0].logprobs
    want = every[:-1].gather(1, ids[0, 1:, None])[-len(found) :, 0].tolist()
    assert found == pytest.approx(want, abs=2e-3)
    plain = LLM(str(tmp_path), memory="8MiB", device="cpu").score([(prompt, answer)])[0].logprobs
    assert found != pytest.approx(plain, abs=2e-3)
    assert found == pytest.approx(plain, abs=1.5)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_gpu_reads_what_is_stored(family: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, family, dtype=torch.bfloat16)
    kind = {"kv_cache_dtype": "fp8", "memory": "64MiB", "device": "cuda"}
    fast = LLM(str(tmp_path), **kind)  # type: ignore[arg-type]
    plain = LLM(str(tmp_path), impl="reference", eager=True, **kind)  # type: ignore[arg-type]
    pairs = [("Question: Ann has 3 apples", " and Bob has 14. How many?")]
    found, want = (np.array(llm.score(pairs)[0].logprobs) for llm in (fast, plain))
    assert np.abs(found - want).max() < 0.3 and np.abs(found - want).mean() < 0.1
    assert len(_drawn(fast)) == len(_drawn(plain)) == 7


@pytest.mark.gpu
def test_reproducible_samples_are_so_with_it() -> None:
    found = []
    ways: list[tuple[Sharing, int]] = [("all", 64), ("off", 64), ("auto", 3)]
    for sharing, rows in ways:
        llm = LLM(
            "demo",
            device="cuda",
            dtype="bfloat16",
            memory="256MiB",
            kv_cache_dtype="fp8",
            reproducible=True,
            sharing=sharing,
            max_rows=rows,
        )
        params = SamplingParams(max_tokens=40, seed=4)
        found.append([(list(c.tokens), c.logprobs) for c in llm.run(TREE, params).completions])
    assert found[0] == found[1] == found[2]


def test_memory_holds_four_times_the_pages_of_float32(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    plain = LLM(str(tmp_path), memory="1MiB", device="cpu")
    small = LLM(str(tmp_path), memory="1MiB", device="cpu", kv_cache_dtype="fp8")
    assert small.spec.kv_bytes_per_token * 4 == plain.spec.kv_bytes_per_token
    assert small.cache.pool.num_pages + 1 == 4 * (plain.cache.pool.num_pages + 1)
    used = {id(pool): pool.nbytes for kv in small.cache.layers for pool in (kv.keys, kv.values)}
    assert sum(used.values()) <= 2**20
    assert {kv.keys.dtype for kv in small.cache.layers} == {FP8}


def test_a_loaded_model_and_a_plan_know_it(tmp_path: Path, treegen: Command) -> None:
    save_tiny_model(tmp_path)
    model = load_model(tmp_path, device="cpu", kv_cache_dtype="fp8")
    assert (model.dtype, model.cache_dtype, model.spec.itemsize) == (torch.float32, FP8, 1)
    arguments = ["plan", "gsm8k", "--model", "demo", "--limit", "2", "--memory", "16MiB"]
    arguments += ["--dtype", "float32"]
    each = []
    for more in ([], ["--kv-cache-dtype", "fp8"]):
        done = treegen(*arguments, *more, "-q")
        each.append(done.document["plans"][0])
    assert each[0]["model"]["kv_bytes_per_token"] == 4 * each[1]["model"]["kv_bytes_per_token"]
    assert each[1]["num_pages"] > 3.9 * each[0]["num_pages"]
    assert each[1]["model"]["kv_cache_dtype"] == "fp8"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype must be auto or fp8"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        EngineOptions(model="demo", **options)  # type: ignore[arg-type]
