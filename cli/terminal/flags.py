"""Messages of the library with the command's flags in place of its argument names.

The library names arguments in one of three ways: `max_tokens=` or `max_tokens=5` anywhere in a
message, a name with an underscore, or any name at the start, before "must".
"""

import re
import shlex
from ast import literal_eval
from typing import Final

import click

from treegen.cli.options.pairs import GEN_KWARGS, MODEL_ARGS
from treegen.common.spelling import advise_foreign, find_near

_VALUE: Final = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[\w.-]+"


def rename_arguments(message: str, command: click.Command | None) -> str:
    """Return a message with argument names replaced by the command's flags."""
    flags = {} if command is None else _flags(command)
    if not flags or message.startswith("--"):  # the command's own message
        return message
    words = "|".join(sorted(flags, key=len, reverse=True))
    # Text in quotes or in a path comes from the user.
    inside = re.compile(rf"(?<![\w'\"/.=:-])({words})(?:(=)({_VALUE})?|(?![\w:]))(?!\()")

    def flag(found: re.Match[str]) -> str:
        name, equals, value = found.groups()
        leads = found.start() == 0 and message[found.end() :].startswith(" must ")
        if not (equals or leads or "_" in name):
            return found[0]
        if value in (None, "True", "False"):
            return flags[name]
        plain = literal_eval(value) if value[0] in "'\"" else value
        between = "=" if " " in flags[name] else " "  # --model-args page_size=16
        return f"{flags[name]}{between}{shlex.quote(plain)}"

    return inside.sub(flag, message)


def describe_unknown_option(error: click.NoSuchOption) -> str:
    """Return the message for an unknown option: the option that was meant, or advice."""
    message = f"No such option {error.option_name!r}"
    if error.ctx is None:
        return message
    command = error.ctx.command
    flags = _flags(command)
    word = error.option_name.lstrip("-").replace("-", "_")
    ours, advice = advise_foreign(word, flags)
    if advice:
        return f"{message}; {rename_arguments(advice, command)}"
    options = {
        option.lstrip("-"): option
        for param in command.get_params(error.ctx)
        for option in (*param.opts, *param.secondary_opts)
        if option.startswith("--")
    }
    near = find_near(word.replace("_", "-"), options)
    meant = [flags[ours]] if ours else [options[name] for name in near]
    return f"{message}; did you mean {' or '.join(map(repr, meant))}?" if meant else message


def _flags(command: click.Command) -> dict[str, str]:
    """Return the command's flag for each argument of the library."""
    if isinstance(command, click.Group):
        found: dict[str, str] = {}
        for each in command.commands.values():
            found |= _flags(each)
        return found
    flags: dict[str, str] = {}
    for param in command.params:
        longer = [each for each in param.opts if each.startswith("--")]
        if param.name and longer:
            flags[param.name] = longer[0]
        elif param.name:
            flags[param.name] = param.make_metavar(click.Context(command)).strip("[].")
    for group, names in (("model_args", MODEL_ARGS), ("gen_kwargs", GEN_KWARGS)):
        if group in flags:
            for name in names:
                flags.setdefault(name, f"{flags[group]} {name}")
    if "names" in flags:
        flags["task"] = "TASK"
    flags.setdefault("resume", "--resume")  # of treegen eval and treegen search
    return flags
