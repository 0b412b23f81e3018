"""Policies that solve the bundled agent tasks: they know the hidden state."""

import copy
from collections import deque
from typing import TypeVar

from treegen.prompts.replies.types import ToolCall
from treegen.search.environments.memory import ToolGame
from treegen.tasks.agents.repair import RepairPuzzle
from treegen.tasks.agents.text_world import DEVICES, HELD, TextWorld

G = TypeVar("G", bound=ToolGame)


def call(name: str, **arguments: str) -> ToolCall:
    return ToolCall(name, arguments)


def play(game: G, actions: list[ToolCall]) -> G:
    """A copy of a game after some actions."""
    game = copy.deepcopy(game)
    for action in actions:
        game.run(action)
    return game


def walk(world: TextWorld, room: str) -> list[ToolCall]:
    """The shortest way to a room without locked doors; raises LookupError if there is none."""
    ways: dict[str, list[ToolCall]] = {world.room: []}
    todo = deque([world.room])
    while todo:
        here = todo.popleft()
        if here == room:
            return ways[here]
        for direction, there in world.exits[here].items():
            if there not in ways and frozenset({here, there}) not in world.locked:
                ways[there] = [*ways[here], call("go", direction=direction)]
                todo.append(there)
    raise LookupError(room)


def next_action(world: TextWorld) -> ToolCall:
    """The next action on a way to the goal, whatever was done before."""
    if world.locked:
        return _unlock(world)
    goal = next(goal for goal in world.goals if not world._is_at_goal(goal))
    spare = [
        thing
        for thing, at in world.things.items()
        if at == HELD
        and thing not in {goal.thing for goal in world.goals if not world._is_at_goal(goal)}
    ]
    if world.things[goal.thing] != HELD:
        if spare and sum(at == HELD for at in world.things.values()) > 1:
            return _drop(world, spare[0])
        return _fetch(world, goal.thing)
    if goal.treatment and world.states.get(goal.thing) != goal.treatment:
        way = walk(world, world.places[DEVICES[goal.treatment]])
        return way[0] if way else call(goal.treatment, thing=goal.thing)
    way = walk(world, world.places[goal.place])
    if way:
        return way[0]
    if goal.place in world.closed:
        return call("open", place=goal.place)
    return call("put", thing=goal.thing, place=goal.place)


def _fetch(world: TextWorld, thing: str) -> ToolCall:
    place = world.things[thing]
    way = walk(world, world.places[place])
    if way:
        return way[0]
    return call("open", place=place) if place in world.closed else call("take", thing=thing)


def _drop(world: TextWorld, thing: str) -> ToolCall:
    open_places = [place for place in world._here() if place not in world.closed]
    return call("put", thing=thing, place=open_places[0])


def _unlock(world: TextWorld) -> ToolCall:
    if world.things["brass key"] != HELD:
        if sum(at == HELD for at in world.things.values()) > 1:
            return _drop(world, next(thing for thing, at in world.things.items() if at == HELD))
        return _fetch(world, "brass key")
    (door,) = world.locked
    for room in door:
        try:
            way = walk(world, room)
        except LookupError:
            continue
        if way:
            return way[0]
        (other,) = door - {room}
        direction = next(name for name, there in world.exits[room].items() if there == other)
        return call("unlock", direction=direction)
    raise AssertionError("no side of the door can be reached")


def solve_world(world: TextWorld) -> list[ToolCall]:
    """Actions that reach the goal of a world."""
    world, actions = copy.deepcopy(world), []
    while not world.is_done:
        actions.append(next_action(world))
        world.run(actions[-1])
    assert world.is_solved
    return actions


def solve_puzzle(puzzle: RepairPuzzle) -> list[ToolCall]:
    """Actions that repair the files of a puzzle."""
    wrong = [path for path in puzzle.files if puzzle.files[path] != puzzle.solution[path]]
    writes = [call("write_file", path=path, text=puzzle.solution[path]) for path in wrong]
    return [*writes, call("run_tests"), call("submit")]
