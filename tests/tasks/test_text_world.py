"""Text worlds: each is solvable, deterministic, and rewards what its goal says."""

import copy

import pytest
from agent_policies import call, play, solve_world

from treegen.tasks.agents.text_world import HELD, LEVELS, introduce, make_world


@pytest.mark.parametrize("level", LEVELS)
def test_a_scripted_policy_solves_each_world(level: str) -> None:
    for seed in range(200):
        world = make_world(level, str(seed))
        actions = solve_world(world)
        end = play(world, actions)
        assert end.is_solved and end.share == end.reward == 1.0
        # An episode leaves room for detours.
        assert len(actions) <= LEVELS[level].max_actions * 0.7, (seed, len(actions))


def test_a_world_follows_from_its_seed() -> None:
    assert make_world("hard", "1") == make_world("hard", "1")
    starts = {introduce(make_world("hard", str(seed))) for seed in range(50)}
    assert len(starts) == 50


@pytest.mark.parametrize("level", LEVELS)
def test_subgoals_are_reached_one_by_one(level: str) -> None:
    for seed in range(20):
        world, sparse = make_world(level, str(seed)), make_world(level, str(seed), is_dense=False)
        rewards = []
        for action in solve_world(world):
            assert not world.is_done
            rewards.append(world.run(action).reward or 0.0)
            sparse_reward = sparse.run(action).reward
            assert sparse_reward == float(world.is_solved)
        assert rewards == sorted(rewards) and rewards[-1] == 1.0
        assert len(set(rewards) - {0.0}) == len(world.subgoals)


def test_forks_are_independent() -> None:
    world = make_world("medium", "3")
    actions = solve_world(world)
    for at in range(len(actions)):
        before = play(world, actions[:at])
        kept = copy.deepcopy(before)
        fork = copy.deepcopy(before)
        for action in actions[at:]:
            fork.run(action)
        assert fork.is_solved and before == kept


def test_pure_tools_change_nothing() -> None:
    world = make_world("hard", "2")
    for action in solve_world(world):
        kept = copy.deepcopy(world)
        for name in world.pure_tools:
            world.run(call(name))
        assert world == kept
        world.run(action)


def test_impossible_moves_are_observations() -> None:
    world = make_world("easy", "0")
    thing = next(iter(world.things))
    for action, text in (
        (call("fly"), "There is no tool 'fly'"),
        (call("go"), "go takes direction; got none"),
        (call("go", direction="up"), "There is no way up."),
        (call("go", direction="north", speed="fast"), "go takes direction"),
        (call("put", thing=thing, place="sink"), f"You do not hold the {thing}."),
        (call("take", thing="moon"), "You see no moon here."),
        (call("open", place="moon"), "There is no moon here."),
        (call("unlock", direction="up"), "There is no way up."),
        (call("heat", thing=thing), f"You do not hold the {thing}."),
    ):
        seen = world.run(action)
        assert seen.text.startswith(text) and not seen.is_done and seen.reward == 0.0
    wrong = call("go")
    wrong.arguments["direction"] = 3
    assert world.run(wrong).text == "direction must be a string, got int."


def test_hands_hold_two_things_and_the_goal_needs_the_treatment() -> None:
    world = make_world("medium", "0")
    goal = world.goals[0]
    world.closed.clear()
    for thing in world.things:
        world.things[thing] = "sink"
    world.room = "kitchen"
    first, second, third, *_ = world.things
    world.run(call("take", thing=first))
    world.run(call("take", thing=second))
    assert world.run(call("take", thing=third)).text == "You can hold only 2 things."
    assert "You hold" in world.run(call("inventory")).text
    world.things[goal.thing] = HELD
    world.room = world.places[goal.place]
    world.run(call("put", thing=goal.thing, place=goal.place))
    assert not world.is_solved and f"put {goal.thing}" not in world.reached


def test_an_episode_ends_after_its_last_action() -> None:
    world = make_world("easy", "1")
    for number in range(world.max_actions):
        assert not world.is_done, number
        world.run(call("go", direction="up"))
        world.run(call("look"))
    assert world.is_done and not world.is_solved
    assert world.run(call("look")).text == "The episode is over."
