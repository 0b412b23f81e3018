"""Tree rollouts for a trainer on another machine: remote_rollouts.py [BASE_URL [API_KEY]].

Each prompt gets a tree: a few openings, and below each several endings. A trainer can compute the
shared segments once, because each sequence is a list of segments from the root down.
"""

import sys
from typing import Any

from treegen import SamplingParams
from treegen.integrations.client import RemoteLLM
from treegen.search import SearchNode, gather, is_ended

PROMPTS = [f"Question: What is {number} + 5?\nAnswer:" for number in range(3, 7)]


async def roll_out(root: SearchNode, openings: int = 2, endings: int = 2) -> dict[str, Any]:
    """Return the segments of a tree, and the segments of each sequence."""
    first_nodes = await root.sample(openings, max_tokens=12)
    await gather(node.sample(endings) for node in first_nodes if not is_ended(node))
    nodes = list(root.walk())[1:]
    index_of: dict[SearchNode | None, int] = {node: index for index, node in enumerate(nodes)}
    segments = [
        {
            "parent": index_of.get(node.parent),
            "token_ids": list(node.tokens),
            "logprobs": list(node.logprobs),
        }
        for node in nodes
    ]
    ends = [node for node in nodes if node.is_leaf]
    sequences = [[index_of[node] for node in end.path[1:]] for end in ends]
    return {"segments": segments, "sequences": sequences}


def main(base_url: str = "http://127.0.0.1:8000/v1", api_key: str | None = None) -> None:
    """Print the tokens of each tree with and without sharing."""
    llm = RemoteLLM(base_url, api_key)
    params = SamplingParams(temperature=1.0, max_tokens=24, seed=1)
    for result in llm.search(roll_out, PROMPTS, params):
        if result.error:
            raise SystemExit(result.error)
        tree: Any = result.value
        lengths = [len(segment["token_ids"]) for segment in tree["segments"]]
        unshared = sum(lengths[index] for path in tree["sequences"] for index in path)
        print(
            f"{len(tree['sequences'])} sequences: {sum(lengths)} tokens in segments, "
            f"{unshared} without sharing"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
