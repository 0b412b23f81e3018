"""Which choice a model's text settles on."""

import pytest

from treegen.tasks.common.letters import first_capital, letter_answer


@pytest.mark.parametrize(
    ("text", "letter", "capital"),
    [
        ("The answer is B", "B", "T"),
        ("\nB", "B", "B"),
        ("(C) It is", "C", "C"),
        ("**D**", "D", "D"),
        ("answer: **(A)**.", "A", "A"),
        ("The answer is B. No, wait: the answer is C.", "C", "T"),
        ("the correct answer would be option D", "D", "D"),
        ("I say it's B", "B", "I"),
        ("A dog is an animal", None, "A"),
        ("The answer is a dog", None, "T"),
        ("The answer is Apple", None, "T"),
        ("B or C", None, "B"),
        ("Bob", None, "B"),
        ("none", None, None),
        ("", None, None),
    ],
)
def test_letters_in_model_text(text: str, letter: str | None, capital: str | None) -> None:
    assert letter_answer(text) == letter
    assert first_capital(text) == capital


@pytest.mark.parametrize(
    "unit", ["answer ", "answer is option ", " ", "(", "A ", "A", "A\t", "*", "\u00c9", "option "]
)
def test_reading_a_letter_takes_linear_time(unit: str) -> None:
    """More would run into the time limit of a test: minutes with the square of the length."""
    letter_answer(unit * (250_000 // len(unit)) + "!")
