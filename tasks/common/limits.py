"""Limits of the sandbox, as task arguments set them."""

from collections.abc import Mapping
from dataclasses import replace

from treegen.common.formatting import parse_bytes
from treegen.errors import InputError
from treegen.tasks.sandbox import Limits


def judge_limits(arguments: Mapping[str, str], limits: Limits) -> Limits:
    """Return limits with the `timeout` and the `memory` of a task's arguments.

    Raises:
        InputError: The timeout or the memory is invalid.
    """
    timeout, memory = arguments.get("timeout"), arguments.get("memory")
    if timeout is not None:
        try:
            seconds = float(timeout)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds <= 3600:
            raise InputError(
                f"task argument timeout must be seconds above 0 and up to 3600, got {timeout!r}"
            )
        limits = replace(limits, cpu_seconds=seconds)
    if memory is not None:
        limits = replace(limits, memory=parse_bytes(memory))
    return limits
