"""`treegen search`: search for solutions step by step, and leave run directories behind."""

import shlex
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click

from treegen.cli.interrupts import Interrupted
from treegen.cli.options import CONTEXT, FLAGS, QUIET, asked_for, options_of
from treegen.cli.places import places_for, take_cluster
from treegen.cli.work import Stop, Work, fill, kept_of, look_at, open_runs, wanted
from treegen.common.formats import safe_text
from treegen.errors import InputError
from treegen.evals.search.methods import METHODS, having
from treegen.evals.search.tools import Method

if TYPE_CHECKING:
    from treegen.cluster.places import Places
    from treegen.errors import CacheFullError
    from treegen.evals.course.progress import Progress
    from treegen.evals.search.job import SearchJob
    from treegen.llm import LLM
    from treegen.runs import RunSettings, SearchRunDir

_BUDGET: Final = {"tokens": int, "calls": int, "seconds": float, "nodes": int}
_FLAGS: Final = {
    **FLAGS,
    "search.num_samples": "--n-samples",
    **{f"budget.{name}": f"--budget {name}=" for name in _BUDGET},
    "search.arguments": "-a",
    "search.source": "the file of --method has changed",
}


_UNIT: Final = "searches"


def _either(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}"


def _of(knob: str, what: str) -> str:
    """Return the help of a setting that few methods read: their names, and what it is."""
    return f"{', '.join(having(knob))}: {what}"


def _arguments_of(name: str, method: Method) -> str:
    """Return the help of a method's own arguments: their names."""
    return f"{name}: {', '.join(each.name for each in method.arguments)}"


@dataclass(frozen=True, slots=True)
class _Work(Work):
    """One method and its open run. no_room: errors of searches that lacked memory, by problem."""

    job: "SearchJob"
    run: "SearchRunDir"
    no_room: "dict[str, CacheFullError]" = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.job.task.name} {self.job.settings.method}"


@click.command("search", context_settings=CONTEXT)
@click.argument("task", required=False)
@click.option(
    "--method",
    "-m",
    metavar="NAME",
    help=f"{_either(METHODS)}; or path/to/file.py:function, a search of your own.",
)
@click.option(
    "--method-arg",
    "-a",
    "arguments",
    multiple=True,
    metavar="NAME=VALUE",
    help="An argument of the method's own; "
    f"{'; '.join(_arguments_of(*each) for each in METHODS.items() if each[1].arguments)}.",
)
@click.option("--compare", metavar="NAME,NAME", help="Run several methods, each with the whole "
              "budget, and print what each solved beside what it cost.")  # fmt: skip
@click.option("--budget", multiple=True, metavar="K=V,...", help="What a problem may cost: any of "
              f"{', '.join(_BUDGET)}; tokens are decoded ones.")  # fmt: skip
@click.option("--width", type=int, help="States kept at a time.")
@click.option("--depth", type=int, help="Steps of a solution at most.")
@click.option("--expand", type=int, help="Next steps tried in a state.")
@click.option("--n-samples", "-n", "num_samples", type=int,
              help=_of("num_samples", "solutions drawn at most."))  # fmt: skip
@click.option("--propose", metavar="HOW", help="Where next steps are from: sample, or a way of "
              "the task's own (puzzles: list).")  # fmt: skip
@click.option("--evaluate", metavar="HOW", help="What a state is worth: logprob, min-logprob, "
              "reward:DIR for a reward model, or a way of the task's own (puzzles: judge, "
              "judge-sampled).")  # fmt: skip
@click.option("--verifier", metavar="DIR|NAME", help="Judge states by a reward model or verifier, "
              "in place of --evaluate.")  # fmt: skip
@click.option("--verifier-arg", "verifier_args", multiple=True, metavar="NAME=VALUE", help="How it "
              "is read, as for `treegen verify`: mark, separator, tokens, label, reduce, chat, "
              "turns.")  # fmt: skip
@click.option("--verifier-memory", metavar="SIZE", help="Its cache (1GiB).")
@click.option("--prune-below", type=float,
              help=_of("prune_below", "do not look into states worth less."))  # fmt: skip
@click.option("--exploration", type=float, help=_of("exploration", "its constant c."))
@click.option("--iterations", type=int, help=_of("iterations", "visits at most."))
@click.option("--rollouts", type=int, help=_of("rollouts", "samples played to their end from a "
              "new state, whose ends are judged (1); 0 judges the state itself."))  # fmt: skip
@click.option("--choose", metavar="HOW", help="Of the solutions found: best, by the evaluation, "
              "or vote, weighted by it, as the papers on rebase and dvts do.")  # fmt: skip
@click.option("--temperature", type=float)
@click.option("--top-p", type=float, help="After temperature, --min-p and --top-k.")
@click.option("--top-k", type=int, help="0 keeps all. After temperature and --min-p.")
@click.option("--min-p", type=float, help="After temperature, before --top-k and --top-p.")
@click.option(
    "--gen-kwargs",
    multiple=True,
    metavar="K=V,...",
    help="As in `treegen eval`, such as repetition_penalty=1.1.",
)
@click.option("--max-tokens", type=int, help="Tokens of a whole solution at most.")
@click.option("--step-tokens", type=int, help="Tokens of a step at most.")
@click.option("--seed", type=int, help="Of the samples.")
@click.option("--repeats", type=int, help="Searches of each problem, for pass@k over searches (1).")
@click.option("--concurrency", type=int, help="Problems searched at once.")
@options_of("data")
@click.option("--task-arg", "-T", "task_args", multiple=True, metavar="NAME=VALUE",
              help="An argument of the task's own, as `treegen tasks` lists them.")  # fmt: skip
@options_of("model without -a", "cluster")
@click.option("--output-path", "-o", metavar="DIR", help="Run directory. Default: a new one in "
              "runs/.")  # fmt: skip
@click.option("--resume", is_flag=False, flag_value="", metavar="[DIR]", help="Continue the run "
              "in DIR with the settings it has; without DIR, begin or continue the one in "
              "--output-path.")  # fmt: skip
@QUIET
def command(
    method: str | None,
    compare: str | None,
    output_path: str | None,
    resume: str | None,
    quiet: bool,
    **params: Any,
) -> None:
    """Search for solutions of each problem of TASK, and print how many were found, and the cost.

    Tasks with steps are countdown, game24 and gsm8k. Every finished search is stored with its
    whole tree; a run that was stopped continues with --resume.
    """
    cluster = take_cluster(params)
    given = _given(params)
    places = places_for(cluster, given)
    methods = _methods(method, compare)
    _share_arguments(given, methods)
    from treegen.cli.destinations import search_destinations
    from treegen.cli.discarding import discarding
    from treegen.cli.render import demo_notice
    from treegen.errors import RunError
    from treegen.evals.asked.given import check_read
    from treegen.evals.search.job import load_search_job
    from treegen.runs import SearchRunDir

    several = compare is not None
    found = search_destinations(methods, given, output_path, resume, compare=several)
    check_read(given, [target.settings for target in found])
    if not quiet:
        demo_notice(given, [each.settings.engine.model for each in found if not each.resume])
    jobs = [load_search_job(target.settings) for target in found]
    _check_alike(jobs)
    asked = [_checked(job, places, quiet=quiet) for job in jobs]
    folder = found[0].path.parent if compare and len(found) > 1 else found[0].path
    advice = f"continue with: treegen search --resume {shlex.quote(str(resume or folder))}"
    with ExitStack() as stack:
        opened = zip(found, asked, strict=True)
        runs = open_runs(SearchRunDir, opened, stack, unit=_UNIT, quiet=quiet)
        stack.enter_context(discarding(runs, but=RunError))
        work = [_Work(job, run) for job, run in zip(jobs, runs, strict=True)]
        try:
            _search_all(work, advice, places, quiet=quiet)
            _report(work, quiet=quiet)
        except Interrupted as stopped:
            raise Interrupted(stopped.signum, f"{kept_of(work, _UNIT)}; {advice}") from None
    if missing := sum(max(item.run.missing, 0) for item in work):
        told = f"Error: {missing:,} problems were not searched{_no_room(work)}; {advice}"
        click.echo(safe_text(told), err=True)
        raise SystemExit(1)


def _no_room(work: list[_Work]) -> str:
    """Return how many searches lacked memory, as a part of a sentence; "" if none did."""
    found = [error for item in work for error in item.no_room.values()]
    if not found:
        return ""
    return f", {len(found):,} of them for want of memory ({found[0]}); add a larger --memory SIZE"


def _given(params: dict[str, Any]) -> dict[str, Any]:
    from treegen.cli.pairs import read_pairs
    from treegen.evals.arguments import read_arguments

    given = asked_for(params)
    if "arguments" in given:
        given["arguments"] = read_arguments(given["arguments"], "method")
    if "budget" in given:
        given["budget"] = read_pairs(given["budget"], "--budget", _BUDGET)
        if not given["budget"]:
            raise InputError("--budget is empty; such as --budget tokens=2000")
    if "verifier_args" in given:
        from treegen.evals.asked.verifier_args import verifier_settings

        given["verifier_args"] = verifier_settings(_named(given["verifier_args"]))
    return given


def _share_arguments(given: dict[str, Any], methods: list[str]) -> None:
    """Let each of several methods take the arguments that it knows.

    Raises:
        InputError: no method knows one of them.
    """
    from treegen.cli.pairs import MODEL_ARGS
    from treegen.common.spelling import did_you_mean
    from treegen.evals.search.own_method import find_method

    if not given.get("arguments"):
        return
    known = sorted({each.name for name in methods for each in find_method(name).arguments})
    for name in given["arguments"]:
        if name not in known and name in MODEL_ARGS:
            raise InputError(f"no method has an argument {name!r}; the model's is --model-args")
        if name not in known and len(methods) > 1:
            hint = did_you_mean(name, known)
            raise InputError(f"none of the methods has an argument {name!r}{hint}")
    if len(methods) > 1:
        given["also_arguments"] = tuple(known)


def _named(texts: Iterable[str]) -> dict[str, str]:
    """Read NAME=VALUE. A value may have commas, and spaces at its ends."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--verifier-arg takes NAME=VALUE, such as reduce=min, not {text!r}")
        found[name.strip()] = value
    return found


def _check_alike(jobs: "list[SearchJob]") -> None:
    """Raise InputError unless all methods have the same problems and the same budget."""
    if len({job.settings.budget for job in jobs}) > 1:
        raise InputError("the methods have different budgets; give all of them one with --budget")
    if len({(job.task.name, job.data.fingerprint) for job in jobs}) > 1:
        raise InputError("the methods have different problems; give all of them the same --data, "
                         "--limit and examples")  # fmt: skip


def _methods(method: str | None, compare: str | None) -> list[str]:
    if compare is None:
        return [] if method is None else [method]
    if method is not None:
        raise InputError("give --method or --compare, not both")
    names = [name.strip() for name in compare.split(",") if name.strip()]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise InputError(f"--compare names {name!r} twice")
    if not names:
        raise InputError("--compare is empty; such as --compare sample,beam,tot-bfs")
    return names


def _checked(job: "SearchJob", places: "Places | None", *, quiet: bool) -> "RunSettings":
    """Check all that can be checked without weights; returns the settings of the run."""
    from treegen.evals.search.job import check_memory, check_prompts_fit, check_reward

    facts = look_at(job, places, quiet=quiet)
    check_prompts_fit(job, facts)
    check_memory(job, facts)
    check_reward(job.settings)
    return wanted(job, facts, _FLAGS)


def _search_all(work: list[_Work], advice: str, places: "Places | None", *, quiet: bool) -> None:
    """Search what each run lacks."""
    from treegen.evals.search.run import run_searches
    from treegen.evals.search.searcher import load_value_function

    # They have the same problems, so what judges the states of one can judge those of another.
    jobs = {item.job.settings.evaluate: item.job for item in work if item.run.missing > 0}
    loads = {how: partial(load_value_function, job.data, job.settings) for how, job in jobs.items()}
    # Workers judge for themselves.
    function_of = {how: load() for how, load in loads.items()} if places is None else {}

    def steps(item: _Work, llm: "LLM", stop: Stop) -> "Iterator[Progress]":
        return run_searches(
            item.job,
            item.run,
            llm,
            stop=stop,
            value_function=function_of.get(item.job.settings.evaluate),
            no_room=item.no_room,
        )

    fill(
        work,
        steps,
        lambda: f"{kept_of(work, _UNIT)}; {advice}",
        places=places,
        before=list(loads.values()),
        quiet=quiet,
    )


def _report(work: list[_Work], *, quiet: bool) -> None:
    from treegen.cli.render import echo, json_line, notice
    from treegen.cli.tables import cost_table
    from treegen.evals.search.run import write_search_results

    results = [write_search_results(item.job, item.run) for item in work]
    for item, each in zip(work, results, strict=True):
        for problem, error in list(each["errors"].items())[:3] if not quiet else ():
            notice(f"{item.job.settings.method}: the search of {problem!r} failed: {error}")
    if not quiet:
        echo("\n" + cost_table(results))
        for item in work:
            echo(f"results: {item.run.path / 'results.json'}")
        echo("")
    json_line(
        {
            "runs": [
                {"run": str(item.run.path), **{k: v for k, v in each.items() if k != "parts"}}
                for item, each in zip(work, results, strict=True)
            ]
        }
    )
