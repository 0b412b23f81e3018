"""Tree of thoughts on the Game of 24: `python examples/search_game24.py DIR`, a checkpoint.

The model lists next steps (if none is legal, all legal ones are tried) and judges their states.
"""

import re
from fractions import Fraction
from itertools import permutations

import click
from rich import print as show

from treegen import LLM, SamplingParams
from treegen.search import SearchNode, bfs, choice_scores, draw_tree, propose_lines

STEPS = """Combine two numbers by + - * or /, so that one number fewer is left.

Numbers left: 2 8 8 14\n8 / 2 = 4 (left: 4 8 14)\n14 - 8 = 6 (left: 2 6 8)

Numbers left: {}\n"""
VALUE = "Can they make 24?\n10 14: sure\n11 12: no\n4 4 10: sure\n5 7 8: maybe\n{}:"


def left(node: SearchNode) -> str:
    """The numbers that are left at a node."""
    return str(re.findall("left: ([-0-9/ ]+)", node.path[0].text + node.path_text)[-1])


def legal_steps(answer: str, node: SearchNode) -> list[str]:
    """The legal steps that an answer lists, or all if it lists none."""
    steps = []
    for a, b, *rest in permutations(map(Fraction, left(node).split())):
        results = {"+": a + b, "-": a - b, "*": a * b} | ({"/": a / b} if b else {})
        for sign, c in results.items():
            steps.append(f"{a} {sign} {b} = {c} (left: {' '.join(map(str, sorted([*rest, c])))})\n")
    return [step for step in steps if step in answer + "\n"] or steps


async def solve(root: SearchNode) -> SearchNode | None:
    """Keep the five best states of each level; at the last, look for a 24."""
    judge = choice_scores(lambda n: VALUE.format(left(n)), {" sure": 20, " maybe": 1, " no": 0})
    propose = propose_lines(lambda n: STEPS.format(left(n)), legal_steps, max_tokens=100)
    result = await bfs(
        root, propose, judge, lambda n: " " not in left(n), breadth=5, depth=3, state=left
    )
    return next((node for node in result.candidates if left(node) == "24"), None)


@click.command()
@click.argument("checkpoint")
def main(checkpoint: str) -> None:
    """Search three puzzles at once with the model in CHECKPOINT."""
    problems = [f"Numbers left: {numbers}\n" for numbers in ("4 9 10 13", "1 2 3 4", "2 2 6 10")]
    for result in LLM(checkpoint).search(solve, problems, SamplingParams(temperature=0)):
        show(draw_tree(result.tree.nodes, result.best), result.best_text, result.usage)


if __name__ == "__main__":
    main()
