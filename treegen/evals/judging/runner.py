"""Running a judge on the missing judgements of a judge run; each is stored as it arrives."""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from treegen.errors import NumericsError, RunError
from treegen.evals.judging.judgement_files import TOO_LONG, JudgementFile
from treegen.evals.judging.prompts import (
    AnswerSet,
    JudgedCase,
    build_content,
    cases_of,
    prompt_of,
    special_in_template,
)
from treegen.evals.judging.repeats import RepeatScheduler
from treegen.evals.judging.rubric import VERDICT_PREFIX
from treegen.evals.judging.settings import JudgeRun
from treegen.evals.multiple_choice import num_distinct
from treegen.evals.thinking import thinking_to_json
from treegen.prompts.tree import Node

if TYPE_CHECKING:
    from treegen.common.outputs import Completion, Usage
    from treegen.llm.base import BaseLLM

Stop = Callable[[], object]
_REPLY_PREFIX: Final = f"\n\n{VERDICT_PREFIX}"
# Tokens that a chat template is assumed to add at most, so that length checks skip most prompts.
_MAX_TEMPLATE_TOKENS: Final = 512


@dataclass(slots=True)
class JudgeUsage:
    """Tokens that a judge has computed."""

    prompt_tokens_computed: int = 0
    prompt_tokens_unshared: int = 0
    decoded_tokens: int = 0
    distinct: int = 0
    """Tokens of its prompts, with tokens of shared prefixes counted once."""

    def update(self, usage: "Usage", distinct: int) -> None:
        """Copy the numbers of a stream so far.

        Args:
            usage: Usage of the stream.
            distinct: Tokens of the prompts, with tokens of shared prefixes counted once.
        """
        self.prompt_tokens_computed = usage.prompt_tokens_computed + usage.recomputed_tokens
        self.prompt_tokens_unshared = usage.prompt_tokens_unshared
        self.decoded_tokens, self.distinct = usage.decoded_tokens, distinct


def run_judge(
    judging: JudgeRun,
    answers: AnswerSet,
    lines: JudgementFile,
    llm: "BaseLLM",
    usage: JudgeUsage,
    stop: Stop = lambda: None,
) -> Iterator[tuple[int, int]]:
    """Run the judge on all missing judgements, and store them.

    Args:
        judging: The judge run.
        answers: The answers to judge.
        lines: The open file of judgements.
        llm: The judge.
        usage: Receives the numbers of computed tokens.
        stop: Called before every step; if it returns a true value, the iteration ends, after this
            step at the latest.

    Yields:
        (stored judgements, planned judgements) after every step.

    Raises:
        RunError: answers have changed since they were judged, or the file cannot be written.
        CapacityError: a prompt takes more memory than the judge's cache has.
        NumericsError: the judge's logits are not finite.
    """
    judge_prompts = _JudgePrompts(judging, answers, lines, llm)
    scheduler = RepeatScheduler(judging.settings, judge_prompts.cases, lines)
    if judging.settings.verdicts == "likelihood":
        steps = _by_likelihood(judge_prompts, scheduler, usage, stop)
    else:
        steps = _by_samples(judge_prompts, scheduler, usage, stop)
    yield scheduler.done, scheduler.planned
    if scheduler.num_missing:
        for _ in steps:
            yield scheduler.done, scheduler.planned
        lines.sync()


class _JudgePrompts:
    """The prompts of a judge run in the format of its judge, and their stored judgements."""

    def __init__(
        self, judging: JudgeRun, answers: AnswerSet, lines: JudgementFile, llm: "BaseLLM"
    ) -> None:
        self.judging, self.lines, self.llm = judging, lines, llm
        self._answers = answers
        tokenizer = llm.tokenizer
        self._special = special_texts(tokenizer)
        template = bool(getattr(tokenizer, "chat_template", None))
        self.chat = template if judging.settings.chat is None else judging.settings.chat
        self.cases = cases_of(answers, judging)
        self._hashes: dict[str, str] = {}
        self._sizes: dict[str, int] = {}

    def node(self, case: JudgedCase, samples: int, *, reply_prefix: str) -> Node:
        """Return the prompt of a case as a node.

        Args:
            case: The answers, wording and criterion of the prompt.
            samples: Number of samples of the node.
            reply_prefix: Text with which the judge's reply begins; may be empty.
        """
        turns = prompt_of(case, self._answers, self.judging, self._special)
        text = "\0".join(turns).encode(errors="replace")
        self._hashes[case.id] = hashlib.blake2b(text, digest_size=16).hexdigest()
        self._sizes[case.id] = len(text)  # no text has more tokens than bytes
        content: Any = build_content(turns, chat=self.chat, reply_prefix=reply_prefix)
        if self.chat and reply_prefix:
            content = [*content, {"role": "assistant", "content": reply_prefix.lstrip()}]
        return Node(content, id=case.id, samples=samples)

    def check(self, case: JudgedCase, repeats: Iterable[int]) -> None:
        """Raise RunError if stored judgements of a case belong to another prompt text."""
        for repeat in repeats:
            stored = self.lines.done.get((case.problem_id, case.slot(repeat)))
            if stored is not None and stored != self._hashes[case.id]:
                raise RunError(
                    f"answers to problem {case.problem_id!r} have changed since they were "
                    f"judged; remove the folder {self.judging.name} in `judged` to judge the "
                    "new answers"
                )

    def due(
        self, scheduler: RepeatScheduler, *, reply_prefix: str, reserved: int
    ) -> list[tuple[JudgedCase, Node]]:
        """Return the prompts that still need judgements.

        For prompts that are too long for the judge, this stores judgements that say so.

        Args:
            scheduler: The scheduler of repeats; it receives the judgements of long prompts.
            reply_prefix: Text with which the judge's reply begins; may be empty.
            reserved: Tokens that must fit into the judge's context after a prompt.

        Returns:
            The cases and their prompts.
        """
        samples = self.judging.settings.repeats
        nodes = [(case, self.node(case, samples, reply_prefix=reply_prefix)) for case in self.cases]
        for case in self.cases:
            self.check(case, range(samples))
        max_prompt_tokens = self.llm.model_info.spec.context_length - reserved
        long = [
            (case, node)
            for case, node in nodes
            if not scheduler.is_decided(case)
            and self._sizes[case.id] + _MAX_TEMPLATE_TOKENS > max_prompt_tokens
        ]
        lengths = self._lengths([node for _, node in long])
        for (case, _), length in zip(long, lengths, strict=True):
            for repeat in range(samples if length > max_prompt_tokens else 0):
                if not scheduler.is_decided(case) and not self.has(case, repeat):
                    self.add(case, repeat, {"text": "", TOO_LONG: True, "prompt_tokens": length})
                    scheduler.add(case, repeat, None)
        return [(case, node) for case, node in nodes if not scheduler.is_decided(case)]

    def _lengths(self, nodes: Sequence[Node]) -> list[int]:
        from treegen.prompts.tokens import tokenize

        if not nodes:
            return []
        prompts = tokenize(Node("", children=nodes, samples=0), self.llm.tokenizer, self.llm.images)
        return [len(prompt.tokens) for prompt in prompts]

    def has(self, case: JudgedCase, repeat: int) -> bool:
        """Return whether a judgement is stored."""
        return (case.problem_id, case.slot(repeat)) in self.lines.done

    def add(self, case: JudgedCase, repeat: int, fields: dict[str, Any]) -> None:
        """Store a judgement.

        Args:
            case: The prompt.
            repeat: Number of the repeat.
            fields: Fields of the judgement, without the hash of the prompt and the time.
        """
        prompt = {"prompt_hash": self._hashes[case.id]}
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.lines.add(case.problem_id, case.slot(repeat), {**fields, **prompt, "time": now})


def special_texts(tokenizer: Any) -> list[str]:
    """Return the special tokens of a tokenizer and the turn markers of its chat template."""
    added = getattr(tokenizer, "added_tokens_decoder", {}) or {}
    texts = {str(token) for token in added.values() if getattr(token, "special", False)}
    texts |= special_in_template(str(getattr(tokenizer, "chat_template", None) or ""))
    return sorted(texts | set(map(str, getattr(tokenizer, "all_special_tokens", ()))))


def _by_samples(
    judge_prompts: _JudgePrompts, scheduler: RepeatScheduler, usage: JudgeUsage, stop: Stop
) -> Iterator[None]:
    settings = judge_prompts.judging.settings
    by_id = {case.id: case for case in judge_prompts.cases}
    reply_prefix = "" if judge_prompts.chat or settings.rubric.defines_verdict_format else "\n\n"
    nodes = [
        node for _, node in judge_prompts.due(scheduler, reply_prefix=reply_prefix, reserved=1)
    ]
    if not nodes:
        return
    params = settings.params(chat=judge_prompts.chat)
    with judge_prompts.llm.open_stream(Node("", children=nodes, samples=0), params) as stream:
        index_of = {request.id: i for i, request in enumerate(stream.plan.requests)}
        distinct = sum(len(segment.tokens) for segment in stream.plan.segments)
        sizes = {request.id: len(request.tokens) for request in stream.plan.requests}

        def submit_due() -> None:
            due = [(index_of[case.id], repeats) for case, repeats in scheduler.take_due()]
            if due:
                stream.add_work(due)

        def store(completions: "Sequence[Completion]") -> None:
            for completion in completions:
                case = by_id[completion.prompt_id]
                judge_prompts.add(
                    case, completion.sample_index, _build_record(completion, sizes[case.id])
                )
                scheduler.add(
                    case, completion.sample_index, settings.rubric.read(completion.answer)
                )

        submit_due()
        stopped = False
        try:
            while stream.has_work and not stopped:
                stopped = bool(stop())
                store(stream.take_finished() if stopped else stream.step())
                if not stopped:
                    submit_due()
                usage.update(stream.usage, distinct)
                yield
        except BaseException:
            # Errors while saving are suppressed, so that the user sees the first error.
            with suppress(Exception):
                store(stream.take_finished())
            raise


def _build_record(completion: "Completion", prompt_tokens: int) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "text": completion.text,
        "seed": completion.seed,
        "num_tokens": completion.num_tokens,
        "logprob": completion.logprob,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": prompt_tokens,
    }
    if completion.thinking is not None:
        fields["thinking"] = thinking_to_json(completion.thinking)
    return fields


def _by_likelihood(
    judge_prompts: _JudgePrompts, scheduler: RepeatScheduler, usage: JudgeUsage, stop: Stop
) -> Iterator[None]:
    from treegen.prompts.tokens import TAIL, append_text, tokenize

    tokenizer, choices = (
        judge_prompts.llm.tokenizer,
        list(judge_prompts.judging.settings.rubric.choices),
    )
    reserved = 1 + max(len(tokenizer.encode(f" {c}", add_special_tokens=False)) for c in choices)
    if not (pending := judge_prompts.due(scheduler, reply_prefix=_REPLY_PREFIX, reserved=reserved)):
        return
    tree = Node("", children=[node for _, node in pending], samples=0)
    prompts = tokenize(tree, tokenizer, judge_prompts.llm.images)
    ends: dict[bytes, list[list[int]]] = {}
    pairs: list[tuple[list[int], list[int]]] = []
    for prompt in prompts:
        tail = prompt.tokens[-TAIL:]
        if tail.tobytes() not in ends:
            added = [append_text(tokenizer, tail, f" {choice}").tolist() for choice in choices]
            ends[tail.tobytes()] = added
        context = prompt.tokens.tolist()
        pairs += [(context, end) for end in ends[tail.tobytes()]]
    scores_of_case: dict[int, dict[int, float]] = {}
    distinct = num_distinct([np.array([*a, *b][:-1], dtype=np.int32) for a, b in pairs])
    with judge_prompts.llm.score_stream(pairs) as stream:
        stopped = False
        while stream.has_work and not stopped:
            stopped = bool(stop())
            for index, score in stream.step():
                number, choice = divmod(index, len(choices))
                logprob_of_choice = scores_of_case.setdefault(number, {})
                logprob_of_choice[choice] = score.logprob
                if len(logprob_of_choice) < len(choices):
                    continue
                case, prompt = pending[number][0], prompts[number]
                choice_tokens = ends[prompt.tokens[-TAIL:].tobytes()]
                logprobs = exclusive_logprob(
                    [logprob_of_choice[i] for i in range(len(choices))], choice_tokens
                )
                fields = {"choice_logprobs": logprobs, "prompt_tokens": len(prompt.tokens)}
                judge_prompts.add(case, 0, fields)
                scheduler.add(case, 0, None)
            usage.update(stream.usage, distinct)
            yield


def exclusive_logprob(logprobs: Sequence[float], tokens: Sequence[Sequence[int]]) -> list[float]:
    """Return the log-probability that each choice is generated and not continued as a longer one.

    If the tokens of "1" are a prefix of those of "10", the probability of "1" includes that of
    "10", which is subtracted.

    Args:
        logprobs: Log-probability of the tokens of each choice.
        tokens: Token ids of each choice.

    Raises:
        NumericsError: a log-probability is not finite.
    """
    if not all(map(math.isfinite, logprobs)):
        raise NumericsError(
            f"the judge's log-probabilities of the choices are not finite: {list(logprobs)}; check "
            "the weights, or use dtype float32"
        )
    keys = [tuple(choice_tokens) for choice_tokens in tokens]
    exclusive = []
    for own, logprob in zip(keys, logprobs, strict=True):
        longer = [i for i, other in enumerate(keys) if _continues(other, own)]
        # Only the shortest continuations are subtracted; their probability includes longer ones.
        first = [i for i in longer if not any(_continues(keys[i], keys[j]) for j in longer)]
        longer_share = math.fsum(math.exp(logprobs[i] - logprob) for i in first)
        exclusive.append(logprob + math.log(max(1 - longer_share, 1e-12)))
    return exclusive


def _continues(longer: tuple[int, ...], shorter: tuple[int, ...]) -> bool:
    """Return whether tokens begin with others and go on."""
    return len(longer) > len(shorter) and longer[: len(shorter)] == shorter
