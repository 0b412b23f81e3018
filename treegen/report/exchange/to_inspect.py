"""Write a run as a log of Inspect AI: a sample for each sample, whose index gives its epoch.

A search becomes one sample whose transcript contains its tree: a span for each node, within the
span of its parent.
"""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from treegen.common.formatting import replace_surrogates
from treegen.common.version import VERSION
from treegen.errors import InputError, require_extra
from treegen.report.exchange.export import ExportedRun, export_references
from treegen.report.view import ProblemView, Sample, StoredTree

with require_extra("an Inspect log needs inspect_ai", "inspect"):
    from inspect_ai import event as events
    from inspect_ai import log as logs
    from inspect_ai import model as models
    from inspect_ai.scorer import Score

# Inspect names an entry of a zip file after the sample and its epoch; names have up to 2^16 bytes.
_MAX_ID_BYTES: Final = 65_000
_STOPS: Final = {"stop": "stop", "length": "max_tokens"}
_TURNS: Final = {
    "system": models.ChatMessageSystem,
    "user": models.ChatMessageUser,
    "assistant": models.ChatMessageAssistant,
    "tool": models.ChatMessageTool,
}
# Fields of a sample's record that are exported as metadata.
_METADATA: Final = (
    "seed",
    "logprob",
    "prompt_hash",
    "finish_reason",
    "dropped",
    "confidence",
    "self_certainty",
    "stop",
    "choice_logprobs",
)


def write(run: ExportedRun, path: Path) -> list[Path]:
    """Write the log and return its file.

    Args:
        run: The run.
        path: Ends in .eval, or in .json for Inspect's older format.

    Raises:
        InputError: the path has another ending, or an id cannot name an entry of an .eval file.
        OSError: the file cannot be written.
    """
    if path.suffix not in (".eval", ".json"):
        raise InputError(
            f"the name of an Inspect log must end in .eval or .json, got {path.name!r}"
        )
    for problem in run.view.problems if path.suffix == ".eval" else ():
        if "\0" in problem.id or len(replace_surrogates(problem.id).encode()) > _MAX_ID_BYTES:
            raise InputError(
                f"the problem id {problem.id!r:.60} is not a valid file name in an .eval file, "
                "because it is too long or contains a NUL; write a log that ends in .json"
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.stem}.part{path.suffix}")
    scratch.unlink(missing_ok=True)  # an existing file may be a link
    try:
        logs.write_eval_log(
            _build_log(run), str(scratch), format="eval" if path.suffix == ".eval" else "json"
        )
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    return [path]


def _build_log(run: ExportedRun) -> logs.EvalLog:
    view, info = run.view, run.view.info
    samples = [
        _build_sample(run, problem, sample)
        for problem in view.problems
        for sample in problem.samples
    ]
    usage = {run.model: _sum_usage(samples)}
    ended = [s.completed_at for s in samples if s.completed_at]
    started = min([info.created, *ended])
    params = {
        key: value for key, value in run.sampling.items() if value is not None and key != "seed"
    }
    return logs.EvalLog(
        version=2,
        status="success" if view.num_done >= info.planned or view.voters else "cancelled",
        eval=logs.EvalSpec(
            eval_id=run.digest("eval").hex()[:22],
            run_id=run.digest("run").hex()[:22],
            created=info.created,
            task=replace_surrogates(view.task),
            task_id=run.digest("task").hex()[:22],
            task_version=run.version or 0,
            task_args=run.task_args,
            task_args_passed=run.task_args,
            dataset=logs.EvalDataset(
                name=view.task,
                location=replace_surrogates(view.source) or None,
                samples=len(view.problems),
                sample_ids=[replace_surrogates(problem.id) for problem in view.problems],
                shuffled=False,
            ),
            model=run.model,
            model_generate_config=_build_config(run.sampling),
            config=logs.EvalConfig(epochs=view.num_samples, epochs_reducer=["mean"]),
            packages={"treegen": str(info.identity.get("treegen", VERSION))},
            metadata={
                "treegen": {
                    "fingerprint": info.fingerprint,
                    "identity": dict(info.identity),
                    **_certificate_metadata(run),
                }
            },
        ),
        plan=logs.EvalPlan(
            name="search" if view.searched else "plan",
            steps=[
                logs.EvalPlanStep(solver="search" if view.searched else "generate", params=params)
            ],
            config=_build_config(run.sampling),
        ),
        results=_build_results(run, samples),
        stats=logs.EvalStats(
            started_at=started, completed_at=max([started, *ended]), model_usage=usage
        ),
        samples=samples,
    )


def _certificate_metadata(run: ExportedRun) -> dict[str, Any]:
    """Return the certificate of a run and its hash, as fields of metadata; empty without one."""
    if (certificate := run.certificate) is None:
        return {}
    content = certificate.model_dump(mode="json")
    return {"certificate": {"sha256": certificate.sha256, "content": content}}


def _build_config(sampling: Mapping[str, Any]) -> models.GenerateConfig:
    names = ("temperature", "top_p", "max_tokens", "seed")
    return models.GenerateConfig(
        **{name: sampling[name] for name in names if sampling.get(name) is not None},
        top_k=sampling.get("top_k") or None,  # 0 keeps all
        stop_seqs=[replace_surrogates(stop) for stop in sampling.get("stop") or ()] or None,
    )


def _build_results(run: ExportedRun, samples: list[logs.EvalSample]) -> logs.EvalResults:
    report, scores = run.view.report, []
    for name in run.view.filters if report else ():
        assert report is not None
        rows = [row for row in report.metrics if row.filter == name]
        metrics: dict[str, logs.EvalMetric] = {}
        for row in rows:
            if row.value is not None:
                bounds = {"stderr": row.stderr, "low": row.low, "high": row.high}
                metrics[row.metric] = logs.EvalMetric(
                    name=row.metric, value=row.value, metadata=bounds
                )
        if rows and rows[0].value is not None and rows[0].stderr is not None:
            metrics["stderr"] = logs.EvalMetric(name="stderr", value=rows[0].stderr)
        for vote in report.majority:
            if vote.filter == name and vote.value is not None:
                metrics[f"maj@{vote.k}"] = logs.EvalMetric(name=f"maj@{vote.k}", value=vote.value)
        scored = sum(name in (sample.scores or {}) for sample in samples)
        scores.append(
            logs.EvalScore(
                name=name,
                scorer=name,
                reducer="mean",
                metrics=metrics,
                scored_samples=scored,
                unscored_samples=len(samples) - scored,
            )
        )
    return logs.EvalResults(
        total_samples=run.view.info.planned, completed_samples=len(samples), scores=scores
    )


def _build_sample(run: ExportedRun, problem: ProblemView, sample: Sample) -> logs.EvalSample:
    record = run.records.get((sample.problem_id, sample.index), {})
    prompt_content = _build_input(run, problem)
    references = export_references(problem)
    thinking, answer = sample.parts
    content: Any = replace_surrogates(sample.text)
    if thinking:
        content = [
            models.ContentReasoning(reasoning=replace_surrogates(thinking)),
            models.ContentText(text=replace_surrogates(answer)),
        ]
    reply = models.ChatMessageAssistant(content=content, model=run.model, source="generate")
    read = int(record.get("prompt_tokens") or problem.prompt_tokens)
    usage = models.ModelUsage(
        input_tokens=read,
        output_tokens=sample.num_tokens,
        total_tokens=read + sample.num_tokens,
        reasoning_tokens=sample.thinking.num_tokens if sample.thinking else None,
    )
    stop: Any = _STOPS.get(sample.finish_reason, "stop" if sample.searched else "unknown")
    metadata = {name: record[name] for name in _METADATA if record.get(name) is not None}
    ended = record.get("time")
    turns = (
        [models.ChatMessageUser(content=prompt_content)]
        if isinstance(prompt_content, str)
        else prompt_content
    )
    tree = run.trees.get((sample.problem_id, sample.index))
    return logs.EvalSample(
        id=replace_surrogates(problem.id),
        epoch=sample.index + 1,
        input=prompt_content,
        target=references[0] if len(references) == 1 else references,
        messages=[*turns, reply],
        output=models.ModelOutput(
            model=run.model,
            choices=[models.ChatCompletionChoice(message=reply, stop_reason=stop)],
            usage=usage,
        ),
        scores={name: _build_score(verdict) for name, verdict in sample.verdicts.items()}
        if sample.verdicts is not None
        else None,
        metadata={
            **metadata,
            **({"group": replace_surrogates(problem.group)} if problem.group else {}),
            **({"fields": run.fields[problem.id]} if problem.id in run.fields else {}),
            "problem": {
                "question": replace_surrogates(problem.question),
                "reference": replace_surrogates(problem.answer),
            },
        },
        model_usage={run.model: usage},
        uuid=run.digest(f"{problem.id} {sample.index}").hex()[:22],
        completed_at=ended,
        events=list(_iter_spans(tree, ended or run.view.info.created)) if tree else [],
    )


def _build_input(run: ExportedRun, problem: ProblemView) -> str | list[models.ChatMessage]:
    """Return the prompt of a problem: a text, or messages if it is a chat or has a system text."""
    prompt = run.prompts.get(problem.id, problem.question)
    if not isinstance(prompt, str):
        return [_build_message(turn) for turn in prompt]
    text = replace_surrogates(prompt)
    if problem.id in run.prompts and (system := run.system_instruction):
        rest = text.removeprefix(f"{system}\n\n")  # as `treegen.evals.job` joins the two
        return [models.ChatMessageSystem(content=system), models.ChatMessageUser(content=rest)]
    return text


def _build_score(verdict: Any) -> Score:
    value: Any = ("C" if verdict.correct else "I") if verdict.credit is None else verdict.credit
    answer = None if verdict.answer is None else replace_surrogates(verdict.answer)
    return Score(value=value, answer=answer, metadata={"correct": verdict.correct})


def _build_message(turn: Mapping[str, Any]) -> models.ChatMessage:
    kind: Any = _TURNS.get(str(turn.get("role")), models.ChatMessageUser)
    return kind(content=replace_surrogates(str(turn["content"] or "")))  # type: ignore[no-any-return]


def _iter_spans(tree: StoredTree, time: str) -> Iterator[Any]:
    """Yield the events of a search tree, depth first; the span of a node contains its subtree."""
    when: Any = {"timestamp": datetime.fromisoformat(time).astimezone(UTC), "working_start": 0.0}
    below: dict[int | None, list[Any]] = {}
    for node in tree.nodes:
        below.setdefault(node["parent_id"], []).append(node)
    open_nodes = list(reversed(below.get(None, [])))
    while open_nodes:  # a stack instead of recursion, because trees may be deep
        node = open_nodes.pop()
        if isinstance(node, str):
            yield events.SpanEndEvent(id=node, span_id=node, **when)
            continue
        name, parent = f"node-{node['id']}", node["parent_id"]
        above = None if parent is None else f"node-{parent}"
        yield events.SpanBeginEvent(
            id=name, parent_id=above, span_id=name, type="node", name=f"node {node['id']}", **when
        )
        data = {
            key: replace_surrogates(value) if isinstance(value, str) else value
            for key, value in node.items()
        }
        yield events.InfoEvent(source="treegen", data=data, span_id=name, **when)
        open_nodes += [name, *reversed(below.get(node["id"], []))]


def _sum_usage(samples: list[logs.EvalSample]) -> models.ModelUsage:
    used = [sample.output.usage for sample in samples if sample.output.usage]
    num_input, num_output = sum(u.input_tokens for u in used), sum(u.output_tokens for u in used)
    return models.ModelUsage(
        input_tokens=num_input, output_tokens=num_output, total_tokens=num_input + num_output
    )
