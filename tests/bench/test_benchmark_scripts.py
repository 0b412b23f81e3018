"""The scripts of examples/benchmarks: what they measure and refuse. No test looks at a time."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import transformers_baseline
import tree_loss
from attention_levels import cascade_line, cascade_table
from attention_levels import measure as measure_levels
from cli_cases import Done, recorded_documents
from fp4_cases import PRODUCTS
from fp4_cases import Case as ProductCase
from image_prompts import VISION_SHAPES, ImageWorkload, build_vision_model, image_of
from paper import EXPERIMENTS, cases_of
from search_methods import compare_methods
from sharing_grid import grid_cases, ratios
from structured import STRUCTURED, StructuredBench, word_tokenizer
from tiny_images import save_tiny_vision_model
from transformers_baseline import CONTINUOUS, GENERATE

from treegen import LLM
from treegen.bench import ceilings
from treegen.bench.attention import Heads, LevelShape
from treegen.bench.decode import Bench, Settings, WorkloadResult
from treegen.bench.roofline import ModelSize, size_of
from treegen.bench.shapes import SHAPES, build_model, shape_of
from treegen.bench.workloads import Case, Workload, decode_cases
from treegen.errors import InputError
from treegen.model.model import Model

CPU = torch.device("cpu")
CEILINGS = ceilings.Ceilings("float32", 2e9, 1e9, 4e8, "flash")
QUICK = ("--ceiling-seconds", "0.003", "--device", "cpu")
TINY = ("--shape", "tiny", "--repeats", "2", "--memory", "4MiB", *QUICK)


class Script:
    """Runs a script in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, line: str, *args: object) -> Done:
        """Run the script that a line begins with; return its exit code and what it printed."""
        self._capsys.readouterr()
        name, *words = shlex.split(line)
        code, module = 0, import_module(name)
        with recorded_documents(module) as documents:
            try:
                module.main.main([*words, *map(str, args)], prog_name=name)
            except SystemExit as stopped:
                code = int(stopped.code or 0)
        printed = self._capsys.readouterr()
        return Done(code, printed.out, printed.err, documents[-1] if documents else None)


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str]) -> Script:
    """The scripts, run in this process."""
    return Script(capsys)


@pytest.fixture(scope="module")
def tiny_model() -> tuple[Model, Any]:
    """A tiny model in memory, and its tokenizer."""
    return build_model(SHAPES["tiny"], device="cpu")


def measured(
    bench_type: type[Bench], model: tuple[Model, Any], cases: list[Case]
) -> list[WorkloadResult]:
    bench = bench_type(*model, CEILINGS, Settings(repeats=2, memory="2MiB"))
    results = list(bench.measure(cases))
    bench.close()
    return results


# What is measured


def test_batches_bring_tree_search_to_the_passes_of_a_beam() -> None:
    beam, one, many = compare_methods(
        problems=2, samples=3, breadth=2, depth=4, step_tokens=4, batches=(1, 8), repeats=2
    )
    assert [row.name for row in (beam, one, many)] == [
        "beam",
        "mcts, batches of 1",
        "mcts, batches of 8",
    ]
    assert beam.decoded == 2 * (3 + 3 * 2 * 3) * 4
    assert beam.decoded <= one.decoded <= many.decoded < 1.2 * beam.decoded
    assert many.steps <= 1.3 * beam.steps < one.steps


def test_experiments_have_the_stated_sizes_and_say_what_was_chosen() -> None:
    apps = EXPERIMENTS["apps"].workloads
    assert {(w.problems, w.samples, w.new_tokens, w.prefix) for w in apps} == {
        (120, 128, 512, 2400)
    }
    assert [w.equal for w in apps] == [True, False]
    assert EXPERIMENTS["monkeys"].workloads[0].rows == 128 * 1024
    assert [w.rows for w in EXPERIMENTS["needle"].workloads] == [64, 128, 256, 512, 1024]
    for experiment in EXPERIMENTS.values():
        assert experiment.shape in SHAPES and experiment.chosen
        cases = cases_of(experiment, scale=0.01, lengths=0.01, against=(GENERATE,))
        assert len({case.workload for case in cases}) == len(cases)
        assert all(case.modes == (*experiment.modes, GENERATE) for case in cases)


def test_below_an_image_the_roofline_counts_the_language_model_alone() -> None:
    text = VISION_SHAPES["tiny-vl"].text
    model, tokenizer = build_vision_model("tiny-vl", device="cpu")
    size = size_of(model)
    assert isinstance(size, ModelSize)
    assert size.layer_weights + 2 * size.hidden * size.vocab_size == text.num_weights
    image = image_of(model, 60)
    assert image.num == 64  # 8 x 8; the others are 7 x 7 and 9 x 9
    job = ImageWorkload(
        "",
        prefix=image.num + 5,
        new_tokens=3,
        samples=2,
        prefixes=2,
        image_tokens=image.num,
        image_id=image.first,
    )
    llm = LLM(model, tokenizer=tokenizer, memory="4MiB")
    found = llm.run(job.tree(tokenizer, text.vocab_size), job.params(text.vocab_size))
    assert found.usage.images_encoded == 1
    assert found.usage.prompt_tokens_computed == image.num + 2 * 5
    for tokens in (1, 70_000):
        with pytest.raises(InputError, match="--image-tokens"):
            image_of(model, tokens)


def test_a_cascade_is_timed_beside_the_sum_of_its_levels_rooflines() -> None:
    parts = [LevelShape(40, 1), LevelShape(20, 3), LevelShape(5, 16)]
    results = list(
        measure_levels(
            [16, 17],
            parts,
            Heads(4, 2, 16),
            CEILINGS,
            device=CPU,
            dtype=torch.float32,
            repeats=2,
        )
    )
    assert [(r.rows, r.parts) for r in results] == [(16, tuple(parts)), (17, tuple(parts))]
    for r in results:
        assert set(r.times) == set(r.ratios) == {"cpu"} and r.error < 1e-4
        flops = 4 * r.rows * 4 * 16
        floor = sum(
            max(flops * part.keys / 1e9, part.keys * part.groups * 2 * 2 * 16 * 4 / 4e8)
            for part in parts
        )
        assert r.floor_us == pytest.approx(floor * 1e6)
        assert r.ratios["cpu"] == pytest.approx(r.times["cpu"].median / r.floor_us)
    table = cascade_table(results)
    assert {len(row) for row in table.rows} == {len(table.head)}
    assert "40 x 1 + 20 x 3 + 5 x 16" in cascade_line(results[0])


def test_samples_of_a_grammar_have_all_their_tokens() -> None:
    pytest.importorskip("llguidance")
    shape = shape_of("tiny")
    model, _ = build_model(shape, device="cpu")
    tokenizer = word_tokenizer(shape.vocab_size)
    assert len(tokenizer) == len(set(tokenizer.get_vocab().values())) == shape.vocab_size
    cases = decode_cases([4], [9], 6, modes=("all", STRUCTURED))
    plain, structured = measured(StructuredBench, (model, tokenizer), cases)
    assert [plain.mode, structured.mode] == ["all", STRUCTURED]
    assert not structured.skipped and structured.step_ms is not None
    assert structured.levels == plain.levels and structured.seconds is not None


def test_the_ratio_of_a_grid_is_that_of_its_steps(tiny_model: tuple[Model, Any]) -> None:
    results = measured(Bench, tiny_model, grid_cases([1, 64], [256], 4))
    found = ratios(results)
    assert [(r.rows, r.prefix) for r in found] == [(1, 256), (64, 256)]
    assert not found[0].shared and not found[0].is_slower  # one row shares with nobody
    for ratio, (auto, off) in zip(
        found, zip(results[::2], results[1::2], strict=True), strict=True
    ):
        assert auto.step_ms is not None and off.step_ms is not None
        assert ratio.ratio == pytest.approx(off.step_ms.median / auto.step_ms.median)
    with pytest.raises(InputError, match=r"number of problems \(2\), got 7"):
        decode_cases([7], [8], 2, problems=2, problem_tokens=1)


def test_an_engine_that_fails_is_a_row_of_the_table(
    tiny_model: tuple[Model, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise ValueError("no such\nthing")

    monkeypatch.setattr(type(tiny_model[0].module), "generate_batch", broken, raising=False)
    workload = Workload("w", prefix=4, samples=2, new_tokens=2)
    result = transformers_baseline.measure(CONTINUOUS, *tiny_model, workload, 1)
    assert result.skipped == "ValueError: no such"
    monkeypatch.setattr(transformers_baseline, "free_bytes", lambda device: 1000)
    assert (
        "1,000 B are free"
        in transformers_baseline.measure(GENERATE, *tiny_model, workload, 1).skipped
    )


# What scripts print


def test_each_script_has_the_command_of_its_figures_and_a_test(repository: Path) -> None:
    text = Path(__file__).read_text()
    for path in (repository / "examples" / "benchmarks").glob("*.py"):
        doc = ast.get_docstring(ast.parse(path.read_text()))
        if path.stem in ("fp4_cases", "tiny_model"):
            continue
        assert doc is not None and f"python examples/benchmarks/{path.name} " in f"{doc} ".replace(
            "\n", " "
        )
        assert f'"{path.stem}"' in text, path


def test_searches_over_http_compute_the_prompt_tokens_of_local_ones(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server of nodes is a process of its own; that of texts is a thread of this process."""
    import remote_search
    from serving import listening

    own_process, servers = remote_search.serving, []

    @contextmanager
    def serve(model: str) -> Iterator[str]:
        servers.append(model)
        if len(servers) == 1:
            with own_process(model) as url:
                yield url
        else:
            with listening(LLM(model), key=None) as running:
                yield f"{running.url}/v1"

    monkeypatch.setattr(remote_search, "serving", serve)
    sizes = ("--problems", "2", "--width", "1", "--expand", "2", "--depth", "2")
    done = script("remote_search", *sizes, "--json")
    assert done.code == 0, done.err
    costs = done.document["costs"]
    assert costs["nodes"]["prefilled"] == costs["`llm.search`"]["prefilled"] > 0
    assert costs["text"]["prefilled"] > 0 and len(servers) == 2


def test_an_audit_of_large_runs_is_timed(script: Script) -> None:
    done = script("audit_speed", "--problems", "5", "--samples", "2", "--json")
    assert done.code == 0, done.err
    assert [result["samples"] for result in done.document["results"]] == [10, 10, 10]


def test_products_in_4_bits_are_exact_and_have_a_roofline(script: Script) -> None:
    done = script("quantized_products --products tiny,tiny-experts --rows 1,3 --repeats 1", *QUICK)
    assert done.code == 0, done.err
    results = done.document["results"]
    assert [(r["name"], r["rows"]) for r in results] == [
        (name, rows) for name in ("tiny", "tiny-experts") for rows in (1, 3)
    ]
    assert all(r["error"] < 2e-6 and 0 < r["floor_us"] <= r["plain_floor_us"] for r in results)
    assert script("quantized_products", "--tune", *QUICK).code == 2


@pytest.mark.parametrize(("name", "matrices"), [("tiny", 1), ("tiny-experts", 4)])
def test_the_roofline_of_products_is_their_bytes_or_their_operations(
    name: str, matrices: int
) -> None:
    case = ProductCase(PRODUCTS[name], 64, torch.float32, CPU)  # so many rows choose every expert
    outputs = 64 * (2 if matrices > 1 else 1)
    moved = 4 * (64 * 64 + outputs * 48)
    by_bytes = replace(CEILINGS, matmul=1e15)
    assert case.floors(by_bytes) == pytest.approx(
        [1e6 * (matrices * 48 * 64 * size + moved) / CEILINGS.memory for size in (0.5 + 1 / 16, 4)]
    )
    by_operations = replace(CEILINGS, memory=1e15)
    assert case.floors(by_operations) == pytest.approx(
        [1e6 * 2 * outputs * 48 * 64 / CEILINGS.matmul] * 2
    )


def test_attention_over_any_levels(script: Script) -> None:
    done = script("attention_levels --levels '32x1, 8x2,5x4' --heads 4,2,16 --repeats 2", *QUICK)
    assert done.code == 0, done.err
    found = done.document
    assert found["bench"] == "levels" and found["heads"]["q_heads"] == 4
    (result,) = found["results"]
    assert result["rows"] == 4 and result["parts"][1] == {"keys": 8, "groups": 2}
    assert result["ratios"].keys() == result["times"].keys() == {"cpu"}
    assert "|32 x 1 + 8 x 2 + 5 x 4|" in done.out and "cpu us" in done.out
    done = script("attention_levels --levels 16x1 --rows 3,8 --repeats 1 --heads 4,4,16", *QUICK)
    assert [r["rows"] for r in done.document["results"]] == [3, 8]
    assert done.document["heads"] == {"q_heads": 4, "kv_heads": 4, "width": 16}


def test_decode_below_an_image(script: Script, tmp_path: Path) -> None:
    decode = ("image_prompts", "--rows", "4", "--prefix", "20", "--new-tokens", "3")
    images = ("--image-tokens", "64", "--modes", "all,off")
    done = script(*decode, *images, "--shape", "tiny-vl", *TINY[2:])
    assert done.code == 0, done.err
    assert done.document["weights"] == "random" and "an image of 64 tokens" in done.out
    for result in done.document["results"]:
        assert result["workload"]["prefix"] == result["prompt_tokens"] == 84
        assert result["workload"]["image_tokens"] == 64 and result["share"] > 0
        assert result["encode_seconds"]["median"] > 0 < result["prefill_seconds"]["median"]
    assert "|encode ms|prefill ms|" in done.out

    model = save_tiny_vision_model(tmp_path, "llava")
    done = script(*decode, "--image-tokens", "20", "--modes", "all", "--model", model, *TINY[2:])
    assert done.code == 0, done.err
    (result,) = done.document["results"]
    assert done.document["weights"] == "checkpoint" and result["workload"]["image_tokens"] == 16
    for tokens, message in (
        ("99", "set --image-tokens to 16, the nearest"),
        ("9999", "context length of 2,048"),
    ):
        done = script(*decode, "--image-tokens", tokens, "--model", model, *TINY[2:])
        assert done.code == 2 and message in done.error


def test_a_grid_says_where_sharing_would_cost_speed(script: Script) -> None:
    done = script("sharing_grid --rows 1,8 --prefix 16,64 --new-tokens 3", *TINY)
    assert done.code == 0, done.err
    found = done.document
    assert found["bench"] == "grid" and len(found["never_slower"]) == 4
    assert found["settings"]["time_limit"] == 5 and not found["settings"]["eager"]
    assert {r["mode"] for r in found["results"]} == {"auto", "off"}
    assert "Prefix \\ rows" in done.out


def test_scores(script: Script) -> None:
    sizes = ("--texts", "3", "--tokens", "20", "--prefix", "100", "--top", "9")
    done = script("scores", "--shape", "tiny", "--layers", "1", *sizes)
    assert done.code == 0, done.err
    ours, text, everything = done.document["results"]
    assert (ours["texts"], text["texts"], everything["texts"]) == (3, 1, 1)
    assert 0 < text["off"] < 1e-5 and 0 < everything["off"] < 1e-5
    # A layer has 64 numbers of width, 8 query heads and 2 key heads of 8, and 3 x 192 inside.
    matrices = 64 * (2 * 64 + 2 * 16 + 3 * 192)
    pairs, shared = 20 * 100 + 20 * 21 / 2, 100 * 101 / 2
    counts = [
        (ours, 20 + 100 / 3, pairs + shared / 3, 20),
        (text, 120, pairs + shared, 20),
        (everything, 120, pairs + shared, 120),
    ]
    for found, tokens, seen, logits in counts:
        assert found["counted"] == pytest.approx(
            {
                "layers": 2e-9 * matrices * tokens,
                "attention": 2e-9 * 2 * 64 * seen,
                "logits": 2e-9 * 64 * 512 * logits,
            }
        )
    assert "1 layers, vocabulary 512" in done.out and "|times treegen's|by count|" in done.out


_SIZES = ("--rollouts", "3", "--tokens", "20", "--prompt", "100")
_LOSS = ("tree_loss", "--shape", "tiny", "--layers", "1", "--device", "cpu", *_SIZES)


@pytest.mark.soak
def test_each_way_to_the_loss_has_a_process_of_its_own(script: Script) -> None:
    done = script(*_LOSS)
    assert done.code == 0, done.err
    losses = [result["loss"] for result in done.document["results"]]
    assert losses == pytest.approx(losses[:1] * 3, rel=1e-5)


def test_the_loss_of_a_tree_is_that_of_repeated_prompts(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ways are measured in this process, which changes their memory and not their loss."""
    monkeypatch.setattr(tree_loss, "_measure_alone", tree_loss.measure)
    done = script(*_LOSS)
    assert done.code == 0, done.err
    results = done.document["results"]
    assert [result["name"] for result in results] == ["tree", "repeated batch", "one by one"]
    for result in results[1:]:
        for key in ("loss", "grad_norm"):
            assert result[key] == pytest.approx(results[0][key], rel=1e-5)
    # Eight heads of width 8 read the prompt's pairs once, and those of each rollout.
    pairs = 100 * 101 // 2 + 3 * (20 * 100 + 20 * 21 // 2)
    attention = [(part["name"], part["flops"]) for part in results[0]["attention"]]
    assert attention == [("forward", 4 * 64 * pairs), ("backward", 10 * 64 * pairs)]
    assert "attention of a layer over the tree: forward" in done.out


def test_scores_of_a_model_that_is_not_counted(script: Script) -> None:
    sizes = ("--texts", "2", "--tokens", "5", "--prefix", "40", "--top", "0")
    done = script("scores", "--shape", "tiny-delta", *sizes)
    assert done.code == 0, done.err
    assert [each["counted"] for each in done.document["results"]] == [None] * 3
    assert done.document["layers"] == 4 and "processor s" in done.out


def test_experiments(script: Script) -> None:
    small = ("--scale", "0.01", "--length-scale", "0.02")
    done = script("paper", "gsm8k", "mmlu", *small, *TINY)
    assert done.code == 0, done.err
    gsm8k, mmlu = done.document["experiments"]
    assert (gsm8k["experiment"], mmlu["experiment"]) == ("gsm8k", "mmlu")
    jobs = {r["workload"]["name"] for r in gsm8k["results"]}
    assert jobs == {"gsm8k, equal batch", "gsm8k, largest batch"}
    assert all(r["job"]["median"] > 0 for e in (gsm8k, mmlu) for r in e["results"])


def test_monkeys(script: Script) -> None:
    sizes = ("--scale", "0.005", "--length-scale", "0.02")
    done = script("paper", "monkeys", *sizes, *TINY, "--json")
    assert done.code == 0, done.err
    (experiment,) = done.document["experiments"]
    assert {r["rows"] for r in experiment["results"]} == {1024}
    assert json.loads(done.out) == done.document


def test_decode_against_transformers(script: Script) -> None:
    sizes = ("--rows", "4", "--prefix", "40", "--new-tokens", "4", "--against", "generate")
    done = script("transformers_baseline", *sizes, *TINY)
    assert done.code == 0, done.err
    assert [r["mode"] for r in done.document["results"]] == ["all", "generate"]
    assert (done.document["model"], done.document["weights"]) == ("tiny", "random")
    lines = [line for line in done.out.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 2


def test_rows_with_states_of_their_own(script: Script) -> None:
    sizes = ("--rows", "6", "--prefix", "20", "--new-tokens", "5")
    done = script("own_states", *sizes, "--shape", "tiny-delta", *TINY[2:])
    assert done.code == 0, done.err
    shared, own = done.document["results"]
    assert (shared["mode"], own["mode"]) == ("all", "own-states")
    assert own["rows"] == 6 and own["floor_parts_ms"]["states"] > 0
    assert not shared["skipped"] and not own["skipped"]


def test_a_job_on_simulated_workers(script: Script) -> None:
    sizes = ("--problems", "6", "--samples", "5", "--max-rows", "4", "--mean-tokens", "9")
    done = script("simulate_workers", "--workers", "1,3", *sizes, "--latency", "0", "--json")
    assert done.code == 0, done.err
    one, three = done.document["results"]
    assert (one["workers"], three["workers"]) == (1, 3) and one["tokens"] == three["tokens"]
    assert one["seconds"] / 3 < three["seconds"] < one["seconds"]


def test_samples_of_a_grammar(script: Script) -> None:
    pytest.importorskip("llguidance")
    sizes = ("--rows", "4", "--prefix", "9", "--new-tokens", "6")
    done = script("structured", *sizes, *TINY)
    assert done.code == 0, done.err
    assert [r["mode"] for r in done.document["results"]] == ["all", STRUCTURED]


def test_latents_in_each_form(script: Script) -> None:
    sizes = ("--rows", "2,5", "--prefix", "32", "--suffix", "0,3", "--repeats", "2")
    done = script("latents", "--shape", "tiny-mla", *sizes, *QUICK)
    assert done.code == 0, done.err
    results = done.document["results"]
    assert done.document["heads"]["rank"] == 32
    assert [(r["rows"], r["suffix"]) for r in results] == [(2, 0), (5, 0), (2, 3), (5, 3)]
    assert results[0]["times"].keys() == {"absorbed", "expanded"}
    assert results[3]["times"].keys() == {"absorbed", "expanded", "prefix expanded"}
    assert "absorbed roofline us" in done.out and "tiny-mla: 4 heads" in done.out


def test_the_engine_on_a_cpu(script: Script, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import engine_overhead

    monkeypatch.setattr(engine_overhead, "_STEPS", 4)
    sizes = ("--samples", "3", "--problems", "2", "--max-tokens", "4")
    done = script("engine_overhead", "--model", tiny, *sizes)
    assert done.code == 0, done.err
    assert [step["rows"] for step in done.document["overhead"]] == [64, 512, 4096] * 2
    assert done.document["memory"]["pages_after"] == 0
    names = [row["name"] for row in done.document["throughput"]]
    assert names[0] == "treegen" and len(names) == 4


def test_searches_with_live_caches(script: Script) -> None:
    sizes = ("--problems", "2", "--samples", "2", "--breadth", "1", "--depth", "2")
    done = script("search_caches", *sizes, "--step-tokens", "3")
    assert done.code == 0, done.err
    live, again = done.document["search"]
    assert live["decoded"] == again["decoded"] == 2 * (2 + 2) * 3
    assert live["prefilled"] < again["prefilled"] and "times fewer prompt tokens" in done.out


def test_a_beam_against_tree_search(script: Script) -> None:
    sizes = ("--problems", "2", "--samples", "2", "--breadth", "1", "--depth", "2")
    done = script("search_methods", *sizes, "--step-tokens", "3", "--repeats", "2")
    assert done.code == 0, done.err
    assert [row["name"] for row in done.document["methods"]][:2] == ["beam", "mcts, batches of 1"]


def test_recorded_samples_are_drawn_again(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import speculation

    monkeypatch.setattr(speculation, "measure", partial(speculation.measure, warm_ups=0))
    trace = {
        "source": "a test",
        "prompts": [[3, 4, 5], [6, 7]],
        "samples": [[[8, 9, 10, 11] * 4, [8, 9, 10, 11] * 3], [[12, 13] * 5, [14, 15]]],
    }
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    sizes = ("--shape", "tiny", "--rows", "3", "--prefix", "20", "--trace", path)
    how = ("--repeats", "1", "--memory", "16MiB", "--json")
    done = script("speculation", *sizes, *how)
    assert done.code == 0, done.err
    (result,) = done.document["results"]
    assert result["job"] == {"rows": 3, "samples": 64, "prefix": 20, "own_tokens": 0}
    assert result["tokens_per_step"] >= 1 and result["steps"][1] <= result["steps"][0]
    done = script("speculation", *sizes, "--own-tokens", "30", *how)
    (result,) = done.document["results"]
    assert result["job"] == {"rows": 3, "samples": 3, "prefix": 20, "own_tokens": 30}


def test_the_commands_of_the_docs_have_the_options_that_they_name(repository: Path) -> None:
    pages = [
        *(repository / "docs").rglob("*.md"),
        *(repository / "examples/benchmarks").glob("*.py"),
    ]
    commands = []
    for page in pages:
        text = page.read_text().replace("\\\\\n", " ").replace("\\\n", " ")
        for line in re.findall(r"python (examples/benchmarks/[^`\n]*)", text):
            commands.append((page.name, line.replace("...", "8x1")))
    assert len(commands) > 30
    for page_name, line in commands:
        path, *words = shlex.split(line)
        command = import_module(Path(path).stem).main
        try:
            command.make_context(path, words)
        except click.ClickException as error:
            # DIR stands for a folder of the reader's.
            assert "'DIR' is not a directory" in error.format_message(), (page_name, line)


# What scripts refuse


REFUSED = [
    (["attention_levels", "--levels", "16x1,8"], "--levels must be a comma-separated list"),
    (["attention_levels", "--levels", "16x0"], "--levels must be a comma-separated list"),
    (["attention_levels", "--levels", ""], "--levels must be a comma-separated list"),
    (
        ["attention_levels", "--levels", "16x1,8x4", "--rows", "8,3"],
        "--rows must be at least 4, the largest number of groups in --levels, got 3",
    ),
    (["attention_levels", "--heads", "8,3,128"], "--heads must be Q,KV,DIM"),
    (["latents", "--shape", "llama3-8b"], "--shape must be one of glm-4.7-flash"),
    (["engine_overhead", "--samples", "0"], "--samples must be at least 1"),
    (["engine_overhead", "--problems", "0"], "--problems must be at least 1"),
    (["engine_overhead", "--max-tokens", "0"], "--max-tokens must be at least 1"),
    (["search_caches", "--step-tokens", "0"], "--step-tokens must be at least 1"),
    (["search_methods", "--repeats", "0"], "--repeats must be at least 1"),
    (["tensor_parallel", "--repeats", "0"], "--repeats must be at least 1"),
    (["transformers_baseline", "--against", "vllm"], "--against must be chosen from generate"),
    (["transformers_baseline", "--tp", "2"], "--tp is not supported with the engines"),
    (["sharing_grid", "--quantization", "int3"], "--quantization"),
    (
        ["sharing_grid", "--tp", "2", "--quantization", "nvfp4"],
        "quantization is not supported with tensor_parallel_size",
    ),
    (["sharing_grid", "--tp", "2", "--shape", "tiny", "--model", "x"], "cannot be used together"),
    (["structured", "--tp", "2"], "--tp is not supported by this benchmark"),
    (["own_states", "--tp", "2"], "--tp is not supported by this benchmark"),
    (["image_prompts", "--image-tokens", "0"], "--image-tokens must be at least 1"),
    (["image_prompts", "--shape", "tiny"], "qwen3-vl-8b, got 'tiny'"),
    (["image_prompts", "--shape", "tiny-vl", "--model", "x"], "cannot be used together"),
    (["image_prompts", "--quantization", "fp8"], "--quantization and --tp are not supported"),
    (["image_prompts", "--tp", "2"], "--quantization and --tp are not supported"),
    (["scores", "--texts", "0"], "--texts must be at least 1"),
    (["scores", "--top", "-1"], "--top must be at least 0"),
    (["scores", "--shape", "tiny", "--layers", "0"], "--layers must be at least 1"),
    (["scores", "--model", "x", "--layers", "2"], "--layers cannot be used together with --model"),
    (["simulate_workers", "--step-ms", "1:2,3"], "--step-ms must be pairs such as"),
    (["simulate_workers", "--step-ms", "nan:2"], "--step-ms must be pairs such as"),
    (["simulate_workers", "--latency", "nan"], "--latency must be at least 0"),
    (["simulate_workers", "--workers", "0"], "--workers must"),
    (["paper", "gsm9k"], "experiment must be one of"),
    (["paper", "--scale", "2"], "--scale"),
    (["paper", "--shape", "tiny", "--dtype", "int4"], "--dtype"),
    (["paper", "monkeys", "--length-scale", "0"], "--length-scale"),
    (["paper", "--nothing"], "(see paper --help)"),
]


@pytest.mark.parametrize(("words", "text"), REFUSED)
def test_what_cannot_be_measured_is_one_line(
    script: Script, no_weights: None, words: list[str], text: str
) -> None:
    assert text in script(*words).error


@pytest.mark.parametrize("name", ["engine_overhead", "search_caches", "search_methods"])
def test_a_missing_model_is_refused_before_anything_is_measured(script: Script, name: str) -> None:
    done = script(name, "--model", "no/such/folder")
    assert done.error == "model directory 'no/such/folder' does not exist; check the path"


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[1]",
        "[" * 100_000,
        '{"source": 1, "prompts": 5, "samples": 5}',
        '{"source": 1, "prompts": [], "samples": []}',
        '{"source": 1, "prompts": [[1]], "samples": [[]]}',
        '{"source": 1, "prompts": [[1]], "samples": [[[2, "x"]]]}',
        '{"source": 1, "prompts": [[1]], "samples": [[[2, 1.5]]]}',
        '{"source": 1, "prompts": [[-1]], "samples": [[[2, 3]]]}',
        '{"source": 1, "prompts": [[1], [2]], "samples": [[[2, 3]]]}',
        '{"source": 1, "prompts": [[1]], "samples": [[[2, 3], [2]]]}',
    ],
)
def test_a_trace_without_samples_is_refused_before_a_model_is_made(
    script: Script, tmp_path: Path, no_weights: None, text: str
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    arguments = ("speculation", "--shape", "tiny", "--rows", "3")
    assert "contains no recorded samples; pass" in script(*arguments, "--trace", path).error
    assert f"cannot read {tmp_path}: " in script(*arguments, "--trace", tmp_path).error


def test_a_script_of_its_own_process_ends_with_code_2(repository: Path) -> None:
    path = repository / "examples/benchmarks/audit_speed.py"  # it imports no torch
    command = [sys.executable, str(path), "--problems", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr.startswith("Error: the log of the task number contains no samples")
        and len(done.stderr.splitlines()) == 1
    )
