"""Placement of workers: their number, on GPUs or CPUs, of this machine or of a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from treegen.common.checks import check_int, device_name
from treegen.common.cores import count_cores
from treegen.errors import InputError, install

ALL = "all"
_MAX_WORKERS_PER_CORE: Final = 16  # CPU workers per core; more would overload a machine


@dataclass(frozen=True, slots=True)
class Placement:
    """Where workers run."""

    device: str
    """"cuda" or "cpu"."""
    count: int | None
    """Number of GPUs, or of workers on CPUs; None for all GPUs."""
    gpus: tuple[int, ...] = ()
    """Indices of this machine's GPUs."""
    address: str | None = None
    """Address of a Ray cluster; None starts Ray here."""


def parse_placement(
    gpus: str | int | None = None,
    workers: int | None = None,
    address: str | None = None,
    *,
    device: str = "auto",
) -> Placement:
    """Return the placement that the arguments describe.

    Args:
        gpus: "all", a number of GPUs, or a list such as "0,2" ("2," for only GPU 2). Default: all,
            unless workers is given.
        workers: Number of workers on CPUs, instead of gpus.
        address: Address of a Ray cluster, such as "10.0.0.1:6379", or "auto" for one that was
            started on this machine. Default: start Ray here.
        device: Device option of the LLM, which must agree with gpus or workers.

    Raises:
        InputError: arguments contradict each other, or name something that does not exist, as far
            as this machine can tell.
    """
    device = device_name(device)
    if find_spec("ray") is None:
        raise InputError(f"several workers need Ray, which is not installed; {install('ray')}")
    if gpus is not None and workers is not None:
        raise InputError(
            "gpus (--gpus) and workers (--workers) cannot be used together; remove one of the two"
        )
    if workers is not None:
        check_int("workers", workers, minimum=1)
        if device not in ("auto", "cpu"):
            raise InputError(
                f"workers (--workers) run only on CPUs, got device {device}; use gpus (--gpus)"
            )
        if address is None and workers > (max_workers := _MAX_WORKERS_PER_CORE * count_cores()):
            raise InputError(
                f"workers (--workers) must be at most {max_workers} on a machine with "
                f"{count_cores()} cores, got {workers:,}"
            )
        return Placement("cpu", workers, address=_check_address(address))
    if device not in ("auto", "cuda"):
        other = (
            "remove one of the two"
            if device == "cpu"
            else "select the GPUs only with gpus (--gpus)"
        )
        raise InputError(f"gpus (--gpus) cannot be used together with device {device}; {other}")
    count, indices = _parse_gpus(ALL if gpus is None else gpus)
    if address is not None:
        if indices:
            raise InputError(
                "indices of GPUs (--gpus 0,2) are not supported with a Ray cluster; pass the "
                "number of GPUs, or all"
            )
        return Placement("cuda", count, address=_check_address(address))
    num_available = num_gpus()
    if not num_available:
        raise InputError("torch sees no GPU on this machine; use workers on CPUs (--workers N)")
    if max(count or 0, max(indices, default=-1) + 1) > num_available:
        what = f"GPU {max(indices)} was" if indices else f"{count} GPUs were"
        raise InputError(
            f"{what} requested (--gpus), but this machine has {num_available}; request fewer GPUs"
        )
    indices = indices or tuple(range(count or num_available))
    return Placement("cuda", len(indices), indices)


def num_gpus() -> int:
    """Return the number of GPUs of this machine that this process may use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _parse_gpus(gpus: str | int) -> tuple[int | None, tuple[int, ...]]:
    """Parse the gpus option: return the number of GPUs, None for all, and their indices."""
    text = str(gpus).strip()
    if text == ALL:
        return None, ()
    words = [word.strip() for word in text.split(",") if word.strip()]
    are_numbers = all(word.isascii() and word.isdecimal() and len(word) < 6 for word in words)
    if not words or not are_numbers:
        raise InputError(f"gpus (--gpus) must be all, a number or a list such as 0,2; got {gpus!r}")
    numbers = tuple(int(word) for word in words)
    if "," in text:
        if len(set(numbers)) < len(numbers):
            raise InputError(
                f"gpus (--gpus) {text} contains the same GPU twice; list each GPU once"
            )
        return None, numbers
    if not numbers[0]:
        raise InputError("gpus (--gpus) must be at least 1; to use only the first GPU, pass `0,`")
    return numbers[0], ()


def _check_address(address: str | None) -> str | None:
    """Return the address of a Ray cluster; raise InputError if it is malformed."""
    if address is None or address == "auto":
        return address
    host, colon, port = address.rpartition(":")
    if "://" in address or not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise InputError(
            "the address of a Ray cluster (--ray) must be auto or HOST:PORT, such as "
            f"10.0.0.1:6379; got {address!r}"
        )
    return address
