"""Images that nothing uses any more are dropped by a server, and kept by an LLM."""

from __future__ import annotations

import asyncio
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_cases import url_of
from tiny_images import picture, save_tiny_vision_model

from treegen import LLM, SamplingParams
from treegen.errors import InputError
from treegen.llm.async_llm import AsyncLLM
from treegen.model.config import read_config
from treegen.model.tokenizer import load_tokenizer
from treegen.model.vision import load_processor
from treegen.prompts.images import table as image_table
from treegen.prompts.images.table import ImageTable, PlacedImage
from treegen.search.live.prompts import PromptIndex

Seen = dict[str, "weakref.ref[PlacedImage]"]


@pytest.fixture(name="seen")
def _seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The images that tables get, while they cache the inputs of only one."""
    seen: Seen = {}
    add = ImageTable.add

    def note(table: ImageTable, source: Any) -> PlacedImage:
        placed = add(table, source)
        seen[placed.digest] = weakref.ref(placed)
        return placed

    monkeypatch.setattr(ImageTable, "add", note)
    monkeypatch.setattr(image_table, "_MAX_INPUT_BYTES", 1)
    return seen


def count_alive(seen: Seen) -> int:
    return sum(image() is not None for image in seen.values())


@pytest.mark.parametrize("keeps_all", [False, True])
def test_only_a_table_that_need_not_keep_all_drops_images(
    tmp_path: Path, seen: Seen, *, keeps_all: bool
) -> None:
    save_tiny_vision_model(tmp_path, "qwen2_vl", seed=1)
    tokenizer = load_tokenizer(str(tmp_path))
    table = load_processor(tmp_path, read_config(str(tmp_path), tmp_path), tokenizer).table(384)
    table.keeps_all = keeps_all
    first = table.add(url_of(picture(0))).first
    held = table.add(url_of(picture(1)))
    for seed in range(2, 30):
        table.add(url_of(picture(seed)))
    # The most recent image is kept in addition to the one that is used.
    assert count_alive(seen) == (30 if keeps_all else 2)
    ids = np.arange(held.first, held.first + held.num, dtype=np.int32)
    assert table.images_in([ids]) == [held] and table.add(url_of(picture(1))) is held
    assert table.inputs(held)["pixel_values"].shape[0] > 0
    assert table.add(url_of(picture(0))).first == first
    table.add(url_of(picture(2)))
    if not keeps_all:
        with pytest.raises(KeyError):
            table.images_in([np.array([first], dtype=np.int32)])
        table.keeps_all = True
        first = table.add(url_of(picture(2))).first  # the table has it, but did not have to keep it
        for seed in range(3, 6):
            table.add(url_of(picture(seed)))
        assert table.images_in([np.array([first], dtype=np.int32)])


def test_a_server_holds_only_images_that_are_in_use(
    tmp_path: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = pytest.importorskip("serving")
    clients = pytest.importorskip("node_clients")
    limits = pytest.importorskip("treegen.integrations.server.limits").NodeLimits()
    app = pytest.importorskip("treegen.integrations.server.app")
    assert PromptIndex.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(PromptIndex.__init__.__kwdefaults__, "max_recent", 4)
    save_tiny_vision_model(tmp_path, "qwen2_vl", seed=1)
    llm, reference = (
        LLM(str(tmp_path), images=True, device="cpu", memory="16MiB") for _ in range(2)
    )

    with AsyncLLM(llm) as served, pytest.raises(InputError, match="API key"):
        app.Server(served, name="m", weights_dir=tmp_path)
    assert llm.images is not None and llm.images.keeps_all  # no server uses it

    def messages(seed: int, key: str = "image_url") -> list[dict[str, Any]]:
        image: dict[str, Any] = {"type": key, key.removesuffix("_url"): url_of(picture(seed))}
        if key == "image_url":
            image = {"type": key, key: {"url": url_of(picture(seed))}}
        return [{"role": "user", "content": [image, {"type": "text", "text": "What?"}]}]

    greedy: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    seeds = [*range(1, 25), 1]
    with serving.listening(llm, nodes=limits) as running:
        client = clients.NodeClient(running.url, serving.KEY)
        given = {"messages": messages(0), "seed": 5, "name": "p", "params": greedy}
        root = client.post("/v1/nodes", given)["node"]
        replies = []
        for seed in seeds:
            body = {"messages": messages(seed), "return_token_ids": True, **greedy}
            (choice,) = running.post("chat/completions", body).json()["choices"]
            replies.append(choice["token_ids"])
        running.wait_until_idle()
        # The root's image, those of the four prompts that are kept, and the most recent one.
        assert len(seen) == 25 and count_alive(seen) <= 6
        asyncio.run(clients.evict_all(running.served))
        (node,) = client.sample(root, 1)
        client.http.close()
    assert llm.images.keeps_all
    chats = [messages(seed, "image") for seed in [*seeds, 0]]
    params = SamplingParams(**greedy)
    want = [result.outputs[0].token_ids for result in reference.generate(chats, params)]
    assert [*replies, node["token_ids"]] == [list(ids) for ids in want]
