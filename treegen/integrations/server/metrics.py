"""The server's metrics for Prometheus."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from treegen.integrations.server.nodes import NodeStore
from treegen.llm.async_llm import AsyncLLM


class Metrics(Collector):
    """Counts of requests, the engine's usage, and its current load."""

    def __init__(self, served: AsyncLLM, nodes: NodeStore | None = None) -> None:
        """Create the metrics of a model.

        Args:
            served: The model.
            nodes: The nodes of clients. Default: none.
        """
        self._served, self._nodes, self._registry = served, nodes, CollectorRegistry()
        self._registry.register(self)
        self.requests = Counter(
            "treegen_requests",
            "Requests, by path and status.",
            ["path", "status"],
            registry=self._registry,
        )

    async def response(self, request: Request) -> Response:
        """Return all metrics in Prometheus' format."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    def collect(self) -> Any:
        """Yield the engine's usage and its current load."""
        usages, status = self._served.usages(), self._served.status()
        for name, description in (
            ("prompt_tokens_computed", "Prompt tokens that the model computed."),
            ("decoded_tokens", "Generated tokens."),
            ("drafted_tokens", "Draft tokens."),
            ("accepted_tokens", "Draft tokens that were accepted."),
            ("recomputed_tokens", "Tokens computed again after preemption or eviction."),
            ("prefill_steps", "Prefill passes."),
            ("decode_steps", "Decode steps."),
            ("key_tokens_read", "Keys that decode steps read in each layer."),
            ("key_tokens_unshared", "Keys that decode steps would have read without sharing."),
        ):
            total = sum(getattr(usage, name) for usage in usages)
            yield CounterMetricFamily(f"treegen_{name}", description, value=total)
        for name, description, value in (
            ("rows", "Samples that are being decoded.", status.rows),
            ("waiting", "Samples that are waiting.", self._served.num_waiting),
            ("pages", "Cache pages in use.", status.pages),
            ("num_pages", "Total pages of the cache.", status.num_pages),
        ):
            yield GaugeMetricFamily(f"treegen_{name}", description, value=value)
        if self._nodes is not None:
            yield from self._collect_nodes(self._nodes)

    @staticmethod
    def _collect_nodes(nodes: NodeStore) -> Any:
        """Yield the memory of each client's nodes; clients have the numbers of their API keys."""
        for name, description in (
            ("nodes", "Nodes that clients hold."),
            ("tokens", "Tokens of the nodes."),
            ("bytes", "Size of the nodes' keys and values."),
        ):
            prefix = "" if name == "nodes" else "node_"
            gauge = GaugeMetricFamily(f"treegen_{prefix}{name}", description, labels=["client"])
            for client in list(nodes.clients.values()):
                gauge.add_metric([client.name], getattr(nodes.memory(client), name))
            yield gauge
