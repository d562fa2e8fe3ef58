"""Prints the software bill of materials of the `skep` binary for a Rust target, as CycloneDX 1.5.

It lists every crate that is compiled into the binary, with its version, license and checksum, and which crate needs which.
usage: sbom.py TARGET
"""

import datetime
import json
import os
import re
import subprocess
import sys
import uuid


def reference(package):
    return f"pkg:cargo/{package['name']}@{package['version']}"


def licenses(package):
    if package["license"]:
        # Before expressions, alternatives were separated by slashes.
        return [{"expression": re.sub(r"\s*/\s*", " OR ", package["license"])}]
    if package["license_file"]:
        return [{"license": {"name": f"see {os.path.basename(package['license_file'])} of the crate"}}]
    sys.exit(f"{package['name']} {package['version']} names no license")


def component(package, checksums):
    described = {
        "type": "library",
        "bom-ref": reference(package),
        "purl": reference(package),
        "name": package["name"],
        "version": package["version"],
        "licenses": licenses(package),
    }
    checksum = checksums.get((package["name"], package["version"]))
    if checksum:
        described["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    if package["repository"]:
        described["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return described


def compiled_in(target):
    """Returns name and version of each crate; the metadata also has what only other crates of the workspace need."""
    arguments = ["tree", "--locked", "-p", "skep-cli", "-e", "normal", "--target", target, "--prefix", "none", "-f", "{p}"]
    lines = subprocess.check_output(["cargo", *arguments], text=True).splitlines()
    return {tuple(line.split()[:2]) for line in lines}


def read_metadata(target):
    arguments = ["metadata", "--format-version", "1", "--locked", "--filter-platform", target]
    return json.loads(subprocess.check_output(["cargo", *arguments]))


def main(target):
    metadata = read_metadata(target)
    packages = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    root = next(id for id, package in packages.items() if package["name"] == "skep-cli")
    with open(os.path.join(metadata["workspace_root"], "Cargo.lock")) as lock:
        entries = re.findall(r'name = "(.*)"\nversion = "(.*)"\nsource = .*\nchecksum = "(.*)"', lock.read())
    checksums = {(name, version): checksum for name, version, checksum in entries}

    here = compiled_in(target)
    is_here = {id: (package["name"], f"v{package['version']}") in here for id, package in packages.items()}
    needs, waiting = {}, [root]
    while waiting:
        id = waiting.pop()
        if id not in needs:
            found = [need["pkg"] for need in nodes[id]["deps"] if any(kind["kind"] is None for kind in need["dep_kinds"])]
            needs[id] = [need for need in found if is_here[need]]
            waiting += needs[id]
    order = sorted(needs, key=lambda id: reference(packages[id]))
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
    version = packages[root]["version"]
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'skep/{version}/{target}/{seconds}')}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).isoformat(),
            "component": component(packages[root], checksums) | {"type": "application", "name": "skep"},
            "properties": [{"name": "skep:target", "value": target}],
        },
        "components": [component(packages[id], checksums) for id in order if id != root],
        "dependencies": [
            {"ref": reference(packages[id]), "dependsOn": sorted({reference(packages[need]) for need in needs[id]})}
            for id in order
        ],
    }
    print(json.dumps(bill, indent=1))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
