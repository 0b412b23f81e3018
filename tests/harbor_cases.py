"""Harbor tasks for tests, and a tiny model that was trained to solve them by a tool call."""

from pathlib import Path
from typing import Any

import torch
from agent_cases import TEMPLATE, call_text, chat_tokenizer
from tiny_models import config_of
from trained_models import save_trained_model

from treegen.common.bounded.templates import render_chat
from treegen.prompts.replies.types import ToolCall
from treegen.prompts.tool_turns import ToolTurns
from treegen.search.environments.file_tools import BASH_TOOL, FILE_TOOLS
from treegen.tasks.environments.local import _PYTHON

INSTRUCTION = "Write 42 to answer.txt."
TEST = """\
#!/bin/bash
python3 /tests/check.py
if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
FILES = {
    "task.toml": '[metadata]\ndifficulty = "easy"\n',
    "instruction.md": f"{INSTRUCTION}\n",
    "environment/Dockerfile": "FROM python:3.12-slim\nWORKDIR /app\nCOPY note.txt ./\n",
    "environment/note.txt": "The answer is 42.\n",
    "tests/test.sh": TEST,
    "tests/check.py": "import wanted\nassert open('answer.txt').read() == wanted.TEXT\n",
    "tests/wanted.py": "TEXT = '42'\n",
}
STEPS = [
    (ToolCall("write_file", {"path": "answer.txt", "text": "42"}), "Wrote 2 bytes to answer.txt.")
]


def save_tasks(folder: Path, *names: str, **files: str) -> Path:
    """Write task folders, and return the folder with them."""
    for name in names:
        for place, text in {**FILES, **files}.items():
            path = folder / name / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return folder


def save_writer_model(directory: Path) -> Path:
    """Train the model, and write it with its tokenizer."""
    tokenizer: Any = chat_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("{{ t | tojson }}", "{{ t.function.name }}")
    episodes = [_episode(tokenizer, [first, *FILE_TOOLS]) for first in (_PYTHON, BASH_TOOL)]
    config = config_of(
        "llama", max_position_embeddings=4096, hidden_size=64, vocab_size=len(tokenizer)
    )
    config.eos_token_id = tokenizer.eos_token_id

    def loss_of(model: Any) -> torch.Tensor:
        losses = [model(input_ids=ids, labels=labels).loss for ids, labels in episodes]
        return torch.stack(losses).sum()

    return save_trained_model(
        directory, config, tokenizer, loss_of, steps=200, enough=0.03, max_loss=0.1
    )


def _episode(tokenizer: Any, tools: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of a solution, and those of them that the model is to write."""
    turns = ToolTurns(tokenizer, tools)
    question = [{"role": "user", "content": INSTRUCTION}]
    prompt = render_chat(tokenizer, question, tools=tools, add_generation_prompt=True)
    ids: list[int] = tokenizer(prompt)["input_ids"]
    labels = [-100] * len(ids)
    for action, shown in STEPS:
        reply = tokenizer(call_text(action))["input_ids"]
        after = tokenizer(turns.render_results([action], [shown], None))["input_ids"]
        ids += [*reply, *after]
        labels += [*reply, after[0], *[-100] * (len(after) - 1)]
    last = [*tokenizer("Done.")["input_ids"], tokenizer.eos_token_id]
    return torch.tensor([ids + last]), torch.tensor([labels + last])
