"""A connection without its socket: greeting, window, matching replies to commands."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.client import conversation as talking
from headrace.client.conversation import Conversation, Question
from headrace.client.job import decode_job
from headrace.client.policy import MAX_WAITING, ConnectionOptions
from headrace.commands.control import WaitJob
from headrace.commands.cron import CronList
from headrace.commands.jobs import Push
from headrace.commands.monitoring import Ping
from headrace.commands.queries import GetJob
from headrace.commands.queues import IsPaused
from headrace.errors import (
    ConnectionLost,
    InvalidCommand,
    LeaseLost,
    NotAuthenticated,
    ProtocolViolation,
    Refused,
    Unreachable,
)
from headrace.frames import encode_frame
from tests.client.fakeserver import HELLO_1, HELLO_2, Talk

PONG = {"ok": True, "data": {"pong": True, "time": 1}}


# -- the greeting ------------------------------------------------------------------------------------------------------


def test_hello_comes_first_and_commands_wait_for_its_answer() -> None:
    talk = Talk()
    talk.ask()
    assert talk.heard() == []
    talk.conversation.greet()
    (hello,) = talk.heard()
    assert (hello["cmd"], hello["protocolVersion"]) == ("Hello", 2)
    assert "pipelining" in hello["capabilities"]
    assert not talk.conversation.is_ready
    talk.say({**HELLO_2, "reqId": hello["reqId"]})
    assert talk.conversation.is_ready
    assert [command["cmd"] for command in talk.heard()] == ["Ping"]


def test_a_server_that_wants_a_token_gets_it_and_another_hello() -> None:
    talk = Talk(token="secret")
    talk.conversation.greet()
    (hello,) = talk.heard()
    talk.say({"ok": False, "error": "Not authenticated", "reqId": hello["reqId"]})
    (auth,) = talk.heard()
    assert (auth["cmd"], auth["token"]) == ("Auth", "secret")
    assert talk.conversation.failure is None
    talk.say({"ok": True, "reqId": auth["reqId"]})
    (again,) = talk.heard()
    assert again["cmd"] == "Hello"
    talk.say({**HELLO_2, "reqId": again["reqId"]})
    assert talk.conversation.is_ready


def test_the_token_is_asked_for_when_it_is_needed() -> None:
    tokens = iter(["first", "second"])
    for expected in ("first", "second"):
        talk = Talk(token=lambda: next(tokens))
        talk.conversation.greet()
        talk.say({"ok": False, "error": "Not authenticated", "reqId": talk.heard()[0]["reqId"]})
        assert talk.heard()[0]["token"] == expected


def test_without_a_token_the_reason_says_where_to_put_one() -> None:
    talk = Talk()
    talk.conversation.greet()
    talk.say({"ok": False, "error": "Not authenticated", "reqId": talk.heard()[0]["reqId"]})
    assert isinstance(talk.conversation.failure, NotAuthenticated)
    assert "token=" in str(talk.conversation.failure)
    assert talk.heard() == []


def test_a_token_that_cannot_be_had_is_a_failure_with_its_reason() -> None:
    talk = Talk(token=lambda: {}["TOKEN"])
    talk.conversation.greet()
    talk.say({"ok": False, "error": "Not authenticated", "reqId": talk.heard()[0]["reqId"]})
    assert str(talk.conversation.failure) == "The function that returns the token failed: KeyError('TOKEN')"


def test_a_wrong_token_is_not_tried_again() -> None:
    talk = Talk(token="wrong")
    talk.conversation.greet()
    talk.say({"ok": False, "error": "Not authenticated", "reqId": 1})
    talk.say({"ok": False, "error": "Invalid token", "reqId": talk.heard()[-1]["reqId"]})
    assert isinstance(talk.conversation.failure, NotAuthenticated)
    assert (str(talk.conversation.failure), talk.heard()) == ("Invalid token", [])


@pytest.mark.parametrize("hello", [HELLO_1, {"ok": False, "error": "Unknown command: Hello"}])
def test_an_old_server_is_asked_one_thing_at_a_time(hello: dict[str, object]) -> None:
    talk = Talk().greeted(hello)
    outcomes = [talk.ask() for _ in range(3)]
    assert not talk.conversation.is_pipelined
    for number in range(3):
        assert len(talk.heard()) == 1
        talk.say(PONG)  # and it echoes no reqId
        assert [len(outcome) for outcome in outcomes] == [1] * (number + 1) + [0] * (2 - number)


def test_whoever_wants_no_pipelining_asks_one_thing_at_a_time() -> None:
    talk = Talk(pipelining=False).greeted()
    talk.ask(), talk.ask()
    assert len(talk.heard()) == 1


def test_a_server_that_refuses_the_greeting_is_a_failure() -> None:
    talk = Talk().greeted({"ok": False, "error": "Rate limit exceeded"})
    assert str(talk.conversation.failure) == "Rate limit exceeded"
    assert not talk.conversation.is_ready


# -- asking and hearing ------------------------------------------------------------------------------------------------


def test_no_more_than_the_window_is_under_way() -> None:
    talk = Talk(max_in_flight=5).greeted()
    outcomes = [talk.ask() for _ in range(12)]
    first = talk.heard()
    assert (len(first), talk.conversation.in_flight) == (5, 5)
    talk.say(*({**PONG, "reqId": command["reqId"]} for command in first[:3]))
    assert [len(outcome) for outcome in outcomes] == [1] * 3 + [0] * 9
    assert (len(talk.heard()), talk.conversation.in_flight) == (3, 5)


def test_replies_find_their_commands_in_any_order() -> None:
    talk = Talk().greeted()
    outcomes = [talk.ask(IsPaused(queue="q")) for _ in range(4)]
    asked = talk.heard()
    for index in (2, 0, 3, 1):
        talk.say({"ok": True, "paused": index % 2 == 0, "reqId": asked[index]["reqId"]})
    assert [outcome[0].paused for outcome in outcomes] == [True, False, True, False]


def test_a_reply_in_pieces_is_a_reply() -> None:
    talk = Talk().greeted()
    outcome = talk.ask()
    number = talk.heard()[0]["reqId"]
    for byte in encode_frame({**PONG, "reqId": number}):
        assert outcome == []
        talk.conversation.receive(bytes([byte]))
    assert outcome[0].ok


def test_a_reply_to_nobody_is_passed_over() -> None:
    talk = Talk().greeted()
    one, two = talk.ask(), talk.ask()
    talk.heard()
    talk.say({**PONG, "reqId": 999}, PONG)
    assert one == two == []


def test_errors_become_what_their_code_or_text_says() -> None:
    talk = Talk().greeted()
    outcomes = [talk.ask() for _ in range(5)]
    numbers = [command["reqId"] for command in talk.heard()]
    errors = [
        {"error": "gone", "code": "lease_lost"},
        {"error": "Not authenticated"},
        {"error": "Something new", "code": "from-the-future"},
        {"error": "no code"},
        {},
    ]
    talk.say(*({"ok": False, "reqId": number, **error} for number, error in zip(numbers, errors, strict=True)))
    kinds = [type(outcome[0]) for outcome in outcomes]
    assert kinds == [LeaseLost, NotAuthenticated, Refused, Refused, Refused]
    assert str(outcomes[4][0]) == "Refused without a reason"


def test_a_reply_that_is_not_what_was_promised_fails_only_its_command() -> None:
    talk = Talk().greeted()
    odd, even = talk.ask(IsPaused(queue="q")), talk.ask(IsPaused(queue="q"))
    one, two = talk.heard()
    talk.say(
        {"ok": True, "paused": {"no": "bool"}, "reqId": one["reqId"]},
        {"ok": True, "paused": True, "reqId": two["reqId"]},
    )
    assert isinstance(odd[0], Refused)
    assert "IsPaused is not understood" in str(odd[0])
    assert even[0].paused is True


def test_a_reply_in_which_javascript_wrote_what_is_absent_is_understood() -> None:
    talk = Talk().greeted()
    one, two = talk.ask(GetJob(id="j")), talk.ask(CronList())
    asked = talk.heard()
    undefined = msgspec.msgpack.Ext(0, b"\0")
    cron = {
        "name": "c",
        "queue": "q",
        "schedule": None,
        "repeatEvery": 5,
        "nextRun": 1,
        "executions": 0,
        "priority": 0,
        "maxLimit": None,
    }
    job = {"id": "j", "failedReason": undefined, "data": {"kept": None}, "timeline": []}
    talk.say(
        {"ok": True, "job": job, "reqId": asked[0]["reqId"]}, {"ok": True, "crons": [cron], "reqId": asked[1]["reqId"]}
    )
    info = decode_job(one[0].job)
    assert (info.id, info.failed_reason, info.data) == ("j", None, {"kept": None})
    assert [(found.name, found.schedule) for found in two[0].crons] == [("c", None)]


def test_events_are_no_replies() -> None:
    talk = Talk().greeted()
    outcome = talk.ask()
    talk.heard()
    talk.say({"type": "event", "event": {"eventType": "pushed", "queue": "q"}})
    assert (outcome, talk.events) == ([], [{"eventType": "pushed", "queue": "q"}])


@pytest.mark.parametrize(
    "garbage",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\x00\x00\x00\x01\xc1",
        b"\x00\x00\x00\x01\x05",
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x00",
    ],
)
def test_garbage_ends_the_conversation(garbage: bytes) -> None:
    talk = Talk().greeted()
    with pytest.raises(ProtocolViolation):
        talk.conversation.receive(garbage)


def test_a_command_that_cannot_be_written_fails_alone() -> None:
    talk = Talk().greeted()
    bad = talk.ask(Push(queue="q", data=b"", tags=(object(),)))  # type: ignore[arg-type]
    good = talk.ask()
    assert isinstance(bad[0], InvalidCommand)
    (ping,) = talk.heard()
    talk.say({**PONG, "reqId": ping["reqId"]})
    assert good[0].ok
    assert talk.conversation.in_flight == 0


# -- the end -----------------------------------------------------------------------------------------------------------


def test_what_was_sent_is_lost_with_the_link_and_what_waited_is_not() -> None:
    talk = Talk(max_in_flight=2).greeted()
    outcomes = [talk.ask() for _ in range(4)]
    waiting = talk.conversation.take_waiting()
    talk.conversation.lose(ConnectionLost())
    assert [str(outcome[0]) if outcome else None for outcome in outcomes] == ["Connection lost"] * 2 + [None] * 2
    assert len(waiting) == 2


def test_those_who_wait_are_bounded() -> None:
    talk = Talk()
    outcomes = [talk.ask() for _ in range(MAX_WAITING + 2)]
    assert all(outcome == [] for outcome in outcomes[:MAX_WAITING])
    assert [type(outcome[0]) for outcome in outcomes[MAX_WAITING:]] == [Unreachable] * 2


def _due(conversation: Conversation, deadline: float) -> Question[Any]:
    question: Question[Any] = Question(Ping(), lambda outcome: None)
    question.deadline = deadline
    conversation.ask(question)
    return question


def test_those_whose_time_is_up_make_room_when_they_were_not_sent() -> None:
    conversation = Conversation(ConnectionOptions(), lambda event: None)
    late = [_due(conversation, 5.0) for _ in range(MAX_WAITING - 1)]
    early = _due(conversation, 9.0)
    assert conversation.next_deadline() == 5.0
    assert conversation.overdue(6.0) == late
    assert conversation.next_deadline() == 9.0
    assert _due(conversation, 10.0).is_over is False
    assert conversation.take_waiting()[0] is early


def test_a_reply_that_comes_too_late_frees_its_place() -> None:
    talk = Talk(max_in_flight=1).greeted()
    first = _due(talk.conversation, 5.0)
    later = talk.ask()
    (sent,) = talk.heard()
    assert talk.conversation.overdue(6.0) == [first]
    first.end(ConnectionLost())
    assert talk.heard() == [], "its place stays taken: the server has not answered yet"
    talk.say({**PONG, "reqId": sent["reqId"]})
    assert len(talk.heard()) == 1
    assert later == []


def test_commands_that_block_are_counted_from_the_moment_they_are_asked() -> None:
    talk = Talk(max_in_flight=2)
    conversation = talk.conversation
    for _ in range(3):
        talk.ask(WaitJob(id="j"))
    assert conversation.blocking == 3
    talk.greeted()
    one, _ = talk.heard()
    talk.say({"ok": True, "completed": False, "reqId": one["reqId"]})
    assert conversation.blocking == 2
    conversation.end(ConnectionLost())
    assert (conversation.blocking, conversation.in_flight) == (0, 0)


def test_a_command_that_no_frame_can_hold_is_refused_here_and_harms_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server would close the connection, and whoever sent it would send it again on the next one."""
    monkeypatch.setattr(talking, "MAX_FRAME_BYTES", 1000)
    talk = Talk().greeted()
    before = talk.ask()
    (refused,) = talk.ask(Push(queue="q", name="n", data=msgspec.Raw(msgspec.msgpack.encode("x" * 1000))))
    assert isinstance(refused, InvalidCommand)
    assert "1000 are the most" in str(refused)
    after = talk.ask()
    first, second = talk.heard()
    talk.say({**PONG, "reqId": first["reqId"]}, {**PONG, "reqId": second["reqId"]})
    assert before[0].data.pong
    assert after[0].data.pong


def test_a_command_that_nobody_wants_any_more_is_not_sent() -> None:
    class Waiter:
        is_unwanted = False

        def __call__(self, outcome: Any) -> None: ...

    talk, waiter = Talk(), Waiter()
    talk.conversation.ask(Question(WaitJob(id="j"), waiter))
    wanted = talk.ask()
    waiter.is_unwanted = True
    talk.greeted()
    assert [command["cmd"] for command in talk.heard()] == ["Ping"]
    assert (talk.conversation.blocking, wanted) == (0, [])
