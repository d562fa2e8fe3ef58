"""Checks what a program for Linux needs of the system that runs it, and fails if that is more than was promised.

usage: linkage.py static BINARY            the program needs nothing: no loader and no library
       linkage.py glibc-VERSION BINARY     the program needs glibc in this version or an older one, and no other library
"""

import os
import re
import struct
import sys

MACHINES = {"x86_64": 62, "aarch64": 183}
PT_LOAD, PT_DYNAMIC, PT_INTERP = 1, 2, 3
DT_NULL, DT_NEEDED, DT_STRTAB, DT_VERNEED, DT_VERNEEDNUM = 0, 1, 5, 0x6FFFFFFE, 0x6FFFFFFF
# The libraries of glibc, and the one of the compiler that systems with glibc have.
GLIBC = r"(libc|libm|libdl|librt|libpthread|libutil|libresolv|libgcc_s|ld-linux-[a-z0-9-]+)\.so\.\d+"
# Versions whose names have no number.
NAMED = {"GLIBC_ABI_DT_RELR": (2, 36), "GLIBC_ABI_GNU2_TLS": (2, 42)}


class Program:
    """The parts of an ELF file that its loader reads."""

    def __init__(self, path):
        with open(path, "rb") as file:
            self.data = file.read()
        if self.data[:6] != b"\x7fELF\x02\x01":
            sys.exit(f"error: {path} is not a 64-bit ELF file")
        (self.machine,) = struct.unpack_from("<H", self.data, 18)
        (offset,), (size, count) = struct.unpack_from("<Q", self.data, 32), struct.unpack_from("<HH", self.data, 54)
        self.headers = [struct.unpack_from("<IIQQQQQQ", self.data, offset + size * index) for index in range(count)]

    def segments(self, kind):
        return [header for header in self.headers if header[0] == kind]

    def offset(self, address):
        for _, _, offset, start, _, size, _, _ in self.segments(PT_LOAD):
            if start <= address < start + size:
                return offset + address - start
        sys.exit(f"error: no segment has the address {address:#x}")

    def dynamic(self):
        """Yields the entries of the dynamic section."""
        for _, _, offset, _, _, size, _, _ in self.segments(PT_DYNAMIC):
            for at in range(offset, offset + size, 16):
                tag, value = struct.unpack_from("<qQ", self.data, at)
                if tag == DT_NULL:
                    break
                yield tag, value

    def text(self, at):
        strings = self.offset(dict(self.dynamic())[DT_STRTAB]) + at
        return self.data[strings : self.data.index(b"\0", strings)].decode()

    def libraries(self):
        return [self.text(value) for tag, value in self.dynamic() if tag == DT_NEEDED]

    def versions(self):
        """Yields the names of the versions that the program needs of its libraries."""
        entries = dict(self.dynamic())
        if DT_VERNEED not in entries:
            return
        at = self.offset(entries[DT_VERNEED])
        for _ in range(entries[DT_VERNEEDNUM]):
            _, count, _, first, following = struct.unpack_from("<HHIII", self.data, at)
            version = at + first
            for _ in range(count):
                _, _, _, name, next_version = struct.unpack_from("<IHHII", self.data, version)
                yield self.text(name)
                version += next_version
            at += following


def number(version):
    if version in NAMED:
        return NAMED[version]
    digits = re.fullmatch(r"GLIBC_(\d+(\.\d+)*)", version)
    # An unknown name belongs to a version that is newer than this list.
    return tuple(map(int, digits[1].split("."))) if digits else (99,)


def main(promise, path):
    program = Program(path)
    here = os.uname().machine
    if program.machine != MACHINES.get(here, program.machine):
        sys.exit(f"error: {path} is for another processor than {here}")
    libraries = program.libraries()
    if promise == "static":
        if program.segments(PT_INTERP) or libraries:
            sys.exit(f"error: {path} is not static: it needs a loader and {', '.join(libraries) or 'no library'}")
        return
    promised = tuple(map(int, promise.removeprefix("glibc-").split(".")))
    if not program.segments(PT_INTERP):
        sys.exit(f"error: {path} is static, so it cannot load NVIDIA's driver")
    others = [library for library in libraries if not re.fullmatch(GLIBC, library)]
    if others:
        sys.exit(f"error: {path} needs {', '.join(others)}, and releases promise to need only glibc")
    newest = max((name for name in program.versions() if name.startswith("GLIBC_")), key=number, default="GLIBC_0")
    if number(newest) > promised:
        sys.exit(f"error: {path} needs {newest}, and releases promise {promise.replace('-', ' ')}")


if len(sys.argv) != 3 or not re.fullmatch(r"static|glibc-\d+\.\d+", sys.argv[1]):
    sys.exit(__doc__)
main(*sys.argv[1:])
