"""How the samples of a run are to be judged, as the run remembers it until they are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from treegen.api.judging import Judgings, check_judges, judge, names_of
from treegen.errors import InputError, TreegenError
from treegen.evals.config.base import absolute
from treegen.evals.judging.rubric import BUILT_IN, Rubric, load_rubric
from treegen.evals.judging.settings import KINDS, Verdicts

if TYPE_CHECKING:
    from treegen.llm.base import BaseLLM

NOBODY: Final = "none"
"""In place of a judge: what a run remembers of its judges is dropped."""
# How a judge is loaded. Trust in a model's code is not among them: a run may be somebody else's.
_LOADING: Final = ("device", "memory", "max_rows", "reproducible", "eager")


@dataclass(frozen=True, kw_only=True)
class JudgingPlan:
    """Which models judge a run's samples, and how.

    Attributes:
        judges: models by directory or hub name, or loaded ones.
        rubric: as `treegen.judge` takes it; None for the task's own.
        wordings: how many wordings of the rubric to use; None for all.
        verdicts: "likelihood" or "samples"; None for what the rubric asks for.
        options: how the judges are loaded, by the names of LLM's arguments.
    """

    judges: "tuple[str | BaseLLM, ...]"
    rubric: str | Path | Mapping[str, Any] | Rubric | None = None
    wordings: int | None = None
    verdicts: Verdicts | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raise InputError or ModelError for what `judge` would refuse before a run is drawn."""
        check_judges(self.judges, self.rubric, self.wordings, self.verdicts, self.options)

    def judge(self, run: Path, **how: Any) -> Judgings:
        """Judge a run.

        Args:
            run: the directory of the run.
            how: further arguments of `treegen.judge`, such as `models` and `listener`.
        """
        return judge(
            run,
            self.rubric,
            self.judges,
            wordings=self.wordings,
            verdicts=self.verdicts,
            options=self.options,
            **how,
        )

    def to_json(self) -> dict[str, Any]:
        """Return what run.json keeps. A loaded model is kept by its name, a file by its content."""
        rubric = self.rubric
        if rubric is not None and not (isinstance(rubric, str) and rubric in BUILT_IN):
            rubric = load_rubric(rubric).to_json()
        names = [each if isinstance(each, str) else each.facts.engine.model for each in self.judges]
        return {
            "judge": [absolute(each) for each in names],
            "rubric": rubric,
            "wordings": self.wordings,
            "verdicts": self.verdicts,
            "options": {name: self.options[name] for name in _LOADING if name in self.options},
        }

    @classmethod
    def make(
        cls, judge: "str | BaseLLM | Sequence[str | BaseLLM]", **how: Any
    ) -> "JudgingPlan | None":
        """Return the plan that a user asks for; None if nobody is to judge.

        Args:
            judge: as `treegen.judge` takes it, or "none".
            how: the other fields.

        Raises:
            InputError: the judge is no model.
        """
        judges = names_of(judge)
        if NOBODY not in judges:
            return cls(judges=judges, **how)
        if len(judges) > 1:
            raise InputError("judge='none' leaves judging out; give it alone, or leave it out")
        return None

    @classmethod
    def check_kept(cls, found: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Raise TreegenError if the judges that a run remembers cannot judge it; see `of_json`."""
        plan = cls.of_json(found, options)
        try:
            plan.check()
        except TreegenError as error:
            raise type(error)(
                f"the run is to be judged by {', '.join(map(str, plan.judges))}: {error}; or name "
                "other models with judge=, or give judge='none'"
            ) from error

    @classmethod
    def of_json(cls, found: Mapping[str, Any], options: Mapping[str, Any]) -> "JudgingPlan":
        """Return the plan that a run remembers.

        Args:
            found: what run.json keeps.
            options: how the judges are loaded now, beside what the run keeps of that.

        Raises:
            InputError: run.json was changed, and this is no plan.
        """
        judges, kept = found.get("judge"), found.get("options", {})
        rubric = found.get("rubric")  # a file is kept by its content, so no path is taken from here
        whole = (
            isinstance(judges, list)
            and judges
            and all(isinstance(each, str) for each in judges)
            and isinstance(kept, Mapping)
            and (isinstance(rubric, Mapping) or rubric in (None, *BUILT_IN))
            and type(found.get("wordings")) in (int, type(None))
            and found.get("verdicts") in (None, *KINDS)
        )
        if not whole:
            raise InputError(
                "the judged_by in the run's run.json is damaged; name the models with judge=, or "
                "give judge='none'"
            )
        kept = {name: kept[name] for name in _LOADING if name in kept}
        return cls(
            judges=tuple(cast("list[str]", judges)),
            rubric=rubric,
            wordings=found.get("wordings"),
            verdicts=found.get("verdicts"),
            options={**kept, **options},
        )
