"""Commands that read runs: their work grows as the runs do, and each record is decoded once."""

import cProfile
import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Command
from report_cases import make_run

from treegen.api.run import open_run
from treegen.evals.scoring.run_verdicts import _VerdictInterner
from treegen.evals.statistics import maj_at_k, votes
from treegen.evals.verdict import Verdict
from treegen.report.live_server import WatchedPage
from treegen.report.load import load_run
from treegen.runs import record_format
from treegen.runs.record_format import check_record

SMALL, LARGE = 20, 160
SAMPLES = 5


@pytest.fixture(scope="module")
def runs(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Path]]:
    """Two runs of each size, of the same problems."""
    folder = tmp_path_factory.mktemp("runs")
    found = {
        size: [
            make_run(
                folder / f"{name}{size}",
                num_problems=size,
                num_samples=SAMPLES,
                seed=seed,
                checkpoint=tiny,
            )
            for seed, name in enumerate("ab")
        ]
        for size in (SMALL, LARGE)
    }
    for path in found[LARGE]:
        load_run(path)  # fills what is kept of answers, which both sizes have
    return found


def work_at_both_sizes(run: Callable[[int], object], decoded: int, monkeypatch: Any) -> None:
    """Check that work grows as the runs do. decoded: how often each record is."""
    found: list[Mapping[str, Any]] = []

    def checking(record: Mapping[str, Any]) -> None:  # of each record as it is decoded
        found.append(record)
        check_record(record)

    monkeypatch.setattr(record_format, "check_record", checking)
    run(SMALL)  # imports, and fills what is kept of votes
    work = {}
    for size in (SMALL, LARGE):
        found.clear()
        work[size] = counted(lambda: run(size))  # noqa: B023
        assert len(found) == decoded * size * SAMPLES
    # What does not grow is in both, so the ratio of linear work is below that of the sizes.
    assert work[LARGE] < 1.25 * (LARGE / SMALL) * work[SMALL], work


def counted(work: Callable[[], object]) -> int:
    """Return how many functions of Python are called: what grows where nothing else tells."""
    profile = cProfile.Profile(builtins=False)
    profile.runcall(work)
    return sum(entry.callcount for entry in profile.getstats())


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("args", "decoded"),
    [
        (["show"], 1),
        (["show", "--problem", "p3"], 1),
        (["score"], 1),
        (["report", "--no-plots"], 1),
        (["compare", "--no-plots"], 2),
        (["replay"], 1),
        (["power", "--difference", "0.1", "--n-problems", "100", "--run"], 1),
        (["eval", "--resume"], 1),
        (["export", "--to", "lm-eval"], 2),
        # For each sample Inspect's own writer looks at all before it, so its logs are left out.
        (["export", "--to", "parquet"], 2),
        (["export", "--to", "every-eval-ever"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_work_is_linear(
    args: list[str],
    decoded: int,
    runs: dict[int, list[Path]],
    treegen: Command,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def run(size: int) -> None:
        paths = runs[size] if args[0] == "compare" else runs[size][:1]
        more: list[object] = ["-q"]
        if args[0] == "report":
            more += ["-o", tmp_path / f"{size}.html"]
        elif args[0] == "export":
            more += ["-o", tmp_path / str(size)]
        done = treegen(*args, *paths, *more)
        assert done.code == 0, done.err

    work_at_both_sizes(run, decoded, monkeypatch)


def test_few_functions_are_called_for_each_sample(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREEGEN_CACHE", "")
    work = {}
    for num in (5, 45):
        path = make_run(
            tmp_path / str(num), num_problems=20, num_samples=num, seed=0, checkpoint=tiny
        )
        load_run(path)
        work[num] = counted(lambda: load_run(path))  # noqa: B023
    assert (work[45] - work[5]) / (20 * 40) < 32, work


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("live", [True, False], ids=["watch", "open_run"])
def test_work_of_pages_and_frames_is_linear(
    live: bool, runs: dict[int, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(size: int) -> object:
        if live:
            return WatchedPage(runs[size][:1]).page()
        return open_run(runs[size][0]).problems

    work_at_both_sizes(run, 1, monkeypatch)


def test_a_run_is_opened_without_decoding(
    runs: dict[int, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from treegen.runs import RunDir

    with RunDir.open(runs[SMALL][0]) as run:
        known = set(run.done)
        assert known == {(r["problem_id"], r["sample_index"]) for r in run.records()}
    monkeypatch.setattr(record_format, "parse_json", lambda text: pytest.fail("it was decoded"))
    with RunDir.open(runs[SMALL][0]) as run:
        assert set(run.done) == known


def test_a_finished_run_is_resumed_without_a_look_at_its_model(
    runs: dict[int, list[Path]], treegen: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from treegen.evals.pipeline import execution

    path = runs[SMALL][0]
    assert treegen("score", path, "-q").code == 0
    before = [(path / name).read_bytes() for name in ("results.json", "run.json")]
    with monkeypatch.context() as patch:
        patch.setattr(execution, "load_model_info", lambda *args: pytest.fail("it was looked at"))
        patch.setattr(execution, "resolve_precision", lambda *args: pytest.fail("it was looked at"))
        assert treegen("eval", "--resume", path, "-q").code == 0
    assert [(path / name).read_bytes() for name in ("results.json", "run.json")] == before
    heavy = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules));"
    program = f"{heavy} from treegen.cli.main import main; main()"
    command = [sys.executable, "-c", program, "eval", "--resume", str(path), "-q"]
    other = subprocess.run(command, check=False, capture_output=True, text=True)
    assert other.returncode == 0 and other.stdout == "False\n", other
    # Other numbers would give other samples, so that is still refused.
    done = treegen("eval", "--resume", runs[SMALL][0], "--dtype", "bfloat16", "-q")
    assert done.code == 2 and "dtype" in done.err


def test_equal_verdicts_are_one_object() -> None:
    once, rng = _VerdictInterner(), random.Random(0)
    found: dict[tuple[str, bool], object] = {}
    for _ in range(2000):  # verdicts that nobody keeps, so that others take their places
        answer, right = str(rng.randrange(9)), rng.random() < 0.5
        verdicts = once("p", {"a": Verdict(answer, right), "b": Verdict(None, False)})
        assert verdicts["a"] == Verdict(answer, right)
        assert found.setdefault((answer, right), verdicts) is verdicts
        assert once("p", verdicts) is verdicts
        assert once("q", verdicts) is not verdicts
    assert len(once.distinct) == 2 * len(found)


def test_votes_of_equal_counts_are_computed_once() -> None:
    maj_at_k._count_wins.cache_clear()
    tallies = [votes.Tally((1, 3), (2,), 2), votes.Tally((3,), (1, 2), 2)]
    for tally in tallies * 2:
        ways = tally.votes_at((1, 4, 8))
        counts = (*tally.correct, *tally.wrong)
        assert ways == tuple(
            (tally.maj_at_k(k), maj_at_k.tie_at_k(counts, tally.invalid, k)) for k in (1, 4, 8)
        )
    # Of each answer that may win, and of ties: for all k at once.
    assert maj_at_k._count_wins.cache_info().misses == 3
