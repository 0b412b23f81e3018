"""TreeQuest's ABMCTS over nodes of `treegen serve`: remote_treequest.py [BASE_URL [API_KEY]].

The controller runs here, in a search function. One request samples the four lines of a batch.
"""

import sys

import treequest

from treegen import SamplingParams
from treegen.integrations.client import RemoteLLM
from treegen.search import SearchNode, gather

PUZZLE = (
    "Combine the numbers to reach the target. Use each number once.\n\n"
    "Input: 1 4 7 13\nTarget: 10\nSteps:\n"
)


async def search(root: SearchNode) -> list[SearchNode]:
    """Return the best node of a tree that TreeQuest grows line by line."""
    algorithm = treequest.ABMCTSA()
    state = algorithm.init_tree()
    for _ in range(6):
        state, trials = algorithm.ask_batch(state, 4, ["line"])
        parents = [trial.parent_state or root for trial in trials]
        children = await gather(
            parent.sample(1, stop="\n", include_stop=True) for parent in parents
        )
        for trial, (node,) in zip(trials, children, strict=True):
            node.value = float("(left: 10)" in node.text)
            state = algorithm.tell(state, trial.trial_id, (node, node.value))
    return [node for node, _ in treequest.top_k(state, algorithm, k=1)]


def main(base_url: str = "http://127.0.0.1:8000/v1", api_key: str | None = None) -> None:
    """Search the puzzle and print the best lines."""
    llm = RemoteLLM(base_url, api_key)
    params = SamplingParams(temperature=0.8, max_tokens=24, seed=1)
    (result,) = llm.search(search, [("puzzle", PUZZLE)], params)
    if result.error:
        raise SystemExit(result.error)
    print(f"{len(result.tree.nodes)} nodes, {llm.num_requests} requests")
    print(result.best_text)


if __name__ == "__main__":
    main(*sys.argv[1:])
