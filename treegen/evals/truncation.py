"""Shorten prompts that are too long for a model by leaving out nodes that a task marks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from treegen.prompts.tree import Node, prompts_of

_MARK: Final = "droppable"


def mark_droppable(node: Node) -> Node:
    """Mark a node that may be left out of a prompt; a prompt's last such node is dropped first."""
    return replace(node, metadata={**node.metadata, _MARK: True})


def truncate_prompts(
    tree: Node, lengths: Callable[[Node], Mapping[str, int]], limit: int
) -> tuple[Node, dict[str, int]]:
    """Leave droppable nodes out of prompts of more than `limit` tokens, until they fit.

    A prompt without a droppable node stays too long. The run rejects it later.

    Args:
        tree: The prompt tree.
        lengths: Returns the number of tokens of each prompt of a tree, by prompt id. It is called
            with the tree, and with every prompt that is shortened.
        limit: The largest allowed number of tokens of a prompt.

    Returns:
        The tree of the shortened prompts and, by prompt id, how many nodes were left out.
    """
    prompts = prompts_of(tree)
    paths: dict[str, tuple[Node, ...]] = {}
    pending = {prompt.id: prompt.path for prompt in prompts}
    dropped: dict[str, int] = {}
    length_of = lengths(tree)
    while True:
        pending = {
            name: _without_last(path)
            for name, path in pending.items()
            if length_of[name] > limit and _marked_indices(path)
        }
        if not pending:
            break
        paths |= pending
        for name in pending:
            dropped[name] = dropped.get(name, 0) + 1
        length_of = lengths(_from_paths(pending))
    if not dropped:
        return tree, {}
    path_of = {prompt.id: paths.get(prompt.id, prompt.path) for prompt in prompts}
    return _from_paths(path_of), dropped


def drop_all_droppable(tree: Node) -> Node:
    """Return a tree of the same prompts without any droppable node."""
    if not any(_marked_indices(prompt.path) for prompt in prompts_of(tree)):
        return tree
    return _from_paths(
        {
            prompt.id: tuple(node for node in prompt.path if not node.metadata.get(_MARK))
            for prompt in prompts_of(tree)
        }
    )


def _marked_indices(path: Sequence[Node]) -> list[int]:
    return [index for index, node in enumerate(path) if node.metadata.get(_MARK)]


def _without_last(path: tuple[Node, ...]) -> tuple[Node, ...]:
    index = _marked_indices(path)[-1]
    return path[:index] + path[index + 1 :]


def _from_paths(paths: Mapping[str, tuple[Node, ...]]) -> Node:
    """Return a tree with one chain of nodes per prompt; the plan finds what chains share."""
    chains = [
        chain_below(path[:-1], replace(path[-1], children=(), id=name))
        for name, path in paths.items()
    ]
    return Node("", children=chains, samples=0)


def chain_below(ancestors: Sequence[Node], node: Node) -> Node:
    """Return a node below copies of its ancestors, which have no other children."""
    for ancestor in reversed(ancestors):
        node = replace(ancestor, children=[node], samples=0, id=None)
    return node
