"""Where a command's work is done: in this process, or by workers of a cluster."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from treegen.cluster.placement import Placement

_FLAGS: Final = {"gpus": "gpus", "workers": "workers", "ray": "address"}


def take_cluster(params: dict[str, Any]) -> dict[str, Any]:
    """Take what is said of workers out of a command's parameters."""
    taken = {known: params.pop(flag) for flag, known in _FLAGS.items()}
    return {name: value for name, value in taken.items() if value is not None}


def resolve_workers(cluster: dict[str, Any], given: Mapping[str, Any]) -> "Placement | None":
    """Return where workers are wanted, None if they are not. given: what else the user gave."""
    if not cluster:
        return None
    # It imports what is slow to import.
    from treegen.cluster.placement import parse_placement

    return parse_placement(**cluster, device=given.get("device", "auto"))
