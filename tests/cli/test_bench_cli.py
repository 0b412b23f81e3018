"""`treegen bench`, its parts for a device: what they print and what they refuse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cli_cases import Command, run_light

from treegen.cli.terminal.render import print_table
from treegen.report.tables import PrintableTable

QUICK = ("--ceiling-seconds", "0.003", "--device", "cpu")
TINY = ("--shape", "tiny", "--repeats", "2", "--memory", "4MiB", *QUICK)
COMMANDS = ("attention", "cluster", "decode", "prefill")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_imports_nothing_heavy(name: str) -> None:
    heavy = ("torch", "transformers", "numpy", "rich", "datasets")
    assert run_light("bench", name, "--help", without=heavy).out.startswith("Usage: ")


REFUSED = [
    (["attention", "--rows", "1,x"], "--rows must be comma-separated integers"),
    (
        ["attention", "--prefix", "0"],
        "--prefix must be comma-separated integers from 1 to 9,999,999",
    ),
    (
        ["decode", "--rows", "10000000"],
        "--rows must be comma-separated integers from 1 to 9,999,999",
    ),
    (["attention", "--heads", "8,3,128"], "--heads"),
    (["attention", "--dtype", "int8"], "--dtype"),
    (["attention", "--ceiling-seconds", "nan"], "--ceiling-seconds"),
    (["attention", "--rows", ""], "--rows must be comma-separated integers"),
    (["decode", "--rows", ""], "--rows must be comma-separated integers"),
    (["decode", "--modes", ""], "--modes is empty"),
    (["decode", "--problem-tokens", "-1"], "--problem-tokens must be at least 0"),
    (["cluster", "--samples", "0"], "--samples must be at least 1"),
    (["decode", "--shape", "llama9"], "llama3-8b"),
    (["decode", "--shape", "tiny", "--model", "x"], "--shape and --model cannot be used together"),
    (["decode", "--rows", "10", "--problems", "3", "--problem-tokens", "5"], "must be a multiple"),
    (["decode", "--rows", "10", "--problems", "5"], "--problem-tokens must be at least 1"),
    (["decode", "--new-tokens", "1"], "--new-tokens"),
    (["decode", "--problems", "0"], "--problems"),
    (["decode", "--repeats", "0"], "--repeats"),
    (["decode", "--time-limit", "0"], "--time-limit"),
    (["decode", "--shape", "tiny-vl"], "llama3-8b"),
    (["decode", "--memory", "much"], "memory must be"),
    (["decode", "--tp", "2", "--quantization", "nvfp4"], "quantization is not supported with"),
    (["prefill", "--tokens", "8,0"], "--tokens must be comma-separated integers from 1"),
    (["prefill", "--passes", "0"], "--passes must be at least 1"),
    (["prefill", "--shape", "tiny", "--model", "x"], "--shape and --model cannot be used together"),
    (["prefill", "--memory", "much"], "memory must be"),
]


def test_what_cannot_be_measured_is_refused_before_torch_is_imported(treegen: Command) -> None:
    for words, message in REFUSED:
        assert message in treegen("bench", *words).error, words
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
        "bench attention --rows 2,5 --prefix 32 --suffix 0,3 --heads 4,2,16 --repeats 2", *QUICK
    )
    assert done.code == 0, done.err
    found = done.document
    assert found["bench"] == "attention" and found["ceilings"]["attention"] > 0
    assert [(r["rows"], r["suffix"]) for r in found["results"]] == [(2, 0), (5, 0), (2, 3), (5, 3)]
    assert "|Rows|Prefix|Suffix|" in done.out and "copies" in done.out
    assert len(done.err.splitlines()) == 4  # one line for each, as it comes


def test_decode_in_every_mode(treegen: Command) -> None:
    done = treegen(
        "bench decode --rows 4 --prefix 40 --new-tokens 4 --problems 2 --problem-tokens 5", *TINY
    )
    assert done.code == 0, done.err
    found = done.document
    modes = ["all", "one", "off", "no-attention"]
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
    done = treegen(*decode, "--model", "x", *TINY[2:])
    assert done.code == 2 and "--refill needs a model with random weights" in done.err


def test_decode_on_a_checkpoint(treegen: Command, tiny: Path) -> None:
    done = treegen(
        f"bench decode --model {tiny} --rows 3 --prefix 20,9000 --new-tokens 3", *TINY[2:]
    )
    assert done.code == 0, done.err
    results = done.document["results"]
    assert done.document["weights"] == "checkpoint"
    assert {r["mode"] for r in results if not r["skipped"]} == {"all", "off", "no-attention"}
    assert all(bool(r["skipped"]) == (r["workload"]["prefix"] == 9000) for r in results)
    output = done.out + done.err
    assert "not run: the workload has 9,003 tokens, more than the context" in output


def test_decode_has_no_columns_of_images_without_one(treegen: Command) -> None:
    done = treegen("bench decode --rows 2 --prefix 9 --new-tokens 3 --modes all", *TINY)
    assert done.code == 0, done.err
    assert "encode ms" not in done.out and "prefill ms" not in done.out
    assert "encode_seconds" not in done.document["results"][0]


def test_prefill(treegen: Command) -> None:
    done = treegen("bench", "prefill", "--tokens", "16,5", "--prefix", "40", "--passes", "3", *TINY)
    assert done.code == 0, done.err
    results = done.document["results"]
    assert [(r["tokens"], r["prefix"], r["passes"]) for r in results] == [(16, 40, 3), (5, 40, 3)]
    assert all(r["times_floor"] == r["milliseconds"]["median"] / r["floor_ms"] for r in results)
    assert "|Prefix|Tokens|ms per pass|" in done.out


def test_a_table_is_drawn_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = PrintableTable(("Name", "N"), (("a\x1b[2J[b]", "1"),), (1,), lines=("re\x1b[2Jmark",))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_table(table)
    out = capsys.readouterr().out
    assert "[b]" in out and "\u2502" in out
    assert "\x1b[2J" not in out
