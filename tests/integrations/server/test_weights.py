"""POST /v1/weights, and AsyncLLM.update."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from engine_cases import load
from serving import HTTP, KEY, TEMPLATE, Running, listening
from tiny_models import save_tiny_model

from treegen import AsyncLLM, InputError, SamplingParams
from treegen.model.load import load_model

httpx2 = pytest.importorskip("httpx2")
Server = pytest.importorskip("treegen.integrations.server.app").Server
WeightUpdater = pytest.importorskip("treegen.integrations.server.weights").WeightUpdater

PROMPT = "Q: Ann has 3 apples and Bob 14."
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints, with links that lead out of it."""
    outside = tmp_path_factory.mktemp("outside")
    save_tiny_model(outside / "secret", seed=5)
    folder = tmp_path_factory.mktemp("weights")
    for step in range(3):
        save_tiny_model(folder / "runs" / f"step-{step}", seed=step)
    (folder / "link").symlink_to(outside / "secret")
    (folder / "inside").symlink_to(folder / "runs" / "step-1")
    leaking = shutil.copytree(folder / "runs" / "step-1", folder / "leaking")
    (leaking / "model.safetensors").unlink()
    (leaking / "model.safetensors").symlink_to(outside / "secret" / "model.safetensors")
    broken = shutil.copytree(folder / "runs" / "step-1", folder / "broken")
    os.truncate(broken / "model.safetensors", 5_000)
    spoiled = load_model(folder / "runs" / "step-1", check=False, device="cpu").module
    with torch.no_grad():
        spoiled.get_parameter("lm_head.weight")[7] = torch.nan
    cast("Any", spoiled).save_pretrained(folder / "spoiled")
    looping = shutil.copytree(folder / "runs" / "step-1", folder / "looping")
    for loop in (folder / "loop", looping / "loop"):
        loop.symlink_to(loop)
    (folder / "file").write_text("no folder")
    return folder


@pytest.fixture
def running(folder: Path) -> Iterator[Running]:
    with listening(load(folder / "runs" / "step-0"), weights_dir=folder) as running:
        yield running


def text_of(running: Running) -> str:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    text: str = running.post("completions", body).json()["choices"][0]["text"]
    return text


def test_a_checkpoint_below_the_folder_is_loaded(running: Running, folder: Path) -> None:
    for version, path in enumerate(("runs/step-1", "./runs/../runs/step-2", "inside"), 1):
        answer = running.post("weights", {"path": path, "cache": "shared"})
        assert answer.status_code == 200
        assert answer.json() == {"object": "weights", "path": path, "version": version}
        want = load((folder / path).resolve()).generate(PROMPT, GREEDY)[0][0]
        assert text_of(running) == want.text


REFUSED = (
    *("link", "leaking", "..", ".", "", "/", "/etc", "../outside0/secret", "absent", "file"),
    *("loop", "loop/more", "looping"),
    *("runs", "broken", "spoiled", "runs/step-1/model.safetensors", "a\0b", "x" * 5_000),
)


@pytest.mark.parametrize("path", REFUSED)
def test_nothing_else_is_read(path: str, running: Running, folder: Path) -> None:
    before = text_of(running)
    answer = running.post("weights", {"path": path})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "path" and str(folder) not in error["message"]
    assert text_of(running) == before and running.served.llm.weights_version == 0


def test_an_error_names_the_tensor_that_is_not_finite(running: Running) -> None:
    answer = running.post("weights", {"path": "spoiled"})
    assert answer.json()["error"]["message"].startswith("lm_head.weight has values that are not")


def test_responses_tell_the_versions_after_an_update(folder: Path) -> None:
    client = pytest.importorskip("treegen.integrations.client")
    conversion = pytest.importorskip("treegen.integrations.nodes.conversion")
    nodes = pytest.importorskip("treegen.integrations.nodes.protocol")
    limits = pytest.importorskip("treegen.integrations.server.limits")
    llm = load(folder / "runs" / "step-0")
    llm.tokenizer.chat_template = TEMPLATE
    options: Any = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    chat = [{"role": "user", "content": PROMPT}]
    asks: Any = {"completions": {"prompt": PROMPT}, "chat/completions": {"messages": chat}}
    with listening(llm, weights_dir=folder, nodes=limits.NodeLimits()) as running:
        remote = client.RemoteLLM(f"{running.url}/v1", KEY)
        for versions in ([], [[1, 8]]):
            told = {"versions": versions} if versions else {}
            for path, ask in asks.items():
                (choice,) = running.post(path, {**ask, **options}).json()["choices"]
                assert {name: choice[name] for name in choice if name == "versions"} == told
                without = running.post(path, {**ask, **options, "return_token_ids": False})
                assert "versions" not in without.json()["choices"][0]
            root = running.post("nodes", {"prompt": PROMPT}).json()["node"]
            ask = {"params": {"max_tokens": 8, "temperature": 0, "ignore_eos": True}}
            (node,) = running.post(f"nodes/{root['id']}/sample", ask).json()["nodes"]
            assert {name: node[name] for name in node if name == "versions"} == told
            local = tuple(map(tuple, versions))
            read = nodes.NodeAnswer.model_validate_json(json.dumps(node))
            assert conversion.completion_of(read, "").versions == local
            for prompt in (PROMPT, chat):
                assert remote.generate([prompt], GREEDY)[0][0].versions == local
            if not versions:
                assert running.post("weights", {"path": "inside"}).status_code == 200


def test_bad_requests_change_nothing(running: Running) -> None:
    for body, field in (
        ({}, "path"),
        ({"path": 3}, "path"),
        ({"path": "inside", "cache": "none"}, "cache"),
        ({"path": "inside", "more": 1}, "more"),
    ):
        answer = running.post("weights", body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field
    url = f"{running.url}/v1/weights"
    assert HTTP.post(url, json={"path": "inside"}).status_code == 401
    assert HTTP.get(url, headers={"authorization": f"Bearer {KEY}"}).status_code == 405
    assert running.served.llm.weights_version == 0


def test_it_is_off_by_default_and_needs_a_key(folder: Path) -> None:
    llm = load(folder / "runs" / "step-0")
    with listening(llm) as running:
        answer = running.post("weights", {"path": "inside"})
        assert answer.status_code == 404 and "--weights-dir" in answer.json()["error"]["message"]
    with AsyncLLM(llm) as served:
        with pytest.raises(InputError, match="requires an API key"):
            Server(served, name="model", weights_dir=folder)
        with pytest.raises(InputError, match="not a folder"):
            Server(served, name="model", api_key=KEY, weights_dir=folder / "file")


def test_a_cancelled_request_keeps_its_turn_until_its_update_has_ended(folder: Path) -> None:
    async def ask(served: AsyncLLM) -> None:
        updater = WeightUpdater(served, folder)
        begun: list[int] = []
        ended: list[int] = []
        may_end = threading.Event()
        stage = served.llm.update

        def update(*args: Any, **how: Any) -> int:
            assert len(begun) == len(ended), "two updates run at once"
            begun.append(1)
            assert may_end.wait(60)
            ended.append(stage(*args, **how))
            return ended[-1]

        with mock.patch.object(served.llm, "update", update):
            first = asyncio.create_task(updater.update({"path": "runs/step-1"}))
            while not begun:
                await asyncio.sleep(0.01)
            second = asyncio.create_task(updater.update({"path": "runs/step-2"}))
            gone = asyncio.create_task(updater.update({"path": "broken"}))
            await asyncio.sleep(0.05)
            for task in (first, gone):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await asyncio.sleep(0.05)
            assert len(begun) == 1 and not second.done()
            may_end.set()
            assert (await second)["version"] == 2
        assert ended == [1, 2]
        assert (await updater.update({"path": "runs/step-0"}))["version"] == 3

    with AsyncLLM(load(folder / "runs" / "step-0")) as served:
        asyncio.run(ask(served))


def test_a_client_that_leaves_while_it_waits_loads_nothing(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []
    may_end = threading.Event()

    def update(directory: Path, **how: Any) -> int:
        begun.append(directory.name)
        assert may_end.wait(60)
        return len(begun)

    def ask(step: int, seconds: float) -> Any:
        url, body = f"{running.url}/v1/weights", {"path": f"runs/step-{step}"}
        headers = {"authorization": f"Bearer {KEY}"}
        return HTTP.post(url, json=body, headers=headers, timeout=seconds)

    monkeypatch.setattr(running.served.llm, "update", update)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(ask, 1, 60)
        while not begun:
            time.sleep(0.01)
        with pytest.raises(httpx2.ReadTimeout):
            ask(2, 0.2)
        time.sleep(0.2)
        may_end.set()
        assert first.result().status_code == 200
        assert ask(0, 60).status_code == 200
    assert begun == ["step-1", "step-0"]


def test_an_async_llm_updates_while_it_answers(folder: Path) -> None:
    paths = [folder / "runs" / f"step-{step}" for step in range(2)]
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)

    async def ask(served: AsyncLLM) -> tuple[list[tuple[tuple[int, int], ...]], list[int]]:
        calls = [asyncio.create_task(served.generate([PROMPT], params)) for _ in range(3)]
        await asyncio.sleep(0.1)
        module = load_model(paths[1], check=False, device="cpu").module
        versions = [await served.update(module, cache=mode) for mode in ("keep", "shared", "all")]
        with pytest.raises(
            InputError, match=r"the new weights have no model\.embed_tokens\.weight"
        ):
            await served.update(list(module.named_parameters())[1:])
        answers = [samples[0].versions for call in calls for samples in (await call)[1]]
        (after,) = (await served.generate([PROMPT], GREEDY))[1][0]
        assert after.versions == ((3, 8),)
        assert after.tokens == load(paths[1]).generate(PROMPT, GREEDY)[0][0].tokens
        served.check()
        return answers, versions

    with AsyncLLM(load(paths[0])) as served:
        answers, versions = asyncio.run(ask(served))
    assert versions == [1, 2, 3]
    assert all(sum(num for _, num in spans) == 120 for spans in answers if spans)
