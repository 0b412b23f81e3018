"""Judge models: checked before any judging starts, and loaded one at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from treegen.common.lifetimes import Closeable
from treegen.errors import InputError
from treegen.evals.model import check_machine, load_llm, weights_fingerprint
from treegen.evals.pipeline.execution import ModelLoader
from treegen.evals.pipeline.listener import Listener
from treegen.model.options import EngineOptions, check_known

if TYPE_CHECKING:
    from treegen.llm.base import BaseLLM


@dataclass(frozen=True, slots=True)
class JudgeModel:
    """A model to judge with."""

    engine: EngineOptions
    """The options with which it is or would be loaded."""
    fingerprint: str
    """A hash of its weights."""
    llm: "BaseLLM | None" = None
    """The model, if the caller has loaded it and keeps it open."""


def resolve_judges(
    judges: "Sequence[str | BaseLLM]", options: Mapping[str, Any]
) -> list[JudgeModel]:
    """Return the judges, checked as far as possible without loading weights.

    Args:
        judges: Directories or names of models, or loaded models.
        options: Options for loading models, by the names of `EngineOptions`.

    Raises:
        InputError: an option is wrong, or two judges have the same weights.
        ModelError: there is no such model.
    """
    if not isinstance(options, Mapping):
        raise InputError(f"options must be a mapping of names to values, got {options!r:.60}")
    check_known(options, "options")
    resolved: list[JudgeModel] = []
    for name_or_llm in judges:
        if isinstance(name_or_llm, str):
            engine = EngineOptions(model=name_or_llm, **options)
            check_machine(engine)
            judge = JudgeModel(engine, weights_fingerprint(engine))
        else:
            judge = JudgeModel(name_or_llm.facts.engine, name_or_llm.fingerprint, name_or_llm)
        if any(judge.fingerprint == other.fingerprint for other in resolved):
            raise InputError(f"the judge {judge.engine.model} is named twice; name each once")
        resolved.append(judge)
    return resolved


@dataclass(slots=True)
class JudgeLoader(Closeable):
    """Loads judges when they are needed; a judge stays loaded until another one is requested."""

    sampler: ModelLoader | None = None
    """The model that has drawn the samples, if it is still loaded. It is reused if it is also the
    judge; otherwise it is closed before a judge is loaded."""
    _loaded: "BaseLLM | None" = field(default=None, init=False)
    _judge: JudgeModel | None = field(default=None, init=False)

    def get(self, judge: JudgeModel, listener: Listener) -> "BaseLLM":
        """Return the loaded model of a judge.

        Raises:
            ModelError: the model cannot be loaded.
        """
        if judge.llm is not None:
            return judge.llm
        if self.sampler is not None:
            if (llm := self.sampler.get_loaded(judge.engine, judge.fingerprint)) is not None:
                return llm
            self.sampler.close()
        if self._loaded is None or self._judge != judge:
            self.close()
            listener.loading(judge.engine.model)
            self._loaded = load_llm(judge.engine, judge.fingerprint)
            self._judge = judge
        return self._loaded

    def close(self) -> None:
        """Close the judge that was loaded here, and free its memory."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.close()
