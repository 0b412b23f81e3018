"""Commands: help in groups of options, and options from a YAML file.

Help shows the options that matter first, and all of them with --help-all. A file (`--config
run.yaml`, written by `--print-config`) has the names of options without the leading dashes, with
hyphens or underscores. Typed options override the file.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import click
from click.core import ParameterSource

from treegen.common.files import describe_read_error, read_text
from treegen.common.foreign_names import advise_foreign
from treegen.common.spelling import did_you_mean
from treegen.common.yaml_texts import MAX_YAML_BYTES, parse_yaml
from treegen.errors import InputError, arg

# The user must type these permissions, because a file may come from somebody else.
_PERMISSIONS: Final = ("allow_code_execution", "allow_task_code", "trust_remote_code")
_NOT_STORED: Final = ("config", "print_config", "quiet", *_PERMISSIONS)
# The argument for tasks, and the option that adds more tasks.
_TASKS: Final = ("names", "more_names")


def _config_options() -> list[click.Option]:
    """Return the two options that a command takes."""
    return [
        click.Option(
            ["--config"],
            metavar="FILE",
            is_eager=True,
            expose_value=False,
            callback=_read,
            help="YAML file of options, such as `limit: 4`; the command line overrides it.",
        ),
        click.Option(
            ["--print-config"],
            is_flag=True,
            help="Print the options of this command as a --config file, and exit.",
        ),
    ]


def _finish_config(ctx: click.Context) -> None:
    """Let typed tasks override those of the file, and print the options if requested."""
    first, more = _TASKS
    if ctx.params.get(first) and ctx.get_parameter_source(more) is ParameterSource.DEFAULT_MAP:
        ctx.params[more] = ()
    if ctx.params.pop("print_config", False):
        import yaml

        click.echo(
            yaml.safe_dump(_collect_set_options(ctx), sort_keys=False, allow_unicode=True), nl=False
        )
        ctx.exit()


def _collect_set_options(ctx: click.Context) -> dict[str, Any]:
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
            flag_value = getattr(param, "flag_value", None)  # for example of --no-score
            options[key] = True if value == flag_value else _tuples_to_lists(value)
    return options


def _tuples_to_lists(value: Any) -> Any:
    return [_tuples_to_lists(item) for item in value] if isinstance(value, tuple) else value


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
            raise InputError(
                f"{path}: {word} cannot be set in a file; remove the line, and pass "
                f"--{key.replace('_', '-')} on the command line"
            )
        if key not in params:
            names = [name.replace("_", "-") for name in params]
            raise InputError(f"{path}: there is no option {word!r}{did_you_mean(str(word), names)}")
        if value is not None:
            parsed = _value(params[key], key, value, path)
            # Also if it is in a list of settings, such as model-args.
            text = str(parsed).replace("-", "_")
            if forbidden := [name for name in _PERMISSIONS if f"{name}=" in text]:
                flag = f"--{forbidden[0].replace('_', '-')}"
                raise InputError(
                    f"{path}: {forbidden[0]} cannot be set in a file; remove the setting, and "
                    f"pass {flag} on the command line"
                )
            if parsed is not None:
                yield str(params[key].name), parsed


def _mapping(path: str) -> Mapping[Any, Any]:
    try:
        mapping = parse_yaml(read_text(path, MAX_YAML_BYTES))
    except OSError as error:
        raise InputError(f"--config cannot be read: {describe_read_error(path, error)}") from None
    except ValueError as error:
        raise InputError(
            f"--config {path} is not valid YAML: {error}; run `treegen eval --print-config` for "
            "an example"
        ) from None
    if not isinstance(mapping, Mapping):
        raise InputError(f"--config {path} must contain lines such as `limit: 4`")
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
    # The value of an option whose argument may be left out, such as --resume.
    flag_value = getattr(param, "flag_value", None)
    return flag_value if value is True and isinstance(flag_value, str) else _text(value)


def _text(value: object, *, pair: bool = False) -> str:
    if isinstance(value, bool):  # YAML reads `on` and `off` as truth values
        return ("true" if value else "false") if pair else ("on" if value else "off")
    return str(value)


# For each group: its title, whether --help shows it, and its parameters. Commands share it.
_GROUPS: Final = (
    (
        "Task and data",
        True,
        "more_names include_path data split limit ids num_fewshot fewshot_file "
        "fewshot_data task_args write_out",
    ),
    ("Method", True, "method arguments compare budget width depth expand concurrency"),
    ("Judges", True, "judge rubric wordings verdicts pairs labels weights combine half_width chat"),
    ("Judging", False, "propose evaluate verifier verifier_args verifier_memory choose"),
    ("Single methods", False, "prune_below exploration iterations rollouts"),
    ("Agents", False, "environment forces_calls max_live"),
    ("Model", True, "model chat_template adapter images dtype quantization device"),
    (
        "Server",
        True,
        "tool_format host port api_key api_keys served_model_name max_waiting max_body "
        "max_image_pixels weights_dir drain_seconds",
    ),
    (
        "Nodes",
        False,
        "node_lease max_node_lease max_nodes max_node_depth max_node_samples "
        "max_node_operations max_node_memory max_stored_answers",
    ),
    ("Searches", False, "max_searches max_key_searches max_search_tokens max_search_seconds"),
    (
        "Sampling",
        True,
        "num_samples sampling_from sampling temperature top_p top_k min_p "
        "max_tokens step_tokens stop seed repeats json_schema",
    ),
    (
        "Chat and reasoning",
        False,
        "apply_chat_template fewshot_as_multiturn system_instruction "
        "reasoning max_thinking_tokens reasoning_tags thinking_end",
    ),
    ("Metrics and votes", False, "pass_ks maj_ks pass_hat_ks votes self_certainty"),
    ("Stop early", False, "stop_when stop_batch confidence"),
    (
        "Memory and speed",
        False,
        "memory max_rows kv_cache_dtype sharing reproducible eager "
        "speculate draft_model draft_tokens",
    ),
    ("Several GPUs", False, "tensor_parallel_size gpus workers ray"),
    (
        "Code execution",
        False,
        "allow_code_execution sandbox num_workers allow_task_code trust_remote_code",
    ),
    ("Lists of settings", False, "model_args gen_kwargs"),
    ("As in lm-eval", False, "samples log_samples check_integrity verbosity"),
    (
        "Output",
        True,
        "output resume config print_config score log_tokens all_filters quiet json "
        "_click_default_help help help_all",
    ),
)
# Alternative names of options; only --help-all shows them.
_HIDDEN_FLAGS: Final = (
    "--batch-size",
    "--confirm-run-unsafe-code",
    "--epochs",
    "--haystack",
    "--n-workers",
    "--num-samples",
    "--predict-only",
    "--repeats",
)
_ALL: Final = f"{__name__}.all"


class GroupedCommand(click.Command):
    """A command with many options.

    Args:
        examples: Command lines at the start of its help.
        file: Whether it takes options from a file.
    """

    def __init__(
        self, *args: Any, examples: tuple[str, ...] = (), file: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._examples, self._file = examples, file
        self.params += [*(_config_options() if file else ()), _help_all()]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options, including those of a file."""
        try:
            remaining = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if any(param.name == "task_args" for param in self.params):
                _check_tasks(error)
            raise
        if self._file:
            _finish_config(ctx)
        return remaining

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what the command does, and examples."""
        super().format_help_text(ctx, formatter)
        if self._examples:
            with formatter.section("Examples"):
                for line in self._examples:
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups of options that were requested."""
        everything = bool(ctx.meta.get(_ALL))
        unlisted = {param.name: param for param in self.get_params(ctx)}
        hidden = 0
        for title, first, names in _GROUPS:
            params = [unlisted.pop(name) for name in names.split() if name in unlisted]
            rows = [row for param in params if (row := _row(param, ctx, everything))]
            if rows and (first or everything):
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=34)
            elif rows:
                hidden += len(rows)
        if unlisted_rows := [
            row for param in unlisted.values() if (row := _row(param, ctx, everything))
        ]:
            with formatter.section("Other options"):
                formatter.write_dl(unlisted_rows, col_max=34)
        if hidden:
            formatter.write_paragraph()
            formatter.write_text(f"{ctx.command_path} --help-all shows {hidden} more options.")


def _check_tasks(error: click.NoSuchOption) -> None:
    """Raise UsageError if an unknown option is an argument of some tasks, which belongs to -T."""
    from treegen.tasks import get_task, list_tasks

    name = error.option_name.lstrip("-").replace("-", "_")
    if advise_foreign(name, ())[1]:  # rather advice on an option of another tool
        return
    names = [info.name for info in list_tasks() if info.source == "treegen"]
    if tasks := [task for task in names if name in get_task(task).arguments]:
        some = [*tasks[:3], f"{len(tasks) - 3} others"] if len(tasks) > 4 else tasks
        raise click.UsageError(
            f"there is no option {error.option_name}; pass -T {name}=VALUE to the task "
            f"{' or '.join(some)}",
            error.ctx,
        ) from None


def _row(param: click.Parameter, ctx: click.Context, everything: bool) -> tuple[str, str] | None:
    row = param.get_help_record(ctx)
    if row is None or not isinstance(param, click.Option):
        return None
    names, text = row
    for other in () if everything else _HIDDEN_FLAGS:
        names = names.replace(f", {other}", "")
    return names, text


def _help_all() -> click.Option:
    def _show(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            ctx.meta[_ALL] = True
            click.echo(ctx.get_help())
            ctx.exit()

    return click.Option(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_show,
        help="Show this message with all options.",
    )
