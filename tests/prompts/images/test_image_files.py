"""Images of runs and data that somebody else made: links, pipes, devices, numbers that are none."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Command, write_jsonl
from tiny_images import picture, save_tiny_vision_model

from treegen.common.files import read_regular
from treegen.errors import InputError, RunError
from treegen.evals.task import TaskOptions
from treegen.prompts.images.loading import ImageFile
from treegen.runs.images import RunImage, RunImages, keep_images
from treegen.tasks.jsonl import QuestionAnswer

CONTENT = b"an image"
NAME = hashlib.sha256(CONTENT).hexdigest()
IMAGE = RunImage(NAME, "x.png", (4, 3), 5)


def _keep(path: Path) -> None:
    keep_images(path, {"a": [IMAGE]}, lambda _: CONTENT)


def test_a_link_out_of_a_run_is_not_followed(tmp_path: Path) -> None:
    project, run = tmp_path / "project", tmp_path / "run"
    project.mkdir()
    run.mkdir()
    (project / "notes.tmp").write_text("mine")
    (run / "images").symlink_to(project)
    with pytest.raises(
        RunError, match="link that leads out of the run; replace the link with a folder"
    ):
        _keep(run)
    assert [each.name for each in project.iterdir()] == ["notes.tmp"]
    assert not (run / "images.json").exists()
    (project / NAME).write_bytes(CONTENT)
    assert RunImages(run).file(NAME) is None


def test_only_what_a_run_wrote_is_swept(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    left, other = tmp_path / "images" / f"{NAME}.123.tmp", tmp_path / "images" / "notes.tmp"
    left.write_text("torn")
    other.write_text("mine")
    _keep(tmp_path)
    assert sorted(each.name for each in other.parent.iterdir()) == [NAME, "notes.tmp"]


def test_an_index_that_is_no_file_is_refused(tmp_path: Path) -> None:
    index = tmp_path / "images.json"
    (tmp_path / "other.json").write_text('{"images": [], "problems": {}}')
    index.symlink_to("other.json")
    with pytest.raises(RunError, match="not a regular file"):
        RunImages.read(tmp_path)
    index.unlink()
    os.mkfifo(index)
    with pytest.raises(RunError, match="not a regular file"):
        RunImages.read(tmp_path)


@pytest.mark.parametrize("value", [1e999, -1, 0, True, 2.5, "3", None, 2**40])
@pytest.mark.parametrize("field", ["width", "height", "tokens"])
def test_numbers_of_an_index_that_are_none_are_damage(
    tmp_path: Path, field: str, value: Any
) -> None:
    _keep(tmp_path)
    index = tmp_path / "images.json"
    assert RunImages.read(tmp_path).of("a") == (IMAGE,)
    document = json.loads(index.read_text())
    document["images"][0][field] = value
    index.write_text(json.dumps(document).replace("Infinity", "1e999"))
    if field == "tokens" and value is None:  # not known
        assert RunImages.read(tmp_path).of("a")[0].tokens is None
        return
    with pytest.raises(RunError, match=r"images\.json is corrupt .* resume the run"):
        RunImages.read(tmp_path)


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.png"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, Path("/dev/zero")):
        with pytest.raises(InputError, match="not a regular file; pass the path"):
            ImageFile.of(path)
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / NAME).symlink_to("/dev/zero")
    assert RunImages(tmp_path).content(NAME) is None


def test_no_more_is_read_than_may_be(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(CONTENT)
    assert read_regular(file, len(CONTENT)) == CONTENT
    assert read_regular(file, 2) == CONTENT[:3]
    with open(file, "r+b") as grown:
        grown.truncate(2**40)  # takes no room
    with pytest.raises(InputError, match="larger than 64 MiB"):
        ImageFile.of(file)
    (tmp_path / "images").mkdir()
    file.rename(tmp_path / "images" / NAME)
    with pytest.raises(RunError, match="corrupt"):
        RunImages(tmp_path).content(NAME)


def test_a_field_without_a_name_is_no_image(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "x.jsonl", [{"": 1, "question": "What?", "answer": "1"}])
    problems = QuestionAnswer().load(TaskOptions(data=str(data))).problems
    assert [problem.images for problem in problems] == [()]


def test_images_that_a_run_has_lost_are_kept_again(tmp_path: Path, treegen: Command) -> None:
    run = tmp_path / "run"
    model = save_tiny_vision_model(tmp_path / "model", "llava", seed=1)
    names = [f"{seed}.png" for seed in range(2)]
    for seed, name in enumerate(names):
        picture(seed).save(tmp_path / name)
    rows = [{"id": "a", "question": "What?", "answer": "1", "image": names}]
    data = write_jsonl(tmp_path / "x.jsonl", rows)
    arguments = ["--data", data, "-M", model, "--images", "-T", "image_field=image"]
    done = treegen("eval", "jsonl", *arguments, "--max-tokens", 2, "-q", "-n", 2, "-o", run)
    assert done.code == 0, done.err
    before = RunImages.read(run)
    kept = sorted((run / "images").iterdir())
    assert len(kept) == 2

    def resume() -> RunImages:
        done = treegen("eval", "--resume", run, "-q")
        assert done.code == 0, done.err
        return RunImages.read(run)

    kept[0].unlink()
    lines = (run / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (run / "samples.jsonl").write_bytes(lines[0])
    assert resume() == before and kept[0].exists()  # a run that lacks a sample
    kept[0].unlink()
    assert resume() == before and kept[0].exists()  # one that lacks none
    (run / "images.json").unlink()
    again = resume()
    assert again.problems == before.problems and again.images.keys() == before.images.keys()
    original = next(tmp_path / i.name for i in before.images.values() if i.sha256 == kept[0].name)
    original.unlink()
    kept[1].unlink()
    assert resume() == again and kept[1].exists()
