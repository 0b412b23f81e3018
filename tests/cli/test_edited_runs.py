"""Runs and checkpoints that were edited by hand: whatever stands in them, one line says what to do.

A fuzzer: it puts a value of a wrong type somewhere, or takes something out, and runs every command
that reads such a file. A few hundred of its cases run by default, and thousands as a soak.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import shutil
import traceback
from pathlib import Path
from random import Random
from typing import Any

import pytest
from cli_cases import run_command
from json_places import edits_of, find_holder, places

from treegen.api.run import open_run
from treegen.demo import model_path
from treegen.errors import ModelError, TreegenError
from treegen.model.tokenizer import load_tokenizer
from treegen.prompts.tokens import encode_texts
from treegen.report.exchange import export_run
from treegen.runs.record_format import encode_record

BAD: list[Any] = [
    None,
    True,
    0,
    -1,
    2.5,
    10**30,
    "",
    "x",
    "a" * 5_000,
    "\ud800",
    [],
    [5],
    [None],
    [[]],
    {},
    {"a": 1},
    {"x": None},
    float("nan"),
    float("inf"),
]
READ: dict[str, list[list[str]]] = {
    "eval": [
        ["show", "RUN"],
        ["report", "RUN", "-o", "page.html"],
        ["score", "RUN"],
        ["compare", "RUN", "RUN"],
        ["compare", "RUN", "WHOLE"],
        ["replay", "RUN"],
        ["eval", "--resume", "RUN", "-q"],
        ["export", "RUN", "--to", "parquet", "-o", "log"],
        ["show", "RUN", "--problem", "0"],
    ],
    "search": [
        ["show", "RUN"],
        ["report", "RUN", "-o", "page.html"],
        ["score", "RUN"],
        ["compare", "RUN", "WHOLE"],
        ["search", "--resume", "RUN", "-q"],
        ["export", "RUN", "--to", "parquet", "-o", "log"],
    ],
}
MAKE = {
    "eval": ["eval", "gsm8k", "-L", "2", "-n", "3", "--max-tokens", "6"],
    "search": ["search", "countdown", "--method", "best-first", "-L", "2", "--budget", "calls=4"],
}
# A thousand edits, most with pictures, take more than the usual 5 minutes on a busy machine.
SOAK = (pytest.mark.soak, pytest.mark.timeout(3_600))
QUIET = ["--memory", "8MiB", "--device", "cpu", "-q"]


def run(*args: object) -> tuple[int, str]:
    """The exit code of a command and what it printed to stderr."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        code = run_command(*args)
    return code, err.getvalue()


def fault(*args: object) -> str:
    """What is wrong with how a command ends; empty if nothing."""
    try:
        code, err = run(*args)
    except Exception:
        return traceback.format_exc(limit=-4)
    lines = [line for line in err.splitlines() if line.startswith("Error: ")]
    if "Traceback" in err or code not in (0, 1, 2):
        return f"exit code {code}: {err[-800:]}"
    if code == 2 and len(lines) != 1:
        return f"{len(lines)} lines of errors: {err[-800:]}"
    return ""


def edited(document: Any, rng: Random) -> tuple[str, Any]:
    """A document with something else somewhere, and in words what."""
    found = copy.deepcopy(document)
    path = rng.choice(list(places(found)))
    inside, last = find_holder(found, path), path[-1]
    name = ".".join(map(str, path))
    if rng.random() < 0.25:
        del inside[last]
        return f"no {name}", found
    inside[last] = value = rng.choice(BAD)
    return f"{name} = {value!r:.60}", found


@pytest.fixture(scope="module", params=list(MAKE))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("made") / str(request.param)
    code, err = run(*MAKE[request.param], "-o", path, *QUIET)
    assert code == 0, err
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("count", [9, pytest.param(1_000, marks=SOAK)], ids=["some", "many"])
@pytest.mark.parametrize("name", ["run.json", "results.json", "*s.jsonl"])
def test_a_file_of_a_run_is_edited(
    made: Path, tmp_path: Path, name: str, count: int, request: pytest.FixtureRequest
) -> None:
    if count < 100:  # a picture takes 0.1 s; the soak draws them
        request.getfixturevalue("undrawn")
    rng, faults = Random(f"{made.name} {name}"), []
    commands = READ[made.name]
    (file,) = [each for each in made.glob(name) if each.name != "progress.jsonl"]
    for number in range(count):
        path = tmp_path / "run"
        shutil.copytree(made, path)
        text = file.read_text(encoding="utf-8")
        if name.endswith(".jsonl"):
            records = [json.loads(line) for line in text.splitlines()]
            for record in records:
                del record["crc"]
            what, records = edited(records, rng)
            lines = []
            for record in records:
                with contextlib.suppress(Exception):  # what JSON cannot hold is in no file
                    lines.append(encode_record(record))
            (path / file.name).write_bytes(b"".join(lines))
        else:
            what, document = edited(json.loads(text), rng)
            (path / file.name).write_text(json.dumps(document), encoding="utf-8")
        command = commands[number % len(commands)]
        words = [{"RUN": path, "WHOLE": made}.get(word, word) for word in command]
        if message := fault(*words):
            faults.append(f"{what}: {' '.join(command)}: {message}")
        shutil.rmtree(path)
    assert not faults, f"{len(faults)} of {count}\n" + "\n".join(faults)


@pytest.mark.parametrize("made", ["eval"], indirect=True)
def test_each_place_of_a_run_s_account_is_edited(made: Path, tmp_path: Path) -> None:
    from treegen.report.load import load_run
    from treegen.report.tables import sharing

    shutil.copytree(made, path := tmp_path / "run")
    (path / "results.json").write_bytes((made / "results.json").read_bytes())
    whole = json.loads((made / "results.json").read_text(encoding="utf-8"))
    assert whole["parts"][0]["plan"]["levels"] and sharing(load_run(path)) is not None
    faults = []
    for place in places(whole["parts"], ("parts",)):
        for what, document in edits_of(whole, place, [None, "x", [5], {"a": "x"}]):
            (path / "results.json").write_text(json.dumps(document), encoding="utf-8")
            try:
                sharing(load_run(path))
            except TreegenError:
                pass
            except Exception as error:
                faults.append(f"{what}: {type(error).__name__}: {error}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("made", ["search"], indirect=True)
def test_each_place_of_a_tree_is_edited(made: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    shutil.copytree(made, path := tmp_path / "run")
    record = json.loads((made / "trees.jsonl").read_text(encoding="utf-8").splitlines()[0])
    del record["crc"]
    record["nodes"] = record["nodes"][:2]
    faults = []
    values = [None, "x", [5], {"x": None}, True, 2.5, -(10**30)]
    for place in places(record):
        for what, document in edits_of(record, place, values):
            with contextlib.suppress(TreegenError):  # it cannot be encoded
                (path / "trees.jsonl").write_bytes(encode_record(document))
            try:
                export_run(path, "parquet", tmp_path / "tables")
            except TreegenError:
                pass
            except Exception as error:
                faults.append(f"{what}: {type(error).__name__}: {error!s:.99}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("made", ["eval"], indirect=True)
@pytest.mark.parametrize("name", ["data", "fewshot_file", "fewshot_data"])
@pytest.mark.parametrize("place", ["a" * 5_000, "b/" * 3_000, "a\0b", "\ud800"])
def test_no_name_of_data_is_too_long(made: Path, tmp_path: Path, name: str, place: str) -> None:
    shutil.copytree(made, path := tmp_path / "run")
    document = json.loads((path / "run.json").read_text(encoding="utf-8"))
    document["settings"]["free"][name] = place
    (path / "run.json").write_text(json.dumps(document), encoding="utf-8")
    assert any("the problems cannot be read" in line for line in open_run(path).view.notices)


LONG = ("a" * 300, "/".join(["b" * 200] * 30))


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    "command",
    [
        "eval gsm8k -L 1 -n 1 -o NAME -q",
        "eval --resume NAME -q",
        "eval gsm8k -M NAME -q",
        "eval gsm8k --data NAME -q",
        "eval --config NAME",
        "eval NAME",
        "search --resume NAME -q",
        "search countdown -L 1 -o NAME -q",
        "plan gsm8k -M NAME",
        "plan gsm8k --data NAME",
        "show NAME",
        "report NAME",
        "score NAME",
        "compare NAME NAME",
        "replay NAME",
        "export NAME --to parquet",
        "import NAME -o run",
        "import x.eval -o NAME",
        "models NAME",
        "verify NAME --verifier NAME",
        "usc NAME",
        "watch NAME",
        "score-texts NAME -o NAME",
    ],
)
def test_a_name_that_no_file_can_have(command: str, no_weights: None) -> None:
    faults = [
        f"{name[:9]!r}: {message}"
        for name in LONG
        if (message := fault(*(name if word == "NAME" else word for word in command.split())))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("count", [15, pytest.param(1_000, marks=SOAK)], ids=["some", "many"])
def test_a_configuration_is_edited(tmp_path: Path, count: int) -> None:
    """What is loaded all the same is wrong for the weights, or is of no account."""
    rng, faults = Random("config"), []
    names = ("config.json", "config.json", "generation_config.json", "tokenizer_config.json")
    model = tmp_path / "model"
    for number in range(count):
        shutil.copytree(model_path(), model)
        file = model / names[number % len(names)]
        what, document = edited(json.loads(file.read_text(encoding="utf-8")), rng)
        file.write_text(json.dumps(document), encoding="utf-8")
        commands = [["models", model], ["plan", "gsm8k", "-M", model, "-L", "2"]]
        if number % 5 == 0:
            commands.append(["eval", *commands[1][1:], "-n", "1", "--max-tokens", "2", *QUIET])
        for command in commands:
            if message := fault(*command):
                faults.append(f"{file.name}: {what}: {command[0]}: {message}")
        shutil.rmtree(model)
        shutil.rmtree("runs", ignore_errors=True)
    assert not faults, f"{len(faults)} of {count}\n" + "\n".join(faults)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("model_max_length", ["1", [], {}, -1, float("nan"), True]),
        ("chat_template", [5, [5], [None], {"a": 1}, True]),
        ("added_tokens_decoder", [None, 5, "x", [], {"x": {}}, {"300": 5}]),
        ("extra_special_tokens", [5, "x", [5], {"a": 1}]),
        ("bos_token", [5, [], {"content": 5}, "\ud800"]),
        ("padding_side", [None, "up", []]),
        ("split_special_tokens", [None, "x", 5]),
        ("model_input_names", [None, 5]),
        ("tokenizer_class", [5, []]),
    ],
)
def test_a_field_of_a_tokenizer_is_named(tmp_path: Path, field: str, values: list[Any]) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_path(), model)
    file = model / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    for value in values:
        file.write_text(json.dumps({**settings, field: value}), encoding="utf-8")
        with pytest.raises(ModelError) as caught:
            load_tokenizer(model)
        message = str(caught.value)
        assert (
            f"{file}: {field} must be " in message
            and "fix the file" in message
            and "\n" not in message
        ), value


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [5, pytest.param(1_000, marks=SOAK)], ids=["some", "many"])
def test_a_tokenizer_is_edited(tmp_path: Path, count: int) -> None:
    rng, model = Random("tokenizer"), tmp_path / "model"
    shutil.copytree(model_path(), model)
    file = model / "tokenizer.json"
    whole = json.loads(file.read_text(encoding="utf-8"))
    large = {name: whole["model"].pop(name) for name in ("vocab", "merges")}
    for _ in range(count):
        what, document = edited(whole, rng)
        if isinstance(document.get("model"), dict):
            document["model"] = {**large, **document["model"]}
        file.write_text(json.dumps(document), encoding="utf-8")
        try:
            encode_texts(["Q: Ann?"], load_tokenizer(model))
        except TreegenError as error:
            assert "tokenizer" in str(error) and "\n" not in str(error), what


def test_a_tokenizer_that_panics_is_an_error(tmp_path: Path) -> None:
    """The library's panic is no Exception."""
    model = tmp_path / "model"
    shutil.copytree(model_path(), model)
    file = model / "tokenizer.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    texts = [
        {"SpecialToken": {"id": "<gone>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    pair = [*texts, {"Sequence": {"id": "B", "type_id": 0}}]
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": texts,
        "pair": pair,
        "special_tokens": {},
    }
    file.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_tokenizer(model)
