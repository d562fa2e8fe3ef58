"""Splits a diff into the requests of a batch, one for each hunk, and prints the reviews that come back."""
import json
import re
import sys


def split(path):
    """Prints one request for each hunk: its file and its lines, with file and line as the reference."""
    file, hunks = "", []
    for line in open(path, encoding="utf-8"):
        start = re.match(r"@@ -\S+ \+(\d+)", line)
        if line.startswith("+++ "):
            file = line[4:].strip().removeprefix("b/")
        elif start:
            hunks.append((f"{file}:{start[1]}", [f"{file}\n", line]))
        elif hunks and line[:1] in " +-" and not line.startswith("--- "):
            hunks[-1][1].append(line)
    for reference, lines in hunks:
        print(json.dumps({"prompt": "".join(lines).rstrip(), "external_reference": reference}))


def show(path):
    """Prints each review after its file and line."""
    for line in open(path, encoding="utf-8"):
        answer = json.loads(line)
        said = answer["result"]["response"] if answer["success"] else f"failed: {answer['error']}"
        print(f"{answer['external_reference']}: {said}")


commands = {"split": split, "show": show}
if len(sys.argv) != 3 or sys.argv[1] not in commands:
    sys.exit("usage: hunks.py split DIFF | hunks.py show ANSWERS")
commands[sys.argv[1]](sys.argv[2])
