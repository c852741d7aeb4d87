#!/usr/bin/env bash
# Runs the test suite in two phases: what may share the machine goes to several workers at once, then what has to be alone
# on it (the marker `alone`) one test at a time. Arguments go to pytest in both; the first phase failing does not keep the
# second from running, and a selection that has tests in one phase only is fine.
set -uo pipefail
cd "$(dirname "$0")/.."

# Tests start Python hundreds of times. Where bytecode is not kept, each start would compile everything anew.
export PYTHONDONTWRITEBYTECODE=
WORKERS=${HEADRACE_TEST_WORKERS:-3}
NOTHING_SELECTED=5

phase() { .venv/bin/python -m pytest "$@"; }

phase -m "not alone" -n "$WORKERS" --dist loadfile --no-loadscope-reorder "$@"
together=$?
# Interrupted, a wrong option or an error of pytest's own: the second phase would only repeat it.
case $together in 0 | 1 | "$NOTHING_SELECTED") ;; *) exit "$together" ;; esac
phase -m alone "$@"
alone=$?

[ "$alone" -eq "$NOTHING_SELECTED" ] && exit "$together"
[ "$together" -eq 0 ] || [ "$together" -eq "$NOTHING_SELECTED" ] && exit "$alone"
exit "$together"
