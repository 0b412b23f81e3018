"""Search a task's problems: run the searches missing from a run directory, then aggregate.

Nothing here prints: `run_searches` is an iterator of progress, which its caller shows. Every
finished search is stored at once, as one record with its whole tree.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from treegen.errors import CacheFullError, Message, arg
from treegen.evals.problem import Problem
from treegen.evals.progress.run_progress import (
    AccuracyCounter,
    RunProgress,
    TimeForecast,
    TimeLeft,
)
from treegen.evals.progress.usage import AttemptLog, load_attempts
from treegen.evals.scoring.results import results_head
from treegen.evals.search.job import SearchJob
from treegen.evals.search.methods import solution_text
from treegen.evals.search.settings import stored_search_choices
from treegen.evals.search.task import SearchTask
from treegen.evals.statistics.estimators import estimate, pass_at_k
from treegen.evals.statistics.metrics import clusters_of
from treegen.evals.task_calls import wrap_task_method
from treegen.runs import Key, SearchRunDir
from treegen.search.environments.branch import NO_ROOM

if TYPE_CHECKING:
    from treegen.evals.search.agent_search import RunAgent
    from treegen.evals.search.searcher import ValueFunction
    from treegen.llm.base import BaseLLM
    from treegen.search.run import SearchRun
    from treegen.search.tree.node import SearchFn
    from treegen.search.tree.result import SearchResult

COSTS: Final = (
    "tokens_decoded",
    "tokens_prefilled",
    "tokens_reprompted",
    "calls",
    "nodes",
    "seconds",
)
_REMEDIES: Final = {
    "max_tokens": f"raise {arg('max_tokens=')}",
    "budget": f"raise {arg('budget=')}",
    "context": f"lower {arg('depth=')}, or use a model with a longer context",
}


def run_searches(
    job: SearchJob,
    run: SearchRunDir,
    llm: "BaseLLM",
    *,
    stop: Callable[[], object] = lambda: None,
    value_function: "ValueFunction | None" = None,
    cache_full_errors: dict[str, CacheFullError] | None = None,
    agent: "RunAgent | None" = None,
) -> Iterator[RunProgress]:
    """Search the problems that a run is missing and store each search as it ends.

    Args:
        job: The job of the run.
        run: The run directory that records are appended to.
        llm: The model that samples.
        stop: Called during and after every search; if it returns a true value, the iteration ends.
            Searches that had finished by then, or before an error, are in the run.
        value_function: From `searcher.load_value_function`; by default it is loaded here.
        cache_full_errors: A dict to fill with the errors of searches that run out of memory, by
            search name. These searches are not stored; a resume with more memory searches them
            again.
        agent: The agent of the run; None for a task that is solved by text.

    Yields:
        The progress of the run after every finished search.
    """
    if run.missing <= 0:
        return
    from treegen.search.budget import StopReason

    not_done = StopReason.INTERRUPTED, StopReason.LEFT_OUT
    tracker = _ProgressTracker(job, run)
    results = _start_searches(job, run, llm, stop, value_function, agent)
    parts = AttemptLog(run, results.workers)
    stopped = False
    with closing(results):
        while results.has_work and not stopped:
            results.step()
            finished = results.take_results()
            for number, result in enumerate(finished, 1):
                if result.stopped_by in not_done:
                    continue
                if isinstance(result.value, CacheFullError):
                    if cache_full_errors is not None:
                        cache_full_errors[result.name] = result.value
                    continue
                record = make_record(job, result, agent)
                run.append(record)
                if agent is not None:
                    agent.finish(result.name)
                parts.save()
                unknown = results.num_unknown + len(finished) - number
                yield tracker.count(record, result.usage.seconds, results, unknown)
            stopped = bool(stop())
        parts.save(now=True)
    run.sync()


class _ProgressTracker:
    """Computes the progress of a run from the searches that finish."""

    def __init__(self, job: SearchJob, run: SearchRunDir) -> None:
        """Begin with the stored searches."""
        self._settings, self._run = job.settings, run
        self._tally = AccuracyCounter(job.data.problems)
        for record in run.records():
            self._tally.count(record["problem_id"], bool(record["solved"]))
        self._start, self._num_before, self._tokens = time.monotonic(), len(run.done), 0
        # The tokens of searches in progress are not known, so a search's length is its time.
        self._forecast = TimeForecast(job.settings.budget.seconds)
        self._spent, self._last_seconds = 0.0, 0.0

    def count(
        self, record: Mapping[str, Any], search_seconds: float, results: "SearchRun", unknown: int
    ) -> RunProgress:
        """Count a stored search and return the progress of the run.

        Args:
            record: The record of the search.
            search_seconds: How long the search took.
            results: The searches in progress.
            unknown: Number of searches that have started and whose result is not counted yet.
        """
        self._tally.count(record["problem_id"], record["solved"])
        self._tokens += record["usage"]["tokens_decoded"]
        seconds, planned = time.monotonic() - self._start, self._run.info.planned
        remaining = planned - len(self._run.done)
        running = min(self._settings.concurrency, remaining)
        # The search was in progress with the others until now.
        self._spent += (seconds - self._last_seconds) * min(
            self._settings.concurrency, remaining + 1
        )
        self._last_seconds = seconds
        self._forecast.finish(search_seconds)
        forecast = self._forecast.estimate(
            seconds=seconds, spent=self._spent, running=running, waiting=remaining - running
        )
        solved = self._tally.estimate(unknown if self._settings.repeats == 1 else 0)
        status = results.status()
        return RunProgress(
            done=len(self._run.done),
            planned=planned,
            rows=status.rows,
            pages=status.pages,
            num_pages=status.num_pages,
            tokens=self._tokens,
            seconds=seconds,
            accuracy=solved.value if solved else None,
            started=self._num_before,
            estimate=solved,
            unit="searches",
            unknown=unknown,
            workers=results.workers(),
            forecast=limit_forecast(
                forecast, self._settings.budget.tokens, remaining, self._tokens / max(seconds, 1e-9)
            ),
        )


def limit_forecast(
    forecast: TimeLeft | None, budget: int | None, remaining: int, speed: float
) -> TimeLeft | None:
    """Return a forecast that assumes at most the whole budget for each remaining search.

    Args:
        forecast: The time left, by how long searches took.
        budget: Maximum number of tokens of a search; None for no limit.
        remaining: Number of searches that have not finished.
        speed: Tokens of finished searches per second, at most the speed of all.
    """
    if budget is None or speed <= 0:
        return forecast
    max_seconds = remaining * budget / speed
    if forecast is not None and forecast.seconds <= max_seconds:
        return forecast
    return TimeLeft(max_seconds, is_bound=True)


def _start_searches(
    job: SearchJob,
    run: SearchRunDir,
    llm: "BaseLLM",
    stop: Callable[[], object],
    value_function: "ValueFunction | None",
    agent: "RunAgent | None",
) -> "SearchRun":
    """Return the searches that a run is missing, as a stream."""
    from treegen.evals.search.searcher import TaskSearch

    settings, done = job.settings, set(run.done)
    names = {name: key for name, key in job.searches.items() if key not in done}
    prompts: list[tuple[str, Any]] = [
        (name, job.roots[problem_id]) for name, (problem_id, _) in names.items()
    ]
    more: dict[str, Any] = {}
    search: SearchFn = TaskSearch(job.task, job.data, settings, stop, value_function)
    if agent is not None:
        search = agent.search(stop, value_function)
        more = {"tools": agent.environment.tools}
        prompts = [(name, [{"role": "user", "content": text}]) for name, text in prompts]
    return llm.search_stream(
        search,
        prompts,
        settings.solution,
        concurrency=settings.concurrency,
        budget=settings.budget,
        **more,
    )


def make_record(
    job: SearchJob, result: "SearchResult", agent: "RunAgent | None" = None
) -> dict[str, Any]:
    """Return the line of trees.jsonl for one finished search.

    Only a whole solution has an answer and can be correct. A text cut short by a budget has none.
    The episode of an agent is scored by the state that its actions lead to, also if it was cut.

    Args:
        job: The job of the run.
        result: The finished search.
        agent: The agent of the run; None for a task that is solved by text.
    """
    task = job.task
    problem_id, repeat = job.searches[result.name]
    problem = job.problems[problem_id]
    text = None
    if result.best is not None and result.best in result.candidates:
        text = solution_text(job.settings.method, result.tree, result.best)
    document = result.to_json()
    if agent is None:
        verdict = _judge_text(task, problem, text)
    else:
        verdict = _judge_episode(agent, problem, result)
    return {
        "problem_id": problem_id,
        "sample_index": repeat,
        "method": job.settings.method,
        **verdict,
        "text": text,
        **{name: document[name] for name in ("best", "candidates", "votes", "stopped", "error")},
        "usage": document["usage"],
        "nodes": document["nodes"],
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }


def _judge_text(task: SearchTask, problem: Problem, text: str | None) -> dict[str, Any]:
    """Return whether a text solves a problem, and its answer."""
    if text is None:
        return {"solved": False, "answer": None}
    return {
        "solved": wrap_task_method(task.is_solved, task.name, problem.id)(problem, text),
        "answer": wrap_task_method(task.answer, task.name, problem.id)(problem, text),
    }


def _judge_episode(agent: "RunAgent", problem: Problem, result: "SearchResult") -> dict[str, Any]:
    """Return the official score of a search's best episode, and the reply that ended it."""
    from treegen.evals.search.agent_search import answer_of

    if result.best is None:
        return {"solved": False, "answer": None, "scores": {}}
    assess = wrap_task_method(agent.assess, agent.task.name, problem.id)
    verdict = assess(problem, result)
    answer = answer_of(result.tree, result.best)
    return {"solved": verdict.solved, "answer": answer, "scores": verdict.scores}


def write_search_results(job: SearchJob, run: SearchRunDir) -> dict[str, Any]:
    """Write results.json from the trees of a run and return its content."""
    tally = AccuracyCounter(job.data.problems)
    solved_of: dict[str, list[bool]] = {}
    failed: dict[Key, str] = {}
    stopped: Counter[str] = Counter()
    cut_off: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    names = COSTS if job.settings.environment is None else (*COSTS, "actions")
    costs: dict[str, list[float]] = {name: [] for name in names}
    for record in run.records():
        tally.count(record["problem_id"], bool(record["solved"]))
        solved_of.setdefault(record["problem_id"], []).append(bool(record["solved"]))
        if record["error"]:
            failed[record["problem_id"], record["sample_index"]] = record["error"]
        stopped[record["stopped"]] += 1
        if limit := find_cut(record, job.settings.solution.max_tokens):
            cut_off[limit] += 1
        elif failure := find_failure(record):
            failures[failure] += 1
        for name in names:
            costs[name].append(record["usage"].get(name, 0))
    errors: dict[str, str] = {}  # by problem, the error of its first search that failed
    for (problem_id, _), error in sorted(failed.items()):
        errors.setdefault(problem_id, error)
    parts = load_attempts(run)
    # A solved search ends early. So searches in progress when a run was stopped are more often hard
    # than those that have ended.
    unknown = min(max(run.missing, 0), job.settings.concurrency)
    solved = tally.estimate(unknown if job.settings.repeats == 1 else 0)
    results = {
        **results_head(job, run, stored_search_choices(run.info)),
        "method": job.settings.method,
        "solved": asdict(solved) if solved else None,
        "num_solved": tally.num_right,
        **_pass_at(solved_of, job),
        **({"num_failed": len(failed)} if failed else {}),
        "errors": errors,
        "stopped": dict(sorted(stopped.items(), key=lambda item: (-item[1], item[0]))),
        **({"cut_off": dict(sorted(cut_off.items()))} if cut_off else {}),
        **({"failures": dict(failures.most_common())} if failures else {}),
        "cost": {name: _sums(values) for name, values in costs.items()},
        "seconds": math.fsum(part["seconds"] for part in parts),
        "parts": parts,
    }
    run.write_results(results)
    return results


def _pass_at(solved_of: Mapping[str, Sequence[bool]], job: SearchJob) -> dict[str, Any]:
    """Return pass@k over searches, for k of 1, 2, 4 and so on; only problems with k searches count.

    Args:
        solved_of: Whether each search of a problem solved it, by problem id.
        job: The job of the searches.
    """
    if (repeats := job.settings.repeats) == 1:
        return {}
    estimates: dict[str, Any] = {}
    for k in sorted({*(2**i for i in range(repeats.bit_length())), repeats}):
        values = {
            problem_id: pass_at_k(len(solved), sum(solved), k)
            for problem_id, solved in solved_of.items()
            if len(solved) >= k
        }
        clusters = clusters_of(job.data.problems, list(values))
        estimates[str(k)] = asdict(estimate([*values.values()], clusters)) if values else None
    return {"pass@k": estimates}


def _sums(values: list[float]) -> Mapping[str, float | None]:
    total = math.fsum(values)
    are_integers = all(isinstance(value, int) for value in values)
    return {
        "total": int(total) if are_integers else total,
        "mean": total / len(values) if values else None,
        "most": max(values, default=None),
    }


def find_cut(record: Mapping[str, Any], max_tokens: int) -> str | None:
    """Return what cut off the last reply of each branch; None if a branch ended otherwise.

    Args:
        record: The record of a search.
        max_tokens: The longest reply that the run allows.

    Returns:
        "max_tokens", "budget", "context" (the model's), or None.
    """
    leaves = _leaves(record)
    if not leaves or not all(map(_is_cut, leaves)):
        return None
    replies = [node for node in leaves if node["finish_reason"] == "length"]
    if any(node["n_tokens"] >= max_tokens for node in replies):
        return "max_tokens"
    return "budget" if "budget" in record["stopped"] else "context"


def find_failure(record: Mapping[str, Any]) -> str | None:
    """Return how the environment failed first; None unless its failures ended all branches.

    Args:
        record: The record of a search. Some of its branches may have been cut off.
    """
    leaves = _leaves(record)
    if not all(map(_has_failed, leaves)):
        return None
    failures = (str(leaf["data"].get("failure", ""))[:200] for leaf in leaves if not _is_cut(leaf))
    return next(failures, None)


def _leaves(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the ends of a search's branches; none if nothing was sampled."""
    return [node for node in record["nodes"] if node["leaf"] and node["parent_id"] is not None]


def _has_failed(node: Mapping[str, Any]) -> bool:
    step = node.get("data")
    return isinstance(step, dict) and step.get("end") == "failed"


def _is_cut(node: Mapping[str, Any]) -> bool:
    is_cut = node["finish_reason"] == "length"
    return _has_failed(node) and (is_cut or node["data"].get("failure") == NO_ROOM)


def describe_ends(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences on the searches of a run that cuts or failures ended, each with a remedy.

    Args:
        results: The content of results.json.
    """
    for limit, num in results.get("cut_off", {}).items():
        yield Message(
            f"{results['method']}: in {num:,} of {results['done']:,} searches, every branch ended "
            f"because its reply was cut off; {_REMEDIES[limit]}"
        )
    failures: Mapping[str, int] = results.get("failures", {})
    if failures:
        yield Message(
            f"{results['method']}: in {sum(failures.values()):,} of {results['done']:,} searches, "
            f"every branch ended because its environment failed ({next(iter(failures))}); fix the "
            "environment, and start a new run"
        )
