"""Whole benchmarks: measure, print the results, and return them as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from treegen.bench import attention, cascade, ceilings, engine, latent, search, table
from treegen.bench.decoding.decode import ratios
from treegen.bench.decoding.modes import STRUCTURED
from treegen.bench.decoding.result import Settings, WorkloadResult
from treegen.bench.decoding.runs import Bench
from treegen.bench.prefill import measure, pass_table
from treegen.bench.score import ScoreJob, score_table
from treegen.bench.score import measure as measure_scores
from treegen.bench.search_methods import compare_methods
from treegen.bench.shapes import build_model, shape_of
from treegen.bench.speculate import RECORDED, SpeculationLoad, Trace, gain_table
from treegen.bench.speculate import measure as measure_guesses
from treegen.bench.timing import describe_machine
from treegen.bench.tiny import word_tokenizer
from treegen.bench.vision import build_vision_model, image_of, load_checkpoint
from treegen.errors import InputError, arg
from treegen.llm import LLM
from treegen.model.config import DTYPES, resolve_device
from treegen.report.tables import PrintableTable

if TYPE_CHECKING:
    from treegen.bench.attention import AttentionResult
    from treegen.bench.cascade import CascadeResult
    from treegen.bench.decoding.workloads import Case
    from treegen.bench.latent import LatentResult
    from treegen.cluster.placement import Placement
    from treegen.model.options import EngineOptions
    from treegen.prompts.images.table import PlacedImage

_Each = TypeVar("_Each", "AttentionResult", "CascadeResult", "LatentResult")
_RANDOM = "a random 4-layer Llama of width 256"


class Reporter(Protocol):
    """The output of a benchmark."""

    def echo(self, text: str) -> None:
        """Print lines of the results."""

    def notice(self, text: str) -> None:
        """Print a line about work in progress."""

    def print_table(self, table: PrintableTable) -> None:
        """Print a table."""


def time_engine(
    tell: Reporter, model: str | None, *, samples: int, problems: int, max_tokens: int
) -> dict[str, Any]:
    """Measure the host time of decode steps, pages in use, and speed against transformers.

    Args:
        tell: Where the results are printed.
        model: A checkpoint; None for a tiny one with random weights.
        samples: Samples per problem.
        problems: Number of problems.
        max_tokens: Tokens per sample.
    """
    about = describe_machine(torch.device("cpu"))
    tell.echo(f"{_headline(about)}\n")
    steps = list(engine.overhead())
    tell.echo("Host time of a decode step in which no row ends; the model's pass is free.")
    columns = {
        "Rows": "{0.rows:,}",
        "Vocabulary": "{0.vocab_size}",
        "median ms": "{0.median_ms:.3f}",
        "90% ms": "{0.p90_ms:.3f}",
    }
    tell.print_table(PrintableTable.of(steps, columns))
    memory = engine.memory()
    tell.echo(
        f"\n{memory.problems:,} problems x {memory.samples // memory.problems} samples, 64 rows at "
        f"once: at most {memory.peak_pages} pages in use ({memory.peak_pages_first_tenth} within "
        f"the first tenth), {memory.pages_after} afterwards"
    )
    rows = list(engine.throughput(model, problems=problems, samples=samples, max_tokens=max_tokens))
    what = f"{problems} problems x {samples} samples x {max_tokens} tokens"
    tell.echo(f"\n{what}, {model or _RANDOM}")
    columns = {
        "Engine": "{0.name}",
        "tokens/s": "{0.tokens_per_second:,.0f}",
        "seconds": "{0.seconds:.2f}",
        "prompt tokens": "{0.prompt_tokens:,}",
    }
    tell.print_table(PrintableTable.of(rows, columns, words=["Engine"]))
    return {
        "machine": about,
        "overhead": [asdict(each) for each in steps],
        "memory": asdict(memory),
        "throughput": [asdict(each) for each in rows],
    }


def time_search(tell: Reporter, model: str | None, **sizes: int) -> dict[str, Any]:
    """Measure tree of thoughts with live caches against prompting each node's text again.

    Args:
        tell: Where the results are printed.
        model: A checkpoint; None for a tiny one with random weights.
        sizes: Sizes of the job, as for `treegen.bench.search.compare`.
    """
    about = describe_machine(resolve_device("auto"))
    tell.echo(f"{_headline(about)}\n")
    rows = live, again = search.compare(model, **sizes)
    tell.echo(
        "{problems} searches at once: {depth} levels of {step_tokens} tokens, {samples} thoughts "
        "per node, {breadth} go on; ".format(**sizes)
        + (model or _RANDOM)
    )
    columns = {
        "Search": "{0.name}",
        "seconds": "{0.seconds:.2f}",
        "prompt tokens computed": "{0.prefilled:,}",
        "tokens decoded": "{0.decoded:,}",
        "nodes": "{0.nodes:,}",
    }
    tell.print_table(PrintableTable.of(rows, columns, words=["Search"]))
    tell.echo(
        f"\n{again.prefilled / live.prefilled:.1f} times fewer prompt tokens, "
        f"{again.seconds / live.seconds:.2f} times the speed"
    )
    return {"machine": about, "search": [asdict(row) for row in rows]}


def time_methods(tell: Reporter, model: str | None, **sizes: Any) -> dict[str, Any]:
    """Measure beam search against Monte Carlo tree search.

    Args:
        tell: Where the results are printed.
        model: A checkpoint; None for a tiny one with random weights.
        sizes: Sizes of the job, as for `treegen.bench.search_methods.compare_methods`.
    """
    about = describe_machine(resolve_device("auto"))
    tell.echo(f"{_headline(about)}\n")
    times = compare_methods(model, **sizes)
    columns = {
        "Method": "{0[0].name}",
        "seconds": "{0[0].seconds:.2f}",
        "beam = 1": "{0[1]:.2f}",
        "forward passes": "{0[0].steps:,}",
        "tokens decoded": "{0[0].decoded:,}",
        "nodes": "{0[0].nodes:,}",
    }
    beside = [(each, each.seconds / times[0].seconds) for each in times]
    tell.print_table(PrintableTable.of(beside, columns, words=["Method"]))
    return {"machine": about, "methods": [asdict(row) for row in times]}


def time_attention(
    tell: Reporter,
    grid: list[tuple[int, int, int]],
    levels: Sequence[tuple[int, int]],
    heads: Sequence[int],
    shape: str | None,
    *,
    repeats: int,
    dtype: str,
    device: str,
    ceiling_seconds: float | None,
) -> dict[str, Any]:
    """Measure the attention operator alone.

    Args:
        tell: Where the results are printed.
        grid: (rows, keys of the prefix, keys of each row's own) of each configuration.
        levels: (keys, groups) of each level; if not empty, only the rows of the grid are used.
        heads: Query heads, KV heads, and their width.
        shape: A model whose latent attention is measured instead; None for none.
        repeats: Timed calls of each configuration.
        dtype: The type of queries, keys and values; "auto" is float32 on a CPU, bfloat16 on a GPU.
        device: The device; "auto" is a GPU if there is one.
        ceiling_seconds: Seconds per measurement of the device's rates; None for the default.

    Raises:
        InputError: no shape has the name.
    """
    if shape is not None and shape not in latent.FORMS:
        raise InputError(f"{arg('shape')} must be one of {', '.join(latent.FORMS)}, got {shape!r}")
    target = resolve_device(device)
    kind = DTYPES[dtype if dtype != "auto" else ("float32" if target.type == "cpu" else "bfloat16")]
    about, found = describe_machine(target), ceilings.measure(target, kind, ceiling_seconds)
    tell.echo(f"{_headline(about)}\n{found}\n")
    sizes = cascade.Heads(*heads)
    how: dict[str, Any] = {"device": target, "dtype": kind, "repeats": repeats}
    medians = f"cold caches; medians of {repeats}"
    told = "{} query heads, {} KV heads, width {}; ".format(*heads) + medians
    if shape is not None:
        form = latent.FORMS[shape]
        told = f"{shape}: {form.heads} heads; {medians}"
        results = _report_each(
            tell,
            latent.measure(grid, form, found, **how),
            table.latent_line,
            table.latent_table,
            told,
        )
    elif levels:
        parts = [cascade.LevelShape(*pair) for pair in levels]
        cascades = cascade.measure([rows for rows, *_ in grid], parts, sizes, found, **how)
        results = _report_each(tell, cascades, table.cascade_line, table.cascade_table, told)
    else:
        shared = attention.measure(grid, sizes, found, **how)
        results = _report_each(tell, shared, table.attention_case_line, table.attention_table, told)
    return {
        "bench": "latent" if shape else "levels" if levels else "attention",
        "machine": about,
        "ceilings": asdict(found),
        "heads": asdict(latent.FORMS[shape] if shape else sizes),
        "results": results,
    }


def time_prefill(
    tell: Reporter,
    shape: str | None,
    model: str | None,
    sizes: Sequence[int],
    *,
    prefix: int,
    passes: int,
    repeats: int,
    dtype: str,
    device: str,
    ceiling_seconds: float | None,
    **made: Any,
) -> dict[str, Any]:
    """Measure passes over a few prompt tokens.

    Args:
        tell: Where the results are printed.
        shape: The shape of a model with random weights; None for the checkpoint.
        model: The checkpoint; None for the shape.
        sizes: Numbers of tokens per pass.
        prefix: Tokens of the cached prefix.
        passes: Passes per run.
        repeats: Timed runs of each size.
        dtype: The type of the weights.
        device: The device.
        ceiling_seconds: Seconds per measurement of the device's rates; None for the default.
        made: Further arguments of `LLM`.
    """
    built, tokenizer = _build_model(shape, model, dtype=dtype, device=device)
    found = ceilings.measure(built.device, built.dtype, ceiling_seconds)
    llm = LLM(built, tokenizer=tokenizer, **made)
    about = describe_machine(built.device)
    tell.echo(f"{_headline(about)}, {built.spec.name}\n{found}\n")
    times = list(measure(llm, found, sizes, prefix=prefix, passes=passes, repeats=repeats))
    built.close()
    tell.print_table(pass_table(times))
    return {
        "bench": "prefill",
        "machine": about,
        "model": built.spec.name,
        "ceilings": asdict(found),
        "settings": made,
        "results": [asdict(each) | {"times_floor": each.times_floor} for each in times],
    }


def time_score(
    tell: Reporter, shape: str | None, model: str | None, layers: int | None, **job: int
) -> dict[str, Any]:
    """Measure scoring of texts below one prompt, on a CPU in float32, against transformers.

    Args:
        tell: Where the results are printed.
        shape: The shape of a model with random weights; None for the checkpoint.
        model: The checkpoint; None for the shape.
        layers: Layers of the shape; None for all.
        job: The fields of `ScoreJob`.
    """
    built, tokenizer = _build_model(shape, model, layers=layers, dtype="float32", device="cpu")
    llm, wanted = LLM(built, tokenizer=tokenizer), ScoreJob(**job)
    about = describe_machine(built.device)
    deep = built.module.config.get_text_config(decoder=True).num_hidden_layers
    tell.echo(
        f"{_headline(about)}, {built.spec.name}, {deep} layers, vocabulary "
        f"{built.spec.vocab_size:,}\n{wanted.texts} texts of {wanted.tokens} tokens below "
        f"{wanted.prefix:,}, {wanted.top} likeliest\n"
    )
    times = []
    for each in measure_scores(llm, wanted):
        tell.notice(f"{each.name}: {each.processor_seconds:,.2f} processor seconds for each text")
        times.append(each)
    built.close()
    tell.print_table(score_table(times))
    return {
        "bench": "score",
        "machine": about,
        "model": built.spec.name,
        "layers": deep,
        "job": asdict(wanted),
        "results": [asdict(each) for each in times],
    }


def time_guesses(
    tell: Reporter,
    shape: str | None,
    model: str | None,
    trace: str | None,
    *,
    rows: Sequence[int],
    prefixes: Sequence[int],
    own_tokens: int,
    repeats: int,
    kind: dict[str, Any],
    made: dict[str, Any],
) -> dict[str, Any]:
    """Measure jobs of recorded samples without speculation and with it.

    Args:
        tell: Where the results are printed.
        shape: The shape of a model with random weights; None for the checkpoint.
        model: The checkpoint; None for the shape.
        trace: A file of recorded samples; None for the bundled one.
        rows: Numbers of samples decoded at once.
        prefixes: Lengths of the shared prefix, in tokens.
        own_tokens: Prompt tokens of each single sample.
        repeats: Timed pairs of runs of each job.
        kind: How the model is loaded.
        made: Further arguments of `LLM`.

    Raises:
        InputError: the file cannot be read, or has no samples.
    """
    recorded = Trace.read(Path(trace) if trace else RECORDED)

    def job(number: int, prefix: int) -> SpeculationLoad:
        # More prompts with own tokens would not fit in memory with those of the first rows.
        more = number if own_tokens or number >= 1024 else max(4 * number, 64)
        return SpeculationLoad(number, more, prefix, own_tokens)

    jobs = [job(number, prefix) for prefix in prefixes for number in rows]
    built, tokenizer = _build_model(shape, model, **kind)
    llm = LLM(built, tokenizer=tokenizer, **made)
    about = describe_machine(built.device)
    told = f"recorded samples: {recorded.source}"
    tell.echo(f"{_headline(about)}, {built.spec.name}\n{told}\n")
    gains = list(measure_guesses(llm, recorded, jobs, repeats))
    built.close()
    tell.print_table(gain_table(gains))
    return {
        "bench": "speculate",
        "machine": about,
        "model": built.spec.name,
        "trace": recorded.source,
        "settings": made,
        "results": [asdict(gain) for gain in gains],
    }


def time_decoding(
    tell: Reporter,
    cases: Sequence[Case],
    shape: str | None,
    model: str | None,
    title: str,
    *,
    settings: Settings,
    ceiling_seconds: float | None,
    image_tokens: int = 0,
    **kind: Any,
) -> tuple[list[WorkloadResult], dict[str, Any]]:
    """Measure cases on a shape or a checkpoint.

    Args:
        tell: Where the results are printed.
        cases: The workloads and their modes.
        shape: The shape of a model with random weights; None for the checkpoint.
        model: The checkpoint; None for the shape.
        title: Text printed before the description of the machine.
        settings: How to measure.
        ceiling_seconds: Seconds per measurement of the device's rates; None for the default.
        image_tokens: Approximate tokens of an image before each prefix. Default: 0, no image.
        kind: How the model is loaded, as for `build_model`.

    Returns:
        The results, and the same with their settings as JSON.

    Raises:
        InputError: there is no such shape, or the image does not fit into the context.
        ModelError: the checkpoint cannot be loaded, or takes no images.
        CapacityError: the weights do not fit.
    """
    if image_tokens:
        usual = {name: kind[name] for name in ("dtype", "device", "kv_cache_dtype")}
        built, tokenizer = (
            build_vision_model(shape, **usual)
            if shape
            else load_checkpoint(model or "", images=True, **usual)
        )
        image = image_of(built, tokenizer, image_tokens)
        cases = [_add_image(image, case) for case in cases]
    else:
        built, tokenizer = _build_model(shape, model, **kind)
    if shape and any(STRUCTURED in case.modes for case in cases):
        tokenizer = word_tokenizer(built.spec.vocab_size)
    ranks, quantization = kind["ranks"], kind["quantization"]
    fp8 = quantization == "fp8"
    found = ceilings.measure(built.device, built.dtype, ceiling_seconds, fp8=fp8)
    about = describe_machine(built.device)
    many = f" on {ranks} GPUs" if ranks > 1 else ""
    many += f" in {quantization}" if quantization else ""
    many += ", keys and values in fp8" if kind["kv_cache_dtype"] == "fp8" else ""
    many += f", below an image of {image.num:,} tokens" if image_tokens else ""
    tell.echo(f"{title}{_headline(about)}, {built.spec.name}{many}\n{found}\n")
    bench = Bench(built, tokenizer, found, settings)
    results = []
    for result in bench.measure(cases):
        tell.notice(table.result_line(result))
        results.append(result)
    bench.close()
    built.close()
    tell.print_table(table.results_table(results))
    return results, {
        "tensor_parallel_size": ranks,
        "quantization": quantization,
        "kv_cache_dtype": kind["kv_cache_dtype"],
        "machine": about,
        "model": built.spec.name,
        "weights": "random" if shape else "checkpoint",
        "ceilings": asdict(found),
        "settings": asdict(settings),
        "results": [asdict(each) for each in results],
    }


def tell_ratios(tell: Reporter, results: Sequence[WorkloadResult]) -> list[dict[str, Any]]:
    """Print the ratios of decode speed with sharing to speed without, and return them."""
    found = ratios(results)
    tell.echo("\nDecode speed with sharing over speed without")
    tell.print_table(table.ratio_table(found))
    return [asdict(each) for each in found]


def time_cluster(
    tell: Reporter, places: Placement, options: EngineOptions, *, shape: str | None, **job: Any
) -> dict[str, Any]:
    """Measure the same whole job on one worker and on all.

    Args:
        tell: Where the results are printed.
        places: Where the workers run.
        options: The checkpoint, and how each worker makes its engine.
        shape: The shape of a model with random weights, instead of the checkpoint; None for none.
        job: The fields of `ClusterJob`.

    Raises:
        InputError: no shape has the name.
    """
    from treegen.bench.cluster import ClusterBench, ClusterJob

    if shape is not None:
        shape_of(shape)
    wanted, count = ClusterJob(**job), places.count or 1
    with ClusterBench(wanted, places, options, shape=shape) as bench:
        starts = {name: getattr(bench, name) for name in ("startup_seconds", "warm_up_seconds")}
        told = "{} workers: started in {:.1f} s, warmed up in {:.1f} s"
        tell.notice(told.format(count, *starts.values()))
        found = []
        for workers in dict.fromkeys((1, count)):
            each = bench.time_job(workers)
            tell.notice(f"{workers} workers: {each.tokens_per_second:,.0f} tokens/s")
            found.append(each)
    tell.echo(
        f"{wanted.problems} problems x {wanted.samples} samples below {wanted.prefix} tokens, "
        f"{shape or options.model}, {'GPUs' if places.device == 'cuda' else 'CPU workers'}"
    )
    columns = {
        "Workers": "{0[0].workers}",
        "tokens/s": "{0[0].tokens_per_second:,.0f}",
        "times one": "{0[1]:.2f}",
        "seconds": "{0[0].seconds:.2f}",
        "prompt tokens": "{0[0].prompt_tokens:,}",
    }
    one = found[0].tokens_per_second
    tell.print_table(
        PrintableTable.of([(each, each.tokens_per_second / one) for each in found], columns)
    )
    results = [asdict(e) | {"tokens_per_second": e.tokens_per_second} for e in found]
    return {
        "bench": "cluster",
        "device": places.device,
        "job": asdict(wanted),
        **starts,
        "results": results,
    }


def _headline(about: dict[str, Any]) -> str:
    """Return one line about the machine that is measured."""
    return f"torch {about['torch']}, {about['threads']} threads, {about['device']}"


def _build_model(
    shape: str | None, model: str | None, layers: int | None = None, **kind: Any
) -> tuple[Any, Any]:
    """Return a model of a shape or of a checkpoint, and its tokenizer. layers: of the shape."""
    if model is not None:
        return load_checkpoint(model, **kind)
    known = shape_of(shape or "")
    return build_model(known if layers is None else replace(known, layers=layers), **kind)


def _add_image(image: PlacedImage, case: Case) -> Case:
    """Return a case with an image before each prefix."""
    job = case.workload
    job = replace(job, prefix=job.prefix + image.num, image_tokens=image.num, image_id=image.first)
    return replace(case, workload=job)


def _report_each(
    tell: Reporter,
    results: Iterable[_Each],
    line: Callable[[_Each], str],
    listed: Callable[[list[_Each]], PrintableTable],
    told: str,
) -> list[dict[str, Any]]:
    """Print each result as it arrives, then a table; return the results as JSON."""
    found = []
    for result in results:
        tell.notice(line(result))
        found.append(result)
    tell.echo(told)
    tell.print_table(listed(found))
    return [asdict(result) for result in found]
