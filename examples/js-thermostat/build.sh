#!/bin/sh
# Builds js-thermostat.wasm, with a toolchain of its own in node_modules. It needs Node 20 or later with npm.
set -eu
cd "$(dirname "$0")"

if ! command -v npm >/dev/null; then
    echo "this agent is built with Node 20 or later, and there is no npm" >&2
    exit 1
fi
if ! cmp -s package-lock.json node_modules/.installed; then
    echo "installing componentize-js"
    npm ci --no-audit --no-fund --loglevel=error
    cp package-lock.json node_modules/.installed
fi
node componentize.js
