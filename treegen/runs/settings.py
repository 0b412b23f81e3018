"""The settings of a run, and their comparison when the run is resumed."""

import hashlib
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any, Final

from treegen.common.formatting import flatten
from treegen.errors import InputError, RunError, arg
from treegen.runs.files import check_id, to_json_value
from treegen.runs.record_format import FREE, check_types

SCHEMA: Final = 1
_PACKAGES: Final = ("torch", "transformers", "tokenizers", "numpy")
_MAX_SHOWN_CHARS: Final = 60
_ABSENT: Final = object()
_MAX_SAMPLES: Final = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings of a run, separated by whether they change samples.

    Raises:
        InputError: JSON cannot represent a value, an id occurs twice, or `planned` is below 1.
    """

    identity: Mapping[str, Any]
    """Everything that changes a result (weights and tokenizer hash, chat template, dtype, sampling,
    seed, number of samples, task and version, data hash, few-shot, limits, treegen's version).
    Resuming with another value is an error. May be nested."""
    problem_ids: Sequence[str]
    """The ids of the problems."""
    planned: int
    """How many samples the finished run has."""
    free: Mapping[str, Any] = field(default_factory=dict)
    """All other settings (memory, devices, paths). They are only recorded. May be nested."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """How a user sets a field, by the field's dotted name, such as `{"data.problems": "data= or
    limit="}`; an empty text if no argument sets it. For a field that is not listed, it is the last
    part of its name and an equals sign."""
    computing: Mapping[str, str] = field(default_factory=dict)
    """What the last bits of samples depend on in addition to versions, such as the device. It is
    recorded with the versions. A resume reports changes."""

    def __post_init__(self) -> None:
        """Raise InputError for settings that cannot be stored and compared."""
        to_json_value(self.identity)
        to_json_value(self.free)
        if taken := {"problem_ids", "planned"} & set(self.identity):
            raise InputError(
                f"identity must not contain {min(taken)!r}, which is a separate argument"
            )
        if type(self.planned) is not int or self.planned < 1:
            raise InputError(f"planned must be a positive integer, got {self.planned!r}")
        seen: set[str] = set()
        for problem_id in self.problem_ids:
            if not isinstance(problem_id, str):
                raise InputError(f"problem ids must be text, got {problem_id!r}")
            if problem_id in seen:
                raise InputError(
                    f"the problem id {problem_id!r} occurs twice; rename one of the problems"
                )
            check_id(problem_id)
            seen.add(problem_id)

    @property
    def versions(self) -> dict[str, str]:
        """Versions of packages and the platform, together with `computing`."""
        return {**versions(), **self.computing}

    @property
    def fingerprint(self) -> str:
        """A hash of everything that changes a result."""
        return _fingerprint(_comparable_fields(self.identity, self.problem_ids, self.planned))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The content of run.json."""

    fingerprint: str
    """A hash of everything that changes a result."""
    created: str
    """When the run was started, in UTC."""
    identity: Mapping[str, Any]
    """As in `RunSettings`, as JSON values."""
    free: Mapping[str, Any]
    """As in `RunSettings`, as JSON values."""
    problem_ids: tuple[str, ...]
    """The ids of the problems."""
    planned: int
    """How many samples the finished run has."""
    versions: Mapping[str, str]
    """Versions of Python, the platform and packages at its start, and `computing`."""
    resumes: tuple[Mapping[str, Any], ...]
    """The resumes with different free settings or versions than before; each has time, free and
    versions."""


def model_identity(
    fingerprint: str, dtype: str, quantization: str | None, kv_cache_dtype: str | None
) -> dict[str, str]:
    """Return the properties of a model that its samples depend on, as runs and caches record them.

    Args:
        fingerprint: Hash of the weights.
        dtype: The type in which the model computes.
        quantization: How weight matrices are rounded; None if they have dtype.
        kv_cache_dtype: How keys and values are rounded; None if they have dtype.
    """
    rounded = {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    named = {name: kind for name, kind in rounded.items() if kind is not None}
    return {"fingerprint": fingerprint, "dtype": dtype, **named}


@cache
def versions() -> Mapping[str, str]:
    """Return the versions of Python, the platform, and the packages on which samples depend."""
    from importlib import metadata  # slow to import, and needed only to write runs

    installed = {"python": platform.python_version(), "platform": platform.platform()}
    installed["treegen"] = sys.modules["treegen"].__version__
    for package in _PACKAGES:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed


def changed_versions(before: object, now: Mapping[str, str]) -> list[str]:
    """Return a list of one sentence on the versions that differ from `before`; empty if none do."""
    old = before if isinstance(before, Mapping) else {}
    changed = [
        f"{name} {now[name]} instead of {old[name]}"
        for name in now
        if name != "platform" and name in old and now[name] != old[name]
    ]
    if not changed:
        return []
    return [f"resumed with {', '.join(changed)}: samples may differ from those drawn before"]


def to_json(info: RunInfo) -> dict[str, Any]:
    """Return the content of run.json as JSON values."""
    return {
        "schema": SCHEMA,
        "fingerprint": info.fingerprint,
        "created": info.created,
        "planned": info.planned,
        "settings": {"identity": info.identity, "free": info.free},
        "versions": info.versions,
        "resumes": list(info.resumes),
        "problem_ids": list(info.problem_ids),
    }


def from_json(value: Any, name: str) -> RunInfo:
    """Return the run that `value`, the content of the file `name`, describes.

    Raises:
        RunError: the content has a newer schema, is incomplete, or was changed by hand.
    """
    schema = value.get("schema") if isinstance(value, dict) else None
    if type(schema) is not int or schema < 1:
        raise RunError(
            f"{name} is not the run.json of a treegen run; pass the directory of a treegen run"
        )
    if schema > SCHEMA:
        raise RunError(
            f"{name} has schema {schema}, but this version of treegen supports schemas up to "
            f"{SCHEMA}; upgrade treegen"
        )
    try:
        info = RunInfo(
            fingerprint=_require_type(value["fingerprint"], str),
            created=_time(_require_type(value["created"], str)),
            identity=_require_type(value["settings"]["identity"], dict),
            free=_require_type(value["settings"]["free"], dict),
            problem_ids=tuple(
                _require_type(p, str) for p in _require_type(value["problem_ids"], list)
            ),
            planned=_require_count(value["planned"]),
            versions=_require_type(value["versions"], dict),
            resumes=tuple(_require_type(r, dict) for r in _require_type(value["resumes"], list)),
        )
        began = {"free": info.free, "versions": info.versions}
        for start in (began, *info.resumes):
            check_types(_require_type(start["free"], dict), FREE)
            for version in _require_type(start["versions"], dict).values():
                _require_type(version, str)
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{name} is corrupt ({error!s}); restore it from a copy") from None
    if (
        _fingerprint(_comparable_fields(info.identity, info.problem_ids, info.planned))
        != info.fingerprint
    ):
        raise RunError(
            f"{name} was changed after it was written (its settings do not match its "
            "fingerprint); restore it from a copy"
        )
    return info


def differences(info: RunInfo, settings: RunSettings) -> list[str]:
    """Return a text for each field of `settings` that differs from that of the run."""
    old = dict(flatten(_comparable_fields(info.identity, info.problem_ids, info.planned)))
    fields = _comparable_fields(settings.identity, settings.problem_ids, settings.planned)
    new = dict(flatten(fields))
    changes = []
    for name in [*old, *(n for n in new if n not in old)]:
        before, after = old.get(name, _ABSENT), new.get(name, _ABSENT)
        if _text(before) != _text(after):
            changes.append(f"{name}: {_change(before, after)}{_set_by(name, settings.arguments)}")
    return changes


def _comparable_fields(
    identity: Mapping[str, Any], problem_ids: Sequence[str], planned: int
) -> dict[str, Any]:
    return {**to_json_value(identity), "problem_ids": list(problem_ids), "planned": planned}


def _fingerprint(value: Any) -> str:
    return hashlib.sha256(_text(value).encode()).hexdigest()


def _time(text: str) -> str:
    datetime.fromisoformat(text)  # checked because it becomes a part of file names
    return text


def _require_type(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {_shorten(_text(value), 0)}")
    return value


def _require_count(value: Any) -> int:
    if not 1 <= _require_type(value, int) <= _MAX_SAMPLES:
        raise ValueError("the number of planned samples is out of range")
    return int(value)


def _set_by(name: str, arguments: Mapping[str, str]) -> str:
    # Arguments that only the caller knows set the problems and their number.
    derived = "" if name in ("problem_ids", "planned") else arg(name.rpartition(".")[2] + "=")
    around = name
    while around and around not in arguments:
        around = around.rpartition(".")[0]
    argument = arguments.get(around, derived)
    return f" ({argument})" if argument else ""


def _text(value: Any) -> str:
    return "not set" if value is _ABSENT else json.dumps(value, sort_keys=True)


def _change(before: Any, after: Any) -> str:
    """Return "before -> after"; long values are cut to where they start to differ."""
    if isinstance(before, list) and isinstance(after, list) and len(before) != len(after):
        return f"{len(before):,} -> {len(after):,} entries"
    old, new = _text(before), _text(after)
    same = next(
        (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b),
        min(len(old), len(new)),
    )
    return f"{_shorten(old, same)} -> {_shorten(new, same)}"


def _shorten(text: str, around: int) -> str:
    if len(text) <= _MAX_SHOWN_CHARS:
        return text
    start = max(0, min(around - _MAX_SHOWN_CHARS // 3, len(text) - _MAX_SHOWN_CHARS))
    stop = start + _MAX_SHOWN_CHARS
    return ("..." if start else "") + text[start:stop] + ("..." if stop < len(text) else "")
