"""The plan of a run as a document and as text: shared, stored and read tokens; needs no weights."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from treegen.common.formatting import format_bytes, format_table, safe_text
from treegen.evals.multiple_choice import num_distinct
from treegen.evals.progress.usage import describe_levels
from treegen.report.tables import PrintableTable, list_reasons

if TYPE_CHECKING:
    from treegen.evals.job import Job
    from treegen.model.model_info import ModelInfo
    from treegen.prompts.plan.plan import Plan
    from treegen.prompts.radix import Tokens


def plan_document(job: "Job", model_info: "ModelInfo", plan: "Plan") -> dict[str, Any]:
    """Return what a run would share, store and read, as JSON values.

    Args:
        job: The job of the run.
        model_info: The layers and sizes of its model.
        plan: The plan of the job's prompts.
    """
    spec, token_bytes = model_info.spec, plan.token_bytes
    longest = max(len(request.tokens) for request in plan.requests)
    unshared = _count_choice_tokens(plan) if job.choices else plan.unshared_tokens
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
            "dtype": model_info.dtype,
            "kv_cache_dtype": job.settings.engine.kv_cache_dtype,
            "kv_bytes_per_token": token_bytes,
            "recurrent_layers": len(spec.states),
            "state_bytes": spec.state_bytes,
            "latents": spec.latent is not None,
        },
        "sharing": plan.sharing,
        "levels": [
            {**level, "folded": level["segments"] - level["kept"]}
            for level in describe_levels(plan)
        ],
        "longest_prompt": longest,
        "max_tokens": job.settings.sampling.max_tokens,
        "prompt_tokens": {"shared": plan.stored_tokens, "unshared": unshared},
        "kv_bytes": {
            "shared": plan.stored_tokens * token_bytes,
            "unshared": unshared * token_bytes,
        },
        "key_tokens_per_step": {"shared": plan.read_tokens, "unshared": plan.unshared_read_tokens},
        "kv_bytes_per_step": {
            "shared": plan.read_tokens * token_bytes,
            "unshared": plan.unshared_read_tokens * token_bytes,
        },
        "copies": {"tokens": plan.copied_tokens, "bytes": plan.copy_bytes},
        "memory": model_info.memory,
        "page_size": model_info.page_size,
        "num_pages": model_info.num_pages,
        "num_states": model_info.num_states,
        "rows_that_fit": (
            None
            if model_info.num_pages is None
            else plan.rows_that_fit(
                model_info.num_pages, model_info.page_size, model_info.num_states
            )
        ),
        "max_rows": model_info.max_rows,
    }


def _count_choice_tokens(plan: "Plan") -> int:
    """Return the prompt tokens without sharing; a prompt counts once for all its choices."""
    tokens_of: dict[str, list[Tokens]] = {}
    for request in plan.requests:
        tokens_of.setdefault(request.id.rpartition("/")[0], []).append(request.tokens)
    return sum(map(num_distinct, tokens_of.values()))


def plan_text(document: Mapping[str, Any]) -> str:
    """Return a plan document as text for people."""
    model = document["model"]
    kind = "bytes of latents" if model["latents"] else "KV bytes"
    dtype = "" if model["kv_cache_dtype"] == "auto" else f" ({model['kv_cache_dtype']})"
    what = f"{document['samples']:,} samples in {document['rows']:,} rows"
    if document["choices"]:
        what = f"the most likely of {document['choices']:,} choices"
    head = safe_text(
        f"{document['task']}: {document['problems']:,} problems ({document['source']}), "
        f"{what}\n"
        f"{model['name']}: {model['type']}, {_describe_layers(model)}, {model['dtype']}, "
        f"{model['kv_bytes_per_token']:,} {kind} per token{dtype}, "
        f"context {model['context_length']:,}\n"
    )
    columns: dict[str, str | Callable[[Mapping[str, Any]], str]] = {
        "Level": "{0[depth]}",
        "Segments": "{0[segments]:,}",
        "Tokens": "{0[tokens]:,}",
        "Rows below": "{0[rows]:,}",
        "Kept": "{0[kept]:,}",
        "Folded": "{0[folded]:,}",
        "Why": list_reasons,
    }
    table = str(PrintableTable.of(document["levels"], columns, words=["Why"]))
    parts = [head.rstrip("\n"), table, _format_comparison(document)]
    if (copies := document["copies"])["tokens"]:
        parts.append(
            f"read expanded: {copies['tokens']:,} tokens, whose keys and values take "
            f"{format_bytes(copies['bytes'])} next to their latents while memory is free"
        )
    if not document["choices"]:
        parts.append(_describe_memory(document))
    return "\n\n".join(parts)


def _format_comparison(document: Mapping[str, Any]) -> str:
    rows = []
    lines = (
        ("prompt tokens computed and stored", "prompt_tokens", "{:,}".format),
        ("their keys and values", "kv_bytes", format_bytes),
        ("prompt keys read per decode step, all rows live", "key_tokens_per_step", "{:,}".format),
        ("their bytes, keys and values, all layers", "kv_bytes_per_step", format_bytes),
    )
    # A task with choices has no decode steps.
    for title, key, show in lines[:2] if document["choices"] else lines:
        shared, unshared = document[key]["shared"], document[key]["unshared"]
        saved = f"{unshared / shared:,.1f}" if shared else "n/a"
        rows.append([title, show(shared), show(unshared), saved])
    return format_table(["", "Shared", "One per sample", "Times less"], rows, right=(1, 2, 3))


def _describe_layers(model: Mapping[str, Any]) -> str:
    if not model["recurrent_layers"]:
        return f"{model['layers']} layers"
    return (
        f"{model['layers']} layers that attend and {model['recurrent_layers']} recurrent ones "
        f"with {format_bytes(model['state_bytes'])} of state per sequence"
    )


def _describe_memory(document: Mapping[str, Any]) -> str:
    if document["num_pages"] is None:
        return "memory: not set; up to 85% of the free GPU memory after loading the model"
    fit, rows = document["rows_that_fit"], document["rows"]
    limit = min(fit, document["max_rows"], rows)
    states = document["num_states"]
    return (
        f"memory: {format_bytes(document['memory'])} is {document['num_pages']:,} pages of "
        f"{document['page_size']} tokens"
        + (f" and {states:,} recurrent states" if states is not None else "")
        + f", so {fit:,} of {rows:,} rows fit at full length "
        f"(max_tokens {document['max_tokens']:,}); up to {limit:,} are decoded at once"
        + (f" (max-rows {document['max_rows']:,})" if limit == document["max_rows"] else "")
    )
