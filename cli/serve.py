"""`treegen serve`: a server that speaks OpenAI's protocol."""

import time
from collections.abc import Callable
from dataclasses import asdict, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import click

from treegen.cli.options.choices import make_engine
from treegen.cli.options.command import GroupedCommand
from treegen.cli.options.options import add_option_groups, option, verifier_options
from treegen.common.formatting import safe_text
from treegen.errors import InputError, arg, install

_NEEDED: Final = ("prometheus_client", "starlette", "uvicorn")
_LOCAL: Final = ("127.0.0.1", "::1", "localhost")


@click.command(
    "serve", cls=GroupedCommand, examples=("treegen serve --model Qwen/Qwen3-0.6B --memory 8GiB",)
)
@add_option_groups("model")
@option("--host", "Address to listen on.", default="127.0.0.1")
@option(
    "--port",
    "Port to listen on; 0 takes a free port.",
    type=click.IntRange(0, 65535),
    default=8000,
)
@option(
    "--api-key KEY",
    "Key that clients must send; required if other machines can reach --host.",
    envvar="TREEGEN_API_KEY",
    show_envvar=True,
)
@option(
    "--api-keys FILE",
    "File with one key per line. Clients see only the nodes created with their own key.",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@option(
    "--served-model-name NAME",
    "Name of the model for clients. Default: the last part of --model.",
)
@option(
    "--max-waiting N",
    "Maximum waiting samples; above it, requests get status 429. Default: four times --max-rows.",
    type=int,
)
@option(
    "--tool-format NAME",
    "Format of the model's tool calls, such as hermes or qwen3_coder. Default: derived from its "
    "chat template.",
)
@option("--max-body SIZE", "Maximum size of a request.", default="16MiB")
@option(
    "--max-image-pixels N",
    "Maximum total pixels of the images of a request.",
    type=int,
    default=2**25,
)
@option(
    "--node-lease SECONDS",
    "Seconds without use after which the server drops a node tree. Default: 600.",
    type=float,
)
@option(
    "--max-node-lease SECONDS",
    "Longest lease that clients may request. Default: 3600.",
    type=float,
)
@option("--max-nodes N", "Maximum nodes per key; 0 disables nodes. Default: 4096.", type=int)
@option("--max-node-depth N", "Maximum ancestors of a node. Default: 256.", type=int)
@option("--max-node-samples N", "Maximum children per sample operation. Default: 128.", type=int)
@option("--max-node-operations N", "Maximum operations per batch. Default: 256.", type=int)
@option(
    "--max-node-memory SIZE",
    "Maximum KV cache size of the nodes of one API key. Default: the size of the cache.",
)
@option(
    "--max-stored-answers SIZE",
    "Maximum size of responses stored for idempotency keys. Default: 64MiB.",
)
@option("--max-searches N", "Maximum searches at once; 0 disables searches. Default: 16.", type=int)
@option(
    "--max-key-searches N",
    "Maximum searches of one key at once. Default: --max-searches.",
    type=int,
)
@option(
    "--max-search-tokens N",
    "Maximum decoded tokens per search, with or without a budget. Default: 16384.",
    type=int,
)
@option(
    "--max-search-seconds",
    "Maximum seconds per search, with or without a budget. Default: 600.",
    type=float,
)
@verifier_options("Reward model or verifier that scores search states and nodes.")
@option(
    "--weights-dir DIR",
    "Folder of checkpoints that clients with a key may load with POST /v1/weights.",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
@option(
    "--sampling",
    "Source of sampling parameters that requests omit: the checkpoint's "
    "generation_config.json, or neutral values (temperature 1 and no filters).",
    type=click.Choice(["recommended", "neutral"]),
    default="recommended",
)
@option(
    "--drain-seconds",
    "Seconds after SIGTERM to finish open requests.",
    type=click.IntRange(0),
    default=60,
)
def command(
    host: str,
    port: int,
    api_key: str | None,
    served_model_name: str | None,
    max_waiting: int | None,
    tool_format: str | None,
    max_body: str,
    max_image_pixels: int,
    sampling: str,
    drain_seconds: int,
    **params: Any,
) -> None:
    """Serve a model to OpenAI clients, until SIGTERM or Ctrl-C.

    The server computes and stores shared parts of prompts once, in whatever order requests arrive.

    \f
    Args:
        host: Address to listen on.
        port: Port to listen on.
        api_key: Key that clients must send.
        served_model_name: Name of the model for clients.
        max_waiting: Maximum waiting samples.
        tool_format: Format of the model's tool calls, such as hermes or qwen3_coder.
        max_body: Maximum size of a request.
        max_image_pixels: Maximum total pixels of the images of a request.
        sampling: Sampling parameters that requests omit: from the checkpoint's
            generation_config.json, or temperature 1 without filters.
        drain_seconds: Seconds after SIGTERM to finish open requests.
        **params: Options of the model, of nodes, searches, the verifier and keys.
    """
    _check_installed()
    from treegen.common.formatting import parse_bytes
    from treegen.integrations.server.limits import NodeLimits, SearchLimits
    from treegen.integrations.server.sockets import bind_socket

    nodes: NodeLimits = _take_limits(params, NodeLimits, "max_node_memory", "max_stored_answers")
    weights_dir: Path | None = params.pop("weights_dir")
    keys = _collect_keys(params.pop("api_keys"), api_key, host, weights_dir)
    search_limits: SearchLimits = _take_limits(params, SearchLimits)
    load_verifier = _verifier_loader(params)
    engine = make_engine(params)
    _check_limits(max_waiting, max_image_pixels, tool_format)
    body_bytes = parse_bytes(max_body, "max_body")
    name = served_model_name or Path(engine.model).name or engine.model
    with bind_socket(host, port) as listener:
        from treegen.integrations.server.run import serve
        from treegen.llm import LLM
        from treegen.tasks.chat import ChatSearches

        begin = time.monotonic()
        click.echo(safe_text(f"loading {engine.model}"), err=True)
        # First, because the model that samples takes all the remaining memory.
        verifier = load_verifier()
        llm = LLM(**asdict(engine))
        click.echo(f"loaded in {time.monotonic() - begin:.0f} s", err=True)
        serve(
            llm,
            listener,
            name=name,
            api_key=keys or None,
            max_waiting=max_waiting,
            max_body=body_bytes,
            max_image_pixels=max_image_pixels,
            drain_seconds=drain_seconds,
            tool_format=tool_format,
            recommended=sampling == "recommended",
            nodes=nodes,
            verifier=verifier,
            searches=ChatSearches(verifier) if search_limits.max_searches else None,
            search_limits=search_limits,
            weights_dir=weights_dir,
            on_start=lambda url: click.echo(f"{name} is served at {url}/v1", err=True),
            on_stop=lambda num_requests: _report_stop(num_requests, drain_seconds),
        )
        click.echo("stopped", err=True)


def _report_stop(num_requests: int, drain_seconds: int) -> None:
    """Print how many requests are in progress, and how long they may take."""
    if not num_requests:
        click.echo("stopping: no requests in progress", err=True)
        return
    requests, them = ("request", "it") if num_requests == 1 else ("requests", "them")
    click.echo(
        f"stopping: {num_requests:,} {requests} in progress, up to {drain_seconds:,} s; press "
        f"Ctrl-C again to end {them}",
        err=True,
    )


def _check_installed() -> None:
    if missing := [name for name in _NEEDED if not find_spec(name)]:
        raise InputError(
            f"`treegen serve` needs {', '.join(missing)}; install it with: {install('serve')}"
        )


def _collect_keys(
    file: Path | None, key: str | None, host: str, weights_dir: Path | None
) -> list[str]:
    """Return all API keys.

    Args:
        file: The file of keys, or None.
        key: A further key, or None.
        host: Address to listen on.
        weights_dir: Folder of new weights, or None.

    Raises:
        InputError: there are none and the server needs one, or the file cannot be used.
    """
    keys = [*_read_keys(file), *([key] if key else [])]
    if not keys:
        _check_needs_no_key(host, weights_dir)
    return keys


def _check_needs_no_key(host: str, weights_dir: Path | None) -> None:
    if host not in _LOCAL:
        raise InputError(
            f"a server at {host} needs an API key, because other machines can reach the server; "
            "pass --api-key, or set TREEGEN_API_KEY"
        )
    if weights_dir is not None:
        raise InputError(f"{arg('weights_dir=')} needs an API key; set {arg('api_key=')} too")


def _check_limits(max_waiting: int | None, max_image_pixels: int, tool_format: str | None) -> None:
    from treegen.common.checks import check_int
    from treegen.prompts.replies import formats

    if max_waiting is not None:
        check_int("max_waiting", max_waiting, minimum=1)
    check_int("max_image_pixels", max_image_pixels, minimum=1)
    if tool_format is not None:
        formats.tool_format(tool_format)


def _take_limits(params: dict[str, Any], kind: type[Any], *sizes: str) -> Any:
    """Take the options that are fields of a class out of all options; return the object.

    Args:
        params: All options.
        kind: The class of the limits.
        sizes: Names of the options that are sizes, such as 64MiB.
    """
    from treegen.common.formatting import parse_bytes

    limits = {field.name: params.pop(field.name) for field in fields(kind)}
    chosen = {name: value for name, value in limits.items() if value is not None}
    return kind(
        **{n: parse_bytes(value, n) if n in sizes else value for n, value in chosen.items()}
    )


def _verifier_loader(params: dict[str, Any]) -> Callable[[], Any]:
    """Take the options about the verifier out of all options; return a function that loads it."""
    from treegen.common.formatting import parse_bytes
    from treegen.evals.arguments import parse_verifier_settings, read_arguments

    name, memory = params.pop("verifier"), params.pop("verifier_memory")
    settings = parse_verifier_settings(read_arguments(params.pop("verifier_args"), "verifier"))
    if name is None:
        if settings or memory is not None:
            raise InputError(
                f"{arg('verifier_args=')} and {arg('verifier_memory=')} have no effect without "
                f"{arg('verifier=')}; set {arg('verifier=')} too"
            )
        return lambda: None
    if memory is not None:
        settings["memory"] = parse_bytes(memory, "verifier_memory")

    def load() -> Any:
        from treegen.search.reward import load_verifier

        return load_verifier(name, **settings)

    return load


def _read_keys(path: Path | None) -> list[str]:
    """Return the keys in a file, one per line."""
    from treegen.common.files import read_text

    if path is None:
        return []
    try:
        keys = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} cannot be read: {error}; pass a text file with one key per line"
        ) from error
    if not keys or len(set(keys)) < len(keys):
        raise InputError(
            f"the file {path} contains {'a key twice' if keys else 'no keys'}; write one "
            "key per line"
        )
    return keys
