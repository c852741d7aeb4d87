"""The life of a job: every state with every verb is either in the table below or refused.

The table is written out a second time on purpose: who changes headrace.states changes it here too,
knowingly.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import HeadraceError, Refused
from headrace.states import NEXT, WORDS, IllegalTransition, State, Verb, advance

ALLOWED = {
    "waiting": {
        "claim": "active",
        "complete": "completed",
        "bury": "failed",
        "delay": "delayed",
        "block": "waiting-children",
        "cancel": "removed",
        "expire": "removed",
        "remove": "removed",
    },
    "delayed": {
        "complete": "completed",
        "bury": "failed",
        "delay": "delayed",
        "promote": "waiting",
        "block": "waiting-children",
        "cancel": "removed",
        "remove": "removed",
    },
    "active": {
        "complete": "completed",
        "retry": "delayed",
        "bury": "failed",
        "release": "waiting",
        "delay": "delayed",
        "block": "waiting-children",
        "cancel": "removed",
        "remove": "removed",
    },
    "waiting-children": {
        "bury": "failed",
        "unblock": "waiting",
        "cancel": "removed",
        "remove": "removed",
    },
    "completed": {"revive": "waiting", "remove": "removed"},
    "failed": {"revive": "waiting", "remove": "removed"},
    "removed": {},
}


@pytest.mark.parametrize(("state", "verb"), list(itertools.product(State, Verb)), ids=lambda member: member.name)
def test_every_pair_is_allowed_or_refused(state: State, verb: Verb) -> None:
    after = ALLOWED[state.word].get(verb.name.lower())
    if after is not None:
        assert advance(state, verb).word == after
        return
    with pytest.raises(IllegalTransition) as caught:
        advance(state, verb)
    assert str(caught.value) == f"cannot {verb.name.lower()} a job that is {state.word}"


def test_the_fast_lookup_says_what_the_table_says() -> None:
    for state, verb in itertools.product(State, Verb):
        if verb in NEXT[state]:
            assert advance(state, verb) is NEXT[state][verb]


def test_an_illegal_transition_is_a_refusal_that_leaves_the_connection_open() -> None:
    error = IllegalTransition(State.COMPLETED, Verb.CLAIM)
    assert isinstance(error, Refused)
    assert isinstance(error, HeadraceError)
    assert (error.code, error.status, error.closes) == ("illegal_transition", 409, False)


def test_a_removed_job_has_no_way_back() -> None:
    assert NEXT[State.REMOVED] == {}


def test_every_state_can_be_reached_and_every_job_can_leave() -> None:
    ends = {after for row in NEXT.values() for after in row.values()}
    pushed_as = {State.WAITING, State.DELAYED, State.WAITING_CHILDREN}
    assert ends | pushed_as == set(State)
    for state in set(State) - {State.REMOVED}:
        assert NEXT[state][Verb.REMOVE] is State.REMOVED


def test_every_verb_does_something() -> None:
    assert {verb for row in NEXT.values() for verb in row} == set(Verb)


def test_only_claiming_makes_a_job_active() -> None:
    assert [(state, verb) for state, row in NEXT.items() for verb, after in row.items() if after is State.ACTIVE] == [
        (State.WAITING, Verb.CLAIM)
    ]


def test_numbers_on_disk_and_words_on_the_wire_do_not_change() -> None:
    assert {state.word: state.value for state in State} == {
        "waiting": 1,
        "delayed": 2,
        "active": 3,
        "completed": 4,
        "failed": 5,
        "waiting-children": 6,
        "removed": 7,
    }
    assert set(WORDS) == set(State)


@given(
    st.sampled_from([State.WAITING, State.DELAYED, State.WAITING_CHILDREN]),
    st.lists(st.sampled_from(Verb), max_size=60),
)
def test_no_series_of_verbs_leaves_the_table(state: State, verbs: list[Verb]) -> None:
    for verb in verbs:
        before = state
        try:
            state = advance(state, verb)
        except IllegalTransition:
            assert verb not in NEXT[before]
        if before is State.REMOVED:
            assert state is State.REMOVED
