"""Time and memory of `treegen audit` on large runs with numbers, letters or formulas as answers.

The samples are made up, about 100 words each and all different: most mark their answer, some do
not, some have none. A problem has six answers that are formulas, four of them wrong, each in
several forms. The figures of docs/trust.md come from

    python examples/benchmarks/audit_speed.py
"""

import random
import resource
import tempfile
import time
from pathlib import Path

import click

from treegen.cli.main import script
from treegen.cli.options.options import JSON
from treegen.cli.terminal.render import json_line, print_table
from treegen.common.bounded.worker import end_workers
from treegen.report.audit.audit import audit_view
from treegen.report.exchange.external_log import ExternalLog, make_runs
from treegen.report.load import load_run
from treegen.report.tables import PrintableTable

_WORDS = ["the", "box", "holds", "apples", "and", "pears", "then", "each", "costs", "two", "coins"]
_PROCESSES = {"here": resource.RUSAGE_SELF, "worker": resource.RUSAGE_CHILDREN}
_ENDS = ("The answer is {}.", "#### {}", "Answer: {}", "\\boxed{{{}}}", "so that leaves {}", "")
_FORMULAS = (
    "\\frac{{{}}}{{7}}",
    "\\sqrt{{{}}}",
    "2\\pi+{}",
    "x^2+{}x",
    "x(x+{})",
    "{}\\sqrt{{2}}",
)


def make_log(kind: str, problems: int, samples: int) -> ExternalLog:
    """Return a log of made-up samples.

    Args:
        kind: "number", "choice" or "mathematics".
        problems: Number of problems.
        samples: Samples of each problem.
    """
    draw = random.Random(kind)
    letters, numbers = [*"ABCD"], [str(number) for number in range(10, 1000)]
    answers = [letters if kind == "choice" else numbers] * problems
    if kind == "mathematics":
        answers = [
            [form.format(draw.randint(2, 99)) for form in _FORMULAS] for _ in range(problems)
        ]
    golds = [draw.choice(some) for some in answers]
    ends = _ENDS if kind != "mathematics" else ("Hence $\\boxed{{{}}}$.", "The answer is {}.", "")
    rows = []
    for problem, index in ((p, i) for p in range(problems) for i in range(samples)):
        answer = golds[problem] if draw.random() < 0.6 else draw.choice(answers[problem])
        end = draw.choice(ends)
        text = f"{' '.join(draw.choices(_WORDS, k=100))} {draw.random()}. {end.format(answer)}"
        verdict = {"answer": answer if end else None, "correct": answer == golds[problem] and end}
        verdict["correct"] = bool(verdict["correct"])
        row = {"problem_id": str(problem), "index": index, "text": text, "num_tokens": 130}
        rows.append({**row, "verdicts": {"score": verdict}})
    questions = [
        {"id": str(number), "question": f"Problem {number}: which is it?", "answer": gold}
        for number, gold in enumerate(golds)
    ]
    head = {"task": kind, "version": "1", "model": "made-up", "source": "audit_speed.py"}
    content = {"problems": tuple(questions), "samples": tuple(rows), "filters": ("score",)}
    return ExternalLog.model_validate({**head, **content, "num_samples": samples})


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of its ended workers."""
    usages = [resource.getrusage(who) for who in _PROCESSES.values()]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@script
@click.option("--problems", default=2500, show_default=True, help="Problems of a run.")
@click.option("--samples", default=20, show_default=True, help="Samples of each problem.")
@JSON
def main(problems: int, samples: int) -> None:
    """Audit made-up runs; print the seconds, and the largest memory of each process."""
    results = []
    for kind in ("number", "choice", "mathematics"):
        with tempfile.TemporaryDirectory() as folder:
            make_runs([make_log(kind, problems, samples)], Path(folder) / "run")
            start = time.perf_counter()
            view = load_run(Path(folder) / "run")
        loaded = round(time.perf_counter() - start, 1)
        start, cpu = time.perf_counter(), _cpu_seconds()
        audit = audit_view(view)
        result = {"answers": audit.answers, "samples": audit.num_samples, "load seconds": loaded}
        result["seconds"] = round(time.perf_counter() - start, 1)
        end_workers()  # so that the system counts their time and memory
        result["cpu seconds"] = round(_cpu_seconds() - cpu, 1)
        for name, who in _PROCESSES.items():
            result[f"MiB {name}"] = resource.getrusage(who).ru_maxrss >> 10
        left_out = [notice for notice in audit.notices if "left out" in notice]
        results.append({**result, "findings": audit.summary, "left out": " ".join(left_out)})
    rows = [[str(value) for value in result.values()] for result in results]
    print_table(PrintableTable([*results[0]], rows, range(1, 7)))
    json_line({"results": results})


if __name__ == "__main__":
    main()
