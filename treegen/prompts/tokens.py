"""Token ids of prompts: equal to the tokenizer's ids of each prompt's whole text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from treegen.common.bounded.templates import TemplateError, render_chat
from treegen.errors import InputError, arg
from treegen.prompts.bos_eos import find_special_tokens, warn_of_double_bos
from treegen.prompts.chat_images import expand_image_markers, extract_images, get_reply_prefix
from treegen.prompts.images.table import ImageTable, PlacedImage
from treegen.prompts.reasoning import check_known, reasoning_arguments
from treegen.prompts.splice import ID, Splicer, shared_starts
from treegen.prompts.token_bytes import TokenLowerBound
from treegen.prompts.tree import Node, Prompt, describe_lone_surrogate, prompts_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from treegen.prompts.splice import Ids, Rows


TAIL: Final = 32
"""Last tokens of a context on which the encoding of the text after it may depend."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenPrompt:
    """The prompt of one sampled node."""

    id: str
    """The id of the node."""
    tokens: Ids
    """The token ids of the prompt."""
    samples: int
    """Completions to draw after it."""
    node: Node
    """The node itself."""
    images: tuple[PlacedImage, ...] = ()
    """The images in it, which their table keeps while the prompt exists."""


@dataclass(frozen=True, slots=True)
class _Text:
    """A part of a prompt whose text is tokenized jointly."""

    text: str
    add_special_tokens: bool
    images: tuple[PlacedImage, ...] = ()
    """The images in it."""
    unexpanded: str | None = None
    """The text before image markers were expanded; None if equal to `text`."""


def tokenize(
    root: Node, tokenizer: PreTrainedTokenizerBase, table: ImageTable | None = None
) -> list[TokenPrompt]:
    """Return the token ids of every prompt of a tree, in the order of `prompts_of`.

    The text along a path is tokenized jointly, never node by node; messages are rendered jointly.
    Token ids stay as they are. They split the text of a path into runs, and each run is tokenized
    separately. The run at the start of the path gets the tokenizer's special tokens.

    Args:
        root: The root of the prompt tree.
        tokenizer: The model's tokenizer.
        table: The model's images; None if it takes none.

    Raises:
        TreeError: the tree has no samples, or generates levels.
        InputError: a prompt has no tokens, or its text or messages cannot be tokenized.
    """
    prompts = prompts_of(root)
    id_arrays: dict[int, Ids] = {}
    parts = [list(_runs(prompt, tokenizer, id_arrays, table)) for prompt in prompts]
    images: dict[str, tuple[PlacedImage, ...]] = {
        prompt.id: part[0].images
        for prompt, part in zip(prompts, parts, strict=True)
        if isinstance(part[0], _Text) and not part[0].add_special_tokens
    }
    for special in (True, False):
        runs = [
            (part, index, run.text)
            for part in parts
            for index, run in enumerate(part)
            if isinstance(run, _Text) and run.add_special_tokens is special
        ]
        encoded = encode_texts([text for *_, text in runs], tokenizer, add_special_tokens=special)
        for (part, index, _), ids in zip(runs, encoded, strict=True):
            part[index] = ids
    result = []
    for prompt, part in zip(prompts, parts, strict=True):
        arrays = [run for run in part if not isinstance(run, _Text)]
        ids = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        if table is not None and prompt.id in images:
            ids = table.replace_placeholders(ids, images[prompt.id], prompt.id)
        if not ids.size:
            raise InputError(f"{prompt.name} has no tokens; pass text or token ids")
        placed = images.get(prompt.id, ())
        result.append(TokenPrompt(prompt.id, ids, prompt.samples, prompt.node, placed))
    return result


def find_too_long_prompt(
    root: Node, tokenizer: PreTrainedTokenizerBase, max_tokens: int, table: ImageTable | None = None
) -> tuple[Prompt, int] | None:
    """Return a prompt that surely has more than `max_tokens` tokens, if any.

    The bound uses only the lengths of texts; nothing is encoded. So a prompt may have more than
    `max_tokens` tokens although the result is None.

    Args:
        root: The root of the prompt tree.
        tokenizer: The model's tokenizer.
        max_tokens: The largest allowed number of tokens.
        table: The model's images; None if it takes none.

    Returns:
        The prompt and a lower bound of its number of tokens, or None.

    Raises:
        TreeError: the tree has no samples, or generates levels.
    """
    lower_bound: TokenLowerBound | None = None
    for prompt in prompts_of(root):
        num_chars = sum(_num_chars(node) for node in prompt.path)
        if num_chars <= max_tokens:
            continue  # most calls end here, before the token lengths are computed
        lower_bound = lower_bound or TokenLowerBound(tokenizer)
        if lower_bound.of_chars(num_chars) <= max_tokens:
            continue
        num = sum(
            lower_bound.of_text(run.text) if isinstance(run, _Text) else len(run)
            for run in _runs(prompt, tokenizer, {}, table)
        )
        if num > max_tokens:
            return prompt, num
    return None


def _num_chars(node: Node) -> int:
    """Return the characters of a node's text or messages, or its number of token ids."""
    if not node.has_messages:
        return len(node.content)
    texts = [message.get("content") for message in node.content]  # type: ignore[union-attr]
    return sum(
        len(part) if isinstance(part, str) else len(part.get("text") or "")
        for text in texts
        for part in ([text] if isinstance(text, str) else text or ())
    )


def prompt_text(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, table: ImageTable | None = None
) -> str:
    """Return the text of a prompt as passed to the tokenizer, with token ids decoded.

    The special tokens that the tokenizer adds are left out.

    Args:
        prompt: The prompt.
        tokenizer: The model's tokenizer.
        table: The model's images; None if it takes none.

    Raises:
        InputError: its messages cannot be rendered.
    """
    return "".join(
        (run.text if run.unexpanded is None else run.unexpanded)
        if isinstance(run, _Text)
        else tokenizer.decode(run.tolist())
        for run in _runs(prompt, tokenizer, {}, table)
    )


def encode_texts(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool = True
) -> list[Ids]:
    """Return tokenizer(text)["input_ids"] of each text.

    Warns once per tokenizer if texts begin with two BOS tokens.

    Args:
        texts: The texts to encode.
        tokenizer: The model's tokenizer.
        add_special_tokens: Whether the tokenizer adds its special tokens. Default: True.

    Raises:
        InputError: a text has half of a surrogate pair.
    """
    encoded = _encode_shared(texts, tokenizer, add_special_tokens=add_special_tokens)
    if add_special_tokens:
        warn_of_double_bos(tokenizer, encoded)
    return encoded


def _encode_shared(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool
) -> list[Ids]:
    """Return the result of `encode_texts`, without the warning.

    A start that several texts share is encoded once. This requires a tokenizer with offsets that
    only puts fixed special tokens before and after a text. With other tokenizers each text is
    encoded in full.

    Raises:
        InputError: a text has half of a surrogate pair.
    """
    if not texts:
        return []
    for index, text in enumerate(texts):
        if problem := describe_lone_surrogate(text):
            raise InputError(f"text {index} {problem}")
    special_tokens = find_special_tokens(tokenizer, add_special_tokens)
    if special_tokens is None or not getattr(tokenizer, "is_fast", False):
        batch = tokenizer(list(texts), add_special_tokens=add_special_tokens, verbose=False)
        return [np.array(ids, dtype=np.int32) for ids in batch["input_ids"]]
    before, after = (np.array(special, dtype=np.int32) for special in special_tokens)
    splicer = Splicer(tokenizer)
    spans, span_of_text = shared_starts(texts)
    requested, with_children = set(span_of_text), {span.parent for span in spans}
    ids: dict[int, Ids] = {}
    above: dict[int, tuple[int, Rows]] = {}
    by_depth = sorted(range(len(spans)), key=lambda index: spans[index].depth)
    for _, group in groupby(by_depth, key=lambda index: spans[index].depth):
        level = list(group)
        parents = [spans[index].parent for index in level]
        starts = [None if parent is None else above[parent] for parent in parents]
        parts = splicer.encode([spans[index].text for index in level], starts)
        above = {}
        for index, (head, added) in zip(level, parts, strict=True):
            if index in requested:
                ids[index] = np.concatenate([before, head[ID], added[ID], after])
            if index in with_children:
                above[index] = (len(spans[index].text), np.concatenate([head, added], axis=1))
    return [ids[span] for span in span_of_text]


@dataclass(slots=True, eq=False)
class AppendablePrompt:
    """A user's prompt to which text can be appended."""

    text: str | None
    """The text; None for token ids."""
    special: bool
    """Whether the tokenizer's special tokens surround it."""
    rows: Rows | None = None
    """The rows of the text's encoding once they are known; see splice.py."""

    @staticmethod
    def of(content: str | Sequence[int]) -> AppendablePrompt:
        """Return the prompt for a text or for token ids."""
        return (
            AppendablePrompt(content, True)
            if isinstance(content, str)
            else AppendablePrompt(None, False)
        )


class PromptAppender:
    """Appends text to prompts, so that each prompt has the token ids of its whole text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        around = find_special_tokens(tokenizer, True)
        is_spliced = around is not None and getattr(tokenizer, "is_fast", False)
        self._splicer = Splicer(tokenizer) if is_spliced else None
        self._around = [np.array(special, dtype=np.int32) for special in around or ([], [])]

    def append(
        self, prompt: AppendablePrompt, tokens: Ids, text: str
    ) -> tuple[AppendablePrompt, Ids]:
        """Return a prompt with text appended, and its token ids.

        Token ids that the user passed stay as they are, unless the tokenizer encodes the text that
        they spell to the same ids. In that case the whole text is encoded.

        Args:
            prompt: The prompt; its `rows` are filled in if they are not known yet.
            tokens: The token ids of the prompt.
            text: The text to append.

        Raises:
            InputError: the text has half of a surrogate pair.
        """
        if problem := describe_lone_surrogate(text):
            raise InputError(f"text {problem}")
        if prompt.rows is None:
            self._read(prompt, tokens)
        if prompt.text is None:
            added = append_text(self._tokenizer, tokens[-TAIL:], text)
            return AppendablePrompt(None, False), np.concatenate([tokens, added])
        return self._encode(prompt.text + text, prompt.special, prompt)

    def _read(self, prompt: AppendablePrompt, tokens: Ids) -> None:
        """Fill in a prompt's rows, and the text of token ids if it encodes to the same ids."""
        text = prompt.text
        if text is None:
            text = self._tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False)
        read, ids = self._encode(text, prompt.special)
        if prompt.text is not None or np.array_equal(ids, tokens):
            prompt.text, prompt.rows = text, read.rows

    def _encode(
        self, text: str, special: bool, start: AppendablePrompt | None = None
    ) -> tuple[AppendablePrompt, Ids]:
        """Return a text as a prompt, and its token ids.

        Args:
            text: The whole text.
            special: Whether the tokenizer's special tokens surround it.
            start: A prompt that the text starts with, if any.
        """
        if self._splicer is None:
            (ids,) = encode_texts([text], self._tokenizer, add_special_tokens=special)
            return AppendablePrompt(text, special), ids
        encoded = None
        if start is not None and start.text is not None and start.rows is not None:
            encoded = len(start.text), start.rows
        (parts,) = self._splicer.encode([text], [encoded])
        rows = np.concatenate(parts, axis=1)
        before, after = self._around if special else ([], [])
        ids = np.concatenate([before, rows[ID], after]).astype(np.int32)
        return AppendablePrompt(text, special, rows), ids


def append_text(tokenizer: PreTrainedTokenizerBase, tail: Ids, text: str) -> Ids:
    """Return the token ids of text that follows a context whose own ids stay as they are.

    The context and the text are encoded jointly if that leaves the context's ids unchanged.
    Otherwise the text is encoded as after a newline, or else alone.

    Args:
        tokenizer: The model's tokenizer.
        tail: The last token ids of the context, at most `TAIL`.
        text: The text to append.

    Raises:
        InputError: the text has half of a surrogate pair.
    """

    def encode(string: str) -> Ids:
        batch = tokenizer([string], add_special_tokens=False, verbose=False)
        return np.array(batch["input_ids"][0], dtype=np.int32)

    if not text:
        return np.empty(0, dtype=np.int32)
    if problem := describe_lone_surrogate(text):
        raise InputError(f"text {problem}")
    before = tokenizer.decode(tail.tolist(), clean_up_tokenization_spaces=False)
    alone = encode(before)
    # Joint encoding is usable only if the tail's text encodes to the tail's last token.
    starts = [(before, alone)] if alone.size and alone[-1] == tail[-1] else []
    for start, ids in (*starts, ("\n", encode("\n"))):
        joint = encode(start + text)
        if np.array_equal(joint[: len(ids)], ids):
            return joint[len(ids) :]
    return encode(text)


def _runs(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    id_arrays: dict[int, Ids],
    table: ImageTable | None,
) -> Iterator[_Text | Ids]:
    """Yield the parts of a prompt in order: runs of text, and token ids."""
    nodes = [node for node in prompt.path if node.content]
    if prompt.template and not (nodes and nodes[0].has_messages):
        raise InputError(
            f"{prompt.name} sets chat-template arguments ({', '.join(prompt.template)}) but "
            "does not start with chat messages; pass messages, or remove the arguments"
        )
    if not nodes:
        yield _Text("", True)
    elif nodes[0].has_messages:
        yield _render(prompt, tokenizer, table)
    else:
        for is_text, group in groupby(nodes, key=lambda node: isinstance(node.content, str)):
            run = list(group)
            if is_text:
                yield _Text("".join(str(node.content) for node in run), run[0] is nodes[0])
                continue
            for node in run:
                if id(node) not in id_arrays:
                    id_arrays[id(node)] = np.array(node.content, dtype=np.int32)
                yield id_arrays[id(node)]


def _render(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, table: ImageTable | None) -> _Text:
    """Return the text of a prompt of chat messages, up to where the assistant continues.

    If the last message is the assistant's, its turn begins with that message.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"{prompt.name} has chat messages but the tokenizer has no chat template; load "
            f"the model with {arg('chat_template', 'TEMPLATE')}, use a chat model, or pass text"
        )
    messages = [dict(message) for node in prompt.path for message in node.content]  # type: ignore[arg-type]
    images = [image for message in messages for image in extract_images(message, prompt.id, table)]
    last = messages[-1]
    reply_prefix = ""
    if last["role"] == "assistant" and not last.get("tool_calls"):
        reply_prefix = get_reply_prefix(messages.pop()["content"], prompt.id)
    arguments = reasoning_arguments(prompt.template, tokenizer)
    # A template may treat an empty list of tools unlike no tools, so an empty list is dropped.
    if not arguments.get("tools"):
        arguments.pop("tools", None)
    if arguments:
        check_known(arguments, tokenizer)

    def apply_template(arguments: dict[str, Any]) -> str:
        try:
            return render_chat(tokenizer, messages, add_generation_prompt=True, **arguments)
        except (TemplateError, TypeError) as error:  # an argument may have been passed twice
            raise InputError(
                f"the chat template rejects {prompt.name}: {error}; correct the messages"
            ) from error

    text = apply_template(arguments)
    if "tools" in arguments:
        without = {name: value for name, value in arguments.items() if name != "tools"}
        if apply_template(without) == text:
            raise InputError(
                f"the model's chat template does not render the tools of {prompt.name}; "
                f"remove the tools, or load the model with {arg('chat_template', 'TEMPLATE')} and "
                "a template that renders tools"
            )
    text = f"{text}{reply_prefix}"
    if table is None:
        return _Text(text, False)
    return _Text(expand_image_markers(text, images, table, prompt.id), False, tuple(images), text)
