"""Run a plan of programs on one GPU, one after another, and gather their tables.

    cd examples/peers
    python run_all.py plan.json OUT --engine vllm=/envs/vllm/bin/python --engine sglang=FOLDER

A plan is a JSON list of programs: a name, the engine, the limit in seconds, and the command without
its checkpoint. OUT gets a log for each program, `table.md` and, where there is an NVIDIA GPU, its
power and clock in `gpu.csv`. Programs that have a complete log in OUT are not repeated, so the same
command continues a plan that was interrupted.

While a program runs, the next one already imports its engine. It waits with everything else.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from workload import HEAD, TURN, gpu_query, job_of, used_mib

HERE = Path(__file__).resolve().parent
ROW = re.compile(r"^\| ([\w-]+) \| [^|]+ \| [\d,]+ \|.*\|$", re.MULTILINE)
SETTLE_SECONDS = 10.0  # for the memory of the last program's processes to be free
FREE_MIB = 3000  # GPU memory in use at most when the next program starts
HEAD_START = 5.0  # seconds that a program runs alone before the next one imports its engine
LEAST_SHARE = 0.5  # of its limit that a program needs to be started


@dataclass(frozen=True)
class Program:
    """A program of a plan."""

    name: str
    engine: str
    seconds: float
    command: str

    @property
    def jobs(self) -> list[str]:
        """The names of its jobs."""
        return shlex.split(self.command)[1].split(",")

    @property
    def shape(self) -> str:
        """The shape of its jobs' model."""
        return job_of(self.jobs[0]).shape


def read_plan(path: Path) -> list[Program]:
    """Read a plan; a mistake in it ends this program."""
    try:
        programs = [Program(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
        for program in programs:
            script, *_ = shlex.split(program.command)
            if not (HERE / script).is_file() or Path(script).name != script:
                sys.exit(f"{path}: {program.name}: {script} is not a program of {HERE}")
            if not re.fullmatch(r"[\w.-]+", program.name):
                sys.exit(f"{path}: {program.name!r} must have letters, digits, '.', '_' and '-'")
            if not isinstance(program.seconds, int | float):
                sys.exit(f"{path}: {program.name}: seconds must be a number")
            job_of(program.jobs[0])
    except (OSError, ValueError, TypeError, IndexError) as error:
        sys.exit(f"{path} is not a plan: {error}")
    if len({program.name for program in programs}) < len(programs):
        sys.exit(f"{path}: two programs have the same name")
    return programs


def find_rows(log: Path) -> list[str]:
    """Return the rows of the tables in a log, one for each job that has ended."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    return [match[0] for match in ROW.finditer(text) if match[0] not in HEAD]


def is_complete(program: Program, out: Path) -> bool:
    """Return whether a log has a row for each job of the program."""
    return len(find_rows(out / f"{program.name}.log")) == len(program.jobs)


def environment_of(program: Program, engines: dict[str, str], turn: Path) -> dict[str, str]:
    """Return the environment variables of a program."""
    where = engines.get(program.engine, sys.executable)
    paths = [] if Path(where).is_file() else [where]
    paths += [str(HERE.parents[1])] if program.engine == "treegen" else []
    paths += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        TURN: str(turn),
    }


def is_installed(program: Program, engines: dict[str, str]) -> bool:
    """Return whether the files of a program's engine are there."""
    where = engines.get(program.engine, sys.executable)
    return all(Path(part).exists() for part in where.split(os.pathsep))


def start(program: Program, engines: dict[str, str], out: Path) -> subprocess.Popen[bytes]:
    """Start a program, which waits for its turn."""
    where = engines.get(program.engine, sys.executable)
    python = where if Path(where).is_file() else sys.executable
    script, jobs, *options = shlex.split(program.command)
    command = [python, str(HERE / script), jobs, str(out / "shapes" / program.shape), *options]
    turn = out / f"{program.name}.turn"
    turn.unlink(missing_ok=True)
    with (out / f"{program.name}.log").open("wb") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment_of(program, engines, turn),
            start_new_session=True,  # so that its processes can be ended together
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a program with all its processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def save_configurations(programs: list[Program], out: Path) -> None:
    """Write the configuration of each shape, with a tokenizer where a job needs one."""
    shapes: dict[str, str] = {}
    for program in programs:
        for name in program.jobs:
            if program.shape not in shapes or job_of(name).kind == "structured":
                shapes[program.shape] = name
    for shape, job in shapes.items():
        if not (out / "shapes" / shape / "config.json").exists():
            command = [sys.executable, str(HERE / "workload.py"), job, str(out / "shapes" / shape)]
            paths = [str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
            subprocess.run(
                [*command, "--config-only"],
                check=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            )


def run(programs: list[Program], engines: dict[str, str], out: Path, deadline: float) -> None:
    """Run programs until all have run or the time is over, and say what was not run."""
    pending = [program for program in programs if not is_complete(program, out)]
    prepared: tuple[Program, subprocess.Popen[bytes]] | None = None
    process: subprocess.Popen[bytes] | None = None
    try:
        while pending:
            # The files of an engine may arrive while others run.
            ready = [program for program in pending if is_installed(program, engines)]
            if not ready:
                break
            program = prepared[0] if prepared else ready[0]
            pending.remove(program)
            left = deadline - time.time()
            if left < LEAST_SHARE * program.seconds:
                if prepared:
                    end(prepared[1])
                    prepared = None
                print(f"{program.name}: not run, {left:.0f} s are left", flush=True)
                continue
            process = prepared[1] if prepared else start(program, engines, out)
            prepared, begun = None, time.time()
            (out / f"{program.name}.turn").touch()
            while process.poll() is None and time.time() - begun < min(program.seconds, left):
                time.sleep(0.2)
                following = [item for item in pending if is_installed(item, engines)]
                if following and prepared is None and time.time() - begun > HEAD_START:
                    prepared = following[0], start(following[0], engines, out)
            code = process.poll()
            end(process)
            process = None
            seconds, rows = time.time() - begun, find_rows(out / f"{program.name}.log")
            state = "killed" if code is None else "done" if code == 0 else f"failed ({code})"
            print(f"{program.name}: {state} after {seconds:.0f} s", *rows, sep="\n", flush=True)
            if code:
                lines = (out / f"{program.name}.log").read_text(errors="replace").splitlines()
                print(*lines[-1:], flush=True)
            print(describe_power(out, begun), end="", flush=True)
            save_table(programs, out)
            settled = time.time() + SETTLE_SECONDS
            while max(used_mib(), default=0) > FREE_MIB and time.time() < settled:
                time.sleep(0.2)
    finally:
        for started in (process, prepared and prepared[1]):
            if started:
                end(started)
    for program in pending:
        print(f"{program.name}: not run, {program.engine} is not installed")


def describe_power(out: Path, begun: float) -> str:
    """Return the median power and clock since a time, over moments of at least half of the peak."""
    samples: list[tuple[float, float]] = []
    path = out / "gpu.csv"
    for line in path.read_text().splitlines() if path.is_file() else ():
        stamp, *numbers = line.split(", ")
        try:
            when = time.mktime(time.strptime(stamp.split(".")[0], "%Y/%m/%d %H:%M:%S"))
            if when >= begun:
                samples.append((float(numbers[0]), float(numbers[1])))
        except (ValueError, IndexError):
            continue
    peak = max((watts for watts, _ in samples), default=0)
    busy = [sample for sample in samples if sample[0] > peak / 2]
    if not busy:
        return ""
    watts, clock = (statistics.median(numbers) for numbers in zip(*busy, strict=True))
    return f"power {watts:.0f} W, clock {clock:.0f} MHz\n"


def save_table(programs: list[Program], out: Path) -> None:
    """Write one table with the rows of all programs that have ended."""
    rows = [row for program in programs for row in find_rows(out / f"{program.name}.log")]
    (out / "table.md").write_text("\n".join([HEAD, *rows, ""]), encoding="utf-8")


def main() -> None:
    """Run the plan that the command line names."""
    parser = argparse.ArgumentParser(description="Run jobs by several engines on one GPU.")
    parser.add_argument("plan", type=Path, help="a JSON file like plan.json")
    parser.add_argument("out", type=Path, help="a folder for logs and tables")
    parser.add_argument("--minutes", type=float, default=120.0, help="time for all programs")
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="NAME=WHERE",
        help="where an engine is installed: a Python executable, or folders for PYTHONPATH; "
        "default: this environment",
    )
    parser.add_argument("--programs", help="names of programs by commas; default: all of the plan")
    options = parser.parse_args()
    if unclear := [text for text in options.engine if "=" not in text]:
        parser.error(f"--engine must be NAME=WHERE, got {unclear[0]!r}")
    engines = dict(text.split("=", 1) for text in options.engine)
    out, deadline = options.out.resolve(), time.time() + 60 * options.minutes
    programs = read_plan(options.plan)
    if options.programs:
        names = options.programs.split(",")
        if unknown := set(names) - {program.name for program in programs}:
            parser.error(f"{options.plan} has no program {', '.join(sorted(unknown))}")
        programs = [program for program in programs if program.name in names]
    (out / "shapes").mkdir(parents=True, exist_ok=True)
    save_configurations(programs, out)
    monitor = None
    try:
        with (out / "gpu.csv").open("ab") as log:
            query = [*gpu_query("timestamp,power.draw,clocks.sm"), "-lms", "500"]
            monitor = subprocess.Popen(query, stdout=log)
    except OSError:
        (out / "gpu.csv").unlink()
    try:
        run(programs, engines, out, deadline)
    finally:
        if monitor:
            monitor.kill()
            monitor.wait()
    print(f"tables: {out / 'table.md'}")


if __name__ == "__main__":
    main()
