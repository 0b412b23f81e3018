"""New weights of a loaded model: which fit, and what stays when they do not."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from engine_cases import load
from safetensors.torch import load_file
from tiny_models import save_tiny_model, tiny_tokenizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from treegen import LLM, SamplingParams
from treegen.bench.shapes import build_model, shape_of
from treegen.errors import CapacityError, InputError, ModelError
from treegen.model.linear.merged import MergedLinears
from treegen.model.load import from_module, load_model
from treegen.model.scorers.heads import as_tree_model
from treegen.model.training import weight_updates
from treegen.model.training.weight_updates import stage_weights

PROMPT = "Q: Ann has 3 apples and Bob 14."
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [save_tiny_model(tmp_path_factory.mktemp("llama"), seed=seed) for seed in (0, 1)]


def draws(llm: LLM) -> Any:
    (completion,) = llm.generate(PROMPT, GREEDY)[0]
    return completion.tokens, completion.logprobs, completion.top_logprobs


def stock_of(path: Path) -> Any:
    return load_model(path, check=False, device="cpu").module


def in_ddp(module: Any) -> DistributedDataParallel:
    """A module in DDP, without other processes."""
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = module
    return wrapped


@pytest.mark.parametrize(
    "form", ["module", "wrapped", "pairs", "dict", "path", "bfloat16", "checkpoint"]
)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_every_form_of_weights_gives_a_freshly_loaded_model(
    form: str, family: str, tmp_path: Path
) -> None:
    old, new = (save_tiny_model(tmp_path / str(seed), family, seed=seed) for seed in (0, 1))
    llm, fresh = load(old), load(new)
    stock: Any = stock_of(new)
    weights: Any = {
        "module": stock,
        "wrapped": in_ddp(torch.compile(stock)),
        "pairs": stock.named_parameters(),
        "dict": dict(stock.state_dict()),
        "path": new,
        "bfloat16": {name: weight.bfloat16() for name, weight in stock.named_parameters()},
        "checkpoint": load_file(new / "model.safetensors"),
    }[form]
    if form == "bfloat16":
        fresh.update({name: weight.float() for name, weight in weights.items()})
    assert draws(llm) != draws(fresh)
    assert llm.update(weights) == 1 == llm.weights_version
    assert draws(llm) == draws(fresh)
    assert llm.fingerprint == (fresh.fingerprint if form == "path" else "")


def failing(stock: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for place, pair in enumerate(stock.named_parameters()):
        if place == 3:
            raise OSError("the trainer is gone")
        yield pair


def reusing(stock: Any) -> Iterator[tuple[str, torch.Tensor]]:
    memory = torch.empty(20_000)
    for name, weight in stock.named_parameters():
        yield name, memory[: weight.numel()].view(weight.shape).copy_(weight)


def without(stock: Any, name: str) -> dict[str, Any]:
    return {other: weight for other, weight in stock.named_parameters() if other != name}


def changed(stock: Any, name: str, change: Callable[[Any], Any]) -> dict[str, Any]:
    weights = dict(stock.named_parameters())
    return {**weights, name: change(weights[name])}


NORM = "model.norm.weight"
WRONG: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "missing": (lambda m: without(m, NORM), InputError, "have no model.norm.weight"),
    "unknown": (lambda m: {**dict(m.named_parameters()), "x": m.lm_head.weight}, InputError, "x"),
    "shape": (
        lambda m: changed(m, NORM, lambda w: w[:-1]),
        InputError,
        r"must have shape \[32\], got \[31\]",
    ),
    "type": (lambda m: changed(m, NORM, lambda w: w.int()), InputError, "int32"),
    "meta": (lambda m: changed(m, NORM, lambda w: w.to("meta")), InputError, "on meta"),
    "sparse": (
        lambda m: changed(m, NORM, lambda w: w.to_sparse()),
        InputError,
        "must be a dense tensor",
    ),
    "complex": (
        lambda m: changed(m, NORM, lambda w: w.to(torch.complex64)),
        InputError,
        "at least 16 bits, got torch.complex64",
    ),
    "no name": (lambda m: {3: m.lm_head.weight}, InputError, "must be strings, got 3"),
    "no tensor": (
        lambda m: changed(m, NORM, lambda w: w.tolist()),
        InputError,
        "must be a tensor, got list",
    ),
    "twice": (lambda m: [*m.named_parameters(), *m.named_parameters()], InputError, "two tensors"),
    "no pairs": (lambda m: list(m.parameters()), InputError, "pairs"),
    "number": (lambda m: 3, InputError, "got int"),
    "raises": (failing, OSError, "gone"),
    "reuses": (reusing, InputError, "yield clones"),
    "part": (lambda m: m.model, InputError, "no weights with these names"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_failed_update_changes_nothing(wrong: str, paths: list[Path]) -> None:
    llm = load(paths[0])
    make, kind, message = WRONG[wrong]
    llm.keep(PROMPT, name="kept")
    want = draws(llm)
    with pytest.raises(kind, match=message):
        llm.update(make(stock_of(paths[1])))
    assert draws(llm) == want and not llm.weights_version
    assert llm.list_prefixes()[0][0] == "kept" and llm.fingerprint


def test_files_that_cannot_be_used_change_nothing(paths: list[Path], tmp_path: Path) -> None:
    llm = load(paths[0])
    want = draws(llm)
    broken = shutil.copytree(paths[1], tmp_path / "broken")
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    other = save_tiny_model(tmp_path / "other", "qwen2")
    for path in (broken, tmp_path / "absent", other):
        with pytest.raises((InputError, ModelError)):
            llm.update(path)
    assert draws(llm) == want


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("rope_parameters", {"rope_type": "default", "rope_theta": 77.0}),
        ("rms_norm_eps", 1e-5),
        ("hidden_act", "gelu"),
        ("model_type", "mistral"),
    ],
)
def test_a_checkpoint_with_other_settings_changes_nothing(
    setting: str, value: Any, paths: list[Path], tmp_path: Path
) -> None:
    """Its tensors fit, but the layers would compute something else from them."""
    llm, other = load(paths[0]), shutil.copytree(paths[1], tmp_path / "other")
    want, file = draws(llm), other / "config.json"
    config = json.loads(file.read_text())
    neutral = {"use_cache": False, "eos_token_id": [1, 2], "attention_dropout": 0.1}
    file.write_text(json.dumps({**config, **neutral, setting: value}))
    with pytest.raises(InputError, match=f"config.json has {setting} .*of the same model"):
        llm.update(other)
    assert draws(llm) == want and not llm.weights_version
    file.write_text(json.dumps({**config, **neutral}))
    assert llm.update(other) == 1 and draws(llm) == draws(load(paths[1]))


@pytest.mark.parametrize("is_adapted", [False, True])
def test_a_module_with_other_settings_changes_nothing(is_adapted: bool, paths: list[Path]) -> None:
    llm = load(paths[0])
    want = draws(llm)
    for setting, value in (("rms_norm_eps", 1e-5), ("hidden_act", "gelu")):
        stock = stock_of(paths[1])
        setattr(stock.config, setting, value)
        if is_adapted:
            stock = peft.get_peft_model(stock, peft.LoraConfig(target_modules=["q_proj"]))
        with pytest.raises(InputError, match=f"module's config has {setting} .*of the same model"):
            llm.update(stock)
    assert draws(llm) == want and not llm.weights_version
    stock = stock_of(paths[1])
    stock.config.use_cache, stock.config.attention_dropout = False, 0.1
    assert llm.update(stock) == 1 and draws(llm) == draws(load(paths[1]))


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("form", ["module", "dict", "bfloat16", "path"])
@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_numbers_that_are_not_finite_change_nothing(
    number: float, form: str, quantization: str, paths: list[Path], tmp_path: Path
) -> None:
    llm = load(paths[0], quantization=quantization)
    want, name = draws(llm), "model.layers.1.mlp.up_proj.weight"
    stock = stock_of(paths[1])
    with torch.no_grad():
        stock.get_parameter(name)[3, 5] = number
    stock.save_pretrained(tmp_path)
    weights = {
        "module": stock,
        "dict": dict(stock.named_parameters()),
        "bfloat16": ((each, weight.bfloat16()) for each, weight in stock.named_parameters()),
        "path": tmp_path,
    }
    with pytest.raises(InputError, match=f"{name} has values that are not finite"):
        llm.update(weights[form])
    assert draws(llm) == want and not llm.weights_version


def test_a_model_with_such_numbers_takes_others_in_the_same_tensor(paths: list[Path]) -> None:
    """As in the row of a token that nothing uses."""
    llm, stock = load(paths[0]), stock_of(paths[1])
    with torch.inference_mode():
        llm.model.module.get_parameter("model.embed_tokens.weight")[319] = torch.inf
    weights = changed(stock, "model.embed_tokens.weight", lambda w: w.detach().clone())
    weights["model.embed_tokens.weight"][319] = torch.nan
    with pytest.raises(InputError, match=r"lm_head\.weight has values that are not finite"):
        llm.update({**weights, "lm_head.weight": weights["lm_head.weight"] * torch.nan})
    assert llm.update(weights) == 1 and draws(llm) == draws(load(paths[1]))
    assert load(paths[0]).update(weights, check_finite=False) == 1


def test_there_is_no_other_cache_mode(paths: list[Path]) -> None:
    with pytest.raises(InputError, match="cache must be one of keep, shared, all"):
        load(paths[0]).update(stock_of(paths[1]), cache="none")  # type: ignore[arg-type]


def test_an_interrupted_update_stops_sampling_until_the_next(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, stock = load(paths[0]), stock_of(paths[1])
    copied: list[int] = []
    stock_copy = torch.Tensor.copy_

    def copy(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        copied.append(1)
        if len(copied) == 5:
            raise KeyboardInterrupt
        return stock_copy(self, other)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", copy)
        with pytest.raises(KeyboardInterrupt):
            llm.update(stock)
    with pytest.raises(ModelError, match="interrupted"):
        draws(llm)
    llm.update(stock)
    assert draws(llm) == draws(load(paths[1]))


@pytest.mark.parametrize("mode", ["keep", "shared", "all"])
def test_an_update_of_replaced_weights_writes_nothing(mode: Any, paths: list[Path]) -> None:
    llm = load(paths[0])
    llm.model.watch_weights()
    want = draws(llm)
    norm = llm.model.module.get_submodule("model.norm")
    before, norm.weight = norm.weight, nn.Parameter(norm.weight.detach().clone())
    with pytest.raises(ModelError, match="were replaced"):
        llm.update(stock_of(paths[1]), cache=mode)
    norm.weight = before
    assert draws(llm) == want and not llm.weights_version


def test_tied_weights_are_given_once_or_equal(tmp_path: Path) -> None:
    old, new = (
        save_tiny_model(tmp_path / str(seed), seed=seed, tie_word_embeddings=True)
        for seed in (0, 1)
    )
    llm, stock = load(old), stock_of(new)
    assert "lm_head.weight" not in dict(stock.named_parameters())
    llm.update(stock.named_parameters())
    assert draws(llm) == draws(load(new))
    with pytest.raises(InputError, match="differ"):
        llm.update({**stock.state_dict(), "lm_head.weight": torch.zeros(320, 32)})


def test_fp8_matrices_are_rounded_again(tmp_path: Path) -> None:
    cases: dict[str, dict[str, Any]] = {"llama": {}, "mixtral": {"intermediate_size": 64}}
    for family, sizes in cases.items():
        old, new = (
            save_tiny_model(tmp_path / f"{family}{seed}", family, seed=seed, **sizes)
            for seed in (0, 1)
        )
        llm, fresh = (load(path, quantization="fp8") for path in (old, new))
        llm.update(stock_of(new))
        assert draws(llm) == draws(fresh)


def test_weights_that_do_not_fit_next_to_the_old_ones_change_nothing(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load(paths[0], quantization="fp8")
    want = draws(llm)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(weight_updates, "quantize_in_chunks", fail)
    with pytest.raises(CapacityError, match=r"cpu has no memory left .* pass the weights on the"):
        llm.update(stock_of(paths[1]))
    assert draws(llm) == want and not llm.weights_version


def test_merged_layers_get_their_slices(paths: list[Path]) -> None:
    llm, stock = load(paths[0]), stock_of(paths[1])
    module = llm.model.module
    once = SamplingParams(temperature=0, max_tokens=1)
    merged = MergedLinears(module, lambda: llm.generate(PROMPT, once))
    assert len(merged._parts) == 10
    llm.update(stock)
    fresh = load(paths[1])
    want = draws(fresh)
    got = draws(llm)
    assert got[0] == want[0] and got[1] == pytest.approx(want[1], abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "mixtral", "bamba"])
def test_compiled_layers_read_the_new_weights(family: str, tmp_path: Path) -> None:
    old, new = (save_tiny_model(tmp_path / str(seed), family, seed=seed) for seed in (0, 1))
    llm = load(old)
    states = llm.cache.states.layers if llm.cache.states is not None else ()
    llm.model.compile_layers(llm.cache.layers, states, backend="eager")
    draws(llm)
    assert not llm.model.uncompiled_because
    llm.update(stock_of(new))
    got, want = draws(llm), draws(load(new))
    assert not llm.model.uncompiled_because
    assert got[0] == want[0] and got[1] == pytest.approx(want[1], abs=1e-4)


@pytest.mark.parametrize("trains_base", [False, True])
def test_adapters_of_a_module_are_merged(trains_base: bool, paths: list[Path]) -> None:
    llm = load(paths[0])
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj", "embed_tokens"], r=4)
    torch.manual_seed(0)
    trained: Any = peft.get_peft_model(stock_of(paths[1]), config)
    for name, weight in trained.named_parameters():
        if "lora_" in name:
            nn.init.normal_(weight, std=0.1)
    if trains_base:  # the LLM of a trainer's module, which has the adapter too
        base = trained.get_base_model()
        served = LLM(from_module(base, check=False), tokenizer=tiny_tokenizer(), memory="8MiB")
        want = draws(served)
        assert served.update(trained) == 1 and draws(served) == want
    llm.update(trained)
    merged = trained.merge_and_unload()
    fresh = load(paths[1])
    fresh.update(merged)
    got, want = draws(llm), draws(fresh)
    assert got[0] == want[0] and got[1] == pytest.approx(want[1], abs=1e-5)


OTHER_ADAPTERS: dict[str, tuple[str, Any, str]] = {
    "a saved head": (
        "llama",
        peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]),
        "adapter of lm_head is not plain LoRA",
    ),
    "rows of the embedding": (
        "llama",
        peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[5]),
        "embed_tokens.* is not plain LoRA",
    ),
    "DoRA": (
        "llama",
        peft.LoraConfig(target_modules=["q_proj"], use_dora=True),
        "q_proj is not plain LoRA",
    ),
    "experts": (
        "mixtral",
        peft.LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"]),
        "experts is not plain LoRA",
    ),
    "LoHa": ("llama", peft.LoHaConfig(target_modules=["q_proj"]), "q_proj is not plain LoRA"),
    "VeRA": ("llama", peft.VeraConfig(target_modules=["q_proj"]), "q_proj is not plain LoRA"),
    "IA3": (
        "llama",
        peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
        "k_proj is not plain LoRA",
    ),
    "a prompt": (
        "llama",
        peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        "prompt learning adapters",
    ),
}


@pytest.mark.parametrize("case", OTHER_ADAPTERS)
def test_adapters_that_are_not_merged_change_nothing(case: str, tmp_path: Path) -> None:
    family, config, message = OTHER_ADAPTERS[case]
    old, new = (save_tiny_model(tmp_path / str(seed), family, seed=seed) for seed in (0, 1))
    llm, trained = load(old), peft.get_peft_model(stock_of(new), config)
    want = draws(llm)
    with pytest.raises(InputError, match=message):
        llm.update(trained)
    assert draws(llm) == want and not llm.weights_version
    if config.is_prompt_learning:
        return
    llm.update(copy.deepcopy(trained).merge_and_unload())  # as the message says
    assert draws(llm)[0] == draws(load(new))[0]


def test_weights_that_cannot_be_updated_are_refused_by_name(paths: list[Path]) -> None:
    model, tokenizer = build_model(shape_of("tiny"), device="cpu", quantization="nvfp4")
    llm = LLM(model, tokenizer=tokenizer, memory="8MiB")
    want = draws(llm)
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.q_proj.*quantization='none'"):
        llm.update(model.module)
    assert draws(llm) == want and not llm.weights_version
    scorer = as_tree_model(stock_of(paths[1]), nn.Linear(32, 2), 0, "a verifier")
    with pytest.raises(ModelError, match="head of a reward model"):
        stage_weights(scorer, stock_of(paths[1]))


def test_numbers_that_overflow_the_type_of_the_model_are_not_finite(paths: list[Path]) -> None:
    llm = load(paths[0], dtype="float16")
    weights = dict(stock_of(paths[1]).named_parameters())
    name = next(iter(weights))
    weights[name] = weights[name].detach().clone()
    weights[name].view(-1)[0] = 1e6
    with pytest.raises(InputError, match=r"not finite in torch\.float16; the old"):
        llm.update(weights)
    assert llm.weights_version == 0
