"""Jobs in brief: what a list shows, whatever the jobs carry."""

from __future__ import annotations

from typing import Any

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
    assert letter.attempts == []


def test_jobs_are_whole_unless_asked_for_in_brief(rig: Rig) -> None:
    job_id = rig.push(data=LARGE)
    assert rig.look(job_id)["data"] == LARGE
    assert "dataBytes" not in rig.look(job_id)
