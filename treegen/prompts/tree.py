"""The prompt tree that a user declares, and the prompts of its sampled nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final, cast

from treegen.errors import InputError, TreeError
from treegen.prompts.expansion import Expand
from treegen.prompts.images.loading import is_image, source_of

Message = Mapping[str, Any]
"""One chat turn: {"role": ..., "content": ...} and other keys that the chat template reads. A
message with tool_calls may omit the content. The content is a string, or a list of parts:
{"type": "text", "text": ...} and {"type": "image", "image": ...} with a path, a data URL, the bytes
of a file or a PIL image."""
Parts = Sequence[Mapping[str, Any]]
"""The content of a message as a list of parts."""
_OWN_ARGUMENTS: Final = (
    "conversation",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "return_dict",
    "return_tensors",
    "padding",
    "truncation",
    "max_length",
    "tokenizer_kwargs",
    "return_assistant_tokens_mask",
)

_RUN_TREE: Final = "pass the root of a tree to llm.run"

MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Node:
    """A piece of a prompt, its possible continuations, and the number of samples drawn after it.

    The prompt of a node is the content of all nodes from the root down to it. Along one path the
    content is either chat messages, or text and token ids in any mixture. Empty content fits both.

    Raises:
        TreeError: a field has a value that cannot be used.
    """

    content: str | Sequence[int] | Sequence[Message] = ""
    _: KW_ONLY
    children: Sequence[Node] = ()
    samples: int | None = None
    """Completions to draw after this node; None means 1 for a leaf and 0 for an inner node."""
    id: str | None = None
    """A name that is unique among sampled nodes. The default joins the child indices on the path,
    such as "0/3/1"; the root's is "0"."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The caller's notes on the node; sampling does not depend on them."""
    expand: Sequence[Expand] = ()
    """Levels to generate after this node, instead of samples; see `LLM.expand`."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template for all prompts below, such as `tools`, `documents` or
    `enable_thinking`. An argument of a node replaces the same argument of the nodes above it.
    `reasoning` is "on", "off" or an effort ("low", "medium", "high"); treegen translates it to the
    template's own argument."""

    def __post_init__(self) -> None:
        _check_content(self.content)
        children: object = self.children
        if isinstance(children, str | Node) or not isinstance(children, Iterable):
            raise TreeError(f"children must be a sequence of Nodes, got {type(children).__name__}")
        # A list could still be changed, and a generator can be read only once.
        object.__setattr__(self, "children", tuple(children))
        for index, child in enumerate(self.children):
            if not isinstance(child, Node):
                raise TreeError(
                    f"children[{index}] must be a Node, got {type(child).__name__}; wrap the value "
                    "in a Node"
                )
        if self.samples is not None and (type(self.samples) is not int or self.samples < 0):
            raise TreeError(f"samples must be an integer >= 0 or None, got {self.samples!r}")
        if self.id is not None and (not isinstance(self.id, str) or not self.id):
            raise TreeError(f"id must be a non-empty string or None, got {self.id!r}")
        if not isinstance(self.metadata, Mapping):
            raise TreeError(f"metadata must be a mapping, got {type(self.metadata).__name__}")
        _check_template(self.template)
        object.__setattr__(self, "expand", _as_levels(self.expand))
        if self.expand and self.samples:
            raise TreeError(
                "samples and expand cannot be used together in one node; remove samples or expand"
            )

    @property
    def num_samples(self) -> int:
        """Completions drawn directly after this node."""
        if self.samples is None:
            return 0 if self.children or self.expand else 1
        return self.samples

    @property
    def has_messages(self) -> bool:
        """Whether the content is chat messages."""
        return bool(self.content) and isinstance(self.content[0], Mapping)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of one node that is sampled or generates levels."""

    id: str
    """The id of the node."""
    path: tuple[Node, ...]
    """The nodes from the root to it."""
    samples: int
    """Completions to draw after it; 0 for a node that generates levels."""
    num_prompts: int = field(default=0, compare=False)
    """Number of prompts of the call; 0 if it is not known."""

    @property
    def name(self) -> str:
        """What error messages call it."""
        return name_prompt(self.id, self.num_prompts)

    @property
    def node(self) -> Node:
        """The node itself."""
        return self.path[-1]

    @property
    def template(self) -> dict[str, Any]:
        """The arguments of the chat template, from all nodes of the path."""
        return {name: value for node in self.path for name, value in node.template.items()}

    @property
    def text(self) -> str:
        """The whole prompt if all of it is text; else empty."""
        contents = [node.content for node in self.path if node.content]
        is_text = all(isinstance(content, str) for content in contents)
        return "".join(map(str, contents)) if is_text else ""


def expansions_of(root: Node) -> list[Prompt]:
    """Return the prompts of the nodes of a tree that generate levels, depth first.

    Raises:
        TreeError: some node is sampled, or no node generates levels.
    """
    paths = _walk(root)
    sampled = [name for name, path in paths.items() if not path[-1].expand]
    if sampled:
        raise TreeError(
            f"node {sampled[0]!r} is sampled, but other nodes of the tree generate levels "
            "(expand); set samples=0 on the node, or put the two kinds of nodes into two trees"
        )
    if not paths:
        raise TreeError("no node generates levels; set expand=[Expand(...)] on at least one node")
    return [Prompt(name, path, 0) for name, path in paths.items()]


def has_expansions(root: Node) -> bool:
    """Whether some node of a tree generates levels."""
    return any(path[-1].expand for path in _walk(root).values())


def prompts_of(root: Node) -> list[Prompt]:
    """Return the prompts of a tree, depth first, children in declared order.

    Raises:
        TreeError: no node is sampled, or some node generates levels.
    """
    paths = _walk(root)
    for name, path in paths.items():
        if path[-1].expand:
            raise TreeError(
                f"node {name!r} generates levels (expand); run the tree with LLM.expand"
            )
    if not paths:
        raise TreeError("the tree has no samples; set samples >= 1 on at least one node")
    num = len(paths)
    return [Prompt(name, path, path[-1].num_samples, num) for name, path in paths.items()]


def name_prompt(prompt_id: str, num_prompts: int) -> str:
    """Return what an error message calls a prompt: by its id, unless it is a call's only prompt.

    Args:
        prompt_id: The id.
        num_prompts: Number of prompts of the call.
    """
    return "the prompt" if num_prompts == 1 and prompt_id == "0" else f"prompt {prompt_id!r}"


def as_list(name: str, values: Iterable[Any]) -> list[Any]:
    """Return an argument as a list.

    Args:
        name: The argument's name in error messages.
        values: The argument.

    Raises:
        InputError: it is a text, a mapping or a single object.
    """
    if isinstance(values, Node):
        raise InputError(f"{name} must be a list, got Node; {_RUN_TREE}")
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise InputError(
            f"{name} must be a list, got {type(values).__name__}; pass a single value as [value]"
        )
    return list(values)


def chat_arguments(
    tools: Sequence[Any] | None, chat_template_kwargs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the chat template arguments of a call: its keyword arguments plus its tools.

    Args:
        tools: Tools for the template; None leaves out the argument.
        chat_template_kwargs: Further arguments of the template; None for none.

    Raises:
        InputError: `chat_template_kwargs` is not a mapping, or `tools` is not a list.
    """
    if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
        raise InputError(
            f"chat_template_kwargs must be a dict of arguments, got {chat_template_kwargs!r:.60}"
        )
    tools = None if tools is None else as_list("tools", tools)
    return {**(chat_template_kwargs or {}), **({} if tools is None else {"tools": list(tools)})}


def _walk(root: Node) -> dict[str, tuple[Node, ...]]:
    """Return the paths to the nodes that are sampled or generate levels, by id, depth first."""
    if not isinstance(root, Node):
        advice = "pass the root Node"
        if isinstance(root, str | list):  # texts or token ids
            advice += ", or pass prompts without a tree to llm.generate"
        raise TreeError(f"the tree must be a Node, got {type(root).__name__}; {advice}")
    paths: dict[str, tuple[Node, ...]] = {}
    # The nodes from the root to the current node. A stack replaces recursion, because a chain of
    # thoughts may be deeper than the interpreter's recursion limit.
    path: list[Node] = []
    indices: list[int] = []
    # For each node of the path: the last node with content from the root down to it.
    sources: list[Node | None] = []

    def enter(node: Node, index: int) -> None:
        above = sources[-1] if sources else None
        path.append(node)
        indices.append(index)
        sources.append(node if node.content else above)
        if node.content and above is not None and node.has_messages != above.has_messages:
            raise TreeError(
                f"node {_name(node, indices)!r} and a node above it mix chat messages with text or "
                "token ids; use only one kind of content along a path"
            )
        if node.num_samples or node.expand:
            name = _name(node, indices)
            if name in paths:
                raise TreeError(f"two sampled nodes have the id {name!r}; ids must be unique")
            paths[name] = tuple(path)

    enter(root, 0)
    next_child = [0]
    while path:
        index = next_child[-1]
        if index < len(path[-1].children):
            next_child[-1] += 1
            next_child.append(0)
            enter(path[-1].children[index], index)
        else:
            for stack in (path, indices, sources, next_child):
                stack.pop()
    return paths


def _name(node: Node, indices: Sequence[int]) -> str:
    return node.id if node.id is not None else "/".join(map(str, indices))


def _as_levels(levels: object) -> tuple[Expand, ...]:
    if isinstance(levels, Expand):
        raise TreeError("expand must be a list of levels, got a single Expand; pass [Expand(...)]")
    if isinstance(levels, str) or not isinstance(levels, Iterable):
        raise TreeError(f"expand must be a list of Expand objects, got {type(levels).__name__}")
    levels = tuple(levels)
    for index, level in enumerate(levels):
        if not isinstance(level, Expand):
            raise TreeError(f"expand[{index}] must be an Expand object, got {type(level).__name__}")
    return levels


def _check_content(content: object) -> None:
    if isinstance(content, Node):
        raise TreeError(f"content must be text, token ids or chat messages, got Node; {_RUN_TREE}")
    if isinstance(content, str):
        if problem := describe_lone_surrogate(content):
            raise TreeError(f"content {problem}")
        return
    if isinstance(content, bytes) or not isinstance(content, Sequence):
        raise TreeError(
            "content must be a string, a sequence of token ids or a sequence of chat messages, got "
            f"{type(content).__name__}"
        )
    if content and isinstance(content[0], Mapping):
        for index, message in enumerate(content):
            _check_message(index, message)
        return
    if set(map(type, content)) == {int} and min(content) >= 0 and max(content) <= MAX_TOKEN_ID:
        return  # the same result as the loop below, a hundred times as fast
    for index, token in enumerate(content):
        # numpy integers have __index__ too. Floats and strings do not.
        is_integer = hasattr(token, "__index__") and not isinstance(token, bool)
        if not is_integer or not 0 <= token <= MAX_TOKEN_ID:
            raise TreeError(
                f"content[{index}] must be a token id (an integer from 0 to {MAX_TOKEN_ID:,}) or a "
                f"chat message (a mapping), got {token!r}"
            )


def _check_template(template: object) -> None:
    if not isinstance(template, Mapping):
        raise TreeError(f"template must be a mapping, got {type(template).__name__}")
    for name in template:
        if not isinstance(name, str) or name in _OWN_ARGUMENTS:
            raise TreeError(
                f"template cannot contain {name!r}; pass only arguments of the chat template, such "
                "as tools (the last message decides how a prompt ends)"
            )


def _check_message(index: int, message: object) -> None:
    if not isinstance(message, Mapping):
        raise TreeError(
            f"content[{index}] must be a chat message, got {type(message).__name__}; pass "
            "{'role': ..., 'content': ...}"
        )
    calls_tools = bool(message.get("tool_calls")) and message.get("content") is None
    has_parts = isinstance(message.get("content"), list | tuple)
    if has_parts:
        check_parts(f"content[{index}]['content']", message["content"])
    for key in ("role",) if calls_tools or has_parts else ("role", "content"):
        if not isinstance(message.get(key), str):
            raise TreeError(
                f"content[{index}][{key!r}] must be a string, got {message.get(key)!r}; pass a "
                'chat message as {"role": "...", "content": "..."}'
            )
        if problem := describe_lone_surrogate(message[key]):
            raise TreeError(f"content[{index}][{key!r}] {problem}")


def check_parts(name: str, parts: object) -> None:
    """Check the form of the content parts of a message.

    Args:
        name: The content's name in error messages.
        parts: The parts.

    Raises:
        TreeError: the parts are not a list, or a part is neither text nor an image.
    """
    if not isinstance(parts, Sequence):
        raise TreeError(f"{name} must be text or a list of parts, got {parts!r:.80}")
    for index, part in enumerate(parts):
        where = f"{name}[{index}]"
        try:
            if is_image(part):
                source_of(cast(Mapping[str, Any], part))
                continue
        except InputError as error:
            raise TreeError(f"{where}: {error.message.marked}") from None
        text = (
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        )
        if not isinstance(text, str):
            raise TreeError(
                f'{where} must be {{"type": "text", "text": "..."}} or {{"type": "image", "image": '
                f"...}}, got {part!r:.80}"
            )
        if problem := describe_lone_surrogate(text):
            raise TreeError(f"{where} {problem}")


def describe_lone_surrogate(text: str) -> str | None:
    """Return a phrase that describes the first lone surrogate of a text; None if there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        return (
            f"has the lone surrogate U+{code:04X} at character {error.start:,}; replace the "
            "character"
        )
    return None
