"""A calculator in the loop: `python examples/search_tool.py DIR`, a checkpoint.

The model writes <<12 * 3= and stops; the result is appended, and it goes on behind it. Nothing
that was generated before is copied or computed again, and 16 solutions share every forward pass.
"""

import operator
import re

import click

from treegen import LLM, SamplingParams
from treegen.search import SearchNode, gather

PROMPT = (
    "Q: Tom has 7 bags of 12 nuts and eats 5. How many are left?\n"
    "A: He had <<7 * 12=84>> nuts, and <<84 - 5=79>> are left. The answer is 79.\n\n"
    "Q: {}\nA: That is <<"
)
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def calculate(text: str) -> int | None:
    """The result of the last sum in a text, which ends with it; None if that is no sum."""
    match = re.search(r"<<\s*([0-9]{1,9})\s*([-+*])\s*([0-9]{1,9})\s*=$", text)
    return SIGNS[match[2]](int(match[1]), int(match[3])) if match else None


async def solve(root: SearchNode) -> list[SearchNode]:
    """Write 16 solutions, giving the result wherever one asks for it."""

    async def write(node: SearchNode, calls: int) -> SearchNode:
        (node,) = await node.sample(1, stop=["=", "\n\n"], include_stop=True)
        result = calculate(PROMPT + node.path_text)
        if result is None or calls == 0:
            return node
        return await write(node.extend(f"{result}>>"), calls - 1)

    return await gather(write(root, calls=4) for _ in range(16))


@click.command()
@click.argument("checkpoint")
def main(checkpoint: str) -> None:
    """Solve a problem with the model in CHECKPOINT."""
    question = "A box has 6 rows of 8 eggs, and 9 are broken. How many are whole?"
    params = SamplingParams(temperature=0.7, max_tokens=48)
    (result,) = LLM(checkpoint).search(solve, [PROMPT.format(question)], params)
    for candidate in result.candidates:
        print(repr(result.tree.path_text(candidate)))
    print(result.usage)


if __name__ == "__main__":
    main()
