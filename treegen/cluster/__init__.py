"""Many workers, each with an LLM of its own, that share every run; needs Ray."""

from treegen.cluster.cluster import Cluster
from treegen.cluster.places import Places, places_of

__all__ = ["Cluster", "Places", "places_of"]
