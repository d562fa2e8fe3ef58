"""Checks what an image promises against the files in it, and prints the command of its health check, one word a line.

usage: image.py INSPECTED EXPORTED VERSION     what `image inspect` and `export` of a container engine gave
"""

import json
import re
import stat
import sys
import tarfile


def check(holds, why):
    if not holds:
        sys.exit(f"error: {why}")


class Image:
    """The configuration of an image, and its files as an engine exports them."""

    def __init__(self, inspected, exported):
        with open(inspected, encoding="utf-8") as file:
            (image,) = json.load(file)
        self.config = image["Config"]
        # Docker has it in the configuration, and podman beside it.
        self.health = (self.config.get("Healthcheck") or image.get("Healthcheck") or {}).get("Test") or []
        self.environment = dict(variable.split("=", 1) for variable in self.config["Env"])
        self.archive = tarfile.open(exported)
        self.files = {member.name.strip("/"): member for member in self.archive}

    def file(self, path):
        member = self.files.get(path.strip("/"))
        check(member, f"the image has no {path}")
        return member

    def text(self, path):
        member = self.file(path)
        check(member.isreg() and member.mode & stat.S_IROTH, f"{path} is not a file that everybody may read")
        return self.archive.extractfile(member).read().decode()


def check_user(image):
    """A user without a name is a number, which also tells an orchestrator that it is not root."""
    user = re.fullmatch(r"(\d+):(\d+)", image.config.get("User", ""))
    named = image.config.get("User")
    check(user and "0" not in user.groups(), f"the user is {named!r}, not the numbers of another user than root")
    return tuple(map(int, user.groups()))


def check_folders(image, owner):
    home = image.environment.get("SKEP_HOME", "")
    check(home in (image.config.get("Volumes") or {}), f"SKEP_HOME is {home!r}, which is not a volume")
    writable = [home.strip("/"), "tmp"]
    for path in writable:
        folder = image.file(f"/{path}")
        check(folder.isdir() and (folder.uid, folder.gid) == owner, f"/{path} is not a folder of the image's user")
        check(folder.mode & stat.S_IRWXU == stat.S_IRWXU, f"the image's user may not write to /{path}")
    for path, member in image.files.items():
        if path not in writable and not member.issym():
            # Devices are the engine's.
            may_write = member.uid in owner or member.gid in owner or member.mode & stat.S_IWOTH
            check(not may_write or path.startswith("dev/"), f"the image's user may write to /{path}")


def check_command(image):
    """Returns the command of the health check."""
    (program,) = image.config["Entrypoint"]
    check(image.file(program).isreg() and image.file(program).mode & stat.S_IXOTH, f"{program} cannot be executed")
    check(image.health[:2] == ["CMD", program], f"the health check is {image.health}")
    command = image.config["Cmd"]
    port = command[command.index("--listen") + 1].rsplit(":", 1)[1]
    check(f"{port}/tcp" in image.config["ExposedPorts"], f"port {port} is not exposed")
    check(image.config.get("StopSignal", "SIGTERM") == "SIGTERM", "the host stops in order after SIGTERM")
    return image.health[1:]


def main(inspected, exported, version):
    image = Image(inspected, exported)
    check_folders(image, check_user(image))
    health = check_command(image)
    labels = image.config.get("Labels") or {}
    for name, expected in {"title": "Skep", "version": version, "licenses": "Apache-2.0"}.items():
        label = f"org.opencontainers.image.{name}"
        check(labels.get(label) == expected, f"the label {label} is {labels.get(label)!r}, not {expected!r}")
    roots = image.environment.get("SSL_CERT_FILE", "")
    check("BEGIN CERTIFICATE" in image.text(roots), f"{roots} has no certificate")
    for name in ("LICENSE", "THIRD-PARTY.txt"):
        check(image.text(f"/licenses/{name}").strip(), f"/licenses/{name} is empty")
    print("\n".join(health))


if len(sys.argv) != 4:
    sys.exit(__doc__)
main(*sys.argv[1:])
