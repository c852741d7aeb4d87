"""Results and dead letters in pages: every one once, whatever happens between two pages."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from headrace.backends.base import JobScan
from headrace.errors import NotSupported
from headrace.model import MAX_SAFE_INTEGER
from headrace.pipeline.options import Options
from headrace.pipeline.reader import ScanReader
from tests.conformance.rig import Rig, spec, unpack
from tests.serverprocess import ServerProcess
from tests.valkey.foreign import Foreign
from tests.wireclient import Client

ALL = JobScan(None, (), 0, MAX_SAFE_INTEGER, 1000)


def wanted(queue: str | None = "q", after: int = 0, until: int = MAX_SAFE_INTEGER, limit: int = 1000) -> JobScan:
    return JobScan(queue, (), after, until, limit)


def pages(rig: Rig, verb: str, **options: Any) -> list[list[Any]]:
    found, after = [], options.pop("after", 0)
    while after is not None:
        page = getattr(rig, verb)(wanted(after=after, **options))
        found.append(page.rows)
        assert page.next is None or page.next > after
        after = page.next
    return found


def end(rig: Rig, count: int, queue: str = "q") -> list[str]:
    """Complete so many jobs, a few of them in each millisecond."""
    ids = []
    for n in range(count):
        rig.push(queue, n)
        ids.append(rig.run(queue, n).id)
        rig.advance(n % 3 == 2)
    return ids


@pytest.mark.parametrize("limit", [1, 7, 30, 1000])
def test_pages_join_to_all_results(rig: Rig, limit: int) -> None:
    ids = end(rig, 30)
    found = pages(rig, "scan_results", limit=limit)
    assert sorted(row.id for page in found for row in page) == sorted(ids)
    assert all(len(page) <= limit + 2 for page in found)
    assert {unpack(row.result) for page in found for row in page} == set(range(30))


def test_a_thousand_that_ended_in_one_millisecond_are_all_found(rig: Rig) -> None:
    ids = rig.push_many(*([spec(n) for n in range(1000)]))
    for held in rig.pull(count=1000):
        rig.ack(held)
    found = [row.id for page in pages(rig, "scan_results", limit=50) for row in page]
    assert sorted(found) == sorted(ids)


def test_what_ends_or_goes_between_pages_makes_none_skipped_or_repeated(rig: Rig) -> None:
    ids = end(rig, 20)
    first = rig.scan_results(wanted(limit=5))
    seen = [row.id for row in first.rows]
    rig.wait(rig.backend._remove("q", "completed", seen[:1], is_told=False))
    rig.advance(1)
    late = end(rig, 5)
    rest = [
        row.id for page in pages(rig, "scan_results", after=first.next, until=first.newest, limit=5) for row in page
    ]
    assert sorted(seen + rest) == sorted(ids)
    assert sorted(row.id for page in pages(rig, "scan_results", after=first.newest) for row in page) == sorted(late)


def test_ranges_read_side_by_side_are_the_whole(rig: Rig) -> None:
    ids = end(rig, 30)
    page = rig.scan_results(wanted(limit=1))
    oldest, newest = page.oldest, page.newest
    bounds = [oldest + (newest - oldest) * part // 4 for part in range(5)]
    parts = [pages(rig, "scan_results", after=a, until=b, limit=3) for a, b in itertools.pairwise(bounds)]
    assert sorted(row.id for part in parts for page in part for row in page) == sorted(ids)
    assert all(5 <= sum(map(len, part)) <= 10 for part in parts), "each has its share"


def test_all_queues_are_read_in_the_order_of_ends(rig: Rig) -> None:
    ids = [end(rig, 4, queue)[-1] for queue in ("a", "b", "c")]
    found = [row for page in pages(rig, "scan_results", queue=None, limit=2) for row in page]
    assert [row.finished_at for row in found] == sorted(row.finished_at for row in found)
    assert len(found) == 12
    assert set(ids) <= {row.id for row in found}


def test_dead_letters_come_with_their_history_and_jobs_of_node_by_their_ids(rig: Rig, foreign: Foreign) -> None:
    mine = [rig.bury(error=f"e{n}").id for n in range(3) if rig.push(max_attempts=1)]
    theirs = foreign.add()
    rig.nack(rig.take(), "theirs")
    found = [letter for page in pages(rig, "scan_dlq", limit=2) for letter in page]
    assert sorted(unpack(letter.job)["id"] for letter in found) == sorted([*mine, f"q:{theirs}"])
    assert {letter.error for letter in found} == {"e0", "e1", "e2", "theirs"}


def test_jobs_that_have_ended_are_scanned_and_others_refused_by_name(rig: Rig) -> None:
    ids = end(rig, 3)
    page = rig.scan_jobs(JobScan("q", ("completed",), 0, MAX_SAFE_INTEGER, 10))
    assert sorted(unpack(job)["id"] for job in page.rows) == sorted(ids)
    with pytest.raises(NotSupported, match="not supported on this backend: scans of jobs that have not ended"):
        rig.scan_jobs(ALL)


def test_partitions_of_a_data_frame_share_out_the_results_of_a_broker(
    server: ServerProcess, client: Client, queue: str
) -> None:
    ids = client.ok("PUSHB", queue=queue, jobs=[{"data": n} for n in range(60)])["ids"]
    for job_id in ids:
        client.ok("PULL", queue=queue)
        client.ok("ACK", id=job_id, result=1)
    url = f"headrace://127.0.0.1:{server.port}"
    given = {"kind": "results", "url": url, "queue": queue, "numPartitions": "3", "fetchSize": "7"}
    reader = ScanReader(Options.parse(given))
    parts = [[row.id for page in reader._pages(part) for row in page] for part in reader.partitions()]
    assert sorted(itertools.chain(*parts)) == sorted(ids)
    assert all(parts)
