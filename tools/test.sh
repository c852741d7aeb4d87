#!/usr/bin/env bash
# Runs the test suite in two phases: what may share the machine goes to several workers at once, then what has to be alone
# on it (the marker `alone`) one test at a time. Arguments go to pytest in both; the first phase failing does not keep the
# second from running, and a selection that has tests in one phase only is fine.
#
# With HEADRACE_TEST_AGAIN=1 what failed is named and tried once more, one test at a time: tests hold real processes to
# bounds in time, and a machine that stalls breaks them. What fails twice has failed, and so has a phase that was cut short
# or in which a test took its worker down.
set -uo pipefail
cd "$(dirname "$0")/.."

# Tests start Python hundreds of times. Where bytecode is not kept, each start would compile everything anew.
export PYTHONDONTWRITEBYTECODE=
WORKERS=${HEADRACE_TEST_WORKERS:-4}
SOME_FAILED=1
NOTHING_SELECTED=5

phase() { .venv/bin/python -m pytest "$@"; }

phase -m "not alone" -n "$WORKERS" --dist loadfile --no-loadscope-reorder "$@"
together=$?
# Interrupted, a wrong option, a worker that crashed or an error of pytest's own: nothing that a second try may pass.
case $together in 0 | "$SOME_FAILED" | "$NOTHING_SELECTED") ;; *) exit "$together" ;; esac
phase -m alone "$@"
alone=$?

[ "$together" -eq "$NOTHING_SELECTED" ] && together=$alone
[ "$alone" -eq "$NOTHING_SELECTED" ] && alone=$together
# The worse of the two: a phase that was cut short (2 and more) is more than a test that failed in the other.
outcome=$((together > alone ? together : alone))
if [ "$outcome" -eq "$SOME_FAILED" ] && [ -n "${HEADRACE_TEST_AGAIN:-}" ]; then
    printf '\ntest: some tests failed (named above); trying those once more, one at a time\n\n'
    phase --last-failed --last-failed-no-failures=none "$@"
    outcome=$?
fi
exit "$outcome"
