"""The log of what happened: every change is told once, in order, numbered without a gap."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.backends.base import Totals
from headrace.backends.local.backend import LocalBackend
from headrace.backends.local.journal import Journal
from headrace.backends.local.slices import run_now
from headrace.clock import ManualClock
from headrace.model import EVENT_WORDS, UNCOMMITTED_EVENTS, Event, EventName, Repeat, StallConfig
from tests.conformance.rig import KINDS, Kind, Rig, pack, spec

WORDS = set(EVENT_WORDS.values())


def told(rig: Rig, *verbs: Callable[[], object]) -> list[str]:
    """What the last of the verbs tells; those before it set the stage."""
    for verb in verbs[:-1]:
        verb()
    rig.take_words()
    verbs[-1]()
    words = rig.take_words()
    assert set(words) <= WORDS
    return words


class TestWords:
    def test_push(self, rig: Rig) -> None:
        assert told(rig, lambda: rig.push()) == ["pushed"]
        assert told(rig, lambda: rig.push(delay=10)) == ["pushed"]
        assert told(rig, lambda: rig.push_many(spec(1), spec(2))) == ["pushed"] * 2
        assert told(rig, lambda: rig.push(custom_id="x")) == ["pushed"]
        assert told(rig, lambda: rig.push(custom_id="x")) == ["duplicated"]

    def test_a_new_generation(self, rig: Rig) -> None:
        rig.push(custom_id="x")
        rig.run()
        assert told(rig, lambda: rig.push(custom_id="x")) == ["removed", "pushed"]

    def test_pull_and_release(self, rig: Rig) -> None:
        holder: dict[str, int] = {}
        rig.push()
        assert told(rig, lambda: rig.pull(holder=holder)) == ["pulled"]
        assert told(rig, lambda: rig.release(holder)) == ["released"]
        assert told(rig, lambda: rig.pull("nowhere")) == []

    def test_an_attempt_that_ends_without_an_outcome_is_told_by_its_number(self, rig: Rig) -> None:
        rig.push()
        for _ in range(2):
            rig.take(lease_ms=1000)
            rig.advance(1200)
        held = rig.take()
        rig.move_to_wait(held.id, held.token)
        holder: dict[str, int] = {}
        rig.pull(holder=holder)
        rig.release(holder)
        told = [(event.event, event.attempt) for event in rig.events if event.event in ("stalled", "released")]
        assert told == [("stalled", 1), ("stalled", 2), ("released", 3), ("released", 3)]

    def test_completion(self, rig: Rig) -> None:
        rig.push()
        held = rig.take()
        assert told(rig, lambda: rig.set_progress(held.id, 5, None)) == ["progress"]
        assert told(rig, lambda: rig.ack(held)) == ["completed"]
        assert told(rig, lambda: rig.ack(held)) == []
        assert told(rig, lambda: rig.retry_completed("q", None, None, None)) == ["waiting"]

    def test_failure(self, rig: Rig) -> None:
        rig.push(max_attempts=2, backoff=0)
        held = rig.take()
        assert told(rig, lambda: rig.nack(held)) == ["failed", "retried"]
        held = rig.take()
        assert told(rig, lambda: rig.nack(held)) == ["failed"]
        assert told(rig, lambda: rig.retry_dlq("q", None, None, None)) == ["dlq-retried"]
        rig.bury()
        assert told(rig, lambda: rig.purge_dlq("q")) == ["removed"]

    def test_time(self, rig: Rig) -> None:
        rig.push(delay=10)
        assert told(rig, lambda: rig.advance(10)) == ["promoted"]
        rig.take(lease_ms=100)
        assert told(rig, lambda: rig.advance(200)) == ["stalled"]
        rig.push(ttl=10)
        rig.pull()
        assert told(rig, lambda: rig.advance(20), lambda: rig.pull()) == ["expired"]

    def test_stalls(self, rig: Rig) -> None:
        rig.set_stall_config("q", StallConfig(stall_interval=10, grace_period=0))
        rig.push(backoff=0)
        rig.take()
        assert told(rig, lambda: rig.advance(100)) == ["stalled", "failed", "retried"]

    def test_timeout(self, rig: Rig) -> None:
        rig.push(timeout=10, max_attempts=1)
        rig.take()
        assert told(rig, lambda: rig.advance(100)) == ["failed"]

    def test_control(self, rig: Rig) -> None:
        first, second, third = (rig.push(delay=1000) for _ in range(3))
        assert told(rig, lambda: rig.cancel(first)) == ["removed"]
        assert told(rig, lambda: rig.promote(second)) == ["promoted"]
        assert told(rig, lambda: rig.move_to_delayed(second, 100, None)) == ["delayed"]
        assert told(rig, lambda: rig.change_delay(second, 50, None)) == ["delayed"]
        assert told(rig, lambda: rig.move_to_wait(second, None)) == ["promoted"]
        assert told(rig, lambda: rig.update(second, pack(1))) == ["updated"]
        assert told(rig, lambda: rig.discard(third, None)) == ["failed"]
        assert told(rig, lambda: rig.change_priority(second, 4, None)) == []

    def test_families(self, rig: Rig) -> None:
        parent = rig.push("parents")
        held = rig.take("parents")
        rig.push(parent_id=parent)
        assert told(rig, lambda: rig.move_to_waiting_children(parent, held.token)) == ["waiting-children"]
        child = rig.take()
        assert told(rig, lambda: rig.ack(child)) == ["completed", "waiting"]

    def test_a_parent_that_fails_with_its_child(self, rig: Rig) -> None:
        rig.push_family(
            ("c", "q", {"parent_id": "p", "fail_parent_on_failure": True}),
            ("p", "q", {"children_ids": ["c"], "depends_on": ["c"]}),
        )
        assert told(rig, lambda: rig.bury()) == ["pulled", "failed", "failed"]

    def test_queues(self, rig: Rig) -> None:
        rig.push_many(spec(1), spec(2))
        assert told(rig, lambda: rig.pause("q")) == ["paused"]
        assert told(rig, lambda: rig.resume("q")) == ["resumed"]
        assert told(rig, lambda: rig.clean("q", 0, "waiting", 1)) == ["removed"]
        assert told(rig, lambda: rig.drain("q")) == ["drained"]
        assert told(rig, lambda: rig.drain("q")) == []
        assert told(rig, lambda: rig.obliterate("q")) == ["obliterated"]

    def test_repetition(self, rig: Rig) -> None:
        rig.push(repeat=Repeat(every=1000))
        assert told(rig, lambda: rig.run()) == ["pulled", "completed", "pushed"]

    def test_what_is_refused_tells_nothing(self, rig: Rig) -> None:
        job_id = rig.push()

        def refused() -> None:
            for verb in (rig.promote, rig.progress, rig.remove_child_dependency):
                with pytest.raises(Exception, match=r"not|no parent"):
                    verb(job_id)

        assert told(rig, refused) == []


class TestParticulars:
    def last(self, rig: Rig, word: str) -> Event:
        return next(event for event in reversed(rig.events) if event.event == word)

    def test_a_push_tells_size_delay_and_ties(self, rig: Rig) -> None:
        parent = rig.push()
        job_id = rig.push(
            "other", "x" * 100, name="n", priority=3, delay=70, group_id="g", tags=["t"], parent_id=parent
        )
        event = self.last(rig, "pushed")
        assert (event.queue, event.job, event.name, event.priority, event.delay) == (
            "other",
            job_id,
            "n",
            3,
            70,
        )
        assert (event.group, event.tags, event.parent, event.bytes) == ("g", ["t"], parent, 102)

    def test_an_attempt_tells_number_and_worker(self, rig: Rig) -> None:
        rig.push(backoff=0)
        held = rig.take(owner="alice")
        assert (self.last(rig, "pulled").attempt, self.last(rig, "pulled").worker) == (1, "alice")
        rig.nack(held, "why")
        event = self.last(rig, "failed")
        assert (event.attempt, event.worker, event.error, event.terminal) == (1, "alice", "why", False)
        assert self.last(rig, "retried").attempt == 2
        rig.run()
        assert self.last(rig, "completed").attempt == 2

    def test_results_go_only_to_those_who_watch(self, rig: Rig) -> None:
        rig.push_many(spec(1), spec(2))
        rig.run(result="unseen")
        assert rig.backend.take_bodies() == {}
        rig.backend.watch("q", +1)
        rig.run(result="seen")
        assert list(rig.backend.take_bodies().values()) == [bytes(pack("seen"))]


class CountingJournal(Journal):
    """The real journal, counting its transactions."""

    commits = 0

    def commit(self, last_seq: int, totals: Totals) -> None:
        self.commits += 1
        super().commit(last_seq, totals)


def counting(folder: Path, clock: ManualClock) -> LocalBackend:
    backend = LocalBackend(folder / "jobs.db", clock=clock)
    backend._journal = CountingJournal(folder / "jobs.db")
    return backend


def test_claims_releases_and_duplicates_need_no_transaction(tmp_path: Path) -> None:
    kind = Kind("counting", counting, KINDS[1].check, is_persistent=True)
    rig = Rig(kind, tmp_path)
    rig.push(unique_key="k")
    before = rig.backend._journal.commits
    holder: dict[str, int] = {}
    rig.pull(holder=holder)
    rig.release(holder)
    rig.push(unique_key="k")
    assert rig.take_words()[-3:] == ["pulled", "released", "duplicated"]
    assert rig.backend._journal.commits == before
    rig.cancel(rig.unique_key_owner("q", "k"))
    assert rig.backend._journal.commits == before + 1
    # Their numbers are taken all the same: after a restart the count goes on behind them.
    rig.push()
    rig.pull()
    rig.reopen()
    rig.push()
    rig.close()


def test_the_words_that_need_no_commit_are_exactly_these() -> None:
    names = (EventName.PULLED, EventName.RELEASED, EventName.DUPLICATED, EventName.GAP)
    assert {EVENT_WORDS[name] for name in names} == UNCOMMITTED_EVENTS


def test_a_tick_shares_one_commit_and_tells_in_order(local_rig: Rig) -> None:
    backend = local_rig.backend
    job_id = run_now(backend.insert_one("q", spec(1)))
    run_now(backend.insert_one("q", spec(2)))
    run_now(backend.cancel(job_id))
    assert backend.take_events() == []
    backend.commit()
    events = backend.take_events()
    assert [event.event for event in events] == ["pushed", "pushed", "removed"]
    assert [event.seq for event in events] == [1, 2, 3]
