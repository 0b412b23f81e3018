"""A GGUF file as a model: it is what transformers makes of it, and faults are told early."""

from __future__ import annotations

import struct
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path

import gguf
import huggingface_hub
import pytest
import torch
from cli_cases import Command
from gguf_checkpoints import write_gguf
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from treegen import LLM, Node, SamplingParams
from treegen.errors import ModelError, ModelWarning
from treegen.model.checkpoint import gguf_file
from treegen.model.config import load_spec
from treegen.model.load import load_model
from treegen.model.tokenizer import load_tokenizer

KINDS = gguf.GGMLQuantizationType
PROMPTS = ["Question: Ann has 3 apples", "Question: Ann has 3 apples and Bob", "Answer: They"]


def tiny_gguf(folder: Path, family: str = "llama", kind: KINDS = KINDS.Q8_0) -> Path:
    source = save_tiny_model(folder / "source", family, hidden_size=64, intermediate_size=96)
    write_gguf(source, folder / "tiny.gguf", kind)
    return folder / "tiny.gguf"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("gguf"))


def refusal(load: Callable[[], object]) -> str:
    with pytest.raises(ModelError) as caught:
        load()
    return str(caught.value)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", [KINDS.F32, KINDS.Q8_0, KINDS.Q4_0])
def test_greedy_tokens_are_those_of_transformers(kind: KINDS, family: str, tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path, family, kind)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        llm = LLM(str(path), memory="8MiB", device="cpu")
    said = [str(each.message) for each in record if each.category is ModelWarning]
    plain = kind == KINDS.F32
    start = f"{path}: weights in {kind.name} (GGUF) were dequantized to float32: "
    assert len(said) == (not plain)
    assert all(each.startswith(start) and " in files, " in each for each in said)
    tree = Node("", children=[Node(text) for text in PROMPTS])
    found = llm.run(tree, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
    stock = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text, completion in zip(PROMPTS, found.completions, strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        want = stock.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False)
        assert list(completion.tokens) == want[0, ids.shape[1] :].tolist()


def test_weights_are_those_that_were_written(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path, kind=KINDS.F32)
    found = load_model(path, device="cpu").module.state_dict()
    want = load_model(tmp_path / "source", device="cpu").module.state_dict()
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)


def test_it_has_a_name_of_its_own(file: Path, tmp_path: Path) -> None:
    spec = load_spec(file)
    assert (spec.model_type, spec.context_length, spec.eos_token_ids) == ("llama", 256, (1,))
    assert load_tokenizer(file).get_vocab()["</s>"] == 1
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    other = tmp_path / "other.gguf"
    other.write_bytes(data)
    with pytest.warns(ModelWarning):
        prints = {load_model(each, device="cpu").fingerprint for each in (file, other)}
    assert len(prints) == 2


def test_the_command_samples_from_it(file: Path, tmp_path: Path, treegen: Command) -> None:
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"question": "1 + 1 = ", "answer": "2"}\n')
    done = treegen(
        f"eval jsonl --data {problems} -T 'template={{question}}' -T answer_field=answer"
        f" --model {file} -n 2 --max-tokens 4 --memory 8MiB -q -o {tmp_path}/run"
    )
    assert done.code == 0, done.err


@pytest.mark.parametrize("share", [0.2, 0.6, 0.98])
def test_a_file_that_is_cut_off_is_refused(share: float, file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    data = file.read_bytes()
    cut.write_bytes(data[: int(len(data) * share)])
    for load in (load_model, load_spec, load_tokenizer):
        assert "is truncated" in refusal(lambda load=load: load(cut))  # type: ignore[misc]


def test_what_is_no_gguf_is_refused(tmp_path: Path) -> None:
    for data in (b"", b"GGUF", b"PK\x03\x04" + b"\x00" * 100):
        (tmp_path / "some.gguf").write_bytes(data)
        assert "is not a GGUF file" in refusal(lambda: load_spec(tmp_path / "some.gguf"))
    (tmp_path / "big-00001-of-00003.gguf").touch()
    message = refusal(lambda: load_spec(tmp_path / "big-00001-of-00003.gguf"))
    assert "is one part of a split model; merge" in message


def test_an_architecture_that_is_not_known_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "unheard-of")
    writer.add_name("odd")
    writer.add_tensor("token_embd.weight", torch.zeros(4, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    message = refusal(lambda: load_spec(tmp_path / "odd.gguf"))
    assert "unheard-of" in message and "not supported" in message and "safetensors" in message


def test_missing_packages_are_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "find_spec", lambda name: None)
    message = refusal(lambda: load_spec(file))
    assert "gguf and accelerate: pip install '.[gguf]'" in message


def test_the_file_itself_must_be_given(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"pass the path of a GGUF file, such as {file}" in refusal(
        lambda: load_spec(file.parent)
    )
    copy = save_tiny_model(tmp_path / "model")
    (copy / "model.safetensors").unlink()
    (copy / "tiny.gguf").touch()
    assert f"pass the file: {copy / 'tiny.gguf'}" in refusal(lambda: load_model(copy))
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(empty))
    assert "download one" in refusal(lambda: load_spec("someone/tiny-GGUF"))


def header(*parts: int | bytes, tensors: int = 0, pairs: int = 0) -> bytes:
    """A GGUF header. Numbers of parts have 8 bytes."""
    encoded = (part if isinstance(part, bytes) else struct.pack("<Q", part) for part in parts)
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + b"".join(encoded)


STRING, ARRAY, UINT8 = (struct.pack("<I", kind) for kind in (8, 9, 0))
NESTED: list[int | bytes] = [ARRAY, ARRAY, 1]


@pytest.mark.parametrize(
    "data",
    [
        header(pairs=2**60),
        header(tensors=2**60),
        header(2**60, pairs=1),
        header(1, b"a", STRING, 2**60, pairs=1),
        header(1, b"a", ARRAY, UINT8, 2**60, pairs=1),
        header(1, b"a", ARRAY, STRING, 2**60, pairs=1),
        header(1, b"a", ARRAY, ARRAY, 2**60, pairs=1),
        header(1, b"a", *NESTED * 9, pairs=1),
        header(1, b"a", ARRAY, UINT8, 2**24, b"\0" * 2**24, pairs=1),
        header(1, b"a", struct.pack("<I", 2**32 - 1), tensors=1),
        header(1, b"a", struct.pack("<I", 99), pairs=1),
        b"GGUF" + struct.pack(">IQQ", 3, 2**60, 0),
        header(pairs=1)[:-4],
        b"GGUF",
        b"",
    ],
)
def test_a_header_that_claims_more_than_there_is_is_refused_at_once(
    data: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "lying.gguf"
    file.write_bytes(data)
    tracemalloc.start()
    try:
        message = refusal(lambda: gguf_file.read_header(file))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "is not a GGUF file or is truncated" in message and peak < 2**24


@pytest.mark.parametrize("name", ["block_count", "embedding_length", "vocab_size"])
def test_sizes_that_no_tensor_has_are_refused(name: str, file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    key = f"llama.{name}".encode()
    at = data.index(key) + len(key) + 4
    other = tmp_path / "other.gguf"
    other.write_bytes(data[:at] + struct.pack("<I", 10**9) + data[at + 4 :])
    message = refusal(lambda: load_spec(other))
    assert f"sets llama.{name} to 1,000,000,000, but the tensors in the file" in message
