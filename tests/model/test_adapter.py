"""Adapters merged as a model loads, against peft's own model of the same base and adapter."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import Command, build_checkpoint
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from treegen import LLM, SamplingParams
from treegen.errors import InputError, ModelError
from treegen.model import weights as model_weights
from treegen.model.checkpoint.adapter import merge, read_adapter
from treegen.model.checkpoint.files import fingerprint
from treegen.model.checkpoint.text_part import auto_class
from treegen.model.load import load_model
from treegen.model.weights import share_base_weights

peft = pytest.importorskip("peft")

PROMPT = "the river of numbers"

KINDS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "v_proj"]},
    "all-linear": {"target_modules": "all-linear", "r": 3, "lora_alpha": 7},
    "rslora": {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "r": 5},
    "dora": {"target_modules": ["k_proj", "o_proj", "up_proj"], "use_dora": True},
    "patterns": {
        "target_modules": ["q_proj", "k_proj", "gate_proj"],
        "rank_pattern": {"k_proj": 2, r"layers.0.mlp.gate_proj": 6},
        "alpha_pattern": {"k_proj": 64, r"layers\.1\.self_attn\.q_proj": 3},
    },
    "embedding-and-head": {"target_modules": ["embed_tokens", "lm_head", "v_proj"]},
    "head-saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "one-layer": {"target_modules": ["v_proj"], "layers_to_transform": [1], "use_dora": True},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("base"), seed=5)


def save_adapter(
    base: Path, path: Path, *, seed: int = 0, scale: float = 0.3, **settings: Any
) -> Any:
    """Write an adapter whose matrices are all random; returns peft's model with it."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "lora_alpha": 16, **settings})
    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                noise = torch.randn(weight.shape, generator=generator)
                # Lengths of rows stay above zero.
                weight.copy_(
                    weight * (1 + 0.2 * noise.abs()) if "magnitude" in name else scale * noise
                )
    adapted.save_pretrained(path)
    return adapted.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_peft(base: Path, tmp_path: Path, kind: str) -> None:
    adapted = save_adapter(base, tmp_path / "adapter", **KINDS[kind])
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged = load_model(base, dtype="float32", device="cpu", adapter=tmp_path / "adapter").module
    tokens = torch.randint(
        3, plain.config.vocab_size, (2, 17), generator=torch.Generator().manual_seed(1)
    )
    state = dict(merged.named_parameters())
    reference = adapted.merge_and_unload()
    with torch.no_grad():
        expected = reference(tokens).logits
        assert (plain(tokens).logits - expected).abs().max() > 1e-2  # the adapter says something
    for name, weight in reference.named_parameters():
        torch.testing.assert_close(state[name], weight, rtol=1e-5, atol=1e-6, msg=name)


def test_an_alpha_of_zero_adds_nothing(base: Path, tmp_path: Path) -> None:
    """A zero is a number, and not the default of 8."""
    adapted = save_adapter(base, tmp_path, lora_alpha=0, target_modules=["q_proj", "v_proj"])
    config = read_adapter(tmp_path).config
    assert config["lora_alpha"] == 0 and read_adapter(tmp_path).alphas(["q_proj"]) == {
        "q_proj": 0.0
    }
    merged = load_model(base, device="cpu", adapter=tmp_path).module
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    scaling = adapted.base_model.model.model.layers[0].self_attn.q_proj.scaling
    assert scaling == {"default": 0.0}
    for name, weight in plain.named_parameters():
        assert torch.equal(weight, merged.get_parameter(name)), name


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_peft(base: Path, tmp_path: Path, kind: str) -> None:
    adapted = save_adapter(base, tmp_path / "adapter", seed=2, **KINDS[kind])
    llm = LLM(
        str(base), adapter=str(tmp_path / "adapter"), device="cpu", dtype="float32", memory="16MiB"
    )
    tokenizer = AutoTokenizer.from_pretrained(base)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for prompt in (PROMPT, "numbers"):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            expected = adapted.generate(
                input_ids=ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        ((found,),) = llm.generate([prompt], params)
        assert list(found.tokens) == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("family", "settings", "options"),
    [
        ("llama", {"tie_word_embeddings": True}, {"target_modules": ["lm_head", "q_proj"]}),
        ("llama", {"tie_word_embeddings": True}, {"target_modules": ["embed_tokens", "up_proj"]}),
        ("minicpm3", {}, {"target_modules": ["kv_b_proj", "q_b_proj", "o_proj"]}),
        ("deepseek_v3", {}, {"target_modules": ["kv_b_proj", "kv_a_proj_with_mqa"]}),
        ("gpt2", {}, {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
        ("gpt2", {}, {"target_modules": ["c_proj"], "fan_in_fan_out": True, "use_dora": True}),
    ],
    ids=["tied-head", "tied-embedding", "latents", "latents-down", "conv1d", "conv1d-dora"],
)
def test_logits_of_tied_turned_and_latent_weights(
    tmp_path: Path, family: str, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    base = save_tiny_model(tmp_path / "base", family, seed=7, **settings)
    adapted = save_adapter(base, tmp_path / "adapter", seed=3, **options)
    llm = LLM(
        str(base), adapter=str(tmp_path / "adapter"), device="cpu", dtype="float32", memory="16MiB"
    )
    ids = AutoTokenizer.from_pretrained(base)(PROMPT, return_tensors="pt").input_ids
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    ((found,),) = llm.generate([PROMPT], params)
    with torch.no_grad():
        wanted = adapted.generate(
            input_ids=ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        tokens = torch.tensor([[*ids[0].tolist(), *found.tokens]])
        logprobs = adapted(tokens).logits[0, ids.shape[1] - 1 : -1].log_softmax(-1)
    assert list(found.tokens) == wanted[0, ids.shape[1] :].tolist()
    expected = logprobs.gather(1, torch.tensor(found.tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found.logprobs), expected, rtol=1e-4, atol=1e-4)


def test_in_bfloat16_the_sum_is_rounded_once(base: Path, tmp_path: Path) -> None:
    save_adapter(base, tmp_path / "adapter", **KINDS["dora"])
    whole, half = (
        dict(
            load_model(
                base, dtype=dtype, device="cpu", adapter=tmp_path / "adapter", check=False
            ).module.named_parameters()
        )
        for dtype in ("float32", "bfloat16")
    )
    for name, weight in half.items():
        assert weight.dtype == torch.bfloat16
        # The base is rounded too, so twice the half of a last place.
        torch.testing.assert_close(weight.float(), whole[name], rtol=2**-7, atol=2e-3, msg=name)


def test_an_adapter_is_a_part_of_the_fingerprint(base: Path, tmp_path: Path) -> None:
    save_adapter(base, tmp_path / "a", seed=1, **KINDS["lora"])
    save_adapter(base, tmp_path / "b", seed=2, **KINDS["lora"])
    prints = [fingerprint(base, each) for each in (None, tmp_path / "a", tmp_path / "b")]
    assert len(set(prints)) == 3 and prints[0] == fingerprint(base)
    loaded = load_model(base, device="cpu", adapter=tmp_path / "a", check=False)
    assert loaded.fingerprint == prints[1]


def test_what_cannot_be_merged_is_refused(base: Path, tmp_path: Path) -> None:
    def refused(match: str, adapter: Path, model: Path = base) -> None:
        with pytest.raises(ModelError, match=match):
            load_model(model, device="cpu", adapter=adapter, check=False)

    def changed(name: str, kind: str = "lora", **changes: Any) -> Path:
        path = tmp_path / name
        save_adapter(base, path, **KINDS[kind])
        config = json.loads((path / "adapter_config.json").read_text())
        (path / "adapter_config.json").write_text(json.dumps({**config, **changes}))
        return path

    refused("does not exist", tmp_path / "nothing")
    refused("has no adapter_config.json", base)
    refused("only LORA is supported", changed("ia3", peft_type="IA3"))
    refused(
        "uses unsupported settings: alora_invocation_tokens, new_thing",
        changed("new", alora_invocation_tokens=[1, 2], new_thing={"a": 1}),
    )
    bare = changed("bare")
    (bare / "adapter_model.safetensors").rename(bare / "adapter_model.bin")
    refused("has no adapter_model.safetensors", bare)
    torn = changed("torn")
    (torn / "adapter_model.safetensors").write_bytes(b"torn")
    refused("cannot be read", torn)
    nothing = changed("nothing")
    file = nothing / "adapter_model.safetensors"
    weights = {
        name: weight[:0] if "lora_A" in name else weight[:, :0].contiguous()
        for name, weight in load_file(file).items()
    }
    save_file(weights, file, {"format": "pt"})
    refused("two matrices of rank 1 or more for model.layers.0", nothing)
    other = save_tiny_model(tmp_path / "other", hidden_size=64)
    refused("or was trained for another", changed("wide"), other)
    single = changed("single")
    file = single / "adapter_model.safetensors"
    weights = {name: weight for name, weight in load_file(file).items() if "lora_A" in name}
    save_file(weights, file, {"format": "pt"})
    refused("q_proj cannot be merged: missing: .*lora_B", single)
    refused("not expected: .*lora_magnitude_vector", changed("length", "dora", use_dora=False))
    refused("init_lora_weights='olora', which", changed("olora", init_lora_weights="olora"))
    with pytest.raises(InputError, match="is not supported with tensor_parallel_size"):
        LLM(str(base), adapter=str(bare), tensor_parallel_size=2)


def test_merging_draws_no_random_numbers(base: Path, tmp_path: Path) -> None:
    save_adapter(base, tmp_path, **KINDS["embedding-and-head"])
    module = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    before = torch.get_rng_state()
    merge(module, read_adapter(tmp_path))
    assert torch.equal(before, torch.get_rng_state())


def test_an_adapter_without_peft_names_the_extra(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"merging an adapter requires peft: .*\[lora\]"):
        load_model(base, device="cpu", adapter=tmp_path)


def test_a_run_knows_its_adapter(tmp_path: Path, treegen: Command) -> None:
    base = build_checkpoint(tmp_path / "base")
    for seed in (1, 2):
        save_adapter(base, tmp_path / f"adapter-{seed}", seed=seed, **KINDS["lora"])
    arguments = ("gsm8k", "--model", base, "--limit", 2, "-n", 2, "--max-tokens", 4, "-f", 0)
    run = tmp_path / "run"
    done = treegen("eval", *arguments, "--adapter", tmp_path / "adapter-1", "-o", run)
    assert done.code == 0, done.err
    info = json.loads((run / "run.json").read_text())
    assert info["settings"]["free"]["adapter"] == str(tmp_path / "adapter-1")
    assert treegen("eval", "--resume", run).code == 0
    done = treegen("eval", "--resume", run, "--adapter", tmp_path / "adapter-2")
    assert done.code == 2 and "--model or --adapter" in done.err
    done = treegen("eval", *arguments, "--adapter", tmp_path / "none", "-o", tmp_path / "other")
    assert done.code == 2 and done.err.count("\n") == 1


def test_several_adapters_read_the_weights_below_them_once(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for seed, path in enumerate(paths):
        save_adapter(base, path, seed=seed, **KINDS["embedding-and-head"])

    def weights(path: Path) -> dict[str, torch.Tensor]:
        return dict(load_model(base, device="cpu", adapter=path).module.named_parameters())

    wanted = [weights(path) for path in paths]
    read: list[object] = []

    def counted(*given: Any, **more: Any) -> Any:
        read.append(given)
        return auto_class(*given, **more)

    monkeypatch.setattr(model_weights, "auto_class", counted)
    with share_base_weights():
        found = [weights(path) for path in paths]
        assert len(read) == 1
        load_model(base, device="cpu", adapter=paths[0], dtype="bfloat16", check=False)
        assert len(read) == 2
    weights(paths[0])
    assert len(read) == 3
    for actual, own in zip(found, wanted, strict=True):
        assert actual.keys() == own.keys()
        assert all(torch.equal(actual[name], own[name]) for name in own)
    assert not torch.equal(found[0]["lm_head.weight"], found[1]["lm_head.weight"])


def test_runs_of_several_adapters_are_those_of_each_and_are_compared(
    tmp_path: Path, treegen: Command
) -> None:
    base = build_checkpoint(tmp_path / "base")
    paths = [tmp_path / f"adapter-{seed}" for seed in (1, 2)]
    for seed, path in enumerate(paths):
        save_adapter(base, path, seed=seed, **KINDS["lora"])
    arguments = ("gsm8k", "--model", base, "--limit", 2, "-n", 2, "--max-tokens", 6, "-f", 0)
    both = ("--adapter", paths[0], "--adapter", paths[1])
    out = tmp_path / "out"
    done = treegen("eval", *arguments, *both, "-o", out)
    assert done.code == 0, done.err
    document = done.document
    assert [Path(each["run"]) for each in document["runs"]] == [out / path.name for path in paths]
    (compared,) = document["compared"]
    assert compared["run_b"] == str(out / paths[1].name)
    for path in paths:
        alone = treegen(
            "eval", *arguments, "--adapter", path, "-o", tmp_path / f"alone-{path.name}"
        )
        assert alone.code == 0, alone.err
        drawn = [
            [json.loads(line)["text"] for line in (run / "samples.jsonl").read_text().splitlines()]
            for run in (out / path.name, tmp_path / f"alone-{path.name}")
        ]
        assert drawn[0] == drawn[1]
    done = treegen("eval", *arguments, *both, "-o", out)
    assert done.code == 2 and "--resume" in done.err
    shutil.rmtree(out / paths[1].name)
    done = treegen("eval", *arguments, *both, "--resume", out)
    assert done.code == 0, done.err
    for refused in (
        ("eval", *arguments, "--adapter", paths[0], "--adapter", tmp_path / "x" / paths[0].name),
        ("eval", *arguments, *both, "--adapter", tmp_path / "none", "-o", tmp_path / "other"),
        ("plan", *arguments, *both),
        ("eval", *arguments, *both, "--workers", 2, "-o", tmp_path / "other"),
        ("eval", *arguments, *both, "--tensor-parallel-size", 2, "-o", tmp_path / "other"),
    ):
        done = treegen(*refused)
        assert done.code == 2 and done.err.count("\n") == 1, done.err
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"lora_alpha": "x"},
        {"lora_alpha": [5]},
        {"lora_alpha": float("nan")},
        {"alpha_pattern": [5]},
        {"alpha_pattern": {"(": 1}},
        {"alpha_pattern": {"q": "x"}},
        {"alpha_pattern": {"q": float("nan")}},
        {"use_rslora": "no"},
        {"use_dora": {}},
        {"fan_in_fan_out": 5},
    ],
)
def test_a_field_of_an_adapter_is_named(tmp_path: Path, wrong: dict[str, Any]) -> None:
    ((field, _),) = wrong.items()
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **wrong}))
    with pytest.raises(ModelError, match=f"adapter_config.json: {field} must be .*; fix the file"):
        read_adapter(tmp_path, weights=False)
