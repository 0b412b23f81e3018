"""How many samples of unnamed prompts were drawn before."""

import pytest

from treegen.prompts.plan import draws
from treegen.prompts.plan.draws import DrawCounter


def test_however_many_prompts_are_asked_for_no_sample_is_drawn_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draws, "_MOST", 3)
    before, drawn = DrawCounter(), set[tuple[str, int]]()
    for turn in range(200):
        origin, num = f"p{turn * turn % 17 % 7}", 1 + turn % 3
        within = DrawCounter(before) if turn % 5 == 0 else before
        first = within.advance(origin, num)
        if within is not before:
            before.update(within)
        before.forget()
        mine = {(origin, first + index) for index in range(num)}
        assert not mine & drawn, "a sample is drawn twice"
        drawn |= mine
        assert len(before._num) <= 3
    assert before.num("never asked for") >= before._forgotten > 0


def test_a_prompt_that_is_asked_for_again_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "_MOST", 2)
    before = DrawCounter()
    for origin in ("a", "b", "a", "c"):  # "b" was asked for the longest ago
        before.advance(origin, 5)
        before.forget()
    assert (before.num("a"), before.num("c")) == (10, 5)
    assert before.num("b") == 5


def test_one_call_numbers_all_of_its_prompts_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "_MOST", 2)
    before = DrawCounter()
    assert [before.advance(f"p{i}", 3) for i in range(9)] == [0] * 9
