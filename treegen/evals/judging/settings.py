"""Settings of a judge run: rubric, number of repeats, and how verdicts are obtained."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final, Literal, get_args

from treegen.common.params import SamplingParams
from treegen.errors import InputError, arg
from treegen.evals.config.type_checks import Count, Maximum, Minimum, check_bounds, check_choices
from treegen.evals.judging.rubric import Rubric, of_json

Verdicts = Literal["likelihood", "samples"]
KINDS: Final = get_args(Verdicts)
_SAMPLING: Final = ("temperature", "max_tokens", "seed")  # settings of texts


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """Settings for judging a run."""

    rubric: Rubric
    """The instructions for judges, and the values of verdicts."""
    wordings: Count = 1
    """Number of wordings of the rubric that are used, from the first."""
    repeats: Annotated[int, Minimum(1), Maximum(10_000)] = 1
    """Verdicts of each wording on each answer; 1 with likelihoods, because all repeats would be
    equal."""
    verdicts: Verdicts = "likelihood"
    """"likelihood" computes the probabilities of the choices; "samples" draws texts that give
    reasons and a verdict."""
    temperature: float = 1.0
    """Temperature at which judges are sampled."""
    max_tokens: int = 512
    """Maximum number of tokens of a judge's text."""
    seed: int = 0
    """Seed of the judges' texts."""
    chat: bool | None = None
    """Whether prompts are in the judge's chat format; None if the judge has a chat template."""
    decided: bool = False
    """Whether to draw no further repeats once the majority among all of them is settled."""

    def __post_init__(self) -> None:
        check_choices(vars(self), JudgeSettings)
        check_bounds(self)
        num_wordings = len(self.rubric.wordings)
        if self.wordings > num_wordings:
            raise InputError(
                f"{arg('wordings', self.wordings)} is more than the {num_wordings} wordings of the "
                f"rubric {self.rubric.name}; add wordings to the file of the rubric"
            )
        if self.verdicts == "likelihood" and (self.repeats > 1 or self.decided):
            raise InputError(
                f"likelihood verdicts are the same in each repeat, so {arg('repeats=')} and "
                f"{arg('stop_when=')} require {arg('verdicts', 'samples')}"
            )
        if self.verdicts == "likelihood" and self.rubric.defines_verdict_format:
            raise InputError(
                f"the rubric {self.rubric.name} reads its verdicts from generated text (reader "
                f"{self.rubric.reader}); use {arg('verdicts', 'samples')}"
            )
        if self.verdicts == "samples":
            self.params()  # raises for invalid numbers before any model is loaded
            if self.repeats > 1 and self.temperature == 0:
                raise InputError(
                    f"at temperature 0 all repeats are the same; remove {arg('repeats=')}, or "
                    f"set a {arg('temperature=')} above 0"
                )
        if self.decided and self.repeats < 2:
            raise InputError(
                f"{arg('stop_when=')} has no effect with one repeat; also pass {arg('repeats=')}"
            )
        if self.decided and self.rubric.criteria:
            raise InputError(
                f"{arg('stop_when=')} is not supported with a rubric that has criteria, because "
                f"its verdicts have no majority; remove {arg('stop_when=')}"
            )

    def params(self, *, chat: bool = False) -> SamplingParams:
        """Return the sampling parameters of texts.

        Args:
            chat: Whether prompts are in the judge's chat format; reasoning is then recognized.

        Raises:
            InputError: a parameter is invalid.
        """
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            seed=self.seed,
            reasoning_tags="auto" if chat else None,
        )

    def identity(self) -> dict[str, Any]:
        """Return the settings that judgements depend on, except wordings and repeats.

        Wordings and repeats may grow later within the same judge run.
        """
        sampling = {name: getattr(self, name) for name in _SAMPLING}
        return {
            "rubric": self.rubric.to_json(),
            "verdicts": self.verdicts,
            "chat": self.chat,
            **({**sampling, "decided": self.decided} if self.verdicts == "samples" else {}),
        }


def resolve_judge_settings(rubric: Rubric, choices: Mapping[str, Any]) -> JudgeSettings:
    """Return the settings that follow from a user's choices.

    Args:
        rubric: The rubric.
        choices: The user's choices, by the names of fields. For None the default holds: all
            wordings of the rubric, and samples if the other choices need them.

    Raises:
        InputError: a choice has a wrong type, or cannot be used with the others.
    """
    chosen = {name: value for name, value in choices.items() if value is not None}
    check_choices(chosen, JudgeSettings)
    need_texts = "repeats" in chosen or chosen.get("decided") or rubric.defines_verdict_format
    verdicts = chosen.setdefault("verdicts", "samples" if need_texts else "likelihood")
    if verdicts == "likelihood" and (names := [name for name in _SAMPLING if name in chosen]):
        raise InputError(
            f"{arg(names[0] + '=')} requires verdicts from samples; also pass "
            f"{arg('verdicts', 'samples')}"
        )
    return JudgeSettings(rubric=rubric, **{"wordings": len(rubric.wordings), **chosen})


@dataclass(frozen=True, slots=True)
class JudgeRun:
    """One judge with one rubric, as stored in the directory of a run."""

    name: str
    """The name of its folder."""
    judge: str
    """The directory or name of the judge."""
    fingerprint: str
    """A hash of the judge's weights."""
    settings: JudgeSettings
    """The settings of the last call."""
    runs: tuple[Mapping[str, str], ...]
    """Path, fingerprint and creation time of each run whose answers are judged; the first one
    stores the judgements."""
    mark: str
    """The mark around quoted answers."""

    def to_json(self) -> dict[str, Any]:
        """Return the content of judging.json."""
        settings = asdict(self.settings)
        return {
            "judge": self.judge,
            "fingerprint": self.fingerprint,
            **settings,
            "rubric": self.settings.rubric.to_json(),
            "runs": [dict(run) for run in self.runs],
            "mark": self.mark,
        }

    @staticmethod
    def of_json(name: str, content: Mapping[str, Any]) -> "JudgeRun":
        """Return the judge run of a judging.json.

        Args:
            name: Name of the folder.
            content: The content of judging.json.

        Raises:
            KeyError: a key is missing.
            TypeError: a value has the wrong type.
        """
        names = [name for name in JudgeSettings.__dataclass_fields__ if name != "rubric"]
        settings = JudgeSettings(
            rubric=of_json(content["rubric"], "the rubric"),
            **{field_name: content[field_name] for field_name in names},
        )
        return JudgeRun(
            name=name,
            judge=str(content["judge"]),
            fingerprint=str(content["fingerprint"]),
            settings=settings,
            runs=tuple(dict(run) for run in content["runs"]),
            mark=str(content["mark"]),
        )
