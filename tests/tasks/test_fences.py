"""Programs in the code fences of answers."""

import time

import pytest

from treegen.tasks.apps.task import extract_program
from treegen.tasks.programs.task import block_that_defines, fenced_blocks

CODE = "def f(x):\n    return x\n"
INDENTED = "   def f(x):\n       return x\n"
DOCSTRING = 'def f(x):\n    """Doubles.\n\n    ```\n    f(1)\n    ```\n    """\n    return x\n'
CASES = (
    ("a fence", f"Here:\n```python\n{CODE}```\nDone.", CODE),
    ("tildes", f"~~~py\n{CODE}~~~\n", CODE),
    ("in a numbered list", f"1. So:\n   ```python\n{INDENTED}   ```\n2. Done", CODE),
    ("in a list of points", "- So:\n\n  ```python\n  def f(x):\n      return x\n  ```\n", CODE),
    ("in a list of lists", "- a\n  - b\n    ```\n    def f(x):\n        return x\n    ```\n", CODE),
    ("in a quotation", "> ```python\n> def f(x):\n>     return x\n> ```\n", CODE),
    ("indented by spaces", f"  ```python\n{INDENTED}  ```\n", " def f(x):\n     return x\n"),
    ("indented with its code", "  ```python\n  def f(x):\n      return x\n  ```\n", CODE),
    ("in a docstring", f"```python\n{DOCSTRING}```\n", DOCSTRING),
    ("in a docstring, four backticks", f"````python\n{DOCSTRING}````\n", DOCSTRING),
    ("tildes around backticks", f"~~~python\n{DOCSTRING}~~~\n", DOCSTRING),
    ("never closed", f"```python\n{CODE}", CODE),
    ("closed only", f"{CODE}```\nThis doubles.", CODE),
    ("closed only, at the end", f"{CODE}```", CODE),
    ("closed only, then another", f"{CODE}```\nUse it:\n```python\nf(1)\n```\n", CODE),
    ("after a tag", f"</think>\n```python\n{CODE}\n```\n", f"{CODE}\n"),
    ("in a tag", f"<answer>\n```python\n{CODE}```\n</answer>", CODE),
    ("without a fence", CODE, CODE),
    ("backticks in a line", f"Use ```f(1)``` so.\n```python\n{CODE}```\n", CODE),
    (
        "the last that defines it",
        f"```python\nf = 1\n```\n```python\n{CODE}```\n```\nf(2)\n```",
        CODE,
    ),
    ("other blocks after it", f"```python\n{CODE}```\n```\n>>> f(1)\n```\n", CODE),
    ("a longer closing fence", f"```python\n{CODE}`````\nDone", CODE),
    ("attributes", f"``` {{.python .numberLines}}\n{CODE}```\n", CODE),
    ("carriage returns", f"```python\r\n{CODE}```\r\n", CODE),
    ("code left of its fence", f"1. So:\n   ```python\n{CODE}   ```\n", CODE),
    ("nothing", "I cannot.", None),
    ("a blank block", "```python\n\n```\n", None),
    ("words in a block", "```\nno\n```", "no\n"),
    ("", "", None),
)


@pytest.mark.parametrize(("text", "code"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_the_program_of_an_answer(text: str, code: str | None) -> None:
    assert block_that_defines(text, ["f"]) == code


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("print(1)\n```\nThat prints 1.", "print(1)\n"),
        ("import sys\nx = 1\n```", "import sys\nx = 1\n"),
        ("n = int(input())\n```\n", "n = int(input())\n"),
        ("Here:\n```\nprint(1)\n", "print(1)\n"),
        ("So:\n- a\n  ```python\n  print(1)\n  ```\n", "print(1)\n"),
        ("print(1)", None),
        ("For this we print:\n```\nprint(1)", "print(1)\n"),
        ("1. a\n   ```\n   print(1)\n   ```", "print(1)\n"),
        ("n = 1\n```python\nprint(1)\n```", "print(1)\n"),
    ],
)
def test_the_program_of_an_answer_without_a_name(text: str, code: str | None) -> None:
    found = extract_program(text, "fenced")
    assert found == code or (found or "").rstrip("\n") == (code or "").rstrip("\n")


@pytest.mark.parametrize(
    "unit",
    [
        "```\n",
        "```python\n",
        "- ",
        "> ",
        "1. ",
        "- a\n  ",
        "`",
        "~",
        "    ```\n",
        "\n",
        "[a]: b\n",
        "<a>\n",
        "* * ",
        "#",
        "|a|\n",
        "\t",
        " ",
        "> - ",
        "- ```\n",
        "a\n=\n",
        "[",
        "*a",
        "&amp;",
        "\\",
        "\x00",
    ],
)
def test_reading_fences_takes_linear_time(unit: str) -> None:
    for text in (unit * (20_000 // len(unit)), "```python\n" + unit * (20_000 // len(unit))):
        start = time.process_time()
        list(fenced_blocks(text))
        block_that_defines(text, ["f"])
        extract_program(text, "fenced")
        assert time.process_time() - start < 8
