"""Stored search trees: `trees.jsonl`, one record for each finished search.

A record holds `nodes`, parents before their children, and names the node where the best path ends.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from treegen.errors import RunError
from treegen.runs import RecordFile
from treegen.search.tree.graphs import to_dot, to_mermaid, to_svg
from treegen.search.tree.records import TreeNode, best_path

if TYPE_CHECKING:
    from rich.tree import Tree

FILE: Final = "trees.jsonl"
_READ: Final = ("depth", "text", "logprob", "n_tokens", "pruned")


@dataclass(frozen=True, slots=True)
class StoredTree:
    """A finished search, as its record stores it."""

    problem_id: str
    """The id of its problem."""
    method: str
    """The name of the search method."""
    solved: bool | None
    """Whether its answer is correct; None if that is not known."""
    answer: str | None
    """The answer that it found, if any."""
    best: int | None
    """The id of the node where the best path ends, if there is one."""
    nodes: tuple[TreeNode, ...]
    """The nodes of its tree, parents before their children."""
    stopped: str = ""
    """Why it ended."""
    usage: Mapping[str, Any] = field(default_factory=dict)
    """What it cost."""
    repeat: int = 0
    """Its index among the searches of the problem, from 0."""

    @property
    def num_tokens(self) -> int:
        """The number of generated tokens, including evaluations if the record counts them."""
        known = self.usage.get("tokens_decoded")
        return sum(node["n_tokens"] or 0 for node in self.nodes) if known is None else int(known)

    def draw(self, *, full: bool = False) -> "Tree":
        """Return a tree for rich to print, with the best path marked.

        Args:
            full: Whether a node may take several lines; otherwise each is one line, cut at the
                width of the terminal.
        """
        from treegen.search.tree.draw import draw_tree

        return draw_tree(self.nodes, self.best, full=full)

    def to_dot(self) -> str:
        """Return the tree in the language of Graphviz."""
        return to_dot(self.nodes, best_path(self.nodes, self.best), self.problem_id)

    def to_mermaid(self) -> str:
        """Return the tree as a Mermaid flowchart."""
        return to_mermaid(self.nodes, best_path(self.nodes, self.best))

    def _repr_svg_(self) -> str:
        return to_svg(self.nodes, best_path(self.nodes, self.best))

    @property
    def path(self) -> list[TreeNode]:
        """The nodes of the best path, the root first."""
        marked = best_path(self.nodes, self.best)
        return [node for node in self.nodes if node["id"] in marked]


def read_trees(folder: Path) -> tuple[StoredTree, ...]:
    """Return the finished searches of a run; none if it is not a search run.

    Raises:
        RunError: the nodes of a record are not a tree, or the file cannot be read.
    """
    path = folder / FILE
    if not path.exists():
        return ()
    file = RecordFile(path, writable=False)
    try:
        return tuple(_tree(record, path) for record in file.records())
    finally:
        file.close()


def _tree(record: Mapping[str, Any], path: Path) -> StoredTree:
    known: set[int] = set()
    try:
        for node in record["nodes"]:
            if (node["parent_id"] is None) == bool(known) or node["id"] in known:
                raise ValueError("its nodes are not one tree, parents first")
            if known and node["parent_id"] not in known:
                raise ValueError(f"node {node['id']} stands before its parent")
            known.add(node["id"])
            if lacking := [name for name in _READ if name not in node]:
                raise ValueError(f"node {node['id']} lacks {lacking[0]}")
        return StoredTree(
            problem_id=record["problem_id"],
            method=str(record["method"]),
            solved=record.get("solved"),
            answer=record.get("answer"),
            best=record.get("best"),
            nodes=tuple(record["nodes"]),
            stopped=str(record.get("stopped") or ""),
            usage=record.get("usage") or {},
            repeat=int(record.get("sample_index") or 0),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{path}: the tree of problem {record.get('problem_id')!r} cannot be read ({error}); "
            "restore the file from a copy"
        ) from None
