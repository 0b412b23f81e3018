"""What `letter_answer` reads of texts as models write them."""

from pathlib import Path

import pytest

from treegen.tasks.common.letters import letter_answer
from treegen.tasks.mmlu.data import load_questions

STATED = (
    ("The answer is C. Answer choice A is incorrect.", "C"),
    ("The answer is B", "B"),
    ("the answer is (B).", "B"),
    ("The answer is **B**", "B"),
    ("The answer is: B", "B"),
    ("The answer is:\n\nB", "B"),
    ('The answer is "B".', "B"),
    ("The answer is 'B'.", "B"),
    ("The answer is `B`", "B"),
    ("The answer is [B]", "B"),
    ("The answer is {B}", "B"),
    ("The answer is $B$.", "B"),
    ("The answer is $\\text{B}$", "B"),
    ("The answer is B) Paris", "B"),
    ("The answer is option B", "B"),
    ("The answer is choice (B)", "B"),
    ("Answer: B", "B"),
    ("**Answer:** B", "B"),
    ("**Answer**: B", "B"),
    ("**Final Answer:** **B**", "B"),
    ("Answer: **(B)**.", "B"),
    ("Answer = B", "B"),
    ("### Answer\nB", "B"),
    ("**Answer**\n\nB", "B"),
    ("Final answer: B, since A is too small.", "B"),
    ("The final answer is B", "B"),
    ("The correct answer would be B", "B"),
    ("The correct option is B", "B"),
    ("The best choice is therefore B", "B"),
    ("The right answer must be B", "B"),
    ("The correct choice: B", "B"),
    ("Thus the answer is clearly B.", "B"),
    ("B is the correct answer", "B"),
    ("(B) is the right choice.", "B"),
    ("B is the answer", "B"),
    ("B is the best answer, A is not", "B"),
    ("Option B is the only correct answer", "B"),
    ("A is the answer", "A"),
    ("A is the correct option.", "A"),
    ("I choose answer B.", "B"),
    ("Answer (B)", "B"),
    ("The answer is A because it is", "A"),
    ("The answer is A, as shown", "A"),
    ("The answer is A in this case", "A"),
    ("Answer: A since 2 < 3", "A"),
    ("The answer is B. No, wait: the answer is C.", "C"),
    ("Answer: A\nAnswer: B", "B"),
    ("The answer is A.\nB is wrong. C is wrong.", "A"),
    ("The answer is B, C is wrong", "B"),
    ("The answer is B and C is wrong.", "B"),
    ("The answer is B, not A or C.", "B"),
    ("The answer is B rather than A.", "B"),
    ("The answer is B (not A).", "B"),
    ("A. x\nB. y\nC. z\nThe answer is C", "C"),
    ("Of A, B, C and D the answer is C", "C"),
    ("\u7b54\u6848: B", "B"),
    ("The answer is \uff22", "B"),
    ("The answer is \uff08\uff22\uff09", "B"),
    ("Answer\uff1aB", "B"),
    ("The answer is \u201cB\u201d", "B"),
    ("_Answer_: _B_", "B"),
)
BOXED = (
    ("\\boxed{B}", "B"),
    ("So $\\boxed{\\text{B}}$. A is not.", "B"),
    ("\\boxed{(B)}", "B"),
    ("\\boxed{\\textbf{(B)}\\ 12}", "B"),
    ("\\boxed{\\mathrm{B}}", "B"),
    ("\\boxed{B. 12}", "B"),
    ("\\boxed{A} no: \\boxed{C}", "C"),
    ("The answer is A. \\boxed{C}", "C"),
    ("\\boxed{A, C}", None),
    ("\\boxed{A \\text{ or } C}", None),
    ("\\boxed{12}, which is B", "B"),
    ("\\boxed{E}", None),
    ("\\boxed{AB}", None),
    ("\\boxed{}", None),
)
CHOSEN = (
    ("A is correct.", "A"),
    ("B is correct.", "B"),
    ("Option A is correct.", "A"),
    ("(A) is correct", "A"),
    ("**A** is correct", "A"),
    ("A is right, B is not", "A"),
    ("Choice C is correct; A is too small, B too large.", "C"),
    ("So only A is correct.", "A"),
    ("A (Paris) is correct", "A"),
    ("I choose B", "B"),
    ("I'd go with option B.", "B"),
    ("I pick (B) over (A)", "B"),
    ("I would select B.", "B"),
    ("We chose C, though D is close", "C"),
    ("A must be correct since B is larger", "A"),
    ("A is clearly correct", "A"),
    ("Option D (at most R) is correct.", "D"),
    ("Option C (A State may do so) is correct.", "C"),
    ("A: Incorrect. B: Correct. C: Incorrect.", "B"),
    ("A - wrong\nB - correct", "B"),
    ("A and C are correct", None),
    ("Both A and C are correct.", None),
    ("A or B is correct", None),
    ("I choose A or B", None),
    ("A is not correct", None),
    ("A isn't correct", None),
    ("A is incorrect", None),
    ("A is incorrect, B is correct", "B"),
    ("If A is correct, then 2 = 3. C fits", "C"),
    ("I don't think A is correct. It is D", "D"),
    ("Whether A is correct is unclear", None),
    ("Neither A nor B is correct", None),
)
DENIED = (
    ("The answer is not A", None),
    ("The answer is not A but B", "B"),
    ("not A", None),
    ("Not A.", None),
    ("The answer isn't A, it's B", "B"),
    ("The answer cannot be A.", None),
    ("The answer can't be A, so B", "B"),
    ("The answer is neither A nor B, but C", "C"),
    ("It's not A, B or C, so D", "D"),
    ("Not A, B, or C", None),
    ("A is wrong.", None),
    ("Option A is incorrect", None),
    ("Eliminate A and B. C remains.", "C"),
    ("A, B and C are wrong, so D", "D"),
    ("A is false. B is false. C is false. D it is", "D"),
    ("A isn't right and B isn't either: C", "C"),
    ("We can rule out A", None),
    ("It can't be A", None),
    ("B, not A", "B"),
    ("B. False", "B"),
    ("The correct answer is **C**: not essential", "C"),
    ("C: not essential", "C"),
    ("(B) Right ventricle", "B"),
    ("They do not\nAnswer: C", "C"),
    ("(B) No effect", "B"),
    ("It is not true that the answer is A. D fits.", "D"),
    ("If the answer is A, then no. B", "B"),
    ("I don't think the answer is A.", None),
    ("A: no. B: no. C: yes. D: no.", "C"),
    ("A. Incorrect. B. Incorrect. C. Correct.", "C"),
    ("A \u274c B \u274c C", "C"),
    ("The answer is B, A isn't", "B"),
    ("Everything except A: no", None),
    ("Answer choice A is incorrect.", None),
    ("Answer A is wrong", None),
)
SEVERAL = (
    ("The answer is A or B", None),
    ("The answer is A and C.", None),
    ("Answer: A, C", None),
    ("The answer is A/B", None),
    ("The answer is (A) or (B)", None),
    ("B or C", None),
    ("The answer is A) 5 or B) 7", None),
    ("Answer: A, B, C or D", None),
    ("A, B", None),
    ("Answer with A, B, C or D.", None),
    ("A. Paris\nB. London", None),
    ("A\nB\nC\nD", None),
    ("(A) x (B) y (C) z", None),
    ("A) x\nB) y\nC) z\nD) w", None),
    ("A-C", None),
    ("A & B", None),
    ("The answer is A-C", None),
    ("The answer is A, B, or both", None),
    ("A and B", None),
    ("Between A and B it is close", None),
    ("The answers are A and D", None),
)
LEADING = (
    ("B", "B"),
    ("\nB", "B"),
    (" B ", "B"),
    ("B.", "B"),
    ("(B)", "B"),
    ("(B) Paris", "B"),
    ("B) Paris", "B"),
    ("**B.** Paris", "B"),
    ("**B**", "B"),
    ("B: Paris", "B"),
    ("option B", "B"),
    ("Option B.", "B"),
    ("B, because A is small", "B"),
    ("B\n\nA is too small", "B"),
    ("[B]", "B"),
    ("B. It is larger than A.", "B"),
    ('"B"', "B"),
    ("`B`", "B"),
    ("$B$", "B"),
    ("__B__", "B"),
    ("B. London. A. is not.", "B"),
    ("C;", "C"),
    ("A", "A"),
    ("A.", "A"),
    ("(A)", "A"),
    ("(C) It is", "C"),
    ("**D**", "D"),
    ("A, since it is", "A"),
    ("A\n", "A"),
)
ALONE = (
    ("I say it's B", "B"),
    ("It is B, I think", "B"),
    ("So B fits", "B"),
    ("That makes it (C).", "C"),
    ("A dog is an animal", None),
    ("The answer is a dog", None),
    ("The answer is A dog", None),
    ("The answer is Apple", None),
    ("Bob", None),
    ("none", None),
    ("", None),
    ("???", None),
    ("I think so", None),
    ("The answer is C++", None),
    ("C# it is", None),
    ("B+ is good", None),
    ("A = 5", None),
    ("x_A", None),
    ("A's", None),
    ("A-team", None),
    ("H2O", None),
    ("\u00c9", None),
    ("The answer is E", None),
    ("E is correct, not A", None),
    ("The answer is E. A is near.", None),
    ("\u7b54\u6848\u662fB", "B"),
    ("La respuesta es B", "B"),
    ("Die Antwort ist B.", "B"),
    ("<think>B seems right</think>B", "B"),
    ("The answer is I think B", "B"),
    ("answer: b", None),
)
TABLE = (*STATED, *BOXED, *CHOSEN, *DENIED, *SEVERAL, *LEADING, *ALONE)


def test_the_table_is_long() -> None:
    assert len({text for text, _ in TABLE}) >= 150


@pytest.mark.parametrize(("text", "want"), TABLE)
def test_letters_in_model_text(text: str, want: str | None) -> None:
    assert letter_answer(text) == want


@pytest.mark.parametrize(
    ("text", "num", "want"),
    [
        ("The answer is E", 5, "E"),
        ("The answer is I", 10, "I"),
        ("I think so", 10, None),
        ("I is correct", 10, "I"),
        ("The answer is J.", 10, "J"),
        ("C", 2, None),
        ("B", 2, "B"),
        ("I choose H", 10, "H"),
        ("I", 9, "I"),
        ("The answer is Z", 26, "Z"),
    ],
)
def test_letters_of_more_or_fewer_choices(text: str, num: int, want: str | None) -> None:
    assert letter_answer(text, num) == want


@pytest.mark.parametrize(
    "form",
    [
        "{letter}. {choice}",
        "({letter}) {choice}",
        "{letter}: {choice}",
        "{letter}\n\n{choice}",
        "The answer is {letter}. {choice}",
        "{choice}. So the answer is ({letter}).",
        "{listed}\n\nThe correct answer is **{letter}**: {choice}",
        "{question}\n{listed}\nAnswer: {letter}",
        "Option {letter} ({choice}) is correct.",
        "{listed}\nThus $\\boxed{{\\text{{{letter}}}}}$.",
    ],
)
def test_letters_beside_real_choices(data_dir: Path, form: str) -> None:
    questions = load_questions(str(data_dir / "mmlu"), None, (), with_dev=False).test
    read = []
    for question in (each for subject in questions.values() for each in subject[::3]):
        text, *choices = question.block.split("\n")[-5:]
        choice = choices["ABCD".index(question.answer)][3:]
        shown = form.format(
            letter=question.answer, choice=choice, question=text, listed="\n".join(choices)
        )
        read.append(letter_answer(shown) == question.answer)
    # A choice may be "cannot ..." or "(at most D)".
    assert len(read) > 400 and sum(read) > 0.97 * len(read)


@pytest.mark.parametrize("letter", "ABCD")
@pytest.mark.parametrize("text", ["%s is correct.", "The answer is %s", "%s", "(%s) is the answer"])
def test_all_letters_are_read_alike(text: str, letter: str) -> None:
    assert letter_answer(text % letter) == letter
