"""A task's prompts as chat messages: each few-shot example as two turns, or all in one turn.

The formats are lm-eval's, with and without its --fewshot_as_multiturn.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from treegen.errors import InputError, arg
from treegen.prompts.tree import Message, Node, prompts_of

_TURNS: Final = "turns"
_ROLE: Final = "role"

Turn = tuple[str, str]
"""The question and the answer of a few-shot example."""


def with_turns(node: Node, turns: Iterable[Turn]) -> Node:
    """Return a node of few-shot examples that also stores them as turns, in text order."""
    return replace(node, metadata={**node.metadata, _TURNS: tuple(turns)})


def with_role(node: Node, role: str) -> Node:
    """Return a node with a role: "system" for system text, "assistant" for the start of the reply.

    A "gap" is text that only separates other nodes where there is no chat.
    """
    return replace(node, metadata={**node.metadata, _ROLE: role})


def as_chat(
    tree: Node, system: str | None, *, multiturn: bool, template: Mapping[str, Any] | None = None
) -> Node:
    """Return the tree with each prompt as chat messages, after a system turn if there is one.

    The few-shot examples are no longer a node of their own, but stay shared: prompts that start
    alike are rendered alike, and the plan finds what is shared in the tokens.

    Args:
        tree: The prompt tree of a task.
        system: The text of the system turn; None for none.
        multiturn: Make a user's and an assistant's turn of each few-shot example, if the task
            separates them.
        template: Arguments of the chat template.
    """
    leaves = [
        Node(
            _messages(prompt.path, system, multiturn),
            samples=prompt.samples,
            id=prompt.id,
            template={**(template or {}), **prompt.template},
        )
        for prompt in prompts_of(tree)
    ]
    return Node("", children=leaves, samples=0)


def _messages(path: Sequence[Node], system: str | None, multiturn: bool) -> list[Message]:
    contents = [node.content for node in path if node.content]
    if contents and all(node.has_messages for node in path if node.content):
        turns: list[Any] = [message for content in contents for message in content]
        if not system or turns[0].get("role") != "system":
            return [*_turn("system", system or ""), *turns]
        # Chat templates take one system turn.
        content = turns[0].get("content") or ""
        if isinstance(content, str):
            joined: Any = _join_system_texts(system, content)
        else:
            first = str(content[0].get("text") or "")
            text = _join_system_texts(system, first).removesuffix(first)
            joined = [{"type": "text", "text": text}, *content]
        return [{**turns[0], "content": joined}, *turns[1:]]
    if not all(isinstance(content, str) for content in contents):
        raise InputError(
            f"{arg('apply_chat_template')} needs a task whose prompts are text or chat messages"
        )
    messages: list[Message] = []
    system_text, user, reply = system or "", "", ""
    for node in filter(lambda node: node.content, path):
        text, role = str(node.content), node.metadata.get(_ROLE)
        if role == "system":
            system_text = _join_system_texts(system_text, text)
        elif role == "assistant":
            reply += text
        elif role == "gap":
            continue
        elif multiturn and node.metadata.get(_TURNS):
            for question, answer in node.metadata[_TURNS]:
                messages += [*_turn("user", user + question), *_turn("assistant", answer)]
                user = ""
        else:
            user += text
    last = {"role": "user", "content": user}
    return [*_turn("system", system_text), *messages, last, *_turn("assistant", reply.lstrip(" "))]


def _turn(role: str, text: str) -> list[Message]:
    return [{"role": role, "content": text}] if text else []


def _join_system_texts(system_text: str, text: str) -> str:
    """Join two system texts by a blank line, unless there is whitespace between them already."""
    blank = not system_text or not text or system_text[-1].isspace() or text[0].isspace()
    return f"{system_text}{'' if blank else chr(10) * 2}{text}"
