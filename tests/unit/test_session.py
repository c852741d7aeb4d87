"""A connection without its socket: order, waiting, limits, and what a failed commit makes of the replies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.backends.base import Totals
from headrace.backends.local import slices
from headrace.backends.local.backend import LocalBackend
from headrace.backends.local.journal import Journal
from headrace.backends.local.slices import run_now
from headrace.clock import ManualClock
from headrace.engine.engine import Engine
from headrace.errors import StorageUnavailable
from headrace.frames import Frames, encode_frame
from headrace.server.session import MAX_IN_FLIGHT, MAX_PER_TICK, Budget, Session


class BrokenJournal(Journal):
    refuses = False

    def commit(self, last_seq: int, totals: Totals) -> None:
        if self.refuses:
            raise StorageUnavailable("the disk refuses")
        super().commit(last_seq, totals)


class House:
    """An engine and its sessions, driven by hand where a server has its event loop."""

    def __init__(self, path: Path) -> None:
        self.clock = ManualClock()
        self.backend = LocalBackend(path, clock=self.clock)
        self.journal = self.backend._journal = BrokenJournal(path)
        self.engine = Engine(self.backend, self.clock)
        run_now(self.engine.start())
        self.stirred: set[Session] = set()
        self.postponed: list[Callable[[], None]] = []
        self.sent: dict[Session, bytearray] = defaultdict(bytearray)

    def session(self, budget: Budget | None = None) -> Talk:
        made = Session(
            self.engine,
            "here",
            stir=lambda: self.stirred.add(made),
            later=lambda work: self.postponed.append(work),
            budget=budget,
        )
        return Talk(self, made)

    def turn(self) -> None:
        """One turn of the loop: what was postponed, then the end of the tick."""
        postponed, self.postponed = self.postponed, []
        for work in postponed:
            work()
        try:
            self.engine.settle()
        except StorageUnavailable as error:
            for session in self.stirred:
                session.spoil(error)
        stirred, self.stirred = self.stirred, set()
        for session in stirred:
            if not session.is_durable:
                self.sent[session] += session.take()

    def settle(self) -> None:
        self.turn()
        for _ in range(1000):
            if not self.postponed:
                return
            self.turn()

    def wait(self, ms: int) -> None:
        self.clock.advance(ms)
        run_now(self.engine.sweep())
        self.settle()


class Talk:
    """A session with a client's mouth and ears."""

    def __init__(self, house: House, session: Session) -> None:
        self.house = house
        self.session = session
        self.frames = Frames()
        self.serial = 0

    def send(self, cmd: str, **fields: Any) -> None:
        self.session.receive(encode_frame({"cmd": cmd, **fields}))

    def say(self, cmd: str, **fields: Any) -> None:
        """A command without a reqId, as clients of protocol 1 send it."""
        self.send(cmd, **fields)

    def hear(self) -> list[dict[str, Any]]:
        self.house.settle()
        heard = self.frames.feed(bytes(self.house.sent.pop(self.session, b"")))
        return [msgspec.msgpack.decode(bytes(frame)) for frame in heard]

    def ask(self, cmd: str, **fields: Any) -> dict[str, Any]:
        self.serial += 1
        self.send(cmd, reqId=f"r{self.serial}", **fields)
        (reply,) = self.hear()
        assert reply.pop("reqId") == f"r{self.serial}"
        return reply


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path / "jobs.db")
    yield house
    house.journal.refuses = False
    run_now(house.engine.backend.close())


@pytest.fixture
def talk(house: House) -> Talk:
    return house.session()


class TestOrder:
    def test_replies_come_in_the_order_of_the_commands(self, talk: Talk) -> None:
        for number in range(20):
            talk.send("PUSH" if number % 2 else "Ping", reqId=number, queue="q", data=number)
        assert [reply["reqId"] for reply in talk.hear()] == list(range(20))

    def test_nothing_leaves_before_the_commit(self, talk: Talk) -> None:
        talk.send("PUSH", queue="q", data=1)
        assert talk.house.journal.is_dirty
        (reply,) = talk.hear()
        assert reply["ok"] is True
        assert not talk.house.journal.is_dirty

    def test_a_long_poll_with_an_id_is_overtaken(self, talk: Talk) -> None:
        talk.send("PULL", reqId="slow", queue="q", timeout=5000)
        talk.send("Ping", reqId="quick")
        assert [reply["reqId"] for reply in talk.hear()] == ["quick"]
        talk.send("PUSH", reqId="push", queue="q", data="d")
        replies = {reply["reqId"]: reply for reply in talk.hear()}
        assert replies.keys() == {"push", "slow"}
        assert replies["slow"]["job"]["data"] == "d"

    def test_without_ids_everything_waits_behind_a_long_poll(self, talk: Talk) -> None:
        talk.say("PULL", queue="q", timeout=5000)
        talk.say("Ping")
        talk.say("PUSH", queue="q", data="never seen by that poll")
        assert talk.hear() == []
        assert len(talk.session.backlog) == 2
        talk.house.wait(5000)
        poll, ping, push = talk.hear()
        assert poll == {"ok": True, "job": None}
        assert ping["data"]["pong"] is True
        assert "id" in push

    def test_a_poll_with_an_id_that_ends_lets_nothing_past_one_without(self, talk: Talk) -> None:
        talk.send("PULL", reqId=1, queue="a", timeout=1000)
        talk.say("PULL", queue="b", timeout=5000)
        talk.say("Ping")
        talk.house.wait(1000)
        assert [reply.get("reqId") for reply in talk.hear()] == [1]
        talk.house.wait(4000)
        poll, pong = talk.hear()
        assert poll["job"] is None
        assert "data" in pong

    def test_a_push_of_another_connection_ends_the_poll_and_the_order_holds(self, talk: Talk) -> None:
        talk.say("PULL", queue="q", timeout=5000)
        talk.say("Ping")
        talk.house.session().ask("PUSH", queue="q", data=1)
        poll, ping = talk.hear()
        assert poll["job"]["data"] == 1
        assert "pong" in ping["data"]

    def test_polls_are_served_in_the_order_of_their_coming(self, talk: Talk) -> None:
        others = [talk.house.session() for _ in range(3)]
        for number, other in enumerate(others):
            other.send("PULL", reqId=number, queue="q", timeout=5000)
        talk.ask("PUSH", queue="q", data="first")
        assert [len(other.hear()) for other in others] == [1, 0, 0]
        talk.ask("PUSHB", queue="q", jobs=[{"data": 2}, {"data": 3}])
        assert [other.hear()[0]["job"]["data"] for other in others[1:]] == [2, 3]


class TestInFlight:
    def test_fifty_wait_at_once_and_the_rest_after_them(self, talk: Talk) -> None:
        for number in range(MAX_IN_FLIGHT + 5):
            talk.send("PULL", reqId=number, queue="q", timeout=5000)
        talk.send("Ping", reqId="ping")
        assert talk.hear() == []
        assert len(talk.session.backlog) == 6
        other = talk.house.session()
        other.ask("PUSHB", queue="q", jobs=[{"data": n} for n in range(10)])
        replies = talk.hear()
        answered = [reply["reqId"] for reply in replies if reply["reqId"] != "ping"]
        assert sorted(answered) == list(range(10))
        assert "ping" in [reply["reqId"] for reply in replies]
        assert len(talk.session.backlog) == 0

    def test_a_sliced_command_lets_others_through(self, talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(slices, "SLICE_SECONDS", -1)
        talk.send("PUSHB", reqId="long", queue="q", jobs=[{"data": n, "uniqueKey": f"k{n}"} for n in range(1001)])
        other = talk.house.session()
        other.send("Ping", reqId="quick")
        talk.house.turn()
        assert talk.house.sent[other.session]
        assert not talk.house.sent[talk.session]
        (reply,) = talk.hear()
        assert len(reply["ids"]) == 1001

    def test_a_client_that_pipelines_without_end_lets_others_through(self, talk: Talk) -> None:
        count = 3 * MAX_PER_TICK
        talk.session.receive(
            b"".join(encode_frame({"cmd": "PUSH", "queue": "q", "data": n, "reqId": n}) for n in range(count))
        )
        other = talk.house.session()
        assert other.ask("Count", queue="q")["count"] == MAX_PER_TICK
        replies = talk.hear()
        assert [reply["reqId"] for reply in replies] == list(range(count))
        pulled = other.ask("PULLB", queue="q", count=1000)["jobs"]
        assert [job["data"] for job in pulled] == list(range(1000))

    def test_a_budget_refuses_what_is_too_much(self, house: House) -> None:
        talk = house.session(Budget(3, 1000))
        for number in range(5):
            talk.send("Ping", reqId=number)
        replies = talk.hear()
        assert [reply["ok"] for reply in replies] == [True, True, True, False, False]
        assert replies[3] == {"ok": False, "error": "Rate limit exceeded", "reqId": 3}
        house.clock.advance(1000)
        assert talk.ask("Ping")["ok"] is True

    def test_refusals_without_end_let_others_through(self, house: House) -> None:
        talk, count = house.session(Budget(3, 1000)), 3 * MAX_PER_TICK
        talk.session.receive(b"".join(encode_frame({"cmd": "Ping", "reqId": n}) for n in range(count)))
        assert len(talk.session.backlog) == count - MAX_PER_TICK
        replies = talk.hear()
        assert [reply["reqId"] for reply in replies] == list(range(count))
        assert [reply["ok"] for reply in replies] == [True] * 3 + [False] * (count - 3)

    def test_a_refusal_does_not_overtake_a_poll_without_an_id(self, house: House) -> None:
        talk = house.session(Budget(1, 60_000))
        talk.say("PULL", queue="q", timeout=5000)
        talk.say("Ping")
        assert talk.hear() == []
        house.wait(5000)
        assert [reply["ok"] for reply in talk.hear()] == [True, False]


class TestFailedCommit:
    def test_every_reply_of_the_tick_becomes_the_error(self, house: House, talk: Talk) -> None:
        other = house.session()
        house.journal.refuses = True
        talk.send("PUSH", reqId=1, queue="q", data=1)
        talk.send("Ping", reqId=2)
        other.send("PUSH", reqId=3, queue="q", data=1)
        replies = [*talk.hear(), *other.hear()]
        assert [(reply["reqId"], reply["ok"]) for reply in replies] == [(1, False), (2, False), (3, False)]
        assert all("the disk refuses" in reply["error"] for reply in replies)
        assert house.backend._jobs == {}

    def test_a_durable_push_waits_for_no_disk_then(self, house: House, talk: Talk) -> None:
        house.journal.refuses = True
        assert talk.ask("PUSH", queue="q", data=1, durable=True)["ok"] is False
        assert not talk.session.is_durable

    def test_a_parked_pull_is_told_the_truth(self, house: House, talk: Talk) -> None:
        puller = house.session()
        puller.send("PULL", reqId="p", queue="q", timeout=5000)
        house.settle()
        house.journal.refuses = True
        talk.send("PUSH", reqId="x", queue="q", data=1)
        house.settle()
        assert [reply["ok"] for reply in puller.hear()] == [False]
        assert puller.session.held == {}

    def test_writes_are_refused_until_a_probe_succeeds_and_reads_go_on(self, house: House, talk: Talk) -> None:
        talk.ask("PUSH", queue="q", data=1)
        house.journal.refuses = True
        talk.ask("PUSH", queue="q", data=2)
        assert talk.ask("PUSH", queue="q", data=3)["ok"] is False
        assert talk.ask("GetJobCounts", queue="q")["counts"]["waiting"] == 1
        assert talk.ask("StorageStatus")["data"]["error"] is not None
        house.journal.refuses = False
        house.wait(2000)
        assert talk.ask("PUSH", queue="q", data=4)["ok"] is True

    def test_the_ack_may_be_repeated(self, house: House, talk: Talk) -> None:
        job_id = talk.ask("PUSH", queue="q", data=1)["id"]
        token = talk.ask("PULL", queue="q", owner="w")["token"]
        house.journal.refuses = True
        assert talk.ask("ACK", id=job_id, token=token)["ok"] is False
        house.journal.refuses = False
        house.wait(2000)
        assert talk.ask("ACK", id=job_id, token=token) == {"ok": True}


class TestDurable:
    def test_replies_that_promise_the_disk_are_marked(self, talk: Talk) -> None:
        talk.send("PUSH", reqId=1, queue="q", data=1)
        talk.send("PUSH", reqId=2, queue="q", data=2, durable=True)
        talk.send("Ping", reqId=3)
        talk.house.settle()
        assert talk.session.is_durable
        assert talk.house.backend.take_sync() is True
        held = talk.session.take_held()
        assert not talk.session.is_durable
        kept = [msgspec.msgpack.decode(bytes(f)) for f in Frames().feed(bytes(held.out))]
        assert [reply["ok"] for reply in kept] == [True, True, True]
        broken = Frames().feed(bytes(held.without_promises("not synced")))
        replies = [msgspec.msgpack.decode(bytes(frame)) for frame in broken]
        assert [(reply["reqId"], reply["ok"]) for reply in replies] == [(1, True), (2, False), (3, True)]
        assert replies[1]["error"] == "not synced"

    def test_a_promise_is_over_when_its_reply_has_left_without_a_sync(self, talk: Talk) -> None:
        talk.send("PUSH", reqId=1, queue="q", data=1, durable=True)
        talk.house.settle()
        assert talk.session.take()
        assert not talk.session.is_durable

    def test_a_plain_push_promises_nothing(self, talk: Talk) -> None:
        talk.ask("PUSH", queue="q", data=1)
        assert not talk.session.is_durable
        assert talk.house.backend.take_sync() is False


class TestClosing:
    def test_a_parked_pull_of_a_closed_connection_gets_no_job(self, house: House, talk: Talk) -> None:
        gone = house.session()
        gone.send("PULL", reqId=1, queue="q", timeout=5000)
        house.settle()
        gone.session.close()
        talk.ask("PUSH", queue="q", data=1)
        assert talk.ask("PULL", queue="q")["job"]["data"] == 1
        assert gone.hear() == []

    def test_jobs_of_a_closed_connection_wait_again(self, house: House, talk: Talk) -> None:
        talk.ask("PUSH", queue="q", data=1)
        gone = house.session()
        job_id = gone.ask("PULL", queue="q")["job"]["id"]
        gone.session.close()
        run_now(house.engine.release(gone.session))
        assert talk.ask("GetState", id=job_id)["state"] == "waiting"
        assert talk.ask("GetJob", id=job_id)["job"]["attempts"] == 0

    def test_a_sliced_command_goes_on_without_its_client(
        self, house: House, talk: Talk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(slices, "SLICE_SECONDS", -1)
        gone = house.session()
        gone.send("PUSHB", reqId=1, queue="q", jobs=[{"data": n, "uniqueKey": f"k{n}"} for n in range(1000)])
        house.turn()
        gone.session.close()
        house.settle()
        assert talk.ask("Count", queue="q")["count"] == 1000

    def test_a_server_knows_of_sliced_commands_whose_client_is_gone(
        self, house: House, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gone, idle = house.session(), house.session()
        gone.ask("PUSHB", queue="q", jobs=[{"data": n} for n in range(1000)])
        monkeypatch.setattr(slices, "SLICE_SECONDS", -1)
        gone.send("PULL", reqId="waits", queue="other", timeout=5000)
        gone.send("Obliterate", reqId="works", queue="q")
        house.turn()
        for left in (gone, idle):
            left.session.close()
        assert house.engine.unattended == {gone.session}
        house.settle()
        assert house.engine.unattended == set()

    def test_a_waiter_for_a_job_is_cancelled(self, house: House, talk: Talk) -> None:
        job_id = talk.ask("PUSH", queue="q", data=1)["id"]
        gone = house.session()
        gone.send("WaitJob", reqId=1, id=job_id, timeout=5000)
        house.settle()
        gone.session.close()
        assert not house.engine.waiters.has_jobs


class TestEvents:
    def test_a_subscriber_hears_of_its_queue_after_the_commit(self, house: House, talk: Talk) -> None:
        listener = house.session()
        listener.ask("SubscribeEvents", queue="q")
        talk.ask("PUSH", queue="q", data=1)
        talk.ask("PUSH", queue="other", data=1)
        heard = listener.hear()
        assert [frame["event"]["eventType"] for frame in heard] == ["pushed"]
        house.journal.refuses = True
        talk.ask("PUSH", queue="q", data=2)
        assert listener.hear() == []

    def test_wait_job_answers_with_the_result_of_a_job_that_is_not_kept(self, talk: Talk) -> None:
        job_id = talk.ask("PUSH", queue="q", data=1, removeOnComplete=True)["id"]
        waiting = talk.house.session()
        waiting.send("WaitJob", reqId=1, id=job_id, timeout=5000)
        talk.ask("PULL", queue="q")
        talk.ask("ACK", id=job_id, result={"a": 1})
        (reply,) = waiting.hear()
        assert reply["completed"] is True
        assert reply["result"] == {"a": 1}

    def test_wait_job_answers_at_once_when_a_lease_runs_out_for_good(self, talk: Talk) -> None:
        job_id = talk.ask("PUSH", queue="q", data=1, maxAttempts=1)["id"]
        talk.ask("PULL", queue="q", owner="w", lockTtl=100)
        waiting = talk.house.session()
        waiting.send("WaitJob", reqId=1, id=job_id, timeout=50_000)
        talk.house.wait(300)
        (reply,) = waiting.hear()
        assert reply["completed"] is False
