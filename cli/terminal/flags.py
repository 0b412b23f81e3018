"""Messages of the library with the command's flags in place of the parameters that they name."""

import shlex
from ast import literal_eval
from functools import partial
from typing import Final

import click

from treegen.cli.options.pairs import GEN_KWARGS, MODEL_ARGS
from treegen.common.foreign_names import ENGINE_ADVICE, advise_foreign, describe_value
from treegen.common.spelling import find_near
from treegen.errors import Message


def rename_arguments(message: str, command: click.Command | None) -> str:
    """Replace the parameters that a message names by flags of the command (`treegen.errors.arg`).

    Args:
        message: The message of an error or a notice.
        command: The command; None keeps the names of the parameters.
    """
    if command is None or not isinstance(message, Message):
        return str(message)
    return message.rename(partial(_rename_flag, _flags(command)))


def _rename_flag(flags: dict[str, str], reference: str) -> str:
    name, _, value = reference.partition("=")
    if name not in flags:
        of_eval = _eval_flags()
        if not of_eval.get(name, "").startswith("--"):
            return reference
        # The option of another command, such as one that decides what `treegen eval` stores.
        return f"`treegen eval {_rename_flag(of_eval, reference)}`"
    flag = flags[name]
    in_list = " " in flag  # --model-args page_size=16
    if not value or (value in ("True", "False") and not in_list):
        return flag
    plain = literal_eval(value) if value[0] in "'\"(" else value
    words = map(shlex.quote, plain if isinstance(plain, tuple) else (plain,))
    return f"{flag}{'=' if in_list else ' '}{' '.join(words)}"


_SERVE_ADVICE: Final = {
    **ENGINE_ADVICE,
    "device_ids": "start a server for each GPU, with --device cuda:N",
    "generation_config": "--sampling neutral ignores the file",
    "override_generation_config": "--sampling neutral ignores the file; requests set parameters",
    "logprobs_mode": "remove this argument: log-probabilities are those of the model",
    "enable_sleep_mode": "stop the server, and start it again later",
    "tokens_only": "remove this argument; requests with return_token_ids get the token ids",
}
"""Options of `vllm serve` that `treegen serve` does not have, with advice."""


def describe_unknown_option(error: click.NoSuchOption) -> str:
    """Return the message for an unknown option: the option that was meant, or advice."""
    message = f"No such option {error.option_name!r}"
    if error.ctx is None:
        return message
    command = error.ctx.command
    flags = _flags(command)
    word = error.option_name.lstrip("-").replace("-", "_")
    ours, advice = advise_foreign(word, flags)
    if command.name == "serve" and ours is None:
        advice = _SERVE_ADVICE.get(word, advice)
    if " " in flags.get(word, ""):  # a name within --model-args or --gen-kwargs
        ours, advice = word, ""
    if advice:
        return f"{message}; {rename_arguments(Message(advice), command)}"
    options = {
        option.lstrip("-"): option
        for param in command.get_params(error.ctx)
        for option in (*param.opts, *param.secondary_opts)
        if option.startswith("--")
    }
    near = find_near(word.replace("_", "-"), options)
    matches = [flags[ours]] if ours else [options[name] for name in near]
    if not matches:
        return message
    # --model-args page_size=VALUE
    spelled = [repr(f"{flag}=VALUE" if " " in flag else flag) for flag in matches]
    return f"{message}; did you mean {' or '.join(spelled)}?{describe_value(word)}"


def suggest_model_option(error: click.UsageError) -> str:
    """Return "; did you mean '--model NAME'?" for a model without its option, or ""."""
    start, _, argument = error.message.removesuffix(")").partition(" (")
    if error.ctx is None or start != "Got unexpected extra argument":
        return ""
    flag = _flags(error.ctx.command).get("model", "")
    return f"; did you mean '{flag} {argument}'?" if flag.startswith("--") else ""


def _eval_flags() -> dict[str, str]:
    """Return the flags of `treegen eval` if a command of `treegen` is running."""
    ctx = click.get_current_context(silent=True)
    root = None if ctx is None else ctx.find_root().command
    if ctx is None or not isinstance(root, click.Group):
        return {}
    command = root.get_command(ctx, "eval")
    return {} if command is None else _flags(command)


def _flags(command: click.Command) -> dict[str, str]:
    """Return the command's flag for each parameter of the library."""
    flags: dict[str, str] = {}
    if isinstance(command, click.Group):
        for subcommand in command.commands.values():
            flags |= _flags(subcommand)
        return flags
    for param in command.params:
        long_options = [option for option in param.opts if option.startswith("--")]
        if param.name and long_options:
            flags[param.name] = long_options[0]
        elif param.name:
            flags[param.name] = param.make_metavar(click.Context(command)).strip("[].")
    for group, names in (
        ("model_args", MODEL_ARGS),
        ("gen_kwargs", GEN_KWARGS),
        ("verifier_args", ("mark", "tokens", "label", "reduce")),
    ):
        if group in flags:
            for name in names:
                flags.setdefault(name, f"{flags[group]} {name}")
    if "names" in flags:
        flags["task"] = "TASK"
    flags.setdefault("resume", "--resume")  # of treegen eval and treegen search
    return flags
