"""Samples drawn again: resumed runs, thinking budgets, and near-ties."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from certified_run import make_certified_run
from cli_cases import Command

from treegen import LLM
from treegen.evals.pipeline.listener import Listener
from treegen.evals.pipeline.redraw import _Comparison, random_number, redraw_samples
from treegen.ops.sampling.draw import uniforms
from treegen.prompts.token_text import Detokenizer
from treegen.report.certify.build import load_job_of, render_prompts
from treegen.runs import RunDir

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certified_run(tmp_path_factory.mktemp("certified"))


def test_a_resumed_run_holds(tmp_path: Path, treegen: Command) -> None:
    run = tmp_path / "run"
    assert treegen("eval", "gsm8k", "-L", "3", "-n", "4", "-o", run).code == 0
    samples = run / "samples.jsonl"
    lines = samples.read_bytes().splitlines(keepends=True)
    samples.write_bytes(b"".join(lines[:5]) + lines[5][:40])
    (run / "results.json").unlink()
    assert treegen("eval", "--resume", run).code == 0
    assert treegen("certify", run).code == 0
    file = run / "certificate.json"
    done = treegen("certify", "--check", file, "--model", "demo", "--redraw", "12")
    assert done.code == 0 and "12 of 12 have the same tokens" in done.out, done.out


def test_samples_with_thinking_budgets_are_drawn_again(tmp_path: Path, treegen: Command) -> None:
    run = tmp_path / "run"
    words = ["--max-thinking-tokens", "6", "--reasoning-tags", "=", ".", "--thinking-end", " 7."]
    done = treegen("eval", "gsm8k", "-L", "3", "-n", "4", *words, "-o", run)
    assert done.code == 0, done.err
    assert treegen("certify", run).code == 0
    file = run / "certificate.json"
    done = treegen("certify", "--check", file, "--model", "demo", "--redraw", "12")
    assert done.code == 0 and "12 of 12 have the same tokens" in done.out, done.out


def test_near_ties_are_told_apart_from_other_differences(repository: Path) -> None:
    """The example was drawn in float32; in bfloat16 honest samples part, and only at near-ties."""
    with RunDir.open(repository / "examples" / "run") as run:
        job = load_job_of(run, {"model": "demo", "dtype": "bfloat16"})
        prepared = render_prompts(job)
        wide = redraw_samples(run, prepared, Listener(), num=12, seed=1)
        assert wide.tolerance == 0.1 and wide.holds and wide.parted and not wide.differing
        narrow = redraw_samples(run, prepared, Listener(), num=12, seed=1, tolerance=1e-4)
        assert not narrow.holds and len(narrow.parted) < len(wide.parted)
        assert narrow.default_tolerance == wide.default_tolerance == 0.1
    many = replace(wide, parted=wide.same, same=wide.parted)
    assert not many.holds and "fewer than half" in str(many)


def test_random_numbers_are_those_of_the_sampler() -> None:
    rng = random.Random(3)
    pairs = [(rng.randrange(2**63), rng.randrange(10_000)) for _ in range(1000)]
    seeds, steps = (torch.tensor(column) for column in zip(*pairs, strict=True))
    assert uniforms(seeds, steps).tolist() == [random_number(*pair) for pair in pairs]


def test_a_near_tie_excuses_no_text_of_other_tokens(certified: Path) -> None:
    """Every two tokens nearly tie at a tolerance of 50, and yet tokens and text belong together."""
    with RunDir.open(certified / "run") as run:
        prepared = render_prompts(load_job_of(run, {}))
        drawn = next(r for r in run.records() if r["stop"] == "\n\n" and "answer is" in r["text"])
    llm = LLM(str(certified / "model"), eager=True)
    comparison = _Comparison(prepared, llm, 50.0)
    tokens, text = drawn["tokens"], drawn["text"]
    place = len(tokens) // 2
    other = next(t for t in tokens if llm.tokenizer.decode([t]).isdigit() and t != tokens[place])
    changed = [*tokens[:place], other, *tokens[place + 1 :]]
    prompt = next(r.tokens for r in prepared.plan.requests if r.id == drawn["problem_id"])
    theirs = Detokenizer(llm.tokenizer).text(prompt, changed)[: -len("\n\n")]
    parts = comparison.parts_at_near_tie
    honest = {**drawn, "tokens": changed, "text": theirs}
    assert parts(honest, drawn)
    unlogged = {name: value for name, value in honest.items() if name != "tokens"}
    assert parts(unlogged, drawn)
    assert not parts({**honest, "text": text}, drawn)
    assert not parts({**honest, "text": f"{theirs[:-3]}123"}, drawn)
    for edit in ({"stop": ""}, {"stop": "The"}, {"stop": 7}, {"seed": 1}, {"text": None}):
        assert not parts({**honest, **edit}, drawn)
        assert not parts({**unlogged, **edit}, drawn)
    for bad in ([], [1.5], ["a"], [-1], [10**9], tokens):
        assert not parts({**honest, "tokens": bad, "num_tokens": len(bad)}, drawn)
    narrow = _Comparison(prepared, llm, 0.0)
    assert not narrow.parts_at_near_tie(honest, drawn)
    llm.close()
