"""Formats of images: an allow-list, whoever gives the file, and no count of frames."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import re
import shutil
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Command, write_jsonl
from image_cases import encode_image, table_of, url_of
from PIL import EpsImagePlugin, Image
from tiny_images import picture, save_tiny_vision_model

from treegen import LLM, AsyncLLM, InputError, SamplingParams
from treegen.prompts.images.loading import (
    FORMATS,
    ImageFile,
    check_pixels,
    load_image,
    open_image,
    read_image,
    thumbnail,
)
from treegen.runs.images import RunImages

EPS = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 8 8
%%EndComments
(mine) print
%%EOF
"""


def gif_of(frames: int) -> bytes:
    """A GIF of one pixel and many frames."""
    whole = encode_image(Image.new("P", (1, 1)), "GIF")
    start = whole.index(b",")
    return whole[:start] + whole[start:-1] * frames + b";"


@pytest.fixture(name="ghostscript")
def _ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A program in Ghostscript's place, which notes that it was started."""
    mark, program = tmp_path / "started", tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {mark}\n")
    program.chmod(0o755)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", str(program))
    with pytest.raises(Exception, match=r"."):  # Pillow itself does start it
        Image.open(io.BytesIO(EPS)).load()
    assert mark.exists()
    mark.unlink()
    yield mark
    assert not mark.exists()


@pytest.fixture(scope="module", name="llm")
def _llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    directory = save_tiny_vision_model(tmp_path_factory.mktemp("model"), "qwen2_vl", seed=1)
    return LLM(str(directory), images=True, device="cpu", memory="16MiB")


def _within(data: bytes, _: LLM, __: Path) -> None:
    ImageFile.within(data)


def _of(data: bytes, _: LLM, folder: Path) -> None:
    (folder / "x.png").write_bytes(data)
    ImageFile.of(folder / "x.png")


def _table(data: bytes, llm: LLM, _: Path) -> None:
    table_of(llm).add(url_of(data))


def _pil(data: bytes, llm: LLM, _: Path) -> None:
    table_of(llm).add(Image.open(io.BytesIO(data)))


def _chat(data: bytes, llm: LLM, _: Path) -> None:
    part = {"type": "image_url", "image_url": {"url": url_of(data)}}
    llm.chat([{"role": "user", "content": [part]}], SamplingParams(max_tokens=1))


def _page(data: bytes, _: LLM, __: Path) -> None:
    thumbnail(data, "image x.png")


WAYS: list[Callable[[bytes, LLM, Path], None]] = [_within, _of, _table, _pil, _chat, _page]


@pytest.mark.parametrize("way", WAYS)
def test_postscript_starts_no_program(
    way: Callable[[bytes, LLM, Path], None], ghostscript: Path, llm: LLM, tmp_path: Path
) -> None:
    with pytest.raises(
        InputError, match=r"(not an image in a supported format \(|treegen decodes only )PNG"
    ):
        way(EPS, llm, tmp_path)


def test_a_foreign_run_with_postscript_can_be_looked_at(
    ghostscript: Path, tmp_path: Path, treegen: Command
) -> None:
    run = tmp_path / "run"
    model = save_tiny_vision_model(tmp_path / "model", "llava", seed=1)
    picture(1).save(tmp_path / "0.png")
    rows = [{"id": "a", "question": "What?", "answer": "1", "image": "0.png"}]
    data = write_jsonl(tmp_path / "x.jsonl", rows)
    arguments = ["--data", data, "-M", model, "--images", "-T", "image_field=image"]
    done = treegen("eval", "jsonl", *arguments, "--max-tokens", 2, "-q", "-o", run)
    assert done.code == 0, done.err
    name = hashlib.sha256(EPS).hexdigest()
    index = json.loads((run / "images.json").read_text())
    old = index["images"][0]["sha256"]
    (run / "images.json").write_text(json.dumps(index).replace(old, name))
    shutil.rmtree(run / "images")
    (run / "images").mkdir()
    (run / "images" / name).write_bytes(EPS)
    assert RunImages.read(run).content(name) == EPS
    assert treegen("show", run).code == 0
    report = treegen("report", run, "-o", tmp_path / "page.html")
    assert report.code == 0, report.err


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_only_the_listed_formats_are_opened() -> None:
    Image.init()
    refused = set()
    for kind in sorted(set(Image.OPEN) & set(Image.SAVE)):
        for mode in ("RGB", "L", "P", "1"):
            try:
                data = encode_image(picture(1).convert(mode), kind)
            except (OSError, KeyError, ValueError, RuntimeError, AttributeError):
                continue
            break
        else:
            continue
        # Some formats are wrappers of one that is listed, such as MPO of JPEG.
        if Image.open(io.BytesIO(data)).format in FORMATS:
            assert load_image(data, "x").size == (40, 28)
            continue
        with pytest.raises(InputError, match="not an image in a supported format"):
            open_image(data, "x")
        refused.add(kind)
    assert refused >= {"EPS", "TIFF", "ICNS", "ICO", "PPM", "TGA", "SGI", "PCX", "DDS"}


def test_an_image_that_its_owner_decoded_may_be_of_any_format() -> None:
    lazy = Image.open(io.BytesIO(encode_image(picture(3), "TIFF")))
    with pytest.raises(InputError, match=r"TIFF image that is not decoded yet.*call its load\(\)"):
        open_image(lazy, "the image")
    lazy.load()
    assert load_image(lazy, "the image").tobytes() == picture(3).tobytes()


def test_a_photograph_with_a_second_view_is_one_image() -> None:
    data = encode_image(picture(1), "MPO", save_all=True, append_images=[picture(2)])
    assert Image.open(io.BytesIO(data)).format == "MPO"
    assert load_image(data, "x").size == (40, 28)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_animations_are_refused_in_every_format(kind: str) -> None:
    data = encode_image(picture(1), kind, save_all=True, append_images=[picture(2)])
    with pytest.raises(InputError, match="pass a single frame"):
        open_image(data, "x")
    assert open_image(encode_image(picture(1), kind), "x").size == (40, 28)


def test_frames_are_not_counted() -> None:
    data = gif_of(200_000)
    begin = time.process_time()
    with pytest.raises(InputError, match="animated"):
        open_image(data, "x")
    taken = time.process_time() - begin
    begin = time.process_time()
    assert Image.open(io.BytesIO(data)).n_frames == 200_000  # type: ignore[attr-defined]
    assert taken * 10 < time.process_time() - begin


def png_of(side: int) -> bytes:
    """A small file of one colour and many pixels."""
    return encode_image(Image.new("L", (side, side), 7), "PNG")


def test_pixels_of_a_call_are_limited_by_their_headers_alone(llm: LLM) -> None:
    sources = [url_of(png_of(64)), url_of(png_of(64))]
    check_pixels(sources, 2 * 64 * 64)
    with pytest.raises(InputError, match="at least 8,192 pixels in total, but the limit is 8,191"):
        check_pixels(sources, 2 * 64 * 64 - 1)

    def chunk(kind: bytes, body: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + body))
        return struct.pack(">I", len(body)) + kind + body + check

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 8000, 8000, 8, 2, 0, 0, 0))
    claims = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", b"")
    with pytest.raises(InputError, match="at least 64,000,000 pixels"):
        check_pixels([claims], 1000)


def test_a_large_image_keeps_nobody_waiting(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are answered, and known images are read, while an image is being processed."""
    table = llm.images
    assert table is not None
    known = table.add(picture(21))
    begun, go_on, threads = threading.Event(), threading.Event(), set[str]()
    real = table._process

    def slow(*given: Any) -> Any:
        threads.add(threading.current_thread().name)
        begun.set()
        assert go_on.wait(30)
        return real(*given)

    monkeypatch.setattr(table, "_process", slow)
    part = {"type": "image_url", "image_url": {"url": url_of(png_of(100))}}
    content = [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    params = SamplingParams(max_tokens=2, temperature=0)

    async def run() -> None:
        with AsyncLLM(llm) as served:
            late = asyncio.create_task(served.generate([content], params))
            await asyncio.to_thread(begun.wait, 30)
            _, ((done,),) = await asyncio.wait_for(served.generate(["b"], params), 30)
            assert done.num_tokens == 2 and not late.done()
            assert await asyncio.wait_for(asyncio.to_thread(table.inputs, known), 30)
            go_on.set()
            _, ((image,),) = await late
            assert image.num_tokens == 2

    asyncio.run(run())
    assert len(threads) == 1 and next(iter(threads)).startswith("treegen-images")


def test_a_served_model_refuses_images_with_too_many_pixels(llm: LLM) -> None:
    part = {"type": "image", "image": url_of(png_of(100))}
    content = [{"role": "user", "content": [part, {"type": "text", "text": "a"}, part]}]
    params = SamplingParams(max_tokens=1)

    async def run(most: int | None) -> None:
        with AsyncLLM(llm, max_image_pixels=most) as served:
            await served.generate([content], params)
            await served.encode([content])

    asyncio.run(run(None))
    asyncio.run(run(20_000))
    with pytest.raises(InputError, match=re.escape("the limit is 19,999")):
        asyncio.run(run(19_999))
    with pytest.raises(InputError, match="max_image_pixels"):
        asyncio.run(run(0))


def test_bad_parts_are_told_with_their_prompt(llm: LLM) -> None:
    async def run(part: Any) -> None:
        with AsyncLLM(llm) as served:
            content = [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
            await served.generate([content], SamplingParams(max_tokens=1))

    with pytest.raises(InputError, match="not an image in a supported format"):
        asyncio.run(run({"type": "image", "image": url_of(EPS)}))
    assert read_image(url_of(EPS)) == EPS
