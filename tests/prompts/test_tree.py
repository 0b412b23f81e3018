"""Declared trees: what is refused and where, ids and order of prompts."""

from __future__ import annotations

from typing import Any

import pytest

from treegen.errors import TreeError
from treegen.prompts.tree import Node, Prompt, prompts_of


def test_prompts_are_listed_depth_first_in_declared_order() -> None:
    root = Node("r", children=[Node("a", children=[Node("b"), Node("c")]), Node("d")])
    assert [(prompt.id, prompt.node.content) for prompt in prompts_of(root)] == [
        ("0/0/0", "b"),
        ("0/0/1", "c"),
        ("0/1", "d"),
    ]


def test_a_prompt_has_the_path_from_the_root() -> None:
    leaf = Node("leaf", samples=3)
    inner = Node("inner", children=[leaf])
    root = Node("root", children=[inner])
    assert prompts_of(root) == [Prompt("0/0/0", (root, inner, leaf), 3)]


def test_leaves_are_sampled_once_and_inner_nodes_not_unless_declared() -> None:
    root = Node("r", samples=2, children=[Node("a"), Node("b", samples=0), Node("c", samples=7)])
    assert [(prompt.id, prompt.samples) for prompt in prompts_of(root)] == [
        ("0", 2),
        ("0/0", 1),
        ("0/2", 7),
    ]


def test_a_single_node_is_a_tree() -> None:
    assert [prompt.id for prompt in prompts_of(Node("text"))] == ["0"]


def test_given_ids_replace_the_default_ones() -> None:
    root = Node("r", id="root", children=[Node("a", id="first"), Node("b")])
    assert [prompt.id for prompt in prompts_of(root)] == ["first", "0/1"]


def test_one_node_may_stand_in_several_places() -> None:
    twice = Node("again")
    assert [p.id for p in prompts_of(Node("r", children=[twice, twice]))] == ["0/0", "0/1"]


def test_a_chain_of_5000_nodes_is_walked() -> None:
    node = Node("end")
    for _ in range(5_000):
        node = Node("x", children=[node])
    (prompt,) = prompts_of(node)
    assert len(prompt.path) == 5_001
    assert prompt.id == "/".join(["0"] * 5_001)


def test_children_given_as_a_generator_or_a_list_become_a_tuple() -> None:
    children = [Node("a"), Node("b")]
    node = Node("r", children=(child for child in children))  # type: ignore[arg-type]
    assert node.children == tuple(children)
    listed = Node("r", children=children)
    children.append(Node("c"))
    assert len(listed.children) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": -1}, "samples must be an integer >= 0 or None, got -1"),
        ({"samples": 1.0}, "samples must be an integer >= 0 or None, got 1.0"),
        ({"samples": True}, "samples must be an integer >= 0 or None, got True"),
        ({"id": ""}, "id must be a non-empty string or None, got ''"),
        ({"id": 3}, "id must be a non-empty string or None, got 3"),
        ({"children": "text"}, "children must be a sequence of Nodes, got str"),
        ({"children": 5}, "children must be a sequence of Nodes, got int"),
        ({"children": Node("a")}, "children must be a sequence of Nodes, got Node"),
        ({"children": ["text"]}, r"children\[0\] must be a Node, got str; wrap"),
        ({"metadata": None}, "metadata must be a mapping, got NoneType"),
        ({"content": None}, "content must be a string, .*, got NoneType"),
        ({"content": b"text"}, "content must be a string, .*, got bytes"),
        ({"content": [1, -2]}, r"content\[1\] must be .*, got -2"),
        ({"content": [2**31]}, r"content\[0\] must be .*, got 2147483648"),
        ({"content": [1, True]}, r"content\[1\] must be .*, got True"),
        ({"content": [1.5]}, r"content\[0\] must be .*, got 1.5"),
        ({"content": ["a", "b"]}, r"content\[0\] must be .*, got 'a'"),
        ({"content": [{"role": "user"}]}, r"content\[0\]\['content'\] must be a string, got None"),
        (
            {"content": [{"role": 1, "content": "x"}]},
            r"content\[0\]\['role'\] must be a string, got 1",
        ),
        (
            {"content": [{"role": "user", "content": "x"}, 3]},
            r"content\[1\] must be a chat message, got int",
        ),
    ],
)
def test_a_bad_node_is_refused_where_it_is_made(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TreeError, match=message):
        Node(**arguments)


def test_two_sampled_nodes_with_one_id_are_refused() -> None:
    with pytest.raises(TreeError, match="two sampled nodes have the id 'x'"):
        prompts_of(Node(children=[Node("a", id="x"), Node("b", id="x")]))
    # A default id may clash with a given one as well.
    with pytest.raises(TreeError, match="two sampled nodes have the id '0/1'"):
        prompts_of(Node(children=[Node("a", id="0/1"), Node("b")]))


def test_a_node_without_samples_may_share_its_id() -> None:
    root = Node("r", id="x", children=[Node("a", id="x")])
    assert [prompt.id for prompt in prompts_of(root)] == ["x"]


def test_a_tree_without_samples_is_refused() -> None:
    with pytest.raises(TreeError, match="no samples"):
        prompts_of(Node("r", children=[Node("a", samples=0)]))


def test_something_else_than_a_node_is_refused() -> None:
    with pytest.raises(TreeError, match="the tree must be a Node, got str"):
        prompts_of("text")  # type: ignore[arg-type]


MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("other", ["text", [1, 2]])
@pytest.mark.parametrize("chat_first", [True, False])
def test_messages_do_not_mix_with_text_or_ids_on_a_path(other: Any, chat_first: bool) -> None:
    above, below = (MESSAGES, other) if chat_first else (other, MESSAGES)
    # An empty node between them does not hide the clash.
    root = Node(above, children=[Node(children=[Node(below, id="clash")])])
    with pytest.raises(TreeError, match="'clash' and a node above it mix chat messages"):
        prompts_of(root)


def test_text_and_messages_may_be_siblings_below_an_empty_root() -> None:
    root = Node(children=[Node(MESSAGES), Node("text"), Node([1, 2], children=[Node("text")])])
    assert [prompt.id for prompt in prompts_of(root)] == ["0/0", "0/1", "0/2/0"]
