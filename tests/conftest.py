"""Fixtures and settings for all tests; this file must not import torch or transformers."""

import asyncio
import atexit
import fcntl
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Read when the libraries are imported, so set before any test module is.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Test tensors are tiny. Threads that wait for each other take many times as long on busy cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests start hundreds of processes. Without bytecode files, each process would compile treegen.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Verdicts that one test has kept must not be another's.
os.environ["TREEGEN_CACHE"] = ""

import pytest
from browsing import Visit, launched, visiting
from cli_cases import SMALL, Command, build_checkpoint, run_command
from hypothesis import settings
from kept_folders import keep_folders_in

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from treegen.model.rank_processes import RankGroup

sys.dont_write_bytecode = False
# A shell's background job starts with SIGINT ignored, nohup with SIGHUP, and so would the commands
# under test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in (signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)

REPOSITORY = Path(__file__).resolve().parent.parent

# The same examples on every machine and in every run. To look for new ones:
# HYPOTHESIS_PROFILE=explore pytest
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.register_profile("explore", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


# Files that take long. Workers that are given whole files begin with them, so that none is alone
# with one at the end. Those that mostly wait for other processes come first.
LONG = (
    "runs/test_kill.py",
    "cluster/test_cluster_runs.py",
    "cluster/test_cluster.py",
    "report/certify/test_certify.py",
    "engine/test_weight_updates.py",
    "model/test_families.py",
    "model/test_compiled.py",
    "bench/test_benchmark_scripts.py",
    "docs/test_docs.py",
    "docs/test_notebooks.py",
    "docs/test_site.py",
    "docs/test_integrations_docs.py",
    "engine/test_selected_keys.py",
    "cli/test_cli_backends.py",
    "model/test_tensor_parallel.py",
    "tasks/test_judge_hostile.py",
    "tasks/test_local_environment.py",
    "ops/recurrence/test_compiled_kernels.py",
    "engine/test_hybrid.py",
    "engine/test_scheduler.py",
    "engine/test_decode_graphs.py",
    "integrations/client/test_remote_llm.py",
    "integrations/lm_eval/test_lm_eval.py",
    "integrations/trl/test_trl.py",
    "integrations/trl/test_trl_loss.py",
    "integrations/inspect_ai/test_inspect.py",
    "integrations/server/test_server.py",
    "integrations/server/test_search_methods.py",
    "report/certify/test_redraw.py",
    "report/test_html_report.py",
    "report/test_report_work_browser.py",
    "model/test_divided_experts.py",
    "model/test_sharded_tree_loss.py",
    "prompts/images/test_image_families.py",
    "evals/test_search_task.py",
    "engine/test_forced_calls.py",
    "model/test_reproducible.py",
    "test_packaging.py",
    "test_bad_calls.py",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that need a CUDA device where there is none, and put long files first."""
    place = {REPOSITORY / "tests" / name: index for index, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path, len(LONG)))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_configure(config: pytest.Config) -> None:
    """Accept files and processes that Ray 2.50 leaves to the garbage collector (not 2.60)."""
    with suppress(PackageNotFoundError):
        if tuple(map(int, version("ray").split(".")[:2])) < (2, 60):
            ignored = "ignore::pytest.PytestUnraisableExceptionWarning"
            config.addinivalue_line("filterwarnings", ignored)


def pytest_collection() -> None:
    """Collect no garbage during imports, whose objects stay."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave what was imported out of later garbage collections, each of which takes half a second.

    They find no garbage there, for modules stay. Collections of all else would still take up to a
    tenth of the tests' time, so they come less often.
    """
    gc.freeze()
    # Or some libraries speak of leaks at exit.
    atexit.register(gc.unfreeze)
    gc.set_threshold(5_000)
    gc.enable()
    if os.environ.get("TRITON_INTERPRET") == "1" and "triton" in sys.modules:
        from interpreted import prepare_once

        prepare_once()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Each test draws the same random input, alone or after any others: its name is the seed."""
    random.seed(item.nodeid)
    # A test that draws tensors has imported it by now.
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(zlib.crc32(item.nodeid.encode()))


@pytest.fixture(scope="session", autouse=True)
def kept_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep folders that tests share in pytest's own one, where other tests do not look."""
    keep_folders_in(tmp_path_factory.mktemp("kept"))


ASYNCIO_MODULES = asyncio, asyncio.events, asyncio.futures, asyncio.tasks
ASYNCIO_CLASSES = asyncio.SelectorEventLoop, asyncio.DefaultEventLoopPolicy
plain_asyncio = {part: dict(vars(part)) for part in (*ASYNCIO_MODULES, *ASYNCIO_CLASSES)}


@pytest.fixture(scope="module", autouse=True)
def unpatched_asyncio() -> Iterator[None]:
    """Undo how inspect_ai patches asyncio in a running loop, for the files that follow.

    The patched `asyncio.run` leaves loops open, and patched tasks leave references to their frames.
    """
    yield
    if not hasattr(asyncio, "_nest_patched"):
        return
    loop = asyncio.get_event_loop_policy().get_event_loop()
    asyncio.set_event_loop(None)
    loop.close()
    for module in ASYNCIO_MODULES:
        for name, value in plain_asyncio[module].items():
            setattr(module, name, value)
    for part in (asyncio, *ASYNCIO_CLASSES):
        for name in vars(part).keys() - plain_asyncio[part].keys():
            if part is not asyncio or name.startswith("_nest"):
                delattr(part, name)
    vars(import_module("inspect_ai._util._async"))["_initialised_nest_asyncio"] = False


@pytest.fixture(scope="module")
def frozen_objects() -> None:
    """Leave what is there out of garbage collections, for files whose tests often collect."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def only_judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hold apart the files that look for traces of judges, or keep a judge, on several workers."""
    with (tmp_path_factory.getbasetemp().parent / "judges.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return REPOSITORY


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of published datasets that TREEGEN_TEST_DATA names; skips without it."""
    folder = os.environ.get("TREEGEN_TEST_DATA")
    if not folder:
        pytest.skip("set TREEGEN_TEST_DATA to a folder with the published datasets")
    path = Path(folder)
    # A path that is set and wrong must not look like a pass.
    assert path.is_dir(), f"TREEGEN_TEST_DATA is not a folder: {folder}"
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with random weights; not to be changed."""
    return build_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama for tests of the engine, with random weights; not to be changed."""
    from tiny_models import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def group() -> Iterator["RankGroup"]:
    """Two processes, which load one model after another."""
    from forked_ranks import forked_group

    with forked_group(2) as group:
        yield group


@pytest.fixture(scope="session")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of the checkpoint; not to be changed."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    done = run_command("eval", "gsm8k", "-M", tiny, *SMALL, "-o", path, "--quiet")
    assert done == 0
    return path


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to spoil."""
    return shutil.copytree(tiny, tmp_path / "model")


@pytest.fixture
def treegen(capsys: pytest.CaptureFixture[str]) -> Command:
    """The command, run in this process. A machine for tests/gpu.sh may lack what it reads with."""
    if not os.environ.get("CI"):
        pytest.importorskip("jsonlines")
    return Command(capsys)


@pytest.fixture
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval asks pip and other commands about the machine, which takes seconds."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Default run directories of commands that should have been refused go to the test's own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading weights fails the test, by whatever way they are loaded."""
    from treegen.engine.speculative import speculation
    from treegen.model import load, rank_processes

    def refuse(*args: Any, **kwargs: Any) -> None:
        pytest.fail("the weights were loaded")

    for module in (speculation, rank_processes, load):
        monkeypatch.setattr(module, "load_model", refuse)


@pytest.fixture
def undrawn() -> Iterator[None]:
    """Pictures are made up and written, but empty: for tests that look at none."""
    from report_cases import empty_pictures

    with empty_pictures():
        yield


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False).returncode:
        pytest.skip("cannot mount a small tmpfs here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# Of a module, because an event loop runs as long as there is a browser.
@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """A headless Chromium; where there is none, the test is skipped."""
    with launched() as found:
        yield found


@pytest.fixture
def visit(browser: "Browser") -> Iterator[Callable[..., Visit]]:
    """Open pages in a browser; see `browsing.visiting`."""
    with visiting(browser) as open_page:
        yield open_page
