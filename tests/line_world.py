"""A world of one line, and a tiny model that was trained to walk in it by tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from agent_cases import TEMPLATE, call_text, chat_tokenizer
from tiny_models import config_of
from tool_schemas import INTEGER, tool
from trained_models import save_trained_model

from treegen.prompts.replies.types import ToolCall
from treegen.search.environments.memory import MemoryEnvironment
from treegen.search.environments.protocol import Observation

TOOLS = [tool(name, {"by": INTEGER}) for name in ("move", "look")]
ENOUGH = 2
"""The episode ends so far from the start."""


@dataclass
class Line:
    """A world whose state is a number. ran: every action of every copy, with the state before."""

    ran: list[tuple[int, ToolCall]] = field(default_factory=list)
    at: int = 0
    limit: int = ENOUGH

    def run(self, action: ToolCall) -> Observation:
        self.ran.append((self.at, action))
        if action.name == "look":
            return Observation(text=f"You are at {self.at}.")
        if action.name != "move" or not isinstance(action.arguments.get("by"), int):
            return Observation(text="No.")
        self.at += action.arguments["by"]
        return Observation(text=f"Now at {self.at}.", is_done=abs(self.at) >= self.limit)

    def observe(self) -> Observation:
        return Observation(reward=self.at / self.limit)

    def fork(self) -> Line:
        return Line(self.ran, self.at, self.limit)


def line_environment(limit: int = ENOUGH) -> tuple[MemoryEnvironment, list[tuple[int, ToolCall]]]:
    """Return an environment, and the list of all actions that it runs."""
    ran: list[tuple[int, ToolCall]] = []
    return MemoryEnvironment(lambda _: Line(ran, limit=limit), TOOLS, pure_tools=["look"]), ran


def as_message(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }


def line_tokenizer() -> Any:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("{{ t | tojson }}", "{{ t.function.name }}")
    return tokenizer


QUESTION = "Go."
WALKS = ([1, 1], [1, -1, None], [0, -1, None], [-1, -1])
"""Moves by the agent; 0 looks, and None answers."""


def save_line_model(directory: Path) -> Path:
    """Train the model on some walks, and write it with its tokenizer."""
    tokenizer = line_tokenizer()
    texts, labels = [], []
    for walk in WALKS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": QUESTION}],
            tools=TOOLS,
            tokenize=False,
            add_generation_prompt=True,
        )
        world, ids = Line(), tokenizer(prompt)["input_ids"]
        targets = [-100] * len(ids)
        for by in walk:
            call = ToolCall("move", {"by": by}) if by else ToolCall("look", {})
            said = "Enough." if by is None else call_text(call)
            reply = tokenizer(f"{said}<|im_end|>")["input_ids"]
            shown = "" if by is None else world.run(call).text
            after = (
                f"\n<|im_start|>user\n<tool_response>\n{shown}\n</tool_response><|im_end|>\n"
                "<|im_start|>assistant\n"
            )
            rest = tokenizer(after)["input_ids"]
            ids, targets = [*ids, *reply, *rest], [*targets, *reply, *[-100] * len(rest)]
        texts.append(torch.tensor(ids))
        labels.append(torch.tensor(targets))
    pad: Any = torch.nn.utils.rnn.pad_sequence
    batch = {
        "input_ids": pad(texts, batch_first=True, padding_value=tokenizer.pad_token_id),
        "labels": pad(labels, batch_first=True, padding_value=-100),
    }
    config = config_of(
        "llama", max_position_embeddings=1024, hidden_size=64, vocab_size=len(tokenizer)
    )
    config.eos_token_id = tokenizer.eos_token_id
    return save_trained_model(
        directory,
        config,
        tokenizer,
        lambda model: model(**batch).loss,
        steps=220,
        enough=0.014,
        max_loss=0.03,
        rate=8e-3,
        one_cycle=True,
    )
