"""Finding jobs by what is in them, and pages of long queues."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.backends.local import queries, slices
from headrace.backends.local.slices import Breath, run_now
from tests.conformance.rig import Rig, spec, unpack


def found(local_rig: Rig, text: str, *states: str, queue: str = "q") -> list[str]:
    page = local_rig.search(queue, text, list(states) or None, 100, None)
    assert page.cursor is None
    return [unpack(raw)["id"] for raw in page.jobs]


class TestSearch:
    @pytest.mark.parametrize("text", ["ada@", "ADA@Example", "recipient", "Ærø", "1234", "1234.0", "-7", "2.5", "99"])
    def test_a_payload_is_searched_for_texts_keys_and_numbers(self, local_rig: Rig, text: str) -> None:
        other: Any = {"to": "bob@example.org", "n": [12, 34], "is": True, "big": 123_456}
        local_rig.push(data=other)
        job = local_rig.push(
            data={"recipient": "Ada@example.com", "n": [1234, {"deep": -7}], "x": 2.5, "é": "Ærø", "y": 99.0}
        )
        local_rig.push(data=other)
        assert found(local_rig, text) == [job]

    @pytest.mark.parametrize("text", ["1", "true", "345", "7", "example.net", "\x07"])
    def test_what_is_not_there_is_not_found(self, local_rig: Rig, text: str) -> None:
        local_rig.push(data={"to": "bob@example.org", "n": [12, 34], "is": True, "big": 123_456})
        assert found(local_rig, text) == []

    def test_id_name_tags_and_error_are_searched(self, local_rig: Rig) -> None:
        named = local_rig.push(name="Send-Mail")
        tagged = local_rig.push(tags=["Urgent"])
        custom = local_rig.push(custom_id="Order-17")
        failed = local_rig.push("f")
        local_rig.bury("f", "Mailbox full")
        assert found(local_rig, "send-m") == [named]
        assert found(local_rig, "urgent") == [tagged]
        assert found(local_rig, "order-17") == [custom]
        assert found(local_rig, named) == found(local_rig, named[-12:].upper()) == [named]
        assert found(local_rig, "mailbox FULL", queue="f") == [failed]

    def test_finished_jobs_are_searched_too_the_newest_first(self, local_rig: Rig) -> None:
        ids = [local_rig.push(data={"to": "ada"}) for _ in range(3)]
        local_rig.run(result=1)
        assert found(local_rig, "ada") == ids[::-1]
        assert found(local_rig, "ada", "completed") == ids[:1]
        assert found(local_rig, "ada", "waiting", "failed") == ids[:0:-1]
        assert found(local_rig, "ada", queue="nowhere") == []

    def test_a_cursor_leads_on_until_everything_was_looked_at(self, local_rig: Rig) -> None:
        ids = local_rig.push_many(
            *(spec({"even": n % 2 == 0, "word": "even" if n % 2 == 0 else "odd"}) for n in range(50))
        )
        cursor, seen, examined = None, [], 0
        while True:
            page = local_rig.search("q", "odd", None, 10, cursor)
            seen += [unpack(raw)["id"] for raw in page.jobs]
            examined += page.examined
            if page.cursor is None:
                break
            cursor = page.cursor
            local_rig.push(data={"word": "odd"})  # what comes later is not in the way
        assert seen == ids[::-1][::2]
        assert examined == 50

    def test_a_page_has_no_more_jobs_than_one_reply_can_hold_with_their_results(
        self, local_rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(queries, "REPLY_ROOM", 10_000)
        ids = [local_rig.push(data=n) for n in range(5)]
        for _ in ids:
            local_rig.run(result="y" * 4000)
        first = local_rig.search("q", "", None, 100, None)
        assert [unpack(raw)["id"] for raw in first.jobs] == ids[:2:-1]
        second = local_rig.search("q", "", None, 100, first.cursor)
        assert [unpack(raw)["id"] for raw in second.jobs] == ids[2:0:-1]
        third = local_rig.search("q", "", None, 100, second.cursor)
        assert [unpack(raw)["id"] for raw in third.jobs] == ids[:1]
        assert (first.examined, second.examined, third.examined, third.cursor) == (2, 2, 1, None)

    def test_a_search_of_large_payloads_gives_way(self, local_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(slices, "SLICE_SECONDS", -1)
        ids = [local_rig.push(data="needle " * 5000) for _ in range(3)]
        work = local_rig.backend.search("q", "needle", None, 10, None)
        for _ in ids:
            assert isinstance(work.send(None), Breath)
        assert [unpack(raw)["id"] for raw in run_now(work).jobs] == ids[::-1]

    def test_a_long_search_gives_way(self, local_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(slices, "SLICE_SECONDS", -1)
        local_rig.push_many(*(spec(n) for n in range(200)))
        work = local_rig.backend.search("q", "needle", None, 10, None)
        assert isinstance(work.send(None), Breath)
        local_rig.pull(count=5)
        local_rig.push(data="needle")
        page = run_now(work)
        assert (page.jobs, page.examined, page.cursor) == ([], 200, None)


class TestLongQueues:
    def test_pages_of_a_long_queue_run_from_either_end(self, local_rig: Rig) -> None:
        local_rig.is_checking = False
        local_rig.push_many(*(spec(n) for n in range(300)), queue="before")
        ids = local_rig.push_many(*(spec(n, priority=n % 3) for n in range(6000)))
        local_rig.push_many(*(spec(n) for n in range(300)), queue="after")
        for states in (["waiting"], None, ["waiting", "prioritized", "nonsense"]):
            assert local_rig.ids_in(states, offset=5, limit=20) == ids[5:25]
            assert local_rig.ids_in(states, offset=5, limit=20, asc=False) == ids[::-1][5:25]
            assert local_rig.ids_in(states, offset=5990, limit=20, asc=False) == ids[:10][::-1]
            assert local_rig.ids_in(states, offset=6000, limit=20) == []
        raised = [job_id for n, job_id in enumerate(ids) if n % 3]
        assert local_rig.ids_in("prioritized", limit=30, asc=False) == raised[::-1][:30]

    def test_a_long_queue_behind_many_other_jobs_is_paged_all_the_same(self, local_rig: Rig) -> None:
        local_rig.is_checking = False
        ids = local_rig.push_many(*(spec(n) for n in range(5_100)))
        local_rig.push_many(*(spec(n, priority=1) for n in range(26_000)), queue="others")
        assert local_rig.ids_in(None, limit=20, asc=False) == ids[::-1][:20]
