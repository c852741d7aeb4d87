#!/usr/bin/env bash
# Prints the path of the bun executable that `make setup` installed.
#
# It comes in a package named after the platform, from where bun's install script moves it behind the `.bin/bun` link;
# where install scripts may not run it stays in its package and the link leads to a placeholder.
set -euo pipefail
modules=$(cd "$(dirname "$0")/.." && pwd)/tests/interop/node_modules
for bun in "$modules"/@oven/bun-*/bin/bun "$modules"/.bin/bun; do
    if [ -x "$bun" ]; then
        echo "$bun"
        exit 0
    fi
done
echo "bun is not installed: run 'make setup'" >&2
exit 1
