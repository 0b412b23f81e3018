"""Help in groups: the options that matter first, and all of them with --help-all."""

from typing import Any, Final

import click

from treegen.cli.options import config

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
    ("Of single methods", False, "prune_below exploration iterations rollouts"),
    ("Model", True, "model adapter images dtype quantization device"),
    (
        "Server",
        True,
        "tool_format host port api_key api_keys served_model_name max_waiting max_body "
        "max_image_pixels drain_seconds",
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
        "apply_chat_template chat_template fewshot_as_multiturn system_instruction "
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
        "Code of others",
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
_OF_OTHERS: Final = (
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
        self.params += [*(config.options() if file else ()), _help_all()]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options, including those of a file."""
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if any(param.name == "task_args" for param in self.params):
                _check_tasks(error)
            raise
        if self._file:
            config.finish(ctx)
        return rest

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
        left = {param.name: param for param in self.get_params(ctx)}
        hidden = 0
        for title, first, names in _GROUPS:
            params = [left.pop(name) for name in names.split() if name in left]
            rows = [row for param in params if (row := _row(param, ctx, everything))]
            if rows and (first or everything):
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=34)
            elif rows:
                hidden += len(rows)
        if rest := [row for param in left.values() if (row := _row(param, ctx, everything))]:
            with formatter.section("Other options"):
                formatter.write_dl(rest, col_max=34)
        if hidden:
            formatter.write_paragraph()
            formatter.write_text(f"{ctx.command_path} --help-all shows {hidden} more options.")


def _check_tasks(error: click.NoSuchOption) -> None:
    """Raise UsageError if an unknown option is an argument of some tasks, which belongs to -T."""
    from treegen.tasks import get_task, list_tasks

    name = error.option_name.lstrip("-").replace("-", "_")
    names = [info.name for info in list_tasks() if info.source == "treegen"]
    if tasks := [task for task in names if name in get_task(task).arguments]:
        raise click.UsageError(
            f"there is no option {error.option_name}; give the task {' or '.join(tasks)} "
            f"-T {name}=VALUE",
            error.ctx,
        ) from None


def _row(param: click.Parameter, ctx: click.Context, everything: bool) -> tuple[str, str] | None:
    row = param.get_help_record(ctx)
    if row is None or not isinstance(param, click.Option):
        return None
    names, text = row
    for other in () if everything else _OF_OTHERS:
        names = names.replace(f", {other}", "")
    return names, text


def _help_all() -> click.Option:
    def show(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted and not ctx.resilient_parsing:
            ctx.meta[_ALL] = True
            click.echo(ctx.get_help())
            ctx.exit()

    return click.Option(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show this message with all options.",
    )
