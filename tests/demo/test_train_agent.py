"""Episodes that the model with tools learns from, its tokenizer, and a very short training."""

import copy
import random
from pathlib import Path

import pytest
from click.testing import CliRunner
from train_demo import episodes
from train_demo.batches import encode
from train_demo.documents import WRITE, Document, Maker
from train_demo.episodes import EPISODES, TEMPLATE, choose_move, kept_back
from train_demo.tokenizer import BOS, EOS, train_agent_tokenizer
from train_demo.train_agent import draw_text, main
from transformers import PreTrainedTokenizerFast

from treegen.cli.main import cli
from treegen.common.bounded.templates import render_chat
from treegen.evals.task import TaskOptions
from treegen.prompts.replies.replies import ReplyReader
from treegen.prompts.replies.types import ToolCall
from treegen.prompts.tool_turns import ToolTurns
from treegen.tasks.agents import repair
from treegen.tasks.agents.repair import CaseRunner, RepairGame
from treegen.tasks.agents.tasks import TextWorldTask
from treegen.tasks.agents.text_world import TextWorld, make_world
from treegen.tasks.sandbox import SandboxPool

MAKERS = [maker for maker, _ in EPISODES]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = train_agent_tokenizer(draw_text, 3, 200)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def calls_of(tokenizer: PreTrainedTokenizerFast, document: Document) -> list[ToolCall]:
    """The calls of an episode."""
    reader, tools = ReplyReader(tokenizer), [*TextWorld.tools, *RepairGame.tools]
    texts = [part.text for part in document if part.text.startswith("<tool_call>")]
    return [reader.parse_text(text.removesuffix(EOS), tools).calls[0] for text in texts]


# Episodes


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
def test_episodes_are_chats_of_the_template(
    tokenizer: PreTrainedTokenizerFast, maker: Maker
) -> None:
    draw = random.Random(maker.__name__)
    for _ in range(8):
        document = maker(draw)
        texts = [part.text for part in document]
        task = TextWorld if "unlock" in texts[0] else RepairGame
        question = texts[0].partition("user:\n")[2].removesuffix("\nassistant:\n")
        turns = ToolTurns(tokenizer, task.tools)
        messages = [{"role": "user", "content": question}]
        shown = render_chat(tokenizer, messages, tools=task.tools, add_generation_prompt=True)
        assert texts[0] == shown.removeprefix(BOS)
        calls = calls_of(tokenizer, document)
        for call, between in zip(calls, texts[2::2], strict=False):
            result = between.removeprefix("\ntool:\n").removesuffix("\nassistant:\n")
            assert turns.render_results([call], [result], None) == EOS + between
        found = encode(tokenizer, document)
        whole = tokenizer("".join(texts))["input_ids"]
        assert found.ids == [*whole, tokenizer.eos_token_id]
        assert any(weight == WRITE for weight in found.weights)


@pytest.mark.parametrize("level", ["easy", "medium"])
def test_the_player_reaches_each_goal(level: str) -> None:
    for seed in range(200):
        world, seen = make_world(level, f"player {seed}"), set[str]()
        while not world.is_done:
            seen.add(world.room)
            world.run(choose_move(world, seen))
        assert world.is_solved


@pytest.mark.parametrize("level", ["easy", "medium"])
def test_the_player_uses_only_what_was_seen(level: str) -> None:
    draw = random.Random(level)
    num_moved = 0
    for seed in range(100):
        world, seen = make_world(level, f"hidden {seed}"), set[str]()
        while not world.is_done:
            seen.add(world.room)
            move = choose_move(world, seen)
            hidden = {
                place
                for place, room in world.places.items()
                if room not in seen or place in world.closed
            }
            free = sorted(hidden - {goal.place for goal in world.goals})
            other = copy.deepcopy(world)
            for thing, place in world.things.items():
                if place in hidden and free:
                    other.things[thing] = draw.choice(free)
                    num_moved += other.things[thing] != place
            assert choose_move(other, seen) == move
            world.run(move)
    assert num_moved > 100


def test_no_world_of_the_task_is_trained_on() -> None:
    extra = {"problems": "90", "level": "all"}
    for problem in TextWorldTask().load(TaskOptions(extra=extra)).problems:
        level = problem.metadata["level"]
        assert level == "hard" or problem.question in kept_back(level)


def test_episodes_of_repair_are_those_of_the_game(tokenizer: PreTrainedTokenizerFast) -> None:
    draw = random.Random("repair")
    with SandboxPool(limits=repair.LIMITS, workers=1) as pool:
        runner = CaseRunner(pool)
        for maker in (episodes.one_file, episodes.several_files):
            state = draw.getstate()
            document = maker(draw)
            draw.setstate(state)
            level = "easy" if maker is episodes.one_file else draw.choice(("medium", "hard"))
            puzzle = repair.make_puzzle(level, str(draw.getrandbits(64)))
            game = RepairGame(dict(puzzle.files), puzzle.public, runner)
            shown = [game.run(call).text for call in calls_of(tokenizer, document)]
            texts = [part.text for part in document[2::2]]
            assert texts == [f"\ntool:\n{text}\nassistant:\n" for text in shown[:-1]]
            assert game.files == puzzle.solution and game.is_done and game.reward == 1.0


def test_names_are_the_same_tokens_everywhere(tokenizer: PreTrainedTokenizerFast) -> None:
    document = episodes.easy_world(random.Random(0))
    ids = encode(tokenizer, document).ids
    words = set(tokenizer.convert_ids_to_tokens(ids))
    for name in ("kitchen", "sink", "north", "south"):
        assert "Ġ" + name not in words


# Training


def test_the_command_writes_a_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(main, [str(out), "--tiny", "--steps", "3"])
    assert done.exit_code == 0 and "from step 0" in done.output, done.output
    arguments = ["search", "text-world", "--model", str(out), "--limit", "1", "--depth", "2"]
    arguments += ["--budget", "tokens=60", "--output-path", str(tmp_path / "run")]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0 and "|best-of-n|" in done.output, done.output
