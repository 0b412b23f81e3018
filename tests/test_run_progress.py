"""The bar of `LLM.run` and `LLM.generate`."""

import pytest

from treegen import LLM, Node, SamplingParams
from treegen.common import progress
from treegen.errors import InputError


@pytest.fixture(name="llm", scope="module")
def _llm() -> LLM:
    return LLM("demo", dtype="float32", device="cpu", memory="16MiB")


def test_a_bar_counts_samples_and_changes_none(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=4, seed=1)
    tree = Node("One and one", children=[Node(" is", samples=3), Node(" are", samples=2)])
    silent = llm.run(tree, params)
    assert capsys.readouterr().err == ""
    assert llm.run(tree, params, progress=True).completions == silent.completions
    assert "5/5" in capsys.readouterr().err
    several = SamplingParams(max_tokens=4, seed=1, n=2)
    texts = llm.generate(["a", "b"], several, progress=True)
    assert "4/4" in capsys.readouterr().err
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    assert llm.generate(["a", "b"], several) == texts
    assert "4/4" in capsys.readouterr().err
    llm.generate(["a", "b"], several, progress=False)
    assert capsys.readouterr().err == ""


def test_other_values_are_refused_before_anything_runs(llm: LLM) -> None:
    for wrong in (1, "yes"):
        with pytest.raises(InputError, match="progress must be True, False or None"):
            llm.run(Node("a", samples=1), progress=wrong)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="progress must be True, False or None"):
            llm.generate(["a"], progress=wrong)  # type: ignore[arg-type]


def test_a_notebook_is_told_by_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shell:
        kernel = object()

    class IPython:
        shell: object = None

        @classmethod
        def get_ipython(cls) -> object:
            return cls.shell

    monkeypatch.setitem(progress.sys.modules, "IPython", IPython)  # type: ignore[attr-defined]
    assert not progress.in_notebook()
    monkeypatch.setattr(IPython, "shell", Shell())
    assert progress.in_notebook()
