"""The commands on a tiny checkpoint with random weights, from end to end."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_cases import (
    SMALL,
    Command,
    assert_same_samples,
    copy_part,
    problem,
    results_of,
    samples_of,
    write_jsonl,
)

from treegen.cli.terminal.interrupts import Interrupted
from treegen.evals import model
from treegen.runs import RunDir

OWN_TASK = """
from treegen.tasks.gsm8k import GSM8K

class Sums(GSM8K):
    name = "sums | [bold]"
"""


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        pytest.fail("the weights were loaded")

    monkeypatch.setattr(model, "load_llm", refuse)


# treegen eval


def test_an_evaluation_prints_tables_and_stores_everything(
    treegen: Command, tiny: Path, finished: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    # The other spelling of every option.
    spelled = [text[:2] + text[2:].replace("-", "_") for text in SMALL]
    assert "--n_samples" in spelled
    done = treegen("eval", "-t", "gsm8k", "--model", tiny, *spelled, "--output_path", path)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("|Task "))
    assert lines[head + 2].startswith("|gsm8k (bundled problems)|")
    assert any(line.startswith("problems: 4 of gsm8k_sample.jsonl, which") for line in lines)
    assert any(line.startswith("examples: 8 that come with treegen;") for line in lines)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[head : head + 6]]
    assert cells[0] == [
        "Task",
        "Version",
        "Filter",
        "n-shot",
        "Metric",
        "",
        "Value",
        "95% interval",
    ]
    assert [row[2:6] for row in cells[2:5]] == [
        ["numeric", "8", "exact_match", "\u2191"],
        ["numeric", "8", "pass@5", "\u2191"],
        ["numeric", "8", "invalid", "\u2193"],
    ]
    assert cells[5][2] == "none" and cells[5][4] == "truncated"
    for row in cells[2:6]:
        assert re.fullmatch(r"[01]\.\d{3}", row[6])
        low, high = map(float, row[7].split(" to "))
        assert low <= float(row[6]) <= high
    assert any(re.match(r"\|Filter *\| *k\| *maj@k\| *95% interval\|", line) for line in lines)
    assert any(line.startswith("|numeric|  5|") for line in lines)
    assert not any(line.startswith("|flexible-extract|") for line in lines)
    others = "other filters: strict-match, flexible-extract; --all-filters shows them"
    assert others in lines
    title = f"gsm8k with {tiny.name}"
    settings = ": n 5, temperature 0.7, max_tokens 12, 8-shot"
    assert f"{title}{settings}" in lines
    value = r"[01]\.\d{3}"
    headline = (
        rf"{title}: accuracy {value} \({value} to {value}\), maj@5 {value} \({value} to {value}\), "
        rf"pass@5 {value} \({value} to {value}\); "
        rf"run: {path}"
    )
    assert re.fullmatch(headline, lines[-1])
    every = treegen("score", path, "--all-filters").out
    assert "|flexible-extract|  5|" in every and "other filters" not in every
    assert f"run directory: {path}" in done.err and "20/20 samples (100%)" in done.err

    (document,) = done.document["runs"]
    stored = results_of(path)
    del stored["parts"]
    assert document == {"run": str(path), **stored}
    usage = stored["usage"]
    assert (stored["complete"], stored["planned"], stored["done"]) == (True, 20, 20)
    assert usage["decoded_tokens"] == sum(r["num_tokens"] for r in samples_of(path))
    assert usage["prompt_tokens_unshared"] == sum(r["prompt_tokens"] for r in samples_of(path))
    assert usage["tokens_per_second"] > 0
    assert stored["settings"]["temperature"] == 0.7
    assert {"torch", "transformers", "treegen"} <= set(stored["versions"])
    assert len(stored["report"]["metrics"]) == 10
    assert_same_samples(path, finished)

    plan = treegen("plan", "gsm8k", "-M", tiny, *SMALL).document["plans"][0]
    assert plan["prompt_tokens"]["shared"] == usage["prompt_tokens_computed"]
    assert plan["prompt_tokens"]["unshared"] == usage["prompt_tokens_unshared"]
    said = f"prompt tokens computed: {usage['prompt_tokens_computed']:,} instead of "
    assert any(line.startswith(said) for line in lines)
    saved = 1 - usage["key_tokens_read"] / usage["key_tokens_unshared"]
    (attention,) = [line for line in lines if line.startswith("attention: ")]
    assert "cpu" in attention and f"key reads saved {saved:.1%}" in attention


def test_what_is_stored_of_a_sample(finished: Path) -> None:
    records = samples_of(finished)
    assert len(records) == 20
    assert {key for record in records for key in record} == {
        "problem_id",
        "sample_index",
        "seed",
        "text",
        "num_tokens",
        "logprob",
        "finish_reason",
        "stop",
        "prompt_hash",
        "prompt_tokens",
    }
    assert len({record["seed"] for record in records}) == 20
    assert len({record["prompt_hash"] for record in records}) == 4
    assert len({record["text"] for record in records}) > 15


def test_a_finished_run_is_left_alone(
    treegen: Command, finished: Path, no_weights: None, tmp_path: Path
) -> None:
    path = shutil.copytree(finished, tmp_path / "run")
    before = (path / "samples.jsonl").read_bytes(), results_of(path)
    done = treegen("eval", "--resume", path)
    assert done.code == 0, done.err
    assert ((path / "samples.jsonl").read_bytes(), results_of(path)) == before
    assert "20 of 20 samples done" in done.err


@pytest.mark.parametrize("lines", [0, 7, 19])
def test_a_stopped_run_ends_with_the_samples_of_an_undisturbed_one(
    treegen: Command, finished: Path, tmp_path: Path, lines: int
) -> None:
    path = copy_part(finished, tmp_path / "run", lines, b'{"problem_id":"gsm8k-0","sample_ind')
    named = ["gsm8k"] if lines else []
    done = treegen("eval", *named, "--resume", path, "-b", 3)
    assert done.code == 0, done.err
    assert "unfinished" in done.err and f"{lines} of 20 samples done" in done.err
    assert_same_samples(path, finished)
    # What the lost part had computed is not known, and not made up.
    account = results_of(path)["usage"]
    assert (account["samples_accounted"], account["samples"]) == (20 - lines, 20)
    assert ("prompt tokens: known for" in done.out) == (lines > 0)
    decoded = "per second; not counted: the last seconds before a kill; 20 of 20"
    assert (decoded in done.out) == (lines > 0)
    assert "unfinished samples" not in done.out  # no attempt but the last has recorded tokens
    assert results_of(path)["report"] == results_of(finished)["report"]


def test_an_interrupt_before_the_run_says_what_to_do(
    treegen: Command, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object) -> None:
        raise Interrupted(2)

    for name in ("load_job", "prepare_runs"):
        with monkeypatch.context() as patched:
            patched.setattr(f"treegen.evals.pipeline.evaluation.{name}", interrupt)
            with pytest.raises(Interrupted) as stopped:
                treegen("eval", "gsm8k", "-M", tiny, *SMALL, "-o", tmp_path / "run")
        assert str(stopped.value) == (
            "stopped by SIGINT; no new sample was drawn; repeat the same command"
        )
        assert not (tmp_path / "run").exists()


def test_a_chat_template_that_is_not_used_is_mentioned_once(
    treegen: Command, tiny: Path, tmp_path: Path
) -> None:
    without = shutil.copytree(tiny, tmp_path / "without")
    (without / "chat_template.jinja").unlink()
    line = "the model has a chat template, which this run does not use; for a chat model, pass "
    words = ("--limit", "1", "--n-samples", "1", "--max-tokens", "4", "--memory", "4MiB")
    both = treegen("eval", "gsm8k", "math500", "-M", tiny, *words, "-o", tmp_path / "both")
    assert both.code == 0 and both.err.count(f"{line}--apply-chat-template\n") == 1
    assert both.err.index(line) < both.err.index("run directory")
    chat = ("--apply-chat-template", "-o", tmp_path / "chat")
    for folder, more in ((tiny, chat), (without, ("-o", tmp_path / "plain"))):
        done = treegen("eval", "gsm8k", "-M", folder, *words, *more)
        assert done.code == 0 and line not in done.err
    assert line not in treegen("eval", "mmlu", "-M", tiny, *words, "-o", tmp_path / "mc").err
    assert line not in treegen("eval", "--resume", tmp_path / "both").err


def test_an_interrupted_run_keeps_its_samples_and_its_account(
    treegen: Command, tiny: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    with monkeypatch.context() as patched:
        polls = iter(range(1000))
        patched.setattr(
            "treegen.cli.terminal.progress.received", lambda: 15 if next(polls) > 20 else None
        )
        with pytest.raises(Interrupted) as stopped:
            treegen("eval", "gsm8k", "-M", tiny, *SMALL, "-b", 5, "-o", path)
    with RunDir.open(path) as run:
        kept = len(run.done)
    assert 0 < kept < 20
    assert stopped.value.exit_code == 143
    assert str(stopped.value) == (
        f"stopped by SIGTERM; {kept} of 20 samples are stored; "
        f"continue with: treegen eval --resume {path}"
    )
    assert (results_of(path)["complete"], results_of(path)["done"]) == (False, kept)
    done = treegen("eval", "gsm8k", "-o", path, "--resume")
    assert done.code == 0, done.err
    assert_same_samples(path, finished)
    results = results_of(path)
    assert [part["samples"] for part in results["parts"]] == [kept, 20 - kept]
    assert results["usage"]["samples_accounted"] == 20
    assert results["usage"]["decoded_tokens"] > results["usage"]["sample_tokens"]
    assert "instead of" in done.out


def test_resume_without_a_directory_begins_what_is_not_there(
    treegen: Command, tiny: Path, finished: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    done = treegen("eval", "gsm8k", "-M", tiny, *SMALL, "-o", path, "--resume", "--quiet")
    assert (done.code, done.err) == (0, "")
    assert done.out == "" and done.document["runs"][0]["complete"]
    assert_same_samples(path, finished)


def test_several_tasks_share_a_model_and_a_directory(
    treegen: Command, tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN_TASK, encoding="utf-8")
    path = tmp_path / "runs"
    few = ["--limit", 2, "-n", 2, "--max-tokens", 4]
    own = f"{tmp_path / 'own.py'}:Sums"
    done = treegen("eval", f"gsm8k,{own}", "-M", tiny, *few, "-o", path)
    assert done.code == 0, done.err
    assert done.err.count("loading") == 1
    assert [run["task"]["name"] for run in done.document["runs"]] == ["gsm8k", "sums | [bold]"]
    assert sorted(sub.name for sub in path.iterdir()) == ["gsm8k", "sums_bold_"]
    assert "|sums \\| [bold] (bundled problems)|" in done.out
    (path / "gsm8k" / "samples.jsonl").write_bytes(b"")
    assert treegen("eval", "--resume", path).code == 2  # code of one's own is named each time
    again = treegen("eval", "--resume", path, "--allow-task-code")
    assert again.code == 0, again.err
    assert [run["done"] for run in again.document["runs"]] == [4, 4]


def test_sampling_options_by_any_name(treegen: Command, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    done = treegen(
        f"eval gsm8k --model_args pretrained={tiny},dtype=float32,page-size=8,check=false"
        " --sample-id gsm8k-2 --repeats 3 --log-tokens -f 2"
        " --gen_kwargs do_sample=false,max_gen_toks=6 --stop '\\n\\n' --k 3,1 --maj 3"
        f" --eager -o {path}"
    )
    assert done.code == 0, done.err
    chosen = results_of(path)["settings"]
    assert (chosen["eager"], chosen["compile"], chosen["run_ahead"]) == (True, None, None)
    assert (chosen["temperature"], chosen["max_tokens"], chosen["stop"]) == (0, 6, ["\n\n"])
    assert (chosen["page_size"], chosen["check"], chosen["num_fewshot"]) == (8, False, 2)
    records = samples_of(path)
    assert {r["problem_id"] for r in records} == {"gsm8k-2"}
    assert len(records) == 3 and len({r["text"] for r in records}) == 1
    assert all(len(r["tokens"]) == r["num_tokens"] for r in records)
    assert "pass@3" in done.out and "|  3|" in done.out and "|  2|" not in done.out


@pytest.mark.parametrize(("temperature", "warns"), [("0", True), ("0.7", False)])
def test_equal_samples_are_told(
    temperature: str, warns: bool, treegen: Command, tiny: Path, tmp_path: Path
) -> None:
    data = write_jsonl(tmp_path / "d.jsonl", [{"question": "1 + 1?", "answer": "2"}])
    named = ["jsonl", "-M", tiny, "--data", data, "-T", "answer=number", "--max-tokens", "4"]
    done = treegen("eval", *named, "-n", "3", "--temperature", temperature, "-o", tmp_path / "run")
    assert done.code == 0, done.err
    told = "the 3 samples of a problem are equal, because the temperature is 0; to draw different"
    assert (told in done.err) == warns
    if warns:
        assert done.err.index(told) < done.err.index("run directory"), "before a sample is drawn"
        several = ["eval", "gsm8k,math500", "-M", tiny, "-L", "1", "-f", "0", "--max-tokens", "4"]
        done = treegen(*several, "-n", "3", "--temperature", "0", "-o", tmp_path / "runs")
        assert done.code == 0 and done.err.count(told) == 1


def test_chat_prompts_stay_shared(treegen: Command, tiny: Path) -> None:
    chat = ["--apply-chat-template", "--system-instruction", "Be brief."]
    plain = treegen("plan", "gsm8k", "-M", tiny, *SMALL).document["plans"][0]
    templated = treegen("plan", "gsm8k", "-M", tiny, *SMALL, *chat).document["plans"][0]
    instructed = treegen("plan", "gsm8k", "-M", tiny, *SMALL, *chat[1:]).document["plans"][0]
    for other in (templated, instructed):
        assert other["levels"][0]["tokens"] > plain["levels"][0]["tokens"]
        assert other["levels"][0]["kept"] == 1 and other["rows"] == 20
    assert templated["longest_prompt"] > instructed["longest_prompt"] > plain["longest_prompt"]


def test_the_chat_format_reaches_the_model(treegen: Command, tiny: Path, tmp_path: Path) -> None:
    few = ["--limit", 1, "-n", 1, "--max-tokens", 3, "-M", tiny]
    one = treegen("eval", "gsm8k", *few, "--apply_chat_template", "-o", tmp_path / "chat")
    two = treegen("eval", "gsm8k", *few, "-o", tmp_path / "plain")
    assert (one.code, two.code) == (0, 0)
    chat, plain = samples_of(tmp_path / "chat"), samples_of(tmp_path / "plain")
    assert chat[0]["prompt_hash"] != plain[0]["prompt_hash"]
    changed = treegen("eval", "--resume", tmp_path / "plain", "--apply-chat-template")
    assert "prompt.apply_chat_template: false -> true (--apply-chat-template)" in changed.error


def test_the_default_directory_is_new_and_named(
    treegen: Command, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = treegen("eval", "gsm8k", "-M", tiny, "-L", 1, "-n", 1, "--max-tokens", 2)
    (made,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"gsm8k-tiny-\d{8}-\d{6}-\d+", made.name)
    assert f"run directory: runs/{made.name}" in done.err
    assert done.document["runs"][0]["run"] == f"runs/{made.name}"


def test_rows_that_cannot_be_run_are_reported_and_the_others_run(
    treegen: Command, tiny: Path, tmp_path: Path
) -> None:
    data = write_jsonl(
        tmp_path / "data.jsonl",
        [problem("1+1?", 2), {"question": "no answer"}, {"answer": "#### 3"}, problem("2+2?", 4)],
    )
    path = tmp_path / "run"
    done = treegen(
        "eval", "gsm8k", "-M", tiny, "--data", data, "-n", 2, "--max-tokens", 3, "-o", path
    )
    assert done.code == 0, done.err
    assert f"skipped: {data}, line 2: no answer" in done.err
    assert f"skipped: {data}, line 3: no question" in done.err
    results = results_of(path)
    assert [row["line"] for row in results["skipped"]] == [2, 3]
    assert results["done"] == 4


def test_metrics_without_a_value_share_a_line(
    treegen: Command, repository: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(repository / "examples/run", run)
    (run / "samples.jsonl").write_bytes(b"")
    shown = [line for line in treegen("score", run).out.splitlines() if line.startswith("n/a")]
    assert len(shown) == 1 and "exact_match" in shown[0] and "maj@20: no samples" in shown[0]


def test_text_of_others_cannot_steer_the_terminal(
    treegen: Command, tiny: Path, tmp_path: Path
) -> None:
    evil = "\x1b[2J[red]\u202e\x9b31m"
    data = write_jsonl(tmp_path / f"{evil}.jsonl", [problem("1+1?", 2, id=evil), {"x": evil}])
    path = tmp_path / "run"
    done = treegen(
        "eval", "gsm8k", "-M", tiny, "--data", data, "-n", 2, "--max-tokens", 3, "-o", path
    )
    assert done.code == 0, done.err
    copy_part(path, tmp_path / "part", 1)
    partial = treegen("score", tmp_path / "part")
    assert "incomplete: 1 problems" in partial.out
    refused = treegen("eval", "gsm8k", "-M", tiny, "--data", data, "--sample-id", f"{evil}x")
    assert refused.code == 2
    for text in (done.out, done.err, partial.out, partial.err, refused.err):
        assert not set(text) & set(evil) - set("[red]2J31m"), text
