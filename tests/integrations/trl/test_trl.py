"""Rollouts of TRL's GRPOTrainer on its own module, while the weights change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_tiny_model, tiny_module, tiny_tokenizer
from transformers import PreTrainedModel

from treegen import LLM, InputError, SamplingParams, from_module
from treegen.integrations.trl import RolloutResult, Rollouts, WeightTransfer, rollout, tree_of
from treegen.model.load import patch_module

trl = pytest.importorskip("trl.trainer", reason="needs trl")
datasets = pytest.importorskip("datasets")

PROMPTS = ["Ann has 3 apples", "Ann has 14 apples and Bob", "Question:", "Answer: They"]


def state_of(module: torch.nn.Module) -> list[Any]:
    """All that training may depend on."""
    parts = [(part.training, sorted(vars(part))) for part in module.modules()]
    weights = [(each.requires_grad, each.data_ptr()) for each in module.parameters()]
    configs = [
        str(part.config._attn_implementation)
        for part in module.modules()
        if isinstance(part, PreTrainedModel)
    ]
    return [parts, weights, configs]


def trainer_of(
    module: Any, directory: Path, rollout_func: Any, reward: Any = None, **settings: Any
) -> Any:
    settings = {"max_steps": 3, "max_completion_length": 10, "learning_rate": 1e-2, **settings}
    args = trl.GRPOConfig(
        output_dir=str(directory),
        per_device_train_batch_size=8,
        num_generations=4,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
        **settings,
    )
    return trl.GRPOTrainer(
        model=module,
        args=args,
        train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
        reward_funcs=reward or (lambda completions, **_: [float(len(set(c))) for c in completions]),
        processing_class=tiny_tokenizer(),
        rollout_func=rollout_func,
    )


class Checked:
    """A rollout function that keeps its results, and what the model would have said."""

    def __init__(self, inner: Any = rollout) -> None:
        self.inner = inner
        self.results: list[RolloutResult] = []
        self.greedy: list[list[list[int]]] = []

    def __call__(self, prompts: Sequence[str], trainer: Any) -> RolloutResult:
        module = trainer.accelerator.unwrap_model(trainer.model)
        before = state_of(module)
        result: RolloutResult = self.inner(prompts, trainer)
        assert state_of(module) == before
        self.results.append(result)
        check_logprobs(module, result, trainer.temperature)
        return result


@torch.no_grad()
def check_logprobs(module: Any, result: RolloutResult, temperature: float) -> None:
    """They are the model's with the weights of now, scaled as TRL scales them."""
    was = module.training
    module.eval()
    for place, (before, after) in enumerate(
        zip(result["prompt_ids"], result["completion_ids"], strict=True)
    ):
        logits = module(input_ids=torch.tensor([before + after])).logits[0].double()
        logprobs = (logits / temperature).log_softmax(-1)
        at = torch.arange(len(before) - 1, len(before) + len(after) - 1)
        want = logprobs[at, torch.tensor(after)]
        assert torch.allclose(torch.tensor(result["logprobs"][place]).double(), want, atol=1e-4)
    module.train(was)


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning")
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_grpo_trains_on_the_rollouts(tmp_path: Path, gradient_checkpointing: bool) -> None:
    checked = Checked()
    module = tiny_module()
    first = [weight.clone() for weight in module.parameters()]
    trainer = trainer_of(
        module, tmp_path, checked, temperature=0.7, gradient_checkpointing=gradient_checkpointing
    )
    trainer.train()
    assert len(checked.results) == 3
    assert any(not torch.equal(a, b) for a, b in zip(first, module.parameters(), strict=True))
    for result in checked.results:
        assert len(result["completion_ids"]) == 8
        ids = result["prompt_ids"]
        assert len({tuple(each) for each in ids}) == 2  # each prompt comes four times
        assert len({tuple(each) for each in result["completion_ids"]}) > 4
        texts = [a + b for a, b in zip(ids, result["completion_ids"], strict=True)]
        check_tree(result, texts)
        assert result.tree.num_tokens < sum(map(len, texts))
    # A training that is run again has the same rollouts.
    again = Checked()
    trainer_of(
        tiny_module(),
        tmp_path,
        again,
        temperature=0.7,
        gradient_checkpointing=gradient_checkpointing,
    ).train()
    assert again.results[0] == checked.results[0]
    assert [each["completion_ids"] for each in again.results] == [
        each["completion_ids"] for each in checked.results
    ]


def check_tree(result: RolloutResult, texts: Sequence[Sequence[int]]) -> None:
    tree = result.tree
    for sample, text in enumerate(texts):
        path = tree.path(sample)
        assert [t for at in path for t in tree.segments[at].tokens] == list(text)
        for at, segment in enumerate(tree.segments):
            assert (sample in segment.samples) == (at in path)
            assert segment.parent is None or segment.parent < at
    for one in range(len(texts)):  # and nothing that two texts share is there twice
        for other in range(one):
            both = set(tree.path(one)) & set(tree.path(other))
            shared = next(
                (
                    at
                    for at, pair in enumerate(zip(texts[one], texts[other], strict=False))
                    if pair[0] != pair[1]
                ),
                min(len(texts[one]), len(texts[other])),
            )
            assert sum(len(tree.segments[at].tokens) for at in both) == shared


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning")
@pytest.mark.parametrize("adapter", ["none", "live", "merged"])
def test_greedy_rollouts_are_those_of_the_weights_of_now(tmp_path: Path, adapter: str) -> None:
    module: Any = tiny_module()
    if adapter != "none":
        peft = pytest.importorskip("peft")
        module = peft.get_peft_model(
            module, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
        )
        for name, weight in module.named_parameters():
            if "lora_B" in name:
                weight.data.normal_(generator=torch.Generator().manual_seed(1))
    seen = []

    def greedy(prompts: Sequence[str], trainer: Any) -> RolloutResult:
        served = trainer.accelerator.unwrap_model(trainer.model)
        if adapter == "merged":
            served.merge_adapter()
        result = rollout(prompts, trainer)
        was = served.training
        served.eval()
        for ids, got in zip(result["prompt_ids"], result["completion_ids"], strict=True):
            whole = served.generate(
                input_ids=torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids)),
                max_new_tokens=10,
                do_sample=False,
                pad_token_id=2,
            )
            assert whole[0, len(ids) :].tolist() == got
        served.train(was)
        if adapter == "merged":
            served.unmerge_adapter()
        seen.append(tuple(map(tuple, result["completion_ids"])))
        return result

    # What is drawn does not matter for the reward, so that the weights go on changing.
    draw = torch.Generator().manual_seed(0)
    trainer_of(
        module,
        tmp_path,
        greedy,
        learning_rate=0.1,
        generation_kwargs={"do_sample": False},
        reward=lambda completions, **_: torch.rand(len(completions), generator=draw).tolist(),
    ).train()
    assert len(seen) == 3


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning")
def test_an_evaluation_changes_no_rollout_of_the_training(tmp_path: Path) -> None:
    drawn = []
    for evaluates in (False, True):
        trainer = trainer_of(tiny_module(), tmp_path, rollout)
        results = [rollout(PROMPTS, trainer)]
        if evaluates:  # as a training does that goes on, and one that begins there again does not
            trainer.model.eval()
            results += [rollout(PROMPTS, trainer), rollout(PROMPTS, trainer)]
            trainer.model.train()
        results.append(rollout(PROMPTS, trainer))
        drawn.append([each["completion_ids"] for each in results])
    without, with_evaluation = drawn
    assert [with_evaluation[0], with_evaluation[-1]] == without
    assert all(one != other for at, one in enumerate(drawn[1]) for other in drawn[1][:at])


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning")
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path) -> None:
    for settings, message in (
        ({"repetition_penalty": -1.2}, "repetition_penalty"),
        ({"generation_kwargs": {"num_beams": 4}}, "num_beams"),
    ):
        trainer = trainer_of(tiny_module(), tmp_path, rollout, **settings)
        with pytest.raises(InputError, match=message):
            trainer.train()
    with pytest.raises(InputError, match="options of rollouts have unknown names: wings"):
        Rollouts(memory="1GiB", wings=1)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_a_borrowed_module_is_given_back_as_it_was(family: str) -> None:
    module = tiny_module(family=family)
    module.gradient_checkpointing_enable()
    module.train()
    next(iter(module.parameters())).requires_grad_(False)
    ids = torch.tensor([tiny_tokenizer()(PROMPTS[0])["input_ids"]])
    module.eval()
    with torch.no_grad():
        want = module(input_ids=ids).logits
    module.train()
    before = state_of(module)
    for _ in range(2):
        with patch_module(module):
            llm = LLM(from_module(module), tokenizer=tiny_tokenizer(), memory="8MiB")
            assert llm.generate(["Ann"])
        assert state_of(module) == before
    with pytest.raises(ZeroDivisionError), patch_module(module):
        _ = 1 / 0
    assert state_of(module) == before
    module(input_ids=ids, labels=ids).loss.backward()
    module.eval()
    with torch.no_grad():
        assert torch.equal(module(input_ids=ids).logits, want)


def test_parts_in_torchscript_train_again_afterwards() -> None:
    module: Any = tiny_module()
    module.scripted = torch.jit.trace(torch.nn.Dropout(), torch.ones(2))
    module.train()
    with patch_module(module):
        assert not module.scripted.training
    assert all(part.training for part in module.modules())


def _negate(module: Any) -> None:
    with torch.no_grad():
        module.model.layers[0].mlp.up_proj.weight.mul_(-1)


def _step(module: Any) -> None:
    weight = module.model.layers[0].mlp.up_proj.weight
    weight.requires_grad_(True).grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=1.0, fused=True).step()


@pytest.mark.parametrize("write", [_negate, _step])
def test_kept_prefixes_leave_when_weights_are_written_into(write: Callable[[Any], None]) -> None:
    module = tiny_module()
    llm = LLM(from_module(module), tokenizer=tiny_tokenizer(), memory="8MiB")
    long, params = PROMPTS[1] * 3, SamplingParams(max_tokens=16)
    llm.keep(long, name="shots")
    llm.generate([long], params)
    assert llm.list_prefixes() == [("shots", len(tiny_tokenizer()(long)["input_ids"]))]
    write(module)
    got = llm.generate([long], params)[0][0]
    assert llm.list_prefixes() == []
    assert llm.cache.pool.num_used == 0
    fresh = LLM(from_module(module), tokenizer=tiny_tokenizer(), memory="8MiB")
    fresh.generate([long], params)
    assert got.tokens == fresh.generate([long], params)[0][0].tokens


def test_a_callers_autocast_changes_no_sample() -> None:
    drawn = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            llm = LLM(from_module(tiny_module()), tokenizer=tiny_tokenizer(), memory="8MiB")
            drawn.append(llm.generate(PROMPTS, SamplingParams(n=3, seed=1, max_tokens=8)))
    assert drawn[0] == drawn[1]


def test_a_tree_of_texts_that_end_within_each_other() -> None:
    tree = tree_of([[1, 2, 3], [1, 2], [1, 2, 3], [4], [1, 2, 5]])
    found = [(each.tokens, each.parent, each.samples) for each in tree.segments]
    assert found == [
        ((1, 2), None, (0, 1, 2, 4)),
        ((3,), 0, (0, 2)),
        ((5,), 0, (4,)),
        ((4,), None, (3,)),
    ]
    assert tree.last == (1, 0, 1, 3, 2)


@pytest.mark.parametrize("is_adapted", [False, True])
def test_weight_transfer_loads_what_an_async_trainer_sends(
    is_adapted: bool, tmp_path: Path
) -> None:
    trainer = pytest.importorskip("trl.experimental.async_grpo.async_grpo_trainer")
    path = save_tiny_model(tmp_path / "old", seed=0)
    llm = LLM(str(path), check=False, memory="8MiB")
    params = SamplingParams(temperature=0, max_tokens=24)
    module: Any = tiny_module(seed=3)
    module.model.embed_tokens.requires_grad_(False)  # frozen, so that it is not sent
    if is_adapted:
        peft = pytest.importorskip("peft")
        module = peft.get_peft_model(module, peft.LoraConfig(r=4, target_modules=["q_proj"]))
        for name, weight in module.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(weight, std=0.1)
        module.merge_adapter()
    transfer = WeightTransfer(llm, cache="all")
    for call in ("init_weight_transfer", "pause", "resume", "destroy"):
        getattr(transfer, call)()
    transfer.send_weights(trainer._iter_vllm_named_params(module))
    if is_adapted:
        module.unmerge_adapter()
        module = module.merge_and_unload()
    else:
        embeddings = llm.model.module.get_input_embeddings().weight
        module.model.embed_tokens.weight.data.copy_(embeddings)
    served = LLM(from_module(module, check=False), tokenizer=llm.tokenizer, memory="8MiB")
    (got,), (want,) = llm.generate(PROMPTS[0], params)[0], served.generate(PROMPTS[0], params)[0]
    assert got.tokens == want.tokens and got.versions == ((1, got.num_tokens),)
    assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)
    with pytest.raises(InputError, match="cache must be one of"):
        WeightTransfer(llm, cache="none")  # type: ignore[arg-type]
