"""Read Inspect logs: samples become problems, epochs become samples, and scorers become filters.

Scores count as they do in Inspect's own metrics. A sample without a score by a scorer, or with NaN,
is left out of that scorer's metrics.
"""

import io
import json
import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO, Final

from treegen.common.files import (
    MAX_DATA_BYTES,
    describe_read_error,
    max_unpacked_size,
    open_regular,
    read_bytes,
)
from treegen.errors import InputError, require_extra
from treegen.report.exchange.external_log import (
    MAX_SAMPLES,
    ExternalLog,
    ExternalProblem,
    ExternalSample,
    ExternalVerdict,
    score_to_verdict,
    usable_sampling,
    validate,
)

with require_extra("an Inspect log needs inspect_ai", "inspect"):
    from inspect_ai.log import EvalLog, EvalSample, read_eval_log
    from inspect_ai.model import ChatMessage, ContentReasoning
    from inspect_ai.scorer import Score

# Inspect's own letters and words, and their values.
_LETTERS: Final = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
_WORDS: Final = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
_ENDS: Final = {"stop": "stop", "max_tokens": "length", "model_length": "length"}
_SAMPLING: Final = ("temperature", "top_p", "top_k", "max_tokens", "seed")


def read_inspect(path: Path) -> ExternalLog:
    """Return the content of a log.

    Raises:
        InputError: it is not a readable log, has no samples, or samples that contradict each other.
    """
    log = _read_log(path)
    if not log.samples:
        raise InputError(
            f"the log {path} contains no samples; run the eval to completion, and log its samples"
        )
    notices: list[str] = []
    problems = _collect_problems(log.samples, path, is_own=_own_metadata(log) is not None)
    scores = _collect_scores(log.samples, notices)
    filters = list(dict.fromkeys(name for sample_scores in scores for name in sample_scores))
    pairs = list(zip(log.samples, scores, strict=True))
    scored = [pair for pair in pairs if pair[1]]
    notices += _describe_unscored(pairs, filters)
    epochs = max([log.eval.config.epochs or 1, *(sample.epoch for sample in log.samples)])
    if epochs > MAX_SAMPLES:
        raise InputError(f"the log {path} must have at most {MAX_SAMPLES:,} epochs, got {epochs}")
    sampling = usable_sampling(_collect_sampling(log), notices)
    system = _find_system_instruction(log)
    return validate(
        ExternalLog,
        {
            "task": log.eval.task,
            "version": str(log.eval.task_version),
            "model": log.eval.model,
            "source": f"inspect_ai {log.eval.packages.get('inspect_ai', '')}".strip(),
            "problems": problems,
            "filters": tuple(filters),
            "num_samples": epochs,
            "samples": tuple(
                validate(
                    ExternalSample,
                    _to_sample(sample, sample_scores),
                    f"{path}: sample {sample.id!r:.60}, epoch {sample.epoch}",
                )
                for sample, sample_scores in scored
            ),
            "sampling": sampling,
            "system_instruction": system,
            "recorded": (*sampling, *(["system_instruction"] if system is not None else [])),
            "notices": tuple(notices),
        },
        str(path),
    )


def _describe_unscored(
    pairs: Sequence[tuple[EvalSample, Mapping[str, tuple[float, Score]]]], filters: Sequence[str]
) -> Iterator[str]:
    """Yield a notice for each kind of samples that some metric leaves out.

    Args:
        pairs: The samples with their scores.
        filters: The names of all scores.
    """
    failed = sum(bool(sample.error) for sample, sample_scores in pairs if not sample_scores)
    if failed:
        yield f"{failed:,} samples ended with an error, have no score and are left out"
    scored = [sample_scores for _, sample_scores in pairs if sample_scores]
    if filters and (num_left := len(pairs) - len(scored) - failed):
        yield f"{num_left:,} samples have no score and are left out"
    for name in filters:
        if num_lacking := sum(name not in sample_scores for sample_scores in scored):
            yield f"{num_lacking:,} samples have no score of {name} and do not count in its metrics"


def _read_log(path: Path) -> EvalLog:
    try:
        if path.suffix != ".eval":
            return read_eval_log(io.BytesIO(read_bytes(path, MAX_DATA_BYTES)), format="json")
        with open(open_regular(path), "rb") as file:
            _check_size(file, path)
            return read_eval_log(file, format="eval")
    except OSError as error:
        raise InputError(describe_read_error(path, error)) from None
    except InputError:
        raise
    except Exception as error:  # from zipfile, json or pydantic
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(
            f"{path} cannot be read as an Inspect log: {reason}; pass a complete .eval or .json "
            "file"
        ) from error


def _check_size(file: BinaryIO, path: Path) -> None:
    """Raise InputError for a log that unpacks to far more than logs of its size do.

    No entry is read beyond the size stated in the zip directory.
    """
    max_bytes = max_unpacked_size(path.stat().st_size)
    with zipfile.ZipFile(file) as packed:
        size = sum(entry.file_size for entry in packed.infolist())
    if size > max_bytes:
        raise InputError(
            f"the log {path} unpacks to {size >> 20:,} MiB, which is far more than usual for a "
            "file of its size; if you trust the log, convert it with `inspect log convert --to "
            "json` and import the result"
        )
    file.seek(0)


def _own_metadata(log: EvalLog) -> Mapping[str, Any] | None:
    """Return what treegen wrote about the run; None if another tool wrote the log."""
    own = (log.eval.metadata or {}).get("treegen")
    return own if isinstance(own, Mapping) else None


def _find_system_instruction(log: EvalLog) -> str | None:
    """Return the system text of all samples, "" for none; None if it is not known."""
    match _own_metadata(log):
        case {"identity": {"prompt": {"system_instruction": str() | None as text}}}:
            return text or ""
    texts = {
        "\n\n".join(turn.text for turn in takewhile(_is_system, sample.messages))
        if sample.messages
        else None
        for sample in log.samples or ()
    }
    text = texts.pop() if len(texts) == 1 else None
    return None if text is None or "attachment://" in text else text


def _is_system(turn: ChatMessage) -> bool:
    return turn.role == "system"


def _collect_problems(
    samples: Sequence[EvalSample], path: Path, *, is_own: bool
) -> tuple[ExternalProblem, ...]:
    """Return the problems of some samples.

    Args:
        samples: The samples of a log.
        path: The file of the log, for messages.
        is_own: Whether treegen wrote the log.

    Raises:
        InputError: Samples of one problem contradict each other.
    """
    problems: dict[str, ExternalProblem] = {}
    ids: dict[str, int | str] = {}
    for sample in samples:
        name = str(sample.id)
        if ids.setdefault(name, sample.id) != sample.id:
            message = (
                f"the log {path} uses the number {name} and the text {name!r} as two "
                "different sample ids"
            )
            raise InputError(f"{message}; rename one of the samples")
        problem = _to_problem(sample, f"{path}: sample {sample.id!r:.60}", is_own=is_own)
        earlier = problems.setdefault(name, problem)
        if earlier.model_copy(update={"prompt": problem.prompt}) != problem:
            raise InputError(
                f"the log {path} has different inputs or targets for the sample {name!r:.60}; "
                "rename one of the samples"
            )
        if earlier.prompt != problem.prompt:  # such as choices in another order in each epoch
            problems[name] = earlier.model_copy(update={"prompt": ""})
    return tuple(problems.values())


def _to_problem(sample: EvalSample, where: str, *, is_own: bool) -> ExternalProblem:
    """Return the problem of a sample.

    Args:
        sample: The sample.
        where: The file and the sample, for messages.
        is_own: Whether treegen wrote the log; its question may be a part of the input.
    """
    content = sample.input
    question = (
        content
        if isinstance(content, str)
        else "\n\n".join(turn.text for turn in content if turn.role == "user")
    )
    target = sample.target
    answer = target if isinstance(target, str) else json.dumps(target)
    if is_own:
        match sample.metadata.get("problem"):
            case {"question": str(question), "reference": str(answer)}:
                pass
    row = {
        "id": str(sample.id),
        "question": question,
        "answer": answer,
        "prompt": _join_prompt(sample),
    }
    group = sample.metadata.get("group")
    return validate(
        ExternalProblem, row | ({"group": group} if isinstance(group, str) else {}), where
    )


def _join_prompt(sample: EvalSample) -> str:
    """Return the messages before the model's first reply as one text; "" if there is no reply."""
    turns = list(
        takewhile(lambda turn: turn.role != "assistant" or turn.source == "input", sample.messages)
    )
    text = "\n\n".join(turn.text for turn in turns)
    return "" if len(turns) == len(sample.messages) or "attachment://" in text else text


def _collect_scores(
    samples: Sequence[EvalSample], notices: list[str]
) -> list[dict[str, tuple[float, Score]]]:
    """Return the scores of each sample that are numbers from 0 to 1; each entry of a dict counts.

    A scorer with another number, or without numbers, is left out. If a scorer has numbers, a text
    that is not a number counts as 0, as in Inspect.
    """
    scores_of_samples = [_list_scores(sample) for sample in samples]
    numbers: dict[str, list[float | None]] = {}
    for by_name in scores_of_samples:
        for name, (value, _) in by_name.items():
            numbers.setdefault(name, []).append(_to_number(value))
    shares = {
        name
        for name, values in numbers.items()
        if any(value is not None for value in values)
        and all(value is None or 0 <= value <= 1 for value in values)
    }
    names = dict.fromkeys(name for sample in samples for name in sample.scores or {})
    for name in sorted(names):
        if not any(share == name or share.startswith(f"{name}/") for share in shares):
            notices.append(f"the scores of {name} are not numbers from 0 to 1 and are left out")
    for name in sorted(shares):
        if num_texts := numbers[name].count(None):
            notices.append(f"{num_texts:,} scores of {name} are not numbers and count as 0")
    return [
        {
            name: (_to_number(value) or 0.0, score)
            for name, (value, score) in by_name.items()
            if name in shares
        }
        for by_name in scores_of_samples
    ]


def _list_scores(sample: EvalSample) -> dict[str, tuple[Any, Score]]:
    """Return the scores of a sample, by scorer, without NaN, which means that it is not scored."""
    by_scorer = {}
    for name, score in (sample.scores or {}).items():
        values = score.value if isinstance(score.value, Mapping) else {"": score.value}
        for key, value in values.items():
            if not (isinstance(value, float) and math.isnan(value)):
                by_scorer[f"{name}/{key}" if key else name] = (value, score)
    return by_scorer


def _to_number(value: Any) -> float | None:
    """Return a score as Inspect's metrics take it; None if it is not a number."""
    if isinstance(value, str):
        if value in _LETTERS:
            return _LETTERS[value]
        value = _WORDS.get(value.lower(), value)
    if not isinstance(value, str | bool | int | float):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if not isinstance(value, str) or math.isfinite(number) else None


def _to_sample(sample: EvalSample, numbers: Mapping[str, tuple[float, Score]]) -> dict[str, Any]:
    answer = sample.output.completion
    thinking = _join_reasoning(sample)
    usage = sample.output.usage
    stop = sample.output.choices[0].stop_reason if sample.output.choices else "unknown"
    return {
        "problem_id": str(sample.id),
        "index": sample.epoch - 1,
        "text": thinking + answer,
        "verdicts": {
            name: _to_verdict(score, number, answer) for name, (number, score) in numbers.items()
        },
        "num_tokens": usage.output_tokens if usage else 0,
        "prompt_tokens": usage.input_tokens if usage else 0,
        "finish_reason": _ENDS.get(stop, stop),
        "thinking": len(thinking),
        "thinking_tokens": (usage.reasoning_tokens or 0) if usage else 0,
        "time": str(sample.completed_at) if sample.completed_at else None,
    }


def _to_verdict(score: Score, number: float, text: str) -> ExternalVerdict:
    # A log exported by treegen stores which samples are correct, because credit does not imply it.
    right = (score.metadata or {}).get("correct")
    if isinstance(right, bool) and (score.answer is not None or not right):
        credit = None if isinstance(score.value, str) else number
        return ExternalVerdict(answer=score.answer, correct=right, credit=credit)
    return score_to_verdict(number, score.answer, text)


def _join_reasoning(sample: EvalSample) -> str:
    content = sample.output.message.content if sample.output.choices else ""
    if isinstance(content, str):
        return ""
    return "".join(part.reasoning for part in content if isinstance(part, ContentReasoning))


def _collect_sampling(log: EvalLog) -> dict[str, Any]:
    # The plan's settings for calls override the model's settings.
    configs = (log.eval.model_generate_config, log.plan.config)
    sampling = {
        name: value
        for config in configs
        for name in _SAMPLING
        if (value := getattr(config, name)) is not None
    }
    stops = [stop for config in configs for stop in config.stop_seqs or ()]
    return sampling | ({"stop": tuple(dict.fromkeys(stops))} if stops else {})
