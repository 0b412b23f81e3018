"""Task folders of Harbor: what is read, what a copy of files can build, and what is refused."""

import os
from pathlib import Path

import pytest

from treegen.errors import DataError
from treegen.evals.task import TaskOptions
from treegen.tasks.agents.dockerfile import copied_files
from treegen.tasks.agents.harbor import (
    as_problem,
    check_image,
    python_test,
    read_folder,
    read_task,
)
from treegen.tasks.agents.harbor_task import Harbor

DOCKERFILE = """\
# A comment
FROM python:3.12-slim
LABEL kind="test"
WORKDIR /app
COPY main.py \\
    lib/ ./
COPY data/*.txt data/
COPY ["notes.md", "README.md"]
"""
TEST = """\
#!/bin/bash
set -euo pipefail
python3 /tests/check.py
if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""


def make_task(folder: Path, **files: str) -> Path:
    texts = {
        "task.toml": 'version = "1.0"\n[metadata]\ndifficulty = "easy"\n'
        "[agent]\ntimeout_sec = 60.0\n[environment]\ncpus = 1\n",
        "instruction.md": "Make the tests pass.\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/main.py": "print(1)\n",
        "environment/lib/util.py": "x = 1\n",
        "environment/lib/deep/more.py": "y = 2\n",
        "environment/data/a.txt": "a\n",
        "environment/data/b.bin": "b\n",
        "environment/notes.md": "notes\n",
        "tests/test.sh": TEST,
        "tests/check.py": "assert True\n",
        "solution/solve.sh": "echo secret\n",
        **files,
    }
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_a_folder_is_read(tmp_path: Path) -> None:
    task = read_task(make_task(tmp_path / "hello"))
    assert (task.name, task.instruction) == ("hello", "Make the tests pass.")
    assert (task.agent_seconds, task.verifier_seconds) == (60.0, 600.0)
    assert task.metadata == {"difficulty": "easy"} and task.image is None
    assert set(task.tests) == {"test.sh", "check.py"}
    assert not any("solve" in path for path in (*task.environment, *task.tests))
    files, workdir = copied_files(task)
    assert workdir == "/app"
    assert files == {
        "main.py": b"print(1)\n",
        "util.py": b"x = 1\n",
        "deep/more.py": b"y = 2\n",
        "data/a.txt": b"a\n",
        "README.md": b"notes\n",
    }
    assert python_test(task) == "check.py"
    problem = as_problem(task)
    assert problem.question == "Make the tests pass."
    assert problem.metadata == {"difficulty": "easy"}
    assert "assert True" not in str(problem)


def test_a_folder_of_folders_is_read_in_order(tmp_path: Path) -> None:
    for name in ("b", "a"):
        make_task(tmp_path / name)
    make_task(tmp_path / "c", **{"task.toml": "no = = toml"})
    tasks, skipped = read_folder(tmp_path)
    assert [task.name for task in tasks] == ["a", "b"]
    assert "could not be read as TOML" in skipped[0].reason and "c" in skipped[0].source
    assert [task.name for task in read_folder(tmp_path / "a")[0]] == ["a"]
    with pytest.raises(DataError, match="no readable Harbor task was found in"):
        read_folder(tmp_path / "a" / "tests")


def test_files_without_a_dockerfile_are_the_working_directory(tmp_path: Path) -> None:
    folder = make_task(tmp_path / "plain")
    (folder / "environment" / "Dockerfile").unlink()
    assert copied_files(read_task(folder))[0]["lib/util.py"] == b"x = 1\n"


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("environment/Dockerfile", "FROM x\nRUN apt-get install gcc\n", "the step RUN apt-get"),
        ("environment/Dockerfile", "FROM x\nENV A=1\n", "the step ENV A=1"),
        ("environment/Dockerfile", "FROM x\nCOPY --from=y a b\n", "the step COPY --from=y"),
        ("environment/Dockerfile", "FROM x\nADD https://x/y z\n", "the step ADD https"),
        ("environment/Dockerfile", "FROM x\nWORKDIR /app\nCOPY main.py /etc/\n", "to /etc/main.py"),
        (
            "environment/Dockerfile",
            "FROM x\nCOPY ../tests /app/\n",
            "which is outside environment/",
        ),
        ("environment/Dockerfile", "FROM x\nCOPY nothing /app/\n", "which is not in environment/"),
        ("environment/Dockerfile", "FROM x\nCOPY 'main.py /app\n", "could not be parsed"),
        ("environment/docker-compose.yaml", "services: {}\n", "starts more containers"),
    ],
)
def test_unsupported_dockerfile_steps_are_named(
    tmp_path: Path, name: str, text: str, reason: str
) -> None:
    task = read_task(make_task(tmp_path / "odd", **{name: text}))
    with pytest.raises(DataError, match="local cannot build the Harbor task odd") as refused:
        copied_files(task)
    assert reason in str(refused.value) and "environment" in str(refused.value)


def test_an_image_and_other_tests_are_refused(tmp_path: Path) -> None:
    toml = '[environment]\ndocker_image = "x/y:1"\n'
    folder = make_task(tmp_path / "image", **{"task.toml": toml})
    (folder / "environment" / "Dockerfile").unlink()
    with pytest.raises(DataError, match="names the image x/y:1 and has no Dockerfile"):
        copied_files(read_task(folder))
    for script, reason in (
        ("apt-get update\n", "has an unsupported command: apt-get update"),
        ("python3 /tests/other.py\n", "must run exactly one Python program"),
        ("python3 /tests/check.py; rm -rf /\n", "has an unsupported command"),
    ):
        task = read_task(make_task(tmp_path / "tests", **{"tests/test.sh": script}))
        with pytest.raises(DataError, match=reason):
            python_test(task)


@pytest.mark.parametrize("place", ["environment/leak", "tests/leak", "instruction.md", "tests"])
@pytest.mark.parametrize("is_folder", [False, True])
def test_links_never_lead_out_of_a_folder(tmp_path: Path, place: str, is_folder: bool) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "test.sh").write_text("secret")
    folder = make_task(tmp_path / "links")
    path = folder / place
    if path.is_dir():
        path.rename(tmp_path / "away")
    path.unlink(missing_ok=True)
    path.symlink_to(secret if is_folder else secret / "test.sh")
    with pytest.raises(DataError):
        read_task(folder)


def test_wrong_configurations_are_errors(tmp_path: Path) -> None:
    for toml, reason in (
        ("[agent]\ntimeout_sec = -1\n", "timeout_sec"),
        ("agent = 3\n", "agent in .* must be a table"),
        ("[[steps]]\nname = 'a'\n", "several steps"),
    ):
        with pytest.raises(DataError, match=reason):
            read_task(make_task(tmp_path / "wrong", **{"task.toml": toml}))


def test_metadata_never_replaces_files(tmp_path: Path) -> None:
    toml = '[metadata]\nwhen = 2026-01-01\n[metadata.files]\n"main.py" = "import evil"\n'
    task = read_task(make_task(tmp_path / "meta", **{"task.toml": toml}))
    assert as_problem(task).metadata == {}
    assert copied_files(task)[0]["main.py"] == b"print(1)\n"


def test_a_problem_depends_on_all_files(tmp_path: Path) -> None:
    problem = as_problem(read_task(make_task(tmp_path / "task")))
    for name in ("tests/check.py", "environment/main.py", "tests/more.py"):
        changed = as_problem(read_task(make_task(tmp_path / "task", **{name: f"# {name}\n"})))
        assert changed.answer != problem.answer
        problem = changed


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("FROM a AS build\nCOPY main.py /x/\nFROM b\nWORKDIR /app\n", "several stages"),
        ("FROM x\nWORKDIR $HOME\n", "a variable in the step WORKDIR"),
        ("FROM x\nWORKDIR /app\nCOPY main.py $X/\n", "a variable in the step COPY"),
        ('FROM x\nCOPY ["main.py", 1]\n', "could not be parsed"),
        ('FROM x\nCOPY ["", "/app/"]\n', "could not be parsed"),
        ("FROM x\nCOPY " + "[" * 100_000 + "\n", "could not be parsed"),
        ("FROM x\nADD pack.tar.gz /app/\n", "the step ADD pack.tar.gz"),
        ("FROM x\nWORKDIR /app\nCOPY [ab].py ./\n", "could not be parsed"),
        ("FROM x\nWORKDIR /app\nCOPY 'ma[i]n.py' ./\n", "brackets or escapes"),
        ("# escape=`\nFROM x\nCOPY main.py `\n  /app/\n", "the escape character"),
        ("FROM x\nCOPY\n", "the step COPY"),
        ("FROM x\nRUN\tmake\n", "the step RUN make"),
        ("FROM x\nCMD echo \\\\\nRUN rm main.py\n", "the step RUN rm main.py"),
        ("# ESCAPE=`\nFROM x\nCMD c:\\\nRUN rm main.py\n", "the escape character"),
        ("FROM x\nCOPY " + "*a" * 24 + " /app/\n", "too many wildcards"),
        ("FROM x\nCOPY **/a/**/b/**/c /app/\n", "too many wildcards"),
        ("FROM x\nWORKDIR /app\n" + "COPY . .\n" * 200, "more than 200 steps"),
        ("FROM x\nCOPY --chmod=400 main.py /app/\n", "the step COPY --chmod=400"),
        ("FROM x\nCOPY --chown=nobody main.py /app/\n", "the step COPY --chown=nobody"),
        ('FROM x\nENTRYPOINT ["setup"]\n', 'the step ENTRYPOINT ["setup"]'),
        ("", "no FROM"),
        ("# FROM x\n", "no FROM"),
        ("WORKDIR /app\nFROM x\nCOPY . .\n", "the step WORKDIR /app before FROM"),
        (
            "FROM x\nWORKDIR /app\nCOPY data/*.* all\n",
            "copies several files (data/*.*) to /app/all",
        ),
        ("FROM x\nWORKDIR /app\nCOPY main.py a\nCOPY lib a/\n", "a file to /app/a, which is a"),
        ("FROM x\nWORKDIR /app\nCOPY main.py a/b\nCOPY lib a/b\n", "to /app/a/b, which is a"),
        ("FROM x\nCOPY main.py /app\nWORKDIR /app\n", "a file to /app, which is a directory"),
        ("FROM x\nWORKDIR /a\0pp\n", "NUL"),
        ('FROM x\nCOPY ["main.py", "/app/\\u0000"]\n', "could not be parsed"),
        ('FROM x\nCOPY ["main.py", "/app/\\ud800"]\n', "could not be parsed"),
    ],
)
def test_dockerfiles_that_would_be_read_wrongly_are_refused(
    tmp_path: Path, text: str, reason: str
) -> None:
    task = read_task(make_task(tmp_path / "odd", **{"environment/Dockerfile": text}))
    with pytest.raises(DataError) as refused:
        copied_files(task)
    assert reason in str(refused.value)


def test_ignored_files_are_not_copied(tmp_path: Path) -> None:
    rules = "# a comment\n*.md\n!keep.md\n/lib/deep\n**/*.pyc\n\nda?a\n./secret/\n"
    names = ("keep.md", "lib/keep.md", "lib/a.pyc", "secret/key", "lib/secret/key")
    files = {f"environment/{name}": name for name in names}
    text = "FROM x\nWORKDIR /app\nCOPY . .\n"
    folder = make_task(
        tmp_path / "ignore",
        **{"environment/Dockerfile": text, "environment/.dockerignore": rules, **files},
    )
    copied, _ = copied_files(read_task(folder))
    assert set(copied) == {"main.py", "lib/util.py", "keep.md", "lib/keep.md", "lib/secret/key"}


def test_patterns_stay_within_one_name(tmp_path: Path) -> None:
    files = {"environment/data/sub/c.txt": "c", "environment/data/d.txt": "d"}
    text = "FROM x\nWORKDIR /app\nCOPY data/*.txt flat/\nCOPY l*b d?ta/ both/\n"
    folder = make_task(tmp_path / "glob", **{"environment/Dockerfile": text, **files})
    copied, _ = copied_files(read_task(folder))
    both = {"util.py", "deep/more.py", "a.txt", "b.bin", "d.txt", "sub/c.txt"}
    flat = {"flat/a.txt", "flat/d.txt"}
    assert set(copied) == flat | {f"both/{name}" for name in both}


@pytest.mark.parametrize(
    ("steps", "copies"),
    [
        ("COPY data/a.* x", {"x"}),  # one file, so the target names it
        ("COPY data/a.* x/", {"x/a.txt"}),
        ("COPY main.py x/y\nCOPY data/a.* x", {"x/y", "x/a.txt"}),  # x is a directory by now
        ("COPY main.py x/y\nADD data/*.* x", {"x/y", "x/a.txt", "x/b.bin"}),
        ("COPY main.py x/y\nCOPY data/a.txt x", {"x/y", "x/a.txt"}),
        ("COPY data/a.txt /app", {"a.txt"}),  # the working directory is one, too
        ("COPY data/a.txt .", {"a.txt"}),
        ("WORKDIR sub/deep\nWORKDIR ..\nCOPY data/*.* deep", {"deep/a.txt", "deep/b.bin"}),
        ("COPY main.py x\nCOPY data/a.txt x", {"x"}),
        ("COPY d* x", {"x/a.txt", "x/b.bin"}),
        ("COPY data x\nCOPY main.py x", {"x/a.txt", "x/b.bin", "x/main.py"}),
    ],
)
def test_a_target_that_is_a_directory_gets_the_copies(
    tmp_path: Path, steps: str, copies: set[str]
) -> None:
    text = f"FROM x\nWORKDIR /app\n{steps}\n"
    task = read_task(make_task(tmp_path / "onto", **{"environment/Dockerfile": text}))
    assert set(copied_files(task)[0]) == copies


def test_names_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    for place in ("environment", "tests"):
        folder = make_task(tmp_path / place)
        (folder / place / os.fsdecode(b"a\xff.py")).write_text("")
        with pytest.raises(DataError, match=r"the name 'a\\udcff.py' .* is not UTF-8; rename the"):
            read_task(folder)
    (tmp_path / "tests").rename(tmp_path / os.fsdecode(b"\xff"))
    tasks, skipped = read_folder(make_task(tmp_path / "good").parent)
    assert [task.name for task in tasks] == ["good"]
    assert [row.reason for row in skipped][-1].startswith("the name '\\udcff'")
    with pytest.raises(DataError):
        read_folder(tmp_path / "a\0b")


def test_docker_builds_nothing_without_from(tmp_path: Path) -> None:
    for text, is_built in (("from x\n", True), ("# FROM x\nWORKDIR /app\n", False)):
        task = read_task(make_task(tmp_path / "image", **{"environment/Dockerfile": text}))
        if is_built:
            check_image(task)
        else:
            with pytest.raises(DataError, match="its Dockerfile has no FROM"):
                check_image(task)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (
            "python3 /tests/check.py\necho 1 > /logs/verifier/reward.txt\n",
            "unsupported command: echo 1",
        ),
        (TEST.replace("-eq 0", "-ne 0"), "unsupported command: if"),
        (TEST.replace("echo 1", "echo 2"), "unsupported command: if"),
        ("cd /tests\npython3 /tests/check.py\n", "unsupported command: cd /tests"),
        ("cd\npython3 /tests/check.py\n", "unsupported command: cd"),
        ("set -n\npython3 /tests/check.py\n", "unsupported command: set -n"),
        ("set -o noexec\npython3 /tests/check.py\n", "unsupported command: set -o noexec"),
        ("set " + "-e " * 400 + "\npython3 /tests/check.py\n", "longer than 1,000 characters"),
        ("cd $(reboot)\npython3 /tests/check.py\n", "unsupported command: cd"),
        ("python3 /tests/check.py\x0creboot\n", "unsupported command: python3"),
        ("python3 /tests/check.py\r\n", "unsupported command: python3"),
        ("python3 /tests/../check.py\n", "must run exactly one Python program"),
    ],
)
def test_other_rewards_than_the_exit_status_are_refused(
    tmp_path: Path, script: str, reason: str
) -> None:
    folder = make_task(tmp_path / "task")
    (folder / "tests" / "test.sh").write_bytes(script.encode())
    with pytest.raises(DataError) as refused:
        python_test(read_task(folder))
    assert reason in str(refused.value)


def test_deeply_nested_input_is_an_error(tmp_path: Path) -> None:
    toml = "a = " + "[" * 50_000
    with pytest.raises(DataError, match="could not be read as TOML"):
        read_task(make_task(tmp_path / "deep", **{"task.toml": toml}))


def test_a_configuration_that_cannot_be_read_is_not_called_no_toml(tmp_path: Path) -> None:
    folder = make_task(tmp_path / "latin")
    (folder / "task.toml").write_bytes(b"# \xe9")
    with pytest.raises(DataError, match=r"^\S+task.toml is not UTF-8"):
        read_task(folder)


@pytest.mark.parametrize(
    "toml",
    [
        "x = " + "1" * 5000,
        "[agent]\ntimeout_sec = 0x" + "f" * 5000,
        "[environment]\ndocker_image = 0x" + "f" * 5000,
    ],
)
def test_one_bad_folder_does_not_end_the_load(tmp_path: Path, toml: str) -> None:
    make_task(tmp_path / "good")
    make_task(tmp_path / "bad", **{"task.toml": toml})
    tasks, skipped = read_folder(tmp_path)
    assert [task.name for task in tasks] == ["good"]
    assert "bad" in skipped[0].source and len(skipped[0].reason) < 500


def test_metadata_has_no_huge_numbers(tmp_path: Path) -> None:
    toml = f"[metadata]\nhuge = 0x{'f' * 5000}\nyear = 2026\n"
    assert as_problem(read_task(make_task(tmp_path / "task", **{"task.toml": toml}))).metadata == {
        "year": 2026
    }


def test_paths_that_are_too_long_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_task(tmp_path / "long")
    monkeypatch.chdir(folder / "tests")
    for _ in range(20):
        os.mkdir("d" * 250)
        os.chdir("d" * 250)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="tests"):
        read_task(folder)


def load(folder: Path, environment: str = "local") -> None:
    """Raise DataError if an environment cannot build a task."""
    Harbor().load_for(TaskOptions(data=str(folder)), environment)


@pytest.mark.parametrize(
    "text",
    [
        "Create hello.txt in /app.",
        "Write `/tmp/out.txt`.",
        "Write /answer.txt.",
        "Write /mnt/sub/answer.txt.",
        "See /work-dir for the files",
        "assert (Path('/app') / 'hello.txt').exists()",
        'open( "/answer")',
        "Read /etc/passwd",
    ],
)
@pytest.mark.parametrize("name", ["instruction.md", "tests/check.py"])
def test_absolute_paths_are_refused_without_containers(
    tmp_path: Path, name: str, text: str
) -> None:
    dockerfile = "FROM x\nWORKDIR /work-dir\nCOPY main.py .\n"
    files = {"environment/Dockerfile": dockerfile, name: text}
    with pytest.raises(DataError, match="contain absolute paths, such as"):
        load(make_task(tmp_path / "task", **files))


@pytest.mark.parametrize(
    "text",
    [
        "Make it and/or mend src/app/main.py and ../tests/a.py.",
        "See https://example.org/app/tests/x.html or http://localhost:80/tmp.",
        "<b>bold</b> </app> // a comment /* another */",
        "a / b; a//b; 1/2.5; x /2.5",
        "#!/usr/bin/env python3\nimport re",
        "re.match('/[a-z]+', client.get('/items').text)",
        "glob('**/tests/*.py'); f'{root}/app/x'; /apple",
    ],
)
@pytest.mark.parametrize("name", ["instruction.md", "tests/check.py"])
def test_other_slashes_are_no_absolute_paths(tmp_path: Path, name: str, text: str) -> None:
    dockerfile = "FROM x\nWORKDIR /app\nCOPY main.py .\n"
    load(make_task(tmp_path / "task", **{"environment/Dockerfile": dockerfile, name: text}))


def test_modes_of_files_are_never_lost(tmp_path: Path) -> None:
    folder = make_task(tmp_path / "task")
    (folder / "tests" / "test.sh").chmod(0o755)
    copied_files(read_task(folder))
    for name in ("tests/check.py", "environment/main.py"):
        (folder / name).chmod(0o755)
        with pytest.raises(DataError, match=f"the file {name} is executable"):
            copied_files(read_task(folder))


@pytest.mark.parametrize("line", ["set -euxo pipefail", "set -e -o pipefail", "set +x", "cd /app/"])
def test_setups_without_effect_on_the_test_are_allowed(tmp_path: Path, line: str) -> None:
    script = f"{line}\npython3 /tests/check.py\n"
    assert python_test(read_task(make_task(tmp_path / "task", **{"tests/test.sh": script})))


@pytest.mark.timeout(20)
def test_patterns_are_matched_in_short_time(tmp_path: Path) -> None:
    name = "a" * 200
    rules = "*a" * 8 + "b\n*a?a*/*a*a*\n**/*a*x*\n"
    text = "FROM x\nWORKDIR /app\nCOPY . .\nCOPY *a*b?*c *.d*.e /app/\n"
    files = {f"environment/{place}": "" for place in (name, f"sub/{name}", "aaba-c", "x.d.d.e")}
    files |= {"environment/Dockerfile": text, "environment/.dockerignore": rules}
    copied, _ = copied_files(read_task(make_task(tmp_path / "task", **files)))
    assert {name, f"sub/{name}", "aaba-c", "x.d.d.e"} <= set(copied)
