# ruff: noqa: RUF001  (some marks are written with wide bars)
"""Tool calls as the chat templates of models write them, and calls made at random."""

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from tool_schemas import tool

Call = tuple[str, dict[str, Any]]
WORDS = (
    "Paris",
    "line one\nline two",
    '{"a": 1}',
    "a < b && c > d",
    'it\'s "quoted"',
    "naïve 東京 🙂",
    "def f(x):\n    return x\n",
    "  spaces  ",
    "",
    "12",
    "true",
    "null",
    "C:\\dir\\n",
    "[1, 2]",
    "a, b; c",
    "x = {y}",
    "100%",
    "<b>bold</b>",
    "\ttab",
)
_PROPERTIES = {
    "text": {"type": "string"},
    "where": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "exact": {"type": "boolean"},
    "items": {"type": "array", "items": {}},
    "options": {"type": "object"},
}
TOOLS = [tool(name, _PROPERTIES) for name in ("search", "get_weather", "files-write", "add2")]


def random_call(rng: Random, *, names: Sequence[str] = ("search", "get_weather", "add2")) -> Call:
    """A call of one of `TOOLS`, with arguments of the types that it declares."""

    def value(depth: int) -> Any:
        kinds: list[Callable[[], Any]] = [
            lambda: rng.choice(WORDS),
            lambda: rng.randint(-(10**9), 10**9),
            lambda: rng.choice([0.5, -2.25, 1e-3]),
            lambda: rng.random() < 0.5,
            lambda: None,
            lambda: [value(depth + 1) for _ in range(rng.randrange(3))],
            lambda: {f"k{i}": value(depth + 1) for i in range(rng.randrange(3))},
        ]
        return rng.choice(kinds[: 5 if depth > 1 else 7])()

    known: dict[str, Callable[[], Any]] = {
        "text": lambda: rng.choice(WORDS),
        "where": lambda: rng.choice(WORDS),
        "count": lambda: rng.randint(-99, 10**6),
        "ratio": lambda: rng.choice([0.5, -2.25, 1e-3]),
        "exact": lambda: rng.random() < 0.5,
        "items": lambda: [value(1) for _ in range(rng.randrange(4))],
        "options": lambda: {f"k{i}": value(1) for i in range(rng.randrange(4))},
    }
    chosen = rng.sample(list(known), rng.randrange(len(known)))
    return rng.choice(names), {name: known[name]() for name in chosen}


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> str:
    """An argument as templates write it between tags: text as it is, the rest as JSON."""
    return value if isinstance(value, str) else _dumped(value)


def _objects(calls: Sequence[Call], names: str = "name", arguments: str = "arguments") -> list[str]:
    return [_dumped({names: name, arguments: given}) for name, given in calls]


def _hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in _objects(calls))


def _qwen(calls: Sequence[Call], outer: str = "tool_call") -> str:
    def one(name: str, given: dict[str, Any]) -> str:
        inner = "".join(f"<parameter={k}>\n{_plain(v)}\n</parameter>\n" for k, v in given.items())
        return f"<{outer}>\n<function={name}>\n{inner}</function>\n</{outer}>"

    return "\n".join(one(*call) for call in calls)


def _glm(calls: Sequence[Call], line: str = "\n") -> str:
    def one(name: str, given: dict[str, Any]) -> str:
        inner = "".join(
            f"<arg_key>{k}</arg_key>{line}<arg_value>{_plain(v)}</arg_value>{line}"
            for k, v in given.items()
        )
        return f"<tool_call>{name}{line}{inner}</tool_call>"

    return line.join(one(*call) for call in calls)


def _hy(calls: Sequence[Call], suffix: str = "", sep: str = "<tool_sep>", line: str = "\n") -> str:
    def one(name: str, given: dict[str, Any]) -> str:
        inner = "".join(
            f"<arg_key{suffix}>{k}</arg_key{suffix}>{line}"
            f"<arg_value{suffix}>{_plain(v)}</arg_value{suffix}>{line}"
            for k, v in given.items()
        )
        return f"<tool_call{suffix}>{name}{sep}{line}{inner}</tool_call{suffix}>{line}"

    return f"<tool_calls{suffix}>{line}{''.join(one(*c) for c in calls)}</tool_calls{suffix}>"


def _minimax(calls: Sequence[Call]) -> str:
    def one(name: str, given: dict[str, Any]) -> str:
        inner = "".join(
            f'<parameter name="{k}">{_plain(v)}</parameter>\n' for k, v in given.items()
        )
        return f'<invoke name="{name}">\n{inner}</invoke>\n'

    return f"<minimax:tool_call>\n{''.join(one(*call) for call in calls)}</minimax:tool_call>"


def _dsml(calls: Sequence[Call], wrapper: str = "function_calls") -> str:
    def one(name: str, given: dict[str, Any]) -> str:
        inner = "".join(
            f'<｜DSML｜parameter name="{k}" string="{_dumped(isinstance(v, str))}">{_plain(v)}'
            "</｜DSML｜parameter>\n"
            for k, v in given.items()
        )
        return f'<｜DSML｜invoke name="{name}">\n{inner}</｜DSML｜invoke>\n'

    inner = "".join(one(*call) for call in calls)
    return f"<｜DSML｜{wrapper}>\n{inner}</｜DSML｜{wrapper}>"


def _deepseek(calls: Sequence[Call], old: bool = False) -> str:
    def one(name: str, given: dict[str, Any]) -> str:
        said = f"{name}<｜tool▁sep｜>{_dumped(given)}"
        if old:
            said = f"function<｜tool▁sep｜>{name}\n```json\n{_dumped(given)}\n```"
        return f"<｜tool▁call▁begin｜>{said}<｜tool▁call▁end｜>"

    inner = ("\n" if old else "").join(one(*call) for call in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def _kimi(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{_dumped(given)}"
        "<|tool_call_end|>"
        for i, (name, given) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def _mistral(calls: Sequence[Call], is_list: bool = False) -> str:
    if is_list:
        return f"[TOOL_CALLS] [{', '.join(_objects(calls))}]"
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_dumped(given)}" for name, given in calls)


def _gemma_value(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_gemma_value(v, quote)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma_value(v, quote) for v in value) + "]"
    return _dumped(value)


def _gemma(calls: Sequence[Call], quote: str, begin: str, end: str) -> str:
    return "".join(f"{begin}call:{name}{_gemma_value(given, quote)}{end}" for name, given in calls)


def _python(calls: Sequence[Call], between: str = ", ") -> str:
    return between.join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"
        for name, given in calls
    )


def _harmony(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_dumped(given)}"
        "<|call|>"
        for name, given in calls
    )


# By the name of the format and a variant of it; each makes the text of calls.
WRITERS: dict[str, Callable[[Sequence[Call]], str]] = {
    "hermes": _hermes,
    "hermes, bare": lambda calls: _objects(calls)[0],
    "qwen3_coder": _qwen,
    "seed_oss": lambda calls: _qwen(calls, "seed:tool_call"),
    "glm": _glm,
    "glm, 4.7": lambda calls: _glm(calls, ""),
    "hy": _hy,
    "hy, 4": lambda calls: _hy(calls, ":opensource", "", ""),
    "harmony": _harmony,
    "minimax_m2": _minimax,
    "minimax_m1": lambda calls: "<tool_calls>\n" + "\n".join(_objects(calls)) + "\n</tool_calls>",
    "deepseek_dsml": _dsml,
    "deepseek_dsml, V4": lambda calls: _dsml(calls, "tool_calls"),
    "deepseek": _deepseek,
    "deepseek, V3": lambda calls: _deepseek(calls, old=True),
    "kimi_k2": _kimi,
    "mistral": _mistral,
    "mistral, list": lambda calls: _mistral(calls, is_list=True),
    "command_r": lambda calls: (
        f"<|START_ACTION|>[\n{','.join(_objects(calls, 'tool_name', 'parameters'))}\n]"
        "<|END_ACTION|>"
    ),
    "command_r, 1": lambda calls: (
        f"Action: ```json\n[\n{','.join(_objects(calls, 'tool_name', 'parameters'))}\n]\n```"
    ),
    "gemma": lambda calls: _gemma(calls, '<|"|>', "<|tool_call>", "<tool_call|>"),
    "gemma, function": lambda calls: _gemma(
        calls, "<escape>", "<start_function_call>", "<end_function_call>"
    ),
    "lfm2": lambda calls: f"<|tool_call_start|>[{_python(calls)}]<|tool_call_end|>",
    "olmo3": lambda calls: f"<function_calls>\n{_python(calls, chr(10))}\n</function_calls>",
    "nemotron": lambda calls: f"<TOOLCALL>[{', '.join(_objects(calls))}]</TOOLCALL>",
    "hunyuan": lambda calls: f"<tool_calls>[{', '.join(_objects(calls))}]</tool_calls>",
    "granite": lambda calls: f"<|tool_call|>[{', '.join(_objects(calls))}]",
    "llama": lambda calls: "<|python_tag|>" + "; ".join(_objects(calls, arguments="parameters")),
    "llama, bare": lambda calls: "; ".join(_objects(calls, arguments="parameters")),
    "llama, python": lambda calls: f"<|python_start|>[{_python(calls)}]<|python_end|>",
    "pythonic": lambda calls: f"[{_python(calls)}]",
}
WHOLE = ("hermes, bare", "llama, bare", "pythonic")
"""Writers whose calls are the whole text."""
ONE = ("hermes, bare",)
"""Writers of a single call."""
