"""The programs in docs/search.md run."""

import re
from pathlib import Path

import pytest
import tiny_models

from treegen.evals.search.methods import METHODS


def test_the_programs_in_the_documentation_run(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (repository / "docs" / "search.md").read_text()
    first, *others = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    checkpoint = f"{str(tiny_models.save_tiny_model(tmp_path))!r}, check=False, memory='16MiB'"
    names: dict[str, object] = {
        "prompts": ["Q: Ann?\nA:", "Q: Bob?\nA:"],
        "FEW_SHOT": "Q: Cy?\nA: Yes.\n\n",
        "problems": [("a", "Ann?"), ("b", "Bob?")],
        "prompt_a": "Ann",
        "prompt_b": "Bob",
    }
    assert first.count('"meta-llama/Llama-3.1-8B"') == 1 and others
    for program in (first.replace('"meta-llama/Llama-3.1-8B"', checkpoint), *others):
        exec(program, names)
    shown = capsys.readouterr().out
    assert "tokens_decoded" in shown
    assert "generated level 2: at most 30 rows, 1,200 tokens; 8 go on" in shown


@pytest.mark.parametrize("page", ["README.md", "docs/search.md"])
def test_tables_name_methods_in_their_order(repository: Path, page: str) -> None:
    order = [name.removeprefix("tot-").replace("_", "-") for name in METHODS]
    heads = re.findall(r"^\| *(`.*?) *\|", (repository / page).read_text(), re.MULTILINE)
    words = [word for head in heads for word in re.findall(r"`([\w-]+)", head)]
    told = [name for name in (word.removeprefix("tot-").replace("_", "-") for word in words)
            if name in order]  # fmt: skip
    assert told == sorted(told, key=order.index)
