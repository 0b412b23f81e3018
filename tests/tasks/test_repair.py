"""Repair puzzles: each is solvable, and hidden tests tell repaired files from tricks."""

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
from agent_policies import call, play, solve_puzzle

from treegen.tasks.agents.functions import FUNCTIONS
from treegen.tasks.agents.repair import (
    LEVELS,
    LIMITS,
    NUM_HIDDEN,
    NUM_PUBLIC,
    CaseRunner,
    RepairGame,
    RepairPuzzle,
    make_puzzle,
)
from treegen.tasks.sandbox import SandboxPool


@pytest.fixture(scope="module")
def runner() -> Iterator[CaseRunner]:
    with SandboxPool(limits=replace(LIMITS, cpu_seconds=0.5), workers=1) as pool:
        yield CaseRunner(pool)


def game_of(puzzle: RepairPuzzle, runner: CaseRunner) -> RepairGame:
    return RepairGame(dict(puzzle.files), puzzle.public, runner)


def hidden_share(puzzle: RepairPuzzle, game: RepairGame, runner: CaseRunner) -> float:
    results = runner.run(game.files, puzzle.hidden)
    return sum(result.passed for result in results) / len(results)


@pytest.mark.parametrize("level", LEVELS)
def test_each_puzzle_is_broken_and_can_be_repaired(level: str) -> None:
    for seed in range(40):
        puzzle = make_puzzle(level, str(seed))
        how = LEVELS[level]
        assert puzzle == make_puzzle(level, str(seed))
        wrong = {path for path in puzzle.files if puzzle.files[path] != puzzle.solution[path]}
        assert len(puzzle.files) == how.num_files
        assert len(wrong) == how.num_bugs + how.num_unwritten
        assert len(puzzle.public) == NUM_PUBLIC * how.num_files
        assert NUM_PUBLIC < len(puzzle.hidden) <= NUM_HIDDEN * how.num_files
        calls = [case.call for case in (*puzzle.public, *puzzle.hidden)]
        assert len(set(calls)) == len(calls), "a hidden test is public"
        sources = {function.name: function for function in FUNCTIONS}
        for cases in (puzzle.public, puzzle.hidden):
            failed = set()
            for case in cases:
                function = sources[case.function]
                assert function.load()(*copy.deepcopy(case.arguments)) == case.expected
                try:
                    text = puzzle.files[f"{case.function}.py"]
                    if function.load(text)(*copy.deepcopy(case.arguments)) != case.expected:
                        failed.add(f"{case.function}.py")
                except Exception:
                    failed.add(f"{case.function}.py")
            assert failed == wrong


@pytest.mark.parametrize("level", LEVELS)
def test_a_scripted_policy_solves_puzzles(level: str, runner: CaseRunner) -> None:
    for seed in range(3):
        puzzle = make_puzzle(level, str(seed))
        game = game_of(puzzle, runner)
        assert game.reward < 1 and hidden_share(puzzle, game, runner) < 1
        end = play(game, solve_puzzle(puzzle))
        assert isinstance(end, RepairGame)
        assert end.is_done and end.reward == 1.0 and hidden_share(puzzle, end, runner) == 1.0
        assert not game.is_done and game.files == puzzle.files


def test_each_bug_has_a_text_of_its_function() -> None:
    for function in FUNCTIONS:
        for old, new in function.bugs:
            assert function.source.count(old) == 1 and old != new, (function.name, old)


def test_the_tools_show_and_change_files(runner: CaseRunner) -> None:
    puzzle = make_puzzle("easy", "0")
    game = game_of(puzzle, runner)
    ((path, text),) = puzzle.files.items()
    assert game.run(call("list_files")).text == f"Files: {path}"
    assert game.run(call("read_file", path=path)).text == text
    seen = game.run(call("run_tests"))
    assert "FAIL" in seen.text and "public tests pass." in seen.text and game.reward < 1
    assert all(case.call not in seen.text for case in puzzle.hidden)
    assert "occurs 0 times" in game.run(call("replace", path=path, old="", new="x")).text
    assert "occurs 0 times" in game.run(call("replace", path=path, old="no such", new="")).text
    game.run(call("replace", path=path, old=text, new=puzzle.solution[path]))
    assert game.reward == 1.0
    assert "There is no file" in game.run(call("write_file", path="other.py", text="")).text
    assert "There is no file" in game.run(call("read_file", path="../repair.py")).text
    assert "at most" in game.run(call("write_file", path=path, text="x" * 20_001)).text
    assert game.run(call("submit")).is_done
    assert game.run(call("write_file", path=path, text="")).text == "The episode is over."
    assert game.files[path] == puzzle.solution[path]


def by_heart(puzzle: RepairPuzzle, name: str) -> str:
    table = {repr(c.arguments): c.expected for c in puzzle.public if c.function == name}
    return f"def {name}(*arguments):\n    return {table!r}[repr(arguments)]\n"


TRICKS = {
    "equal to everything": (
        "class E:\n    __eq__ = lambda *_: True\ndef {name}(*a):\n    return E()\n"
    ),
    "true": "def {name}(*a):\n    return True\n",
    "arguments": "def {name}(*a):\n    return a[0]\n",
    "exit": "import os\ndef {name}(*a):\n    os._exit(0)\n",
    "raise": "raise SystemExit(0)\n",
    "endless": "while True: pass\n",
    "syntax": "def {name}(:\n",
    "look around": (
        "import sys\ndef {name}(*a):\n"
        "    frame = sys._getframe()\n    found = []\n"
        "    while frame:\n        found += list(frame.f_locals.values())\n"
        "        frame = frame.f_back\n"
        "    return next((v for v in found if isinstance(v, list) and len(v) > 99), None)\n"
    ),
    "an int that Python does not write": "def {name}(*a):\n    return 10**5000\n",
    "patch the runner": (
        "import sys\nfor module in list(sys.modules.values()):\n"
        "    if hasattr(module, 'run_cases'):\n"
        "        module.run_cases = lambda name, cases: [['value', None]] * len(cases)\n"
        "def {name}(*a):\n    return None\n"
    ),
}


@pytest.mark.parametrize("trick", [*TRICKS, "by heart"])
def test_tricks_do_not_pass_the_hidden_tests(trick: str, runner: CaseRunner) -> None:
    puzzle = make_puzzle("easy", "1")
    game = game_of(puzzle, runner)
    (path,) = puzzle.files
    name = path.removesuffix(".py")
    text = by_heart(puzzle, name) if trick == "by heart" else TRICKS[trick].format(name=name)
    game.run(call("write_file", path=path, text=text))
    if trick == "by heart":
        assert game.reward == 1.0
    assert hidden_share(puzzle, game, runner) < 1, text
