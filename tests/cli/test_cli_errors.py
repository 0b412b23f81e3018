"""What a user can mend is refused in one line with exit code 2, and before weights are loaded."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli_cases import (
    Command,
    edit_config,
    problem,
    samples_of,
    write_jsonl,
)
from safetensors.torch import load_file, save_file

from treegen import evaluate
from treegen.demo import data_path
from treegen.errors import InputError
from treegen.runs import RunDir

pytestmark = pytest.mark.usefixtures("elsewhere")

FEW = ["-n", "2", "--max-tokens", "3"]


# Arguments


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["gsm8"], "there is no task 'gsm8'; did you mean 'gsm8k'?"),
        (["my.jsonl"], "to ask the questions of a file, use the task jsonl with --data my.jsonl"),
        (["gsm8k,gsm8k"], "the task 'gsm8k' is listed twice"),
        (["gsm8k", "--metric", "exact"], "--metric; pass -T metric=VALUE to the task jsonl"),
        ([], "no task is given; use `treegen tasks` to list the tasks"),
        (["gsm8k", "--temprature", "1"], "did you mean '--temperature'?"),
        (["gsm8k", "--max-num-seqs", "8"], "did you mean '--max-rows'?"),
        (["gsm8k", "--gpu-memory-utilization", "0.9"], "'--memory'? The value is a size, such as"),
        (["gsm8k", "--repetition-penalty", "2"], "'--gen-kwargs repetition_penalty=VALUE'?"),
        (["gsm8k", "--max-num-batched-tokens", "8"], "'--model-args prefill_chunk=VALUE'?"),
        (["gsm8k", "--few-shot", "5"], "did you mean '--num-fewshot'?"),
        (["gsm8k", "--dp", "2"], "did you mean '--gpus'?"),
        (["gsm8k", "--tokenizer", "x"], "uses the tokenizer of the checkpoint"),
        (
            ["gsm8k", "--length-penalty", "1"],
            "remove this argument; see treegen.search.beam for beam search",
        ),
        (
            ["gsm8k", "--max-model-len", "9"],
            "memory grows with the number of tokens, and --max-rows limits",
        ),
        (
            ["gsm8k", "--wandb_args", "a=b"],
            "uploads are not supported; use `treegen export` to write",
        ),
        (
            ["gsm8k", "--use_cache", "a"],
            "and continue the run with --resume (see treegen eval --help)",
        ),
        (["gsm8k", "--n-samples", "0"], "--n-samples must be at least 1, got 0"),
        (["gsm8k", "--n-samples", "few"], "'few' is not a valid integer"),
        (["gsm8k", "--temperature", "-1"], "temperature must be at least 0, got -1.0"),
        (["gsm8k", "--temperature", "nan"], "temperature must be a finite number, got nan"),
        (["gsm8k", "--top_p", "0"], "--top-p must be in (0, 1], got 0.0"),
        (["gsm8k", "--top-p", "1.5"], "--top-p must be in (0, 1], got 1.5"),
        (["gsm8k", "--top-k", "-2"], "--top-k must be at least 0"),
        (["gsm8k", "--min-p", "2"], "--min-p must be in [0, 1], got 2.0"),
        (["gsm8k", "--max-tokens", "0"], "--max-tokens must be at least 1, got 0"),
        (["gsm8k", "--stop", ""], "stop strings must be non-empty text"),
        (["gsm8k", "--seed", "-1"], "seed must be in [0, 2**63), got -1"),
        (
            ["gsm8k", "--memory", "lots"],
            "memory must be a number of bytes, or a size such as '2GiB'",
        ),
        (["gsm8k", "--memory", "0"], "memory must be a number of bytes, or a size such as '2GiB'"),
        (["gsm8k", "--max-rows", "many"], "--max-rows must be an integer or auto"),
        (["gsm8k", "--max-rows", "9" * 5_000], "--max-rows must be an integer or auto"),
        (["gsm8k", "-b", "0"], "--max-rows must be at least 1, got 0"),
        (["gsm8k", "--sharing", "some"], "sharing must be one of auto, all, one, off"),
        (["gsm8k", "--dtype", "int4"], "dtype must be auto or one of float32"),
        (["gsm8k", "--device", "abacus"], "device must be auto, cpu, cuda or cuda:N"),
        (["gsm8k", "--limit", "1.5"], "limit must be a count, a fraction below 1 or a range"),
        (
            ["gsm8k", "--limit", "2", "--sample-id", "x"],
            "--limit and --sample-id cannot be used together; remove one of the two arguments",
        ),
        (["gsm8k", "--sample-id", "gsm8k-99"], "there is no problem 'gsm8k-99'; did you mean"),
        (["gsm8k", "-f", "99"], "--num-fewshot is 99, but the bundled few-shot file has 8"),
        (
            ["gsm8k", "--k", "1,x"],
            "--k must be comma-separated integers from 1 to 9,999,999, got '1,x'",
        ),
        (["gsm8k", "--k", "3"], "--k 3 is not possible with 2 samples per problem"),
        (
            ["gsm8k", "--model-args", "dtyp=float32"],
            "--model-args has no 'dtyp'; known: model, dtype",
        ),
        (
            ["gsm8k", "--model-args", "pretrained=x,max_model_len=9,load_format=auto"],
            "max_model_len: remove this argument: memory grows with the number of tokens, and "
            "--max-rows limits the samples that are decoded at once; load_format: remove this "
            "argument",
        ),
        (["gsm8k", "--model-args", "float32"], "--model-args: expected name=value, got 'float32'"),
        (["gsm8k", "--model-args", "check=maybe"], "check must be true or false, got 'maybe'"),
        (["gsm8k", "--model-args", "dtype=float16", "--dtype", "float32"], "dtype has two values"),
        (["gsm8k", "--gen-kwargs", "top_k=1,top_k=2"], "top_k is given twice, as 1 and 2"),
        (["gsm8k", "--stop-batch", "4"], "--stop-batch has no effect without --stop-when"),
        (["gsm8k", "--confidence", "warmup=4"], "warmup has no effect without keep"),
        (["gsm8k", "--resume"], "--resume requires a run directory"),
        (["--resume", "nowhere"], "there is no run directory nowhere"),
        (
            ["gsm8k", "--resume", "a", "-o", "b"],
            "--resume a and --output-path b name different directories",
        ),
    ],
)
def test_bad_arguments(
    treegen: Command, tiny: Path, no_weights: None, tmp_path: Path, args: list[str], message: str
) -> None:
    given = [] if "--n-samples" in args else ["-n", "2"]
    assert message in treegen("eval", *args, *given, "-M", tiny).error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "line",
    [
        "eval gsm8k -M demo -o ''",
        "eval jsonl -M demo --data ''",
        "search countdown -M demo -o ''",
        "show ''",
        "audit run ''",
        "compare run run -o ''",
        "export run --to parquet -o ''",
        "import '' -o run",
        "score-texts text -M demo -o ''",
    ],
)
def test_an_empty_path_is_not_the_current_directory(treegen: Command, line: str) -> None:
    # Not "such as .", because click takes off a full stop at the end.
    assert "the path is empty; choose another path (see treegen" in treegen(line).error
    assert not [*Path().iterdir()]
    with pytest.raises(InputError, match="output= is empty"):
        evaluate("gsm8k", model="demo", output="")


def test_an_unknown_command(treegen: Command) -> None:
    assert treegen("evl").error == "there is no command 'evl'; did you mean 'eval'?"
    assert treegen("zzz").error.startswith("there is no command 'zzz'; known: eval, search")
    assert "No such option '--verison'" in treegen("--verison").error


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("--enforce-eager", "did you mean '--eager'?"),
        ("--async-scheduling", "remove this argument, or set --model-args run_ahead"),
        ("--generation-config", "--sampling neutral ignores the file"),
        ("--kv-transfer-config", "transfers of keys and values between engines are not supported"),
    ],
)
def test_an_option_of_vllm_serve(treegen: Command, option: str, advice: str) -> None:
    error = treegen("serve", "--model", "demo", option).error
    assert f"No such option '{option}'; {advice}" in error


def test_no_model(treegen: Command) -> None:
    error = treegen("eval", "mmlu").error
    assert "no model is given; pass --model" in error and "--model demo" in error
    assert "; mmlu also needs --data with a folder with dev/ and test/" in error
    assert "jsonl also needs --data with a JSONL file" in treegen("eval", "jsonl").error


# Data


def repeated(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "d.jsonl", [problem("1", 1, id="a"), problem("2", 2, id="a")])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "missing.jsonl", r"missing\.jsonl does not exist"),
        (lambda folder: write_jsonl(folder / "d.jsonl", []), r"d\.jsonl is empty"),
        (
            lambda folder: write_jsonl(folder / "d.jsonl", [problem("1", 1), "", '{"question": ']),
            r"d\.jsonl, line 3 is not JSON: ",
        ),
        (
            lambda folder: write_jsonl(folder / "d.jsonl", [{"question": "1"}, {"answer": "2"}]),
            r"d\.jsonl has no usable problem; .*d\.jsonl, line 1: no answer",
        ),
        (repeated, r"d\.jsonl, lines 1 and 2 have the same id 'a'"),
    ],
)
def test_bad_data(
    treegen: Command,
    tiny: Path,
    no_weights: None,
    tmp_path: Path,
    make: Callable[[Path], Path],
    message: str,
) -> None:
    path = tmp_path / "run"
    done = treegen("eval", "gsm8k", "-M", tiny, "--data", make(tmp_path), "-o", path)
    assert re.search(message, done.error)
    assert not path.exists()


@pytest.mark.parametrize("command", ["eval", "plan"])
def test_a_prompt_longer_than_the_context(
    treegen: Command, model: Path, no_weights: None, tmp_path: Path, command: str
) -> None:
    edit_config(model, max_position_embeddings=600)
    data = write_jsonl(
        tmp_path / "d.jsonl", [problem("1+1?", 2), problem("one and " * 300, 4, id="long")]
    )
    error = treegen(command, "gsm8k", "-M", model, "-f", 2, "--data", data).error
    found = re.match(
        r"prompt 'long' has ([\d,]+) tokens, ([\d,]+) more than fit into the model's", error
    )
    assert found and "context of 600" in error
    assert int(found[1].replace(",", "")) - int(found[2].replace(",", "")) == 599


@pytest.mark.parametrize("command", ["eval gsm8k", "plan gsm8k", "search gsm8k", "eval apps"])
def test_a_prompt_that_is_far_too_long_is_not_encoded(
    treegen: Command,
    no_weights: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    """That would take a minute for 30 megabytes, and signals would wait for it."""
    name = "programs.jsonl" if "apps" in command else "words.jsonl"
    row = json.loads(data_path(name).read_text(encoding="utf-8").splitlines()[0])
    question = "one and " * 100_000
    data = write_jsonl(tmp_path / "d.jsonl", [{**row, "question": question}])
    monkeypatch.setattr("treegen.prompts.tokens.encode_texts", lambda *_, **__: pytest.fail())
    error = treegen(*command.split(), "-M", "demo", "--data", data).error
    assert re.match(r"prompt '.+' has at least [\d,]+ tokens, .* context of 4,096 ", error), error


@pytest.mark.parametrize("command", ["eval", "plan"])
def test_a_tree_that_does_not_fit_even_alone(
    treegen: Command, tiny: Path, no_weights: None, command: str
) -> None:
    error = treegen(command, "gsm8k", "-M", tiny, "--memory", "64KiB").error
    assert re.search(r"needs [\d,]+ cache tokens, but the cache holds only 112 ", error)
    error = treegen(command, "gsm8k", "-M", tiny, "--memory", "9KiB").error
    assert "cannot hold a page of 16 tokens" in error


# Models


def without(name: str) -> Callable[[Path], None]:
    return lambda model: (model / name).unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without("model.safetensors"), r"has no \*\.safetensors weights"),
        (without("config.json"), "has no config.json"),
        (without("tokenizer.json"), r"has no tokenizer \(tokenizer.json\)"),
        (lambda m: (m / "config.json").write_text('{"model_type": "mamba2"}'), "mamba2 models"),
        (lambda m: (m / "config.json").write_text('{"model_type": "bloom"}'), "bloom models"),
        (lambda m: edit_config(m, hidden_size="wide"), "'hidden_size': .*expected int, got str"),
        (lambda m: edit_config(m, model_type="nothing"), "'nothing' in .* is not known"),
        (lambda m: edit_config(m, auto_map={"AutoConfig": "x.Y"}), "requires custom code"),
        (lambda m: (m / "config.json").write_text("{"), "config.json cannot be read as JSON"),
        (shutil.rmtree, "model directory .* does not exist"),
    ],
)
def test_bad_models(
    treegen: Command,
    model: Path,
    no_weights: None,
    tmp_path: Path,
    spoil: Callable[[Path], object],
    message: str,
) -> None:
    spoil(model)
    path = tmp_path / "run"
    assert re.search(message, treegen("eval", "gsm8k", "-M", model, *FEW, "-o", path).error)
    assert not path.exists()


def test_weights_that_do_not_fit_the_config_leave_no_run(
    treegen: Command, model: Path, tmp_path: Path
) -> None:
    whole = (model / "model.safetensors").read_bytes()
    weights = load_file(model / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    command = ["eval", "gsm8k", "-M", model, "-L", 1, *FEW, "-o", tmp_path / "run"]
    done = treegen(*command)
    assert "have no model.layers.1.mlp.up_proj.weight" in done.error
    assert not (tmp_path / "run").exists()
    # So the same command works once the model is mended.
    (model / "model.safetensors").write_bytes(whole)
    assert treegen(*command).code == 0


def test_what_to_know_about_a_model_is_told_once_in_one_line(
    treegen: Command, model: Path, tmp_path: Path
) -> None:
    factors = [1.0] * 8
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "short_factor": factors,
        "long_factor": factors,
    }
    rope["original_max_position_embeddings"] = 2048
    edit_config(model, rope_parameters=rope)
    weights = load_file(model / "model.safetensors")
    save_file(
        weights | {"extra.weight": weights["model.norm.weight"].clone()},
        model / "model.safetensors",
        {"format": "pt"},
    )
    done = treegen("eval", "gsm8k", "-M", model, "-L", 1, *FEW, "-o", tmp_path / "run")
    assert done.code == 0
    warnings = [line for line in done.err.splitlines() if "Warning" in line]
    assert len(warnings) == 2, done.err
    assert warnings[0].startswith(f"Warning: {model}: the context is limited to 2,048 tokens")
    assert warnings[1].startswith(f"Warning: {model}: 1 tensors of the checkpoint are not used")
    assert warnings[1].endswith(": extra.weight")


def test_weights_that_are_not_numbers(treegen: Command, model: Path, tmp_path: Path) -> None:
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    error = treegen("eval", "gsm8k", "-M", model, *FEW, "-o", tmp_path / "run").error
    assert "returns logits that are not finite in torch.float32" in error


def test_logits_that_are_not_numbers_name_their_row_and_keep_what_was_finished(
    treegen: Command, model: Path, tmp_path: Path
) -> None:
    weights = load_file(model / "model.safetensors")
    # Untied, so that a spoilt embedding shows only where its token is read.
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    edit_config(model, tie_word_embeddings=False)
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    given = ["eval", "gsm8k", "-M", model, "-L", 4, "-n", 5, "--max-tokens", 12, "-b", 4]
    assert treegen(*given, "--log-tokens", "-o", tmp_path / "whole").code == 0
    with RunDir.open(tmp_path / "whole") as run:
        last = list(run.records())[-1]
    others = {
        t
        for r in samples_of(tmp_path / "whole")
        if r["problem_id"] != last["problem_id"]
        for t in r["tokens"][:-1]
    }
    # A token that only the last problem's samples contain, and not in the last place.
    (spoilt, *_) = (t for t in last["tokens"][:-1] if t not in others)
    weights["model.embed_tokens.weight"][spoilt] = torch.nan
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    path = tmp_path / "run"
    done = treegen(*given, "-o", path)
    assert re.search(
        rf"not numbers for prompt '{last['problem_id']}' sample \d token \d+; finished samples are "
        r"kept; .*; 1\d of 20 samples are stored; continue with: treegen eval --resume",
        done.error,
    )
    kept = samples_of(path)
    assert len(kept) >= 10
    whole = {
        (r["problem_id"], r["sample_index"]): r["text"] for r in samples_of(tmp_path / "whole")
    }
    assert all(whole[r["problem_id"], r["sample_index"]] == r["text"] for r in kept)
