"""A tiny model that was trained to solve one text world by tool calls."""

from pathlib import Path
from typing import Any

import torch
from agent_cases import TEMPLATE, call_text, chat_tokenizer
from agent_policies import solve_world
from tiny_models import config_of
from trained_models import save_trained_model

from treegen.common.bounded.templates import render_chat
from treegen.evals.task import TaskOptions
from treegen.prompts.tool_turns import ToolTurns
from treegen.tasks.agents.tasks import TextWorldTask
from treegen.tasks.agents.text_world import TextWorld, make_world

EXTRA = {"level": "easy", "problems": "2", "problem_seed": "12"}
"""The arguments of the task; the model knows the first problem."""


def save_walker_model(directory: Path) -> Path:
    """Train the model, and write it with its tokenizer."""
    tokenizer: Any = chat_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("{{ t | tojson }}", "{{ t.function.name }}")
    problem = TextWorldTask().load(TaskOptions(extra=EXTRA)).problems[0]
    world = make_world("easy", "12 0")
    turns = ToolTurns(tokenizer, TextWorld.tools)
    question = [{"role": "user", "content": problem.question}]
    prompt = render_chat(
        tokenizer, question, tools=list(TextWorld.tools), add_generation_prompt=True
    )
    ids: list[int] = tokenizer(prompt)["input_ids"]
    labels = [-100] * len(ids)
    for action in solve_world(world):
        reply = tokenizer(call_text(action))["input_ids"]
        shown = world.run(action)
        after = tokenizer(turns.render_results([action], [shown.text], None))["input_ids"]
        ids += [*reply, *after]
        labels += [*reply, after[0], *[-100] * (len(after) - 1)]
    assert world.is_solved
    config = config_of(
        "llama", max_position_embeddings=4096, hidden_size=64, vocab_size=len(tokenizer)
    )
    config.eos_token_id = tokenizer.eos_token_id
    batch = {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])}
    return save_trained_model(
        directory,
        config,
        tokenizer,
        lambda model: model(**batch).loss,
        steps=150,
        enough=0.03,
        max_loss=0.05,
    )
