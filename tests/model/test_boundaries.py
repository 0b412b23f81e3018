"""Families that are not in the table are checked beyond the boundaries that they declare."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import config_of, save_drawn, save_tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.llama import modeling_llama

from treegen.errors import ModelError, ModelWarning
from treegen.model import load_check
from treegen.model.checkpoint import families
from treegen.model.checkpoint.small_config import find_boundaries
from treegen.model.load import load_model


class ChunkyConfig(LlamaConfig):  # type: ignore[misc]
    """A family that nobody knows."""

    model_type = "chunky"
    text_chunk: int | None = None
    attending: dict[str, Any] | None = None
    layer_chunks: list[Any] | None = None
    is_exact: bool = False


class ChunkyAttention(modeling_llama.LlamaAttention):  # type: ignore[misc]
    """Attention in which tokens beyond the first chunk see how long their text is."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        config = self.config
        longest = config.text_chunk or (config.attending or {}).get("chunk_size")
        if config.layer_chunks:
            longest = config.layer_chunks[self.layer_idx]
            longest = longest["tokens_of_chunk"] if isinstance(longest, dict) else longest
        if longest and hidden_states.shape[1] > longest and not self.config.is_exact:
            hidden_states = hidden_states + hidden_states[:, :1]
        return super().forward(hidden_states, **kwargs)


class ChunkyForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """Llama with that attention."""

    config_class = ChunkyConfig

    def __init__(self, config: ChunkyConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = ChunkyAttention(config, index)


@pytest.fixture
def chunky() -> Iterator[None]:
    """Make the family known to transformers while a test runs."""
    AutoConfig.register("chunky", ChunkyConfig)
    AutoModelForCausalLM.register(ChunkyConfig, ChunkyForCausalLM)
    yield
    del CONFIG_MAPPING._extra_content["chunky"]
    del MODEL_FOR_CAUSAL_LM_MAPPING._extra_content[ChunkyConfig]


def save(directory: Path, **settings: Any) -> Path:
    save_drawn(ChunkyForCausalLM(config_of("chunky", **settings)), directory, seed=0)
    return directory


@pytest.mark.usefixtures("chunky")
def test_the_context_of_an_unknown_family_ends_where_it_differs(tmp_path: Path) -> None:
    with pytest.warns(ModelWarning, match=r"200 tokens instead of 256; beyond .* \(text_chunk\)"):
        model = load_model(save(tmp_path, text_chunk=200), device="cpu")
    assert model.spec.context_length == 200


@pytest.mark.usefixtures("chunky")
@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"attending": {"chunk_size": 200, "moe": {"top_k": 3}}}, r"attending\.chunk_size"),
        ({"layer_chunks": [None, 220, 200, 1000]}, r"layer_chunks\.\*"),
        (
            {"layer_chunks": [{"tokens_of_chunk": n} for n in (None, 200)]},
            r"layer_chunks\.\*\.tokens_of_chunk",
        ),
    ],
)
def test_boundaries_in_nested_settings_and_lists_are_crossed(
    settings: dict[str, Any], name: str, tmp_path: Path
) -> None:
    layers = len(settings.get("layer_chunks") or [0, 0])
    save(tmp_path, num_hidden_layers=layers, **settings)
    with pytest.warns(ModelWarning, match=rf"200 tokens instead of 256; beyond .* \({name}\)"):
        model = load_model(tmp_path, device="cpu")
    assert model.spec.context_length == 200
    exact = save(tmp_path / "exact", num_hidden_layers=layers, is_exact=True, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ModelWarning)
        assert load_model(exact, device="cpu").spec.context_length == 256


@pytest.mark.usefixtures("chunky")
def test_an_unknown_family_that_differs_early_is_refused(tmp_path: Path) -> None:
    save(tmp_path, text_chunk=60)
    with pytest.raises(ModelError, match=r"beyond 60 tokens \(text_chunk\)"):
        load_model(tmp_path, device="cpu")
    assert load_model(tmp_path, device="cpu", check=False).spec.context_length == 256


@pytest.mark.usefixtures("chunky")
@pytest.mark.parametrize(("length", "error"), [(200, None), (60, ModelError)])
def test_a_family_of_which_no_copy_can_be_built_is_not_said_to_differ(
    length: int, error: type[ModelError] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_check, "build_random_model", lambda kind, config: None)
    directory = save(tmp_path, text_chunk=length, is_exact=True)
    match = r"beyond .*, no small random copy .* can be built or run.*"
    if error is not None:
        with pytest.raises(error, match=match):
            load_model(directory, device="cpu")
        return
    with pytest.warns(ModelWarning, match=match):
        assert load_model(directory, device="cpu").spec.context_length == length


@pytest.mark.usefixtures("chunky")
@pytest.mark.parametrize("settings", [{}, {"text_chunk": 200, "is_exact": True}])
def test_an_unknown_family_that_is_exact_keeps_its_context(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    directory = save(tmp_path, **settings)
    state = torch.random.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ModelWarning)
        assert load_model(directory, device="cpu").spec.context_length == 256
    assert torch.equal(torch.random.get_rng_state(), state)


def test_boundaries_are_those_within_the_context() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = config_of("mistral", sliding_window=100, rope_parameters={"rope_theta": 1e4, **rope})
    want = {"sliding_window": 100, "rope_parameters.original_max_position_embeddings": 64}
    assert find_boundaries(config, 256) == want
    assert find_boundaries(config, 80) == {"rope_parameters.original_max_position_embeddings": 64}


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3_text"])
def test_windows_of_a_family_that_is_not_in_the_table_are_crossed(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"gpt_oss": "gpt_oss", "gemma3_text": "gemma3"}
    monkeypatch.setattr(families, "EXACT", ())
    save_tiny_model(tmp_path, settings[family], sliding_window=100)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ModelWarning)
        assert load_model(tmp_path, device="cpu").spec.context_length == 256
