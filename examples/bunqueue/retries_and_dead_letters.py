"""Retries and dead letters: a job fails, is retried with backoff, ends in the dead-letter queue, and is brought back.

    headrace serve &
    python examples/bunqueue/retries_and_dead_letters.py

Needs `pip install bunqueue-client`. HEADRACE_PORT names the port of the server (default 6789).
"""

from __future__ import annotations

import os
import threading

from bunqueue import Job, Queue, UnrecoverableError, Worker

PORT = int(os.environ.get("HEADRACE_PORT", "6789"))

bank_is_open = threading.Event()


def charge(job: Job) -> str:
    if job.data["amount"] < 0:
        raise UnrecoverableError("amount must not be negative")  # no retry can help
    if not bank_is_open.is_set():
        raise ConnectionError("the bank does not answer")
    return f"charged {job.data['amount']}"


def main() -> None:
    charges = Queue("examples-charges", port=PORT)
    failures = threading.Semaphore(0)

    def on_failed(job: Job, error: BaseException) -> None:
        print(f"attempt {job.attempts + 1} of {job.data['amount']}: {error}")
        failures.release()

    # concurrency=1 only to make the output come in one order.
    with Worker("examples-charges", charge, port=PORT, concurrency=1, poll_timeout_ms=500) as worker:
        worker.on("failed", on_failed)
        hopeful = charges.add("charge", {"amount": 12}, attempts=3, backoff={"type": "fixed", "delay": 100})
        wait_for(failures, times=3)
        charges.add("charge", {"amount": -5}, attempts=3)
        wait_for(failures, times=1)

        for letter in charges.get_dlq():
            error = letter["timeline"][-1]["error"]
            print(f"dead letter {letter['data']['amount']}: {error} (attempts: {letter['attempts']})")

        bank_is_open.set()
        charges.retry_dlq(hopeful.id)
        print("after the retry:", charges.wait_for_job(hopeful.id, timeout_ms=10_000))

    print("left in the dead-letter queue:", len(charges.get_dlq()))
    charges.obliterate()
    charges.close()


def wait_for(failures: threading.Semaphore, times: int) -> None:
    for _ in range(times):
        if not failures.acquire(timeout=10):
            raise TimeoutError("the worker did not report a failure within 10 s")


if __name__ == "__main__":
    main()
