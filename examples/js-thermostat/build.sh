#!/bin/sh
# Builds js-thermostat.wasm with a toolchain that is installed in node_modules. Needs Node 20 or later with
# npm.
set -eu
cd "$(dirname "$0")"

if ! command -v npm >/dev/null; then
    echo "building this agent needs Node 20 or later, but npm is not installed" >&2
    exit 1
fi
if ! cmp -s package-lock.json node_modules/.installed; then
    echo "installing componentize-js"
    npm ci --no-audit --no-fund --loglevel=error
    cp package-lock.json node_modules/.installed
fi
node componentize.js
