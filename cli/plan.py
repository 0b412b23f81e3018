"""`treegen plan`: what a run would share, store and read, before any weight is loaded."""

from typing import TYPE_CHECKING, Any

import click

from treegen.cli.options import CONTEXT, QUIET, WRITE_OUT, asked_for, options_of, task_names

if TYPE_CHECKING:
    from treegen.evals.job import Job
    from treegen.evals.model import ModelFacts
    from treegen.plan.plan import LevelSummary, Plan
    from treegen.prompts.radix import Tokens


@click.command("plan", context_settings=CONTEXT)
@options_of("task", "data", "arguments", "model", "sampling")
@WRITE_OUT
@QUIET
def command(write_out: bool, quiet: bool, **params: Any) -> None:
    """Show the prompt tree of each TASK by level: tokens, bytes, rows that fit, and what is shared.

    Needs the model's tokenizer and configuration only.
    """
    from treegen import demo
    from treegen.cli.render import demo_notice, json_line, show_prompt, skipped_rows
    from treegen.errors import InputError
    from treegen.evals.asked.given import check_read
    from treegen.evals.asked.settings import settle
    from treegen.evals.job import first_prompt, load_job, plan_job
    from treegen.evals.model import look_at_model

    tasks = task_names(params)
    given = asked_for(params)
    if not tasks:
        raise InputError("no task is given; `treegen tasks` lists them")
    jobs = [load_job(settle(demo.completed({**given, "task": task}))) for task in tasks]
    check_read(given, [job.settings for job in jobs])
    if not quiet:
        demo_notice(given, [job.settings.engine.model for job in jobs])
    documents = []
    for job in jobs:
        if not quiet:
            skipped_rows(job.data.skipped)
        facts = look_at_model(job.settings.engine)
        plan = plan_job(job, facts)
        document = _document(job, facts, plan)
        documents.append(document)
        if write_out:
            show_prompt(first_prompt(job, facts), quiet=quiet)
        if not quiet:
            _print(document, plan.levels())
    json_line({"plans": documents})


def _document(job: "Job", facts: "ModelFacts", plan: "Plan") -> dict[str, Any]:
    from treegen.evals.choices import num_distinct
    from treegen.evals.course.account import describe_levels

    spec, each = facts.spec, plan.token_bytes
    longest = max(len(request.tokens) for request in plan.requests)
    unshared = plan.unshared_tokens
    if job.choices:
        # Without sharing, too, a prompt counts once for all its choices.
        whole: dict[str, list[Tokens]] = {}
        for request in plan.requests:
            whole.setdefault(request.id.rpartition("/")[0], []).append(request.tokens)
        unshared = sum(map(num_distinct, whole.values()))
    return {
        "task": job.task.name,
        "source": job.data.source,
        "problems": len(job.data.problems),
        "skipped": len(job.data.skipped),
        "samples": job.planned,
        "choices": len(plan.requests) if job.choices else None,
        "rows": plan.num_rows,
        "model": {
            "name": spec.name,
            "type": spec.model_type,
            "layers": len(spec.layers),
            "context_length": spec.context_length,
            "dtype": facts.dtype,
            "kv_cache_dtype": job.settings.engine.kv_cache_dtype,
            "kv_bytes_per_token": each,
            "recurrent_layers": len(spec.states),
            "state_bytes": spec.state_bytes,
        },
        "sharing": plan.sharing,
        "levels": [
            {**level, "folded": level["segments"] - level["kept"]}
            for level in describe_levels(plan)
        ],
        "longest_prompt": longest,
        "max_tokens": job.settings.sampling.max_tokens,
        "prompt_tokens": {"shared": plan.stored_tokens, "unshared": unshared},
        "kv_bytes": {"shared": plan.stored_tokens * each, "unshared": unshared * each},
        "key_tokens_per_step": {"shared": plan.read_tokens, "unshared": plan.unshared_read_tokens},
        "kv_bytes_per_step": {
            "shared": plan.read_tokens * each,
            "unshared": plan.unshared_read_tokens * each,
        },
        "memory": facts.memory,
        "page_size": facts.page_size,
        "num_pages": facts.num_pages,
        "num_states": facts.num_states,
        "rows_that_fit": (
            None
            if facts.num_pages is None
            else plan.rows_that_fit(facts.num_pages, facts.page_size, facts.num_states)
        ),
        "max_rows": facts.max_rows,
    }


def _print(document: dict[str, Any], levels: "list[LevelSummary]") -> None:
    from treegen.cli.render import echo
    from treegen.cli.tables import markdown
    from treegen.common.formats import safe_text

    model = document["model"]
    what = f"{document['samples']:,} samples in {document['rows']:,} rows"
    if document["choices"]:
        what = f"the likeliest of {document['choices']:,} choices"
    echo(
        safe_text(
            f"{document['task']}: {document['problems']:,} problems from {document['source']}, "
            f"{what}\n"
            f"{model['name']}: {model['type']}, {_layers(model)}, {model['dtype']}, "
            f"{model['kv_bytes_per_token']:,} KV bytes per token{_kept(model)}, "
            f"context {model['context_length']:,}\n"
        )
    )
    rows = [
        [
            str(level.depth),
            f"{level.segments:,}",
            f"{level.tokens:,}",
            f"{level.rows:,}",
            f"{level.kept:,}",
            f"{level.segments - level.kept:,}",
            ", ".join(f"{reason} ({count:,})" for reason, count in level.reasons),
        ]
        for level in levels
    ]
    head = ["Level", "Segments", "Tokens", "Rows below", "Kept", "Folded", "Why"]
    echo(markdown(head, rows, right=(0, 1, 2, 3, 4, 5)) + "\n")
    echo(_comparison(document) + "\n")
    if not document["choices"]:
        echo(_fit(document) + "\n")


def _comparison(document: dict[str, Any]) -> str:
    from treegen.cli.tables import markdown

    rows = []
    lines = (
        ("prompt tokens computed and stored", "prompt_tokens", _count),
        ("their keys and values", "kv_bytes", _bytes),
        ("prompt keys read per decode step, all rows live", "key_tokens_per_step", _count),
        ("their bytes, keys and values, all layers", "kv_bytes_per_step", _bytes),
    )
    # A task with choices has no decode steps.
    for title, key, show in lines[:2] if document["choices"] else lines:
        shared, unshared = document[key]["shared"], document[key]["unshared"]
        saved = f"{unshared / shared:,.1f}" if shared else "n/a"
        rows.append([title, show(shared), show(unshared), saved])
    return markdown(["", "Shared", "One per sample", "Times less"], rows, right=(1, 2, 3))


def _kept(model: dict[str, Any]) -> str:
    kind = model["kv_cache_dtype"]
    return "" if kind == "auto" else f" ({kind})"


def _layers(model: dict[str, Any]) -> str:
    if not model["recurrent_layers"]:
        return f"{model['layers']} layers"
    return (
        f"{model['layers']} layers that attend and {model['recurrent_layers']} recurrent ones "
        f"with {_bytes(model['state_bytes'])} of state per sequence"
    )


def _fit(document: dict[str, Any]) -> str:
    if document["num_pages"] is None:
        return "memory: not given; up to 85% of what is free on the GPU once the model is loaded"
    fit, rows = document["rows_that_fit"], document["rows"]
    limit = min(fit, document["max_rows"], rows)
    states = document["num_states"]
    return (
        f"memory: {_bytes(document['memory'])} is {document['num_pages']:,} pages of "
        f"{document['page_size']} tokens"
        + (f" and {states:,} recurrent states" if states is not None else "")
        + f", so {fit:,} of {rows:,} rows fit at full length "
        f"(max_tokens {document['max_tokens']:,}); up to {limit:,} are decoded at once"
        + (f" (max-rows {document['max_rows']:,})" if limit == document["max_rows"] else "")
    )


def _count(number: int) -> str:
    return f"{number:,}"


def _bytes(number: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number:,} B"
