"""Search trees as graphs for Graphviz and Mermaid.

The report page has the same conversion in page/export.js.
"""

import re
from collections.abc import Iterator
from typing import Final

from treegen.common.formatting import safe_text
from treegen.report.trees import StoredTree
from treegen.search.tree.records import TreeNode, best_path

# The number of characters shown of a node's text.
_SHOWN: Final = 40


def to_dot(tree: StoredTree) -> str:
    """Return a tree in the language of Graphviz: the best path bold, pruned nodes dashed."""
    best = best_path(tree.nodes, tree.best)
    lines = [
        f"digraph {_quote_dot(safe_text(tree.problem_id))} {{",
        "  rankdir=LR;",
        '  node [shape=box, style="rounded"];',
    ]
    for node in tree.nodes:
        label = r"\n".join(_quote_dot(line)[1:-1] for line in _lines(node))
        style = ', style="rounded,dashed"' if node["pruned"] else ""
        bold = ", penwidth=3" if node["id"] in best else ""
        lines.append(f'  n{node["id"]} [label="{label}"{style}{bold}];')
    for node in tree.nodes:
        if node["parent_id"] is not None:
            bold = " [penwidth=3]" if node["id"] in best else ""
            lines.append(f"  n{node['parent_id']} -> n{node['id']}{bold};")
    return "\n".join([*lines, "}", ""])


def to_mermaid(tree: StoredTree) -> str:
    """Return a tree as a Mermaid flowchart: the best path thick, pruned nodes dashed."""
    best = best_path(tree.nodes, tree.best)
    lines = ["flowchart LR"]
    for node in tree.nodes:
        label = "<br>".join(map(_escape_mermaid, _lines(node)))
        lines.append(f'  n{node["id"]}["{label}"]')
    for node in tree.nodes:
        if node["parent_id"] is not None:
            arrow = "==>" if node["id"] in best else "-->"
            lines.append(f"  n{node['parent_id']} {arrow} n{node['id']}")
    for name, style, ids in (
        ("best", "stroke-width:4px", [node["id"] for node in tree.nodes if node["id"] in best]),
        ("pruned", "stroke-dasharray:4", [node["id"] for node in tree.nodes if node["pruned"]]),
    ):
        if ids:
            names = ",".join(f"n{id}" for id in ids)
            lines += [f"  classDef {name} {style}", f"  class {names} {name}"]
    return "\n".join([*lines, ""])


def _lines(node: TreeNode) -> Iterator[str]:
    """Yield the lines of a node's label."""
    text = " ".join(safe_text(str(node.get("text") or "")).split())
    yield (text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...") or "(empty)"
    facts = []
    if node.get("score") is not None:
        facts.append(f"score {node['score']:.3f}")
    if node.get("visits"):
        facts.append(f"visits {node['visits']}")
    if node.get("n_tokens"):
        facts.append(f"{node['n_tokens']} tokens")
    if facts:
        yield ", ".join(facts)


def _quote_dot(text: str) -> str:
    return '"' + re.sub(r'[\\"]', r"\\\g<0>", text) + '"'


def _escape_mermaid(text: str) -> str:
    """Return a text in which every character that Mermaid could interpret is an entity."""
    return re.sub(r"[^\w .,+*/=-]", _to_entity, text, flags=re.ASCII)


def _to_entity(match: re.Match[str]) -> str:
    sign = match[0]
    return f"#{ord(sign)};" if ord(sign) < 128 else sign
