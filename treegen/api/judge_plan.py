"""The plan to judge a run's samples, which the run stores until they are judged."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from treegen.api.judging import Judgings, as_judges, judge
from treegen.errors import InputError, TreegenError, arg
from treegen.evals.config.base import absolute
from treegen.evals.judging.pipeline import resolve_judges
from treegen.evals.judging.rubric import BUILT_IN, Rubric, load_rubric
from treegen.evals.judging.settings import KINDS, Verdicts, resolve_judge_settings

if TYPE_CHECKING:
    from treegen.llm.base import BaseLLM

NOBODY: Final = "none"
"""Used instead of a judge to remove the judges that a run stores."""
# Loading options that a run stores. Trust in a model's code is not stored, because a run may come
# from somebody else.
_LOADING: Final = ("device", "memory", "max_rows", "reproducible", "eager")


@dataclass(frozen=True, kw_only=True)
class JudgingPlan:
    """The models that judge a run's samples, and how they judge."""

    judges: "tuple[str | BaseLLM, ...]"
    """Models by directory or hub name, or loaded models."""
    rubric: str | Path | Mapping[str, Any] | Rubric | None = None
    """As `treegen.judge` takes it; None for the task's own."""
    wordings: int | None = None
    """How many wordings of the rubric to use; None for all."""
    verdicts: Verdicts | None = None
    """"likelihood" or "samples"; None for the rubric's default."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """How the judges are loaded, by the names of LLM's arguments."""

    def check(self) -> None:
        """Raise the InputError or ModelError that `judge` would raise, before a run is sampled."""
        rubric = load_rubric(self.rubric or "correctness")
        if rubric.pairs:
            raise InputError(
                "a rubric that compares pairs requires a second run; use `treegen judge` when "
                "this run is finished"
            )
        resolve_judge_settings(rubric, {"wordings": self.wordings, "verdicts": self.verdicts})
        resolve_judges(self.judges, self.options)

    def judge(self, run: Path, **arguments: Any) -> Judgings:
        """Judge a run.

        Args:
            run: The directory of the run.
            arguments: Further arguments of `treegen.judge`, such as `models` and `listener`.
        """
        return judge(
            run,
            self.rubric,
            self.judges,
            wordings=self.wordings,
            verdicts=self.verdicts,
            options=self.options,
            **arguments,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the plan as run.json stores it: loaded models by name, rubric files by content."""
        rubric = self.rubric
        if rubric is not None and not (isinstance(rubric, str) and rubric in BUILT_IN):
            rubric = load_rubric(rubric).to_json()
        names = [
            judge if isinstance(judge, str) else judge.model_info.engine.model
            for judge in self.judges
        ]
        return {
            "judge": [absolute(judge) for judge in names],
            "rubric": rubric,
            "wordings": self.wordings,
            "verdicts": self.verdicts,
            "options": {name: self.options[name] for name in _LOADING if name in self.options},
        }

    @classmethod
    def make(
        cls, judge: "str | BaseLLM | Sequence[str | BaseLLM]", **fields: Any
    ) -> "JudgingPlan | None":
        """Return the plan with a user's judges; None if the judge is "none".

        Args:
            judge: As `treegen.judge` takes it, or "none".
            fields: The other fields.

        Raises:
            InputError: the judge is not a model.
        """
        judges = as_judges(judge)
        if NOBODY not in judges:
            return cls(judges=judges, **fields)
        if len(judges) > 1:
            raise InputError(
                f"{arg('judge', 'none')} skips judging and cannot be used together with other "
                "judges; remove none or the other judges"
            )
        return None

    @classmethod
    def check_stored(cls, stored: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Raise TreegenError if the judges that a run stores cannot judge it; see `of_json`."""
        plan = cls.of_json(stored, options)
        try:
            plan.check()
        except TreegenError as error:
            raise type(error)(
                f"the run's judges {', '.join(map(str, plan.judges))} cannot be used: "
                f"{error.message.marked}; or pass other models with {arg('judge=')}, or set "
                f"{arg('judge', 'none')}"
            ) from error

    @classmethod
    def of_json(cls, stored: Mapping[str, Any], options: Mapping[str, Any]) -> "JudgingPlan":
        """Return the plan that a run stores.

        Args:
            stored: The plan in run.json.
            options: How the judges are loaded now; these options override the stored ones.

        Raises:
            InputError: run.json was changed, and this is not a plan.
        """
        judges, stored_options = stored.get("judge"), stored.get("options", {})
        rubric = stored.get("rubric")  # files are stored by content, so a path is not accepted here
        is_valid = (
            isinstance(judges, list)
            and judges
            and all(isinstance(judge, str) for judge in judges)
            and isinstance(stored_options, Mapping)
            and (isinstance(rubric, Mapping) or rubric in (None, *BUILT_IN))
            and type(stored.get("wordings")) in (int, type(None))
            and stored.get("verdicts") in (None, *KINDS)
        )
        if not is_valid:
            raise InputError(
                "the setting judged_by in the run's run.json is corrupt; pass the models "
                f"with {arg('judge=')}, or set {arg('judge', 'none')}"
            )
        stored_options = {name: stored_options[name] for name in _LOADING if name in stored_options}
        return cls(
            judges=tuple(cast("list[str]", judges)),
            rubric=rubric,
            wordings=stored.get("wordings"),
            verdicts=stored.get("verdicts"),
            options={**stored_options, **options},
        )
