"""The images of a run: kept in its directory, and shown in the terminal and on its page."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browsing import Visit
from cli_cases import Command, samples_of, write_jsonl
from image_cases import encode_image
from tiny_images import picture, save_tiny_vision_model

from treegen.errors import RunError
from treegen.report.exchange import export_run
from treegen.report.html_page import write_page
from treegen.report.html_page_data import build_page_data, make_thumbnails
from treegen.report.load import load_run
from treegen.runs import RunDir, RunSettings
from treegen.runs.images import RunImage, RunImages, keep_images

HOSTILE = "<img src=x onerror='window.owned = 1'>\x1b[31m\u202e.png"


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision_model(tmp_path_factory.mktemp("model"), "llava", seed=1)


@pytest.fixture(scope="module", name="begun")
def _begun(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A finished run of two problems on three images, and the folder of its data."""
    folder = tmp_path_factory.mktemp("data")
    for seed, name in enumerate(("1.png", "2.png", HOSTILE)):
        picture(seed).save(folder / name)
    chat = [
        {"role": "system", "content": "Look."},
        {
            "role": "user",
            "content": [
                {"type": "image", "image": HOSTILE},
                {"type": "text", "text": "Like"},
                {"type": "image", "url": "1.png"},
                {"type": "text", "text": "?"},
            ],
        },
    ]
    rows: list[dict[str, Any]] = [
        {"id": "a", "chat": chat, "answer": "1"},
        {"id": "b", "chat": chat[1:], "answer": "2"},
        {"id": "c", "chat": [{"role": "user", "content": "No image"}], "answer": "3"},
    ]
    data, out = write_jsonl(folder / "questions.jsonl", rows), folder / "run"
    from treegen import evaluate

    evaluate(
        "jsonl",
        model=str(model),
        data=str(data),
        images=True,
        output=str(out),
        num_samples=2,
        max_tokens=4,
        extra={"messages_field": "chat"},
    )
    return out, folder


@pytest.fixture(name="run")
def _run(begun: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the run, whose images are gone: only the file of questions is there."""
    out, folder = begun
    path = tmp_path / "run"
    shutil.copytree(out, path)
    shutil.copy(folder / "questions.jsonl", path / "questions.jsonl")
    text = (path / "run.json").read_text()
    (path / "run.json").write_text(text.replace(str(folder / "questions"), str(path / "questions")))
    return path


def test_a_run_keeps_each_image_once(begun: tuple[Path, Path]) -> None:
    out, folder = begun
    files = {
        hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("1.png", HOSTILE)
    }
    assert {file.name for file in (out / "images").iterdir()} == files
    for file in (out / "images").iterdir():
        assert hashlib.sha256(file.read_bytes()).hexdigest() == file.name
    by_problem: dict[str, Any] = {
        record["problem_id"]: record.get("images") for record in samples_of(out)
    }
    first, second = by_problem["a"]
    assert {first, second} == files
    assert by_problem["b"] == [first, second]
    assert by_problem["c"] is None
    images = RunImages.read(out)
    assert [image.name for image in images.of("a")] == [HOSTILE, "1.png"]
    assert images.of("a")[1].size == picture(0).size
    assert all(image.tokens for image in images.of("a"))


def test_it_is_scored_shown_and_continued_without_the_originals(
    run: Path, treegen: Command
) -> None:
    before = samples_of(run)
    assert treegen("score", run, "-q").code == 0
    shown = treegen("show", run, "--problem", "a")
    assert "image: 1.png, " in shown.out
    assert " pixels, " in shown.out and " tokens" in shown.out
    assert "\x1b" not in shown.out and "\u202e" not in shown.out
    lines = (run / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (run / "samples.jsonl").write_bytes(b"".join(lines[:2]))
    done = treegen("eval", "--resume", run, "-q")
    assert done.code == 0, done.err

    def contents(records: list[dict[str, Any]]) -> list[Any]:
        return sorted(
            (each["problem_id"], each["sample_index"], each["text"], each.get("images"))
            for each in records
        )

    assert contents(samples_of(run)) == contents(before)


def test_what_is_missing_is_told(run: Path, treegen: Command) -> None:
    kept = next(iter((run / "images").iterdir()))
    kept.unlink()
    assert treegen("score", run, "-q").code == 0  # no pixel is needed for that
    assert "1 of 2 images are not stored" in treegen("show", run).err
    (run / "samples.jsonl").write_bytes(b"")
    failed = treegen("eval", "--resume", run, "-q")
    assert failed.code == 2
    name = {i.sha256: i.name for i in RunImages.read(run).images.values()}[kept.name]
    assert ("1.png" if name == "1.png" else "onerror") in failed.err
    other = next(iter((run / "images").iterdir()))
    other.write_bytes(b"corrupt")
    assert "is corrupt" in treegen("eval", "--resume", run, "-q").err
    (run / "images.json").write_text('{"images": [{"sha256": "../../x"}], "problems": {}}')
    assert "images.json is corrupt" in treegen("show", run).err


def test_a_crash_while_images_are_kept_leaves_a_run_that_goes_on(tmp_path: Path) -> None:
    data = {hashlib.sha256(each).hexdigest(): each for each in (b"a" * 100, b"b" * 100, b"c" * 100)}
    images = [RunImage(name, "x.png", (1, 1)) for name in data]

    def until(number: int) -> Callable[[str], bytes]:
        left = iter(range(number))

        def content(name: str) -> bytes:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return data[name]

        return content

    with pytest.raises(KeyboardInterrupt):
        keep_images(tmp_path, {"a": images}, until(2))
    assert RunImages.read(tmp_path).images == {}
    keep_images(tmp_path, {"a": images[:1], "b": images}, until(1))  # two were there already
    found = RunImages.read(tmp_path)
    assert [found.content(image.sha256) for image in found.of("b")] == list(data.values())
    keep_images(tmp_path / "", {"a": images}, until(0))
    assert not list((tmp_path / "images").glob("*.tmp"))


def test_a_run_keeps_no_more_than_its_bound(tmp_path: Path) -> None:
    data = {hashlib.sha256(each).hexdigest(): each for each in (b"a" * 60, b"b" * 60, b"c" * 30)}
    images = [RunImage(name, "x.png", (1, 1)) for name in data]
    keep_images(tmp_path, {"a": images}, data.__getitem__, max_bytes=100)
    found = RunImages.read(tmp_path)
    assert [found.file(image.sha256) is not None for image in images] == [True, False, True]
    assert found.num_left_out == 1
    (tmp_path / "images").chmod(0o755)
    with pytest.raises(RunError, match="cannot store images"):
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "images").write_text("a file")
        keep_images(tmp_path / "other", {"a": images}, data.__getitem__)


def test_thumbnails_are_bounded(run: Path) -> None:
    view = load_run(run)
    assert view.images is not None
    shown = make_thumbnails(view.images)
    assert set(shown) == set(view.images.images)
    assert all(url.startswith("data:image/jpeg;base64,") for url in shown.values())
    one = next(iter(shown.values()))
    assert len(make_thumbnails(view.images, max_bytes=len(one))) == 1
    assert make_thumbnails(view.images, max_bytes=10) == {}
    (run / "images" / next(iter(shown))).write_bytes(b"corrupt")
    assert len(make_thumbnails(view.images)) == 1
    parts = {blob.id for blob in build_page_data(view, "run", {})}
    assert "run-images-0" in parts


def test_the_page_shows_them(run: Path, visit: Callable[..., Visit]) -> None:
    path = run / "report.html"
    write_page([load_run(run)], path, plots=False)
    page = (opened := visit(path)).page
    page.locator(".samples .row").first.click()
    images = page.locator(".samples .detail .images img")
    opened.wait(lambda: images.count() == 2)
    for index in range(2):
        assert images.nth(index).evaluate("image => image.decode().then(() => image.naturalWidth)")
    names = page.locator(".samples .detail figcaption").all_inner_texts()
    assert "1.png" in names[1] and "onerror" in names[0]
    opened.check()


def test_exports_name_the_images_of_prompts(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("inspect_ai")
    pandas = pytest.importorskip("pandas")
    image = {"bytes": encode_image(picture(0)), "path": "1.png"}
    row = {"questionId": "1", "question": "What?", "answers": ["1"], "image": image}
    pandas.DataFrame([row]).to_parquet(tmp_path / "data.parquet")
    from treegen import evaluate

    run = tmp_path / "run"
    choices: dict[str, Any] = {"model": str(model), "data": str(tmp_path / "data.parquet")}
    evaluate("docvqa", **choices, images=True, output=str(run), max_tokens=4, progress=False)
    (inspect,) = export_run(run, "inspect", tmp_path / "log.json")
    (sample,) = json.loads(inspect.read_text())["samples"]
    assert sample["input"][0]["content"].startswith("[image 1.png]\nWhat?")
    _, samples = export_run(run, "lm-eval", tmp_path)
    (message,) = json.loads(json.loads(samples.read_text())["arguments"]["gen_args_0"]["arg_0"])
    assert message["content"] == sample["input"][0]["content"]


def test_a_run_that_ends_before_its_first_sample_leaves_no_images(tmp_path: Path) -> None:
    settings = RunSettings(identity={}, problem_ids=["a"], planned=1, free={})
    with RunDir.create(tmp_path / "run", settings) as run:
        content = b"image"
        image = RunImage(hashlib.sha256(content).hexdigest(), "x.png", (1, 1))
        keep_images(run.path, {"a": [image]}, lambda _: content)
        run.discard()
    assert not (tmp_path / "run").exists()


# A file of questions with images, from the command line


@pytest.fixture(name="data")
def _data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for seed in (1, 2):
        picture(seed).save(folder / f"{seed}.png")
    rows: list[dict[str, Any]] = [
        {"id": "a", "question": "What is it?", "answer": "1", "image": "1.png"},
        {"id": "b", "question": "How many?", "answer": "2", "image": "1.png"},
        {"id": "c", "question": "Which?", "answer": "3", "image": ["1.png", "2.png"]},
        {"id": "d", "question": "None", "answer": "4", "image": None},
    ]
    return write_jsonl(folder / "questions.jsonl", rows)


def test_questions_on_images(treegen: Command, model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    args = ["--data", data, "-M", model, "--images", "-T", "image_field=image"]
    planned = treegen("plan", "jsonl", *args, "-n", 8, "--json")
    assert planned.code == 0, planned.err
    args += ["--max-tokens", 5, "-q"]
    done = treegen("eval", "jsonl", *args, "-n", 8, "-o", out)
    assert done.code == 0, done.err
    assert len(samples_of(out)) == 32
    usage = json.loads((out / "results.json").read_text())["usage"]
    assert usage["images_encoded"] == 2
    assert usage["prompt_tokens_computed"] < usage["prompt_tokens_unshared"] / 8
    assert treegen("score", out, "-q").code == 0
    shown = treegen("show", out, "--tree", "a")
    assert shown.code == 0, shown.err
    assert "1.png" in shown.out
    assert treegen("report", out).code == 0
    picture(3).save(data.parent / "1.png")
    assert "problems" in treegen("eval", "--resume", out, "-q").error


def test_what_cannot_be_asked_is_told_before_weights_load(
    treegen: Command, model: Path, data: Path, no_weights: None
) -> None:
    arguments = ["eval", "jsonl", "--data", data, "-M", model, "-T", "image_field=image"]
    assert "--images" in treegen(*arguments).error
    assert "--num-fewshot" in treegen(*arguments, "--images", "--num_fewshot", 2).error
    (data.parent / "2.png").write_bytes(b"GIF89a")
    done = treegen("plan", *arguments[1:], "--images")
    assert done.code == 0
    assert "2.png" in done.err
