"""Monte Carlo tree search over the steps of a solution: `python examples/search_mcts.py DIR`.

A rollout is worth how often its answer came up before: the model's agreement with itself.
"""

from collections import Counter

import click
from rich import print as show

from treegen import LLM, SamplingParams
from treegen.search import (
    Budget,
    SearchNode,
    SearchOutcome,
    by_function,
    draw_tree,
    is_ended,
    mcts,
    rollouts,
    sample_steps,
)
from treegen.tasks.common.answers import numeric_answer

QUESTION = "Q: A train has 5 cars of 32 seats; 41 seats are free. How many people sit?\nA:"


def done(node: SearchNode) -> bool:
    """Whether the solution says its answer or has come to its end."""
    return is_ended(node) or "The answer is" in node.path_text


async def solve(root: SearchNode) -> SearchOutcome:
    """Look where steps lead that the model agrees on."""
    answers: Counter[str] = Counter()

    def agreement(node: SearchNode) -> float:
        answer = numeric_answer(node.path_text)
        if answer is None:
            return 0.0
        answers[answer] += 1
        return answers[answer] / answers.total()

    evaluate = rollouts(4, done, by_function(agreement), max_tokens=48, stop="\n\n")
    steps = sample_steps(3, stop=[". ", "\n"], max_tokens=24)
    return await mcts(root, steps, evaluate, done, iterations=20, depth=6)


@click.command()
@click.argument("checkpoint")
def main(checkpoint: str) -> None:
    """Search with the model in CHECKPOINT."""
    params, budget = SamplingParams(temperature=0.8), Budget(tokens=3000)
    (result,) = LLM(checkpoint).search(solve, [QUESTION], params, budget=budget)
    show(draw_tree(result.tree.nodes, result.best), result.stopped or "done", result.usage)


if __name__ == "__main__":
    main()
