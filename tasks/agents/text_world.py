"""A text world: rooms, furniture and things, and a goal such as "put a clean mug on the desk".

The style is that of TextWorld (https://arxiv.org/abs/1806.11532) and ALFWorld
(https://arxiv.org/abs/2010.03768). A level and a seed decide the world. It is always solvable: the
key of a locked door is on the side of the door on which the episode begins.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import ClassVar, Final

from treegen.search.environments.file_tools import make_tool
from treegen.search.environments.memory import MoveError, ToolGame

HELD: Final = "hands"
"""The place of things that the player holds."""
CAPACITY: Final = 2
"""How many things the player can hold."""
OPPOSITE: Final = {"north": "south", "south": "north", "east": "west", "west": "east"}
DEVICES: Final = {"clean": "sink", "heat": "stove", "cool": "fridge"}
"""By tool, the device that must be in the room."""
DONE_TO: Final = {"clean": "clean", "heat": "hot", "cool": "cold"}
"""By tool, the state of a thing afterwards."""

_MOVES: Final = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}
_ROOMS: Final = ("hall", "bedroom", "study", "bathroom", "cellar", "attic", "garage", "library")
_OPEN_PLACES: Final = ("table", "shelf", "desk", "bench")
_CLOSED_PLACES: Final = ("cabinet", "drawer", "chest")
_THINGS: Final = ("apple", "bowl", "cup", "egg", "mug", "pan", "plate", "potato", "spoon", "tomato")
_KEY: Final = "brass key"


@dataclass(frozen=True, slots=True)
class WorldLevel:
    """How difficult a world is."""

    num_rooms: int
    num_goals: int
    num_things: int
    is_treated: bool
    """Whether things must be cleaned, heated or cooled first."""
    is_locked: bool
    """Whether a door is locked."""
    max_actions: int
    """The episode ends after so many actions; looking does not count."""


LEVELS: Final = {
    "easy": WorldLevel(3, 1, 3, is_treated=False, is_locked=False, max_actions=20),
    "medium": WorldLevel(5, 1, 5, is_treated=True, is_locked=False, max_actions=40),
    "hard": WorldLevel(8, 2, 7, is_treated=True, is_locked=True, max_actions=80),
}


@dataclass(frozen=True, slots=True)
class Goal:
    """A thing that must be at a place."""

    thing: str
    place: str
    treatment: str | None
    """The tool that must be used on the thing first; None if no tool must be."""

    def __str__(self) -> str:
        state = f"{DONE_TO[self.treatment]} " if self.treatment else ""
        return f"put the {state}{self.thing} into or onto the {self.place}"


@dataclass(slots=True)
class TextWorld(ToolGame):
    """One state of a world."""

    tools: ClassVar = (
        make_tool("look", "Describe the room."),
        make_tool("inventory", "List what you hold."),
        make_tool("go", "Walk to the next room.", direction="north, south, east or west"),
        make_tool("unlock", "Unlock a door with the key.", direction="Direction of the door."),
        make_tool("open", "Open a closed piece of furniture.", place="Name of the furniture."),
        make_tool("take", "Take a thing that you see.", thing="Name of the thing."),
        make_tool("put", "Put down a thing that you hold.", thing="Its name.", place="Furniture."),
        *(
            make_tool(name, f"Make a thing {DONE_TO[name]} at the {device}.", thing="Its name.")
            for name, device in DEVICES.items()
        ),
    )
    pure_tools: ClassVar = frozenset({"look", "inventory"})

    room: str
    exits: dict[str, dict[str, str]]
    """By room and direction, the next room."""
    places: dict[str, str]
    """By piece of furniture, its room."""
    closed: set[str]
    """Furniture that is closed."""
    things: dict[str, str]
    """By thing, the furniture that has it, or HELD."""
    goals: tuple[Goal, ...]
    max_actions: int
    is_dense: bool = True
    """Whether the reward is the share of subgoals; if not, it is 1 at the goal and 0 before."""
    locked: set[frozenset[str]] = field(default_factory=set)
    """Pairs of rooms with a locked door between them."""
    states: dict[str, str] = field(default_factory=dict)
    """By thing, its last treatment."""
    reached: set[str] = field(default_factory=set)
    """Subgoals that were reached."""
    num_actions: int = 0

    @property
    def subgoals(self) -> list[str]:
        """The names of all subgoals."""
        names = ["unlock"] if any(thing == _KEY for thing in self.things) else []
        for goal in self.goals:
            names.append(f"take {goal.thing}")
            names += [f"{goal.treatment} {goal.thing}"] if goal.treatment else []
            names.append(f"put {goal.thing}")
        return names

    @property
    def share(self) -> float:
        """The share of subgoals that were reached."""
        return len(self.reached) / len(self.subgoals)

    @property
    def is_solved(self) -> bool:
        """Whether every goal is reached now."""
        return all(map(self._is_at_goal, self.goals))

    @property
    def reward(self) -> float:
        """The share of subgoals, or whether the goal is reached."""
        return self.share if self.is_dense else float(self.is_solved)

    @property
    def is_done(self) -> bool:
        """Whether the goal is reached, or no action is left."""
        return self.is_solved or self.num_actions >= self.max_actions

    def describe(self) -> str:
        """Return the text of the room: exits, furniture and visible things."""
        exits = ", ".join(
            f"{direction} to the {room}" + (" (locked)" if self._is_locked(room) else "")
            for direction, room in sorted(self.exits[self.room].items())
        )
        places = []
        for place in sorted(self._here()):
            inside = self._visible_at(place)
            if place in self.closed:
                places.append(f"the {place} (closed)")
            else:
                places.append(f"the {place} ({', '.join(inside) if inside else 'empty'})")
        return f"You are in the {self.room}. Exits: {exits}. You see {', '.join(places)}."

    # The tools

    def do_look(self) -> str:
        """Describe the room."""
        return self.describe()

    def do_inventory(self) -> str:
        """List what the player holds."""
        things = ", ".join(map(self._name, self._visible_at(HELD)))
        return f"You hold {things or 'nothing'}."

    def do_go(self, direction: str) -> str:
        """Walk to the next room."""
        self.num_actions += 1
        room = self._exit(direction)
        if self._is_locked(room):
            raise MoveError("The door is locked.")
        self.room = room
        return self.describe()

    def do_unlock(self, direction: str) -> str:
        """Unlock a door."""
        self.num_actions += 1
        room = self._exit(direction)
        if not self._is_locked(room):
            raise MoveError("That door is not locked.")
        if self.things.get(_KEY) != HELD:
            raise MoveError("You need the key.")
        self.locked.discard(frozenset({self.room, room}))
        self.reached.add("unlock")
        return f"You unlock the door to the {room}."

    def do_open(self, place: str) -> str:
        """Open a piece of furniture."""
        self.num_actions += 1
        self._check_place(place)
        if place not in self.closed:
            raise MoveError(f"The {place} is not closed.")
        self.closed.discard(place)
        inside = ", ".join(map(self._name, self._visible_at(place)))
        return f"You open the {place}. It contains {inside or 'nothing'}."

    def do_take(self, thing: str) -> str:
        """Take a thing."""
        self.num_actions += 1
        place = self.things.get(thing)
        if place == HELD:
            raise MoveError("You hold it already.")
        if place is None or place not in self._here() or place in self.closed:
            raise MoveError(f"You see no {thing} here.")
        if len(self._visible_at(HELD)) >= CAPACITY:
            raise MoveError(f"You can hold only {CAPACITY} things.")
        self.things[thing] = HELD
        self._reach("take", thing)
        return f"You take the {thing} from the {place}."

    def do_put(self, thing: str, place: str) -> str:
        """Put down a thing."""
        self.num_actions += 1
        self._check_carried(thing)
        self._check_place(place)
        if place in self.closed:
            raise MoveError(f"The {place} is closed.")
        self.things[thing] = place
        if any(goal.thing == thing and self._is_at_goal(goal) for goal in self.goals):
            self._reach("put", thing)
        end = " You have reached the goal." if self.is_solved else ""
        return f"You put the {thing} into or onto the {place}.{end}"

    def do_clean(self, thing: str) -> str:
        """Clean a thing."""
        return self._treat("clean", thing)

    def do_heat(self, thing: str) -> str:
        """Heat a thing."""
        return self._treat("heat", thing)

    def do_cool(self, thing: str) -> str:
        """Cool a thing."""
        return self._treat("cool", thing)

    def _treat(self, tool: str, thing: str) -> str:
        self.num_actions += 1
        self._check_carried(thing)
        device = DEVICES[tool]
        if device not in self._here():
            raise MoveError(f"There is no {device} here.")
        self.states[thing] = tool
        self._reach(tool, thing)
        return f"The {thing} is {DONE_TO[tool]} now."

    def _reach(self, tool: str, thing: str) -> None:
        name = f"{tool} {thing}"
        if name in self.subgoals:
            self.reached.add(name)

    def _is_at_goal(self, goal: Goal) -> bool:
        treated = goal.treatment is None or self.states.get(goal.thing) == goal.treatment
        return treated and self.things[goal.thing] == goal.place

    def _here(self) -> list[str]:
        return [place for place, room in self.places.items() if room == self.room]

    def _visible_at(self, place: str) -> list[str]:
        return sorted(thing for thing, at in self.things.items() if at == place)

    def _name(self, thing: str) -> str:
        state = self.states.get(thing)
        return f"{thing} ({DONE_TO[state]})" if state else thing

    def _is_locked(self, room: str) -> bool:
        return frozenset({self.room, room}) in self.locked

    def _exit(self, direction: str) -> str:
        if direction not in self.exits[self.room]:
            raise MoveError(f"There is no way {direction[:40]}.")
        return self.exits[self.room][direction]

    def _check_place(self, place: str) -> None:
        if place not in self._here():
            raise MoveError(f"There is no {place[:40]} here.")

    def _check_carried(self, thing: str) -> None:
        if self.things.get(thing) != HELD:
            raise MoveError(f"You do not hold the {thing[:40]}.")


def make_world(level: str, seed: str, *, is_dense: bool = True) -> TextWorld:
    """Return the first state of the world that a level and a seed decide.

    Args:
        level: One of LEVELS.
        seed: Any text.
        is_dense: See `TextWorld`.
    """
    how, draw = LEVELS[level], random.Random(f"text-world {level} {seed}")
    exits = _draw_rooms(how.num_rooms, draw)
    places, closed = _draw_furniture(list(exits), level, draw)
    free = [place for place in places if place not in DEVICES.values()]
    things = {name: draw.choice(free) for name in draw.sample(_THINGS, how.num_things)}
    locked: set[frozenset[str]] = set()
    start = draw.choice(list(exits))
    if how.is_locked:
        door, near, far = _cut(exits, start, draw)
        locked.add(frozenset(door))
        things[_KEY] = draw.choice([place for place in free if places[place] in near])
    goals = []
    for number, thing in enumerate(draw.sample(sorted(set(things) - {_KEY}), how.num_goals)):
        targets = [place for place in free if place != things[thing]]
        if how.is_locked and number == 0:  # the first goal is behind the locked door
            targets = [place for place in targets if places[place] in far]
        treatment = draw.choice(sorted(DEVICES)) if how.is_treated else None
        goals.append(Goal(thing, draw.choice(targets), treatment))
    return TextWorld(
        room=start,
        exits=exits,
        places=places,
        closed=closed,
        things=things,
        goals=tuple(goals),
        max_actions=how.max_actions,
        is_dense=is_dense,
        locked=locked,
    )


def _draw_rooms(num: int, draw: random.Random) -> dict[str, dict[str, str]]:
    """Return a tree of rooms on a grid: by room and direction, the next room."""
    names = ["kitchen", *draw.sample(_ROOMS, num - 1)]
    cells = {(0, 0): names[0]}
    exits: dict[str, dict[str, str]] = {name: {} for name in names}
    for name in names[1:]:
        options = [
            (cell, direction, (cell[0] + x, cell[1] + y))
            for cell in cells
            for direction, (x, y) in _MOVES.items()
            if (cell[0] + x, cell[1] + y) not in cells
        ]
        cell, direction, new = draw.choice(options)
        exits[cells[cell]][direction] = name
        exits[name][OPPOSITE[direction]] = cells[cell]
        cells[new] = name
    return exits


def _draw_furniture(
    rooms: list[str], level: str, draw: random.Random
) -> tuple[dict[str, str], set[str]]:
    """Return furniture by name with its room, and the furniture that is closed."""
    places = dict.fromkeys(DEVICES.values(), "kitchen")
    closed = set()
    for room in rooms:
        places[f"{room} {draw.choice(_OPEN_PLACES)}"] = room
        if level == "easy":
            places[f"{room} {draw.choice(_CLOSED_PLACES)}"] = room
            continue
        for name in draw.sample(_CLOSED_PLACES, draw.choice((1, 2))):
            places[f"{room} {name}"] = room
            closed.add(f"{room} {name}")
    return places, closed


def _cut(
    exits: dict[str, dict[str, str]], start: str, draw: random.Random
) -> tuple[tuple[str, str], set[str], set[str]]:
    """Choose a door to lock. Return its two rooms, all rooms before it, and all rooms behind it."""
    doors = sorted((a, b) for a, ways in exits.items() for b in ways.values() if a < b)
    door = draw.choice(doors)
    near, todo = {start}, [start]
    while todo:
        room = todo.pop()
        for other in exits[room].values():
            if other not in near and {room, other} != set(door):
                near.add(other)
                todo.append(other)
    return door, near, set(exits) - near


def introduce(world: TextWorld) -> str:
    """Return the text that asks the model to reach the goal of a world."""
    goals = "; then ".join(map(str, world.goals))
    limit = f"You have {world.max_actions} actions; looking does not count."
    return f"Your goal: {goals}. {limit} Call one tool at a time.\n\n{world.describe()}"
