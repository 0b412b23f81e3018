"""Time and memory of `treegen audit` on a large run with numbers or letters as answers.

The run has made-up samples of about 100 words, all different: most mark their answer, some do not,
some are cut off. It is imported like a log of another tool. The figures of docs/trust.md come from

    python examples/benchmarks/audit_speed.py
"""

import random
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from treegen.cli.main import script
from treegen.cli.options.options import JSON
from treegen.cli.terminal.render import echo, json_line, print_table
from treegen.report.audit.audit import audit_view
from treegen.report.exchange.external_log import ExternalLog, make_runs
from treegen.report.load import load_run
from treegen.report.tables import PrintableTable

_WORDS = ["the", "box", "holds", "apples", "and", "pears", "then", "each", "costs", "two", "coins"]
_ENDS = ("The answer is {}.", "#### {}", "Answer: {}", "\\boxed{{{}}}", "so that leaves {}", "")


def make_log(kind: str, problems: int, samples: int, seed: int) -> ExternalLog:
    """Return a log of made-up samples.

    Args:
        kind: "number" or "choice".
        problems: Number of problems.
        samples: Samples of each problem.
        seed: Decides the texts.
    """
    draw = random.Random(seed)
    answers = "ABCD" if kind == "choice" else [str(n) for n in range(10, 1000)]
    golds = [draw.choice(answers) for _ in range(problems)]
    rows: list[dict[str, Any]] = []
    for problem, gold in enumerate(golds):
        for index in range(samples):
            answer = gold if draw.random() < 0.6 else draw.choice(answers)
            end = draw.choice(_ENDS)
            words = " ".join(draw.choices(_WORDS, k=100))
            read = answer if end else None
            verdict = {"answer": read, "correct": read == gold}
            rows.append(
                {
                    "problem_id": str(problem),
                    "index": index,
                    "text": f"{words} {draw.randrange(10**6)}. {end.format(answer)}",
                    "num_tokens": 130,
                    "finish_reason": "stop" if end else "length",
                    "verdicts": {"score": verdict},
                }
            )
    return ExternalLog(
        task=kind,
        version="1",
        model="made-up",
        source="audit_speed.py",
        problems=tuple(
            {"id": str(number), "question": f"Problem {number}: which is it?", "answer": gold}  # type: ignore[misc]
            for number, gold in enumerate(golds)
        ),
        filters=("score",),
        num_samples=samples,
        samples=tuple(rows),  # type: ignore[arg-type]
    )


@script
@click.option("--problems", default=2500, show_default=True, help="Problems of a run.")
@click.option("--samples", default=20, show_default=True, help="Samples of each problem.")
@JSON
def command(problems: int, samples: int) -> None:
    """Audit made-up runs; print seconds and the peak of the process's memory."""
    results = []
    for kind in ("number", "choice"):
        with tempfile.TemporaryDirectory() as folder:
            make_runs([make_log(kind, problems, samples, seed=0)], Path(folder) / "run")
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            start, cpu = time.perf_counter(), time.process_time()
            view = load_run(Path(folder) / "run")
            loaded, loaded_cpu = time.perf_counter() - start, time.process_time() - cpu
            audit = audit_view(view)
            results.append(
                {
                    "answers": audit.answers,
                    "samples": audit.num_samples,
                    "load_s": round(loaded, 2),
                    "audit_s": round(time.perf_counter() - start - loaded, 2),
                    "load_cpu_s": round(loaded_cpu, 2),
                    "audit_cpu_s": round(time.process_time() - cpu - loaded_cpu, 2),
                    "more_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10,
                    "findings": audit.summary,
                }
            )
    head = list(results[0])
    rows = [[str(value) for value in result.values()] for result in results]
    print_table(PrintableTable(head, rows, range(1, 7)))
    echo("")
    json_line({"results": results})


if __name__ == "__main__":
    command()
