"""Reward models: a tiny random sequence classifier against transformers itself."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import HistoryModel
from live_search import backend_of, run_of
from tiny_models import config_of, save_drawn, tiny_tokenizer
from toy_search import hashed, run, start
from transformers import (
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
)

from treegen.errors import CapacityError, InputError, ModelError, ModelWarning
from treegen.search import reward
from treegen.search.propose import sample_steps
from treegen.search.reward import by_verifier, load_verifier, reward_model
from treegen.search.strategies.beam import beam, dvts
from treegen.search.strategies.best_of_n import best_of_n
from treegen.search.strategies.majority import vote
from treegen.search.tree.node import Search, SearchNode
from treegen.search.tree.result import SearchOutcome


def save(
    folder: Path,
    num_labels: int = 1,
    *,
    kind: Any = LlamaForSequenceClassification,
    pad: bool = True,
    length: int = 64,
) -> Any:
    sizes = {"max_position_embeddings": length, "num_labels": num_labels}
    model = kind(config_of("llama", **sizes, pad_token_id=2 if pad else None))
    save_drawn(model, folder, seed=random.randrange(1000))
    if not pad:
        settings = (folder / "tokenizer_config.json").read_text(encoding="utf-8")
        settings = settings.replace('"pad_token": "<pad>"', '"pad_token": null')
        (folder / "tokenizer_config.json").write_text(settings, encoding="utf-8")
    return model


def rewards(evaluate: Any, texts: list[str]) -> list[float]:
    search, _ = start(hashed("abc"), "a")
    nodes = [search.root.extend(text) for text in texts]
    values: list[float] = asyncio.run(evaluate(nodes))
    return values


@pytest.mark.parametrize("num_labels", [1, 2, 3])
@pytest.mark.parametrize("pad", [True, False])
def test_rewards_are_those_of_each_text_alone(tmp_path: Path, num_labels: int, pad: bool) -> None:
    model = save(tmp_path, num_labels, pad=pad)
    texts = ["b" * random.randint(1, 40) + "c" * random.randint(0, 9) for _ in range(11)]
    values = rewards(reward_model(tmp_path, batch_size=4, device="cpu"), texts)
    for text, value in zip(texts, values, strict=True):
        ids = torch.tensor([tiny_tokenizer()("a" + text)["input_ids"]])
        with torch.inference_mode():
            logits = model(input_ids=ids).logits[0]
        expected = logits.sigmoid()[0] if num_labels == 1 else logits.softmax(0)[-1]
        assert value == pytest.approx(float(expected), abs=1e-5)
    assert len(set(values)) > 1
    if num_labels > 1:
        first = rewards(reward_model(tmp_path, label=0, device="cpu"), texts)
        assert first != values
    with pytest.raises(InputError, match="label"):
        reward_model(tmp_path, label=num_labels)


def test_best_of_n_by_a_reward_model(tmp_path: Path) -> None:
    save(tmp_path)
    evaluate = reward_model(tmp_path, text_of=lambda node: node.path_text, device="cpu")

    async def fn(root: SearchNode) -> SearchOutcome:
        return await best_of_n(root, 12, evaluate, max_tokens=10)

    result = run(start(hashed("abc"), "a")[0], fn)
    values = [result.tree.nodes[index].score for index in result.candidates]
    assert values == sorted(values, key=lambda value: -(value or 0)) and len(values) == 12


@pytest.mark.parametrize("reduce", ["last", "product"])
def test_searches_are_judged_together_as_they_are_alone(tmp_path: Path, reduce: str) -> None:
    save(tmp_path, 2, kind=LlamaForTokenClassification, length=400)
    options: dict[str, Any] = {"device": "cpu", "separator": "d", "reduce": reduce}
    judge, own = (load_verifier(tmp_path, share=each, **options) for each in (True, False))
    sizes: list[int] = []

    class Counting:
        def score_prefixes(self, rows: Any, ends: Any) -> list[list[float]]:
            sizes.append(len(rows))
            assert judge.reader is not None
            return judge.reader.score_prefixes(rows, ends)

    evaluate = by_verifier(replace(judge, reader=Counting()), name="judge", batch_size=10**6)

    async def fn(root: SearchNode) -> SearchOutcome:
        propose = sample_steps(3, stop=(), max_tokens=3)
        if root.search.name in "01":
            found = await best_of_n(root, 6, evaluate, max_tokens=9)
            return vote(found, lambda node: node.text[:1], lambda node: node.value or 0.0)
        how = beam if root.search.name in "23" else dvts
        size: dict[str, Any] = {"width" if how is beam else "subtrees": 2}
        return await how(root, propose, evaluate, lambda n: n.depth == 3, depth=3, **size)

    backend = backend_of(HistoryModel(), max_rows=64)
    with run_of(backend, fn, 6) as run:
        results = {result.name: result for result in run}
    judged = 0
    for result in results.values():
        assert result.error is None
        tree, prompt = result.tree, result.tree.nodes[0].text
        scored = [node for node in tree.nodes[1:] if node.scores]
        want = own.scores([(prompt, tree.path_text(node.id)) for node in scored])
        assert [node.scores["judge"] for node in scored] == pytest.approx(want, abs=6e-5)
        assert all(node.score == node.scores["judge"] for node in scored)
        judged += len(scored)
    assert sum(sizes) == judged and len(sizes) <= 4
    votes = results["0"].votes
    assert sum(votes.values()) == pytest.approx(
        sum(node.score or 0 for node in results["0"].tree.nodes), abs=1e-3
    )
    assert results["0"].answer == max(votes, key=lambda answer: votes[answer])


def test_smaller_batches_of_whole_texts_need_less_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advice of the error helps."""
    forward = LlamaForSequenceClassification.forward

    def forward_two(model: Any, input_ids: torch.Tensor, **inputs: Any) -> Any:
        if len(input_ids) > 2:
            raise torch.OutOfMemoryError
        return forward(model, input_ids, **inputs)

    def fail(*_: object) -> None:
        raise RuntimeError

    save(tmp_path)
    monkeypatch.setattr(reward, "_make_prefix_scorer", fail)
    monkeypatch.setattr(LlamaForSequenceClassification, "forward", forward_two)
    with pytest.warns(ModelWarning):
        large, small = (reward_model(tmp_path, batch_size=n, device="cpu") for n in (64, 2))
    with pytest.raises(CapacityError, match="lower batch_size= of the reward model, or give"):
        rewards(large, ["b", "bc", "c"])
    assert len(rewards(small, ["b", "bc", "c"])) == 3


def test_texts_that_are_too_long_are_refused(tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(InputError, match="the reward model accepts at most 64"):
        rewards(reward_model(tmp_path, device="cpu"), ["b"] * 3 + ["bc" * 90])


def test_other_models_are_refused(tmp_path: Path) -> None:
    save(tmp_path, kind=LlamaForCausalLM)
    with pytest.raises(ModelError, match="is not a sequence classifier"):
        reward_model(tmp_path)
    with pytest.raises(ModelError, match="does not exist"):
        reward_model("/no/such/model")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="can run code"):
        reward_model(tmp_path)


def test_a_prompt_of_token_ids_has_no_text(tmp_path: Path) -> None:
    save(tmp_path)
    evaluate = reward_model(tmp_path, device="cpu")
    backend = start(hashed("abc"))[1]
    search = Search(backend, [1, 2, 3], name="ids")
    with pytest.raises(InputError, match="token ids"):
        asyncio.run(evaluate([search.root.extend("b")]))  # type: ignore[arg-type]
