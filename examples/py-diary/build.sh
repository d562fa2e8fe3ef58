#!/bin/sh
# Builds py-diary.wasm with a toolchain that is installed in .venv. Needs Python 3.10 or later with venv and
# pip.
set -eu
cd "$(dirname "$0")"

python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "building this agent needs Python 3.10 or later; python3 is $(python3 --version 2>&1)" >&2
    exit 1
}
if ! cmp -s requirements.txt .venv/requirements.txt; then
    echo "installing componentize-py"
    python3 -m venv --clear .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
    cp requirements.txt .venv/requirements.txt
fi
.venv/bin/componentize-py -d ../../wit/skep-agent -w agent componentize -p app diary -o py-diary.wasm
