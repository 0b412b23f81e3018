"""Runs for the tests of reports: real run directories whose samples were made up, not sampled."""

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from cli_cases import problem, write_jsonl

from treegen.evals.config.eval_settings import resolve_eval_settings
from treegen.evals.identity import run_settings
from treegen.evals.job import load_job
from treegen.evals.pipeline.execution import ModelLoader
from treegen.evals.search.job import load_search_job
from treegen.evals.search.settings import resolve_search_settings
from treegen.runs import RunDir, SearchRunDir
from treegen.runs.record_format import encode_record
from treegen.runs.settings import _comparable_fields, _fingerprint

# What a browser, a terminal or a plot could trip over.
HOSTILE = (
    "<script>document.title = 'owned'; window.owned = 1</script>",
    "</script><script>window.owned = 1</script><!--",
    "<img src=x onerror='window.owned = 1'><svg onload='window.owned = 1'>",
    "\x1b[31mred\x1b]0;title\x07\x1b[2J and \x9b2J",
    "\u202eright to left\u2066 and \u2028 a separator\u200f",
    "{{ 7 * 7 }} {% raw %} $x^2$ %s \\x41 &lt;b&gt; &amp;",
    "\ud800 half a pair, \x00 nothing, \ufffd lost",
    "a" * 1_000_000,
)

Draw = Callable[[random.Random, int, int], str]


def set_fingerprint(content: dict[str, Any]) -> None:
    """Let the content of a run.json have the fingerprint of its settings."""
    identity = content["settings"]["identity"]
    fields = _comparable_fields(identity, content["problem_ids"], content["planned"])
    content["fingerprint"] = _fingerprint(fields)


def edit_run(run: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change run.json as somebody would who knows how its fingerprint is made."""
    content = json.loads((run / "run.json").read_text())
    edit(content)
    set_fingerprint(content)
    (run / "run.json").write_text(json.dumps(content))


def content(folder: Path) -> dict[str, str]:
    """Return a hash of every file below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def answer_with(rng: random.Random, number: int, index: int) -> str:
    """A sample that is right about as often as its problem is easy."""
    right = rng.random() < 0.15 + 0.8 * ((number * 7919) % 101) / 101
    value = number if right else number + rng.choice([1, 1, 1, 2, 10, -3])
    steps = " ".join(f"Step {i} leaves {rng.randrange(100)}." for i in range(rng.randrange(1, 12)))
    return f" {steps} The answer is {value}." if rng.random() < 0.95 else f" {steps} And so on"


def make_run(
    path: Path,
    *,
    num_problems: int = 12,
    num_samples: int = 8,
    seed: int = 0,
    draw: Draw = answer_with,
    done: Sequence[int] | None = None,
    questions: Sequence[str] = (),
    checkpoint: Path | None = None,
    **settings: Any,
) -> Path:
    """Write a run of gsm8k whose samples `draw` makes; done: samples of each problem, if not all.

    Args:
        checkpoint: One that could have drawn them, so that the run can be resumed. Its problems are
            written beside it and depend on their number and `questions` alone.
    """
    rows = [
        problem(questions[i] if i < len(questions) else f"What is {i} + 0?", i, id=f"p{i}")
        for i in range(num_problems)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    data = write_jsonl(path.with_name(f"{path.name}-data.jsonl"), rows)
    choices = {
        "task": "gsm8k",
        "model": str(checkpoint or "made-up"),
        "data": str(data),
        "num_samples": num_samples,
        **settings,
    }
    job = load_job(resolve_eval_settings(choices))
    kept = run_settings(job, dtype="float32", fingerprint="0")
    if checkpoint is not None:
        kept = (models := ModelLoader()).settings(job, models.load_model_info(job.settings.engine))
    with RunDir.create(path, kept) as run:
        for number in range(num_problems):
            rng = random.Random(f"{seed} {number}")
            for index in range(num_samples if done is None else done[number]):
                text = draw(rng, number, index)
                cut = rng.random() < 0.1
                run.append(
                    {
                        "problem_id": f"p{number}",
                        "sample_index": index,
                        "seed": 0,
                        "text": text,
                        "num_tokens": min(len(text) // 4 + 1, 400),
                        "logprob": -rng.random() * len(text) / 10,
                        "finish_reason": "length" if cut else "stop",
                        "stop": None if cut else "\n\n",
                        "prompt_hash": "0",
                        "prompt_tokens": 700 + number % 90,
                        "time": "2026-01-01T00:00:00.000+00:00",
                    }
                )
    return path


def make_trees(path: Path, *, num_trees: int = 3, seed: int = 0, text: str = "") -> list[Any]:
    """Add search trees to a run; returns their records."""
    records = [search_record(f"p{i}", random.Random(f"{seed} {i}"), text) for i in range(num_trees)]
    (path / "trees.jsonl").write_bytes(b"".join(map(encode_record, records)))
    return records


def search_record(problem_id: str, rng: random.Random, text: str = "") -> dict[str, Any]:
    """A finished search: what a run of searches stores of a problem."""
    nodes: list[dict[str, Any]] = []
    for id in range(21):
        parent = rng.choice(nodes) if nodes else None
        nodes.append(
            {
                "id": id,
                "parent_id": parent["id"] if parent else None,
                "depth": parent["depth"] + 1 if parent else 0,
                "text": f"{text}{id} + 1 = {id + 1}\n",
                "score": rng.choice([None, rng.random()]),
                "logprob": -rng.random() * 9 if id else 0.0,
                "n_tokens": rng.randrange(30) if id else 0,
                "leaf": True,
                "pruned": rng.random() < 0.2,
                "finish_reason": "stop" if id else "given",
            }
        )
        if parent:
            parent["leaf"] = False
    solved = rng.random() < 0.5
    return {
        "problem_id": problem_id,
        "sample_index": 0,
        "method": "beam",
        "solved": solved,
        "answer": "(1 + 2) * 3" if solved else None,
        "best": nodes[-1]["id"],
        "stopped": "done",
        "usage": {
            "tokens_decoded": sum(n["n_tokens"] for n in nodes),
            "tokens_prefilled": 90,
            "tokens_reprompted": 900,
        },
        "nodes": nodes,
    }


def make_search_run(path: Path, *, num_problems: int = 12, seed: int = 0, **settings: Any) -> Path:
    """Write a run of searches of the bundled countdown problems."""
    choices = {"task": "countdown", "model": "made-up", "limit": num_problems, **settings}
    job = load_search_job(resolve_search_settings(choices))
    wanted = run_settings(job, dtype="float32", fingerprint="0")
    with SearchRunDir.create(path, wanted) as run:
        for problem in job.data.problems:
            run.append(search_record(problem.id, random.Random(f"{seed} {problem.id}")))
    return path


def make_timeline(path: Path) -> None:
    """Add what a run notes of its course."""
    lines = [
        {"part": part, "seconds": s / 2, "done": s, "tokens": s * 700 + s % 7 * 90, "rows": 60 - s}
        for part in range(2)
        for s in range(40)
    ]
    write_jsonl(path / "progress.jsonl", lines)


@contextmanager
def empty_pictures() -> Iterator[None]:
    """Put what pictures show on their figures and do not draw those, each of which takes 0.1 s."""
    figures = pytest.importorskip("matplotlib.figure")
    empty = {"svg": b'<svg xmlns="http://www.w3.org/2000/svg"></svg>', "png": b"\x89PNG\r\n\x1a\n"}

    def save(figure: Any, out: BinaryIO, *, format: str, **how: Any) -> None:
        out.write(empty[format])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures.Figure, "savefig", save)
        yield
