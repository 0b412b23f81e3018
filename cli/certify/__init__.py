"""`treegen certify`: state what a number came from, and check such a statement."""

from pathlib import Path
from typing import Any

import click

from treegen.cli.options.choices import collect_choices, make_execution
from treegen.cli.options.options import PATH, QUIET, add_option_groups, option


@click.command("certify")
@click.argument("run", type=PATH, required=False)
@option("--output-path -o FILE", "The certificate. Default: certificate.json in RUN.", type=PATH)
@option("--sign KEY", "Sign with this SSH key, by ssh-keygen; writes FILE.sig.", type=PATH)
@option("--check FILE", "Check this certificate. Default of RUN: its folder.", type=PATH)
@option("--signer FILE", "Who must have signed: a public SSH key, or allowed signers.", type=PATH)
@option("--redraw N", "Draw N random samples again; needs --model.", type=click.IntRange(min=1))
@option("--redraw-seed N", "Chooses these samples. Default: a random seed.", type=int)
@option(
    "--tolerance X",
    "Difference allowed in the log-probability of a token. Default: 0.001 for float32, else 0.1.",
    type=float,
)
@option("--model -M DIR|NAME", "The model now. Default: as the run names it; with --check, none.")
@option("--adapter DIR|NAME", "The adapter now, if it was moved.", multiple=True)
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
    """State in one file how the scores of the directory RUN came about, or check such a file.

    The file has hashes of the weights, tokenizer, prompts, data and samples, the settings and
    versions, the scores and the findings of the audit. A check computes all of it again from RUN.
    The exit code is 1 if something does not hold.
    """
    from treegen.cli.terminal.progress import Terminal
    from treegen.cli.terminal.render import echo, json_line
    from treegen.common.formatting import safe_text
    from treegen.errors import InputError

    anew = check is not None and params["allow_code_execution"]
    choices, execution = collect_choices(params), make_execution(params, anew=anew)
    checking = {
        "--signer": signer,
        "--redraw": redraw,
        "--redraw-seed": redraw_seed,
        "--tolerance": tolerance,
    }
    unused = {"--sign": sign, "--output-path": output_path} if check is not None else checking
    for name, value in unused.items():
        if value is not None:
            why = "goes with a new certificate" if check is not None else "needs --check FILE"
            raise InputError(f"{name} {why}; leave it out")
    if check is None:
        from treegen.report.certify.build import write_certificate

        if run is None:
            raise InputError("name the directory RUN to certify, or a certificate with --check")
        file, certificate = write_certificate(
            run, choices, Terminal(), path=output_path, key=sign, execution=execution
        )
        signed = "" if sign is None else f"\nsignature: {file}.sig"
        echo(safe_text(f"certificate: {file}\nsha256: {certificate.sha256}{signed}"))
        json_line({"certificate": str(file), "sha256": certificate.sha256})
        return
    from treegen.report.certify.check import check_certificate

    if redraw is None and (redraw_seed is not None or tolerance is not None):
        raise InputError("--redraw-seed and --tolerance are of no use without --redraw N")
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
