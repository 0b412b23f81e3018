"""Images by every way into a model, and images that are refused."""

from __future__ import annotations

import asyncio
import base64
import random
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_cases import encode_image, image_question, table_of, url_of
from PIL import Image
from tiny_images import picture, save_tiny_vision_model
from tiny_models import save_tiny_model

from treegen import LLM, AsyncLLM, InputError, ModelError, Node, SamplingParams, TreeError
from treegen.model.checkpoint.families import IMAGES
from treegen.prompts.chat_images import render_parts
from treegen.prompts.images import loading
from treegen.prompts.tokens import TAIL, append_text

GREEDY = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module", name="directory")
def _directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision_model(tmp_path_factory.mktemp("model"), "qwen2_vl", seed=1)


@pytest.fixture(scope="module", name="llm")
def _llm(directory: Path) -> LLM:
    return LLM(str(directory), images=True, device="cpu", memory="16MiB")


def test_one_image_in_every_form_is_one_image(llm: LLM, tmp_path: Path) -> None:
    image = picture(11)
    file = tmp_path / "a picture.png"
    file.write_bytes(encode_image(image))
    forms = [
        image_question(image),
        image_question(encode_image(image)),
        image_question(file),
        image_question(str(file)),
        image_question(url_of(image)),
        image_question(file.as_uri()),
        image_question(str(file), kind="path"),
        image_question(url_of(image), kind="url"),
        image_question(base64.b64encode(encode_image(image)).decode(), kind="base64"),
    ]
    openai = image_question(url_of(image))
    openai[0]["content"][0] = {"type": "image_url", "image_url": {"url": url_of(image)}}
    before = llm.engine.encoder_cache.num_encoded if llm.engine.encoder_cache else 0
    texts = [c.token_ids for (c,) in llm.chat([*forms, openai], GREEDY)]
    assert len(set(texts)) == 1
    assert llm.engine.encoder_cache is not None
    assert llm.engine.encoder_cache.num_encoded == before + 1


def test_samples_of_one_image_compute_its_tokens_once(llm: LLM) -> None:
    question = Node(image_question(picture(12)), samples=64, id="q")
    result = llm.run(question, SamplingParams(max_tokens=4, ignore_eos=True))
    assert result.usage.images_encoded == 1
    assert result.usage.prompt_tokens_computed == len(result.plan.requests[0].tokens)
    assert len({c.token_ids for c in result.completions}) > 32


def test_the_program_of_the_documentation_runs(
    directory: Path, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (repository / "docs" / "images.md").read_text(encoding="utf-8")
    program = page.split("```python\n")[1].split("```")[0]
    program = program.replace('"Qwen/Qwen3-VL-8B-Instruct"', f"{str(directory)!r}, memory='16MiB'")
    picture(1).save(tmp_path / "chart.png")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(program.replace("max_tokens=512", "max_tokens=3"), names)
    assert names["result"].usage.images_encoded == 1
    assert len(names["result"].completions) == 128


def test_the_documented_families_are_those_that_take_images(repository: Path) -> None:
    page = (repository / "docs" / "models.md").read_text(encoding="utf-8")
    section = page.split("## Images\n")[1].split("\nWe test each family")[0]
    assert re.findall(r"`(\w+)`[,.]", section) == list(IMAGES)
    assert f"{len(IMAGES)} families" in section
    readme = (repository / "README.md").read_text(encoding="utf-8")
    assert f"{len(IMAGES)} families accept [images]" in " ".join(readme.split())


def test_samples_do_not_depend_on_which_images_came_before(directory: Path) -> None:
    drawn = []
    for before in ([], [picture(i) for i in range(3)]):
        llm = LLM(str(directory), images=True, device="cpu", memory="16MiB")
        for image in before:
            llm.chat(image_question(image), GREEDY)
        drawn.append(llm.chat(image_question(picture(9)), SamplingParams(n=3, max_tokens=6)))
    assert [c.token_ids for c in drawn[0][0]] == [c.token_ids for c in drawn[1][0]]


def test_images_survive_that_pages_are_taken_away(directory: Path, llm: LLM) -> None:
    small = LLM(str(directory), images=True, device="cpu", memory="48KiB", page_size=4)
    tree = Node(
        samples=0,
        children=[
            Node(image_question(picture(seed), text), samples=8, id=f"{seed}{text}")
            for seed in (3, 4, 5)
            for text in ("What?", "Why is it so?")
        ],
    )
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=2)
    want, got = llm.run(tree, params), small.run(tree, params)
    assert got.usage.preemptions or got.usage.recomputed_tokens
    assert [c.token_ids for c in got.completions] == [c.token_ids for c in want.completions]


def test_speculation_draws_the_same_below_images(directory: Path, llm: LLM) -> None:
    guessing = LLM(str(directory), images=True, device="cpu", memory="16MiB", speculate="ngram")
    params = SamplingParams(max_tokens=30, ignore_eos=True, n=3, seed=1, repetition_penalty=1.1)
    chats = [image_question(picture(6), "What?"), image_question(picture(6), "What is it?")]
    for guessed, other in zip(guessing.chat(chats, params), llm.chat(chats, params), strict=True):
        assert [c.token_ids for c in guessed] == [c.token_ids for c in other]


def test_a_kept_image_is_not_computed_again(llm: LLM) -> None:
    chats = [image_question(picture(7), "What?"), image_question(picture(7), "Why?")]
    want = [c.token_ids for (c,) in llm.chat(chats, GREEDY)]
    with llm.keep(Node(image_question(picture(7), ""))):
        result = llm.run(Node(samples=0, children=[Node(chat) for chat in chats]), GREEDY)
        assert [c.token_ids for c in result.completions] == want
        assert result.usage.prompt_tokens_reused > 20


def test_a_search_goes_on_from_an_image(llm: LLM) -> None:
    drawn: list[str] = []

    async def fn(root: Any) -> None:
        (first,) = await root.sample(1)
        (second,) = await first.extend(" And").sample(1)
        drawn.extend((first.text, second.text))

    chat = image_question(picture(8), "Here.")
    (result,) = llm.search(fn, [chat], GREEDY)
    assert result.error is None
    (want,) = llm.chat(chat, GREEDY)[0]
    assert drawn[0] == want.text
    tokens = [*llm.plan(Node(chat)).requests[0].tokens.tolist(), *want.token_ids]
    tail = np.array(tokens[-TAIL:], dtype=np.int32)
    (then,) = llm.generate([[*tokens, *append_text(llm.tokenizer, tail, " And").tolist()]], GREEDY)[
        0
    ]
    assert drawn[1] == then.text


def test_images_may_be_appended_to_nodes(llm: LLM) -> None:
    a, b = picture(21), picture(22, 30, 50)
    turns = [
        *image_question(a),
        {"role": "assistant", "content": "It."},
        *image_question(b, "And?"),
    ]
    wants = [
        done.token_ids
        for (done,) in llm.chat([image_question(a), image_question(b), turns], GREEDY)
    ]
    part = {"type": "image", "image": a}
    more: list[dict[str, Any]] = [part, {"type": "text", "text": " is it."}]
    with llm.session(GREEDY) as session:
        root = session.root("<s>user:", name="text")
        for image, want in ((a, wants[0]), (b, wants[1]), (a, wants[0])):
            parts: list[dict[str, Any]] = image_question(image)[0]["content"]
            assert below(session, root.extend(parts).extend("<s>assistant:")).tokens == want
        # Below what was drawn, and below a chat with an image at a later turn.
        root = session.root(turns, name="chat")
        drawn = below(session, root)
        assert drawn.tokens == wants[2]
        done, other = below(session, drawn.extend(more)), below(session, root.extend([part]))
    assert "[the image]" in done.path_text
    assert other.tokens != drawn.tokens
    path = llm.plan(Node(turns)).requests[0].tokens.tolist()
    text, images = render_parts(more, llm.tokenizer, llm.images, "it")
    ids = np.array(llm.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
    placed = table_of(llm).replace_placeholders(ids, images, "it").tolist()
    (wanted,) = llm.generate([[*path, *drawn.tokens, *placed]], GREEDY)[0]
    assert done.tokens == wanted.token_ids


def below(session: Any, node: Any) -> Any:
    """One sample of a node."""
    (child,) = session.sample({node: 1})[node]
    return child


def test_what_cannot_be_appended_is_told(llm: LLM, directory: Path) -> None:
    with llm.session(GREEDY) as session:
        root = session.root("Here: ", name="r")
        with pytest.raises(TreeError, match=r"content\[0\] must be"):
            root.extend([{"type": "sound"}])
        with pytest.raises(InputError, match=r"'extension': image .* cannot be read"):
            root.extend([{"type": "image", "image": "/no/such.png"}])
        with pytest.raises(InputError, match="image placeholders; remove"):
            root.extend(
                [
                    {"type": "image", "image": picture(1)},
                    {"type": "text", "text": table_of(llm).marker},
                ]
            )
    with LLM(str(directory), device="cpu", memory="4MiB").session(GREEDY) as session:
        root = session.root("Here: ", name="r")
        assert root.extend([{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]).text
        with pytest.raises(InputError, match="images=True"):
            root.extend([{"type": "image", "image": picture(1)}])


def test_an_image_has_no_probability(llm: LLM) -> None:
    tokens = llm.plan(Node(image_question(picture(1)))).requests[0].tokens.tolist()
    with pytest.raises(InputError, match="pair 0: the continuation contains an image"):
        llm.score([(tokens[:2], tokens[2:])])
    (whole,) = llm.score([(image_question(picture(1)), " it is")])
    ids = llm.tokenizer(" it is", add_special_tokens=False)["input_ids"]
    (by_ids,) = llm.score([(tokens, ids)])
    assert whole.logprobs == by_ids.logprobs
    begun = [*image_question(picture(1)), {"role": "assistant", "content": " it"}]
    (rest,) = llm.score([(begun, " is")])
    assert rest.logprobs == pytest.approx(whole.logprobs[-len(rest.logprobs) :], abs=1e-6)


def test_async_llm_takes_images(directory: Path, llm: LLM) -> None:
    chats = [image_question(picture(seed)) for seed in (1, 2, 1)]

    async def ask() -> list[Any]:
        own = LLM(str(directory), images=True, device="cpu", memory="16MiB")
        with AsyncLLM(own) as served:
            results = await asyncio.gather(*(served.generate([chat], GREEDY) for chat in chats))
        return [completions for _, (completions,) in results]

    got = asyncio.run(ask())
    want = llm.chat(chats, GREEDY)
    assert [[c.token_ids for c in each] for each in got] == [
        [c.token_ids for c in each] for each in want
    ]


def test_a_file_that_changes_is_another_image(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.png"

    async def sample(served: AsyncLLM, seed: int) -> list[int]:
        file.write_bytes(encode_image(picture(seed)))
        (tokens,), _ = await served.generate([image_question(str(file))], GREEDY)
        return list(tokens)

    async def body() -> list[list[int]]:
        own = LLM(str(directory), images=True, device="cpu", memory="16MiB")
        with AsyncLLM(own) as served:
            return [await sample(served, seed) for seed in (1, 2, 1)]

    first, second, third = asyncio.run(body())
    assert first == third != second


def test_the_server_takes_data_urls_alone(llm: LLM) -> None:
    asks = pytest.importorskip("treegen.integrations.server.requests")
    body = {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": url_of(picture(1))}},
                    {"type": "text", "text": "What?"},
                ],
            }
        ]
    }
    assert asks.read_message(body["messages"][0]) == image_question(url_of(picture(1)))[0]
    for bad in ("/etc/passwd", "file:///etc/passwd", "http://169.254.169.254/", None):
        part = {"type": "image_url", "image_url": {"url": bad}}
        with pytest.raises(InputError, match="data URL"):
            asks.read_message({"role": "user", "content": [part]})
    with pytest.raises(InputError, match="text and image_url"):
        asks.read_message({"role": "user", "content": [{"type": "image", "image": "/etc/passwd"}]})


def test_messages_of_inspect_keep_their_images() -> None:
    model = pytest.importorskip("inspect_ai.model")
    from treegen.integrations.inspect_ai.conversion import template_messages

    image = model.ContentImage(image=url_of(picture(1)))
    turn = model.ChatMessageUser(content=[image, model.ContentText(text="What?")])
    assert template_messages([turn]) == image_question(url_of(picture(1)))


def broken(kind: str) -> Any:
    """An image that cannot be used."""
    image = picture(1)
    if kind == "truncated":
        return encode_image(picture(1, 200, 200))[:2000]
    if kind == "bomb":
        huge = encode_image(Image.new("1", (1, 1)))
        header = huge[12:16] + (60_000).to_bytes(4, "big") * 2 + huge[24:29]
        return huge[:12] + header + zlib.crc32(header).to_bytes(4, "big") + huge[33:]
    if kind == "animated":
        return encode_image(image, "GIF", save_all=True, append_images=[picture(2)])
    return {
        "empty": b"",
        "text": b"no image at all",
        "zero": Image.new("RGB", (0, 4)),
        "deep": Image.fromarray(np.zeros((4, 4), np.float32)),
        "narrow": picture(1, 900, 2),
        "url": "data:image/png;base64,%%%",
        "network": "https://example.org/a.png",
        "missing": "/no/such/picture.png",
        "folder": "/tmp",
        "bracket": "//[x.png",
        "home": "~no-such-user/x.png",
    }[kind]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("truncated", "corrupt"),
        ("bomb", "pixels"),
        ("animated", "pass a single frame"),
        ("empty", "empty"),
        ("text", "not an image in a supported format"),
        ("zero", "no pixels"),
        ("deep", "image mode F"),
        ("narrow", "processor rejects"),
        ("url", "base64"),
        ("network", "is a URL"),
        ("missing", "/no/such/picture.png"),
        ("folder", "/tmp"),
        ("bracket", "cannot be read"),
        ("home", "cannot be read"),
    ],
)
def test_images_that_cannot_be_used_are_refused(llm: LLM, kind: str, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        llm.plan(Node(image_question(broken(kind)), id="asked"))
    message = str(caught.value)
    assert reason in message
    assert "\n" not in message
    assert "'asked'" in message


def test_a_path_is_told(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "cut.png"
    file.write_bytes(broken("truncated"))
    with pytest.raises(InputError, match=r"cut\.png is corrupt"):
        llm.chat(image_question(file))


def test_random_bytes_are_refused_or_taken(llm: LLM) -> None:
    """Whatever is wrong with a file is told as InputError."""
    chance, whole = random.Random(1), encode_image(picture(1))
    jpeg = encode_image(picture(1), "JPEG")
    for _ in range(150):
        data = bytearray(chance.choice([whole, jpeg]))
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if chance.random() < 0.3:
            del data[chance.randrange(len(data)) :]
        try:
            table_of(llm).add(bytes(data))
        except InputError as error:
            assert "\n" not in str(error)


def test_other_kinds_of_pixels_are_taken(llm: LLM) -> None:
    image = picture(1)
    kinds = [image.convert(mode) for mode in ("CMYK", "L", "RGBA", "P", "1", "LA")]
    answers = llm.chat([image_question(each) for each in kinds], GREEDY)
    assert all(len(each) == 1 for each in answers)
    cmyk = encode_image(image.convert("CMYK"), "JPEG")
    assert llm.chat(image_question(cmyk), GREEDY)


def test_a_photograph_is_turned_as_its_file_says(llm: LLM) -> None:
    image = picture(1, 24, 60)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    turned = loading.load_image(encode_image(image, exif=exif), "it")
    assert turned.size == (60, 24)


def test_a_text_cannot_pretend_to_be_an_image(llm: LLM) -> None:
    for text in (table_of(llm).marker, f"see {table_of(llm).marker} it"):
        with pytest.raises(InputError, match="image placeholders; remove"):
            llm.plan(Node(image_question(picture(1), text)))
        with pytest.raises(InputError, match="image placeholders; remove"):
            llm.plan(Node([{"role": "user", "content": text}]))


def test_ids_past_the_vocabulary_are_refused_as_ever(llm: LLM) -> None:
    with pytest.raises(InputError, match="token id"):
        llm.generate([[5, llm.spec.vocab_size]])


def test_a_model_without_its_tower_says_what_to_do(directory: Path) -> None:
    llm = LLM(str(directory), device="cpu", memory="4MiB")
    with pytest.raises(InputError, match="images=True"):
        llm.chat(image_question(picture(1)))
    (output,) = llm.chat([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], GREEDY)[0]
    (want,) = llm.chat([{"role": "user", "content": "Hi"}], GREEDY)[0]
    assert output.token_ids == want.token_ids


@pytest.mark.usefixtures("no_weights")
def test_families_without_images_are_refused_before_weights_load(tmp_path: Path) -> None:
    for family in ("llama", "got_ocr2_on_text"):
        directory = save_tiny_model(tmp_path / family, family)
        with pytest.raises(ModelError, match="support only text"):
            LLM(str(directory), images=True, device="cpu")


def test_options_that_do_not_go_with_images(directory: Path) -> None:
    for other in ({"reproducible": True}, {"quantization": "fp8"}, {"draft_model": str(directory)}):
        with pytest.raises(InputError, match=f"images is not supported with {next(iter(other))}"):
            LLM(str(directory), images=True, device="cpu", **other)


def test_malformed_parts_are_refused() -> None:
    for part in (
        {"type": "image"},
        {"type": "image", "image": 3},
        {"type": "text"},
        "text",
        {"type": "video", "video": "a.mp4"},
        {"type": "image", "image": b"", "path": "a"},
    ):
        with pytest.raises(TreeError, match=r"content\[0\]\['content'\]\[0\]"):
            Node([{"role": "user", "content": [part]}])


def test_prompt_logprobs_are_refused_with_images(llm: LLM) -> None:
    with pytest.raises(InputError, match="prompt_logprobs"):
        llm.chat(image_question(picture(1)), SamplingParams(prompt_logprobs=1))
