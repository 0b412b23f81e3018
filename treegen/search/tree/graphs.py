"""Search trees as graphs for Graphviz and Mermaid, and as SVG for notebooks.

The report page has the first two conversions in page/export.js.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, Final

from treegen.common.formatting import safe_text

# The number of characters shown of a node's text, and of the end of the prompt.
_SHOWN: Final = 40
_PROMPT: Final = 80
_LEGEND: Final = (
    "bold: best path; dashed: pruned by the method or dropped by the function; score: value of a "
    "node, higher is better"
)
# Of an SVG: the largest number of nodes, the size of a column and a row, and characters of a text.
_MAX_DRAWN_NODES: Final = 300
_COLUMN: Final = 230
_ROW: Final = 30
_SVG_SHOWN: Final = 29


def describe_ended(node: Mapping[str, Any]) -> str:
    """Return "pruned" with the reason if it is known, or "dropped"; "" for any other node."""
    if not node.get("pruned"):
        return "dropped" if node.get("dropped") else ""
    reason = safe_text(str(node.get("pruned_because") or ""))
    return f"pruned: {reason}" if reason else "pruned"


def to_dot(nodes: Sequence[Mapping[str, Any]], path: frozenset[int], name: str) -> str:
    """Return a tree in the language of Graphviz: the best path bold, ended nodes dashed.

    Args:
        nodes: The nodes, parents before their children.
        path: The ids of the nodes on the best path.
        name: The name of the graph.
    """
    lines = [
        f"digraph {_quote_dot(safe_text(name))} {{",
        "  rankdir=LR;",
        '  node [shape=box, style="rounded"];',
        f"  label={_quote_dot(_LEGEND)};",
    ]
    for node in nodes:
        label = r"\n".join(_quote_dot(line)[1:-1] for line in _lines(node))
        style = ', style="rounded,dashed"' if describe_ended(node) else ""
        bold = ", penwidth=3" if node["id"] in path else ""
        lines.append(f'  n{node["id"]} [label="{label}"{style}{bold}];')
    for node in nodes:
        if node["parent_id"] is not None:
            bold = " [penwidth=3]" if node["id"] in path else ""
            lines.append(f"  n{node['parent_id']} -> n{node['id']}{bold};")
    return "\n".join([*lines, "}", ""])


def to_mermaid(nodes: Sequence[Mapping[str, Any]], path: frozenset[int]) -> str:
    """Return a tree as a Mermaid flowchart: the best path thick, ended nodes dashed.

    Args:
        nodes: The nodes, parents before their children.
        path: The ids of the nodes on the best path.
    """
    lines = ["flowchart LR"]
    for node in nodes:
        label = "<br>".join(map(_escape_mermaid, _lines(node)))
        lines.append(f'  n{node["id"]}["{label}"]')
    for node in nodes:
        if node["parent_id"] is not None:
            arrow = "==>" if node["id"] in path else "-->"
            lines.append(f"  n{node['parent_id']} {arrow} n{node['id']}")
    for name, style, ids in (
        ("best", "stroke-width:4px", [node["id"] for node in nodes if node["id"] in path]),
        ("pruned", "stroke-dasharray:4", [node["id"] for node in nodes if node["pruned"]]),
        (
            "dropped",
            "stroke-dasharray:4",
            [n["id"] for n in nodes if describe_ended(n) == "dropped"],
        ),
    ):
        if ids:
            names = ",".join(f"n{id}" for id in ids)
            lines += [f"  classDef {name} {style}", f"  class {names} {name}"]
    return "\n".join([*lines, f"  %% {_LEGEND}", ""])


def to_svg(nodes: Sequence[Mapping[str, Any]], path: frozenset[int]) -> str:
    """Return a tree as SVG, from left to right: the best path bold, ended nodes dashed.

    A large tree is drawn by its first nodes, and a line says how many are left out.

    Args:
        nodes: The nodes, parents before their children.
        path: The ids of the nodes on the best path.
    """
    visible = nodes[:_MAX_DRAWN_NODES]
    below: dict[Any, list[int]] = {}
    for index, node in enumerate(visible):
        below.setdefault(node["parent_id"], []).append(index)
    rows = _lay_out(visible, below)
    depths = [node["depth"] for node in visible]
    height = round(max(rows) * _ROW + 2 * _ROW)
    width = (max(depths) + 1) * _COLUMN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="monospace" font-size="11" '
        'fill="currentColor" stroke="none">'
    ]
    index_of = {node["id"]: index for index, node in enumerate(visible)}
    for index, node in enumerate(visible):
        x, y = depths[index] * _COLUMN + 8, rows[index] * _ROW + _ROW
        thick = 3 if node["id"] in path else 1
        if (parent := node["parent_id"]) is not None:
            above = index_of[parent]
            start = depths[above] * _COLUMN + _COLUMN - 18, rows[above] * _ROW + _ROW
            parts.append(
                f'<path d="M{start[0]} {start[1]:.0f}C{x - 6} {start[1]:.0f} {start[0] + 6} '
                f'{y:.0f} {x} {y:.0f}" fill="none" stroke="currentColor" stroke-width="{thick}"/>'
            )
        dashes = ' stroke-dasharray="4 3"' if describe_ended(node) else ""
        text, *facts = _lines(node)
        label = text
        if len(text) > _SVG_SHOWN:
            cut = _SVG_SHOWN - 1
            label = f"\u2026{text[-cut:]}" if parent is None else f"{text[:cut]}\u2026"
        title = escape("\n".join((safe_text(str(node.get("text") or "")), *facts)))
        parts.append(
            f'<g><title>{title}</title><rect x="{x}" y="{y - 11:.0f}" width="{_COLUMN - 26}" '
            f'height="22" rx="5" fill="none" stroke="currentColor" stroke-width="{thick}"{dashes}/>'
            f'<text x="{x + 6}" y="{y + 4:.0f}">{escape(label)}</text></g>'
        )
    if len(nodes) > len(visible):
        note = f"... and {len(nodes) - len(visible):,} more nodes"
        parts.append(f'<text x="8" y="{height - 6}">{note}</text>')
    return "".join((*parts, "</svg>"))


def _lay_out(nodes: Sequence[Mapping[str, Any]], below: dict[Any, list[int]]) -> list[float]:
    """Return the row of each node: leaves have rows of their own, parents stand in the middle.

    Args:
        nodes: The nodes, parents before their children.
        below: The indices of the children of each id.
    """
    order, stack = [], list(reversed(below.get(None, [])))
    while stack:  # depth first, so that the rows of a subtree are neighbours
        index = stack.pop()
        order.append(index)
        stack += reversed(below.get(nodes[index]["id"], []))
    rows, next_row = [0.0] * len(nodes), 0
    for index in order:
        if nodes[index]["id"] not in below:
            rows[index], next_row = float(next_row), next_row + 1
    for index in reversed(order):
        if children := below.get(nodes[index]["id"]):
            rows[index] = (rows[children[0]] + rows[children[-1]]) / 2
    return rows


def _lines(node: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a node's label."""
    text = " ".join(safe_text(str(node.get("text") or "")).split())
    if node["parent_id"] is None:  # the problem is at the end of a prompt
        yield (text if len(text) <= _PROMPT else f"...{text[-_PROMPT:]}") or "(empty)"
    else:
        yield (text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...") or "(empty)"
    facts = []
    if node.get("score") is not None:
        facts.append(f"score {node['score']:.3f}")
    if node.get("visits"):
        facts.append(f"visits {node['visits']}")
    if node.get("n_tokens"):
        facts.append(f"{node['n_tokens']} tokens")
    if ended := describe_ended(node):
        facts.append(ended)
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
