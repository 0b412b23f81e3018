"""Runs judged by a model: what is stored, resumed, re-scored and shown, from the command."""

import json
import math
import shutil
from collections import Counter
from pathlib import Path

import pytest
from cli_cases import Command, write_jsonl
from judging_cases import LETTERS, RUBRIC, rubric_file, small_run

import treegen
from treegen.errors import InputError, RunError
from treegen.evals.judging.interval import CorrectedMean
from treegen.evals.judging.judgement_files import FILE, FOLDER, read_records
from treegen.evals.judging.pipeline import JudgeLoader
from treegen.evals.judging.runner import exclusive_logprob
from treegen.evals.judging.summary_tables import make_agreement_table, make_corrected_table
from treegen.evals.multiple_choice import num_distinct
from treegen.runs import RunDir

SMALL = ("--memory", "32MiB")


@pytest.fixture(scope="module")
def llm() -> treegen.LLM:
    return treegen.LLM("demo", device="cpu", memory="32MiB")


def lines_of(run: Path) -> list[bytes]:
    (file,) = (run / FOLDER).glob(f"*/{FILE}")
    return file.read_bytes().splitlines(keepends=True)


def test_likelihoods_are_those_of_the_choices_after_the_prompt(
    tmp_path: Path, llm: treegen.LLM
) -> None:
    """Against one call of `score` for each choice of each prompt that is written here by hand."""
    run = small_run(tmp_path / "run", problems=3, samples=2)
    found = treegen.judge(run, rubric_file(tmp_path), llm, progress=False)
    (summary,) = found.summaries
    mark = summary.judged[0].judging.mark
    heads = (
        "Say whether an answer is good or bad.\nQuestion: {question}\nAnswer: {answer}",
        "Good or bad?\n{question}\n{answer}",
    )
    with RunDir.open(run) as opened:
        texts = {(r["problem_id"], r["sample_index"]): r["text"] for r in opened.records()}
    values = {}
    for (problem, index), text in texts.items():
        for wording, head in enumerate(heads):
            question = f"What is {problem[1:]} + 0?"
            prompt = head.format(question=question, answer=f"<<<{mark}\n{text}\n{mark}>>>")
            prompt += '\n\nReply with "Verdict: X" and nothing else, where X is one of good, bad.'
            prompt += "\n\nVerdict:"
            good, bad = llm.score([(prompt, " good"), (prompt, " bad")])
            values[problem, (0, index), wording] = 1 / (1 + math.exp(bad.logprob - good.logprob))
    assert summary.judged[0].values == pytest.approx(values, abs=1e-5)
    assert found.done == found.planned == 12


def test_what_prompts_share_is_computed_once(tmp_path: Path, llm: treegen.LLM) -> None:
    run = small_run(tmp_path / "run", problems=6, samples=3)
    for how in ({}, {"verdicts": "samples", "repeats": 4, "max_tokens": 2}):
        found = treegen.judge(run, "correctness", llm, wordings=3, progress=False, **how)  # type: ignore[arg-type]
        (work,) = found.work.values()
        assert work["distinct"] <= work["prompt_tokens_computed"] <= 1.1 * work["distinct"]
        assert work["prompt_tokens_unshared"] > 4 * work["prompt_tokens_computed"]


def test_a_small_cache_computes_little_again(tmp_path: Path) -> None:
    """Prompts are in the order of the tree, so a cache of a few of them is enough."""
    run = small_run(tmp_path / "run", problems=8, samples=3)
    with treegen.LLM("demo", device="cpu", memory="3MiB", max_rows=8) as llm:
        found = treegen.judge(
            run,
            "correctness",
            llm,
            wordings=2,
            verdicts="samples",
            repeats=3,
            max_tokens=4,
            progress=False,
        )
        (work,) = found.work.values()
        assert work["prompt_tokens_computed"] <= 1.1 * work["distinct"]


def test_judgements_are_stored_once_and_read_without_a_model(
    tmp_path: Path, treegen: Command
) -> None:
    run, rubric = small_run(tmp_path / "run"), rubric_file(tmp_path, LETTERS)
    arguments = (
        f"judge {run} --judge demo --rubric {rubric} --wordings 1 --repeats 2 --max-tokens 12",
        *SMALL,
    )
    first = treegen(*arguments).document
    assert first["done"] == first["planned"] == 24
    stored = lines_of(run)
    assert len(stored) == 24
    again = treegen(*arguments).document
    assert lines_of(run) == stored and again["summaries"] == first["summaries"]
    # More wordings and repeats add to what is there, and torn lines are drawn again.
    file = next((run / FOLDER).glob(f"*/{FILE}"))
    file.write_bytes(b"".join(stored)[:-30])
    more = treegen(
        f"judge {run} --judge demo --rubric {rubric} --repeats 3 --max-tokens 12", *SMALL
    ).document
    assert more["done"] == more["planned"] == 72
    whole = lines_of(run)
    assert whole[:23] == stored[:23] and len(whole) == 72
    said = [json.loads(line) for line in whole]
    key = [(s["problem_id"], str(s["answers"]), s["wording"], s["repeat"]) for s in said]
    assert len(set(key)) == 72
    torn = json.loads(stored[23])
    redrawn = said[key.index((torn["problem_id"], str(torn["answers"]), 0, torn["repeat"]))]
    assert redrawn["text"] == torn["text"] and redrawn["seed"] == torn["seed"]


def test_an_unfinished_run_is_named(tmp_path: Path, llm: treegen.LLM) -> None:
    run = small_run(tmp_path / "run")
    samples = run / "samples.jsonl"
    samples.write_bytes(b"".join(samples.read_bytes().splitlines(keepends=True)[:-1]))
    judged = treegen.judge(run, rubric_file(tmp_path), llm, progress=False)
    notice = "run: 1 of 12 samples are not drawn yet; the results are those of the other samples"
    assert judged.about[-1] == notice and notice in str(judged)


def test_what_is_stored_is_scored_and_shown_without_weights(
    tmp_path: Path, treegen: Command, llm: object, no_weights: None
) -> None:
    import treegen as library

    a, b = small_run(tmp_path / "a"), small_run(tmp_path / "b", seed=1)
    for run in (a, b):
        library.judge(run, rubric_file(tmp_path), llm, progress=False)  # type: ignore[arg-type]
    scored = treegen("judge", a, "--half-width", "0.2").document
    (summary,) = scored["summaries"]
    assert summary["judgements"] == 24 and 0 <= summary["mean"]["low"] <= summary["mean"]["high"]
    assert [each["name"] for each in scored["needs"][0]][:2] == ["problems", "answers"]
    shown = treegen("show", a)
    assert "Judged by brief" in shown.out and "Sources of variance" in shown.out
    assert shown.document["judged"][0]["mean"] == summary["mean"]
    compared = treegen("compare", a, b, "--no-plots").document["differences"][-1]
    assert compared["metric"] == "judged" and compared["filter"] == "brief, likelihood"
    assert compared["a"] == pytest.approx(summary["mean"]["value"])
    page = library.open_run(a).report()
    assert "Judged by brief" in page.read_text()


def test_one_of_several_stored_judgings_is_chosen_by_its_rubric(
    tmp_path: Path, treegen: Command, llm: object, no_weights: None
) -> None:
    import treegen as library

    run, brief = small_run(tmp_path / "run"), rubric_file(tmp_path)
    for rubric in (brief, "rating"):
        library.judge(run, rubric, llm, wordings=1, progress=False)  # type: ignore[arg-type]
    assert len(treegen("judge", run).document["summaries"]) == 2
    rows = [{"problem_id": f"p{i}", "sample_index": 0, "label": "good"} for i in range(3)]
    labels = write_jsonl(tmp_path / "labels.jsonl", rows)
    error = treegen("judge", run, "--labels", labels).error
    assert "the choices of the rubric rating, got 'good'" in error and "pass the --rubric" in error
    for chosen in ("brief", brief):
        (summary,) = treegen("judge", run, "--rubric", chosen, "--labels", labels).document[
            "summaries"
        ]
        assert summary["title"].startswith("brief") and summary["corrected"]["labelled"] == 3
        assert repr(library.judgings(run, chosen).summaries[0]).startswith("Summary('brief, ")
    rows[1:] = [{**rows[0], "sample_index": index} for index in range(90, 94)]
    write_jsonl(labels, rows)
    error = treegen("judge", run, "--rubric", brief, "--labels", labels).error
    assert "labels for at least 2 problems, got 1; 4 of 5 labels are for answers that" in error
    error = treegen("judge", run, "--rubric", "simpleqa").error
    assert "has no judgements by the rubric simpleqa, but by brief, rating; set --rubric" in error
    assert "there is no rubric 'nothing'; use" in treegen("judge", run, "--rubric", "nothing").error
    error = treegen("judge", run, "--rubric", "corectness").error
    assert error.rstrip().endswith("there is no rubric 'corectness'; did you mean 'correctness'?")
    assert "--pairs has no effect" in treegen("judge", run, "--pairs", run).error


def test_pairs_are_judged_in_both_orders(tmp_path: Path, treegen: Command) -> None:
    runs = [
        small_run(tmp_path / name, problems=3, samples=2, seed=i) for i, name in enumerate("ab")
    ]
    found = treegen("judge", runs[0], "--pairs", runs[1], "--judge", "demo", *SMALL).document
    (summary,) = found["summaries"]
    assert summary["judgements"] == 3 * 2 * 2 * 3
    said = list(read_records(runs[0], summary["judgings"][0]))
    orders = Counter(str(record["answers"]) for record in said)
    assert orders["[[0, 0], [1, 0]]"] == orders["[[1, 0], [0, 0]]"] == 9
    strengths = {Path(each["run"]).name: each for each in summary["strengths"]}
    assert strengths["a"]["value"] == pytest.approx(-strengths["b"]["value"])
    assert strengths["a"]["low"] < strengths["a"]["value"] < strengths["a"]["high"]
    assert 0 <= summary["position"]["flipped"] <= 1 and summary["position"]["pairs"] == 6


def test_criteria_are_judged_one_by_one_below_the_answer(tmp_path: Path, llm: treegen.LLM) -> None:
    run = small_run(tmp_path / "run", problems=3, samples=2)
    text = RUBRIC.replace("wordings:", "criteria: [short, {text: right, weight: 3}]\nwordings:")
    text = text.replace("{{ answer }}\n", "{{ answer }}\n    Is it {{ criterion }}?\n")
    found = treegen.judge(run, rubric_file(tmp_path, text), llm, wordings=1, progress=False)
    (summary,) = found.summaries
    (judged,) = summary.judged
    assert len(judged.judgements) == 3 * 2 * 2
    by = {(j.problem_id, j.shown[0], j.criterion): j.value for j in judged.judgements}
    for (problem, key, wording), value in judged.values.items():
        first, second = by[problem, key, 0], by[problem, key, 1]
        assert first is not None and second is not None and wording == 0
        assert value == pytest.approx((first + 3 * second) / 4)
    (work,) = found.work.values()
    assert work["prompt_tokens_computed"] <= 1.1 * work["distinct"]
    (table,) = [table for table in summary.tables if table.title.startswith("Means by criterion")]
    assert [row[:2] for row in table.rows] == [("short", "1"), ("right", "3")]
    means = []
    for number, row in enumerate(table.rows):
        values = [value for (_, _, criterion), value in by.items() if criterion == number]
        mean, low, high = (float(str(cell)) for cell in row[2:])
        assert mean == pytest.approx(sum(filter(None, values)) / 6) and low < mean < high
        means.append(mean)
    assert summary.mean is not None
    assert summary.mean.value == pytest.approx((means[0] + 3 * means[1]) / 4)
    assert "Each answer has a verdict for each of the 2 criteria." in str(found)


def test_a_jury_and_people(tmp_path: Path, treegen: Command, tiny: Path) -> None:
    run = small_run(tmp_path / "run", problems=4, samples=2)
    rubric = rubric_file(tmp_path)
    rows = [
        {"problem_id": f"p{i}", "sample_index": 0, "label": "good" if i % 2 else 0}
        for i in range(3)
    ]
    labels = write_jsonl(tmp_path / "labels.jsonl", rows)
    found = treegen(
        f"judge {run} --judge demo --judge {tiny} --rubric {rubric} --labels {labels}",
        *("--weight", "3", "--weight", "1"),
        *SMALL,
    ).document
    (summary,) = found["summaries"]
    assert len(summary["judges"]) == 2 and summary["variances"]["judge"] is not None
    alone = {row[0]: row[1] for row in summary["tables"][0]["rows"]}
    weighted = (3 * alone["demo"] + alone[str(tiny)]) / 4
    assert summary["jury"]["value"] == pytest.approx(weighted, abs=1e-9)
    assert summary["corrected"]["labelled"] == 3 and summary["corrected"]["problems"] == 4
    majority = treegen("judge", run, "--combine", "majority").document["summaries"][0]
    assert majority["jury"]["value"] * 16 % 1 == pytest.approx(0)


def test_an_evaluation_is_judged_in_its_own_directory(tmp_path: Path, treegen: Command) -> None:
    run = tmp_path / "run"
    done = treegen(
        f"eval gsm8k --limit 2 -n 2 --max-tokens 16 -o {run} --judge demo --wordings 1", *SMALL
    )
    assert done.code == 0, done.err
    (document,) = done.document["runs"]
    assert document["judged"]["done"] == 4
    assert "Judged by correctness" in treegen("show", run).out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rubric", "ratings"), "did you mean 'rating'"),
        (("--wordings", "4"), "--wordings 4 is more than the 3"),
        (("--verdicts", "likelihood", "--repeats", "2"), "require --verdicts samples"),
        (("--rubric", "pairwise"), "compares pairs of answers; pass another run with --pairs"),
        (("--labels", "none.jsonl"), "cannot be read"),
        (("--judge", "demo"), "named twice"),
    ],
)
def test_what_cannot_be_judged(
    tmp_path: Path, treegen: Command, no_weights: None, flags: tuple[str, ...], message: str
) -> None:
    run = small_run(tmp_path / "run", problems=2, samples=1)
    if message != "named twice":
        assert message in treegen("judge", run, "--judge", "demo", *flags).error
    with pytest.raises(InputError, match="has no judgements"):
        __import__("treegen").judgings(run)
    error = treegen("judge", run, "--rubric", "rating").error
    assert "has no judgements; pass a model with --judge" in error
    assert "has no effect on stored judgements" in treegen("judge", run, "--wordings", "2").error


def test_answers_that_changed_are_not_mixed(tmp_path: Path, llm: treegen.LLM) -> None:
    run, rubric = small_run(tmp_path / "run"), rubric_file(tmp_path)
    treegen.judge(run, rubric, llm, wordings=1, progress=False)
    samples = run / "samples.jsonl"
    kept = [json.loads(line) for line in samples.read_text().splitlines()]
    samples.write_bytes(b"")
    with RunDir.open(run) as opened:
        info = opened.info
    from treegen.runs.record_format import encode_record

    for record in kept:
        record.pop("crc")
        record["text"] += " or so"
    samples.write_bytes(b"".join(map(encode_record, kept)))
    assert info.problem_ids
    with pytest.raises(RunError, match="have changed since they were judged"):
        treegen.judge(run, rubric, llm, wordings=2, progress=False)


def test_a_choice_that_begins_another_does_not_have_its_chance() -> None:
    logs = [math.log(p) for p in (0.5, 0.2, 0.1, 0.05)]
    found = exclusive_logprob(logs, [[1], [1, 0], [1, 0, 0], [2]])
    assert [math.exp(each) for each in found] == pytest.approx([0.3, 0.1, 0.1, 0.05])
    assert num_distinct([]) == 0


def test_notices_stand_below_the_means_wherever_they_are_shown(
    tmp_path: Path, treegen: Command, no_weights: None, llm: object
) -> None:
    import treegen as library

    run = small_run(tmp_path / "run")
    found = library.judge(run, rubric_file(tmp_path), llm, progress=False)  # type: ignore[arg-type]
    (summary,) = found.summaries
    notice = next(line for line in summary.notices if "not reliable" in line)
    assert "instruction-tuned" in notice and "--verdicts samples" in notice
    line = f"{notice[0].upper()}{notice[1:]}."
    for text in (str(found), treegen("judge", run).out, treegen("show", run).out):
        head, _, tail = text.partition(line)
        assert head.count("Judged by brief") == 1 and "Verdicts: brief" not in head
        assert tail.lstrip().startswith("There is only one judge") and "Verdicts: brief" in tail
    page = library.open_run(run).report().read_text()
    assert page.index(">Judged by brief (0 to 1)") < page.index("so its verdicts are not reliable")
    assert treegen("show", run).document["judged"][0]["tables"][0]["lines"][0] == line


def test_labels_say_what_they_do_not_decide(
    tmp_path: Path, treegen: Command, llm: object, no_weights: None
) -> None:
    import treegen as library

    run = small_run(tmp_path / "run")
    library.judge(run, rubric_file(tmp_path), llm, progress=False)  # type: ignore[arg-type]
    rows = [{"problem_id": f"p{i}", "sample_index": 0, "label": i % 2} for i in range(6)]
    labels = write_jsonl(tmp_path / "labels.jsonl", rows)
    shown = treegen("judge", run, "--labels", labels, "--half-width", "0.2").out
    corrected = shown[shown.index("Corrected by the labels of 4 of 4 problems") :]
    assert "With fewer than 10 labelled problems, treegen uses the labels alone" in corrected
    assert "Labels that treegen ignores, because nobody judged the answer: 2." in corrected
    assert corrected.index("needed for a mean") < corrected.index("do not consider the labels")
    assert "labels" not in treegen("judge", run, "--half-width", "0.2").out


def test_unreadable_verdicts_are_shown_with_their_file(tmp_path: Path, llm: object) -> None:
    import treegen as library

    run = small_run(tmp_path / "run", problems=2, samples=1)
    how = {"repeats": 1, "max_tokens": 4, "progress": False}  # repeats imply samples
    found = library.judge(run, rubric_file(tmp_path), llm, **how)  # type: ignore[arg-type]
    (summary,) = found.summaries
    (notice,) = [line for line in summary.notices if "unreadable" in line]
    file = f"judged/{summary.judged[0].judging.name}/judgements.jsonl"
    assert "treegen expects the last line 'Verdict: X', where X is one of " in notice
    num_cut = sum(judgement.truncated for judgement in summary.judged[0].judgements)
    assert f"; {num_cut} of these texts are cut off after --max-tokens 4" in notice
    assert "the first of these texts ends with '" in notice
    assert file in notice and (run / file).exists()
    assert notice[1:] in str(found)


def test_undefined_agreement_has_its_reason() -> None:
    rows = [(("wordings", None, None, 4), 3), (("a and b", None, 0.5, 4), 2)]
    table = make_agreement_table("brief", rows)
    assert [line.split(" is n/a ")[0] for line in table.lines] == [
        "Cohen's kappa",
        "Cohen's kappa",
        "Krippendorff's alpha",
    ]
    assert "more than two" in table.lines[0] and "both raters" in table.lines[1]
    defined = [(("wordings", 0.1, 0.2, 4), 2)]
    assert make_agreement_table("brief", defined).lines == ()


def test_a_judge_is_left_out_by_naming_the_others_and_removed_with_its_folder(
    tmp_path: Path, tiny: Path, treegen: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    import treegen as library

    run, rubric = small_run(tmp_path / "run", problems=2, samples=1), rubric_file(tmp_path)
    jury = ("--judge", "demo", "--judge", tiny)
    treegen("judge", run, "--rubric", rubric, *jury, *SMALL)
    monkeypatch.setattr(JudgeLoader, "get", lambda *_: pytest.fail("a judge was loaded"))
    alone = treegen("judge", run, "--rubric", rubric, "--judge", "demo", *SMALL).document
    assert alone["summaries"][0]["judges"] == ["demo"]
    (both,) = library.judgings(run).summaries
    assert len(both.judged) == 2
    shutil.rmtree(run / FOLDER / both.judged[1].judging.name)
    (left,) = treegen("show", run).document["judged"]
    assert left["judges"] == [both.judged[0].judging.judge]


@pytest.mark.parametrize(
    ("labelled", "problems", "weight", "reason"),
    [
        (9, 20, 0.0, "With fewer than 10 labelled problems"),
        (12, 12, 0.0, "Because all problems have labels"),
        (12, 20, 0.0, "Because the judges' values do not increase with the labels"),
        (12, 20, 0.5, ""),
    ],
)
def test_labels_alone_have_their_reason(
    labelled: int, problems: int, weight: float, reason: str
) -> None:
    numbers = dict.fromkeys(
        ("value", "stderr", "low", "high", "judge", "bias", "labels", "labels_low", "labels_high"),
        0.5,
    )
    corrected = CorrectedMean(**numbers, weight=weight, labelled=labelled, problems=problems)
    table = make_corrected_table(corrected, 0)
    assert [line.split(",")[0] for line in table.lines] == [reason] * bool(reason)
