"""What the attention operator refuses, how implementations are chosen and added."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from attention_cases import Group, make_case, paged
from torch import Tensor

from treegen.errors import InputError, ModelWarning
from treegen.ops.attention import Level, attend, prepare, register, registry
from treegen.ops.attention.reference import Reference
from treegen.ops.attention.registry import LOADERS, choose
from treegen.ops.attention.types import Implementation


def arguments() -> dict[str, Any]:
    """Good arguments of attend: five rows, two levels, pages of four tokens."""
    case = make_case([[Group(0, 5, 9)], [Group(0, 2, 3, 9), Group(2, 5, 6, 9)]], [20] * 5)
    keys, values, levels = paged(case, torch.float32)
    return {"q_THD": case.q.float(), "keys": keys, "values": values, "levels": levels}


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def change(index: int, **fields: Any) -> Callable[[dict[str, Any]], None]:
    """Replace fields of one level."""

    def apply(args: dict[str, Any]) -> None:
        args["levels"][index] = replace(args["levels"][index], **fields)

    return apply


def put(name: str, make: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    """Replace one argument by a function of it."""

    def apply(args: dict[str, Any]) -> None:
        args[name] = make(args.get(name))

    return apply


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (change(1, q_start_G=ints(0, 1)), "groups 0 and 1 must be ascending and disjoint"),
        (change(1, q_start_G=ints(2, 0), q_stop_G=ints(5, 2)), "ascending"),
        (change(0, q_stop_G=ints(6)), "rows up to 6, but there are only 5"),
        (change(0, q_start_G=ints(-1)), "row 0 or later, got row -1"),
        (change(0, q_start_G=ints(3), q_stop_G=ints(1)), "stop must be >= start"),
        (change(0, kv_len_G=ints(-2)), "kv_len -2"),
        (
            change(0, kv_len_G=ints(99)),
            "99 keys, but 4 pages of 4 keys have room for only 16; pass 25",
        ),
        (
            change(0, pages_GP=ints(1, 2, 77).view(1, 3)),
            "page 77, but the pool has only pages 0 to 6",
        ),
        (change(0, pages_GP=ints(1, -2, 1).view(1, 3)), "page -2"),
        (change(0, pages_GP=torch.ones(1, 3)), "pages_GP must be int32, got torch.float32"),
        (
            change(1, kv_len_G=ints(3)),
            "kv_len_G must have 1 dimensions, and the first must have size 2",
        ),
        (change(1, kv_start_G=torch.zeros(2, dtype=torch.int64)), "int32, got torch.int64"),
        (
            change(1, kv_start_G=torch.zeros(2, dtype=torch.int32, device="meta")),
            "on cpu, got meta",
        ),
        (change(1, causal=True), "level 1 is causal and requires positions_T"),
        (put("levels", lambda _: []), "at least one level"),
        (put("levels", lambda levels: [*levels, 3]), r"levels\[2\] must be a Level, got int"),
        (put("window", lambda _: 4), "window 4 requires positions_T"),
        (put("window", lambda _: 0), "at least 1"),
        (put("chunk", lambda _: 4), "chunk 4 requires positions_T"),
        (put("chunk", lambda _: 0), "at least 1"),
        (lambda args: args.update(window=2, chunk=2), "window and chunk cannot be used together"),
        (put("softcap", lambda _: 0.0), "softcap must be positive, got 0.0"),
        (put("sinks", lambda _: torch.zeros(3)), r"sinks must have shape \(4,\), got \(3,\)"),
        (
            put("positions_T", lambda _: torch.zeros(4, dtype=torch.int64)),
            "4 (positions|query rows)|to 5",
        ),
        (put("positions_T", lambda _: torch.zeros(5)), "int64 or int32"),
        (put("q_THD", lambda q: q[0]), "q_THD must have the shape"),
        (put("q_THD", lambda q: q.int()), "floating-point type"),
        (put("q_THD", lambda q: q.double()), "must be torch.float64 on cpu, got torch.float32"),
        (
            put("q_THD", lambda q: q[:, :3]),
            "must be a multiple of the number of key heads, got 3 and 2",
        ),
        (put("q_THD", lambda q: q[:, :, :8]), "kv_heads, 8"),
        (put("keys", lambda k: [k, k]), "both be a single tensor"),
        (put("keys", lambda k: k[0]), "keys of level 0 must have the shape"),
        (put("values", lambda v: v[:-1]), "values of level 0 must have"),
        (put("values", lambda v: v.bfloat16()), "values .* got torch.bfloat16"),
        (
            put("impl", lambda _: "fast"),
            "auto or one of cpu, flash, flash4, gluon, invariant, reference, triton, xformers, "
            "got 'fast'",
        ),
    ],
)
def test_bad_arguments_are_refused(spoil: Callable[[dict[str, Any]], None], complaint: str) -> None:
    args = arguments()
    attend(**args)
    spoil(args)
    with pytest.raises(InputError, match=complaint):
        attend(**args)


def test_tensors_per_level_must_match_the_levels() -> None:
    args = arguments()
    with pytest.raises(InputError, match="keys and values must have 2 tensors"):
        attend(args["q_THD"], [args["keys"]], [args["values"]], args["levels"])
    with pytest.raises(InputError, match="the same v_dim, got 8 in level 1 and 16 in level 0"):
        values = [args["values"], args["values"][..., :8]]
        attend(args["q_THD"], [args["keys"]] * 2, values, args["levels"])


def test_prepared_levels_are_checked_against_each_new_pool() -> None:
    args = arguments()
    prepared = prepare(args["levels"])
    attend(args["q_THD"], args["keys"], args["values"], prepared)
    with pytest.raises(InputError, match="the pool has only pages 0 to 2"):
        attend(args["q_THD"], args["keys"][:3], args["values"][:3], prepared)
    with pytest.raises(InputError, match="rows up to 5, but there are only 4"):
        attend(args["q_THD"][:4], args["keys"], args["values"], prepared)
    with pytest.raises(InputError, match=r"pass both arguments to prepare\(\)"):
        attend(args["q_THD"], args["keys"], args["values"], prepared, impl="reference")


def test_auto_takes_the_cpu_kernel_and_says_so() -> None:
    levels = arguments()["levels"]
    assert prepare(levels).impl == "cpu"
    assert prepare(levels, impl="reference").impl == "reference"


def test_gpus_before_ampere_compute_with_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("treegen.ops.attention.gpu.attend", exc_type=ImportError)
    monkeypatch.setattr(triton, "_INTERPRETED", False)
    turing = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert choose("auto", turing).name == "reference"
    with pytest.raises(InputError, match=r"cannot run on cuda:0; triton: needs compute capability"):
        choose("triton", turing)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert choose("auto", turing).name == "triton"


def test_dense_levels_take_numbers_for_all_groups() -> None:
    level = Level.dense([0, 2], [2, 3], 7, 5)
    assert level.pages_GP.tolist() == [[0], [1]]
    assert level.kv_len_G.tolist() == [7, 7]
    assert level.kv_start_G.tolist() == [5, 5]
    assert not level.causal


class Elsewhere(Reference):
    """An implementation that does not run here."""

    name = "elsewhere"

    def refusal(self, device: torch.device) -> str | None:
        return "needs another planet" if device.type == "cpu" else None


def test_a_registered_implementation_runs_or_raises() -> None:
    levels = arguments()["levels"]
    register("elsewhere", Elsewhere)
    try:
        assert prepare(levels).impl == "cpu"
        with pytest.raises(InputError, match="cannot run on cpu; elsewhere: needs another planet"):
            prepare(levels, impl="elsewhere")
        with pytest.raises(InputError, match="already exists"):
            register("elsewhere", Elsewhere)
    finally:
        del LOADERS["elsewhere"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ImportError("undefined symbol: cuFly"), "cannot be imported: undefined symbol: cuFly"),
        (ModuleNotFoundError("No module named 'fly'", name="fly"), "fly is not installed"),
    ],
)
def test_an_implementation_that_cannot_be_imported_is_not_chosen(
    error: ImportError, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> Implementation:
        raise error

    monkeypatch.setitem(LOADERS, "cpu", load)
    assert prepare(arguments()["levels"]).impl != "cpu"
    with pytest.raises(InputError, match=reason):
        prepare(arguments()["levels"], impl="cpu")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ImportError("undefined symbol: cuFly"), "cannot be imported: undefined symbol: cuFly"),
        (ModuleNotFoundError("No module named 'triton'", name="triton"), "triton is not installed"),
        (AttributeError("no 'jit'\nin it"), "cannot be imported: AttributeError: no 'jit' in it"),
        (AssertionError(), "cannot be imported: AssertionError"),
        (ImportError(), "cannot be imported: ImportError"),
    ],
)
def test_a_gpu_without_a_usable_triton_warns_once(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> ModuleType:
        if name.endswith("gpu.attend"):
            raise error
        return import_module(name)

    monkeypatch.setattr(registry, "import_module", fail)
    registry._warn_of_fallback.cache_clear()
    device = torch.device("cuda")
    expected = f"uses impl 'reference'.*[(]triton: {re.escape(reason)}[)]"
    with pytest.warns(ModelWarning, match=expected) as caught:
        assert [choose("auto", device).name for _ in range(3)] == ["reference"] * 3
    assert len(caught) == 1
    for impl in ("triton", "invariant"):
        expected = re.escape(f"impl '{impl}' cannot run on cuda; {impl}: {reason}; install")
        with pytest.raises(InputError, match=expected):
            choose(impl, device)
    assert choose("auto", torch.device("cpu")).name == "cpu"
