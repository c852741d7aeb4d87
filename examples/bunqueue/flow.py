"""A flow: two pages are fetched side by side, and a report is written when both are there.

    headrace serve &
    python examples/bunqueue/flow.py

The parent waits in the state `waiting-children` and runs when its last child has completed. Children may be in other
queues than their parent.

Needs `pip install bunqueue-client`. HEADRACE_PORT names the port of the server (default 6789).
"""

from __future__ import annotations

import os

from bunqueue import FlowProducer, Job, Queue, Worker

PORT = int(os.environ.get("HEADRACE_PORT", "6789"))


def fetch(job: Job) -> int:
    return len(job.data["url"])


def report(job: Job) -> str:
    sizes = job.get_children_values()  # "<queue>:<id>" -> what the child returned
    return f"{len(sizes)} pages, {sum(sizes.values())} characters"


def main() -> None:
    reports = Queue("examples-reports", port=PORT)
    pages = Queue("examples-pages", port=PORT)
    with FlowProducer(port=PORT) as flows:
        flow = flows.add(
            {
                "name": "report",
                "queueName": reports.name,
                "children": [
                    {"name": "fetch", "queueName": pages.name, "data": {"url": "https://example.com/a"}},
                    {"name": "fetch", "queueName": pages.name, "data": {"url": "https://example.com/long"}},
                ],
            }
        )
    print("before:", reports.get_state(flow.job.id))

    with (
        Worker(pages.name, fetch, port=PORT, poll_timeout_ms=500),
        Worker(reports.name, report, port=PORT, poll_timeout_ms=500),
    ):
        print("report:", reports.wait_for_job(flow.job.id, timeout_ms=10_000))
    print("after:", reports.get_state(flow.job.id))

    for queue in (reports, pages):
        queue.obliterate()
        queue.close()


if __name__ == "__main__":
    main()
