"""Prints the licenses of what is compiled into the `skep` binary for a Rust target. They ask that copies of the program have them.

Each text appears once, below the crates that have it. A crate without such a file is listed with the license that it names.
usage: notices.py TARGET
"""

import os
import re
import sys

# A checkout that a release is made from stays as it is.
sys.dont_write_bytecode = True
import sbom

FILE = re.compile(r"(licen[cs]e|copying|copyright|notice|unlicense)s?([-._].*)?", re.IGNORECASE)
# Libraries in C are in folders of the crates that build them.
DEEPEST = 4
VENDORED = "host/gateway/ui/vendor"
LINE = "=" * 80


def texts(folder):
    """Yields the license texts in a folder."""
    for at, folders, files in os.walk(folder):
        folders[:] = sorted(folders) if os.path.relpath(at, folder).count(os.sep) < DEEPEST else []
        for name in sorted(files):
            if FILE.fullmatch(name) and not name.endswith((".rs", ".py", ".toml")):
                with open(os.path.join(at, name), encoding="utf-8", errors="replace") as file:
                    yield file.read().strip()


def main(target):
    metadata = sbom.read_metadata(target)
    here = sbom.compiled_in(target)
    crates_of, without = {}, []
    for package in sorted(metadata["packages"], key=sbom.reference):
        # The crates of the workspace have Skep's own license, which is a file of its own.
        if (package["name"], f"v{package['version']}") not in here or package["source"] is None:
            continue
        crate = f"{package['name']} {package['version']} ({package['license'] or 'see its file'})"
        found = list(dict.fromkeys(texts(os.path.dirname(package["manifest_path"]))))
        for text in found:
            crates_of.setdefault(text, []).append(crate)
        if not found:
            without.append(crate)
    for text in texts(os.path.join(metadata["workspace_root"], VENDORED)):
        crates_of.setdefault(text, []).append("the libraries of the console")

    print("Skep contains the Rust standard library (MIT OR Apache-2.0), the C library musl (MIT) where it is static, and what follows.")
    for text, crates in crates_of.items():
        print(LINE, *crates, LINE, text, sep="\n")
    print(LINE, "These crates name their license and have no file with its text:", *without, sep="\n")


if len(sys.argv) != 2:
    sys.exit(__doc__)
main(sys.argv[1])
