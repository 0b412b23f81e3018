"""Sampling parameters of one request, checked when they are made. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, Literal, get_args

from treegen.common.checks import as_tuple, check_bool, check_int, check_number
from treegen.common.foreign_names import NEUTRAL_SAMPLING, drop_neutral
from treegen.common.spelling import check_field_names, with_suggestions
from treegen.common.structured_outputs import STRUCTURES, check_structure, read_structured_outputs
from treegen.errors import InputError, arg

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
MAX_SEED = 2**63 - 1
MIN_TEMPERATURE = 1e-4
MAX_TEMPERATURE = 1e4
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_REPETITION = 1e4
# Parameters that make a draw depend on earlier tokens, with the values that have no effect.
PENALTIES: Mapping[str, Any] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "bad_words": (),
}
# Parameters that a request of another tool, such as a body of the server, sets by the same names.
REQUEST_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "logit_bias",
    "seed",
    *PENALTIES,
)
MAX_COUNT = 2**31 - 1  # larger numbers of tokens have no use, and overflow


@with_suggestions
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters, named as in vLLM.

    The order of operations is logit_bias and min_tokens, repetition_penalty, frequency_penalty,
    presence_penalty, no_repeat_ngram_size and bad_words, temperature, min_p, top_k, top_p (each
    filter applies to what the previous one left, renormalized), then one draw.

    Raises:
        InputError: A value is out of range or not supported.
    """

    temperature: float = 1.0
    """0 is greedy decoding; then all samples of a prompt are one decode."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities sum to at least this, in (0, 1]."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the most likely, in [0, 1]."""
    max_tokens: int = 256
    """Maximum number of generated tokens, including the stop token. A sample also ends where the
    model's context is full, with the finish reason "length". None sets no other limit."""
    min_tokens: int = 0
    """Number of generated tokens before which no stop token is drawn and no stop string ends the
    sample."""
    stop: str | Sequence[str] | None = ()
    """Strings that end a sample. They may span tokens, and are cut from the sample's text. A string
    that is a special token of the tokenizer stops at that token."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end a sample, in addition to the model's end-of-sequence ids."""
    ignore_eos: bool = False
    """Whether to continue after the model's end-of-sequence ids."""
    seed: int | None = None
    """Decides every draw, together with the prompt's name and the sample's index. None is 0, with
    one difference: a prompt without a name then gets further samples in each further call; see
    `LLM.generate`."""
    logprobs: int = 0
    """Number of most likely alternatives to report per token."""
    prompt_logprobs: int | None = None
    """Report the log-probabilities of the prompt's tokens too, with this many most likely
    alternatives; None does not. Searches do not report them."""
    confidence: int = 0
    """Report the confidence at each token: minus the mean log-probability of this many most likely
    tokens, as in DeepConf, which uses 20. 0 reports none."""
    min_confidence: float | None = None
    """End a sample once the mean confidence of its last `confidence_window` tokens is lower than
    this; its finish reason is "confidence". None ends no sample."""
    confidence_window: int = 2048
    """Number of tokens of the mean for `min_confidence`. A sample with fewer tokens continues."""
    self_certainty: bool = False
    """Report at each token how far the model's distribution is from the uniform one: their
    Kullback-Leibler divergence, in nats."""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    """"raw_logprobs" reports log-probabilities of the model's own distribution,
    "processed_logprobs" those of the sampled one, after temperature, biases and filters."""
    n: int = 1
    """Samples per prompt, for flat prompts (`LLM.generate`); trees give it per node."""
    include_stop: bool = False
    """Keep the stop string, or the text of the stop token, in the text. vLLM's name
    include_stop_str_in_output is accepted too."""
    logit_bias: Mapping[int, float] | None = None
    """Token id -> number added to its logit, from -100 (practically never drawn) to 100."""
    allowed_token_ids: Sequence[int] | None = None
    """The only token ids that a sample may contain. None allows all. A sample can end before
    max_tokens only if an end-of-sequence id or a stop is among them."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the sample contains, from -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that the sample contains it, from -2 to 2.
    In a search both penalties count the tokens generated on the path to a node as the sample's."""
    repetition_penalty: float = 1.0
    """Divides the logit of each token of the prompt or the sample if the logit is positive, and
    multiplies it if negative, as in transformers. From 0.0001 to 10000; 1 changes nothing."""
    no_repeat_ngram_size: int = 0
    """Never draw a token that completes a sequence of this many tokens which the prompt or the
    sample already contains, as in transformers; 0 allows all."""
    bad_words: Sequence[str] | None = ()
    """Strings that a sample may not contain, as tokenized at the start of a text and after a space;
    strings of whitespace alone, such as a newline, only as tokenized without a space. Where
    bad_words and no_repeat_ngram_size exclude every token, they exclude none."""
    json_schema: Any = None
    """A sample must be JSON of this schema: a mapping, JSON as text, or a pydantic model."""
    regex: str | None = None
    """A sample must match this regular expression, from its first character to its last."""
    grammar: str | None = None
    """A sample must be a text of this grammar, in Lark's or GBNF's form."""
    choice: Sequence[str] | None = None
    """A sample must be one of these texts. At most one of json_schema, regex, grammar and choice
    may be given. Each draw is from the tokens that may come next, renormalized; where only one text
    can come next, its tokens are those of the tokenizer. A sample ends where it may end and draws
    the end, and always at max_tokens. If a sample reasons first, the grammar starts after its
    reasoning. Needs the extra "structured"."""
    max_thinking_tokens: int | None = None
    """Maximum number of reasoning tokens, not counting the opening tag; 0 turns reasoning off. A
    sample that still reasons then gets the tokens of `thinking_end`, and continues with its answer.
    These tokens count as generated tokens, with the model's log-probabilities."""
    reasoning_tags: str | Sequence[str] | None = None
    """The tags before and after the reasoning, such as ("<think>", "</think>"), by which
    `Completion.thinking` separates reasoning and answer; "auto" takes the known tags of the
    tokenizer or the chat template. With max_thinking_tokens, None is "auto"."""
    thinking_end: str | None = None
    """The text that ends the reasoning when its budget is used up; by default a newline, the
    closing tag and two newlines."""
    include_stop_str_in_output: InitVar[bool | None] = None
    structured_outputs: InitVar[Mapping[str, Any] | None] = None
    """The structure in vLLM's form: a mapping with one of json, regex, grammar, choice or
    json_object."""

    def __post_init__(
        self, include_stop_str_in_output: bool | None, structured_outputs: Mapping[str, Any] | None
    ) -> None:
        if include_stop_str_in_output is not None:
            object.__setattr__(self, "include_stop", include_stop_str_in_output)
        if structured_outputs is not None:
            for name, value in read_structured_outputs(structured_outputs).items():
                if getattr(self, name) is not None:
                    raise InputError(f"{name} is also set in structured_outputs; pass {name} once")
                object.__setattr__(self, name, value)
        if self.top_k == -1:  # vLLM's way to keep all
            object.__setattr__(self, "top_k", 0)
        if self.max_tokens is None:  # vLLM's way to end only where the context is full
            object.__setattr__(self, "max_tokens", MAX_COUNT)
        if self.logprobs is None:  # vLLM's way to report none
            object.__setattr__(self, "logprobs", 0)
        self._check_numbers()
        self._check_stops()
        self._check_bias()
        self._check_penalties()
        self._check_structure()
        self._check_thinking()

    def _check_numbers(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            check_number(name, getattr(self, name))
        check_int("top_k", self.top_k)
        for name, minimum in (("max_tokens", 1), ("logprobs", 0), ("n", 1)):
            check_int(name, getattr(self, name), minimum=minimum)
        check_int("min_tokens", self.min_tokens, maximum=MAX_COUNT)
        check_int("confidence", self.confidence, minimum=0, maximum=MAX_COUNT)
        check_int("confidence_window", self.confidence_window, minimum=1, maximum=MAX_COUNT)
        if self.min_confidence is not None:
            check_number("min_confidence", self.min_confidence)
            if not self.confidence:
                raise InputError(
                    f"{arg('min_confidence')} requires confidence, the number of most likely "
                    "tokens to average; set confidence=20, for example"
                )
        self._check_temperature()
        if not 0 < self.top_p <= 1:
            raise InputError(f"{arg('top_p')} must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise InputError(
                f"{arg('top_k')} must be at least 0 (0 or -1 keeps all tokens), got {self.top_k}"
            )
        if not 0 <= self.min_p <= 1:
            raise InputError(f"{arg('min_p')} must be in [0, 1], got {self.min_p}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InputError(
                f"{arg('min_tokens')} must be from 0 to {arg('max_tokens')} ({self.max_tokens}), "
                f"got {self.min_tokens}"
            )
        if self.seed is not None:
            check_int("seed", self.seed)
            if not 0 <= self.seed <= MAX_SEED:
                raise InputError(f"{arg('seed')} must be in [0, 2**63), got {self.seed}")
        for name in ("prompt_logprobs", "max_thinking_tokens"):
            if (value := getattr(self, name)) is not None:
                check_int(name, value, minimum=0, maximum=MAX_COUNT)
        if self.logprobs_mode not in get_args(LogprobsMode):
            modes = " or ".join(get_args(LogprobsMode))
            raise InputError(f"{arg('logprobs_mode')} must be {modes}, got {self.logprobs_mode!r}")

    def _check_temperature(self) -> None:
        if self.temperature < 0:
            raise InputError(f"{arg('temperature')} must be at least 0, got {self.temperature}")
        if self.temperature > MAX_TEMPERATURE:
            raise InputError(
                f"{arg('temperature')} must be at most {MAX_TEMPERATURE:g}, got {self.temperature}"
            )
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise InputError(
                f"temperature {self.temperature} is too small to divide the logits by; use 0 "
                f"for greedy decoding, or a temperature of at least {MIN_TEMPERATURE}"
            )

    def _check_stops(self) -> None:
        for name in ("ignore_eos", "include_stop", "self_certainty"):
            check_bool(name, getattr(self, name))
        if not isinstance(self.stop, str):
            object.__setattr__(self, "stop", as_tuple("stop", self.stop))  # also of an iterator
        if any(not isinstance(text, str) or not text for text in self.stops):
            raise InputError(f"stop strings must be non-empty text, got {self.stop!r}")
        object.__setattr__(self, "stop_token_ids", as_tuple("stop_token_ids", self.stop_token_ids))
        for token in self.stop_token_ids:
            check_int("stop_token_ids", token)
            if token < 0:
                raise InputError(f"{arg('stop_token_ids')} must not be negative, got {token}")

    def _check_bias(self) -> None:
        if self.allowed_token_ids is not None:
            allowed = as_tuple("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise InputError(
                    f"{arg('allowed_token_ids')} is empty; pass token ids, or None to allow all"
                )
            for token in allowed:
                check_int("allowed_token_ids", token, minimum=0, maximum=MAX_COUNT)
            object.__setattr__(self, "allowed_token_ids", tuple(sorted({int(t) for t in allowed})))
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise InputError(
                f"{arg('logit_bias')} must map token ids to numbers, got {self.logit_bias!r}"
            )
        for token, bias in self.logit_bias.items():
            check_int("a token of logit_bias", token)
            check_number(f"logit_bias of token {token}", bias)
            if token < 0 or abs(bias) > MAX_LOGIT_BIAS:
                raise InputError(
                    f"{arg('logit_bias')} has the value {bias} for token {token}; ids must be at "
                    f"least 0, and values from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
                )

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            check_number(name, value)
            if abs(value) > MAX_PENALTY:
                raise InputError(
                    f"{arg(name)} must be from {-MAX_PENALTY:g} to {MAX_PENALTY:g}, got {value}"
                )
        if not 1 / MAX_REPETITION <= self.repetition_penalty <= MAX_REPETITION:
            raise InputError(
                f"{arg('repetition_penalty')} must be above 0 (from {1 / MAX_REPETITION:g} to "
                f"{MAX_REPETITION:g}), got {self.repetition_penalty}"
            )
        check_int("no_repeat_ngram_size", self.no_repeat_ngram_size, minimum=0, maximum=MAX_COUNT)
        if isinstance(self.bad_words, str):
            raise InputError(f"{arg('bad_words')} must be a list of words, got {self.bad_words!r}")
        object.__setattr__(self, "bad_words", as_tuple("bad_words", self.bad_words))
        for word in self.banned_words:
            if not isinstance(word, str) or not word:
                raise InputError(f"{arg('bad_words')} must contain non-empty text, got {word!r}")

    def _check_structure(self) -> None:
        names = [name for name in STRUCTURES if getattr(self, name) is not None]
        if len(names) > 1:
            raise InputError(f"{' and '.join(names)} cannot be used together; pass one")
        for name in names:
            object.__setattr__(self, name, check_structure(name, getattr(self, name)))
        if names and self.allowed_token_ids is not None:
            raise InputError(
                f"{arg(names[0])} and {arg('allowed_token_ids')} cannot be used together; pass one"
            )
        if names and (self.ignore_eos or self.min_tokens):
            raise InputError(
                f"{arg(names[0])} determines where a sample ends; remove {arg('ignore_eos')} and "
                "min_tokens"
            )

    def _check_thinking(self) -> None:
        tags, end = self.reasoning_tags, self.thinking_end
        if tags is not None and tags != "auto":
            tags = () if isinstance(tags, str) else as_tuple("reasoning_tags", tags)
            if len(tags) != 2 or not all(isinstance(tag, str) and tag.strip() for tag in tags):
                raise InputError(
                    f'{arg("reasoning_tags")} must be "auto", or the tags before and after the '
                    f'reasoning, such as ("<think>", "</think>"); got {self.reasoning_tags!r}'
                )
            if tags[1] in tags[0]:
                raise InputError(
                    f"{arg('reasoning_tags')}: the opening tag {tags[0]!r} contains the closing "
                    f"tag {tags[1]!r}, so reasoning would end where it begins; pass an opening "
                    "tag that does not contain the closing tag"
                )
            object.__setattr__(self, "reasoning_tags", tags)
        if end is not None and (not isinstance(end, str) or not end):
            raise InputError(f"{arg('thinking_end')} must be text that is not empty, got {end!r}")

    @classmethod
    def from_generation_config(cls, llm: Any, **others: Any) -> SamplingParams:
        """Return the sampling parameters that the checkpoint's generation_config.json recommends.

        Args:
            llm: An LLM, AsyncLLM or Cluster.
            **others: Further parameters, such as max_tokens or n; they replace recommended ones.

        Raises:
            InputError: The checkpoint recommends nothing, or a value cannot be used.
        """
        spec = getattr(llm, "spec", None) or llm.llm.spec
        if not spec.recommended:
            raise InputError(
                f"{spec.name} has no generation_config.json with recommended sampling "
                "parameters; give the parameters yourself"
            )
        return cls(**{**spec.take_recommended(), **others})

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, always as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def sampling_key(self) -> tuple[object, ...]:
        """Values that requests must have in common to share one parameter set of the sampler.

        `n` and `max_tokens` are not among them, because each request has its own.
        """
        return (
            self.temperature,
            self.top_p,
            self.top_k,
            self.min_p,
            self.stops,
            tuple(self.stop_token_ids),
            self.ignore_eos,
            self.seed,
            self.logprobs,
            self.include_stop,
            self.min_tokens,
            self.biases,
            self.allowed_token_ids,
            self.confidence,
            self.min_confidence,
            self.confidence_window,
            self.self_certainty,
            self.max_thinking_tokens,
            self.reasoning_tags,
            self.thinking_end,
            self.logprobs_mode,
            *self.penalties.items(),
            *(self.structure or ()),
        )

    @property
    def reports_signals(self) -> bool:
        """Whether the confidence or the self-certainty at each token is reported."""
        return self.confidence > 0 or self.self_certainty

    @property
    def reports_processed(self) -> bool:
        """Whether reported log-probabilities differ from the model's own distribution."""
        changes = (self.top_p, self.top_k, self.min_p, self.temperature or 1, self.min_tokens)
        same = changes == (1, 0, 0, 1, 0) and not self.biases and not self.has_penalties
        same = same and self.structure is None and self.allowed_token_ids is None
        return self.logprobs_mode == "processed_logprobs" and not same

    @property
    def structure(self) -> tuple[str, str] | None:
        """The structure's name in STRUCTURES and its value as text; None without a structure."""
        for name in STRUCTURES:
            if (value := getattr(self, name)) is not None:
                return name, value if isinstance(value, str) else json.dumps(value)
        return None

    @property
    def has_penalties(self) -> bool:
        """Whether a parameter of PENALTIES has an effect, so that draws read earlier tokens."""
        return bool(self.penalties)

    @property
    def penalties(self) -> dict[str, Any]:
        """The parameters of PENALTIES that have an effect, by name."""
        values = {name: getattr(self, name) for name in PENALTIES}
        return {name: value for name, value in values.items() if value != PENALTIES[name]}

    @property
    def banned_words(self) -> tuple[str, ...]:
        """The bad words, always as a tuple."""
        return tuple(self.bad_words or ())

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """The (token id, number) pairs of logit_bias, sorted by token id."""
        return tuple(sorted((self.logit_bias or {}).items()))


Params = SamplingParams | Mapping[str, Any]
"""Sampling parameters, or a dict of them by name."""


def check_params(params: Params | None) -> SamplingParams:
    """Return the given sampling parameters, or the defaults; raises InputError for other types."""
    if isinstance(params, Mapping):
        params = drop_neutral(params, SamplingParams.__dataclass_fields__, NEUTRAL_SAMPLING)
        check_field_names(SamplingParams, params)
        return SamplingParams(**params)
    if params is not None and not isinstance(params, SamplingParams):
        raise InputError(
            f"params must be SamplingParams or a dict of them, got {type(params).__name__}"
        )
    return params or SamplingParams()


def check_tree_params(params: Params | None) -> SamplingParams:
    """Return the parameters of trees and searches, which give the number of samples themselves.

    Raises:
        InputError: They are no sampling parameters, or have an n.
    """
    params = check_params(params)
    if params.n != 1:
        raise InputError(
            f"n={params.n} is supported only in LLM.generate; use Node(samples=...) in a tree, "
            "or node.sample(n) in a search"
        )
    return params
