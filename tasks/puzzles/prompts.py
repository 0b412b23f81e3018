"""Prompts that ask a model for possible next steps of a puzzle, and for the value of a state."""

from collections.abc import Sequence
from typing import Final

from treegen.tasks.puzzles.countdown_text import (
    VALUE_HEADER,
    numbers_text,
    prompt,
    read_step,
    step_line,
    value_block,
    value_head,
    value_label,
)
from treegen.tasks.puzzles.puzzle import Number, PuzzleState, is_legal, moves

# Score of each judgement, as in the tree-of-thoughts paper.
WORTH: Final = {"sure": 20.0, "likely": 1.0, "impossible": 0.001}

_PROPOSE_HEADER: Final = "List steps that may help to reach the target, one a line."
_NUM_PROPOSED: Final = 6
_PROPOSED: Final[tuple[tuple[PuzzleState, int], ...]] = (((2, 6, 7, 13), 24), ((3, 5, 8), 16))
_JUDGED: Final[tuple[tuple[PuzzleState, int], ...]] = (
    ((10, 14), 24),
    ((11, 12), 24),
    ((4, 4, 10), 24),
    ((5, 9), 45),
    ((3, 7, 12), 50),
    ((2, 5, 8), 20),
    ((7, 13), 6),
    ((10, 10, 11), 24),
    ((4, 6), 30),
    ((17,), 17),
)


def puzzle_value_prompt(state: PuzzleState, target: Number, *, whole: bool) -> str:
    """Return the prompt for a judgement of a state, which ends where the judgement begins.

    Args:
        state: The numbers that are left.
        target: The number to reach.
        whole: Whether every result must be a whole number from 0 on.
    """
    blocks = [
        value_block(left, goal, value_label(left, goal, whole=whole)) for left, goal in _JUDGED
    ]
    return prompt(VALUE_HEADER, blocks, value_head(state, target))


def read_judgement(text: str) -> float:
    """Return the score of a judgement; 0 for a text that is not a judgement."""
    words = text.split(None, 1)
    return WORTH.get(words[0].rstrip(".").lower(), 0.0) if words else 0.0


def propose_prompt(state: PuzzleState, target: Number, *, whole: bool) -> str:
    """Return the prompt for a list of possible next steps, which ends where the list begins.

    Args:
        state: The numbers that are left.
        target: The number to reach.
        whole: Whether every result must be a whole number from 0 on.
    """
    blocks = []
    for left, goal in _PROPOSED:
        steps = moves(left, whole=whole)
        # Show steps from the whole list, because the first ones all combine the same two numbers.
        shown = steps[:: max(1, len(steps) // _NUM_PROPOSED)][:_NUM_PROPOSED]
        blocks.append(_propose_head(left, goal) + "\n".join(map(step_line, shown)))
    return prompt(_PROPOSE_HEADER, blocks, _propose_head(state, target))


def read_proposals(text: str, state: PuzzleState, *, whole: bool) -> list[str]:
    """Return the legal steps of an answer as lines with their newlines, without repeats.

    Args:
        text: The model's answer.
        state: The numbers that are left before the step.
        whole: Whether every result must be a whole number from 0 on.
    """
    found: dict[str, None] = {}
    for line in text.split("\n"):
        step = read_step(line.strip())
        if step is not None and is_legal(state, step, whole=whole):
            found[f"{step_line(step)}\n"] = None
    return list(found)


def _propose_head(numbers: Sequence[Number], target: Number) -> str:
    return f"Numbers: {numbers_text(numbers)}\nTarget: {target}\nPossible next steps:\n"
