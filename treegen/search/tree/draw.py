"""Draw a search tree in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from treegen.common.checks import check_argument_types
from treegen.common.formatting import safe_text
from treegen.search.tree.graphs import describe_ended
from treegen.search.tree.records import NodeRecord, TreeNode, best_path, children_of

# Maximum number of characters of a text. The terminal cuts the line at its width anyway.
_SHOWN: Final = 1000
_PROMPT: Final = 80

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree


@check_argument_types
def draw_tree(
    nodes: Sequence[NodeRecord | TreeNode], best: int | None = None, *, full: bool = False
) -> Tree:
    """Return a rich Tree for the terminal. The path to the node `best` is bold and marked with *.

    Args:
        nodes: Nodes of a `SearchTree`, or records as in `trees.jsonl`, parents before children.
        best: Id of the node to mark the path to; None marks no path.
        full: Whether a text may take many lines. Otherwise each node is one line, cut at the width
            of the terminal.
    """
    from rich.tree import Tree

    records = [node.to_json() if isinstance(node, NodeRecord) else node for node in nodes]
    path, below = best_path(records, best), children_of(records)
    top = Tree("", hide_root=True)
    # No recursion, because a chain of thoughts may be deeper than the interpreter allows.
    stack = [(top, node) for node in reversed(below.get(None, []))]
    while stack:
        branch, node = stack.pop()
        label = _label(node, node["id"] in path, full=full)
        inner = branch.add(label)
        stack += [(inner, child) for child in reversed(below.get(node["id"], []))]
    return top.children[0] if len(top.children) == 1 else top


def _label(node: TreeNode, on_path: bool, *, full: bool) -> Text:
    from rich.text import Text

    drawn = node.get("n_tokens") or 0  # a prompt has none
    facts = [] if node.get("score") is None else [f"score {node['score']:.3f}"]
    if drawn and node.get("logprob") is not None:
        facts.append(f"logprob {node['logprob']:.2f}")
    if drawn:
        facts.append(f"{drawn:,} tokens")
    if node.get("leaf") and node.get("finish_reason") == "length":
        facts.append("cut off")
    if ended := describe_ended(node):
        facts.append(ended)
    label = Text(no_wrap=not full, overflow="fold" if full else "ellipsis")
    label.append("* " if on_path else "", style="bold")
    label.append(f"[{', '.join(facts)}] " if facts else "", style="dim")
    text = str(node.get("text") or "")
    if not full:
        # Show the end of a prompt, because the question is there.
        prompt = node.get("parent_id") is None and len(text) > _PROMPT
        text = f"...{text[-_PROMPT:]}" if prompt else text[:_SHOWN]
    line = " ".join(safe_text(text).split())
    label.append(line or "(empty)", style="bold" if on_path else "")
    return label
