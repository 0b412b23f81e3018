"""The samples and log-likelihoods of a call: read from the journal, or computed and stored.

A journal is a directory from which a run of lm-eval is resumed:

    DIR/<model>/model.json      what the responses depend on, apart from their requests
    DIR/<model>/samples.jsonl   generated samples, appended as they finish
    DIR/<model>/scores.jsonl    log-likelihoods, likewise
    DIR/<model>/run.lock        held by the one process that appends

The key of a response is a hash of its request's tokens and settings, so one directory serves any
tasks, limits and models.
"""

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Self

import numpy as np

from treegen.common.params import SamplingParams
from treegen.integrations.lm_eval.tokenizer import Pair
from treegen.llm.base import BaseLLM
from treegen.prompts.tree import Node
from treegen.runs import Key, RecordFile, open_for_append
from treegen.runs.files import Lock, NewDirectory, write_json

Kind = Literal["samples", "scores"]
_LOCK: Final = "run.lock"

_log = logging.getLogger(__name__)


class Journal:
    """The responses of one model in a directory."""

    def __init__(self, directory: Path, identity: Mapping[str, Any]) -> None:
        """Create the model's folder in an existing directory.

        Args:
            directory: The directory.
            identity: Everything that a response depends on, apart from its request.

        Raises:
            RunError: The folder cannot be created, or is in use.
        """
        text = json.dumps(identity, sort_keys=True)
        self._folder = directory / hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        NewDirectory.create(self._folder)
        with Lock(self._folder / _LOCK):
            if not (self._folder / "model.json").exists():
                write_json(self._folder / "model.json", identity)

    @contextmanager
    def open(self, kind: Kind) -> Iterator[RecordFile]:
        """Open and lock the file of the responses of one kind, to read it and to append to it.

        Raises:
            RunError: Another process holds it, or it is corrupt or cannot be written.
        """
        with open_for_append(self._folder / f"{kind}.jsonl", _LOCK) as file:
            for notice in file.notices:
                _log.warning("%s: %s", self._folder, notice)
            yield file


def read_stored(file: RecordFile, requested: Collection[Key]) -> dict[Key, dict[str, Any]]:
    """Return the records of a file that have one of the requested keys."""
    keys = set(requested) & file.keys
    if not keys:
        return {}
    records = (((r["problem_id"], r["sample_index"]), r) for r in file.records())
    return {key: record for key, record in records if key in keys}


@dataclass(frozen=True, slots=True)
class SampledPrompt:
    """A prompt and its sampling parameters. Instances with equal names are equal."""

    name: str
    """A hash of tokens and params; the samples are drawn and stored under it."""
    tokens: list[int] = field(compare=False)
    """The token ids of the prompt."""
    params: SamplingParams = field(compare=False)
    """The sampling parameters."""

    @classmethod
    def of(cls, tokens: list[int], params: SamplingParams) -> Self:
        """Return the prompt of these tokens, with its name."""
        return cls(_name(tokens, (params.sampling_key, params.max_tokens)), tokens, params)


class ResponseCache:
    """A model's responses, each computed only once if there is a journal."""

    def __init__(self, llm: BaseLLM, journal: Journal | None) -> None:
        """Create a cache.

        Args:
            llm: The model.
            journal: Stores the responses; None stores nothing.
        """
        self._llm, self._journal = llm, journal

    def scores(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, tuple[float, bool]]]:
        """Yield (index of the pair, (log-likelihood, whether it is greedy)) as results arrive.

        Args:
            pairs: Contexts and continuations.

        Raises:
            TreegenError: As for `LLM.score`; RunError if the journal cannot be used.
        """
        indices_of: dict[Key, list[int]] = defaultdict(list)
        for pair_index, (context, continuation) in enumerate(pairs):
            indices_of[_name([*context, *continuation], len(continuation)), 0].append(pair_index)
        with self._open_journal("scores") as file:
            stored = read_stored(file, indices_of) if file else {}
            for key, record in stored.items():
                answer = record["logprob"], record["is_greedy"]
                yield from ((pair_index, answer) for pair_index in indices_of[key])
            missing = [key for key in indices_of if key not in stored]
            if not missing:
                return
            with self._llm.score_stream([pairs[indices_of[key][0]] for key in missing]) as stream:
                for index, score in stream:
                    key, answer = missing[index], (score.logprob, score.is_greedy)
                    if file:
                        named = {"problem_id": key[0], "sample_index": key[1]}
                        file.append({**named, "logprob": answer[0], "is_greedy": answer[1]})
                    yield from ((pair_index, answer) for pair_index in indices_of[key])

    def samples(
        self, prompts: Mapping[SampledPrompt, int]
    ) -> Iterator[tuple[SampledPrompt, int, list[int]]]:
        """Yield (prompt, sample index, tokens) as samples end.

        A token that ended a sample is left out; the tokens of a stop string are not.

        Args:
            prompts: Prompt -> number of samples.

        Raises:
            TreegenError: As for `LLM.stream`; RunError if the journal cannot be used.
        """
        prompts_by_name = {prompt.name: prompt for prompt in prompts}
        keys = [(prompt.name, index) for prompt, num in prompts.items() for index in range(num)]
        with self._open_journal("samples") as file:
            stored = read_stored(file, keys) if file else {}
            for (name, index), record in stored.items():
                yield prompts_by_name[name], index, record["tokens"]
            missing = {
                name: prompts_by_name[name] for name, index in keys if (name, index) not in stored
            }
            if not missing:
                return
            leaves = [Node(p.tokens, samples=prompts[p], id=p.name) for p in missing.values()]
            skip = [key for key in stored if key[0] in missing]
            params = [prompt.params for prompt in missing.values()]
            with self._llm.stream(Node("", children=leaves), params, skip=skip) as stream:
                for done in stream:
                    ended_by_token = isinstance(done.stop, int)
                    tokens = list(done.tokens[:-1] if ended_by_token else done.tokens)
                    if file:
                        named = {"problem_id": done.prompt_id, "sample_index": done.sample_index}
                        about = {"logprob": done.logprob, "finish_reason": done.finish_reason}
                        file.append({**named, "text": done.text, "tokens": tokens, **about})
                    yield missing[done.prompt_id], done.sample_index, tokens

    def _open_journal(self, kind: Kind) -> AbstractContextManager[RecordFile | None]:
        return nullcontext() if self._journal is None else self._journal.open(kind)


def _name(tokens: Sequence[int], settings: object) -> str:
    data = np.asarray(tokens, dtype="<i4").tobytes()
    return hashlib.blake2b(repr(settings).encode() + b"\0" + data, digest_size=16).hexdigest()
