"""A search tree as a graph: Graphviz, Mermaid, and a picture for notebooks."""

import xml.dom.minidom
from typing import Any

import pytest
from rich.console import Console

from treegen import LLM, Node, SamplingParams
from treegen.search.tree.records import NodeRecord, SearchTree, draw_tree


def node(id: int, parent: int | None, depth: int, text: str, **more: Any) -> NodeRecord:
    fields: dict[str, Any] = {
        "score": 0.5,
        "logprob": -1.0,
        "n_tokens": 3,
        "leaf": False,
        "pruned": False,
    }
    fields["finish_reason"] = "given" if parent is None else "stop"
    return NodeRecord(id=id, parent_id=parent, depth=depth, text=text, **(fields | more))


@pytest.fixture(name="tree")
def _tree() -> SearchTree:
    return SearchTree(
        (
            node(0, None, 0, 'Q <b>& "one"'),
            node(1, 0, 1, "a first thought that is far too long for one line of a picture"),
            node(2, 0, 1, "second\x1b[2J", leaf=True, pruned=True),
            node(3, 1, 2, "end", leaf=True),
        )
    )


def test_the_best_path_is_bold_and_pruned_nodes_are_dashed(tree: SearchTree) -> None:
    dot = tree.to_dot(3, name="p0")
    assert dot.startswith('digraph "p0" {') and dot.count("n0 -> ") == 2
    assert dot.count("penwidth=3") == 5  # three nodes and two edges
    assert "dashed" in dot and tree.to_dot().count("penwidth=3") == 0
    mermaid = tree.to_mermaid(3)
    assert "n0 ==> n1" in mermaid and "n1 ==> n3" in mermaid and "n0 --> n2" in mermaid
    svg = tree.to_svg(3)
    assert svg.count('stroke-width="3"') == 5 and svg.count("stroke-dasharray") == 1


def test_labels_have_the_problem_and_why_nodes_were_pruned() -> None:
    prompt = f"{'Q: an example. ' * 9}Input: 2 3 7 11 Target: 49"
    why = {"pruned": True, "pruned_because": "outranked"}
    nodes = (node(0, None, 0, prompt), node(1, 0, 1, "2 * 3 = 6", leaf=True, **why))
    tree = SearchTree(nodes)
    for text in (tree.to_dot(), tree.to_mermaid()):
        assert "Target: 49" in text.replace("#58;", ":") and "bold: best path" in text
        assert "pruned: outranked" in text.replace("#58;", ":")
    assert "7 11 Target: 49</text>" in tree.to_svg()
    console = Console(width=200)
    with console.capture() as drawn:
        console.print(draw_tree(nodes))
    assert "score 0.500, logprob -1.00, 3 tokens, pruned: outranked" in drawn.get()


def test_a_dropped_node_is_not_called_pruned() -> None:
    nodes = (
        node(0, None, 0, "Q"),
        node(1, 0, 1, "left", leaf=True, dropped=True),
        node(2, 0, 1, "right", leaf=True, dropped=True, pruned=True),
    )
    tree = SearchTree(nodes)
    dot = tree.to_dot()
    assert "3 tokens, dropped" in dot and "3 tokens, pruned" in dot and dot.count("dashed") == 3
    mermaid = tree.to_mermaid()
    assert "class n2 pruned" in mermaid and "class n1 dropped" in mermaid
    assert nodes[1].to_json()["dropped"] and "dropped" not in nodes[0].to_json()


def test_the_picture_is_xml_and_holds_no_markup_of_the_texts(tree: SearchTree) -> None:
    svg = tree._repr_svg_()
    document = xml.dom.minidom.parseString(svg)
    assert len(document.getElementsByTagName("rect")) == len(tree.nodes)
    assert len(document.getElementsByTagName("path")) == len(tree.nodes) - 1
    assert "<b>" not in svg and "\x1b" not in svg


def test_leaves_have_rows_of_their_own_and_parents_stand_between(tree: SearchTree) -> None:
    document = xml.dom.minidom.parseString(tree.to_svg())
    tops = [float(each.getAttribute("y")) for each in document.getElementsByTagName("rect")]
    root, first, second, end = tops
    assert end == first and first < second and root == (first + second) / 2


def test_a_large_tree_is_drawn_in_part() -> None:
    nodes = [node(0, None, 0, "Q")] + [node(i, 0, 1, f"{i}", leaf=True) for i in range(1, 1000)]
    svg = SearchTree(tuple(nodes)).to_svg()
    assert svg.count("<rect") == 300 and "... and 700 more nodes" in svg


def test_results_show_themselves_in_a_notebook() -> None:
    async def draw_two(root: object) -> object:
        return await root.sample(2, max_tokens=4)  # type: ignore[attr-defined]

    with LLM("demo", dtype="float32", device="cpu", memory="16MiB") as llm:
        assert repr(llm).startswith("LLM('demo', float32 on cpu, at most ")
        assert "<p>LLM(" in llm._repr_html_()
        (result,) = llm.search(draw_two, ["1 + 2 ="])
        assert repr(result).startswith("SearchResult(") and "3 nodes" in repr(result)
        assert repr(result.tree) == "SearchTree(3 nodes)"
        assert result._repr_svg_() == result.tree.to_svg(result.best)
        plan = llm.plan(Node("a prompt <b>", samples=1))
        assert repr(plan).startswith("Plan(1 prompts, 1 samples, ")
        assert plan._repr_html_().startswith("<pre>")
        run = llm.run(Node("1 + 2 =", samples=2), SamplingParams(max_tokens=2))
        assert repr(run).startswith("RunResult(2 completions, Plan(")
        (score,) = llm.score([("1 + 2 =", " 3")])
        assert repr(score).startswith(f"Score(logprob={score.logprob:.4f}, ")
        (completion,) = llm.generate(["1 + 2 ="], SamplingParams(max_tokens=60))[0]
        shown = repr(completion)
        assert shown.startswith("Completion('") and f"{completion.num_tokens} tokens" in shown
        assert len(shown) < 200 and "logprobs" not in shown
        assert "<pre>" in completion._repr_html_()
