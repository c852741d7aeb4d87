"""Jobs in brief: what a list shows, whatever the jobs carry."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.backends.local import slices
from headrace.backends.local.slices import Breath, run_now
from headrace.model import DlqFilter
from tests.conformance.rig import Rig, unpack

LARGE = {"of": "Ada", "image": "x" * 500_000}


def check(job: dict[str, Any], job_id: str, state: str) -> None:
    assert (job["id"], job["state"], job["data"]["of"]) == (job_id, state, "Ada")
    assert len(job["data"]["image"]) < 1000
    assert job["dataBytes"] > 500_000
    assert (job["timeline"], job["stacktrace"]) == ([], None)
    assert "returnvalue" not in job


def test_jobs_in_brief_have_the_beginning_of_their_payload_in_every_state(rig: Rig) -> None:
    done, buried, waiting = (rig.push(data=LARGE) for _ in range(3))
    rig.run(result="y" * 10_000)
    rig.bury(error="boom " * 10_000)
    listed = [unpack(raw) for raw in rig.jobs("q", None, 0, 10, True, brief=True)]
    for job, job_id, state in zip(listed, (done, buried, waiting), ("completed", "failed", "waiting"), strict=True):
        check(job, job_id, state)
        check(unpack(rig.job(job_id, brief=True)), job_id, state)
    assert len(listed[1]["failedReason"]) < 2000
    (letter,) = rig.dead_letters("q", DlqFilter(), None, brief=True)
    check(unpack(letter.job), buried, "failed")
    assert (letter.error, letter.attempts) == ("boom " * 10_000, [])  # whole: people choose letters by it


def test_jobs_are_whole_unless_asked_for_in_brief(rig: Rig) -> None:
    job_id = rig.push(data=LARGE)
    assert rig.look(job_id)["data"] == LARGE
    assert "dataBytes" not in rig.look(job_id)


@pytest.mark.parametrize("brief", [True, False])
def test_a_list_of_large_payloads_gives_way_and_leaves_out_what_went(
    local_rig: Rig, monkeypatch: pytest.MonkeyPatch, brief: bool
) -> None:
    monkeypatch.setattr(slices, "SLICE_SECONDS", -1)
    first, gone, last = (local_rig.push(data=LARGE) for _ in range(3))
    work = local_rig.backend.jobs("q", None, 0, 10, True, brief)
    for _ in range(2):
        assert isinstance(work.send(None), Breath)
    local_rig.cancel(gone)
    assert [unpack(raw)["id"] for raw in run_now(work)] == [first, last]


@pytest.mark.parametrize("brief", [True, False])
def test_a_list_of_large_dead_letters_gives_way_and_leaves_out_what_went(
    local_rig: Rig, monkeypatch: pytest.MonkeyPatch, brief: bool
) -> None:
    monkeypatch.setattr(slices, "SLICE_SECONDS", -1)
    first, retried, gone, last = (local_rig.push(data=LARGE) for _ in range(4))
    for _ in range(4):
        local_rig.bury()
    work = local_rig.backend.dead_letters("q", DlqFilter(), None, brief)
    for _ in range(2):
        assert isinstance(work.send(None), Breath)
    local_rig.retry_dlq("q", retried, None, None)
    local_rig.remove_dead_letter("q", gone)
    assert [unpack(letter.job)["id"] for letter in run_now(work)] == [first, last]
