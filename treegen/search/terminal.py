"""A search tree for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from treegen.search.tree import NodeRecord
from treegen.terminal import safe_text

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree


def draw_tree(nodes: Sequence[NodeRecord], best: int | None = None, *, width: int = 60) -> Tree:
    """Return a tree for rich to print, the path to the node `best` marked by stars.

    nodes: parents before children, as `SearchTree.nodes`. width: characters of text per node; a
    longer text shows its two ends. A node's value stands before its text. What was pruned is dim.
    """
    from rich.tree import Tree

    marked = set()
    at = best
    while at is not None:
        marked.add(at)
        at = nodes[at].parent_id
    branches: list[Tree] = []
    for node in nodes:
        label = _label(node, node.id in marked, width)
        style = "green" if node.id in marked else "dim" if node.pruned else "default"
        if node.parent_id is None:
            branches.append(Tree(label, guide_style="dim"))
        else:
            branches.append(branches[node.parent_id].add(label, guide_style="dim"))
        label.stylize(style)
    return branches[0]


def _label(node: NodeRecord, marked: bool, width: int) -> Text:
    from rich.text import Text

    shown = node.text.replace("\n", "\\n").replace("\t", "\\t")
    if len(shown) > width:
        head = (width - 3) // 2
        shown = f"{shown[:head]}...{shown[len(shown) - (width - 3 - head) :]}"
    parts = ["* " if marked else ""]
    if node.score is not None:
        parts.append(f"{node.score:.4g}  ")
    parts.append(safe_text(shown) or "(nothing)")
    if node.n_tokens:
        parts.append(f"  {node.n_tokens} tokens, logprob {node.logprob:.2f}")
    if node.finish_reason == "length":
        parts.append(", cut")
    if node.pruned:
        parts.append("  pruned")
    return Text("".join(parts), no_wrap=True, overflow="ellipsis")
