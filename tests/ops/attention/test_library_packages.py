"""Packages of kernels that are missing, broken, or beside each other under one name."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from treegen.errors import InputError
from treegen.ops.attention import Level, attend
from treegen.ops.attention.library_kernels import (
    FlashAttention2,
    FlashAttention4,
    load_flash_attn_4,
)
from treegen.ops.attention.registry import LOADERS, choose

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Write a file of a package that stands before those installed, if any."""
    found = importlib.util.find_spec("flash_attn")
    if found is not None and found.origin is not None:
        pytest.skip("flash-attn is installed, and would be found before flash-attn-4 alone")
    names = "flash_attn", "xformers"
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(names)}
    monkeypatch.syspath_prepend(tmp_path)
    load_flash_attn_4.cache_clear()

    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    yield write
    for name in [name for name in sys.modules if name.startswith(names)]:
        del sys.modules[name]
    sys.modules.update(kept)
    load_flash_attn_4.cache_clear()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))


def complaint(impl: str, device: torch.device = CPU) -> str:
    with pytest.raises(InputError) as caught:
        choose(impl, device)
    return str(caught.value)


def test_flash_attn_4_alone_is_not_taken_for_flash_attn(install: Install, hopper: None) -> None:
    install("flash_attn/cute/__init__.py", "def flash_attn_varlen_func(): ...")
    assert not FlashAttention2().softcaps  # the kernels are torch's
    assert choose("flash4", CUDA).name == "flash4"


def test_flash_attn_4_is_not_imported_where_it_cannot_run(install: Install) -> None:
    """The import takes seconds."""
    install("flash_attn/cute/__init__.py", "def flash_attn_varlen_func(): ...")
    assert "flash4: requires tensors on an NVIDIA GPU, got cpu" in complaint("flash4")
    assert choose("auto", CPU).name == "cpu" and "flash_attn.cute" not in sys.modules


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No module named 'flash_attn.cute'"),
        ("import cutlass_of_another_time", "No module named 'cutlass_of_another_time'"),
        ("flash_attn_func = None", "cannot import name 'flash_attn_varlen_func'"),
        ("None.shape", "AttributeError: 'NoneType' object has no attribute 'shape'"),
        ("raise OSError('libcuda:\\nmissing')", "OSError: libcuda: missing)"),
    ],
)
def test_a_flash_attn_4_that_cannot_be_loaded_is_refused(
    install: Install, hopper: None, text: str | None, reason: str
) -> None:
    install("flash_attn/__init__.py", "")
    if text is not None:
        install("flash_attn/cute/__init__.py", text)
    message = complaint("flash4", CUDA)
    assert f"flash4: flash-attn-4 cannot be imported ({reason}" in message
    assert "; pip install '.[flash4]' in" in message


def test_warnings_of_flash_attn_4_are_its_authors(install: Install) -> None:
    install(
        "flash_attn/cute/__init__.py",
        "import warnings\nwarnings.warn('old', DeprecationWarning)\n"
        "def flash_attn_varlen_func(): ...",
    )
    assert callable(load_flash_attn_4())


def test_flash_attn_alone_is_taken_for_flash(install: Install) -> None:
    install("flash_attn/__init__.py", "")
    install("flash_attn/flash_attn_interface.py", "def _flash_attn_varlen_forward(): ...")
    assert FlashAttention2().softcaps


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("loaded", [False, True])
def test_xformers_beside_flash_attn_4(install: Install, whole: bool, loaded: bool) -> None:
    """xformers takes any flash_attn for flash-attn, and fails if that is flash-attn-4 alone."""
    install("flash_attn/cute/__init__.py", "def flash_attn_varlen_func(): ...")
    if whole:
        install("flash_attn/__init__.py", "")
        install("flash_attn/flash_attn_interface.py", "")
    install("xformers/__init__.py", "_has_cpp_library = False")
    install("xformers/ops/__init__.py", "")
    install(
        "xformers/ops/fmha.py",
        "import importlib.util\n"
        "found = importlib.util.find_spec('flash_attn') is not None\n"
        "if found:\n    import flash_attn.flash_attn_interface\n",
    )
    if loaded:
        load_flash_attn_4()
    assert "xformers: xformers was built for another torch or CUDA" in complaint("xformers")
    assert sys.modules["xformers.ops.fmha"].found is whole
    assert ("flash_attn" in sys.modules) is (loaded or whole)
    assert callable(load_flash_attn_4())


def test_a_broken_xformers_is_refused_with_the_reason(install: Install) -> None:
    install("xformers/__init__.py", "import cutlass_of_another_time")
    assert (
        "xformers: xformers cannot be imported (No module named 'cutlass_of_another_time'); "
        "pip install '.[xformers]' in"
    ) in complaint("xformers")


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ((7, 5), "needs compute capability 8.0 (Ampere) or newer"),
        ((8, 9), "needs compute capability 9.0 (Hopper) or 10.x (Blackwell)"),
        ((9, 0), None),
        ((10, 0), None),
        ((12, 0), "needs compute capability 9.0 (Hopper) or 10.x (Blackwell)"),
    ],
)
def test_gpus_of_flash4(
    install: Install,
    hopper: None,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    reason: str | None,
) -> None:
    install("flash_attn/cute/__init__.py", "def flash_attn_varlen_func(): ...")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert FlashAttention4().refusal(CUDA) == reason


@pytest.mark.parametrize("width", [136, 192, 248])
def test_widths_that_flash4_does_not_take_on_blackwell(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    monkeypatch.setattr(FlashAttention4, "refusal", lambda self, device: None)
    monkeypatch.setitem(LOADERS, "flash4", FlashAttention4)
    q_THD, pool = torch.zeros(1, 1, width), torch.zeros(1, 1, 1, width)
    q_THD, pool = q_THD.bfloat16(), pool.bfloat16()
    level = Level.dense([0], [1], 1)
    with pytest.raises(InputError, match=f"on a Blackwell GPU, got {width}; use"):
        attend(q_THD, pool, pool, [level], impl="flash4")
