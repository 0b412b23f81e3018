"""Clients of nodes over HTTP whose answers are checked against the server's OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import torch
from jsonschema import Draft202012Validator
from serving import TEMPLATE
from tiny_models import save_tiny_model

from treegen import LLM
from treegen.integrations.server.openapi import make_openapi
from treegen.llm.async_llm import AsyncLLM
from treegen.ops.sampling.draw import uniforms
from treegen.search.live.backend import LiveBackend

LIMIT = 1e-5
"""Largest difference of log-probabilities down to -10; below, they are rounded more coarsely. Also
the largest difference of numbers that decide a draw in a near-tie."""


def tiny_llm(directory: Path, memory: str = "4MiB") -> LLM:
    """Return an LLM with random weights and a chat template."""
    if not (directory / "config.json").exists():
        save_tiny_model(directory, max_position_embeddings=2_048)
    llm = LLM(str(directory), device="cpu", dtype="float32", memory=memory, max_rows=48)
    llm.tokenizer.chat_template = TEMPLATE
    return llm


def check_answer(method: str, path: str, status: int, answer: Any) -> None:
    """Assert that an answer is as the OpenAPI document says."""
    document = make_openapi()
    parts = path.split("/")
    if len(parts) > 3 and parts[3] != "batch":
        parts[3] = "{id}"
    response = document["paths"]["/".join(parts)][method.lower()]["responses"][str(status)]
    schema = response["content"]["application/json"]["schema"]
    Draft202012Validator({**schema, "components": document["components"]}).validate(answer)


def difference(got: Sequence[float], want: Sequence[float]) -> float:
    """Return the largest difference of log-probabilities, to be compared with LIMIT."""
    pairs = zip(got, want, strict=True)
    return max((abs(a - b) / max(1.0, abs(b) / 10) for a, b in pairs), default=0.0)


class NodeClient:
    """Sends requests, and checks their answers."""

    def __init__(self, url: str, key: str) -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.http = httpx2.Client(base_url=url, headers=headers, verify=False, timeout=120)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        more = {} if body is None else {"json": body}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        response = self.http.request(method, path, headers=named, **more)
        answer = response.json()
        check_answer(method, path, response.status_code, answer)
        return response.status_code, answer

    def post(self, path: str, body: Any, **headers: str) -> Any:
        status, answer = self.ask("POST", path, body, **headers)
        assert status == 200, answer
        return answer

    def error(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        status, answer = self.ask(method, path, body, **headers)
        assert status >= 400, answer
        assert answer["error"]["code"] == status
        return status, answer["error"]

    def root(self, prompt: Any, **more: Any) -> Any:
        return self.post("/v1/nodes", {"prompt": prompt, **more})["node"]

    def sample(self, node: Any, n: int = 1, **more: Any) -> Any:
        return self.post(f"/v1/nodes/{node['id']}/sample", {"n": n, **more})["nodes"]

    def extend(self, node: Any, text: str) -> Any:
        return self.post(f"/v1/nodes/{node['id']}/extend", {"text": text})["node"]

    def batch(self, *operations: Any) -> Any:
        return self.post("/v1/nodes/batch", {"operations": operations})["results"]

    def memory(self) -> Any:
        return self.ask("GET", "/v1/nodes")[1]["memory"]


async def evict_all(served: AsyncLLM) -> tuple[int, int]:
    """Evict the pages of all idle segments.

    Returns:
        The pages that are in use afterwards, and the number of segments that neither the prompts
        kept for later requests nor anything below them need.
    """

    async def begin(backend: LiveBackend) -> tuple[int, int]:
        store, held = backend.scheduler.run.store, backend.prompts._recent
        while store.evict_idle():
            pass
        needed = {above.index for segment in held.values() for above in segment.path()}
        return backend.scheduler.run.pool.num_used, len(set(store.segments) - needed)

    return await served.call_nodes(begin)


@contextmanager
def clean_client(url: str, key: str) -> Iterator[NodeClient]:
    """Yield a client; in the end delete its trees, and check that none of their memory is left."""
    client = NodeClient(url, key)
    with closing(client.http):
        yield client
        for tree in client.ask("GET", "/v1/nodes")[1]["data"]:
            client.ask("DELETE", f"/v1/nodes/{tree['id']}")
        assert client.memory()["nodes"] == client.memory()["tokens"] == 0


def is_near_tie(
    llm: LLM, context: list[int], seed: int, step: int, tokens: tuple[int, int]
) -> bool:
    """Return whether a draw at temperature 1 is so close to a boundary that rounding decides it.

    Args:
        llm: The model.
        context: Token ids before the draw.
        seed: Seed of the sample.
        step: Number of tokens that the sample had before the draw.
        tokens: The two tokens that were drawn.
    """
    (score,) = llm.score([(context, [tokens[0]])], top=llm.spec.vocab_size)
    assert score.top is not None
    probabilities = np.zeros(llm.spec.vocab_size)
    probabilities[score.top.tokens[0]] = np.exp(score.top.logprobs[0].astype(np.float64))
    bounds = np.concatenate([[0.0], np.cumsum(probabilities / probabilities.sum())])
    drawn = float(uniforms(torch.tensor([seed]), torch.tensor([step]))[0])
    return all(bounds[t] - LIMIT <= drawn <= bounds[t + 1] + LIMIT for t in tokens)
