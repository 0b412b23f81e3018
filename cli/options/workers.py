"""Where a command's work is done: in this process, or by the workers of a cluster."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from treegen.cluster.placement import Placement

_FLAGS: Final = {"gpus": "gpus", "workers": "workers", "ray": "address"}


def take_cluster(params: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of workers from a command's parameters, and return them."""
    taken = {known: params.pop(flag) for flag, known in _FLAGS.items()}
    return {name: value for name, value in taken.items() if value is not None}


def resolve_workers(cluster: dict[str, Any], given: Mapping[str, Any]) -> "Placement | None":
    """Return where workers run; None if none are requested. given: the user's other options."""
    if not cluster:
        return None
    # Imported here, because it imports slow libraries.
    from treegen.cluster.placement import parse_placement

    return parse_placement(**cluster, device=given.get("device", "auto"))
