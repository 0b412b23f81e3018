"""treegen as a model of lm-evaluation-harness, against lm-eval's own `hf` on the same weights."""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import lm_eval_tasks
import pytest
import tiny_models
import torch
from lm_eval_kinds import folder as folder

from treegen import LLM, Node, from_module
from treegen.demo import model_path
from treegen.errors import CapacityError, InputError, ModelWarning, RunError

lm_eval = pytest.importorskip("lm_eval", "0.4")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.model import CachingLM  # noqa: E402
from lm_eval.api.registry import Registry  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from treegen.integrations.lm_eval import TreegenLM  # noqa: E402
from treegen.integrations.lm_eval.__main__ import main  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_environment")

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('none') }}{% endif %}"
    "[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MEMORY = "64MiB"


@pytest.fixture(scope="module")
def demo() -> LLM:
    return LLM("demo", device="cpu", dtype="float32", memory="256MiB", check=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint whose tokenizer has a chat template and a window of 96 tokens."""
    path = tiny_models.save_tiny_model(
        tmp_path_factory.mktemp("tiny"), seed=3, max_position_embeddings=96
    )
    tokenizer = tiny_models.tiny_tokenizer()
    (path / "chat_template.jinja").write_text(TEMPLATE)
    assert tokenizer.eos_token == "</s>"
    return path


@pytest.fixture(scope="module")
def tiny_llm(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint), device="cpu", memory=MEMORY, check=False)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lm_eval_tasks.write_tasks(tmp_path_factory.mktemp("tasks"), limit=3, greedy=True)


def evaluate(model: Any, tasks: Path, *names: str, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model=model,
        tasks=list(names),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        **options,
    )
    return found


def hf(path: Path, **options: Any) -> Any:
    return HFLM(pretrained=str(path), dtype="float32", device="cpu", batch_size=8, **options)


def assert_equal(got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    """Requests and texts are equal, log-likelihoods and scores within 1e-3."""
    assert got["results"].keys() == want["results"].keys()
    for task, scores in want["results"].items():
        numbers = {name: value for name, value in scores.items() if isinstance(value, float)}
        assert numbers
        close = {name: pytest.approx(value, rel=1e-5) for name, value in numbers.items()}
        assert {name: got["results"][task][name] for name in numbers} == close
        pairs = list(zip(got["samples"][task], want["samples"][task], strict=True))
        assert pairs
        for one, other in pairs:
            assert one["arguments"] == other["arguments"]
            assert _flat(one["resps"]) == [
                pytest.approx(value, abs=1e-3) if isinstance(value, float) else value
                for value in _flat(other["resps"])
            ]


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in _flat(each)]
    return [value]


def request(context: str, gen_kwargs: Mapping[str, Any]) -> Instance:
    return Instance("generate_until", {}, (context, dict(gen_kwargs)), 0)


# Equal to lm-eval's own model


@pytest.mark.soak
def test_requests_and_scores_of_lm_evals_tasks_equal_those_of_hf(demo: LLM, tasks: Path) -> None:
    names = lm_eval_tasks.task_names()
    options: dict[str, Any] = {"gen_kwargs": {"max_gen_toks": 90}}
    actual = evaluate(TreegenLM(demo), tasks, *names, **options)
    expected = evaluate(hf(model_path()), tasks, *names, **options)
    assert_equal(actual, expected)
    assert actual["results"]["local_gsm8k_cot"]["exact_match,strict-match"] > 0
    assert actual["max_length"] == expected["max_length"] == 4096


@pytest.mark.parametrize("add_bos_token", [None, True])
def test_long_prompts_and_texts_are_cut_as_by_hf(
    demo: LLM, tasks: Path, add_bos_token: bool | None
) -> None:
    names = ["local_gsm8k_cot", "local_hellaswag", "local_wikitext"]
    arguments: dict[str, Any] = {"max_length": 128, "add_bos_token": add_bos_token}
    options: dict[str, Any] = {"gen_kwargs": {"max_gen_toks": 20}, "limit": 2}
    ours = evaluate(TreegenLM(demo, **arguments), tasks, *names, **options)
    assert_equal(ours, evaluate(hf(model_path(), **arguments), tasks, *names, **options))


@pytest.mark.parametrize("fewshot_as_multiturn", [True, False])
def test_chats_are_those_of_hf(
    tiny_llm: LLM, checkpoint: Path, tasks: Path, fewshot_as_multiturn: bool
) -> None:
    options: dict[str, Any] = {
        "apply_chat_template": True,
        "fewshot_as_multiturn": fewshot_as_multiturn,
        "system_instruction": "Be brief.",  # The template refuses it.
        "num_fewshot": 1,
        "gen_kwargs": {"max_gen_toks": 12},
        "limit": 2,
    }
    names = ["local_gsm8k_cot", "local_mmlu"]
    ours = evaluate(TreegenLM(tiny_llm), tasks, *names, **options)
    assert_equal(ours, evaluate(hf(checkpoint), tasks, *names, **options))
    prompt = ours["samples"]["local_gsm8k_cot"][0]["arguments"][0][0]
    assert "[user]" in prompt and prompt.endswith("[assistant]")


def test_texts_at_the_edges_are_scored_as_by_hf(tiny_llm: LLM, checkpoint: Path) -> None:
    # With its cache of logits, hf takes the wrong positions for texts that two contexts split.
    ours, stock = TreegenLM(tiny_llm), hf(checkpoint, logits_cache=False)
    pairs = [
        ("", "word"),
        ("<s>one", " two"),
        ("one ", "two"),
        ("a" * 300, " b"),
        ("x", " y" * 40),
        ("<s>", "one two"),
        ("same", " a"),
        ("same", " a"),
        ("same", " a b"),
    ]
    scored = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    got, want = ours.loglikelihood(scored), stock.loglikelihood(scored)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in want]
    assert [value for value, _ in got] == pytest.approx([value for value, _ in want], abs=1e-3)
    texts = ["", "one", "<s>one", "a b c " * 5, "some words, and then more " * 30]
    rolled = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts]
    got, want = ours.loglikelihood_rolling(rolled), stock.loglikelihood_rolling(rolled)
    assert got == pytest.approx(want, abs=1e-3)
    with pytest.raises(CapacityError, match="a continuation has"):
        ours.loglikelihood([Instance("loglikelihood", {}, ("a", " b" * 400), 0)])


def test_stop_strings_and_thoughts_are_cut_as_by_hf(tiny_llm: LLM, checkpoint: Path) -> None:
    texts = ["one two", "the", "a long way", "<s>again", "stop"]
    requests = [
        request(text, {"until": until, "max_gen_toks": 24})
        for text in texts
        for until in (["e"], ["\n", "a", "</s>"], [], "th")
    ]
    assert TreegenLM(tiny_llm).generate_until(requests) == hf(checkpoint).generate_until(requests)
    whole = [request(text, {"max_gen_toks": 24}) for text in texts]
    for thinking in ("o", tiny_llm.tokenizer.encode("o")[0]):
        ours = TreegenLM(tiny_llm, think_end_token=thinking)
        answers = ours.generate_until(whole)
        assert answers == hf(checkpoint, think_end_token=thinking).generate_until(whole)
        # Stop strings cut the answer, and not the thoughts before it.
        until = [request(text, {"max_gen_toks": 24, "until": "i"}) for text in texts]
        assert ours.generate_until(until) == [answer.split("i")[0] for answer in answers]


def test_what_thinks_scores_no_continuations(tiny_llm: LLM) -> None:
    pairs = [Instance("loglikelihood", {}, ("a", " b"), 0)]
    lm = TreegenLM(tiny_llm, enable_thinking=True, think_end_token="o")
    with pytest.raises(InputError, match="enable_thinking"):
        lm.loglikelihood(pairs)
    TreegenLM(tiny_llm, enable_thinking=False).loglikelihood(pairs)


@pytest.mark.parametrize(
    ("family", "add_bos_token"),
    [("llama", True), ("qwen3", None), ("gemma2", False), ("gpt2", True), ("mistral_swa", None)],
)
def test_any_mixture_of_requests_is_answered_as_by_hf(
    family: str, add_bos_token: bool | None, tmp_path: Path
) -> None:
    path = tiny_models.save_tiny_model(tmp_path, family, seed=1)
    arguments: dict[str, Any] = {"max_length": 56, "add_bos_token": add_bos_token}
    llm = LLM(str(path), device="cpu", memory="32MiB", check=False)
    # Gemma 2's soft cap is lost with torch's attention in transformers 5.17.
    exact = {**arguments, "logits_cache": False, "attn_implementation": "eager"}
    ours, stock = TreegenLM(llm, **arguments), hf(path, **exact)
    letters = "the quick brown fox it was a dark and <s> </s> stormy night 12 \xe9 \u6f22"
    words = [*letters.split(), "\n"]

    def text(most: int) -> str:
        return " ".join(random.choices(words, k=random.randint(1, most)))

    prefixes = [text(20) for _ in range(4)]
    stops: list[Any] = [[], ["e"], ["\n", "th"], ["</s>"], "qu"]
    requests = [
        request(
            random.choice(prefixes) + random.choice(["", " ", "\n", text(5)]),
            {"until": random.choice(stops), "max_gen_toks": random.choice([3, 9, 20])},
        )
        for _ in range(30)
    ]
    assert ours.generate_until(requests) == stock.generate_until(requests)
    pairs = [
        (random.choice([*prefixes, ""]), random.choice([" ", ""]) + text(6)) for _ in range(30)
    ]
    scored = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    got, want = ours.loglikelihood(scored), stock.loglikelihood(scored)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in want]
    assert [value for value, _ in got] == pytest.approx([value for value, _ in want], abs=1e-3)
    rolled = [Instance("loglikelihood_rolling", {}, (text(60),), 0) for _ in range(8)]
    expected = stock.loglikelihood_rolling(rolled)
    assert ours.loglikelihood_rolling(rolled) == pytest.approx(expected, abs=1e-3)


# Samples


def test_repeats_are_samples_of_one_prompt(
    demo: LLM, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees: list[Node] = []
    stream = demo.stream

    def spied(tree: Node, *arguments: Any, **options: Any) -> Any:
        trees.append(tree)
        return stream(tree, *arguments, **options)

    monkeypatch.setattr(demo, "stream", spied)
    drawn = lm_eval_tasks.write_tasks(tmp_path, limit=2)
    options: dict[str, Any] = {"gen_kwargs": {"temperature": 1.0, "max_gen_toks": 24}}
    names = ["local_gsm8k_cot_self_consistency", "local_gsm8k_cot"]
    (again, first) = (evaluate(TreegenLM(demo), drawn, *names, **options) for _ in range(2))
    for task in names:
        assert [s["resps"] for s in first["samples"][task]] == [
            s["resps"] for s in again["samples"][task]
        ]
    (answers,) = first["samples"][names[0]][0]["resps"]
    assert len(answers) == 8 and len(set(answers)) > 4
    # One tree holds the requests of both tasks, whose settings differ.
    assert [sorted(child.samples or 0 for child in tree.children) for tree in trees] == [
        [1, 1, 8, 8],
        [1, 1, 8, 8],
    ]
    other = evaluate(TreegenLM(demo, seed=1), drawn, names[0], **options)
    assert other["samples"][names[0]][0]["resps"] != first["samples"][names[0]][0]["resps"]


def test_requests_with_other_settings_keep_their_order(tiny_llm: LLM) -> None:
    lm = TreegenLM(tiny_llm, max_gen_toks=9)
    greedy, drawn = {"until": ["q"]}, {"do_sample": True, "temperature": 2.0, "top_p": 0.9}
    requests = [
        request(text, {**kwargs, **length})
        for text in ("one", "two", "one")
        for kwargs in (greedy, drawn, {**drawn, "seed": 5, "top_k": -1, "until": None})
        for length in ({}, {"max_tokens": 4})
    ]
    together = lm.generate_until(requests)
    for each in requests:
        context, kwargs = each.args
        same = [at for at, other in enumerate(requests) if other.args == each.args]
        alone = lm.generate_until([request(context, kwargs)] * len(same))
        assert alone == [together[at] for at in same]
    # The first and the third text are equal: greedy answers are too, drawn ones are not.
    assert together[:2] == together[12:14] and together[2] != together[14]
    # Two names of one setting make one prompt.
    names = ["max_tokens", "max_gen_toks"]
    twice = [request("one", {**drawn, name: 4}) for name in names]
    assert lm.generate_until(twice) == lm.generate_until(twice[:1] * 2)


@pytest.mark.parametrize(
    ("gen_kwargs", "named"),
    [
        ({"num_beams": 4}, "num_beams=4"),
        ({"num_beams": 2, "typical_p": 0.5}, "num_beams=2, typical_p=0.5"),
        ({"repetition_penalty": -1}, "repetition_penalty must be"),
        ({"max_length": 40}, "max_length=40"),
        ({"nonsense": "x"}, "nonsense='x'"),
        ({"do_sample": True, "temperature": -1}, "temperature must be"),
        ({"temperature": "hot"}, "cannot be read"),
        ({"until": [3]}, "stop strings must be"),
        ({"max_gen_toks": 96}, "leaves no room for a prompt"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    tiny_llm: LLM, gen_kwargs: dict[str, Any], named: str
) -> None:
    lm = TreegenLM(tiny_llm, max_gen_toks=8)
    with pytest.raises(InputError, match=named.replace(".", r"\.")):
        lm.generate_until([request("fine", {}), request("one", gen_kwargs)])


def test_what_the_checkpoint_recommends_is_taken_if_asked_for(checkpoint: Path) -> None:
    file = checkpoint / "generation_config.json"
    before = file.read_text() if file.exists() else None
    try:
        file.write_text(json.dumps({"temperature": 0.3, "top_k": 4, "repetition_penalty": 1.1}))
        llm = LLM(str(checkpoint), memory="8MiB", check=False)
    finally:
        file.write_text(before or "{}")
    with pytest.warns(ModelWarning, match="without do_sample, transformers decodes greedily"):
        lm = TreegenLM(llm, sampling="recommended", max_gen_toks=8)
    drawn = lm._prompt("one", {"do_sample": True, "top_k": 7})[1].params
    assert (drawn.temperature, drawn.top_k, drawn.repetition_penalty) == (0.3, 7, 1.1)
    greedy = lm._prompt("one", {})[1].params
    assert (greedy.temperature, greedy.repetition_penalty) == (0, 1.1)
    plain = (
        TreegenLM(llm, max_gen_toks=8)
        ._prompt("one", {"do_sample": True, "temperature": 1.0})[1]
        .params
    )
    assert (plain.top_k, plain.repetition_penalty) == (0, 1)
    with pytest.raises(InputError, match="sampling must be neutral or recommended"):
        TreegenLM(llm, sampling="best")


def test_settings_that_change_nothing_are_taken(tiny_llm: LLM) -> None:
    lm = TreegenLM(tiny_llm, max_gen_toks=6)
    neutral = {"num_beams": 1, "repetition_penalty": 1.0, "use_cache": True, "top_p": None}
    assert lm.generate_until([request("one", neutral)]) == lm.generate_until([request("one", {})])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"peft": "x", "load_in_4bit": True}, "unknown names: load_in_4bit, peft"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"max_gen_toks": 0}, "max_gen_toks must be at least 1"),
        ({"max_length": 1}, "max_length must be at least 2"),
        ({"enable_thinking": True}, "enable_thinking requires think_end_token"),
        ({"impl": "magic"}, "magic"),
    ],
)
def test_bad_arguments_are_refused_before_a_model_is_loaded(
    checkpoint: Path, arguments: dict[str, Any], named: str, no_weights: None
) -> None:
    with pytest.raises(InputError, match=named):
        TreegenLM.create_from_arg_obj({"pretrained": str(checkpoint), **arguments}, {})


def test_the_device_that_lm_evals_command_names_by_itself_needs_no_gpu(checkpoint: Path) -> None:
    options = {"pretrained": str(checkpoint), "memory": "1MiB", "check": False}
    lm = TreegenLM.create_from_arg_obj(options, {"device": "cuda:0", "batch_size": 1})
    assert lm.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_arguments_that_a_loaded_model_cannot_take_are_refused(tiny_llm: LLM) -> None:
    with pytest.raises(InputError, match="max_length=97 exceeds the model's context length of 96"):
        TreegenLM(tiny_llm, max_length=97)
    with pytest.raises(InputError, match="the LLM is already loaded, so dtype"):
        TreegenLM(tiny_llm, dtype="float32")


# Caches


def test_lm_evals_own_cache_holds_every_kind_of_answer(
    tiny_llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = {
        "loglikelihood": [Instance("loglikelihood", {}, ("a", f" {n}"), 0) for n in "bcd"],
        "loglikelihood_rolling": [Instance("loglikelihood_rolling", {}, ("a b c",), 0)],
        "generate_until": [request(text, {"max_gen_toks": 5}) for text in "ab"],
    }
    first: dict[str, Any] = {}
    for wrapped in (TreegenLM(tiny_llm), None):
        lm = TreegenLM(tiny_llm) if wrapped is None else wrapped
        cached = CachingLM(lm, str(tmp_path / "cache.db"))
        if wrapped is None:  # What is cached asks nothing of the model.
            monkeypatch.setattr(lm, "_answers", None)
        answers = {kind: getattr(cached, kind)(instances) for kind, instances in requests.items()}
        cached.dbdict.close()
        first = first or answers
        assert answers == first


@pytest.fixture
def counted(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many samples or scores each run of the model gave."""
    counts: list[int] = []
    for name in ("stream", "score_stream"):
        original = getattr(tiny_llm, name)

        def spied(*arguments: Any, original: Any = original, **options: Any) -> Any:
            found = original(*arguments, **options)
            counts.append(0)
            step = type(found).__next__

            class Counted(type(found)):  # type: ignore[misc]
                def __next__(self) -> Any:
                    item = step(self)
                    counts[-1] += 1
                    return item

            found.__class__ = Counted
            return found

        monkeypatch.setattr(tiny_llm, name, spied)
    yield counts


def test_a_journal_holds_every_kind_of_answer(
    tiny_llm: LLM, tmp_path: Path, counted: list[int]
) -> None:
    drawn = {"do_sample": True, "temperature": 1.5, "max_gen_toks": 6}
    pairs = [Instance("loglikelihood", {}, ("a", f" {n}"), 0) for n in "bcdb"]
    texts = [Instance("loglikelihood_rolling", {}, ("a b c " * n,), 0) for n in (1, 50)]
    requests = [request(text, drawn) for text in "abaca"]
    plain = TreegenLM(tiny_llm)
    want = [plain.loglikelihood(pairs), plain.loglikelihood_rolling(texts)]
    want.append(plain.generate_until(requests))
    counted.clear()
    lm = TreegenLM(tiny_llm, cache=str(tmp_path / "kept"))
    # A part first, as if the run had been stopped or limited.
    assert lm.generate_until(requests[:2]) == want[2][:2]
    # Other scores in a pass may change the last bit of a log-likelihood, not what is kept.
    first = lm.loglikelihood(pairs[:2])
    assert counted == [2, 2]
    again = TreegenLM(tiny_llm, cache=str(tmp_path / "kept"))
    found = again.loglikelihood(pairs)
    assert found[:2] == first
    assert [greedy for _, greedy in found] == [greedy for _, greedy in want[0]]
    assert [value for value, _ in found] == pytest.approx([v for v, _ in want[0]], abs=1e-5)
    assert again.loglikelihood_rolling(texts) == pytest.approx(want[1], abs=1e-4)
    assert again.generate_until(requests) == want[2]
    num_windows = counted[3]
    assert counted == [2, 2, 1, num_windows, 3]
    assert again.generate_until(requests) == want[2] and len(counted) == 5
    # Another seed is another sample.
    other = TreegenLM(tiny_llm, cache=str(tmp_path / "kept"), seed=9).generate_until(requests)
    assert other != want[2] and counted[5:] == [5]
    (folder,) = (tmp_path / "kept").iterdir()
    assert json.loads((folder / "model.json").read_text())["model_dtype"] == "torch.float32"


def test_answers_of_rounded_numbers_are_kept_apart(checkpoint: Path, tmp_path: Path) -> None:
    usual: dict[str, Any] = {"memory": MEMORY, "device": "cpu", "check": False}
    for rounded in ({}, {"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}, {"max_rows": 5}):
        TreegenLM(str(checkpoint), cache=str(tmp_path), **usual, **rounded)
    kept = [json.loads(file.read_text()) for file in tmp_path.glob("*/model.json")]
    assert len(kept) == 3
    rest = ("model_fingerprint", "model_dtype", "treegen_version")
    assert sorted(str({k: v for k, v in each.items() if k not in rest}) for each in kept) == [
        "{'model_kv_cache_dtype': 'fp8'}",
        "{'model_quantization': 'fp8'}",
        "{}",
    ]


def test_a_torn_journal_is_mended_and_a_corrupt_one_refused(
    tiny_llm: LLM, tmp_path: Path, counted: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    requests = [request(text, {"max_gen_toks": 6}) for text in "abcd"]
    lm = TreegenLM(tiny_llm, cache=str(tmp_path))
    want = lm.generate_until(requests)
    (file,) = tmp_path.glob("*/samples.jsonl")
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    assert lm.generate_until(requests) == want and counted == [4, 1]
    assert "was unfinished" in caplog.text
    # Drawn alone, a sample's log-probabilities may differ in their last digit.
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 4 and lines[:3] == whole.splitlines(keepends=True)[:3]
    assert lines[3].endswith(b"}\n")
    file.write_bytes(b"{}\n" + whole)
    with pytest.raises(RunError, match="delete this line and run the same command again"):
        lm.generate_until(requests)


def test_a_journal_that_cannot_be_used_is_refused(
    tiny_llm: LLM, tmp_path: Path, no_weights: None
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot make the directory"):
        TreegenLM("nowhere", cache=str(tmp_path / "file"))
    lm = TreegenLM(tiny_llm, cache=str(tmp_path / "kept"))
    assert lm._answers._journal is not None
    with (
        lm._answers._journal.open("samples"),
        pytest.raises(RunError, match="is in use by process"),
    ):
        TreegenLM(tiny_llm, cache=str(tmp_path / "kept"))
    module = tiny_llm.model.module
    loaded = LLM(from_module(module, check=False), tokenizer=tiny_llm.tokenizer, memory="1MiB")
    with pytest.raises(InputError, match="has no fingerprint"):
        TreegenLM(loaded, cache=str(tmp_path / "kept"))


# Found by lm-eval


def test_lm_eval_finds_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lm_eval.api.registry.get_model("treegen") is TreegenLM
    assert lm_eval.api.registry.get_model("hf") is HFLM
    # Versions that look for plug-ins register the entry point as it stands.
    (entry,) = entry_points(group="lm_eval.models", name="treegen")
    registry: Any = Registry("model")
    registry.register("treegen", target=entry)
    assert registry.get("treegen") is TreegenLM


def test_without_lm_eval_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['lm_eval'] = None; import treegen.integrations.lm_eval"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install '.[lm-eval]'" in done.stderr.splitlines()[-1]
    assert "torch" not in done.stderr


# The command


def command(folder: Path, *arguments: object) -> list[str]:
    return [
        *(sys.executable, "-m", "treegen.integrations.lm_eval", "run", "--model", "treegen"),
        *("--include_path", str(folder), *map(str, arguments)),
    ]


def environment() -> dict[str, str]:
    return {**os.environ, "LMEVAL_LOG_LEVEL": "ERROR"}


def results_of(output: Path) -> tuple[dict[str, Any], list[Any]]:
    """The scores and the samples that the command has written."""
    (results,) = output.rglob("results_*.json")
    lines = [
        json.loads(line)
        for file in sorted(output.rglob("samples_*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    samples = [(line["doc_id"], line["filter"], line["arguments"], line["resps"]) for line in lines]
    scores: dict[str, Any] = json.loads(results.read_text())["results"]
    return scores, sorted(samples, key=str)


@pytest.mark.soak
def test_a_killed_command_goes_on_from_its_journal(tmp_path: Path) -> None:
    drawn = lm_eval_tasks.write_tasks(tmp_path / "tasks", limit=2)
    kept = tmp_path / "kept"
    arguments = shlex.split(
        f"--model_args pretrained=demo,dtype=float32,check=False,cache={kept} --device cpu"
        " --tasks local_gsm8k_cot_self_consistency,local_mmlu --log_samples"
        " --gen_kwargs temperature=1.0,max_gen_toks=60"
    )
    lines = command(drawn, *arguments, "--output_path", tmp_path / "first")
    process = subprocess.Popen(
        lines, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while process.poll() is None:
        files = list(kept.glob("*/samples.jsonl"))
        if files and files[0].read_bytes().count(b"\n") >= 3:
            process.kill()
        time.sleep(0.01)
    process.wait()
    (file,) = kept.glob("*/samples.jsonl")
    before = file.read_bytes()
    assert 3 <= before.count(b"\n") < 16
    again = command(drawn, *arguments, "--output_path", tmp_path / "again")
    done = subprocess.run(again, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "local_gsm8k_cot_self_consistency" in done.stdout and "maj@8" in done.stdout
    # What was drawn before the end is still there, and nothing was drawn twice.
    whole = file.read_bytes()
    assert whole.startswith(before[: before.rindex(b"\n") + 1]) and whole.count(b"\n") == 16
    fresh = TreegenLM("demo", device="cpu", dtype="float32", check=False)
    names = ["local_gsm8k_cot_self_consistency", "local_mmlu"]
    settings = {"temperature": 1.0, "max_gen_toks": 60}
    undisturbed = evaluate(fresh, drawn, *names, gen_kwargs=settings)
    scores, samples = results_of(tmp_path / "again")
    for task in names:
        for name, value in undisturbed["results"][task].items():
            if "stderr" not in name:
                expected = pytest.approx(value) if isinstance(value, float) else value
                assert scores[task][name] == expected
    texts = [resps for _, _, _, resps in samples if len(resps[0]) == 8]
    assert sorted(map(str, texts)) == sorted(
        str(sample["resps"]) for sample in undisturbed["samples"][names[0]]
    )


@pytest.mark.soak  # lm-eval reads all its tasks first
def test_the_command_ends_in_one_line_for_what_the_user_can_mend(
    tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = command(tasks, "--model_args", "pretrained=demo,peft=x", "--tasks", "local_mmlu")
    monkeypatch.setattr(sys, "argv", ["lm_eval", *lines[3:]])
    assert main() == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("Error: model_args have unknown names: peft")
