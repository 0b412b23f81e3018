"""Help in groups, and options from a file."""

import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from cli_cases import Command

from treegen.cli.main import cli
from treegen.cli.options.command import _GROUPS, GroupedCommand

GROUPED = ("eval", "search", "plan", "serve")


def _command(name: str) -> Any:
    return cli.get_command(click.Context(cli), name)


@pytest.mark.parametrize("name", GROUPED)
def test_every_option_is_in_one_group_and_help_all_shows_it(treegen: Command, name: str) -> None:
    listed = [each for _, _, names in _GROUPS for each in names.split()]
    assert len(listed) == len(set(listed))
    first, everything = (treegen(name, flag).out for flag in ("--help", "--help-all"))
    assert "Other options" not in everything and "more options" not in everything
    command = _command(name)
    assert isinstance(command, GroupedCommand)
    for param in command.params:
        if isinstance(param, click.Option):
            assert param.name in listed and all(opt in everything for opt in param.opts)
    lengths = len(first.splitlines()), len(everything.splitlines())
    assert lengths[0] < lengths[1] and f"treegen {name} --help-all shows" in first
    assert "--epochs" not in first and "--batch-size" not in first


@pytest.mark.parametrize("name", GROUPED)
def test_the_examples_of_help_have_options_that_there_are(name: str) -> None:
    for line in _command(name)._examples:
        words = shlex.split(line)
        assert words[:2] == ["treegen", name]
        _command(name).make_context(name, words[2:])


def test_a_short_option_means_one_thing() -> None:
    meant: dict[str, str] = {}
    for name in GROUPED:
        for param in _command(name).params:
            for opt in param.opts:
                if len(opt) == 2:
                    assert meant.setdefault(opt, param.name) == param.name, opt


def test_the_list_of_commands_is_in_groups(treegen: Command) -> None:
    listed = treegen("--help").out
    titles = ("Run:", "Inspect:", "Score again:", "Serve:", "Information:", "This machine:")
    places = [listed.index(f"\n{title}\n") for title in titles]
    assert places == sorted(places) and "_TREEGEN_COMPLETE=bash_source" in listed


TYPED = [
    ["gsm8k", "-L", "2", "--n-samples", "3"],
    ["gsm8k", "math500", "--stop", r"\n", "--stop", "b", "--temperature", "0.5", "--no-score"],
    ["--resume", "--output-path", "x y", "--confidence", "--maj", "2,3", "--sharing", "off"],
    [
        "gsm8k",
        "-T",
        "form=self-consistency",
        "--reasoning-tags",
        "<a>",
        "</a>",
        "--reasoning",
        "on",
    ],
    [
        "--no-fewshot-as-multiturn",
        "--apply-chat-template",
        "--confidence",
        "keep=0.5",
        "--gpus",
        "2",
    ],
]


def _params(*words: str) -> dict[str, Any]:
    """What `treegen eval` is called with. Where tasks are named does not matter."""
    found = dict(_command("eval").make_context("eval", list(words)).params)
    return found | {"names": (), "more_names": (*found["names"], *found["more_names"])}


@pytest.mark.parametrize("words", TYPED)
def test_a_printed_config_gives_the_same_options(
    treegen: Command, tmp_path: Path, words: list[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(treegen("eval", *words, "--print-config").out)
    assert _params("--config", str(file)) == _params(*words)
    assert treegen("eval", "--config", file, "--print-config").out == file.read_text()


def test_a_config_as_people_write_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "task: gsm8k\nlimit: 2\nnum_samples: 3\nmaj: [2, 3]\ntask-arg: {form: self-consistency}\n"
        "no-score: true\nspeculate: off\nmodel-args: {eager: true, page_size: 16}\nsplit:\n"
        "log_tokens: false\nresume: true\noutput_path: x\n"
    )
    assert _params("--config", str(file)) == _params(
        *("gsm8k", "--limit", "2", "--n-samples", "3", "--maj", "2,3", "--resume"),
        *("-T", "form=self-consistency", "--no-score", "--speculate", "off", "-o", "x"),
        *("--model-args", "eager=true", "--model-args", "page_size=16"),
    )
    typed = _params("math500", "--config", str(file), "-L", "5")
    assert typed["limit"] == "5" and typed["more_names"] == ("math500",)


def test_a_run_by_a_config(treegen: Command, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    document = {"tasks": ["gsm8k"], "limit": 2, "n-samples": 2, "max-tokens": 8}
    file.write_text(yaml.safe_dump({**document, "output-path": str(tmp_path / "run")}))
    done = treegen("eval", "--config", file)
    assert done.code == 0, done.err
    assert (tmp_path / "run" / "results.json").exists()
    assert len((tmp_path / "run" / "samples.jsonl").read_text().splitlines()) >= 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("limt: 3", "there is no option 'limt'; did you mean 'limit'"),
        ("allow-code-execution: true", "pass --allow-code-execution on the"),
        ("confirm_run_unsafe_code: true", "cannot be set in a file"),
        ("trust_remote_code: true", "pass --trust-remote-code on the command line"),
        ("model-args: {trust_remote_code: true}", "cannot be set in a file"),
        ("log-tokens: 3", "--log-tokens must be true or false, got 3"),
        ("num-fewshot: many", "'many' is not a valid integer"),
        ("- limit", "must contain lines such as `limit: 4`"),
        ("a: [", "is not valid YAML"),
        ("limit: 2024-13-45", "is not valid YAML: month must be"),
        (f"limit: {'9' * 5_000}", "is not valid YAML"),
        ("[" * 50_000, "is not valid YAML"),
        ("config: run.yaml", "there is no option 'config'"),
        ('output_path: "a\\0b"', "embedded null byte; choose another path"),
    ],
)
def test_a_config_that_cannot_be_used(
    treegen: Command, tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert message in treegen("eval", "--config", file, "--print-config").error
    assert "cannot be read" in treegen("eval", "--config", tmp_path / "none").error
