"""Produce and consume: three mails go into a queue, a worker sends them, the producer reads the results.

    headrace serve &
    python examples/bunqueue/produce_and_consume.py

Needs `pip install bunqueue-client`. HEADRACE_PORT names the port of the server (default 6789).
"""

from __future__ import annotations

import os

from bunqueue import Job, Queue, Worker

PORT = int(os.environ.get("HEADRACE_PORT", "6789"))


def send_mail(job: Job) -> dict[str, str]:
    """What a worker does with one job. What it returns is kept as the result of the job."""
    job.log(f"connecting for {job.data['to']}")
    job.update_progress(50)
    return {"sent": job.data["to"]}


def main() -> None:
    mails = Queue("examples-mail", port=PORT)
    urgent = mails.add("send", {"to": "ada@example.com"}, priority=10)
    # One round trip for many jobs. Either all of them are stored or none.
    others = mails.add_bulk(
        [
            {"name": "send", "data": {"to": "grace@example.com"}},
            {"name": "send", "data": {"to": "edsger@example.com"}, "delay": 200},
        ]
    )

    with Worker("examples-mail", send_mail, port=PORT, concurrency=2, poll_timeout_ms=500):
        for job_id in [urgent.id, *others]:
            # Returns the moment the job completes; raises when it failed for good.
            print("result", mails.wait_for_job(job_id, timeout_ms=10_000))

    print("completed", mails.get_job_counts()["completed"])
    mails.obliterate()
    mails.close()


if __name__ == "__main__":
    main()
