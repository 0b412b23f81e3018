"""Sample a prompt tree from Python: few-shot prompt -> problems -> samples, then vote.

    python examples/sample_a_tree.py DIR

DIR is a checkpoint; demo is the model that comes with treegen.
"""

from collections import defaultdict

import click

from treegen import LLM, Node, SamplingParams
from treegen.tasks import majority_vote
from treegen.tasks.common.answers import numeric_answer

FEW_SHOT = (
    "Q: Mia has 4 boxes of 6 eggs. How many eggs has she?\n"
    "A: 4 boxes of 6 eggs are 4 * 6 = 24 eggs. The answer is 24.\n\n"
)
QUESTIONS = {
    "pens": "Leo has 12 pens and gives 5 away. How many has he left?",
    "walk": "A walk takes 3 hours at 4 km an hour. How long is it in km?",
}


@click.command()
@click.argument("checkpoint")
@click.option("--samples", default=16, show_default=True)
def main(checkpoint: str, samples: int) -> None:
    """Sample the problems with the model in CHECKPOINT and print the votes."""
    llm = LLM(checkpoint)
    leaves = [Node(f"Q: {text}\nA:", samples=samples, id=name) for name, text in QUESTIONS.items()]
    tree = Node(FEW_SHOT, children=leaves)
    print(llm.plan(tree))

    answers = defaultdict(list)
    params = SamplingParams(temperature=0.7, max_tokens=64, stop=["Q:", "\n\n"], seed=1)
    with llm.stream(tree, params) as stream:
        for completion in stream:  # in the order in which samples finish
            answers[completion.prompt_id].append(numeric_answer(completion.text))
    for name, votes in answers.items():
        print(f"{name}: {majority_vote(votes)}")
    print(f"{stream.usage.tokens_per_second:,.0f} tokens per second")


if __name__ == "__main__":
    main()
