"""Pack an engine for a GPU machine without a network: `pack_engine.py vllm OUT.tar.xz`.

The archive is a folder for `PYTHONPATH`: the packages of vllm.txt, sglang.txt or flashinfer.txt
without the parts that the jobs do not run.
"""

import argparse
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from textwrap import indent

from shrink_libraries import entries, shrink

HERE = Path(__file__).parent
CAPABILITY = 90
PYTHON = "3.12"
PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in range(17, 36)))

ZSTD = bytes.fromhex("28b52ffd")
"""What compressed machine code begins with."""

KEPT_ATTENTION = re.compile(
    r"C<(64|128)> >, \1, cutlass::bfloat16_t, float, cutlass::arch::Sm90, \w+, \w+, false, "
)
"""FlashAttention-3's head sizes of keys and values, number format, GPU, two masks and soft cap."""


class PackError(Exception):
    """An engine cannot be packed."""


@dataclass(frozen=True)
class Engine:
    """What to change in the folder of an engine's packages.

    Attributes:
        remove: Globs of files and folders.
        shrink: Globs of libraries; only the machine code for one compute capability stays.
        attention: Those with FlashAttention-3; only the kernels of KEPT_ATTENTION stay.
        patches: (file, old text, new text).
    """

    remove: str
    shrink: str = ""
    attention: str = ""
    patches: tuple[tuple[str, str, str], ...] = ()


def optional(file: str, statement: str) -> tuple[str, str, str]:
    """Return the patch that lets an import fail."""
    margin = statement[: len(statement) - len(statement.lstrip())]
    guard = f"{margin}except ImportError:\n{margin}    pass\n"
    return file, statement, f"{margin}try:\n{indent(statement, '    ')}{guard}"


SAMPLER_IMPORT = """\
    from flashinfer.sampling import (
        min_p_sampling_from_probs,
        top_k_top_p_sampling_from_probs,
    )
"""
QWEN3_ASR = "sglang/srt/configs/qwen3_asr.py"

ENGINES = {
    "vllm": Engine(
        shrink="vllm/*.so vllm/vllm_flash_attn/*fa3*.so",
        remove="""
            vllm/vllm_flash_attn/*fa2*.so vllm/_qutlass_C*.so vllm/vllm-rs
            vllm/third_party/fmha_sm100 vllm/third_party/tml_fa4
            vllm/third_party/deep_gemm/include vllm/third_party/deep_gemm/_C.cpython-31[!2]-*.so
            mistral_common/data/[!.]* pycountry/locales xgrammar/include xgrammar/lib */tests
        """,
    ),
    "sglang": Engine(
        shrink="sgl_kernel/flash_ops*.so sgl_kernel/spatial_ops*.so sgl_kernel/sm90/*.so",
        attention="sgl_kernel/flash_ops*.so",
        remove="""
            sgl_kernel/sm100 sgl_kernel/flashmla_ops*.so sgl_kernel/infllm_ops*.so
            sglang/multimodal_gen sglang/test sglang/srt/*/_core*.so
            tools tvm_ffi/3rdparty/libbacktrace xgrammar/lib
        """,
        patches=(
            (QWEN3_ASR, '_asr", Qwen3ASRConfig)', '_asr", Qwen3ASRConfig, exist_ok=True)'),
            (QWEN3_ASR, ", Qwen3ASRThinkerConfig)", ", Qwen3ASRThinkerConfig, exist_ok=True)"),
            optional("sglang/utils.py", "from IPython.display import HTML, display\n"),
            optional("sglang/srt/layers/sampler.py", SAMPLER_IMPORT),
            optional(
                "sglang/srt/layers/quantization/fp8_utils.py",
                "    from flashinfer import bmm_fp8 as _raw_bmm_fp8_batched\n",
            ),
        ),
    ),
    "flashinfer": Engine(
        remove="""
            build_*.py example.py flashinfer/data/build_*.py flashinfer/data/*/benchmarks
            flashinfer/data/*/examples flashinfer/data/*/python flashinfer/data/*/test
            flashinfer/data/cccl/libcudacxx/test
        """,
    ),
}


def run(*command: str | Path) -> None:
    """Run a command, or raise PackError with the last line that it wrote to stderr."""
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise PackError(f"{command[0]} failed: {(done.stderr.splitlines() or ['no message'])[-1]}")


def pipe(data: bytes, *command: str) -> bytes:
    """Return what a command writes, whether it succeeds or not."""
    return subprocess.run(command, input=data, capture_output=True, check=False).stdout


def files_in(path: Path) -> list[Path]:
    """Return the file, or all files in the folder."""
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def describe(path: Path) -> str:
    """Return how many files there are and how large they are."""
    files = files_in(path)
    return f"{len(files)} files, {sum(file.stat().st_size for file in files) / 1e6:.1f} MB"


def match(folder: Path, globs: str) -> Iterator[Path]:
    """Yield the paths of the globs, and raise PackError for a glob that matches nothing."""
    for glob in globs.split():
        paths = sorted(folder.glob(glob))
        if not paths:
            raise PackError(f"nothing matches {glob}")
        yield from paths


def download(requirements: Path, wheels: Path) -> None:
    """Download the wheels of a requirement file."""
    if find_spec("pip") is None:
        raise PackError(f"{sys.executable} has no pip")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download"]
    target = ["--only-binary=:all:", f"--python-version={PYTHON}"]
    target += [f"--platform={platform}" for platform in PLATFORMS]
    run(*pip, "--no-deps", *target, "--dest", wheels, "--requirement", requirements)


def unzip(wheels: Path, folder: Path) -> None:
    """Unzip wheels into one folder, without the scripts in their folders *.data."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if not name.partition("/")[0].endswith(".data"):
                    archive.extract(name, folder)


def check_versions(requirements: Path, folder: Path) -> None:
    """Raise PackError unless the folder has just the packages of the requirement file."""

    def normalize(name: str, version: str) -> str:
        return f"{re.sub('[-_.]+', '-', name).lower()}=={version}"

    packages = distributions(path=[str(folder)])
    found = {normalize(package.name, package.version) for package in packages}
    wanted = {normalize(*line.split("==")) for line in requirements.read_text().split()}
    for difference, verb in ((wanted - found, "lack"), (found - wanted, "exceed")):
        if difference:
            raise PackError(f"the wheels {verb} {requirements.name}: {sorted(difference)}")


def remove(folder: Path, globs: str) -> None:
    """Remove files and folders and print their sizes."""
    for path in match(folder, globs):
        print(f"remove {path.relative_to(folder)}: {describe(path)}")
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def patch(folder: Path, patches: tuple[tuple[str, str, str], ...]) -> None:
    """Replace texts in files."""
    for name, old, new in patches:
        text = (folder / name).read_text() if (folder / name).is_file() else ""
        if text.count(old) != 1:
            raise PackError(f"{name} must contain once what a patch replaces: {old!r}")
        (folder / name).write_text(text.replace(old, new))
        print(f"patch {name}")


def keep_attention(data: bytearray) -> int:
    """Zero FlashAttention-3's kernels of attention, except KEPT_ATTENTION.

    Returns:
        How many bytes of entries are zeroed; an entry with a kept kernel stays as a whole.
    """
    zeroed = 0
    for _, _, start, stop in entries(data):
        code = bytes(data[start:stop])
        if code.startswith(ZSTD):
            code = pipe(code, "zstd", "-dcq")  # it fails at the padding behind the last frame
            if not code:
                raise PackError("zstd cannot decompress the kernels of FlashAttention-3")
        symbols = b"\n".join({*re.findall(rb"_Z\w+CollectiveMainloopFwd\w+", code)})
        if symbols and not KEPT_ATTENTION.search(pipe(symbols, "c++filt").decode()):
            data[start:stop] = bytes(stop - start)
            zeroed += stop - start
    return zeroed


def zero_code(folder: Path, engine: Engine) -> None:
    """Zero machine code that the jobs do not run."""
    attention = {*match(folder, engine.attention)}
    for path in match(folder, engine.shrink):
        data = bytearray(path.read_bytes())
        _, zeroed = shrink(data, CAPABILITY)
        if path in attention:
            zeroed += keep_attention(data)
        path.write_bytes(data)
        print(f"shrink {path.name}: zeroed {zeroed / 1e6:.1f} of {len(data) / 1e6:.1f} MB")


def compress(folder: Path, out: Path) -> None:
    """Write an xz-compressed tar file of the folder, with similar files side by side."""
    lzma2 = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 2**28}
    with (
        lzma.open(out, "wb", filters=[lzma2]) as stream,
        tarfile.open(fileobj=stream, mode="w") as archive,
    ):
        for path in sorted(files_in(folder), key=lambda path: (path.suffix, path)):
            archive.add(path, path.relative_to(folder))


def pack(name: str, out: Path, wheels: Path | None) -> None:
    """Write the archive of an engine.

    Args:
        name: A key of ENGINES.
        out: The archive, a new file.
        wheels: The folder of the wheels. If it does not exist, they are downloaded into it.

    Raises:
        PackError: A program or package is missing, or a package differs from what is expected.
    """
    if name not in ENGINES:
        raise PackError(f"ENGINE must be one of {', '.join(ENGINES)}, got {name!r}")
    if out.exists() or not out.parent.is_dir():
        raise PackError(f"{out} must be a new file in a folder that exists")
    for program in ("strip", "c++filt", "zstd"):
        if not shutil.which(program):
            raise PackError(f"{program} is missing; install binutils and zstd")
    engine, requirements = ENGINES[name], HERE / f"{name}.txt"
    with tempfile.TemporaryDirectory(prefix="pack_engine_", dir=out.parent) as temporary:
        folder, archive = Path(temporary, "folder"), Path(temporary, "archive")
        wheels = wheels or Path(temporary, "wheels")
        if not wheels.exists():
            download(requirements, wheels)
        unzip(wheels, folder)
        check_versions(requirements, folder)
        print(f"wheels: {describe(wheels)}; unzipped: {describe(folder)}")
        remove(folder, engine.remove)
        patch(folder, engine.patches)
        zero_code(folder, engine)
        for path in folder.rglob("*.so"):
            run("strip", "--strip-debug", path)
        print(f"compress {describe(folder)}")
        compress(folder, archive)
        archive.rename(out)
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


def main() -> None:
    """Pack the engine that the command line names."""
    parser = argparse.ArgumentParser(description="Pack an engine for a machine without a network.")
    parser.add_argument("engine", metavar="ENGINE", help=", ".join(ENGINES))
    parser.add_argument("out", metavar="OUT.tar.xz", type=Path, help="a new file")
    parser.add_argument("--wheels", metavar="DIR", type=Path, help="read or download wheels here")
    options = parser.parse_args()
    try:
        pack(options.engine, options.out, options.wheels)
    except PackError as error:
        print(f"pack_engine.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
