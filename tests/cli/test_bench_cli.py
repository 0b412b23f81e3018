"""`treegen bench`, its parts for a device: what they print and what they refuse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cli_cases import Command, run_light
from tiny_images import save_tiny_vision_model

from treegen.cli.terminal.render import print_table
from treegen.report.tables import PrintableTable

QUICK = ("--ceiling-seconds", "0.003", "--device", "cpu")
TINY = ("--shape", "tiny", "--repeats", "2", "--memory", "4MiB", *QUICK)
COMMANDS = ("attention", "cluster", "decode", "paper", "prefill", "score", "monkeys")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_imports_nothing_heavy(name: str) -> None:
    heavy = ("torch", "transformers", "numpy", "rich", "datasets")
    assert run_light("bench", name, "--help", without=heavy).out.startswith("Usage: ")


REFUSED = [
    (["attention", "--rows", "1,x"], "--rows must be whole numbers"),
    (["attention", "--prefix", "0"], "--prefix must be whole numbers from 1 to 9,999,999"),
    (["decode", "--rows", "10000000"], "--rows must be whole numbers from 1 to 9,999,999"),
    (["attention", "--heads", "8,3,128"], "--heads"),
    (["attention", "--levels", "16x1,8"], "--levels must be KEYSxGROUPS"),
    (["attention", "--levels", "16x0"], "--levels must be KEYSxGROUPS"),
    (["attention", "--levels", "16x1", "--prefix", "8"], "not both"),
    (["attention", "--levels", "16x1,8x4", "--rows", "8,3"], "--rows 3 cannot be divided"),
    (["attention", "--dtype", "int8"], "--dtype"),
    (["attention", "--ceiling-seconds", "nan"], "--ceiling-seconds"),
    (["attention", "--rows", ""], "--rows must be whole numbers"),
    (["attention", "--levels", ""], "--levels must be KEYSxGROUPS"),
    (["decode", "--rows", ""], "--rows must be whole numbers"),
    (["decode", "--modes", ""], "--modes is empty"),
    (["decode", "--problem-tokens", "-1"], "--problem-tokens must be at least 0"),
    (["engine", "--samples", "0"], "--samples must be at least 1"),
    (["engine", "--problems", "0"], "--problems must be at least 1"),
    (["engine", "--max-tokens", "0"], "--max-tokens must be at least 1"),
    (["search", "--step-tokens", "0"], "--step-tokens must be at least 1"),
    (["cluster", "--samples", "0"], "--samples must be at least 1"),
    (["decode", "--shape", "llama9"], "llama3-8b"),
    (["decode", "--shape", "tiny", "--model", "x"], "not both"),
    (["decode", "--rows", "10", "--problems", "3", "--problem-tokens", "5"], "cannot be divided"),
    (["decode", "--rows", "10", "--problems", "5"], "5 problems need at least 1 token"),
    (["decode", "--new-tokens", "1"], "--new-tokens"),
    (["decode", "--problems", "0"], "--problems"),
    (["decode", "--grid", "--problems", "2", "--problem-tokens", "5"], "--grid"),
    (["decode", "--against", "vllm"], "--against"),
    (["decode", "--grid", "--structured"], "--structured is not for --grid"),
    (["decode", "--repeats", "0"], "--repeats"),
    (["decode", "--time-limit", "0"], "--time-limit"),
    (["decode", "--image-tokens", "-1"], "--image-tokens must be at least 0"),
    (["decode", "--image-tokens", "9", "--shape", "tiny"], "qwen3-vl-8b, got 'tiny'"),
    (["decode", "--shape", "tiny-vl"], "--shape tiny-vl is for treegen bench decode --image-tok"),
    (["decode", "--memory", "much"], "memory must be"),
    (["prefill", "--tokens", "8,0"], "--tokens must be whole numbers from 1"),
    (["prefill", "--passes", "0"], "--passes must be at least 1"),
    (["prefill", "--shape", "tiny", "--model", "x"], "not both"),
    (["prefill", "--memory", "much"], "memory must be"),
    (["score", "--texts", "0"], "--texts must be at least 1"),
    (["score", "--top", "-1"], "--top must be at least 0"),
    (["score", "--shape", "tiny", "--layers", "0"], "--layers must be at least 1"),
    (["score", "--model", "x", "--layers", "2"], "--layers is for a shape"),
    (["paper", "gsm9k"], "experiment must be one of"),
    (["paper", "--scale", "2"], "--scale"),
    (["paper", "--shape", "tiny", "--dtype", "int4"], "--dtype"),
    (["monkeys", "--length-scale", "0"], "--length-scale"),
]
_BESIDE = (
    "grid",
    "refill",
    "speculate",
    "structured",
    "tp 2",
    "against generate",
    "quantization fp8",
)
REFUSED += [
    (["decode", "--image-tokens", "9", *f"--{more}".split()], f"not go with --{more.split()[0]};")
    for more in _BESIDE
]


@pytest.mark.parametrize("part", ["engine", "search"])
def test_a_missing_model_is_refused_before_anything_is_measured(
    treegen: Command, part: str
) -> None:
    done = treegen("bench", part, "--model", "no/such/folder")
    assert done.error == "model directory 'no/such/folder' does not exist; check the path"


def test_what_cannot_be_measured_is_refused_before_torch_is_imported(treegen: Command) -> None:
    for words, told in REFUSED:
        assert told in treegen("bench", *words).error, words
    # In one process of its own: tests before have imported torch.
    code = (
        "import sys\nfrom treegen.cli.main import cli\n"
        f"for words in {[words for words, _ in REFUSED]!r}:\n"
        "    try:\n        cli.main(['bench', *words])\n"
        "    except SystemExit as done:\n        assert done.code == 2, words\n"
        "    assert 'torch' not in sys.modules, words\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_attention(treegen: Command) -> None:
    done = treegen(
        "bench",
        "attention",
        "--rows",
        "2,5",
        "--prefix",
        "32",
        "--suffix",
        "0,3",
        "--heads",
        "4,2,16",
        "--repeats",
        "2",
        *QUICK,
    )
    assert done.code == 0, done.err
    found = done.document
    assert found["bench"] == "attention" and found["ceilings"]["attention"] > 0
    assert [(r["rows"], r["suffix"]) for r in found["results"]] == [(2, 0), (5, 0), (2, 3), (5, 3)]
    assert "|Rows|Prefix|Suffix|" in done.out and "copies" in done.out
    assert len(done.err.splitlines()) == 4  # one line for each, as it comes


def test_attention_over_any_levels(treegen: Command) -> None:
    done = treegen(
        "bench",
        "attention",
        "--levels",
        "32x1, 8x2,5x4",
        "--heads",
        "4,2,16",
        "--repeats",
        "2",
        *QUICK,
    )
    assert done.code == 0, done.err
    found = done.document
    assert found["bench"] == "levels" and found["heads"]["q_heads"] == 4
    (result,) = found["results"]
    assert result["rows"] == 4 and result["parts"][1] == {"keys": 8, "groups": 2}
    assert result["ratios"].keys() == result["times"].keys() == {"cpu"}
    assert "|32 x 1 + 8 x 2 + 5 x 4|" in done.out and "cpu us" in done.out
    done = treegen(
        "bench",
        "attention",
        "--levels",
        "16x1",
        "--rows",
        "3,8",
        "--repeats",
        "1",
        "--heads",
        "4,4,16",
        *QUICK,
    )
    assert [r["rows"] for r in done.document["results"]] == [3, 8]
    assert done.document["heads"] == {"q_heads": 4, "kv_heads": 4, "width": 16}


def test_decode_in_every_mode(treegen: Command) -> None:
    done = treegen(
        "bench",
        "decode",
        "--rows",
        "4",
        "--prefix",
        "40",
        "--new-tokens",
        "4",
        "--problems",
        "2",
        "--problem-tokens",
        "5",
        "--against",
        "generate",
        *TINY,
    )
    assert done.code == 0, done.err
    found = done.document
    modes = ["all", "one", "off", "no-attention", "generate"]
    assert [r["mode"] for r in found["results"]] == modes
    assert (found["model"], found["weights"]) == ("tiny", "random")
    lines = [line for line in done.out.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(modes) and "1 x 40, 2 x 5" in lines[2]


def test_decode_with_samples_that_end_at_random(treegen: Command) -> None:
    decode = ("bench", "decode", "--refill", "--rows", "4", "--prefix", "20", "--new-tokens", "5")
    done = treegen(*decode, "--modes", "all", *TINY)
    assert done.code == 0, done.err
    (result,) = done.document["results"]
    assert result["workload"]["random_ends"] and result["workload"]["samples"] == 32
    for more in (("--grid",), ("--against", "generate"), ("--model", "x")):
        done = treegen(*decode, *more, *TINY[2:])
        assert done.code == 2 and "--refill takes random weights" in done.err


def test_decode_on_a_checkpoint(treegen: Command, tiny: Path) -> None:
    done = treegen(
        "bench",
        "decode",
        "--model",
        tiny,
        "--rows",
        "3",
        "--prefix",
        "20,9000",
        "--new-tokens",
        "3",
        *TINY[2:],
    )
    assert done.code == 0, done.err
    results = done.document["results"]
    assert done.document["weights"] == "checkpoint"
    assert {r["mode"] for r in results if not r["skipped"]} == {"all", "off", "no-attention"}
    assert all(bool(r["skipped"]) == (r["workload"]["prefix"] == 9000) for r in results)
    told = done.out + done.err
    assert "not run: 9,003 tokens are more than the model's 4,096; ask for fewer" in told


def test_decode_below_an_image(treegen: Command, tmp_path: Path) -> None:
    decode = ("bench", "decode", "--rows", "4", "--prefix", "20", "--new-tokens", "3")
    images = ("--image-tokens", "64", "--modes", "all,off")
    done = treegen(*decode, *images, "--shape", "tiny-vl", *TINY[2:])
    assert done.code == 0, done.err
    assert done.document["weights"] == "random" and "an image of 64 tokens" in done.out
    for result in done.document["results"]:
        assert result["workload"]["prefix"] == result["prompt_tokens"] == 84
        assert result["workload"]["image_tokens"] == 64 and result["share"] > 0
        assert result["encode_seconds"]["median"] > 0 < result["prefill_seconds"]["median"]
    assert "|encode ms|prefill ms|" in done.out

    model = save_tiny_vision_model(tmp_path, "llava")
    done = treegen(*decode, "--image-tokens", "20", "--modes", "all", "--model", model, *TINY[2:])
    assert done.code == 0, done.err
    (result,) = done.document["results"]
    assert done.document["weights"] == "checkpoint" and result["workload"]["image_tokens"] == 16
    for tokens, told in ("99", "the nearest is 16, ask for that"), ("9999", "context of 2,048"):
        done = treegen(*decode, "--image-tokens", tokens, "--model", model, *TINY[2:])
        assert done.code == 2 and told in done.error


def test_decode_has_no_columns_of_images_without_one(treegen: Command) -> None:
    done = treegen(
        "bench",
        "decode",
        "--image-tokens",
        "0",
        "--rows",
        "2",
        "--prefix",
        "9",
        "--new-tokens",
        "3",
        "--modes",
        "all",
        *TINY,
    )
    assert done.code == 0, done.err
    assert "encode ms" not in done.out and "prefill ms" not in done.out
    assert done.document["results"][0]["encode_seconds"] is None


def test_a_grid_says_where_sharing_would_cost_speed(treegen: Command) -> None:
    done = treegen(
        "bench",
        "decode",
        "--grid",
        "--rows",
        "1,8",
        "--prefix",
        "16,64",
        "--new-tokens",
        "3",
        *TINY,
    )
    assert done.code == 0, done.err
    found = done.document
    assert found["bench"] == "grid" and len(found["never_slower"]) == 4
    assert found["settings"]["time_limit"] == 5 and not found["settings"]["eager"]
    assert {r["mode"] for r in found["results"]} == {"auto", "off"}
    assert "Prefix \\ rows" in done.out


def test_prefill(treegen: Command) -> None:
    done = treegen("bench", "prefill", "--tokens", "16,5", "--prefix", "40", "--passes", "3", *TINY)
    assert done.code == 0, done.err
    results = done.document["results"]
    assert [(r["tokens"], r["prefix"], r["passes"]) for r in results] == [(16, 40, 3), (5, 40, 3)]
    assert all(r["times_floor"] == r["milliseconds"]["median"] / r["floor_ms"] for r in results)
    assert "|Prefix|Tokens|ms a pass|" in done.out


def test_scores(treegen: Command) -> None:
    sizes = ("--texts", "3", "--tokens", "20", "--prefix", "100", "--top", "9")
    done = treegen("bench", "score", "--shape", "tiny", "--layers", "1", *sizes)
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


def test_scores_of_a_model_that_is_not_counted(treegen: Command) -> None:
    sizes = ("--texts", "2", "--tokens", "5", "--prefix", "40", "--top", "0")
    done = treegen("bench", "score", "--shape", "tiny-delta", *sizes)
    assert done.code == 0, done.err
    assert [each["counted"] for each in done.document["results"]] == [None] * 3
    assert done.document["layers"] == 4 and "processor s" in done.out


def test_experiments(treegen: Command) -> None:
    small = ("--scale", "0.01", "--length-scale", "0.02")
    done = treegen("bench", "paper", "gsm8k", "mmlu", *small, *TINY)
    assert done.code == 0, done.err
    gsm8k, mmlu = done.document["experiments"]
    assert (gsm8k["experiment"], mmlu["experiment"]) == ("gsm8k", "mmlu")
    jobs = {r["workload"]["name"] for r in gsm8k["results"]}
    assert jobs == {"gsm8k, equal batch", "gsm8k, largest batch"}
    assert all(r["job"]["median"] > 0 for e in (gsm8k, mmlu) for r in e["results"])


def test_monkeys(treegen: Command) -> None:
    done = treegen("bench", "monkeys", "--scale", "0.005", "--length-scale", "0.02", *TINY)
    assert done.code == 0, done.err
    (experiment,) = done.document["experiments"]
    assert {r["rows"] for r in experiment["results"]} == {1024}


def test_a_table_is_drawn_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = PrintableTable(("Name", "N"), (("a\x1b[2J[b]", "1"),), (1,), lines=("re\x1b[2Jmark",))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_table(table)
    out = capsys.readouterr().out
    assert "[b]" in out and "\u2502" in out
    assert "\x1b[2J" not in out
