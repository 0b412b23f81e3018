"""Episodes of text-world and repair as chats with tool calls, played by rules.

The player of a world knows only what it has seen. So a model can learn to choose each call by what
stands above it. At times the player makes a wrong move; these moves are only read.
"""

import json
import random
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Final

from train_demo.documents import READ, WRITE, Document, Mixture, Part
from train_demo.tokenizer import EOS
from treegen.prompts.replies.types import ToolCall
from treegen.tasks.agents import repair, text_world
from treegen.tasks.agents.text_world import DEVICES, HELD, TextWorld

# The chat template of the model. It shows tools by their names and arguments alone.
TEMPLATE: Final = """\
{{ bos_token }}{% if tools %}tools:{% for tool in tools %} {{ tool.function.name }}(\
{{ tool.function.parameters.properties | list | join(', ') }}){% endfor %}{{ '\\n' }}{% endif %}\
{% for m in messages %}{{ m.role }}:{{ '\\n' }}{{ m.content }}\
{% for call in m.tool_calls or [] %}<tool_call>{{ '\\n' }}{"name": "{{ call.function.name }}", \
"arguments": {{ call.function.arguments | tojson }}}{{ '\\n' }}</tool_call>{% endfor %}\
{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}\
{% if add_generation_prompt %}assistant:{{ '\\n' }}{% endif %}"""

Turn = tuple[ToolCall, str, float]
"""A call, what it shows, and how much the call counts."""

# How often the player of an episode makes a wrong move.
_STRAY: Final = (0.0, 0.0, 0.1, 0.3)


def call_text(call: ToolCall) -> str:
    """Return a call as the model writes it."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{call.name}", "arguments": {arguments}}}\n</tool_call>'


def opening(tools: Sequence[dict[str, Any]], text: str) -> str:
    """Return the beginning of a chat up to the first reply."""
    tool_lines = (
        f" {tool['function']['name']}({', '.join(tool['function']['parameters']['properties'])})"
        for tool in tools
    )
    return f"tools:{''.join(tool_lines)}\nuser:\n{text}\nassistant:\n"


def _chat(tools: Sequence[dict[str, Any]], text: str, turns: Iterable[Turn]) -> Document:
    """Return the chat of an episode."""
    parts = [Part(opening(tools, text), READ)]
    for call, output, weight in turns:
        parts.append(Part(f"{call_text(call)}{EOS}", weight))
        parts.append(Part(f"\ntool:\n{output}\nassistant:\n", READ))
    end = parts[-2]  # the last call ends where its document ends
    return [*parts[:-2], Part(end.text.removesuffix(EOS), end.weight)]


# Text worlds


@cache
def kept_back(level: str) -> frozenset[str]:
    """Return how the first thousand problems of the task with problem_seed=0 begin."""
    worlds = (text_world.make_world(level, f"0 {number}") for number in range(1000))
    return frozenset(map(text_world.introduce, worlds))


def world_document(draw: random.Random, level: str) -> Document:
    """An episode in a world that is no problem of the task with its default seed."""
    while True:
        world = text_world.make_world(level, str(draw.getrandbits(64)))
        introduction = text_world.introduce(world)
        if introduction not in kept_back(level):
            break
    stray, visited = draw.choice(_STRAY), set[str]()

    turns: list[Turn] = []
    while not world.is_done:
        visited.add(world.room)
        is_stray = draw.random() < stray
        call = _stray(world, draw) if is_stray else choose_move(world, visited)
        turns.append((call, world.run(call).text, READ if is_stray else WRITE))
    return _chat(world.tools, introduction, turns)


def choose_move(world: TextWorld, visited: set[str]) -> ToolCall:
    """Return the next call of a player who has been in some rooms of a world without locks."""
    goal = next(goal for goal in world.goals if not world._is_at_goal(goal))
    at = world.things[goal.thing]
    if at != HELD:
        carried = world._visible_at(HELD)
        if len(carried) == text_world.CAPACITY:
            return ToolCall("put", {"thing": carried[0], "place": _open_places(world)[0]})
        if at in world.closed or world.places[at] not in visited:
            return _search(world, visited)
        return _walk(world, visited, world.places[at]) or ToolCall("take", {"thing": goal.thing})
    if goal.treatment and world.states.get(goal.thing) != goal.treatment:
        room = world.places[DEVICES[goal.treatment]]
        return _walk(world, visited, room) or ToolCall(goal.treatment, {"thing": goal.thing})
    way = _walk(world, visited, world.places[goal.place])
    if way is None and goal.place in world.closed:
        return ToolCall("open", {"place": goal.place})
    return way or ToolCall("put", {"thing": goal.thing, "place": goal.place})


def _open_places(world: TextWorld) -> list[str]:
    return sorted(place for place in world._here() if place not in world.closed)


def _search(world: TextWorld, visited: set[str]) -> ToolCall:
    """Open what is closed here, or else go to the nearest room that was not seen yet."""
    closed = sorted(place for place in world._here() if place in world.closed)
    if closed:
        return ToolCall("open", {"place": closed[0]})
    shut = {world.places[place] for place in world.closed}
    way = _walk(world, visited, None) or next(
        filter(None, (_walk(world, visited, room) for room in sorted(shut & visited))), None
    )
    assert way is not None, "everything was seen"
    return way


def _walk(world: TextWorld, visited: set[str], room: str | None) -> ToolCall | None:
    """Return the first step to a room, or with None to the nearest one that was not seen.

    The way to a room that cannot be known yet leads to the nearest one that was not seen. None if
    the player is in the room, or if no room is left.
    """
    if room == world.room:
        return None
    todo, first = deque([world.room]), {world.room: ""}
    new: list[str] = []
    while todo:
        here = todo.popleft()
        if here == room:
            return ToolCall("go", {"direction": first[here]})
        if here not in visited:
            new.append(here)
            continue
        for direction, there in sorted(world.exits[here].items()):
            if there not in first:
                first[there] = first[here] or direction
                todo.append(there)
    return ToolCall("go", {"direction": first[new[0]]}) if new else None


def _stray(world: TextWorld, draw: random.Random) -> ToolCall:
    """Return any call that is possible here or looks so."""
    here, carried = world._here(), world._visible_at(HELD)
    options = [ToolCall("go", {"direction": way}) for way in world.exits[world.room]]
    options += [ToolCall("open", {"place": place}) for place in here]
    options += [ToolCall("put", {"thing": t, "place": draw.choice(here)}) for t in carried]
    options += [
        ToolCall("take", {"thing": thing}) for place in here for thing in world._visible_at(place)
    ]
    return draw.choice(options)


# Files with bugs


def repair_document(draw: random.Random, level: str) -> Document:
    """An episode of repair: read each file, mend it if it is wrong, and submit."""
    puzzle = repair.make_puzzle(level, str(draw.getrandbits(64)))
    turns: list[Turn] = []
    for path in draw.sample(sorted(puzzle.files), len(puzzle.files)):
        broken, fixed = puzzle.files[path], puzzle.solution[path]
        turns.append((ToolCall("read_file", {"path": path}), broken, WRITE))
        if broken != fixed:
            old, new = _change(broken, fixed)
            change = ToolCall("replace", {"path": path, "old": old, "new": new})
            turns.append((change, f"Wrote {path}.", WRITE))
    turns.append((ToolCall("submit", {}), "Submitted.", WRITE))
    return _chat(repair.RepairGame.tools, repair.introduce(puzzle), turns)


def _change(broken: str, fixed: str) -> tuple[str, str]:
    """Return the line of a file in which the mistake is, and what makes the file right there."""
    first = next(i for i, (a, b) in enumerate(zip(broken, fixed, strict=False)) if a != b)
    start, end = broken.rfind("\n", 0, first) + 1, broken.find("\n", first)
    return broken[start:end], fixed[start : len(fixed) - (len(broken) - end)]


def easy_world(draw: random.Random) -> Document:
    """A world of three rooms."""
    return world_document(draw, "easy")


def medium_world(draw: random.Random) -> Document:
    """A world of five rooms, with closed furniture."""
    return world_document(draw, "medium")


def one_file(draw: random.Random) -> Document:
    """A file that is wrong."""
    return repair_document(draw, "easy")


def several_files(draw: random.Random) -> Document:
    """Return three or four files; two or three of them are wrong."""
    return repair_document(draw, draw.choice(("medium", "hard")))


SHORT_EPISODES: Final[Mixture] = ((easy_world, 0.8), (one_file, 0.2))
EPISODES: Final[Mixture] = (
    (easy_world, 0.2),
    (medium_world, 0.5),
    (one_file, 0.1),
    (several_files, 0.2),
)
