"""Tasks scored by likelihood, from the command line to stored records."""

import json
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import Command, build_checkpoint, copy_part, samples_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from treegen.evals.config.eval_settings import resolve_eval_settings
from treegen.evals.identity import run_settings
from treegen.evals.job import load_job, prepare_job
from treegen.evals.progress.usage import format_sharing
from treegen.evals.sampling import sample
from treegen.evals.scoring.results import write_results
from treegen.llm import LLM
from treegen.prompts.tree import prompts_of
from treegen.runs import RunDir
from treegen.tasks import TaskOptions, get_task

WORDS = ("river", "number", "garden", "letter", "window")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two subjects of MMLU with twenty questions each, of different lengths."""
    path = tmp_path_factory.mktemp("mmlu")
    for subject in ("anatomy", "astronomy"):
        for split, num in (("dev", 5), ("test", 20)):
            rows = [
                f"Which {WORDS[i % 5]} of {subject} is {'very ' * (3 * i)}{split} {i}?,"
                f"{i},{WORDS[i % 3]},{WORDS[i % 4]} {i},none,{'ABCD'[i % 4]}\n"
                for i in range(num)
            ]
            (path / split).mkdir(exist_ok=True)
            (path / split / f"{subject}_{split}.csv").write_text("".join(rows))
    return path


@cache
def stock_model(checkpoint: Path) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    return AutoTokenizer.from_pretrained(checkpoint), model


def stock_logprobs(checkpoint: Path, prompt: str, choices: tuple[str, ...]) -> list[float]:
    """What plain transformers says of each choice, one whole text at a time."""
    tokenizer, model = stock_model(checkpoint)
    start = len(tokenizer(prompt)["input_ids"])
    found = []
    for choice in choices:
        ids = torch.tensor([tokenizer(prompt + choice)["input_ids"]])
        with torch.no_grad():
            logprobs = model(ids).logits[0].double().log_softmax(-1)
        tokens = ids[0, start:]
        found.append(float(logprobs[start - 1 : -1].gather(1, tokens[:, None]).sum()))
    return found


def prompts(data: Path, extra: Mapping[str, str]) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Text and choices of each problem of MMLU."""
    task = get_task("mmlu")
    loaded = task.load(TaskOptions(data=str(data), extra=extra))
    texts = {
        prompt.id: "".join(str(node.content) for node in prompt.path)
        for prompt in prompts_of(task.tree(loaded, 1))
    }
    return {problem.id: (texts[problem.id], problem.choices) for problem in loaded.problems}


def check_records(path: Path, checkpoint: Path, wanted: Mapping[str, Any]) -> None:
    records = samples_of(path)
    assert {record["problem_id"] for record in records} == set(wanted)
    for record in records:
        prompt, choices = wanted[record["problem_id"]]
        want = stock_logprobs(checkpoint, prompt, choices)
        assert record["choice_logprobs"] == pytest.approx(want, abs=1e-4)
        assert record["text"] == choices[want.index(max(want))]
        assert record["logprob"] == max(record["choice_logprobs"])


def test_scores_are_those_of_plain_transformers(
    treegen: Command, tiny: Path, folder: Path, tmp_path: Path
) -> None:
    """With passes so small that the examples take several."""
    out = tmp_path / "run"
    done = treegen(
        f"eval mmlu --data {folder} -M {tiny} -o {out} --model-args prefill_chunk=64"
        " -T per_subject=6 --memory 4MiB"
    )
    assert done.code == 0
    check_records(out, tiny, prompts(folder, {"per_subject": "6"}))
    assert "|mmlu (hendrycks form)|      1|none  |     5|acc      |" in done.out
    assert "acc_norm" not in done.out and "truncated" not in done.out
    usage = done.document["runs"][0]["usage"]
    assert usage["prompt_tokens_computed"] < usage["prompt_tokens_unshared"] / 3


def test_real_questions_score_as_in_plain_transformers(
    treegen: Command, tiny: Path, data_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    done = treegen(f"eval mmlu --data {data_dir}/mmlu -M {tiny} -o {out} -T per_subject=2 --quiet")
    assert done.code == 0
    check_records(out, tiny, prompts(data_dir / "mmlu", {"per_subject": "2"}))


OWN_CHOICES = """
from treegen import Node, SamplingParams
from treegen.tasks import Problem, TaskData, TaskDefaults, Verdict, summarize

class Pairs:
    name = "pairs"
    version = "1"
    filters = ("none",)
    defaults = TaskDefaults(SamplingParams(temperature=0.0, max_tokens=1), 1, 0)

    def load(self, options):
        pairs = [("One river", " a", " of many long words"), ("A garden", " b", " green")]
        problems = (Problem(w, w, "right", choices=(a, b)) for w, a, b in pairs)
        return TaskData(tuple(problems), "here")

    def tree(self, data, num_samples):
        return Node("", children=[
            Node(p.question, id=p.id, samples=num_samples) for p in data.problems])

    def score(self, problem, text):
        return {"none": Verdict(text.strip(), text == problem.choices[1])}

    def aggregate(self, scores, options):
        return summarize(scores, options, task=self.name, version="1", filters=self.filters)
"""


def test_an_own_task_of_choices_reports_what_choices_have(
    treegen: Command, tiny: Path, tmp_path: Path
) -> None:
    """Accuracy, and accuracy by length as lm-eval's acc_norm; no votes, no unreadable samples."""
    (tmp_path / "pairs.py").write_text(OWN_CHOICES)
    task, out = f"{tmp_path / 'pairs.py'}:Pairs", tmp_path / "run"
    done = treegen("eval", task, "-M", tiny, "-o", out)
    assert done.code == 0, done.err
    (document,) = done.document["runs"]
    values = {row["metric"]: row["value"] for row in document["report"]["metrics"]}
    assert list(values) == ["acc", "acc_norm"] and document["report"]["majority"] == []
    by_sum, by_length = [], []
    lengths = {"One river": (1, 18), "A garden": (1, 5)}
    for record in samples_of(out):
        first, second = record["choice_logprobs"]
        a, b = lengths[record["problem_id"]]
        by_sum.append(second > first)
        by_length.append(second / b > first / a)
    assert values == {"acc": sum(by_sum) / 2, "acc_norm": sum(by_length) / 2}
    assert by_sum != by_length
    usage = document["usage"]
    assert usage["prompt_tokens_computed"] <= usage["prompt_tokens_unshared"]
    assert "0.8 times" not in done.out
    again = treegen("score", out, "-q", "--task", task).document
    assert again["runs"][0]["report"] == document["report"]
    plan = treegen("plan", task, "-M", tiny).document["plans"][0]
    assert plan["prompt_tokens"]["shared"] <= plan["prompt_tokens"]["unshared"]
    assert plan["prompt_tokens"]["unshared"] == usage["prompt_tokens_unshared"]


@pytest.mark.parametrize(
    ("computed", "text"),
    [(10, "10.0 times fewer"), (100, "nothing saved"), (125, "1.2 times more")],
)
def test_what_sharing_did_is_told_in_its_own_words(computed: int, text: str) -> None:
    usage = {
        "prompt_tokens_computed": computed,
        "prompt_tokens_unshared": 100,
        "samples": 1,
        "samples_accounted": 1,
    }
    assert format_sharing(usage).endswith(f"({text})")


def test_a_stopped_run_continues_and_can_be_scored_again(
    treegen: Command, tiny: Path, folder: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    args = ["eval", "mmlu", "--data", folder, "-M", tiny, "-q"]
    first = treegen(*args, "-o", whole).document["runs"][0]
    part = copy_part(whole, tmp_path / "part", 17, b'{"problem_id": "anat')
    second = treegen("eval", "--resume", part, "-q").document["runs"][0]
    assert second["report"] == first["report"]
    assert len(samples_of(part)) == 40
    assert [r["text"] for r in samples_of(part)] == [r["text"] for r in samples_of(whole)]
    moved = tmp_path / "moved"
    shutil.copytree(whole, moved)
    assert treegen("score", moved, "-q").document["runs"][0]["report"] == first["report"]


def test_stopping_between_passes_keeps_what_is_scored(
    tiny: Path, folder: Path, tmp_path: Path
) -> None:
    choices = {"task": "mmlu", "data": str(folder), "model": str(tiny), "prefill_chunk": 32}
    job = load_job(resolve_eval_settings(choices))
    llm = LLM(str(tiny), prefill_chunk=32, memory="4MiB")
    settings = run_settings(job, dtype="float32", fingerprint="x")
    with RunDir.create(tmp_path / "run", settings) as run:
        steps = list(
            sample(prepare_job(job, llm.model_info), run, llm, stop=lambda: len(run.done) >= 9)
        )
        assert 9 <= len(run.done) < 40
        assert [step.done for step in steps] == sorted(step.done for step in steps)
        assert llm.list_prefixes() == [] and llm.cache.pool.num_used == 0
        list(sample(prepare_job(job, llm.model_info), run, llm))
        results, _ = write_results(job, run)
        assert results["complete"] and results["usage"]["samples_accounted"] == 40


def test_examples_are_left_out_until_a_prompt_fits(
    treegen: Command, folder: Path, tmp_path: Path
) -> None:
    small = build_checkpoint(tmp_path / "small", context=345)
    out = tmp_path / "run"
    done = treegen("eval", "mmlu", "--data", folder, "-M", small, "-o", out)
    assert done.code == 0
    records = samples_of(out)
    shorter = [record for record in records if "dropped" in record]
    assert len({record.get("dropped", 0) for record in records}) > 2
    assert f"{len(shorter)} prompts were too long for the model" in done.err
    wanted = {}
    for record in records:
        text, choices = prompts(folder, {})[record["problem_id"]]
        parts = text.split("\n\n")  # header, five examples, question
        kept = parts[: len(parts) - 1 - record.get("dropped", 0)]
        wanted[record["problem_id"]] = ("\n\n".join([*kept, parts[-1]]), choices)
        if len(kept) < len(parts) - 1:
            one_more = "\n\n".join([*parts[: len(kept) + 1], parts[-1]])
            size = max(len(stock_model(small)[0](one_more + c)["input_ids"]) for c in choices)
            assert size > 345
    check_records(out, small, wanted)
    planned = treegen("plan", "mmlu", "--data", folder, "-M", small)
    assert planned.document["plans"][0]["longest_prompt"] <= 345


def test_a_question_that_never_fits_is_refused(
    treegen: Command, folder: Path, tmp_path: Path
) -> None:
    small = build_checkpoint(tmp_path / "small", context=64)
    error = treegen("eval", "mmlu", "--data", folder, "-M", small, "-o", tmp_path / "run").error
    assert "too many for the model's context of 64" in error


def test_sampling_shortens_prompts_as_well(treegen: Command, folder: Path, tmp_path: Path) -> None:
    small = build_checkpoint(tmp_path / "small", context=420)
    out = tmp_path / "run"
    done = treegen(
        f"eval mmlu-generate --data {folder} -M {small} -o {out} -T per_subject=4 --max-tokens 5"
    )
    assert done.code == 0
    assert any(record.get("dropped") for record in samples_of(out))
    assert all(record["prompt_tokens"] + 5 <= 420 for record in samples_of(out))
    assert "|mmlu-generate|      2|letter|     5|exact_match_macro|" in done.out


def test_after_a_chat_turn_choices_lose_their_space(
    treegen: Command, tiny: Path, folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    done = treegen(
        f"eval mmlu --data {folder} -M {tiny} -o {out} -T per_subject=2"
        " --apply-chat-template --no-fewshot-as-multiturn -q"
    )
    assert done.code == 0
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    wanted = prompts(folder, {"per_subject": "2"})
    for record in samples_of(out):
        text, choices = wanted[record["problem_id"]]
        turn = [{"role": "user", "content": text}]
        chat = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        chat = chat.removeprefix(tokenizer.bos_token)
        want = stock_logprobs(tiny, chat, tuple(choice.strip() for choice in choices))
        assert record["choice_logprobs"] == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--temperature", "1"], "remove --temperature"),
        (["-n", "4"], "so --n-samples 4 is not supported; remove --n-samples"),
        (["--stop", "x"], "remove --stop"),
    ],
)
def test_what_means_nothing_is_refused(
    treegen: Command, tiny: Path, folder: Path, args: list[str], message: str
) -> None:
    assert message in treegen("eval", "mmlu", "--data", folder, "-M", tiny, *args).error


def test_plan_counts_one_prompt_per_question(treegen: Command, tiny: Path, folder: Path) -> None:
    done = treegen("plan", "mmlu", "--data", folder, "-M", tiny)
    (plan,) = done.document["plans"]
    assert (plan["samples"], plan["choices"], plan["rows"]) == (40, 160, 0)
    assert plan["prompt_tokens"]["shared"] < plan["prompt_tokens"]["unshared"]
    assert "the most likely of 160 choices" in done.out
    json.dumps(plan, allow_nan=False)


def test_show_counts_the_choices_among_the_tokens_that_sharing_saves(
    treegen: Command, tiny: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    usage = treegen("eval", "winogrande", "-M", tiny, "-o", out).document["runs"][0]["usage"]
    shown = treegen("show", out)
    line = format_sharing(usage)
    assert line is not None and line in shown.out and "times more" not in shown.out
