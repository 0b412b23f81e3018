"""The corpus of the demo model, its tokenizer, and a very short training."""

import io
import random
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from train_demo import documents, words
from train_demo.batches import Group, Rows, Stage, Steps, encode, stage_of
from train_demo.bundle import ways
from train_demo.documents import LONG, LOOKUP, SHORT, Document
from train_demo.evaluate import TASKS
from train_demo.held_out import SHARE, reserved
from train_demo.model import SMOOTHING, TINY, build_model, digit_tokens, loss_of
from train_demo.programs import MAX_STEPS, Program, program
from train_demo.puzzles import judge, key, puzzle, reachable, state
from train_demo.tokenizer import train_tokenizer
from train_demo.train import Training, main, rate
from train_demo.words import WordProblem, word_problem
from transformers import PreTrainedTokenizerFast

from treegen import LLM, SamplingParams
from treegen.tasks.apps.task import with_tabs
from treegen.tasks.common.answers import numeric_answer
from treegen.tasks.puzzles.puzzle import PuzzleStep, is_legal, read_step, value_label
from treegen.tasks.puzzles.puzzle import reachable as can_reach

MAKERS = [maker for maker, _ in (*SHORT, *LONG, *LOOKUP)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(3, 300)


# Problems


@pytest.mark.parametrize("level", range(words.LEVELS))
def test_word_problems_have_right_solutions(level: int) -> None:
    draw = random.Random(f"words {level}")
    for problem in _words(draw, level, 150):
        for step in problem.steps:
            if step.sign:
                sum_ = f"{step.left} {step.sign} {step.right}"
                assert eval(sum_) == step.result, sum_
                assert f"{sum_} = {step.result}" in step.plain()
        assert problem.steps[-1].result == problem.answer >= 0
        assert str(problem.answer) == numeric_answer(problem.target())
        assert problem.reference().endswith(f"\n#### {problem.answer}")
        assert "\n\n" not in problem.target("\n") and "Q:" not in problem.question
        assert "{" not in problem.target() + problem.question


def _words(draw: random.Random, level: int, num: int) -> list[WordProblem]:
    return [word_problem(draw, level) for _ in range(num)]


@pytest.mark.parametrize("steps", range(MAX_STEPS + 1))
def test_programs_do_what_their_problems_ask(steps: int) -> None:
    draw = random.Random(f"programs {steps}")
    for hidden in range(min(steps, 2) + 1):
        for _ in range(40):
            problem = program(draw, steps, hidden, num_tests=4)
            _check_program(problem)
            assert problem.question.count("Input\n") == 2
            assert with_tabs(problem.solution) == documents.with_tabs(problem.solution)


def _check_program(problem: Program) -> None:
    code = compile(problem.solution, "solution", "exec")
    for given, expected in zip(problem.inputs, problem.outputs, strict=True):
        printed = io.StringIO()
        stdin, sys.stdin = sys.stdin, io.StringIO(given)
        try:
            with redirect_stdout(printed):
                exec(code, {"__name__": "__main__"})
        finally:
            sys.stdin = stdin
        assert printed.getvalue().split() == expected.split(), problem.solution


@pytest.mark.parametrize("count", [3, 4])
def test_puzzles_are_those_of_the_task(count: int) -> None:
    draw = random.Random(f"puzzles {count}")
    for _ in range(200):
        made = puzzle(draw, count)
        left: tuple[int, ...] = made.numbers
        for step in made.steps:
            parsed = read_step(str(step))
            assert parsed == PuzzleStep(step.left, step.sign, step.right, step.result, step.rest)
            assert is_legal(left, parsed, whole=True)
            left = step.rest
        assert left == (made.target,)
        assert ways(made.numbers, made.target) > 0


def test_states_are_judged_as_the_task_judges_them() -> None:
    draw = random.Random("states")
    seen = set()
    for _ in range(300):
        numbers, target, verdict = state(draw)
        assert verdict == judge(numbers, target) == value_label(numbers, target)
        assert (target in reachable(numbers)) == can_reach(numbers, target, True)
        seen.add((len(numbers), verdict != "impossible"))
    assert seen >= {(count, possible) for count in (2, 3) for possible in (True, False)}


# What is held out


def test_about_one_in_so_many_is_reserved_whatever_its_spacing_and_case() -> None:
    keys = [f"problem {number}" for number in range(4000)]
    assert 0.8 / SHARE < sum(map(reserved, keys)) / len(keys) < 1.2 / SHARE
    assert all(reserved(f"  {name.upper()}\n") == reserved(name) for name in keys)


def test_training_never_sees_what_is_reserved() -> None:
    draw = random.Random("stream")
    for _ in range(400):
        assert not reserved(word_problem(draw, draw.randrange(words.LEVELS)).key)
        made = puzzle(draw, draw.choice((3, 4)))
        assert not reserved(key(made.numbers, made.target))
        numbers, target, _ = state(draw)
        assert not reserved(key(numbers, target))
        question = program(draw, draw.randint(2, MAX_STEPS), 1)
        assert not reserved(question.key)
        assert not reserved(program(draw, draw.randint(0, 1)).question)


def test_evaluation_takes_nothing_else() -> None:
    draw = random.Random("evaluation")
    for _ in range(40):
        assert reserved(word_problem(draw, 2, evaluation=True).key)
        made = puzzle(draw, 4, evaluation=True)
        assert reserved(key(made.numbers, made.target))
        assert reserved(program(draw, 3, evaluation=True).key)
        assert reserved(program(draw, 1, 1, evaluation=True).question)


# Tokens and rows


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
def test_parts_have_the_tokens_of_the_whole(
    tokenizer: PreTrainedTokenizerFast, maker: documents.Maker
) -> None:
    draw = random.Random(maker.__name__)
    for _ in range(12):
        document: Document = maker(draw)
        found = encode(tokenizer, document)
        whole = tokenizer("".join(part.text for part in document), verbose=False)["input_ids"]
        assert found.ids == [*whole, tokenizer.eos_token_id]
        assert len(found.ids) == len(found.weights) == len(found.smooth)
        assert any(weight > documents.READ for weight in found.weights)


def test_every_digit_is_a_token_and_every_text_comes_back(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    for text in (" 1204", "7 + 56 = 63", "x[12:]\t\t\n\n\n a  b", "größer ≤ 犬\r\n"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
    pieces = tokenizer.tokenize(" 1204 + 9")
    assert all(sum(c.isdigit() for c in piece) <= 1 for piece in pieces)
    assert len(tokenizer) <= 2048


def test_a_step_is_the_same_wherever_training_begins(tokenizer: PreTrainedTokenizerFast) -> None:
    plan = (Stage(2, (Group(LOOKUP, 2, 64),)), Stage(3, (Group(SHORT, 2, 96), Group(LONG, 1, 128))))
    whole, later = Steps(tokenizer, plan, 5, 0), Steps(tokenizer, plan, 5, 3)
    assert (len(whole), len(later)) == (5, 2)
    for index in range(2):
        for first, second in zip(whole[3 + index], later[index], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert [rows.tokens.shape for rows in whole[4]] == [(2, 97), (1, 129)]
    assert not torch.equal(whole[0][0].tokens, whole[1][0].tokens)
    assert not torch.equal(whole[0][0].tokens, Steps(tokenizer, plan, 6, 0)[0][0].tokens)
    with pytest.raises(IndexError):
        stage_of(plan, 5)


def test_the_learning_rate_rises_stays_and_falls() -> None:
    rates = [rate(step, 1000) for step in range(1000)]
    assert rates[0] == 0.1 and max(rates) == 1.0 and 0 < rates[-1] < 0.01
    assert rates[10] == rates[500] == 1.0 and rates == sorted(rates[:500]) + rates[500:]


# Training


def test_a_training_that_was_stopped_goes_on_as_if_it_had_not(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    plan = (Stage(3, (Group(LOOKUP, 2, 64),)), Stage(3, (Group(SHORT, 2, 96), Group(LONG, 1, 128))))

    def begin() -> Training:
        return Training(tokenizer, plan, seed=4, size=TINY)

    whole, part, later = begin(), begin(), begin()
    losses = [torch.stack(step) for step in whole.run(0)]
    for _, _ in zip(range(4), part.run(0), strict=False):
        pass
    part.store(tmp_path / "state.pt")
    later.restore(tmp_path / "state.pt")
    assert later.step == 4
    rest = [torch.stack(step) for step in later.run(0)]
    assert all(torch.equal(a, b) for a, b in zip(losses[4:], rest, strict=True))
    for first, second in zip(whole.model.parameters(), later.model.parameters(), strict=True):
        assert torch.equal(first, second)


def test_smoothing_is_for_digits_of_word_problems_alone(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    model = build_model(tokenizer, TINY)
    digits = digit_tokens(tokenizer)
    ids = tokenizer(" 12 + 7 = 19 pears", return_tensors="pt")["input_ids"]

    def loss(smooth: torch.Tensor) -> float:
        rows = Rows(ids, torch.ones(ids.shape, dtype=torch.float16), smooth)
        with torch.no_grad():
            return float(loss_of(model, rows, digits))

    none, every = torch.zeros(ids.shape, dtype=torch.bool), torch.ones(ids.shape, dtype=torch.bool)
    is_digit = (ids[..., None, None] == digits).any(-1).any(-1)
    assert int(is_digit.sum()) == 5
    logits = model(input_ids=ids[:, :-1]).logits[0].detach().log_softmax(-1)
    plain, smoothed = [], []
    for row, target in zip(logits, ids[0, 1:], strict=True):
        plain.append(-row[target])
        kind = next((kind for kind in digits if target in kind), None)
        spread = -row[target] if kind is None else -row[kind].mean()
        smoothed.append((1 - SMOOTHING) * -row[target] + SMOOTHING * spread)
    assert loss(none) == pytest.approx(float(torch.stack(plain).mean()), abs=1e-4)
    assert loss(every) == pytest.approx(float(torch.stack(smoothed).mean()), abs=1e-4)
    assert loss(is_digit) == pytest.approx(loss(every), abs=1e-6)


def test_the_command_writes_a_checkpoint(tmp_path: Path) -> None:
    def train(*more: str) -> Result:
        return CliRunner().invoke(main, [str(tmp_path / "out"), "--tiny", *more])

    done = train("--steps", "4", "--evaluate", "1")
    assert done.exit_code == 0 and "from step 0" in done.output, done.output
    for task in TASKS:
        assert f"$ treegen eval {task}" in done.output and f"|{task}" in done.output
        assert list((tmp_path / "out" / "runs").glob(f"*/{task}/results.json"))
    llm = LLM(str(tmp_path / "out"))
    ((completion,),) = llm.generate(["Q: 1 + 1\nA:"], SamplingParams(max_tokens=5, seed=1))
    assert completion.num_tokens <= 5
    refused = train("--steps", "5")
    assert refused.exit_code == 2 and "14 steps; pass the same options" in refused.output
