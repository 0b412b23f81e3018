"""The file of a certificate: its schema, its canonical form, and its differences to another.

A certificate may come from somebody else. It is one JSON document in canonical form (ASCII, sorted
keys, an indent of two spaces), so that equal contents are equal bytes, which a signature covers.
Nothing in it is used as a path.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from treegen.common.files import read_limited
from treegen.errors import InputError
from treegen.runs import RunDir
from treegen.runs.files import parse_json
from treegen.runs.settings import to_json

FILE: Final = "certificate.json"
"""The name of a run's certificate in its directory."""
_MAX_BYTES: Final = 64 << 20
_MAX_CHARS: Final = 40
_CLOSE: Final = 1e-9
"""Absolute and relative tolerance of equal numbers; library versions round differently."""

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class HashedFile(_Part):
    """A file of the model."""

    size: Count
    sha256: Sha256


class CertifiedRun(_Part):
    """The settings of the run, as its run.json has them."""

    created: str
    fingerprint: Sha256
    planned: Count
    resumes: Count
    model: str
    """The name of the model in the run; its files are what counts."""
    settings: dict[str, Any]
    versions: dict[str, str]
    computed_on: dict[str, str]
    run_json: Sha256
    """Hash of the content of run.json, which has further settings."""


class CertifiedTask(_Part):
    """The task and its scorer."""

    name: str
    version: str
    filters: list[str]
    arguments: dict[str, str]
    libraries: dict[str, str | None]
    """Versions of the libraries that scorers use; null if one is not installed."""


class CertifiedData(_Part):
    """The problems and the few-shot examples."""

    problems: Sha256
    num_problems: Count
    examples: Sha256
    skipped: Count
    """Lines of the data that could not be used."""


class CertifiedSamples(_Part):
    """The samples and their verdicts."""

    samples_jsonl: Sha256
    """Hash of the lines of samples.jsonl, as sha256sum prints it."""
    num_samples: Count
    num_tokens: Count
    verdicts: Sha256
    """Hash of whether each sample is right, and of its credit, by filter."""


class CertifiedFinding(_Part):
    """A finding of the audit."""

    kind: str
    severity: Literal["high", "medium", "low"]
    count: Count
    total: Count
    unit: str


class CertifiedPrompts(_Part):
    """The prompts as the tokenizer renders them."""

    token_ids: Sha256
    """Hash of the token ids of all prompts."""
    num_tokens: Count
    chat_template: Sha256 | None
    """Null if prompts are not chat messages."""


class CertifiedModel(_Part):
    """The files of the model, and the prompts that it reads."""

    files: dict[str, HashedFile]
    adapter: dict[str, HashedFile]
    prompts: CertifiedPrompts


class RunPart(_Part):
    """The parts of a certificate that need no model."""

    run: CertifiedRun
    task: CertifiedTask
    data: CertifiedData
    samples: CertifiedSamples
    report: dict[str, Any]
    """The report as in results.json."""
    audit: list[CertifiedFinding]
    audit_version: str | None = None
    """The version of treegen that made the audit; None in certificates of earlier versions."""


class Certificate(RunPart):
    """The certificate of a run: how its scores were computed."""

    format: Literal["treegen-certificate"] = "treegen-certificate"
    schema_version: Literal[1] = 1
    model: CertifiedModel

    def content(self) -> bytes:
        """Return the file of the certificate."""
        absent = {"audit_version"} if self.audit_version is None else None
        return canonical(self.model_dump(mode="json", exclude=absent), indent=2) + b"\n"

    @property
    def sha256(self) -> str:
        """The hash of the file."""
        return hashlib.sha256(self.content()).hexdigest()


def canonical(value: object, indent: int | None = None) -> bytes:
    """Return a JSON value in canonical form.

    Args:
        value: The value.
        indent: Spaces of indentation; None for one line.

    Raises:
        ValueError: JSON cannot represent the value.
    """
    separators = (",", ":") if indent is None else None
    text = json.dumps(value, indent=indent, separators=separators, sort_keys=True, allow_nan=False)
    return text.encode("ascii")


def hash_value(value: object) -> str:
    """Return the SHA-256 of a JSON value in canonical form."""
    return hashlib.sha256(canonical(value)).hexdigest()


def read_certificate(path: Path) -> tuple[Certificate, bytes]:
    """Return the certificate in a file, and the bytes of the file.

    Raises:
        InputError: the file cannot be read, is larger than 64 MiB, or is not a certificate in
            canonical form.
    """
    content = read_limited(path, _MAX_BYTES)
    try:
        document = parse_json(content.decode("ascii"))
        certificate = Certificate.model_validate(document)
        is_canonical = certificate.content() == content
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        loc = ".".join(map(str, first["loc"])) or "it"
        raise InputError(
            f"{path} is not a certificate that this version of treegen can read: {loc!r:.80}: "
            f"{first['msg']}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path} is not a certificate: {error!s:.200}; pass a file that `treegen certify` wrote"
        ) from None
    if not is_canonical:
        raise InputError(
            f"the certificate {path} is not in canonical form, so the file was changed after "
            "`treegen certify` wrote it; ask for the original file"
        )
    return certificate, content


def load_own_certificate(path: Path) -> Certificate | None:
    """Return the certificate in a run's directory; None without one of its present samples.

    Args:
        path: The directory of the run.

    Raises:
        RunError: there is no run, or it is corrupt.
    """
    if not os.path.isfile(path / FILE):
        return None
    with suppress(InputError), RunDir.open(path) as run:
        certificate, _ = read_certificate(path / FILE)
        is_own = certificate.run.run_json == hash_value(to_json(run.info))
        if is_own and certificate.samples.samples_jsonl == run.digest():
            return certificate
    return None


def find_other_conditions(a: Certificate, b: Certificate) -> list[str]:
    """Return the differences of two certified runs apart from the model, such as "seed 0 / 1".

    Args:
        a: The certificate of the first run.
        b: The certificate of the second run.
    """
    parts = []
    for certificate in (a, b):
        part = certificate.model_dump(mode="json", include={"run", "task", "data"})
        for name in ("created", "fingerprint", "run_json", "model", "resumes"):
            del part["run"][name]
        part["run"]["versions"].pop("platform", None)
        if isinstance(model := part["run"]["settings"].get("model"), dict):
            model.pop("fingerprint", None)
        parts.append(part)
    return [
        f"{name.partition('.')[2]} {_shorten(x)} / {_shorten(y)}"
        for name, x, y in find_differences(parts[0], parts[1])
    ]


def _shorten(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."


def find_differences(a: object, b: object, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted name and both values of each leaf in which two JSON values differ.

    Of two lists of objects with different lengths, the values are the objects that the other lacks.

    Args:
        a: The first value.
        b: The second value.
        name: The name of both.
    """
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in sorted({*a, *b}):
            inner = f"{name}.{key}" if name else str(key)
            if key in a and key in b:
                yield from find_differences(a[key], b[key], inner)
            else:
                yield inner, a.get(key), b.get(key)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, pair in enumerate(zip(a, b, strict=True)):
            yield from find_differences(*pair, f"{name}[{index}]")
    elif _is_table(a) and _is_table(b):
        yield name, [row for row in a if row not in b], [row for row in b if row not in a]
    elif not _is_equal(a, b):
        yield name, a, b


def _is_table(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and all(isinstance(row, Mapping) for row in value)


def _is_equal(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=_CLOSE, abs_tol=_CLOSE)
    return type(a) is type(b) and a == b
