"""Kernels that cannot be imported, as with a Triton that fits neither torch nor the driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from treegen.ops.kernel_modules import import_kernels


@pytest.mark.parametrize("error", ["ImportError", "AttributeError", "RuntimeError", "OSError"])
def test_kernels_that_cannot_be_imported_are_none(
    error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"broken_{error}.py").write_text(f"raise {error}('no driver')\n")
    assert import_kernels(f"broken_{error}") is None
    assert import_kernels("kernels_of_no_package") is None


def test_kernels_are_imported_by_their_full_name() -> None:
    module = import_kernels("treegen.ops.recurrence.types")
    assert module is not None and module.NUM_OWN == 2
