"""MCTS of llm-reasoners over nodes of `treegen serve`: remote_reasoners.py [BASE_URL [API_KEY]].

The program does not import treegen: it sends JSON to /v1/nodes.
"""

import sys
from typing import Any

import httpx2
from reasoners import Reasoner, SearchConfig, WorldModel
from reasoners.algorithm import MCTS

PUZZLE = (
    "Combine the numbers to reach the target. Use each number once.\n\n"
    "Input: 1 4 7 13\nTarget: 10\nSteps:\n"
)


class Nodes(WorldModel, SearchConfig):  # type: ignore[misc]  # both are untyped
    """A node of the server is both an action and the state that it leads to."""

    def __init__(self, client: httpx2.Client) -> None:
        super().__init__()
        self._client = client

    def _post(self, path: str, **body: Any) -> Any:
        response = self._client.post(path, json=body)
        response.raise_for_status()
        return response.json()

    def init_state(self) -> Any:
        params = {"temperature": 0.8, "max_tokens": 24, "stop": "\n", "include_stop": True}
        return self._post("nodes", prompt=self.example, seed=1, params=params)["node"]

    def get_actions(self, state: Any) -> Any:
        return self._post(f"nodes/{state['id']}/sample", n=3)["nodes"]

    def step(self, state: Any, action: Any) -> Any:
        return action, {}

    def is_terminal(self, state: Any) -> bool:
        return "(left: 10)" in state["text"]

    def fast_reward(self, state: Any, action: Any) -> Any:
        return sum(action["logprobs"]), {}

    reward = fast_reward  # step adds no details


def main(base_url: str = "http://127.0.0.1:8000/v1", api_key: str = "none") -> None:
    """Search the puzzle and print the best line."""
    key = {"Authorization": f"Bearer {api_key}"}
    with httpx2.Client(base_url=base_url, headers=key, timeout=600) as client:
        nodes = Nodes(client)
        result = Reasoner(nodes, nodes, MCTS(n_iters=6, depth_limit=4, disable_tqdm=True))(PUZZLE)
    print(result.terminal_state["path"], result.terminal_state["text"])


if __name__ == "__main__":
    main(*sys.argv[1:])
