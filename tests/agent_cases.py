"""Worlds of random machines, a policy that acts in them by a script, and searches over both."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiny_models import tiny_tokenizer
from tool_schemas import INTEGER, tool

from treegen.common.params import SamplingParams
from treegen.prompts.replies.types import ToolCall
from treegen.prompts.tool_turns import ToolTurns
from treegen.search.ask_tell import AskTell, SampleRequest
from treegen.search.budget import Budget
from treegen.search.environments.memory import MemoryEnvironment
from treegen.search.environments.protocol import Observation
from treegen.search.tree.node import SearchFn, SearchNode
from treegen.search.tree.result import SearchResult

NAMES = ("left", "right", "jump", "look")
TOOLS = [tool(name, {"by": INTEGER}) for name in NAMES]
# As Qwen writes chats, without its system prompt.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "{{ '\\n' if m.content or not loop.first else '' }}"
    '<tool_call>\n{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_tokenizer() -> Any:
    """Return the tokenizer of the tiny models, with a chat template that shows tools."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.add_special_tokens(
        {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def drawn(*parts: object) -> random.Random:
    """Return a generator that follows from the parts."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return random.Random(int.from_bytes(digest))


@dataclass
class Machine:
    """A world whose states are numbers, and whose steps follow from them at random.

    ran: every action of every copy of the machine.
    """

    salt: object
    ran: list[ToolCall] = field(default_factory=list)
    state: int = 0
    steps: list[str] = field(default_factory=list)

    def run(self, action: ToolCall) -> Observation:
        self.ran.append(action)
        rng = drawn(self.salt, self.state, action.name, sorted(action.arguments.items()))
        if action.name == "look":
            return Observation(text=f"state {self.state}")
        if action.name not in NAMES:
            return Observation(text=f"no tool {action.name}", exit_status=127)
        self.state = rng.randrange(10**6)
        self.steps.append(action.name)
        return Observation(
            text=f"at {self.state} after {len(self.steps)} steps",
            reward=rng.choice([None, rng.random()]),
            is_done=rng.random() < 0.15,
        )

    def observe(self) -> Observation:
        return Observation(text=str(self.state), reward=drawn(self.salt, self.state).random())

    def fork(self) -> Machine:
        return Machine(self.salt, self.ran, self.state, self.steps.copy())


def call_text(*calls: ToolCall) -> str:
    """Return calls as the policy writes them."""
    return "\n".join(
        f'<tool_call>\n{{"name": "{call.name}", "arguments": {json.dumps(call.arguments)}}}'
        "\n</tool_call>"
        for call in calls
    )


def policy(salt: object, *, ends: float = 0.1) -> Callable[[str, int], str]:
    """Return a policy: a function from a context and a seed to a reply.

    ends: How often it answers without a call.
    """

    def reply(context: str, seed: int) -> str:
        rng = drawn(salt, context, seed)
        if rng.random() < ends:
            return f"The answer is {rng.randrange(3)}."
        calls = [
            ToolCall(rng.choice(NAMES), {"by": rng.randrange(2)})
            for _ in range(1 if rng.random() < 0.8 else 2)
        ]
        return rng.choice(["", "Hm.\n"]) + call_text(*calls)

    return reply


def machines(salt: object = 0, **more: Any) -> tuple[MemoryEnvironment, list[ToolCall]]:
    """Return an environment of machines, and the list of all actions that they run."""
    ran: list[ToolCall] = []
    return (
        MemoryEnvironment(lambda problem: Machine((salt, problem), ran), TOOLS, **more),
        ran,
    )


def turns() -> ToolTurns:
    """Return what reads and renders the turns of `chat_tokenizer`."""
    return ToolTurns(chat_tokenizer(), TOOLS)


def search(
    fn: SearchFn,
    reply: Callable[[str, int], str],
    *,
    prompts: Sequence[str] = ("Go.",),
    budget: Budget | None = None,
    shuffle: random.Random | None = None,
) -> list[SearchResult]:
    """Run searches of a policy.

    shuffle: Answers the requests in an order of this generator.
    """
    searches = AskTell(
        fn,
        [(str(place), prompt) for place, prompt in enumerate(prompts)],
        SamplingParams(max_tokens=64, seed=1),
        budget=budget,
        count_tokens=lambda text: len(text.split()),
    )
    with searches:
        waiting: list[Any] = []
        while not searches.done:
            waiting += searches.ask()
            if shuffle is not None:
                shuffle.shuffle(waiting)
            for request in waiting[: 1 if shuffle is not None else None]:
                assert isinstance(request, SampleRequest)
                texts = [reply(request.context.text, seed) for seed in request.seeds]
                searches.tell(request, texts)
            waiting = waiting[1 if shuffle is not None else len(waiting) :]
    results = [result for result in searches.results if result is not None]
    for result in results:
        if result.exception is not None:
            raise result.exception
    return results


def steps_of(node: SearchNode) -> list[SearchNode]:
    """Return the nodes from the root to a node that are ends of steps."""
    return [above for above in node.path if above.data is not None]
