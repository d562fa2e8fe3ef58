"""Splits a diff into the requests of a batch, one for each hunk, and prints the reviews that come back."""
import json
import re
import sys


def split(path):
    """Prints one request for each hunk: its file and its lines, with file and line as the reference."""
    file, hunks = "", []
    old = new = 0  # lines of the hunk that are still to come, before and after the change
    for line in open(path, encoding="utf-8", newline="\n"):
        if line.startswith("\\"):  # "No newline at end of file"
            continue
        start = re.match(r"@@ -\d+(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", line)
        # Only the counts tell a removed line that begins with "-- " from the header of a file.
        if old > 0 or new > 0:
            hunks[-1][1].append(line)
            old -= line[0] != "+"
            new -= line[0] != "-"
        elif start:
            old, new = int(start[1] or 1), int(start[3] or 1)
            hunks.append((f"{file}:{start[2]}", [f"{file}\n", line]))
        elif line.startswith("+++ "):
            file = line[4:].strip().removeprefix("b/")
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
