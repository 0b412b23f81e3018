"""A tiny model that was trained to call a tool in some format, and to answer by its result."""

import functools
import shutil
from pathlib import Path
from typing import Any

import torch
from kept_folders import make_kept_folder
from tiny_models import config_of, tiny_tokenizer
from tool_texts import WRITERS
from trained_models import save_trained_model

QUESTION = "What is 17 + 25?"
CALL = {"name": "add", "arguments": {"x": 17, "y": 25}}
ANSWER = "The answer is 42."
TEMPLATE = (
    "{% if tools %}Tools:{% for t in tools %} {{ t.function.name }}{% endfor %}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}\n"
    "{% for c in m.tool_calls or [] %}{% raw %}CALL{% endraw %}"
    "{% else %}{{ m.content }}{% endfor %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)


def save_tool_model(directory: Path, writer: str = "hermes") -> Path:
    """Write the model with a tokenizer that has a chat template.

    Args:
        writer: Of `tool_texts.WRITERS`.
    """
    return Path(shutil.copytree(_trained(writer), directory, dirs_exist_ok=True))


@functools.cache
def _trained(writer: str) -> Path:
    """Train the model once in a process, and return its directory."""
    directory = make_kept_folder()
    tokenizer = tiny_tokenizer()
    template = TEMPLATE.replace("CALL", WRITERS[writer]([("add", {"x": 17, "y": 25})]))
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": ANSWER},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    ids: list[int] = []
    labels: list[int] = []
    for place, turn in enumerate(turns):
        for upto, is_said in ((turns[:place], True), (turns[: place + 1], False)):
            text = (
                tokenizer.apply_chat_template(
                    upto,
                    tools=tools,
                    chat_template=template,
                    tokenize=False,
                    add_generation_prompt=is_said and turn["role"] == "assistant",
                )
                if upto
                else ""
            )
            new = tokenizer(text)["input_ids"][len(ids) :]
            labels += [-100 if is_said or turn["role"] != "assistant" else token for token in new]
            ids += new
    config = config_of("llama", max_position_embeddings=1024, hidden_size=64)
    batch = {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])}
    save_trained_model(
        directory, config, tokenizer, lambda model: model(**batch).loss, steps=120, max_loss=0.05
    )
    (directory / "chat_template.jinja").write_text(template)
    return directory
