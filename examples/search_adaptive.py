"""Adaptive self-consistency: `python examples/search_adaptive.py DIR`, a checkpoint.

Solutions of many problems are drawn at once. Each problem stops when its vote is decided (the beta
rule at 0.95), which an easy one is after four samples; those still being drawn are cancelled.
"""

import click

from treegen import LLM, SamplingParams
from treegen.search import SearchNode, SearchOutcome, majority
from treegen.tasks.common.answers import numeric_answer

FEW_SHOT = (
    "Q: Mia has 4 boxes of 6 eggs. How many eggs has she?\n"
    "A: 4 boxes of 6 eggs are 4 * 6 = 24 eggs. The answer is 24.\n\n"
)
QUESTIONS = {
    "pens": "Leo has 12 pens and gives 5 away. How many has he left?",
    "walk": "A walk takes 3 hours at 4 km an hour. How long is it in km?",
    "cake": "A cake is cut into 8 pieces, 3 are eaten. How many are left?",
}


async def solve(root: SearchNode) -> SearchOutcome:
    """Vote; a solution without a number has no say."""
    return await majority(root, lambda node: numeric_answer(node.text), max_samples=40)


@click.command()
@click.argument("checkpoint")
def main(checkpoint: str) -> None:
    """Answer the questions with the model in CHECKPOINT."""
    problems = [(name, f"{FEW_SHOT}Q: {text}\nA:") for name, text in QUESTIONS.items()]
    params = SamplingParams(temperature=0.7, max_tokens=64, stop=["Q:", "\n\n"], seed=1)
    for result in LLM(checkpoint).search(solve, problems, params):
        print(f"{result.name}: {result.answer} of {len(result.answers)} samples", result.votes)
        print(f"   {result.stopped or 'all drawn'}; {result.usage.tokens_decoded:,} tokens decoded")


if __name__ == "__main__":
    main()
