"""A problem's prompt and samples as a tree like that of a search."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from treegen.evals.statistics.votes import majority_vote
from treegen.prompts.images.loading import describe_content
from treegen.prompts.tree import Node, prompts_of
from treegen.report.trees import StoredTree
from treegen.report.view import ProblemView

SAMPLES: Final = "samples"
"""The method of a tree of samples."""


def prompt_tree(root: Node | None, problem: ProblemView, filter: str) -> StoredTree:
    """Return one problem's prompt with its samples below, as a tree like that of a search.

    The best node is the first sample with the elected answer of the vote. A correct sample has the
    score 1, another 0, and an unscored sample has none.

    Args:
        root: The declared prompts; if None, the problem's question replaces the prompt.
        problem: The problem.
        filter: The filter that reads the answers.
    """
    nodes: list[dict[str, Any]] = []

    def add(text: str, leaf: bool, **more: Any) -> None:
        parent = None if not nodes else stem if leaf else nodes[-1]["id"]
        depth = 0 if parent is None else nodes[parent]["depth"] + 1
        nodes.append(
            {
                "id": len(nodes),
                "parent_id": parent,
                "depth": depth,
                "text": text,
                "score": None,
                "logprob": None,
                "n_tokens": 0,
                "leaf": leaf,
                "pruned": False,
                "finish_reason": "given",
                **more,
            }
        )

    stem = 0
    prompts = prompts_of(root) if root is not None else []
    path = next((prompt.path for prompt in prompts if prompt.id == problem.id), ())
    for node in path:
        if node.content:
            add(content_text(node), leaf=False)
    if not nodes:
        add(problem.question or problem.id, leaf=False)
    stem = nodes[-1]["id"]
    verdicts = [(sample.verdicts or {}).get(filter) for sample in problem.samples]
    vote = majority_vote(verdict.answer for verdict in verdicts if verdict is not None)
    best: int | None = None
    for sample, verdict in zip(problem.samples, verdicts, strict=True):
        if best is None and verdict is not None and verdict.answer == vote.answer is not None:
            best = len(nodes)
        add(
            sample.text,
            leaf=True,
            score=None if verdict is None else float(verdict.correct),
            logprob=sample.logprob,
            n_tokens=sample.num_tokens,
            finish_reason=sample.finish_reason,
        )
    solved = None if best is None else nodes[best]["score"] == 1.0
    return StoredTree(problem.id, SAMPLES, solved, vote.answer, best, tuple(nodes))


def content_text(node: Node) -> str:
    """Return a node's content as text for people."""
    if isinstance(node.content, str):
        return node.content
    if node.has_messages:
        turns = cast("Sequence[Mapping[str, Any]]", node.content)
        return "\n".join(f"{turn['role']}: {describe_content(turn['content'])}" for turn in turns)
    return f"{len(node.content):,} token ids: {' '.join(map(str, node.content[:50]))}"
