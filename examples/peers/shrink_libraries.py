"""Zero the machine code for other GPUs in shared libraries: `shrink_libraries.py 90 FILE.so...`.

The first argument is the compute capability to keep, such as 90 for `sm_90`. The files keep their
sizes, so offsets stay valid, and the zeros disappear when the files are compressed. PTX goes too:
the driver can no longer compile kernels that have no machine code for the GPU.
"""

import argparse
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

MAGIC = 0xBA55ED50
"""What a container of machine code for several GPUs begins with."""

MACHINE_CODE = 2
"""The kind of an entry with machine code; PTX has kind 1."""


def fatbin_sections(data: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Yield the first and the last offset of the ELF sections that hold containers.

    Args:
        data: The bytes of a 64-bit ELF file.
    """
    (headers,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", data, headers + i * size) for i in range(count)]
    for name, _, _, _, offset, length in sections:
        start = sections[names][4] + name
        if data[start : data.index(b"\0", start)] in (b".nv_fatbin", b"__nv_relfatbin"):
            yield offset, offset + length


def entries(data: bytes | bytearray) -> Iterator[tuple[int, int, int, int]]:
    """Yield the kind, the compute capability, and the first and last offset of each entry's code.

    Args:
        data: The bytes of a 64-bit ELF file.
    """
    for at, end in fatbin_sections(data):
        while at + 16 <= end:
            magic, _, header, length = struct.unpack_from("<IHHQ", data, at)
            if magic != MAGIC:  # padding between containers
                at += 8
                continue
            entry, at = at + header, at + header + length
            while entry < at:
                kind, _, header, length = struct.unpack_from("<HHIQ", data, entry)
                (arch,) = struct.unpack_from("<I", data, entry + 28)
                yield kind, arch, entry + header, entry + header + length
                entry += header + length


def shrink(data: bytearray, capability: int) -> tuple[int, int]:
    """Zero the entries for other GPUs in place.

    Args:
        data: The bytes of a shared library.
        capability: The compute capability to keep, such as 90.

    Returns:
        How many bytes of entries are kept and zeroed.
    """
    kept = zeroed = 0
    for kind, arch, start, stop in entries(data):
        if kind == MACHINE_CODE and arch == capability:
            kept += stop - start
        else:
            data[start:stop] = bytes(stop - start)
            zeroed += stop - start
    return kept, zeroed


def main() -> None:
    """Shrink the files that the command line names."""
    parser = argparse.ArgumentParser(description="Zero machine code for other GPUs.")
    parser.add_argument("capability", type=int, help="compute capability to keep, such as 90")
    parser.add_argument("files", type=Path, nargs="+", help="shared libraries; they are changed")
    options = parser.parse_args()
    for path in options.files:
        data = bytearray(path.read_bytes())
        if data[:5] != b"\x7fELF\x02":
            sys.exit(f"{path} is not a 64-bit shared library")
        kept, zeroed = shrink(data, options.capability)
        path.write_bytes(data)
        print(f"{path}: kept {kept / 2**20:.1f} MiB, zeroed {zeroed / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
