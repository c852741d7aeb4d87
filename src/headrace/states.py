"""The life of a job: states, verbs and the only table that connects them.

Everything that can change a job's state is in NEXT; a missing entry is an illegal transition. To add a verb: add
it to Verb, add its rows, run `make docs` (diagram and table follow), then implement it in the backends; the conformance
suite tells you where.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from headrace.errors import Refused


class State(IntEnum):
    """Numbers are stored on disk: never renumber, only add."""

    WAITING = 1
    DELAYED = 2
    ACTIVE = 3
    COMPLETED = 4
    FAILED = 5
    WAITING_CHILDREN = 6
    REMOVED = 7

    @property
    def word(self) -> str:
        """How the wire spells it."""
        return WORDS[self]


class Verb(IntEnum):
    """What can happen to a job after it was pushed."""

    CLAIM = 0  # handed to a worker under a lease
    COMPLETE = 1  # acknowledged; also late, while nobody else holds it
    RETRY = 2  # an attempt failed and another one is due after the backoff
    BURY = 3  # failed for good, or discarded: into the dead-letter queue
    RELEASE = 4  # the holder vanished, gave it back, or its lease ran out
    DELAY = 5  # put off by a client
    PROMOTE = 6  # its time has come, or a client said so
    BLOCK = 7  # steps back until its children are done
    UNBLOCK = 8  # the last dependency is settled
    REVIVE = 9  # brought back from completed or failed
    CANCEL = 10  # withdrawn: before it ran, or by force from under its worker
    EXPIRE = 11  # its time to live ran out before it ran
    REMOVE = 12  # cleaned, drained, obliterated, or not kept after its end


WORDS: Final[dict[State, str]] = {state: state.name.lower().replace("_", "-") for state in State}

_LEAVING: Final = {Verb.REMOVE: State.REMOVED}
_UNSTARTED: Final = {**_LEAVING, Verb.BURY: State.FAILED, Verb.CANCEL: State.REMOVED}

NEXT: Final[dict[State, dict[Verb, State]]] = {
    State.WAITING: {
        **_UNSTARTED,
        Verb.CLAIM: State.ACTIVE,
        Verb.COMPLETE: State.COMPLETED,
        Verb.DELAY: State.DELAYED,
        Verb.BLOCK: State.WAITING_CHILDREN,
        Verb.EXPIRE: State.REMOVED,
    },
    State.DELAYED: {
        **_UNSTARTED,
        Verb.COMPLETE: State.COMPLETED,
        Verb.DELAY: State.DELAYED,
        Verb.PROMOTE: State.WAITING,
        Verb.BLOCK: State.WAITING_CHILDREN,
    },
    State.ACTIVE: {
        **_LEAVING,
        Verb.CANCEL: State.REMOVED,
        Verb.COMPLETE: State.COMPLETED,
        Verb.RETRY: State.DELAYED,
        Verb.BURY: State.FAILED,
        Verb.RELEASE: State.WAITING,
        Verb.DELAY: State.DELAYED,
        Verb.BLOCK: State.WAITING_CHILDREN,
    },
    State.WAITING_CHILDREN: {**_UNSTARTED, Verb.UNBLOCK: State.WAITING},
    State.COMPLETED: {**_LEAVING, Verb.REVIVE: State.WAITING},
    State.FAILED: {**_LEAVING, Verb.REVIVE: State.WAITING},
    State.REMOVED: {},
}

# The same table as a grid: two index operations instead of two enum hashes on the hot path.
_GRID: Final[list[list[State | None]]] = [
    [NEXT[State(s)].get(v) if s else None for v in Verb] for s in range(len(State) + 1)
]


class IllegalTransition(Refused):
    code = "illegal_transition"

    def __init__(self, state: State, verb: Verb) -> None:
        super().__init__(f"cannot {verb.name.lower()} a job that is {state.word}")


def advance(state: State, verb: Verb) -> State:
    """The state after `verb`, or IllegalTransition."""
    after = _GRID[state][verb]
    if after is None:
        raise IllegalTransition(state, verb)
    return after
