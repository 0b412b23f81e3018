"""Settings of an evaluation: a task, its data, a model, and how to sample.

Sampling parameters may be those that a checkpoint's generation_config.json recommends.
"""

import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from treegen.common.params import PENALTIES, SamplingParams
from treegen.common.structured_outputs import STRUCTURES
from treegen.errors import InputError, Message, ModelWarning, arg
from treegen.evals.config.base import (
    BaseSettings,
    build_settings,
    last_choices,
    merge_choices,
    select,
)
from treegen.evals.config.stop_rule import NEVER, parse_stop_rule
from treegen.evals.config.type_checks import Count
from treegen.evals.registry import get_task
from treegen.evals.statistics.confidence import CONFIDENCES, Confidence
from treegen.evals.statistics.weighted import check_votes
from treegen.evals.task import TaskDefaults
from treegen.prompts.reasoning import check_reasoning

if TYPE_CHECKING:
    from treegen.common.spec import ModelSpec
    from treegen.runs import RunDir, RunInfo

SAMPLING_SOURCES: Final = ("recommended", "task")
USER, CHECKPOINT, TASK = "user", "checkpoint", "task"


def load_recommended(way: object, choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that a checkpoint recommends, if a user wants them.

    Args:
        way: One of SAMPLING_SOURCES, or None.
        choices: The user's other choices, including the model.

    Raises:
        InputError: the way is not known, or the checkpoint recommends nothing.
        ModelError: there is no such checkpoint, or its recommendation cannot be used.
    """
    if way not in (None, *SAMPLING_SOURCES):
        raise InputError(
            f"{arg('sampling_from')} must be {' or '.join(SAMPLING_SOURCES)}, got {way!r}"
        )
    if way != "recommended" or not choices.get("model"):
        return {}
    from treegen.model.checkpoint.files import locate
    from treegen.model.checkpoint.generation_config import (
        difference_from_generate,
        recommended_sampling,
    )

    directory = locate(choices["model"], choices.get("revision"), weights=False)
    recommended = recommended_sampling(directory)
    if not recommended:
        raise InputError(
            f"{choices['model']} has no generation_config.json with sampling settings; remove "
            f"{arg('sampling_from=')}, or pass {arg('temperature=')} and other sampling settings"
        )
    if note := difference_from_generate(directory):
        warnings.warn(note, ModelWarning, stacklevel=2)
    return dict(recommended)


def sources_of(
    names: Collection[str],
    user_choices: Collection[str],
    recommended: Collection[str],
    stored: Mapping[str, Any] | None,
) -> dict[str, str]:
    """Return who chose each sampling parameter: the user, the checkpoint or the task.

    Args:
        names: Names of the sampling parameters.
        user_choices: Names of the parameters that the user chose.
        recommended: Names of the parameters that the checkpoint recommends.
        stored: The choices of the run that is resumed; None for a new run. An old run does not
            record its sources, so parameters without a known source are left out.
    """
    chosen = (stored or {}).get("sources", {})
    sources: dict[str, str] = {}
    for name in names:
        if name in user_choices:
            sources[name] = USER
        elif name in recommended:
            sources[name] = CHECKPOINT
        elif stored is None or name in chosen:
            sources[name] = chosen.get(name, TASK)
    return sources


def advice(sampling: SamplingParams, spec: "ModelSpec") -> Message | None:
    """Return a hint if the sampling differs from the checkpoint's recommendation, else None."""
    if all(getattr(sampling, name) == value for name, value in spec.recommended):
        return None
    values = ", ".join(arg(f"{name}={value:g}") for name, value in spec.recommended)
    return Message(
        f"the checkpoint recommends {values}; pass {arg('sampling_from', 'recommended')} to use "
        "these settings"
    )


SAMPLING: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "seed",
)
# run.json stores these only if they change a sample.
_OPTIONAL: Final = ("min_tokens", "logit_bias", *PENALTIES, *STRUCTURES)
# Reasoning settings; run.json stores these only if they change a sample.
_THINKING: Final = ("max_thinking_tokens", "reasoning_tags", "thinking_end")
REPORTED: Final = ("votes", "pass_ks", "maj_ks", "pass_hat_ks")
"""The settings of a report that scoring a finished run may change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings(BaseSettings):
    """All settings of an evaluation; every default is filled in."""

    COMPUTED: ClassVar = ("sampling",)
    CHOICES: ClassVar = (*SAMPLING, *_OPTIONAL, *_THINKING, "sampling_from")
    FREE: ClassVar = (
        "pass_ks",
        "maj_ks",
        "pass_hat_ks",
        "score",
        "log_tokens",
        "stop_when",
        "stop_batch",
        "self_certainty",
        "votes",
        "sources",
        "judged_by",
    )
    RECORDED: ClassVar = ("confidence", "self_certainty", "log_tokens")

    num_samples: Count
    """Samples of each problem."""
    sampling: SamplingParams
    """How they are drawn."""
    apply_chat_template: bool = False
    """Whether prompts are chat messages."""
    fewshot_as_multiturn: bool = False
    """In chat, make a user's and an assistant's turn of each few-shot example; otherwise one user's
    turn has all of them."""
    system_instruction: str | None = None
    """A text before each prompt, in chat as the system's turn."""
    reasoning: str = "auto"
    """Whether a chat model reasons: auto, on, off, or how much (low, medium, high)."""
    pass_ks: tuple[int, ...] | None = None
    """The k of pass@k; None picks them from num_samples."""
    maj_ks: tuple[int, ...] | None = None
    """The k of maj@k; None picks them from num_samples."""
    pass_hat_ks: tuple[int, ...] = ()
    """The k of pass^k and G-Pass@k."""
    score: bool = True
    """Whether the samples are scored."""
    log_tokens: bool = False
    """Whether the token ids of each sample are stored as well."""
    stop_when: str = NEVER
    """When a problem gets no further samples; see
    `treegen.evals.config.stop_rule.parse_stop_rule`."""
    stop_batch: Count = 8
    """The number of samples of a problem that are drawn before the rule is checked again."""
    confidence: Confidence | None = None
    """Which confidence statistics of samples are stored; None stores none."""
    self_certainty: bool = False
    """Whether the mean self-certainty of each sample is stored."""
    votes: tuple[str, ...] = ()
    """The votes that are reported in addition to maj@k."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Who chose each sampling parameter: the user, the checkpoint or the task."""
    judged_by: Mapping[str, Any] | None = None
    """The models that judge the samples after sampling, and how, so that a resumed run is judged
    too; None if no model judges them."""

    def __post_init__(self) -> None:
        BaseSettings.__post_init__(self)
        self._check_stops()
        check_votes(self.votes)
        if self.fewshot_as_multiturn and not self.apply_chat_template:
            raise InputError(
                f"{arg('fewshot_as_multiturn')} requires chat messages; also pass "
                f"{arg('apply_chat_template', True)}"
            )
        self._check_reasoning()
        for name in ("pass_ks", "maj_ks", "pass_hat_ks"):
            for k in getattr(self, name) or ():
                if not 1 <= k <= self.num_samples:
                    raise InputError(
                        f"{arg(name, k)} is not possible with {self.num_samples} samples per "
                        f"problem; choose a number from 1 to {self.num_samples}, or draw more "
                        f"samples ({arg('num_samples=')})"
                    )

    def _check_stops(self) -> None:
        if parse_stop_rule(self.stop_when) is not None and not self.score:
            raise InputError(
                f"{arg('stop_when=')} cannot be used together with {arg('score', False)}, "
                "because early stopping needs scores; remove one of the two arguments"
            )
        if self.in_rounds and self.sampling.temperature == 0:
            raise InputError(
                "early stopping has no effect with greedy sampling, because all samples of a "
                "problem are the same; set a temperature above 0"
            )

    @property
    def stops_samples(self) -> bool:
        """Whether samples end because of low confidence."""
        return self.confidence is not None and self.confidence.keep is not None

    @property
    def in_rounds(self) -> bool:
        """Whether the samples to draw of a problem depend on its earlier samples."""
        return self.stop_when != NEVER or self.stops_samples

    @property
    def first_round(self) -> int:
        """The number of samples of each problem that are always drawn, and never cut."""
        first = self.num_samples
        if self.confidence is not None and self.confidence.keep is not None:
            first = self.confidence.warmup
        elif self.stop_when != NEVER:
            first = self.stop_batch
        return min(first, self.num_samples)

    @property
    def sampling_params(self) -> SamplingParams:
        """The sampling parameters, with the confidence statistics to compute."""
        statistics: dict[str, Any] = {"self_certainty": self.self_certainty}
        if self.confidence is not None:
            statistics |= {
                "confidence": self.confidence.top,
                "confidence_window": self.confidence.window,
            }
        return replace(self.sampling, **statistics)

    def free_choices(self) -> dict[str, Any]:
        """Return the settings that change no sample, with the confidence settings as a mapping."""
        free = super(EvalSettings, self).free_choices()
        if not self.pass_hat_ks:
            del free["pass_hat_ks"]
        return free | {"confidence": self._confidence_fields}

    @property
    def _confidence_fields(self) -> dict[str, Any] | None:
        return None if self.confidence is None else asdict(self.confidence)

    def _check_reasoning(self) -> None:
        check_reasoning(self.reasoning)
        if self.reasoning != "auto" and not self.apply_chat_template:
            raise InputError(
                f"{arg('reasoning=')} is an argument of the chat template; also pass "
                f"{arg('apply_chat_template', True)}"
            )
        budget, max_tokens = self.sampling.max_thinking_tokens, self.sampling.max_tokens
        if budget is not None and budget >= max_tokens:
            raise InputError(
                f"{arg('max_thinking_tokens', budget)} must be less than "
                f"{arg('max_tokens', max_tokens)}, which counts the reasoning and the answer"
            )

    def explain_unused(self, name: str) -> str | None:
        """Return why the setting `name` has no effect with the others; None if it has one."""
        if name == "stop_batch" and self.stop_when == NEVER:
            return f"without {arg('stop_when=')}"
        if name == "thinking_end" and self.sampling.max_thinking_tokens is None:
            return f"without {arg('max_thinking_tokens=')}"
        return None

    def identity(self) -> dict[str, Any]:
        """Return the settings that change a sample, as run.json groups them."""
        sampling = {name: getattr(self.sampling, name) for name in SAMPLING}
        sampling |= self.sampling.penalties
        for name in STRUCTURES:
            if (value := getattr(self.sampling, name)) is not None:
                sampling[name] = value
        if self.sampling.min_tokens:
            sampling["min_tokens"] = self.sampling.min_tokens
        for name in _THINKING:
            value = getattr(self.sampling, name)
            if value is not None and value != "auto":
                sampling[name] = value
        if biases := self.sampling.biases:
            sampling["logit_bias"] = {str(token): bias for token, bias in biases}
        return {
            "num_samples": self.num_samples,
            "sampling": {**sampling, "stop": self.sampling.stops},
            "prompt": {
                "apply_chat_template": self.apply_chat_template,
                "system_instruction": self.system_instruction,
                # It is absent if it is false, as in runs from before this setting existed.
                **({"fewshot_as_multiturn": True} if self.fewshot_as_multiturn else {}),
                **({"reasoning": self.reasoning} if self.reasoning != "auto" else {}),
            },
            # Confidence settings change samples only if they end some.
            **({"confidence": self._confidence_fields} if self.stops_samples else {}),
        }


def resolve_eval_settings(
    requested: Mapping[str, Any], stored: Mapping[str, Any] | None = None
) -> EvalSettings:
    """Return the settings that follow from a user's choices.

    Args:
        requested: The user's choices, by name.
        stored: The choices of the run that is resumed or scored. They hold if the user did not
            choose. If neither has a name, the task's own default holds.

    Raises:
        InputError: no task or model is named, a name is unknown, or a value cannot be used.
    """
    if isinstance(requested.get("votes"), str):
        requested = {**requested, "votes": split_votes(requested["votes"])}
    choices = merge_choices(EvalSettings, requested, stored)
    if not choices.get("task"):
        raise InputError("no task is given; use `treegen tasks` to list the tasks")
    task = get_task(choices["task"])
    if hasattr(task, "environments"):  # before a missing model, which would not help
        raise InputError(
            f"the task {task.name} requires tool calls; use `treegen search {task.name}`"
        )
    task.configure(choices.get("extra", {}))
    defaults = task.defaults
    chat = choices.get("apply_chat_template", False)
    names = (*SAMPLING, *_OPTIONAL, *_THINKING)
    chosen = {name: _list_to_tuple(value) for name, value in select(choices, names).items()}
    if "logit_bias" in chosen and "logit_bias" not in requested:  # JSON has text for keys
        chosen["logit_bias"] = {int(token): bias for token, bias in chosen["logit_bias"].items()}
    recommended = load_recommended(choices.get("sampling_from"), choices)
    chosen |= {name: value for name, value in recommended.items() if name not in requested}
    default_params = default_sampling(defaults, chat=chat)
    sampling = replace(default_params, **{"seed": default_params.seed or 0, **chosen})
    recorded = [name for name in names if name in SAMPLING or name in chosen]
    # Votes are added to those of the run, so that a later command hides none.
    added = split_votes(choices.get("votes", ()))
    votes = tuple(dict.fromkeys((*split_votes((stored or {}).get("votes", ())), *added)))
    weights = {vote.partition(":")[0] for vote in votes}
    confidence = choices.get("confidence")
    if isinstance(confidence, Mapping):
        confidence = Confidence(**confidence)
    elif confidence is None and weights & CONFIDENCES:
        confidence = Confidence()
    return build_settings(
        EvalSettings,
        choices,
        task.needs_data,
        num_samples=choices.get("num_samples", defaults.num_samples),
        sampling=sampling,
        fewshot_as_multiturn=choices.get("fewshot_as_multiturn", chat),
        system_instruction=choices.get("system_instruction") or None,
        pass_ks=_list_to_tuple(choices.get("pass_ks")),
        maj_ks=_list_to_tuple(choices.get("maj_ks")),
        pass_hat_ks=_list_to_tuple(choices.get("pass_hat_ks")) or (),
        confidence=confidence,
        self_certainty=choices.get("self_certainty", False) or "certainty" in weights,
        votes=votes,
        sources=sources_of(recorded, requested, recommended, stored),
    )


def split_votes(votes: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of votes, which may be written as one text with commas."""
    names = votes.split(",") if isinstance(votes, str) else votes
    return tuple(name.strip() for name in names if name.strip())


def _list_to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def default_sampling(defaults: TaskDefaults, *, chat: bool) -> SamplingParams:
    """Return the default sampling parameters of a task; reasoning tags default to "auto".

    A chat model ends its turn itself, and its turn may have blank lines, so blank lines are not
    stop strings in chat.
    """
    sampling = defaults.sampling
    sampling = replace(sampling, reasoning_tags=sampling.reasoning_tags or "auto")
    if not chat:
        return sampling
    return replace(sampling, stop=tuple(stop for stop in sampling.stops if stop.strip()))


def stored_choices(info: "RunInfo") -> dict[str, Any]:
    """Return the choices of an evaluation's start or latest resume, by name.

    Raises:
        RunError: the run is not an evaluation.
    """
    return last_choices(
        info,
        "eval",
        groups=("sampling", "prompt"),
        names=("num_samples",),
        absent={"fewshot_as_multiturn": False},
    )


def recall_choices(run: "RunDir") -> dict[str, Any]:
    """Return the choices of an evaluation, and the votes and k with which it was last scored.

    Raises:
        RunError: the run is not an evaluation.
    """
    choices = stored_choices(run.info)
    # The next scoring replaces a corrupt file.
    settings: Any = run.stored_results().get("settings")
    for name in REPORTED if isinstance(settings, dict) else ():
        with suppress(InputError, TypeError):  # it has none, or was edited
            choices[name] = _read_reported(name, settings.get(name), choices)
    return choices


def _read_reported(name: str, value: Any, choices: Mapping[str, Any]) -> Any:
    """Return votes or k of results.json; raises InputError or TypeError for other values.

    Args:
        name: A name of REPORTED.
        value: Its value in results.json.
        choices: The choices in run.json.
    """
    if name == "votes":
        check_votes(value)
        return list(dict.fromkeys((*choices.get(name, ()), *value)))
    if not isinstance(value, list) or not all(
        type(k) is int and 1 <= k <= choices["num_samples"] for k in value
    ):
        raise InputError(
            f"{name} must be a list of sample counts from 1 to {choices['num_samples']}, "
            f"got {value!r:.60}"
        )
    return value
