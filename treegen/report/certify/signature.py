"""Signatures of certificates, by the program ssh-keygen.

A signature is made over the bytes of the file, in the namespace "treegen", so that stock OpenSSH
checks it:

    ssh-keygen -Y verify -f ALLOWED -I NAME -n treegen -s FILE.sig < FILE
"""

import codecs
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from treegen.common.files import read_limited
from treegen.errors import InputError, arg

NAMESPACE: Final = "treegen"
_PROGRAM: Final = "ssh-keygen"
_SECONDS: Final = 60
_MAX_BYTES: Final = 1 << 20
_PUBLIC_KEY: Final = re.compile(r"(?:ssh|ecdsa|sk)-\S+ AAAA\S+")
HEADER: Final = b"-----BEGIN SSH SIGNATURE-----"
"""The beginning of a file with a signature."""


def signature_path(certificate: Path) -> Path:
    """Return the path of a certificate's signature, which is in the same folder."""
    return certificate.with_name(f"{certificate.name}.sig")


def sign(content: bytes, key: Path) -> bytes:
    """Return the signature of a content; ssh-keygen may ask for a passphrase on the terminal.

    Args:
        content: What is signed.
        key: A private key, or the public key of one that the agent has.

    Raises:
        InputError: ssh-keygen is not installed, or cannot sign with the key.
    """
    read_limited(key, _MAX_BYTES)
    done = _run("-Y", "sign", "-f", os.path.abspath(key), "-n", NAMESPACE, content=content)
    if done.returncode or not done.stdout.startswith(HEADER):
        raise InputError(
            f"ssh-keygen cannot sign with {key}: {_last_line(done)}; set {arg('sign')} to a "
            "private key, such as ~/.ssh/id_ed25519"
        )
    return done.stdout


def verify(content: bytes, signature: Path, signer: Path | None) -> tuple[bool | None, str, str]:
    """Return whether a signature of a content holds, by whose key, and a word for the result.

    The word is empty, except if the signature is valid and the signer is not known.

    Args:
        content: The content.
        signature: The file of the signature.
        signer: Public keys, or a file of allowed signers in OpenSSH's form; None if the signer is
            not known. Then a good signature gives None, because anybody can make one.

    Raises:
        InputError: ssh-keygen is not installed, or the file of the signer cannot be read or has no
            public key.
    """
    signers = None if signer is None else _read_signers(signer)
    if signers is not None and not _PUBLIC_KEY.search(signers):
        raise InputError(
            f"the file {signer} contains no public SSH key; pass a file such as id_ed25519.pub"
        )
    if not os.path.lexists(signature):
        if signer is None:
            return (
                None,
                "there is no signature, so anybody may have changed the certificate and the run",
                "",
            )
        return False, f"the signature file {signature} does not exist", ""
    with tempfile.TemporaryDirectory(prefix="treegen-signature-") as folder:
        # A copy, so that ssh-keygen reads what was read here, and from a path without surprises.
        copy, allowed = Path(folder, "signature"), Path(folder, "allowed")
        copy.write_bytes(read_limited(signature, _MAX_BYTES))
        common = ("-n", NAMESPACE, "-s", str(copy))
        if signers is None:
            done = _run("-Y", "check-novalidate", *common, content=content)
            if done.returncode:
                return False, f"the signature does not match this file: {_last_line(done)}", ""
            key = _last_line(done).rpartition(" with ")[2]
            return (
                None,
                f"the signature with {key} is valid, but the signer is unknown; to check the "
                "signer, pass --signer FILE",
                "valid",
            )
        lines = [
            f"{NAMESPACE} {line}" if _PUBLIC_KEY.match(line) else line
            for line in signers.splitlines()
        ]
        allowed.write_text("\n".join([*lines, ""]), encoding="utf-8")
        result = _run("-Y", "find-principals", "-f", str(allowed), "-s", str(copy))
        if result.returncode:
            return False, f"no signer in {signer} made the signature: {_last_line(result)}", ""
        for name in _text(result.stdout).splitlines():
            done = _run("-Y", "verify", "-f", str(allowed), "-I", name, *common, content=content)
            if not done.returncode:
                return True, _last_line(done), ""
        return False, f"the signature does not match this file and a signer in {signer}", ""


def _read_signers(file: Path) -> str:
    """Return the text of a file of keys, which may be in UTF-16, as PowerShell writes it."""
    content = read_limited(file, _MAX_BYTES)
    is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return content.decode("utf-16" if is_utf16 else "utf-8-sig", "replace")


def _run(*words: str, content: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    if (program := shutil.which(_PROGRAM)) is None:
        raise InputError(
            "signatures need the program ssh-keygen, which is not installed; install OpenSSH "
            f"(Debian: openssh-client), or leave out {arg('sign=')} and {arg('signer=')}"
        )
    seconds = None if "sign" in words else _SECONDS  # a person may have to type a passphrase
    try:
        return subprocess.run(
            [program, *words], input=content, capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        reason = f"it timed out after {seconds:g} seconds"
    except OSError as error:
        reason = f"{error!s:.200}"
    raise InputError(f"{program} cannot be run: {reason}; check OpenSSH")


def _last_line(done: "subprocess.CompletedProcess[bytes]") -> str:
    text = _text(done.stdout + done.stderr).strip()
    return text.splitlines()[-1][:300] if text else f"exit code {done.returncode}"


def _text(content: bytes) -> str:
    return content.decode("utf-8", "replace")
