"""Options from a YAML file (`--config run.yaml`), and writing such a file (`--print-config`).

A file has the names of options without the leading dashes, with hyphens or underscores. Typed
options override the file.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import click
from click.core import ParameterSource

from treegen.common.files import describe_read_error, read_text
from treegen.common.spelling import did_you_mean
from treegen.errors import InputError, arg

# The user must type these permissions, because a file may come from somebody else.
_PERMISSIONS: Final = ("allow_code_execution", "allow_task_code", "trust_remote_code")
_NOT_STORED: Final = ("config", "print_config", "quiet", *_PERMISSIONS)
# The argument for tasks, and the option that adds more tasks.
_TASKS: Final = ("names", "more_names")


def options() -> list[click.Option]:
    """Return the two options that a command takes."""
    return [
        click.Option(
            ["--config"],
            metavar="FILE",
            is_eager=True,
            expose_value=False,
            callback=_read,
            help="YAML with options by name, such as `limit: 4`; what is typed wins.",
        ),
        click.Option(
            ["--print-config"],
            is_flag=True,
            help="Print such a file with the options of this command, and do nothing else.",
        ),
    ]


def finish(ctx: click.Context) -> None:
    """Let typed tasks override those of the file, and print the options if requested."""
    first, more = _TASKS
    if ctx.params.get(first) and ctx.get_parameter_source(more) is ParameterSource.DEFAULT_MAP:
        ctx.params[more] = ()
    if ctx.params.pop("print_config", False):
        import yaml

        click.echo(
            yaml.safe_dump(_collect_given(ctx), sort_keys=False, allow_unicode=True), nl=False
        )
        ctx.exit()


def _collect_given(ctx: click.Context) -> dict[str, Any]:
    options: dict[str, Any] = {}
    tasks = [*ctx.params.get(_TASKS[0], ()), *ctx.params.get(_TASKS[1], ())]
    if tasks:
        options["tasks"] = tasks
    for param in ctx.command.params:
        name, source = str(param.name), ctx.get_parameter_source(str(param.name))
        if name in (*_TASKS, *_NOT_STORED) or source in (None, ParameterSource.DEFAULT):
            continue
        value = ctx.params.get(name)
        if value is not None:
            key = next((opt for opt in param.opts if opt.startswith("--")), name).lstrip("-")
            alone = getattr(param, "flag_value", None)  # for example of --no-score
            options[key] = True if value == alone else _plain(value)
    return options


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _read(ctx: click.Context, _: click.Parameter, path: str | None) -> None:
    if path is not None and not ctx.resilient_parsing:
        ctx.default_map = {**(ctx.default_map or {}), **dict(_values(ctx.command, path))}


def _values(command: click.Command, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the parameters in a file, in click's form."""
    params = {
        key: param
        for param in command.params
        for key in (str(param.name), *(opt.lstrip("-").replace("-", "_") for opt in param.opts))
        if len(key) > 1 and param.name not in ("config", "print_config", "help_all")
    }
    if _TASKS[1] in params:
        params["task"] = params[_TASKS[1]]
    for word, value in _mapping(path).items():
        key = str(word).replace("-", "_")
        if key in _PERMISSIONS or params.get(key, command).name in _PERMISSIONS:
            raise InputError(f"{path}: {word} has to be typed; give --{key.replace('_', '-')}")
        if key not in params:
            names = [name.replace("_", "-") for name in params]
            raise InputError(f"{path}: there is no option {word!r}{did_you_mean(str(word), names)}")
        if value is not None:
            parsed = _value(params[key], key, value, path)
            # Also if it is in a list of settings, such as model-args.
            text = str(parsed).replace("-", "_")
            if refused := [name for name in _PERMISSIONS if f"{name}=" in text]:
                raise InputError(f"{path}: {refused[0]} has to be typed; see --help-all")
            if parsed is not None:
                yield str(params[key].name), parsed


def _mapping(path: str) -> Mapping[Any, Any]:
    import yaml

    try:
        mapping = yaml.safe_load(read_text(path))
    except OSError as error:
        raise InputError(f"--config cannot be read: {describe_read_error(path, error)}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(
            f"--config {path} is not YAML: {error}; `treegen eval --print-config` shows one"
        ) from None
    if not isinstance(mapping, Mapping):
        raise InputError(f"--config {path} must have lines such as `limit: 4`")
    return mapping


def _value(param: click.Parameter, key: str, value: Any, path: str) -> Any:
    if isinstance(param, click.Option) and param.is_flag:
        if not isinstance(value, bool):
            raise InputError(
                f"{path}: {arg(str(param.name))} must be true or false, got {value!r:.60}"
            )
        if param.flag_value is True or key == param.name:
            return value
        return param.flag_value if value else None
    if param.multiple or param.nargs != 1:
        if isinstance(value, Mapping):
            return [f"{name}={_text(item, pair=True)}" for name, item in value.items()]
        return [_text(item) for item in value] if isinstance(value, list) else [_text(value)]
    if isinstance(value, Mapping):
        return ",".join(f"{name}={_text(item, pair=True)}" for name, item in value.items())
    if isinstance(value, list):
        return ",".join(map(_text, value))
    # The value of an option that needs no argument, such as --resume.
    alone = getattr(param, "flag_value", None)
    return alone if value is True and isinstance(alone, str) else _text(value)


def _text(value: object, *, pair: bool = False) -> str:
    if isinstance(value, bool):  # YAML reads `on` and `off` as truth values
        return ("true" if value else "false") if pair else ("on" if value else "off")
    return str(value)
