"""`treegen certify`: write a certificate of how scores were computed, or check one."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treegen.cli.options.choices import collect_choices, make_execution
from treegen.cli.options.options import PATH, QUIET, add_option_groups, option
from treegen.errors import InputError

if TYPE_CHECKING:
    from treegen.evals.scoring.code_execution import ExecutionOptions


@click.command("certify")
@click.argument("run", type=PATH, required=False)
@option("--output-path -o FILE", "Certificate file. Default: certificate.json in RUN.", type=PATH)
@option(
    "--sign KEY", "Sign the certificate with this SSH key; ssh-keygen writes FILE.sig.", type=PATH
)
@option("--check FILE", "Check this certificate. RUN defaults to the folder of FILE.", type=PATH)
@option(
    "--signer FILE",
    "Require a signature by a public SSH key in this file, which may be an allowed-signers file.",
    type=PATH,
)
@option("--redraw N", "Draw N random samples again; needs --model.", type=click.IntRange(min=1))
@option("--redraw-seed N", "Seed that chooses the samples of --redraw. Default: random.", type=int)
@option(
    "--tolerance X",
    "Allowed difference of a token's log-probability. Default: 0.001 for float32, else 0.1.",
    type=float,
)
@option(
    "--model -M DIR|NAME",
    "Where the model is now. Default: where the run found it; with --check, no model is checked.",
)
@option("--adapter DIR|NAME", "Where the adapter is now, if it has moved.", multiple=True)
@option("--device NAME", "auto, cpu, cuda or cuda:N.")
@add_option_groups("reading", "execution", "trust")
@QUIET
def command(
    run: Path | None,
    output_path: Path | None,
    sign: Path | None,
    check: Path | None,
    signer: Path | None,
    redraw: int | None,
    redraw_seed: int | None,
    tolerance: float | None,
    **params: Any,
) -> None:
    """Write a certificate of how the scores of the directory RUN were computed, or check one.

    A certificate has hashes of the weights, tokenizer, prompts, data and samples, the settings and
    versions, the scores and the findings of the audit. --check computes all of them again from RUN
    and exits with code 1 if one differs.

    \f
    Args:
        run: The run directory.
        output_path: Certificate file.
        sign: SSH key that signs the certificate.
        check: Certificate to check.
        signer: Public SSH key, or file of allowed signers, whose signature is required.
        redraw: Number of random samples to draw again.
        redraw_seed: Seed that chooses these samples.
        tolerance: Allowed difference of a token's log-probability.
        **params: Places of the model, and options of reading and execution.
    """
    from treegen.cli.terminal.progress import Terminal
    from treegen.cli.terminal.render import echo, json_line

    rescore = check is not None and params["allow_code_execution"]
    choices, execution = collect_choices(params), make_execution(params, rescore=rescore)
    writing = {"--sign": sign, "--output-path": output_path}
    checking = {
        "--signer": signer,
        "--redraw": redraw,
        "--redraw-seed": redraw_seed,
        "--tolerance": tolerance,
    }
    _reject_unused_options(checking if check is None else writing, is_checking=check is not None)
    if check is None:
        _write(run, choices, output_path, sign, execution)
        return
    from treegen.report.certify.check import check_certificate

    if redraw is None and (redraw_seed is not None or tolerance is not None):
        raise InputError(
            "--redraw-seed and --tolerance have no effect without --redraw; pass --redraw N too"
        )
    result = check_certificate(
        check,
        run,
        choices,
        Terminal(),
        execution=execution,
        signer=signer,
        redraw=redraw or 0,
        redraw_seed=redraw_seed,
        tolerance=tolerance,
    )
    echo(str(result))
    json_line(result.to_json())
    if not result.holds:
        raise click.exceptions.Exit(1)


def _reject_unused_options(values: Mapping[str, object], *, is_checking: bool) -> None:
    """Raise InputError if an option of checking is passed to write a certificate, or vice versa.

    Args:
        values: The values of the options without effect, by flag; None for one not passed.
        is_checking: Whether a certificate is checked.
    """
    for name, value in values.items():
        if value is not None:
            why = "cannot be used with --check" if is_checking else "needs --check FILE"
            raise InputError(f"{name} {why}; remove {name}")


def _write(
    run: Path | None,
    choices: dict[str, Any],
    output_path: Path | None,
    sign: Path | None,
    execution: "ExecutionOptions | None",
) -> None:
    """Write a certificate.

    Args:
        run: The run directory.
        choices: Where the model is, and options of reading.
        output_path: Certificate file; None for the usual one.
        sign: SSH key that signs it; None for no signature.
        execution: Permission to run programs that a model wrote; None without it.
    """
    from treegen.cli.terminal.progress import Terminal
    from treegen.cli.terminal.render import echo, json_line
    from treegen.common.formatting import safe_text
    from treegen.report.certify.build import write_certificate

    if run is None:
        raise InputError(
            "RUN is missing; pass the directory of the run to certify, or pass a "
            "certificate with --check"
        )
    file, certificate = write_certificate(
        run, choices, Terminal(), path=output_path, key=sign, execution=execution
    )
    signed = "" if sign is None else f"\nsignature: {file}.sig"
    echo(safe_text(f"certificate: {file}\nsha256: {certificate.sha256}{signed}"))
    json_line({"certificate": str(file), "sha256": certificate.sha256})
