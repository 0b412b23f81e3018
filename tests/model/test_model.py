"""Loading a model: what is refused before weights are read, what is checked after."""

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from fp4_checkpoints import store_in_fp4
from safetensors.torch import load_file, save_file
from tiny_models import EXACT, config_of, save_tiny_model, tiny_tokenizer

from treegen.common.formatting import format_bytes
from treegen.errors import InputError, ModelError, ModelWarning
from treegen.model import attention_hook as model_attention
from treegen.model import probe
from treegen.model.attention_hook import ATTENTION, NO_NUMBER, read_call
from treegen.model.batch import Batch
from treegen.model.checkpoint.fp4 import dequantize_fp4
from treegen.model.checkpoint_report import inspect_checkpoint
from treegen.model.config import load_spec
from treegen.model.linear.experts import fused_experts
from treegen.model.linear.fp4_checkpoint import Mxfp4Experts
from treegen.model.load import load_model
from treegen.model.load_check import check_model
from treegen.model.model import Model
from treegen.model.options import EngineOptions
from treegen.model.tokenizer import load_tokenizer
from treegen.ops.attention import Level, attend, prepare


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    """A checkpoint that the test may spoil."""
    return shutil.copytree(llama, tmp_path / "model")


def edit(directory: Path, **settings: Any) -> None:
    """Change fields of config.json; None removes."""
    file = directory / "config.json"
    config = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def refusal(load: Callable[[], object]) -> str:
    """Return the one line with which loading is refused."""
    with pytest.raises(ModelError) as caught:
        load()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3", "qwen3_next"])
def test_a_model_that_is_planned_and_loaded_is_probed_once(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_model(tmp_path, family)
    probe._probe_stock.cache_clear()
    spec = load_spec(path, device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(probe, "_probe", lambda *_: pytest.fail("it was probed again"))
        assert load_model(path, device="cpu").spec == load_spec(path, device="cpu") == spec
    edit(path, vocab_size=300)
    assert load_spec(path, device="cpu").vocab_size == 300


def test_equal_models_of_two_folders_are_probed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (save_tiny_model(tmp_path / name, "llama") for name in ("first", "second"))
    probe._probe_stock.cache_clear()
    spec = load_spec(first, device="cpu")
    monkeypatch.setattr(probe, "_probe", lambda *_: pytest.fail("it was probed again"))
    assert load_spec(second, device="cpu") == replace(spec, name=str(second))


def test_models_with_different_parallel_plans_are_probed_one_by_one(tmp_path: Path) -> None:
    usual, other = (save_tiny_model(tmp_path / name, "llama") for name in ("usual", "other"))
    edit(other, base_model_tp_plan={"layers.*.mlp.down_proj": "rowwise"})
    heads = [load_spec(path, device="cpu", ranks=2).num_heads for path in (usual, other)]
    assert heads == [2, 4]


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    assert "does not exist" in refusal(lambda: load_model(tmp_path / "nothing"))
    assert "does not exist" in refusal(lambda: load_spec("./nothing"))
    assert "does not exist" in refusal(lambda: load_tokenizer("a/b/c"))


def test_a_file_is_not_a_model(copy: Path) -> None:
    assert "is a file" in refusal(lambda: load_model(copy / "config.json"))


def test_a_hub_name_that_cannot_be_had_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert "nobody/no-such-model" in refusal(lambda: load_model("nobody/no-such-model"))
    assert "hub name" in refusal(lambda: load_model("not a name!"))


def test_a_directory_without_config_is_named(tmp_path: Path) -> None:
    assert "no config.json" in refusal(lambda: load_spec(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "(--adapter)" in refusal(lambda: load_spec(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", "null", "\x00", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused(copy: Path, text: str) -> None:
    (copy / "config.json").write_text(text)
    assert "config.json" in refusal(lambda: load_model(copy))


def test_weights_must_be_safetensors_and_complete(copy: Path) -> None:
    weights = copy / "model.safetensors"
    data = weights.read_bytes()
    weights.unlink()
    assert "no *.safetensors" in refusal(lambda: load_model(copy))
    (copy / "model.gguf").touch()
    assert "GGUF" in refusal(lambda: load_model(copy))
    (copy / "pytorch_model.bin").touch()
    assert "pytorch_model.bin" in refusal(lambda: load_model(copy))
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    message = refusal(lambda: load_model(copy))
    assert (
        "is missing 2 of the weight files listed in its index, such as model-1.safetensors"
        in message
    )
    for broken in ({"weight_map": [1]}, {"weight_map": {"a": 1}}, {}):
        (copy / "model.safetensors.index.json").write_text(json.dumps(broken))
        assert "no valid weight_map" in refusal(lambda: load_model(copy))
    (copy / "model.safetensors.index.json").unlink()
    weights.write_bytes(data[: len(data) // 2])
    assert "cannot be loaded" in refusal(lambda: load_model(copy))


def test_weights_that_transformers_would_make_up_are_refused(copy: Path) -> None:
    weights = copy / "model.safetensors"
    tensors = load_file(weights)
    name = "model.layers.1.self_attn.k_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != name}, weights, {"format": "pt"})
    assert name in refusal(lambda: load_model(copy))
    save_file(tensors | {name: tensors[name][:3].clone()}, weights, {"format": "pt"})
    message = refusal(lambda: load_model(copy))
    assert f"{name} has shape [3, 32], but the configuration requires [16, 32]" in message
    save_file(tensors, weights, {"format": "pt"})
    edit(copy, intermediate_size=40)
    message = refusal(lambda: load_model(copy))
    assert (
        "down_proj.weight has shape [32, 48], but the configuration requires [32, 40], and 5"
        in message
    )


def test_experts_that_do_not_fit_are_named(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3_moe")
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    save_file(tensors | {name: tensors[name][:3].clone()}, weights, {"format": "pt"})
    message = refusal(lambda: load_model(tmp_path))
    assert "do not fit config.json: model.layers.1.mlp.experts" in message


def test_weights_that_are_not_used_are_named(copy: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(copy, device="cpu", check=False)
    weights = copy / "model.safetensors"
    tensors = load_file(weights)
    save_file(tensors | {"model.extra.weight": torch.zeros(2)}, weights, {"format": "pt"})
    with pytest.warns(ModelWarning, match=r": 1 tensors of .* not used.*: model\.extra\.weight$"):
        load_model(copy, device="cpu")
    edit(copy, num_hidden_layers=1)
    with pytest.warns(ModelWarning, match=r"10 tensors .*model\.layers\.1\.input.* and 7 more$"):
        load_model(copy, device="cpu")


def test_a_missing_or_broken_tokenizer_is_refused(copy: Path) -> None:
    assert load_tokenizer(copy)("apples")["input_ids"] == tiny_tokenizer()("apples")["input_ids"]
    (copy / "tokenizer.json").write_text("{}")
    assert "cannot be loaded" in refusal(lambda: load_tokenizer(copy))
    (copy / "tokenizer.json").unlink()
    assert "no tokenizer" in refusal(lambda: load_tokenizer(copy))


# --- trust ---------------------------------------------------------------------------------------


def test_code_of_a_checkpoint_does_not_run_unless_asked(copy: Path) -> None:
    edit(copy, auto_map={"AutoModelForCausalLM": "evil.Evil"})
    (copy / "evil.py").write_text(f"open({str(copy / 'ran')!r}, 'w')\n")
    for load in (load_model, load_spec, load_tokenizer):
        assert "auto_map" in refusal(lambda load=load: load(copy))  # type: ignore[misc]
    assert not (copy / "ran").exists()
    edit(copy, auto_map={"AutoModelForCausalLM": "other/repo--evil.Evil"})
    assert "another repository" in refusal(lambda: load_model(copy, trust_remote_code=True))


def test_code_from_the_hub_needs_a_pinned_revision(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(copy, auto_map={"AutoModelForCausalLM": "evil.Evil"})
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(copy))
    with pytest.raises(InputError, match="pinned revision"):
        load_spec("some/model", revision="main", trust_remote_code=True)


@pytest.mark.parametrize(
    "settings",
    [
        {"attn_implementation": "kernels-community/flash-attn"},
        {"_attn_implementation": "someone/kernel"},
        {"text_config": {"attn_implementation": {"": "someone/kernel"}}},
        {"kernel_config": {"RMSNorm": ["someone/kernel:RMSNorm"]}},
        {"experts_implementation": "someone/kernel"},
    ],
)
def test_configs_that_fetch_kernels_are_refused(copy: Path, settings: dict[str, Any]) -> None:
    edit(copy, **settings)
    assert "another repository" in refusal(lambda: load_spec(copy))


# --- configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model_type": "llamma"}, "not known"),
        ({"model_type": None}, "not known"),
        ({"model_type": "t5", "d_model": 32}, "encoder-decoder"),
        ({"model_type": "vit"}, "no class that generates text"),
        ({"model_type": "bert"}, "not causal"),
        ({"model_type": "roformer"}, "roformer models cannot be used"),
        ({"model_type": "gpt_neo"}, "`len(config.attention_layers)`"),
        ({"model_type": "git"}, "without transformers' attention interface"),
        ({"model_type": "hrm_text"}, "must call attention once in a forward pass"),
        ({"model_type": "mllama"}, "8 of its 40 layers do not call attention, such as layer 3"),
        ({"model_type": "blip-2"}, "pixel_values"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"num_hidden_layers": 0}, "must be at least 1, got 0"),
        ({"hidden_size": "wide"}, "not valid"),
    ],
)
def test_configs_that_cannot_work_are_refused_before_the_weights(
    copy: Path, settings: dict[str, Any], reason: str
) -> None:
    edit(copy, **settings)
    (copy / "model.safetensors").write_bytes(b"not read")
    assert reason in refusal(lambda: load_model(copy, device="cpu"))


def test_dtype_and_device_are_checked(llama: Path) -> None:
    with pytest.raises(InputError, match="int8"):
        load_spec(llama, "int8")
    with pytest.raises(InputError, match="dtype"):
        load_spec(llama, torch.int32)
    with pytest.raises(InputError, match="device"):
        load_spec(llama, device="tpu9")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="CUDA"):
            load_spec(llama, device="cuda")


def test_a_spec_needs_no_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    spec = load_spec(copy, "bfloat16")
    assert (spec.model_type, spec.vocab_size, spec.context_length) == ("llama", 320, 256)
    assert spec.eos_token_ids == (1,)
    assert [(x.kv_heads, x.k_dim, x.v_dim) for x in spec.layers] == [(2, 8, 8)] * 2
    assert spec.kv_bytes_per_token == 2 * 2 * (8 + 8) * 2
    assert load_spec(copy, "float32").kv_bytes_per_token == 2 * spec.kv_bytes_per_token


def test_layers_that_share_keys_cost_no_memory(tmp_path: Path) -> None:
    model_type, settings = EXACT["gemma4"]
    config_of(model_type, **settings).save_pretrained(tmp_path)
    spec = load_spec(tmp_path, "float32")
    assert [x.shared_with for x in spec.layers] == [None, None, 0, 1]
    assert spec.kv_bytes_per_token == (2 * (8 + 8) + 2 * (16 + 16)) * 4
    assert spec.windows == (8, None, 8, None)


def test_latents_are_kept_in_place_of_keys_and_values(tmp_path: Path) -> None:
    model_type, settings = EXACT["deepseek_v3"]
    config_of(model_type, **settings).save_pretrained(tmp_path)
    spec = load_spec(tmp_path)
    # Of 12 + 6 numbers for each of 4 heads, a latent of 12 and 4 rotated numbers are kept.
    assert {(x.kv_heads, x.k_dim, x.v_dim) for x in spec.layers} == {(1, 16, 12)}
    assert spec.kv_bytes_per_token == len(spec.layers) * 16 * 4
    assert {x.latent.k_dim for x in spec.layers if x.latent} == {12}
    assert {x.expanded for x in spec.layers} == {4 * (12 + 6)}


_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "default"}, 256),
        ({"rope_type": "linear", "factor": 2.0}, 256),
        ({"rope_type": "dynamic", "factor": 2.0}, 256),
        (_LONGROPE, 64),
    ],
)
def test_context_ends_where_rope_depends_on_the_batch(
    tmp_path: Path, rope: dict[str, Any], length: int
) -> None:
    rope = {"rope_theta": 10000.0, **rope}
    save_tiny_model(tmp_path, rope_parameters=rope)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        spec = load_spec(tmp_path)
        model = load_model(tmp_path, device="cpu")
    assert model.spec.context_length == spec.context_length == length
    assert bool(record) == (length < 256)
    for warning in record:
        assert warning.category is ModelWarning
        assert "the context is limited to 64 tokens instead of 256; beyond" in str(warning.message)
        assert "longrope" in str(warning.message)


def test_every_end_of_text_id_counts(copy: Path) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load_spec(copy).eos_token_ids == (7, 9, 1)
    edit(copy, eos_token_id=[9, 5, -1])
    assert load_spec(copy).eos_token_ids == (7, 9, 5)


def test_a_family_that_looks_for_padding_loads(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "gpt2", pad_token_id=2)
    model = load_model(tmp_path, device="cpu")
    assert one_pass(model, [0]).shape == (1, 320)


def test_sizes_that_do_not_fit_together_are_one_line(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    edit(tmp_path, num_attention_heads=3)
    assert "not valid" in refusal(lambda: load_model(tmp_path, device="cpu"))


def test_what_a_text_never_reaches_is_left_out(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "mistral3_on_text")
    stored = load_file(tmp_path / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load_model(tmp_path, device="cpu")
    left_out = ("model.vision_tower", "model.multi_modal_projector")
    assert model.spec.unreached == load_spec(tmp_path).unreached == left_out
    kept = sum(weight.numel() for weight in model.module.parameters())
    text = ("language_model.", "model.language_model.", "lm_head")
    assert kept == sum(w.numel() for name, w in stored.items() if name.startswith(text))
    assert load_spec("demo").unreached == ()


def test_a_tower_that_is_only_asked_for_its_device_stays(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2_audio_on_text")
    assert load_model(tmp_path, device="cpu").spec.unreached == ()


# --- attention calls -----------------------------------------------------------------------------


def call(**options: Any) -> Any:
    module = torch.nn.Linear(1, 1)
    module.layer_idx = 3  # type: ignore[assignment]
    q_1HTK, k_1GTK = torch.zeros(1, 4, 5, 8), torch.zeros(1, 2, 5, 8)
    mask = options.pop("attention_mask", None)
    return read_call(module, q_1HTK, k_1GTK, k_1GTK, mask, **options)


def test_a_call_is_read() -> None:
    got = call(scaling=0.5, sliding_window=4, softcap=None, use_cache=False, position_ids=1)
    assert (got.layer, got.scale, got.window, got.softcap, got.sinks_H) == (3, 0.5, 4, None, None)
    assert (got.q_THK.shape, got.k_TGK.shape) == ((5, 4, 8), (5, 2, 8))


@pytest.mark.parametrize(
    "options",
    [
        {"position_bias": torch.zeros(1)},
        {"head_mask": torch.ones(4)},
        {"is_causal": False},
        {"dropout": 0.1},
        {"attention_mask": torch.zeros(1)},
        {"cu_seq_lens_q": torch.zeros(2)},
    ],
)
def test_what_would_change_the_result_is_never_dropped(options: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="layer 3"):
        call(**options)


def test_a_layer_may_have_no_number() -> None:
    x_11TK = torch.zeros(1, 1, 2, 4)
    assert read_call(torch.nn.Identity(), x_11TK, x_11TK, x_11TK, None).layer == NO_NUMBER


def test_layers_without_a_number_are_refused_unless_some_are_recurrent(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = model_attention.read_call

    def unnumbered(module: torch.nn.Module, *args: Any, **options: Any) -> Any:
        return replace(read(module, *args, **options), layer=NO_NUMBER)

    monkeypatch.setattr(model_attention, "read_call", unnumbered)
    probe._probe_stock.cache_clear()
    with pytest.raises(ModelError, match=r"LlamaAttention has no layer index \(layer_idx\)"):
        load_spec(copy)


# --- loaded models -------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def model(llama: Path) -> Model:
    return load_model(llama, device="cpu")


def one_pass(model: Model, logits_at: list[int], num_tokens: int = 3) -> torch.Tensor:
    """Run the first tokens of a sequence in page 0."""

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    level = Level(
        q_start_G=ints(0),
        q_stop_G=ints(num_tokens),
        pages_GP=ints(0)[:, None],
        kv_len_G=ints(num_tokens),
        kv_start_G=ints(0),
        causal=True,
    )
    positions = torch.arange(num_tokens)
    batch = Batch(
        tokens_T=positions + 10,
        positions_T=positions,
        slots_T=positions,
        logits_at_S=torch.tensor(logits_at, dtype=torch.int64),
        levels=prepare([level], positions),
        layers=model.new_cache(1, 16),
    )
    return model.forward(batch)


def test_logits_are_those_of_the_rows_asked_for(model: Model) -> None:
    every = one_pass(model, [0, 1, 2])
    assert every.dtype == torch.float32
    assert torch.equal(one_pass(model, [2, 0]), every[[2, 0]])
    assert one_pass(model, []).shape == (0, 320)


def test_a_model_that_cannot_keep_rows_gives_the_same(model: Model) -> None:
    every = one_pass(model, [2, 0])
    model._keeps_rows = False
    try:
        torch.testing.assert_close(one_pass(model, [2, 0]), every)
    finally:
        model._keeps_rows = True


def test_a_new_cache_is_zero_and_fits(model: Model) -> None:
    pools = model.new_cache(5, 16)
    assert [pool.keys.shape for pool in pools] == [(5, 16, 2, 8)] * 2
    assert all(not pool.keys.any() and not pool.values.any() for pool in pools)
    with pytest.raises(InputError, match="num_pages and page_size must be at least 1, got 0"):
        model.new_cache(0, 16)


def test_auto_dtype_on_a_cpu_is_float32(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, dtype=torch.bfloat16)
    assert load_model(tmp_path, device="cpu").dtype == torch.float32
    model = load_model(tmp_path, device="cpu", dtype="bfloat16")
    assert model.dtype == model.new_cache(1, 4)[0].keys.dtype == torch.bfloat16
    assert one_pass(model, [1]).dtype == torch.bfloat16


def save_in_mxfp4(directory: Path) -> None:
    """Save a tiny gpt-oss whose experts are stored in MXFP4."""
    save_tiny_model(directory, "gpt_oss", intermediate_size=32)
    weights = directory / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, value in load_file(weights).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = value.bfloat16()
            continue
        count, width, height = value.shape
        shape = (count, height, width // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, shape, dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, weights, {"format": "pt"})
    edit(directory, quantization_config={"quant_method": "mxfp4"})


def test_weights_in_mxfp4_are_expanded_on_a_cpu(tmp_path: Path) -> None:
    save_in_mxfp4(tmp_path)
    with pytest.warns(ModelWarning, match="in MXFP4 were dequantized to float32"):
        model = load_model(tmp_path, device="cpu")
    assert {weight.dtype for weight in model.module.parameters()} == {torch.float32}


def test_experts_kept_in_mxfp4_are_those_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_in_mxfp4(tmp_path)
    with pytest.warns(ModelWarning, match="dequantized"):
        want = load_model(tmp_path, device="cpu")
    monkeypatch.setattr("treegen.model.linear.fp4_checkpoint.can_keep_fp4", lambda *given: True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ModelWarning)
        model = load_model(tmp_path, device="cpu", quantization="mxfp4")
    kept = [part for part in model.module.modules() if isinstance(part, Mxfp4Experts)]
    assert kept and model.quantization is None
    for part, (_, other) in zip(kept, fused_experts(want.module), strict=True):
        for name in ("gate_up_proj", "down_proj"):
            blocks, scales = (getattr(part, f"{name}_{end}") for end in ("blocks", "scales"))
            made = torch.stack(
                [dequantize_fp4(*each) for each in zip(blocks.flatten(2), scales, strict=True)]
            )
            assert torch.equal(made.transpose(1, 2), getattr(other.module, name).float())
    got, stock = one_pass(model, [0, 1, 2]), one_pass(want, [0, 1, 2])
    torch.testing.assert_close(got, stock, rtol=1e-4, atol=1e-5)


def test_mxfp4_is_asked_for_where_it_is_stored(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    with pytest.raises(InputError, match="requires a checkpoint with MXFP4 weights"):
        load_model(tmp_path, device="cpu", quantization="mxfp4")
    with pytest.raises(InputError, match="requires a checkpoint with NVFP4 weights"):
        load_model(tmp_path, device="cpu", quantization="nvfp4")
    with pytest.raises(InputError, match="quantization is not supported with"):
        EngineOptions(model="m", quantization="mxfp4", tensor_parallel_size=2)


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_weights_stay_in_4_bits_if_expanded_ones_take_half_of_the_device(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "mxfp4":
        save_in_mxfp4(tmp_path)
    else:
        save_tiny_model(tmp_path / "source", "qwen3_moe")
        tmp_path /= "packed"
        store_in_fp4(tmp_path.parent / "source", tmp_path, "modelopt")
    counts: list[int] = []

    def fits(numbers: int, device: torch.device) -> bool:
        counts.append(numbers)
        return does_fit

    monkeypatch.setattr("treegen.model.linear.fp4_checkpoint.can_keep_fp4", lambda *given: True)
    monkeypatch.setattr("treegen.model.linear.fp4_checkpoint.fits_expanded", fits)
    does_fit = True
    line = (
        f"in {form.upper()} were dequantized .*; set quantization to {form} to keep 4-bit weights"
    )
    with pytest.warns(ModelWarning, match=line) as record:
        wide = load_model(tmp_path, device="cpu").module
    assert len(record) == 1
    does_fit = False
    line = (
        f"weights stay in {form.upper()} .* instead of .*, because .* half of cpu; .* to dequantize"
    )
    with pytest.warns(ModelWarning, match=line) as record:
        kept = load_model(tmp_path, device="cpu").module
    assert len(record) == 1
    sizes = [sum(w.numel() * w.element_size() for w in m.parameters()) for m in (kept, wide)]
    numbers = max(counts)
    assert numbers == counts[0] and 3 * numbers < sizes[1] - sizes[0] < 4 * numbers
    assert f"{format_bytes(sizes[0])} instead of " in str(record[0].message)


def test_what_experts_in_mxfp4_take_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_in_mxfp4(tmp_path)
    monkeypatch.setattr("treegen.model.linear.fp4_checkpoint.can_keep_fp4", lambda *given: True)
    found = inspect_checkpoint(EngineOptions(model=str(tmp_path), device="cpu", dtype="bfloat16"))
    stored = load_file(tmp_path / "model.safetensors").values()
    assert found.quantization == "mxfp4"
    assert found.weight_bytes == sum(each.numel() * each.element_size() for each in stored)


# --- fingerprint ---------------------------------------------------------------------------------


def test_the_fingerprint_is_of_what_changes_results(copy: Path, model: Model) -> None:
    def current() -> str:
        return load_model(copy, device="cpu", check=False).fingerprint

    assert current() == model.fingerprint
    config = copy / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()), indent=7))
    assert current() == model.fingerprint
    seen = {model.fingerprint}
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    seen.add(current())
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    seen.add(current())
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": 4}))
    seen.add(current())
    edit(copy, rms_norm_eps=1e-3)
    seen.add(current())
    assert len(seen) == 5


# --- load check ----------------------------------------------------------------------------------


def test_the_check_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "gemma2")
    model = load_model(tmp_path, device="cpu", check=False)
    check_model(model)
    config = model.module.config
    assert config._attn_implementation == ATTENTION
    assert config.sliding_window == 8
    layers = [layer.self_attn.sliding_window for layer in model.module.model.layers]
    assert layers == [8, None, 8, None]


@pytest.mark.parametrize(
    ("family", "dropped"),
    [("mistral_swa", "window"), ("gemma2", "softcap"), ("gpt_oss", "sinks"), ("gemma2", "window")],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_check_sees_attention_that_drops_an_option(
    family: str, dropped: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path, family)

    def broken(*args: Any, **options: Any) -> torch.Tensor:
        out: torch.Tensor = attend(*args, **{**options, dropped: None})
        return out

    load_model(tmp_path, device="cpu", dtype=dtype)
    monkeypatch.setattr(model_attention, "attend", broken)
    assert "small tree" in refusal(lambda: load_model(tmp_path, device="cpu", dtype=dtype))


def test_the_check_sees_a_scale_that_is_wrong(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> torch.Tensor:
        out: torch.Tensor = attend(*args, **{**options, "scale": 1.0})
        return out

    monkeypatch.setattr(model_attention, "attend", broken)
    assert "small tree" in refusal(lambda: load_model(llama, device="cpu"))


def test_the_check_sees_logits_that_are_not_numbers(copy: Path) -> None:
    weights = copy / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, weights, {"format": "pt"})
    assert "logits that are not finite" in refusal(lambda: load_model(copy, device="cpu"))
