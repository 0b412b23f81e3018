"""Tasks that a model solves by tool calls in an environment, and the table of environments.

Environments of files and commands are on this machine, and in sandboxes of Inspect and E2B:

    treegen search repair --environment inspect:docker --allow-code-execution
"""

import hashlib
import shutil
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from treegen.errors import InputError, arg, require_extra
from treegen.evals.problem import Problem
from treegen.evals.scoring.code_execution import ExecutionOptions
from treegen.evals.search.agent_task import EnvironmentOptions, check_execution
from treegen.search.environments.file_tools import Files
from treegen.search.environments.protocol import Environment

_DOCKER_SECONDS: Final = 20

_Open = Callable[[str, ExecutionOptions, dict[str, Any]], Environment]


def open_backend(
    task: str, options: EnvironmentOptions, files: Callable[[Problem], Files], **more: Any
) -> Environment:
    """Return the environment that the options name.

    Args:
        task: Name of the task, for messages.
        options: What the environment may use. What follows the colon in its name is a provider of
            Inspect (default: docker) or a template of E2B (default: base).
        files: Returns the first files of a problem.
        more: Further arguments of the environment's class.

    Raises:
        InputError: The environment needs a permission, a package, a program or a key.
    """
    execution = check_execution(task, options)
    _, colon, name = options.name.partition(":")
    if colon and (options.backend == "local" or not name):
        raise InputError(
            f"{arg('environment', options.name)} must be {options.backend}, inspect:NAME or "
            "e2b:TEMPLATE"
        )
    more |= {"allow_code_execution": True, "files": files}
    if options.backend != "e2b":
        more["folder"] = options.folder
    elif options.folder is not None:  # sandboxes get a label that does not show the path
        more["run_name"] = hashlib.sha256(str(options.folder.absolute()).encode()).hexdigest()[:16]
    return BACKENDS[options.backend](name, execution, more)


def _open_local(_: str, execution: ExecutionOptions, more: dict[str, Any]) -> Environment:
    from treegen.tasks.environments.local import LocalEnvironment

    return LocalEnvironment(sandbox=execution.sandbox, num_workers=execution.num_workers, **more)


def _open_inspect(
    provider_name: str, execution: ExecutionOptions, more: dict[str, Any]
) -> Environment:
    provider = provider_name or "docker"
    if provider == "local" and execution.sandbox != "none":
        raise InputError(
            "inspect:local has no isolation, so commands from the model run as your user; use "
            f"another environment, or pass {arg('sandbox', 'none')}"
        )
    if provider == "docker":
        _check_docker()
    with require_extra("Inspect's sandboxes need inspect_ai", "inspect"):
        from treegen.integrations.inspect_ai.environment import InspectEnvironment

    return InspectEnvironment(provider, **more)


def _check_docker() -> None:
    """Raise InputError unless docker is installed and its daemon runs."""
    docker = shutil.which("docker")
    why, remedy = "is not installed", "install Docker"
    if docker is not None:
        why, remedy = f"did not respond within {_DOCKER_SECONDS} s", "start Docker"
        with suppress(subprocess.TimeoutExpired):
            result = subprocess.run(
                [docker, "info"],
                capture_output=True,
                text=True,
                check=False,
                timeout=_DOCKER_SECONDS,
            )
            if not result.returncode:
                return
            why = f"does not run ({result.stderr.strip()[-200:]})"
    raise InputError(f"docker {why}; {remedy}, or use another {arg('environment=')}")


def _open_e2b(template: str, _: ExecutionOptions, more: dict[str, Any]) -> Environment:
    from treegen.integrations.e2b import E2BEnvironment

    return E2BEnvironment(template or "base", **more)


BACKENDS: Final[Mapping[str, _Open]] = {
    "local": _open_local,
    "inspect": _open_inspect,
    "e2b": _open_e2b,
}
