"""Templates of files: rendered as transformers renders them, within limits."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from treegen import LLM, SamplingParams
from treegen.common.bounded import templates
from treegen.common.bounded.templates import (
    TemplateError,
    read_names,
    read_set,
    render_chat,
    render_rubric,
)
from treegen.common.bounded.worker import FileWorker
from treegen.errors import InputError
from treegen.evals.judging.rubric import load_rubric
from treegen.model.tokenizer import load_tokenizer
from treegen.prompts.tokens import tokenize
from treegen.prompts.tree import Node

RANGE = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
FAN = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
DOUBLING = (
    "{% set n = namespace(s='a') %}{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
)
ENDLESS = {
    "loop": RANGE,
    "calls": FAN,
    "doubling": DOUBLING,
    "product": "{{ 'a' * 10 ** 10 }}",
    "format": "{{ '%3000000000d' % 1 }}",
    "format method": "{{ '{:>3000000000}'.format(1) }}",
    "filter": "{{ 'a'|center(10 ** 10) }}",
    "list": "{{ [1] * 10 ** 10 }}",
    "power": "{{ 7 ** (10 ** 9) > 1 }}",
}
REFUSED = {
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "long": ("{{ 'a' * 6000000 }}", "6,000,0.. characters"),
    "include": ("{% include '/etc/passwd' %}", "no loader"),
    "import": ("{% import 'os' as os %}", "no loader"),
    "inside": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "key": ("{{ {}['x'] }}", "no attribute 'x'"),
    "index": ("{{ 'a'.index('b') }}", "substring not found"),
    "lookup": ("{{ 'a'.encode('nope') }}", "unknown encoding"),
    "type": ("{{ 1 + 'a' }}", "unsupported operand"),
    "filter": ("{{ 1|nope }}", "No filter"),
    "nested": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion"),
    "syntax": ("{{ 1", "unexpected end"),
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "\u00c4\u00df <x> 'q'",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "string", "enum": ["x", "y"]}},
                "required": ["a"],
            },
        },
    }
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello <b> & 'x' \u00c4\u2028 \ud83d\ude00 \n\n  "}],
    [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\na"},
        {"role": "user", "content": "more"},
    ],
    [
        {"role": "user", "content": "w"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "type": "function",
                    "id": "abcdefghi",
                    "function": {"name": "look", "arguments": {"a": "x", "n": 1.5, "z": None}},
                }
            ],
        },
        {"role": "tool", "name": "look", "tool_call_id": "abcdefghi", "content": "22"},
    ],
    [{"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image"}]}],
]
ASKED: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": True},
    {"add_generation_prompt": True, "tools": TOOLS},
    {"add_generation_prompt": True, "enable_thinking": False},
]


@pytest.fixture(name="tokenizer")
def _tokenizer(checkpoint: Path) -> Any:
    return load_tokenizer(str(checkpoint))


@pytest.fixture(scope="module", name="impatient")
def _impatient() -> dict[str, FileWorker]:
    """Return processes that give templates little time; the chats' one imports transformers."""
    names = {"_CHATS": "chat", "_RUBRICS": "rubric"}
    limits: dict[str, Any] = {"seconds": 0.2, "memory": 1 << 29, "what": "x", "site": True}
    return {name: FileWorker(templates._FILE, kind, **limits) for name, kind in names.items()}


@pytest.fixture(name="short")
def _short(impatient: dict[str, FileWorker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Render templates in the processes that give them little time."""
    for name, worker in impatient.items():
        monkeypatch.setattr(templates, name, worker)


def test_chats_are_byte_by_byte_those_of_transformers(tokenizer: Any) -> None:
    folder = files(pytest.importorskip("trl")).joinpath("chat_templates")
    sources = {
        each.name: each.read_text(encoding="utf-8")
        for each in folder.iterdir()
        if each.name.endswith(".jinja")
    }
    assert len(sources) > 20
    compared = 0
    for name, source in sources.items():
        tokenizer.chat_template = source
        for messages in CHATS:
            for how in ASKED:
                try:
                    want = tokenizer.apply_chat_template(messages, tokenize=False, **how)
                except Exception:
                    with pytest.raises(TemplateError):
                        render_chat(tokenizer, messages, **how)
                    continue
                assert render_chat(tokenizer, messages, **how) == want, name
                compared += 1
    assert compared > 10 * len(sources)


def test_functions_and_halves_of_characters_come_through(tokenizer: Any) -> None:
    def add(a: int) -> int:
        """Add.

        Args:
            a: A number.
        """
        return a

    tokenizer.chat_template = "{{ tools }}{{ messages[0].content }}{{ bos_token }}{{ mine }}"
    messages = [{"role": "user", "content": "\ud800\0\n"}]
    for how in ({"tools": [add]}, {"mine": {"a": [1, None, True, 2.5]}}, {}):
        want = tokenizer.apply_chat_template(messages, tokenize=False, **how)
        assert render_chat(tokenizer, messages, **how) == want


def test_one_of_several_templates_is_chosen(tokenizer: Any) -> None:
    tokenizer.chat_template = {"default": "plain", "tool_use": "tools"}
    messages = [{"role": "user", "content": "a"}]
    assert render_chat(tokenizer, messages) == "plain"
    assert render_chat(tokenizer, messages, tools=TOOLS) == "tools"
    tokenizer.chat_template = {"a": "plain"}
    with pytest.raises(TemplateError, match="no default"):
        render_chat(tokenizer, messages)


def test_a_tokenizer_with_code_of_its_own_is_called_itself() -> None:
    class Own:
        def apply_chat_template(self, messages: Any, **how: Any) -> str:
            if not messages:
                raise KeyError("two\nlines")
            return f"{messages} {how}"

    assert render_chat(Own(), [{}], a=1) == "[{}] {'tokenize': False, 'a': 1}"
    with pytest.raises(TemplateError, match=r"two.*lines") as caught:
        render_chat(Own(), [])
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("kind", ENDLESS)
def test_templates_that_take_for_ever_are_given_up(kind: str, tokenizer: Any) -> None:
    source = ENDLESS[kind]
    tokenizer.chat_template = source
    message = r"takes more than .* s or .* GiB of memory; check the loops"
    with pytest.raises(TemplateError, match=message):
        render_rubric(source, {})
    with pytest.raises(TemplateError, match=message):
        render_chat(tokenizer, [{"role": "user", "content": "a"}])
    # What comes after is answered as ever.
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert render_chat(tokenizer, [{"role": "user", "content": "a"}]) == "a"
    assert render_rubric("{{ a }}", {"a": "b"}) == "b"


@pytest.mark.parametrize("kind", REFUSED)
def test_templates_that_fail_are_refused_in_one_line(kind: str, tokenizer: Any) -> None:
    source, message = REFUSED[kind]
    with pytest.raises(TemplateError, match=message) as caught:
        render_rubric(source, {})
    assert "\n" not in str(caught.value)
    tokenizer.chat_template = source
    if kind not in ("key",):  # a chat may ask for what is not there
        with pytest.raises(TemplateError):
            render_chat(tokenizer, [{"role": "user", "content": "a"}])


def test_a_template_may_be_as_long_as_its_messages(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages[0].content }}"
    content = "a" * 6_000_000
    assert render_chat(tokenizer, [{"role": "user", "content": content}]) == content


@pytest.mark.usefixtures("short")
def test_names_and_what_a_rubric_sets_are_read_within_the_limits() -> None:
    names, words = read_names("{{ a }}{% set b = 'high' %}")
    assert names == {"a"} and words == {"high"}
    with pytest.raises(TemplateError, match="recursion"):
        read_names("{{ " + "(" * 5000)
    source = "{% set choices = {true: 1, 2: [0, none]} %}{% set other = 1 %}"
    assert read_set(source, {}, ["choices", "name"]) == {"choices": {True: 1, 2: [0, None]}}
    with pytest.raises(TemplateError, match="takes more than"):
        read_set(RANGE, {}, ["choices"])
    with pytest.raises(TemplateError, match="a value must be text, a number"):
        read_set("{% set choices = cycler %}", {}, ["choices"])


@pytest.mark.usefixtures("short")
def test_a_model_whose_template_never_ends_says_so(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), device="cpu", memory="4MiB", check=False)
    llm.tokenizer.chat_template = RANGE
    with pytest.raises(InputError, match="rejects the prompt: the template takes more than"):
        llm.chat([{"role": "user", "content": "a"}], SamplingParams(max_tokens=1))


@pytest.mark.parametrize("name", ["messages", "tokenizer"])
def test_arguments_that_are_not_the_templates_are_refused(tokenizer: Any, name: str) -> None:
    tokenizer.chat_template = "{{ messages }}{{ tokenizer }}"
    node = Node([{"role": "user", "content": "a"}], template={name: 1})
    with pytest.raises(InputError, match="rejects the prompt"):
        tokenize(node, tokenizer)


def test_a_fork_renders_by_a_process_of_its_own() -> None:
    code = (
        "import os\n"
        "from treegen.common.bounded import templates as t\n"
        "assert t.render_rubric('{{ a }}', {'a': '1'}) == '1'\n"
        "mine, pid = t._RUBRICS._process.pid, os.fork()\n"
        "assert t.render_rubric('{{ a }}', {'a': str(pid)}) == str(pid)\n"
        "assert (t._RUBRICS._process.pid == mine) == bool(pid)\n"
        "if pid:\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n"
        "    assert t.render_rubric('{{ a }}', {'a': '2'}) == '2'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr


MALFORMED: dict[str, Any] = {
    "no mapping": 5,
    "nothing": None,
    "a list": [1],
    "criteria": {"criteria": 5},
    "a criterion": {"criteria": [{"text": 5}]},
    "a weight": {"criteria": [{"text": "a", "weight": "x"}]},
    "a number": {"choices": {"yes": 10**400, "no": 0}},
    "a long number": {"choices": {"yes": 10**5000, "no": 0}},
    "endless": {"choices": {"yes": float("inf"), "no": 0}},
    "lists as choices": {"choices": [["a"], ["b"]]},
    "a long choice": {"choices": {10**5000: 1, "no": 0}},
    "a long name": {"name": 10**5000},
    "a long reader": {"reader": 10**5000},
    "a mapping of wordings": {"wordings": {"a": 1}},
    "numbers": {"wordings": [1]},
    "bytes": {"wordings": b"{{ answer }}"},
    "a key": {("a", 1): 2},
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_rubrics_are_refused_in_one_line(kind: str) -> None:
    given = MALFORMED[kind]
    if isinstance(given, dict):
        given = {"choices": {"yes": 1, "no": 0}, "wordings": ["{{ answer }}"], **given}
    with pytest.raises(InputError) as caught:
        load_rubric(given) if isinstance(given, dict) else templates_of(given)
    assert "\n" not in str(caught.value)


def templates_of(given: Any) -> None:
    from treegen.evals.judging.rubric import of_json

    of_json(given, "x")


YAML = [
    "choices: {a: 2001-13-45, b: 1}",
    "a: !!int ''",
    "a: !!bool x",
    "[" * 2000,
    "{a: " * 2000,
    "&a [*a]",
    "choices: &a {x: *a, y: 1}\nwordings: ['{{ answer }}']",
    "a: !!float x",
    "!!python/object/apply:os.system ['true']",
    "",
    "5",
    f"a: {'9' * 5000}",
    "a:\tb: c",
    "a: \0",
    "? [a]\n: 1",
    "a: 0001-01-01T00:00:00+99:99",
    "<<: 5",
    "!!omap 5",
    "a: !!timestamp x",
]


@pytest.mark.parametrize("text", YAML)
def test_malformed_yaml_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_rubric(file)
    assert "\n" not in str(caught.value)
