"""Rollouts with tools in GRPOTrainer, against replays of their episodes and stock TRL."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_cases import call_text
from line_world import ENOUGH, QUESTION, TOOLS, Line, as_message, line_environment, save_line_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl_trainers import SETTINGS, Replayed

from treegen.errors import InputError, WorldError
from treegen.integrations.trl import RolloutResult, with_tree_loss
from treegen.integrations.trl_tools import ToolRollouts
from treegen.prompts.replies.types import ToolCall
from treegen.prompts.tool_turns import ToolTurns
from treegen.search.environments.memory import MemoryEnvironment
from treegen.search.environments.protocol import Observation, Traits

trl = pytest.importorskip("trl.trainer", reason="needs trl")
datasets = pytest.importorskip("datasets")

pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning")
CHAT = [{"role": "user", "content": QUESTION}]
NUM = 8
TEMPERATURE = 0.6


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_line_model(tmp_path_factory.mktemp("line"))


def by_environment(environment_reward: Sequence[float | None], **_: Any) -> list[float | None]:
    return list(environment_reward)


def make_trainer(
    path: Path, folder: Path, rollout: Any, trainer_class: Any = trl.GRPOTrainer, **settings: Any
) -> Any:
    tokenizer = settings.pop("tokenizer", None) or AutoTokenizer.from_pretrained(path)
    prompt = settings.pop("prompt", CHAT)
    more = {"rollout_func": rollout} if rollout is not None else {}
    config = trl.RLOOConfig if issubclass(trainer_class, trl.RLOOTrainer) else trl.GRPOConfig
    defaults = {
        **SETTINGS,
        "num_generations": NUM,
        "max_completion_length": 400,
        "temperature": TEMPERATURE,
    }
    return trainer_class(
        model=AutoModelForCausalLM.from_pretrained(path, dtype="float32"),
        args=config(output_dir=str(folder), **{**defaults, **settings}),
        train_dataset=datasets.Dataset.from_dict({"prompt": [prompt] * 4}),
        reward_funcs=by_environment,
        processing_class=tokenizer,
        **more,
    )


def replies_of(
    tokenizer: Any, result: RolloutResult, sample: int
) -> list[tuple[str, ToolCall | None]]:
    """The text and the call of each reply of an episode."""
    turns = ToolTurns(tokenizer, TOOLS)
    ids, mask = result["completion_ids"][sample], result["env_mask"][sample]
    replies: list[list[int]] = []
    for place, (token, is_own) in enumerate(zip(ids, mask, strict=True)):
        if is_own and (place == 0 or not mask[place - 1]):
            replies.append([])
        if is_own:
            replies[-1].append(token)
    texts = [tokenizer.decode(each[:-1]) for each in replies]
    read = [turns.replies.parse_text(text, TOOLS).calls for text in texts]
    return [(text, calls[0] if calls else None) for text, calls in zip(texts, read, strict=True)]


def check_episode(tokenizer: Any, result: RolloutResult, sample: int) -> None:
    """Check an episode against the chat that its calls make, as the chat template renders it."""
    world, chat = Line(), list(CHAT)
    spans, is_done = [], False
    for reply, call in replies_of(tokenizer, result, sample):
        start = render(tokenizer, chat, is_open=True)
        if call is not None and reply == call_text(call):
            chat.append(as_message(call))
        else:
            chat.append({"role": "assistant", "content": reply})
        spans.append((len(start), len(render(tokenizer, chat)) - len("\n")))
        if call is not None:
            shown = world.run(call)
            is_done = shown.is_done
            chat.append({"role": "tool", "content": shown.text})
    text = render(tokenizer, chat)[: spans[-1][1]]
    encoded = tokenizer(text, return_offsets_mapping=True)
    prompt, completion = result["prompt_ids"][sample], result["completion_ids"][sample]
    assert prompt + completion == encoded["input_ids"]
    mask = [
        int(any(start <= first < stop for start, stop in spans))
        for first, _ in encoded["offset_mapping"]
    ]
    assert [0] * len(prompt) + result["env_mask"][sample] == mask
    assert result["environment_reward"][sample] == world.at / ENOUGH
    assert result["episode_end"][sample] == ("done" if is_done else "answer")
    assert result["num_actions"][sample] == len(world.ran)
    logprobs = result["logprobs"][sample]
    assert all(
        value <= 0 if own else value == 0
        for value, own in zip(logprobs, result["env_mask"][sample], strict=True)
    )


def render(tokenizer: Any, chat: list[Any], *, is_open: bool = False) -> str:
    text: str = tokenizer.apply_chat_template(
        chat, tools=TOOLS, tokenize=False, add_generation_prompt=is_open
    )
    return text


@torch.no_grad()
def check_logprobs(trainer: Any, result: RolloutResult) -> None:
    """The log-probabilities of own tokens are those of the model, read in one pass."""
    samples = zip(
        *(result[name] for name in ("prompt_ids", "completion_ids", "env_mask", "logprobs")),
        strict=True,
    )
    for before, after, mask, logprobs in samples:
        logits = trainer.model(input_ids=torch.tensor([before + after])).logits[0]
        scaled = logits[len(before) - 1 : -1] / TEMPERATURE
        want = scaled.log_softmax(-1)[range(len(after)), after]
        own = torch.tensor(mask).bool()
        torch.testing.assert_close(torch.tensor(logprobs)[own], want[own], atol=1e-4, rtol=1e-4)


def test_episodes_are_the_chats_that_their_calls_make(path: Path, tmp_path: Path) -> None:
    environment, ran = line_environment()
    with ToolRollouts(environment) as rollout:
        trainer = make_trainer(path, tmp_path, rollout)
        result = rollout([CHAT] * 12, trainer)
        for sample in range(12):
            check_episode(trainer._tokenizer, result, sample)
        check_logprobs(trainer, result)
        assert {"answer", "done"} == set(result["episode_end"])
        assert 0 in result["env_mask"][0] and len(set(result["environment_reward"])) > 1
        # Equal calls from equal states run once: moves by their history, looks by the state.
        want = set()
        for sample in range(12):
            moves: list[Any] = []
            for _, call in replies_of(trainer._tokenizer, result, sample):
                if call is not None:
                    key = call_text(call)
                    want.add((*moves, key))
                    moves += [key] if call.name != "look" else []
        assert len(ran) == len(want) < sum(result["num_actions"])
        usage = rollout.agent.usage
        assert usage.started == 1 and usage.live == usage.stored == 0
        texts = zip(result["prompt_ids"], result["completion_ids"], strict=True)
        for sample, (before, after) in enumerate(texts):
            assert result.tree.text(sample) == before + after
        assert result.tree.num_tokens < sum(map(len, result["completion_ids"]))
        again = rollout([CHAT] * 12, trainer)  # the next rollout draws other samples
        assert again["completion_ids"] != result["completion_ids"]


class Disturbed(with_tree_loss(trl.GRPOTrainer)):  # type: ignore[misc]
    """Changes the log-probabilities of tokens that the model did not write."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self.foreign = 1 - inputs["tool_mask"]
        assert self.foreign.any()
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if logps.requires_grad:
            logps = logps * (1 + 2 * self.foreign) + self.foreign
        return logps, entropies, aux_loss


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_steps_give_the_weights_of_stock_trl(path: Path, tmp_path: Path, loss_type: str) -> None:
    trainers = []
    with ToolRollouts(line_environment()[0]) as rollout:
        rollouts = Replayed(rollout)
        for kind in (trl.GRPOTrainer, with_tree_loss(trl.GRPOTrainer), Disturbed):
            trainer = make_trainer(
                path, tmp_path, rollouts.rewind(), kind, loss_type=loss_type, beta=0.05
            )
            first = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
            trainer.train()
            trainers.append(trainer)
    assert rollouts.at == len(rollouts.results) == 2
    stock = dict(trainers[0].model.named_parameters())
    assert any(not torch.equal(first[name], weight) for name, weight in stock.items())
    for other in trainers[1:]:
        for name, weight in other.model.named_parameters():
            assert (weight - stock[name]).norm() <= 1e-5 * stock[name].norm(), name
    logs = [trainer.state.log_history[0] for trainer in trainers]
    assert logs[0]["reward"] == pytest.approx(logs[1]["reward"])
    own = [sum(mask) for mask in rollouts.results[0]["env_mask"]]
    assert logs[1]["completions/mean_length"] == pytest.approx(sum(own) / len(own))


def test_limits_end_episodes(path: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], set[str]]] = [
        ({"max_turns": 1}, {"turns", "answer"}),
        ({"max_actions": 1}, {"actions", "answer"}),
        ({}, {"length"}),
    ]
    for limits, ends in cases:
        environment, _ = line_environment(limit=100)
        with ToolRollouts(environment, **limits) as rollout:
            most = 400 if limits else 120
            trainer = make_trainer(path, tmp_path, rollout, max_completion_length=most)
            result = rollout([CHAT] * NUM, trainer)
        assert set(result["episode_end"]) <= ends
        for sample in range(NUM):
            ids, mask = result["completion_ids"][sample], result["env_mask"][sample]
            assert len(ids) == len(mask) == len(result["logprobs"][sample]) <= most
            assert mask[-1] == 1  # results that nothing follows are left out
            assert result["environment_reward"][sample] is not None
            if limits:
                assert result["num_actions"][sample] <= 1 and 0 not in mask


def test_greedy_episodes_and_replayed_forks(path: Path, tmp_path: Path) -> None:
    results = []
    for has_snapshots in (True, False):
        environment, _ = line_environment()
        environment.traits = replace(environment.traits, has_snapshots=has_snapshots)
        with ToolRollouts(environment, max_live=1) as rollout:
            trainer = make_trainer(path, tmp_path, rollout)
            results.append(rollout([CHAT] * NUM, trainer))
    assert results[0] == results[1]
    with ToolRollouts(line_environment()[0]) as rollout:
        trainer = make_trainer(path, tmp_path, rollout, generation_kwargs={"do_sample": False})
        result = rollout([CHAT] * 3, trainer)
    assert result["completion_ids"] == result["completion_ids"][:1] * 3


class Faulty(Line):
    def run(self, action: ToolCall) -> Observation:
        if self.at:
            raise OSError("the disk is full")
        return super().run(action)

    def fork(self) -> Faulty:
        return Faulty(self.ran, self.at, self.limit)


def test_failures_of_the_environment_have_no_reward(path: Path, tmp_path: Path) -> None:
    with ToolRollouts(MemoryEnvironment(lambda _: Faulty(), TOOLS)) as rollout:
        trainer = make_trainer(path, tmp_path, rollout, max_steps=1)
        result = rollout([CHAT] * NUM, trainer)
        for end, reward in zip(result["episode_end"], result["environment_reward"], strict=True):
            assert (end == "failed") == (reward is None)
        assert "failed" in result["episode_end"]
        trainer.train()
        assert math.isfinite(trainer.state.log_history[0]["grad_norm"])


class Watched(MemoryEnvironment):
    is_closed = False

    async def close(self) -> None:
        self.is_closed = True
        await super().close()


def test_an_error_closes_the_environment(path: Path, tmp_path: Path) -> None:
    def fail(problem: Any) -> Any:
        assert problem == "the problem"
        raise OSError("no such map")

    environment = Watched(fail, TOOLS)
    rollout = ToolRollouts(environment, problem_of=lambda chat: "the problem")
    trainer = make_trainer(path, tmp_path, rollout)
    with pytest.raises((WorldError, OSError), match="no such map"):
        trainer.train()
    assert environment.is_closed
    with pytest.raises(InputError, match="create a new agent"):
        trainer.train()


def test_what_cannot_work_is_refused(path: Path, tmp_path: Path) -> None:
    class NoForks:
        traits, tools = Traits(), TOOLS

    wrong: Any = NoForks()
    with pytest.raises(InputError, match="NoForks is not an environment that treegen can fork"):
        ToolRollouts(wrong)
    with pytest.raises(InputError, match="has no tools"):
        ToolRollouts(MemoryEnvironment(lambda _: Line(), []))
    with pytest.raises(InputError, match="wings"):
        ToolRollouts(line_environment()[0], wings=1)
    plain = AutoTokenizer.from_pretrained(path)
    plain.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"

    def check(message: str, change: Any = None, prompts: Any = (CHAT,), **settings: Any) -> None:
        with ToolRollouts(line_environment()[0]) as rollout:
            trainer = make_trainer(path, tmp_path, rollout, **settings)
            if change is not None:
                change(trainer)
            with pytest.raises(InputError, match=message):
                rollout(list(prompts), trainer)

    check("use_vllm", lambda trainer: setattr(trainer, "use_vllm", True))
    check(
        "environment_factory of the trainer are not supported",
        lambda trainer: setattr(trainer, "tools", [print]),
    )
    check("cannot determine the tool-call format", tokenizer=plain)
    check("is a string", prompts=["Go."])
    check("remove stop_strings", generation_kwargs={"stop_strings": ["x"]})
    check("RLOOTrainer is not supported with tools", trainer_class=with_tree_loss(trl.RLOOTrainer))
